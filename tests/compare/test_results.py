"""From records to rows, notes, tables and a picture. (5 s)"""

from __future__ import annotations

import io
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import surefoot as sf
from refused import refused
from stated import numbers_in
from surefoot.tools.compare import runner
from surefoot.tools.compare.presentation import as_json, charts, markdown, text, tsv
from surefoot.tools.compare.results import (
    EQUAL_BITS,
    INSIDE_NOISE,
    NO_SPREAD,
    ONE_SEED,
    compared,
)
from surefoot.tools.compare.runner import Board, ComparisonSession, Lines, VariantsInOrder
from surefoot.tools.compare.trained import Compared, Trained, read_run
from surefoot.tools.compare.trials import Trial, TrialProgress, Trials
from surefoot.tools.compare.variants import Variant
from surefoot.tools.report.charts import Chart
from surefoot.tools.report.figures import picture
from surefoot.tracking.jsonl import line
from surefoot.tracking.run_directory import RunDirectory

ORDER = {"seed": 0, "batch_size": 8, "data": "same", "precision": "fp32", "weights": "same"}
SCORES = [(10, 2.0), (20, 1.0), (30, 1.5)]


def trained(scores: Any = SCORES, **changes: Any) -> Trained:
    settings: dict[str, Any] = {
        "settings": {},
        "watch": ("min", "val/loss"),
        "loss": [(step, score + 0.1) for step, score in scores],
        "scores": scores,
        "times": [(10, 1.0), (20, 2.0), (30, 4.0)],
        "targets": 400.0,
        "order": ORDER,
    }
    return Trained(**(settings | changes))


def batches(*means: float) -> dict[str, Any]:
    counts = [2.0] * len(means)
    return {"split": {"sha256": "x"}, "counts": counts, "best": {"step": 20, "means": list(means)}}


def variant(name: str, group: str = "", **settings: Any) -> Variant:
    varied = {setting: value for setting, value in settings.items() if setting != "seed"}
    return Variant(name, group or name, varied or {"optimizer.lr": 0.1}, settings)


def run(
    name: str, scores: Any = SCORES, found: dict[str, Any] | None = None, **changes: Any
) -> Compared:
    return Compared(variant(name), trained(scores, **changes), batches=found)


def test_best_final_and_time_to_the_target_are_those_of_the_records() -> None:
    row = compared([run("lr=1")], target=1.2).rows[0]
    assert (row.best, row.best_step, row.final) == (1.0, 20, 1.5)
    assert (row.target_step, row.target_s) == (20, 2.0)
    assert (row.training_s, row.targets_per_s) == (4.0, 100.0)


def test_higher_is_better_where_the_run_says_so() -> None:
    first = run("a", [(10, 0.5), (20, 0.9)], watch=("max", "val/accuracy"))
    second = run("b", [(10, 0.7), (20, 0.8)], watch=("max", "val/accuracy"))
    found = compared([second, first])
    assert [row.name for row in found.rows] == ["a", "b"]
    assert found.rows[0].target_step == 20  # 0.8, the best of the first given
    assert found.rows[0].verdict == "best"


def test_what_is_not_a_number_is_never_best() -> None:
    assert trained([(10, float("nan")), (20, 3.0)]).best == (20, 3.0)
    assert trained([(10, float("nan"))]).best is None
    assert trained([(10, float("-inf")), (20, 3.0)]).best == (20, 3.0)
    assert trained([(10, float("-inf"))]).reached(1.0) is None


def test_a_small_difference_is_inside_the_noise_and_a_steady_one_is_not() -> None:
    runs = repeats({"steady": (1.5, 1.6, 1.5), "noisy": (0.7, 1.6, 1.2), "best": (1.0, 1.1, 1.05)})
    verdicts = {row.name: row.verdict for row in compared(runs).rows}
    assert verdicts == {"best": "best", "steady": "worse", "noisy": INSIDE_NOISE}
    named = {row.name: row.verdict for row in compared(runs, baseline="steady").rows}
    assert named == {"steady": "baseline", "best": "better", "noisy": INSIDE_NOISE}


