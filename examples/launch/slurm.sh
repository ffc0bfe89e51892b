#!/bin/bash
# A run on several machines under Slurm. It resumes by itself after a preemption and after its time limit:
#
#   sbatch examples/launch/slurm.sh gpt --preset gpt2-124m --data.path shards/ --run-dir runs/large
#
# The arguments of the script are the arguments of `surefoot train`. --run-dir must be on storage that all machines share.
# Change the sizes below to fit your machines: one task for each GPU, with its share of the cores.
#SBATCH --job-name=surefoot
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# --signal=TERM@120: two minutes before the time limit, Slurm sends SIGTERM to all tasks, which save and end. B:TERM would
# signal only this script, and bash would not handle the signal before srun has ended.

export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # since Slurm 22.05 srun does not inherit --cpus-per-task

# srun must not kill the other ranks when one ends: they are writing the checkpoint.
srun --kill-on-bad-exit=0 surefoot train "$@"
status=$?

# 143: stopped by a signal, with everything saved. The same command resumes from there.
if [ "$status" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
