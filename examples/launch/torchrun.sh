#!/bin/bash
# Two processes under torchrun:  bash examples/launch/torchrun.sh PROGRAM.py:build --run-dir runs/launched
#
# The arguments are those of `surefoot train`. If a process dies, torchrun starts both again, up to three times, and the run
# resumes from its newest checkpoint. For a script of your own, write its name in place of `-m surefoot train`.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m surefoot train "$@"
