#!/usr/bin/env bash
#SBATCH --job-name=exitwave-seed
#SBATCH --output=exitwave-seed-%j.out
#SBATCH --open-mode=append
#SBATCH --partition=cpu
#SBATCH --account=phys
#SBATCH --ntasks=64
#SBATCH --cpus-per-task=1
#SBATCH --mem-per-cpu=3072M
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --constraint=rome
#SBATCH --mail-type=FAIL
#SBATCH --signal=TERM@120
module load python/3.11
source ~/exitwave/bin/activate
export DASK_EXITWAVE__END_TIME=$(($(date +%s) + 14400))
export OMP_NUM_THREADS=1
srun --kill-on-bad-exit=0 exitwave simulate 'my campaign.yaml' --out d --cluster slurm-allocation
code=$?; [ "$code" -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"; exit "$code"
