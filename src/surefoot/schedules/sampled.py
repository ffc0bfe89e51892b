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
        planned, steps = None if self.steps is None else self._tables.planned, self.steps or 0
        if planned is None or planned <= steps:
            return None
        return f"the scheduler is planned for {planned:,} steps, but the run has {steps:,} and ends before: total_steps={steps}"

    def _for(self, length: Length) -> "Sampled":
        return (
            self if self.steps is not None and self.steps >= length.steps else self.resolved(length)
        )

    @cached_property
    def _tables(self) -> "_Tables":
        steps = self.steps or 1
        if self.shape == "from_function":
            return _Tables(array("d", [_factor_of(self.source, step) for step in range(steps)]))
        groups = self.every_group or self.groups
        try:
            scheduler = _StandIn(groups, self.source)
        except ConfigError:
            if len(groups) == len(self.groups):
                raise
            # a list of lambdas or rates, one for each learning rate of the run
            return _one_per_rate(self.source, self.groups, groups, steps, self.epoch)
        return scheduler.tables(steps, self.epoch)


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


@dataclass(frozen=True)
class _Tables:
    """What a source gives for each step of a run."""

    factors: Table  # of the first group
    momenta: Table | None = None  # None: they do not change
    planned: int | None = None  # the scheduler's own number of steps
    by_group: list[Table] | None = None  # None: all groups have the same factors


class _StandIn:
    """A scheduler over a stand-in optimizer without weights, with the groups of a run."""

    def __init__(self, groups: Groups, factory: Callable[[Any], Any]) -> None:
        self.groups, self.optimizer = groups, _optimizer_of(groups)
        name = _name(factory)
        with warnings.catch_warnings(action="ignore"):  # torch warns if the optimizer does not step
            try:
                scheduler = factory(self.optimizer)
            except Exception as problem:  # of the user's code, or of missing arguments
                raise ConfigError(
                    "scheduler-not-built",
                    problem=f"schedule: {name} failed when it is built: {_in_words(problem)}",
                    remedy=_how_to_build(problem, groups),
                    setting="schedule",
                ) from problem
        if isinstance(scheduler, tuple) and scheduler:  # timm's create_scheduler_v2
            scheduler = scheduler[0]
        self.scheduler, self.name = scheduler, type(scheduler).__name__
        self.planned = getattr(scheduler, "total_steps", None)  # of OneCycleLR

    def tables(self, steps: int, epoch: tuple[int, int]) -> _Tables:
        momenta = array("d")
        by_group = [array("d") for _ in self.groups]
        with warnings.catch_warnings(action="ignore"):
            advance = _advance(self.scheduler, self.optimizer, epoch)
            for step in range(steps):
                self._advance_to(step, steps, advance)
                for table, own, group in zip(
                    by_group, self.optimizer.param_groups, self.groups, strict=True
                ):
                    if group["lr"]:
                        table.append(_factor(own["lr"] / group["lr"], step, self.name))
                momenta.append(_momentum(self.optimizer.param_groups[0]))
        self._refuse_other_changes()
        first = next(table for table in by_group if table)
        by_group = [table or first for table in by_group]  # a rate of 0 stays 0
        is_changing = any(each != _momentum(self.groups[0]) for each in momenta)
        return _Tables(
            first,
            momenta if is_changing else None,
            self.planned if isinstance(self.planned, int) else None,
            None if all(_near(first, table) for table in by_group) else list(by_group),
        )

    def _advance_to(self, step: int, steps: int, advance: Callable[[int], Any]) -> None:
        try:
            advance(step)
        except Exception as problem:  # for example OneCycleLR with too few total_steps
            remedy = ["its step() is called once per optimizer step, not once per epoch"]
            if isinstance(self.planned, int) and self.planned < steps:
                remedy = [
                    f"it is planned for {self.planned} steps, and the run has {steps}:"
                    f" write total_steps={steps}",
                    "each step of a run is full and no sample is dropped, so len(loader) times"
                    " epochs may be another number",
                ]
            raise ConfigError(
                "scheduler-failed",
                problem=f"schedule: {self.name} failed at step {step} of {steps}:"
                f" {_in_words(problem)}",
                remedy=remedy,
                setting="schedule",
                step=step,
                steps=steps,
                planned_steps=self.planned,
            ) from problem

    def _refuse_other_changes(self) -> None:
        for own, group in zip(self.optimizer.param_groups, self.groups, strict=True):
            own["betas"] = (*group.get("betas", ())[:1], *own.get("betas", ())[1:])
            changed = [
                key for key in group if key not in ("lr", "momentum") and own[key] != group[key]
            ]
            if changed:
                raise ConfigError(
                    "scheduler-changes-setting",
                    problem=f"schedule: {self.name} changes the optimizer's {changed[0]}",
                    reason="a schedule changes only learning rates and momentum",
                    remedy="change other settings in your own training loop",
                    setting=changed[0],
                )


def _optimizer_of(groups: Groups) -> Any:
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

    return StandIn()


def _one_per_rate(
    source: Callable[[Any], Any],
    rates: Groups,
    every_group: Groups,
    steps: int,
    epoch: tuple[int, int],
) -> _Tables:
    """Return the tables of a scheduler for one group of each learning rate, given to all groups."""
    tables = _StandIn(rates, source).tables(steps, epoch)
    if tables.by_group is None:
        return tables
    of_rate = {group["lr"]: table for group, table in zip(rates, tables.by_group, strict=True)}
    by_group = [of_rate.get(group["lr"], tables.factors) for group in every_group]
    return replace(tables, by_group=by_group)


def _near(one: Table, other: Table) -> bool:
    return one is other or all(
        math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-12)
        for first, second in zip(one, other, strict=True)
    )


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


def _advance(scheduler: Any, optimizer: Any, epoch: tuple[int, int]) -> Callable[[int], Any]:
    """Return a function that brings a scheduler to a step; it is called with each step from 0."""
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
    is_of_timm = callable(getattr(scheduler, "step_update", None)) and needed == ["epoch"]
    if (needed and not is_of_timm) or "Plateau" in name:
        argument = "metric" if is_of_timm else (needed or ["metrics"])[0]
        raise ConfigError(
            "scheduler-needs-metric",
            problem=f"schedule: {name}.step() needs {argument}, but a schedule depends on the step"
            " alone",
            remedy=_PLATEAU,
            setting="schedule",
            value=name,
            argument=argument,
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
    if not is_of_timm:
        return lambda step: advance() if step > 0 else None
    samples, batch_size = epoch

    def as_timm_does(step: int) -> None:
        if step == 0:
            return
        scheduler.step_update(step)
        ended_epochs = step * batch_size // samples
        ended_before = (step - 1) * batch_size // samples
        if ended_epochs > ended_before:
            advance(ended_epochs)

    return as_timm_does
