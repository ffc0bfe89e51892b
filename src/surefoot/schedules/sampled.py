"""Schedules from user code: a function of the step, or a scheduler of torch or transformers.

The factor of every step is computed once when a run is built, so a resume, a replay and a plot read
the same values.
"""

import inspect
import math
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

from surefoot.config.durations import NEVER, Length
from surefoot.config.keywords import known_keywords
from surefoot.errors import ConfigError, first_line
from surefoot.schedules.curves import Factors

_PLATEAU = 'to lower the learning rate if a metric stops improving: Run(plateau=sf.ReduceLROnPlateau("min val/loss", patience=3))'

Table = Sequence[float]
Groups = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Sampled:
    """The schedule that `from_function` and `from_scheduler` return; `source` computes its
    factors.
    """

    shape: Literal["from_function", "from_scheduler"]
    source: Callable[[Any], Any]
    steps: int | None = None  # length of the run for which the schedule is resolved
    groups: Groups = (
        {"lr": 1.0, "betas": (0.9, 0.999)},
    )  # parameter groups of the scheduler's stand-in optimizer

    @property
    def warmup(self) -> None:
        """None, because user code does not declare a warm-up."""
        return

    def resolved(self, length: Length) -> "Sampled":
        return replace(self, steps=length.steps)

    def factors(self, length: Length) -> Factors:
        return _looked_up(self._for(length)._tables[0])

    def momentum(self, length: Length) -> Factors | None:
        momenta = self._for(length)._tables[1]
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
        numbers = [array("f", table).tobytes() for table in self._tables[:2] if table is not None]
        return {"shape": self.shape, "factors": sha256(b"".join(numbers)).hexdigest()[:12]}

    @property
    def note(self) -> str | None:
        """A note if the scheduler is planned for more steps than the run has; None otherwise."""
        planned, steps = None if self.steps is None else self._tables[2], self.steps or 0
        if planned is None or planned <= steps:
            return None
        return f"the scheduler is planned for {planned:,} steps, but the run has {steps:,} and ends before: total_steps={steps}"

    def _for(self, length: Length) -> "Sampled":
        return (
            self if self.steps is not None and self.steps >= length.steps else self.resolved(length)
        )

    @cached_property
    def _tables(self) -> tuple[Table, Table | None, int | None]:
        steps = self.steps or 1
        if self.shape == "from_function":
            return array("d", [_factor_of(self.source, step) for step in range(steps)]), None, None
        return _tables_of_scheduler(self.source, self.groups, steps)


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
    """Build a schedule from a torch or transformers scheduler, which `factory(optimizer)` returns.

    When the run is built, the scheduler steps through the whole run on a stand-in optimizer with
    the same parameter groups (about 10 us per step). A resume needs no scheduler state. Changes of
    the momentum (OneCycleLR, CyclicLR) are applied too. A scheduler that needs a metric raises
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
        raise ConfigError(
            "schedule-not-a-function",
            problem=f"{name}({_name(source)}): it must be a function of one argument, {argument}:"
            f" {problem}",
            reason="the run calls it to compute the factor of every step before training",
            remedy=f"write sf.schedules.{name}({example})",
            setting="schedule",
            argument=argument,
        ) from problem


def _looked_up(table: Table) -> Factors:
    last = len(table) - 1
    return lambda step: table[min(step, last)]


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _factor_of(fn: Callable[[int], Any], step: int) -> float:
    try:
        value = fn(step)
    except Exception as problem:
        raise ConfigError(
            "schedule-function-failed",
            problem=f"schedule: {_name(fn)} failed at step {step}:"
            f" {type(problem).__name__}: {first_line(problem)}",
            reason="it is called with every step of the run, and returns a factor on the"
            " learning rate",
            setting="schedule",
            step=step,
        ) from problem
    return _factor(value, step, _name(fn))


def _factor(value: Any, step: int, name: str) -> float:
    try:
        factor = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        factor = math.nan
    if not -1e-9 <= factor < math.inf:  # a recursion may end just below 0
        raise ConfigError(
            "schedule-factor-invalid",
            problem=f"schedule: {name} gives the factor {value!r} at step {step}",
            reason="it multiplies the learning rate, so it must be a finite number, at least 0",
            setting="schedule",
            value=value,
            step=step,
        )
    return factor


def _tables_of_scheduler(
    factory: Callable[[Any], Any], groups: Groups, steps: int
) -> tuple[Table, Table | None, int | None]:
    """Return the factors, the momenta if they change, and the scheduler's own number of steps if it
    has one.
    """
    from torch import zeros
    from torch.optim import Optimizer

    class StandIn(Optimizer):
        """An optimizer without weights. The base class is not initialized, because that imports
        torch's compiler.
        """

        def __init__(self) -> None:
            self.param_groups = [{**group, "params": [zeros(1)]} for group in groups]
            self.defaults = {
                key: value for group in reversed(groups) for key, value in group.items()
            }

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Do nothing; the scheduler wraps this method."""

    optimizer = StandIn()
    rates, momenta, name = array("d"), array("d"), _name(factory)
    with warnings.catch_warnings(action="ignore"):  # torch warns if the optimizer does not step
        try:
            scheduler = factory(optimizer)
        except Exception as problem:  # of the user's code, or of a scheduler that misses arguments
            raise ConfigError(
                "scheduler-not-built",
                problem=f"schedule: {name} failed when it is built: {_in_words(problem)}",
                remedy=_how_to_build(problem, groups),
                setting="schedule",
            ) from problem
        name = type(scheduler).__name__
        advance = _advance(scheduler, optimizer)
        planned = getattr(scheduler, "total_steps", None)  # of OneCycleLR
        for step in range(steps):
            try:
                if step:
                    advance()
            except Exception as problem:  # for example OneCycleLR with too few total_steps
                remedy = ["its step() is called once per optimizer step, not once per epoch"]
                if isinstance(planned, int) and planned < steps:
                    remedy = [
                        f"it is planned for {planned} steps, and the run has {steps}:"
                        f" write total_steps={steps}",
                        "each step of a run is full and no sample is dropped, so len(loader) times"
                        " epochs may be another number",
                    ]
                raise ConfigError(
                    "scheduler-failed",
                    problem=f"schedule: {name} failed at step {step} of {steps}:"
                    f" {_in_words(problem)}",
                    remedy=remedy,
                    setting="schedule",
                    step=step,
                    steps=steps,
                    planned_steps=planned,
                ) from problem
            factors = [
                own["lr"] / group["lr"]
                for own, group in zip(optimizer.param_groups, groups, strict=True)
            ]
            if any(
                not math.isclose(factor, factors[0], rel_tol=1e-9, abs_tol=1e-12)
                for factor in factors
            ):
                other = next(factor for factor in factors if factor != factors[0])
                raise ConfigError(
                    "scheduler-factors-differ",
                    problem=f"schedule: {name} gives parameter groups different factors"
                    f" at step {step}: {factors[0]:g} and {other:g}",
                    reason="a schedule is one factor for all groups; does it have a lambda for each"
                    " group, or absolute rates such as eta_min?",
                    remedy="give each group its own lr, and use sf.schedules.from_function, whose"
                    " factor multiplies each lr",
                    setting="schedule",
                    step=step,
                    factors=factors,
                )
            rates.append(_factor(factors[0], step, name))
            momenta.append(_momentum(optimizer.param_groups[0]))
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        own["betas"] = (*group.get("betas", ())[:1], *own.get("betas", ())[1:])
        if changed := [
            key for key in group if key not in ("lr", "momentum") and own[key] != group[key]
        ]:
            raise ConfigError(
                "scheduler-changes-setting",
                problem=f"schedule: {name} changes the optimizer's {changed[0]}",
                reason="a schedule changes only learning rates and momentum",
                remedy="change other settings in your own training loop",
                setting=changed[0],
            )
    changing = momenta if any(each != _momentum(groups[0]) for each in momenta) else None
    return rates, changing, planned if isinstance(planned, int) else None


