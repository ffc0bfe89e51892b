"""The number of processes, from `--nproc`, the micro-batches of a step, and the number of
devices.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from surefoot.config.batch_size import batching, one_each
from surefoot.distributed.environment import more_processes_than_gpus
from surefoot.errors import ConfigError, Setting


@dataclass(frozen=True)
class ProcessCount:
    """The smallest and largest number of processes, and the `text` of the setting."""

    min_count: int
    max_count: int
    text: str


@dataclass(frozen=True)
class Sizes:
    """The batch size of a step, and the micro-batch size if fixed. A resumed run keeps both
    sizes.
    """

    batch_size: int | str
    micro_batch_size: int | str | None
    is_resumed: bool = False

    def refuse(self, processes: int) -> None:
        """Raise `ConfigError` unless each process gets a micro-batch. The message names possible
        numbers.
        """
        if self.micro_batch_size is None:
            one_each(self.batch_size, ranks=processes)
        else:
            from surefoot.distributed.strategy import refuse_ranks

            pieces = batching(self.batch_size, self.micro_batch_size).pieces
            refuse_ranks(
                processes, pieces=pieces, batch_size=self.batch_size, is_resumed=self.is_resumed
            )

    def largest(self, min_count: int, max_count: int) -> int:
        """Return the largest number of processes in a range that `refuse` allows. Raises
        `ConfigError` if `refuse` allows no number.
        """
        for number in range(max_count, min_count - 1, -1):
            with suppress(ConfigError):
                self.refuse(number)
                return number
        self.refuse(max_count)  # raises
        return max_count


def parse_nproc(nproc: int | str) -> ProcessCount:
    """Return the range in `--nproc 4` or `--nproc 1:4`.

    >>> parse_nproc(4), parse_nproc("1:4")
    (ProcessCount(min_count=4, max_count=4, text='4'), ProcessCount(min_count=1, max_count=4, text='1:4'))
    """
    text = str(nproc)
    ends = text.split(":")
    if len(ends) <= 2 and all(end.isascii() and end.isdigit() for end in ends):
        min_count = int(ends[0])
        max_count = int(ends[-1])
        if 1 <= min_count <= max_count:
            return ProcessCount(min_count, max_count, text)
    raise ConfigError(
        "not-a-number-of-processes",
        problem=f"nproc = {nproc!r} is not a number of processes",
        remedy=[Setting("nproc", 4), (Setting("nproc", "1:4"), "for one to four")],
        setting="nproc",
        value=nproc,
    )


class Slots:
    """The slots for ranks. `gpus` has the names of this machine's GPUs, one per slot; if None,
    slots are not bound to devices.

    `sizes` returns the sizes of a step, or None if unknown. If `wanted` is a range, the slot of a
    dead rank stays empty.

    >>> places = Slots(parse_nproc("1:4"), sizes=lambda: Sizes(24, 2), gpus=["0", "1", "4", "5"])
    >>> places.size(), places.environment()
    (4, {'CUDA_VISIBLE_DEVICES': '0,1,4,5'})
    >>> places.died([1])
    >>> places.size(), places.environment()
    (3, {'CUDA_VISIBLE_DEVICES': '0,4,5'})
    """

    def __init__(
        self, wanted: ProcessCount, *, sizes: Callable[[], Sizes | None], gpus: Sequence[str] | None
    ) -> None:
        self.wanted = wanted
        self.sizes = sizes
        self.gpus = gpus
        self.left = list(range(wanted.max_count if gpus is None else len(gpus)))

    def size(self) -> int:
        """Return the largest number of ranks that can share a step and has devices. Raises
        `ConfigError` if no such number exists.
        """
        min_count = self.wanted.min_count
        max_count = self.wanted.max_count
        left = len(self.left)
        if min_count < max_count:
            max_count = max(min_count, min(max_count, left))
            if left < min_count and self.gpus is None:
                raise ConfigError(
                    "processes-lost",
                    problem=f"nproc = {self.wanted.text}, and only {left} of these processes are left",
                    setting="nproc",
                    value=self.wanted.text,
                    left=left,
                )
        sizes = self.sizes()
        if self.gpus is not None and left < min_count:
            raise more_processes_than_gpus(min_count, gpus=left)
        if sizes is None and min_count < max_count:
            raise ConfigError(
                "processes-without-batch-size",
                problem=f"nproc = {self.wanted.text}, and build() has no setting batch_size",
                reason="it is not known how many processes can share a step",
                remedy=[
                    Setting("nproc", max_count),
                    "or give build() a parameter with the size of a step: batch_size=32",
                ],
                setting="nproc",
                value=self.wanted.text,
            )
        size = max_count if sizes is None else sizes.largest(min_count, max_count)
        if self.gpus is None:
            self.left = self.left[:size]  # without GPUs, a slot exists as long as its rank
        return size

    def died(self, ranks: Sequence[int]) -> None:
        """Remove the slots of dead ranks, which are numbered as in the last start."""
        if self.wanted.min_count < self.wanted.max_count:
            self.left = [slot for rank, slot in enumerate(self.left) if rank not in ranks]

    def environment(self) -> dict[str, str]:
        if self.gpus is None:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus[slot] for slot in self.left)}


def cores_each(processes: int) -> int:
    """Return the number of available CPU cores per process, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // processes)
