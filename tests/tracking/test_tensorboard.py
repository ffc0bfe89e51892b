"""What TensorBoard is given besides numbers: pictures of panels, and hparams; read back with its
own reader. 3 seconds.
"""

from __future__ import annotations

import io
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import nn

import surefoot as sf
from refused import refused
from small_runs import Augmented, build
from stated import lines_naming
from surefoot.errors import Command, Setting
from surefoot.tracking.jsonl import read_records
from surefoot.tracking.panels_file import panel_to_dict
from surefoot.tracking.record import numbers_in
from surefoot.tracking.tensorboard import TensorBoard, render_panel

COUNTS = ((8, 2), (0, 3))
CAT = sf.report.encode_png(torch.rand(3, 6, 4))


def panels(model: nn.Module) -> list[Any]:
    wrong = tuple(sf.report.Image(png=CAT) for _ in range(9))
    return [
        sf.report.ConfusionMatrix(title="taken for", classes=("a cat", "dog"), counts=COUNTS),
        sf.report.ImageGrid(title="wrong", images=wrong),
        sf.report.TextHeatmap(title="text", legend="", unit="nats", pieces=()),
    ]


def read_events(run: Path) -> EventAccumulator:
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    return events


def dying_loss(passes: int) -> Any:
    """A loss that fails after so many passes."""
    counter = count(1)

    def loss(model: nn.Module, batch: Any) -> Any:
        if next(counter) > passes:
            raise RuntimeError("died")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return loss


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted, ended, made longer, and ended again."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    changes: dict[str, Any] = {
        "panels_fn": panels,
        "schedule": sf.schedules.constant(),
        "early_stopping": None,
        "count_unit": "rows",
    }
    with pytest.raises(RuntimeError, match="died"):
        build(run_dir, length="6 steps", loss=dying_loss(9), check_state=False, **changes).train()
    build(run_dir, length="6 steps", **changes).train()
    build(run_dir, length="6 steps", **changes).train()  # nothing to do
    build(run_dir, length="8 steps", **changes).train()
    return run_dir


def test_targets_are_called_what_the_run_calls_them(run: Path) -> None:
    tags = set(read_events(run).Tags()["scalars"])
    assert {"train/rows", "train/samples"} <= tags
    assert tags.isdisjoint({"train/targets", "train/targets_per_s"})


def test_each_end_has_its_pictures_once(run: Path) -> None:
    events = read_events(run)
    assert sorted(events.Tags()["images"]) == ["panels/taken for", "panels/wrong"]
    for tag in events.Tags()["images"]:
        assert [image.step for image in events.Images(tag)] == [6, 8]


def test_the_pictures_are_those_of_the_panels(run: Path) -> None:
    events = read_events(run)
    matrix, grid, _ = panels(nn.Identity())
    for panel, tag in ((matrix, "panels/taken for"), (grid, "panels/wrong")):
        expected = render_panel(panel_to_dict(panel))
        assert expected is not None
        first, *_ = events.Images(tag)
        assert (first.width, first.height) == expected.size
        with Image.open(io.BytesIO(first.encoded_image_string), formats=["PNG"]) as image:
            assert image.convert("RGB").tobytes() == expected.tobytes()


def hparams_data(events: EventAccumulator, name: str) -> Any:
    """What the plugin of hparams reads under a name."""
    content = events.SummaryMetadata(f"_hparams_/{name}").plugin_data.content
    return HParamsPluginData.FromString(content)


def hparams_metrics(events: EventAccumulator) -> set[str]:
    experiment = hparams_data(events, "experiment").experiment
    return {info.name.tag for info in experiment.metric_infos}


def test_hparams_are_the_settings_with_the_scores_that_stand_as_scalars(run: Path) -> None:
    events = read_events(run)
    settings = hparams_data(events, "session_start_info").session_start_info.hparams
    assert settings["optimizer.lr"].number_value == 0.01
    assert settings["seed"].number_value == 0
    assert settings["clip"].string_value == "off"
    metrics = hparams_metrics(events)
    assert metrics == {"val/loss", "val/accuracy"}
    assert metrics <= set(events.Tags()["scalars"])


def test_scores_at_the_end_are_among_the_metrics(tmp_path: Path) -> None:
    data = Augmented()
    test = sf.Split((data.inputs, data.labels), metrics=sf.metrics.accuracy, at_end=True)
    build(tmp_path / "run", length="2 steps", splits={"test": test}, early_stopping=None).train()
    events = read_events(tmp_path / "run")
    metrics = hparams_metrics(events)
    assert metrics == {"test/loss", "test/accuracy"}
    assert metrics <= set(events.Tags()["scalars"])


def test_a_matrix_is_the_darker_the_larger_the_share_of_its_row() -> None:
    matrix, _, _ = panels(nn.Identity())
    picture = render_panel(panel_to_dict(matrix))
    assert picture is not None
    cell = 28
    margin = picture.width - 2 * cell
    reds = np.asarray(picture)[margin + 1 :: cell, margin + 1 :: cell, 0]
    assert reds.tolist() == [[round(255 * 0.2), round(255 * 0.8)], [255, 0]]


def test_other_panels_have_no_picture() -> None:
    _, _, text = panels(nn.Identity())
    assert render_panel(panel_to_dict(text)) is None
    assert render_panel(panel_to_dict(sf.report.ImageGrid(title="none", images=()))) is None


@pytest.fixture
def broken_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)


