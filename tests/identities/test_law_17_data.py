"""Law 17: what the body of a loop changes in the data is seen by the next step, or refused by name;
and a resumed run continues with it. (8 s)
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import surefoot as sf
from refused import refused
from surefoot.data.loader import MicroBatch
from surefoot.run.data_changes import DataChanges

SAMPLES = 24
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(SAMPLES) % 3
Sample = tuple[Tensor, Tensor]


class Scale:
    """A transform with a setting."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


class Module(nn.Module):
    """A transform as torchvision writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


class Rows:
    """Samples whose size a loop may change, in many places."""

    of_class = 1.0
    missing = 1.0  # the body sets an attribute of the object

    def __init__(self, *transforms: Callable[[Tensor], Tensor]) -> None:
        self.factor = 1.0
        self.by_name = {"factor": 1.0}
        self.in_list = [1.0, 1.0]
        self.transforms = list(transforms)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        inputs = X[index] * self.factor * self.by_name["factor"] * self.in_list[1]
        inputs = inputs * self.missing * self.of_class
        for transform in self.transforms:
            inputs = transform(inputs)
        return inputs, Y[index]


class Slots:
    """A data set without a dictionary of attributes."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        return X[index] * self.factor, Y[index]


class Collate:
    """A collate function with a setting."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, samples: list[Sample]) -> list[Tensor]:
        inputs, labels = zip(*samples, strict=True)
        return [torch.stack(inputs) * self.factor, torch.stack(labels)]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def build(data: Any, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 3),
        "loss": loss,
        "train_data": data,
        "batch_size": 6,
        "order": "sequential",
        "length": "8 steps",
        "optimizer": sf.optim.sgd(lr=0.1),
        "console": False,
        "report": False,
    }
    return sf.Run(**settings | changes)


def factor_of(step: sf.Step) -> float:
    """By what the inputs of a step were multiplied."""
    first = 6 * (step.index % 4)
    return round(float(step.micro_batches[0].batch[0].sum() / X[first : first + 6].sum()), 3)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A value of a data set by which its inputs are multiplied: what sets it, and its name."""

    data: Any
    set_value: Callable[[float], None]
    name: str
    settings: dict[str, Any] = field(default_factory=dict)  # of the run


def set_attribute(owner: Any, name: str) -> Callable[[float], None]:
    return partial(setattr, owner, name)


def in_attribute() -> Place:
    data = Rows()
    return Place(data=data, set_value=set_attribute(data, "factor"), name="train_data.factor")


def in_new_attribute() -> Place:
    data = Rows()
    return Place(data=data, set_value=set_attribute(data, "missing"), name="train_data.missing")


def in_attribute_of_class() -> Place:
    class Own(Rows):
        of_class = 1.0

    return Place(data=Own(), set_value=set_attribute(Own, "of_class"), name="train_data.of_class")


def in_dict() -> Place:
    data = Rows()
    set_value = partial(data.by_name.__setitem__, "factor")
    return Place(data=data, set_value=set_value, name="train_data.by_name['factor']")


def in_list() -> Place:
    data = Rows()
    set_value = partial(data.in_list.__setitem__, 1)
    return Place(data=data, set_value=set_value, name="train_data.in_list[1]")


def in_slot() -> Place:
    data = Slots()
    return Place(data=data, set_value=set_attribute(data, "factor"), name="train_data.factor")


def in_transform() -> Place:
    scale = Scale()
    return Place(
        data=Rows(scale),
        set_value=set_attribute(scale, "factor"),
        name="train_data.transforms[0].factor",
    )


def in_module() -> Place:
    module = Module()
    return Place(
        data=Rows(nn.Sequential(nn.Identity(), module)),
        set_value=set_attribute(module, "factor"),
        name="train_data.transforms[0]._modules['1'].factor",
    )


def in_partial() -> Place:
    transform = partial(torch.mul, other=1.0)

    def set_value(value: float) -> None:
        transform.keywords["other"] = value

    return Place(
        data=Rows(transform),
        set_value=set_value,
        name="train_data.transforms[0].keywords['other']",
    )


def in_object_of_method() -> Place:
    scale = Scale()
    return Place(
        data=Rows(scale.__call__),
        set_value=set_attribute(scale, "factor"),
        name="train_data.transforms[0].factor",
    )


def in_closure() -> Place:
    factor = 1.0

    def transform(inputs: Tensor) -> Tensor:
        return inputs * factor

    def set_value(value: float) -> None:
        nonlocal factor
        factor = value

    return Place(data=Rows(transform), set_value=set_value, name="train_data.transforms[0].factor")


