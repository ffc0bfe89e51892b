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
from same_bits import assert_same_bits, weights
from small_runs import build
from surefoot.checkpoint import Checkpoint, Store, average_weights


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
    files = ["model"] if ema is None else ["model", "ema"]
    last_steps = store.steps()[-3:]

    mean = average_weights(store, 3)

    assert mean.step == last_steps[-1]
    checkpoints = [store.at(step) for step in last_steps]
    for file in files:
        for name, tensor in mean.tensors(file).items():
            values = [checkpoint.tensors(file)[name] for checkpoint in checkpoints]
            if tensor.is_floating_point():
                precise = [value.numpy().astype(np.float64) for value in values]
                expected = np.mean(precise, axis=0).astype(np.float32)
                np.testing.assert_array_equal(tensor.numpy(), expected)
            else:
                assert torch.equal(tensor, values[-1])


def test_the_mean_of_one_is_the_newest(store: Store) -> None:
    mean = average_weights(store, 1)

    newest = store.at(store.steps()[-1])
    assert_same_bits(mean.tensors("model"), newest.tensors("model"))


def test_a_run_is_scored_with_the_mean(plain_store: Store) -> None:
    run = build(None, early_stopping=None, ema=None)

    run.load_checkpoint(average_weights(plain_store, 3))

    expected = average_weights(plain_store, 3).tensors("model")
    for name, parameter in run.state.models["model"].named_parameters():
        assert torch.equal(parameter, expected[name])
    assert run.evaluate()["val/loss"] > 0


@pytest.mark.parametrize("count", [0, 9])
def test_more_than_there_are_is_refused_and_says_how_many_there_are(
    count: int, store: Store
) -> None:
    with refused("too-few-checkpoints-to-average", sf.CheckpointError, count=count):
        average_weights(store, count)


def save_models(directory: Path, *models: dict[str, torch.Tensor]) -> Store:
    """A checkpoint with the tensors of each model."""
    store = Store(directory, keep_last=len(models))
    for step, tensors in enumerate(models, start=1):
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
    store = save_models(tmp_path, first, last)

    mean = average_weights(store, 2).tensors("model")

    assert mean["weight"].tolist() == [0.5, 0.5]
    assert mean["_extra_state"].tolist() == [0.0, 0.0]
    assert mean["extra/_extra_state/a"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("files", "untrained"),
    [
        (["model", "ema"], ["target"]),
        (
            ["model", "ema", "model-critic", "ema-critic"],
            ["critic.target", "model.target"],
        ),
    ],
    ids=["one model", "two models"],
)
def test_a_parameter_that_no_optimizer_trains_is_the_newest_one(
    files: list[str], untrained: list[str], tmp_path: Path
) -> None:
    """Such as a momentum encoder, which the body moves."""
    store = Store(tmp_path)
    state = {"trainable": {"frozen": untrained, "in_no_optimizer": untrained}}
    for step in (1, 2):
        tensors = {"online": torch.full((1,), float(step)), "target": torch.full((1,), float(step))}
        store.save(Checkpoint(step, dict.fromkeys(files, tensors), state))

    mean = average_weights(store, 2)

    for file in files:
        tensors = mean.tensors(file)
        assert tensors["online"].item() == 1.5
        assert tensors["target"].item() == 2.0


def quantized(codes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"scale": torch.ones(1), "codes": codes}


def test_codes_of_quantized_weights_that_changed_are_refused(tmp_path: Path) -> None:
    """A mean of their scales would belong to no codes."""
    codes = torch.arange(4, dtype=torch.int8)
    store = save_models(tmp_path, quantized(codes), quantized(codes + 1))

    with refused("average-of-quantized-weights", sf.CheckpointError, tensor="codes", step=1):
        average_weights(store, 2)


def test_equal_codes_of_quantized_weights_are_kept(tmp_path: Path) -> None:
    codes = torch.arange(4, dtype=torch.int8)
    store = save_models(tmp_path, quantized(codes), quantized(codes))

    assert torch.equal(average_weights(store, 2).tensors("model")["codes"], codes)


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


def with_statistics(model: Normed) -> Normed:
    """A model with the statistics that `update_bn` gives its norms, without the fixed one."""
    passes = list(zip(INPUTS.split(6), LABELS.split(6), strict=True))
    torch.optim.swa_utils.update_bn(passes, Called(model))
    return model


def expected_mean(run: sf.Run, store: Store, file: str) -> Normed:
    expected = Normed()
    expected.load_state_dict(average_weights(store, 3).tensors(file))
    fixed = {name: tensor for name, tensor in weights(run).items() if "fixed.running" in name}
    expected.load_state_dict(fixed, strict=False)
    return with_statistics(expected)


@pytest.mark.parametrize("source", ["auto", "trained"])
@pytest.mark.parametrize("ema", [None, 0.5])
def test_batch_norms_of_a_mean_have_the_statistics_of_update_bn(
    ema: float | None, source: Any, tmp_path: Path
) -> None:
    run = trained_normed(tmp_path / "run", ema=ema)
    before = weights(run)
    file = "model" if ema is None or source == "trained" else "ema"
    expected = expected_mean(run, Store(tmp_path / "run" / "checkpoints"), file)

    saved = sf.load(run)
    loaded = saved.load_model(Normed, checkpoint="average 3", weights=source)
    of_program = saved.load_model(checkpoint="average 3", weights=source)

    for model in (loaded, of_program):
        state = model.state_dict()
        assert torch.equal(state["queue"], torch.full((4,), 16.0))  # the newest: no mean
        for name in ("norm.running_mean", "norm.running_var", "first.weight"):
            torch.testing.assert_close(state[name], expected.state_dict()[name])
        assert torch.equal(state["fixed.running_var"], before["fixed.running_var"])
        assert int(state["norm.num_batches_tracked"]) == 8
    assert_same_bits(weights(run), before)


@pytest.mark.parametrize(("ema", "file"), [(None, "model"), (0.5, "ema")])
def test_a_mean_is_scored_with_the_statistics_of_update_bn(
    ema: float | None, file: str, tmp_path: Path
) -> None:
    run = trained_normed(tmp_path / "run", ema=ema)
    before = weights(run)
    expected = expected_mean(run, Store(tmp_path / "run" / "checkpoints"), file).eval()
    with torch.no_grad():
        score = float(loss_of_normed(expected, (INPUTS[:20], LABELS[:20])))

    scores = sf.load(run).evaluate(checkpoint="average 3")

    assert scores["val/loss"] == pytest.approx(score, rel=1e-5)
    assert_same_bits(weights(run), before)


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
    trained = weights(run)

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

    scores = ranks(
        2, averaged_runs.score_of_mean, saved_in=str(tmp_path / "run"), ema=0.5, parallel=parallel
    )

    for score in scores:
        assert score == pytest.approx(expected, rel=1e-5)
