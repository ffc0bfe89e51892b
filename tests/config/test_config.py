"""Configuration: exact round trips, and what a user is told about mistakes; 2 seconds."""

from __future__ import annotations

import dataclasses
import importlib
import math
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from in_one import in_one
from refused import refused
from surefoot.config.setting import default, number, setting
from surefoot.config.toml import program, to_toml, values
from surefoot.config.train_settings import TrainSettings, clipping
from surefoot.config.tree import flatten, layered, nearest, unknown_setting
from surefoot.errors import ConfigError, Setting


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] | None = (0.9, 0.999)


@dataclass(frozen=True, kw_only=True)
class Deep:
    optimizer: Optimizer = field(default_factory=Optimizer)
    layers: tuple[int, ...] = ()


@dataclass(kw_only=True)
class Config(TrainSettings):
    length: str = default("30 epochs")
    batch_size: int | str = default(32)
    deep: Deep = setting(factory=lambda: Deep(layers=(4, 4)), identity=True, changes_at="never")
    warmup: str | int | None = setting("5%", identity=True, changes_at="step")
    label: str | None = setting("a", observer=True)


def from_toml(text: str, kind: type[Config], where: str = "config.toml") -> Config:
    return layered(kind, [(where, values(text, where=where))])[0]


text = st.text(st.characters(exclude_categories=["Cs"])).filter(
    lambda one: one != "None"
)  # which is None in a file
optional_text = st.none() | text
finite = st.floats(allow_nan=False)
configs = st.builds(
    Config,
    run_dir=st.none() | text.map("runs/{}".format),
    seed=st.integers(),
    length=text,
    precision=st.sampled_from(["auto", "fp32", "tf32", "bf16", "fp16"]),
    compile=st.booleans() | st.just("auto"),
    micro_batch_size=st.none() | st.integers(),
    ema=st.none() | finite,
    warmup=optional_text | st.integers(),
    label=optional_text,
    deep=st.builds(
        Deep,
        optimizer=st.builds(Optimizer, lr=finite, betas=st.none() | st.tuples(finite, finite)),
        layers=st.lists(st.integers()).map(tuple),
    ),
)
origins = st.dictionaries(st.sampled_from(sorted(flatten(Config()))), text)


@given(config=configs, origins=origins)
def test_a_configuration_written_and_read_is_the_same(config, origins):
    again = from_toml(to_toml(config, origins, {"recipe": "gpt"}), Config)

    assert again == config
    assert repr(again) == repr(config)  # 1 is not 1.0, and -0.0 not 0.0


@given(config=configs)
def test_flat_and_back_is_the_same(config):
    assert layered(Config, [("file", flatten(config))])[0] == config


@given(recipe=text, arguments=st.lists(text), number=st.integers(-(2**63), 2**63 - 1))
def test_the_program_written_and_read_is_the_same(recipe, arguments, number):
    made_by = {"recipe": recipe, "arguments": arguments, "number": number, "file": {"path": recipe}}

    assert program(to_toml(Config(), {}, made_by | {"left_out": None})) == made_by


def test_every_setting_stands_in_the_file_with_its_origin():
    written = to_toml(Config(), {"seed": "flag", "deep.optimizer.lr": "file small.toml"}, {})

    assert "seed = 0 # flag\n" in written
    assert "lr = 0.0003 # file small.toml\n" in written
    assert "keep_last = 3 # default\n" in written
    document = tomllib.loads(written)
    assert set(values(written)) == {
        name for name, value in flatten(Config()).items() if value is not None
    }
    assert [*document][:4] == ["init_optimizer", "seed", "length", "batch_size"]


def test_none_is_written_where_it_is_not_the_default():
    written = to_toml(dataclasses.replace(Config(), label=None), {"label": "flag"}, {})

    assert 'label = "None" # flag\n' in written
    assert "init_from" not in written
    assert from_toml(written, Config).label is None


def test_an_origin_cannot_break_out_of_its_comment():
    assert from_toml(to_toml(Config(), {"seed": "file a\nseed = 7"}, {}), Config).seed == 0


def test_a_file_changes_what_it_names_and_no_more():
    config = from_toml('label = "None"\nseed = 3\n[deep.optimizer]\nlr = 1', Config)

    assert config == dataclasses.replace(
        Config(), seed=3, label=None, deep=Deep(layers=(4, 4), optimizer=Optimizer(lr=1.0))
    )
    assert isinstance(config.deep.optimizer.lr, float)