def in_subset() -> Place:
    rows = Rows()
    return Place(
        data=Subset(rows, range(SAMPLES)),  # type: ignore[arg-type]
        set_value=set_attribute(rows, "factor"),
        name="train_data.dataset.factor",
    )


def in_concatenation() -> Place:
    rows = Rows()
    halves = [Subset(rows, range(12)), Subset(rows, range(12, 24))]  # type: ignore[arg-type]
    return Place(
        data=ConcatDataset(halves),  # type: ignore[arg-type]
        set_value=set_attribute(rows, "factor"),
        name="train_data.datasets[0].dataset.factor",
    )


def in_collate_function() -> Place:
    collate = Collate()
    return Place(
        data=Rows(),
        set_value=set_attribute(collate, "factor"),
        name="collate_fn.factor",
        settings={"collate_fn": collate},
    )


def in_loader() -> Place:
    rows = Rows()
    return Place(
        data=DataLoader(rows, batch_size=6),  # type: ignore[arg-type]
        set_value=set_attribute(rows, "factor"),
        name="train_data.dataset.factor",
        settings={"batch_size": None, "order": None},
    )


PLACES = [
    pytest.param(in_attribute, id="attribute"),
    pytest.param(in_new_attribute, id="new attribute"),
    pytest.param(in_attribute_of_class, id="attribute of the class"),
    pytest.param(in_dict, id="entry of a dict"),
    pytest.param(in_list, id="entry of a list"),
    pytest.param(in_slot, id="slot"),
    pytest.param(in_transform, id="transform"),
    pytest.param(in_module, id="module"),
    pytest.param(in_partial, id="partial"),
    pytest.param(in_object_of_method, id="method"),
    pytest.param(in_closure, id="closure"),
    pytest.param(in_subset, id="subset"),
    pytest.param(in_concatenation, id="concatenation"),
    pytest.param(in_collate_function, id="collate function"),
    pytest.param(in_loader, id="data set of a loader"),
]


def train(place: Place, **changes: Any) -> tuple[list[float], Tensor]:
    """The factor of each step, which the body of step 2 changes to 2, and the last weights."""
    factors = []
    with build(place.data, **place.settings | changes) as run:
        for step in run:
            factors.append(factor_of(step))
            if step.index == 2:
                place.set_value(2.0)
    return factors, run.state.model.weight.detach().clone()


@pytest.mark.parametrize("build_place", PLACES)
def test_the_next_step_reads_what_the_body_changed_and_a_resumed_run_continues_with_it(
    build_place: Callable[[], Place], tmp_path: Path
) -> None:
    factors, whole = train(build_place())
    assert factors == [1.0] * 3 + [2.0] * 5

    factors_before, _ = train(build_place(), run_dir=tmp_path, stop_after="5 steps")
    factors_after, resumed = train(build_place(), run_dir=tmp_path)

    assert factors_before + factors_after == factors
    assert torch.equal(resumed, whole)


@pytest.mark.parametrize("build_place", PLACES)
def test_with_workers_a_change_is_refused_by_name_before_the_next_step(
    build_place: Callable[[], Place],
) -> None:
    place = build_place()
    if isinstance(place.data, DataLoader):
        loader: Any = DataLoader(place.data.dataset, batch_size=6, num_workers=1)
        place = replace(place, data=loader)
    with refused("data-changed-with-workers", setting=place.name, step=3, value=1):
        train(place, workers=1)


