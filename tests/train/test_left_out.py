"""A loss or a `collate_fn` that returns None leaves its samples out of a step or of an evaluation,
as a micro-batch without targets does, and they are counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

import surefoot as sf
from rank_processes import Ranks
from refused import refused
from stated import lines_naming

SAMPLES = 24
STEPS = 9
INPUTS = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(SAMPLES) % 2
BAD = torch.arange(SAMPLES) % 8 == 3  # their batches are left out


class Rows:
    """Samples that are read one by one, with their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return INPUTS[index], TARGETS[index], index


def is_bad(batch: Any) -> bool:
    return bool(BAD[batch[2]].any())


def plain_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loss_or_none(model: Any, batch: Any) -> Tensor | None:
    loss = plain_loss(model, batch)  # the model has seen the batch
    return None if is_bad(batch) else loss


def collate_or_none(samples: list[Any]) -> Any:
    batch = default_collate(samples)
    return None if is_bad(batch) else batch


def count_or_zero(batch: Any) -> int:
    return 0 if is_bad(batch) else len(batch[0])


def build(run_dir: Path | None = None, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2)
        ),
        "loss": plain_loss,
        "train_data": Rows(),
        "batch_size": 8,
        "micro_batch_size": 2,
        "length": f"{STEPS} steps",
        "optimizer": sf.optim.adamw(lr=0.05),
        "layer_stats_every": "2 steps",
        "log_every": "3 steps",
        "device": "cpu",
        "console": False,
        "report": False,
        "tensorboard": False,
        "run_dir": run_dir,
    }
    return sf.Run(**(settings | changes))


def state_of(run: sf.Run) -> list[Tensor]:
    return [tensor.clone() for tensor in run.state.model.state_dict().values()]


def recorded(run_dir: Path, name: str) -> list[Any]:
    """A value of each training record, None where it has none."""
    return [record.get(name) for record in sf.load(run_dir).records("train")]


@pytest.fixture(scope="module")
def without_targets(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Tensor], list[float]]:
    """A run of which the same micro-batches have no targets: its weights and batch statistics, and
    the losses of its records.
    """
    run_dir = tmp_path_factory.mktemp("count") / "run"
    run = build(run_dir, count_fn=count_or_zero)
    run.train()
    return state_of(run), recorded(run_dir, "loss")


@pytest.mark.parametrize("change", [{"loss": loss_or_none}, {"collate_fn": collate_or_none}])
def test_what_is_left_out_changes_what_a_micro_batch_without_targets_changes(
    tmp_path: Path,
    change: dict[str, Any],
    without_targets: tuple[list[Tensor], list[float]],
) -> None:
    run = build(tmp_path / "run", **change)
    run.train()

    expected_state, expected_losses = without_targets
    for one, other in zip(state_of(run), expected_state, strict=True):
        assert torch.equal(one, other)
    assert recorded(tmp_path / "run", "loss") == expected_losses


@pytest.mark.parametrize(
    ("change", "workers"), [({"loss": loss_or_none}, 0), ({"collate_fn": collate_or_none}, 2)]
)
def test_they_are_counted_once_also_by_workers_and_over_a_resume(
    tmp_path: Path, change: dict[str, Any], workers: int
) -> None:
    left_out = 0
    with build(tmp_path / "whole", **change) as run:
        for step in run:
            for micro_batch in step.micro_batches:
                ids = torch.from_numpy(micro_batch.sample_ids.astype("int64"))
                if BAD[ids].any():
                    left_out += len(ids)
    build(tmp_path / "cut", stop_after="4 steps", workers=workers, **change).train()
    build(tmp_path / "cut", workers=workers, **change).train()

    counts = recorded(tmp_path / "whole", "skipped_samples")
    assert left_out > 0
    assert sum(count or 0 for count in counts) == left_out
    assert recorded(tmp_path / "cut", "skipped_samples") == counts


@pytest.mark.parametrize("change", [{"loss": lambda *_: None}, {"collate_fn": lambda _: None}])
def test_a_step_of_which_nothing_is_left_changes_nothing(change: dict[str, Any]) -> None:
    run = build(length="2 steps", log_every="2 steps", **change)
    before = state_of(run)
    with refused("every-sample-left-out", setting="loss", step=2):
        run.train()

    assert all(map(torch.equal, state_of(run), before))


BY_TWO: dict[str, Any] = {"batch_size": 2, "length": "12 steps", "check_state": False}
cut_or_whole = pytest.mark.parametrize("cut", [None, "2 steps"], ids=["in one session", "resumed"])


