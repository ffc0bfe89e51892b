"""Optimizers of the user: built by a class or function from parameter groups, or built already."""

import inspect
import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from surefoot.distributed.shards import holders
from surefoot.errors import ConfigError, first_line, line_of_user
from surefoot.optim.kinds.kind import Built, inner_optimizers, kind_of
from surefoot.optim.param_groups import ParameterGroup

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class WithClosure:
    """A function that builds an optimizer whose `step` gets a closure; see `with_closure`."""

    build: Built

    def __call__(self, groups: list[dict[str, Any]]) -> Optimizer:
        return self.build(groups)


def with_closure(build: Built) -> WithClosure:
    """Declare that the optimizer that `build` returns evaluates the loss in its `step(closure)`.

    LBFGS needs no declaration, and neither does a `step` whose argument `closure` has no default.
    Many implementations of SAM write `step(self, closure=None)`, and need one. The closure repeats
    the step's evaluation at the current weights: all micro-batches on all ranks, with the same
    random numbers. It sets the gradients and returns the loss.

    >>> import torch
    >>> from functools import partial
    >>> with_closure(partial(torch.optim.SGD, lr=0.1))(
    ...     [{"params": [nn.Parameter(torch.ones(1))]}]
    ... ).defaults["lr"]
    0.1
    """
    if not callable(build):
        raise ConfigError(
            "closure-of-no-function",
            problem=f"with_closure received a {type(build).__name__}, not a class or function that"
            " builds an optimizer",
            reason="the run calls it with the parameter groups",
            remedy="write with_closure(lambda groups: SAM(groups, lr=0.1)), for example",
            setting="optimizer",
            value=type(build).__name__,
        )
    return WithClosure(build)


def takes_closure(optimizer: Optimizer) -> bool:
    """Return whether `optimizer.step` needs a closure: for LBFGS, and if an argument called
    `closure` has no default.

    >>> import torch
    >>> weight = nn.Parameter(torch.ones(1))
    >>> takes_closure(torch.optim.LBFGS([weight])), takes_closure(torch.optim.SGD([weight]))
    (True, False)
    """
    _self, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    is_required = False
    for argument in arguments:
        is_variadic = argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
        if is_variadic or argument.default is not argument.empty:
            continue
        if "closure" not in argument.name or argument.kind is argument.KEYWORD_ONLY:
            raise ConfigError(
                "optimizer-step-arguments",
                problem=f"optimizer: {type(optimizer).__name__}.step needs the argument"
                f" {argument.name}, but a run calls step() or step(closure)",
                remedy=f"write a subclass whose step(self, closure=None) supplies {argument.name}",
                setting="optimizer",
                argument=argument.name,
            )
        is_required = True
    return is_required or isinstance(optimizer, LBFGS)


def build_user_optimizer(
    source: Built | Optimizer, groups: Sequence[ParameterGroup], *, is_rebuilt: bool
) -> tuple[Optimizer, bool]:
    """Return the optimizer that the user built, or that a class or function builds, and whether its
    step gets a closure.
    """
    optimizer = source if isinstance(source, Optimizer) else from_factory(source, groups)
    complete(optimizer)
    refuse_groups(optimizer)
    if isinstance(source, Optimizer):
        take_instance(source, groups, is_rebuilt=is_rebuilt)
    if kind_of(optimizer) is None:
        MemoryKeeper(optimizer)
    return optimizer, isinstance(source, WithClosure) or takes_closure(optimizer)


def complete(optimizer: Optimizer) -> None:
    """Give an optimizer and its inner ones what torch's constructor sets. Many wrappers do not call
    this constructor, and their hooks would be missing or never run.
    """
    for incomplete in (optimizer, *inner_optimizers(optimizer).values()):
        attributes = vars(incomplete)
        for name in _HOOKS:
            hooks = attributes.get(name, {})
            if not isinstance(hooks, OrderedDict):  # torch refers weakly to it
                attributes[name] = OrderedDict(hooks)
        if not hasattr(incomplete, "defaults"):
            incomplete.defaults = {}
        if not hasattr(incomplete, "state"):
            incomplete.state = defaultdict(dict)
        incomplete._patch_step_function()


