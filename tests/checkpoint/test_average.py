"""The mean of the weights of the last checkpoints. 2 s."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import averaged_runs
import surefoot as sf
from averaged_runs import INPUTS, LABELS, Normed, loss_of_normed, normed
from rank_processes import Ranks
from refused import refused
from small_runs import build
from surefoot.checkpoint import Store, average_weights


def trained(run_dir: Path, **changes: Any) -> Store:
    build(run_dir, early_stopping=None, save_every="5 steps", keep_last=4, **changes).train()
    return Store(run_dir / "checkpoints")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The checkpoints of a run with an average. Tests read them only."""
    return trained(tmp_path_factory.mktemp("averaged") / "run", ema=0.9)


@pytest.fixture(scope="module")
def plain_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The checkpoints of a run without an average. Tests read them only."""
    return trained(tmp_path_factory.mktemp("plain") / "run", ema=None)


@pytest.mark.parametrize("ema", [None, 0.9])
def test_the_mean_is_that_of_numpy_over_the_last_ones(
    ema: float | None, store: Store, plain_store: Store
) -> None:
    if ema is None:
        store = plain_store
    last = store.steps()[-3:]
    found = average_weights(store, 3)
    assert found.step == last[-1]
    for file in ("model", "ema") if ema else ("model",):
        for name, held in found.files[file].items():
            each = [store.at(step).files[file][name].numpy() for step in last]
            if held.is_floating_point():
                expected = np.mean([one.astype(np.float64) for one in each], axis=0).astype(
                    np.float32
                )
                np.testing.assert_array_equal(held.numpy(), expected)
            else:
                np.testing.assert_array_equal(held.numpy(), each[-1])


def test_the_mean_of_one_is_the_newest(store: Store) -> None:
    newest = store.newest_intact()
    assert newest is not None
    for name, held in average_weights(store, 1).files["model"].items():
        assert torch.equal(held, newest[0].files["model"][name])


def test_a_run_is_scored_with_the_mean(plain_store: Store) -> None:
    run = build(None, early_stopping=None, ema=None)
    run.load_checkpoint(average_weights(plain_store, 3))
    expected = {
        name: held.clone() for name, held in average_weights(plain_store, 3).files["model"].items()
    }
    for name, parameter in run.state.models["model"].named_parameters():
        assert torch.equal(parameter, expected[name])
    assert run.evaluate()["val/loss"] > 0


@pytest.mark.parametrize("count", [0, 9])
def test_more_than_there_are_is_refused_and_says_how_many_there_are(
    count: int, store: Store
) -> None:
    with refused("too-few-checkpoints-to-average", sf.CheckpointError, count=count):
        average_weights(store, count)


def saved(directory: Path, *each: dict[str, torch.Tensor]) -> Store:
    store = Store(directory, keep_last=len(each))
    for step, tensors in enumerate(each, start=1):
        store.save(sf.checkpoint.Checkpoint(step, {"model": tensors}))
    return store


def test_state_of_a_modules_own_is_the_newest_one_and_is_not_averaged(tmp_path: Path) -> None:
    """It may grow, and holds what has no mean."""
    first = {
        "weight": torch.zeros(2),
        "_extra_state": torch.ones(1),
        "extra/_extra_state/a": torch.ones(1),
    }
    last = {
        "weight": torch.ones(2),
        "_extra_state": torch.zeros(2),
        "extra/_extra_state/a": torch.zeros(1),
    }
    mean = average_weights(saved(tmp_path, first, last), 2).tensors("model")
    assert mean["weight"].tolist() == [0.5, 0.5]
    assert mean["_extra_state"].tolist() == [0.0, 0.0]
    assert mean["extra/_extra_state/a"].tolist() == [0.0]


@pytest.mark.parametrize("others", [[], ["critic"]])
def test_a_parameter_that_no_optimizer_trains_is_the_newest_one(
    others: list[str], tmp_path: Path
) -> None:
    """Such as a momentum encoder, which the body moves."""
    store = Store(tmp_path)
    untrained = ["critic.target", "model.target"] if others else ["target"]
    for step in (1, 2):
        tensors = {"online": torch.full((1,), float(step)), "target": torch.full((1,), float(step))}
        names = [
            "model",
            "ema",
            *(f"{kind}-{name}" for name in others for kind in ("model", "ema")),
        ]
        files = dict.fromkeys(names, tensors)
        state = {"trainable": {"frozen": untrained, "in_no_optimizer": untrained}}
        store.save(sf.checkpoint.Checkpoint(step, files, state))
    mean = average_weights(store, 2)
    for name in names:
        own = mean.tensors(name)
        assert (own["online"].item(), own["target"].item()) == (1.5, 2.0)


def test_codes_of_quantised_weights_that_changed_are_refused_and_equal_ones_are_not(
    tmp_path: Path,
) -> None:
    """A mean of their scales would belong to no codes."""
    codes = torch.arange(4, dtype=torch.int8)
    first, last = ({"scale": torch.ones(1), "codes": each} for each in (codes, codes + 1))
    assert torch.equal(
        average_weights(saved(tmp_path / "same", first, first), 2).tensors("model")["codes"], codes
    )
    with refused("average-of-quantized-weights", sf.CheckpointError, tensor="codes", step=1):
        average_weights(saved(tmp_path / "other", first, last), 2)


class Called(torch.nn.Module):
    """A model without its fixed norm among its modules, which `update_bn` would reset."""

    def __init__(self, model: Normed) -> None:
        super().__init__()
        self.norm = model.norm
        self.call = [model]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.call[0](inputs)
        return result


def trained_normed(run_dir: Path, **changes: Any) -> sf.Run:
    run = normed(run_dir, **changes)
    with run:
        for _ in run:
            run.state.model.queue.add_(1)
    return run


@pytest.mark.parametrize("weights", ["auto", "trained"])
@pytest.mark.parametrize("ema", [None, 0.5])
def test_batch_norms_of_a_mean_have_the_statistics_of_update_bn(
    ema: float | None, weights: Any, tmp_path: Path
) -> None:
    run = trained_normed(tmp_path / "run", ema=ema)
    before = {name: each.clone() for name, each in run.state.model.state_dict().items()}
    store = Store(tmp_path / "run" / "checkpoints")
    mean = average_weights(store, 3)
    newest = store.newest_intact()
    assert newest is not None
    file = "model" if ema is None or weights == "trained" else "ema"

    expected = Normed()
    expected.load_state_dict(mean.tensors(file))
    fixed = {name: each for name, each in before.items() if name.startswith("fixed.running")}
    expected.load_state_dict(fixed, strict=False)
    passes = list(zip(INPUTS.split(6), LABELS.split(6), strict=True))
    torch.optim.swa_utils.update_bn(passes, Called(expected))

    saved = sf.load(run)
    loaded = saved.load_model(Normed, checkpoint="average 3", weights=weights)
    of_program = saved.load_model(checkpoint="average 3", weights=weights)
    for model in (loaded, of_program):
        state = model.state_dict()
        assert torch.equal(state["queue"], torch.full((4,), 16.0))  # the newest: no mean
        for name in ("norm.running_mean", "norm.running_var", "first.weight"):
            torch.testing.assert_close(state[name], expected.state_dict()[name])
        assert torch.equal(state["fixed.running_var"], before["fixed.running_var"])
        assert int(state["norm.num_batches_tracked"]) == 8

    if weights == "auto":
        with torch.no_grad():
            score = float(loss_of_normed(expected.eval(), (INPUTS[:20], LABELS[:20])))
        assert saved.evaluate(checkpoint="average 3")["val/loss"] == pytest.approx(score, rel=1e-5)
    after = run.state.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_without_training_data_they_are_those_of_the_newest_which_is_said(tmp_path: Path) -> None:
    run = trained_normed(tmp_path / "run", ema=None)
    with pytest.warns(UserWarning, match=r"\bstep 16\b"):
        loaded = sf.load(tmp_path / "run").load_model(Normed, checkpoint="average 3")
    for name in ("norm.running_mean", "norm.num_batches_tracked", "queue"):
        assert torch.equal(loaded.state_dict()[name], run.state.model.state_dict()[name])
    assert not torch.equal(loaded.first.weight, run.state.model.first.weight)


class Unreadable(torch.utils.data.Dataset[Any]):
    """Samples that are gone after the training."""

    gone = False

    def __len__(self) -> int:
        return 48

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.gone and sample > 30:
            raise OSError("the disk is gone")
        return INPUTS[sample], LABELS[sample]


def test_data_that_cannot_be_read_leave_the_statistics_of_the_newest(tmp_path: Path) -> None:
    data = Unreadable()
    run = trained_normed(tmp_path / "run", train_data=data)
    data.gone = True
    mean = average_weights(Store(tmp_path / "run" / "checkpoints"), 2)
    trained = {name: each.clone() for name, each in run.state.model.state_dict().items()}
    with pytest.warns(UserWarning, match=r"\bstep 16\b"):
        run.load_checkpoint(mean)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(run.state.model.state_dict()[name], trained[name])
    assert run.state.model.training
    assert run.state.model.norm.momentum == 0.1


@pytest.mark.fast("fsdp")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_mean_is_scored_on_ranks_as_in_one_process(
    ranks: Ranks, parallel: str, tmp_path: Path
) -> None:
    trained_normed(tmp_path / "run", ema=0.5)
    run = normed(None, ema=0.5)
    run.load_checkpoint(average_weights(Store(tmp_path / "run" / "checkpoints"), 3))
    expected = run.evaluate()["val/loss"]
    for score in ranks(
        2, averaged_runs.score_of_mean, saved_in=str(tmp_path / "run"), ema=0.5, parallel=parallel
    ):
        assert score == pytest.approx(expected, rel=1e-5)
