"""The images recipe: its configurations and networks, what it scores, resume, and
`surefoot predict`; 12 seconds.
"""

from __future__ import annotations

import json
import re
import shutil
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import surefoot as sf
from refused import refused
from stated import lines_naming, numbers_in
from surefoot.cli.main import main
from surefoot.config.tree import layered
from surefoot.errors import Setting
from surefoot.program import choose_checkpoint
from surefoot.recipes import images
from surefoot.recipes.gpt import corpus
from surefoot.recipes.images import networks, predict, recipe

SMALL = {
    "run_dir": None,
    "model.width": 4,
    "length": "6 steps",
    "precision": "fp32",
    "evaluate_every": "3 steps",
} | {
    "batch_size": 32,
    "report": False,
}


def config(**changes: Any) -> images.Config:
    return layered(images.Config, [("test", SMALL | changes)])[0]


def trained(asked: images.Config) -> sf.Run:
    run = images.build(asked)
    run.train()
    return run


def weights(run: sf.Run) -> dict[str, torch.Tensor]:
    return run.state.models["model"].state_dict()


def same(one: sf.Run, other: sf.Run) -> bool:
    pairs = zip(weights(one).values(), weights(other).values(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# --- scores ---------------------------------------------------------------------------------------


def test_scores_are_those_of_the_model_on_every_image_and_not_smoothed(tmp_path: Path) -> None:
    run = trained(config(label_smoothing=0.3))
    split = run.parts.evaluator.splits["val"]
    data = split.data
    inputs, labels = data.gather(np.arange(len(data)), np.zeros(len(data), dtype=np.int64))
    with torch.no_grad():
        logits = run.state.models["model"].eval()(inputs)
    scores = run.evaluate()
    assert scores["val/loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5
    )
    assert scores["val/accuracy"] == (logits.argmax(dim=1) == labels).double().mean().item()
    five = (logits.topk(5).indices == labels[:, None]).any(dim=1).double().mean().item()
    assert scores["val/top_5_accuracy"] == pytest.approx(five, abs=1e-12)


def test_mean_logits_over_views_are_evaluated_reported_and_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    views = {
        "test_time_augmentation": True,
        "augmentation.flip": True,
        "augmentation.randaugment": 0,
    }
    asked = config(
        run_dir=str(tmp_path / "run"), **{"optimizer.lr": 0.03, "length": "20 steps"}, **views
    )
    run = trained(asked)
    (of_data,) = re.findall(r"^data +(.*(?:\n .*)*)", capsys.readouterr().out, re.MULTILINE)
    assert numbers_in(of_data)[0] == 6  # views
    data = run.parts.evaluator.splits["val"].data
    inputs, labels = data.gather(np.arange(len(data)), np.zeros(len(data), dtype=np.int64))
    framed = torch.nn.functional.pad(inputs, (1, 1, 1, 1), value=-data.mean[0] / data.std[0])
    shifted = [framed[..., first : first + 8, first : first + 8] for first in range(3)]
    with torch.no_grad():
        model = run.state.models["model"].eval()
        logits = torch.stack(
            [model(view) for each in shifted for view in (each, each.flip(-1))]
        ).mean(dim=0)
    scores = run.evaluate()
    assert scores["val/loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5
    )
    counts = run.make_panels().panels[0].counts
    assert (
        np.sum(counts, axis=0).tolist() == np.bincount(logits.argmax(dim=1), minlength=10).tolist()
    )
    newest = choose_checkpoint(tmp_path / "run", None)
    picture = str(tmp_path / "run/example.png")
    told = recipe.predict(
        asked, predict.Predict(device="cpu"), [picture], run=tmp_path / "run", checkpoint=newest
    )
    lines = [line.split() for line in told]
    chances, classes = logits[0].softmax(dim=0).topk(5)
    assert [int(name) for _, name in lines] == classes.tolist()
    assert [float(chance) for chance, _ in lines] == pytest.approx(chances.tolist(), abs=1e-4)


def test_views_that_training_does_not_have_are_refused() -> None:
    none = {"augmentation.flip": False, "augmentation.crop_padding": 0}
    with refused("test-time-augmentation-without-views"):
        images.build(config(test_time_augmentation=True, **none))


def test_the_test_part_is_scored_once_at_the_end_and_with_its_confusion(tmp_path: Path) -> None:
    trained(config(run_dir=str(tmp_path / "run")))
    tested = [line for line in records(tmp_path / "run") if "test/accuracy" in line]
    assert len(tested) == 1
    assert np.sum(tested[0]["test/confusion"]) == 360
    assert sum("val/confusion" in line for line in records(tmp_path / "run")) == 2


def test_accuracy_while_training_counts_both_labels_by_their_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = config(**{"augmentation.mixup": 0.4, "label_smoothing": 0.0})
    run = images.build(asked)
    labels, others = torch.tensor([1, 1, 1, 1]), torch.tensor([2, 2, 1, 0])
    monkeypatch.setattr(
        sf.losses,
        "mixup",
        lambda images, labels, **_: sf.losses.MixedBatch(images, labels, others, 0.25),
    )
    guess = torch.nn.functional.one_hot(torch.full((4,), 2), 10).float()
    _, told = run.parts.task.loss(torch.nn.Identity(), (guess, labels))
    assert told["accuracy"].value.item() == 0.75 * 2 / 4


def test_the_loss_of_a_batch_is_the_mean_that_it_must_be() -> None:
    from surefoot.train.state_check import loss_contract

    asked = config(**{"augmentation.mixup": 0.4, "augmentation.cutmix": 0.4, "model.dropout": 0.5})
    run = images.build(asked)
    torch.nn.init.normal_(
        run.state.models["model"].head.weight
    )  # which starts at zero, where every loss is the same
    contract = loss_contract(run.parts)
    assert contract.holds, contract.description


# --- the same run ---------------------------------------------------------------------------------


EVERYTHING = {
    "augmentation.flip": True,
    "augmentation.cutout": 2,
    "augmentation.mixup": 0.4,
    "augmentation.cutmix": 0.4,
    "model.dropout": 0.2,
    "micro_batch_size": 16,
    "ema": 0.9,
}


@pytest.mark.parametrize("stop_after", ["1 steps", pytest.param("4 steps", marks=pytest.mark.slow)])
def test_a_resumed_run_ends_with_the_same_bits(stop_after: str, tmp_path: Path) -> None:
    changes = {"run_dir": str(tmp_path / "run"), **EVERYTHING}
    trained(config(stop_after=stop_after, **changes))
    assert same(trained(config(**changes)), trained(config(**EVERYTHING)))


def test_watching_and_workers_change_no_weight() -> None:
    assert same(
        trained(config(**EVERYTHING)),
        trained(config(**EVERYTHING | {"evaluate_every": "1 steps", "workers": 1})),
    )


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of two steps, which no test may change."""
    run_dir = str(tmp_path_factory.mktemp("stopped") / "run")
    trained(config(run_dir=run_dir, stop_after="2 steps"))
    return run_dir


@pytest.mark.fast("change0-loss.mixup was", "change2-samples", "change4-model.width was 4, now 5")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"augmentation.mixup": 0.2}, "loss.mixup was"),
        ({"augmentation.cutout": 3}, "cutout"),
        ({"data.val_fraction": 0.2}, "samples"),
        ({"data.classes": tuple("abcdefghij")}, "data.classes was"),
        ({"model.width": 5}, "model.width was 4, now 5"),
        (
            {"model.name": "resnet18", "model.width": None},
            "model.name was 'simple_cnn', now 'resnet18'",
        ),
        ({"channels_last": False}, "channels_last was True, now False"),
    ],
)
def test_another_loss_other_data_and_another_network_are_another_run(
    change: dict[str, Any], says: str, stopped: str
) -> None:
    with pytest.raises(sf.CheckpointError) as error:
        trained(config(run_dir=stopped, **change))
    assert error.value.code in ("settings-changed", "data-changed")
    assert any(says in changed for changed in error.value.fields["changes"])


@pytest.mark.parametrize(
    ("change", "code", "expected"),
    [
        ({"data.classes": tuple("jihgfedcba")}, "classes-of-other-data", [*"0123456789"]),
        (
            {"data.path": "synthetic", "data.size": 9, "data.channels": 1},
            "images-of-other-shape",
            8,
        ),
    ],
)
def test_a_run_is_never_scored_on_images_of_another_kind(
    change: dict[str, Any], code: str, expected: Any, stopped: str
) -> None:
    run = images.build(config(run_dir=stopped))
    again = images.build(config(run_dir=stopped, **change))
    again.load_checkpoint(run.parts.packed())
    with refused(code, sf.DataError, expected=expected):
        again.evaluate("val")


def test_other_data_are_scored_with_the_normalisation_that_was_trained_with(stopped: str) -> None:
    run = images.build(config(run_dir=stopped))
    other = {"data.path": "synthetic", "data.size": 8, "data.channels": 1}
    again = images.build(config(run_dir=stopped, **other))
    for name in ("val", "test"):
        ours = again.parts.evaluator.splits[name].data
        theirs = run.parts.evaluator.splits[name].data
        assert (ours.mean, ours.std) == (theirs.mean, theirs.std)
    with refused("data-changed", sf.CheckpointError):
        again.train()


def test_pictures_of_the_same_names_that_look_otherwise_are_other_data(tmp_path: Path) -> None:
    tree(tmp_path / "data")
    asked = {"data.path": str(tmp_path / "data"), "run_dir": str(tmp_path / "run")}
    trained(config(stop_after="2 steps", **asked))
    for path in (tmp_path / "data").glob("*/*.png"):
        Image.new("RGB", (10, 10)).save(path)
    with refused("settings-changed", sf.CheckpointError):
        trained(config(**asked))


def test_early_stopping_watches_what_the_best_checkpoint_is_chosen_by() -> None:
    asked = {
        "length": "400 steps",
        "evaluate_every": "1 steps",
        "early_stopping.patience": 1,
        "optimizer.lr": 1.0,
    }
    run = trained(config(**asked))
    assert run.state.step < 400
    assert run.parts.run_state.best is not None
    assert run.parts.run_state.best.score == "val/loss"


# --- networks -------------------------------------------------------------------------------------


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n"
        "def build(channels, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, classes))\n"
        "def bare():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
        "def wrong():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))\n"
        "def large():\n    return nn.Linear(99, 10)\n"
        "def nothing():\n    return None\n"
        "def strange(width):\n    return None\n"
        "class Raising(nn.Module):\n"
        "    def __init__(self, problem):\n        super().__init__()\n        self.problem = problem\n"
        "    def forward(self, images):\n        raise self.problem\n"
        "def mute():\n    return Raising(AssertionError())\n"
        "def keyed():\n    return Raising(KeyError('head'))\n"
    )
    return file


@pytest.mark.parametrize("function", ["build", "bare"])
def test_a_network_of_a_file_is_trained_resumed_and_used(
    function: str,
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {"run_dir": "run", "model.name": f"net.py:{function}", "model.width": None}
    trained(config(stop_after="2 steps", **asked))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # its path was noted
    run = trained(config(**asked | {"run_dir": str(tmp_path / "run")}))
    assert run.state.step == 6
    assert list(weights(run)) == ["1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("net.py:wrong", "network-outputs"),
        ("net.py:large", "network-refuses-images"),
        ("net.py:nothing", "network-not-a-module"),
        ("net.py:mute", "network-refuses-images"),
        ("net.py:keyed", "network-refuses-images"),
        ("net.py:strange", "network-arguments"),
        ("net.py:absent", "function-missing"),
        ("nowhere.py:build", "program-missing"),
        ("resnet19", "network-unknown"),
        ("transformer", "network-unknown"),
    ],
)
def test_a_network_that_cannot_be_is_refused(
    name: str, code: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(code):
        images.build(config(**{"model.name": name, "model.width": None}))


def test_a_network_of_another_file_is_another_run(program: Path, tmp_path: Path) -> None:
    asked = {"run_dir": str(tmp_path / "run"), "model.width": None}
    trained(config(stop_after="2 steps", **asked, **{"model.name": f"{program}:build"}))
    (tmp_path / "other").mkdir()
    other = Path(shutil.copy(program, tmp_path / "other" / "net.py"))
    for name in (f"{program}:bare", f"{other}:build", "simple_cnn"):
        with refused("settings-changed", sf.CheckpointError):
            trained(config(**asked, **{"model.name": name}))


def test_a_network_may_import_its_neighbours_and_what_fails_there_is_named(tmp_path: Path) -> None:
    file = tmp_path / "network.py"
    neighbour = tmp_path / "its_neighbour.py"
    file.write_text("from its_neighbour import build\n")
    asked = config(**{"model.name": f"{file}:build", "model.width": None})
    neighbour.write_text("from torch import nn\nthere_is_no(such_name)\n")
    with refused("program-fails", path=str(neighbour), line=2):
        images.build(asked)
    neighbour.write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    assert len(weights(images.build(asked))) == 2


def test_a_changed_network_is_refused_where_nobody_asks_for_it(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    main(
        [
            "train",
            "images",
            f"--run-dir={run}",
            "--length=2 steps",
            "--precision=fp32",
            "--report=false",
            f"--model.name={program}:build",
        ]
    )
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    commands = (["predict", run, str(tmp_path / "x.png")], ["evaluate", run])
    for command in commands:
        main(command)
    program.write_text(program.read_text() + "# changed\n")
    for command in commands:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(command)
        assert end.value.code == 2
        assert "[program-not-trusted]" in capsys.readouterr().err
        main([*command, "--run-changed-program"])
        assert len(lines_naming(capsys.readouterr().out, f"note: {program} ")) == 1


def test_a_changed_file_is_another_run(program: Path, tmp_path: Path) -> None:
    asked = {
        "run_dir": str(tmp_path / "run"),
        "model.name": f"{program}:build",
        "model.width": None,
    }
    trained(config(stop_after="2 steps", **asked))
    program.write_text(program.read_text() + "# changed\n")
    with refused("settings-changed", sf.CheckpointError):
        trained(config(**asked))


@pytest.mark.parametrize(
    "where", ["run/net.py:build", "net.py:build", "/proc/self/cwd/net.py:build"]
)
def test_a_program_that_came_with_the_run_is_never_run(
    where: str,
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["surefoot"])
    flags = ["--run-dir=run", "--length=2 steps", "--precision=fp32", "--report=false"]
    main(["train", "images", *flags, f"--model.name={program}:build"])
    held = Path("run/images.json")
    held.write_text(
        held.read_text().replace(
            f"{program}:build", where if where[0] != "r" else str(tmp_path / where)
        )
    )
    Path("run/net.py").write_text("raise SystemExit('run')")
    Path("net.py").write_text("raise SystemExit('run')")
    Image.new("L", (8, 8)).save("x.png")
    for command in (["predict", "run", "x.png"], ["resume", "run"], ["evaluate", "run"]):
        with pytest.raises(SystemExit) as end:
            main(command)
        assert end.value.code == 2, command
        assert "[path-of-code-unresolved]" in capsys.readouterr().err


@pytest.mark.fast("run/evil.py-as it was", "evil.py-missing")
@pytest.mark.parametrize("kept", ["as it was", "missing", "of the file"])
@pytest.mark.parametrize("where", ["run/evil.py", "evil.py"])
def test_a_network_that_came_with_the_run_is_never_run(
    where: str,
    kept: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """config.toml names it, without `out`; images.json says what it likes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["surefoot"])
    main(
        [
            "train",
            "images",
            "--run-dir=run",
            "--length=2 steps",
            "--precision=fp32",
            "--report=false",
            "--model.width=4",
        ]
    )
    Path(where).write_text("from pathlib import Path; Path('canary').touch()\n")
    Path("run/config.toml").write_text(
        f'[model]\nname = "{where}:build"\n[program]\nkind = "recipe"\nrecipe = "images"\n'
    )
    held = Path("run/images.json")
    if kept == "of the file":
        held.write_text(held.read_text().replace('"simple_cnn"', '"/nowhere/evil.py:build"'))
    elif kept == "missing":
        held.unlink()
    for command in (["verify", "run"], ["evaluate", "run"], ["resume", "run"]):
        with pytest.raises(SystemExit):
            main(command)
    assert not Path("canary").exists()


def test_predict_runs_no_changed_network_that_the_settings_do_not_name(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    main(
        [
            "train",
            "images",
            f"--run-dir={run}",
            "--length=2 steps",
            "--precision=fp32",
            "--report=false",
            "--model.width=4",
        ]
    )
    held = run / "images.json"
    held.write_text(held.read_text().replace('"simple_cnn"', f'"{program}:build"'))
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    with pytest.raises(SystemExit) as end:
        main(["predict", str(run), str(tmp_path / "x.png")])
    assert end.value.code == 2
    assert "[program-not-trusted]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "stem"),
    [("resnet18", None), ("resnet34", "imagenet"), ("resnet50", "cifar"), ("resnet18", "imagenet")],
)
def test_resnets_have_the_stem_that_suits_the_images_or_is_asked(name: str, stem: Any) -> None:
    asked = config(**{"model.name": name, "model.stem": stem, "model.width": None})
    with torch.device("meta"):
        model = networks.builder(asked.model, name, channels=1, classes=10, size=8)()
    assert model.conv1.kernel_size == ((7, 7) if stem == "imagenet" else (3, 3))


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("resnet18", "width", 8),
        ("resnet18", "dropout", 0.1),
        ("simple_cnn", "stem", "cifar"),
        ("simple_cnn", "zero_init_residual", True),
        ("timm:resnet10t", "width", 8),
    ],
)
def test_a_setting_of_another_network_is_foreign(name: str, setting: str, value: Any) -> None:
    with refused("setting-of-other-network", setting=f"model.{setting}", value=value):
        images.build(config(**{"model.width": None, "model.name": name, f"model.{setting}": value}))


