"""Law 17: what the body of a loop changes in the data is seen by the next step, or refused by name;
and a resumed run continues with it. (8 s)
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
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
        return [
            torch.stack([inputs for inputs, _ in samples]) * self.factor,
            torch.stack([label for _, label in samples]),
        ]


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


def closure() -> tuple[Rows, Callable[[float], None], str]:
    factor = 1.0

    def transform(inputs: Tensor) -> Tensor:
        return inputs * factor

    def change(to: float) -> None:
        nonlocal factor
        factor = to

    return Rows(transform), change, "train_data.transforms[0].factor"


def of_attribute(owner: Any, name: str) -> Callable[[float], None]:
    return partial(setattr, owner, name)


def places() -> dict[str, tuple[Any, Callable[[float], None], str, dict[str, Any]]]:
    """A data set, what changes a value of it, the value's name, and settings of the run."""
    rows = [Rows() for _ in range(8)]
    scales = [Scale() for _ in range(3)]
    module = Module()
    slots = Slots()
    collate = Collate()
    parts = [Subset(rows[6], range(12)), Subset(rows[6], range(12, 24))]
    by_partial = partial(torch.mul, other=1.0)
    closed, change_closed, closed_name = closure()

    class Own(Rows):
        of_class = 1.0

    own = Own()
    return {
        "attribute": (rows[0], of_attribute(rows[0], "factor"), "train_data.factor", {}),
        "new attribute": (rows[1], of_attribute(rows[1], "missing"), "train_data.missing", {}),
        "attribute of the class": (
            own,
            of_attribute(Own, "of_class"),
            "train_data.of_class",
            {},
        ),
        "entry of a dict": (
            rows[2],
            partial(rows[2].by_name.__setitem__, "factor"),
            "train_data.by_name['factor']",
            {},
        ),
        "entry of a list": (
            rows[3],
            partial(rows[3].in_list.__setitem__, 1),
            "train_data.in_list[1]",
            {},
        ),
        "slot": (slots, of_attribute(slots, "factor"), "train_data.factor", {}),
        "transform": (
            Rows(scales[0]),
            of_attribute(scales[0], "factor"),
            "train_data.transforms[0].factor",
            {},
        ),
        "module": (
            Rows(nn.Sequential(nn.Identity(), module)),
            of_attribute(module, "factor"),
            "train_data.transforms[0]._modules['1'].factor",
            {},
        ),
        "partial": (
            Rows(by_partial),
            lambda to: by_partial.keywords.update(other=to),
            "train_data.transforms[0].keywords['other']",
            {},
        ),
        "method": (
            Rows(scales[1].__call__),
            of_attribute(scales[1], "factor"),
            "train_data.transforms[0].factor",
            {},
        ),
        "closure": (closed, change_closed, closed_name, {}),
        "subset": (
            Subset(rows[4], range(SAMPLES)),
            of_attribute(rows[4], "factor"),
            "train_data.dataset.factor",
            {},
        ),
        "concatenation": (
            ConcatDataset(parts),  # type: ignore[arg-type]
            of_attribute(rows[6], "factor"),
            "train_data.datasets[0].dataset.factor",
            {},
        ),
        "collate function": (
            Rows(),
            of_attribute(collate, "factor"),
            "collate_fn.factor",
            {"collate_fn": collate},
        ),
        "data set of a loader": (
            DataLoader(rows[7], batch_size=6),  # type: ignore[arg-type]
            of_attribute(rows[7], "factor"),
            "train_data.dataset.factor",
            {"batch_size": None, "order": None},
        ),
    }


PLACES = list(places())


def train(
    place: str, *, change_at: int = 2, workers: int = 0, **changes: Any
) -> tuple[list[float], Tensor]:
    """The factor of each step, which the body of one step changes to 2, and the last weights."""
    data, change, _, settings = places()[place]
    if workers:
        settings = settings | {"workers": workers}
        if isinstance(data, DataLoader):
            data = DataLoader(data.dataset, batch_size=6, num_workers=workers)
    factors = []
    with build(data, **settings | changes) as run:
        for step in run:
            factors.append(factor_of(step))
            if step.index == change_at:
                change(2.0)
    return factors, run.state.model.weight.detach().clone()


