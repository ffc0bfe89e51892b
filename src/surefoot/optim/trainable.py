"""Which parameters a run trains, while its own code freezes and unfreezes them through `requires_grad`.

A parameter that is frozen on the way stays with its optimizer, as in torch: it gets no gradient, neither moves nor decays, and its
state waits. One that is unfrozen for the first time joins: its model's optimizer is built again, and all others keep their state.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.errors import CheckpointError, ConfigError, first_line, line_of_user
from surefoot.optim import flat_parameters, sharding
from surefoot.optim.adamw_fused import StraightToKernel
from surefoot.optim.averages import Twin
from surefoot.optim.clipping import Clip, Clipping, clipping_of
from surefoot.optim.gradients import present
from surefoot.optim.param_groups import Group, first_and_last
from surefoot.optim.skip_step import Skip, skipping
from surefoot.optim.specs import OptimizerSpec
from surefoot.optim.without_compiler import without_compiler
from surefoot.sharding import holders
from surefoot.world import World

Built = Callable[[list[dict[str, Any]]], Optimizer]
_requires_grad = attrgetter("requires_grad")


@dataclass
class Trained:
    """An optimizer with what its updates need."""

    optimizer: Optimizer
    parameters: list[nn.Parameter]
    skip: Skip
    clipping: Clipping
    bad_in_a_row: Tensor  # on the device; past Task.max_bad_steps every later update is skipped
    gradients: Callable[[], list[Tensor]]  # what norm and limit are taken of, and the update is made with


@dataclass(frozen=True)
class Decided:
    """What of one model is told by its modules and names: who is trained how. Decided while it holds whole parameters."""

    spec: OptimizerSpec | Built
    factors: dict[str, float]  # on the rate, of every parameter by name
    groups: list[Group]
    limited: list[nn.Parameter]
    twin: Twin | None  # for averages of its weights

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that are trained."""
        return [parameter for group in self.groups for parameter in group.parameters]

    def on(self, held: Mapping[nn.Parameter, nn.Parameter], twin: Twin | None) -> Decided:
        """The same of what this rank holds of each parameter, and of a twin of that."""
        groups = [replace(group, parameters=[held[each] for each in group.parameters]) for group in self.groups]
        return replace(self, groups=groups, limited=[held[each] for each in self.limited], twin=twin)


