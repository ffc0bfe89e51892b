"""The step of an optimizer that evaluates the loss through a closure, such as torch's LBFGS or SAM.

`forward_backward` evaluates the loss and gradient of a step, as for every optimizer.
`optimizer.step(closure)` may evaluate them again at other weights, with the same samples and seeds.
Such an optimizer decides on the host, so its step waits for the device.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from surefoot.errors import ConfigError, Remedy, Setting
from surefoot.optim.clipping import Clip, clear, gradient_norm, present
from surefoot.optim.kinds.kind import inner_optimizers, state_tensors

# evaluates a training step again: returns its mean loss, and the factor that its gradients still
# need
Evaluate = Callable[[Any], tuple[Tensor, Tensor | float]]


@dataclass
class ClosureStep:
    """A skip method for an optimizer with a closure; `trained` is the `RunOptimizer` that uses it.

    A step with a bad loss or gradient is not taken. A step is undone from copies, and counts as a
    bad step, if its last evaluation, its parameters or its state are not finite. A line search may
    meet such numbers on its way. `evaluate` repeats the evaluation of a training step.
    """

    name: str
    copied_bytes: int
    evaluate: Evaluate
    trained: Any = None
    # consecutive bad steps before this one
    bad_before: Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def description(self) -> str:
        return (
            f"by restoring copies of {self.name}'s parameters and state, taken before each step"
            f" (+{self.copied_bytes:,} bytes for parameters and gradients, plus the size of the state);"
            " a step evaluates the loss several times"
        )

    def gradients(self) -> list[Tensor]:
        """Return the gradients, and note the number of bad steps, which a good gradient resets."""
        self.bad_before = self.trained.bad_in_a_row.clone()
        return present(self.trained.parameters)

    def apply(self, optimizer: Any, found_inf: Tensor, step: Any = None) -> None:
        if not step_with_closure(self, optimizer, found_inf, step):
            found_inf.fill_(1.0)
            self.trained.bad_in_a_row.copy_(self.bad_before + 1)


def refuse_clip(name: str, clip: Clip) -> None:
    """Raise `ConfigError` for a clip that needs one norm per step."""
    if clip[0] == "auto":
        why = "a quantile of past norms needs one norm per step"
        value = f"auto {clip[1]:g}"
        raise _misfit(name, "clip", value, why, [Setting("clip", "norm 1.0")])


def refuse_closures(trained: Iterable[Any], *, scaled: bool, compiled: bool) -> None:
    """Raise `ConfigError` for an optimizer with a closure in a run with a loss scale or with
    compiled models.
    """
    name = next(optimizer.skip.name for optimizer in trained if optimizer.takes_closure)
    if scaled:
        why = "its loss scale is decided once per step"
        remedies: list[Remedy] = [Setting("precision", "bf16"), Setting("precision", "fp32")]
        raise _misfit(name, "precision", "fp16", why, remedies)
    if compiled:
        why = (
            "compiled passes are not known to repeat their bits outside of a step's own evaluation"
        )
        raise _misfit(name, "compile", True, why, [Setting("compile", False)])


def _misfit(name: str, setting: str, value: Any, why: str, remedies: list[Remedy]) -> ConfigError:
    return ConfigError(
        "setting-with-closure",
        problem=f"{setting} = {value!r}: {name} evaluates the loss several times in a step, through"
        " a closure",
        reason=why,
        remedy=remedies,
        setting=setting,
        value=value,
        optimizer=name,
    )


def lbfgs_of_other_parameters() -> ConfigError:
    """Return the refusal of parameters that begin or cease to be trained by LBFGS."""
    return ConfigError(
        "lbfgs-of-other-parameters",
        problem="LBFGS cannot train parameters that are frozen or unfrozen during training",
        reason="its state and its steps are vectors over all parameters",
        remedy="set requires_grad before Run(...), or use another optimizer, such as"
        " sf.optim.adamw(...)",
        setting="optimizer",
    )


def step_with_closure(skip: ClosureStep, optimizer: Any, found_inf: Tensor, step: Any) -> bool:
    """Call `optimizer.step(closure)` unless `found_inf` is 1; return False if the step had to be
    undone. Waits for the device.
    """
    if bool(found_inf):
        return True
    trained = skip.trained
    state = step.state
    loss, *_, is_first = step._pending
    if not is_first:
        raise ConfigError(
            "closure-of-several-losses",
            problem=f"{skip.name} evaluates the loss again, but this step called forward_backward"
            " more than once before update",
            reason="the closure would repeat only the last call",
            remedy="add the losses in one function, and call forward_backward(step, it)",
            step=step.index,
        )
    if isinstance(optimizer, LBFGS):
        is_complete = all(parameter.requires_grad for parameter in trained.parameters)
        if not is_complete:
            raise lbfgs_of_other_parameters()
    updated = set(trained.parameters)
    other_gradients = [
        (parameter, parameter.grad) for parameter in state.parameters if parameter not in updated
    ]
    before = _Copies(optimizer, trained.parameters)
    # the first call may repeat the step's own evaluation, unless another optimizer has changed its
    # model since
    first_gradients = None
    if not other_gradients:
        first_gradients = [_copied(parameter.grad) for parameter in trained.parameters]
    last_sum = loss  # of loss and norm; finite only if both are

    def closure() -> Tensor:
        nonlocal first_gradients, last_sum
        copies = first_gradients
        first_gradients = None
        if copies is not None and before.are_current():
            for parameter, gradient in zip(trained.parameters, copies, strict=True):
                parameter.grad = gradient
            return loss  # type: ignore[no-any-return]
        clear(state.parameters)
        with torch.enable_grad():
            repeated_loss, factor = skip.evaluate(step)
        trained.evaluations += 1
        gradients = present(trained.parameters)
        norm_inputs = step._task.ranks.norm_inputs(trained.parameters, gradients)
        norm = gradient_norm(norm_inputs, factor=factor)
        last_sum = repeated_loss + norm
        trained.clipping.apply(
            gradients, factor=factor, norm=norm, skipped=torch.zeros_like(found_inf)
        )
        return repeated_loss

    try:
        with state.buffers.repeated():
            optimizer.step(closure)
        is_good = before.all_finite(last_sum)
    except BaseException:
        before.put_back()
        raise
    for parameter, gradient in other_gradients:
        parameter.grad = gradient
    if not is_good:
        before.put_back()
    return is_good


class _Copies:
    """Copies of an optimizer's parameters, state, and plain attributes, with the state of its inner
    optimizers.
    """

    def __init__(self, optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.parameters = [(parameter, parameter.detach().clone()) for parameter in parameters]
        self.states: list[tuple[Optimizer, Any, list[Any]]] = []  # also the settings of groups
        for copied in (optimizer, *inner_optimizers(optimizer).values()):
            settings = [_copied(_without_parameters(group)) for group in copied.param_groups]
            self.states.append((copied, _copied(dict(copied.state)), settings))
        plain = (bool, int, float, str, type(None))
        self.attributes = {
            name: value for name, value in vars(optimizer).items() if isinstance(value, plain)
        }

    def are_current(self) -> bool:
        return all(torch.equal(parameter, copy) for parameter, copy in self.parameters)

    def all_finite(self, last_sum: Tensor) -> bool:
        """Return whether the last evaluation, the parameters and their state are finite now."""
        parameters = [parameter for parameter, _ in self.parameters]
        tensors = [last_sum, *parameters, *state_tensors(self.optimizer)]
        return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors)

    @torch.no_grad()
    def put_back(self) -> None:
        for parameter, copy in self.parameters:
            parameter.copy_(copy)
        for optimizer, state, settings_of_groups in self.states:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, settings in zip(optimizer.param_groups, settings_of_groups, strict=True):
                for key in _without_parameters(group):
                    del group[key]
                group.update(settings)
        vars(self.optimizer).update(self.attributes)


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _copied(nested: Any) -> Any:
    if isinstance(nested, Tensor):
        return nested.detach().clone()
    if isinstance(nested, dict):
        return {key: _copied(value) for key, value in nested.items()}
    if type(nested) in (list, tuple):
        return type(nested)(map(_copied, nested))
    return nested
