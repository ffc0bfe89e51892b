"""Construction of a run's optimizer from its specification, with clipping and the skipping of bad
steps.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from weakref import proxy

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from surefoot.distributed.shards import holders
from surefoot.errors import ConfigError, Setting
from surefoot.optim.adamw_fused import StraightToKernel
from surefoot.optim.clipping import Clip, Clipping, clipping_of, present
from surefoot.optim.flat_parameters import FlatAdamW, none_shared, worth_it
from surefoot.optim.group_rates import GroupRates
from surefoot.optim.kinds.kind import Built, inner_optimizers, kind_named, kind_of, refuse_shards
from surefoot.optim.optimizers import OptimizerSpec
from surefoot.optim.param_groups import Group, final_layer, own_parameters, with_rates
from surefoot.optim.skip_step import Skip, parameter_bytes, skipping

if TYPE_CHECKING:
    from surefoot.optim.closure_step import Evaluate
    from surefoot.optim.ema import ModelCopy

Source = OptimizerSpec | Built | Optimizer  # what `Run(optimizer=)` takes for one model


@dataclass
class RunOptimizer:
    """An optimizer with its parameters, skip method, clipping method and gradients."""

    optimizer: Optimizer
    parameters: list[nn.Parameter]
    skip: Skip
    clipping: Clipping
    bad_in_a_row: Tensor  # on the device; above Task.max_bad_steps, all later updates are skipped
    gradients: Callable[[], list[Tensor]]  # for the norm, the clipping and the update
    rates: GroupRates
    takes_closure: bool = False
    evaluations: int = 0  # by its closures, so far

    def set_rate(
        self, factors: float | Sequence[float], *, lowered: float = 1.0, momentum: float | None
    ) -> None:
        """Set each group's learning rate to its base times its factor times `lowered`, and its
        momentum (or Adam's beta1). `factors` is one for all groups, or one for each.
        """
        self.rates.set(factors, lowered=lowered, momentum=momentum)


def optimizer_identity(plan: "TrainingPlan", trained: RunOptimizer) -> dict[str, Any]:
    """Return the settings of an optimizer that a resume compares."""
    spec, optimizer = plan.spec, trained.optimizer
    if isinstance(spec, OptimizerSpec):  # the learning rates of all parameters, also of frozen ones
        rates = [
            spec.lr * factor for factor in sorted(set(plan.factors.values()) - {0.0}, reverse=True)
        ]
        return spec.to_dict() | ({"learning_rates": rates} if spec.lr_multipliers else {})
    own = (
        {}
        if kind_of(optimizer)
        else {key: value for key, value in vars(optimizer).items() if key[0] != "_"}
    )
    attributes, defaults, *groups = (
        _json_numbers(numbers) for numbers in (own, optimizer.defaults, *optimizer.param_groups)
    )
    of_class = {"name": type(optimizer).__name__} | (
        {"closure": True} if trained.takes_closure else {}
    )
    return (
        of_class
        | ({"attributes": attributes} if attributes else {})
        | defaults
        | {"groups": groups}
    )


def _json_numbers(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers, texts and tuples among settings as JSON values."""
    kinds = (bool, int, float, str, tuple, np.generic)
    return {key: _as_json(each) for key, each in numbers.items() if isinstance(each, kinds)}


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_as_json, value))
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # JSON has no infinity
    return value


def every_group(optimizers: Iterable[RunOptimizer]) -> tuple[dict[str, Any], ...]:
    """Return the scalar settings of all parameter groups, with the base learning rate as `lr`."""
    kinds = (bool, int, float, tuple)
    groups = []
    for trained in optimizers:
        for rate, group in zip(trained.rates.initial, trained.optimizer.param_groups, strict=True):
            numbers = {key: value for key, value in group.items() if isinstance(value, kinds)}
            numbers.pop("initial_lr", None)
            groups.append(numbers | {"lr": rate})
    return tuple(groups)


def base_groups(optimizers: Iterable[RunOptimizer]) -> tuple[dict[str, Any], ...]:
    """Return the scalar settings of one parameter group per distinct base learning rate above 0."""
    groups = {group["lr"]: group for group in every_group(optimizers)}
    return tuple(group for rate, group in groups.items() if rate)


def refuse_without_momentum(optimizers: Iterable[RunOptimizer]) -> None:
    """Raise `ConfigError` for an optimizer without a momentum that a schedule can change."""
    for optimizer in (trained.optimizer for trained in optimizers):
        kind = kind_of(optimizer)
        if (kind is not None and kind.average is not None) or not all(
            group.get("momentum") or "betas" in group for group in optimizer.param_groups
        ):
            raise ConfigError(
                "schedule-without-momentum",
                problem="schedule: it changes the momentum, but"
                f" {type(optimizer).__name__} has no momentum to change",
                remedy="give sgd a momentum, use an optimizer with betas, or omit momentum_range",
                setting="schedule.momentum_range",
            )


