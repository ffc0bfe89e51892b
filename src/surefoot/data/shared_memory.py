"""The shared memory through which loader workers send their batches: `/dev/shm` on Linux. Where it
is small or missing, the error says so, instead of blaming the data.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from surefoot.data.nested import leaves
from surefoot.errors import Command, ConfigError, Setting, first_line

_PLACE = "/dev/shm"
# what torch says if it cannot make or fill a file of shared memory
_WORDS = re.compile(r"shared memory|shm_open|torch_shm_manager|/torch_\d+", re.IGNORECASE)
# of a file that cannot be made
_NO_FILE = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOSYS)


def share_memory(batch: Any) -> None:
    """Move the tensors of a batch into shared memory. Otherwise a thread of the worker does it
    later, and if it fails there, the run waits forever.
    """
    for leaf in leaves(batch):
        if type(leaf) is Tensor and leaf.device.type == "cpu" and leaf.layout == torch.strided:
            leaf.share_memory_()  # type: ignore[no-untyped-call]


@contextmanager
def shared_memory_named() -> Iterator[None]:
    """Convert an error of shared memory, also one that caused another error, to a `ConfigError`."""
    try:
        yield
    except Exception as problem:
        cause = _of_shared_memory(problem)
        if cause is None:
            raise
        raise shared_memory_full(first_line(cause)) from problem


@contextmanager
def locks_named() -> Iterator[None]:
    """Convert an `OSError` of starting workers, whose locks are files of `/dev/shm`."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in _NO_FILE or problem.filename is not None:
            raise
        raise shared_memory_full(str(problem)) from problem


def shared_memory_full(why: str) -> ConfigError:
    """Return the error for shared memory that is full or missing."""
    size = _size()
    return ConfigError(
        "shared-memory-full",
        problem=f"shared memory is full or missing: {why}",
        reason=f"loader workers send their batches through it; {size}",
        remedy=[Command("docker run --shm-size=1g ..."), Setting("workers", 0)],
        setting="workers",
    )


def _of_shared_memory(problem: BaseException | None) -> BaseException | None:
    while problem is not None:
        is_of_system = isinstance(problem, RuntimeError | OSError)
        if is_of_system and _WORDS.search(str(problem)):
            return problem
        problem = problem.__cause__ or problem.__context__
    return None


def _size() -> str:
    if not hasattr(os, "statvfs") or not os.path.isdir(_PLACE):
        return f"this system has no {_PLACE}"
    status = os.statvfs(_PLACE)
    mebibytes = status.f_frsize * status.f_blocks / 2**20
    return f"{_PLACE} has {mebibytes:,.1f} MiB here, and 64 MiB in a container of Docker"
