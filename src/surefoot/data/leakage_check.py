"""Data checks before the first step: distinct targets, and training samples that leaked into a
split.
"""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset

from surefoot.checkpoint.tensor_file import bytes_of
from surefoot.data.gathering import gather_fn, sample_count, tensors_of
from surefoot.data.nested import has_fields, leaves, tensors
from surefoot.data.order import Ids
from surefoot.data.sample_arguments import SampleArguments
from surefoot.seeding import fold, seed_generators, stream_key, untouched

_MAX_SAMPLES, _MAX_BYTES = 20_000, 1 << 24  # per data set
_MAX_SAMPLES_READ, _READING_S = (
    2_000,
    0.2,
)  # limits without gathering: samples per data set, seconds for all data sets
_PROBED = 16  # samples read to estimate the bytes per sample
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
class Cut(Protocol):
    """A data set of windows over a longer sequence; windows at different offsets may overlap."""

    def passages(self, ids: Ids) -> Batch:
        """Return one passage of each window in `ids` (see `passages` below), and all targets."""


def first_look(train: Any, splits: Mapping[str, Any], *, seed: int) -> dict[str, Any]:
    """Return the data record with the keys `samples`, `checked` (number of checked samples),
    `targets` and `overlap` (by split).

    `targets` has the number of `distinct` targets, the `most_common_fraction`, and the `entropy` in
    nats, and is absent for targets other than integers. The target is the second part of an (input,
    target) sample, or the entry "target", "targets", "label" or "labels" of a mapping. `overlap`
    has the number of `checked` samples, and the number of samples `overlapping` with training
    samples (equal bytes). Its flags: `among_all` (all indices of two subsets were compared),
    `passages` (passages of windows were compared), and `same` (the split is the training data).
    Unreadable samples are skipped.

    >>> inputs, labels = torch.arange(4.0), torch.tensor([0, 1, 0, 1])
    >>> look = first_look((inputs, labels), {"val": (inputs[2:], labels[2:])}, seed=0)
    >>> look["targets"], look["overlap"]
    ({'distinct': 2, 'most_common_fraction': 0.5, 'entropy': 0.6931471805599453}, {'val': {'checked': 2, 'overlapping': 2}})
    """
    with untouched():
        reading_s = _READING_S / (1 + len(splits))
        samples, targets = _read_samples(train, seed=seed, reading_s=reading_s)
        known = set(samples)
        look: dict[str, Any] = {"samples": sample_count(train), "checked": len(samples)}
        if targets is not None and targets.size:
            values, counts = np.unique(targets, return_counts=True)
            fractions = counts / counts.sum()
            look["targets"] = {
                "distinct": len(values),
                "most_common_fraction": float(fractions.max()),
                "entropy": abs(float(-(fractions * np.log(fractions)).sum())),  # -0.0 for one
            }
        look["overlap"] = {
            name: _overlap(train, split, known, seed=seed, reading_s=reading_s)
            for name, split in splits.items()
        }
    return look