def _momentum(group: Mapping[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


def _in_words(problem: BaseException) -> str:
    if isinstance(problem, ValueError):
        return first_line(problem)
    return f"{type(problem).__name__}: {first_line(problem)}"


def _how_to_build(problem: BaseException, groups: Groups) -> str:
    if "ReduceLROnPlateau" in str(problem):  # within a ChainedScheduler or a SequentialLR
        return _PLATEAU
    if len({("momentum" in group, "betas" in group) for group in groups}) > 1:
        return (
            "it gets the parameter groups of all optimizers: pass cycle_momentum=False if these"
            " differ in momentum or betas"
        )
    return (
        "pass all arguments: from_scheduler(lambda optimizer:"
        " torch.optim.lr_scheduler.StepLR(optimizer, 1000))"
    )


def _advance(scheduler: Any, optimizer: Any) -> Callable[[], Any]:
    name, advance = type(scheduler).__name__, getattr(scheduler, "step", None)
    if not callable(advance):
        raise ConfigError(
            "scheduler-without-step",
            problem=f"schedule: the factory returned a {name}, which has no step()",
            remedy="write sf.schedules.from_scheduler(lambda optimizer:"
            " torch.optim.lr_scheduler.StepLR(optimizer, 1000))",
            setting="schedule",
            value=name,
        )
    needed = [
        each.name
        for each in inspect.signature(advance).parameters.values()
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if needed:
        raise ConfigError(
            "scheduler-needs-metric",
            problem=f"schedule: {name}.step() needs {needed[0]}, but a schedule depends on the step"
            " alone",
            remedy=_PLATEAU,
            setting="schedule",
            value=name,
            argument=needed[0],
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            "scheduler-of-another-optimizer",
            problem=f"schedule: the factory returned a {name} for another optimizer",
            remedy="pass it the factory's argument:"
            " sf.schedules.from_scheduler(lambda optimizer: ...(optimizer, ...))",
            setting="schedule",
            value=name,
        )
    return advance  # type: ignore[no-any-return]
