"""Places with values on which samples depend: attributes, entries of containers, and variables of
functions that the code that reads samples names.
"""

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Container, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from operator import is_
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader

from surefoot.data.read_names import names_in, read_names

PLAIN = (bool, int, float, str, bytes, complex, np.generic, type(None))
BY_VALUE = (*PLAIN, tuple, list, dict, set, frozenset)
# how values are named
ATTRIBUTE = "{name}.{key}"
ENTRY = "{name}[{key!r}]"
ITSELF = "{name}"
MAX_ENTRIES = 64  # a longer container is compared as a whole, by some of its entries
_SOME = 256
_MAX_PLACES = 100
_MAX_DEPTH = 8
_OF_LOADER = frozenset({"dataset", "collate_fn"})
_OF_CLASS = (*BY_VALUE, MemberDescriptorType)  # constants and slots


class Path(NamedTuple):
    """How a thing is reached: its name for the user, the objects that hold it, and the names in the
    code that reads it.
    """

    name: str
    owners: tuple[Any, ...] = ()
    names: frozenset[str] = frozenset()


class ValuePlace:
    """Values by their keys, as they were when last compared.

    `values` returns at least all of them, without a copy where it can: most steps compare only
    these, by identity. `write` sets the value of a key.
    """

    def __init__(
        self,
        path: Path,
        entries: Callable[[], Mapping[Any, Any]],
        label: str,
        write: Callable[[Any, Any], None] | None = None,
        values: Callable[[], Collection[Any]] | None = None,
    ) -> None:
        self.path = path
        self.entries = entries
        self.label = label
        self.write = write
        self.values = values
        self.keep(entries())

    def keep(self, entries: Mapping[Any, Any]) -> None:
        self.last = dict(entries)
        self.last_values = [] if self.values is None else [*self.values()]

    def is_same(self) -> bool:
        if self.label == ITSELF:  # a number or bytes that stand for a whole value
            return self.entries() == self.last
        if self.values is None:
            return False
        values = self.values()
        last_values = self.last_values
        return len(values) == len(last_values) and all(map(is_, values, last_values))

    def name_of(self, key: Any) -> str:
        return self.label.format(name=self.path.name, key=key)

    def key_of(self, name: str) -> Any:
        """Return the key of a value by its name, also of an attribute that is not set yet."""
        for key in self.last:
            if self.name_of(key) == name:
                return key
        if self.label != ATTRIBUTE:
            return None
        attribute = name.removeprefix(f"{self.path.name}.")
        return attribute if attribute in self.path.names else None


