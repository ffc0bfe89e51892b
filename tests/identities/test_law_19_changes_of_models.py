"""Law 19 for keywords of the model's factory, such as a dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import surefoot as sf
from identities.changed_runs import (
    CHANGED_AT,
    LAST,
    assert_same_end,
    given_the_journal_of,
    on_two_ranks,
    run_in,
)
from rank_processes import forks
from refused import refused
from surefoot.cli.main import _verb
from surefoot.tracking.change_journal import read_changes


def model(dropout: float = 0.0, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(dropout), nn.Linear(width, 1))


WITH_DROPOUT: dict[str, Any] = {"model": model, "model_settings": {"dropout": 0.2}}


@pytest.mark.parametrize("stopped_at", range(CHANGED_AT, LAST, 3))
def test_another_dropout_is_that_of_a_run_given_its_journal(
    stopped_at: int, tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    run_in(changed, stop_after=f"{CHANGED_AT} steps", **WITH_DROPOUT).train()
    sf.load(changed).change(**{"model.dropout": 0.5})
    run_in(changed, stop_after=f"{stopped_at} steps", **WITH_DROPOUT).train()
    run = run_in(changed, **WITH_DROPOUT)
    run.train()
    given = given_the_journal_of(changed, tmp_path / "given")
    run_in(given, **WITH_DROPOUT).train()
    assert_same_end(given, changed)

    (dropout,) = [part for part in run.state.model.modules() if isinstance(part, nn.Dropout)]
    assert dropout.p == 0.5
    unchanged = tmp_path / "unchanged"
    run_in(unchanged, **WITH_DROPOUT).train()
    assert rates_of_loss(unchanged)[:CHANGED_AT] == rates_of_loss(changed)[:CHANGED_AT]
    assert rates_of_loss(unchanged)[CHANGED_AT] != rates_of_loss(changed)[CHANGED_AT]


def rates_of_loss(run_dir: Path) -> list[float]:
    return [record["loss"] for record in sf.load(run_dir).records("train")]


@forks
def test_two_ranks_take_another_dropout(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**WITH_DROPOUT, "parallel": "ddp", "micro_batch_size": 4}
    changed = tmp_path / "changed"
    on_two_ranks(changed, stop_after=f"{CHANGED_AT} steps", **settings)
    sf.load(changed).change(**{"model.dropout": 0.5})
    on_two_ranks(changed, **settings)
    given = given_the_journal_of(changed, tmp_path / "given")
    on_two_ranks(given, **settings)
    assert_same_end(given, changed)


def test_a_changed_dropout_is_replayed_and_verified(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after=f"{CHANGED_AT} steps", **WITH_DROPOUT).train()
    sf.load(tmp_path).change(**{"model.dropout": 0.5})
    run_in(tmp_path, **WITH_DROPOUT).train()
    saved = sf.load(run_in(tmp_path, **WITH_DROPOUT))
    losses = rates_of_loss(tmp_path)
    for step in (CHANGED_AT, CHANGED_AT + 2):
        assert saved.replay(step).look.loss == losses[step]
    assert saved.verify(steps="all").problems == []


@pytest.mark.parametrize("of_program", [0.2, 0.5])
def test_a_program_may_have_either_dropout(of_program: float, tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="4 steps", **WITH_DROPOUT).train()
    sf.load(tmp_path).change(**{"model.dropout": 0.5})
    run_in(tmp_path, stop_after="6 steps", **WITH_DROPOUT).train()
    run_in(tmp_path, model=model, model_settings={"dropout": of_program}).train()
    assert sf.load(tmp_path).step == LAST
    with refused("changed-setting-differs", value=0.1):
        run_in(tmp_path, model=model, model_settings={"dropout": 0.1})


def test_another_dropout_in_the_program_alone_is_told_the_line_to_type(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="4 steps", **WITH_DROPOUT).train()
    with pytest.raises(sf.CheckpointError) as refusal:
        run_in(tmp_path, model=model, model_settings={"dropout": 0.5}).train()
    assert refusal.value.code == "settings-changed"
    assert "model.dropout=0.5" in str(refusal.value.remedies[0])


@pytest.mark.parametrize(
    ("setting", "value", "code"),
    [
        ("model.dropout", 1.0, "setting-out-of-range"),
        ("model.dropout", "much", "setting-out-of-range"),
        ("model.width", 16, "setting-cannot-change"),
    ],
)
def test_what_a_model_cannot_be_is_refused(
    setting: str, value: Any, code: str, tmp_path: Path
) -> None:
    run_in(tmp_path, stop_after="2 steps", **WITH_DROPOUT).train()
    with refused(code):
        sf.load(tmp_path).change(**{setting: value})
    assert read_changes(tmp_path) == ()


def test_a_keyword_that_decides_a_parameter_is_refused_when_the_run_goes_on(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"model": model, "model_settings": {"width": 8}}
    run_in(tmp_path, stop_after="2 steps", **settings).train()
    sf.load(tmp_path).change(**{"model.width": 16})
    with pytest.raises(sf.CheckpointError):
        run_in(tmp_path, **settings).train()
    sf.load(tmp_path).change(**{"model.width": 8})
    run_in(tmp_path, **settings).train()
    assert sf.load(tmp_path).step == LAST


def test_another_activation_in_the_program_is_refused_beside_a_change(tmp_path: Path) -> None:
    def other(dropout: float) -> nn.Module:
        built = model(dropout)
        built[1] = nn.AlphaDropout(dropout)  # type: ignore[index]
        return built

    run_in(tmp_path, stop_after="2 steps", **WITH_DROPOUT).train()
    sf.load(tmp_path).change(**{"model.dropout": 0.5})
    with refused("model-changed", sf.CheckpointError):
        run_in(tmp_path, model=other, model_settings={"dropout": 0.2}).train()


def test_settings_of_a_model_need_a_factory_that_takes_them(tmp_path: Path) -> None:
    with refused("model-settings-without-factory"):
        run_in(tmp_path, model=nn.Linear(4, 1), model_settings={"dropout": 0.2})
    with refused("model-settings-not-taken"):
        run_in(tmp_path, model=lambda: nn.Linear(4, 1), model_settings={"dropout": 0.2})
    with refused("setting-out-of-range"):
        run_in(tmp_path, model=model, model_settings={"dropout": [0.2]})


def test_the_dropout_of_a_recipe_changes(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 200)
    run = tmp_path / "run"
    begin = [
        "train",
        "gpt",
        "--data.path",
        str(text),
        "--model.layers",
        "1",
        "--model.width",
        "16",
        "--model.heads",
        "2",
        "--model.context",
        "16",
        "--batch-size",
        "4",
        "--length",
        "8 steps",
        "--log-every",
        "1 steps",
        "--report",
        "False",
        "--tensorboard",
        "False",
    ]
    _verb([*begin, "--run-dir", str(run), "--stop-after", "4 steps"])
    _verb(["resume", str(run), "--change", "model.dropout=0.5", "--stop-after", "6 steps"])
    _verb(["resume", str(run)])
    given = given_the_journal_of(run, tmp_path / "given")
    _verb([*begin, "--run-dir", str(given)])
    assert_same_end(given, run, step=8)
    (change,) = read_changes(run)
    assert (change.setting, change.was, change.now) == ("model.dropout", 0.0, 0.5)