def test_all_pairs_count_where_the_reference_was_chosen_by_looking() -> None:
    runs = repeats({"a": (1.0, 1.2, 1.1), "b": (1.3, 1.6, 1.4), "c": (1.5, 1.8, 1.7)})
    chosen = {row.name: row.p for row in compared(runs).rows}
    named = {row.name: row.p for row in compared(runs, baseline="a").rows}
    assert chosen["b"] > named["b"] > 0  # type: ignore[operator]


def test_one_seed_is_never_tested_however_large_the_difference() -> None:
    steady = run("steady", found=batches(1.1, 2.1, 3.11, 4.1, 5.09))
    best = run("best", [(10, 0.9)], found=batches(1.0, 2.0, 3.0, 4.0, 5.0))
    bare = run("bare", [(10, 9.0)])
    several = repeats({"several": (7.0, 7.1, 7.2)})
    for baseline in ("best", "steady"):
        rows = {row.name: row for row in compared([steady, best, bare], baseline=baseline).rows}
        rows.pop(baseline)
        assert {row.verdict for row in rows.values()} == {ONE_SEED}
        assert {row.p for row in rows.values()} == {None}
    beside = {row.name: row.verdict for row in compared([best, *several]).rows}
    assert beside == {"best": "best", "several": ONE_SEED}
    recommended = text(compared([steady, best])).splitlines()[-1]
    assert recommended.endswith(f": --optimizer.lr 0.1 ({ONE_SEED})")


def test_a_repeat_that_failed_leaves_one_seed() -> None:
    runs = repeats({"a": (1.0, 1.2), "b": (5.0, 5.1)}, failed=("b", 1))
    assert {row.name: row.verdict for row in compared(runs).rows}["b"] == ONE_SEED


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("direction", ["min", "max"])
def test_equal_scores_are_a_tie_and_nothing_is_recommended(seeds: int, direction: str) -> None:
    runs = repeats({"a": (0.0,) * seeds, "b": (0.0,) * seeds, "c": (0.0,) * seeds})
    runs = [replace(each, trained=replace(each.trained, watch=(direction, "x/y"))) for each in runs]
    assert [row.verdict for row in compared(runs).rows] == ["tie"] * 3
    told = text(compared(runs))
    assert "--optimizer.lr" not in told
    assert "tie: a, b, c " in told
    named = [row.verdict for row in compared(runs, baseline="b").rows]
    assert named == ["tie", "baseline", "tie"]


def test_a_tie_of_the_first_two_is_no_tie_of_the_third() -> None:
    runs = repeats({"a": (1.0, 2.0, 3.0), "b": (3.0, 2.0, 1.0), "c": (90.0, 91.0, 92.5)})
    verdicts = {row.name: row.verdict for row in compared(runs).rows}
    assert verdicts == {"a": "tie", "b": "tie", "c": "worse"}


def test_seeds_without_spread_are_no_test() -> None:
    """Three equal accuracies of few samples say nothing of a fourth."""
    rows = compared(repeats({"a": (0.9, 0.9, 0.9), "b": (0.91, 0.91, 0.91)})).rows
    assert (rows[1].verdict, rows[1].p) == (NO_SPREAD, None)


def test_batches_that_are_not_finite_leave_the_error_of_seeds() -> None:
    scores = {"a": (1.0, 1.2, 1.1), "b": (1.5, 1.8, 1.6)}
    runs = evaluated(scores, a=batches(1.0, float("nan")), b=batches(1.0, 2.0))
    assert compared(runs).rows[1].verdict == compared(repeats(scores)).rows[1].verdict == "worse"


def evaluated(scores: dict[str, tuple[float, ...]], **found: Any) -> list[Compared]:
    return [replace(each, batches=found[each.variant.group]) for each in repeats(scores)]


def test_with_seeds_the_error_also_covers_the_evaluation_data() -> None:
    """The two variances add, each in its closed form; so do the degrees of freedom."""
    scores = {"a": (1.0, 1.2, 1.1), "b": (1.5, 1.8, 1.6)}
    means = {"a": [1.0, 2.0, 3.0, 4.0], "b": [1.1, 2.5, 3.1, 4.7]}
    of_data = [0.1, 0.5, 0.1, 0.7]
    parts = [*scores.values(), of_data]
    variances = [float(np.var(each, ddof=1)) / len(each) for each in parts]
    runs = evaluated(scores, a=batches(*means["a"]), b=batches(*means["b"]))
    found = next(row for row in compared(runs).rows if row.name == "b").difference
    assert found is not None
    assert found.mean == pytest.approx(1.6 / 3)
    assert found.standard_error == pytest.approx(sum(variances) ** 0.5)
    seeds = sum(variances[:2])
    data = variances[2]
    of_seeds = int(seeds**2 / sum(each**2 / 2 for each in variances[:2]))
    assert found.freedom == int((seeds + data) ** 2 / (seeds**2 / of_seeds + data**2 / 3))


