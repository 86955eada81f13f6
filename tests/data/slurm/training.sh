#!/usr/bin/env bash
#SBATCH --job-name=exitwave-a
#SBATCH --output='/scratch/my runs/a/.slurm/%j.out'
#SBATCH --open-mode=append
#SBATCH --partition=gpu
#SBATCH --account=phys
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=65536M
#SBATCH --gpus-per-node=2
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --constraint=h100
module load python/3.11
export OMP_NUM_THREADS=8
export EXITWAVE_INTERFACE=ib0
export EXITWAVE_ATTEMPT="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
state='/scratch/my runs/a/.slurm'/"$EXITWAVE_ATTEMPT"; rm -rf "$state"; mkdir -p "$state"; taken=
trap 'kill -USR1 "$step"' USR1  # the walltime is near: srun passes it on to the nodes
trap 'taken=1' TERM  # the nodes have it too; handed on to srun it would kill them
srun --ntasks=4 --ntasks-per-node=1 --cpus-per-task=16 --cpu-bind=none --kill-on-bad-exit=0 --wait=0 '--output=/scratch/my runs/a/.slurm/%j-node-%n.out' --open-mode=append exitwave train t.yaml --data d --out '/scratch/my runs/a' --cache '$TMPDIR/exitwave-$USER' &
step=$!; while kill -0 "$step" 2>/dev/null; do wait "$step"; done; wait "$step"; code=$?
[ -s "$state/verdict" ] && read -r code < "$state/verdict"
echo "$code" > "$state/ended"
[ "$code" -eq 75 ] && [ -z "$taken" ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
