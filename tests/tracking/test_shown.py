"""Texts, images and histograms of a loop reach TensorBoard and every tracker, as they were given."""

from __future__ import annotations

import json
import math
import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import surefoot as sf
from refused import refused
from surefoot.tracking.external import client
from surefoot.tracking.shown import image_in, record_of
from waiting import HANG_S

STEPS = 4
GRAY = torch.arange(20, dtype=torch.uint8).reshape(5, 4) * 12
COLORS = torch.stack([GRAY, 255 - GRAY, GRAY // 2])  # (C, H, W)
COLORS_HWC = COLORS.permute(1, 2, 0).numpy()
ALL_STEPS = list(range(1, STEPS + 1))


def build(run_dir: Path | None, **changes: Any) -> sf.Run:
    inputs = torch.linspace(-1, 1, 16).reshape(8, 2)
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 1),
        "loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        "train_data": (inputs, inputs.sum(1, keepdim=True)),
        "batch_size": 4,
        "length": f"{STEPS} steps",
        "log_every": "2 steps",
        "optimizer": sf.optim.sgd(lr=0.01),
        "device": "cpu",
        "console": False,
        "report": False,
        "tensorboard": False,
        "run_dir": run_dir,
    }
    return sf.Run(**(settings | changes))


def log_all_kinds(step: sf.Step) -> None:
    step.log_text(prompt=f"text {step.index} <&>")
    step.log_image(colors=COLORS, gray=GRAY.float() / 255)
    step.log_histogram(weights=step.state.model.weight, numbers=[1.0, 2.0, float("nan")])


def train(run: sf.Run) -> None:
    with run:
        for step in run:
            log_all_kinds(step)


def events_of(run_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sizes = {"images": 0, "scalars": 0, "histograms": 0, "tensors": 0}
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance=sizes)
    events.Reload()
    return events


def train_own_steps(run: sf.Run) -> None:
    with run:
        for step in run.steps():
            sf.forward_backward(step)
            sf.update(step)
            log_all_kinds(step)


@dataclass(frozen=True)
class Resumed:
    """A run of two sessions that has logged in each step: its weight and what TensorBoard reads."""

    run_dir: Path
    weight: torch.Tensor
    events: Any


@pytest.fixture(scope="module", params=[train, train_own_steps])
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    pytest.importorskip("tensorboard")
    run_dir = tmp_path_factory.mktemp("resumed") / "run"
    request.param(build(run_dir, tensorboard=True, stop_after="3 steps"))
    run = build(run_dir, tensorboard=True)
    request.param(run)
    return Resumed(run_dir, run.state.model.weight.detach().double(), events_of(run_dir))


def test_tensorboard_has_an_image_at_its_step_once_also_after_a_resume(resumed: Resumed) -> None:
    images = resumed.events.Images("images/colors")
    assert [event.step for event in images] == ALL_STEPS
    pixels = np.asarray(Image.open(BytesIO(images[-1].encoded_image_string)))
    assert np.array_equal(pixels, COLORS_HWC)


def test_tensorboard_has_a_text_at_its_step_once_also_after_a_resume(resumed: Resumed) -> None:
    texts = resumed.events.Tensors("texts/prompt/text_summary")
    assert [event.step for event in texts] == ALL_STEPS
    assert texts[1].tensor_proto.string_val[0] == b"text 1 <&>"


def test_tensorboard_has_a_histogram_at_its_step_once_also_after_a_resume(
    resumed: Resumed,
) -> None:
    histograms = resumed.events.Histograms("histograms/weights")
    assert [event.step for event in histograms] == ALL_STEPS
    assert {event.histogram_value.num for event in histograms} == {2.0}
    last = histograms[-1].histogram_value
    assert last.min == float(resumed.weight.min())
    assert last.max == float(resumed.weight.max())
    assert last.sum == pytest.approx(float(resumed.weight.sum()))
    assert sum(last.bucket) == 2


def test_what_is_shown_is_not_in_the_records_of_a_run(resumed: Resumed) -> None:
    kinds = {record["kind"] for record in sf.load(resumed.run_dir).records()}
    assert kinds.isdisjoint({"text", "image", "histogram"})


