"""Values on which the samples of a data set depend: changes that the body of a loop makes are found
between two steps, and plain values are saved.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from surefoot.checkpoint.nested_state import join_state, split_state
from surefoot.data.value_places import (
    BY_VALUE,
    ENTRY,
    ITSELF,
    MAX_ENTRIES,
    PLAIN,
    Path,
    ValuePlace,
    Visitor,
    is_in_shared_memory,
)
from surefoot.errors import CheckpointError

_NOTHING = object()  # stands for a value that is not there


@dataclass(frozen=True)
class DataChange:
    """A value that the body of a loop changed, by its name for the user. `is_saved` is True if a
    checkpoint holds it, `is_shared` if all processes see the change.
    """

    name: str
    is_saved: bool
    is_shared: bool = False


class _Difference(NamedTuple):
    name: str
    place: ValuePlace
    value: Any


class DataValues:
    """The values on which samples depend, by name, as last compared.

    `roots` are data sets, collate functions and samplers. An attribute is compared if the code that
    reads samples names it, also one of a transform, a wrapped data set or settings that this code
    names. Plain values are compared by value, other objects by identity, tensors also by the
    counter of their changes, and arrays and long containers by some of their entries. Weights and
    globals are not compared. A value that reading a sample changes (a counter, a cache, a file that
    is opened late) is left out.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots = roots
        self.changed_by_reading: set[str] = set()
        self.changed_by_body: set[str] = set()
        self.changes: list[DataChange] = []
        self.refresh()

    def refresh(self) -> None:
        """Compare with the values as they are now from here on."""
        visitor = Visitor(left_out=self.changed_by_reading)
        for name, root in self.roots.items():
            visitor.visit(root, Path(name))
        self.places = visitor.places

    def note_reading(self) -> None:
        """Leave out what has changed since the last comparison: only samples were read."""
        names = set()
        for change in self._differences():
            names.add(change.name)
            if change.place.label == ENTRY:  # a cache that grows has new keys in every step
                names.add(change.place.path.name)
        if not names <= self.changed_by_reading:
            self.changed_by_reading |= names
            self.refresh()

    def compare(self, *, registered: Mapping[str, Any]) -> None:
        """Add to `changes` what has changed since the last comparison, but not by reading.

        `registered` has the objects of `run.register_state`, whose values a checkpoint holds.
        """
        differences = self._differences()
        if not differences:
            return
        registered_ids = set(map(id, registered.values()))
        for name, place, value in differences:
            if name in self.changed_by_reading:
                continue
            is_registered = any(id(owner) in registered_ids for owner in place.path.owners)
            if not is_registered:
                self.changed_by_body.add(name)
            is_plain = place.write is not None and _as_json(value) is not None
            owner = place.path.owners[-1]
            is_shared = isinstance(owner, Tensor) and is_in_shared_memory(owner)
            self.changes.append(DataChange(name, is_registered or is_plain, is_shared))

    def pop_changes(self) -> list[DataChange]:
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
            for name, value in values.items():
                key = place.key_of(name)
                if key is not None:
                    place.write(key, join_state(value, {}))
        self.changed_by_body.update(values)
        self.refresh()

    def _differences(self) -> list[_Difference]:
        differences = []
        has_other_objects = False
        for place in self.places:
            if place.is_same():
                continue
            entries = place.entries()
            for key in {**place.last, **entries}:
                value = entries.get(key, _NOTHING)
                before = place.last.get(key, _NOTHING)
                if value is before or _is_equal(value, before):
                    continue
                differences.append(_Difference(place.name_of(key), place, value))
                is_plain = isinstance(value, PLAIN) and isinstance(before, PLAIN)
                is_within = place.label == ITSELF
                has_other_objects = has_other_objects or not (is_plain or is_within)
            place.keep(entries)
        if has_other_objects:
            self.refresh()
        return differences


def _is_equal(value: Any, before: Any) -> bool:
    if type(value) is not type(before) or not isinstance(value, BY_VALUE):
        return False
    with suppress(Exception):  # arrays in a list, for example
        is_nan = value != value and before != before  # noqa: PLR0124
        return bool(value == before) or bool(is_nan)
    return False


def _as_json(value: Any) -> Any:
    """Return a plain value as JSON, or None for what a checkpoint does not hold."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list | tuple | dict) and len(value) > MAX_ENTRIES:
        return None
    tensors: dict[str, Tensor] = {}
    try:
        as_json = split_state("", value, tensors)
    except CheckpointError:
        return None
    return None if tensors else as_json