def test_later_layers_win_and_origins_say_which():
    config, origins = layered(
        Config,
        [
            ("preset", {"seed": 1, "deep.optimizer.lr": 0.1}),
            ("file a.toml", {"seed": 2}),
            ("flag", {"keep_last": 5}),
        ],
    )

    assert (config.seed, config.keep_last, config.deep.optimizer.lr) == (2, 5, 0.1)
    assert {origins[name] for name in ("seed",)} == {"file a.toml"}
    assert (origins["keep_last"], origins["deep.optimizer.lr"], origins["clip"]) == (
        "flag",
        "preset",
        "default",
    )
    assert set(origins) == set(flatten(config))


def test_layers_are_checked_one_by_one_and_problems_name_theirs():
    with pytest.raises(ConfigError) as caught:
        layered(Config, [("file a", {"sead": 1}), ("flag", {"keep_last": "x"})])
    unknown, wrong = caught.value.problems
    assert (unknown.code, unknown.places) == ("setting-unknown", ("file a",))
    assert unknown.remedies == (Setting("seed"),)
    assert (wrong.code, wrong.places) == ("setting-of-wrong-type", ("flag",))
    assert wrong.fields == {"setting": "keep_last", "value": "x"}


@in_one
@pytest.mark.parametrize(
    ("line", "setting", "meant"),
    [
        ("deep.optimizer.lrr = 1.0", "deep.optimizer.lrr", "deep.optimizer.lr"),
        ("lr = 1.0", "lr", "deep.optimizer.lr"),
        ("Batch-Size = 4", "Batch-Size", "batch_size"),
        ("colour = 4", "colour", None),
        ("seed.x = 1", "seed.x", "seed"),
    ],
)
def test_an_unknown_setting_in_a_file_is_told_with_the_one_that_was_meant(line, setting, meant):
    with refused("setting-unknown", setting=setting) as error:
        from_toml(line, Config, where="small.toml")
    assert error.value.remedies == (() if meant is None else (Setting(meant),))
    assert error.value.places == ("small.toml",)


@in_one
@pytest.mark.parametrize(
    ("line", "remedies"),
    [
        ('deep.optimizer.lr = "fast"', ()),
        ('deep.optimizer.lr = "3e-4"', ("write it without quotes: 3e-4",)),
        ("seed = 1.0", ()),
        ("seed = true", ()),
        ("compile = 1", ()),
        ('deterministic = "on"', ()),
        ("length = 30", ()),
        ('precision = "bf61"', (Setting("precision", "bf16"),)),
        ("deep.optimizer.betas = [0.9]", ()),
        ('deep.layers = [1, "a"]', ()),
        ("warmup = 0.5", ()),
        ("seed = 1979-05-27", ()),
        ('seed = "None"', ()),
    ],
)
def test_a_value_of_another_type_in_a_file_is_told_with_where_and_what_instead(line, remedies):
    setting = line.partition(" ")[0]
    with refused("setting-of-wrong-type", setting=setting) as error:
        from_toml(line, Config, where="small.toml")
    assert error.value.remedies == remedies
    assert error.value.places == ("small.toml",)


@pytest.mark.parametrize(
    ("text", "line"),
    [("seed = 1\nlength = 30 epochs", 2), ("a = " + "[" * 10_000, None), ("program = 3", None)],
)
def test_what_is_no_file_of_settings_is_told_with_its_line(text, line):
    with refused("settings-file-not-readable", path="small.toml", line=line):
        program(text, where="small.toml")


def test_all_unknown_settings_are_problems_of_one_error():
    with pytest.raises(ConfigError) as caught:
        from_toml("\n".join(f"unknown{number} = 1" for number in range(20)), Config)
    named = [problem.fields["setting"] for problem in caught.value.problems]
    assert named == [f"unknown{number}" for number in range(20)]


def test_a_setting_without_default_is_asked_for():
    with refused("setting-missing", setting="length"):
        layered(TrainSettings, [])


def test_text_that_no_file_can_hold_is_refused_by_name():
    with refused("setting-out-of-range", setting="run_dir"):
        to_toml(dataclasses.replace(Config(), run_dir="\udcff"), {}, {})
    with refused("setting-out-of-range", setting="program.arguments"):
        to_toml(Config(), {}, {"arguments": ["--run-dir", "\udcff"]})


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("norm 1.0", ("norm", 1.0)),
        ("norm 1", ("norm", 1.0)),
        (" value  5e-1 ", ("value", 0.5)),
        ("adaptive 0.01", ("adaptive", 0.01)),
        ("auto 0.9", ("auto", 0.9)),
        ("off", ("off", math.inf)),
    ],
)
def test_clipping_reads_kind_and_limit(written, meant):
    assert clipping(written) == meant


