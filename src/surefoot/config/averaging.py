"""When a moving average of weights moves, and how far: its decay at every update. Imports no torch.

The decay rises as that of TensorFlow's `num_updates`, so that an average in a short run does not
consist of its initial weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.config.behavior import AVERAGES, behavior_in_identity, behavior_of
from surefoot.config.durations import Length, planned
from surefoot.config.train_settings import TrainSettings
from surefoot.errors import ConfigError, Setting

MUCH_OF_THE_START = 0.05
"""Share of an average that the weights at its beginning still have at the end of a run, above which
the average is too slow for the run."""
OF_AVERAGE = ("ema_ramp", "ema_start", "ema_every")
SETTINGS = ("ema", *OF_AVERAGE)
_NEGLIGIBLE = 1e-6
_OF_STEPS = Length(1, samples_per_epoch=1, batch_size=1)


@dataclass(frozen=True)
class Averaging:
    """How an average follows the weights of a model, counted in updates of this model.

    Until update `start`, the average is the current weights. From there on it moves after each
    `every` updates, by 1 - decay. If `ramp`, the decay of move n is at most (1 + n) / (10 + n).
    Otherwise the first move copies the weights, as in torch's `AveragedModel`. A run of an older
    `behavior` has a constant decay, and averages in the dtype of its weights.

    >>> averaging = Averaging(0.999)
    >>> [round(averaging.decay_of(move), 3) for move in (1, 10, 100, 10_000)]
    [0.182, 0.55, 0.918, 0.999]
    """

    decay: float
    ramp: bool = True
    start: int = 0
    every: int = 1
    behavior: int = AVERAGES

    @property
    def is_older(self) -> bool:
        """True in a run that began before the behavior `AVERAGES`."""
        return self.behavior < AVERAGES

    def move_at(self, updates: int) -> int:
        """Return the number of the move that is due after so many updates, from 1 on; 0 if none is
        due.
        """
        moves, rest = divmod(updates - self.start, self.every)
        return 0 if rest or moves < 0 else moves

    def decay_of(self, move: int) -> float:
        """Return the share of the average that is left after a move, counted from 1."""
        if self.is_older:
            return self.decay
        if self.ramp:
            return min(self.decay, (1 + move) / (10 + move))
        return 0.0 if move == 1 else self.decay

    def share_of_start(self, updates: int) -> float:
        """Return the share of the weights with which the average began, after so many updates.

        >>> round(Averaging(0.999, ramp=False).share_of_start(250), 2)
        0.78
        >>> round(Averaging(0.999).share_of_start(250), 6)
        0.0
        """
        if self.start > 0 and updates <= self.start:  # the average is the current weights
            return 0.0
        moves = (updates - self.start) // self.every
        if not self.ramp:
            copied = 0 if self.is_older else 1
            return float(self.decay ** max(0, moves - copied))
        share = 1.0
        for move in range(1, moves + 1):
            share *= self.decay_of(move)
            if share < _NEGLIGIBLE:
                return 0.0
        return share

    def decay_for(self, updates: int) -> float:
        """Return the decay with which the average has a time constant of a tenth of its moves, so
        that little of its start is left after so many updates.

        >>> Averaging(0.999).decay_for(250), Averaging(0.9999).decay_for(20_000)
        (0.96, 0.9995)
        """
        moves = (updates - self.start) // self.every
        return max(0.0, 1 - 10 / moves) if moves > 0 else 0.0


def averaging_of(described: Mapping[str, Any], *, length: Length = _OF_STEPS) -> Averaging | None:
    """Return how a run averages its weights, by its identity or by its settings; None: not at all.

    Only settings may have lengths in epochs; `length` has the size of an epoch.

    >>> averaging_of({"ema": 0.9, "ema_every": "4 steps", "behavior": AVERAGES}).every
    4
    """
    decay = described.get("ema")
    if decay is None:
        return None
    behavior = behavior_of(described)
    start = described.get("ema_start")
    return Averaging(
        decay,
        ramp=described.get("ema_ramp", True) and behavior >= AVERAGES,
        start=0 if start is None else _in_steps(start, length),
        every=_in_steps(described.get("ema_every", "1 steps"), length),
        behavior=behavior,
    )


def averaging_of_settings(
    settings: TrainSettings, length: Length, *, behavior: int
) -> Averaging | None:
    """Return how a run of this behavior is to average its weights."""
    described = {name: getattr(settings, name) for name in SETTINGS}
    return averaging_of(described | behavior_in_identity(behavior), length=length)


def average_of_average(decay: float, *, optimizer: str) -> ConfigError:
    """Return the error of an average of weights that an optimizer averages itself."""
    return ConfigError(
        "average-of-averaging-optimizer",
        problem=f"ema = {decay:g} with {optimizer}, which already averages the weights for"
        " evaluation",
        remedy=Setting("ema", None),
        setting="ema",
        value=decay,
        optimizer=optimizer,
    )


def averaging_in_identity(averaging: Averaging | None) -> dict[str, Any]:
    """Return what the identity of a run says of its averages, besides the decay and the ramp."""
    if averaging is None:
        return {}
    start = f"{averaging.start} steps" if averaging.start > 0 else None
    return {"ema_start": start, "ema_every": f"{averaging.every} steps"}


def _in_steps(text: str, length: Length) -> int:
    return planned(
        text, samples_per_epoch=length.samples_per_epoch, batch_size=length.batch_size
    ).steps