def test_a_network_of_timm_or_what_to_install(tmp_path: Path) -> None:
    asked = config(
        **{"model.name": "timm:test_resnet.r160_in1k", "model.width": None, "length": "1 steps"}
    )
    try:
        import timm  # noqa: F401
    except Exception:
        with refused("package-not-usable", modules=["timm"]):
            images.build(asked)
        return
    assert trained(asked).state.step == 1
    with refused("network-unknown", value="timm:resnet18x"):
        images.build(config(**{"model.name": "timm:resnet18x", "model.width": None}))


@pytest.mark.fast("resnet18-cifar-8")
@pytest.mark.parametrize(
    ("name", "stem", "side"),
    [("simple_cnn", None, 8), ("resnet18", "cifar", 8), ("resnet18", "imagenet", 32)],
)
def test_one_image_that_ends_as_one_pixel_is_refused_and_a_larger_one_is_trained(
    name: str, stem: Any, side: int
) -> None:
    settings = {"model.name": name, "model.stem": stem, "model.width": None}
    for size in (side, side + 1):
        shape = {"data.path": "synthetic", "data.size": size, "data.channels": 1}
        asked = config(batch_size=2, micro_batch_size=1, **settings, **shape)
        if size == side:
            with refused("image-reduced-to-one-pixel", size=size):
                images.build(asked)
        one = torch.zeros(1, 1, size, size)
        model = networks.builder(asked.model, name, channels=1, classes=10, size=size)()
        if size == side:
            with pytest.raises(ValueError, match="more than 1 value per channel"):
                model(one)
        else:
            images.build(asked)
            model(one)


