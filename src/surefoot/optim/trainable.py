"""The parameters that a run trains, while user code freezes and unfreezes them through
`requires_grad`.

A parameter that is frozen during training stays in its optimizer and does not change. A parameter
that is unfrozen for the first time joins its model's optimizer, which is rebuilt; all other
parameters keep their state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any
from zlib import crc32

from torch import nn

from surefoot.errors import CheckpointError, ConfigError, Setting
from surefoot.optim.param_groups import first_and_last

_requires_grad = attrgetter("requires_grad")

_SHARDED_ONCE = "FSDP shards trainable parameters once, when the run is built"


@dataclass
class Trainable:
    """A tracker that detects frozen, unfrozen and replaced parameters by flags and identities,
    without reading values.

    `trained` maps each model with an optimizer to the names of its trained parameters, and
    `without_rate` to those that settings freeze; `rebuild` rebuilds a model's optimizer for other
    names. `joins_in_step` (False with several processes) allows new trained parameters inside a
    step. `sharded` is True if parameters are sharded.
    """

    models: dict[str, nn.Module] = field(default_factory=dict)
    trained: dict[str, set[str]] = field(default_factory=dict)
    without_rate: dict[str, set[str]] = field(default_factory=dict)
    rebuild: Callable[[str, set[str]], None] = lambda model, trained: None  # noqa: ARG005
    joins_in_step: bool = True
    sharded: bool = False

    def __post_init__(self) -> None:
        self._look()

    def follow(self, *, in_step: bool = False) -> None:
        """Train all parameters with `requires_grad`; raise `ConfigError` for parameters that cannot
        be trained.

        Without changes, a call takes 5 us with 24 parameters and 70 us with 144 parameters (one
        core). Inside a step, these calls take 2 us and 9 us.
        """
        if tuple(map(_requires_grad, self._every)) != self.flags or (
            not in_step and self._replaced()
        ):
            self._follow(in_step=in_step)

    def state(self) -> dict[str, list[str]]:
        """Return the frozen parameters, and those without an optimizer, for a checkpoint."""
        frozen = [
            name for name, parameter in self.parameters.items() if not parameter.requires_grad
        ]
        return {
            "frozen": frozen,
            "in_no_optimizer": [self._full(model, name) for model, name, _ in self._outside],
        }

    def after_change(self, state: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """Return the state of a checkpoint after settings freeze other parameters. What they do not
        name stays as it was, such as what user code has frozen.
        """
        outside_now = {self._full(model, name) for model, name, _ in self._outside}
        unfrozen = set(state["in_no_optimizer"]) - outside_now
        by_settings = set()
        for model, names in self.without_rate.items():
            by_settings |= {self._full(model, name) for name in names}
        changed = {}
        for key, names_before in state.items():
            names = set(names_before) - unfrozen | by_settings
            changed[key] = [name for name in self.parameters if name in names]
        return changed

    def trained_in(self, state: Mapping[str, list[str]]) -> dict[str, set[str]]:
        """Return the names of the parameters that each optimizer of a checkpoint trains."""
        outside = set(state["in_no_optimizer"])
        trained: dict[str, set[str]] = {model: set() for model in self.trained}
        for model, name, _ in self._named():
            if model in trained and self._full(model, name) not in outside:
                trained[model].add(name)
        return trained

    def load_state(self, state: Mapping[str, list[str]], *, where: str) -> None:
        """Restore `requires_grad` from a checkpoint, and rebuild optimizers that had other
        parameters.
        """
        now = self.state()
        frozen = set(state["frozen"])
        outside = set(state["in_no_optimizer"])
        if self.sharded and state != now:
            other_frozen = frozen ^ set(now["frozen"])
            other_outside = outside ^ set(now["in_no_optimizer"])
            other = sorted(other_frozen | other_outside)
            raise CheckpointError(
                "checkpoint-of-other-frozen-parameters",
                problem=f"it has other frozen parameters ({first_and_last(other)})",
                reason=_SHARDED_ONCE,
                remedy=["set requires_grad as it was before Run(...)", Setting("parallel", "ddp")],
                names=other,
            ).inside(f"cannot resume {where}")
        if not self.sharded:
            for name, parameter in self.parameters.items():
                parameter.requires_grad_(name not in frozen)
        self._retrain(self.trained_in(state))
        self._look()

    def changes(self, before: tuple[bool, ...]) -> list[str]:
        """Return descriptions of the parameters whose flags differ from `before`."""
        unfrozen = []
        frozen = []
        for name, was, flag in zip(self.parameters, before, self.flags, strict=True):
            if flag and not was:
                unfrozen.append(name)
            elif was and not flag:
                frozen.append(name)
        descriptions = []
        if unfrozen:
            descriptions.append(f"{_counted(unfrozen)} unfrozen: {first_and_last(unfrozen)}")
        if frozen:
            descriptions.append(f"{_counted(frozen)} frozen: {first_and_last(frozen)}")
        return descriptions

    def _look(self) -> None:
        """Remember the modules and parameters of the models, and which of them are trained."""
        dictionaries: list[Any] = [self.models]
        for model in self.models.values():
            for module in model.modules():
                dictionaries += [module._parameters, module._modules]
        self._owners: list[Any] = []
        self._empty: list[Any] = []
        for dictionary in dictionaries:
            if dictionary:
                self._owners.append(dictionary)
            else:
                self._empty.append(dictionary)
        # the objects themselves too, so that no other object gets one of their ids
        self._objects = [*chain.from_iterable(map(dict.values, self._owners))]
        self._ids = [*map(id, self._objects)]
        self._outside: list[tuple[str, str, nn.Parameter]] = []
        self.parameters: dict[str, nn.Parameter] = {}
        for model_name, name, parameter in self._named():
            self.parameters[self._full(model_name, name)] = parameter
            if name not in self.trained.get(model_name, ()):
                self._outside.append((model_name, name, parameter))
        self._every = list(self.parameters.values())
        self._take_flags()

    def _take_flags(self) -> None:
        self.flags = tuple(map(_requires_grad, self._every))
        self.fingerprint = crc32(bytes(self.flags))  # equal on all ranks with equal flags

    def _replaced(self) -> bool:
        if self.sharded:
            return False  # FSDP replaces parameters in every forward pass
        now = [*map(id, chain.from_iterable(map(dict.values, self._owners)))]
        return now != self._ids or any(self._empty)

    def _follow(self, *, in_step: bool) -> None:
        if self.sharded and in_step:
            return
        before = dict(zip(self.parameters, self.flags, strict=True))
        changed = [
            name
            for name, parameter in self.parameters.items()
            if parameter.requires_grad is not before[name]
        ]
        if self.sharded:  # flags that still differ after the step
            raise ConfigError(
                "frozen-under-fsdp",
                problem=f"requires_grad of {_counted(changed)} has changed"
                f" ({first_and_last(changed)})",
                reason=_SHARDED_ONCE,
                remedy=[
                    "set requires_grad before Run(...)",
                    "change what the settings freeze: run.change('optimizer.frozen', [...])",
                    Setting("parallel", "ddp"),
                ],
                names=changed,
            )
        is_replaced = self._replaced()
        if is_replaced:
            self._refuse_other_parameters()
        # parameters outside of the optimizers that are now trainable
        joining = []
        thawed = []  # their model has no optimizer
        for model, name, parameter in self._outside:
            if not parameter.requires_grad:
                continue
            if model in self.trained:
                joining.append((model, name))
            elif before.get(self._full(model, name)) is False:
                # parameters that were never frozen are allowed
                thawed.append(self._full(model, name))
        if in_step and not self.joins_in_step and (joining or len(self.models) == 1):
            # DDP of a single model waits for all previously trained parameters
            raise ConfigError(
                "unfrozen-inside-step",
                problem=f"requires_grad of {_counted(changed)} changed inside a step, before its"
                f" gradients ({first_and_last(changed)})",
                reason="the other processes wait for gradients of the parameters that were"
                " trainable when the step began",
                remedy="change it after update(step), at the end of the loop's body: it applies"
                " from the next step on",
                names=changed,
            )
        if thawed:
            model_name = thawed[0].partition(".")[0]
            raise ConfigError(
                "unfrozen-without-optimizer",
                problem=f"requires_grad of {_counted(thawed)} is now True, but their model has no"
                f" optimizer ({first_and_last(thawed)})",
                reason="they would get gradients but no updates",
                remedy=f"give it one: Run(optimizer={{..., {model_name!r}: sf.optim.adamw(...)}}),"
                " or keep it frozen",
                names=thawed,
            )
        trained = {model: set(names) for model, names in self.trained.items()}
        for model, name in joining:
            trained[model].add(name)
        self._retrain(trained)
        if is_replaced or joining:
            self._look()
        else:
            self._take_flags()

    def _retrain(self, trained: dict[str, set[str]]) -> None:
        for model, names in trained.items():
            if names != self.trained[model]:
                self.rebuild(model, names)
                self.trained[model] = names

    def _refuse_other_parameters(self) -> None:
        then = self.parameters
        now = {self._full(model, name): parameter for model, name, parameter in self._named()}
        all_names = dict.fromkeys([*then, *now])
        other = [name for name in all_names if then.get(name) is not now.get(name)]
        if other:
            if other[0] not in now:
                how = "is missing"
            elif other[0] not in then:
                how = "is new"
            else:
                how = "is now another tensor"
            raise ConfigError(
                "parameters-replaced",
                problem=f"{_counted(other)} of the model changed during the run: {other[0]} {how}",
                reason="the optimizer and later checkpoints would miss the change",
                remedy=[
                    "change the model before Run(...)",
                    "to set new values: parameter.copy_(...) under torch.no_grad(), or"
                    " load_state_dict",
                ],
                names=other,
                found=how,
            )

    def _named(self) -> list[tuple[str, str, nn.Parameter]]:
        """Return the name of the model, the name in the model, and each parameter."""
        named = []
        for model_name, model in self.models.items():
            for name, parameter in model.named_parameters():
                named.append((model_name, name, parameter))
        return named

    def _full(self, model: str, name: str) -> str:
        return name if list(self.models) == ["model"] else f"{model}.{name}"


def _counted(names: list[str]) -> str:
    return "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
