"""A saved run in a notebook's cell: it shows itself, its chart is that of the page, and nothing of
its author runs; 1 second.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import surefoot as sf
from pages import Elements
from surefoot.tools.report.write import page_of
from written_runs import HOSTILE, falling, scores, train, written


def html_of(path: Path) -> str:
    html = sf.load(path)._repr_html_()
    assert html is not None
    return html


def frame(html: str) -> str:
    """The page in the frame of a cell."""
    (iframe,) = Elements(html).with_tag("iframe")
    assert iframe["sandbox"] in (None, "")  # no script, form, popup or access to the notebook
    assert "src" not in iframe
    page = iframe["srcdoc"]
    assert page is not None
    return page


def write_finished(path: Path, *, steps: int = 600) -> Path:
    return written(path, [*falling(steps), {"kind": "event", "step": steps, "event": "finished"}])


def test_a_run_shows_its_course_its_figures_and_its_chart(tmp_path: Path) -> None:
    html = html_of(write_finished(tmp_path / "mine"))
    text = "".join(Elements(html).text)
    assert "mine finished: 600 steps; val/loss fell from 2.6576 to 1.1996" in " ".join(text.split())
    assert re.findall(r"<th>(.*?)</th>", html)[:3] == ["val/loss", "training loss", "steps"]
    assert "Loss" in "".join(Elements(frame(html)).text)


def test_the_chart_is_that_of_the_report(tmp_path: Path) -> None:
    run = write_finished(tmp_path / "mine")
    figure = re.compile(r'<figure class="card wide" id="loss">.*?</figure>', re.DOTALL)
    (chart,) = figure.findall(frame(html_of(run)))
    assert figure.findall(page_of([run])) == [chart]
    assert chart.count("<path ") >= 3


def test_the_style_of_the_chart_does_not_reach_the_notebook(tmp_path: Path) -> None:
    html = html_of(write_finished(tmp_path / "mine"))
    tags = {tag for tag, _ in Elements(html).elements}
    table = {"table", "thead", "tbody", "tr", "th", "td"}
    assert tags <= table | {"div", "p", "b", "br", "small", "iframe"}


def test_a_long_run_stays_small_in_a_notebook(tmp_path: Path) -> None:
    assert len(html_of(write_finished(tmp_path / "mine", steps=60_000))) < 50_000


def hostile_records(text: str) -> list[dict[str, Any]]:
    values = scores(10, loss=1.0) | {f"{text}/loss": 2.0, f"val/{text}": 0.5}
    return [
        train(10, **{text: 1.0}),
        values,
        {"kind": "event", "step": 10, "event": f"failed: {text}"},
    ]


@pytest.mark.parametrize(
    "text", [HOSTILE, "<script>alert(1)</script>", "'\"></iframe><script>alert(1)</script>"]
)
def test_nothing_of_a_hostile_run_becomes_markup(text: str, tmp_path: Path) -> None:
    config = 'length = "20 steps"\n'
    harmless = written(tmp_path / "name", hostile_records("name"), config=config)
    directory = tmp_path / "<img src=x onerror=alert(1)>"
    hostile = written(directory, hostile_records(text), config=config)

    html = html_of(hostile)

    assert markup(html) == markup(html_of(harmless))
    page = Elements(frame(html))
    assert markup(frame(html)) == markup(frame(html_of(harmless)))
    assert page.with_tag("script") == []
    (policy,) = [meta for meta in page.with_tag("meta") if "http-equiv" in meta]
    assert str(policy["content"]).startswith("default-src 'none';")
    assert "alert(1)" in "".join(Elements(html).text)  # the name of the directory is text


def markup(html: str) -> list[tuple[str, list[str]]]:
    """The tags of a page, and the names of their attributes."""
    return [(tag, sorted(attributes)) for tag, attributes in Elements(html).elements]


def test_a_directory_without_a_run_has_its_sentence_instead(tmp_path: Path) -> None:
    run = sf.load(tmp_path / "missing")
    assert run._repr_html_() is None
    assert repr(run) == f"SavedRun({run.path}: no run {run.path})"


def test_a_run_without_records_says_so(tmp_path: Path) -> None:
    html = html_of(written(tmp_path / "empty", []))
    assert "nothing was recorded" in html
    assert "<iframe" not in html
