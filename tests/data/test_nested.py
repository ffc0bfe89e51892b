from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves, tree_map_only

from refused import refused
from surefoot.data.dataset_checks import rows
from surefoot.data.fingerprints import hash_of
from surefoot.data.loader import to_device
from surefoot.data.nested import leaves, map_tensors, named_tensors, select_rows, tensors
from surefoot.errors import DataError
from surefoot.tools.replay.tensor_stats import describe_sample

META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True, slots=True)
class Sealed:
    x: Tensor
    name: str = "a"


class Encoding(UserDict[str, Any]):
    """As transformers' `BatchEncoding` moves itself, in place."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoding:
        self.data = {
            key: part.to(device, non_blocking=non_blocking) for key, part in self.data.items()
        }
        return self


class Graph:
    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes
        self.num_graphs = 2

    def to(self, device: torch.device) -> Graph:  # takes no non_blocking
        self.nodes = self.nodes.to(device)
        return self

    def pin_memory(self) -> Graph:
        self.pinned = True
        return self


NESTS = [
    (torch.ones(2), [torch.zeros(3), 5]),
    {"x": torch.ones(2), "y": {"z": [torch.zeros(1)]}},
    OrderedDict(a=torch.ones(1)),
    Pair(torch.ones(2), Pair(torch.ones(1), "text")),
]


@pytest.mark.parametrize("nest", NESTS)
def test_plain_containers_are_walked_as_torch_walks_them(nest: Any) -> None:
    def double(tensor: Tensor) -> Tensor:
        return 2 * tensor

    doubled = map_tensors(double, nest)

    assert [*map(str, leaves(nest))] == [*map(str, tree_leaves(nest))]
    assert str(doubled) == str(tree_map_only(Tensor, double, nest))
    assert type(doubled) is type(nest)


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ({"x": Sealed(torch.ones(1))}, ["batch['x'].x"]),
        (Encoding(ids=torch.ones(1)), ["batch['ids']"]),
        ((Graph(torch.ones(1)), torch.ones(1)), ["batch[0].nodes", "batch[1]"]),
        (Pair(torch.ones(1), 3), ["batch.x"]),
    ],
)
def test_the_name_of_a_tensor_is_the_expression_that_reads_it(batch: Any, names: list[str]) -> None:
    named = dict(named_tensors(batch))

    assert list(named) == names
    for name, tensor in named.items():
        assert eval(name, {"batch": batch}) is tensor
    assert [*map(id, tensors(batch))] == [*map(id, named.values())]


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(2), "y": [torch.ones(1), "text"]},
        Sealed(torch.ones(2)),
        Encoding(ids=torch.ones(2)),
        Graph(torch.ones(2)),
        (Graph(torch.ones(2)), Pair(torch.ones(1), 3)),
        pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]),
    ],
)
def test_every_kind_of_batch_is_moved_and_the_one_that_was_handed_over_stays(batch: Any) -> None:
    moved = to_device(batch, META)

    assert type(moved) is type(batch)
    shapes = [tensor.shape for tensor in tensors(batch)]
    assert [tensor.shape for tensor in tensors(moved)] == shapes
    floating = [tensor for tensor in tensors(moved) if tensor.is_floating_point()]
    assert floating
    assert all(tensor.is_meta for tensor in floating)
    assert not any(tensor.is_meta for tensor in tensors(batch))


def test_a_batch_that_pins_itself_is_pinned() -> None:
    pinned = to_device(Graph(torch.ones(1)), META, pin=True)
    plain = to_device(Graph(torch.ones(1)), META)

    assert pinned.pinned
    assert "pinned" not in vars(plain)


def test_rows_are_selected_in_every_container_that_has_one_per_sample() -> None:
    batch = {
        "x": Sealed(torch.arange(3)),
        "e": Encoding(ids=torch.arange(6).reshape(3, 2)),
        "text": ["a", "b", "c"],
    }

    few = select_rows(batch, [2, 0], of=3)

    assert few["x"].x.tolist() == [2, 0]
    assert few["e"]["ids"].tolist() == [[4, 5], [0, 1]]
    assert few["text"] == ["c", "a"]
    assert batch["text"] == ["a", "b", "c"]


def test_a_selected_row_is_described_by_its_tensors() -> None:
    row = select_rows(Encoding(ids=torch.arange(6).reshape(3, 2)), [1], of=3)

    assert describe_sample(row) == "batch['ids']  (2)  2, 3"


@pytest.mark.parametrize("of", [1, 2, 3, 4])
def test_graphs_and_packed_sequences_have_no_rows_of_samples(of: int) -> None:
    assert select_rows((Graph(torch.ones(of)), torch.ones(of)), [0], of=of) is None
    assert select_rows(pack_sequence([torch.ones(1)] * of), [0], of=of) is None


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (Graph(torch.ones(4)), None),
        ((Graph(torch.ones(4)), torch.ones(2)), None),
        (pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]), None),
        ({"nodes": torch.ones(5, 2), "labels": torch.ones(2)}, 2),  # a graph in a dictionary
        (torch.tensor(3.0), None),
        (["a", "b"], 2),
    ],
)
def test_a_batch_whose_samples_cannot_be_counted_names_count_fn(
    batch: Any, samples: int | None
) -> None:
    with refused("batch-not-countable", DataError):
        rows(batch, samples=samples)


def test_two_views_of_each_sample_are_counted_and_so_are_rows_that_are_not_samples() -> None:
    assert rows((torch.ones(4, 2), torch.ones(4)), samples=2) == 4
    assert rows({"x": torch.ones(2), "weights": torch.ones(7)}, samples=2) == 2


def test_a_graph_is_hashed_by_what_it_holds() -> None:
    unknown: dict[str, None] = {}

    first = hash_of(Graph(torch.ones(2)), unknown)

    assert hash_of(Graph(torch.ones(2)), unknown) == first
    assert hash_of(Graph(torch.zeros(2)), unknown) != first
    assert not unknown
