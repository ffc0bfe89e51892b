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
    bad_before: Tensor = field(
        default_factory=lambda: torch.zeros(())
    )  # consecutive bad steps before this one

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
    name = next(each.skip.name for each in trained if each.takes_closure)
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
    trained, state, (loss, *_, is_first) = skip.trained, step.state, step._pending
    if not is_first:
        raise ConfigError(
            "closure-of-several-losses",
            problem=f"{skip.name} evaluates the loss again, but this step called forward_backward"
            " more than once before update",
            reason="the closure would repeat only the last call",
            remedy="add the losses in one function, and call forward_backward(step, it)",
            step=step.index,
        )
    if isinstance(optimizer, LBFGS) and not all(
        parameter.requires_grad for parameter in trained.parameters
    ):
        raise lbfgs_of_other_parameters()
    own = set(trained.parameters)
    others = [(each, each.grad) for each in state.parameters if each not in own]
    before = _Copies(optimizer, trained.parameters)
    # the first call may repeat the step's own evaluation, unless another optimizer has changed its
    # model since
    first = (
        None
        if others
        else [None if each.grad is None else each.grad.clone() for each in trained.parameters]
    )
    last = loss

    def closure() -> Tensor:
        nonlocal first, last
        copies, first = first, None
        if copies is not None and before.are_current():
            for parameter, gradient in zip(trained.parameters, copies, strict=True):
                parameter.grad = gradient
            return loss  # type: ignore[no-any-return]
        clear(state.parameters)
        with torch.enable_grad():
            again, factor = skip.evaluate(step)
        trained.evaluations += 1
        gradients = present(trained.parameters)
        norm = gradient_norm(
            step._task.ranks.norm_inputs(trained.parameters, gradients), factor=factor
        )
        last = again + norm
        trained.clipping.apply(
            gradients, factor=factor, norm=norm, skipped=torch.zeros_like(found_inf)
        )
        return again

    try:
        with state.buffers.repeated():
            optimizer.step(closure)
        is_good = before.all_finite(last)
    except BaseException:
        before.put_back()
        raise
    for parameter, gradient in others:
        parameter.grad = gradient
    if not is_good:
        before.put_back()
    return is_good


class _Copies:
    """Copies of an optimizer's parameters, state, and numbers, with those of its inner
    optimizers.
    """

    def __init__(self, optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
        self.parameters = [(each, each.detach().clone()) for each in parameters]
        self.optimizers = [
            (
                each,
                _copied(dict(each.state)),
                [_copied(_without_parameters(group)) for group in each.param_groups],
            )
            for each in (optimizer, *inner_optimizers(optimizer).values())
        ]
        plain = (bool, int, float, str, type(None))
        self.numbers = {
            name: each for name, each in vars(optimizer).items() if isinstance(each, plain)
        }

    def are_current(self) -> bool:
        return all(torch.equal(parameter, copy) for parameter, copy in self.parameters)

    def all_finite(self, last: Tensor) -> bool:
        parameters = [parameter for parameter, _ in self.parameters]
        states = state_tensors(self.optimizers[0][0])
        return all(
            bool(torch.isfinite(tensor.detach()).all()) for tensor in [last, *parameters, *states]
        )

    @torch.no_grad()
    def put_back(self) -> None:
        for parameter, copy in self.parameters:
            parameter.copy_(copy)
        for optimizer, state, groups in self.optimizers:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, numbers in zip(optimizer.param_groups, groups, strict=True):
                for key in _without_parameters(group):
                    del group[key]
                group.update(numbers)
        vars(self.optimizers[0][0]).update(self.numbers)


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in group.items() if key != "params"}


def _copied(nested: Any) -> Any:
    if isinstance(nested, Tensor):
        return nested.detach().clone()
    if isinstance(nested, dict):
        return {key: _copied(each) for key, each in nested.items()}
    return type(nested)(map(_copied, nested)) if type(nested) in (list, tuple) else nested