class MemoryKeeper:
    """Hooks that keep parameters in their memory, where averages read them, if a `step` assigns
    `parameter.data`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.tensors: list[tuple[nn.Parameter, Tensor]] = []
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        self.tensors = [
            (parameter, parameter.data)
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def after(self, *_: Any) -> None:
        for parameter, tensor in self.tensors:
            if parameter.data_ptr() != tensor.data_ptr():
                tensor.copy_(parameter.data)
                parameter.data = tensor


def take_instance(
    optimizer: Optimizer, groups: Sequence[ParameterGroup], *, is_rebuilt: bool
) -> None:
    """Prepare an optimizer that the user built; refuse one that does not train exactly the
    parameters of the groups.
    """
    name = type(optimizer).__name__
    lr = float(optimizer.param_groups[0]["lr"])

    def misfit(what: str, why: str, *remedies: str) -> ConfigError:
        instead = f"pass what builds one: optimizer=functools.partial({name}, lr={lr:g})"
        return ConfigError(
            "optimizer-instance-misfit",
            problem=f"optimizer: the {name} that is already built {what}",
            reason=why,
            remedy=[instead, *remedies],
            setting="optimizer",
            value=name,
            found=what,
        )

    wanted: dict[nn.Parameter, str] = {}  # the names of the parameters that a run trains
    for group in groups:
        wanted.update(zip(group.parameters, group.names, strict=True))
    members: list[nn.Parameter] = []
    for own_group in optimizer.param_groups:
        members += own_group["params"]

    if is_rebuilt:
        raise misfit("cannot be rebuilt", "parameters were unfrozen during training")
    if holders([*wanted]) is not None:
        raise misfit("cannot be rebuilt", "FSDP replaces the parameters by shards")
    why = (
        "it must have the parameters of the nn.Module that is passed as model=; a function as"
        " model= builds another one"
    )
    members_set = set(members)
    for parameter, parameter_name in wanted.items():
        if parameter not in members_set:
            remedy = "freeze what it leaves out by requires_grad_(False)"
            raise misfit(f"does not train {parameter_name}", why, remedy)
    for parameter in members:
        if parameter.requires_grad and parameter not in wanted:
            raise misfit("trains parameters that are not the model's", why)
    for parameter in members:
        if _has_state_elsewhere(optimizer, parameter):
            raise misfit(
                f"has its state on another device than {parameter.device}",
                "the run moved the model there",
                "move the model before you build it",
            )
    is_scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    for own_group in optimizer.param_groups:
        initial = own_group.setdefault("initial_lr", own_group["lr"])
        # an earlier run changed `lr`; a scheduler of the user's code starts with what it set
        if not is_scheduled:
            own_group["lr"] = initial


def _has_state_elsewhere(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    for value in optimizer.state.get(parameter, {}).values():
        # step counters may be on the host
        if isinstance(value, Tensor) and value.ndim > 0 and value.device != parameter.device:
            return True
    return False


def refuse_groups(optimizer: Optimizer) -> None:
    """Raise `ConfigError` for groups without a learning rate, and for an inner optimizer that does
    not share the groups.
    """
    if not all("lr" in group for group in optimizer.param_groups):
        raise ConfigError(
            "group-without-rate",
            problem=f'optimizer: {type(optimizer).__name__} has a parameter group without "lr"',
            reason="a run sets the learning rate of each group in every step",
            remedy='write super().__init__(params, {"lr": lr}), and read group["lr"] in step()',
            setting="optimizer",
        )
    for name, inner in inner_optimizers(optimizer).items():
        for inner_group in inner.param_groups:
            if any(inner_group is group for group in optimizer.param_groups):
                continue
            raise ConfigError(
                "inner-optimizer-with-groups",
                problem=f"optimizer: {type(optimizer).__name__}.{name} has parameter groups of its"
                " own",
                reason="learning rates of a schedule and a checkpoint would not reach it",
                remedy=f"write self.param_groups = self.{name}.param_groups in __init__",
                setting="optimizer",
                attribute=name,
            )


def from_factory(factory: Built, groups: Sequence[ParameterGroup]) -> Optimizer:
    """Return the optimizer that a class or function builds from parameter groups; explain why it
    could not.
    """
    factory = factory.build if isinstance(factory, WithClosure) else factory
    name = getattr(factory, "__name__", type(factory).__name__)
    if inspect.isfunction(factory) and factory.__module__ == "surefoot.optim.optimizers":
        raise ConfigError(
            "optimizer-function-itself",
            problem=f"optimizer: received the function {name} itself",
            reason="it takes settings, and returns what builds an optimizer from the parameter"
            " groups",
            remedy=f"write optimizer=sf.optim.{name}(lr=1e-3)",
            setting="optimizer",
            value=name,
        )
    try:
        optimizer: Any = factory([{"params": group.parameters} for group in groups])
    except (ValueError, TypeError, IndexError, AttributeError) as problem:
        *_, (frame, _) = traceback.walk_tb(problem.__traceback__)
        is_called = problem.__traceback__ is None or problem.__traceback__.tb_next is not None
        if not is_called:
            raise ConfigError(
                "optimizer-arguments",
                problem=f"optimizer: {first_line(problem)}",
                reason="a run calls it with the parameter groups alone",
                remedy=f"supply the rest: functools.partial({name}, lr=1e-3)",
                setting="optimizer",
                value=name,
            ) from None
        place = line_of_user(problem.__traceback__).strip() or None
        if "'dict' object" in str(problem):
            raise ConfigError(
                "optimizer-groups-as-parameters",
                problem=f"optimizer: {name} takes each parameter group for a parameter:"
                f" {first_line(problem)}",
                reason=place,
                remedy='it gets [{"params": [...]}], as torch.optim does: write'
                ' groups[0]["params"] for the list of parameters',
                setting="optimizer",
                value=name,
            ) from None
        if not frame.f_globals["__name__"].startswith("torch.optim"):
            raise
        remedy = "use valid values, such as betas at least 0 and below 1, lr and eps at least 0"
        if "2D parameters" in str(problem):  # torch.optim.Muon
            remedy = (
                "for a whole model: optimizer=sf.optim.muon(lr=1e-2), which trains other parameters"
                " with AdamW"
            )
        raise ConfigError(
            "optimizer-rejects-settings",
            problem="optimizer: the factory's optimizer rejects its settings:"
            f" {first_line(problem)}",
            reason=place,
            remedy=remedy,
            setting="optimizer",
        ) from None
    if isinstance(optimizer, Optimizer):
        return optimizer
    if type(optimizer).__module__.startswith("schedulefree"):
        raise ConfigError(
            "schedule-free-wrapper",
            problem=f"optimizer: {name} returned a {type(optimizer).__name__} of schedulefree, which"
            " is no torch.optim.Optimizer",
            reason="a run needs its param_groups, state and step()",
            remedy="write optimizer=sf.optim.schedule_free(lr=2.5e-3), or use"
            " schedulefree.AdamWScheduleFree",
            setting="optimizer",
            value=type(optimizer).__name__,
        )
    raise ConfigError(
        "optimizer-of-another-class",
        problem=f"optimizer: {name} returned a {type(optimizer).__name__}, not a"
        " torch.optim.Optimizer",
        reason="a run needs its param_groups, state and step()",
        remedy="return an instance of a subclass of torch.optim.Optimizer",
        setting="optimizer",
        value=type(optimizer).__name__,
    )
