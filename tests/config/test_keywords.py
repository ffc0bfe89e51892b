"""A keyword that does not exist is refused with the line to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.config.keywords import known_keywords

RUN: dict[str, Any] = {
    "model": lambda: nn.Linear(1, 1),
    "train_data": (torch.zeros(4, 1),),
    "optimizer": sf.optim.sgd(lr=0.1),
    "batch_size": 2,
}


def refusal(constructor: Callable[..., Any], **keywords: Any) -> str:
    with pytest.raises(sf.ConfigError) as refused:
        constructor(**keywords)
    return str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"epochs": 30}, 'length="30 epochs"'),
        ({"num_train_epochs": 3}, 'length="3 epochs"'),
        ({"steps": 100}, 'length="100 steps"'),
        ({"max_steps": 100}, 'length="100 steps"'),
        ({"output_dir": "runs/a"}, 'run_dir="runs/a"'),
        ({"eval_dataset": [1]}, 'splits={"val": sf.Split(...)}'),
        ({"learning_rate": 1e-3}, "optimizer=sf.optim.adamw(lr=0.001)"),
        ({"lr": 0.1}, "optimizer=sf.optim.adamw(lr=0.1)"),
        ({"num_workers": 4}, "workers=4"),
        ({"gradient_accumulation_steps": 4}, "micro_batch_size=batch_size // 4"),
        ({"train_dataset": [1]}, "train_data=..."),
        ({"max_grad_norm": 1.0}, 'clip="norm 1.0"'),
        ({"eval_every": "1 epochs"}, 'evaluate_every="1 epochs"'),
        ({"fp16": True}, 'precision="fp16"'),
        ({"bf16": True}, 'precision="bf16"'),
        (
            {"scheduler": "cosine"},
            "schedule=sf.schedules.cosine(...), or from a torch scheduler: sf.schedules.from_scheduler(factory)",
        ),
        ({"lenght": "3 epochs"}, 'length="3 epochs"'),
        ({"early_stoping": None}, "early_stopping=..."),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_a_run_names_the_keyword_that_is_meant_with_its_value(
    wrong: dict[str, Any], right: str
) -> None:
    first, _, last = refusal(sf.Run, **RUN, **wrong).splitlines()
    assert first.startswith(f"Run({next(iter(wrong))}=")
    assert last == f"  write {right}"


def test_callbacks_have_the_body_of_the_loop_instead() -> None:
    assert "`for step in run:`" in refusal(sf.Run, callbacks=[])


def test_a_keyword_like_no_other_is_refused_too() -> None:
    assert refusal(sf.Run, colour=1).splitlines()[0] == "Run(colour=1): Run has no keyword colour"


@pytest.mark.parametrize(
    ("constructor", "wrong", "right"),
    [
        (sf.optim.adamw, {"learning_rate": 0.1}, "lr=0.1"),
        (sf.optim.sgd, {"lr": 0.1, "momentun": 0.9}, "momentum=0.9"),
        (sf.Split, {"dataset": "a"}, 'data="a"'),
        (sf.Split, {"data": "a", "scores": 1}, "metrics=1"),
        (sf.Split, {"data": "a", "outputs": 1}, "predict=1"),
        (sf.data.load_images, {"val_split": 0.2}, "val_fraction=0.2"),
        (sf.data.Mixture, {"part": 1}, "parts=1"),
        (sf.schedules.cosine, {"warmup_steps": 10}, 'warmup="10 steps"'),
        (sf.schedules.wsd, {"min_lr": 0.1}, "min_lr_ratio=0.1"),
        (sf.EarlyStopping, {"watch": "min val/loss"}, 'monitor="min val/loss"'),
    ],
)
def test_so_does_every_other_constructor(
    constructor: Callable[..., Any], wrong: dict[str, Any], right: str
) -> None:
    assert refusal(constructor, **wrong).splitlines()[-1] == f"  write {right}"


@pytest.mark.parametrize(
    ("constructor", "given", "says"),
    [
        (
            sf.optim.LRMultipliers,
            {"factors": len},
            ("missing identity", 'LRMultipliers(..., identity={"my_rule": 1})'),
        ),
        (
            sf.optim.LRMultipliers,
            {"factors": {}, "identity": {}},
            ("is not a function", "LRMultipliers(lambda model: {"),
        ),
        (
            sf.EarlyStopping,
            {"monitor": "min val/loss"},
            ("missing patience", "EarlyStopping(..., patience=5)"),
        ),
        (sf.optim.adamw, {}, ("missing lr", "adamw(..., lr=...)")),
    ],
)
def test_a_keyword_that_is_missing_is_named_with_what_to_write(
    constructor: Callable[..., Any], given: dict[str, Any], says: tuple[str, str]
) -> None:
    first, _, last = refusal(constructor, **given).splitlines()
    assert says[0] in first
    assert last.startswith(f"  write {says[1]}")


def test_arguments_by_position_that_are_too_many_are_an_error_of_ours() -> None:
    with pytest.raises(sf.ConfigError, match="too many positional arguments\n  its keywords: lr, "):
        sf.optim.adamw(0.1, 0.2, 0.3)  # type: ignore[misc]


@pytest.mark.parametrize("setting", ["length", "stop_after", "evaluate_every", "save_every"])
def test_a_duration_without_a_unit_names_both(setting: str) -> None:
    message = refusal(sf.Run, **{"length": "2 steps", **RUN, setting: 30})
    assert f'{setting}="30 epochs" or {setting}="30 steps"' in message


def test_signatures_and_docstrings_are_those_of_the_functions() -> None:
    assert list(inspect.signature(sf.optim.adamw).parameters)[:2] == ["lr", "weight_decay"]
    assert (sf.optim.adamw.__doc__ or "").startswith("Specify Adam")
    assert next(iter(inspect.signature(sf.Split).parameters)) == "data"
    assert "model" in inspect.signature(sf.Run).parameters


def test_arguments_without_a_name_of_their_own_are_not_asked_for() -> None:
    assert known_keywords(lambda first, *others, **named: (first, others))(1) == (1, ())
