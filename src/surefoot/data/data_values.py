"""Values in the attributes of a data set and of what reads it: changes that the body of a loop makes
are found between two steps, and plain values are saved.
"""

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import (
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from surefoot.checkpoint.nested_state import join_state, split_state
from surefoot.errors import CheckpointError

_PLAIN = (bool, int, float, str, bytes, complex, np.generic, type(None))
_BY_VALUE = (*_PLAIN, tuple, list, dict, set, frozenset)
_NAMESPACES = (SimpleNamespace, Namespace)
_MAX_ENTRIES = 64  # of a longer container only the length is compared
_MAX_PLACES, _MAX_DEPTH = 100, 8
_NOT_VISITED = {"builtins", "abc", "typing", "collections", "torch"}  # attributes of classes there
_ATTRIBUTE, _ENTRY = "{name}.{key}", "{name}[{key!r}]"  # names of values
_NOTHING = object()  # stands for a value that is not there


@dataclass(frozen=True)
class ChangedValue:
    """A value that the body of a loop changed, by its name for the user. `is_saved` is True if a
    checkpoint holds it.
    """

    name: str
    is_saved: bool


class _Place:
    """Attributes of an object, or entries of a container, as they were when last compared.

    `values()` returns the values alone, where it can without a copy: most steps compare only these.
    `entries()` returns them by key. `write(key, value)` sets one; None if they cannot be set.
    """

    def __init__(
        self,
        name: str,
        owners: tuple[Any, ...],
        *,
        label: str,
        values: Callable[[], Collection[Any]],
        entries: Callable[[], Mapping[Any, Any]],
        write: Callable[[Any, Any], None] | None,
    ) -> None:
        self.name = name
        self.owners = owners  # the objects through which it is reached, from the data set on
        self.label = label
        self.values = values
        self.entries = entries
        self.write = write
        self.keep()

    def keep(self) -> None:
        self.last = dict(self.entries())
        self.last_values = list(self.values())

    def name_of(self, key: Any) -> str:
        return self.label.format(name=self.name, key=key)

    def is_same(self) -> bool:
        values, last = self.values(), self.last_values
        return len(values) == len(last) and all(map(is_, values, last))


class _Difference(NamedTuple):
    name: str
    place: _Place
    value: Any


class DataValues:
    """The values of objects by name, such as "train_data" and "collate_fn", as last compared.

    Visited are attributes, closures and short containers, also those of wrapped data sets and of
    transforms. Plain values are compared by value, other objects by identity, tensors by the
    counter of their changes in place, and long containers by their length. Weights, buffers and
    globals are not compared. A value that reading a sample changes (a counter, a cache, a file that
    is opened late) is left out.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots = roots
        self.changed_by_reading: set[str] = set()
        self.changed_by_body: set[str] = set()
        self.changes: list[ChangedValue] = []
        self.refresh()

    def refresh(self) -> None:
        """Compare with the values as they are now from here on."""
        self.places: list[_Place] = []
        self._visited: dict[int, Any] = {}  # keeps the objects alive, so that ids stay unique
        for name, root in self.roots.items():
            self._visit(name, root, ())

    def note_reading(self) -> None:
        """Leave out what has changed since the last comparison: only samples were read."""
        names = set()
        for change in self._differences():
            names.add(change.name)
            if change.place.label == _ENTRY:  # a cache that grows has new keys in every step
                names.add(change.place.name)
        if not names <= self.changed_by_reading:
            self.changed_by_reading |= names
            self.refresh()

    def compare(self, *, registered: Mapping[str, Any]) -> None:
        """Add to `changes` what has changed since the last comparison, but not by reading.

        `registered` has the objects of `run.register_state`, whose values a checkpoint holds.
        """
        registered_ids = {id(each) for each in registered.values()}
        for name, place, value in self._differences():
            if name in self.changed_by_reading:
                continue
            is_registered = any(id(owner) in registered_ids for owner in place.owners)
            if not is_registered:
                self.changed_by_body.add(name)
            is_plain = place.write is not None and _as_json(value) is not None
            self.changes.append(ChangedValue(name, is_saved=is_registered or is_plain))

    def pop_changes(self) -> list[ChangedValue]:
        """Return the changes since the last call."""
        changes = self.changes
        self.changes = []
        return changes

    def state(self) -> dict[str, Any]:
        """Return the plain values that the body of the loop has changed, as JSON."""
        values = {}
        for place in self.places:
            if place.write is None:
                continue
            for key, value in place.entries().items():
                name = place.name_of(key)
                if name in self.changed_by_body:
                    values[name] = _as_json(value)
        return {name: value for name, value in values.items() if value is not None}

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Set the values of a checkpoint. A value whose place is gone is left out."""
        for place in self.places:
            if place.write is None:
                continue
            keys = {place.name_of(key): key for key in place.entries()}
            for name, value in values.items():
                attribute = name.removeprefix(
                    f"{place.name}."
                )  # perhaps one that only the body sets
                is_new = place.label == _ATTRIBUTE and attribute.isidentifier()
                if name in keys or (is_new and attribute != name):
                    place.write(keys.get(name, attribute), join_state(value, {}))
        self.changed_by_body.update(values)
        self.refresh()

    def _differences(self) -> list[_Difference]:
        differences = []
        has_other_objects = False
        for place in self.places:
            if place.is_same():
                continue
            now, last = place.entries(), place.last
            for key in {**last, **now}:
                value = now.get(key, _NOTHING)
                before = last.get(key, _NOTHING)
                if value is before or _is_equal(value, before):
                    continue
                differences.append(_Difference(place.name_of(key), place, value))
                is_plain = isinstance(value, _PLAIN) and isinstance(before, _PLAIN)
                has_other_objects = has_other_objects or not is_plain
            place.keep()
        if has_other_objects:
            self.refresh()
        return differences

    # --- what is visited -------------------------------------------------------------------------

    def _visit(self, name: str, thing: Any, owners: tuple[Any, ...]) -> None:
        is_known = id(thing) in self._visited or name in self.changed_by_reading
        is_far = len(owners) >= _MAX_DEPTH or len(self.places) >= _MAX_PLACES
        if is_known or is_far or isinstance(thing, (*_PLAIN, type, ModuleType, nn.Parameter)):
            return
        self._visited[id(thing)] = thing
        with suppress(Exception):  # of properties of the user's objects
            self._enter(name, thing, (*owners, thing))

    def _enter(self, name: str, thing: Any, owners: tuple[Any, ...]) -> None:
        match thing:
            case Tensor():
                self._add_number(name, owners, lambda: thing._version)
            case dict() | list() | set() | deque() if len(thing) > _MAX_ENTRIES:
                self._add_number(name, owners, lambda: len(thing))
            case tuple():  # its owner has another one if an entry changes
                self._visit_all(name, owners, dict(enumerate(thing)), label=_ENTRY)
            case dict():
                self._add(
                    name,
                    owners,
                    label=_ENTRY,
                    values=thing.values,
                    entries=lambda: thing,
                    write=thing.__setitem__,
                )
            case list() | deque():
                self._add(
                    name,
                    owners,
                    label=_ENTRY,
                    values=lambda: thing,
                    entries=lambda: dict(enumerate(thing)),
                    write=thing.__setitem__,
                )
            case set():
                self._add(
                    name,
                    owners,
                    label=_ENTRY,
                    values=lambda: thing,
                    entries=lambda: dict.fromkeys(thing),
                    write=None,
                )
            case partial():
                self._visit(name, thing.func, owners)
                self._visit(f"{name}.args", thing.args, owners)
                self._visit(f"{name}.keywords", thing.keywords, owners)
            case MethodType():
                self._visit(name, thing.__self__, owners)
            case FunctionType():
                self._visit_closure(name, thing, owners)
            case _:
                self._visit_object(name, thing, owners)

    def _visit_closure(self, name: str, function: FunctionType, owners: tuple[Any, ...]) -> None:
        pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        cells = {key: cell for key, cell in pairs if cell != CellType()}  # that are assigned

        def write(key: str, value: Any) -> None:
            cells[key].cell_contents = value

        self._add(
            name,
            owners,
            label=_ATTRIBUTE,
            values=lambda: [cell.cell_contents for cell in cells.values()],
            entries=lambda: {key: cell.cell_contents for key, cell in cells.items()},
            write=write,
        )

    def _visit_object(self, name: str, thing: Any, owners: tuple[Any, ...]) -> None:
        package = type(thing).__module__.partition(".")[0]
        if package in sys.stdlib_module_names and not isinstance(thing, _NAMESPACES):
            return  # such as a logger, whose caches change with every import
        attributes = getattr(thing, "__dict__", None)
        if isinstance(attributes, dict):
            self._add(
                name,
                owners,
                label=_ATTRIBUTE,
                values=attributes.values,
                entries=lambda: attributes,
                write=attributes.__setitem__,
                is_module=isinstance(thing, nn.Module),
            )
        for owner in type(thing).__mro__:
            if owner.__module__.partition(".")[0] in _NOT_VISITED:
                continue
            slots = [
                key for key, each in vars(owner).items() if isinstance(each, MemberDescriptorType)
            ]
            self._add_named(name, thing, slots, owners)
            if id(owner) not in self._visited:
                self._visited[id(owner)] = owner
                plain = [
                    key
                    for key, each in vars(owner).items()
                    if isinstance(each, _PLAIN) and not key.startswith("__")
                ]
                self._add_named(owner.__qualname__, owner, plain, owners)

    def _add_named(
        self, name: str, thing: Any, keys: Collection[str], owners: tuple[Any, ...]
    ) -> None:
        if keys:
            self._add(
                name,
                owners,
                label=_ATTRIBUTE,
                values=lambda: [getattr(thing, key, _NOTHING) for key in keys],
                entries=lambda: {key: getattr(thing, key, _NOTHING) for key in keys},
                write=partial(setattr, thing),
            )

    def _add_number(self, name: str, owners: tuple[Any, ...], number: Callable[[], int]) -> None:
        """Compare a number that stands for a tensor or for a long container."""
        self.places.append(
            _Place(
                name,
                owners,
                label="{name}",
                values=lambda: [number()],
                entries=lambda: {"": number()},
                write=None,
            )
        )

    def _add(
        self, name: str, owners: tuple[Any, ...], *, is_module: bool = False, **place: Any
    ) -> None:
        self.places.append(_Place(name, owners, **place))
        entries = self.places[-1].last
        if is_module:  # without its hooks, weights and buffers
            entries = {
                key: each
                for key, each in entries.items()
                if key == "_modules" or not key.startswith("_")
            }
        self._visit_all(name, owners, entries, label=place["label"])

    def _visit_all(
        self, name: str, owners: tuple[Any, ...], entries: Mapping[Any, Any], *, label: str
    ) -> None:
        for key, value in entries.items():
            self._visit(label.format(name=name, key=key), value, owners)


def _is_equal(value: Any, before: Any) -> bool:
    if type(value) is not type(before) or not isinstance(value, _BY_VALUE):
        return False
    with suppress(Exception):  # arrays in a list, for example
        is_nan = value != value and before != before  # noqa: PLR0124
        return bool(value == before) or bool(is_nan)
    return False


def _as_json(value: Any) -> Any:
    """Return a plain value as JSON, or None for what a checkpoint does not hold."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list | tuple | dict) and len(value) > _MAX_ENTRIES:
        return None
    tensors: dict[str, Tensor] = {}
    try:
        as_json = split_state("", value, tensors)
    except CheckpointError:
        return None
    return None if tensors else as_json
