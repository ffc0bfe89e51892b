#!/bin/bash
# A run on several machines under Slurm, which goes on by itself after a pre-emption and after its time is over:
#
#   sbatch examples/slurm.sh gpt --preset gpt2-124m --data.path shards/ --run-dir runs/large
#
# What follows the script is what follows `surefoot train`. --run-dir must be on files that all machines share.
# Change the sizes to those of your machines: one task for each GPU, and its share of the cores.
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

# --signal=TERM@120: two minutes before the end all tasks are told to save and to end. It is not B:TERM, which tells this script
# only, and bash would not act on it before srun has ended.

export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # since Slurm 22.05 srun does not take it over by itself

# A rank that has ended must not have the others killed: they are writing the checkpoint.
srun --kill-on-bad-exit=0 surefoot train "$@"
status=$?

# 143: told to stop, and all is saved. The same command goes on from there.
if [ "$status" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
