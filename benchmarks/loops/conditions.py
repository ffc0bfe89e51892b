"""How fast the machine was while something was measured, and how much of it other programs used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

MOST_OTHER_CORES = 0.3  # with more than this in use by others no figure is reported
BEGINNING = "machine: "
_CPU_TIMES = Path("/proc/stat")
_IDLE = (3, 4)  # the columns of idle time there
_COLUMNS = 8  # after them the time of guests, which is counted as a user's too


@dataclass(frozen=True)
class _Work:
    prepare: Callable[[], Callable[[], object]]
    amount: float  # of one call
    unit: str
    per_second: bool = True

    def speed(self, seconds: float) -> float:
        return self.amount / seconds if self.per_second else seconds / self.amount


_OPERATIONS = 2_000
_BYTES = 1 << 26
_SIDE = 512


def _operations() -> Callable[[], object]:
    small = torch.ones(16)
    return lambda: [small + small for _ in range(_OPERATIONS)]


def _memory() -> Callable[[], object]:
    source, target = torch.zeros(_BYTES // 4), torch.zeros(_BYTES // 4)
    return lambda: target.copy_(source)


def _matrices() -> Callable[[], object]:
    matrix = torch.ones(_SIDE, _SIDE)
    return lambda: matrix @ matrix


_WORK = {
    "operations": _Work(_operations, _OPERATIONS * 1e-6, "us a small operation", per_second=False),
    "memory": _Work(_memory, _BYTES / 1e9, "GB/s copied"),
    "matrices": _Work(_matrices, 2 * _SIDE**3 / 1e9, "GFLOP/s in matrices"),
}


@dataclass
class Conditions:
    """The machine from `begin` to `end`: its speeds on one thread, as medians over both moments,
    and the cores in use by others.
    """

    processes: int = 1  # that compute alike; this is one of them
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _WORK})
    other_cores: float | None = None  # None where the system does not tell
    _begin: tuple[float, float, float | None] = (0.0, 0.0, None)

    def begin(self) -> None:
        self._measure()
        self._begin = self._now()

    def end(self) -> None:
        spent = [
            None if b is None or a is None else b - a
            for a, b in zip(self._begin, self._now(), strict=True)
        ]
        wall_s, own_s, busy_s = spent
        if busy_s is not None and wall_s and own_s is not None:
            self.other_cores = max(0.0, busy_s - self.processes * own_s) / wall_s
        self._measure()

    @property
    def is_quiet(self) -> bool:
        return self.other_cores is None or self.other_cores <= MOST_OTHER_CORES

    def __str__(self) -> str:
        speeds = ", ".join(
            f"{work.speed(median(self.seconds[name])):.3g} {work.unit}"
            for name, work in _WORK.items()
        )
        others = "unknown" if self.other_cores is None else f"{self.other_cores:.2f} cores"
        return f"{BEGINNING}{speeds}; other programs: {others}{'' if self.is_quiet else ', too much for a figure'}"

    def _now(self) -> tuple[float, float, float | None]:
        own = os.times()
        return (
            perf_counter(),
            own.user + own.system + own.children_user + own.children_system,
            _busy_s(),
        )

    def _measure(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for name, work in _WORK.items():
            run = work.prepare()
            run()
            for _ in range(9):
                begun = perf_counter()
                run()
                self.seconds[name].append(perf_counter() - begun)
        torch.set_num_threads(threads)


@contextmanager
def reported(processes: int = 1, *, speaks: bool = True) -> Iterator[None]:
    """Print the conditions after what is measured inside."""
    conditions = Conditions(processes)
    conditions.begin()
    yield
    conditions.end()
    if speaks:
        print(conditions, flush=True)


def _busy_s() -> float | None:
    """Seconds that all cores were busy, or were withheld by the machine below this virtual one."""
    if not _CPU_TIMES.exists():
        return None
    ticks = [
        int(text) for text in _CPU_TIMES.read_text().split("\n", 1)[0].split()[1 : 1 + _COLUMNS]
    ]
    return sum(each for column, each in enumerate(ticks) if column not in _IDLE) / os.sysconf(
        "SC_CLK_TCK"
    )
