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
from recorded import training_records
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
from surefoot.tools.diagnose.reading import description_of
from surefoot.tools.diagnose.run_settings import RunDescription
from surefoot.train.run_settings import RunSettings
from waiting import HANG_S

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

from write_settings import settings_table  # noqa: E402

ORDER = re.findall(
    r"\w+",
    """
    model model_settings loss train_data init_from init_optimizer seed length stop_after time_limit early_stopping batch_size micro_batch_size order collate_fn
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
    declaration = default(3) if annotation == "str" else setting(3, observer=True)
    with pytest.raises(TypeError, match=r"^Config\.seed: "):
        type(
            "Config",
            (TrainSettings,),
            {"__annotations__": {"seed": annotation}, "seed": declaration},
        )


def test_a_new_default_keeps_check_text_and_role() -> None:
    of_recipe = {field.name: field.metadata for field in dataclasses.fields(images.Config)}
    for inherited in dataclasses.fields(TrainSettings):
        assert of_recipe[inherited.name] == inherited.metadata
    assert texts_of(images.Config)["batch_size"] == texts_of(TrainSettings)["batch_size"]


def test_the_defaults_that_a_recipe_changes_are_these() -> None:
    def changed_by(kind: type) -> dict[str, Any]:
        defaults = {field.name: field.default for field in dataclasses.fields(TrainSettings)}
        changed = {}
        for field in dataclasses.fields(kind):
            if field.name in defaults and field.default != defaults[field.name]:
                changed[field.name] = field.default
        return changed

    more_than_a_plain_loop = {
        "clip": "norm 1.0",
        "precision": "auto",
        "channels_last": "auto",
        "evaluate_every": "25%",
    }
    assert changed_by(sf.Run) == {}
    assert changed_by(gpt.Config) == more_than_a_plain_loop | {
        "length": "550 steps",
        "batch_size": 16,
        "run_dir": "runs/gpt",
    }
    assert changed_by(images.Config) == more_than_a_plain_loop | {
        "length": "30 epochs",
        "batch_size": 64,
        "channels_last": True,
        "run_dir": "runs/images",
    }
    assert changed_by(translation.Config) == more_than_a_plain_loop | {
        "length": "900 steps",
        "batch_size": "2048 tokens",
        "ema": 0.99,
        "run_dir": "runs/translation",
    }


def test_the_keywords_of_run_stand_in_their_order() -> None:
    parameters = inspect.signature(sf.Run).parameters

    assert list(parameters) == ORDER
    assert [field.name for field in dataclasses.fields(sf.Run)] == ORDER
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("kind", [gpt.Config, images.Config, translation.Config])
def test_the_settings_of_a_recipe_stand_in_the_order_of_those_of_run(kind: type) -> None:
    names = [field.name for field in dataclasses.fields(kind)]
    shared = [name for name in names if name in ORDER and name != "model"]

    assert shared == [name for name in ORDER if name in shared]


@pytest.mark.parametrize("kind", [sf.Run, gpt.Config, images.Config, translation.Config])
def test_every_setting_has_its_text(kind: type) -> None:
    texts = texts_of(kind)
    for field in dataclasses.fields(kind):
        is_table = field.default_factory is not dataclasses.MISSING
        assert is_table or texts.get(field.name), field.name


def test_help_of_run_has_the_keywords_of_the_settings_page() -> None:
    shown = pydoc.render_doc(sf.Run, renderer=pydoc.plaintext)
    page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    words = " ".join(shown.split()).replace("| ", "")

    for name, text in texts_of(sf.Run).items():
        assert text.replace("|", "") in words
        assert f"| `{name}` |" in page
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
    "init_optimizer": ("init_from", True),
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
    settings |= {"run_dir": tmp_path / "run", "best": "min val/loss", "init_from": tmp_path}
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
    not_shared = set(ORDER) - shared_by_ranks(built()).keys()

    assert not_shared == {"workers", "device", "console", "disk", "time_limit", "data_summary"}


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
        "log_every": "5",
        "time_limit": "9 steps",
        "precision": "bf61",
        "trackers": "neptune",
        "compile": 1,
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
    run = built(run_dir=tmp_path / "run", report=False, **changes)
    run.train()

    max_bad_steps = changes.get("max_bad_steps", 5)
    assert run.max_bad_steps == max_bad_steps
    assert description_of(tmp_path / "run").max_bad_steps == max_bad_steps


def test_diagnose_has_the_default_of_the_bad_steps() -> None:
    assert RunDescription().max_bad_steps == TrainSettings.max_bad_steps


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_bad_steps", 3),
        ("clip", "norm 1.0"),
        ("ema", 0.5),
        ("seed", 1),
        ("identity", {"a": 1}),
    ],
)
def test_a_resume_refuses_another_value_of_a_setting_of_the_identity(
    name: str, value: Any, tmp_path: Path
) -> None:
    assert name in names_of(sf.Run, "identity")
    built(run_dir=tmp_path / "run", report=False, stop_after="2 steps").train()
    resumed = built(**{"run_dir": tmp_path / "run", "report": False, name: value})

    with refused("settings-changed", sf.CheckpointError) as error:
        resumed.train()

    (change,) = error.value.fields["changes"]
    assert name in change


@pytest.mark.parametrize(
    ("role", "name", "value"),
    [
        ("cadence", "log_every", "1 steps"),
        ("cadence", "keep_every", "2 steps"),
        ("cadence", "evaluate_every", "3 steps"),
        ("observer", "keep_last", 1),
        ("observer", "report", True),
        ("observer", "data_summary", ["ones"]),
        ("observer", "deterministic", True),
        ("one_session", "time_limit", "9 h"),
        ("one_session", "check_state", False),
        ("one_session", "accept_change", "loss"),
        ("per_rank", "workers", 0),
        ("per_rank", "device", "cpu"),
    ],
)
def test_a_resume_takes_another_value_of_a_setting_of_another_role(
    role: Role, name: str, value: Any, tmp_path: Path
) -> None:
    assert name in names_of(sf.Run, role)
    built(run_dir=tmp_path / "run", report=False, stop_after="2 steps").train()
    resumed = built(**{"run_dir": tmp_path / "run", "report": False, name: value})

    resumed.train()

    assert resumed.state.step == 4


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
    package = copy / "surefoot"
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(sf.__file__).parent, package, ignore=without)
    insert(package / "config/train_settings.py", FIELD, before="    max_bad_steps: int = setting(")
    insert(package / "train/loop.py", LINE, before="step.state.lr_factor")
    return copy


def insert(file: Path, more: str, *, before: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, more + before))


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
    train = ("surefoot", "train", "images", "--length", "2 steps")
    train += ("--log-every", "1 steps", "--report", "False")
    help_text = printed(copy, tmp_path, "surefoot", "train", "images", "--help-all")
    assert re.search(r"--rate-times FLOAT\s+What every learning rate", help_text)

    def rates(name: str, times: str) -> list[float]:
        text = printed(copy, tmp_path, *train, "--rate-times", times, "--run-dir", name)
        trained = training_records(tmp_path / name)
        assert trained, text
        return [record["lr"] for record in trained]

    whole = rates("whole", "1")
    half = rates("half", "0.5")
    assert half == [rate / 2 for rate in whole]
    assert "rate_times = 0.5 # flag" in (tmp_path / "half" / "config.toml").read_text()

    other = printed(copy, tmp_path, "surefoot", "resume", "half", "--rate-times", "0.25")
    assert "cannot resume half at step-00000002: rate_times was 0.5, now 0.25" in other

    shutil.copy(DOCS / "reference" / "settings.md", tmp_path)
    shutil.copy(DOCS / "write_settings.py", tmp_path)
    printed(copy, tmp_path, "write_settings", "settings.md")
    page = (tmp_path / "settings.md").read_text()
    assert "| `rate_times` | `1.0` | What every learning rate is" in page

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
        }
    two = (*train, "--run-dir", "two", "--rate-times")
    ranks = []
    for rank in ("0", "1"):
        ranks.append(started(copy, tmp_path, *two, rank, RANK=rank, LOCAL_RANK=rank, **world))
    outputs = [rank.communicate(timeout=HANG_S)[0] for rank in ranks]
    assert "rate_times: rank 0 has 0.0, rank 1 has 1.0" in outputs[0], outputs
    assert [rank.returncode for rank in ranks] == [2, 2], outputs
