"""A snapshot of everything that a pass or a user's code can change: compared, named and restored.

`with Snapshot(..., keep=True)` leaves no trace of what its block does.

It holds weights, buffers, frozen parts, optimizers, generators, objects of `run.register_state`,
gradients, modes, and what a killed process loses: nonpersistent buffers, attributes, closure
variables, globals of functions. Objects of installed packages are visited only if they are modules,
optimizers or the loss. To compare, a tensor is hashed on its device and is not copied. No tensor is
read on the host before `changed_values`.
"""

import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
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
    near_sketches,
    sketch,
    tensor_fingerprint,
)
from surefoot.checkpoint.optimizer_state import further_state, group_numbers
from surefoot.checkpoint.tensor_file import equal_bits
from surefoot.distributed.shards import (
    Shard,
    extra_states,
    local_part,
    plain_tensors,
    reset_passes,
)
from surefoot.errors import ConfigError, first_line
from surefoot.metrics.contract import torchmetrics_in
from surefoot.optim.kinds.kind import inner_optimizers, kind_of
from surefoot.seeding import global_generators, hold_generators

Kind = Literal[
    "weight", "buffer", "gradient", "mode", "optimizer", "generator", "registered", "attribute"
]
_PLAIN = (bool, int, float, complex, str, bytes, np.generic)
_MAX_ENTRIES = 10_000  # of a longer container only the length is compared
_MAX_OBJECTS = 100_000
# of tensors that no checkpoint holds, such as a data set in a closure: a larger one is not hashed,
# and above this sum none is copied
_MAX_UNSAVED_BYTES = 1 << 28
_OF_MODULES = {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_OF_OPTIMIZERS = {"state", "param_groups", "defaults", "params", "lr", "initial_lr"}
_PROTOCOLS = {
    nn.Module: ("get_extra_state", "state_dict", "_save_to_state_dict"),
    Optimizer: ("state_dict", "load_state_dict"),
}


class Place(NamedTuple):
    """Where a value stands: its name for the user, its kind, and whether a checkpoint holds it or a
    step makes it anew.
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
class KeptTensor:
    """A tensor's numbers: of a buffer on its device, of others on the host. For these on another
    device also what is compared of it, and its bits.
    """

    numbers: Tensor
    compared: Fingerprint | Sketch | None = None
    bits: Fingerprint | None = None


class Version(NamedTuple):
    """Shape and version counter of a tensor that is not hashed. In-place changes raise the
    counter; writes through `.data` or NumPy do not.
    """

    shape: tuple[int, ...]
    version: int


@dataclass(frozen=True)
class ChangedValue:
    """A value that differs between two snapshots, or that only one of them has."""

    name: str
    kind: Kind
    is_saved: bool
    how: Literal["changed", "appeared", "vanished"] = "changed"


class NotPutBackError(ConfigError):
    """An error: a pass changed a value, and the change cannot be undone."""


class Snapshot:
    """The state of models, a loss, optimizers, registered objects and generators at one moment.

    Each object is visited once, under its first name. `user_state` maps names to the objects of
    `run.register_state`. `parameters` are further parameters that an optimizer trains.

    A snapshot with `keep` is a context manager: it restores all of its values at the end of the
    block. Inside the block, gradients are None, and no other thread may use the generators.

    keep: also copy what `restore` needs. Buffers are copied where they are, and written back without
        waiting for the device; other tensors are copied to the host.
    saved: also compare what a checkpoint holds or a step makes anew.
    weights: with False, parameters are left out, and must not be changed before `restore`.
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
        self.keep = keep
        self.saved = saved
        self.exact = exact
        self.values: dict[str, Value] = {}
        self.hashed_bytes = 0
        self.copied_bytes = 0
        self._copied_unsaved_bytes = 0
        self._undo: list[tuple[Place, Callable[[], Any]]] = []
        self._visited: dict[int, Any] = {}  # keeps the objects alive, so that ids stay unique
        self._failed: list[Exception] = []  # while a tensor was copied or hashed
        self._models = models
        self._leaves: list[Tensor] = []  # whose gradients are recorded
        self._is_in_block = False
        self._block = ExitStack()
        user_state = user_state or {}
        optimizers = optimizers or {}
        self._parameter_names = _parameter_names(models)
        self._saved_modules = _ids_of_modules([*models.values(), *user_state.values()])
        # the state of a metric is saved with the registered object that has it
        metrics = {name: torchmetrics_in(thing) for name, thing in user_state.items()}
        metric_ids = set(map(id, chain.from_iterable(metrics.values())))
        # not visited through a registered object, which may refer to the whole run
        self._later = self._saved_modules | set(map(id, optimizers.values()))
        self._later -= metric_ids

        self._global_generators()
        for name, model in models.items():
            self._saved_tensors(name, model, weights=weights)
        for parameter in parameters:
            if isinstance(parameter, Shard):  # others are those of the models
                self._shard(f"shard of {parameter.called}", parameter)
        for name, thing in user_state.items():  # before other references to the same objects
            place = Place(f"registered[{name!r}]", "registered", is_saved=True)
            for part in [thing, *metrics[name]]:
                self._visit(place, part, is_root=True)
        for name, model in models.items():
            self._visit(Place(name, "attribute", is_saved=False), model, is_root=True)
            self._modes(name, model)
        self._visit(Place("loss", "attribute", is_saved=False), loss, is_root=True)
        for name, optimizer in optimizers.items():
            is_only = list(models) == ["model"]
            self._optimizer("optimizer" if is_only else f"optimizer[{name!r}]", optimizer)
        for name, thing in user_state.items():  # modules, whose state_dict is saved
            self._visit(Place(name, "attribute", is_saved=False), thing)
        if self._failed:
            raise self._failed[0]

    def __enter__(self) -> Self:
        self._block.enter_context(hold_generators())
        self._is_in_block = True
        self._clear_gradients()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_in_block = False
        with self._block:
            reset_passes(self._models.values())  # after a pass that failed
            self.restore()

    def _clear_gradients(self) -> None:
        for leaf in self._leaves:
            leaf.grad = None

    def keep_buffer(self, module: nn.Module, name: str) -> None:
        """Keep a further buffer."""
        buffer = module._buffers[name]
        if buffer is not None:
            place = Place(name, "buffer", is_saved=True)
            self._on_restore(place, module._buffers.__setitem__, name, buffer)
            self._kept(place, buffer, local_part(buffer)[0].detach())

    def keep_objects(self, **objects: Any) -> None:
        """Keep the attributes of further objects by name, also of surefoot's own."""
        for name, thing in objects.items():
            self._visit(Place(name, "attribute", is_saved=False), thing, is_root=True)

    def keep_further(self, restore: Callable[[], Any]) -> None:
        """Call this function before all else is restored."""
        self._undo.insert(0, (Place("further", "attribute", is_saved=True), restore))

    @torch.no_grad()
    def restore(self, *, only_saved: bool = False) -> list[str]:
        """Restore all that was kept, or with `only_saved` what a checkpoint holds. Return the names
        of the weights that had changed.

        Raises `NotPutBackError` if something cannot be restored, after all else is restored.
        """
        assert self.keep, "this snapshot was taken to compare"
        problems = []
        changed_weights = []
        for place, undo in self._undo:
            if place.is_saved or not only_saved:
                try:
                    had_changed = undo()
                    if had_changed is True and place.is_saved and place.kind == "weight":
                        changed_weights.append(place.name)
                except Exception as problem:
                    problems.append(f"{type(problem).__name__}: {first_line(problem)}")
        if self._is_in_block:
            self._clear_gradients()
        if problems:
            raise NotPutBackError(
                "state-not-restored",
                problem=f"a trial changed state that cannot be restored ({problems[0]})",
                reason="the run would go on with a state other than its own",
                remedy="let the model and the loss change only plain attributes, dicts, lists and"
                " tensors",
                causes=problems,
            )
        return changed_weights

    # --- what is visited -------------------------------------------------------------------------

    def _record(self, place: Place, content: Any) -> None:
        if place.is_saved and not self.saved:
            return
        name = place.name
        number = 1
        while name in self.values:  # two hooks of one module, for example
            number += 1
            name = f"{place.name} ({number})"
        self.values[name] = Value(place._replace(name=name), content)

    def _on_restore(self, place: Place, function: Callable[..., Any], *arguments: Any) -> None:
        if self.keep:
            self._undo.append((place, partial(function, *arguments)))

    def _visit(self, place: Place, thing: Any, *, is_root: bool = False) -> None:
        """Record an object and all objects that are reachable from this object."""
        if thing is None or isinstance(thing, _PLAIN):
            self._record(place, thing)
            return
        if _is_plain_tuple(thing):  # equal ones, such as betas of two groups, may be one object
            self._container(place, thing)
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

    def _container(self, place: Place, container: Any) -> None:
        before = container if isinstance(container, tuple) else container.copy()
        self._record(place, (type(container).__name__, len(before)))
        if not isinstance(container, tuple):
            self._on_restore(place, _reset, container, before)
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

    # --- tensors ---------------------------------------------------------------------------------

    def _tensor(self, place: Place, tensor: Tensor) -> None:
        is_opaque = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_inference()
        is_compared = self.saved or not place.is_saved
        is_trained = isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
        if is_trained and place.kind == "attribute":  # such as a parameter of a loss
            place = place._replace(kind="weight")
        if is_opaque or not (is_compared or self.keep):
            return
        try:
            local = local_part(tensor)[0].detach()
            parts = plain_tensors(place.name, local)
            if parts.keys() == {place.name}:
                self._numbers(place, tensor, local)
            else:  # a quantized tensor, for example
                for name, part in parts.items():
                    self._visit(place._replace(name=name), part)
        except Exception as problem:  # out of memory, for example
            self._failed.append(problem)
        if is_trained:
            self._gradient(place.name, tensor)

    def _numbers(self, place: Place, tensor: Tensor, local: Tensor) -> None:
        is_kept = self.keep and (place.is_saved or self._may_copy(place, local))
        if not place.is_saved and local.nbytes > _MAX_UNSAVED_BYTES:
            self._record(place, Version(tuple(local.shape), tensor._version))
            if is_kept:
                self._kept(place, tensor, local)
        elif is_kept:
            self._record(place, self._kept(place, tensor, local))
        elif self.saved or not place.is_saved:
            self.hashed_bytes += local.nbytes
            self._record(place, None if local.is_meta else compared(local, exact=self.exact))
        if self.keep and not is_kept:
            self._on_restore(place, _refuse_changed, place.name, tensor, tensor._version)

    def _may_copy(self, place: Place, local: Tensor) -> bool:
        """Return False for what is most likely a data set that a closure or a global names."""
        if place.kind == "buffer":
            return True
        self._copied_unsaved_bytes += local.nbytes
        return self._copied_unsaved_bytes <= _MAX_UNSAVED_BYTES

    def _kept(self, place: Place, tensor: Tensor, local: Tensor) -> KeptTensor | None:
        self.copied_bytes += local.nbytes
        if local.is_meta:
            return None
        if place.kind == "buffer":
            kept = KeptTensor(local.to(local.device, copy=True))
            self._on_restore(place, _restore_buffer, tensor, local, kept.numbers)
            return kept
        if local.is_cpu:
            kept = KeptTensor(local.to("cpu", copy=True))
        else:
            self.hashed_bytes += local.nbytes
            bits = tensor_fingerprint(local)
            on_device = bits if self.exact else compared(local, exact=False)
            kept = KeptTensor(local.to("cpu", copy=True), on_device, bits)
        self._on_restore(place, _restore_tensor, tensor, local, kept)
        return kept

    def _gradient(self, name: str, tensor: Tensor) -> None:
        """Record the gradient of a leaf, also of a leaf of the loss or of a registered object."""
        place = Place(f"{name}.grad", "gradient", is_saved=True)
        self._leaves.append(tensor)
        self._on_restore(place, setattr, tensor, "grad", tensor.grad)
        self._visit(place, tensor.grad)

    def _training_of(self, name: str, parameter: Tensor) -> None:
        flag = Place(f"{name}.requires_grad", "mode", is_saved=True)
        self._record(flag, parameter.requires_grad)
        self._on_restore(flag, setattr, parameter, "requires_grad", parameter.requires_grad)

    def _shard(self, name: str, shard: Shard) -> None:
        """Record what an optimizer's parameter has besides the memory of a model's parameter."""
        self._training_of(name, shard)
        self._gradient(name, shard)

    # --- models ----------------------------------------------------------------------------------

    def _saved_tensors(self, name: str, model: nn.Module, *, weights: bool) -> None:
        """Record weights and persistent buffers, before other references to them."""
        for prefix, module in model.named_modules(prefix=name):
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for slots, kind in _tensors_of(module):
                for key, tensor in slots.items():
                    if key in module._non_persistent_buffers_set:
                        continue
                    place = Place(f"{prefix}.{key}", kind, is_saved=True)
                    if kind == "weight" and tensor is not None and id(tensor) not in self._visited:
                        self._training_of(place.name, tensor)
                        if not weights:
                            self._visited[id(tensor)] = tensor
                            self._gradient(place.name, tensor)
                    self._visit(place, tensor)

    def _module(self, place: Place, module: nn.Module) -> None:
        is_known = id(module) in self._saved_modules
        # a module with its own save methods decides what is saved; those of a metric omit values
        has_own_protocol = _overrides(module, nn.Module) and module not in torchmetrics_in(module)
        saves_itself = is_known and (has_own_protocol or bool(module._state_dict_hooks))
        of_module = place._replace(is_saved=place.is_saved or saves_itself)
        for entries in (vars(module), module._parameters, module._buffers, module._modules):
            self._on_restore(of_module, _reset, entries, entries.copy())
        attributes = {key: value for key, value in vars(module).items() if key not in _OF_MODULES}
        self._attributes(of_module, attributes)
        for slots, kind in _tensors_of(module):
            for name, tensor in slots.items():
                is_persistent = is_known and name not in module._non_persistent_buffers_set
                is_saved = of_module.is_saved or is_persistent
                slot = Place(f"{place.name}.{name}", kind, is_saved)
                if is_persistent:  # a forward pass may replace the tensor
                    self._on_restore(slot, slots.__setitem__, name, tensor)
                if tensor is not None:
                    self._visit(slot, tensor)
        for name, child in module._modules.items():
            self._visit(place.attribute(name), child)

    def _modes(self, name: str, model: nn.Module) -> None:
        for prefix, module in model.named_modules(prefix=name):
            mode = Place(f"{prefix}.training", "mode", is_saved=True)
            self._record(mode, module.training)
            self._on_restore(mode, setattr, module, "training", module.training)
        if not (self.keep or self.saved):
            return
        extra = Place(f"{name}.extra_state", "attribute", is_saved=True)
        for module, state in extra_states(model):
            self._record(extra, _as_bytes(state))
            self._on_restore(extra, _set_extra_state, module, state)

    # --- optimizers and generators ----------------------------------------------------------------

    def _optimizer(self, name: str, optimizer: Optimizer) -> None:
        self._visited |= {id(optimizer): optimizer, id(optimizer.state): optimizer.state}
        for inner_name, inner in inner_optimizers(optimizer).items():  # its state is saved too
            self._optimizer(f"{name}.{inner_name}", inner)
        saved = Place(name, "optimizer", is_saved=True)
        unsaved = saved._replace(is_saved=False)
        if self.saved:
            self._optimizer_state(saved, optimizer)
        groups = zip(optimizer.param_groups, group_numbers(optimizer), strict=True)
        for index, (group, numbers) in enumerate(groups):
            group_name = f"param_groups[{index}]"
            if self.saved:
                self._on_restore(saved, _reset, group, group.copy())
                for key, number in numbers.items():
                    self._visit(saved.attribute(f"{group_name}.{key}"), number)
            left_out = {*_OF_OPTIMIZERS, *numbers}
            rest = {key: value for key, value in group.items() if key not in left_out}
            self._attributes(unsaved.attribute(group_name), rest)
        # an optimizer whose state_dict adds something decides what is saved; a wrapper that gives
        # the state_dict of another optimizer leaves its own attributes out
        saves_itself = bool(further_state(optimizer))
        # other attributes of torch's and surefoot's optimizers are no state
        package = type(optimizer).__module__.partition(".")[0]
        is_own = kind_of(optimizer) is None and package != "torch"
        attributes = {}
        for key, value in vars(optimizer).items():
            if key not in _OF_OPTIMIZERS and (is_own or key.endswith("_hooks")):
                attributes[key] = value
        self._attributes(saved if saves_itself else unsaved, attributes)

    def _optimizer_state(self, place: Place, optimizer: Optimizer) -> None:
        self._on_restore(place, _reset, optimizer.state, optimizer.state.copy())
        for index, (parameter, state) in enumerate(optimizer.state.items()):
            if isinstance(parameter, Shard):
                name = parameter.called
            else:
                name = self._parameter_names.get(id(parameter), str(index))
            self._visit(place.attribute(f"state[{name!r}]"), state)

    def _generator(self, place: Place, generator: Any) -> None:
        state, set_state = _generator_state(generator)
        self._record(place._replace(kind="generator"), _as_bytes(state))
        self._on_restore(place, set_state, state)

    def _global_generators(self) -> None:
        """Record the generators of the process, before other references to them."""
        self._visited[id(torch.default_generator)] = torch.default_generator
        if not (self.saved or self.keep):
            return
        for generator in global_generators():
            place = Place(f"global {generator.name}", "generator", is_saved=True)
            state = generator.get_state()
            self._record(place, _as_bytes(state))
            self._on_restore(place, generator.set_state, state)


# --- comparing ------------------------------------------------------------------------------------


def changed_values(before: Snapshot, after: Snapshot) -> list[ChangedValue]:
    """Return the values that differ, and those that only one snapshot has, by their outermost
    names. The host reads fingerprints.
    """
    assert before.exact == after.exact, "one snapshot is compared by bits, the other up to rounding"
    differing = {}
    hashed = {}
    for name in before.values.keys() & after.values.keys():
        first = _to_compare(before.values[name].content, exact=before.exact)
        second = _to_compare(after.values[name].content, exact=before.exact)
        if isinstance(first, Fingerprint) and isinstance(second, Fingerprint):
            hashed[name] = (first, second)
        elif not same_value(first, second, exact=before.exact):
            differing[name] = ChangedValue(*after.values[name].place)
    for name, is_equal in zip(hashed, equal_fingerprints([*hashed.values()]), strict=True):
        if not is_equal:
            differing[name] = ChangedValue(*after.values[name].place)
    for name in after.values.keys() - before.values.keys():
        differing[name] = ChangedValue(*after.values[name].place, "appeared")
    for name in before.values.keys() - after.values.keys():
        differing[name] = ChangedValue(*before.values[name].place, "vanished")
    return [differing[name] for name in sorted(differing) if not _is_inside(name, differing)]


def _is_inside(name: str, differing: Mapping[str, ChangedValue]) -> bool:
    """Return True if another changed value holds this one."""
    ends = [index for index, character in enumerate(name) if character in ".["]
    return any(name[:end] in differing for end in ends)


def _to_compare(content: Any, *, exact: bool) -> Any:
    if not isinstance(content, KeptTensor):
        return content
    return content.compared or compared(content.numbers, exact=exact)


def compared(tensor: Tensor, *, exact: bool) -> Fingerprint | Sketch:
    """Return what is compared of a tensor: its bits, or its numbers up to rounding."""
    is_rounded = tensor.is_floating_point() or tensor.is_complex()
    return sketch(tensor) if is_rounded and not exact else tensor_fingerprint(tensor)


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


# --- putting back ---------------------------------------------------------------------------------


def _restore_tensor(tensor: Tensor, local: Tensor, kept: KeptTensor) -> bool:
    """Restore the memory and the numbers of a tensor, without writing equal numbers. Return True if
    the numbers had changed.
    """
    moved_to = local_part(tensor)[0]
    has_moved = moved_to.data_ptr() != local.data_ptr()
    if has_moved:
        moved_to = moved_to.detach()
        tensor.data = local
    if kept.bits is None:
        is_unchanged = equal_bits(local, kept.numbers)
    else:
        is_unchanged = equal_fingerprints([(kept.bits, tensor_fingerprint(local))])[0]
    if not is_unchanged:
        local.copy_(kept.numbers)
    if has_moved:
        return not _has_numbers_of(moved_to, local)
    return not is_unchanged


def _restore_buffer(buffer: Tensor, local: Tensor, numbers: Tensor) -> None:
    """Restore the memory and the numbers of a buffer, without a comparison, which would wait for
    its device. A pass that is under way may hold the buffer, so that no write is counted.
    """
    now = local_part(buffer)[0]
    if now.data_ptr() != local.data_ptr() or now.shape != local.shape:
        buffer.data = local
    local.data.copy_(numbers)


def _has_numbers_of(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return equal_fingerprints([(tensor_fingerprint(one), tensor_fingerprint(other))])[0]


def _refuse_changed(name: str, tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise ValueError(f"{name} was changed, and its {tensor.nbytes} bytes were not copied")


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


# --- the user's code ------------------------------------------------------------------------------


def _as_bytes(state: Any) -> Any:
    """Return nested state, as that of a generator, with arrays and tensors as bytes."""
    if type(state) is tuple and all(type(entry) is int for entry in state):
        return state  # the 625 numbers of `random`
    match state:
        case Tensor():
            return state.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        case np.ndarray():
            return state.tobytes()
        case dict():
            return {key: _as_bytes(entry) for key, entry in state.items()}
        case list() | tuple():
            return tuple(_as_bytes(entry) for entry in state)
    return state


def _parameter_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    names = {}
    for model_name, model in models.items():
        prefix = "" if len(models) == 1 else f"{model_name}."
        for name, parameter in model.named_parameters():
            names[id(parameter)] = f"{prefix}{name}"
    return names


def _ids_of_modules(objects: Iterable[Any]) -> set[int]:
    ids: set[int] = set()
    for thing in objects:
        if isinstance(thing, nn.Module):
            ids.update(map(id, thing.modules()))
    return ids


def _tensors_of(module: nn.Module) -> list[tuple[dict[str, Any], Kind]]:
    return [(module._parameters, "weight"), (module._buffers, "buffer")]


def _is_plain_tuple(thing: Any) -> bool:
    if type(thing) is not tuple or len(thing) > _MAX_ENTRIES:
        return False
    return all(entry is None or isinstance(entry, _PLAIN) for entry in thing)


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
