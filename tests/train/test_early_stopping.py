"""Early stopping and the best checkpoint: two watches, with their own scores and rules. (6 s)"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from recorded import records_of_kind
from refused import refused
from scored_runs import Count, build, rows, scored
from surefoot.recipes.optimizer_settings import EarlyStopping as Flags
from surefoot.run import messages
from surefoot.tools.plan import summary
from surefoot.train.patience import Best, PlateauProgress, ScoreWatch, following

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
import scores_of_behavior_1

UP_AND_DOWN = (0.0, 0.900, 0.905, 0.912, 0.919, 0.908)
FALLING = (9.0, 5.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0)


def split(**scores: Sequence[float]) -> sf.Split:
    metrics = {name: scored(values) for name, values in scores.items()}
    return sf.Split(rows(), metrics=metrics)


def evaluated_steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in records_of_kind(run_dir, "eval")]


def kept_steps(run_dir: Path) -> list[int]:
    checkpoints = (run_dir / "checkpoints").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in checkpoints)


def newest_state(run_dir: Path) -> dict[str, Any]:
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return dict(json.loads((newest / "state.json").read_text()))


def best_weight(run_dir: Path) -> float:
    model = Count()
    sf.load(run_dir).load_model(model, checkpoint="best")
    return model.steps.item()


# --- the best -------------------------------------------------------------------------------------


def test_the_best_is_the_largest_value_whatever_early_stopping_calls_an_improvement(
    tmp_path: Path,
) -> None:
    splits = {"val": split(score=UP_AND_DOWN), "test": sf.Split(rows(), at_end=True)}
    rule = sf.EarlyStopping("max val/score", patience=9, min_delta=0.02)
    changes: dict[str, Any] = {"splits": splits, "early_stopping": rule, "keep_last": 1}
    build(tmp_path / "run", best="max val/score", **changes).train()

    (end,) = records_of_kind(tmp_path / "run", "final_eval")
    assert (end["weights"], end["weights_step"], end["test/loss"]) == ("best", 4, -4.0)
    assert 4 in kept_steps(tmp_path / "run")
    assert best_weight(tmp_path / "run") == 4.0


def test_without_best_the_last_weights_are_evaluated_at_the_end_and_none_are_kept(
    tmp_path: Path,
) -> None:
    splits = {"val": split(score=UP_AND_DOWN), "test": sf.Split(rows(), at_end=True)}
    rule = sf.EarlyStopping("max val/score", patience=3)
    run = build(tmp_path / "run", splits=splits, early_stopping=rule, keep_last=1)
    run.train()

    assert run.state.step == 7
    (end,) = records_of_kind(tmp_path / "run", "final_eval")
    assert (end["weights"], end["weights_step"], end["test/loss"]) == ("last", 7, -7.0)
    assert kept_steps(tmp_path / "run") == [0, 7]
    with refused("run-without-best-checkpoint", sf.CheckpointError):
        best_weight(tmp_path / "run")


@pytest.mark.parametrize("keep", [1, 2, 3, 20])
@pytest.mark.parametrize("direction", ["min", "max"])
def test_the_steps_that_are_kept_are_those_of_the_best_values(direction: str, keep: int) -> None:
    for seed in range(30):
        generator = random.Random(seed)
        values = [generator.choice((0.0, 1.0, 2.0, 3.0, math.nan)) for _ in range(12)]
        best = Best(f"{direction} val/score", keep=keep)
        ranking: list[tuple[float, int]] = []  # of the values so far that are numbers
        for step, value in enumerate(values):
            if not math.isnan(value):
                ranking.append((value if direction == "min" else -value, step))
                ranking.sort()
            expected = tuple(index for _, index in ranking[:keep])

            assert best.improved(step, value) == (step in expected)
            assert best.steps == expected


def test_the_three_best_checkpoints_are_kept_over_kills(tmp_path: Path) -> None:
    scores = (9.0, 4.0, 2.0, 5.0, 1.0, 6.0, 3.0, 7.0, 8.0, 9.0)
    changes: dict[str, Any] = {
        "splits": {"val": split(score=scores)},
        "best": "min val/score",
        "keep_best": 3,
        "keep_last": 1,
    }
    for end in ("3 steps", "5 steps", None):
        build(tmp_path / "run", stop_after=end, **changes).train()

    assert kept_steps(tmp_path / "run") == [0, 2, 4, 6, 9]
    run = build(tmp_path / "run", **changes)
    with run:
        assert run.parts.run_state.best is not None
        assert run.parts.run_state.best.steps == (4, 2, 6)
    assert best_weight(tmp_path / "run") == 4.0


def test_several_best_checkpoints_need_a_score() -> None:
    with refused("keep-best-without-best", setting="keep_best", value=3):
        build(None, keep_best=3)


# --- the rules ------------------------------------------------------------------------------------


def test_best_and_two_rules_have_their_own_scores_and_a_resume_knows_each(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "splits": {"val": split(error=FALLING, score=UP_AND_DOWN)},
        "best": "max val/score",
        "early_stopping": [
            sf.EarlyStopping("min val/error", patience=3),
            sf.EarlyStopping("max val/score", patience=7),
        ],
    }
    whole = build(tmp_path / "whole", **changes)
    whole.train()
    for end in ("2 steps", "4 steps", "5 steps", None):
        cut = build(tmp_path / "cut", stop_after=end, **changes)
        cut.train()

    for run in (whole, cut):
        assert run.state.step == 6  # the error is best at step 3
        of_error, of_score = run.parts.run_state.stopping
        assert (of_error.step, of_error.waited, of_error.exhausted) == (3, 3, True)
        assert (of_score.step, of_score.waited, of_score.exhausted) == (4, 2, False)
    expected = newest_state(tmp_path / "whole")
    resumed = newest_state(tmp_path / "cut")
    assert resumed["monitor"] == expected["monitor"]
    assert resumed["stopping"] == expected["stopping"]
    assert resumed["stopped_early"] is expected["stopped_early"] is True
    assert sf.load(build(tmp_path / "cut", **changes)).verify(say=None).exit_status == 0


def test_a_rule_on_a_training_value_counts_records_and_the_last_step_is_evaluated(
    tmp_path: Path,
) -> None:
    changes: dict[str, Any] = {
        "splits": {"val": split(score=UP_AND_DOWN)},
        "evaluate_every": "4 steps",
        "log_every": "2 steps",
        "early_stopping": sf.EarlyStopping("max train/loss", patience=2),  # it falls in each step
        "length": "20 steps",
    }
    whole = build(tmp_path / "whole", **changes)
    whole.train()
    for end in ("2 steps", "5 steps", None):
        cut = build(tmp_path / "cut", stop_after=end, **changes)
        cut.train()

    assert whole.state.step == cut.state.step == 6  # the first record, and two that are lower
    assert evaluated_steps(tmp_path / "whole") == [4, 6]
    assert evaluated_steps(tmp_path / "cut") == [4, 6]
    expected = newest_state(tmp_path / "whole")
    assert newest_state(tmp_path / "cut")["stopping"] == expected["stopping"]
    verdict = sf.load(build(tmp_path / "cut", **changes)).verify(say=None)
    assert verdict.exit_status == 0, str(verdict)


class KilledError(BaseException):
    """Stands for a kill, after which nothing is saved."""


def test_an_evaluation_that_a_kill_prevented_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "splits": {"val": split(score=UP_AND_DOWN)},
        "evaluate_every": "4 steps",
        "early_stopping": sf.EarlyStopping("max train/loss", patience=2),
    }
    run = build(tmp_path / "run", **changes)
    plain = run.parts.evaluator.scores

    def killed(*arguments: Any, **options: Any) -> Any:
        if run.state.step == 3:
            raise KilledError
        return plain(*arguments, **options)

    monkeypatch.setattr(run.parts.evaluator, "scores", killed)
    with pytest.raises(KilledError):
        run.train()
    assert newest_state(tmp_path / "run")["evaluation_due"] is True

    build(tmp_path / "run", **changes).train()

    assert evaluated_steps(tmp_path / "run") == [3]


def test_a_value_of_your_own_is_monitored(tmp_path: Path) -> None:
    rule = sf.EarlyStopping("min train/error", patience=2)
    with build(tmp_path / "run", early_stopping=rule, best="min train/error") as run:
        for step in run:
            if step.index != 2:  # not in each record
                step.log(error=FALLING[step.index])

    assert run.state.step == 6
    assert run.parts.run_state.best is not None
    assert run.parts.run_state.best.step == 4


def test_a_name_that_is_in_no_record_is_refused() -> None:
    rule = sf.EarlyStopping("min train/error", patience=2)
    with refused("score-unknown", setting="early_stopping.monitor", value="min train/error"):
        build(None, early_stopping=rule).train()


@pytest.mark.parametrize("name", ["train", "epoch", "event"])
def test_a_split_has_no_name_under_which_trackers_show_other_values(name: str) -> None:
    with refused("split-name-reserved", split=name):
        build(None, splits={name: split(loss_of_split=FALLING)})


def test_an_older_run_goes_on_with_a_split_named_train_and_monitors_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "splits": {"train": split(loss_of_split=FALLING)},
        "early_stopping": sf.EarlyStopping("min train/loss", patience=2),
    }
    with monkeypatch.context() as older:
        older.setattr("surefoot.run.build.refuse_split_names", lambda _names: None)
        build(tmp_path / "run", **changes, stop_after="2 steps").train()

    run = build(tmp_path / "run", **changes)

    assert not run.parts.run_state.stopping[0].of_training


# --- min_delta ------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["min", "max"])
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.3])
def test_a_share_as_min_delta_is_the_relative_threshold_of_torch(
    direction: Any, share: float
) -> None:
    text = f"{100 * share:g}%"
    plateau = sf.ReduceLROnPlateau(f"{direction} a/score", 2, 0.5, 0.0, 1, text)
    for seed in range(10):
        generator = random.Random(seed)
        values = []
        value = 1.0
        for _ in range(60):
            value *= generator.uniform(0.7, 1.4)
            values.append(value)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer,
            mode=direction,
            factor=0.5,
            patience=1,
            threshold=share,
            threshold_mode="rel",
            cooldown=1,
            eps=0.0,
        )
        progress = PlateauProgress()
        watch = ScoreWatch(f"{direction} a/score")
        watch.min_delta = text
        for step, value in enumerate(values):
            theirs.step(value)
            progress = following(plateau, progress, step=step, score=value)
            watch.improved(step, value)

            assert progress.factor == optimizer.param_groups[0]["lr"]
            assert watch.value == theirs.best


@pytest.mark.parametrize("wrong", [-1.0, math.inf, math.nan, "1", "-1%", "x%", True, None])
@pytest.mark.parametrize("rule", [sf.EarlyStopping, sf.ReduceLROnPlateau])
def test_a_min_delta_that_is_neither_number_nor_share_is_refused(rule: Any, wrong: Any) -> None:
    name = "early_stopping" if rule is sf.EarlyStopping else "plateau"
    with refused("setting-out-of-range", setting=f"{name}.min_delta", value=wrong):
        rule("min val/loss", patience=2, min_delta=wrong)


# --- what is said, and other ways to say it -------------------------------------------------------


def test_a_score_that_is_nan_is_said_once_and_never_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = (0.0, math.nan, 0.5, math.nan, math.nan, 0.4)
    run = build(
        tmp_path / "run",
        splits={"val": split(score=scores)},
        best="min val/score",
        early_stopping=sf.EarlyStopping("min val/score", patience=5),
        length="7 steps",
        console=True,
    )
    run.train()

    assert capsys.readouterr().out.count("val/score after step 1 is NaN") == 1
    best, rule = run.parts.run_state.watches
    assert (best.step, rule.step) == (5, 5)
    assert isinstance(rule, ScoreWatch)
    assert rule.waited == 2


def test_the_header_and_the_plan_say_what_is_watched() -> None:
    rules = [
        sf.EarlyStopping("min val/loss", patience=1, min_delta="1%"),
        sf.EarlyStopping("min train/grad_norm", patience=3),
    ]
    run = build(
        None,
        splits={"val": sf.Split(rows())},
        early_stopping=rules,
        best="min val/loss",
        keep_best=2,
    )
    sentences = [
        "keeps the 2 best checkpoints by min val/loss",
        "ends after 1 evaluation without a val/loss better by more than 1%",
        "ends after 3 records without a better train/grad_norm",
    ]
    header = " ".join(messages.header(run.parts, resumed=False).split())
    assert "; ".join(sentences) in header
    assert sentences in [section.lines for section in summary.sections(run.parts)]


def test_flags_of_several_metrics_are_several_rules() -> None:
    flags = Flags(patience=3, monitor="min val/loss, max val/accuracy", min_delta="1%")

    assert flags.spec("min val/loss") == [
        sf.EarlyStopping("min val/loss", patience=3, min_delta="1%"),
        sf.EarlyStopping("max val/accuracy", patience=3, min_delta="1%"),
    ]


def test_flags_without_a_metric_are_a_rule_on_that_of_the_recipe() -> None:
    rule = Flags(patience=3).spec("min val/loss")

    assert rule == sf.EarlyStopping("min val/loss", patience=3)


def test_without_a_flag_of_patience_there_is_no_rule() -> None:
    assert Flags().spec("min val/loss") is None


# --- runs that began earlier ----------------------------------------------------------------------


def test_a_run_of_behavior_1_ends_as_it_began(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(scores_of_behavior_1.STORED, run_dir)
    run = scores_of_behavior_1.build(run_dir)
    run.train()

    assert run.state.step == 7  # six evaluations without an improvement of more than 0.02
    (end,) = records_of_kind(run_dir, "final_eval")
    assert (end["weights"], end["weights_step"]) == ("best", 1)
    assert 1 in kept_steps(run_dir)
    assert {line["val/nothing"] for line in records_of_kind(run_dir, "eval")} == {0.0}
    verdict = sf.load(scores_of_behavior_1.build(run_dir)).verify(say=None)
    assert verdict.exit_status == 0, str(verdict)


def test_a_run_with_the_settings_of_one_of_behavior_1_keeps_no_best_today(tmp_path: Path) -> None:
    run = scores_of_behavior_1.build(tmp_path / "run")
    run.train()

    assert run.state.step == 7
    (end,) = records_of_kind(tmp_path / "run", "final_eval")
    assert (end["weights"], end["weights_step"]) == ("last", 7)
    for line in records_of_kind(tmp_path / "run", "eval"):
        assert math.isnan(line["val/nothing"])