# --- settings -------------------------------------------------------------------------------------


def test_all_that_is_wrong_is_told_at_once_before_data_are_read(tmp_path: Path) -> None:
    wrong = {
        "data.path": str(tmp_path / "nowhere"),
        "augmentation.cutout": -1,
        "augmentation.mixup": -0.5,
        "data.val_fraction": 1.5,
        "model.dropout": 2.0,
        "optimizer.momentum": 0.9,
        "schedule.power": 2.0,
        "clip": "norm -1",
    }
    with pytest.raises(sf.ConfigError) as caught:
        images.build(config(**wrong))
    said = str(caught.value)
    assert [
        name
        for name in ("cutout", "mixup", "val_fraction", "dropout", "momentum", "power", "clip")
        if name not in said
    ] == []


@pytest.mark.parametrize("name", images.PRESETS)
def test_a_preset_is_a_complete_configuration(name: str) -> None:
    asked = layered(images.Config, [("preset", images.PRESETS[name])])[0]
    asked.optimizer.spec()
    asked.schedule.spec()
    networks.refuse_settings(asked.model)
    sf.data.Augmentation(
        crop_padding=asked.augmentation.crop_padding, randaugment=asked.augmentation.randaugment
    )
    with torch.device("meta"):
        networks.builder(
            asked.model, asked.model.name, channels=3, classes=10, size=asked.data.size or 32
        )()


