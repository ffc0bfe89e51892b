"""Several runs on one page: overlaid curves, only the settings that differ, the best of each score; 2
seconds.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import Elements, titles
from surefoot.tools.report.series import read_reported_run
from surefoot.tools.report.several_runs import labels, page_values
from surefoot.tools.report.write import page_of
from written_runs import falling, scores, train, written


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("several")
    found = []
    for name, rate, loss in (("slow", 1e-4, 2.0), ("fast", 1e-3, 1.5), ("wild", 1e-1, 9.0)):
        told = [
            *falling(200),
            scores(190, loss=loss),
            scores(200, loss=loss + (name == "wild"), accuracy=0.5),
        ]
        config = f"out = '{name}' # flag\nseed = 3 # default\n[optimizer]\nlr = {rate} # flag\n"
        found.append(written(place / name, told, config=config))
    return found


def test_only_settings_that_differ_are_told(runs: list[Path]) -> None:
    held = page_values([read_reported_run(run) for run in runs], stretches=100)
    assert held["differing"] == [("optimizer.lr", ["0.0001", "0.001", "0.1"])]


def test_the_best_of_each_score_is_marked(runs: list[Path]) -> None:
    held = page_values([read_reported_run(run) for run in runs], stretches=100)
    place = held["metric_names"].index("val/loss")
    value, _, best = held["cells"][1][place]
    assert (value, best) == ("1.1996", True)
    assert re.search(r"\bslow\b.* val/loss", held["verdict"])


def test_every_run_has_a_line_in_every_chart_and_one_colour(runs: list[Path]) -> None:
    held = page_values([read_reported_run(run) for run in runs], stretches=100)
    assert [chart.name for chart in held["overlaid"]][:2] == ["loss", "metric-val/loss"]
    for chart in held["overlaid"]:
        assert [(line.name, line.series) for line in chart.lines] == [
            ("slow", 0),
            ("fast", 1),
            ("wild", 2),
        ]


def test_the_page_of_several_is_well_formed_and_asks_for_nothing(runs: list[Path]) -> None:
    page = page_of(runs)
    elements = Elements(page)
    assert titles(page) == ["Runs", "Settings that differ", "Curves"]
    assert not [tag for tag, _ in elements.elements if tag == "script"]
    assert "http" not in page.replace("http-equiv", "")


def test_more_runs_than_colours_differ_in_their_dashes(tmp_path: Path) -> None:
    several = [
        read_reported_run(written(tmp_path / f"run {n}", [train(1), train(2)])) for n in range(20)
    ]
    page = page_of([run.files.path for run in several])
    keys = re.findall(r'<svg class="key"[^>]*><path class="([^"]*)"', page)
    lines = {line.series for line in page_values(several, stretches=20)["overlaid"][0].lines}
    assert len(set(keys)) == len(lines) == 20


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    several = [
        read_reported_run(written(tmp_path / name / "run", [train(1)])) for name in ("a", "b")
    ]
    assert labels(several) == ["a/run", "b/run"]
    again = [read_reported_run(written(tmp_path / f"lr=1,width={n}", [train(1)])) for n in (8, 16)]
    assert labels(again) == ["width=8", "width=16"]
