"""The values in a source of a stream, by name: what its rows depend on, seen without reading it."""

import random
import sys
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from inspect import isroutine
from pathlib import PurePath
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.config.user_code import globals_of
from surefoot.data.fingerprints import hash_of, hash_of_list

_MAX_VALUES = 100_000
_MAX_VISITED = 1_000  # entries; a longer container is hashed, and objects in it are not visited
_MAX_ENTRIES = 100_000  # of a longer list, evenly spaced entries are hashed
_SYSTEM_BITS = 64  # an entropy with more bits is that of the system, no seed that somebody wrote
_PLAIN = (bool, int, float, complex, bytes, np.generic, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


class NamedValue(NamedTuple):
    """A value in a source. The entries of a list share a name."""

    name: str
    value: Any


class Digest(NamedTuple):
    """Hashes of values: which rows they may decide, and in which order."""

    rows: str
    order: str


def values_of_source(source: Any) -> list[NamedValue]:
    """Return what is reachable from a source: attributes, closures, default arguments, and globals
    that the user's functions name.

    `value_places` visits only attributes that the code names. Here all are visited, because a
    difference between two ranks is only a suspicion.
    """
    values: list[NamedValue] = []
    visited: dict[int, Any] = {}  # keeps the objects alive, so that ids stay unique
    _visit(NamedValue("source", source), values, visited)
    for name, value in globals_of([*visited.values()]).items():
        _visit(NamedValue(name, value), values, visited)
    return values


def digests_of_values(values: Iterable[NamedValue]) -> dict[str, Digest]:
    """Return the hashes of values by name, the same on all ranks for the same values."""
    by_name = defaultdict[str, list[Digest]](list)
    for name, value in values:
        by_name[name].append(_digest(name, value))
    return {name: _together(digests) for name, digests in by_name.items()}


def generators_without_seed(values: Iterable[NamedValue]) -> list[str]:
    """Return the names of NumPy generators that were built without a seed. Others do not keep it."""
    names = []
    for name, value in values:
        if isinstance(value, np.random.Generator):
            sequence = value.bit_generator.seed_seq
            entropy = getattr(sequence, "entropy", None)
            if isinstance(entropy, int) and entropy.bit_length() > _SYSTEM_BITS:
                names.append(name)
    return names


# --- what is visited ------------------------------------------------------------------------------


def _visit(root: NamedValue, values: list[NamedValue], visited: dict[int, Any]) -> None:
    waiting = deque([root])
    while waiting and len(values) < _MAX_VALUES:
        named = waiting.popleft()
        values.append(named)
        if id(named.value) not in visited and not isinstance(named.value, (*_PLAIN, str)):
            visited[id(named.value)] = named.value
            with suppress(Exception):  # of the user's objects
                waiting += _parts(*named)


def _parts(name: str, thing: Any) -> list[NamedValue]:
    match thing:
        case list() | tuple() | dict() | set() | frozenset() | deque():
            if len(thing) > _MAX_VISITED:
                return []
            if isinstance(thing, dict):
                return [NamedValue(f"{name}[{key!r}]", value) for key, value in thing.items()]
            return [NamedValue(f"{name}[]", entry) for entry in thing]
        case partial():
            arguments = [NamedValue(f"{name}.args", thing.args), NamedValue(name, thing.keywords)]
            return [NamedValue(name, thing.func), *arguments]
        case MethodType():
            return [NamedValue(name, thing.__self__), NamedValue(name, thing.__func__)]
        case FunctionType():
            cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
            variables = [NamedValue(f"{name}.{key}", cell.cell_contents) for key, cell in cells]
            return [NamedValue(f"{name}.__defaults__", thing.__defaults__), *variables]
        case nn.Module() | Tensor() | ModuleType() | type():
            return []
    if _notes_its_process(type(thing)):
        return []
    parts = dict(getattr(thing, "__dict__", {}))
    for owner in type(thing).__mro__:
        for key, value in vars(owner).items():
            is_constant = isinstance(value, (*_PLAIN, *_CONTAINERS, str)) and key[:2] != "__"
            # a member of a class in C may be an address of memory, which differs in every process
            is_slot = isinstance(value, MemberDescriptorType) and "__slots__" in vars(owner)
            if is_constant or is_slot:
                parts.setdefault(key, getattr(thing, key, None))
    return [NamedValue(f"{name}.{key}", value) for key, value in parts.items()]


def _notes_its_process(kind: type) -> bool:
    """Return True for a lock, a logger or a file system, for example."""
    packages = {owner.__module__.partition(".")[0] for owner in kind.__mro__}
    is_of_stdlib = kind.__module__.partition(".")[0] in sys.stdlib_module_names
    is_namespace = issubclass(kind, SimpleNamespace | Namespace)
    return "fsspec" in packages or (is_of_stdlib and not is_namespace)


# --- how values are compared ----------------------------------------------------------------------


def _digest(name: str, value: Any) -> Digest:
    if "seed" in name.rpartition(".")[2].lower():
        return Digest("", _text(value))
    match value:
        case random.Random():
            return Digest("", str(value.getstate()))
        case np.random.Generator():
            return Digest("", str(value.bit_generator.state))
        case np.random.RandomState():
            return Digest("", str(value.get_state()))
        case torch.Generator():
            return Digest("", hash_of(value.get_state()))
        case dict():
            entries = [_digest(str(key), entry) for key, entry in value.items()]
            keys = sorted(map(str, value))
            return _together([Digest(hash_of(keys), ""), *entries])
        case list() | tuple() if len(value) <= _MAX_ENTRIES:
            return _together([Digest(_text(entry), "") for entry in value])
        case Tensor() | np.ndarray() if value.ndim == 1 and len(value) <= _MAX_ENTRIES:
            return _together([Digest(repr(entry), "") for entry in value.tolist()])
    return Digest(_text(value), "")


def _together(digests: list[Digest]) -> Digest:
    """Return the hashes of values whose order decides an order only."""
    rows = [digest.rows for digest in digests]
    orders = [digest.order for digest in digests]
    return Digest(_hash(sorted(rows)), _hash([rows, orders]))


def _text(value: Any) -> str:
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, list | tuple) and len(value) > _MAX_ENTRIES:
        return f"{len(value)} {hash_of_list(value)}"
    if isinstance(value, (*_CONTAINERS, Tensor, np.ndarray)):
        return hash_of(value)
    if isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    text = type(value).__qualname__
    # of a library in C, or a table of pandas; other objects have attributes with names of their own
    if not hasattr(value, "__dict__") or hasattr(value, "__array__"):
        with suppress(Exception):
            text = hash_of(repr(value).lower())  # leaves out addresses of memory
    return text


def _hash(value: Any) -> str:
    return sha256(repr(value).encode(errors="surrogatepass")).hexdigest()[:16]