@pytest.mark.parametrize("name", ["fashion-mnist", "fashion-mnist-fast", "cifar10", "imagenet"])
def test_a_preset_for_other_data_does_not_train_on_digits(name: str) -> None:
    asked = layered(images.Config, [("preset", images.PRESETS[name]), ("flag", {"preset": name})])[
        0
    ]
    with refused("preset-without-data", value=name):
        images.build(asked)


def test_the_names_of_presets_are_those_that_help_shows() -> None:
    hint = typing.get_type_hints(images.Config)["preset"]
    names, _ = typing.get_args(hint)
    assert {*typing.get_args(names)} == {*images.PRESETS}


def test_damaged_pictures_that_are_left_out_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree(tmp_path / "data")
    (tmp_path / "data" / "dark" / "3.png").write_bytes(b"no picture")
    run = trained(config(**{"data.path": str(tmp_path / "data"), "data.on_corrupt": "skip"}))
    (note,) = lines_naming(capsys.readouterr().out, str(tmp_path / "data" / "dark" / "3.png"))
    assert numbers_in(note) == [1]
    assert len(run.parts.pipeline.dataset) == 35
    assert run.parts.plan.identity["identity"]["data"]["left_out"]["pictures"] == 1
    for path in (tmp_path / "data" / "dark").glob("1*.png"):  # of which some are not held out
        path.write_bytes(b"no picture")
    with refused("picture-unknown", sf.DataError) as caught:  # while the mean is measured
        images.build(config(**{"data.path": str(tmp_path / "data")}))
    assert Setting("data.on_corrupt", "skip") in caught.value.remedies
    assert Path(caught.value.fields["path"]).name.startswith("1")