def rows_as_bytes(*arrays: NDArray[Any]) -> list[bytes]:
    """Return the bytes of each row, concatenated over all arrays.

    >>> rows_as_bytes(np.array([[1, 2], [3, 4]], np.uint8), np.array([7, 8], np.uint8))
    [b'\\x01\\x02\\x07', b'\\x03\\x04\\x08']
    """
    plain = [
        np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
        for array in arrays
        if array.size
    ]
    joined = np.concatenate(plain, axis=1) if plain else np.empty((0, 1), np.uint8)
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
    long = max(1, min(limit, windows_NT.shape[1] // 4))
    gram, positions = min(4, long), windows_NT.shape[1] - long + 1
    rows: list[bytes] = []
    for start in range(0, len(windows_NT), 256):  # small blocks stay in the CPU cache
        part_NT = windows_NT[start : start + 256].astype(np.int64)
        hashes_NT = np.zeros((len(part_NT), positions), dtype=np.uint64)
        for offset in range(gram):
            hashes_NT += part_NT[:, offset : offset + positions].astype(np.uint64)
            hashes_NT *= np.uint64(0x9E3779B97F4A7C15)
            hashes_NT ^= hashes_NT >> np.uint64(29)
        firsts_N1 = hashes_NT.argmin(axis=1)[:, None]
        rows += rows_as_bytes(np.take_along_axis(part_NT, firsts_N1 + np.arange(long), axis=1))
    return rows


def _overlap(
    train: Any, split: Any, known: set[int], *, seed: int, reading_s: float
) -> dict[str, Any]:
    if _is_same(train, split):
        return {"checked": len(known), "overlapping": len(known), "same": True}
    if type(train) is Subset and type(split) is Subset and _is_same(train.dataset, split.dataset):
        own = np.asarray(split.indices)
        return {
            "checked": len(own),
            "overlapping": int(np.isin(own, np.asarray(train.indices)).sum()),
            "among_all": True,
        }
    samples, _ = _read_samples(split, seed=seed, reading_s=reading_s)
    counts = {"checked": len(samples), "overlapping": sum(sample in known for sample in samples)}
    return counts | ({"passages": True} if isinstance(split, Cut) else {})


def _is_same(first: Any, second: Any) -> bool:
    ours, theirs = tensors_of(first), tensors_of(second)
    return first is second or (bool(ours) and [*map(id, ours)] == [*map(id, theirs)])


def _read_samples(dataset: Any, *, seed: int, reading_s: float) -> tuple[list[int], Ids | None]:
    try:
        return _hash_samples(dataset, key=stream_key(seed, "first look"), reading_s=reading_s)
    except Exception:  # the record is optional: an unreadable sample must not end the run here
        return [], None


def _hash_samples(dataset: Any, *, key: int, reading_s: float) -> tuple[list[int], Ids | None]:
    """Hash samples in blocks, because the first samples alone are a poor estimate of the reading
    time.
    """

    reads = SampleArguments(dataset)

    def read_one(ids: Ids) -> Batch:
        seed_generators(
            key
        )  # one seed for all samples, so that equal samples are augmented equally
        reads.seed(key)
        sample = reads.dataset[int(ids[0])]
        if sample is None:  # a collate_fn leaves it out
            return [], np.empty(0, np.int64)
        return [b"".join(_bytes(part) for part in leaves(sample))], integer_targets(sample)

    start_s, generator, samples = (
        perf_counter(),
        np.random.default_rng(fold(key, 0)),
        sample_count(dataset),
    )
    if (read := _stored(dataset)) is None:
        read, chosen, at_a_time = read_one, _choose(samples, _MAX_SAMPLES_READ, generator), 1
    else:
        probe, _ = read(_choose(samples, _PROBED, generator))
        each = max(1, sum(map(len, probe)) // len(probe))
        chosen, at_a_time = (
            _choose(samples, max(_PROBED, min(_MAX_SAMPLES, _MAX_BYTES // each)), generator),
            512,
        )
        if chosen.size > at_a_time:
            chosen = generator.permutation(chosen)  # so that a time limit leaves a random subset
    rows: list[int] = []
    targets: list[Ids | None] = []
    for start in range(0, len(chosen), at_a_time):
        part, theirs = read(np.sort(chosen[start : start + at_a_time]))
        rows += map(hash, part)
        targets.append(theirs)
        if perf_counter() - start_s > reading_s:
            break
    known_targets = [part[part != IGNORED] for part in targets if part is not None]
    return rows, np.concatenate(known_targets) if known_targets and len(known_targets) == len(
        targets
    ) else None


def _stored(dataset: Any) -> Callable[[Ids], Batch] | None:
    if isinstance(dataset, Stored):
        return dataset.stored
    if isinstance(dataset, Cut):
        return dataset.passages
    if tensors := tensors_of(dataset):
        return lambda ids: _of_tensors(
            [part.detach()[torch.from_numpy(ids).to(part.device)] for part in tensors]
        )
    if type(dataset) is Subset:
        inner, indices = _stored(dataset.dataset), np.asarray(dataset.indices, dtype=np.int64)
        return None if inner is None else lambda ids: inner(indices[ids])
    gather = gather_fn(dataset)
    return None if gather is None else lambda ids: _of_tensors(gather(ids, np.zeros_like(ids)))


def _of_tensors(batch: Any) -> Batch:
    arrays = [part.detach().cpu().contiguous() for part in tensors(batch)]
    return rows_as_bytes(
        *(part.view(len(part), -1).view(torch.uint8).numpy() for part in arrays)
    ), integer_targets(batch)


def _bytes(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        return bytes(bytes_of(leaf.detach().cpu().contiguous()))
    if isinstance(leaf, int | float):
        leaf = np.asarray(leaf)
    if hasattr(leaf, "tobytes"):  # PIL images too
        return bytes(leaf.tobytes())
    return leaf if isinstance(leaf, bytes) else repr(leaf).encode()


def integer_targets(sample: Any) -> Ids | None:
    """Return the targets of a sample or a batch as a flat array; None if they are not integers."""
    label: Any = None
    named = vars(sample) if has_fields(sample) else sample
    if isinstance(named, Mapping):
        label = next(
            (named[name] for name in ("target", "targets", "label", "labels") if name in named),
            None,
        )
    elif isinstance(sample, list | tuple) and len(sample) > 1:
        label = sample[1]
    if isinstance(label, Tensor) and not label.is_floating_point():  # NumPy has no bfloat16
        label = label.detach().cpu().numpy()
    array = np.asarray(label if isinstance(label, int | np.integer | np.ndarray) else None)
    return array.reshape(-1).astype(np.int64) if array.dtype.kind in "iu" else None


def _choose(samples: int, limit: int, generator: np.random.Generator) -> Ids:
    if samples <= limit:
        return np.arange(samples, dtype=np.int64)
    return np.sort(generator.choice(samples, size=limit, replace=False, shuffle=False)).astype(
        np.int64
    )
