"""Checks of a data set before training, and the fingerprint of its data."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from surefoot.config.numpy_numbers import plain_number
from surefoot.data.fingerprints import hash_of, hash_of_hugging_face, hash_of_list, parts_of
from surefoot.data.gathering import (
    Gather,
    Gathers,
    gather_fn,
    gathered,
    is_hugging_face,
    is_tensors,
    sample_count,
    tensors_of,
)
from surefoot.data.nested import is_opaque, leaves, tensors
from surefoot.data.reading import read_each
from surefoot.data.sample_arguments import SampleArguments
from surefoot.errors import ConfigError, DataError, Setting
from surefoot.seeding import fold, seed_generators, stream_key, untouched

_NAMED_PARTS = 64  # if a data set has more parts, one hash covers all of them
_TABLES = {  # classes of pyarrow, pandas, polars and lance
    *("Table", "RecordBatch", "DataFrame", "LazyFrame"),
    *("FileSystemDataset", "UnionDataset", "InMemoryDataset", "LanceDataset"),
    *("ParquetFile", "ParquetDataset", "Scanner", "LanceScanner"),
}
_MAX_COLUMNS = 8  # a longer list or tuple of arrays is a data set, whose samples are arrays
_ENDLESS = 1 << 62  # what an endless data set says of its length: often sys.maxsize
# reads of sample 0; two other samples get half as many. 8 coin flips agree with probability 1/128
_READINGS = 8


@runtime_checkable
class Fingerprinted(Protocol):
    """A data set that computes its own fingerprint."""

    def fingerprint(self) -> dict[str, Any]:
        """Return JSON values that change if the data change."""


def is_stream(train: Any) -> bool:
    """Return True for a data set that can only be iterated, and for a function, which returns an
    iterator.
    """
    if isinstance(train, DataLoader):
        return isinstance(train.dataset, IterableDataset)
    if isinstance(train, IterableDataset):
        return True
    if hasattr(train, "__getitem__") or isinstance(train, Gathers | set | frozenset | type):
        return False
    return callable(train) or hasattr(train, "__iter__")


def check_samples(
    dataset: Any, *, seed: int, batch_size: int | None = None, collates: bool = False
) -> int:
    """Return the number of samples; raise `DataError` if the data set is not indexable or not
    repeatable.

    The first, middle and last samples are read several times under one seed, or gathered under
    different seeds. If the reads differ, a resumed run would train on other samples. A list of
    batches is refused, unless the user's own `collate_fn` makes batches of its entries (`collates`).
    """
    name = type(dataset).__name__
    if isinstance(dataset, list) and batch_size is not None and not collates:
        _refuse_batches(dataset, batch_size)
    instead = _what_instead(dataset)
    if instead is not None:
        what, cure = instead
        raise DataError(
            "data-set-of-other-kind",
            problem=f"the data set is {what}, and its samples cannot be indexed",
            remedy=cure,
            kind=name,
        )
    if is_tensors(dataset):
        lengths = [len(tensor) for tensor in dataset]
        if len(set(lengths)) > 1:
            raise DataError(
                "tensors-differ-in-length",
                problem="the tensors of a data set differ in length:"
                f" {', '.join(map(str, lengths))}",
                lengths=lengths,
            )
    gather = gather_fn(dataset)
    is_indexed = gather is not None or hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not is_indexed:
        iterated = "data" if hasattr(dataset, "__iter__") else "data()"  # of a function
        raise DataError(
            "data-set-only-iterated",
            problem=f"{name} can only be iterated, so its samples have no numbers",
            reason="only train_data by itself may be a stream",
            remedy=f"read a part of it into a list: list(itertools.islice({iterated}, 1000)), or"
            " add __getitem__(index) and __len__()",
            kind=name,
        )
    samples = count_samples(dataset)
    if samples == 0:
        raise DataError(
            "data-set-empty",
            problem=f"the data set is empty: {name} has 0 samples",
            remedy="check the path, and any filter of the samples",
            kind=name,
        )
    with untouched():
        _check_repeats(dataset, gather, seed, samples)
    return samples


def count_samples(dataset: Any) -> int:
    """Return the number of samples; raise `DataError` for a data set without a length, or with one
    that stands for no end.
    """
    name = type(dataset).__name__
    try:
        samples = sample_count(dataset)
    except OverflowError:  # of a length that is no index
        samples = _ENDLESS
    except (TypeError, NotImplementedError) as problem:
        raise DataError(
            "data-set-without-length",
            problem=f"{name} does not report its number of samples, so its epochs cannot be planned",
            remedy="add __len__() beside __getitem__(index)",
            kind=name,
        ) from problem
    if samples >= _ENDLESS:
        raise DataError(
            "data-set-without-end",
            problem=f"{name} says that it has {samples:,} samples or more, so it has no end",
            reason="a permutation of so many numbers draws with replacement, and no epoch ends",
            remedy=(
                "leave out .repeat(): the run repeats its data, as often as it needs for its",
                Setting("length"),
            ),
            samples=samples,
        )
    return samples


def _what_instead(dataset: Any) -> tuple[str, str] | None:
    """Return what is given in place of a data set, and what to write; None for a data set."""
    if isinstance(dataset, Tensor):
        cure = "give a tuple of tensors whose rows are samples: (inputs, targets), or (inputs,)"
        return "a Tensor", cure
    if isinstance(dataset, str | Path):
        cure = "load it first: sf.data.load_documents(path), load_images(path), load_pairs(path), or torch.load(path)"
        if Path(dataset).suffix in (".parquet", ".arrow", ".feather"):
            cure = "give its rows: sf.data.Table(path)"
        return f"the path {str(dataset)!r}", cure
    package = type(dataset).__module__.partition(".")[0]
    name = type(dataset).__name__
    if package in ("pyarrow", "pandas", "polars", "lance") and name in _TABLES:
        return f"a {name} of {package}", "give its rows: sf.data.Table(table)"
    if isinstance(dataset, Mapping):
        return _what_instead_of_mapping(dataset)
    if not isinstance(dataset, tuple | list) or not 0 < len(dataset) <= _MAX_COLUMNS:
        return None
    if not all(isinstance(part, np.ndarray | Tensor) and part.ndim > 0 for part in dataset):
        return None
    if isinstance(dataset, tuple) and not is_tensors(dataset):
        tensors = "tensors and " if any(isinstance(part, Tensor) for part in dataset) else ""
        cure = "convert them to tensors: tuple(map(torch.as_tensor, arrays))"
        return f"a tuple of {tensors}NumPy arrays", cure
    if isinstance(dataset, list) and len(dataset) > 1 and _are_columns(dataset):
        cure = "give a tuple of tensors, (inputs, targets): tuple(map(torch.as_tensor, columns))"
        return f"a list of {len(dataset)} columns", cure
    return None


def _what_instead_of_mapping(dataset: Mapping[Any, Any]) -> tuple[str, str] | None:
    if all(isinstance(value, Tensor) for value in dataset.values()):
        cure = "give a tuple of the tensors, (inputs, targets), or an object with __getitem__(index) and __len__()"
        return "a dictionary of tensors", cure
    if not all(isinstance(key, str) for key in dataset):
        return None
    names = [*dataset]
    shown = ", ".join(names[:4])
    if len(names) > 4:
        shown += " ..."
    cure = f"give one of its entries: data[{names[0]!r}], and others as splits={{{names[-1]!r}: sf.Split(...)}}"
    return f"a {type(dataset).__name__} of {shown}", cure


def _are_columns(arrays: Sequence[Any]) -> bool:
    """Return True for arrays that are as long as each other, but no rows of one table: their other
    sizes or types differ.
    """
    lengths = {len(array) for array in arrays}
    forms = {(array.shape[1:], str(array.dtype)) for array in arrays}
    return len(lengths) == 1 and len(arrays[0]) > 1 and len(forms) > 1


def _refuse_batches(entries: list[Any], batch_size: int) -> None:
    """Raise `DataError` for a list of a loader's batches."""
    if not _are_batches(entries, batch_size):
        return
    samples = "tuple(map(torch.cat, zip(*batches)))"
    if isinstance(entries[0], Mapping):
        samples = "[dict(zip(batch, row)) for batch in batches for row in zip(*batch.values())]"
    raise DataError(
        "list-of-batches",
        problem=f"the data set looks like a list of batches of {batch_size} samples",
        reason="a run makes batches of samples itself, so each entry would be one sample",
        remedy=[
            f"if the entries are batches, give their samples: {samples}",
            "if each entry is one sample, say so:"
            " collate_fn=torch.utils.data.default_collate, or one of your own",
        ],
        batch_size=batch_size,
    )


