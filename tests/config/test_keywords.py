"""A keyword that does not exist is refused with the line to write instead."""

from __future__ import annotations

import inspect
import json
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import surefoot as sf
from refused import refused
from surefoot.config.closest import closest
from surefoot.config.keywords import _METHODS, known_keywords
from surefoot.errors import Setting

RUN: dict[str, Any] = {
    "model": lambda: nn.Linear(1, 1),
    "train_data": (torch.zeros(4, 1),),
    "optimizer": sf.optim.sgd(lr=0.1),
    "batch_size": 2,
}


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
        ({"Epochs": 3}, 'length="3 epochs"'),
        ({"learningRate": 3}, "optimizer=sf.optim.adamw(lr=3)"),
        ({"Batch_Size": 3}, "batch_size=3"),
        ({"batchSize": 3}, "batch_size=3"),
        ({"report_to": "wandb"}, 'trackers="wandb"'),
        ({"shuffle": True}, 'order="shuffled", which is the default, or order="sequential"'),
        ({"early_stoping": None}, "early_stopping=..."),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_a_run_names_the_keyword_that_is_meant_with_its_value(
    wrong: dict[str, Any], right: str
) -> None:
    keyword = next(iter(wrong))
    with refused("keyword-unknown", setting=keyword) as error:
        sf.Run(**RUN, **wrong)
    assert error.value.remedies == (f"write {right}",)
    assert str(error.value.problem).startswith(f"Run({keyword}=")


def test_callbacks_have_the_body_of_the_loop_instead() -> None:
    with refused("keyword-unknown", setting="callbacks") as error:
        sf.Run(callbacks=[])
    assert "`for step in run:`" in str(error.value.remedies[0])


@pytest.mark.parametrize(
    "word", ["logger", "loggers", "dropout", "drop_last", "pin_memory", "log_level", "verbose"]
)
def test_a_word_of_another_meaning_suggests_no_keyword(word: str) -> None:
    """Its letters are those of trackers, report, keep_last or log_every, and no stem is common."""
    with refused("keyword-unknown", setting=word) as error:
        sf.Run(**RUN, **{word: True})
    assert not [text for text in error.value.remedies if str(text).startswith("write ")]


@pytest.mark.parametrize(
    ("word", "names", "match"),
    [
        ("adamW", ["adam", "adamw"], "adamw"),
        ("SGD", ["sgd", "sgdm"], "sgd"),
        ("early-stopping", ["early_stopping"], "early_stopping"),
        ("tep", ["random", "tpe"], "tpe"),
        ("gpd", ["gpt", "images"], "gpt"),
        ("cosinus", ["constant", "cosine"], "cosine"),
        ("evaluate", ["evaluate_every"], "evaluate_every"),
        ("shuffle", ["schedule"], None),
        ("logger", ["log_every", "trackers"], None),
        ("anything", [], None),
    ],
)
def test_the_closest_name_has_the_stem_in_any_case(
    word: str, names: list[str], match: str | None
) -> None:
    assert closest(word, names) == match


def run_of(**changes: Any) -> sf.Run:
    return sf.Run(**RUN | {"length": "2 steps", "console": False} | changes)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fit", "write run.train()"),
        ("validate", "write run.evaluate()"),
        ("test", 'write run.evaluate("test")'),
        ("save_checkpoint", "write run.save()"),
        ("global_step", "write run.state.step"),
        ("epochs", "write run.length"),
        ("trian", "write run.train"),
        ("colour", ""),
        ("_private", ""),
    ],
)
def test_an_attribute_of_another_library_is_an_attribute_error_with_a_hint(
    name: str, hint: str
) -> None:
    run = run_of()
    assert not hasattr(run, name)
    with pytest.raises(AttributeError) as error:
        getattr(run, name)
    first, *rest = str(error.value).splitlines()
    assert first == f"Run has no attribute {name}"
    assert rest == ([f"  {hint}"] if hint else [])


def test_each_hint_names_something_that_a_run_has() -> None:
    run = run_of()
    for text in _METHODS.values():
        for names in re.findall(r"run\.([a-z_.]+[a-z])", text):
            operator.attrgetter(names)(run)


def test_a_keyword_like_no_other_is_refused_too() -> None:
    with refused("keyword-unknown", setting="colour") as error:
        sf.Run(colour=1)
    assert error.value.remedies == ()


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
    with refused("keyword-unknown", setting=[*wrong][-1]) as error:
        constructor(**wrong)
    assert error.value.remedies == (f"write {right}",)


@pytest.mark.parametrize(
    ("constructor", "given", "setting", "line"),
    [
        (
            sf.optim.LRMultipliers,
            {"factors": len},
            "identity",
            'LRMultipliers(..., identity={"my_rule": 1})',
        ),
        (
            sf.EarlyStopping,
            {"monitor": "min val/loss"},
            "patience",
            "EarlyStopping(..., patience=5)",
        ),
        (sf.optim.adamw, {}, "lr", "adamw(..., lr=...)"),
    ],
)
def test_a_keyword_that_is_missing_is_named_with_what_to_write(
    constructor: Callable[..., Any], given: dict[str, Any], setting: str, line: str
) -> None:
    with refused("keyword-missing", setting=setting) as error:
        constructor(**given)
    assert str(error.value.remedies[0]).startswith(f"write {line}")


def test_factors_that_are_no_function_are_refused() -> None:
    with pytest.raises(sf.ConfigError):
        sf.optim.LRMultipliers(factors={}, identity={})  # type: ignore[arg-type]


def test_arguments_by_position_that_are_too_many_are_an_error_of_ours() -> None:
    with refused("arguments-do-not-fit", called="adamw"):
        sf.optim.adamw(0.1, 0.2, 0.3)  # type: ignore[misc]


@pytest.mark.parametrize("setting", ["length", "stop_after", "evaluate_every", "save_every"])
def test_a_duration_without_a_unit_names_both(setting: str) -> None:
    with refused("duration-without-unit", setting=setting) as error:
        sf.Run(**{"length": "2 steps", **RUN, setting: 30})
    assert {Setting(setting, "30 epochs"), Setting(setting, "30 steps")} <= {*error.value.remedies}


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
        return json.loads(json.dumps(sf.Run(**keywords).parts.plan.identity))

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
