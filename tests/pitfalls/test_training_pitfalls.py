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
from torch import Tensor, nn

import surefoot as sf
from refused import refused
from run_files import records_of, same_tensors
from small_runs import SAMPLES, Augmented, build, loss
from stated import numbers_in
from surefoot.checkpoint import Store
from surefoot.tracking.format import number
from surefoot.tracking.jsonl import records
from surefoot.train.precision import precision
from waiting import LogicalClock


def copy_tensors(run: sf.Run) -> dict[str, Tensor]:
    """The parameters and buffers of a run's model, as they are now."""
    return {name: value.clone() for name, value in run.state.models["model"].state_dict().items()}


def modes_of_parts(run: sf.Run) -> list[bool]:
    """Whether each part of a run's model is in training mode."""
    return [part.training for part in run.state.models["model"].children()]


# --- the step -------------------------------------------------------------------------------------


def infinite_at(step: int) -> Any:
    """A loss whose gradient is infinite in one step, where clipping by its norm would turn it into
    NaN.
    """
    passes = 0

    def loss_with_one_infinity(model: nn.Module, batch: Any) -> Tensor:
        nonlocal passes
        value = loss(model, batch)
        if model.training:
            passes += 1
            if passes == 2 * step + 1:  # of two micro-batches a step
                return value * 1e38 * 1e38
        return value

    return loss_with_one_infinity


def test_an_infinite_gradient_is_not_clipped_into_nan_and_applied() -> None:
    run = build(None, loss=infinite_at(3), length="6 steps", splits=None, early_stopping=None)
    after_step: list[dict[str, Tensor]] = []
    skipped: list[float] = []
    with run:
        for step in run:
            assert step.skipped is not None
            skipped.append(step.skipped.item())
            after_step.append(copy_tensors(run))

    assert skipped == [0, 0, 0, 1, 0, 0]
    before = after_step[2]
    for name, value in after_step[3].items():
        if value.is_floating_point():
            assert torch.equal(value, before[name]), name
    for name, value in after_step[-1].items():
        assert bool(value.isfinite().all()), name


def test_a_step_that_is_not_applied_is_shown_and_its_loss_is_not_filtered_away(
    tmp_path: Path,
) -> None:
    """One reports a clean loss of 0.61 because it filters NaN out of the log; a skipped update that
    nobody is told of.
    """
    build(tmp_path / "run", loss=infinite_at(3), length="6 steps", log_every="2 steps").train()

    shown = records_of(tmp_path / "run", "train")
    assert [record["skipped"] for record in shown] == [0, 1, 0]
    assert [math.isfinite(record["loss"]) for record in shown] == [True, False, True]
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

    ratios = []
    with build(None, optimizer=optimizer, length="8 steps", ema=None) as run:
        for step in run:
            fast, slow = step.state.optimizers["model"].optimizer.param_groups
            ratios.append(fast["lr"] / slow["lr"])

    assert ratios == pytest.approx([100] * 8)


# --- schedules, as the run uses them --------------------------------------------------------------


@pytest.mark.parametrize("micro_batch_size", [8, 2])
def test_the_rate_moves_once_a_step_however_many_micro_batches(
    micro_batch_size: int, tmp_path: Path
) -> None:
    """Counted in micro-batches; rate 0 at step 0; peak used twice; floor never reached."""
    schedule = sf.schedules.linear(warmup="3 steps", min_lr_ratio=0.1)
    build(
        tmp_path / "run",
        schedule=schedule,
        length="10 steps",
        log_every="1 steps",
        micro_batch_size=micro_batch_size,
    ).train()

    rates = [record["lr"] for record in records_of(tmp_path / "run", "train")]
    factors = [0.25, 0.5, 0.75, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1]
    assert rates == pytest.approx([0.01 * factor for factor in factors])


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
    (weight,) = run.state.models["model"].parameters()
    before = weight.item()

    with run:
        next(iter(run))

    assert before - weight.item() == pytest.approx(0.1 * factor, rel=1e-5)


# --- evaluation -----------------------------------------------------------------------------------


def test_the_model_trains_on_after_validation_and_validates_in_evaluation_mode() -> None:
    modes_in_evaluation: set[bool] = set()
    modes_in_training: set[bool] = set()

    def predict(model: nn.Module, batch: Any) -> Any:
        modes_in_evaluation.update(part.training for part in model.modules())
        return model(batch[0]), batch[1]

    data = Augmented()
    split = sf.Split((data.inputs, data.labels), metrics=sf.metrics.accuracy, predict=predict)
    run = build(None, length="6 steps", splits={"val": split}, evaluate_every="2 steps", ema=None)

    with run:
        for step in run:
            model = step.state.models["model"]
            modes_in_training.update(part.training for part in model.modules())

    assert modes_in_evaluation == {False}
    assert modes_in_training == {True}


def test_a_part_that_its_user_froze_in_evaluation_mode_stays_so() -> None:
    run = build(None, length="6 steps", evaluate_every="2 steps")
    run.state.models["model"].get_submodule("1").eval()

    run.train()

    assert modes_of_parts(run) == [True, False, True, True, True]


