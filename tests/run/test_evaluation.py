"""Metrics that are not means, and splits that are scored once, when the run is over. 8 s."""

from __future__ import annotations

import math
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import small_runs
import surefoot as sf
from recorded import records_of_kind, training_records
from refused import refused
from small_runs import Augmented
from stated import lines_naming, numbers_in
from surefoot.checkpoint import Store
from surefoot.errors import Setting
from surefoot.tracking.commands import resume_command
from surefoot.tracking.format import number
from surefoot.tracking.jsonl import records


def predict(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    inputs, labels = batch
    return model(inputs), labels


class CountingPredict:
    """As `predict`; counts the samples that it was called with."""

    def __init__(self) -> None:
        self.samples = 0

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        outputs, labels = predict(model, batch)
        self.samples += len(labels)
        return outputs, labels


def confusion(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    table = torch.zeros(3, 3, dtype=torch.long)
    for target, guess in zip(targets.tolist(), outputs.argmax(dim=1).tolist(), strict=True):
        table[target, guess] += 1
    return {
        "right": int(table.diagonal().sum()) / len(targets),
        "samples": len(targets),
        "confusion": table.tolist(),
        "signature": "three classes",
    }


def build(run_dir: Path | None, **changes: Any) -> sf.Run:
    # looking for hidden state is no claim of these tests, and takes a tenth of their time
    return small_runs.build(run_dir, **{"length": "16 steps", "check_state": False, **changes})


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    data = Augmented()
    return data.inputs, data.labels


def with_confusion(**changes: Any) -> sf.Split:
    metrics = [sf.metrics.accuracy, sf.metrics.whole_split(confusion)]
    return sf.Split(rows(), metrics=metrics, **({"predict": predict} | changes))


ALL = {"all": sf.Split(rows(), metrics=sf.metrics.accuracy)}
# the worst is watched, which the last step is not
WORST: dict[str, Any] = {"early_stopping": None, "best": "max all/loss"}


def scores_of_step(step: int, run_dir: Path, **changes: Any) -> dict[str, float]:
    """The scores of the checkpoint of a step, as another run has them."""
    splits = ALL | {"test": with_confusion(at_end=True)}
    run = build(None, **(changes | {"splits": splits}))
    run.load_checkpoint(Store(run_dir / "checkpoints").at(step))
    return run.evaluate("test")


def test_accuracy_is_the_share_of_labels_whose_output_is_the_largest() -> None:
    """A label below 0 counts nothing; outputs are (B, C) or (B, C, ...)."""
    outputs = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 9.0], [7.0, 6.0, 8.0], [1.0, 4.0, 0.0]])
    mean = sf.metrics.accuracy(outputs, torch.tensor([0, 1, 2, -100]))
    assert (int(mean.total), int(mean.count)) == (2, 3)
    positions = outputs.reshape(2, 2, 3).movedim(2, 1)
    mean = sf.metrics.accuracy(positions, torch.tensor([[0, 1], [-1, 1]]))
    assert (int(mean.total), int(mean.count)) == (2, 3)


@pytest.mark.parametrize("batch_size", [1, 7, 52])
def test_a_metric_of_the_whole_split_sees_every_output_once_whatever_the_batch_size(
    batch_size: int,
) -> None:
    run = build(
        None, splits={"all": with_confusion(batch_size=batch_size)}, early_stopping=None, seed=1
    )
    scores = run.evaluate()
    assert scores["all/samples"] == 52
    assert scores["all/right"] == pytest.approx(scores["all/accuracy"])


def test_what_is_no_number_stands_in_the_records_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build(
        tmp_path / "run", splits={"all": with_confusion()}, early_stopping=None, console=True
    )
    run.train()

    assert {type(value) for value in run.evaluate().values()} == {float}
    *_, last = records_of_kind(tmp_path / "run", "eval")
    assert sum(map(sum, last["all/confusion"])) == 52
    assert last["all/signature"] == "three classes"
    printed = capsys.readouterr().out
    assert "all/right=" in printed
    assert "confusion" not in printed


def test_what_cannot_be_recorded_is_refused() -> None:
    metric = sf.metrics.whole_split(lambda outputs, targets: {"what": {1, 2}})
    strange = sf.Split(rows(), metrics=metric)
    with refused("metric-not-recordable", metrics=["what"]):
        build(None, splits={"all": strange}, early_stopping=None).evaluate()