class Visitor:
    """Finds the places behind data sets, collate functions and samplers. Values whose names are
    `left_out` are not entered.
    """

    def __init__(self, left_out: Container[str]) -> None:
        self.places: list[ValuePlace] = []
        self.left_out = left_out
        self.visited: dict[int, frozenset[str]] = {}  # names by the id of a thing
        self.compared: dict[int, frozenset[str]] = {}  # names of attributes by the id of an object

    def visit(self, thing: Any, path: Path) -> None:
        before = self.visited.get(id(thing))
        is_known = before is not None and (path.names <= before or isinstance(thing, BY_VALUE))
        is_far = len(path.owners) >= _MAX_DEPTH or len(self.places) >= _MAX_PLACES
        if is_known or is_far or path.name in self.left_out or _is_left_out(thing):
            return
        self.visited[id(thing)] = path.names | (before or frozenset())
        with suppress(Exception):  # of the user's objects
            self._enter(thing, path._replace(owners=(*path.owners, thing)))

    def _enter(self, thing: Any, path: Path) -> None:
        match thing:
            case Tensor():
                self._add_proof(path, lambda: thing._version)
            case np.ndarray():
                if _has_own_memory(thing):
                    self._add_proof(path, lambda: _spread(thing.flat, thing.size).tobytes())
            case tuple() | list() | dict() | set() | deque():
                self._enter_container(thing, path)
            case partial():
                self.visit(thing.func, path)
                self.visit(thing.args, path._replace(name=f"{path.name}.args"))
                self.visit(thing.keywords, path._replace(name=f"{path.name}.keywords"))
            case MethodType():
                called = path.names | {thing.__name__}
                self.visit(thing.__self__, path._replace(names=called))
            case FunctionType():
                self._enter_function(thing, path)
            case DataLoader():
                self._enter_object(thing, path._replace(names=_OF_LOADER))
            case _ if not _is_of_stdlib(thing):
                names = read_names(type(thing), path.names)
                before = self.compared.get(id(thing), frozenset())  # through another owner
                self.compared[id(thing)] = names | before
                if not names <= before:
                    self._enter_object(thing, path._replace(names=names - before))

    def _enter_container(self, thing: Any, path: Path) -> None:
        match thing:
            case tuple():  # its owner has another one if an entry changes
                for index, entry in enumerate(thing[:MAX_ENTRIES]):
                    self.visit(entry, path._replace(name=f"{path.name}[{index}]"))
            case dict() if path.names & thing.keys():  # by constants, as in settings["rate"]
                named = partial(_named, thing, path.names)
                self._add(ValuePlace(path, named, ENTRY, thing.__setitem__))
            case dict() if len(thing) <= MAX_ENTRIES:
                self._add(ValuePlace(path, lambda: thing, ENTRY, thing.__setitem__, thing.values))
            case list() | deque() if len(thing) <= MAX_ENTRIES:
                numbered = partial(_numbered, thing)
                self._add(ValuePlace(path, numbered, ENTRY, thing.__setitem__, lambda: thing))
            case list():
                self._add_proof(path, lambda: (len(thing), *_spread(thing, len(thing))))
            case dict() | deque() | set():
                values = thing.values() if isinstance(thing, dict) else thing
                self._add_proof(path, lambda: (len(thing), *islice(values, _SOME)))

    def _enter_function(self, function: FunctionType, path: Path) -> None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

        def variables() -> dict[str, Any]:
            return {key: cell.cell_contents for key, cell in cells.items()}

        def write(key: str, value: Any) -> None:
            cells[key].cell_contents = value

        path = path._replace(names=frozenset(names_in(function)))
        self._add(ValuePlace(path, variables, ATTRIBUTE, write))

    def _enter_object(self, thing: Any, path: Path) -> None:
        attributes: dict[str, Any] = getattr(thing, "__dict__", {})
        of_class = set()
        for owner in type(thing).__mro__:
            for key, value in _named(vars(owner), path.names).items():
                if isinstance(value, _OF_CLASS):
                    of_class.add(key)

        def entries() -> dict[str, Any]:
            named = _named(attributes, path.names)
            for key in of_class:
                named[key] = getattr(thing, key, None)
            return named

        if of_class or hasattr(thing, "__dict__"):
            values = None if of_class else attributes.values
            self._add(ValuePlace(path, entries, ATTRIBUTE, partial(setattr, thing), values))

    def _add(self, place: ValuePlace) -> None:
        self.places.append(place)
        for key, value in place.last.items():
            self.visit(value, place.path._replace(name=place.name_of(key)))

    def _add_proof(self, path: Path, proof: Callable[[], Any]) -> None:
        """Add a value that stands for all of a tensor, an array or a long container."""
        self.places.append(ValuePlace(path, lambda: {"": proof()}, ITSELF))


def _is_left_out(thing: Any) -> bool:
    """Return True for what is only compared by identity: among others models, and the tables of
    other libraries, which hold caches.
    """
    if isinstance(thing, nn.Module):
        return next(thing.parameters(), None) is not None
    is_table = hasattr(type(thing), "__array__") and not isinstance(thing, Tensor | np.ndarray)
    return is_table or isinstance(thing, (*PLAIN, type, ModuleType, nn.Parameter))


def _is_of_stdlib(thing: Any) -> bool:
    """Return True for a logger, for example, whose caches change with every import."""
    package = type(thing).__module__.partition(".")[0]
    return package in sys.stdlib_module_names and not isinstance(thing, SimpleNamespace | Namespace)


def _has_own_memory(array: np.ndarray[Any, Any]) -> bool:
    """Return True for an array that is no file, and that no other process sees."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, Tensor):
        return not is_in_shared_memory(owner)
    return owner is None


def is_in_shared_memory(tensor: Tensor) -> bool:
    """Return True for a tensor on the host whose changes all processes see."""
    return bool(tensor.is_cpu and tensor.is_shared())  # type: ignore[no-untyped-call]


def _named(entries: Mapping[Any, Any], names: frozenset[str]) -> dict[Any, Any]:
    return {key: value for key, value in entries.items() if key in names}


def _numbered(entries: Collection[Any]) -> dict[int, Any]:
    return dict(enumerate(entries))


def _spread(entries: Any, size: int) -> Any:
    """Return some entries of a list or an array, at even distances."""
    return entries[:: max(1, size // _SOME)]