@pytest.mark.parametrize("place", PLACES)
def test_the_next_step_reads_what_the_body_changed_and_a_resumed_run_continues_with_it(
    place: str, tmp_path: Path
) -> None:
    factors, whole = train(place)
    assert factors == [1.0] * 3 + [2.0] * 5
    first, _ = train(place, run_dir=tmp_path, stop_after="5 steps")
    second, resumed = train(place, run_dir=tmp_path)
    assert first + second == factors
    assert torch.equal(resumed, whole)


@pytest.mark.parametrize("place", PLACES)
def test_with_workers_a_change_is_refused_by_name_before_the_next_step(place: str) -> None:
    name = places()[place][2]
    with refused("data-changed-with-workers", setting=name, step=3, value=1):
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
    with warnings.catch_warnings(), run:
        warnings.simplefilter("error")
        for step in run:
            data[step.index]  # the body reads too
            if step.index == 3:
                run.evaluate("all")
    assert run.parts.run_state.data_values.changed_by_body == set()


def test_an_object_in_place_of_another_is_read_by_the_next_step_and_named_once(
    tmp_path: Path,
) -> None:
    data = Rows(Scale())
    larger = Scale()
    factors = []
    larger.factor = 2.0

    def train() -> None:
        with build(data, run_dir=tmp_path) as run:
            for step in run:
                factors.append(factor_of(step))
                if step.index in (2, 4):
                    data.transforms[0] = larger if step.index == 2 else Scale()

    with pytest.warns(UserWarning, match=r"train_data\.transforms\[0\]") as caught:
        train()
    assert factors == [1.0] * 3 + [2.0] * 2 + [1.0] * 3
    assert len(caught) == 1


