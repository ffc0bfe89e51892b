"""Output norms of modules in one step, and the fraction of saturated activations.

Forward hooks are registered only while the loss runs, so recomputation in the backward pass is not
counted. The hooks do not wait for the device, draw random numbers or add to the autograd graph.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.distributed.blocks import blocks_of

_STEEP = 0.01  # an activation is saturated if the magnitude of its derivative is smaller
_COMPILED = (
    "OptimizedModule",
    "ScriptModule",
    "RecursiveScriptModule",
    "TopLevelTracedModule",
)  # by name


@dataclass
class ModuleActivity:
    """Device tensors of one module in one step, with one list entry per call of the module."""

    norms: list[Tensor] = field(default_factory=list)
    # counts of saturated elements, if it is an activation
    flat: list[Tensor] = field(default_factory=list)
    numbers: int = 0


@dataclass
class Activity:
    """Context manager that records the outputs of the modules that are in training mode."""

    modules: Mapping[str, nn.Module]
    by_module: dict[str, ModuleActivity] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)

    def __enter__(self) -> None:
        # a hook may keep a module in evaluation mode from its fast path, which has other bits
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
            or torch._C._current_graph_task_id() != -1  # recomputation in the backward pass
            # inside torch.func, which no tensor may leave
            or torch._C._functorch.maybe_current_level() is not None
        ):
            return
        values = output[0] if isinstance(output, list | tuple) and output else output
        if type(values) is not Tensor or not values.is_floating_point() or not values.numel():
            return
        values = values.detach()  # in a step, this takes less time than `torch.no_grad()`
        activity = self.by_module.get(name)
        if activity is None:
            activity = self.by_module[name] = ModuleActivity()
        if values.dtype == torch.float32:
            norm = torch.linalg.vector_norm(values)
        else:
            wide = torch.promote_types(values.dtype, torch.float32)
            norm = torch.linalg.vector_norm(values, dtype=wide)
        activity.norms.append(norm)
        activity.numbers += values.numel()
        saturated_elements = SATURATED.get(type(module))
        if saturated_elements is not None:
            is_tensor = inputs and type(inputs[0]) is Tensor
            saturated = saturated_elements(module, inputs[0] if is_tensor else None, values)
            if saturated is not None:
                activity.flat.append(torch.count_nonzero(saturated))


def observed(model: nn.Module) -> dict[str, nn.Module]:
    """Return the observed modules by name, in order: repeated blocks, and leaf modules except
    dropout and `nn.Identity`.

    Compiled and scripted modules, and all modules inside them, are left out. A model without
    submodules is named after its class.

    >>> list(observed(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Dropout()))))
    ['0', '1.0']
    """
    blocks = set(blocks_of(model).values())
    modules = {}
    for name, module in _uncompiled(model, ""):
        is_leaf = next(module.children(), None) is None
        # by name, for other libraries' dropout
        is_trivial = isinstance(module, nn.Identity) or "Dropout" in type(module).__name__
        if module in blocks or (is_leaf and not is_trivial):
            modules[name or type(module).__name__] = module
    return modules


def _uncompiled(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    visited: set[nn.Module] = set()
    queue = [(name, module)]
    while queue:
        name, submodule = queue.pop(0)
        is_compiled = any(kind.__name__ in _COMPILED for kind in type(submodule).__mro__)
        if submodule in visited or submodule._compiled_call_impl is not None or is_compiled:
            continue
        visited.add(submodule)
        yield name, submodule
        prefix = f"{name}." if name else ""
        queue[:0] = [(f"{prefix}{part}", child) for part, child in submodule.named_children()]


# --- saturated elements: those where the magnitude of the activation's derivative is below 1/100 --
# They are computed from the output if it determines the derivative: an activation in place has
# overwritten its input.


def _slope_below(
    slope: Callable[[Any, Tensor], Tensor],
) -> Callable[[Any, Tensor | None, Tensor], Tensor]:
    return lambda module, _, out: slope(module, out) < _STEEP


# GELU, SiLU, Mish and Hardswish are not monotonic: for inputs below `bound` the derivative is
# between -1/75 and 0.
def _far_below(bound: float) -> Callable[[Any, Tensor | None, Tensor], Tensor | None]:
    def below_bound(module: Any, x: Tensor | None, out: Tensor) -> Tensor | None:
        is_in_place = not isinstance(module, nn.GELU) and module.inplace
        if x is None or x is out or is_in_place:
            return None
        return x < bound

    return below_bound


# Klambauer et al. 2017, section 2
_SELU_ALPHA = 1.6732632423543772
_SELU_SCALE = 1.0507009873554805

SATURATED: dict[type, Callable[[Any, Tensor | None, Tensor], Tensor | None]] = {
    nn.ReLU: lambda _, __, out: torch.logical_not(out),  # never below 0
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
