"""Data checks before the first step: distinct targets, and training samples that leaked into a
split.
"""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from surefoot.checkpoint.tensor_file import bytes_of
from surefoot.data.gathering import gather_fn, sample_count, tensors_of
from surefoot.data.nested import leaves, tensors
from surefoot.data.order import Ids
from surefoot.data.sample_arguments import SampleArguments
from surefoot.data.stored_samples import (
    IGNORED,
    Batch,
    Stored,
    Windowed,
    integer_targets,
    rows_as_bytes,
)
from surefoot.seeding import fold, seed_generators, stream_key, untouched

_MAX_SAMPLES = 20_000  # of a data set
_MAX_BYTES = 1 << 24  # of a data set
_MAX_SAMPLES_READ = 2_000  # of a data set without gathering
_READING_S = 0.2  # for all data sets without gathering
_PROBED = 16  # samples read to estimate the bytes per sample


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
    overlap: dict[str, Any] = {
        "checked": len(samples),
        "overlapping": sum(sample in known for sample in samples),
    }
    if isinstance(split, Windowed):
        overlap["passages"] = True
    return overlap


def _is_same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    ours = [id(tensor) for tensor in tensors_of(first)]
    theirs = [id(tensor) for tensor in tensors_of(second)]
    return bool(ours) and ours == theirs


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
        # one seed for all samples, so that equal samples are augmented equally
        seed_generators(key)
        reads.seed(key)
        sample = reads.dataset[int(ids[0])]
        if sample is None:  # a collate_fn leaves it out
            return [], np.empty(0, np.int64)
        return [b"".join(_bytes(part) for part in leaves(sample))], integer_targets(sample)

    start_s = perf_counter()
    generator = np.random.default_rng(fold(key, 0))
    samples = sample_count(dataset)
    read = _stored(dataset)
    if read is None:
        read = read_one
        at_a_time = 1
        chosen = _choose(samples, _MAX_SAMPLES_READ, generator)
    else:
        at_a_time = 512
        probe, _ = read(_choose(samples, _PROBED, generator))
        sample_bytes = max(1, sum(len(sample) for sample in probe) // len(probe))
        limit = max(_PROBED, min(_MAX_SAMPLES, _MAX_BYTES // sample_bytes))
        chosen = _choose(samples, limit, generator)
        if chosen.size > at_a_time:
            chosen = generator.permutation(chosen)  # so that a time limit leaves a random subset
    hashes: list[int] = []
    targets: list[Ids] = []
    all_integer = True
    for start in range(0, len(chosen), at_a_time):
        block, block_targets = read(np.sort(chosen[start : start + at_a_time]))
        hashes += map(hash, block)
        if block_targets is None:
            all_integer = False
        else:
            targets.append(block_targets[block_targets != IGNORED])
        if perf_counter() - start_s > reading_s:
            break
    if targets and all_integer:
        return hashes, np.concatenate(targets)
    return hashes, None


def _stored(dataset: Any) -> Callable[[Ids], Batch] | None:
    if isinstance(dataset, Stored):
        return dataset.stored
    if isinstance(dataset, Windowed):
        return dataset.passages
    of_columns = tensors_of(dataset)
    if of_columns:
        return lambda ids: _of_tensors(
            [column.detach()[torch.from_numpy(ids).to(column.device)] for column in of_columns]
        )
    if type(dataset) is Subset:
        inner = _stored(dataset.dataset)
        indices = np.asarray(dataset.indices, dtype=np.int64)
        return None if inner is None else lambda ids: inner(indices[ids])
    gather = gather_fn(dataset)
    return None if gather is None else lambda ids: _of_tensors(gather(ids, np.zeros_like(ids)))


def _of_tensors(batch: Any) -> Batch:
    columns = []
    for tensor in tensors(batch):
        column = tensor.detach().cpu().contiguous()
        columns.append(column.view(len(column), -1).view(torch.uint8).numpy())
    return rows_as_bytes(*columns), integer_targets(batch)


def _bytes(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        return bytes(bytes_of(leaf.detach().cpu().contiguous()))
    if isinstance(leaf, int | float):
        leaf = np.asarray(leaf)
    if hasattr(leaf, "tobytes"):  # PIL images too
        return bytes(leaf.tobytes())
    if isinstance(leaf, bytes):
        return leaf
    return repr(leaf).encode()


def _choose(samples: int, limit: int, generator: np.random.Generator) -> Ids:
    if samples <= limit:
        return np.arange(samples, dtype=np.int64)
    chosen = generator.choice(samples, size=limit, replace=False, shuffle=False)
    return np.sort(chosen).astype(np.int64)
