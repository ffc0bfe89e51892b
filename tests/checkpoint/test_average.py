"""The mean of the weights of the last checkpoints. 2 s."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import surefoot as sf
from small_runs import build
from surefoot.checkpoint import Store, average_weights


def trained(run_dir: Path, **changes: Any) -> Store:
    build(run_dir, early_stopping=None, save_every="5 steps", keep_last=4, **changes).train()
    return Store(run_dir / "checkpoints")


@pytest.mark.parametrize("ema", [None, 0.9])
def test_the_mean_is_that_of_numpy_over_the_last_ones(ema: float | None, tmp_path: Path) -> None:
    store = trained(tmp_path / "run", ema=ema)
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


def test_the_mean_of_one_is_the_newest(tmp_path: Path) -> None:
    store = trained(tmp_path / "run")
    newest = store.newest_intact()
    assert newest is not None
    for name, held in average_weights(store, 1).files["model"].items():
        assert torch.equal(held, newest[0].files["model"][name])


def test_a_run_is_scored_with_the_mean(tmp_path: Path) -> None:
    store = trained(tmp_path / "run", ema=None)
    run = build(None, early_stopping=None, ema=None)
    run.load_checkpoint(average_weights(store, 3))
    expected = {
        name: held.clone() for name, held in average_weights(store, 3).files["model"].items()
    }
    for name, held in run.state.models["model"].state_dict().items():
        assert torch.equal(held, expected[name])
    assert run.evaluate()["val/loss"] > 0


@pytest.mark.parametrize("count", [0, 9])
def test_more_than_there_are_is_refused_and_says_how_many_there_are(
    count: int, tmp_path: Path
) -> None:
    store = trained(tmp_path / "run")
    with pytest.raises(sf.CheckpointError, match=r"has \d after step 0"):
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


def test_codes_of_quantised_weights_that_changed_are_refused_and_equal_ones_are_not(
    tmp_path: Path,
) -> None:
    """A mean of their scales would belong to no codes."""
    codes = torch.arange(4, dtype=torch.int8)
    first, last = ({"scale": torch.ones(1), "codes": each} for each in (codes, codes + 1))
    assert torch.equal(
        average_weights(saved(tmp_path / "same", first, first), 2).tensors("model")["codes"], codes
    )
    with pytest.raises(
        sf.CheckpointError, match="codes at step 1 has different 8-bit codes"
    ) as problem:
        average_weights(saved(tmp_path / "other", first, last), 2)
    assert len(str(problem.value).splitlines()) == 3
