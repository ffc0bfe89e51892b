"""Schedules in pictures: the same bytes each time, marks where they belong, and nothing of
matplotlib left behind; 4 seconds.
"""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

import surefoot as sf
from surefoot.config.durations import Length
from surefoot.plan import schedule_plot
from surefoot.plan.schedule_plot import trace_schedules
from surefoot.report import figures
from surefoot.schedules.joined import Joined
from surefoot.schedules.lr_schedule import Schedule

SOME: dict[str, Schedule | Joined] = {
    "cosine": sf.schedules.cosine("5%"),
    "linear:min_lr_ratio=0.1": sf.schedules.linear("5%", min_lr_ratio=0.1),
    "a joined one": sf.schedules.join(sf.schedules.constant(3), sf.schedules.linear(), at="50%"),
}


def drawn(
    out: Path, schedules: dict[str, Schedule | Joined] | None = None, rate: float | None = None
) -> list[Path]:
    return sf.plan.plot_schedules(
        SOME if schedules is None else schedules, "200 steps", out=out, rate=rate
    )


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The picture of `SOME`, and that drawing it has changed nothing of matplotlib."""
    before = dict(mpl.rcParams)
    files = drawn(tmp_path_factory.mktemp("pictures") / "one")
    assert dict(mpl.rcParams) == before
    return files


@pytest.mark.slow
def test_the_same_schedules_give_the_same_bytes(one: list[Path], tmp_path: Path) -> None:
    other = drawn(tmp_path / "two" / "other.svg")
    assert [path.name for path in (*one, *other)] == [
        "one.png",
        "one.svg",
        "other.png",
        "other.svg",
    ]
    for first, second in zip(one, other, strict=True):
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    "number", [3, *(pytest.param(other, marks=pytest.mark.slow) for other in (1, 5))]
)
def test_a_picture_is_a_thousand_pixels_wide_and_not_empty(
    number: int, one: list[Path], tmp_path: Path
) -> None:
    schedules: dict[str, Schedule | Joined] = {
        f"linear {floor}": sf.schedules.linear(9, floor / 10) for floor in range(number)
    }
    with Image.open(
        (one if number == len(SOME) else drawn(tmp_path / "it", schedules))[0]
    ) as picture:
        assert picture.width == 1000
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 50


@pytest.mark.parametrize("rate", [None, 0.004])
def test_each_schedule_is_told_with_its_marks(
    rate: float | None, one: list[Path], tmp_path: Path
) -> None:
    text = (one if rate is None else drawn(tmp_path / "it", rate=rate))[1].read_text()
    told = re.findall(r">([^<>\n]+)</text>", text)
    unit = rate or 1.0
    for trace in trace_schedules(SOME, Length(steps=200, samples_per_epoch=1, batch_size=1)):
        (peak_step, peak), (lowest_step, lowest) = trace.peak, trace.lowest
        assert told.count(trace.name) == 2  # in the legend, and above its own field
        assert f"mean factor {trace.mean:.3f}, warm-up to {trace.warmup}" in told
        assert (
            f"peak {peak * unit:.3g} at {peak_step}, lowest {lowest * unit:.3g} at {lowest_step}"
            in told
        )
    assert ("learning rate (base 0.004)" in told) == (rate is not None)


def test_both_sides_of_a_jump_are_drawn_however_few_the_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule_plot, "_POINTS", 10)
    (trace,) = trace_schedules(
        {"step": sf.schedules.multistep(50)},
        Length(steps=100_000, samples_per_epoch=1, batch_size=1),
    )
    (chart,) = schedule_plot.charts([trace], rate=1.0)
    points = dict(chart.lines[0].points)
    assert {50, 49_999, 50_000, 74_999, 75_000, 99_999} <= points.keys()
    assert len(points) < 80
    assert max(points.values()) == 1.0


def test_no_two_of_many_curves_look_alike() -> None:
    length = Length(steps=10, samples_per_epoch=1, batch_size=1)
    together = schedule_plot.charts(
        trace_schedules({f"{place}": sf.schedules.linear() for place in range(35)}, length),
        rate=1.0,
    )[0]
    styles = {line.series % (len(figures.COLORS) * len(figures.DASHES)) for line in together.lines}
    assert len(styles) == 35


def linear_light(colour: str) -> np.ndarray:
    """sRGB to linear light: IEC 61966-2-1."""
    channels = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


# what someone without cones of one kind sees: Machado et al. 2009, table 1, severity 1
BLIND = {
    "none": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}


@pytest.mark.parametrize("kind", BLIND)
def test_colours_next_to_each_other_are_told_apart_without_one_kind_of_cones(kind: str) -> None:
    colours = [BLIND[kind] @ linear_light(colour) for colour in figures.COLORS]
    assert min(np.linalg.norm(one - other) for one, other in pairwise(colours)) > 0.1
    white = BLIND[kind] @ np.ones(3)
    assert min(np.linalg.norm(white - one) for one in colours) > 0.4


def test_no_window_system_is_asked_for_and_importing_surefoot_imports_no_matplotlib(
    tmp_path: Path,
) -> None:
    code = f"""
import sys
import surefoot as sf
assert "matplotlib" not in sys.modules
sf.plan.plot_schedules({{"linear": sf.schedules.linear()}}, "10 steps", out={str(tmp_path / "it")!r})
assert "matplotlib.pyplot" not in sys.modules
assert "torch" not in sys.modules
"""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("schedules", "length", "out", "says"),
    [
        ({}, "10 steps", "it", "plot-without-schedules"),
        (SOME, "2 epochs", "it", "epochs-without-data"),
        ({"late": sf.schedules.constant(10)}, "10 steps", "it", "late: schedule.warmup = 10 steps"),
        ({"flat": sf.schedules.constant()}, "10 steps", "file/it", "choose another path"),
        ({"flat": sf.schedules.constant()}, "10 steps", "", "path-empty"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    schedules: dict[str, Schedule | Joined],
    length: str,
    out: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    with pytest.raises(sf.ConfigError, match=says):
        sf.plan.plot_schedules(schedules, length, out=out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