@pytest.mark.parametrize("batch_size", [1, 7, SAMPLES])
def test_a_validation_score_does_not_depend_on_its_batch_size(batch_size: int) -> None:
    data = Augmented()

    def evaluate_in_batches(size: int) -> dict[str, float]:
        split = sf.Split((data.inputs, data.labels), metrics=sf.metrics.accuracy, batch_size=size)
        return build(None, splits={"val": split}).evaluate()

    scores = evaluate_in_batches(batch_size)

    assert scores == pytest.approx(evaluate_in_batches(13), rel=1e-6)


@pytest.fixture(scope="module")
def unobserved() -> dict[str, Tensor]:
    """What nine steps make of the weights where nobody looks more often than usual."""
    run = build(None, length="9 steps")
    run.train()
    return copy_tensors(run)


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
def test_observing_more_often_changes_no_weight(
    changes: dict[str, Any], unobserved: dict[str, Tensor], tmp_path: Path
) -> None:
    """Sampling or validating more often changes the training result (random state, mode,
    loader).
    """
    run = build(tmp_path / "run", length="9 steps", **changes)
    run.train()

    assert same_tensors(copy_tensors(run), unobserved)


def test_the_last_update_is_evaluated_logged_and_saved(tmp_path: Path) -> None:
    """No evaluation and no checkpoint after the last update."""
    never = "1000 steps"
    build(
        tmp_path / "run", length="7 steps", evaluate_every=never, log_every=never, save_every=never
    ).train()

    written = [
        (record["kind"], record["step"])
        for record in records(tmp_path / "run" / "metrics.jsonl")
        if record["kind"] in ("train", "eval")
    ]
    assert written == [("train", 7), ("eval", 7)]
    assert Store(tmp_path / "run" / "checkpoints").steps() == [0, 7]


# --- numbers shown --------------------------------------------------------------------------------


def test_the_logged_loss_is_that_of_all_steps_since_the_last(tmp_path: Path) -> None:
    """Loss of the last micro-batch."""
    run = build(tmp_path / "run", length="9 steps", log_every="3 steps")
    with run:
        losses = [step.loss.item() for step in run if step.loss is not None]

    logged = [record["loss"] for record in records_of(tmp_path / "run", "train")]
    means = [sum(losses[first : first + 3]) / 3 for first in (0, 3, 6)]
    assert logged == pytest.approx(means, rel=1e-6)


def test_throughput_times_time_is_what_was_trained_on_and_leaves_out_the_rest(
    tmp_path: Path,
) -> None:
    """The last batch's tokens over the whole interval; evaluation, saving and the user's body
    inside.
    """
    clock = LogicalClock()

    def slow_loss(model: nn.Module, batch: Any) -> Any:
        if torch.is_grad_enabled():
            clock.advance(0.5)
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
    )
    run.parts.run_state.clock.now = clock

    with run:
        for _ in run:
            clock.advance(1e6)

    (record,) = records_of(tmp_path / "run", "train")
    training_s = 6 * 2 * 0.5  # two micro-batches a step
    assert record["targets"] == 6 * 8
    assert record["targets_per_s"] == pytest.approx(6 * 8 / training_s)
    assert record["evaluating_s"] == 200.0  # after steps 3 and 6
    assert record["user_s"] == 6e6


@pytest.mark.parametrize("rate", [3e-7, 1.5e-12])
def test_small_rates_are_not_shown_as_zero(rate: float) -> None:
    assert float(number(rate)) == rate


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
    notes = notes_in(capsys.readouterr().out)
    # samples of a step, and of the data set
    assert [numbers_in(note) for note in notes].count([8, 3]) == 1


@pytest.mark.parametrize(
    ("settings", "noted_steps"),
    [
        ({"ema": 0.99, "ema_ramp": False}, [8]),
        ({"ema": 0.5, "ema_ramp": False}, []),
        ({"ema": 0.99}, []),
        ({}, []),
    ],
)
def test_an_average_of_weights_that_a_short_run_cannot_fill_is_noted(
    settings: dict[str, Any], noted_steps: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    """A decay of 0.999 in a run of 600 steps: scores of weights that are more than half untrained,
    without a word.
    """
    usual: dict[str, Any] = {"splits": None, "early_stopping": None, "ema": None}

    build(None, length="8 steps", console=True, **(usual | settings)).train()

    notes = [note for note in notes_in(capsys.readouterr().out) if " 93% " in note]
    assert [numbers_in(note)[0] for note in notes] == noted_steps


@pytest.mark.parametrize(
    ("length", "code"),
    [
        ("0 steps", "setting-out-of-range"),
        ("0 epochs", "setting-out-of-range"),
        ("-3 steps", "duration-not-understood"),
    ],
)
def test_a_run_of_no_steps_is_refused(length: str, code: str) -> None:
    with refused(code, setting="length", value=length):
        build(None, length=length)
