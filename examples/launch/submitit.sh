#!/bin/bash
# Two processes as a Slurm job that submitit writes:  bash examples/launch/submitit.sh PROGRAM.py:build --run-dir runs/launched
#
# The arguments are those of `surefoot train`, and of `surefoot submit`: add --local to start the processes on this machine.
# Slurm requeues the job after its time limit or a preemption, and the run resumes. If a process dies, type the same command
# again. Needs  pip install "surefoot[slurm]"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec surefoot submit "$@" --hours 1 --nodes 1 --tasks-per-node 2
