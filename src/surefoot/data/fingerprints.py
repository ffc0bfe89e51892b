"""Hashes of data: a few samples, a micro-batch, a list of samples. Equal values have equal hashes.

Which data a data set says it holds is `dataset_checks.fingerprint`; hashes of two starts are compared in `checkpoint/changes.py`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import sha256
from pathlib import PurePath
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset

from surefoot.data.gathering import by_sample, gather_fn
from surefoot.seeding import fold, seed_generators, stream_key, untouched

_MAX_BYTES = 1 << 24  # of one tensor, and of one list of samples


@runtime_checkable
class Picture(Protocol):
    """A picture of PIL."""

    mode: str
    size: tuple[int, int]

    def tobytes(self) -> bytes:
        """Its pixels."""


@runtime_checkable
class Concatenated(Protocol):
    """A data set that is several others, one after the other."""

    def concatenated(self) -> Mapping[str, Any]:
        """The others by name."""


def hash_of(value: Any, unknown: dict[str, None] | None = None) -> str:
    """A hash of a nested value; `unknown` takes the kinds of objects that are not looked into.

    Mappings and sets count in any order; of a text neither addresses nor the folders of an absolute path count.

    >>> hash_of({"x": torch.ones(2), "y": 3}) == hash_of({"y": 3, "x": torch.ones(2)}), hash_of(1.0) == hash_of(2.0)
    (True, False)
    """
    digest = sha256()
    for piece in _pieces(value, {} if unknown is None else unknown):
        digest.update(piece)
    return digest.hexdigest()[:16]


def hash_of_list(samples: Sequence[Any]) -> str:
    """A hash of a list of samples: of up to 2,000 of them and 16 MiB, evenly spread, the ends among them."""
    size_bytes = max(1, sum(map(len, _pieces(samples[0], {}))))
    count = min(len(samples), max(3, min(2_000, _MAX_BYTES // size_bytes)))
    return hash_of([samples[index] for index in np.linspace(0, len(samples) - 1, count).astype(int).tolist()])


def hashes_of_samples(dataset: Any, *, seed: int, gather: bool, unknown: dict[str, None]) -> dict[str, str]:
    """Hashes of the first, middle and last sample, of two that the seed draws, and of one of up to 64 parts, by their names.

    Each is read as in the first epoch, under its own random numbers. An unreadable one is left out: the step that needs it reports
    why. `gather` tells whether batches are gathered where a data set can do that. The global generators are left as they were.
    """
    gathered = gather_fn(dataset) if gather else None
    dataset = by_sample(dataset)
    samples, key, hashes = len(dataset), stream_key(seed, "augment"), dict[str, str]()
    drawn = np.random.default_rng(fold(stream_key(seed, "fingerprint"), samples)).integers(samples, size=2).tolist()
    chosen = {sample: f"sample {sample}" for sample in (0, samples // 2, samples - 1, *drawn)}
    parts = list(_ranges(dataset))
    for index in np.linspace(0, len(parts) - 1, min(len(parts), 64)).astype(int).tolist():
        name, start, stop = parts[index]
        chosen[(start + stop) // 2] = f"sample {(start + stop) // 2} (part {name})"
    with untouched():
        for sample, label in chosen.items():
            seed_generators(fold(fold(key, 0), sample))
            try:
                read = dataset[sample] if gathered is None else gathered(np.array([sample]), np.zeros(1, np.int64))
                hashes[label] = hash_of(read, unknown)
            except Exception:  # of the user's code, whatever it is
                continue
    return hashes


def parts_of(dataset: Any) -> Mapping[str, Any]:
    """The data sets that one is made of, by name; none for any other."""
    if type(dataset) not in (ConcatDataset, StackDataset):
        return dataset.concatenated() if isinstance(dataset, Concatenated) else {}
    inner = dataset.datasets
    return inner if isinstance(inner, dict) else {str(index): part for index, part in enumerate(inner)}


def all_within(dataset: Any) -> Iterator[Any]:
    """A data set, and those that it is a subset of or made of."""
    yield dataset
    for part in [dataset.dataset] if type(dataset) is Subset else parts_of(dataset).values():
        yield from all_within(part)


def _ranges(dataset: Any, start: int = 0, prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Name, first sample and end of each part of a concatenation, of parts of parts too."""
    for name, part in {} if type(dataset) is StackDataset else parts_of(dataset).items():
        yield from list(_ranges(part, start, f"{prefix}{name}.")) or [(f"{prefix}{name}", start, start + len(part))]
        start += len(part)


def _pieces(value: Any, unknown: dict[str, None], depth: int = 0) -> Iterator[bytes]:
    kind = type(value).__qualname__
    if isinstance(value, Tensor) and value.layout == torch.strided:
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        rows = value.detach()[:: _stride(value.shape, value.nbytes)] if value.ndim else value.detach()
        yield rows.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        yield f"{value.dtype.str} {value.shape}".encode()
        array = np.asarray(value)
        yield (array[:: _stride(array.shape, array.nbytes)] if array.ndim else array).tobytes()
    elif value is None or isinstance(value, bool | int | float | complex | bytes | Enum):
        yield f"{kind} {value!r};".encode()
    elif isinstance(value, list | tuple) and set(map(type, value)) <= {bool, int, float}:
        yield f"{kind} {list(value)!r};".encode()
    elif isinstance(value, str | PurePath):
        text = PurePath(value).name if re.fullmatch(r"(/[^/\s]+)+", str(value)) else str(value)
        yield f"{kind} {re.sub('0x[0-9a-f]{6,}', '0x', text)};".encode(errors="surrogatepass")
    elif isinstance(value, Picture):
        yield f"{value.mode} {value.size}".encode() + value.tobytes()
    elif isinstance(value, AbstractSet):
        yield f"set {sorted(hash_of(each, unknown) for each in value)}".encode()
    elif depth < 32 and (parts := _parts_of_value(value)) is not None:
        yield f"{kind} {len(parts)}".encode()
        for part in parts:
            yield from _pieces(part, unknown, depth + 1)
    else:
        unknown[kind] = None
        yield kind.encode()


def _parts_of_value(value: Any) -> Sequence[Any] | None:
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=str) for part in (key, value[key])]
    if isinstance(value, np.ndarray):
        return list(value.flat)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return value if isinstance(value, Sequence) else None


def _stride(shape: Sequence[int], size_bytes: int) -> int:
    return min(max(1, size_bytes // _MAX_BYTES), max(1, shape[0]))