def _are_batches(entries: Sequence[Any], batch_size: int) -> bool:
    """Return True for batches of a loader: the last one is smaller, or inputs have labels beside
    them. Otherwise a sample may have as many rows as a batch has samples, such as a window of text.
    """
    if batch_size < 2 or len(entries) < 2:
        return False
    if any(_rows_of_parts(entry) != {batch_size} for entry in entries[:-1]):
        return False
    last = _rows_of_parts(entries[-1])
    if last == {batch_size}:
        first = entries[0].values() if isinstance(entries[0], Mapping) else entries[0]
        dimensions = {part.ndim for part in first}
        return 1 in dimensions and len(dimensions) > 1
    return len(last) == 1 and 0 < min(last) < batch_size


def _rows_of_parts(entry: Any) -> set[int]:
    """Return the sizes of the first dimensions of an entry's tensors; nothing if one has none."""
    parts = list(entry.values()) if isinstance(entry, Mapping) else entry
    if not isinstance(parts, list | tuple):
        return set()
    if not all(isinstance(part, Tensor) and part.ndim > 0 for part in parts):
        return set()
    return {len(part) for part in parts}


def check_split(name: str, dataset: Any, *, seed: int) -> None:
    """Raise `DataError` if a split cannot be evaluated, and `ConfigError` if the name is empty or
    has a slash.
    """
    if not name or "/" in name:
        raise ConfigError(
            "split-name-invalid",
            problem=f"split {name!r}: the name of a split must not be empty or have a slash",
            reason="metrics are named SPLIT/METRIC",
            split=name,
        )
    try:
        check_samples(dataset, seed=seed)
    except DataError as problem:
        raise problem.inside(f"split {name!r}") from problem


