#!/usr/bin/env bash
#SBATCH --job-name=n
#SBATCH --output=%j.out
#SBATCH --open-mode=append
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --mem=4096M
#SBATCH --time=01:00:00
#SBATCH --requeue
export DASK_EXITWAVE__END_TIME=$(($(date +%s) + 3600))
export OMP_NUM_THREADS=1
exec /usr/bin/python3 -m distributed.cli.dask_worker tcp://h:1 --nthreads 1 --nworkers 1 --memory-limit 4294967296 --death-timeout 60 --no-dashboard --name "exitwave-$SLURM_JOB_ID" --local-directory "${TMPDIR:-/tmp}"
