"""Several runs on one page: overlaid curves, only the settings that differ, the best of each score; 2
seconds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pages import Elements, titles
from surefoot.tools.report.series import read_reported_run
from surefoot.tools.report.several_runs import labels, page_values
from surefoot.tools.report.write import page_of
from written_runs import falling, scores, train, written


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("several")
    runs = []
    for name, lr, losses in (
        ("slow", 1e-4, (2.0, 2.0)),
        ("fast", 1e-3, (1.5, 1.5)),
        ("wild", 1e-1, (9.0, 10.0)),
    ):
        before, last = losses
        records = [*falling(200), scores(190, loss=before), scores(200, loss=last, accuracy=0.5)]
        config = f"out = '{name}' # flag\nseed = 3 # default\n[optimizer]\nlr = {lr} # flag\n"
        runs.append(written(place / name, records, config=config))
    return runs


@pytest.fixture(scope="module")
def values(runs: list[Path]) -> dict[str, Any]:
    """What the page of the runs shows."""
    return page_values([read_reported_run(run) for run in runs], stretches=100)


def test_only_settings_that_differ_are_shown(values: dict[str, Any]) -> None:
    assert values["differing"] == [("optimizer.lr", ["0.0001", "0.001", "0.1"])]


def test_the_best_of_each_score_is_marked(values: dict[str, Any]) -> None:
    column = values["metric_names"].index("val/loss")
    _, fast, _ = values["cells"]
    score, _, is_best = fast[column]
    assert score == "1.1996"
    assert is_best
    assert re.search(r"\bslow\b.* val/loss", values["verdict"])


def test_every_run_has_a_line_in_every_chart_and_one_color(values: dict[str, Any]) -> None:
    assert [chart.name for chart in values["overlaid"]][:2] == ["loss", "metric-val/loss"]
    for chart in values["overlaid"]:
        series = {line.name: line.series for line in chart.lines}
        assert series == {"slow": 0, "fast": 1, "wild": 2}


def test_the_page_of_several_is_well_formed_and_asks_for_nothing(runs: list[Path]) -> None:
    page = page_of(runs)
    elements = Elements(page)
    assert titles(page) == ["Runs", "Settings that differ", "Curves"]
    assert elements.with_tag("script") == []
    assert "http" not in page.replace("http-equiv", "")


def test_more_runs_than_colors_differ_in_their_dashes(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"run {number}", [train(1), train(2)]) for number in range(20)]
    page = page_of(paths)
    keys = re.findall(r'<svg class="key"[^>]*><path class="([^"]*)"', page)
    assert len(set(keys)) == 20
    runs = [read_reported_run(path) for path in paths]
    first_chart, *_ = page_values(runs, stretches=20)["overlaid"]
    assert len({line.series for line in first_chart.lines}) == 20


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a/run", "b/run"], ["a/run", "b/run"]),
        (["lr=1,width=8", "lr=1,width=16"], ["width=8", "width=16"]),
    ],
)
def test_labels_of_runs_are_the_part_that_differs(
    names: list[str], expected: list[str], tmp_path: Path
) -> None:
    runs = [read_reported_run(written(tmp_path / name, [train(1)])) for name in names]
    assert labels(runs) == expected
