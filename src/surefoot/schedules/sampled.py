"""Schedules from user code: a function of the step, or a scheduler of torch or transformers.

The factor of every step is computed once when a run is built, so a resume, a replay and a plot read
the same values.
"""

import inspect
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from surefoot.config.durations import NEVER, Length
from surefoot.config.keywords import known_keywords
from surefoot.errors import ConfigError
from surefoot.schedules.curves import Factors, Groups

if TYPE_CHECKING:
    from surefoot.schedules.sampling import Tables


@dataclass(frozen=True)
class Sampled:
    """The schedule that `from_function` and `from_scheduler` return; `source` computes its
    factors.
    """

    shape: Literal["from_function", "from_scheduler"]
    source: Callable[[Any], Any]
    steps: int | None = None  # length of the run for which the schedule is resolved
    # settings of the stand-in optimizer's groups, one for each rate
    groups: Groups = ({"lr": 1.0, "betas": (0.9, 0.999)},)
    every_group: Groups = ()  # of the run, in order; () if `groups` are all
    epoch: tuple[int, int] = (1, 1)  # samples of an epoch and of a step

    @property
    def warmup(self) -> None:
        """None, because user code does not declare a warm-up."""
        return

    def resolved(self, length: Length) -> "Sampled":
        return replace(
            self, steps=length.steps, epoch=(length.samples_per_epoch, length.batch_size)
        )

    def factors(self, length: Length) -> Factors:
        return _looked_up(self._for(length)._tables.factors)

    def group_factors(self, length: Length) -> list[Factors] | None:
        """Return the factors of each parameter group, or None if all have those of `factors`."""
        by_group = self._for(length)._tables.by_group
        return None if by_group is None else [_looked_up(table) for table in by_group]

    def momentum(self, length: Length) -> Factors | None:
        momenta = self._for(length)._tables.momenta
        return None if momenta is None else _looked_up(momenta)

    def shared_steps(self, length: Length) -> int:  # noqa: ARG002
        """Return `NEVER`: every longer run has the same factors, because the source does not depend
        on the run's length.
        """
        return NEVER

    def to_dict(self) -> dict[str, Any]:
        """Return the shape and a hash of the factors in float32; a resume compares the hashes."""
        if self.steps is None:
            return {"shape": self.shape}
        tables = [self._tables.factors]
        if self._tables.momenta is not None:
            tables.append(self._tables.momenta)
        tables.extend(self._tables.by_group or ())
        numbers = [array("f", table).tobytes() for table in tables]
        return {"shape": self.shape, "factors": sha256(b"".join(numbers)).hexdigest()[:12]}

    @property
    def note(self) -> str | None:
        """A note if the scheduler is planned for more steps than the run has; None otherwise."""
        if self.steps is None:
            return None
        steps = self.steps
        planned = self._tables.planned
        if planned is None or planned <= steps:
            return None
        return f"the scheduler is planned for {planned:,} steps, but the run has {steps:,} and ends before: total_steps={steps}"

    def _for(self, length: Length) -> "Sampled":
        if self.steps is not None and self.steps >= length.steps:
            return self
        return self.resolved(length)

    @cached_property
    def _tables(self) -> "Tables":
        from surefoot.schedules.sampling import tables_of_function, tables_of_scheduler

        steps = self.steps or 1
        if self.shape == "from_function":
            return tables_of_function(self.source, steps)
        groups = self.every_group or self.groups
        return tables_of_scheduler(self.source, groups, self.groups, steps, self.epoch)


@known_keywords
def from_function(fn: Callable[[int], float]) -> Sampled:
    """Build a schedule from `fn(step)`, the factor on the base learning rate; steps count from 0.

    `fn` must be deterministic: a resume compares its factors, and raises an error if they differ.

    >>> factor = from_function(lambda step: 0.5**step).factors(
    ...     Length(steps=3, samples_per_epoch=8, batch_size=1)
    ... )
    >>> [factor(step) for step in range(3)]
    [1.0, 0.5, 0.25]
    """
    _refuse_uncallable(
        "from_function", fn, argument="step", example="lambda step: 0.5 ** (step / 1000)"
    )
    return Sampled("from_function", fn)


@known_keywords
def from_scheduler(factory: Callable[[Any], Any]) -> Sampled:
    """Build a schedule from a scheduler of torch, transformers or timm, which `factory(optimizer)`
    returns.

    When the run is built, the scheduler steps through the whole run on a stand-in optimizer with
    the same parameter groups (about 10 us per step). A resume needs no scheduler state. Groups may
    have different factors, as from a list of lambdas. Changes of the momentum (OneCycleLR,
    CyclicLR) are applied too. A scheduler of timm gets the calls `step(epoch)` and
    `step_update(num_updates)` of timm's own loop. A scheduler that needs a metric raises
    `ConfigError`; use `sf.ReduceLROnPlateau` instead.

    >>> from torch.optim.lr_scheduler import StepLR
    >>> halved = from_scheduler(lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5))
    >>> factor = halved.factors(Length(steps=4, samples_per_epoch=8, batch_size=1))
    >>> [factor(step) for step in range(4)]
    [1.0, 1.0, 0.5, 0.5]
    """
    example = "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)"
    _refuse_uncallable("from_scheduler", factory, argument="optimizer", example=example)
    return Sampled("from_scheduler", factory)


def _refuse_uncallable(name: str, source: Any, *, argument: str, example: str) -> None:
    try:
        inspect.signature(source).bind(argument)
    except ValueError:
        return  # a function that is written in C may have no signature
    except TypeError as problem:
        source_name = getattr(source, "__name__", type(source).__name__)
        raise ConfigError(
            "schedule-not-a-function",
            problem=f"{name}({source_name}): it must be a function of one argument, {argument}:"
            f" {problem}",
            reason="the run calls it to compute the factor of every step before training",
            remedy=f"write sf.schedules.{name}({example})",
            setting="schedule",
            argument=argument,
        ) from problem


def _looked_up(table: Sequence[float]) -> Factors:
    last = len(table) - 1
    return lambda step: table[min(step, last)]
