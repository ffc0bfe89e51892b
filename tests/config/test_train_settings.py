"""The one list of settings: what is derived from its fields, and that nothing can be forgotten; 4
seconds, the slow one 60.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import pydoc
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import surefoot as sf
from refused import refused
from stated import lines_naming
from surefoot.config.setting import (
    Declared,
    Role,
    default,
    names_of,
    setting,
    shared_by_ranks,
    texts_of,
    without_effect,
)
from surefoot.config.train_settings import TrainSettings
from surefoot.config.tree import When, leaves
from surefoot.recipes import finetune, gpt, images, translation
from surefoot.run.messages import header
from surefoot.tools.diagnose.run_settings import RunDescription
from surefoot.train.run_settings import RunSettings
from waiting import HANG_S

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

from write_settings import settings_table  # noqa: E402

ORDER = re.findall(
    r"\w+",
    """
    model loss train_data init_from seed length stop_after time_limit early_stopping batch_size micro_batch_size order collate_fn
    count_fn count_unit workers optimizer schedule plateau clip ema ema_ramp ema_start ema_every max_bad_steps precision channels_last compile
    activation_checkpointing activation_checkpointing_modules device deterministic splits evaluate_every evaluate_at_start best sample_fn
    sample_every sample_on_all_ranks log_every layer_stats_every derived loss_note trackers panels_fn tensorboard text_log report console run_dir save_every keep_last keep_best keep_every
    parallel sync_batch_norm buffers exact_sums check_ranks_every identity extra_files describe_fn predict_example sample_summary data_summary check_state
    accept_change disk
    """,
)


def built(**changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": lambda: torch.nn.Linear(2, 1),
        "loss": lambda model, batch: model(batch[0]).square().mean(),
        "train_data": (torch.ones(4, 2),),
        "batch_size": 2,
        "length": "4 steps",
        "optimizer": sf.optim.sgd(lr=0.1),
        "console": False,
    }
    return sf.Run(**settings | changes)


@pytest.mark.parametrize("roles", [{}, {"identity": True, "observer": True}])
def test_a_setting_without_exactly_one_role_fails_at_import(roles: dict[str, bool]) -> None:
    with pytest.raises(TypeError, match=r"\bidentity\b.*\bobserver\b"):
        setting(0, **roles)


def test_a_setting_of_the_identity_that_does_not_say_when_it_may_change_fails_at_import() -> None:
    with pytest.raises(TypeError, match="changes_at"):
        setting(0, identity=True)
    assert setting(0, observer=True).metadata["changes_at"] == "step"


@pytest.mark.parametrize("kind", [finetune.Config, gpt.Config, images.Config, translation.Config])
def test_each_setting_says_when_it_may_change(kind: type[Declared]) -> None:
    of_run = {field.name: field.metadata["changes_at"] for field in dataclasses.fields(sf.Run)}
    of_recipe = {leaf.name: leaf.changes_at for leaf in leaves(kind)}
    for when in (of_run, of_recipe):
        assert [name for name, at in when.items() if at not in get_args(When)] == []
        assert {when[name] for name in ("length", "batch_size", "clip", "precision")} == {"step"}
        assert {when[name] for name in ("seed", "order", "init_from", "run_dir")} == {"never"}


def test_a_field_of_a_table_changes_when_the_table_does_unless_it_says_otherwise() -> None:
    when = {leaf.name: leaf.changes_at for leaf in leaves(gpt.Config)}
    assert (when["optimizer.lr"], when["optimizer.name"]) == ("step", "never")
    assert (when["model.width"], when["model.dropout"]) == ("never", "step")
    assert (when["data.path"], when["data.tokenizer"]) == ("epoch", "never")


def test_a_field_that_is_not_declared_fails_at_import() -> None:
    with pytest.raises(TypeError, match=r"^Config\.more "):

        @dataclass(kw_only=True)
        class Config(TrainSettings):
            more: int = 0


@pytest.mark.parametrize("annotation", ["str", "int"])
def test_of_an_inherited_setting_nothing_but_the_default_may_change(annotation: str) -> None:
    # seed is an int, and has a declaration
    own = default(3) if annotation == "str" else setting(3, observer=True)
    with pytest.raises(TypeError, match=r"^Config\.seed: "):
        type("Config", (TrainSettings,), {"__annotations__": {"seed": annotation}, "seed": own})


def test_a_new_default_keeps_check_text_and_role() -> None:
    for field in dataclasses.fields(images.Config):
        if field.name in {inherited.name for inherited in dataclasses.fields(TrainSettings)}:
            assert field.metadata == next(
                each.metadata
                for each in dataclasses.fields(TrainSettings)
                if each.name == field.name
            )
    assert texts_of(images.Config)["batch_size"] == texts_of(TrainSettings)["batch_size"]


def test_the_defaults_that_a_recipe_changes_are_these() -> None:
    own = {field.name: field.default for field in dataclasses.fields(TrainSettings)}
    changed = {
        (kind.__module__.split(".")[2], field.name): field.default
        for kind in (sf.Run, gpt.Config, images.Config, translation.Config)
        for field in dataclasses.fields(kind)
        if field.name in own and field.default != own[field.name]
    }
    more_than_a_plain_loop = {"clip": "norm 1.0", "precision": "auto", "channels_last": "auto"}
    recipes = {
        (recipe, name): value
        for recipe in ("gpt", "images", "translation")
        for name, value in more_than_a_plain_loop.items()
    }
    assert changed == recipes | {
        ("gpt", "length"): "550 steps",
        ("gpt", "batch_size"): 16,
        ("gpt", "evaluate_every"): "25%",
        ("gpt", "run_dir"): "runs/gpt",
        ("images", "length"): "30 epochs",
        ("images", "batch_size"): 64,
        ("images", "channels_last"): True,
        ("images", "evaluate_every"): "25%",
        ("images", "run_dir"): "runs/images",
        ("translation", "length"): "900 steps",
        ("translation", "batch_size"): "2048 tokens",
        ("translation", "ema"): 0.99,
        ("translation", "evaluate_every"): "25%",
        ("translation", "run_dir"): "runs/translation",
    }


def test_the_keywords_of_run_stand_in_their_order() -> None:
    assert list(inspect.signature(sf.Run).parameters) == ORDER
    assert [field.name for field in dataclasses.fields(sf.Run)] == ORDER
    for kind in (gpt.Config, images.Config, translation.Config):
        shared = [
            field.name
            for field in dataclasses.fields(kind)
            if field.name in ORDER and field.name != "model"
        ]
        assert shared == [name for name in ORDER if name in shared]
    assert all(
        parameter.kind is parameter.KEYWORD_ONLY
        for parameter in inspect.signature(sf.Run).parameters.values()
    )


def test_every_setting_has_its_text() -> None:
    for kind in (sf.Run, gpt.Config, images.Config, translation.Config):
        plain = [
            field.name
            for field in dataclasses.fields(kind)
            if field.default_factory is dataclasses.MISSING
        ]
        texts = texts_of(kind)
        assert [name for name in plain if not texts.get(name)] == []


def test_help_of_run_has_the_keywords_of_the_settings_page() -> None:
    shown = pydoc.render_doc(sf.Run, renderer=pydoc.plaintext)
    page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    words = " ".join(shown.split()).replace("| ", "")
    texts = texts_of(sf.Run)
    fields = dataclasses.fields(sf.Run)
    assert [field.name for field in fields if texts[field.name].replace("|", "") not in words] == []
    assert [field.name for field in fields if f"| `{field.name}` |" not in page] == []
    assert "clip = 'off'" in words
    assert "length (required)" in words
    assert " at 0x" not in shown


NEEDED = {
    "evaluate_every": ("splits", "3 steps"),
    "evaluate_at_start": ("splits", True),
    "sample_every": ("sample_fn", "3 steps"),
    "sample_on_all_ranks": ("sample_fn", True),
    "save_every": ("run_dir", "3 steps"),
    "keep_last": ("run_dir", 2),
    "keep_every": ("run_dir", "3 steps"),
    "accept_change": ("run_dir", "loss"),
}


def test_the_settings_that_do_nothing_without_another_are_these() -> None:
    needs = {}
    for field in dataclasses.fields(RunSettings):
        if field.metadata["needs"] is not None:
            needs[field.name] = field.metadata["needs"]
    assert needs == {name: needed for name, (needed, _) in NEEDED.items()}
    assert {field.name for field in dataclasses.fields(RunSettings)}.issuperset(needs.values())


@pytest.mark.parametrize("name", NEEDED)
def test_the_header_says_which_setting_does_nothing(name: str) -> None:
    needed, value = NEEDED[name]
    run = built(**{name: value})
    assert without_effect(run.parts.settings) == {needed: [name]}
    (note,) = lines_naming(header(run.parts, resumed=False), "note: ", f"without {needed}, ")
    assert name in note


def test_a_run_that_has_what_its_settings_need_says_nothing_of_them(tmp_path: Path) -> None:
    data = torch.zeros(8, 2)
    settings = {name: value for name, (_, value) in NEEDED.items()}
    settings |= {"splits": {"val": sf.Split((data,))}, "sample_fn": str}
    settings |= {"run_dir": tmp_path / "run", "best": "min val/loss"}
    assert without_effect(built(**settings).parts.settings) == {}


def test_the_interval_of_a_recipe_that_evaluates_nothing_is_the_users_alone() -> None:
    unasked = finetune.Config().run_settings(None)
    assert unasked["evaluate_every"] == TrainSettings.evaluate_every
    asked = finetune.Config(evaluate_every="3 steps").run_settings(None)
    assert asked["evaluate_every"] == "3 steps"


def test_a_run_without_a_directory_says_at_its_start_that_the_best_weights_are_lost(
    tmp_path: Path,
) -> None:
    data = torch.zeros(8, 2)
    settings = {"splits": {"val": sf.Split((data,))}, "best": "min val/loss"}
    for run_dir, is_said in [(None, True), (tmp_path / "run", False)]:
        run = built(run_dir=run_dir, **settings)
        text = " ".join(header(run.parts, resumed=False).split())
        assert ("the best val/loss are lost" in text) == is_said


def test_ranks_share_every_setting_but_these() -> None:
    own = set(ORDER) - shared_by_ranks(built()).keys()
    assert own == {"workers", "device", "console", "disk", "time_limit", "data_summary"}


@pytest.mark.parametrize("settings", [built(), images.Config()], ids=["run", "recipe"])
def test_a_setting_cannot_be_assigned_afterwards(settings: TrainSettings) -> None:
    with refused("setting-assigned", setting="seed", value=3):
        settings.seed = 3
    assert settings.seed == 0


def test_all_that_is_wrong_is_told_at_once() -> None:
    wrong: dict[str, Any] = {
        "seed": -1,
        "clip": "hard",
        "workers": -2,
        "keep_last": 0,
        "ema": 1.5,
        "max_bad_steps": -1,
    }
    wrong |= {
        "log_every": "5",
        "time_limit": "9 steps",
        "precision": "bf61",
        "trackers": "neptune",
        "compile": 1,
    }
    wrong |= {
        "batch_size": 4,
        "micro_batch_size": 3,
        "schedule": 0.1,
        "accept_change": "lost",
        "splits": [],
    }
    with pytest.raises(sf.ConfigError) as caught:
        built(**wrong)
    problems = caught.value.problems
    assert len(problems) == 15  # one problem is that of both batch sizes
    of_values = {"seed", "clip", "workers", "keep_last", "ema", "max_bad_steps", "log_every"}
    of_values |= {"time_limit", "precision", "compile", "micro_batch_size"}
    assert of_values <= {problem.fields.get("setting") for problem in problems}


@pytest.mark.parametrize("changes", [{"max_bad_steps": 0}, {"max_bad_steps": 7}, {}])
def test_diagnose_reads_the_bad_steps_that_a_run_was_given(
    changes: dict[str, int], tmp_path: Path
) -> None:
    from surefoot.tools.diagnose.reading import description_of

    run = built(run_dir=tmp_path / "run", report=False, **changes)
    run.train()
    assert (
        description_of(tmp_path / "run").max_bad_steps
        == run.max_bad_steps
        == changes.get("max_bad_steps", 5)
    )
    assert RunDescription().max_bad_steps == TrainSettings.max_bad_steps


OTHER: dict[Role, dict[str, Any]] = {
    "identity": {
        "max_bad_steps": 3,
        "clip": "norm 1.0",
        "ema": 0.5,
        "seed": 1,
        "identity": {"a": 1},
    },
    "cadence": {"log_every": "1 steps", "keep_every": "2 steps", "evaluate_every": "3 steps"},
    "observer": {"keep_last": 1, "report": True, "data_summary": ["ones"], "deterministic": True},
    "one_session": {"time_limit": "9 h", "check_state": False, "accept_change": "loss"},
    "per_rank": {"workers": 0, "device": "cpu"},
}


@pytest.mark.parametrize(
    ("role", "name"), [(role, name) for role, given in OTHER.items() for name in given]
)
def test_a_resume_does_with_a_setting_what_its_role_says(
    role: Role, name: str, tmp_path: Path
) -> None:
    assert name in names_of(sf.Run, role)
    built(run_dir=tmp_path / "run", report=False, stop_after="2 steps").train()
    again = built(**{"run_dir": tmp_path / "run", "report": False, name: OTHER[role][name]})
    if role == "identity":
        with refused("settings-changed", sf.CheckpointError) as error:
            again.train()
        assert [name in change for change in error.value.fields["changes"]] == [True]
    else:
        again.train()
        assert again.state.step == 4


def test_the_table_in_the_docs_is_the_one_that_the_fields_make() -> None:
    """Write it anew: python docs/write_settings.py."""
    assert settings_table(sf.Run) in (DOCS / "reference" / "settings.md").read_text()


FIELD = '''    rate_times: float = setting(1.0, identity=True, changes_at="step")
    """What every learning rate is multiplied by."""
'''
LINE = "task.settings.rate_times * "


def with_one_more_setting(directory: Path) -> Path:
    """A copy of the package in which `TrainSettings` has one field more, and the loop one line."""
    copy = directory / "src"
    shutil.copytree(
        Path(sf.__file__).parent, copy / "surefoot", ignore=shutil.ignore_patterns("__pycache__")
    )
    for file, before, more in (
        ("config/train_settings.py", "    max_bad_steps: int = setting(", FIELD),
        ("train/loop.py", "step.state.lr_factor", LINE),
    ):
        text = (copy / "surefoot" / file).read_text()
        assert text.count(before) == 1
        (copy / "surefoot" / file).write_text(text.replace(before, more + before))
    return copy


def started(
    copy: Path, directory: Path, *arguments: str, **environment: str
) -> subprocess.Popen[str]:
    own = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "COLUMNS": "100", **environment}
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=directory,
        env={**os.environ, **own},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def printed(copy: Path, directory: Path, *arguments: str) -> str:
    return started(copy, directory, *arguments).communicate(timeout=HANG_S)[0]


@pytest.mark.slow
def test_one_field_and_one_line_make_a_setting(tmp_path: Path) -> None:
    """Its flag, its help, its line in config.toml and in the docs, what a resume and other ranks
    say of another value.
    """
    copy = with_one_more_setting(tmp_path)
    train = (
        "surefoot",
        "train",
        "images",
        "--length",
        "2 steps",
        "--log-every",
        "1 steps",
        "--report",
        "False",
    )
    assert re.search(
        r"--rate-times FLOAT\s+What every learning rate",
        printed(copy, tmp_path, *train[:3], "--help-all"),
    )

    rates = {}
    for name, times in (("whole", "1"), ("half", "0.5")):
        text = printed(copy, tmp_path, *train, "--rate-times", times, "--run-dir", name)
        rates[name] = re.findall(r'"lr": ?([^,]+)', (tmp_path / name / "metrics.jsonl").read_text())
        assert rates[name], text
    assert [float(rate) for rate in rates["half"]] == [float(rate) / 2 for rate in rates["whole"]]
    assert "rate_times = 0.5 # flag" in (tmp_path / "half" / "config.toml").read_text()

    other = printed(copy, tmp_path, "surefoot", "resume", "half", "--rate-times", "0.25")
    assert "cannot resume half at step-00000002: rate_times was 0.5, now 0.25" in other

    shutil.copy(DOCS / "reference" / "settings.md", tmp_path)
    shutil.copy(DOCS / "write_settings.py", tmp_path)
    printed(copy, tmp_path, "write_settings", "settings.md")
    assert (
        "| `rate_times` | `1.0` | What every learning rate is"
        in (tmp_path / "settings.md").read_text()
    )

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
        }
    ranks = [
        started(
            copy,
            tmp_path,
            *train,
            "--rate-times",
            f"{rank}",
            "--run-dir",
            "two",
            RANK=f"{rank}",
            LOCAL_RANK=f"{rank}",
            **world,
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=HANG_S)[0] for rank in ranks]
    assert "rate_times: rank 0 has 0.0, rank 1 has 1.0" in said[0], said
    assert [rank.returncode for rank in ranks] == [2, 2], said
