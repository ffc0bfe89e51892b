"""A plateau: the factors of torch's ReduceLROnPlateau, the rates that steps have of it, and what a
resume knows of it. (4 s)
"""

from __future__ import annotations

import json
import math
import random
import signal
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import small_runs
import surefoot as sf
from in_one import in_one
from recorded import records_of_kind
from refused import refused
from stated import numbers_in
from surefoot.cli.main import main
from surefoot.config.tree import layered
from surefoot.recipes import images
from surefoot.recipes.optimizer_settings import Plateau
from surefoot.tools.plan import summary
from surefoot.train.patience import (
    Feedback,
    PlateauProgress,
    ReduceLROnPlateau,
    ScoreWatch,
    following,
)

NEVER_BETTER = ReduceLROnPlateau("min val/same", patience=2)
SETTINGS: dict[str, Any] = {
    "length": "12 steps",
    "evaluate_every": "2 steps",
    "save_every": "3 steps",
    "log_every": "1 steps",
    "early_stopping": None,
    "plateau": NEVER_BETTER,
    "check_state": False,  # no claim of these tests, and a tenth of their time
}


def same(outputs: Any, targets: Any) -> sf.Mean:
    """A score that cannot get better."""
    return sf.Mean(torch.tensor(1.0), 1)


def split(*scores: Any) -> dict[str, sf.Split]:
    data = small_runs.Augmented()
    return {"val": sf.Split((data.inputs, data.labels), metrics=[same, *scores])}


def build(run_dir: Path | None, **changes: Any) -> sf.Run:
    return small_runs.build(run_dir, **({"splits": split()} | SETTINGS | changes))


def written(run_dir: Path, kind: str, value: str) -> list[tuple[int, Any]]:
    return [(record["step"], record[value]) for record in records_of_kind(run_dir, kind)]