def test_a_score_of_the_whole_split_has_the_error_of_its_draws() -> None:
    draws = {"a": [0.5, 0.7, 0.6], "b": [0.3, 0.4, 0.1]}
    found = {
        name: batches() | {"counts": [2.0] * 40, "best": {"step": 10, "resampled": values}}
        for name, values in draws.items()
    }
    scores = {"a": (0.6, 0.62, 0.61), "b": (0.3, 0.29, 0.32)}
    rows = {row.name: row for row in compared(evaluated(scores, **found)).rows}
    difference = rows["a"].difference
    assert difference is not None
    of_seeds = sum(float(np.var(values, ddof=1)) / 3 for values in scores.values())
    of_draws = float(np.var([0.2, 0.3, 0.5], ddof=1))
    assert difference.standard_error == pytest.approx((of_seeds + of_draws) ** 0.5)


def test_means_and_draws_are_not_paired() -> None:
    drawn = batches(1.0, 2.0) | {"best": {"step": 10, "resampled": [1.0, 2.0]}}
    found = compared([run("a", found=batches(1.0, 2.0)), run("b", found=drawn)])
    assert all(row.difference is None for row in found.rows)


def test_five_shared_seeds_are_paired() -> None:
    one = (1.0, 2.0, 3.0, 4.0, 5.0)
    other = (1.1, 2.2, 3.1, 4.3, 5.1)
    row = next(row for row in compared(repeats({"a": one, "b": other})).rows if row.name == "b")
    assert row.difference is not None
    error = np.std(np.subtract(other, one), ddof=1) / 5**0.5
    assert (row.difference.standard_error, row.difference.freedom) == (pytest.approx(error), 4)
    assert row.verdict == "worse"


def test_seeds_that_are_not_shared_are_compared_without_pairs() -> None:
    runs = repeats({"a": (1.0, 1.2, 1.1)})
    others = repeats({"b": (9.0, 9.0, 9.0, 1.5, 1.8, 1.6)})[3:]  # of the seeds 3, 4 and 5
    row = next(row for row in compared([*runs, *others]).rows if row.name == "b")
    assert row.difference is not None
    error = (np.var([1.0, 1.2, 1.1], ddof=1) / 3 + np.var([1.5, 1.8, 1.6], ddof=1) / 3) ** 0.5
    assert row.difference.standard_error == pytest.approx(error)
    assert row.verdict == "worse"


def test_the_sign_is_that_of_the_row_minus_the_reference() -> None:
    one = run("one", [(10, 2.0)], batches(2.0, 3.0))
    other = run("other", [(10, 1.0)], batches(1.0, 2.5))
    rows = {row.name: row for row in compared([one, other]).rows}
    assert rows["one"].difference is not None
    assert rows["one"].difference.mean == 0.75
    turned = {row.name: row for row in compared([other, one], baseline="one").rows}
    assert turned["other"].difference is not None
    assert turned["other"].difference.mean == -0.75


def test_other_evaluation_data_are_not_paired_and_it_is_said_why() -> None:
    other = batches(1.0, 2.0) | {"split": {"sha256": "y"}}
    found = compared([run("a", found=batches(1.0, 2.0)), run("b", found=other)])
    assert all(row.difference is None for row in found.rows)
    same = compared([run("a", found=batches(1.0, 2.0)), run("b", found=batches(1.0, 2.0))])
    assert len(set(found.notes) - set(same.notes)) == 1  # why
    (of_difference,) = set(same.notes) - set(found.notes)
    assert numbers_in(of_difference)[0] == 2  # batches


