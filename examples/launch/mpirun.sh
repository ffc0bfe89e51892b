#!/bin/bash
# Two processes under Open MPI:  bash examples/launch/mpirun.sh PROGRAM.py:build --run-dir runs/launched
#
# The arguments are those of `surefoot train`. mpirun only starts the processes: they communicate through gloo or NCCL. If one
# dies, mpirun ends the others, and the same command resumes the run. For several machines, add `--host node1:8,node2:8` and
# set MASTER_ADDR=node1.
export MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}" MASTER_PORT="${MASTER_PORT:-29500}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec mpirun -n 2 -x MASTER_ADDR -x MASTER_PORT -x OMP_NUM_THREADS surefoot train "$@"