def test_other_pictures_left_out_are_another_run(tmp_path: Path) -> None:
    tree(tmp_path / "data")
    asked = {
        "data.path": str(tmp_path / "data"),
        "data.on_corrupt": "skip",
        "run_dir": str(tmp_path / "run"),
    }
    (tmp_path / "data" / "dark" / "3.png").write_bytes(b"no picture")
    trained(config(stop_after="2 steps", **asked))
    whole = tmp_path / "data" / "dark" / "4.png"
    (tmp_path / "data" / "dark" / "3.png").write_bytes(whole.read_bytes())
    whole.write_bytes(b"no picture")
    with refused("settings-changed", sf.CheckpointError):
        trained(config(**asked))


def test_the_run_of_another_recipe_is_told_from_one_that_lost_a_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000000").mkdir(parents=True)
    tokenizer = corpus.saved_tokenizer_path(str(tmp_path))
    assert tokenizer is not None
    with refused("run-file-missing", sf.CheckpointError, path=tokenizer):
        corpus.saved_tokenizer(tokenizer)
    with refused("run-file-missing", sf.CheckpointError):
        predict.read_metadata(tmp_path)


# --- predict --------------------------------------------------------------------------------------


def tree(place: Path) -> None:
    """Twenty dark pictures and twenty light ones, of 10 x 10."""
    generator = np.random.default_rng(0)
    for name, low in (("dark", 0), ("light", 160)):
        (place / name).mkdir(parents=True)
        for number in range(20):
            pixels = generator.integers(low, low + 90, size=(10, 10, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / name / f"{number}.png")


@pytest.fixture(scope="module")
def shades(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shades")
    tree(place / "data")
    settings = [
        "--model.width=4",
        "--length=20 steps",
        "--report=false",
        "--batch-size=16",
        "--precision=fp32",
        "--augmentation.randaugment=0",
    ]
    main(
        [
            "train",
            "images",
            f"--data.path={place / 'data'}",
            f"--run-dir={place / 'run'}",
            *settings,
        ]
    )
    shutil.rmtree(place / "data")  # nothing but the run's directory is needed from here on
    for name, shade in (("dark", 20), ("light", 230)):
        Image.new("L", (40, 25), shade).save(place / f"{name}.png")
    return place


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    main(["predict", *arguments])
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_picture_of_any_size_and_colour_is_named(
    shades: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("dark", "light"):
        lines = [
            line.split()
            for line in said(capsys, str(shades / "run"), str(shades / f"{name}.png")).splitlines()
        ]
        assert lines[0][1] == name
        assert sum(float(chance) for chance, _ in lines) == pytest.approx(1, abs=2e-4)


def test_several_pictures_are_named_one_json_object_a_line(
    shades: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(shades / f"{name}.png") for name in ("light", "dark")]
    lines = [
        json.loads(line)
        for line in said(capsys, str(shades / "run"), *asked, "--top-k", "1").splitlines()
    ]
    assert [(line["image"], list(line["classes"])) for line in lines] == [
        (asked[0], ["light"]),
        (asked[1], ["dark"]),
    ]
    assert all(chance == round(chance, 4) for line in lines for chance in line["classes"].values())


@pytest.mark.parametrize(
    ("given", "status", "says"),
    [
        ([], 2, "[predict-without-input]"),
        (["nowhere.png"], 3, "no file nowhere.png"),
        (["text.png"], 3, "is not a readable image"),
        (["{place}/dark.png", "--top-k", "0"], 2, "[setting-out-of-range]"),
        (["{place}/dark.png", "--tpo-k", "1"], 2, "[setting-unknown]"),
    ],
)
def test_what_cannot_be_named_is_told(
    given: list[str],
    status: int,
    says: str,
    shades: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.png").write_text("no picture")
    with pytest.raises(SystemExit) as end:
        main(
            [
                "predict",
                str(shades / "run"),
                *(one.replace("{place}", str(shades)) for one in given),
            ]
        )
    assert end.value.code == status
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda file: file.unlink(), "run-file-missing"),
        (lambda file: file.write_text("{"), "run-file-damaged"),
        (lambda file: file.write_text('{"classes": 3}'), "run-file-damaged"),
    ],
)
def test_a_run_without_its_classes_is_not_guessed_at(
    change: Any, code: str, shades: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(shades / "run", tmp_path / "run"))
    change(run / predict.FILE)
    with refused(code, sf.CheckpointError, path=run / predict.FILE):
        predict.read_metadata(run)


@pytest.mark.slow
def test_digits_are_learned() -> None:
    """97 % in a third of the time; what the whole preset reaches stands in
    docs/guides/images.md.
    """
    quick = {
        "run_dir": None,
        "length": "10 epochs",
        "precision": "fp32",
        "augmentation.randaugment": 0,
    }
    run = trained(layered(images.Config, [("test", quick)])[0])
    assert run.evaluate("test")["test/accuracy"] > 0.97