def test_with_repeats_the_noise_is_that_between_seeds() -> None:
    runs = [
        Compared(variant(f"{name},seed={seed}", name, seed=seed), trained([(10, score)]))
        for name, scores in {"a": (1.0, 1.2, 1.1), "b": (1.5, 1.8, 1.6)}.items()
        for seed, score in enumerate(scores)
    ]
    rows = {row.name: row for row in compared(runs).rows}
    assert rows["a"].best == pytest.approx(1.1)
    assert rows["a"].best_error == pytest.approx(0.1 / 3**0.5)
    assert rows["b"].difference is not None
    assert (rows["b"].difference.mean, rows["b"].difference.pairs) == (pytest.approx(1.6 / 3), 3)


def repeats(
    scores: dict[str, tuple[float, ...]], *, failed: tuple[str, int] | None = None
) -> list[Compared]:
    return [
        Compared(
            variant(f"{name},seed={seed}", name, seed=seed),
            trained([(10, score)], order=ORDER | {"seed": seed}),
            "failed" if (name, seed) == failed else "finished",
        )
        for name, held in scores.items()
        for seed, score in enumerate(held)
    ]


def test_half_a_run_is_no_repeat_of_a_whole_one() -> None:
    found = compared(repeats({"a": (1.0, 1.2, 9.0), "b": (1.5, 1.8, 1.6)}, failed=("a", 2)))
    row = next(row for row in found.rows if row.name == "a")
    assert (row.best, row.repeats) == (1.1, 3)
    assert "failed" in row.status.split()
    assert numbers_in(row.status) == [1, 3, 30]  # of how many repeats, and the step
    assert {each.difference.pairs for each in found.rows if each.difference is not None} == {2}
    assert any(" a " in note for note in found.notes)


def test_models_of_other_sizes_are_said_also_where_all_seeds_differ() -> None:
    one = run("a", order=ORDER | {"model_bytes": 400})
    other = run("b", order=ORDER | {"model_bytes": 900, "seed": 1})
    notes = [numbers_in(note) for note in compared([one, other]).notes]
    assert notes.count([0, 400, 900]) == 1
    assert not [note for note in compared([one, one]).notes if 400 in numbers_in(note)]


def test_nothing_is_shared_where_there_are_no_two_to_share_it() -> None:
    assert not any("shared" in note for note in compared(repeats({"a": (1.0, 1.2)})).notes)


def test_what_a_run_began_with_is_not_known_without_its_first_checkpoint() -> None:
    notes = compared([run("a"), run("b"), run("c", order=None)]).notes
    (unknown,) = [note for note in notes if " c, " in note]
    assert numbers_in(unknown) == [0]


def test_a_table_shows_what_differs_and_files_have_the_names_of_directories_too() -> None:
    shared = {"schedule.name": "constant", "model.layers": 4}
    variants = [
        Variant(
            name := f"name=constant,layers=4,lr={lr}",
            name,
            held := {**shared, "optimizer.lr": lr},
            held,
        )
        for lr in (0.1, 0.2)
    ]
    found = compared([Compared(each, trained()) for each in variants], baseline="lr=0.2")
    assert "layers" not in text(found)
    assert any(line.startswith("lr=0.1 ") for line in text(found).splitlines())
    assert {row["variant"] for row in json.loads(as_json(found))["variants"]} == {
        each.name for each in variants
    }
    assert compared(found.runs, baseline=variants[1].name).rows == found.rows


@pytest.mark.parametrize(
    ("changes", "unlike", "alike"),
    [
        ({"order": ORDER | {"weights": "other"}}, ["weights"], ["order"]),
        ({"order": ORDER | {"seed": 1, "data": "b"}}, ["order", "seed", "data"], ["weights"]),
        ({"order": ORDER | {"precision": "bf16"}}, ["precision"], ["weights", "order"]),
    ],
)
def test_what_is_not_shared_is_said(
    changes: dict[str, Any], unlike: list[str], alike: list[str]
) -> None:
    notes = compared([run("a"), run("b", **changes)]).notes
    assert words_of("not shared", notes) == set(unlike)
    assert words_of("shared", notes) == set(alike)


def words_of(label: str, notes: Sequence[str]) -> set[str]:
    """Which of the things that two runs may share are in the only note with a label."""
    (note,) = [note.removeprefix(f"{label}: ") for note in notes if note.startswith(f"{label}: ")]
    return set(re.findall(r"weights|order|precision|seed|batch_size|data", note))