def test_tensors_changed_in_place_are_read_by_the_next_step(tmp_path: Path) -> None:
    inputs = X.clone()
    seen = []

    def train() -> None:
        with build((inputs, Y), run_dir=tmp_path) as run:
            for step in run:
                seen.append(float(step.micro_batches[0].batch[0].sum()))
                if step.index == 4:
                    inputs.zero_()

    with pytest.warns(UserWarning, match=r"train_data\[0\]"):
        train()
    assert 0.0 not in seen[:5]
    assert seen[5:] == [0.0] * 3


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
        sums.append(float(feed.micro_batches(step)[0].batch[0].sum()))
        changes.note_reading()
        if step == 1:
            inputs.zero_()
    assert feed.ahead is None
    assert 0.0 not in sums[:2]
    assert sums[2:] == [0.0, 0.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_registered_data_set_saves_itself(workers: int, tmp_path: Path) -> None:
    class Saving(Rows):
        def state_dict(self) -> dict[str, float]:
            return {"factor": self.factor}

        def load_state_dict(self, state: dict[str, float]) -> None:
            self.factor = state["factor"]

    def session(**changes: Any) -> list[float]:
        data = Saving()
        factors = []
        run = build(data, run_dir=tmp_path, **changes)
        run.register_state("data", data)
        with run:
            for step in run:
                factors.append(factor_of(step))
                if not changes.get("workers") and not workers:
                    data.factor += 1
                if step.index == 3 and workers:
                    data.factor = 3.0
                    run.stop()
        return factors

    if workers:  # a change after which no step follows harms nothing
        assert session(workers=1) == [1.0] * 4
        assert session(workers=1) == [3.0] * 4
    else:
        assert session(stop_after="4 steps") == [1.0, 2.0, 3.0, 4.0]
        assert session() == [5.0, 6.0, 7.0, 8.0]


def test_a_sampler_whose_distribution_the_run_took_is_not_changed_in_silence() -> None:
    sampler = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    run = build(DataLoader(Rows(), 6, sampler=sampler), batch_size=None, order=None)  # type: ignore[arg-type]
    with (
        refused("sampler-changed", setting="train_data.batch_sampler.sampler.weights", step=2),
        run,
    ):
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


@pytest.mark.parametrize("kind", ["tensors", "subset", "subset of rng"])
def test_another_list_of_samples_is_read_by_the_next_step(kind: str) -> None:
    tensors = TensorDataset(X.clone(), Y)
    half = list(range(12))
    data = {
        "tensors": tensors,
        "subset": Subset(tensors, half),
        "subset of rng": Subset(Noisy(), half),  # type: ignore[arg-type]
    }[kind]
    seen = []
    with build(data, length="2 steps") as run:
        for step in run:
            seen.append(step.micro_batches[0].batch[0])
            if isinstance(data, Subset):
                data.indices = list(range(12, 24))
            else:
                data.tensors = (X * 3, Y)
    expected = {"tensors": X[6:12] * 3, "subset": X[18:], "subset of rng": X[18:] * 2}
    assert torch.equal(seen[1], expected[kind])


def test_an_index_of_a_long_list_is_read_as_it_is() -> None:
    data = Subset(TensorDataset(X, Y), list(range(SAMPLES)) * 40)
    first = []
    with build(data, length="2 steps") as run:
        for step in run:
            first.append(step.micro_batches[0].batch[0][1])
            data.indices[7] = 0  # no entry that is compared
    assert torch.equal(first[1], X[0])


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
        return scale(row[0]), row[1]

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
    first = scores(run_dir=tmp_path, stop_after="5 steps")
    assert first | scores(run_dir=tmp_path) == whole
    assert whole[7] > whole[3]
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
    def session(**changes: Any) -> list[float]:
        data = WRAPPED[wrapper]()
        if wrapper == "loader":
            data = DataLoader(data.dataset, batch_size=6, num_workers=workers)
            changes |= {"batch_size": None, "order": None}
        else:
            changes["workers"] = workers
        with build(data, run_dir=tmp_path, micro_batch_size=3, **changes) as run:
            return [
                sum(
                    float(part.batch[0].sum() / X[part.sample_ids].sum())
                    for part in step.micro_batches
                )
                for step in run
            ]

    factors = session(stop_after="3 steps") + session()
    assert factors == pytest.approx([2.0 * (1 + step) for step in range(8)])


def test_a_split_is_read_as_in_step_0_and_an_older_run_as_it_began() -> None:
    run = build(Curriculum(), splits={"val": sf.Split(Curriculum())})
    pipeline = run.parts.pipeline
    (batch,) = pipeline.split(Curriculum(), batch_size=SAMPLES)
    assert torch.equal(batch.batch[0], X)
    with run:
        for _ in run:
            pass
    (batch,) = pipeline.split(Curriculum(), batch_size=SAMPLES)
    assert torch.equal(batch.batch[0], X)


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
    """What the body of `run.steps()` sees, by step."""
    seen = {}
    with run:
        for step in run.steps():
            if step.metrics:
                seen[step.index] = step.metrics["val/loss"]
            sf.forward_backward(step)
            sf.update(step)
    if step.index == 7:  # of the evaluation after the last step
        seen[8] = step.metrics["val/loss"]
    return seen


def test_the_body_of_steps_sees_the_metrics_of_the_evaluation_before_it() -> None:
    with scored() as run:
        expected = {step.index + 1: dict(step.metrics) for step in run}
    assert by_hand(scored()) == {
        index: metrics["val/loss"] for index, metrics in expected.items() if metrics
    }
    assert sorted(by_hand(scored())) == [2, 4, 6, 8]


def test_a_resumed_body_sees_the_metrics_that_an_uninterrupted_one_sees(tmp_path: Path) -> None:
    whole = by_hand(scored())
    first = by_hand(scored(run_dir=tmp_path, stop_after="4 steps"))
    second = by_hand(scored(run_dir=tmp_path))
    assert sorted(first) == [2]
    assert first | second == whole


def test_a_step_that_only_samples_has_no_metrics() -> None:
    run = scored(evaluate_every="4 steps", sample_every="2 steps", sample_fn=lambda _: "text")
    with run:
        assert [step.index for step in run if step.metrics] == [3, 7]