@dataclass(frozen=True)
class TrainingPlan:
    """The parameter groups, clipping and averaging of one model, decided while the model holds
    unsharded parameters.
    """

    spec: Source
    factors: dict[str, float]  # learning-rate factor by parameter name
    groups: list[Group]
    clipped: list[nn.Parameter]
    model_copy: "ModelCopy | None"  # for averaged weights

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.groups for parameter in group.parameters]

    def on(
        self, own_part: Mapping[nn.Parameter, nn.Parameter], model_copy: "ModelCopy | None"
    ) -> Self:
        """Return the plan with each parameter replaced by this rank's shard, and with a copy of the
        sharded model.
        """
        groups = [
            replace(group, parameters=[own_part[each] for each in group.parameters])
            for group in self.groups
        ]
        return replace(
            self,
            groups=groups,
            clipped=[own_part[each] for each in self.clipped],
            model_copy=model_copy,
        )


def build_optimizer(spec: OptimizerSpec, groups: Sequence[Group]) -> Optimizer:
    """Build the specified optimizer, with the weight decay and the learning rate of each group.

    >>> from surefoot.optim.optimizers import lion
    >>> type(
    ...     build_optimizer(
    ...         lion(0.1), [Group("all", 0.0, [nn.Parameter(torch.ones(2))], ["weight"])]
    ...     )
    ... ).__name__
    'Lion'
    """
    named = (pair for group in groups for pair in zip(group.names, group.parameters, strict=True))
    if gaps := [
        name for name, parameter in named if not _lies_whole(parameter)
    ]:  # kernels would update the gaps
        more = f" and {len(gaps) - 1} more" if len(gaps) > 1 else ""
        raise ConfigError(
            "parameter-with-gaps",
            problem=f"the elements of {gaps[0]}{more} have gaps between them in memory",
            reason="is it part of a larger tensor?",
            remedy="give the model a copy: nn.Parameter(part.clone())",
            names=gaps,
        )
    kind = kind_named(spec.name)
    real = all(parameter.is_floating_point() for group in groups for parameter in group.parameters)
    if not real and not kind.takes_complex:
        raise ConfigError(
            "optimizer-of-real-parameters",
            problem=f"optimizer.name = {spec.name!r} cannot train complex parameters",
            remedy="use adamw, adam or sgd",
            setting="optimizer.name",
            value=spec.name,
        )
    if kind.build is not None:
        return kind.build(groups, spec.lr, spec.settings)
    return kind.cls(with_rates(groups, spec.lr), lr=spec.lr, **spec.settings)


def clipped_parameters(
    clip: Clip, model: nn.Module, parameters: Iterable[nn.Parameter]
) -> list[nn.Parameter]:
    """Return the parameters that `clip` clips: all of them, or all except the final layer's with
    "adaptive".
    """
    spared = own_parameters(final_layer(model)) if clip[0] == "adaptive" else set()
    clipped = [parameter for parameter in parameters if parameter not in spared]
    if not clipped:
        raise ConfigError(
            "clip-without-layers",
            problem=f"clip = 'adaptive {clip[1]:g}' exempts the final layer, but"
            f" {type(model).__name__} trains no other layer",
            remedy=Setting("clip", "norm 1.0"),
            setting="clip",
            value=f"adaptive {clip[1]:g}",
        )
    return clipped


