#!/bin/bash
# MareNostrum 5 ACC, by imgkit: one task a node, each starts torchrun on its node.
#SBATCH --job-name=mn5
#SBATCH --chdir="/home/me/my run"
#SBATCH --output=%x-%j.out
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=80
#SBATCH --time=00:10:00
#SBATCH --account=bsc98
#SBATCH --qos=acc_debug
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
# A shell that was not started by a login, cron's for example, has no module command to hand on.
# shellcheck disable=SC1091
type module > /dev/null 2>&1 || source /etc/profile
set -e
module load singularity

export IMGKIT_RUN_DIR="$PWD/runs/mn5-$SLURM_JOB_ID"
mkdir -p "$IMGKIT_RUN_DIR"
rm -f "$IMGKIT_RUN_DIR/state-saved"

code=0
# Before the time is up: the launchers look for this file and ask the program to save.
asked=
trap 'asked=1; touch "$IMGKIT_RUN_DIR/stop"' USR1
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 \
    --cpus-per-task="$SLURM_CPUS_PER_TASK" singularity exec --nv --bind '/home/me/my run' \
    '/home/me/my run/mn5.sif' dist-run --device cpu --nproc 2 --grace 20 save_and_resume.py 100 &
run=$!
wait "$run" || code=$?
if [[ $asked ]]; then
    code=0
    wait "$run" || code=$? # the trap has interrupted the first one
fi

# srun's code says nothing of a saved state: the first task that ends has the others killed. The mark does.
if [[ -s $IMGKIT_RUN_DIR/state-saved ]]; then
    saved=$(<"$IMGKIT_RUN_DIR/state-saved")
    if [[ -f $IMGKIT_RUN_DIR/requeued && $saved == "$(<"$IMGKIT_RUN_DIR/requeued")" ]]; then
        echo "imgkit: state saved ($saved) where it was at the last start: not requeued" >&2
        exit 85
    fi
    printf '%s\n' "$saved" > "$IMGKIT_RUN_DIR/requeued"
    echo "imgkit: state saved ($saved): requeued"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
