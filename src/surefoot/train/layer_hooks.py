"""What modules give out in the passes of one step: how large it is, and how much of it lies where an activation is flat.

By forward hooks that are there only while the loss is called, so nothing of it is counted twice where blocks are computed again
in the backward pass. Nothing here waits for the device, draws a random number, or hands autograd anything.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.distributed.blocks import blocks_of

_STEEP = 0.01  # where the magnitude of an activation's derivative is below this, it counts as flat
_COMPILED = ("OptimizedModule", "ScriptModule", "RecursiveScriptModule", "TopLevelTracedModule")  # each another's class


@dataclass
class ModuleActivity:
    """Of one module in one step: tensors on the device, one of each for every time that it was called."""

    norms: list[Tensor] = field(default_factory=list)
    flat: list[Tensor] = field(default_factory=list)  # numbers at the flat end; none where the module is no activation
    numbers: int = 0


@dataclass
class Activity:
    """Takes notice of modules (by name) as long as its block is entered, and only of those in training mode."""

    modules: Mapping[str, nn.Module]
    by_module: dict[str, ModuleActivity] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)

    def __enter__(self) -> None:
        # parts in evaluation mode may take a quicker way where they have no hooks, and other bits with it
        self.hooks = [
            module.register_forward_hook(partial(self._look, name))
            for name, module in self.modules.items()
            if module.training
        ]

    def __exit__(self, *_: object) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    def _look(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if (
            torch.compiler.is_compiling()
            or torch._C._current_graph_task_id() != -1  # it is computed again
            or torch._C._functorch.maybe_current_level() is not None  # inside of torch.func, which nothing must leave
        ):
            return
        values = output[0] if isinstance(output, list | tuple) and output else output
        if type(values) is not Tensor or not values.is_floating_point() or not values.numel():
            return
        with torch.no_grad():
            activity = self.by_module.setdefault(name, ModuleActivity())
            activity.norms.append(
                torch.linalg.vector_norm(values.detach(), dtype=torch.promote_types(values.dtype, torch.float32))
            )
            activity.numbers += values.numel()
            flat = FLAT_ENDS.get(type(module))
            first_input = inputs[0] if inputs and type(inputs[0]) is Tensor else None
            where = None if flat is None else flat(module, first_input, values.detach())
            if where is not None:
                activity.flat.append(torch.count_nonzero(where))


def observed(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are looked at: those without parts, but for dropout, and the model's repeated blocks. By name, in order.

    None inside of what is compiled or scripted. A model without parts is called by its class.

    >>> list(observed(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Dropout()))))
    ['0', '1.0']
    """
    blocks = set(blocks_of(model).values())
    return {
        name or type(module).__name__: module
        for name, module in _uncompiled(model, "")
        if module in blocks or (next(module.children(), None) is None and not isinstance(module, nn.Identity))
        if module in blocks or "Dropout" not in type(module).__name__  # whoever wrote it
    }


def _uncompiled(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """A module and all inside of it, each once, but for what is compiled."""
    visited: set[nn.Module] = set()
    queue = [(name, module)]
    while queue:
        name, submodule = queue.pop(0)
        is_compiled = any(kind.__name__ in _COMPILED for kind in type(submodule).__mro__)
        if submodule in visited or submodule._compiled_call_impl is not None or is_compiled:
            continue
        visited.add(submodule)
        yield name, submodule
        queue[:0] = [(f"{name}.{part}" if name else part, child) for part, child in submodule.named_children()]


# --- where activations are flat: for each class, which of the numbers that it gave lie there ------------------------
# Where the magnitude of the derivative is below 1/100, from what went in and what came out. What came out decides wherever it
# tells: in place, what went in is gone.


def _slope_below(slope: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor | None, Tensor], Tensor]:
    """By the derivative as a function of the output."""
    return lambda module, _, out: slope(module, out) < _STEEP


def _far_below(bound: float) -> Callable[[Any, Tensor | None, Tensor], Tensor | None]:
    """By the input, for what bends once more: from there on down the derivative is between -1/75 and 0."""
    return lambda module, x, out: (
        None if x is None or x is out or (not isinstance(module, nn.GELU) and module.inplace) else x < bound
    )


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805  # Klambauer et al. 2017, section 2

FLAT_ENDS: dict[type, Callable[[Any, Tensor | None, Tensor], Tensor | None]] = {
    nn.ReLU: lambda _, __, out: out <= 0,
    nn.ReLU6: lambda _, __, out: (out <= 0) | (out >= 6),
    nn.Hardtanh: lambda module, _, out: (out <= module.min_val) | (out >= module.max_val),
    nn.Hardsigmoid: lambda _, __, out: (out <= 0) | (out >= 1),
    nn.Sigmoid: _slope_below(lambda _, out: out * (1 - out)),
    nn.Tanh: _slope_below(lambda _, out: 1 - out * out),
    nn.Softsign: _slope_below(lambda _, out: (1 - out.abs()).square()),
    nn.Softplus: _slope_below(lambda module, out: -torch.expm1(-module.beta * out)),
    nn.LogSigmoid: _slope_below(lambda _, out: -torch.expm1(out)),
    nn.ELU: lambda module, _, out: (out < 0) & (out + module.alpha < _STEEP),
    nn.CELU: lambda module, _, out: (out < 0) & (out / module.alpha + 1 < _STEEP),
    nn.SELU: lambda _, __, out: (out < 0) & (out + _SELU_SCALE * _SELU_ALPHA < _STEEP),
    nn.GELU: _far_below(-3.0),
    nn.SiLU: _far_below(-6.0),
    nn.Mish: _far_below(-6.0),
    nn.Hardswish: _far_below(-3.0),
}