def train_with_tracker(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Train with a tracker, and return the directory of its files."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    for variable in list(os.environ):
        if variable.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(client, "CLOSING_S", HANG_S)
    run_dir = place / "poems" / "runs" / "first"
    train(build(run_dir, trackers=name, text_log=True))
    log = (run_dir / "trackers" / f"{name}.log").read_text()
    assert "WARNING" not in (run_dir / "log.txt").read_text(), log
    return run_dir / "trackers"


@pytest.mark.slow
def test_mlflow_has_them_as_artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = train_with_tracker("mlflow", tmp_path, monkeypatch)
    (artifacts,) = (files / "mlflow").glob("*/artifacts")
    assert (artifacts / "texts/prompt/step-00000002.txt").read_text() == "text 1 <&>"
    pixels = np.asarray(Image.open(artifacts / "images/colors/step-00000004.png"))
    assert np.array_equal(pixels, COLORS_HWC)
    histogram = json.loads((artifacts / "histograms/numbers/step-00000001.json").read_text())
    assert histogram["count"] == 2
    assert histogram["nonfinite_count"] == 1


@pytest.mark.slow
def test_trackio_has_them_in_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = train_with_tracker("trackio", tmp_path, monkeypatch)
    with closing(sqlite3.connect(files / "trackio" / "poems.db")) as store:
        rows = store.execute("select step, metrics from metrics order by step").fetchall()
    values_by_step: dict[str, dict[int, Any]] = {}
    for step, text in rows:
        for name, value in json.loads(text).items():
            steps = values_by_step.setdefault(name, {})
            assert step not in steps
            steps[step] = value

    texts = values_by_step["texts/prompt"]
    assert {step: text["_value"] for step, text in texts.items()} == {
        step: f"text {step - 1} <&>" for step in ALL_STEPS
    }
    assert list(values_by_step["images/colors"]) == ALL_STEPS
    assert sum(values_by_step["histograms/weights"][1]["values"]) == 2


@pytest.mark.slow
def test_wandb_has_them_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = train_with_tracker("wandb", tmp_path, monkeypatch)
    (run,) = files.glob("wandb/offline-run-*")
    pictures = list((run / "files/media/images/images").glob("colors_*.png"))
    texts = list((run / "files/media/html/texts").glob("prompt_*.html"))
    assert len(pictures) == STEPS
    assert len(texts) == STEPS
    assert np.array_equal(np.asarray(Image.open(pictures[0])), COLORS_HWC)
    (file,) = run.glob("*.wandb")
    assert b"histograms/weights" in file.read_bytes()


def test_of_two_ends_that_may_be_channels_a_tensor_has_the_first_and_an_array_the_last() -> None:
    zeros = torch.zeros(4, 6, 3)
    as_tensor = image_in(record_of("image", "a", zeros, step=1))
    as_array = image_in(record_of("image", "a", zeros.numpy(), step=1))
    assert as_tensor.size == (3, 6)
    assert as_tensor.mode == "RGBA"
    assert as_array.size == (6, 4)
    assert as_array.mode == "RGB"


GRAY_HW = GRAY.numpy()


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        pytest.param(COLORS, COLORS_HWC, id="(C, H, W) bytes"),
        pytest.param(COLORS.double() / 255, COLORS_HWC, id="(C, H, W) floats"),
        pytest.param((COLORS // 255).bfloat16(), COLORS_HWC // 255 * 255, id="bfloat16"),
        pytest.param(COLORS_HWC, COLORS_HWC, id="(H, W, C)"),
        pytest.param(GRAY, GRAY_HW, id="(H, W)"),
        pytest.param(GRAY[None], GRAY_HW, id="(1, H, W)"),
        pytest.param(COLORS.long(), COLORS_HWC, id="integers"),
        pytest.param(GRAY > 100, (GRAY_HW > 100) * 255, id="booleans"),
        pytest.param(Image.fromarray(GRAY_HW), GRAY_HW, id="PIL"),
    ],
)
def test_a_picture_has_the_pixels_that_it_was_given(image: Any, expected: np.ndarray) -> None:
    pixels = np.asarray(image_in(record_of("image", "a", image, step=1))).astype(int)
    assert np.array_equal(pixels, expected)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("image", torch.zeros(2, 3, 4, 5)),
        ("image", torch.zeros(5)),
        ("image", torch.zeros(0, 4)),
        ("image", torch.zeros(3, 4, 0)),
        ("image", Image.new("RGB", (0, 4))),
        ("image", "a path"),
        ("text", 3.0),
        ("histogram", "words"),
        ("histogram", object()),
    ],
)
def test_another_kind_of_value_is_refused(kind: Any, value: Any) -> None:
    with refused("not-to-be-shown", setting=kind, value="a"):
        record_of(kind, "a", value, step=1)


HUGE = 1.7e308


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [float("nan"), float("inf")],
        torch.full((3,), 2.0),
        [1e17, 1e17 + 16],  # as close as two of their size can be
        [1e17, 1e17],
        [-HUGE, HUGE],
        [HUGE, HUGE],
        [-HUGE, 0.0],
        [1e300, 1.0],
        [5e-324, 0.0],
    ],
)
def test_a_histogram_of_any_numbers_can_be_made(numbers: Any) -> None:
    record = record_of("histogram", "a", numbers, step=1)
    edges = record["edges"]
    assert len(edges) == len(record["counts"]) + 1
    assert np.isfinite(edges).all()
    assert edges[0] < edges[-1]
    finite_count = sum(math.isfinite(number) for number in numbers)
    assert sum(record["counts"]) == record["count"] == finite_count


def test_one_note_says_that_nothing_shows_what_is_logged(tmp_path: Path) -> None:
    train(build(tmp_path / "a", text_log=True))
    lines = (tmp_path / "a" / "log.txt").read_text().splitlines()
    notes = [line for line in lines if line.startswith("note: step.log_text")]
    assert len(notes) == 1


def test_showing_changes_no_bit_of_the_weights(resumed: Resumed) -> None:
    plain = build(None)
    plain.train()
    assert torch.equal(resumed.weight, plain.state.model.weight.double())


def test_tensorboard_has_a_change_of_a_setting_at_its_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    build(tmp_path, tensorboard=True, stop_after="3 steps").train()
    sf.load(tmp_path).change("a test", clip="norm 2.0")
    build(tmp_path, tensorboard=True, stop_after="4 steps").train()
    build(tmp_path, tensorboard=True).train()
    (text,) = events_of(tmp_path).Tensors("texts/change/text_summary")
    assert text.step == 3
    assert b"clip off -> norm 2.0 (a test)" in text.tensor_proto.string_val[0]
