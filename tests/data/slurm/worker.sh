#!/usr/bin/env bash
#SBATCH --job-name=exitwave-8786
#SBATCH --output=/scratch/d/.slurm/%j.out
#SBATCH --open-mode=append
#SBATCH --partition=cpu
#SBATCH --account=phys
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=49152M
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --constraint=rome
#SBATCH --mail-type=FAIL
module load python/3.11
source ~/exitwave/bin/activate
export DASK_EXITWAVE__END_TIME=$(($(date +%s) + 14400))
export OMP_NUM_THREADS=1
exec /opt/exitwave/bin/python -m distributed.cli.dask_worker tls://10.0.0.1:8786 --nthreads 1 --nworkers 16 --memory-limit 3221225472 --death-timeout 60 --no-dashboard --interface ib0 --name "exitwave-$SLURM_JOB_ID" --local-directory "${TMPDIR:-/tmp}" --tls-ca-file /home/me/tls/c.pem