@dataclass
class Trainable:
    """Notices between steps what user code has frozen, unfrozen or replaced; looks at flags and identities, never at numbers.

    trained: names of the parameters that an optimizer has, for each model with one; `rebuild` builds that for others of it.
    joins_in_step: whether it may do so inside a step, where no other process waits. sharded: parameters lie over several ranks,
    divided for what is trained at first.
    """

    models: dict[str, nn.Module] = field(default_factory=dict)
    trained: dict[str, set[str]] = field(default_factory=dict)
    rebuild: Callable[[str, set[str]], None] = lambda model, trained: None  # noqa: ARG005
    joins_in_step: bool = True
    sharded: bool = False

    def __post_init__(self) -> None:
        self._look()

    def follow(self, *, in_step: bool = False) -> None:
        """Train what is trainable now; `ConfigError` for what cannot be trained.

        If nothing changed that takes 5 us between steps with 24 parameters, and 70 us with 144 (one core); in a step, 2 and 9.
        """
        if tuple(map(_requires_grad, self._every)) != self.flags or (not in_step and self._replaced()):
            self._follow(in_step=in_step)

    def state(self) -> dict[str, list[str]]:
        """What a checkpoint holds of it: which parameters are frozen now, and which no optimizer has."""
        frozen = [name for name, parameter in self.parameters.items() if not parameter.requires_grad]
        return {"frozen": frozen, "in_no_optimizer": [self._full(model, name) for model, name, _ in self._outside]}

    def load_state(self, state: Mapping[str, list[str]], *, where: str) -> None:
        """Freeze and unfreeze as a checkpoint says, and build optimizers again that had other parameters."""
        now, frozen, outside = self.state(), set(state["frozen"]), set(state["in_no_optimizer"])
        if self.sharded and state != now:
            other = sorted(frozen ^ set(now["frozen"]) | outside ^ set(now["in_no_optimizer"]))
            raise CheckpointError(f"cannot resume {where}: {_not_under_fsdp(other)}")
        for name, parameter in () if self.sharded else self.parameters.items():
            parameter.requires_grad_(name not in frozen)
        for model, before in self.trained.items():
            names = {
                name for name, _ in self.models[model].named_parameters() if self._full(model, name) not in outside
            }
            if names != before:
                self.trained[model] = names
                self.rebuild(model, names)
        self._look()

    def changes(self, before: tuple[bool, ...]) -> list[str]:
        """In words, how the flags differ from those `before`."""
        now = [(name, flag) for name, was, flag in zip(self.parameters, before, self.flags, strict=True) if was != flag]
        verbs = {"unfrozen": [name for name, flag in now if flag], "frozen": [name for name, flag in now if not flag]}
        return [f"{_counted(names)} {verb}: {first_and_last(names)}" for verb, names in verbs.items() if names]

    def _look(self) -> None:
        """Remember what there is, and what of it is trained."""
        modules = [module for model in self.models.values() for module in model.modules()]
        owners: list[Any] = [self.models, *(own for each in modules for own in (each._parameters, each._modules))]
        self._owners, self._empty = [own for own in owners if own], [own for own in owners if not own]
        self._parts = [*chain.from_iterable(map(dict.values, self._owners))]  # so that no other can have their ids
        self._ids = [*map(id, self._parts)]
        self._outside = [each for each in self._named() if each[1] not in self.trained.get(each[0], ())]
        self.parameters = {self._full(model, name): parameter for model, name, parameter in self._named()}
        self._every = list(self.parameters.values())
        self._take_flags()

    def _take_flags(self) -> None:
        self.flags = tuple(map(_requires_grad, self._every))
        self.fingerprint = crc32(bytes(self.flags))  # the same on every rank that has frozen the same

    def _replaced(self) -> bool:
        """Whether there are other modules or parameters now; FSDP replaces them in every pass."""
        now = [*map(id, chain.from_iterable(map(dict.values, self._owners)))]
        return (now != self._ids or any(self._empty)) and not self.sharded

    def _follow(self, *, in_step: bool) -> None:
        before = dict(zip(self.parameters, self.flags, strict=True))
        changed = [name for name, parameter in self.parameters.items() if parameter.requires_grad is not before[name]]
        if self.sharded:
            if not in_step:  # what still differs after the step
                raise ConfigError(_not_under_fsdp(changed))
            return
        replaced = self._replaced()
        if replaced:
            self._refuse_other_parameters()
        wanted = [(model, name) for model, name, parameter in self._outside if parameter.requires_grad]
        joining = [(model, name) for model, name in wanted if model in self.trained]
        if in_step and not self.joins_in_step and (joining or len(self.models) == 1):
            raise ConfigError(  # DDP of a single model waits for all that was trained before
                f"requires_grad of {_counted(changed)} changed inside a step, before its gradients ({first_and_last(changed)})\n"
                "  the other processes wait for the gradients of what was trained when the step began\n"
                "  change it after update(step), at the end of the loop's body: it then counts from the next step on"
            )
        thawed = [
            self._full(*each) for each in wanted if each not in joining and before.get(self._full(*each)) is False
        ]
        if thawed:  # what nobody ever froze in a model without an optimizer is its owner's choice
            raise ConfigError(
                f"requires_grad of {_counted(thawed)} is True now, and their model has no optimizer ({first_and_last(thawed)})\n"
                "  they would get gradients and never move\n"
                f"  give it one: Run(optimizer={{..., {thawed[0].partition('.')[0]!r}: surefoot.adamw(...)}}), or leave it frozen"
            )
        for model, trained in self.trained.items():
            names = trained.union(name for other, name in joining if other == model)
            if names != trained:
                self.rebuild(model, names)
                trained.update(names)
        if replaced or joining:
            self._look()
        else:
            self._take_flags()

    def _refuse_other_parameters(self) -> None:
        """Raise `ConfigError` where a model has other parameters than it had; other modules around them are its own business."""
        then, now = self.parameters, {self._full(model, name): parameter for model, name, parameter in self._named()}
        other = [name for name in dict.fromkeys([*then, *now]) if then.get(name) is not now.get(name)]
        if not other:
            return
        how = "is gone" if other[0] not in now else "is new" if other[0] not in then else "is another tensor now"
        raise ConfigError(
            f"{_counted(other)} of the model changed while the run goes on: {other[0]} {how}\n"
            "  no optimizer would train it, and no resume would find it\n"
            "  change the model before Run(...); new numbers for it: parameter.copy_(...) under torch.no_grad(), or load_state_dict"
        )

    def _named(self) -> list[tuple[str, str, nn.Parameter]]:
        return [(model, *pair) for model, module in self.models.items() for pair in module.named_parameters()]

    def _full(self, model: str, name: str) -> str:
        return name if list(self.models) == ["model"] else f"{model}.{name}"


