"""What a run has given up where its settings changed: user code may still hold these models, their
parameters and optimizers, and their use would be in vain.
"""

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn

from surefoot.errors import ConfigError
from surefoot.train.loop import State


def free(state: State) -> None:
    """Free the memory of optimizers and averages before the run is built again."""
    for trained in state.optimizers.values():
        trained.optimizer.state.clear()
    state.ema_models.clear()


def retire(before: State, *, present: State) -> None:
    """Let a later use of models, parameters and optimizers raise `ConfigError`, but not of those
    that the run still has. Sharded parameters are not among them.
    """
    of_run: set[nn.Module | nn.Parameter] = set()
    for model in present.models.values():
        of_run.update(model.modules(), model.parameters())
    for model in before.models.values():
        for module in model.modules():
            if module not in of_run:
                module.register_forward_pre_hook(_refuse_call)
        for parameter in model.parameters():
            if parameter not in of_run and type(parameter) is nn.Parameter:
                parameter.__class__ = _RefusedParameter
    of_present = [trained.optimizer for trained in present.optimizers.values()]
    for trained in before.optimizers.values():
        if not any(trained.optimizer is other for other in of_present):
            trained.optimizer.param_groups = _RefusedGroups()


def follow_optimizers(registered: Iterable[Any], before: State, *, present: State) -> None:
    """Let registered schedulers write the rates of the optimizers that the run has now."""
    for scheduler in registered:
        for name, trained in before.optimizers.items():
            if getattr(scheduler, "optimizer", None) is trained.optimizer:
                scheduler.optimizer = present.optimizers[name].optimizer


def _refuse_call(model: nn.Module, inputs: Any) -> NoReturn:  # noqa: ARG001  of the hook
    raise _of_earlier_model(type(model).__name__)


class _RefusedParameter(nn.Parameter):
    """A parameter that nobody may read or write."""

    @classmethod
    def __torch_function__(cls, *_arguments: Any, **_keywords: Any) -> NoReturn:
        raise _of_earlier_model("Parameter")


def _of_earlier_model(kind: str) -> ConfigError:
    return ConfigError(
        "model-of-earlier-settings",
        problem=f"this {kind} is of the model of before a change of settings",
        reason="the run was built again, and trains another object",
        remedy="take the model from run.state or step.state where you use it",
        model=kind,
    )


class _RefusedGroups(list[Any]):
    """Parameter groups that nobody may read or write, such as a scheduler of the user."""

    def __iter__(self) -> NoReturn:
        raise _refused_groups()

    def __getitem__(self, index: Any) -> NoReturn:
        raise _refused_groups()


def _refused_groups() -> ConfigError:
    return ConfigError(
        "optimizer-of-earlier-settings",
        problem="this is the optimizer of before a change of settings",
        reason="the run was built again, and a rate that is written here would have no effect",
        remedy="take the optimizer from run.state or step.state where you use it",
    )