class Busy(Rows):
    """A data set that changes itself while it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.cache: dict[int, Sample] = {}
        self.file: object | None = None

    def __getitem__(self, index: int) -> Sample:
        self.reads += 1
        if self.file is None:
            self.file = object()
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_reading_changes_is_no_change_of_the_body(workers: int, tmp_path: Path) -> None:
    data = Busy()
    run = build(data, workers=workers, run_dir=tmp_path, splits={"all": sf.Split(data)})
    with warnings.catch_warnings(action="error"), run:
        for step in run:
            data[step.index]  # the body reads too
            if step.index == 3:
                run.evaluate("all")
    assert run.parts.run_state.data_values.changed_by_body == set()


def test_an_object_in_place_of_another_is_read_by_the_next_step_and_named_once(
    tmp_path: Path,
) -> None:
    data = Rows(Scale())
    doubling = Scale()
    doubling.factor = 2.0
    factors = []

    def train() -> None:
        with build(data, run_dir=tmp_path) as run:
            for step in run:
                factors.append(factor_of(step))
                if step.index == 2:
                    data.transforms[0] = doubling
                if step.index == 4:
                    data.transforms[0] = Scale()

    with pytest.warns(UserWarning, match=r"train_data\.transforms\[0\]") as caught:
        train()

    assert factors == [1.0] * 3 + [2.0] * 2 + [1.0] * 3
    assert len(caught) == 1


def sum_of_inputs(micro_batches: Sequence[MicroBatch]) -> float:
    (micro_batch,) = micro_batches
    return float(micro_batch.batch[0].sum())


def test_tensors_changed_in_place_are_read_by_the_next_step(tmp_path: Path) -> None:
    inputs = X.clone()
    sums = []

    def train() -> None:
        with build((inputs, Y), run_dir=tmp_path) as run:
            for step in run:
                sums.append(sum_of_inputs(step.micro_batches))
                if step.index == 4:
                    inputs.zero_()

    with pytest.warns(UserWarning, match=r"train_data\[0\]"):
        train()

    assert 0.0 not in sums[:5]
    assert sums[5:] == [0.0] * 3


def test_a_step_that_was_read_ahead_for_a_gpu_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("surefoot.data.loader.to_device", lambda batch, *_, **__: batch)
    inputs = X.clone()
    run = build((inputs, Y))
    feed = run.parts.pipeline.feed(workers=0)
    changes = DataChanges(
        run.parts.run_state.data_values,
        run.parts.pipeline,
        registered={},
        say_unsaved=lambda text: None,
    )
    feed.device = torch.device("cuda")
    changes.begin(step=0)
    feed.start(0, stop=4)
    sums = []
    for step in range(4):
        changes.follow(feed, step=step)
        sums.append(sum_of_inputs(feed.micro_batches(step)))
        changes.note_reading()
        if step == 1:
            inputs.zero_()

    assert feed.ahead is None
    assert 0.0 not in sums[:2]
    assert sums[2:] == [0.0, 0.0]


class Saving(Rows):
    def state_dict(self) -> dict[str, float]:
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.factor = state["factor"]


def test_a_registered_data_set_saves_itself(tmp_path: Path) -> None:
    def train(**changes: Any) -> list[float]:
        data = Saving()
        run = build(data, run_dir=tmp_path, **changes)
        run.register_state("data", data)
        factors = []
        with run:
            for step in run:
                factors.append(factor_of(step))
                data.factor += 1
        return factors

    assert train(stop_after="4 steps") == [1.0, 2.0, 3.0, 4.0]
    assert train() == [5.0, 6.0, 7.0, 8.0]


def test_a_change_after_the_last_step_of_workers_is_that_of_the_resumed_run(
    tmp_path: Path,
) -> None:
    """No step follows that a worker would read otherwise."""

    def train() -> list[float]:
        data = Saving()
        run = build(data, run_dir=tmp_path, workers=1)
        run.register_state("data", data)
        factors = []
        with run:
            for step in run:
                factors.append(factor_of(step))
                if step.index == 3:
                    data.factor = 3.0
                    run.stop()
        return factors

    assert train() == [1.0] * 4
    assert train() == [3.0] * 4


def test_a_sampler_whose_distribution_the_run_took_is_not_changed_in_silence() -> None:
    sampler = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    run = build(DataLoader(Rows(), 6, sampler=sampler), batch_size=None, order=None)  # type: ignore[arg-type]
    setting = "train_data.batch_sampler.sampler.weights"
    with refused("sampler-changed", setting=setting, step=2), run:
        for step in run:
            if step.index == 1:
                sampler.weights = torch.ones(SAMPLES).double() * (Y == 0)


def test_a_loader_whose_parts_the_run_took_is_not_changed_in_silence() -> None:
    loader = DataLoader(Rows(), 6)  # type: ignore[arg-type]
    run = build(loader, batch_size=None, order=None)
    with refused("loader-changed", setting="train_data.collate_fn", step=2), run:
        for step in run:
            if step.index == 1:
                loader.collate_fn = Collate()


def inputs_of_two_steps(data: Any, change: Callable[[], object]) -> list[Tensor]:
    """Of which the body of the first changes the data."""
    inputs = []
    with build(data, length="2 steps") as run:
        for step in run:
            (micro_batch,) = step.micro_batches
            inputs.append(micro_batch.batch[0])
            change()
    return inputs


def test_other_tensors_of_a_data_set_are_read_by_the_next_step() -> None:
    data = TensorDataset(X.clone(), Y)
    _, second = inputs_of_two_steps(data, lambda: setattr(data, "tensors", (X * 3, Y)))
    assert torch.equal(second, X[6:12] * 3)


def test_other_indices_of_a_subset_are_read_by_the_next_step() -> None:
    data = Subset(TensorDataset(X.clone(), Y), list(range(12)))
    _, second = inputs_of_two_steps(data, lambda: setattr(data, "indices", list(range(12, 24))))
    assert torch.equal(second, X[18:])


def test_other_indices_of_a_subset_that_draws_are_read_by_the_next_step() -> None:
    data = Subset(Noisy(), list(range(12)))  # type: ignore[arg-type]
    _, second = inputs_of_two_steps(data, lambda: setattr(data, "indices", list(range(12, 24))))
    assert torch.equal(second, X[18:] * 2)


def test_an_index_of_a_long_list_is_read_as_it_is() -> None:
    indices = list(range(SAMPLES)) * 40
    data = Subset(TensorDataset(X, Y), indices)
    # no entry that is compared
    _, second = inputs_of_two_steps(data, lambda: indices.__setitem__(7, 0))
    assert torch.equal(second[1], X[0])


def test_memory_that_workers_share_is_refused_for_its_own_reason() -> None:
    data = Rows()
    data.factor = torch.ones(()).share_memory_()  # type: ignore[assignment]
    with (
        refused("shared-data-changed-with-workers", setting="train_data.factor", step=3),
        build(data, workers=1) as run,
    ):
        for step in run:
            if step.index == 2:
                data.factor *= 2.0


class Source(IterableDataset[Sample]):
    factor = 1.0
    seen = 0  # not read

    def __iter__(self) -> Iterator[Sample]:
        for inputs, label in zip(X, Y, strict=True):
            yield inputs * self.factor, label


def test_a_source_of_a_stream_is_not_changed_in_silence() -> None:
    source = Source()
    with (
        refused("stream-changed", setting="train_data.factor", step=3),
        build(source, order=None, length="4 steps") as run,
    ):
        for step in run:
            source.seen += 1
            if step.index == 2:
                source.factor = 2.0


def test_the_function_that_decodes_rows_of_a_stream_is_read_by_the_next_step() -> None:
    scale = Scale()
    factors = []

    def decode(row: Sample) -> Sample:
        inputs, label = row
        return scale(inputs), label

    data = sf.data.Stream(Source(), decode_fn=decode)
    with build(data, order=None, length="4 steps") as run:
        for step in run:
            factors.append(factor_of(step))
            if step.index == 1:
                scale.factor = 2.0
    assert factors == [1.0, 1.0, 2.0, 2.0]


def test_a_split_that_the_body_changes_is_scored_as_before_in_a_resumed_run(
    tmp_path: Path,
) -> None:
    def scores(**changes: Any) -> dict[int, float]:
        data = Rows()
        losses = {}
        settings = {"splits": {"val": sf.Split(data)}, "evaluate_every": "4 steps"}
        with build((X, Y), **settings | changes) as run:
            for step in run:
                if step.metrics:
                    losses[step.index] = step.metrics["val/loss"]
                if step.index == 4:
                    data.factor = 3.0
        return losses

    whole = scores()
    assert whole[7] > whole[3]
    before = scores(run_dir=tmp_path, stop_after="5 steps")
    after = scores(run_dir=tmp_path)
    assert before | after == whole
    assert scores(workers=1) == whole  # an evaluation starts its own workers


def test_many_changes_are_named_by_the_first_three(tmp_path: Path) -> None:
    data = list(zip(X, Y, strict=True))

    def train(**changes: Any) -> None:
        with build(data, length="3 steps", **changes) as run:
            for _ in run:
                data[:] = [(inputs * 2, label) for inputs, label in data]

    with pytest.warns(UserWarning, match=r"train_data\[2\].* 21 .* 1\b") as caught:
        train(run_dir=tmp_path)
    assert len(caught) == 1
    names = [f"train_data[{index}]" for index in range(SAMPLES)]
    with refused("data-changed-with-workers", names=names) as refusal:
        train(workers=1)
    assert "train_data[3]" not in str(refusal.value)


# --- an argument `step` ---------------------------------------------------------------------------


class Curriculum(Rows):
    """A pure function of the step."""

    def __getitem__(self, index: int, step: int = 0) -> Sample:  # type: ignore[override]
        return X[index] * (1 + step), Y[index]


class Noisy(Rows):
    """One that draws too."""

    def __getitem__(self, index: int, *, rng: Any, step: int) -> Sample:  # type: ignore[override]
        return X[index] * (1 + step) + 0 * rng.random(), Y[index]


WRAPPED: dict[str, Callable[[], Any]] = {
    "itself": Curriculum,
    "with rng": Noisy,
    "subset": lambda: Subset(Curriculum(), range(SAMPLES)),  # type: ignore[arg-type]
    "concatenation": lambda: ConcatDataset(
        [Subset(Noisy(), range(12)), Subset(Curriculum(), range(12, 24))]  # type: ignore[arg-type,list-item]
    ),
    "loader": lambda: DataLoader(Curriculum(), batch_size=6),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_may_take_the_step(wrapper: str, workers: int, tmp_path: Path) -> None:
    def factors_of_two_micro_batches(**changes: Any) -> list[list[float]]:
        data = WRAPPED[wrapper]()
        if wrapper == "loader":
            data = DataLoader(data.dataset, batch_size=6, num_workers=workers)
            changes |= {"batch_size": None, "order": None}
        else:
            changes["workers"] = workers
        factors = []
        with build(data, run_dir=tmp_path, micro_batch_size=3, **changes) as run:
            for step in run:
                factors.append([])
                for part in step.micro_batches:
                    factor = part.batch[0].sum() / X[part.sample_ids].sum()
                    factors[-1].append(float(factor))
        return factors

    factors = factors_of_two_micro_batches(stop_after="3 steps")
    factors += factors_of_two_micro_batches()

    for step, factors_of_step in enumerate(factors):
        assert factors_of_step == pytest.approx([1.0 + step] * 2)
    assert len(factors) == 8


def test_a_split_is_read_as_in_step_0() -> None:
    run = build(Curriculum(), splits={"val": sf.Split(Curriculum())})
    (before,) = run.parts.pipeline.split(Curriculum(), batch_size=SAMPLES)
    run.train()
    (after,) = run.parts.pipeline.split(Curriculum(), batch_size=SAMPLES)

    assert torch.equal(before.batch[0], X)
    assert torch.equal(after.batch[0], X)


def test_a_run_that_began_before_the_argument_does_not_pass_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("surefoot.tracking.run_reader.newest_behavior", lambda: 1)
    with build(Curriculum()) as run:
        assert [factor_of(step) for step in run] == [1.0] * 8


def test_a_wrapper_that_passes_no_step_on_is_refused() -> None:
    class Doubled:
        inner = Noisy()

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> Sample:
            return self.inner[index]  # type: ignore[call-arg,index]

    with refused("sample-unreadable", sf.DataError, kind="Doubled") as caught:
        build(Doubled())
    (remedy,) = caught.value.remedies
    assert re.search(r"Doubled: def __getitem__\(self, index, rng, step\)", str(remedy))


# --- metrics --------------------------------------------------------------------------------------


def scored(**changes: Any) -> sf.Run:
    return build(
        (X, Y),
        **{"splits": {"val": sf.Split((X, Y))}, "evaluate_every": "2 steps"} | changes,
    )


def by_hand(run: sf.Run) -> dict[int, float]:
    """The losses that the body of `run.steps()` sees, by step."""
    losses = {}
    with run:
        for step in run.steps():
            if step.metrics:
                losses[step.index] = step.metrics["val/loss"]
            sf.forward_backward(step)
            sf.update(step)
    if step.index == 7:  # of the evaluation after the last step
        losses[8] = step.metrics["val/loss"]
    return losses


def test_the_body_of_steps_sees_the_metrics_of_the_evaluation_before_it() -> None:
    expected = {}
    with scored() as run:
        for step in run:
            if step.metrics:
                expected[step.index + 1] = step.metrics["val/loss"]
    assert sorted(expected) == [2, 4, 6, 8]

    assert by_hand(scored()) == expected


def test_a_resumed_body_sees_the_metrics_that_an_uninterrupted_one_sees(tmp_path: Path) -> None:
    whole = by_hand(scored())
    before = by_hand(scored(run_dir=tmp_path, stop_after="4 steps"))
    after = by_hand(scored(run_dir=tmp_path))
    assert sorted(before) == [2]
    assert before | after == whole


def test_a_step_that_only_samples_has_no_metrics() -> None:
    run = scored(evaluate_every="4 steps", sample_every="2 steps", sample_fn=lambda _: "text")
    with run:
        assert [step.index for step in run if step.metrics] == [3, 7]