def rows(batch: Any, *, samples: int | None = None) -> int:
    """Return the size of the first dimension of the first tensor in a nested batch.

    Raises `DataError` if no such tensor exists, or if a graph or another object with its own `to`
    comes first. Also raises it if the tensors differ in size and the first has not `samples` rows:
    its rows are nodes, for example.
    """
    is_plain = type(batch) in (list, tuple) and batch and type(batch[0]) is Tensor
    if is_plain and samples is None and batch[0].ndim:  # most batches; in a step every call counts
        return int(batch[0].shape[0])
    parts = batch if is_plain else leaves(batch, into_opaque=False)
    first = next((leaf for leaf in parts if isinstance(leaf, Tensor) or is_opaque(leaf)), None)
    if isinstance(first, Tensor) and first.ndim > 0:
        if samples in (None, len(first)):
            return len(first)
        if {len(part) for part in tensors(batch) if part.ndim} == {len(first)}:
            return len(first)
        why = f"has {samples} samples, but its tensors have {len(first)} rows and other numbers of rows"
    elif is_opaque(first):
        why = f"begins with a {type(first).__name__}"
    else:
        why = "has no tensor with a first dimension"
    raise DataError(
        "batch-not-countable",
        problem=f"the samples of a {type(batch).__name__} cannot be counted: it {why}",
        remedy=[
            "give a function that counts the values in a batch over which the loss is a mean:"
            " Run(count_fn=...)",
            "for example count_fn=lambda batch: batch.num_graphs, or the number of its labels",
        ],
        kind=type(batch).__name__,
    )


def checked_count(count: Any) -> int:
    """Return what `count_fn` returned; raise `ConfigError` if it is not a number that is at least
    0.
    """
    try:
        is_count = 0 <= float(count) < math.inf and not isinstance(count, str)
    except (TypeError, ValueError, RuntimeError):
        is_count = False
    if not is_count:
        raise ConfigError(
            "count-invalid",
            problem=f"count_fn returned {repr(count)[:60]} for a batch, not a number of 0 or more",
            reason="the loss is a mean over that many targets",
            remedy="write, for example, count_fn=lambda batch: int((batch[1] != -100).sum())",
            value=count,
        )
    return plain_number(count)  # type: ignore[no-any-return]