@cut_or_whole
def test_a_run_whose_first_step_is_left_out_goes_on(tmp_path: Path, cut: str | None) -> None:
    """One picture that cannot be read may be the whole first step."""
    ((ids, _),) = build(**BY_TWO).parts.pipeline.plan.micro_batches(0)
    of_first_step = set(ids.tolist())

    def collate(samples: list[Any]) -> Any:
        is_left_out = any(sample[2] in of_first_step for sample in samples)
        return None if is_left_out else default_collate(samples)

    changes = BY_TWO | {"collate_fn": collate, "log_every": "1 steps"}
    build(tmp_path / "run", stop_after=cut, **changes).train()
    build(tmp_path / "run", **changes).train()


@cut_or_whole
def test_a_run_whose_first_ten_steps_are_left_out_is_ended(tmp_path: Path, cut: str | None) -> None:
    changes = BY_TWO | {"collate_fn": lambda _: None, "log_every": "11 steps"}
    if cut is not None:
        build(tmp_path / "run", stop_after=cut, **changes).train()
    with refused("every-sample-left-out", setting="loss", step=11):
        build(tmp_path / "run", **changes).train()


def test_a_later_record_of_which_nothing_is_left_ends_no_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[int] = []

    def loss(model: Any, batch: Any) -> Tensor | None:
        calls.append(1)
        return plain_loss(model, batch) if len(calls) < 30 else None

    build(loss=loss, console=True, check_state=False, log_every="1 steps").train()

    assert len(lines_naming(capsys.readouterr().out, "note: ", " None ")) == 1


def test_the_first_batch_may_be_left_out() -> None:
    """Before the first step, checks pass it too."""
    calls: list[int] = []

    def first_is_none(model: Any, batch: Any) -> Tensor | None:
        calls.append(1)
        return None if len(calls) < 6 else plain_loss(model, batch)

    build(loss=first_is_none, splits={"val": sf.Split(Rows())}).train()


def test_verify_repeats_what_was_left_out(tmp_path: Path) -> None:
    build(tmp_path / "run", loss=loss_or_none, save_every="3 steps").train()

    run = build(tmp_path / "run", loss=loss_or_none, save_every="3 steps")
    assert sf.load(run).verify().problems == []


def accuracy(outputs: Tensor, targets: Tensor) -> sf.Mean:
    return sf.Mean((outputs.argmax(1) == targets).sum(), len(targets))


def with_pair(model: Any, batch: Any) -> Any:
    outputs = model(batch[0])
    if is_bad(batch):
        return None
    return F.cross_entropy(outputs, batch[1]), (outputs, batch[1])


def whole_split(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(1) == targets).sum())


METRICS = {"accuracy": accuracy, "right": sf.metrics.whole_split(whole_split)}


def expected_scores(run: sf.Run) -> dict[str, float]:
    model = run.state.model.eval()
    is_kept = ~BAD.reshape(-1, 2).any(1).repeat_interleave(2)
    with torch.no_grad():
        outputs = model(INPUTS[is_kept])
    model.train()
    right = (outputs.argmax(1) == TARGETS[is_kept]).float()
    return {
        "val/loss": float(F.cross_entropy(outputs, TARGETS[is_kept])),
        "val/accuracy": float(right.mean()),
        "val/right": float(right.sum()),
        "val/skipped_samples": int((~is_kept).sum()),
    }


@pytest.mark.parametrize("by", ["loss", "collate_fn"])
def test_an_evaluation_scores_what_is_left(by: str) -> None:
    run = build(splits={"val": split_by(by)})
    assert run.evaluate() == pytest.approx(expected_scores(run), rel=1e-5)


def test_a_split_of_which_nothing_is_left_has_a_loss_of_nothing() -> None:
    split = sf.Split(Rows(), loss=lambda *_: None, derived={"double": lambda of: 2 * of["loss"]})
    scores = build(splits={"val": split}).evaluate()
    assert math.isnan(scores["val/loss"])
    assert math.isnan(scores["val/double"])
    assert scores["val/skipped_samples"] == SAMPLES


def test_the_ending_shows_no_count_of_samples_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    split = sf.Split(Rows(), loss=lambda *_: None)
    run = build(splits={"val": split}, console=True)
    run.train()

    ending = capsys.readouterr().out.partition("finished: ")[2]
    assert [*run.evaluate()] == ["val/loss", "val/skipped_samples"]
    assert "val/loss" in ending
    assert "skipped_samples" not in ending


