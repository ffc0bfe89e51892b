"""The lines of PITFALLS.md under "The step", "Schedules", "Evaluation", "Numbers shown" and
"Settings" that one process can show.

Tested elsewhere:
* mean of means, left-over micro-batches, the norm that clips:
  identities/test_law_01_accumulation.py, data/test_loader.py
* a skipped step changes no bit, a gradient that is None is left alone: optim/test_skip_step.py
* groups without decay by name: optim/test_param_groups.py
* peak used once, floor reached, no cosine climbing, warm-up = total, rate above 0:
  schedules/test_lr_schedule.py (here as used)
* NaN burning patience: doctest of patience.ScoreWatch; NaN ends with exit status 5: test_bad_input.py
* padding samples counted: data/text/test_windows.py (HeldOut); a resume's records:
  test_resume_pitfalls.py
* unknown keys, ill-typed values, a typo: test_config.py, test_bad_input.py; empty data set, loss
  not scalar: test_bad_input.py
Not there yet: perplexity (nothing logs one, so none is smoothed), HellaSwag, inverse square root,
plateau, finders, MFU, the scaler on a GPU, several processes.

3 seconds.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from refused import refused
from small_runs import SAMPLES, Augmented, build, loss
from stated import numbers_in
from surefoot.checkpoint import Store
from surefoot.tracking.format import number
from surefoot.tracking.jsonl import records
from surefoot.train.precision import precision
from waiting import LogicalClock


def held(run: sf.Run) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in run.state.models["model"].state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trained(run_dir: Path, **changes: Any) -> list[dict[str, Any]]:
    build(run_dir, **changes).train()
    return [record for record in records(run_dir / "metrics.jsonl") if record["kind"] == "train"]


# --- the step -------------------------------------------------------------------------------------


def infinite_at(step: int) -> Any:
    """A loss whose gradient is infinite in one step, where clipping by its norm would turn it into
    NaN.
    """
    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = F.cross_entropy(model(batch[0]), batch[1])
        if model.training:
            calls.append(1)
            if len(calls) == 2 * step + 1:
                return found * 1e38 * 1e38
        return found

    return loss


def test_an_infinite_gradient_is_not_clipped_into_nan_and_applied() -> None:
    run = build(None, loss=infinite_at(3), length="6 steps", splits=None, early_stopping=None)
    before: dict[str, Tensor] = {}
    with run:
        for step in run:
            if step.index == 3:
                after = held(run)
                whole = [name for name, value in after.items() if value.is_floating_point()]
                assert all(torch.equal(after[name], before[name]) for name in whole)
                assert step.skipped is not None
                assert step.skipped.item() == 1
            before = held(run)
    assert all(bool(value.isfinite().all()) for value in before.values())


def test_a_step_that_is_not_applied_is_shown_and_its_loss_is_not_filtered_away(
    tmp_path: Path,
) -> None:
    """One reports a clean loss of 0.61 because it filters NaN out of the log; a skipped update that
    nobody is told of.
    """
    found = trained(
        tmp_path / "run",
        loss=infinite_at(3),
        check_state=False,
        length="6 steps",
        log_every="2 steps",
    )
    assert [record["skipped"] for record in found] == [0, 1, 0]
    assert [math.isfinite(record["loss"]) for record in found] == [True, False, True]
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


def test_bf16_has_no_gradient_scaler() -> None:
    assert precision("bf16", torch.device("cpu")).loss_scale is None


def test_rates_of_parameter_groups_keep_their_ratio_under_a_schedule() -> None:
    """One rate written into every group destroys per-group rates."""

    def optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        parameters = [parameter for group in groups for parameter in group["params"]]
        halves = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "lr": 0.001}]
        return torch.optim.SGD(halves, lr=1.0)

    run = build(None, optimizer=optimizer, length="8 steps", ema=None)
    with run:
        for step in run:
            slow, fast = (
                group["lr"] for group in step.state.optimizers["model"].optimizer.param_groups
            )
            assert slow / fast == pytest.approx(100)


# --- schedules, as the run uses them --------------------------------------------------------------


@pytest.mark.parametrize("micro_batch_size", [8, 2])
def test_the_rate_moves_once_a_step_however_many_micro_batches(
    micro_batch_size: int, tmp_path: Path
) -> None:
    """Counted in micro-batches; rate 0 at step 0; peak used twice; floor never reached."""
    schedule = sf.schedules.linear(warmup="3 steps", min_lr_ratio=0.1)
    changes: dict[str, Any] = {
        "length": "10 steps",
        "log_every": "1 steps",
        "micro_batch_size": micro_batch_size,
    }
    rates = [record["lr"] for record in trained(tmp_path / "run", schedule=schedule, **changes)]
    expected = [0.25, 0.5, 0.75, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1]
    assert rates == pytest.approx([0.01 * factor for factor in expected])


@pytest.mark.parametrize(("warmup", "factor"), [("3 steps", 0.25), ("0 steps", 1.0)])
def test_the_first_update_has_the_first_rate(warmup: str, factor: float) -> None:
    """First update at full peak because the rate is set only after the step."""
    inputs = torch.ones(4, 1)
    targets = torch.zeros(4, 1)
    run = sf.Run(
        model=lambda: nn.Linear(1, 1, bias=False),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).mean(),
        train_data=(inputs, targets),
        batch_size=4,
        length="9 steps",
        optimizer=sf.optim.sgd(0.1),
        schedule=sf.schedules.cosine(warmup=warmup),
        clip="off",
        console=False,
    )
    before = next(run.state.models["model"].parameters()).item()
    with run:
        next(iter(run))
    after = next(run.state.models["model"].parameters()).item()
    assert before - after == pytest.approx(0.1 * factor, rel=1e-5)


# --- evaluation -----------------------------------------------------------------------------------


def test_the_model_trains_on_after_validation_and_validates_in_evaluation_mode() -> None:
    modes: set[bool] = set()

    def predict(model: nn.Module, batch: Any) -> Any:
        modes.update(part.training for part in model.modules())
        return model(batch[0]), batch[1]

    data = Augmented()
    split = sf.Split((data.inputs, data.labels), metrics=sf.metrics.accuracy, predict=predict)
    run = build(None, length="6 steps", splits={"val": split}, evaluate_every="2 steps", ema=None)
    with run:
        for step in run:
            assert all(
                part.training for model in step.state.models.values() for part in model.modules()
            )
    assert modes == {False}


def test_a_part_that_its_user_froze_in_evaluation_mode_stays_so() -> None:
    run = build(None, length="6 steps", evaluate_every="2 steps")
    run.state.models["model"].get_submodule("1").eval()
    run.train()
    assert [part.training for part in run.state.models["model"].children()] == [
        True,
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("batch_size", [1, 7, SAMPLES])
def test_a_validation_score_does_not_depend_on_its_batch_size(batch_size: int) -> None:
    data = Augmented()

    def scores(size: int) -> dict[str, float]:
        split = sf.Split((data.inputs, data.labels), metrics=sf.metrics.accuracy, batch_size=size)
        return build(None, splits={"val": split}).evaluate()

    assert scores(batch_size) == pytest.approx(scores(13), rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluate_every": "1 steps"},
        {"log_every": "1 steps"},
        {"save_every": "1 steps"},
        {"splits": None, "early_stopping": None},
        {"sample_fn": lambda model: str(model(torch.randn(2, 8)))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_observing_more_often_changes_no_weight(changes: dict[str, Any], tmp_path: Path) -> None:
    """Sampling or validating more often changes the training result (random state, mode,
    loader).
    """
    seen = build(tmp_path / "run", length="9 steps", **changes)
    unseen = build(None, length="9 steps")
    seen.train()
    unseen.train()
    assert equal(held(seen), held(unseen))


def test_the_last_update_is_evaluated_logged_and_saved(tmp_path: Path) -> None:
    """No evaluation and no checkpoint after the last update."""
    never = "1000 steps"
    build(
        tmp_path / "run", length="7 steps", evaluate_every=never, log_every=never, save_every=never
    ).train()
    found = [
        (record["kind"], record["step"]) for record in records(tmp_path / "run" / "metrics.jsonl")
    ]
    assert [pair for pair in found if pair[0] in ("train", "eval")] == [("train", 7), ("eval", 7)]
    assert Store(tmp_path / "run" / "checkpoints").steps() == [0, 7]


# --- numbers shown --------------------------------------------------------------------------------


def test_the_logged_loss_is_that_of_all_steps_since_the_last(tmp_path: Path) -> None:
    """Loss of the last micro-batch."""
    run = build(tmp_path / "run", length="9 steps", log_every="3 steps")
    with run:
        losses = [step.loss.item() for step in run if step.loss is not None]
    found = [
        record
        for record in records(tmp_path / "run" / "metrics.jsonl")
        if record["kind"] == "train"
    ]
    means = [sum(losses[first : first + 3]) / 3 for first in (0, 3, 6)]
    assert [record["loss"] for record in found] == pytest.approx(means, rel=1e-6)


def test_throughput_times_time_is_what_was_trained_on_and_leaves_out_the_rest(
    tmp_path: Path,
) -> None:
    """The last batch's tokens over the whole interval; evaluation, saving and the user's body
    inside.
    """

    clock = LogicalClock()

    def slow_loss(model: nn.Module, batch: Any) -> Any:
        clock.advance(0.5 * torch.is_grad_enabled())
        return loss(model, batch)

    def slow_score(outputs: Any, targets: Any) -> sf.Mean:
        clock.advance(100.0)
        return sf.Mean(torch.tensor(0.0), 1)

    data = Augmented()
    split = sf.Split((data.inputs, data.labels), metrics=slow_score, batch_size=SAMPLES)
    run = build(
        tmp_path / "run",
        loss=slow_loss,
        length="6 steps",
        log_every="6 steps",
        splits={"val": split},
        check_state=False,
    )
    run.parts.run_state.clock.now = clock
    with run:
        for _ in run:
            clock.advance(1e6)
    (found,) = [
        record
        for record in records(tmp_path / "run" / "metrics.jsonl")
        if record["kind"] == "train"
    ]
    assert found["targets"] == 6 * 8
    assert found["targets_per_s"] == pytest.approx(
        6 * 8 / (6 * 2 * 0.5)
    )  # two micro-batches a step
    assert found["evaluating_s"] == 200.0  # after steps 3 and 6
    assert found["user_s"] == 6e6


def test_small_rates_are_not_shown_as_zero() -> None:
    assert [float(number(rate)) for rate in (3e-7, 1.5e-12)] == [3e-7, 1.5e-12]


# --- settings -------------------------------------------------------------------------------------


def notes_in(text: str) -> list[str]:
    """The notes of a header, each on one line."""
    return [" ".join(note.split()) for note in re.findall(r"(?m)^note: .*(?:\n +.*)*", text)]


def test_a_data_set_smaller_than_a_batch_trains_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Empty data set: endless loop, silent hang, or exit 0 with loss 0."""
    data = torch.randn(3, 8), torch.randint(3, (3,))
    run = build(
        None, train_data=data, length="4 steps", console=True, splits=None, early_stopping=None
    )
    with run:
        counts = [sum(part.count for part in step.micro_batches) for step in run]
    assert counts == [8, 8, 8, 8]
    (note,) = notes_in(capsys.readouterr().out)
    assert numbers_in(note) == [8, 3]  # samples of a step, and of the data set


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ({"ema": 0.99, "ema_ramp": False}, True),
        ({"ema": 0.5, "ema_ramp": False}, False),
        ({"ema": 0.99}, False),
        ({}, False),
    ],
)
def test_an_average_of_weights_that_a_short_run_cannot_fill_is_noted(
    settings: dict[str, Any], noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A decay of 0.999 in a run of 600 steps: scores of weights that are more than half untrained,
    without a word.
    """
    usual: dict[str, Any] = {"splits": None, "early_stopping": None, "ema": None}
    run = build(None, length="8 steps", console=True, **(usual | settings))
    run.train()
    notes = [numbers_in(note)[0] for note in notes_in(capsys.readouterr().out) if " 93% " in note]
    assert notes == ([8] if noted else [])


@pytest.mark.parametrize("length", ["0 steps", "0 epochs", "-3 steps"])
def test_a_run_of_no_steps_is_refused(length: str) -> None:
    code = "duration-not-understood" if length.startswith("-") else "setting-out-of-range"
    with refused(code, setting="length", value=length):
        build(None, length=length)