def test_a_split_for_the_end_is_scored_once_with_the_best_weights_and_the_last_ones_stay(
    tmp_path: Path,
) -> None:
    counting = CountingPredict()
    changes: dict[str, Any] = WORST | {"ema": None}
    test = with_confusion(predict=counting, at_end=True)
    run = build(tmp_path / "run", **(changes | {"splits": ALL | {"test": test}}))
    run.train()
    unscored = build(tmp_path / "other", **(changes | {"splits": ALL}))
    unscored.train()

    assert counting.samples == 52
    (record,) = records_of_kind(tmp_path / "run", "final_eval")
    best = run.parts.run_state.best
    assert best is not None
    assert record["weights"] == "best"
    assert record["weights_step"] == best.step != run.state.step
    scores = scores_of_step(record["weights_step"], tmp_path / "run", **changes)
    assert scores["test/accuracy"] == record["test/accuracy"]
    for one, other in zip(run.state.parameters, unscored.state.parameters, strict=True):
        assert torch.equal(one, other)


def test_the_average_of_the_best_step_is_scored_at_the_end(tmp_path: Path) -> None:
    changes: dict[str, Any] = WORST | {"ema": 0.9}
    test = with_confusion(at_end=True)
    run = build(tmp_path / "run", **(changes | {"splits": ALL | {"test": test}}))
    run.train()

    (record,) = records_of_kind(tmp_path / "run", "final_eval")
    assert record["weights_step"] < run.state.step
    scores = scores_of_step(record["weights_step"], tmp_path / "run", **changes)
    assert scores["test/loss"] == record["test/loss"]


def test_a_finished_run_is_not_scored_again(tmp_path: Path) -> None:
    def changes(predict: Any) -> dict[str, Any]:
        test = with_confusion(predict=predict, at_end=True)
        return {"splits": {"test": test}, "early_stopping": None, "best": None}

    build(tmp_path / "run", **changes(predict)).train()
    counting = CountingPredict()
    build(tmp_path / "run", **changes(counting)).train()

    assert counting.samples == 0
    assert len(records_of_kind(tmp_path / "run", "final_eval")) == 1


