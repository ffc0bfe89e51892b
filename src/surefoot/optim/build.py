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
from importlib import import_module
from threading import Thread
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
from surefoot.optim.param_groups import (
    ParameterGroup,
    final_layer,
    own_parameters,
    with_rates,
)
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
    # for each group, its index among so many groups of earlier settings, which trained the
    # parameters with these names; None for a new group
    former_places: Callable[[set[str], int], list[int | None]] | None = None

    def set_rate(
        self, factors: float | Sequence[float], *, lowered: float = 1.0, momentum: float | None
    ) -> None:
        """Set each group's learning rate to its base times its factor times `lowered`, and its
        momentum (or Adam's beta1). `factors` is one for all groups, or one for each.
        """
        self.rates.set(factors, lowered=lowered, momentum=momentum)


def optimizer_identity(plan: "TrainingPlan", trained: RunOptimizer) -> dict[str, Any]:
    """Return the settings of an optimizer that a resume compares."""
    spec = plan.spec
    if isinstance(spec, OptimizerSpec):
        identity = spec.to_dict()
        if spec.lr_multipliers:  # the learning rates of all parameters, also of frozen ones
            factors = sorted(set(plan.factors.values()) - {0.0}, reverse=True)
            identity["learning_rates"] = [spec.lr * factor for factor in factors]
        return identity
    optimizer = trained.optimizer
    identity = {"name": type(optimizer).__name__}
    if trained.takes_closure:
        identity["closure"] = True
    if kind_of(optimizer) is None:  # settings of a user's class may be its attributes
        public = {key: value for key, value in vars(optimizer).items() if key[0] != "_"}
        attributes = _json_settings(public)
        if attributes:
            identity["attributes"] = attributes
    identity |= _json_settings(optimizer.defaults)
    identity["groups"] = [_json_settings(group) for group in optimizer.param_groups]
    return identity


