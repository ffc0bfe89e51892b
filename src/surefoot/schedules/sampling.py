"""The factors of every step of a run, sampled from a function or from a scheduler.

A scheduler steps on a stand-in optimizer with the parameter groups of the run.
"""

import inspect
import math
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surefoot.errors import ConfigError, first_line
from surefoot.schedules.curves import Groups

_PLATEAU = 'to lower the learning rate if a metric stops improving: Run(plateau=sf.ReduceLROnPlateau("min val/loss", patience=3))'

Table = Sequence[float]


@dataclass(frozen=True)
class Tables:
    """What a source gives for each step of a run."""

    factors: Table  # of the first group
    momenta: Table | None = None  # None: they do not change
    planned: int | None = None  # the scheduler's own number of steps
    by_group: list[Table] | None = None  # None: all groups have the same factors


def tables_of_function(fn: Callable[[int], Any], steps: int) -> Tables:
    """Return the factors of a function of the step."""
    return Tables(array("d", [_factor_of(fn, step) for step in range(steps)]))


def tables_of_scheduler(
    factory: Callable[[Any], Any],
    groups: Groups,
    rates: Groups,
    steps: int,
    epoch: tuple[int, int],
) -> Tables:
    """Return the factors of a scheduler over these groups of a run. `rates` has one group for each
    learning rate: a scheduler may have a list of lambdas or rates for these alone.
    """
    try:
        sampled = _SampledScheduler(groups, factory)
    except ConfigError:
        if len(groups) == len(rates):
            raise
        return _one_per_rate(_SampledScheduler(rates, factory).tables(steps, epoch), rates, groups)
    return sampled.tables(steps, epoch)


def _one_per_rate(tables: Tables, rates: Groups, groups: Groups) -> Tables:
    """Give all groups the tables of their learning rate."""
    if tables.by_group is None:
        return tables
    of_rate = {group["lr"]: table for group, table in zip(rates, tables.by_group, strict=True)}
    by_group = [of_rate.get(group["lr"], tables.factors) for group in groups]
    return replace(tables, by_group=by_group)


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


class _SampledScheduler:
    """A scheduler over a stand-in optimizer without weights, with the groups of a run."""

    def __init__(self, groups: Groups, factory: Callable[[Any], Any]) -> None:
        self.groups = groups
        self.optimizer = _optimizer_of(groups)
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
        self.scheduler = scheduler
        self.name = type(scheduler).__name__
        self.planned = getattr(scheduler, "total_steps", None)  # of OneCycleLR

    def tables(self, steps: int, epoch: tuple[int, int]) -> Tables:
        momenta = array("d")
        by_group = [array("d") for _ in self.groups]
        with warnings.catch_warnings(action="ignore"):
            advance = _advance(self.scheduler, self.optimizer, epoch)
            for step in range(steps):
                self._advance_to(step, steps, advance)
                changed_groups = self.optimizer.param_groups
                for table, changed, group in zip(
                    by_group, changed_groups, self.groups, strict=True
                ):
                    if group["lr"]:
                        table.append(_factor(changed["lr"] / group["lr"], step, self.name))
                momenta.append(_momentum(changed_groups[0]))
        self._refuse_other_changes()
        first = next(table for table in by_group if table)
        by_group = [table or first for table in by_group]  # a rate of 0 stays 0
        initial_momentum = _momentum(self.groups[0])
        has_same_momentum = all(momentum == initial_momentum for momentum in momenta)
        has_same_factors = all(_near(first, table) for table in by_group)
        return Tables(
            first,
            momenta=None if has_same_momentum else momenta,
            planned=self.planned if isinstance(self.planned, int) else None,
            by_group=None if has_same_factors else list(by_group),
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
        for changed, group in zip(self.optimizer.param_groups, self.groups, strict=True):
            # the first of the betas is a momentum
            changed["betas"] = (*group.get("betas", ())[:1], *changed.get("betas", ())[1:])
            for key, value in group.items():
                if key in ("lr", "momentum") or changed[key] == value:
                    continue
                raise ConfigError(
                    "scheduler-changes-setting",
                    problem=f"schedule: {self.name} changes the optimizer's {key}",
                    reason="a schedule changes only learning rates and momentum",
                    remedy="change other settings in your own training loop",
                    setting=key,
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
            self.defaults = {}
            for group in reversed(groups):  # the first group's value of a key counts
                self.defaults.update(group)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Do nothing; the scheduler wraps this method."""

    return StandIn()


def _near(one: Table, other: Table) -> bool:
    if one is other:
        return True
    pairs = zip(one, other, strict=True)
    return all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in pairs)


def _momentum(group: Mapping[str, Any]) -> float:
    if "betas" in group:
        return float(group["betas"][0])
    return float(group.get("momentum", 0.0))


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
    name = type(scheduler).__name__
    advance = getattr(scheduler, "step", None)
    if not callable(advance):
        raise ConfigError(
            "scheduler-without-step",
            problem=f"schedule: the factory returned a {name}, which has no step()",
            remedy="write sf.schedules.from_scheduler(lambda optimizer:"
            " torch.optim.lr_scheduler.StepLR(optimizer, 1000))",
            setting="schedule",
            value=name,
        )
    needed = []
    for parameter in inspect.signature(advance).parameters.values():
        is_positional = parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        )
        if is_positional and parameter.default is parameter.empty:
            needed.append(parameter.name)
    is_of_timm = callable(getattr(scheduler, "step_update", None)) and needed == ["epoch"]
    if (needed and not is_of_timm) or "Plateau" in name:
        first_needed = needed[0] if needed else "metrics"
        argument = "metric" if is_of_timm else first_needed
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