def test_an_end_given_up_for_a_signal_is_scored_by_the_resume_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted: list[bool] = []

    def interrupting(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        if not interrupted:
            interrupted.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return predict(model, batch)

    def changes(predict: Any) -> dict[str, Any]:
        return {
            "splits": {"test": with_confusion(predict=predict, batch_size=5, at_end=True)},
            "early_stopping": None,
            "best": None,
            "sample_fn": lambda model: "once",
            "console": True,
        }

    run_dir = tmp_path / "run"
    with pytest.raises(SystemExit) as end:
        build(run_dir, **changes(interrupting)).train()
    assert end.value.code == 143
    assert records_of_kind(run_dir, "final_eval") == []
    assert records_of_kind(run_dir, "sample") == []
    *_, last_line = capsys.readouterr().out.splitlines()
    assert last_line.endswith(resume_command(run_dir))

    for _ in range(2):
        build(run_dir, **changes(predict)).train()
        assert len(records_of_kind(run_dir, "final_eval")) == 1
        assert len(records_of_kind(run_dir, "sample")) == 1


def test_a_run_that_patience_ended_is_scored_too(tmp_path: Path) -> None:
    run = build(
        tmp_path / "run",
        splits=ALL | {"test": with_confusion(at_end=True)},
        early_stopping=sf.EarlyStopping("min all/loss", patience=1),
        optimizer=sf.optim.adamw(lr=2.0),
        length="60 steps",
    )
    run.train()

    assert run.state.step < 60
    (record,) = records_of_kind(tmp_path / "run", "final_eval")
    assert record["step"] == run.state.step


def test_no_step_is_steered_by_what_is_for_the_end() -> None:
    with refused("score-unknown", setting="best", value="max test/right"):
        build(
            None,
            splits={"all": sf.Split(rows()), "test": with_confusion(at_end=True)},
            early_stopping=None,
            best="max test/right",
        )


@pytest.mark.parametrize(
    ("best", "code"), [("min loss", "score-unknown"), ("all/loss", "setting-out-of-range")]
)
def test_a_score_that_cannot_be_monitored_names_the_keyword(best: str, code: str) -> None:
    with refused(code, setting="best", value=best) as error:
        build(None, splits={"all": sf.Split(rows())}, early_stopping=None, best=best)
    if code == "score-unknown":
        assert error.value.remedies == (Setting("best", "min all/loss"),)


def test_a_monitored_score_without_splits_asks_for_one() -> None:
    rule = sf.EarlyStopping("max val/right", patience=1)
    with refused("score-unknown", setting="early_stopping.monitor", scores=[]) as error:
        build(None, splits={}, early_stopping=rule, best=None)

    first, *_ = error.value.remedies
    assert "split" in str(first)


def test_a_monitored_score_without_the_name_of_its_split_is_refused() -> None:
    rule = sf.EarlyStopping("max right", patience=1)
    with refused("score-unknown", setting="early_stopping.monitor"):
        build(None, splits={"val": sf.Split(rows())}, early_stopping=rule, best=None)


def test_the_end_says_whose_weights_were_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build(
        tmp_path / "run",
        splits={"test": with_confusion(at_end=True)},
        early_stopping=None,
        best=None,
        console=True,
    )
    run.train()

    printed = " ".join(capsys.readouterr().out.split())
    (at_end,) = [part for part in printed.split("; ") if part.startswith("test/loss ")]
    assert numbers_in(at_end)[-1] == run.state.step  # whose weights


def test_a_run_that_is_made_longer_has_another_end(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "splits": {"test": with_confusion(at_end=True)},
        "early_stopping": None,
        "best": None,
        "schedule": sf.schedules.constant(),
        "save_every": "2 steps",
    }
    for steps in (6, 6, 9):
        build(tmp_path / "run", length=f"{steps} steps", **changes).train()

    scored_at = [record["step"] for record in records_of_kind(tmp_path / "run", "final_eval")]
    assert scored_at == [6, 9]


def test_the_last_step_is_safe_before_the_end_is_scored(tmp_path: Path) -> None:
    def failing(model: nn.Module, batch: Any) -> Any:
        raise RuntimeError("out of luck")

    split = with_confusion(predict=failing, at_end=True)
    changes: dict[str, Any] = {"splits": {"test": split}, "early_stopping": None, "best": None}
    with pytest.raises(RuntimeError, match="out of luck"):
        build(tmp_path / "run", length="7 steps", save_every="1 h", **changes).train()
    assert (tmp_path / "run" / "checkpoints" / "step-00000007" / "manifest.json").is_file()


def test_scores_that_overflow_end_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def overflowing(model: nn.Module, batch: Any) -> Any:
        raise sf.DivergedError("the logits are not finite")

    splits = {
        "all": with_confusion(predict=overflowing),
        "test": with_confusion(predict=overflowing, at_end=True),
    }
    run = build(
        tmp_path / "run",
        splits=splits,
        early_stopping=None,
        best=None,
        console=True,
        length="10 steps",
    )
    run.train()

    assert run.state.step == 10
    printed = capsys.readouterr().out
    of_step_5, of_step_10, of_test = lines_naming(
        printed, "warning: ", ": the logits are not finite"
    )
    assert numbers_in(of_step_5) == [5]
    assert numbers_in(of_step_10) == [10]
    assert " test: " in of_test


def test_the_end_tells_how_a_score_moved_in_the_run_and_not_in_its_last_session(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain: dict[str, Any] = {
        "length": "12 steps",
        "evaluate_every": "4 steps",
        "early_stopping": None,
    }
    build(tmp_path / "run", stop_after="8 steps", **plain).train()
    build(tmp_path / "run", console=True, **plain).train()

    first, *_ = records_of_kind(tmp_path / "run", "eval")
    assert first["step"] == 4
    assert f"from {number(first['val/loss'])} at step 4 to" in capsys.readouterr().out


def test_splits_are_evaluated_before_the_first_step_once_and_that_steers_nothing(
    tmp_path: Path,
) -> None:
    """A session that ends in its first step leaves it to no other; the run verifies, and watches
    what it would have watched.

    A training record has the derived values too, and they are computed again.
    """
    changes: dict[str, Any] = {
        "length": "5 steps",
        "evaluate_at_start": True,
        "ema": None,
        "derived": {"perplexity": sf.metrics.perplexity},
        # at the start it is the largest
        "early_stopping": sf.EarlyStopping("max val/loss", patience=9),
    }
    expected = build(None, **changes).evaluate()
    with suppress(KeyError), build(tmp_path / "run", **changes) as run:
        for _ in run:
            raise KeyError
    run = build(tmp_path / "run", **changes)
    run.train()

    first, *others = records_of_kind(tmp_path / "run", "eval")
    assert first == {"kind": "eval", "step": 0, **expected}
    assert [record["step"] for record in others] == [5]
    (rule,) = run.parts.run_state.stopping
    assert rule.step == 5
    for record in records_of_kind(tmp_path / "run", "train"):
        assert record["perplexity"] == math.exp(record["loss"])
    verdict = sf.load(build(tmp_path / "run", **changes)).verify()
    assert verdict.problems == []
    assert "perplexity" not in str(verdict)  # as what it cannot compute


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_first_body_that_makes_its_step_has_the_scores_from_before_it(
    is_killed: bool, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"length": "2 steps", "evaluate_at_start": True, "ema": None}
    expected = build(None, **changes).evaluate()
    if is_killed:
        with suppress(KeyError), build(tmp_path / "run", **changes) as run:
            for _ in run.steps():
                raise KeyError

    metrics = []
    with build(tmp_path / "run", **changes) as run:
        for step in run.steps():
            metrics.append(dict(step.metrics))
            sf.forward_backward(step)
            sf.update(step)

    assert metrics == [expected, {}]
    assert run.parts.run_state.state.step == 2


def test_a_sample_between_two_steps_stands_below_the_row_of_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = dict.fromkeys(["sample_every", "log_every", "evaluate_every"], "2 steps")
    run = build(
        tmp_path / "run", length="4 steps", sample_fn=lambda _: "drawn", console=True, **every
    )
    with run:
        for _ in run:
            pass

    rows_and_samples = []
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("step="):
            rows_and_samples.append(line.partition("/")[0])
        elif "drawn" in line:
            rows_and_samples.append("sample")
    assert rows_and_samples == ["step=2", "sample", "step=4", "sample"]
    kinds = [record["kind"] for record in records(tmp_path / "run" / "metrics.jsonl")]
    assert kinds.index("train") < kinds.index("sample")


@pytest.mark.parametrize("log_every", ["1 steps", "4 steps"])
def test_a_sample_is_recorded_whether_or_not_its_step_has_a_record(
    log_every: str, tmp_path: Path
) -> None:
    every = {"sample_every": "2 steps", "evaluate_every": "4 steps", "log_every": log_every}
    with build(tmp_path / "run", length="4 steps", sample_fn=lambda _: "drawn", **every) as run:
        for _ in run:
            pass

    assert [record["step"] for record in records_of_kind(tmp_path / "run", "sample")] == [2, 4]


def test_derived_values_do_not_take_the_place_of_a_number_of_the_record() -> None:
    with refused("logged-name-reserved", name="loss"):
        build(None, derived={"loss": sf.metrics.perplexity})
    with refused("setting-out-of-range", setting="derived"):
        build(None, derived=sf.metrics.perplexity)


def test_several_samples_stand_in_one_record_and_all_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build(
        tmp_path / "run", sample_fn=lambda _: ["once", "twice"], early_stopping=None, console=True
    )
    assert run.sample() == ["once", "twice"]
    run.train()

    (record,) = records_of_kind(tmp_path / "run", "sample")
    assert record["texts"] == ["once", "twice"]
    assert "once" in record["text"]
    assert "twice" in record["text"]
    assert record["text"] in capsys.readouterr().out


@pytest.mark.parametrize("best", ["min val/loss", "max val/accuracy", "min train/loss"])
def test_each_new_best_value_has_a_line_below_the_row_of_its_step(
    best: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runners-up have none."""
    settings = {"evaluate_every": "2 steps", "log_every": "2 steps", "early_stopping": None}
    build(tmp_path / "run", console=True, best=best, keep_best=3, **settings).train()

    direction, score = best.split()
    if score == "train/loss":
        scores = [(record["step"], record["loss"]) for record in training_records(tmp_path / "run")]
    else:
        evaluations = records_of_kind(tmp_path / "run", "eval")
        scores = [(record["step"], record[score]) for record in evaluations]
    lines = capsys.readouterr().out.splitlines()
    best_lines = []
    before = ""
    best_value = math.inf if direction == "min" else -math.inf
    for step, value in scores:
        is_better = value < best_value if direction == "min" else value > best_value
        if is_better:
            line = f"best: {score} {number(value)} at step {step}{before}"
            assert lines[lines.index(line) - 1].startswith(f"step={step}/")
            best_lines.append(line)
            before = f", {number(value)} at step {step} before"
            best_value = value
    assert [line for line in lines if line.startswith("best: ")] == best_lines
