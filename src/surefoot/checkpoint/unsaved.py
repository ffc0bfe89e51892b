"""State of models, losses and optimizers that no checkpoint holds: detection, comparison and
restoration.

A killed process loses nonpersistent buffers, attributes, closure variables, globals of functions,
and generators. Objects of installed packages are visited only if they are modules, optimizers or
the loss. No tensor is read on the host.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.checkpoint.nested_state import (
    Counted,
    NotPutBackError,
    generator_state,
    reset,
    reset_tensor,
    same,
)
from surefoot.checkpoint.optimizer_state import group_numbers
from surefoot.distributed.shards import held_of, plain_tensors
from surefoot.errors import first_line
from surefoot.metrics.contract import torchmetrics_in
from surefoot.optim.kinds.kind import inner_optimizers

_PLAIN = (bool, int, float, complex, str, bytes, np.generic)
_MAX_ENTRIES, _MAX_OBJECTS = 10_000, 100_000  # of a longer container only the length is compared
# copied bytes of unsaved tensors; other tensors are compared by version counters, and not restored
_MAX_BYTES = 1 << 28
_OF_MODULES = {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_OF_OPTIMIZERS = {"state", "param_groups", "defaults", "params", "lr", "initial_lr"}
_PROTOCOLS = {
    nn.Module: ("get_extra_state", "state_dict", "_save_to_state_dict"),
    Optimizer: ("state_dict", "load_state_dict"),
}


class Observation:
    """A snapshot of a run's models, loss and optimizers; with `with_weights`, also of weights and
    persistent buffers.

    Each object is visited once, under its first name. `user_state` maps names to the objects of
    `run.register_state`. Tensors are copied on their device, or to the host if `with_weights`.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        loss: Any,
        optimizers: Mapping[str, Optimizer] | None = None,
        *,
        user_state: Mapping[str, Any],
        with_weights: bool = False,
    ) -> None:
        self.values: dict[str, Any] = {}  # unsaved values by user-visible name
        self.undo: list[
            tuple[bool, Callable[[], None]]
        ] = []  # (saved in a checkpoint?, undo function)
        self.visited: dict[int, Any] = {}  # keeps the objects alive, so that ids stay unique
        self.copied_bytes = 0  # of unsaved tensors
        self.with_weights, of_user = (
            with_weights,
            [each for each in user_state.values() if isinstance(each, nn.Module)],
        )
        self.saved_modules = {
            id(module) for each in [*models.values(), *of_user] for module in each.modules()
        }
        # not visited through an object of `run.register_state`, which may refer to the complete run
        self.later = self.saved_modules | {
            id(optimizer) for optimizer in (optimizers or {}).values()
        }
        metrics = {
            name: torchmetrics_in(each) for name, each in user_state.items()
        }  # their state is always saved
        self.later -= {id(metric) for of_object in metrics.values() for metric in of_object}
        for module in (
            ()
            if with_weights
            else (module for model in models.values() for module in model.modules())
        ):
            tensors = (module._parameters | module._buffers).items()
            self.visited |= {
                id(each): each
                for name, each in tensors
                if name not in module._non_persistent_buffers_set
            }
        for name, each in user_state.items():  # first, so that other references find them visited
            for part in [each, *metrics[name]]:
                self.visit(name, part, True, is_root=True)
        for name, each in [*models.items(), ("loss", loss)]:
            self.visit(name, each, is_root=True)
        for name, optimizer in (optimizers or {}).items():
            self._optimizer(
                "optimizer" if list(models) == ["model"] else f"optimizer[{name!r}]", optimizer
            )
        for name, each in user_state.items():  # modules, whose state_dict is saved
            self.visit(name, each)

    @torch.no_grad()
    def put_back(self, *, only_saved: bool = False) -> None:
        """Restore all visited state, or only saved state if `only_saved`; raise `NotPutBackError`
        if a restoration failed.
        """
        problems = []
        for is_saved, undo in self.undo:
            if is_saved or not only_saved:
                try:
                    undo()
                except Exception as problem:
                    problems.append(f"{type(problem).__name__}: {first_line(problem)}")
        if problems:
            raise NotPutBackError(
                f"the test pass before the first step changed state that cannot be restored ({problems[0]})\n"
                "  the run would begin with a state other than its own\n"
                "  let the model and the loss change only plain attributes, dicts, lists and tensors"
            )

    def visit(
        self, path: str, thing: Any, is_saved: bool = False, *, is_root: bool = False
    ) -> None:
        """Record an object and all objects that are reachable from this object."""
        if thing is None or isinstance(thing, _PLAIN):
            self._note(path, thing, is_saved)
        elif not (
            id(thing) in self.visited
            or (is_saved and id(thing) in self.later)
            or len(self.visited) > _MAX_OBJECTS
        ):
            self.visited[id(thing)] = thing
            with suppress(Exception):
                self._enter(path, thing, is_saved, is_root)

    def _enter(self, path: str, thing: Any, is_saved: bool, is_root: bool) -> None:
        match thing:
            case Tensor():
                self._tensor(path, thing, is_saved)
            case np.ndarray() if (
                thing.dtype.kind in "biuf" and thing.dtype.itemsize <= 8 and thing.flags.writeable
            ):
                self.visit(path, torch.from_numpy(thing), is_saved)
            case random.SystemRandom() | type():
                pass
            case (
                torch.Generator()
                | random.Random()
                | np.random.Generator()
                | np.random.RandomState()
            ):
                state, set_state = generator_state(thing)
                self._note(
                    path,
                    state if isinstance(state, Tensor) else repr(state),
                    is_saved,
                    set_state,
                    state,
                )
            case dict() | list() | tuple() | deque() | set():
                self._container(path, thing, is_saved)
            case partial():
                self.visit(path, thing.func, is_saved, is_root=is_root)
                self.visit(f"{path}.args", thing.args, is_saved)
                self._attributes(path, thing.keywords, is_saved)
            case MethodType():
                self.visit(path, thing.__self__, is_saved, is_root=is_root)
                self.visit(path, thing.__func__, is_saved)
            case FunctionType():
                self._function(path, thing, is_saved)
            case nn.Module() if not isinstance(thing, torch.jit.ScriptModule):
                self._module(path, thing, is_saved)
            case _ if is_root or isinstance(thing, Optimizer) or _is_own(type(thing).__module__):
                if "__dict__" in dir(thing):
                    self._attributes(path, vars(thing), is_saved)
                self._slots(path, thing, is_saved)

    def _note(
        self,
        path: str,
        value: Any,
        is_saved: bool,
        undo: Callable[..., None] | None = None,
        *to: Any,
    ) -> None:
        if not is_saved and path:
            self.values[path] = value
        if undo is not None:
            self.undo.append((is_saved, partial(undo, *to)))

    def _tensor(self, path: str, tensor: Tensor, is_saved: bool) -> None:
        if (
            tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.is_meta
            or tensor.is_inference()
        ):
            return
        local = held_of(tensor)[0].detach()
        if (parts := plain_tensors(path, local)).keys() != {
            path
        }:  # a quantized tensor, for example
            for name, part in parts.items():
                self.visit(name, part, is_saved)
        elif not is_saved and self.copied_bytes + local.nbytes > _MAX_BYTES:
            self._note(path, Counted(tuple(local.shape), tensor._version), is_saved)
        else:
            self.copied_bytes += 0 if is_saved else local.nbytes
            numbers = local.to("cpu", copy=True) if self.with_weights else local.clone()
            self._note(path, numbers, is_saved, reset_tensor, tensor, local, numbers)
            if tensor.is_leaf and tensor.requires_grad:
                self._note("", None, True, setattr, tensor, "grad", tensor.grad)
                self.visit("", tensor.grad, True)

    def _container(self, path: str, thing: Any, is_saved: bool) -> None:
        before = thing if isinstance(thing, tuple) else thing.copy()
        undo = () if isinstance(thing, tuple) else (reset, thing, before)
        self._note(path, (type(thing).__name__, len(before)), is_saved, *undo)
        entries = before.items() if isinstance(before, dict) else enumerate(before)
        for index, (key, entry) in enumerate(entries if len(before) <= _MAX_ENTRIES else ()):
            key_text = repr(key) if isinstance(key, str | int) else f"{type(key).__name__} {index}"
            self.visit(path if path.endswith("_hooks") else f"{path}[{key_text}]", entry, is_saved)

    def _attributes(self, path: str, attributes: dict[str, Any], is_saved: bool = False) -> None:
        before = attributes.copy()
        self._note("", None, is_saved, reset, attributes, before)
        for name, attribute in before.items():
            self.visit(f"{path}.{name}", attribute, is_saved)

    def _slots(self, path: str, thing: Any, is_saved: bool) -> None:
        for owner in type(thing).__mro__:
            names = vars(owner).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                slot = vars(owner).get(name)  # a private name is mangled and not found
                if isinstance(slot, MemberDescriptorType) and hasattr(thing, name):
                    attribute = slot.__get__(thing)
                    self._note("", None, is_saved, slot.__set__, thing, attribute)
                    self.visit(f"{path}.{name}", attribute, is_saved)

    def _module(self, path: str, module: nn.Module, is_saved: bool) -> None:
        is_known = id(module) in self.saved_modules
        # a module with its own save methods decides which attributes are saved; but a metric's
        # methods omit its values
        says_itself = _overrides(module, nn.Module) and module not in torchmetrics_in(module)
        all_saved = is_saved or (is_known and (says_itself or bool(module._state_dict_hooks)))
        for entries in (vars(module), module._parameters, module._buffers, module._modules):
            self._note("", None, all_saved, reset, entries, entries.copy())
        self._attributes(
            path, {k: v for k, v in vars(module).items() if k not in _OF_MODULES}, all_saved
        )
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                is_persistent = is_known and name not in module._non_persistent_buffers_set
                if is_persistent:  # a forward pass may replace the tensor
                    self._note("", None, True, slots.__setitem__, name, tensor)
                self.visit(f"{path}.{name}", tensor, all_saved or is_persistent)
        for name, child in module._modules.items():
            self.visit(f"{path}.{name}", child, is_saved)

    def _function(self, path: str, function: FunctionType, is_saved: bool) -> None:
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if cell != CellType():  # the cell is assigned
                self._note("", None, is_saved, setattr, cell, "cell_contents", cell.cell_contents)
                self.visit(f"{path}.{name}", cell.cell_contents, is_saved)
        self.visit(f"{path}.__defaults__", function.__defaults__, is_saved)
        self._attributes(path, function.__kwdefaults__ or {}, is_saved)
        self._attributes(path, vars(function), is_saved)
        variables, module = function.__globals__, str(function.__globals__.get("__name__"))
        for name in function.__code__.co_names if _is_own(module) else ():
            if name in variables and not isinstance(variables[name], ModuleType | type):
                self._note("", None, is_saved, variables.__setitem__, name, variables[name])
                self.visit(f"{module}.{name}", variables[name], is_saved)

    def _optimizer(self, path: str, optimizer: Optimizer) -> None:
        self.visited |= {id(optimizer): optimizer, id(optimizer.state): optimizer.state}
        for name, inner in inner_optimizers(optimizer).items():  # its state is saved too
            self._optimizer(f"{path}.{name}", inner)
        for index, (group, saved) in enumerate(
            zip(optimizer.param_groups, group_numbers(optimizer), strict=True)
        ):
            rest = {
                name: each
                for name, each in group.items()
                if name not in _OF_OPTIMIZERS | saved.keys()
            }
            self._attributes(f"{path}.param_groups[{index}]", rest)
        # an optimizer with its own save methods decides what is saved
        all_saved = _overrides(optimizer, Optimizer) or bool(
            optimizer._optimizer_state_dict_post_hooks
        )
        own = _is_own(
            type(optimizer).__module__
        )  # other attributes of torch's and surefoot's are no state
        names = [
            name
            for name in vars(optimizer)
            if name not in _OF_OPTIMIZERS and (own or name.endswith("_hooks"))
        ]
        self._attributes(path, {name: vars(optimizer)[name] for name in names}, all_saved)


def changes(before: Observation, after: Observation, *, exact: bool) -> list[str]:
    """Return the outermost names of the values that differ. Unless `exact`, floats may differ by
    rounding.
    """
    names = before.values.keys() & after.values.keys()
    differ = sorted(
        name for name in names if not same(before.values[name], after.values[name], exact=exact)
    )
    return [
        name
        for name in differ
        if not any(name.startswith((f"{each}.", f"{each}[")) for each in differ)
    ]


@cache
def _is_own(module: str) -> bool:
    file = vars(sys.modules[module]).get("__file__") if module in sys.modules else None
    installed = file is not None and {"site-packages", "dist-packages"}.intersection(
        Path(file).parts
    )
    return not installed and module.partition(".")[0] not in {
        *sys.stdlib_module_names,
        "torch",
        "surefoot",
    }


def _overrides(thing: object, base: type[nn.Module | Optimizer]) -> bool:
    return any(getattr(type(thing), name) is not getattr(base, name) for name in _PROTOCOLS[base])
