"""A snapshot of everything that a pass or a user's code can change: compared, named and restored.

It holds weights, buffers, frozen parts, optimizers, generators, objects of `run.register_state`,
gradients, modes, and what a killed process loses: nonpersistent buffers, attributes, closure
variables, globals of functions. Objects of installed packages are visited only if they are modules,
optimizers or the loss. To compare, a tensor is hashed on its device and is not copied. No tensor is
read on the host before `changes`.
"""

import math
import random
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import (
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.checkpoint.fingerprint import (
    ROUNDING,
    Fingerprint,
    Sketch,
    equal_fingerprints,
    fingerprint,
    near_sketches,
    sketch,
)
from surefoot.checkpoint.optimizer_state import group_numbers
from surefoot.checkpoint.tensor_file import equal_bits
from surefoot.distributed.shards import extra_states, held_of, plain_tensors
from surefoot.errors import ConfigError, first_line
from surefoot.metrics.contract import torchmetrics_in
from surefoot.optim.kinds.kind import inner_optimizers
from surefoot.seeding import global_generators, untouched

Kind = Literal[
    "weight", "buffer", "gradient", "mode", "optimizer", "generator", "registered", "attribute"
]
_PLAIN = (bool, int, float, complex, str, bytes, np.generic)
_MAX_ENTRIES, _MAX_OBJECTS = 10_000, 100_000  # of a longer container only the length is compared
# a larger tensor that no checkpoint holds, such as a data set in a closure, is not hashed or copied
_MAX_UNSAVED_BYTES = 1 << 26
_OF_MODULES = {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_OF_OPTIMIZERS = {"state", "param_groups", "defaults", "params", "lr", "initial_lr"}
_PROTOCOLS = {
    nn.Module: ("get_extra_state", "state_dict", "_save_to_state_dict"),
    Optimizer: ("state_dict", "load_state_dict"),
}


class Place(NamedTuple):
    """Where a value was found: its name for the user, its kind, and whether a checkpoint holds it
    or a step makes it anew.
    """

    name: str
    kind: Kind
    is_saved: bool

    def attribute(self, name: str) -> "Place":
        return self._replace(name=f"{self.name}.{name}")


@dataclass(frozen=True)
class Value:
    """What is compared of a value: a plain value, or what stands for a tensor."""

    place: Place
    content: Any


@dataclass(frozen=True, eq=False)
class Copied:
    """A tensor's numbers on the host, and the fingerprint of a tensor on another device."""

    numbers: Tensor
    bits: Fingerprint | None


class Version(NamedTuple):
    """Shape and version counter of a tensor that is not hashed. In-place changes raise the
    counter; writes through `.data` or NumPy do not.
    """

    shape: tuple[int, ...]
    version: int


@dataclass(frozen=True)
class Change:
    """A value that differs between two snapshots."""

    name: str
    kind: Kind
    is_saved: bool


class NotPutBackError(ConfigError):
    """An error: a pass changed a value, and the change cannot be undone."""


class Snapshot:
    """The state of models, a loss, optimizers, registered objects and generators at one moment.

    Each object is visited once, under its first name. `user_state` maps names to the objects of
    `run.register_state`. `parameters` are further parameters that an optimizer trains.

    keep: also copy what `restore` needs; tensors are copied to the host. As a context manager, such
    a snapshot restores everything at the end of the block, in which gradients are None.
    saved: also compare what a checkpoint holds or a step makes anew.
    weights: with False, parameters are left out, and the block must not change them.
    exact: compare bits; with False, floating values may differ by rounding.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        loss: Any = None,
        optimizers: Mapping[str, Optimizer] | None = None,
        *,
        user_state: Mapping[str, Any] | None = None,
        parameters: Sequence[nn.Parameter] = (),
        keep: bool = False,
        saved: bool = True,
        weights: bool = True,
        exact: bool = True,
    ) -> None:
        self.keep, self.saved, self.exact = keep, saved, exact
        self.values: dict[str, Value] = {}
        self.hashed_bytes = 0
        self.copied_bytes = 0
        self._undo: list[tuple[bool, Callable[[], None]]] = []  # (is saved, function)
        self._visited: dict[int, Any] = {}  # keeps the objects alive, so that ids stay unique
        self._block: ExitStack | None = None
        self._parameters = [
            *parameters,
            *(parameter for model in models.values() for parameter in model.parameters()),
        ]
        self._gradients = [(parameter, parameter.grad) for parameter in self._parameters]
        user_state = user_state or {}
        optimizers = optimizers or {}
        registered = [each for each in user_state.values() if isinstance(each, nn.Module)]
        self._saved_modules = {
            id(module) for each in [*models.values(), *registered] for module in each.modules()
        }
        # the state of a metric is saved with the registered object that has it
        metrics = {name: torchmetrics_in(each) for name, each in user_state.items()}
        metric_ids = {id(metric) for of_object in metrics.values() for metric in of_object}
        # not visited through a registered object, which may refer to the whole run
        self._later = self._saved_modules | {id(each) for each in optimizers.values()}
        self._later -= metric_ids

        self._global_generators()
        if not weights:
            self._visited |= {id(each): each for each in self._parameters}
        for name, model in models.items():
            self._saved_tensors(name, model)
        for name, each in user_state.items():  # before other references to the same objects
            place = Place(f"registered[{name!r}]", "registered", is_saved=True)
            for part in [each, *metrics[name]]:
                self._visit(place, part, is_root=True)
        for name, model in models.items():
            self._visit(Place(name, "attribute", is_saved=False), model, is_root=True)
            self._modes(name, model)
        self._visit(Place("loss", "attribute", is_saved=False), loss, is_root=True)
        for name, optimizer in optimizers.items():
            is_only = list(models) == ["model"]
            self._optimizer("optimizer" if is_only else f"optimizer[{name!r}]", optimizer, models)
        for name, each in user_state.items():  # modules, whose state_dict is saved
            self._visit(Place(name, "attribute", is_saved=False), each)
        self._flags(models)

    # --- the block -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._block = ExitStack()
        self._block.enter_context(untouched())
        for parameter in self._parameters:
            parameter.grad = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._block is not None
        try:
            self.restore()
        finally:
            block, self._block = self._block, None
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            block.close()

    @torch.no_grad()
    def restore(self, *, only_saved: bool = False) -> None:
        """Restore all that was kept, or with `only_saved` what a checkpoint holds.

        Raises `NotPutBackError` if something cannot be restored, after all else is restored.
        """
        problems = []
        for is_saved, undo in self._undo:
            if is_saved or not only_saved:
                try:
                    undo()
                except Exception as problem:
                    problems.append(f"{type(problem).__name__}: {first_line(problem)}")
        for parameter, gradient in self._gradients:
            parameter.grad = None if self._block is not None else gradient
        if problems:
            raise NotPutBackError(
                "state-not-restored",
                problem="the test pass before the first step changed state that cannot be restored"
                f" ({problems[0]})",
                reason="the run would begin with a state other than its own",
                remedy="let the model and the loss change only plain attributes, dicts, lists and"
                " tensors",
                causes=problems,
            )

    # --- what is visited -----------------------------------------------------------------------

    def _record(self, place: Place, content: Any) -> None:
        if self.saved or not place.is_saved:
            self.values.setdefault(place.name, Value(place, content))

    def _on_restore(self, place: Place, function: Callable[..., None], *arguments: Any) -> None:
        if self.keep:
            self._undo.append((place.is_saved, partial(function, *arguments)))

    def _visit(self, place: Place, thing: Any, *, is_root: bool = False) -> None:
        """Record an object and all objects that are reachable from this object."""
        if thing is None or isinstance(thing, _PLAIN):
            self._record(place, thing)
            return
        is_later = place.is_saved and id(thing) in self._later
        if id(thing) in self._visited or is_later or len(self._visited) > _MAX_OBJECTS:
            return
        self._visited[id(thing)] = thing
        with suppress(Exception):  # of properties of the user's objects
            self._enter(place, thing, is_root)

    def _enter(self, place: Place, thing: Any, is_root: bool) -> None:
        match thing:
            case Tensor():
                self._tensor(place, thing)
            case np.ndarray() if _is_numeric(thing):
                self._visit(place, torch.from_numpy(thing))
            case random.SystemRandom() | type():
                pass
            case (
                torch.Generator()
                | random.Random()
                | np.random.Generator()
                | np.random.RandomState()
            ):
                self._generator(place, thing)
            case dict() | list() | tuple() | deque() | set():
                self._container(place, thing)
            case partial():
                self._visit(place, thing.func, is_root=is_root)
                self._visit(place.attribute("args"), thing.args)
                self._attributes(place, thing.keywords)
            case MethodType():
                self._visit(place, thing.__self__, is_root=is_root)
                self._visit(place, thing.__func__)
            case FunctionType():
                self._function(place, thing)
            case nn.Module() if not isinstance(thing, torch.jit.ScriptModule):
                self._module(place, thing)
            case _ if is_root or isinstance(thing, Optimizer) or _is_own(type(thing).__module__):
                if "__dict__" in dir(thing):
                    self._attributes(place, vars(thing))
                self._slots(place, thing)

    def _tensor(self, place: Place, tensor: Tensor) -> None:
        is_compared = self.saved or not place.is_saved
        is_opaque = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_inference()
        if is_opaque or not (is_compared or self.keep):
            return
        local = held_of(tensor)[0].detach()
        parts = plain_tensors(place.name, local)
        if parts.keys() != {place.name}:  # a quantized tensor, for example
            for name, part in parts.items():
                self._visit(place._replace(name=name), part)
            return
        if not place.is_saved and local.nbytes > _MAX_UNSAVED_BYTES:
            self._record(place, Version(tuple(local.shape), tensor._version))
            if self.keep and place.kind == "buffer":
                self._copied(place, tensor, local)
        elif self.keep:
            self._record(place, self._copied(place, tensor, local))
        elif is_compared:
            self.hashed_bytes += local.nbytes
            self._record(place, None if local.is_meta else standing(local, exact=self.exact))

    def _copied(self, place: Place, tensor: Tensor, local: Tensor) -> "Copied | None":
        self.copied_bytes += local.nbytes
        if local.is_meta:
            return None
        bits = None
        if not local.is_cpu:
            self.hashed_bytes += local.nbytes
            bits = fingerprint(local)
        copied = Copied(local.to("cpu", copy=True), bits)
        self._on_restore(place, _restore_tensor, tensor, local, copied)
        return copied

    def _container(self, place: Place, thing: Any) -> None:
        before = thing if isinstance(thing, tuple) else thing.copy()
        self._record(place, (type(thing).__name__, len(before)))
        if not isinstance(thing, tuple):
            self._on_restore(place, _reset, thing, before)
        if len(before) > _MAX_ENTRIES:
            return
        entries = before.items() if isinstance(before, dict) else enumerate(before)
        for index, (key, entry) in enumerate(entries):
            key_text = repr(key) if isinstance(key, str | int) else f"{type(key).__name__} {index}"
            is_of_hooks = place.name.endswith("_hooks")
            name = place.name if is_of_hooks else f"{place.name}[{key_text}]"
            self._visit(place._replace(name=name), entry)

    def _attributes(self, place: Place, attributes: dict[str, Any]) -> None:
        before = attributes.copy()
        self._on_restore(place, _reset, attributes, before)
        for name, attribute in before.items():
            self._visit(place.attribute(name), attribute)

    def _slots(self, place: Place, thing: Any) -> None:
        for owner in type(thing).__mro__:
            names = vars(owner).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                slot = vars(owner).get(name)  # a private name is mangled and not found
                if isinstance(slot, MemberDescriptorType) and hasattr(thing, name):
                    attribute = slot.__get__(thing)
                    self._on_restore(place, slot.__set__, thing, attribute)
                    self._visit(place.attribute(name), attribute)

    def _function(self, place: Place, function: FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if cell != CellType():  # the cell is assigned
                value = cell.cell_contents
                self._on_restore(place, setattr, cell, "cell_contents", value)
                self._visit(place.attribute(name), value)
        self._visit(place.attribute("__defaults__"), function.__defaults__)
        self._attributes(place, function.__kwdefaults__ or {})
        self._attributes(place, vars(function))
        variables = function.__globals__
        module = str(variables.get("__name__"))
        if not _is_own(module):
            return
        for name in function.__code__.co_names:
            if name in variables and not isinstance(variables[name], ModuleType | type):
                self._on_restore(place, variables.__setitem__, name, variables[name])
                self._visit(place._replace(name=f"{module}.{name}"), variables[name])

    def _generator(self, place: Place, generator: Any) -> None:
        state, set_state = _generator_state(generator)
        self._record(place._replace(kind="generator"), _state_as_value(state))
        self._on_restore(place, set_state, state)

    # --- models --------------------------------------------------------------------------------

    def _saved_tensors(self, name: str, model: nn.Module) -> None:
        """Record weights and persistent buffers, before other references to them."""
        for prefix, module in model.named_modules(prefix=name):
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for slots, kind in _tensors_of(module):
                for key, tensor in slots.items():
                    if key not in module._non_persistent_buffers_set:
                        self._visit(Place(f"{prefix}.{key}", kind, is_saved=True), tensor)

    def _module(self, place: Place, module: nn.Module) -> None:
        is_known = id(module) in self._saved_modules
        # a module with its own save methods decides what is saved; those of a metric omit values
        has_own_protocol = _overrides(module, nn.Module) and module not in torchmetrics_in(module)
        saves_itself = is_known and (has_own_protocol or bool(module._state_dict_hooks))
        own = place._replace(is_saved=place.is_saved or saves_itself)
        for entries in (vars(module), module._parameters, module._buffers, module._modules):
            self._on_restore(own, _reset, entries, entries.copy())
        attributes = {key: each for key, each in vars(module).items() if key not in _OF_MODULES}
        self._attributes(own, attributes)
        for slots, kind in _tensors_of(module):
            for name, tensor in slots.items():
                is_persistent = is_known and name not in module._non_persistent_buffers_set
                is_saved = own.is_saved or is_persistent
                slot = Place(f"{place.name}.{name}", kind, is_saved)
                if is_persistent:  # a forward pass may replace the tensor
                    self._on_restore(slot, slots.__setitem__, name, tensor)
                self._visit(slot, tensor)
        for name, child in module._modules.items():
            self._visit(place.attribute(name), child)

    def _modes(self, name: str, model: nn.Module) -> None:
        for prefix, module in model.named_modules(prefix=name):
            mode = Place(f"{prefix}.training", "mode", is_saved=True)
            self._record(mode, module.training)
            self._on_restore(mode, setattr, module, "training", module.training)
        if self.keep:
            extra = Place(f"{name}.extra_state", "attribute", is_saved=True)
            for module, state in extra_states(model):
                self._on_restore(extra, _set_extra_state, module, state)

    def _flags(self, models: Mapping[str, nn.Module]) -> None:
        """Record which parameters are trained, and their gradients."""
        names = {
            id(parameter): f"{model_name}.{name}"
            for model_name, model in models.items()
            for name, parameter in model.named_parameters()
        }
        for index, parameter in enumerate(self._parameters):
            name = names.get(id(parameter), f"parameters[{index}]")
            flag = Place(f"{name}.requires_grad", "mode", is_saved=True)
            self._record(flag, parameter.requires_grad)
            self._on_restore(flag, setattr, parameter, "requires_grad", parameter.requires_grad)
            if parameter.grad is not None:
                self._visit(Place(f"{name}.grad", "gradient", is_saved=True), parameter.grad)

    # --- optimizers and generators ---------------------------------------------------------------

    def _optimizer(self, name: str, optimizer: Optimizer, models: Mapping[str, nn.Module]) -> None:
        self._visited |= {id(optimizer): optimizer, id(optimizer.state): optimizer.state}
        for inner_name, inner in inner_optimizers(optimizer).items():  # its state is saved too
            self._optimizer(f"{name}.{inner_name}", inner, models)
        saved = Place(name, "optimizer", is_saved=True)
        unsaved = saved._replace(is_saved=False)
        if self.saved:
            self._optimizer_state(saved, optimizer, models)
        groups = zip(optimizer.param_groups, group_numbers(optimizer), strict=True)
        for index, (group, numbers) in enumerate(groups):
            group_name = f"param_groups[{index}]"
            if self.saved:
                self._on_restore(saved, _reset, group, group.copy())
                for key, number in numbers.items():
                    self._visit(saved.attribute(f"{group_name}.{key}"), number)
            left_out = {*_OF_OPTIMIZERS, *numbers}
            rest = {key: each for key, each in group.items() if key not in left_out}
            self._attributes(unsaved.attribute(group_name), rest)
        # an optimizer with its own save methods decides what is saved
        saves_itself = _overrides(optimizer, Optimizer) or bool(
            optimizer._optimizer_state_dict_post_hooks
        )
        # other attributes of torch's and surefoot's optimizers are no state
        is_own = _is_own(type(optimizer).__module__)
        attributes = {
            key: each
            for key, each in vars(optimizer).items()
            if key not in _OF_OPTIMIZERS and (is_own or key.endswith("_hooks"))
        }
        self._attributes(saved if saves_itself else unsaved, attributes)

    def _optimizer_state(
        self, place: Place, optimizer: Optimizer, models: Mapping[str, nn.Module]
    ) -> None:
        names = {
            id(parameter): name
            for model in models.values()
            for name, parameter in model.named_parameters()
        }
        self._on_restore(place, _reset, optimizer.state, optimizer.state.copy())
        for index, (parameter, state) in enumerate(optimizer.state.items()):
            name = names.get(id(parameter), str(index))
            self._visit(place.attribute(f"state[{name!r}]"), state)

    def _global_generators(self) -> None:
        """Record the generators of the process, before other references to them."""
        self._visited[id(torch.default_generator)] = torch.default_generator
        if not (self.saved or self.keep):
            return
        for generator in global_generators():
            place = Place(f"global {generator.name}", "generator", is_saved=True)
            state = generator.get_state()
            self._record(place, _state_as_value(state))
            self._on_restore(place, generator.set_state, state)


def changes(before: Snapshot, after: Snapshot) -> list[Change]:
    """Return the values that differ, by their outermost names. The host reads fingerprints."""
    differing = set()
    hashed = {}
    for name in before.values.keys() & after.values.keys():
        first, second = (
            standing(content.numbers, exact=before.exact)
            if isinstance(content, Copied)
            else content
            for content in (before.values[name].content, after.values[name].content)
        )
        if isinstance(first, Fingerprint) and isinstance(second, Fingerprint):
            hashed[name] = (first, second)
        elif not same_value(first, second, exact=before.exact):
            differing.add(name)
    for name, is_equal in zip(hashed, equal_fingerprints([*hashed.values()]), strict=True):
        if not is_equal:
            differing.add(name)
    outermost = []
    for name in sorted(differing):
        if not any(name.startswith((f"{other}.", f"{other}[")) for other in differing):
            outermost.append(Change(*after.values[name].place))
    return outermost


def standing(tensor: Tensor, *, exact: bool) -> Fingerprint | Sketch:
    """Return what is compared of a tensor: its bits, or its numbers up to rounding."""
    is_rounded = tensor.is_floating_point() or tensor.is_complex()
    return sketch(tensor) if is_rounded and not exact else fingerprint(tensor)


def same_value(first: Any, second: Any, *, exact: bool) -> bool:
    """Return True if two values have equal types and are equal; NaN equals NaN. Unless `exact`,
    floats may differ by rounding.
    """
    if type(first) is not type(second):
        return False
    if isinstance(first, Sketch):
        return near_sketches(first, second)
    if isinstance(first, float | np.floating):
        if exact or not math.isfinite(first):
            return float(first).hex() == float(second).hex()
        return math.isclose(first, second, rel_tol=2 * ROUNDING)
    return bool(first == second)


# --- putting back --------------------------------------------------------------------------------


def _restore_tensor(tensor: Tensor, local: Tensor, copied: Copied) -> None:
    """Restore the memory and the numbers of a tensor, without writing equal numbers."""
    if held_of(tensor)[0].data_ptr() != local.data_ptr():
        tensor.data = local  # the tensor was moved to other memory
    if copied.bits is None:
        is_unchanged = equal_bits(local, copied.numbers)
    else:
        is_unchanged = equal_fingerprints([(copied.bits, fingerprint(local))])[0]
    if not is_unchanged:
        local.copy_(copied.numbers)


def _reset(live: Any, before: Any) -> None:
    """Restore the entries of a dict, list, deque or set in place."""
    if _has_entries_of(live, before):
        return
    live.clear()
    if isinstance(live, list | deque):
        live.extend(before)
    else:
        live.update(before)


def _has_entries_of(live: Any, before: Any) -> bool:
    """Return True if two containers hold the same objects in the same order."""
    if len(live) != len(before):
        return False
    if isinstance(live, dict):
        pairs = zip([*live, *live.values()], [*before, *before.values()], strict=True)
    else:
        pairs = zip(live, before, strict=True)
    return all(now is then for now, then in pairs)


def _set_extra_state(module: nn.Module, state: Any) -> None:
    module.set_extra_state(deepcopy(state))  # the module may keep its argument and modify it


def _generator_state(generator: Any) -> tuple[Any, Callable[[Any], None]]:
    """Return the state of a torch, Python or NumPy generator, and the function that restores it."""
    match generator:
        case np.random.Generator(bit_generator=bits):
            return bits.state, partial(setattr, bits, "state")
        case random.Random():
            return generator.getstate(), generator.setstate
    return generator.get_state(), generator.set_state


def _state_as_value(state: Any) -> Any:
    """Return the state of a generator as bytes or text; torch keeps its states on the host."""
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    if isinstance(state, list):  # of all CUDA devices
        return tuple(each.numpy().tobytes() for each in state)
    return repr(state)


def _tensors_of(module: nn.Module) -> list[tuple[dict[str, Any], Kind]]:
    return [(module._parameters, "weight"), (module._buffers, "buffer")]


# --- the user's code -----------------------------------------------------------------------------


def _is_numeric(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.kind in "biuf" and array.dtype.itemsize <= 8 and array.flags.writeable


@cache
def _is_own(module: str) -> bool:
    """Return True for a module that is neither installed nor of the standard library."""
    file = vars(sys.modules[module]).get("__file__") if module in sys.modules else None
    if file is not None and {"site-packages", "dist-packages"}.intersection(Path(file).parts):
        return False
    return module.partition(".")[0] not in {*sys.stdlib_module_names, "torch", "surefoot"}


def _overrides(thing: object, base: type[nn.Module | Optimizer]) -> bool:
    own = type(thing)
    return any(getattr(own, name) is not getattr(base, name) for name in _PROTOCOLS[base])
