"""The words of a command, such as RUN, may stand before, between or behind its flags; 2 seconds."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from command_line import output_of
from refused import refused
from surefoot.cli.help import Flag, flags_of
from surefoot.cli.main import VERBS
from surefoot.cli.options import target
from surefoot.cli.word_order import option_kinds, words_first
from surefoot.errors import Setting
from surefoot.recipes import NAMES


def values_of(flag: Flag) -> list[list[str]]:
    """Words that a flag may have behind it: none, one, or a pair."""
    if flag.is_switch:
        return [[]]
    text = str(flag.hint)
    if "..." in text or "Sequence" in text:
        return []  # it takes all words up to the next flag, as in argparse
    if "float, float" in text:
        return [["0.9", "0.95"]]
    if "bool" in text:
        return [[], ["True"], ["false"]]
    return [["7"]]


def assert_word_moves(verb: str, flag: Flag) -> None:
    """A word behind a flag and its values is put before it."""
    for values in values_of(flag):
        before = ["WORD", flag.typed, *values]
        behind = [flag.typed, *values, "WORD"]
        assert words_first(verb, behind) == before


@pytest.mark.parametrize("verb", VERBS)
def test_a_word_may_stand_behind_any_flag_of_its_subcommand(verb: str) -> None:
    for options in option_kinds(verb):
        for flag in flags_of(options, switches=True):
            if not flag.metavar:
                assert_word_moves(verb, flag)


@pytest.mark.parametrize("name", NAMES)
def test_a_word_may_stand_behind_any_setting_of_a_recipe(name: str) -> None:
    config = importlib.import_module(f"surefoot.recipes.{name}.config").Config
    predict = importlib.import_module(f"surefoot.recipes.{name}.predict").Predict
    for flag in flags_of(config):
        assert_word_moves("train", flag)
    for flag in flags_of(predict):
        assert_word_moves("predict", flag)


@pytest.mark.parametrize(
    ("verb", "typed", "ordered"),
    [
        (
            "predict",
            ["RUN", "--max-new-tokens", "5", "a text"],
            ["RUN", "a text", "--max-new-tokens", "5"],
        ),
        ("predict", ["--temperature=1", "RUN", "-"], ["RUN", "-", "--temperature=1"]),
        (
            "predict",
            ["RUN", "--mine", "5", "a text", "--top-k", "3"],
            ["RUN", "--mine", "5", "a text", "--top-k", "3"],
        ),
        ("report", ["a", "--out", "x.html", "b"], ["a", "b", "--out", "x.html"]),
        ("report", ["--watch", "runs/"], ["runs/", "--watch"]),
        ("compare", ["--metric", "min val/loss", "a", "b"], ["a", "b", "--metric", "min val/loss"]),
        (
            "compare",
            ["--vary", "seed=0,1", "--vary", "length=9,8", "gpt"],
            ["gpt", "--vary", "seed=0,1", "--vary", "length=9,8"],
        ),
        (
            "data",
            ["prepare", "--tokenizer", "bytes", "O", "I"],
            ["prepare", "O", "I", "--tokenizer", "bytes"],
        ),
        ("train", ["my.py:build", "--layers", "64", "32"], ["my.py:build", "--layers", "64", "32"]),
        ("train", ["--width", "64", "my.py:build"], ["my.py:build", "--width", "64"]),
        ("train", ["--model.smear", "2", "gpt"], ["gpt", "--model.smear", "2"]),
        ("train", ["--compile", "auto", "gpt"], ["gpt", "--compile", "auto"]),
        ("train", ["--trackers", "wandb,mlflow", "gpt"], ["gpt", "--trackers", "wandb,mlflow"]),
        (
            "train",
            ["gpt", "--trackers", "wandb", "mlflow"],
            ["gpt", "--trackers", "wandb", "mlflow"],
        ),
        ("resume", ["-h", "RUN"], ["RUN", "--help"]),
        ("report", ["--out", "x.html", "--", "a", "b"], ["a", "b", "--out", "x.html"]),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else case,
)
def test_words_stand_before_flags(verb: str, typed: list[str], ordered: list[str]) -> None:
    assert words_first(verb, typed) == ordered


@pytest.mark.parametrize("word", ["--hello", "-h", "--"])
def test_a_word_like_a_flag_behind_two_dashes_is_refused(word: str) -> None:
    with refused("word-like-a-flag", value=word):
        words_first("predict", ["RUN", "--", "a text", word])


def test_main_puts_them_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/config.toml").write_text('steps = 4\n[program]\nkind = "recipe"\n')
    (tmp_path / "runs/a/metrics.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    word_first = output_of(capsys, "diagnose", "a", "--json")
    flag_first = output_of(capsys, "diagnose", "--json", "a")
    assert '"findings"' in word_first
    assert flag_first == word_first


def test_a_word_that_a_flag_took_is_named() -> None:
    with refused("argument-missing", verb="verify") as caught:
        target(option_kinds("verify")[0], ["--tolerance", "runs/a"], verb="verify")
    assert "--tolerance runs/a" in str(caught.value.reason)
    with refused("argument-missing") as caught:
        target(option_kinds("verify")[0], [], verb="verify")
    assert caught.value.reason is None


@pytest.mark.parametrize(
    ("verb", "flag", "meant"),
    [("diagnose", "--jsn", "json"), ("report", "--wach", "watch"), ("verify", "--step", "steps")],
)
def test_a_misspelled_flag_is_named_before_a_run_and_behind_it(
    verb: str, flag: str, meant: str
) -> None:
    with refused("setting-unknown", setting=flag.removeprefix("--")) as caught:
        target(option_kinds(verb)[0], [flag, "runs/a"], verb=verb)
    (remedy,) = caught.value.remedies
    assert isinstance(remedy, Setting)
    assert remedy.name == meant


def test_an_unknown_argument_is_no_missing_run() -> None:
    with refused("argument-unknown", value="-x"):
        target(option_kinds("verify")[0], ["-x", "runs/a"], verb="verify")