def test_runs_judged_by_different_scores_are_not_compared() -> None:
    with refused("runs-ranked-by-different-scores"):
        compared([run("a"), run("b", watch=("max", "val/accuracy"))])


def test_an_unknown_reference_is_refused() -> None:
    with refused("baseline-unknown", value="z"):
        compared([run("a")], baseline="z")


def test_a_run_without_records_is_a_row_without_numbers(tmp_path: Path) -> None:
    empty = Compared(variant("lr=9"), read_run(tmp_path), "failed", "killed")
    found = compared([run("lr=1"), empty])
    assert found.rows[-1].best is None
    assert "lr=9: killed" in text(found)


def test_records_that_a_resume_superseded_are_no_part_of_a_curve(tmp_path: Path) -> None:
    lines = [
        {
            "kind": "train",
            "step": 5,
            "loss": 3.0,
            "targets": 10,
            "training_s": 1.0,
            "data_wait_s": 0.5,
        },
        {
            "kind": "train",
            "step": 10,
            "loss": 9.0,
            "targets": 10,
            "training_s": 1.0,
            "data_wait_s": 0.5,
        },
        {"kind": "eval", "step": 10, "val/loss": 9.0},
        {"kind": "resume", "step": 5},
        {
            "kind": "train",
            "step": 10,
            "loss": 2.0,
            "targets": 10,
            "training_s": 2.0,
            "data_wait_s": 0.0,
        },
        {"kind": "eval", "step": 10, "val/loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(line(each) + "\n" for each in lines))
    found = read_run(tmp_path)
    assert found.loss == [(5, 3.0), (10, 2.0)]
    assert found.scores == [(10, 1.0)]
    assert (found.training_s, found.targets) == (3.5, 20.0)
    assert found.watch == ("min", "val/loss")
    with refused("score-missing", available={"val/loss": 1.0}):
        read_run(tmp_path, metric="max val/accuracy")


def test_every_form_of_the_table_holds_the_same_numbers(tmp_path: Path) -> None:
    found = compared(
        [
            run("lr=1", found=batches(1.0, 2.0, 4.0)),
            run("lr=2|", [(10, 3.0)], batches(3.0, 4.5, 5.0)),
        ]
    )
    held = json.loads(as_json(found))
    assert held["variants"][1]["best"] == 3.0
    lines = [row.split("\t") for row in tsv(found).splitlines()]
    assert lines[2][lines[0].index("best")] == "3"
    assert "| lr=2\\| |" in markdown(found)
    assert "val/loss: lower is better" in text(found)
    assert (
        json.loads(as_json(compared([run("a", [(10, float("inf"))])])))["variants"][0]["best"]
        is None
    )


def test_the_same_comparison_gives_the_same_picture() -> None:
    found = compared([run(f"lr={place}") for place in range(9)] + [run("none", [])])
    svg = picture(charts(found), title="")
    assert svg == picture(charts(found), title="")
    assert all(f">lr={place}<" in svg for place in range(9))


def test_a_score_that_is_no_loss_has_a_field_of_its_own() -> None:
    drawn = charts(compared([run("a", watch=("max", "val/accuracy"))]))
    assert [chart.title for chart in drawn] == ["training loss", "val/accuracy"]


def names(chart: Chart) -> list[str]:
    """As they stand in the legend."""
    return [line.name for line in chart.lines if line.named]


def test_every_score_is_in_the_picture_and_what_is_too_far_away_is_said() -> None:
    early = run("lr=1", [(1, 5.0), (50, 2.0), (100, 1.0)])
    far = Compared(variant("lr=9"), trained([(1, 5.0), (50, 1e6), (100, 1e9)]), "diverged")
    (chart,) = charts(compared([early, far, run("lr=2", [(1, 1e9)])]))
    assert chart.within is not None
    low, high = chart.within
    assert low < 1.0
    assert 5.0 < high < 50.0
    whole, partly, outside = names(chart)
    assert whole == "lr=1"
    assert partly.startswith("lr=9 (diverged ")
    assert numbers_in(partly)[-1] == 100  # the last step
    assert outside.startswith("lr=2 (")
    ends = [name.rpartition(", ")[2] for name in (partly, outside)]
    assert ends[0] != ends[1]  # partly off the scale, and wholly


def test_of_many_variants_the_best_twelve_are_named_and_the_rest_are_counted() -> None:
    for count, more in ((12, ""), (13, "1"), (15, "3")):
        runs = [run(f"lr={place}", [(1, 1.0 + place / 100)]) for place in range(count)]
        (chart,) = charts(compared(runs))
        assert names(chart) == [f"lr={place}" for place in range(12)]
        assert chart.note.partition(" ")[0] == more


def test_a_field_is_called_what_is_on_it_and_a_trial_by_its_settings() -> None:
    trial = Compared(
        variant("trial-003", **{"optimizer.lr": 0.0123456, "optimizer.name": "sgd"}),
        trained(loss=[]),
    )
    (chart,) = charts(compared([trial]))
    assert names(chart) == ["trial-003: lr=0.0123, name=sgd"]
    assert chart.title == "val/loss"
    (chart,) = charts(compared([run("a")]))
    assert chart.title == "training loss (lines), val/loss (points)"


def test_plain_lines_come_at_most_every_ten_seconds_for_each_variant() -> None:
    stream = io.StringIO()
    clock = [0.0]
    lines = Lines(stream, now=lambda: clock[0])
    for step in range(1, 30):
        clock[0] += 1.0
        lines.show({"a": TrialProgress(step=step, steps=30, loss=2.0), "b": TrialProgress()})
    assert stream.getvalue().splitlines() == [
        f"variant=a step={step}/30 loss=2" for step in (1, 11, 21)
    ]


def test_a_board_draws_its_lines_again_over_themselves() -> None:
    stream = io.StringIO()
    board = Board(stream, width=20)
    board.show({"a": TrialProgress(step=1), "bb": TrialProgress()})
    board.show({"a": TrialProgress(step=1), "bb": TrialProgress()})  # nothing new
    board.say("one has ended")
    board.close()
    assert stream.getvalue() == (
        "a   step=1\nbb  starting\n\x1b[2A\r\x1b[Jone has ended\na   step=1\nbb  starting\n\x1b[2A\r\x1b[J"
    )


def test_a_long_name_leaves_room_for_the_numbers() -> None:
    stream = io.StringIO()
    Board(stream, width=40).show(
        {"a-very-long-name-of-a-variant,lr=0.001": TrialProgress(step=7, loss=2.0)}
    )
    line, _, _ = stream.getvalue().partition("\n")
    assert line.endswith("lr=0.001  step=7  loss=2")
    assert len(line) <= 39


def test_the_time_that_is_left_is_of_what_is_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    chooser: Any = SimpleNamespace(total=6, over=4)
    session = ComparisonSession(
        chooser,
        Trials(RunDirectory(Path()), lambda name: [name], threads=1, cwd="."),
        jobs=1,
        score=None,
        screen=Lines(stream),
        stopping=lambda: False,
        labels={},
    )
    trial: Any = SimpleNamespace(started=90.0)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: 100.0))
    session._estimate(trial, eta_s=60.0)
    assert stream.getvalue().startswith("about 2m20s ")
    assert numbers_in(stream.getvalue()) == [2]  # runs that remain