def test_a_broken_package_is_one_note_for_auto(
    broken_package: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(tmp_path / "run", length="2 steps", early_stopping=None, console=True).train()
    printed = capsys.readouterr().out
    assert printed.count("tensorboard") == 2, printed  # the package, and the module that fails
    (note,) = lines_naming(printed, "note: ", " tensorboard ")
    assert ": ModuleNotFoundError: " in note
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_broken_package_is_refused_for_true(broken_package: None, tmp_path: Path) -> None:
    with refused("package-not-usable", modules=["tensorboard"]) as error:
        build(tmp_path / "other", tensorboard=True).train()
    assert isinstance(error.value.__cause__, ModuleNotFoundError)
    install = Command("pip install --force-reinstall tensorboard")
    assert error.value.remedies == (Setting("tensorboard", "auto"), install)
    assert not (tmp_path / "other").exists()


# --- sessions without TensorBoard -----------------------------------------------------------------


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = read_events(run)
    curves = {}
    for tag in events.Tags()["scalars"]:
        curves[tag] = [(point.step, point.value) for point in events.Scalars(tag)]
    return curves


def curves_of_records(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What the curves are by metrics.jsonl, in the precision of TensorBoard."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in read_records(run / "metrics.jsonl"):
        if record["kind"] in ("train", "epoch", "eval", "final_eval"):
            for name, number in numbers_in(record).items():
                curves.setdefault(name, []).append((record["step"], float(np.float32(number))))
    return curves


@pytest.mark.parametrize("without", ["False", "deleted"])
def test_what_a_session_without_tensorboard_leaves_out_is_written_by_the_next_one(
    tmp_path: Path, without: str
) -> None:
    run = tmp_path / "run"
    changes = {"check_state": False, "early_stopping": None}
    # after step 4 was saved, and later steps recorded
    with pytest.raises(RuntimeError, match="died"):
        build(run, log_every="1 steps", loss=dying_loss(22), **changes).train()
    tensorboard = without != "False"
    build(
        run, log_every="4 steps", stop_after="16 steps", tensorboard=tensorboard, **changes
    ).train()
    if without == "deleted":
        for file in (run / "tensorboard").iterdir():
            file.unlink()

    build(run, stop_after="20 steps", **changes).train()

    assert scalars(run) == curves_of_records(run)
    assert [step for step, _ in scalars(run)["train/loss"]] == [1, 2, 3, 4, 8, 12, 16, 18]
    build(run, stop_after="24 steps", **changes).train()  # nothing to add
    assert scalars(run) == curves_of_records(run)
    *older, newest = sorted((run / "tensorboard").iterdir())
    assert newest.stat().st_size < sum(file.stat().st_size for file in older)


def test_pictures_that_no_record_has_stay_when_points_are_written_again(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "panels_fn": panels,
        "schedule": sf.schedules.constant(),
        "early_stopping": None,
    }
    run_dir = tmp_path / "run"
    build(run_dir, length="4 steps", **changes).train()
    build(run_dir, length="6 steps", **changes).train()
    build(run_dir, length="8 steps", tensorboard=False, **changes).train()
    build(run_dir, length="9 steps", **changes).train()
    events = read_events(tmp_path / "run")
    assert [image.step for image in events.Images("panels/wrong")] == [4, 6, 9]
    assert scalars(tmp_path / "run") == curves_of_records(tmp_path / "run")


@pytest.mark.parametrize("name", ["images", "texts", "histograms", "panels"])
def test_a_split_may_be_called_like_what_no_record_has(tmp_path: Path, name: str) -> None:
    inputs = torch.randn(8, 3)
    targets = torch.zeros(8, dtype=torch.int64)
    for length, tensorboard in (("4 steps", True), ("6 steps", False), ("8 steps", True)):
        sf.Run(
            model=lambda: nn.Linear(3, 2),
            loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            train_data=(inputs, targets),
            splits={name: sf.Split((inputs, targets))},
            optimizer=sf.optim.sgd(lr=0.1),
            batch_size=4,
            length=length,
            evaluate_every="2 steps",
            tensorboard=tensorboard,
            device="cpu",
            console=False,
            report=False,
            run_dir=tmp_path / "run",
        ).train()
    assert scalars(tmp_path / "run") == curves_of_records(tmp_path / "run")
    newest = max((tmp_path / "run" / "tensorboard").iterdir())
    session = [event for event in EventFileLoader(str(newest)).Load() if event.step == 4]
    assert session == []  # it was written by the first session


def test_a_torn_event_file_is_read_up_to_its_last_event(tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = {"check_state": False, "early_stopping": None}
    build(run, stop_after="8 steps", **changes).train()
    (file,) = (run / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    build(run, stop_after="12 steps", tensorboard=False, **changes).train()
    build(run, stop_after="16 steps", **changes).train()
    assert scalars(run) == curves_of_records(run)


def test_event_files_are_not_read_if_every_session_wrote_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"check_state": False, "early_stopping": None}
    monkeypatch.delattr(TensorBoard, "_differing")
    for stop in ("8 steps", "12 steps", "16 steps"):
        build(tmp_path / "run", stop_after=stop, **changes).train()
    assert scalars(tmp_path / "run") == curves_of_records(tmp_path / "run")


def test_a_record_of_a_slow_rank_is_no_curve(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "tensorboard", from_step=0)
    slow = {
        "kind": "slow_rank",
        "step": 3,
        "rank": 1,
        "host": "node7",
        "work": "forward",
        "since_step": 1,
        "own_s": 0.4,
    }
    for record in (slow, {"kind": "train", "step": 3, "loss": 2.0}):
        board.write(record)
    board.close()
    assert scalars(tmp_path).keys() == {"train/loss"}