def trained_by(
    decision: Decided, models: Mapping[str, nn.Module], *, clip: Clip, world: World, before: Trained | None
) -> Trained:
    """An optimizer with what its updates need; what was trained `before` goes on with its state, bit for bit."""
    spec, parameters = decision.spec, decision.parameters
    with without_compiler():
        plain = [{"params": group.parameters} for group in decision.groups]
        optimizer = spec.build(decision.groups) if isinstance(spec, OptimizerSpec) else _from_factory(spec, plain)
    if holders(parameters) is not None:
        sharding.refuse_optimizer(optimizer)
    for group in optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])
    if before is not None:
        carry_over(before.optimizer, optimizer, of=parameters)
    clipping, device = clipping_of(clip, decision.limited), parameters[0].device
    clipping.remembered = clipping.remembered if before is None else before.clipping.remembered
    skip = skipping(optimizer, device)
    gradients: Callable[[], list[Tensor]] = partial(present, parameters)
    by_group = clip[0] != "adaptive"  # which is told of parameters, not of groups
    if isinstance(skip, StraightToKernel) and world.size == 1 and by_group and _may_lie_together(optimizer, models):
        skip = flat_parameters.FlatAdamW(optimizer, skip)
        gradients = skip.gradients
    latch = torch.zeros((), device=device) if before is None else before.bad_in_a_row
    return Trained(optimizer, parameters, skip, clipping, latch, gradients)


def _from_factory(factory: Built, groups: list[dict[str, Any]]) -> Optimizer:
    """What a factory of the user's makes; `ConfigError` if torch refuses its settings."""
    try:
        return factory(groups)
    except (ValueError, TypeError, IndexError) as problem:
        *_, (frame, _) = traceback.walk_tb(problem.__traceback__)
        if not frame.f_globals["__name__"].startswith("torch.optim"):
            raise
        raise ConfigError(
            f"optimizer: the factory's optimizer refuses its settings: {first_line(problem)}\n"
            "  give it another value: betas at least 0 and below 1, lr and eps at least 0, for example"
            + line_of_user(problem.__traceback__)
        ) from None


def carry_over(before: Optimizer, after: Optimizer, *, of: Collection[nn.Parameter]) -> None:
    """Give an optimizer that was built again, `of` these parameters, the state, hooks and groups' numbers of the one before.

    A group takes the numbers of the one that its parameters were in: what joins it has its rate and decay. A parameter that is
    new has no state yet, as after torch's `add_param_group`.
    """
    still = set(of)
    homes = {each: group for group in before.param_groups for each in group["params"] if each in still}
    groups = [[homes[each] for each in group["params"] if each in homes] for group in after.param_groups]
    if sum(map(len, groups)) < len(homes) or any(_numbers(own) != _numbers(held[0]) for held in groups for own in held):
        raise ConfigError(
            f"the function that builds {type(after).__name__} puts parameters that were trained before into other groups, or none\n"
            "  it is called again where parameters are unfrozen on the way, and their state could not be carried over\n"
            "  build it from the groups that it is given, each parameter in the same one as before"
        )
    for group, held in zip(after.param_groups, groups, strict=True):
        group.update(_numbers(held[0]) if held else {})
    after.state.update(before.state)
    after._optimizer_step_pre_hooks = before._optimizer_step_pre_hooks
    after._optimizer_step_post_hooks = before._optimizer_step_post_hooks


def _may_lie_together(optimizer: Optimizer, models: Mapping[str, nn.Module]) -> bool:
    """Whether what an optimizer trains should lie in one tensor a group, and no part of any model would notice."""
    if not all(flat_parameters.worth_it(group["params"]) for group in optimizer.param_groups):
        return False
    held = {id(tensor): tensor for model in models.values() for tensor in (*model.parameters(), *model.buffers())}
    return flat_parameters.none_shared(held.values())


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says of its parameters, without these."""
    return {key: held for key, held in group.items() if key != "params"}


def _counted(names: list[str]) -> str:
    return f"{len(names)} parameter{'s' * (len(names) != 1)}"


def _not_under_fsdp(names: list[str]) -> str:
    return (
        f"requires_grad of {_counted(names)} is not what it was ({first_and_last(names)}), which FSDP cannot follow\n"
        "  it divides parameters among the ranks for what is trained, once and for all\n"
        "  set requires_grad before Run(...), or use --parallel ddp"
    )