def outcome(run_dir: Path) -> Any:
    """All that a run leaves: its newest tensors, where its plateau stands, its rates and scores."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    tensors = {
        file.name: sha256(file.read_bytes()).hexdigest() for file in newest.glob("*.safetensors")
    }
    standing = json.loads((newest / "state.json").read_text())["plateau"]
    factors = sorted(written(run_dir, "eval", "lr_factor"))
    return newest.name, tensors, standing, recorded_rates(run_dir), factors


def recorded_rates(run_dir: Path) -> list[float]:
    """The rate of each step."""
    return [rate for _, rate in sorted(written(run_dir, "train", "lr"))]


# --- the decision ---------------------------------------------------------------------------------


def factors(plateau: ReduceLROnPlateau, scores: Sequence[float]) -> list[float]:
    """The factor after each score."""
    progress = PlateauProgress()
    factors = []
    for step, score in enumerate(scores, start=1):
        progress = following(plateau, progress, step=step, score=score)
        factors.append(progress.factor)
    return factors


def walk(generator: random.Random) -> list[float]:
    """Scores on a grid, so that differences are exact, now and then infinite."""
    scores = []
    score = 0.0
    for _ in range(60):
        score += generator.choice((-0.25, 0.0, 0.0, 0.125, 0.25))
        is_infinite = generator.random() < 0.05
        scores.append(math.inf if is_infinite else score)
    return scores


@in_one
@pytest.mark.parametrize("direction", ["min", "max"])
@pytest.mark.parametrize("cooldown", [0, 1, 3])
@pytest.mark.parametrize(
    ("patience", "factor", "floor"), [(1, 0.5, 0.0), (2, 0.1, 0.005), (3, 0.7, 0.3)]
)
@pytest.mark.parametrize("improvement", [0.0, 0.125])
def test_factors_are_those_of_torch_whose_patience_is_one_less(
    direction: Any, cooldown: int, patience: int, factor: float, floor: float, improvement: float
) -> None:
    plateau = ReduceLROnPlateau(
        f"{direction} a/score", patience, factor, floor, cooldown, improvement
    )
    for seed in range(10):
        scores = walk(random.Random(seed))
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer,
            mode=direction,
            factor=factor,
            patience=patience - 1,
            threshold=improvement,
            threshold_mode="abs",
            cooldown=cooldown,
            min_lr=floor,
            eps=0.0,
        )
        expected = []
        for score in scores:
            theirs.step(score)
            expected.append(optimizer.param_groups[0]["lr"])

        assert factors(plateau, scores) == expected
        assert len(set(expected)) > 1


@pytest.mark.parametrize("cooldown", [0, 2])
def test_scores_that_are_no_numbers_change_nothing_but_their_count(cooldown: int) -> None:
    plateau = ReduceLROnPlateau("min a/score", patience=2, cooldown=cooldown)
    for seed in range(20):
        generator = random.Random(seed)
        scores = walk(generator)
        feedback = Feedback(plateau)
        with_nans = Feedback(plateau)
        nan_count = 0
        for step, score in enumerate(scores):
            feedback.update(step, score)
            for _ in range(generator.choice((0, 0, 1, 2))):
                warning = with_nans.update(step, math.nan)
                nan_count += 1
                assert warning is not None
                assert "is NaN (" in warning
            with_nans.update(step, score)

            assert with_nans.state() == feedback.state() | {"not_numbers": nan_count}
        assert nan_count > 0


def test_what_a_checkpoint_holds_is_all_there_is_to_know() -> None:
    scores = walk(random.Random(3))
    plateau = ReduceLROnPlateau("max a/score", patience=2, cooldown=1)
    whole = Feedback(plateau)
    resumed = Feedback(plateau)
    for step, score in enumerate(scores):
        saved = json.dumps(resumed.state())
        resumed = Feedback(plateau)
        resumed.load_state(json.loads(saved))

        assert resumed.update(step, score) == whole.update(step, score)
    assert resumed.standing == whole.standing


# --- the rates ------------------------------------------------------------------------------------


def following_factors(
    recorded: Sequence[tuple[int, float]], plateau: ReduceLROnPlateau, steps: int, every: int
) -> list[float]:
    """The factor of each step, from the recorded scores alone."""
    progress = PlateauProgress()
    factors = []
    scores = dict(recorded)
    for step in range(steps):
        if step in scores and step % every == 0:
            progress = following(plateau, progress, step=step, score=scores[step])
        factors.append(progress.factor)
    return factors


@pytest.mark.parametrize(
    "plateau", [NEVER_BETTER, ReduceLROnPlateau("min val/loss", 1, 0.25, 0.1, 1, 0.02)], ids=repr
)
def test_the_rate_of_a_step_is_its_schedules_times_what_the_scores_before_it_say(
    plateau: ReduceLROnPlateau, tmp_path: Path
) -> None:
    run = build(tmp_path / "run", plateau=plateau)
    run.train()

    scores = written(tmp_path / "run", "eval", plateau.score)
    lowered = following_factors(scores, plateau, 12, every=2)
    schedule = [run.parts.task.factors(step) for step in range(12)]
    expected = [1e-2 * (schedule[step] * lowered[step]) for step in range(12)]
    assert recorded_rates(tmp_path / "run") == expected
    assert len(set(lowered)) > 1


def test_a_loop_of_ones_own_has_the_same_rates(tmp_path: Path) -> None:
    build(tmp_path / "run").train()
    with build(tmp_path / "own") as own:
        for step in own.steps():
            sf.forward_backward(step)
            sf.update(step)

    assert outcome(tmp_path / "own") == outcome(tmp_path / "run")


def test_the_rate_of_a_step_is_that_of_its_record_whenever_it_is_read(tmp_path: Path) -> None:
    """After its update, after an evaluation that lowers the rate, and when the run is over."""
    with build(tmp_path / "run", schedule=sf.schedules.cosine()) as run:
        steps = []
        in_the_body = []
        for step in run:
            steps.append(step)
            in_the_body.append(step.lr)
    afterwards = [step.lr for step in steps]

    assert in_the_body == recorded_rates(tmp_path / "run")
    assert afterwards == recorded_rates(tmp_path / "run")
    assert run.state.lr_factor < 1


def test_in_a_loop_of_ones_own_a_step_has_its_rate_after_its_update(tmp_path: Path) -> None:
    with build(tmp_path / "run", schedule=sf.schedules.cosine()) as run:
        group = run.state.optimizers["model"].optimizer.param_groups[0]
        after_updates = []
        for step in run.steps():
            assert step.lr is None
            sf.forward_backward(step)
            sf.update(step)
            after_updates.append(step.lr)
            assert step.lr == group["lr"]

    assert after_updates == recorded_rates(tmp_path / "run")
    assert run.state.lr_factor < 1


def test_every_group_of_every_optimizer_is_lowered() -> None:
    def loss(models: Any, batch: Any) -> Any:
        return small_runs.loss(models["one"], batch) + small_runs.loss(models["other"], batch)

    def predict(models: Any, batch: Any) -> Any:
        return batch[0], batch[1]

    zeros = (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))
    run = build(
        None,
        model={"one": small_runs.Net, "other": small_runs.Net},
        optimizer={"one": sf.optim.sgd(lr=1.0), "other": sf.optim.adamw(lr=1e-3)},
        loss=loss,
        schedule=None,
        splits={"val": sf.Split(zeros, metrics=same, predict=predict)},
        plateau=ReduceLROnPlateau("min val/same", patience=1),
        length="5 steps",
        ema=None,
    )
    run.train()

    groups = []
    for optimizer in run.state.optimizers.values():
        groups += optimizer.optimizer.param_groups
    factors = [group["lr"] / group["initial_lr"] for group in groups]
    assert factors == [0.5] * 3  # evaluated after steps 2 and 4; the first score is the best


def test_a_plateau_that_is_never_reached_changes_no_bit() -> None:
    watching = build(None, plateau=ReduceLROnPlateau("min val/same", patience=99))
    plain = build(None, plateau=None)
    watching.train()
    plain.train()

    for one, other in zip(watching.state.parameters, plain.state.parameters, strict=True):
        assert torch.equal(one, other)


# --- resume ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    build(run_dir).train()
    factors = [factor for _, factor in sorted(written(run_dir, "eval", "lr_factor"))]
    assert factors == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    return outcome(run_dir)


@pytest.mark.fast("5", "6")
# 6: between the evaluation that lowers the rate and the next step
@pytest.mark.parametrize("stop", [3, 5, 6, 7, 10])
def test_a_run_that_was_stopped_ends_bit_equal(stop: int, whole: Any, tmp_path: Path) -> None:
    build(tmp_path / "run", stop_after=f"{stop} steps").train()
    build(tmp_path / "run").train()
    assert outcome(tmp_path / "run") == whole


def leave_run(run: sf.Run) -> None:
    for step in run:
        if step.index == 5:
            break


def leave_own_loop(run: sf.Run) -> None:
    for step in run.steps():
        sf.forward_backward(step)
        sf.update(step)
        if step.index == 5:
            break


@pytest.mark.parametrize("leave_at_evaluation", [leave_run, leave_own_loop])
def test_a_loop_left_by_break_at_an_evaluation_ends_bit_equal(
    leave_at_evaluation: Callable[[sf.Run], None], whole: Any, tmp_path: Path
) -> None:
    with build(tmp_path / "run") as run:
        leave_at_evaluation(run)
    build(tmp_path / "run").train()

    assert outcome(tmp_path / "run") == whole


def test_an_evaluation_that_gave_way_to_a_signal_lowers_the_rate_at_the_resume(
    whole: Any, tmp_path: Path
) -> None:
    def interrupting(outputs: Any, targets: Any) -> sf.Mean:
        if run.state.step == 6:
            signal.raise_signal(signal.SIGTERM)
        return sf.Mean(0.0, 1)

    run = build(tmp_path / "run", splits=split(interrupting))
    with pytest.raises(SystemExit):
        run.train()
    assert run.state.lr_factor == 1.0
    build(tmp_path / "run").train()
    assert outcome(tmp_path / "run") == whole


@pytest.mark.fast("7")
@pytest.mark.parametrize("first", [6, 7])  # 7: evaluated too, but only because the run ends there
def test_a_run_made_longer_is_one_of_that_length(first: int, tmp_path: Path) -> None:
    plain = {"schedule": None, "save_every": "1 steps"}
    build(tmp_path / "whole", **plain).train()
    build(tmp_path / "longer", length=f"{first} steps", **plain).train()
    build(tmp_path / "longer", **plain).train()
    assert outcome(tmp_path / "longer")[:4] == outcome(tmp_path / "whole")[:4]


def another_split() -> dict[str, sf.Split]:
    data = small_runs.Augmented()
    return {"val": sf.Split((data.inputs + 1, data.labels), metrics=[same])}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            lambda: {"evaluate_every": "3 steps"},
            "plateau.evaluate_every was '2 steps', now '3 steps'",
        ),
        (
            lambda: {"plateau": ReduceLROnPlateau("min val/same", 3)},
            "plateau.patience was 2, now 3",
        ),
        (lambda: {"plateau": None}, "plateau.monitor was 'min val/same', now absent"),
        (lambda: {"splits": another_split()}, "plateau.scored"),
    ],
)
def test_what_would_change_a_decision_is_refused_at_resume(
    changes: Callable[[], dict[str, Any]], says: str, tmp_path: Path
) -> None:
    build(tmp_path / "run", stop_after="4 steps").train()
    with refused("settings-changed", sf.CheckpointError) as refusal:
        build(tmp_path / "run", **changes()).train()
    assert any(change.startswith(says) for change in refusal.value.fields["changes"])


def test_a_percentage_stays_the_steps_that_it_was_when_the_run_is_made_longer(
    tmp_path: Path,
) -> None:
    plain = {"schedule": None, "save_every": "1 steps", "evaluate_every": "25%"}
    build(tmp_path / "run", length="8 steps", **plain).train()
    build(tmp_path / "run", **plain).train()

    evaluated = [step for step, _ in sorted(written(tmp_path / "run", "eval", "lr_factor"))]
    assert evaluated == [2, 4, 6, 8, 10, 12]


# --- words ----------------------------------------------------------------------------------------


def test_a_reduction_is_told_in_one_line_and_in_the_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(
        tmp_path / "run",
        console=True,
        plateau=ReduceLROnPlateau("min val/same", 2, min_lr_ratio=0.3),
    ).train()

    printed, _, ending = capsys.readouterr().out.partition("finished: ")
    first, second = [line for line in printed.splitlines() if line.startswith("learning rate")]
    # evaluations, times the schedule, from this step on; before them, what it was multiplied by
    assert numbers_in(first) == [2, 0.5, 6]
    assert numbers_in(second) == [0.6, 2, 0.3, 10]
    assert " val/same: " in first
    assert " val/same: " in second
    assert 0.3 in numbers_in(ending)
    assert dict(written(tmp_path / "run", "eval", "lr_factor"))[6] == 0.5


def test_a_resume_says_at_which_rate_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(tmp_path / "run", stop_after="7 steps").train()
    build(tmp_path / "run", console=True).train()

    printed = " ".join(capsys.readouterr().out.split())
    plan = printed.partition(" plan ")[2].partition(" update ")[0]
    assert numbers_in(plan)[-2:] == [7, 0.5]  # the step, times the schedule


def test_after_the_last_step_nothing_is_lowered_and_nothing_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # the second reduction would come after step 10
    run = build(None, console=True, length="10 steps")
    run.train()

    printed, _, ending = capsys.readouterr().out.partition("finished: ")
    (lowered,) = [line for line in printed.splitlines() if line.startswith("learning rate")]
    assert numbers_in(lowered)[-1] < 10
    assert 0.5 in numbers_in(ending)
    assert run.state.lr_factor == 0.5


def test_an_evaluation_that_ends_the_run_early_lowers_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = build(None, console=True, early_stopping=sf.EarlyStopping("min val/same", 4))
    run.train()
    assert "from step 10 on" not in capsys.readouterr().out
    assert (run.state.step, run.state.lr_factor) == (10, 0.5)


def test_a_score_that_is_no_number_is_told_each_time_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def nan_from_step_4(outputs: Any, targets: Any) -> sf.Mean:
        return sf.Mean(math.nan if run.state.step >= 4 else 1.0, 1)

    plateau = ReduceLROnPlateau("min val/nan_from_step_4", patience=2)
    run = build(None, splits=split(nan_from_step_4), plateau=plateau, console=True)
    run.train()

    printed = capsys.readouterr().out.splitlines()
    warnings = [line for line in printed if line.startswith("warning")]
    statements = [line.removeprefix("warning: ").partition(":")[0] for line in warnings]
    expected = []
    for count, step in enumerate((4, 6, 8, 10, 12), start=1):
        expected.append(f"val/nan_from_step_4 after step {step} is NaN ({count} so far)")
    assert statements == expected
    assert run.state.lr_factor == 1.0


def test_plan_says_that_rates_may_be_lower() -> None:
    *others, line = summary.learning_rates(build(None).parts)

    assert "val/same" in line
    assert numbers_in(line) == [0.5, 2, 0.01]  # factor, evaluations, the minimum
    assert len(summary.learning_rates(build(None, plateau=None).parts)) == len(others)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("patience", 0),
        ("factor", 1.0),
        ("factor", 0.0),
        ("min_lr_ratio", 1.0),
        ("cooldown", -1),
        ("min_delta", math.nan),
    ],
)
def test_numbers_that_cannot_be_are_refused(name: str, value: float) -> None:
    settings: dict[str, Any] = {"patience": 1, name: value}
    with refused("setting-out-of-range", setting=f"plateau.{name}", value=value):
        ReduceLROnPlateau("min val/loss", **settings)


def test_a_monitor_without_a_direction_is_refused() -> None:
    with refused("setting-out-of-range", setting="plateau.monitor", value="val/loss"):
        ReduceLROnPlateau("val/loss", 1)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(sf.ConfigError) as refusal:
        ReduceLROnPlateau("min val/loss", 0, 2.0, -1.0)
    names = [problem.fields["setting"] for problem in refusal.value.problems]
    assert names == ["plateau.patience", "plateau.factor", "plateau.min_lr_ratio"]


@pytest.mark.parametrize(
    ("changes", "code", "setting"),
    [
        ({"plateau": "min val/loss"}, "setting-out-of-range", "plateau"),
        ({"early_stopping": 3}, "setting-out-of-range", "early_stopping"),
        (
            {"early_stopping": sf.EarlyStopping("min val/same", 2)},
            "stopping-before-reduction",
            "early_stopping.patience",
        ),
    ],
)
def test_a_plateau_that_could_lower_no_rate_is_refused_before_the_run(
    changes: dict[str, Any], code: str, setting: str
) -> None:
    with refused(code, setting=setting):
        build(None, **changes)


def test_a_plateau_of_a_split_that_is_not_there_is_refused() -> None:
    with refused("score-unknown", setting="plateau.monitor"):
        build(None, plateau=ReduceLROnPlateau("min test/loss", 3))


@pytest.mark.parametrize(
    "stop", [sf.EarlyStopping("min val/same", 3), sf.EarlyStopping("min val/loss", 1)]
)
def test_early_stopping_of_another_score_or_more_patience_goes_with_it(
    stop: sf.EarlyStopping,
) -> None:
    run = build(None, early_stopping=stop)

    assert run.parts.run_state.feedback is not None


def test_a_score_that_is_not_taken_is_named_at_the_first_evaluation() -> None:
    scores = ["val/loss", "val/same"]
    with refused("score-unknown", setting="plateau.monitor", scores=scores):
        build(None, plateau=ReduceLROnPlateau("min val/sane", 2)).train()


def test_a_recipe_builds_the_plateau_of_its_score() -> None:
    config = images.Config(plateau=Plateau(patience=4, factor=0.2), run_dir=None)

    assert images.build(config).parts.run_state.feedback is not None
    assert config.steering(images.BEST) == {
        "best": images.BEST,
        "early_stopping": None,
        "plateau": ReduceLROnPlateau(images.BEST, 4, 0.2),
    }


def test_a_plateau_watches_the_score_that_its_recipe_names() -> None:
    config = images.Config(plateau=Plateau(patience=4))

    assert config.steering("max a/b")["plateau"] == ReduceLROnPlateau("max a/b", 4)


def test_flags_are_the_fields_of_the_objects_and_best_follows_the_monitor() -> None:
    flags = {
        "early_stopping.patience": 5,
        "early_stopping.monitor": "min val/loss",
        "early_stopping.min_delta": 0.25,
        "plateau.patience": 2,
        "plateau.factor": 0.1,
        "plateau.min_lr_ratio": 0.5,
        "plateau.cooldown": 3,
        "plateau.min_delta": 0.125,
    }
    config, _ = layered(images.Config, [("flag", flags)])
    assert config.steering("max val/accuracy") == {
        "best": "min val/loss",
        "early_stopping": sf.EarlyStopping("min val/loss", patience=5, min_delta=0.25),
        "plateau": ReduceLROnPlateau(
            "max val/accuracy",
            patience=2,
            factor=0.1,
            min_lr_ratio=0.5,
            cooldown=3,
            min_delta=0.125,
        ),
    }


@in_one
@pytest.mark.parametrize("direction", ["min", "max"])
@pytest.mark.parametrize("patience", [1, 3])
@pytest.mark.parametrize("min_delta", [0.0, 0.125])
def test_early_stopping_ends_where_keras_ends(
    direction: Any, patience: int, min_delta: float
) -> None:
    monitor = f"{direction} a/b"
    rule = sf.EarlyStopping(monitor, patience, min_delta)
    ends = set()
    for seed in range(20):
        scores = [score for score in walk(random.Random(seed)) if math.isfinite(score)]

        end = end_of_early_stopping(ScoreWatch(monitor, rule), scores)

        assert end == end_of_keras(direction, patience, min_delta, scores)
        ends.add(end)
    assert len(ends) > 1


def end_of_early_stopping(watch: ScoreWatch, scores: Sequence[float]) -> int | None:
    for step, score in enumerate(scores):
        is_better = watch.improved(step, score)
        if not is_better and watch.exhausted:
            return step
    return None


def end_of_keras(
    direction: str, patience: int, min_delta: float, scores: Sequence[float]
) -> int | None:
    """Where Keras 3 ends: EarlyStopping.on_epoch_end."""
    sign = 1.0 if direction == "min" else -1.0
    best = sign * math.inf
    wait = 0
    for step, score in enumerate(scores):
        wait += 1
        if sign * (best - score) > min_delta:
            best = score
            wait = 0
        elif wait >= patience:
            return step
    return None


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--plateau.patience", "0"], "[setting-out-of-range]"),
        (["--plateau.patience", "2", "--plateau.factor", "1.5"], "[setting-out-of-range]"),
        (["--plateau.factor", "0.5"], "[setting-without-patience]"),
        (
            ["--plateau.patience", "3", "--early-stopping.patience", "3"],
            "[stopping-before-reduction]",
        ),
    ],
)
def test_flags_that_make_no_plateau_are_refused(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "images", "--run-dir", str(tmp_path / "run"), *flags])
    assert end.value.code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@in_one
@pytest.mark.parametrize("plateau", range(1, 8))
@pytest.mark.parametrize("stop", range(1, 8))
def test_what_a_refusal_says_to_type_is_taken(plateau: int, stop: int) -> None:
    flags = {"plateau.patience": plateau, "early_stopping.patience": stop}
    config, _ = layered(images.Config, [("flag", flags)])
    if stop > plateau:
        config.steering(images.BEST)
        return
    with refused("stopping-before-reduction") as refusal:
        config.steering(images.BEST)

    for setting, _ in refusal.value.remedies:
        changed = flags | {setting.name: setting.value}
        config, _ = layered(images.Config, [("flag", changed)])
        config.steering(images.BEST)
