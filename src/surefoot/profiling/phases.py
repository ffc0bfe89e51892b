"""What a step takes and where that goes, from many steps: the middle half of them, so that the phases still add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.profiling.watched import PHASES


@dataclass(frozen=True)
class Phases:
    """Seconds of a step by phase; they add up to `step_s`. `low_s` and `high_s` are the ends of the half that was taken."""

    seconds: dict[str, float]
    low_s: float
    high_s: float
    steps: int  # that were made

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    def share(self, phase: str) -> float:
        """What part of a step a phase is, 0 to 1."""
        return self.seconds.get(phase, 0.0) / self.step_s if self.step_s else 0.0


def middle_half(laps: Sequence[Mapping[str, float]]) -> Phases:
    """The mean over the middle half of the steps, by how long each was: as little moved by a slow step as a median is.

    Medians of the phases would not add up to the median of the step; these do.

    >>> laps = [{"forward": 1.0, "rest": 1.0}, {"forward": 1.5, "rest": 1.0}, {"forward": 2.0, "rest": 50.0}]
    >>> middle_half(laps).seconds, middle_half(laps).step_s
    ({'forward': 1.5, 'rest': 1.0}, 2.5)
    """
    ordered = sorted(laps, key=lambda lap: sum(lap.values()))
    spared = len(ordered) // 4 if len(ordered) > 3 else (len(ordered) - 1) // 2
    half = ordered[spared : len(ordered) - spared]
    names = [name for name in PHASES if any(name in lap for lap in half)]
    return Phases(
        {name: sum(lap.get(name, 0.0) for lap in half) / len(half) for name in names},
        sum(half[0].values()),
        sum(half[-1].values()),
        len(laps),
    )