def split_by(by: str) -> sf.Split:
    if by == "loss":
        return sf.Split(Rows(), metrics=METRICS, loss=with_pair, batch_size=2)

    def pair(model: Any, batch: Any) -> Any:
        return model(batch[0]), batch[1]

    return sf.Split(Rows(), metrics=METRICS, predict=pair, collate_fn=collate_or_none, batch_size=2)


def on_rank() -> Any:
    run = build(
        collate_fn=collate_or_none, splits={by: split_by(by) for by in ("loss", "collate_fn")}
    )
    run.train()
    weights = torch.cat([tensor.double().flatten() for tensor in run.state.parameters])
    scores = run.evaluate()
    return weights.tolist(), scores


def test_ranks_leave_out_the_same(ranks: Ranks) -> None:
    (weights, scores), _ = ranks(2, on_rank)

    expected_weights, expected_scores = on_rank()
    assert weights == expected_weights
    assert scores == pytest.approx(expected_scores, rel=1e-6)


def objects_on_rank(left_out: list[int], batch_size: int) -> Any:
    """Evaluate objects of torchmetrics where the batches of some samples are left out."""
    import torchmetrics

    def collate(samples: list[Any]) -> Any:
        batch = default_collate(samples)
        return None if any(int(index) in left_out for index in batch[2]) else batch

    of_classes: dict[str, Any] = {"task": "multiclass", "num_classes": 2}
    split = sf.Split(
        Rows(),
        metrics={
            "sums": torchmetrics.Accuracy(**of_classes),
            "lists": torchmetrics.AUROC(**of_classes),
            "right": sf.metrics.whole_split(whole_split),
        },
        predict=lambda model, batch: (model(batch[0]).softmax(1), batch[1]),
        collate_fn=collate,
        batch_size=batch_size,
        loss=False,
    )
    return build(splits={"val": split}, check_state=False).evaluate()


@dataclass(frozen=True)
class LeftOut:
    """Samples whose batches are left out of a split."""

    samples: list[int]
    batch_size: int
    score_count: int  # of the metrics


LEFT_OUT = [
    LeftOut([4, 12, 20], batch_size=4, score_count=3),  # every batch of rank 1
    LeftOut([0, 8, 16], batch_size=4, score_count=3),  # every batch of rank 0
    LeftOut([12], batch_size=12, score_count=3),  # the only batch of rank 1
    LeftOut([0], batch_size=12, score_count=3),
    LeftOut([0], batch_size=SAMPLES, score_count=0),  # the only batch, and rank 1 has padding
    LeftOut([0, 4, 8, 12, 16, 20], batch_size=4, score_count=0),
]


def all_objects_on_rank() -> list[dict[str, float]]:
    return [objects_on_rank(case.samples, case.batch_size) for case in LEFT_OUT]


def test_ranks_of_which_every_batch_is_left_out_have_the_scores_of_the_others(
    ranks: Ranks,
) -> None:
    pytest.importorskip("torchmetrics")
    expected = all_objects_on_rank()
    of_ranks = ranks(2, all_objects_on_rank)

    for scores, case in zip(expected, LEFT_OUT, strict=True):
        assert len(scores) == case.score_count + 1  # and `skipped_samples`
    for of_rank in of_ranks:
        for scores, of_one_process in zip(of_rank, expected, strict=True):
            assert scores == pytest.approx(of_one_process, rel=1e-6)


def none_on_rank() -> None:
    with refused("loss-left-out-on-ranks", setting="loss"):
        build(loss=loss_or_none, check_state=False).train()


@pytest.mark.slow
def test_a_loss_of_none_is_refused_on_ranks(ranks: Ranks) -> None:
    ranks(2, none_on_rank)


def refused_of_shards(by: str) -> str:
    """Left out before the model is called: this rank would miss a gather of the weights."""
    split = sf.Split(Rows(), loss=lambda *_: None)
    if by == "collate_fn":
        split = sf.Split(Rows(), collate_fn=lambda _: None)
    with refused("batch-left-out-when-sharded", sf.DataError, setting=by):
        build(parallel="fsdp", splits={"val": split}).evaluate()
    return by


@pytest.mark.parametrize("by", ["loss", "collate_fn"])
def test_no_batch_of_a_split_is_left_out_where_ranks_gather_weights(by: str, ranks: Ranks) -> None:
    assert ranks(2, refused_of_shards, by=by) == [by, by]


@pytest.mark.parametrize("by", ["loss", "collate_fn"])
def test_outputs_of_samples_that_are_left_out_are_refused(by: str) -> None:
    with refused("outputs-left-out", setting="loss", count=2):
        build().predict(split_by(by))
