"""The look at the data before the first step: targets, and samples that a split shares with the
training data. (1 s)
"""

from __future__ import annotations

import math
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
from surefoot.tools import leakage_check as looking
from surefoot.tools.leakage_check import first_look
from surefoot.tracking.jsonl import records

SAMPLES = 40


@pytest.fixture(autouse=True)
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes no time, however busy the machine is."""
    monkeypatch.setattr(looking, "perf_counter", lambda: 0.0)


def tensors(*, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SAMPLES, 3, generator=generator), torch.randint(
        4, (SAMPLES,), generator=generator
    )


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
        drawn = random.random() + float(np.random.rand()) + torch.rand(3)
        return self.inputs[sample] + self.noise * drawn, self.labels[sample]


def overlap(train: Any, split: Any) -> dict[str, Any]:
    found: dict[str, Any] = first_look(train, {"split": split}, seed=0)["overlap"]["split"]
    return found


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
    others, their_labels = tensors(seed=1)
    split = kind(torch.cat([inputs[5:12], others[:9]]), torch.cat([labels[5:12], their_labels[:9]]))
    assert overlap(kind(inputs, labels), split) == {"checked": 16, "overlapping": 7}


def test_samples_that_are_none_are_not_the_same_sample() -> None:
    class WithBadSamples(Rows):
        def __getitem__(self, sample: int) -> Any:
            return None if sample % 3 == 0 else super().__getitem__(sample)

    train, split = WithBadSamples(*tensors()), WithBadSamples(*tensors(seed=1))
    found = first_look(train, {"split": split}, seed=0)["overlap"]["split"]
    assert found["overlapping"] == 0
    assert found["checked"] == len(split) - len(range(0, len(split), 3))


def test_a_label_of_another_is_another_sample() -> None:
    inputs, labels = tensors()
    assert overlap((inputs, labels), (inputs[:8].clone(), labels[:8] + 1)) == {
        "checked": 8,
        "overlapping": 0,
    }


@pytest.mark.parametrize("kind", [as_given, as_rows])
def test_scoring_the_training_data_is_no_accident(kind: Any) -> None:
    data = kind(*tensors())
    assert overlap(data, data) == {"checked": SAMPLES, "overlapping": SAMPLES, "same": True}


def test_the_same_tensors_in_another_wrapping_are_the_same() -> None:
    data = tensors()
    assert overlap(data, TensorDataset(*data))["same"]


def test_of_parts_of_one_data_set_the_indices_tell() -> None:
    data = Rows(*tensors())
    found = overlap(Subset(data, range(30)), Subset(data, range(25, 40)))
    assert found == {"checked": 15, "overlapping": 5, "among_all": True}


def test_targets_are_counted_where_they_are_whole_numbers() -> None:
    inputs, labels = tensors()
    counts = np.bincount(labels.numpy())
    nats = -sum(count / SAMPLES * math.log(count / SAMPLES) for count in counts)
    expected = {
        "distinct": 4,
        "most_common_fraction": counts.max() / SAMPLES,
        "entropy": pytest.approx(nats, rel=1e-12),
    }
    for data in (
        (inputs, labels),
        Rows(inputs, labels),
        Rows(inputs, labels.tolist()),
        Rows(inputs, labels.numpy()),
    ):
        assert first_look(data, {}, seed=0)["targets"] == expected
    named = [
        {"image": row, "label": label} for row, label in zip(inputs, labels.tolist(), strict=True)
    ]
    assert first_look(named, {}, seed=0)["targets"] == expected


@pytest.mark.parametrize("labels", [torch.rand(SAMPLES), torch.rand(SAMPLES) > 0.5])
def test_targets_that_are_no_whole_numbers_are_not_told_of(labels: Tensor) -> None:
    assert "targets" not in first_look((tensors()[0], labels), {}, seed=0)
    assert "targets" not in first_look((tensors()[0],), {}, seed=0)


def test_ignored_targets_do_not_count() -> None:
    labels = torch.tensor([1, -100, -100, 1])
    assert first_look((torch.rand(4, 2), labels), {}, seed=0)["targets"] == {
        "distinct": 1,
        "most_common_fraction": 1.0,
        "entropy": 0.0,
    }


def test_augmented_images_are_known_by_what_is_stored() -> None:
    found = digits()
    how = sf.data.Augmentation(crop_padding=2, flip=True)
    moments: dict[str, Any] = {"mean": (0.5,), "std": (0.25,)}
    train = ImageArrays(found.images, found.labels, augmentation=how, **moments)
    copied = ImageArrays(found.images[100:150], found.labels[100:150], **moments)
    test = ImageArrays(found.test_images, found.test_labels, **moments)
    look = first_look(train, {"copied": copied, "test": test}, seed=0)
    assert look["overlap"]["copied"] == {"checked": 50, "overlapping": 50}
    assert look["overlap"]["test"]["overlapping"] == 0
    assert look["checked"] == len(train)
    assert look["targets"]["distinct"] == 10


def test_pairs_are_known_whatever_they_are_padded_to() -> None:
    sources = [[place % 7 + 3] * (place % 5 + 1) for place in range(30)]
    targets = [[place + 3] for place in range(30)]
    train = TokenPairs(sources, targets)
    assert overlap(train, TokenPairs(sources[20:24], targets[20:24])) == {
        "checked": 4,
        "overlapping": 4,
    }
    assert overlap(train, TokenPairs(sources[20:24], [[99]] * 4))["overlapping"] == 0


def test_text_that_is_in_both_is_found_wherever_it_is_cut() -> None:
    generator = np.random.default_rng(0)
    text, other = generator.integers(0, 200, 20_000), generator.integers(0, 200, 2_000)
    train = TrainWindows(text, context=128, seed=3)
    for cut in range(5_000, 5_128, 16):
        leaked = overlap(train, EvalWindows(text[cut:10_000], context=128))
        assert leaked["overlapping"] > 0.1 * leaked["checked"]
        assert leaked["passages"]
    assert overlap(train, EvalWindows(other, context=128))["overlapping"] == 0
    assert first_look(train, {}, seed=0)["targets"]["distinct"] == 200


def test_so_much_is_looked_at_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(*tensors())
    monkeypatch.setattr(looking, "_MAX_SAMPLES_READ", 10)
    monkeypatch.setattr(looking, "_MAX_SAMPLES", 20)
    assert first_look(rows, {}, seed=0)["checked"] == rows.read == 10
    look = first_look(tensors(), {"copy": tuple(part.clone() for part in tensors())}, seed=0)
    assert look["checked"] == 20
    assert look["samples"] == SAMPLES
    assert look["overlap"]["copy"] == {
        "checked": 20,
        "overlapping": 20,
    }  # of equal lengths the same are chosen


def test_reading_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(looking, "perf_counter", lambda: next(ticks) * 0.05)
    assert 0 < first_look(Rows(*tensors()), {}, seed=0)["checked"] < 10


def test_what_only_the_first_time_takes_does_not_leave_little_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = iter([0.0, 1.0, 1.0, 1.001])
    monkeypatch.setattr(looking, "perf_counter", lambda: next(ticks))
    assert first_look(tensors(), {}, seed=0)["checked"] == SAMPLES


def test_what_cannot_be_read_is_passed_over() -> None:
    class Damaged(Rows):
        def __getitem__(self, sample: int) -> Any:
            if sample == 3:
                raise OSError("a bad block")
            return super().__getitem__(sample)

    look = first_look(tensors(), {"damaged": Damaged(*tensors())}, seed=0)
    assert look["overlap"]["damaged"] == {"checked": 0, "overlapping": 0}


def test_looking_leaves_the_generators_alone() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first_look(Rows(*tensors(), noise=1.0), {"other": Rows(*tensors(seed=2), noise=1.0)}, seed=0)
    assert (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    ) == before


def test_a_run_looks_once_when_it_begins(tmp_path: Path) -> None:
    build(tmp_path / "run", stop_after="4 steps").train()
    build(tmp_path / "run", length="4 epochs").train()
    (record,) = [
        line for line in records(tmp_path / "run/metrics.jsonl") if line["kind"] == "data_check"
    ]
    assert record["step"] == 0
    assert record["samples"] == record["checked"] == 52
    assert set(record["overlap"]) == {"val"}


def test_what_there_is_time_for_comes_from_all_over_a_data_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(looking, "_READING_S", -1.0)
    inputs = torch.arange(20_000.0)
    look = first_look(
        (inputs, torch.arange(20_000)), {"copy": (inputs.clone(), torch.arange(20_000))}, seed=0
    )
    assert look["checked"] == look["targets"]["distinct"] == 512
    assert look["overlap"]["copy"] == {"checked": 512, "overlapping": 512}
    assert first_look((inputs, (inputs // 2_000).long()), {}, seed=0)["targets"]["distinct"] == 10
