"""A keyword that does not exist is refused with the line to write instead."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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


# --- numbers of NumPy -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.array])
def test_every_setting_takes_numbers_of_numpy(kind: Any, tmp_path: Path) -> None:
    """The settings with numbers of NumPy are those with the same numbers of Python."""
    whole = np.int64

    def settings(number: Any, count: Any) -> dict[str, Any]:
        many = sf.optim.LRMultipliers(lambda model: {"bias": number(0.5)}, identity={"a": count(1)})
        rule = {"patience": count(2), "min_delta": number(0.5)}
        return RUN | {
            "model": lambda: nn.Linear(1, 1),
            "loss": lambda model, batch: model(batch[0]).square().mean(),
            "optimizer": sf.optim.adamw(
                number(0.25), betas=(number(0.5), 0.75), eps=number(0.125), lr_multipliers=[many]
            ),
            "schedule": sf.schedules.multistep(milestones=[count(1), count(2)], gamma=number(0.5)),
            "batch_size": count(2),
            "micro_batch_size": count(1),
            "seed": count(3),
            "workers": count(0),
            "keep_last": count(1),
            "max_bad_steps": count(3),
            "ema": number(0.5),
            "length": "4 steps",
            "count_fn": lambda batch: count(len(batch[0])),
            "identity": {"mine": [number(0.5), {"n": count(2)}]},
            "splits": {"val": sf.Split((torch.zeros(4, 1),), batch_size=count(2))},
            "early_stopping": sf.EarlyStopping("min val/loss", patience=count(9)),
            "plateau": sf.ReduceLROnPlateau("min val/loss", factor=number(0.5), **rule),
            "run_dir": tmp_path / "run",
            "console": False,
            "report": False,
        }

    def identity(**keywords: Any) -> Any:
        return json.loads(json.dumps(sf.Run(**keywords).parts.identity))

    found = settings(kind, whole)
    assert identity(**found) == identity(**settings(float, int))
    sf.Run(**found).train()
    sf.Run(**settings(float, int)).train()  # resumes it
    assert sf.load(tmp_path / "run").step == 4


def test_numbers_of_numpy_are_registered_and_logged(tmp_path: Path) -> None:
    run = sf.Run(
        **RUN,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        length="2 steps",
        run_dir=tmp_path / "run",
        console=False,
        report=False,
    )
    own = {"share": np.float32(0.1), "n": np.int64(3), "flag": np.bool_(True)}
    run.register_state("own", own)
    with run:
        for step in run:
            own["share"] = np.float32(own["share"] * 2)
            step.log(mine=np.float32(0.5), count=np.int64(2))
    again = {"share": np.float32(0.0), "n": np.int64(0), "flag": np.bool_(False)}
    resumed = sf.Run(
        **RUN, loss=run.loss, length="2 steps", run_dir=tmp_path / "run", console=False
    )
    resumed.register_state("own", again)
    with resumed:
        pass
    assert again == own
    assert type(again["share"]) is np.float32
    assert [record["mine"] for record in sf.load(tmp_path / "run").records("train")][-1] == 0.5
