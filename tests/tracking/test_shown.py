"""Texts, images and histograms of a loop reach TensorBoard and every tracker, as they were given."""

from __future__ import annotations

import json
import math
import os
import sqlite3
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


def show(step: sf.Step) -> None:
    step.log_text(prompt=f"text {step.index} <&>")
    step.log_image(colors=COLORS, gray=GRAY.float() / 255)
    step.log_histogram(weights=step.state.model.weight, numbers=[1.0, 2.0, float("nan")])


def train(run: sf.Run) -> None:
    with run:
        for step in run:
            show(step)


def events_of(run_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sizes = {"images": 0, "scalars": 0, "histograms": 0, "tensors": 0}
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance=sizes)
    events.Reload()
    return events


@pytest.mark.parametrize("is_opened", [False, True])
def test_tensorboard_has_them_at_their_step_once_also_after_a_resume(
    tmp_path: Path, is_opened: bool
) -> None:
    pytest.importorskip("tensorboard")
    for stop in ("3 steps", "4 steps"):
        with build(tmp_path / "a", tensorboard=True, stop_after=stop) as run:
            for step in run.steps() if is_opened else run:
                if is_opened:
                    sf.forward_backward(step)
                    sf.update(step)
                show(step)
    events = events_of(tmp_path / "a")
    every = [*range(1, STEPS + 1)]
    images = events.Images("images/colors")
    assert [event.step for event in images] == every
    pixels = np.asarray(Image.open(BytesIO(images[-1].encoded_image_string)))
    assert np.array_equal(pixels, COLORS.permute(1, 2, 0).numpy())
    texts = events.Tensors("texts/prompt/text_summary")
    assert [event.step for event in texts] == every
    assert texts[1].tensor_proto.string_val[0] == b"text 1 <&>"
    histograms = events.Histograms("histograms/weights")
    assert [event.step for event in histograms] == every
    assert {event.histogram_value.num for event in histograms} == {2.0}
    weights = run.state.model.weight.detach().double()
    last = histograms[-1].histogram_value
    assert (last.min, last.max) == (float(weights.min()), float(weights.max()))
    assert last.sum == pytest.approx(float(weights.sum()))
    assert sum(last.bucket) == 2
    assert not any(
        record["kind"] in ("text", "image", "histogram")
        for record in sf.load(tmp_path / "a").records()
    )


def tracked(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    there = tracked("mlflow", tmp_path, monkeypatch)
    (artifacts,) = (there / "mlflow").glob("*/artifacts")
    assert (artifacts / "texts/prompt/step-00000002.txt").read_text() == "text 1 <&>"
    pixels = np.asarray(Image.open(artifacts / "images/colors/step-00000004.png"))
    assert np.array_equal(pixels, COLORS.permute(1, 2, 0).numpy())
    histogram = json.loads((artifacts / "histograms/numbers/step-00000001.json").read_text())
    assert (histogram["count"], histogram["nonfinite_count"]) == (2, 1)


@pytest.mark.slow
def test_trackio_has_them_in_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tracked("trackio", tmp_path, monkeypatch)
    store = sqlite3.connect(there / "trackio" / "poems.db")
    shown: dict[str, list[Any]] = {}
    for step, text in store.execute("select step, metrics from metrics order by step"):
        for name, value in json.loads(text).items():
            shown.setdefault(name, []).append((step, value))
    store.close()
    assert [(step, value["_value"]) for step, value in shown["texts/prompt"]] == [
        (step + 1, f"text {step} <&>") for step in range(STEPS)
    ]
    assert [step for step, _ in shown["images/colors"]] == [*range(1, STEPS + 1)]
    assert sum(shown["histograms/weights"][0][1]["values"]) == 2


@pytest.mark.slow
def test_wandb_has_them_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tracked("wandb", tmp_path, monkeypatch)
    pictures = [*there.glob("wandb/offline-run-*/files/media/images/images/colors_*.png")]
    assert len(pictures) == STEPS
    pixels = np.asarray(Image.open(pictures[0]))
    assert np.array_equal(pixels, COLORS.permute(1, 2, 0).numpy())
    assert len([*there.glob("wandb/offline-run-*/files/media/html/texts/prompt_*.html")]) == STEPS
    (file,) = there.glob("wandb/offline-run-*/*.wandb")
    assert b"histograms/weights" in file.read_bytes()


def test_of_two_ends_that_may_be_channels_a_tensor_has_the_first_and_an_array_the_last() -> None:
    zeros = torch.zeros(4, 6, 3)
    as_tensor = image_in(record_of("image", "a", zeros, step=1))
    as_array = image_in(record_of("image", "a", zeros.numpy(), step=1))
    assert [(image.size, image.mode) for image in (as_tensor, as_array)] == [
        ((3, 6), "RGBA"),
        ((6, 4), "RGB"),
    ]


PICTURES: dict[str, Any] = {
    "(C, H, W) bytes": COLORS,
    "(C, H, W) floats": COLORS.double() / 255,
    "bfloat16": (COLORS // 255).bfloat16(),
    "(H, W, C)": COLORS.permute(1, 2, 0).numpy(),
    "(H, W)": GRAY,
    "(1, H, W)": GRAY[None],
    "integers": COLORS.long(),
    "booleans": GRAY > 100,
    "PIL": Image.fromarray(GRAY.numpy()),
}


@pytest.mark.parametrize("name", [*PICTURES])
def test_a_picture_has_the_pixels_that_it_was_given(name: str) -> None:
    given = PICTURES[name]
    pixels = np.asarray(image_in(record_of("image", "a", given, step=1))).astype(int)
    expected = {
        "bfloat16": (COLORS // 255).permute(1, 2, 0).numpy() * 255,
        "booleans": (GRAY > 100).numpy() * 255,
    }.get(name, COLORS.permute(1, 2, 0).numpy() if pixels.ndim == 3 else GRAY.numpy())
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
    assert sum(record["counts"]) == record["count"] == sum(map(math.isfinite, numbers))


def test_what_nothing_shows_is_said_once(tmp_path: Path) -> None:
    train(build(tmp_path / "a", text_log=True))
    lines = (tmp_path / "a" / "log.txt").read_text().splitlines()
    assert len([line for line in lines if line.startswith("note: step.log_text")]) == 1


def test_showing_changes_no_bit_of_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    shown, plain = build(tmp_path / "a", tensorboard=True), build(None)
    train(shown)
    plain.train()
    assert torch.equal(shown.state.model.weight, plain.state.model.weight)