def test_what_was_printed_below_a_board_is_not_drawn_over() -> None:
    stream = io.StringIO()
    board = Board(stream, width=40)
    board.show({"a": TrialProgress(step=1)})
    board.leave()
    board.show({"a": TrialProgress(step=2)})
    assert stream.getvalue() == "a  step=1\na  step=2\n"


def test_the_time_that_is_left_is_that_of_what_no_session_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text('{"status": "finished", "said": ""}')
    said = io.StringIO()
    process: Any = SimpleNamespace()
    trial = Trial("b", process, tmp_path / "b" / "metrics.jsonl", 0, fresh=True)
    session = ComparisonSession(
        VariantsInOrder("abcd", tmp_path),
        Trials(RunDirectory(tmp_path), lambda name: [name], threads=1, cwd="."),
        jobs=1,
        score=("min", "val/loss"),
        screen=Lines(said),
        stopping=lambda: False,
        labels={},
    )
    trial.started = 90.0
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: 100.0))
    session._estimate(trial, 90.0)
    assert said.getvalue().startswith("about 5m00s ")
    assert numbers_in(said.getvalue()) == [3]
    (tmp_path / "b" / "metrics.jsonl").write_text(
        '{"kind": "eval", "step": 1, "val/accuracy": 0.5}\n'
    )
    with refused("score-missing", run="b", available={"val/accuracy": 0.5}):
        session._look(trial)