def _json_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers, texts and tuples among settings as JSON values."""
    types = (bool, int, float, str, tuple, np.generic)
    return {key: _as_json(value) for key, value in settings.items() if isinstance(value, types)}


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
    types = (bool, int, float, tuple)
    groups = []
    for trained in optimizers:
        for rate, group in zip(trained.rates.initial, trained.optimizer.param_groups, strict=True):
            numbers = {key: value for key, value in group.items() if isinstance(value, types)}
            numbers.pop("initial_lr", None)
            numbers["lr"] = rate
            groups.append(numbers)
    return tuple(groups)


def base_groups(optimizers: Iterable[RunOptimizer]) -> tuple[dict[str, Any], ...]:
    """Return the scalar settings of one parameter group per distinct base learning rate above 0."""
    groups = {group["lr"]: group for group in every_group(optimizers)}
    return tuple(group for rate, group in groups.items() if rate)


def refuse_without_momentum(optimizers: Iterable[RunOptimizer]) -> None:
    """Raise `ConfigError` for an optimizer without a momentum that a schedule can change."""
    for trained in optimizers:
        optimizer = trained.optimizer
        kind = kind_of(optimizer)
        has_average = kind is not None and kind.average is not None
        groups = optimizer.param_groups
        has_momentum = all(group.get("momentum") or "betas" in group for group in groups)
        if has_average or not has_momentum:
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
    unfrozen_factors: dict[str, float]  # without what `frozen` freezes
    groups: list[ParameterGroup]
    clipped: list[nn.Parameter]
    model_copy: "ModelCopy | None"  # for averaged weights

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.groups for parameter in group.parameters]

    def on(
        self, shard_of: Mapping[nn.Parameter, nn.Parameter], model_copy: "ModelCopy | None"
    ) -> Self:
        """Return the plan with each parameter replaced by this rank's shard, and with a copy of the
        sharded model.
        """
        groups = []
        for group in self.groups:
            shards = [shard_of[parameter] for parameter in group.parameters]
            groups.append(replace(group, parameters=shards))
        clipped = [shard_of[parameter] for parameter in self.clipped]
        return replace(self, groups=groups, clipped=clipped, model_copy=model_copy)


def build_optimizer(spec: OptimizerSpec, groups: Sequence[ParameterGroup]) -> Optimizer:
    """Build the specified optimizer, with the weight decay and the learning rate of each group.

    >>> from surefoot.optim.optimizers import lion
    >>> type(
    ...     build_optimizer(
    ...         lion(0.1), [ParameterGroup("all", 0.0, [nn.Parameter(torch.ones(2))], ["weight"])]
    ...     )
    ... ).__name__
    'Lion'
    """
    gaps = []  # which kernels would update too
    is_real = True
    for group in groups:
        for name, parameter in zip(group.names, group.parameters, strict=True):
            if not _lies_whole(parameter):
                gaps.append(name)
            if not parameter.is_floating_point():
                is_real = False
    if gaps:
        more = f" and {len(gaps) - 1} more" if len(gaps) > 1 else ""
        raise ConfigError(
            "parameter-with-gaps",
            problem=f"the elements of {gaps[0]}{more} have gaps between them in memory",
            reason="is it part of a larger tensor?",
            remedy="give the model a copy: nn.Parameter(part.clone())",
            names=gaps,
        )
    kind = kind_named(spec.name)
    if not is_real and not kind.takes_complex:
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
    if clip[0] != "adaptive":
        return list(parameters)
    spared = own_parameters(final_layer(model))
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
    spec = plan.spec
    parameters = plan.parameters
    takes_closure = False
    with without_compiler():
        if isinstance(spec, OptimizerSpec):
            optimizer = build_optimizer(spec, plan.groups)
        else:
            from surefoot.optim.user_optimizer import build_user_optimizer

            optimizer, takes_closure = build_user_optimizer(
                spec, plan.groups, is_rebuilt=before is not None
            )
    if holders(parameters) is not None:
        refuse_shards(kind_of(optimizer), name=type(optimizer).__name__)
    # torch's schedulers warn without it, because the run calls some kernels without `step`
    vars(optimizer)["_opt_called"] = True
    if not has_scheduler(optimizer):  # whose constructor may have set other rates
        for group in optimizer.param_groups:
            group["initial_lr"] = float(group["lr"])
    initial = [float(group["initial_lr"]) for group in optimizer.param_groups]
    clipping = clipping_of(clip, plan.clipped)
    device = parameters[0].device
    bad_step_latch = torch.zeros((), device=device)
    if before is not None:
        carry_over(before.optimizer, optimizer, parameters=set(parameters))
        clipping.remembered = before.clipping.remembered
        bad_step_latch = before.bad_in_a_row
    rates = GroupRates(optimizer, initial, follows=follows_code)
    if before is not None:
        rates.carry_over(before.rates)
    if takes_closure:
        from surefoot.optim.closure_step import ClosureStep, refuse_clip

        name = type(optimizer).__name__
        refuse_clip(name, clip)
        closure_step = ClosureStep(name, 2 * parameter_bytes(optimizer), evaluate)
        trained = RunOptimizer(
            optimizer,
            parameters,
            closure_step,
            clipping,
            bad_step_latch,
            closure_step.gradients,
            rates,
            takes_closure=True,
        )
        closure_step.trained = proxy(trained)  # not a circle of references
        return trained
    skip = skipping(optimizer, device)
    gradients: Callable[[], list[Tensor]] = partial(present, parameters)
    # adaptive clipping reads the parameters one by one, which flat groups hide
    if isinstance(skip, StraightToKernel) and clip[0] != "adaptive":
        tensors: list[Tensor] = []
        for model in models.values():
            tensors += [*model.parameters(), *model.buffers()]
        is_small = all(worth_it(group["params"]) for group in optimizer.param_groups)
        if is_small and none_shared(tensors):
            skip = FlatAdamW(optimizer, skip)
            gradients = skip.gradients
    return RunOptimizer(
        optimizer,
        parameters,
        skip,
        clipping,
        bad_step_latch,
        gradients,
        rates,
    )


def carry_over(before: Optimizer, after: Optimizer, *, parameters: set[nn.Parameter]) -> None:
    """Copy the state, hooks and group settings of `parameters` to a rebuilt optimizer; new
    parameters start without state.
    """
    former_settings: dict[nn.Parameter, dict[str, Any]] = {}
    for group in before.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            if parameter in parameters:
                former_settings[parameter] = settings
    # the former settings of each parameter, in the groups of the rebuilt optimizer
    settings_of_groups = []
    for group in after.param_groups:
        members = [parameter for parameter in group["params"] if parameter in former_settings]
        settings_of_groups.append([former_settings[parameter] for parameter in members])
    is_dropped = sum(map(len, settings_of_groups)) < len(former_settings)
    is_mixed = any(
        settings != of_group[0] for of_group in settings_of_groups for settings in of_group[1:]
    )
    if is_dropped or is_mixed:
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
    for group, of_group in zip(after.param_groups, settings_of_groups, strict=True):
        if of_group:
            group.update(of_group[0])
    if isinstance(before, LBFGS) and before.state:
        from surefoot.optim.closure_step import lbfgs_of_other_parameters

        raise lbfgs_of_other_parameters()
    optimizers_after = [after, *inner_optimizers(after).values()]
    optimizers_before = [before, *inner_optimizers(before).values()]
    for rebuilt, former in zip(optimizers_after, optimizers_before, strict=True):
        rebuilt.state.update(former.state)
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


def import_for_steps(optimizers: Iterable[RunOptimizer]) -> None:
    """Import torch._dynamo if the first step of an optimizer would import it.

    An exception within that import keeps all frames of its stack, and what they refer to, until
    Python collects garbage: the model of a notebook's first run, after `del run`. So it happens on
    the stack of a thread.
    """
    name = "torch._dynamo"
    if name in sys.modules or not any(map(_imports_dynamo, optimizers)):
        return
    thread = Thread(target=import_module, args=(name,))
    thread.start()
    thread.join()


def _imports_dynamo(trained: RunOptimizer) -> bool:
    """Return True for a step with torch's decorator for differentiable optimizers."""
    if isinstance(trained.skip, StraightToKernel | FlatAdamW):
        return False  # they call their kernel without `step`
    step = getattr(type(trained.optimizer), "step", None)
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is not None and code.co_name == "_use_grad":
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def _lies_whole(tensor: Tensor) -> bool:
    elements = 1  # of the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != elements:
            return False
        elements *= size
    return True
