"""What the source of a stream sees of the ranks: one process, which is rank 0 of 1.

Rank 0 alone reads the source, and all ranks share the rows on the tape. A source that gives each
rank its share would be shared out twice.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

_RANKS = (  # of torchrun, srun, Open MPI, MPICH and Intel, and names that others have taken over
    "RANK",
    "GLOBAL_RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "NODE_RANK",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_NODE_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "MPI_LOCALRANKID",
)
_SIZES = (
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "NUM_NODES",
    "NNODES",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NNODES",
    "SLURM_JOB_NUM_NODES",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_SIZE",
    "MPI_LOCALNRANKS",
)
# never destroyed: a group of the parent process would close connections that the parent still uses
_INHERITED_GROUPS: list[Any] = []


def as_one_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a launcher as a single process would have them.

    >>> as_one_rank({"RANK": "3", "WORLD_SIZE": "8", "HOME": "/home/me"})
    {'RANK': '0', 'WORLD_SIZE': '1'}
    """
    ranks = {name: "0" for name in _RANKS if name in environment}
    sizes = {name: "1" for name in _SIZES if name in environment}
    return ranks | sizes


@contextmanager
def environment_of_one_rank() -> Iterator[None]:
    """Start a process inside this block that inherits the environment of a single process."""
    changed = as_one_rank(os.environ)
    before = {name: os.environ[name] for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        os.environ.update(before)


def become_one_rank() -> None:
    """Let this process, which reads a source, be rank 0 of 1 for its environment and for
    torch.distributed.

    Collectives then work, among this process alone, so a source that calls them does not wait for
    the ranks.
    """
    os.environ.update(as_one_rank(os.environ))
    if not dist.is_available():
        return
    c10d = dist.distributed_c10d
    _INHERITED_GROUPS.append(c10d._world)
    c10d._world = c10d._World()
    with suppress(Exception):  # without a group, torch.distributed says that it has none
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
