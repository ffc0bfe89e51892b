"""What a data set must be, found out before training: addressable, not empty, the same when read again, and which one it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from surefoot.errors import DataError, SurefootError
from surefoot.seeding import fold, seed_generators, stream_key, untouched

_HASHED_BYTES = 1 << 24  # of each tensor: 16 MiB spread over it, so that naming the data stays a matter of milliseconds


@runtime_checkable
class Fingerprinted(Protocol):
    """A data set that says itself which data it holds."""

    def fingerprint(self) -> dict[str, Any]:
        """JSON that differs where the data differ."""


def check_samples(dataset: Any, *, seed: int) -> int:
    """How many samples there are; raises `DataError` for what cannot be addressed by step or is not a function of its seed.

    One sample is read twice under the same seed: a data set that holds a generator of its own is not reached by seeding,
    and would differ after a resume.
    """
    if isinstance(dataset, tuple) and dataset and all(isinstance(part, Tensor) for part in dataset):
        sizes = [len(part) for part in dataset]
        if len(set(sizes)) > 1:
            raise DataError(f"the training tensors differ in length: {', '.join(str(size) for size in sizes)}")
        return _not_empty(sizes[0])
    if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "gather")) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{type(dataset).__name__} can only be iterated, so no step can be addressed in it (nor resumed at)\n"
            "  give it __getitem__(index) and __len__(), or read it once into a list, tensors, or token shards (surefoot.write_shards)"
        )
    try:
        samples = _not_empty(len(dataset))
    except TypeError as problem:
        raise DataError(f"{type(dataset).__name__} has no length: {problem}; give it __len__()") from problem
    if type(dataset) is not TensorDataset and not hasattr(dataset, "gather"):
        bits = fold(stream_key(seed, "augment"), 0, 0)
        with untouched():
            seed_generators(bits)
            first = read(dataset, 0, step=0)
            seed_generators(bits)
            again = read(dataset, 0, step=0)
        if not same(first, again):
            raise DataError(
                f"sample 0 of {type(dataset).__name__} differs when it is read twice under the same seed\n"
                "  it seems to hold a random generator of its own (random.Random(), np.random.default_rng(), torch.Generator()),\n"
                "  or to depend on time or on what was read before: draw from random, np.random or torch instead, which are seeded per sample"
            )
    return samples


def read(dataset: Any, sample: int, *, step: int) -> Any:
    """One sample; an exception inside the data set becomes a `DataError` that names sample and step."""
    try:
        return dataset[sample]
    except SurefootError:
        raise
    except Exception as problem:
        raise DataError(f"sample {sample} of {type(dataset).__name__} cannot be read (step {step}): {type(problem).__name__}: {problem}") from problem


def rows(batch: Any) -> int:
    """The first dimension of the first tensor in a nested batch: over how many samples a mean loss is taken."""
    found = _first_tensor(batch)
    if found is None or found.ndim == 0:
        raise DataError(f"no tensor with a first dimension in a batch of type {type(batch).__name__}: say what to count with Run(count=...)")
    return len(found)


def same(first: Any, second: Any) -> bool:
    """Whether two samples hold the same values; NaN equals NaN. What has no comparison is taken to be the same."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return first.shape == second.shape and torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second, equal_nan=first.dtype.kind in "fc")
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, str | bytes):
        return bool(first == second)
    if isinstance(first, Sequence):
        return len(first) == len(second) and all(same(one, other) for one, other in zip(first, second, strict=True))
    if isinstance(first, int | float | complex | bool):
        return first == second or first != first  # noqa: PLR0124
    if hasattr(first, "tobytes"):  # PIL images
        return bool(first.tobytes() == second.tobytes())
    return True


def fingerprint(dataset: Any) -> dict[str, Any]:
    """Which data these are, as JSON: type and length, and for tensors a hash of up to 16 MiB spread over each.

    A data set may say so itself with a method `fingerprint()`.
    """
    if isinstance(dataset, Fingerprinted):
        return {"type": type(dataset).__name__, **dataset.fingerprint()}
    tensors = dataset.tensors if type(dataset) is TensorDataset else dataset if isinstance(dataset, tuple) else ()
    found: dict[str, Any] = {"type": type(dataset).__name__, "samples": len(tensors[0]) if tensors else len(dataset)}
    if tensors:
        digest = sha256()
        for tensor in tensors:
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(_spread(tensor).contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        found["sha256"] = digest.hexdigest()
    return found


def _spread(tensor: Tensor) -> Tensor:
    bytes_each = max(1, tensor[0].numel() * tensor.element_size())
    stride = max(1, len(tensor) * bytes_each // _HASHED_BYTES)
    return tensor[::stride].detach()


def _not_empty(samples: int) -> int:
    if samples == 0:
        raise DataError("the training data set is empty: 0 samples\n  is the path right, and did a filter drop everything?")
    return samples


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)
