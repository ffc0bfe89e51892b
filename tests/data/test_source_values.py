"""The values in a source of a stream: what is a share of a rank, and what is an order without a
seed. No row is read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.data.streams.source_values import (
    digests_of_values,
    generators_without_seed,
    values_of_source,
)

NUMBERS = list(range(200))
RANK = 0


class Source:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the source is read")


class Slotted:
    __slots__ = ("rank",)

    def __init__(self, rank: int) -> None:
        self.rank = rank


def numbers(rank: int) -> Iterator[int]:
    raise AssertionError("the source is read")
    yield rank


def in_closure(rank: int) -> Any:
    return lambda: numbers(rank)


def in_default(rank: int) -> Any:
    def rows(first: int = rank) -> Iterator[int]:
        return numbers(first)

    return rows


def in_global(rank: int) -> Any:
    globals()["RANK"] = rank

    def rows() -> Iterator[int]:
        return numbers(RANK)

    return rows


def in_filter_of_datasets(rank: int) -> Any:
    return streaming().filter(lambda row: row["x"] % 2 == rank)


def streaming() -> Any:
    datasets = pytest.importorskip("datasets")
    shards = {"shards": [0, 1, 2, 3]}
    return datasets.IterableDataset.from_generator(rows_of_shards, gen_kwargs=shards)


def rows_of_shards(shards: list[int]) -> Iterator[dict[str, int]]:
    return ({"x": shard} for shard in shards)


def split_by_node(rank: int) -> Any:
    pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(streaming(), rank, 2)


def row_of_table(row: Any) -> Any:
    return row.x


def pandas_share(rank: int) -> Any:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"x": NUMBERS})[rank::2]
    return lambda: map(row_of_table, table.itertuples())


def web_shards(rank: int) -> Any:
    webdataset = pytest.importorskip("webdataset")
    urls = [f"rows-{number}.tar" for number in range(4)]
    return webdataset.WebDataset(urls[rank::2], shardshuffle=False)


SHARES: dict[str, Callable[[int], Any]] = {
    "attribute": lambda rank: Source(rank=rank),
    "slot": lambda rank: Source(settings=Slotted(rank)),
    "attribute of an attribute": lambda rank: Source(settings=SimpleNamespace(rank=rank)),
    "closure": in_closure,
    "default": in_default,
    "global": in_global,
    "partial": lambda rank: partial(numbers, rank),
    "keyword of partial": lambda rank: partial(numbers, rank=rank),
    "list": lambda rank: Source(files=NUMBERS[rank::2]),
    "list of few": lambda rank: Source(files=["a", "b"][rank::2]),
    "list of objects": lambda rank: Source(parts=[Source(file=f"part {rank}")]),
    "dict": lambda rank: Source(settings={"rank": rank}),
    "tensor": lambda rank: Source(ids=torch.arange(100)[rank::2]),
    "array": lambda rank: Source(ids=np.ones((100, 2)) * rank),
    "table of pandas": pandas_share,
    "split_dataset_by_node": split_by_node,
    "shard of datasets": lambda rank: streaming().shard(2, rank),
    "filter of datasets": in_filter_of_datasets,
    "shards of webdataset": web_shards,
}


def differing(build: Callable[[int], Any]) -> tuple[set[str], set[str]]:
    """The names of values that differ in rows, and in order, between the sources of two ranks."""
    first, second = (digests_of_values(values_of_source(build(rank))) for rank in (0, 1))
    assert first.keys() == second.keys()
    rows = {name for name in first if first[name].rows != second[name].rows}
    orders = {name for name in first if first[name].order != second[name].order}
    return rows, orders - rows


@pytest.mark.parametrize("kind", SHARES)
def test_a_share_of_a_rank_is_seen_without_reading(kind: str) -> None:
    rows, _ = differing(SHARES[kind])
    assert rows


def shuffled_shards(_rank: int) -> Any:
    webdataset = pytest.importorskip("webdataset")
    random.seed(_rank)  # it draws its seed, if none is given
    return webdataset.WebDataset(["rows-0.tar"], shardshuffle=10).shuffle(10)


ORDERS: dict[str, Callable[[int], Any]] = {
    "shuffled list": lambda rank: Source(files=random.Random(rank).sample(NUMBERS, 200)),
    "shuffled objects": lambda rank: Source(
        parts=[Source(file=name) for name in (["a", "b"], ["b", "a"])[rank]]
    ),
    "permutation": lambda rank: Source(ids=np.random.default_rng(rank).permutation(200)),
    "seed": lambda rank: Source(seed=rank),
    "random": lambda rank: Source(draws=random.Random(rank)),
    "numpy": lambda rank: Source(draws=np.random.default_rng(rank)),
    "torch": lambda rank: Source(draws=torch.Generator().manual_seed(rank)),
    "shuffle of datasets": lambda _rank: streaming().shuffle(buffer_size=10),
    "webdataset": shuffled_shards,
}


@pytest.mark.parametrize("kind", ORDERS)
def test_an_order_of_each_rank_is_no_share(kind: str) -> None:
    rows, orders = differing(ORDERS[kind])
    assert not rows
    assert orders


def test_an_address_of_memory_is_no_value() -> None:
    generators = [torch.Generator() for _ in range(2)]  # both alive, so their addresses differ
    addresses = {generator._cdata for generator in generators}
    assert len(addresses) == 2
    assert differing(lambda rank: Source(draws=generators[rank])) == (set(), set())


@pytest.mark.parametrize("seed", [None, 0, 3_000_000_000])
def test_a_numpy_generator_without_a_seed_is_found(seed: int | None) -> None:
    values = values_of_source(Source(draws=np.random.default_rng(seed)))
    assert generators_without_seed(values) == ([] if seed is not None else ["source.draws"])


def test_equal_sources_have_no_difference() -> None:
    def build(_rank: int) -> Any:
        words = {"a", "b", "c"}
        return Source(function=numbers, kind=Source, at=object(), words=words, none=None)

    assert differing(build) == (set(), set())


def test_file_systems_are_not_compared() -> None:
    """They note the number of their process."""
    files = pytest.importorskip("fsspec").filesystem("file")
    names = {value.name for value in values_of_source(Source(files=files))}
    assert {name for name in names if name.startswith("source")} == {"source", "source.files"}