def test_best_settings_name_what_is_no_worse_and_what_was_measured() -> None:
    runs = repeats({"lr=1": (1.0, 2.0, 3.0), "lr=2": (0.5, 2.9, 3.5)})
    told = text(compared(runs, settled={"precision": "bf16"})).splitlines()[-1]
    settings, _, remark = told.partition(" (")
    assert settings == "best settings: --optimizer.lr 0.1 --precision bf16"
    assert "lr=2" in remark


def test_the_size_of_the_batches_that_a_difference_is_over_is_said() -> None:
    found = compared(
        [run("a", found=batches(1.0, 2.0, 3.0)), run("b", found=batches(1.1, 2.3, 3.2))]
    )
    assert numbers_in(found.notes[1])[:3] == [3, 2, 6]  # batches, targets of each, and in all
    single = [
        batches(*values) | {"counts": [1.0] * 3} for values in ((1.0, 2.0, 3.0), (1.1, 2.3, 3.2))
    ]
    found = compared([run("a", found=single[0]), run("b", found=single[1])])
    assert numbers_in(found.notes[1])[:1] == [3]  # samples


def test_a_target_is_that_of_the_first_variant_that_has_a_score() -> None:
    found = compared([run("a", []), run("b")])
    assert found.notes[0].startswith("target: 1, ")
    assert " b, " in found.notes[0]
    assert " a, " in compared([run("a"), run("b")]).notes[0]


def test_a_value_has_the_digits_of_its_error_and_a_step_is_whole() -> None:
    found = compared(repeats({"a": (0.7573, 0.7773)}))
    assert "0.767 ± 0.010" in text(found)
    assert '"best_step": 10,' in as_json(found)


def test_records_are_read_as_they_come_and_never_in_part(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    process: Any = SimpleNamespace()
    trial = Trial("a", process, path, 0, fresh=True)
    assert trial.new_records() == []
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "tr')
    assert [record["step"] for record in trial.new_records()] == [1]
    path.write_text(
        '{"kind": "train", "step": 1}\n{"kind": "train", "step": 2, "nonfinite": {"loss": "nan"}}\n'
    )
    assert [record["step"] for record in trial.new_records()] == [2]


def renamed() -> nn.Module:
    return nn.Sequential(OrderedDict(into=nn.Linear(2, 3), act=nn.Tanh(), out=nn.Linear(3, 1)))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def small_run(place: Path, model: Callable[[], nn.Module], *, lr: float, **more: Any) -> Compared:
    """A run of one step, whose scores are equal for any rate: they are those of step 0."""
    data = torch.linspace(-1, 1, 16).reshape(8, 2), torch.linspace(0, 1, 8)[:, None]
    sf.Run(
        model=model,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        train_data=data,
        batch_size=4,
        optimizer=sf.optim.sgd(lr=lr),
        splits={"val": sf.Split(data, loss=False, metrics={"same": lambda *_: sf.Mean(1.0, 1)})},
        best="min val/same",
        evaluate_every="1 steps",
        run_dir=place,
        console=False,
        report=False,
        device="cpu",
        precision="fp32",
        **{"length": "1 steps"} | more,
    ).train()
    return Compared(variant(place.name), read_run(place))


def test_other_names_of_the_same_computation_are_equal_bits(tmp_path: Path) -> None:
    one = small_run(tmp_path / "one", plain, lr=0.1)
    other = small_run(tmp_path / "other", renamed, lr=0.1)
    rate = small_run(tmp_path / "rate", plain, lr=0.11)
    verdicts = {row.name: row.verdict for row in compared([one, other], baseline="one").rows}
    assert verdicts == {"one": "baseline", "other": EQUAL_BITS}
    verdicts = {row.name: row.verdict for row in compared([one, rate], baseline="one").rows}
    assert verdicts == {"one": "baseline", "rate": "tie"}
