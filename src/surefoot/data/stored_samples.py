"""Samples as bytes, without random augmentation, and their targets: by these, samples of two data
sets are compared.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from surefoot.data.nested import has_fields
from surefoot.data.order import Ids

IGNORED = -100  # the default ignore_index of cross-entropy

Batch = tuple[list[bytes], Ids | None]


@runtime_checkable
class Stored(Protocol):
    """A data set that can return its samples without random augmentation."""

    def stored(self, ids: Ids) -> Batch:
        """Return the bytes of each sample in `ids`, and all targets (None if the targets are not
        integers).
        """


@runtime_checkable
class Windowed(Protocol):
    """A data set of windows over a longer sequence; windows at different offsets may overlap."""

    def passages(self, ids: Ids) -> Batch:
        """Return one passage of each window in `ids` (see `passages` below), and all targets."""


def rows_as_bytes(*arrays: NDArray[Any]) -> list[bytes]:
    """Return the bytes of each row, concatenated over all arrays.

    >>> rows_as_bytes(np.array([[1, 2], [3, 4]], np.uint8), np.array([7, 8], np.uint8))
    [b'\\x01\\x02\\x07', b'\\x03\\x04\\x08']
    """
    columns = []
    for array in arrays:
        if array.size:
            rows = np.ascontiguousarray(array).reshape(len(array), -1)
            columns.append(rows.view(np.uint8))
    if not columns:
        return []
    joined = np.concatenate(columns, axis=1)
    return joined.view(f"V{joined.shape[1]}").ravel().tolist()


def passages(windows_NT: NDArray[Any], *, limit: int = 64) -> list[bytes]:
    """Return one passage per window of tokens: at most `limit` tokens and at most 25% of the
    window.

    A passage starts at the four tokens with the smallest hash, so overlapping windows often share a
    passage (Schleimer, Wilkerson and Aiken 2003, section 3: https://doi.org/10.1145/872757.872770).

    >>> text = np.random.default_rng(0).integers(0, 50, 100)
    >>> passages(text[None, 10:90]) == passages(text[None, 13:93])
    True
    """
    width = windows_NT.shape[1]
    long = max(1, min(limit, width // 4))
    gram = min(4, long)
    positions = width - long + 1
    rows: list[bytes] = []
    for start in range(0, len(windows_NT), 256):  # small blocks stay in the CPU cache
        part_NT = windows_NT[start : start + 256].astype(np.int64)
        hashes_NT = np.zeros((len(part_NT), positions), dtype=np.uint64)
        for offset in range(gram):
            hashes_NT += part_NT[:, offset : offset + positions].astype(np.uint64)
            hashes_NT *= np.uint64(0x9E3779B97F4A7C15)
            hashes_NT ^= hashes_NT >> np.uint64(29)
        firsts_N1 = hashes_NT.argmin(axis=1)[:, None]
        passages_NT = np.take_along_axis(part_NT, firsts_N1 + np.arange(long), axis=1)
        rows += rows_as_bytes(passages_NT)
    return rows


def integer_targets(sample: Any) -> Ids | None:
    """Return the targets of a sample or a batch as a flat array; None if they are not integers."""
    label: Any = None
    named = vars(sample) if has_fields(sample) else sample
    if isinstance(named, Mapping):
        for name in ("target", "targets", "label", "labels"):
            if name in named:
                label = named[name]
                break
    elif isinstance(sample, list | tuple) and len(sample) > 1:
        label = sample[1]
    if isinstance(label, Tensor) and not label.is_floating_point():  # NumPy has no bfloat16
        label = label.detach().cpu().numpy()
    if not isinstance(label, int | np.integer | np.ndarray):
        return None
    array = np.asarray(label)
    return array.reshape(-1).astype(np.int64) if array.dtype.kind in "iu" else None