def run_optimizer(
    plan: TrainingPlan,
    models: Mapping[str, nn.Module],
    *,
    clip: Clip,
    before: RunOptimizer | None,
    evaluate: "Evaluate",
    follows_code: bool = True,
) -> RunOptimizer:
    """Build the optimizer of a plan; the parameters of `before` keep their optimizer state, bit for
    bit.

    `evaluate` repeats the evaluation of a training step, for an optimizer with a closure.
    `follows_code`: learning rates that the user's code writes are followed.
    """
    if before is not None:
        before.rates.follow()
        refuse_scheduler(before.optimizer)
    spec, parameters = plan.spec, plan.parameters
    with without_compiler():
        if isinstance(spec, OptimizerSpec):
            optimizer, takes_closure = build_optimizer(spec, plan.groups), False
        else:
            from surefoot.optim.user_optimizer import build_user_optimizer

            optimizer, takes_closure = build_user_optimizer(
                spec, plan.groups, is_rebuilt=before is not None
            )
    if holders(parameters) is not None:
        refuse_shards(kind_of(optimizer), name=type(optimizer).__name__)
    # torch's schedulers warn without it, because the run calls some kernels without `step`
    vars(optimizer)["_opt_called"] = True
    is_scheduled = has_scheduler(optimizer)  # whose constructor may have set other rates
    for group in optimizer.param_groups:
        if not is_scheduled:
            group["initial_lr"] = float(group["lr"])
    initial = [float(group["initial_lr"]) for group in optimizer.param_groups]
    clipping, device = clipping_of(clip, plan.clipped), parameters[0].device
    bad_step_latch = torch.zeros((), device=device)
    if before is not None:
        carry_over(before.optimizer, optimizer, parameters=set(parameters))
        clipping.remembered, bad_step_latch = before.clipping.remembered, before.bad_in_a_row
    rates = GroupRates(optimizer, initial, follows=follows_code)
    if before is not None:
        rates.carry_over(before.rates)
    if takes_closure:
        from surefoot.optim.closure_step import ClosureStep, refuse_clip

        refuse_clip(name := type(optimizer).__name__, clip)
        closed = ClosureStep(name, 2 * parameter_bytes(optimizer), evaluate)
        own = closed.gradients
        trained = RunOptimizer(
            optimizer, parameters, closed, clipping, bad_step_latch, own, rates, True
        )
        closed.trained = proxy(trained)  # not a circle of references
        return trained
    skip = skipping(optimizer, device)
    gradients: Callable[[], list[Tensor]] = partial(present, parameters)
    by_group = clip[0] != "adaptive"  # adaptive clipping reads parameters, which flat groups hide
    small = all(worth_it(group["params"]) for group in optimizer.param_groups)
    tensors = (
        tensor for model in models.values() for tensor in (*model.parameters(), *model.buffers())
    )
    if isinstance(skip, StraightToKernel) and by_group and small and none_shared(tensors):
        skip = FlatAdamW(optimizer, skip)
        gradients = skip.gradients
    return RunOptimizer(optimizer, parameters, skip, clipping, bad_step_latch, gradients, rates)


def carry_over(before: Optimizer, after: Optimizer, *, parameters: set[nn.Parameter]) -> None:
    """Copy the state, hooks and group settings of `parameters` to a rebuilt optimizer; new
    parameters start without state.
    """
    numbers_of = {
        each: {key: number for key, number in group.items() if key != "params"}
        for group in before.param_groups
        for each in group["params"]
        if each in parameters
    }
    groups = [
        [numbers_of[each] for each in group["params"] if each in numbers_of]
        for group in after.param_groups
    ]
    if sum(map(len, groups)) < len(numbers_of) or any(
        own != numbers[0] for numbers in groups for own in numbers
    ):
        raise ConfigError(
            "groups-of-factory-changed",
            problem=f"the function that builds {type(after).__name__} moves parameters that were"
            " already trained to other groups, or drops them",
            reason="it is called again when parameters are unfrozen during training, and the"
            " optimizer state could not be carried over",
            remedy="build the optimizer from the groups that the function receives, and keep each"
            " parameter in its group",
            setting="optimizer",
        )
    for group, numbers in zip(after.param_groups, groups, strict=True):
        group.update(numbers[0] if numbers else {})
    if isinstance(before, LBFGS) and before.state:
        from surefoot.optim.closure_step import lbfgs_of_other_parameters

        raise lbfgs_of_other_parameters()
    for now, then in zip(
        (after, *inner_optimizers(after).values()),
        (before, *inner_optimizers(before).values()),
        strict=True,
    ):
        now.state.update(then.state)
    after._optimizer_step_pre_hooks = before._optimizer_step_pre_hooks
    after._optimizer_step_post_hooks = before._optimizer_step_post_hooks


def has_scheduler(optimizer: Optimizer) -> bool:
    """Return True if a torch scheduler was built over an optimizer, whose `step` it replaces."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def refuse_scheduler(optimizer: Optimizer) -> None:
    """Raise `ConfigError` if a torch scheduler would go on with an optimizer that is replaced."""
    if has_scheduler(optimizer):
        raise ConfigError(
            "scheduler-of-replaced-optimizer",
            problem="parameters were unfrozen, and the run replaces their optimizer, over which"
            " your code built a torch scheduler",
            reason="the scheduler would change the rates of the former one",
            remedy="unfreeze all parameters before Run(...), or use"
            " sf.schedules.from_scheduler(...)",
            setting="optimizer",
            value=type(optimizer).__name__,
        )


@contextmanager
def without_compiler() -> Iterator[None]:
    """Prevent torch's wrapper of `add_param_group` from importing `torch._dynamo`, which takes 1 to
    2 s (decision 0037).
    """
    wrapped = Optimizer.add_param_group
    if "torch._dynamo" not in sys.modules:
        Optimizer.add_param_group = inspect.unwrap(wrapped)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.add_param_group = wrapped  # type: ignore[method-assign]


def _lies_whole(tensor: Tensor) -> bool:
    numbers = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != numbers:
            return False
        numbers *= size
    return True