def fingerprint(dataset: Any) -> dict[str, Any]:
    """Return a JSON fingerprint of the data: type, length, and a hash of the contents.

    Up to 16 MiB of evenly spaced rows are hashed per tensor. Lists, tuples, dictionaries, arrays
    and `Subset` indices are also hashed. Each part of a `ConcatDataset` or `StackDataset` has its
    own fingerprint, or all parts share one hash if more than 64 exist. A method `fingerprint()`
    takes precedence.
    """
    if isinstance(dataset, Fingerprinted):
        return {"type": type(dataset).__name__, **dataset.fingerprint()}
    if type(dataset) is Subset:
        indices = [_plain(index) for index in dataset.indices]
        return {
            "type": "Subset",
            "samples": len(indices),
            "indices": hash_of(indices),
            "of": fingerprint(dataset.dataset),
        }
    fields: dict[str, Any] = {"type": type(dataset).__name__}
    if hasattr(dataset, "__len__"):  # the parent of a subset may lack a length
        fields["samples"] = sample_count(dataset)
    tensors_in_memory = tensors_of(dataset)
    if tensors_in_memory:
        fields["sha256"] = hash_of(tensors_in_memory)
    elif is_hugging_face(dataset) and len(dataset):
        fields["sha256"] = hash_of_hugging_face(dataset)
    elif type(dataset) is dict and dataset:
        fields["sha256"] = hash_of_list(sorted(dataset.items(), key=lambda item: str(item[0])))
    elif type(dataset) in (list, tuple, np.ndarray) and len(dataset):
        fields["sha256"] = hash_of_list(dataset)
    parts = {name: fingerprint(part) for name, part in parts_of(dataset).items()}
    if len(parts) > _NAMED_PARTS:
        fields["sha256"] = hash_of(parts)
    elif parts:
        fields["parts"] = parts
    return fields


def digest_of_samples(dataset: Any, *, seed: int) -> str:
    """Return a hash of the number of samples and of the first, middle and last one, as a run with
    this seed reads them.
    """
    gather = gather_fn(dataset)
    arguments = SampleArguments(dataset)
    count = sample_count(dataset)
    with untouched():
        chosen = [
            _read(dataset, gather, arguments, seed, sample) for sample in _first_middle_last(count)
        ]
        return hash_of([count, *map(hash_of, chosen)])


def _plain(index: Any) -> Any:
    """Return an index of NumPy or torch as a number of Python."""
    return index.item() if hasattr(index, "item") else index


def _first_middle_last(samples: int) -> list[int]:
    return sorted({0, samples // 2, samples - 1})


def _check_repeats(dataset: Any, gather: Gather | None, seed: int, samples: int) -> None:
    name = type(dataset).__name__
    arguments = SampleArguments(dataset)
    for sample in _first_middle_last(samples):
        hashes = set()
        for reading in range(_READINGS if sample == 0 else _READINGS // 2):
            value = _read(dataset, gather, arguments, seed, sample, reading=reading)
            hashes.add(hash_of(value))
        if len(hashes) > 1:
            if gather is not None:
                raise DataError(
                    "gather-not-repeatable",
                    problem=f"sample {sample} of {name} differs when it is gathered again",
                    reason="gather(ids, epochs) must depend on these two arguments only",
                    remedy="draw from np.random.default_rng((seed, epoch, id)), or remove gather:"
                    " __getitem__ is seeded for every sample",
                    sample=sample,
                    kind=name,
                )
            raise DataError(
                "sample-not-repeatable",
                problem=f"sample {sample} of {name} differs when it is read again under the same"
                " seed",
                reason="it seems to use its own random generator (random.Random(),"
                " np.random.default_rng(), torch.Generator()), or to depend on time or on earlier"
                " reads",
                remedy="draw from random, np.random or torch, which are seeded for every sample, or"
                " from the NumPy generator that surefoot passes to __getitem__(self, index, rng)",
                sample=sample,
                kind=name,
            )


def _read(
    dataset: Any,
    gather: Gather | None,
    arguments: SampleArguments,
    seed: int,
    sample: int,
    *,
    reading: int = 0,
) -> Any:
    """Read a sample under its own seed, or gather it under that of a `reading`."""
    if gather is None:
        bits = fold(stream_key(seed, "augment"), 0, sample)
        return read_each(arguments, [sample], seeds=[bits], seed=seed_generators, step=0)[0]
    seed_generators(reading)
    return gathered(dataset, gather, np.array([sample]), np.zeros(1, dtype=np.int64), step=0)
