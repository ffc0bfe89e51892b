"""What measuring a cost comes to: a table, one line, and curves to be drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Clock = Callable[
    [], float
]  # seconds: of the wall or, where others use the machine, of this process
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Told:
    """One cost: the lines of its table, what they come to, and a field of the picture."""

    rows: Sequence[str]
    last: str
    title: str
    x: str
    y: str
    curves: Mapping[str, Points] = field(default_factory=dict)


def seconds(call: Callable[[], object], now: Clock, *, times: int = 1) -> float:
    """The least of so many calls: what others add to it is left out."""
    found = []
    for _ in range(times):
        begun = now()
        call()
        found.append(now() - begun)
    return min(found)
