"""Law 19 for averages of the weights that begin or end while a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from identities.changed_runs import (
    CHANGED_AT,
    LAST,
    assert_same_end,
    data,
    given_the_journal_of,
    loss,
    on_two_ranks,
    run_in,
    tensors_of,
)
from rank_processes import forks
from refused import refused
from surefoot.checkpoint.reader import read
from surefoot.tracking.change_journal import read_changes


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


@pytest.mark.parametrize(("before", "after"), [(None, 0.9), (0.9, None)])
@pytest.mark.parametrize("stopped_at", range(CHANGED_AT, LAST))
def test_an_average_begins_and_ends_as_in_a_run_given_its_journal(
    before: float | None, after: float | None, stopped_at: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"model": model, "ema": before}
    changed = tmp_path / "changed"
    run_in(changed, stop_after=f"{CHANGED_AT} steps", **settings).train()
    sf.load(changed).change("a test", ema=after)
    run_in(changed, stop_after=f"{stopped_at} steps", **settings).train()
    run_in(changed, **settings).train()

    given = given_the_journal_of(changed, tmp_path / "given")
    run_in(given, **settings).train()

    assert_same_end(given, changed)
    has_average = any(name.startswith("ema/") for name in tensors_of(given, LAST))
    assert has_average == (after is not None)


def test_an_average_that_begins_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": lambda: nn.Linear(4, 1), "ema": None}
    run_in(tmp_path, stop_after=f"{CHANGED_AT} steps", **settings).train()
    sf.load(tmp_path).change(ema=0.9)

    average: list[Tensor] = []
    run = run_in(tmp_path, **settings)
    with run:
        for updates, _ in enumerate(run):
            weights = [weight.detach().clone() for weight in run.state.model.parameters()]
            if updates == 0:
                saved = read(tmp_path / "checkpoints" / f"step-{CHANGED_AT:08d}")
                average = [saved.tensors("model")[name].clone() for name in ("weight", "bias")]
            decay = min(0.9, (2 + updates) / (11 + updates))
            for averaged, weight in zip(average, weights, strict=True):
                averaged.add_(weight - averaged, alpha=1 - decay)

    of_run = run.state.ema_models["model"].model
    for mine, theirs in zip(of_run.parameters(), average, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@forks
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_begin_an_average_as_those_that_were_given_the_journal(
    parallel: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"parallel": parallel, "micro_batch_size": 4, "ema": None}
    changed = tmp_path / "changed"
    on_two_ranks(changed, stop_after=f"{CHANGED_AT} steps", **settings)
    sf.load(changed).change(ema=0.9)
    on_two_ranks(changed, stop_after=f"{CHANGED_AT + 1} steps", **settings)
    on_two_ranks(changed, **settings)

    given = given_the_journal_of(changed, tmp_path / "given")
    on_two_ranks(given, **settings)
    assert_same_end(given, changed)
    assert any(name.startswith("ema/") for name in tensors_of(given, LAST))


def test_an_average_of_narrow_weights_begins_with_its_full_precision(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 1).bfloat16(),
        "loss": lambda model, batch: loss(model, [each.bfloat16() for each in batch]),
        "ema": None,
    }
    run_in(tmp_path / "run", stop_after=f"{CHANGED_AT} steps", **settings).train()
    sf.load(tmp_path / "run").change(ema=0.9)
    run_in(tmp_path / "run", **settings).train()
    given = given_the_journal_of(tmp_path / "run", tmp_path / "given")
    run_in(given, **settings).train()

    assert_same_end(given, tmp_path / "run")
    assert "ema_float32/weight" in tensors_of(given, LAST)


def test_frozen_tensors_of_an_average_that_begins_are_in_its_checkpoints(tmp_path: Path) -> None:
    def frozen_model() -> nn.Module:
        built = model()
        built[0].requires_grad_(False)  # type: ignore[index]
        return built

    settings: dict[str, Any] = {"model": frozen_model, "ema": None, "save_every": "4 steps"}
    run_in(tmp_path, stop_after=f"{CHANGED_AT} steps", **settings).train()
    sf.load(tmp_path).change(ema=0.9)
    run_in(tmp_path, stop_after="15 steps", **settings).train()
    run_in(tmp_path, **settings).train()
    assert "ema/0.weight" in tensors_of(tmp_path, LAST)
    assert sf.load(run_in(tmp_path, **settings)).verify(steps="all").problems == []


@pytest.mark.parametrize(("before", "after"), [(None, 0.9), (0.9, None)])
def test_the_best_weights_of_before_are_scored_as_they_were_evaluated(
    before: float | None, after: float | None, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "ema": before,
        "splits": {"val": sf.Split(data()), "test": sf.Split(data(), at_end=True)},
        "best": "max val/loss",  # the first evaluation
        "evaluate_every": "2 steps",
    }
    run_in(tmp_path, stop_after=f"{CHANGED_AT} steps", **settings).train()
    sf.load(tmp_path).change(ema=after)
    run_in(tmp_path, **settings).train()

    scores = {record["step"]: record["val/loss"] for record in sf.load(tmp_path).records("eval")}
    (final,) = sf.load(tmp_path).records("final_eval")
    assert final["weights_step"] < CHANGED_AT
    assert final["test/loss"] == scores[final["weights_step"]]


def test_what_only_an_average_needs_comes_back_with_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ema": 0.9, "ema_ramp": False}
    run_in(tmp_path, stop_after="8 steps", **settings).train()
    sf.load(tmp_path).change(ema=None)
    run_in(tmp_path, stop_after="12 steps", **settings).train()
    sf.load(tmp_path).change(ema=0.5)
    run = run_in(tmp_path, **settings)
    assert run.parts.plan.timeline.averaging is not None
    assert not run.parts.plan.timeline.averaging.ramp
    run.train()
    assert len(read_changes(tmp_path)) == 2


def test_an_optimizer_that_averages_takes_no_second_average(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": sf.optim.schedule_free(1e-2), "schedule": None}
    run_in(tmp_path, stop_after="4 steps", ema=None, **settings).train()
    with refused("average-of-averaging-optimizer", value=0.9):
        sf.load(tmp_path).change(ema=0.9)
    assert read_changes(tmp_path) == ()


def test_a_program_without_the_average_of_the_run_is_refused(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="4 steps").train()
    sf.load(tmp_path).change(ema=0.5)
    with refused("changed-setting-differs", value=None, at_beginning=0.9, at_present=0.5):
        run_in(tmp_path, ema=None)


def test_a_mean_of_checkpoints_does_not_reach_over_the_begin_of_an_average(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"ema": None, "keep_last": 9, "save_every": "5 steps"}
    run_in(tmp_path, stop_after=f"{CHANGED_AT} steps", **settings).train()
    sf.load(tmp_path).change(ema=0.9)
    run_in(tmp_path, **settings).train()
    with refused("checkpoint-without-tensors", sf.CheckpointError, name="ema"):
        sf.load(tmp_path).load_model(nn.Linear(4, 1), checkpoint="average 4")
