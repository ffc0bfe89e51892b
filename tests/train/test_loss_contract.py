"""The loss of a batch is a mean: checked at every start, refused where a split is scored. (5 s)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from recorded import records_of_kind
from refused import refused
from surefoot.data.loader import MicroBatch
from surefoot.train import state_check
from surefoot.train.loss_contract import check_contract, compared, pieces_of
from surefoot.train.state_check import loss_contract

CLASSES = 3
WIDTH = 4
SAMPLES = 24
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0])


def rows(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(samples, WIDTH, generator=generator),
        torch.randint(CLASSES, (samples,), generator=generator),
    )


def padded_rows() -> tuple[Tensor, Tensor]:
    """Sequences of labels, most of which are ignored in every second sample."""
    inputs = torch.randn(SAMPLES, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(SAMPLES * 5).view(SAMPLES, 5) % CLASSES
    labels[::4, 1:] = -100
    return inputs, labels


def mean(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def summed(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def divided(model: Any, batch: Any) -> Tensor:
    return summed(model, batch) / 32


def small_sum(model: Any, batch: Any) -> Tensor:
    return summed(model, batch) / 4096


def mean_of_tokens(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def counted(model: Any, batch: Any) -> sf.Mean:
    return sf.losses.cross_entropy(model(batch[0]), batch[1])


def of_shape_1(model: Any, batch: Any) -> Tensor:
    return mean(model, batch).reshape(1)


def contrastive(model: Any, batch: Any) -> Tensor:
    outputs = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(outputs @ outputs.T / 0.1, torch.arange(len(outputs)))


def diffusion(model: Any, batch: Any) -> Tensor:
    noise = torch.randn(len(batch[0]), CLASSES)
    share = torch.rand(len(noise), 1)
    return (model(batch[0] * share) - noise).square().mean()


def with_dropout(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(F.dropout(model(batch[0]), 0.5, training=model.training), batch[1])


def regularized(model: Any, batch: Any) -> Tensor:
    return mean(model, batch) + 0.1 * model.weight.square().sum()


def unreduced(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def build(loss: Any, run_dir: Path | None = None, **settings: Any) -> sf.Run:
    fixed: dict[str, Any] = {
        "model": lambda: nn.Linear(WIDTH, CLASSES),
        "loss": loss,
        "train_data": rows(),
        "optimizer": sf.optim.sgd(lr=0.01),
        "batch_size": 12,
        "length": "1 step",
        "device": "cpu",
        "console": False,
        "tensorboard": False,
        "report": False,
        "run_dir": run_dir,
    }
    return sf.Run(**(fixed | settings))


# --- what is found --------------------------------------------------------------------------------


def count_of_labels(batch: Any) -> int:
    return int((batch[1] != -100).sum())


@pytest.mark.parametrize(
    ("loss", "data", "count_fn"),
    [
        (mean, rows(), None),
        (counted, rows(), None),
        (of_shape_1, rows(), None),
        (diffusion, rows(), None),
        (with_dropout, rows(), None),
        (regularized, rows(), None),
        (mean_of_tokens, padded_rows(), count_of_labels),
        (counted, padded_rows(), None),
    ],
)
def test_a_mean_holds_and_is_trained_and_scored(loss: Any, data: Any, count_fn: Any) -> None:
    run = build(loss, train_data=data, splits={"val": sf.Split(data)}, count_fn=count_fn)

    assert loss_contract(run.parts).holds
    run.train()
    assert run.state.step == 1


@pytest.mark.parametrize("micro_batch_size", [None, 3, 1])
@pytest.mark.parametrize("loss", [summed, divided, small_sum])
def test_a_split_that_a_sum_scores_is_refused_before_the_first_step(
    loss: Any, micro_batch_size: int | None, tmp_path: Path
) -> None:
    splits = {"val": sf.Split(rows()), "other": sf.Split(rows(), loss=False, at_end=True)}
    run = build(loss, tmp_path / "run", splits=splits, micro_batch_size=micro_batch_size)
    with refused("scored-loss-not-a-mean", splits=["val"], is_sum=True):
        run.train()

    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("loss", [mean_of_tokens, contrastive])
def test_a_split_that_depends_on_its_batch_size_is_refused(loss: Any) -> None:
    data = padded_rows() if loss is mean_of_tokens else rows()
    run = build(loss, train_data=data, splits={"val": sf.Split(data)})
    with refused("scored-loss-not-a-mean", splits=["val"], is_sum=False):
        run.train()


@pytest.mark.parametrize("loss", [summed, divided])
def test_a_run_that_trains_with_a_sum_is_warned_of_it_and_trains(loss: Any, tmp_path: Path) -> None:
    splits = {"val": sf.Split(rows(), loss=False, metrics=sf.metrics.accuracy)}
    run = build(loss, tmp_path / "run", splits=splits)
    with pytest.warns(UserWarning, match=r"\[loss-not-a-mean\]"):
        run.train()

    assert run.state.step == 1
    (look,) = records_of_kind(tmp_path / "run", "data_check")
    assert look["loss_contract"]["holds"] is False
    assert "\n" not in look["loss_contract"]["description"]


@pytest.mark.parametrize(
    "loss",
    [
        contrastive,  # right, as long as a step is one micro-batch
        sf.losses.whole_batch(
            lambda model, batch: model(batch[0]), lambda model, outputs: outputs.square().mean()
        ),
    ],
)
def test_a_loss_that_couples_the_samples_of_a_step_is_not_warned_of(
    loss: Any, recwarn: pytest.WarningsRecorder
) -> None:
    run = build(loss)
    run.train()

    assert run.state.step == 1
    assert list(recwarn) == []


def weighted(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=CLASS_WEIGHTS)


def weighted_mean(model: Any, batch: Any) -> sf.Mean:
    total = F.cross_entropy(model(batch[0]), batch[1], weight=CLASS_WEIGHTS, reduction="sum")
    return sf.Mean(total, CLASS_WEIGHTS[batch[1]].sum())


def test_a_loss_with_class_weights_is_no_mean_of_its_samples() -> None:
    with refused("scored-loss-not-a-mean", splits=["val"], is_sum=False):
        build(weighted, splits={"val": sf.Split(rows())}).train()


def test_class_weights_count_by_the_sum_of_the_weights() -> None:
    run = build(weighted_mean, splits={"val": sf.Split(rows())}, micro_batch_size=4)
    run.train()

    with torch.no_grad():
        expected = float(weighted(run.state.model, rows()))
    assert run.evaluate()["val/loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("whole", "first", "second", "holds"),
    [
        (2.0e-5, 2.6e-5, 2.0e-5, True),  # of a fine-tuned model, as far as float32 can tell
        (3.0, 2.0, 1.0, False),
        (3.0e-4, 2.0e-4, 1.0e-4, False),  # a sum, divided by a constant
        (0.0, 0.0, 0.0, True),
    ],
)
def test_what_rounding_explains_is_not_refused(
    whole: float, first: float, second: float, holds: bool
) -> None:
    means = [sf.Mean(2 * whole, 2), sf.Mean(first, 1), sf.Mean(second, 1)]

    assert compared(means, pieces_of_four(), tolerance=1e-4).holds is holds


def pieces_of_four() -> Any:
    """What the loss of a micro-batch of four samples is compared over."""
    ids = np.arange(4)
    pieces = pieces_of(MicroBatch((torch.zeros(4, 1),), 4, 0, ids, ids), None)
    assert pieces is not None
    return pieces


def test_a_loss_that_fails_on_another_rank_is_not_checked() -> None:
    exchanges: list[Any] = []

    def gathered(value: Any) -> list[Any]:
        exchanges.append(value)
        return [value, None]

    def sum_of(piece: MicroBatch, seed: int) -> sf.Mean:
        return sf.Mean(piece.count**2, piece.count)

    contract = check_contract(sum_of, pieces_of_four(), tolerance=1e-4, gathered=gathered)

    assert contract.holds
    assert not contract.is_checked
    assert len(exchanges) == 1  # the rank that failed has made one


def test_the_check_costs_the_samples_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = state_check.mean_loss

    def counting(model: Any, batch: MicroBatch, *arguments: Any, **options: Any) -> sf.Mean:
        seen.append(len(batch.sample_ids))
        return plain(model, batch, *arguments, **options)

    monkeypatch.setattr(state_check, "mean_loss", counting)
    loss_contract(build(mean, batch_size=20).parts)

    assert seen == [10, 5, 5]


def test_the_loss_of_a_batch_that_lost_a_sample_is_checked() -> None:
    def without_first(samples: list[Any]) -> Any:
        return torch.utils.data.default_collate(samples[1:])

    settings: Any = {"collate_fn": without_first, "batch_size": 9}
    of_sum = loss_contract(build(summed, **settings).parts)
    of_mean = loss_contract(build(mean, **settings).parts)

    assert not of_sum.holds
    assert of_mean.holds
    assert of_mean.is_checked


def test_what_is_no_scalar_is_refused_as_before(tmp_path: Path) -> None:
    with refused("loss-not-a-scalar", shape=(12,)):
        build(unreduced, splits={"val": sf.Split(rows())}).train()


def mean_of_shape_1(model: Any, batch: Any) -> sf.Mean:
    return sf.Mean(summed(model, batch).reshape(1), torch.tensor([len(batch[0])]))


@pytest.mark.parametrize("loss", [of_shape_1, mean_of_shape_1])
def test_a_loss_of_shape_1_trains_as_its_scalar_does(loss: Any) -> None:
    settings: dict[str, Any] = {
        "micro_batch_size": 4,
        "length": "3 steps",
        "splits": {"val": sf.Split(rows())},
    }
    run = build(loss, **settings)
    scalar = build(mean, **settings)
    run.train()
    scalar.train()

    weight = run.state.model.weight
    torch.testing.assert_close(weight, scalar.state.model.weight, rtol=1e-6, atol=1e-7)
    score = scalar.evaluate()["val/loss"]
    assert run.evaluate()["val/loss"] == pytest.approx(score, rel=1e-6)


# --- a loss of the split's own --------------------------------------------------------------------


def smoothed(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def test_a_split_may_have_another_loss_than_the_training(tmp_path: Path) -> None:
    splits = {"val": sf.Split(rows(), loss=mean), "as_trained": sf.Split(rows())}
    run = build(smoothed, tmp_path / "run", splits=splits)
    run.train()

    scores = run.evaluate()
    with torch.no_grad():
        plain = float(mean(run.state.model, rows()))
        as_trained = float(smoothed(run.state.model, rows()))
    assert scores["val/loss"] == pytest.approx(plain, rel=1e-6)
    assert scores["as_trained/loss"] == pytest.approx(as_trained, rel=1e-6)
    assert sf.load(build(smoothed, tmp_path / "run", splits=splits)).evaluate() == scores
    (look,) = records_of_kind(tmp_path / "run", "data_check")
    assert look["scored_by_training_loss"] == ["as_trained"]


def test_a_run_without_a_loss_scores_its_splits_with_theirs() -> None:
    run = build(None, splits={"val": sf.Split(rows(), loss=mean)}, best="min val/loss")
    with run:
        for step in run.steps():
            sf.forward_backward(step, smoothed)
            sf.update(step)
    assert run.evaluate()["val/loss"] > 0


def test_a_sum_as_the_loss_of_a_split_is_refused_and_takes_no_other_split_with_it() -> None:
    splits = {"val": sf.Split(rows()), "own": sf.Split(rows(), loss=summed)}
    with refused("scored-loss-not-a-mean", splits=["own"], is_sum=True):
        build(mean, splits=splits).train()


def test_a_sum_that_is_for_the_training_alone_leaves_its_splits_to_be_scored() -> None:
    splits = {"val": sf.Split(rows(), loss=mean)}
    run = build(summed, splits=splits, micro_batch_size=None)

    assert run.evaluate()["val/loss"] > 0


def test_outside_a_run_a_sum_is_refused_too() -> None:
    with refused("scored-loss-not-a-mean", is_sum=True):
        sf.evaluate(nn.Linear(WIDTH, CLASSES), sf.Split(rows()), loss=summed)


def test_outside_a_run_a_mean_does_not_depend_on_the_batch_size() -> None:
    model = nn.Linear(WIDTH, CLASSES)
    small = sf.evaluate(model, sf.Split(rows(), batch_size=3, loss=mean))
    whole = sf.evaluate(model, sf.Split(rows(), batch_size=24, loss=mean))

    assert small["loss"] == pytest.approx(whole["loss"], rel=1e-6)


@pytest.mark.parametrize("wrong", ["mean", None, 1])
def test_a_loss_that_is_no_function_is_refused(wrong: Any) -> None:
    with refused("split-loss", value=repr(wrong)):
        sf.Split(rows(), loss=wrong)
