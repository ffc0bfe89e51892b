"""Which values of a data set are compared, by the code that reads samples."""

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from surefoot.data.data_values import DataValues


def changes_of(data: Any, change: Callable[[], Any]) -> list[str]:
    """The names of what a body changed, by its comparison."""
    values = DataValues({"data": data})
    values.compare(registered={})
    assert values.pop_changes() == []
    change()
    values.compare(registered={})
    names = [each.name for each in values.pop_changes()]
    values.compare(registered={})
    assert values.pop_changes() == []
    return names


# --- values on which reading does not depend ------------------------------------------------------


@dataclass
class Config:
    rate: float = 0.0
    seen: int = 0


class Trainer:
    def __init__(self) -> None:
        self.rate = 0.0
        self.seen = 0

    def note(self) -> None:
        self.seen += 1

    def collate(self, samples: list[Any]) -> Any:
        return [sample * self.rate for sample in samples]


class Holds:
    """A data set that holds an object of the loop, and reads one value of it."""

    def __init__(self, shared: Any) -> None:
        self.shared = shared
        self.seen = 0
        self.log = logging.getLogger("test_data_values")

    def __getitem__(self, index: int) -> float:
        self.log.debug("read")
        return index * self.shared.rate

    def note(self) -> None:
        self.seen += 1


KINDS: dict[str, Callable[[], Any]] = {
    "namespace": lambda: argparse.Namespace(rate=0.0, seen=0),
    "simple namespace": lambda: SimpleNamespace(rate=0.0, seen=0),
    "dataclass": Config,
    "trainer": Trainer,
}


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_shared_object_only_what_the_reading_code_names_is_compared(kind: str) -> None:
    shared = KINDS[kind]()
    data = Holds(shared)
    assert changes_of(data, lambda: setattr(shared, "seen", 5)) == []
    assert changes_of(data, data.note) == []
    assert changes_of(data, lambda: setattr(shared, "rate", 0.5)) == ["data.shared.rate"]


def test_a_logger_is_not_compared() -> None:
    data = Holds(Config())

    def log() -> None:
        data.log.debug("fills the cache of levels")
        logging.getLogger("test_data_values.other")

    assert changes_of(data, log) == []


def test_a_model_is_not_compared() -> None:
    class Labels:
        def __init__(self) -> None:
            self.model = nn.Linear(1, 1)
            self.model.calls = 0  # type: ignore[assignment]

        def __getitem__(self, index: int) -> Any:
            return self.model(torch.ones(1) * index) + self.model.calls

    data = Labels()

    def step() -> None:
        data.model.calls += 1  # type: ignore[operator]
        data.model.weight.data.add_(1)

    assert changes_of(data, step) == []


def test_an_unread_list_and_unread_keys_are_not_compared() -> None:
    class Reads:
        def __init__(self) -> None:
            self.losses = [0.0]
            self.state = {"rate": 0.0, "seen": 0}
            self.by_class = {3: 1.0}

        def __getitem__(self, index: int) -> float:
            return index * self.state["rate"] * self.by_class[index]

    data = Reads()
    assert changes_of(data, lambda: data.losses.append(1.0)) == []
    assert changes_of(data, lambda: data.state.update(seen=1)) == []
    assert changes_of(data, lambda: data.state.update(rate=1)) == ["data.state['rate']"]
    assert changes_of(data, lambda: data.by_class.update({3: 2.0})) == ["data.by_class[3]"]


def test_of_the_owner_of_a_collate_method_only_what_the_method_names_is_compared() -> None:
    trainer = Trainer()
    assert changes_of(trainer.collate, trainer.note) == []
    assert changes_of(trainer.collate, lambda: setattr(trainer, "rate", 1.0)) == ["data.rate"]


# --- values on which it depends -------------------------------------------------------------------


def in_file(augment: Any, value: float) -> float:
    return value * getattr(augment, "through_function")  # noqa: B009


