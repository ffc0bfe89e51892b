"""A loss or a `collate_fn` that returns None leaves its samples out of a step or of an evaluation,
as a micro-batch without targets does, and they are counted.
"""

from __future__ import annotations

import math
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

SAMPLES, STEPS = 24, 9
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


def test_what_is_left_out_changes_what_a_micro_batch_without_targets_changes(
    tmp_path: Path,
) -> None:
    """To the bit: weights, batch statistics, and the loss of the records."""
    expected = build(tmp_path / "count", count_fn=count_or_zero)
    by_loss = build(tmp_path / "loss", loss=loss_or_none)
    by_collate = build(tmp_path / "collate", collate_fn=collate_or_none)
    for run in (expected, by_loss, by_collate):
        run.train()
    want = [record["loss"] for record in sf.load(tmp_path / "count").records("train")]
    for name, run in (("loss", by_loss), ("collate", by_collate)):
        for one, other in zip(state_of(run), state_of(expected), strict=True):
            assert torch.equal(one, other), name
        records = sf.load(tmp_path / name).records("train")
        assert [record["loss"] for record in records] == want


@pytest.mark.parametrize("change", [{"loss": loss_or_none}, {"collate_fn": collate_or_none}])
def test_they_are_counted_once_also_by_workers_and_over_a_resume(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    seen: list[int] = []
    with build(tmp_path / "whole", **change) as run:
        for step in run:
            for micro_batch in step.micro_batches:
                if BAD[torch.from_numpy(micro_batch.sample_ids.astype("int64"))].any():
                    seen.append(len(micro_batch.sample_ids))
    whole = [r.get("skipped_samples") for r in sf.load(tmp_path / "whole").records("train")]
    assert sum(filter(None, whole)) == sum(seen) > 0
    workers = 2 if "collate_fn" in change else 0
    build(tmp_path / "cut", stop_after="4 steps", workers=workers, **change).train()
    build(tmp_path / "cut", workers=workers, **change).train()
    assert [r.get("skipped_samples") for r in sf.load(tmp_path / "cut").records("train")] == whole


@pytest.mark.parametrize("change", [{"loss": lambda *_: None}, {"collate_fn": lambda _: None}])
def test_a_step_of_which_nothing_is_left_changes_nothing(change: dict[str, Any]) -> None:
    run = build(length="2 steps", log_every="2 steps", **change)
    before = state_of(run)
    with refused("every-sample-left-out", setting="loss", step=2):
        run.train()
    assert all(map(torch.equal, state_of(run), before))


@pytest.mark.parametrize("cut", [None, "2 steps"], ids=["in one session", "resumed"])
def test_only_a_run_whose_first_ten_steps_are_left_out_is_ended(
    tmp_path: Path, cut: str | None
) -> None:
    """One picture that cannot be read may be the whole first step."""
    bad: set[int] = set()

    def collate(samples: list[Any]) -> Any:
        is_left_out = any(sample[2] in bad for sample in samples)
        return None if is_left_out else default_collate(samples)

    settings = {"collate_fn": collate, "batch_size": 2, "length": "12 steps", "check_state": False}
    order = build(**settings).parts.pipeline.plan
    bad.update(int(sample) for ids, _ in order.micro_batches(0) for sample in ids)
    run_dir = tmp_path / "a"
    build(run_dir, log_every="1 steps", stop_after=cut, **settings).train()
    build(run_dir, log_every="1 steps", **settings).train()
    bad.update(range(SAMPLES))
    if cut is not None:
        build(tmp_path / "b", log_every="11 steps", stop_after=cut, **settings).train()
    with refused("every-sample-left-out", setting="loss", step=11):
        build(tmp_path / "b", log_every="11 steps", **settings).train()


def test_a_later_record_of_which_nothing_is_left_ends_no_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[int] = []

    def loss(model: Any, batch: Any) -> Tensor | None:
        calls.append(1)
        return plain_loss(model, batch) if len(calls) < 30 else None

    build(loss=loss, console=True, check_state=False, log_every="1 steps").train()
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("note: ") and " None " in line]) == 1


def test_the_first_batch_may_be_left_out() -> None:
    """Before the first step, checks pass it too."""
    calls: list[int] = []

    def first_is_none(model: Any, batch: Any) -> Tensor | None:
        calls.append(1)
        return None if len(calls) < 6 else plain_loss(model, batch)

    build(loss=first_is_none, splits={"val": sf.Split(Rows())}).train()


def test_verify_repeats_what_was_left_out(tmp_path: Path) -> None:
    run = build(tmp_path / "a", loss=loss_or_none, save_every="3 steps")
    run.train()
    assert (
        sf.load(build(tmp_path / "a", loss=loss_or_none, save_every="3 steps")).verify().problems
        == []
    )


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
    assert [*run.evaluate()] == ["val/loss", "val/skipped_samples"]
    ending = capsys.readouterr().out.partition("finished: ")[2]
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
    (weights, scores) = ranks(2, on_rank)[0]
    expected = on_rank()
    assert weights == expected[0]
    assert scores == pytest.approx(expected[1], rel=1e-6)


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


OBJECTS_LEFT_OUT: list[tuple[list[int], int, int]] = [  # samples, batch size, number of scores
    ([4, 12, 20], 4, 3),  # every batch of rank 1
    ([0, 8, 16], 4, 3),  # every batch of rank 0
    ([12], 12, 3),  # the only batch of rank 1
    ([0], 12, 3),
    ([0], SAMPLES, 0),  # the only batch, and rank 1 has padding
    ([0, 4, 8, 12, 16, 20], 4, 0),
]


def all_objects_on_rank() -> Any:
    return [objects_on_rank(left_out, size) for left_out, size, _ in OBJECTS_LEFT_OUT]


def test_ranks_of_which_every_batch_is_left_out_have_the_scores_of_the_others(
    ranks: Ranks,
) -> None:
    pytest.importorskip("torchmetrics")
    expected = all_objects_on_rank()
    for scores, (_, _, count) in zip(expected, OBJECTS_LEFT_OUT, strict=True):
        assert len(scores) == count + 1  # and `skipped_samples`
    for of_rank in ranks(2, all_objects_on_rank):
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
