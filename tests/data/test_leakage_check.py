"""The look at the data before the first step: targets, and samples that a split shares with the
training data. (1 s)
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

import surefoot as sf
from small_runs import build
from surefoot.data.text.windows import EvalWindows, TrainWindows
from surefoot.recipes.readers.images.arrays import digits
from surefoot.recipes.readers.images.dataset import ImageArrays
from surefoot.recipes.readers.pairs.pairs import TokenPairs
from surefoot.tools import leakage_check
from surefoot.tools.leakage_check import first_look

SAMPLES = 40


@pytest.fixture(autouse=True)
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes no time, however busy the machine is."""
    monkeypatch.setattr(leakage_check, "perf_counter", lambda: 0.0)


def tensors(*, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 3, generator=generator)
    labels = torch.randint(4, (SAMPLES,), generator=generator)
    return inputs, labels


class Rows:
    """Read one by one, noise in it."""

    def __init__(self, inputs: Tensor, labels: Any, *, noise: float = 0.0) -> None:
        self.inputs = inputs
        self.labels = labels
        self.noise = noise
        self.read = 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, sample: int) -> Any:
        self.read += 1
        noise = random.random() + float(np.random.rand()) + torch.rand(3)
        return self.inputs[sample] + self.noise * noise, self.labels[sample]


def look_at(train: Any, **splits: Any) -> dict[str, Any]:
    return first_look(train, splits, seed=0)


def overlap(train: Any, split: Any) -> dict[str, Any]:
    return look_at(train, split=split)["overlap"]["split"]


def as_given(inputs: Tensor, labels: Tensor) -> Any:
    return inputs, labels


def as_dataset(inputs: Tensor, labels: Tensor) -> Any:
    return TensorDataset(inputs, labels)


def as_subset(inputs: Tensor, labels: Tensor) -> Any:
    return Subset(TensorDataset(inputs, labels), list(range(len(inputs))))


def as_subset_of_rows(inputs: Tensor, labels: Tensor) -> Any:
    return Subset(Rows(inputs, labels), list(range(len(inputs))))


def as_rows(inputs: Tensor, labels: Tensor) -> Any:
    return Rows(inputs, labels)


def as_augmented(inputs: Tensor, labels: Tensor) -> Any:
    return Rows(inputs, labels, noise=1.0)


@pytest.mark.parametrize(
    "kind", [as_given, as_dataset, as_subset, as_subset_of_rows, as_rows, as_augmented]
)
def test_samples_that_are_in_both_are_counted(kind: Any) -> None:
    inputs, labels = tensors()
    other_inputs, other_labels = tensors(seed=1)
    train = kind(inputs, labels)
    split = kind(
        torch.cat([inputs[5:12], other_inputs[:9]]), torch.cat([labels[5:12], other_labels[:9]])
    )

    assert overlap(train, split) == {"checked": 16, "overlapping": 7}


def test_samples_that_are_none_are_not_the_same_sample() -> None:
    class WithBadSamples(Rows):
        def __getitem__(self, sample: int) -> Any:
            return None if sample % 3 == 0 else super().__getitem__(sample)

    train = WithBadSamples(*tensors())
    split = WithBadSamples(*tensors(seed=1))

    bad_samples = len(range(0, SAMPLES, 3))
    assert overlap(train, split) == {"checked": SAMPLES - bad_samples, "overlapping": 0}


def test_a_label_of_another_is_another_sample() -> None:
    inputs, labels = tensors()
    relabeled = (inputs[:8].clone(), labels[:8] + 1)

    assert overlap((inputs, labels), relabeled) == {"checked": 8, "overlapping": 0}


@pytest.mark.parametrize("kind", [as_given, as_rows])
def test_scoring_the_training_data_is_no_accident(kind: Any) -> None:
    data = kind(*tensors())
    assert overlap(data, data) == {"checked": SAMPLES, "overlapping": SAMPLES, "same": True}


def test_the_same_tensors_in_another_wrapping_are_the_same() -> None:
    data = tensors()
    assert overlap(data, TensorDataset(*data))["same"]


def test_of_parts_of_one_data_set_the_indices_tell() -> None:
    data = Rows(*tensors())
    first = Subset(data, range(30))
    second = Subset(data, range(25, 40))

    assert overlap(first, second) == {"checked": 15, "overlapping": 5, "among_all": True}


def as_list_of_labels(inputs: Tensor, labels: Tensor) -> Any:
    return Rows(inputs, labels.tolist())


def as_array_of_labels(inputs: Tensor, labels: Tensor) -> Any:
    return Rows(inputs, labels.numpy())


def as_mappings(inputs: Tensor, labels: Tensor) -> Any:
    pairs = zip(inputs, labels.tolist(), strict=True)
    return [{"image": row, "label": label} for row, label in pairs]


@pytest.mark.parametrize(
    "kind", [as_given, as_rows, as_list_of_labels, as_array_of_labels, as_mappings]
)
def test_targets_are_counted_where_they_are_whole_numbers(kind: Any) -> None:
    inputs, labels = tensors()
    fractions = np.bincount(labels.numpy()) / SAMPLES
    nats = -float((fractions * np.log(fractions)).sum())

    targets = look_at(kind(inputs, labels))["targets"]

    assert targets == {
        "distinct": 4,
        "most_common_fraction": fractions.max(),
        "entropy": pytest.approx(nats, rel=1e-12),
    }


@pytest.mark.parametrize("labels", [torch.rand(SAMPLES), torch.rand(SAMPLES) > 0.5])
def test_targets_that_are_no_whole_numbers_are_not_told_of(labels: Tensor) -> None:
    inputs, _ = tensors()

    assert "targets" not in look_at((inputs, labels))