def logged(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def inner(*arguments: Any) -> Any:
        return method(*arguments)

    return inner


class Augment:
    def __init__(self) -> None:
        self.through_method = 1.0
        self.through_function = 1.0
        self.through_property = 1.0
        self.through_cached = 1.0
        self.in_comprehension = 1.0

    def apply(self, value: float) -> float:
        return self._inner(in_file(self, value)) * self.prop * self.cached

    @logged
    def _inner(self, value: float) -> float:
        return sum(value * self.in_comprehension for _ in range(2)) * self.through_method

    @property
    def prop(self) -> float:
        return self.through_property

    @cached_property
    def cached(self) -> float:
        return self.through_cached


class Uses:
    def __init__(self) -> None:
        self.augment = Augment()

    def __getitem__(self, index: int) -> float:
        return self.augment.apply(index)


@pytest.mark.parametrize("name", list(vars(Augment())))
def test_what_a_method_reads_in_turn_is_compared(name: str) -> None:
    data = Uses()
    assert changes_of(data, lambda: setattr(data.augment, name, 2.0)) == [f"data.augment.{name}"]


class Labels:
    """Samples of one attribute."""

    def __init__(self, labels: Any) -> None:
        self.labels = labels

    def __getitem__(self, index: int) -> Any:
        return self.labels[index]


def replace(labels: Any, index: int, value: Any) -> None:
    labels[index] = value


@pytest.mark.parametrize(
    "labels",
    [[0] * 200, np.zeros(200), np.zeros((100, 2)).T, torch.zeros(200), torch.zeros(200).numpy()],
    ids=["long list", "array", "transposed array", "tensor", "array of a tensor"],
)
def test_a_replaced_entry_is_seen(labels: Any) -> None:
    assert changes_of(Labels(labels), partial(replace, labels, 1, 7)) == ["data.labels"]


def test_of_very_many_entries_some_are_compared() -> None:
    labels = np.zeros(100_000)
    assert changes_of(Labels(labels), partial(replace, labels, slice(0, 99_999, 10), 1)) != []
    assert changes_of(Labels(labels), partial(replace, labels, 17, 1)) == []


def test_a_file_in_memory_is_not_read_for_the_comparison(tmp_path: Any) -> None:
    labels = np.memmap(tmp_path / "labels", dtype=np.float32, mode="w+", shape=(8,))
    assert changes_of(Labels(labels), partial(replace, labels, 0, 1)) == []


def test_a_table_of_another_library_is_compared_by_identity() -> None:
    pandas = pytest.importorskip("pandas")
    data = Labels(pandas.DataFrame({"x": range(8)}))
    assert changes_of(data, data.labels["x"].mean) == []
    table = pandas.DataFrame({"x": range(4)})
    assert changes_of(data, lambda: setattr(data, "labels", table)) == ["data.labels"]


def test_parts_of_a_loader_are_compared_by_name() -> None:
    loader = DataLoader(Labels([1, 2]), batch_size=1)  # type: ignore[arg-type]
    assert changes_of(loader, lambda: iter(loader)) == []
    assert changes_of(loader, lambda: setattr(loader, "collate_fn", tuple)) == ["data.collate_fn"]


def test_two_holders_of_one_object_may_read_different_values_of_it() -> None:
    shared = Config()

    class First:
        def __init__(self) -> None:
            self.shared = shared
            self.then = Holds(shared)

        def __getitem__(self, index: int) -> Any:
            return self.then[index] if self.shared else None

    data = First()
    assert changes_of(data, lambda: setattr(shared, "rate", 1.0)) == ["data.then.shared.rate"]


def test_objects_that_hold_themselves_and_break_are_left_out() -> None:
    class Odd:
        def __init__(self) -> None:
            self.itself = self
            self.count = 0

        def __getitem__(self, index: int) -> Any:
            return self.itself.count + self.breaks

        @property
        def breaks(self) -> int:
            raise RuntimeError

    data = Odd()
    assert changes_of(data, lambda: setattr(data, "count", 1)) == ["data.count"]
