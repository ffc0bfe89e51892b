"""Hashes of samples, micro-batches and lists of samples; equal values have equal hashes."""

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import sha256
from itertools import chain
from pathlib import PurePath
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset

from surefoot.checkpoint.tensor_file import bytes_of
from surefoot.data.gathering import by_sample, gather_fn
from surefoot.data.nested import children, is_opaque
from surefoot.data.sample_arguments import Concatenated, SampleArguments
from surefoot.seeding import fold, seed_generators, stream_key, untouched

_MAX_DEPTH = 32  # a value may hold itself
_MAX_BYTES = 1 << 24  # limit of hashed bytes per tensor, and per list of samples


@runtime_checkable
class Picture(Protocol):
    """A PIL image."""

    mode: str
    size: tuple[int, int]

    def tobytes(self) -> bytes:
        """Return the pixel bytes."""


def hash_of(value: Any, unknown: dict[str, None] | None = None) -> str:
    """Return a hash of a nested value; add the names of types without hashable contents to
    `unknown`.

    The hash ignores the order of mappings and sets, memory addresses in strings, and the
    directories of absolute paths.

    >>> (
    ...     hash_of({"x": torch.ones(2), "y": 3}) == hash_of({"y": 3, "x": torch.ones(2)}),
    ...     hash_of(1.0) == hash_of(2.0),
    ... )
    (True, False)
    """
    digest = sha256()
    for piece in _pieces(value, {} if unknown is None else unknown):
        digest.update(piece)
    return digest.hexdigest()[:16]


def hash_of_list(samples: Sequence[Any]) -> str:
    """Return a hash of evenly spaced samples, including the first and the last: at most 2,000
    samples or about 16 MiB.
    """
    return hash_of([samples[index] for index in spaced(samples[0], len(samples))])


def hash_of_hugging_face(dataset: Any) -> str:
    """Return a hash of evenly spaced rows of a `datasets.Dataset` as they are stored, before any
    format or transform.

    The data set's own fingerprint depends on the files of its cache and their times, and on
    functions that may have none.
    """
    stored = dataset.with_format("arrow", columns=dataset.format["columns"])
    return hash_of(stored[spaced(stored[0].to_pylist(), len(stored))].to_pylist())


def spaced(first: Any, count: int) -> list[int]:
    """Return evenly spaced indices of `count` samples like `first`: at most 2,000, or about 16
    MiB.
    """
    sample_bytes = max(1, sum(map(len, _pieces(first, {}))))
    most = max(3, min(2_000, _MAX_BYTES // sample_bytes))
    return [int(index) for index in np.linspace(0, count - 1, min(count, most))]


def hashes_of_samples(
    dataset: Any, *, seed: int, gather: bool, unknown: dict[str, None]
) -> dict[str, str]:
    """Return hashes by name of the first, middle and last samples, two random samples, and one
    sample from up to 64 parts.

    Each sample is read (or gathered, if `gather` is true) under its own seed, as in the first
    epoch. Unreadable samples are skipped.
    """
    gathered = gather_fn(dataset) if gather else None
    dataset = by_sample(dataset)
    count = len(dataset)
    rng = np.random.default_rng(fold(stream_key(seed, "fingerprint"), count))
    random_samples = rng.integers(count, size=2).tolist()
    labels = {}
    for sample in (0, count // 2, count - 1, *random_samples):
        labels[sample] = f"sample {sample}"
    parts = list(_ranges(dataset))
    for index in np.linspace(0, len(parts) - 1, min(len(parts), 64)).astype(int).tolist():
        name, start, stop = parts[index]
        middle = (start + stop) // 2
        labels[middle] = f"sample {middle} (part {name})"
    key = stream_key(seed, "augment")
    arguments = SampleArguments(dataset)
    hashes = {}
    with untouched():
        for sample, label in labels.items():
            bits = fold(key, 0, sample)
            seed_generators(bits)
            arguments.seed(bits)
            try:
                if gathered is None:
                    value = arguments.dataset[sample]
                else:
                    value = gathered(np.array([sample]), np.zeros(1, np.int64))
                hashes[label] = hash_of(value, unknown)
            except Exception:  # user code may raise anything
                continue
    return hashes


def parts_of(dataset: Any) -> Mapping[str, Any]:
    """Return the parts of a concatenated or stacked data set by name, or an empty mapping for other
    data sets.
    """
    if type(dataset) not in (ConcatDataset, StackDataset):
        return dataset.concatenated() if isinstance(dataset, Concatenated) else {}
    if isinstance(dataset.datasets, dict):
        return dataset.datasets
    return {str(index): part for index, part in enumerate(dataset.datasets)}


def all_within(dataset: Any) -> Iterator[Any]:
    """Yield a data set and, recursively, the parents of subsets and the parts of concatenations."""
    yield dataset
    if type(dataset) is Subset:
        yield from all_within(dataset.dataset)
    for part in parts_of(dataset).values():
        yield from all_within(part)


def _ranges(dataset: Any, start: int = 0, prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Yield the name, the first sample and the end of each innermost part of a concatenation."""
    if type(dataset) is StackDataset:  # each of its parts has all samples
        return
    for name, part in parts_of(dataset).items():
        within = list(_ranges(part, start, f"{prefix}{name}."))
        yield from within or [(f"{prefix}{name}", start, start + len(part))]
        start += len(part)


def _pieces(value: Any, unknown: dict[str, None], depth: int = 0) -> Iterator[bytes]:
    kind = type(value).__qualname__
    if isinstance(value, Tensor) and value.layout == torch.strided:
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield bytes_of(_some_rows(value.detach()).cpu().contiguous()).tobytes()
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        yield f"{value.dtype.str} {value.shape}".encode()
        yield _some_rows(np.asarray(value)).tobytes()
    elif value is None or isinstance(value, bool | int | float | complex | bytes | Enum):
        yield f"{kind} {value!r};".encode()
    elif isinstance(value, list | tuple) and set(map(type, value)) <= {bool, int, float}:
        yield f"{kind} {list(value)!r};".encode()
    elif isinstance(value, str | PurePath):
        text = str(value)
        if re.fullmatch(r"(/[^/\s]+)+", text):
            text = PurePath(text).name
        yield f"{kind} {re.sub('0x[0-9a-f]{6,}', '0x', text)};".encode(errors="surrogatepass")
    elif isinstance(value, Picture):
        yield f"{value.mode} {value.size}".encode() + value.tobytes()
    elif isinstance(value, AbstractSet):
        yield f"set {sorted(hash_of(member, unknown) for member in value)}".encode()
    else:
        parts = _parts_of_value(value) if depth < _MAX_DEPTH else None
        if parts is None:
            unknown[kind] = None
            yield kind.encode()
            return
        yield f"{kind} {len(parts)}".encode()
        for part in parts:
            yield from _pieces(part, unknown, depth + 1)


def _parts_of_value(value: Any) -> Sequence[Any] | None:
    if isinstance(value, Mapping):
        ordered = [(key, value[key]) for key in sorted(value, key=str)]
        return [*chain.from_iterable(ordered)]
    if isinstance(value, np.ndarray):
        return list(value.flat)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Sequence):
        return value
    if is_opaque(value):
        attributes = children(value) or {}
        return [*chain.from_iterable(attributes.items())]
    return None


def _some_rows(array: Any) -> Any:
    """Return rows of a tensor or an array at even distances, about `_MAX_BYTES` of them."""
    if array.ndim == 0:
        return array
    distance = max(1, array.nbytes // _MAX_BYTES)
    return array[:: min(distance, max(1, len(array)))]
