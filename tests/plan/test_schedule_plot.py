"""Schedules in pictures: the same bytes each time, and marks where they belong; 2 seconds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import surefoot as sf
from refused import refused
from surefoot.config.durations import Length
from surefoot.config.extras import is_installed
from surefoot.schedules.joined import Joined
from surefoot.schedules.lr_schedule import Schedule
from surefoot.tools.plan import schedule_plot
from surefoot.tools.plan.schedule_plot import trace_schedules
from surefoot.tools.report.figures import RASTERIZER

SOME: dict[str, Schedule | Joined] = {
    "cosine": sf.schedules.cosine("5%"),
    "linear:min_lr_ratio=0.1": sf.schedules.linear("5%", min_lr_ratio=0.1),
    "a joined one": sf.schedules.join(sf.schedules.constant(3), sf.schedules.linear(), at="50%"),
}


def draw_some(out: Path, *, rate: float | None = None) -> list[Path]:
    return sf.plan.plot_schedules(SOME, "200 steps", out=out, rate=rate)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The picture of `SOME`."""
    return draw_some(tmp_path_factory.mktemp("pictures") / "one")


def test_the_same_schedules_give_the_same_bytes(one: list[Path], tmp_path: Path) -> None:
    other = draw_some(tmp_path / "two" / "other.svg")

    names = ["one.png", "one.svg", "other.png", "other.svg"]
    if not is_installed(RASTERIZER):
        names = ["one.svg", "other.svg"]
    assert [path.name for path in (*one, *other)] == names
    for first, second in zip(one, other, strict=True):
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("rate", [None, 0.004])
def test_each_schedule_is_told_with_its_marks(
    rate: float | None, one: list[Path], tmp_path: Path
) -> None:
    files = one if rate is None else draw_some(tmp_path / "it", rate=rate)
    texts = re.findall(r">([^<>\n]+)</text>", files[-1].read_text())
    unit = rate or 1.0

    for trace in trace_schedules(SOME, Length(steps=200, samples_per_epoch=1, batch_size=1)):
        peak_step, peak = trace.peak
        lowest_step, lowest = trace.lowest
        at_peak = f"peak {peak * unit:.3g} at {peak_step}"
        at_lowest = f"lowest {lowest * unit:.3g} at {lowest_step}"
        assert texts.count(trace.name) == 2  # in the legend, and above its own field
        assert f"mean factor {trace.mean:.3f}, warm-up to {trace.warmup}" in texts
        assert f"{at_peak}, {at_lowest}" in texts
    assert ("learning rate (base 0.004)" in texts) == (rate is not None)


def test_both_sides_of_a_jump_are_drawn_however_few_the_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule_plot, "_POINTS", 10)
    length = Length(steps=100_000, samples_per_epoch=1, batch_size=1)
    (trace,) = trace_schedules({"step": sf.schedules.multistep(50)}, length)

    (chart,) = schedule_plot.charts([trace], rate=1.0)
    points = dict(chart.lines[0].points)
    assert {50, 49_999, 50_000, 74_999, 75_000, 99_999} <= points.keys()
    assert len(points) < 80
    assert max(points.values()) == 1.0


def test_drawing_schedules_needs_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
import surefoot as sf
sf.plan.plot_schedules({{"linear": sf.schedules.linear()}}, "10 steps", out={str(tmp_path / "it")!r})
assert "torch" not in sys.modules
"""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""


def test_a_png_that_is_asked_for_by_name_needs_its_rasterizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.config.extras.is_installed", lambda module: False)
    with pytest.raises(sf.ConfigError):
        draw_some(tmp_path / "it.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("schedules", "length", "out", "code"),
    [
        ({}, "10 steps", "it", "plot-without-schedules"),
        (SOME, "2 epochs", "it", "epochs-without-data"),
        ({"late": sf.schedules.constant(10)}, "10 steps", "it", "schedule-warmup-too-long"),
        ({"flat": sf.schedules.constant()}, "10 steps", "file/it", "file-not-writable"),
        ({"flat": sf.schedules.constant()}, "10 steps", ".", "file-not-writable"),
        ({"flat": sf.schedules.constant()}, "10 steps", "", "path-empty"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    schedules: dict[str, Schedule | Joined],
    length: str,
    out: str,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    with refused(code):
        sf.plan.plot_schedules(schedules, length, out=out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
