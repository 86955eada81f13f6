#!/usr/bin/env bash
#SBATCH --job-name=exitwave-a
#SBATCH --output=/r/100%%/.slurm/%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --mem=4096M
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --no-requeue
export OMP_NUM_THREADS=1
export EXITWAVE_ATTEMPT="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
state=/r/100%/.slurm/"$EXITWAVE_ATTEMPT"; rm -rf "$state"; mkdir -p "$state"; taken=
trap 'kill -USR1 "$step"' USR1  # the walltime is near: srun passes it on to the nodes
trap 'taken=1' TERM  # the nodes have it too; handed on to srun it would kill them
srun --ntasks=1 --ntasks-per-node=1 --cpus-per-task=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=0 --output=/r/100%%/.slurm/%j-node-%n.out --open-mode=append exitwave train t.yaml --data d --out /r/100% --cache '$TMPDIR/exitwave-$USER' &
step=$!; while kill -0 "$step" 2>/dev/null; do wait "$step"; done; wait "$step"; code=$?
[ -s "$state/verdict" ] && read -r code < "$state/verdict"
echo "$code" > "$state/ended"
exit "$code"