def test_nothing_is_told_of_targets_where_there_are_none() -> None:
    inputs, _ = tensors()

    assert "targets" not in look_at((inputs,))


def test_ignored_targets_do_not_count() -> None:
    labels = torch.tensor([1, -100, -100, 1])

    targets = look_at((torch.rand(4, 2), labels))["targets"]

    assert targets == {"distinct": 1, "most_common_fraction": 1.0, "entropy": 0.0}


def test_augmented_images_are_known_by_what_is_stored() -> None:
    arrays = digits()
    augmentation = sf.data.Augmentation(crop_padding=2, flip=True)
    moments: dict[str, Any] = {"mean": (0.5,), "std": (0.25,)}
    train = ImageArrays(arrays.images, arrays.labels, augmentation=augmentation, **moments)
    copied = ImageArrays(arrays.images[100:150], arrays.labels[100:150], **moments)
    test = ImageArrays(arrays.test_images, arrays.test_labels, **moments)

    look = look_at(train, copied=copied, test=test)

    assert look["overlap"]["copied"] == {"checked": 50, "overlapping": 50}
    assert look["overlap"]["test"]["overlapping"] == 0
    assert look["checked"] == len(train)
    assert look["targets"]["distinct"] == 10


def test_pairs_are_known_whatever_they_are_padded_to() -> None:
    sources = [[place % 7 + 3] * (place % 5 + 1) for place in range(30)]
    targets = [[place + 3] for place in range(30)]
    train = TokenPairs(sources, targets)
    copied = TokenPairs(sources[20:24], targets[20:24])
    of_other_targets = TokenPairs(sources[20:24], [[99]] * 4)

    assert overlap(train, copied) == {"checked": 4, "overlapping": 4}
    assert overlap(train, of_other_targets) == {"checked": 4, "overlapping": 0}


TEXT = np.random.default_rng(0).integers(0, 200, 20_000)


@pytest.mark.parametrize("cut", range(5_000, 5_128, 16))
def test_text_that_is_in_both_is_found_wherever_it_is_cut(cut: int) -> None:
    train = TrainWindows(TEXT, context=128, seed=3)

    leaked = overlap(train, EvalWindows(TEXT[cut:10_000], context=128))

    assert leaked["overlapping"] > 0.1 * leaked["checked"]
    assert leaked["passages"]


def test_other_text_is_not_in_both() -> None:
    train = TrainWindows(TEXT, context=128, seed=3)
    other = np.random.default_rng(1).integers(0, 200, 2_000)

    assert overlap(train, EvalWindows(other, context=128))["overlapping"] == 0


def test_tokens_of_a_text_are_its_targets() -> None:
    train = TrainWindows(TEXT, context=128, seed=3)

    assert look_at(train)["targets"]["distinct"] == 200


def test_so_many_samples_are_read_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leakage_check, "_MAX_SAMPLES_READ", 10)
    rows = Rows(*tensors())

    look = look_at(rows)

    assert look["checked"] == rows.read == 10


def test_so_many_tensors_are_looked_at_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leakage_check, "_MAX_SAMPLES", 20)

    look = look_at(tensors(), copy=tensors())

    assert look["checked"] == 20
    assert look["samples"] == SAMPLES
    # of equal lengths the same are chosen
    assert look["overlap"]["copy"] == {"checked": 20, "overlapping": 20}


def test_reading_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(leakage_check, "perf_counter", lambda: next(ticks) * 0.05)

    assert 0 < look_at(Rows(*tensors()))["checked"] < 10


def test_what_only_the_first_time_takes_does_not_leave_little_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = iter([0.0, 1.0, 1.0, 1.001])
    monkeypatch.setattr(leakage_check, "perf_counter", lambda: next(ticks))

    assert look_at(tensors())["checked"] == SAMPLES


def test_what_cannot_be_read_is_passed_over() -> None:
    class Damaged(Rows):
        def __getitem__(self, sample: int) -> Any:
            if sample == 3:
                raise OSError("a bad block")
            return super().__getitem__(sample)

    damaged = Damaged(*tensors())

    assert overlap(tensors(), damaged) == {"checked": 0, "overlapping": 0}


def test_looking_leaves_the_generators_alone() -> None:
    def states() -> tuple[Any, ...]:
        numpy_state = np.random.get_state()[1].tolist()
        return random.getstate(), numpy_state, torch.get_rng_state().tolist()

    train = Rows(*tensors(), noise=1.0)
    other = Rows(*tensors(seed=2), noise=1.0)
    before = states()

    look_at(train, other=other)

    assert states() == before


def test_a_run_looks_once_when_it_begins(tmp_path: Path) -> None:
    build(tmp_path / "run", stop_after="4 steps").train()
    build(tmp_path / "run", length="6 steps").train()

    (record,) = sf.load(tmp_path / "run").records("data_check")
    assert record["step"] == 0
    assert record["samples"] == record["checked"] == 52
    assert set(record["overlap"]) == {"val"}


def test_what_there_is_time_for_comes_from_all_over_a_data_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leakage_check, "_READING_S", -1.0)
    inputs = torch.arange(20_000.0)
    numbers = torch.arange(20_000)

    look = look_at((inputs, numbers), copy=(inputs.clone(), numbers))
    in_ten_parts = look_at((inputs, numbers // 2_000))

    assert look["checked"] == look["targets"]["distinct"] == 512
    assert look["overlap"]["copy"] == {"checked": 512, "overlapping": 512}
    assert in_ten_parts["targets"]["distinct"] == 10