@in_one
@pytest.mark.parametrize(
    "written",
    [
        "norm",
        "norm -1",
        "norm 0",
        "norm nan",
        "norm inf",
        "nrom 1",
        "off 1",
        "",
        "auto 1",
        "auto 90",
        "auto 0",
        "adaptive",
    ],
)
def test_a_limit_that_means_nothing_is_refused_with_what_to_type(written):
    with refused("clip-not-a-limit", value=written) as error:
        clipping(written)
    typed = [remedy.value for remedy in error.value.remedies]
    assert typed == ["norm 1.0", "value 0.5", "adaptive 0.01", "auto 0.9", "off"]


@pytest.mark.parametrize(
    ("given", "typed"), [(1.0, "norm 1.0"), (2, "norm 2.0"), ("0.5", "norm 0.5")]
)
def test_a_number_alone_as_limit_is_answered_with_the_one_that_was_meant(given, typed):
    with refused("clip-not-a-limit", value=given) as error:
        clipping(given)
    assert error.value.remedies[0] == Setting("clip", typed)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("epochs", "3", Setting("length", "3 epochs")),
        ("max_steps", "150", Setting("length", "150 steps")),
        ("epochs", "many", Setting("length")),
        ("lenght", "3", Setting("length")),
    ],
)
def test_a_number_of_another_librarys_setting_is_suggested_in_the_form_of_the_one_here(
    name, value, meant
):
    assert unknown_setting(name, ["seed", "length"], value=value).remedies == (meant,)


@in_one
@pytest.mark.parametrize("value", [True, False, -1, 5, 1.0, "3", None, math.nan])
def test_a_whole_number_within_bounds_is_no_truth_value_and_no_other_type(value):
    with refused("setting-out-of-range", setting="jobs"):
        number(min_value=0, below=5)(value, setting="jobs")


def test_the_smallest_number_is_allowed_and_the_upper_bound_is_not():
    number(min_value=0, below=5)(0, setting="jobs")
    number(min_value=0, below=5)(4, setting="jobs")
    number(min_value=0, below=1, kind=(int, float))(0.5, setting="share")
    for value in (1, True, math.nan, -0.1):
        with refused("setting-out-of-range", setting="share"):
            number(min_value=0, below=1, kind=(int, float))(value, setting="share")


@given(name=text)
def test_nearest_answers_anything_with_a_known_name_or_none(name):
    assert nearest(name, flatten(Config())) in {None, *flatten(Config())}


def test_configuration_does_not_import_torch():
    code = "import sys, surefoot.config, surefoot.schedules.lr_schedule; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_a_preset_says_of_an_optimizer_is_forgotten_with_another_one():
    from surefoot.recipes.gpt.config import Config as Gpt

    preset = {"optimizer.lr": 0.5, "optimizer.betas": (0.9, 0.95), "schedule.min_lr_ratio": 0.1}
    kept, _ = layered(Gpt, [("preset", preset), ("flag", {"optimizer.name": "adamw"})])
    other, origin = layered(
        Gpt, [("preset", preset), ("flag", {"optimizer.name": "sgd", "optimizer.momentum": 0.9})]
    )

    rates = {
        "optimizer.frozen": ("embedding.*",),
        "optimizer.layer_decay": 0.5,
        "optimizer.base_width": 64,
    }
    still, _ = layered(Gpt, [("file", preset | rates), ("flag", {"optimizer.name": "lion"})])

    assert (still.optimizer.lr, still.optimizer.frozen) == (
        None,
        ("embedding.*",),
    )  # which are about the model
    assert (still.optimizer.layer_decay, still.optimizer.base_width) == (0.5, 64)
    assert (kept.optimizer.lr, kept.optimizer.betas) == (0.5, (0.9, 0.95))
    assert (other.optimizer.lr, other.optimizer.betas, other.optimizer.momentum) == (
        None,
        None,
        0.9,
    )
    assert (origin["optimizer.lr"], origin["optimizer.name"], other.schedule.min_lr_ratio) == (
        "default",
        "flag",
        0.1,
    )


@pytest.mark.parametrize("recipe", ["gpt", "images", "translation", "finetune"])
@pytest.mark.parametrize("name", ["run_dir", "data.path", "init_from"])
def test_paths_in_flags_and_files_are_converted_before_a_recipe_reads_them(
    recipe, name, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    kind = importlib.import_module(f"surefoot.recipes.{recipe}.config").Config
    config, _ = layered(kind, [("file", {name: "~/a"})])
    assert flatten(config)[name] == f"{tmp_path}/a"
    with refused("path-empty", setting=name, value=""):
        layered(kind, [("flag", {name: ""})])
