"""The batch of a list of samples, as torch's `default_collate` builds it, for more kinds of samples
and with other errors.
"""

from collections import UserDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from surefoot.data.fingerprints import Picture
from surefoot.data.nested import children, has_fields, is_opaque, leaves, rebuilt
from surefoot.errors import DataError

_NUMBERS = (bool, int, float, np.number, np.bool_)
_KNOWN = (*_NUMBERS, Tensor, np.ndarray, np.generic, complex, str, bytes, type(None))
_PAD = "make the shapes equal, or pad in Run(collate_fn=...), for example with torch.nn.utils.rnn.pad_sequence"
_CURE = "change it in the data set, or combine the samples in Run(collate_fn=...)"
_PICTURE = (
    "convert images in the data set: torch.from_numpy(np.array(image)), or torchvision's pil_to_tensor(image);\n"
    "Hugging Face data sets do it by dataset.with_format('torch')"
)
_OPAQUE = "combine the samples in Run(collate_fn=...), and count the targets of a batch in Run(count_fn=...)"


def collate(samples: Sequence[Any]) -> Any:
    """Return one batch: tensors are stacked, numbers become tensors, texts a list, and containers
    are combined part by part.

    Three rules are not torch's. The parts of a dataclass are combined. A list of numbers in a
    mapping or dataclass is one row of a tensor. A part that is None in all samples stays None.

    >>> batch = collate([{"ids": [1, 2], "name": "a"}, {"ids": [3, 4], "name": "b"}])
    >>> batch["ids"].tolist(), batch["name"]
    ([[1, 2], [3, 4]], ['a', 'b'])
    """
    first = samples[0]
    if type(first) is Tensor:
        return default_collate(list(samples))
    if first is None and all(sample is None for sample in samples):
        return None
    if has_fields(first):
        rows = [[*(children(sample) or {}).values()] for sample in samples]
        parts = [collate(_as_rows(column)) for column in zip(*rows, strict=True)]
        return rebuilt(first, parts)
    if isinstance(first, Mapping):
        if any(sample.keys() != first.keys() for sample in samples):
            raise ValueError("the keys of the samples differ")
        batch = {}
        for key in first:
            column = [sample[key] for sample in samples]
            batch[key] = collate(_as_rows(column))
        if isinstance(first, UserDict):
            # a `BatchEncoding` also holds the encoding of its own text, not that of the batch
            return type(first)(batch)
        return rebuilt(first, [*batch.values()])
    if isinstance(first, list | tuple):
        parts = [collate(column) for column in zip(*samples, strict=True)]
        return rebuilt(first, parts) if hasattr(first, "_fields") else parts
    if isinstance(first, np.ndarray):
        samples = [_plain_array(sample) for sample in samples]
    return default_collate(list(samples))


def why_not(samples: Sequence[Any], ids: Sequence[int]) -> tuple[str, str] | None:
    """Return why samples cannot be combined, and what to write instead, or None if nothing is
    known. `ids` are the numbers of the samples.

    >>> why, _ = why_not([torch.ones(2), torch.ones(3)], [7, 9])
    >>> why
    'dataset[i] is a tensor of shape (2) in sample 7, and a tensor of shape (3) in sample 9'
    """
    with suppress(Exception):  # a list of lists may be no tensor
        return _difference(samples, ids, "dataset[i]") or _unknown(samples[0])
    return None


def _plain_array(array: Any) -> Any:
    """Return an array of a subclass as one that torch takes. Raises `DataError` if a value of it is
    masked.
    """
    if type(array) is not np.ndarray and np.ma.is_masked(array):
        raise DataError(
            "array-masked",
            problem=f"a sample holds a masked array of shape {array.shape}",
            reason="a tensor has no mask, so the values below the mask would be trained on",
            remedy=[
                "fill them: array.filled(0)",
                "or give values and mask as two entries of the sample: array.filled(0) and"
                " np.ma.getmaskarray(array)",
            ],
            shape=list(array.shape),
        )
    return np.asarray(array)


def _as_rows(column: Sequence[Any]) -> Sequence[Any]:
    """Return a column with tensors for its lists, if these are lists of numbers."""
    number = column[0]
    if not isinstance(number, list):
        return column
    while isinstance(number, list) and number:
        number = number[0]
    if not isinstance(number, (*_NUMBERS, list)):
        return column
    return [_row(entry, number) if isinstance(entry, list) else entry for entry in column]


def _row(numbers: list[Any], first: Any) -> Tensor:
    if isinstance(first, np.generic):
        return torch.from_numpy(np.array(numbers))
    return torch.tensor(numbers)


def _difference(samples: Sequence[Any], ids: Sequence[int], name: str) -> tuple[str, str] | None:
    first = samples[0]
    texts = [_described(sample) for sample in samples]
    for sample, text in zip(ids, texts, strict=True):
        if text != texts[0]:
            cure = _PAD if "shape" in texts[0] and "shape" in text else _CURE
            return f"{name} is {texts[0]} in sample {ids[0]}, and {text} in sample {sample}", cure
    if is_opaque(first):
        return None
    has_names = isinstance(first, Mapping) or has_fields(first)
    parts_of_samples = [children(sample) or {} for sample in samples]
    for key in parts_of_samples[0]:
        column: Sequence[Any] = [parts[key] for parts in parts_of_samples]
        if has_names:
            column = _as_rows(column)
        difference = _difference(column, ids, f"{name}{key}")
        if difference is not None:
            return difference
    return None


def _described(sample: Any) -> str:
    if isinstance(sample, Tensor | np.ndarray):
        return f"a tensor of shape ({', '.join(map(str, sample.shape))})"
    if isinstance(sample, _NUMBERS):
        return "a number"
    name = "None" if sample is None else f"a {type(sample).__name__}"
    parts = None if is_opaque(sample) else children(sample)
    if parts is None:
        return name
    return f"{name} with the parts {', '.join(parts) or '(none)'}"


def _unknown(sample: Any) -> tuple[str, str] | None:
    for leaf in leaves(sample, into_opaque=False):
        if isinstance(leaf, Picture):
            return "a sample holds a PIL image", _PICTURE
        if is_opaque(leaf):
            what = f"a sample holds a {type(leaf).__name__}, which only its own library can combine"
            return what, _OPAQUE
        if not isinstance(leaf, _KNOWN):
            what = (
                f"a sample holds a {type(leaf).__name__}, which does not become a tensor by itself"
            )
            return what, _CURE
    return None
