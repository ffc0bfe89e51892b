"""A comparison as text, as files and as a picture. (1 s)"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from compare.compared_runs import batches, repeats, run, trained, variant
from stated import numbers_in
from surefoot.tools.compare.presentation import as_json, charts, markdown, text, tsv
from surefoot.tools.compare.results import ONE_SEED, Comparison, compared
from surefoot.tools.compare.trained import Compared, read_run
from surefoot.tools.compare.variants import Variant
from surefoot.tools.report.charts import Chart
from surefoot.tools.report.figures import picture

# --- tables ---------------------------------------------------------------------------------------


@pytest.fixture
def two_variants() -> Comparison:
    first = run("lr=1", batches=batches(1.0, 2.0, 4.0))
    second = run("lr=2|", [(10, 3.0)], batches(3.0, 4.5, 5.0))
    return compared([first, second])


def test_json_has_the_numbers_of_the_table(two_variants: Comparison) -> None:
    assert json.loads(as_json(two_variants))["variants"][1]["best"] == 3.0


def test_columns_have_the_numbers_of_the_table(two_variants: Comparison) -> None:
    head, _, second = [row.split("\t") for row in tsv(two_variants).splitlines()]
    assert second[head.index("best")] == "3"


def test_markdown_has_the_names_of_the_table(two_variants: Comparison) -> None:
    assert "| lr=2\\| |" in markdown(two_variants)


def test_a_table_says_which_direction_is_better(two_variants: Comparison) -> None:
    assert "val/loss: lower is better" in text(two_variants)


def test_a_score_that_is_not_finite_is_null_in_json() -> None:
    comparison = compared([run("a", [(10, math.inf)])])
    assert json.loads(as_json(comparison))["variants"][0]["best"] is None


def test_a_table_says_what_a_failed_run_said(tmp_path: Path) -> None:
    failed = Compared(variant("lr=9"), read_run(tmp_path), "failed", "killed")
    assert "lr=9: killed" in text(compared([run("lr=1"), failed]))


def test_a_value_has_the_digits_of_its_error_and_a_step_is_whole() -> None:
    comparison = compared(repeats({"a": (0.7573, 0.7773)}))
    assert "0.767 ± 0.010" in text(comparison)
    assert '"best_step": 10,' in as_json(comparison)


def variants_of_rates(*rates: float) -> list[Compared]:
    """Two other settings are the same in all of them."""
    runs = []
    for lr in rates:
        name = f"name=constant,layers=4,lr={lr}"
        settings = {"schedule.name": "constant", "model.layers": 4, "optimizer.lr": lr}
        runs.append(Compared(Variant(name, name, settings, settings), trained()))
    return runs


def test_a_table_shows_what_differs_and_files_have_the_names_of_directories_too() -> None:
    runs = variants_of_rates(0.1, 0.2)
    comparison = compared(runs)

    table = text(comparison)
    in_json = [row["variant"] for row in json.loads(as_json(comparison))["variants"]]

    assert "layers" not in table
    assert any(line.startswith("lr=0.1 ") for line in table.splitlines())
    assert sorted(in_json) == [run.variant.name for run in runs]


def test_a_baseline_has_the_name_that_is_shown_or_that_of_its_directory() -> None:
    runs = variants_of_rates(0.1, 0.2)
    by_label = compared(runs, baseline="lr=0.2")
    by_name = compared(runs, baseline="name=constant,layers=4,lr=0.2")
    assert by_label.rows == by_name.rows


# --- best settings --------------------------------------------------------------------------------


def test_best_settings_of_one_seed_are_named_with_that_remark() -> None:
    other = run("other")
    best = run("best", [(10, 0.9)])
    last_line = text(compared([other, best])).splitlines()[-1]
    assert last_line.endswith(f": --optimizer.lr 0.1 ({ONE_SEED})")


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("direction", ["min", "max"])
def test_of_a_tie_nothing_is_recommended(seeds: int, direction: str) -> None:
    equal = (0.0,) * seeds
    runs = []
    for of_seed in repeats({"a": equal, "b": equal, "c": equal}):
        watching = replace(of_seed.trained, watch=(direction, "x/y"))
        runs.append(replace(of_seed, trained=watching))
    table = text(compared(runs))
    assert "--optimizer.lr" not in table
    assert "tie: a, b, c " in table


def test_best_settings_name_what_is_no_worse_and_what_was_measured() -> None:
    runs = repeats({"lr=1": (1.0, 2.0, 3.0), "lr=2": (0.5, 2.9, 3.5)})

    last_line = text(compared(runs, settled={"precision": "bf16"})).splitlines()[-1]

    settings, _, remark = last_line.partition(" (")
    assert settings == "best settings: --optimizer.lr 0.1 --precision bf16"
    assert "lr=2" in remark


# --- the picture ----------------------------------------------------------------------------------


def names(chart: Chart) -> list[str]:
    """As they stand in the legend."""
    return [line.name for line in chart.lines if line.named]


def test_the_same_comparison_gives_the_same_picture() -> None:
    runs = [run(f"lr={place}") for place in range(9)]
    comparison = compared([*runs, run("none", [])])

    svg = picture(charts(comparison), title="")

    assert svg == picture(charts(comparison), title="")
    for place in range(9):
        assert f">lr={place}<" in svg


def test_a_score_that_is_no_loss_has_a_field_of_its_own() -> None:
    fields = charts(compared([run("a", watch=("max", "val/accuracy"))]))
    assert [chart.title for chart in fields] == ["training loss", "val/accuracy"]


def test_every_score_is_in_the_picture_and_what_is_too_far_away_is_said() -> None:
    near = run("lr=1", [(1, 5.0), (50, 2.0), (100, 1.0)])
    rising = trained([(1, 5.0), (50, 1e6), (100, 1e9)])
    diverged = Compared(variant("lr=9"), rising, "diverged")
    far = run("lr=2", [(1, 1e9)])

    (chart,) = charts(compared([near, diverged, far]))

    assert chart.within is not None
    low, high = chart.within
    assert low < 1.0
    assert 5.0 < high < 50.0
    whole, partly_outside, outside = names(chart)
    assert whole == "lr=1"
    assert partly_outside.startswith("lr=9 (diverged ")
    assert numbers_in(partly_outside)[-1] == 100  # the last step
    assert outside.startswith("lr=2 (")
    assert partly_outside.rpartition(", ")[2] != outside.rpartition(", ")[2]


@pytest.mark.parametrize(("count", "further"), [(12, ""), (13, "1"), (15, "3")])
def test_of_many_variants_the_best_twelve_are_named_and_the_rest_are_counted(
    count: int, further: str
) -> None:
    runs = [run(f"lr={place}", [(1, 1.0 + place / 100)]) for place in range(count)]

    (chart,) = charts(compared(runs))

    assert names(chart) == [f"lr={place}" for place in range(12)]
    assert chart.note.partition(" ")[0] == further


def test_a_trial_is_called_by_its_settings() -> None:
    settings = {"optimizer.lr": 0.0123456, "optimizer.name": "sgd"}
    trial = Compared(variant("trial-003", **settings), trained())
    (chart,) = charts(compared([trial]))
    assert names(chart) == ["trial-003: lr=0.0123, name=sgd"]


def test_a_field_is_called_what_is_on_it() -> None:
    (of_scores,) = charts(compared([run("a", loss=[])]))
    assert of_scores.title == "val/loss"

    (of_both,) = charts(compared([run("a")]))
    assert of_both.title == "training loss (lines), val/loss (points)"
