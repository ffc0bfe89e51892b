"""Which settings a run has at each step, from its program and its journal of changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import surefoot as sf
from refused import refused
from surefoot.config.batch_size import batching
from surefoot.config.setting_change import SettingChange
from surefoot.tools.change.change import naming_way_out
from surefoot.train.changed_settings import (
    Wish,
    changeable,
    changes_of,
    described,
    history_of,
    values_at,
    with_values,
)
from surefoot.train.run_settings import RunSettings

SIZES = batching(8, 4)


def settings(**given: Any) -> RunSettings:
    chosen: dict[str, Any] = {
        "model": lambda: None,
        "train_data": (),
        "optimizer": sf.optim.adamw(lr=1e-2),
        "schedule": sf.schedules.cosine("5%"),
        "batch_size": 8,
        "length": "3 epochs",
    }
    return RunSettings(**(chosen | given))


def changes(*wishes: Wish, at: int = 10, **given: Any) -> list[SettingChange]:
    return changes_of(changeable(settings(**given)), wishes, from_step=at, sizes=SIZES)


def test_values_survive_their_way_through_settings() -> None:
    values = changeable(settings())
    assert changeable(with_values(settings(length="1 epochs", clip="norm 2.0"), values)) == values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer.lr", 1e-3),
        ("optimizer.weight_decay", 0.3),
        ("optimizer.betas", [0.8, 0.9]),
        ("clip", "norm 1.0"),
        ("length", "5 epochs"),
        ("max_bad_steps", 2),
        ("precision", "bf16"),
        ("micro_batch_size", 2),
    ],
)
def test_a_change_holds_from_its_step_on_and_not_before(name: str, value: Any) -> None:
    history = history_of(settings(), changes(Wish(name, value)))
    assert [segment.begin for segment in history] == [0, 10]
    before, after = [changeable(segment.settings)[name] for segment in history]
    assert before == changeable(settings())[name]
    assert after == value


def test_changes_at_one_step_are_one_segment_and_the_last_value_counts() -> None:
    first = changes(Wish("clip", "norm 1.0"), Wish("optimizer.lr", 1e-3))
    second = SettingChange(0, 10, "clip", "norm 1.0", "off")
    history = history_of(settings(), [*first, second])
    assert [segment.begin for segment in history] == [0, 10]
    assert history[-1].settings.clip == "off"


def test_values_at_a_step_are_those_of_its_segment() -> None:
    line = changes(Wish("batch_size", 16))
    values = changeable(settings())
    assert values_at(values, line, 9)["batch_size"] == 8
    assert values_at(values, line, 10)["batch_size"] == 16
    assert values_at(values, line, 10)["micro_batch_size"] == 4


@pytest.mark.parametrize(("size", "micro_batch"), [(16, 4), (12, 4), (6, 3), (2, 2), (7, 1)])
def test_micro_batches_stay_as_large_or_become_the_next_smaller_divisor(
    size: int, micro_batch: int
) -> None:
    (line,) = changes(Wish("batch_size", size))
    assert line.follows == {"micro_batch_size": [4, micro_batch]}


def test_micro_batches_that_are_given_follow_nothing() -> None:
    lines = changes(Wish("batch_size", 16), Wish("micro_batch_size", 8))
    assert [dict(line.follows) for line in lines] == [{}, {}]


def test_parts_of_a_schedule_are_one_change() -> None:
    (line,) = changes(Wish("schedule.name", "wsd"), Wish("schedule.cooldown", "30%"))
    assert line.setting == "schedule"
    assert line.now == {"shape": "wsd", "warmup": 0, "cooldown": "30%"}


def test_a_part_of_a_schedule_alone_begins_it_anew() -> None:
    (line,) = changes(Wish("schedule.min_lr_ratio", 0.1))
    assert line.now == {"shape": "cosine", "warmup": 0, "min_lr_ratio": 0.1}


def test_a_program_has_the_values_of_the_beginning_or_the_present_ones() -> None:
    line = changes(Wish("clip", "norm 1.0"))
    of_beginning = history_of(settings(), line)
    of_now = history_of(settings(clip="norm 1.0"), line)
    assert [changeable(segment.settings) for segment in of_beginning] == [
        changeable(segment.settings) for segment in of_now
    ]
    with refused("changed-setting-differs", setting="clip", value="norm 2.0"):
        history_of(settings(clip="norm 2.0"), line)


def test_an_optimizer_of_the_program_has_no_settings_that_change() -> None:
    with refused("change-of-own-optimizer", setting="optimizer.lr"):
        changes(Wish("optimizer.lr", 1e-3), optimizer=lambda parameters: None)


def test_a_run_without_early_stopping_has_no_patience_to_change() -> None:
    with refused("rule-incomplete", setting="early_stopping", missing=["monitor"]):
        changes(Wish("early_stopping.patience", 3))
    rule = sf.EarlyStopping("min val/loss", patience=2)
    (line,) = changes(Wish("early_stopping.patience", 3), early_stopping=rule)
    history = history_of(settings(early_stopping=rule), [line])
    assert [segment.settings.early_stopping.patience for segment in history] == [2, 3]  # type: ignore[union-attr]


def test_a_rule_that_was_off_begins_again_with_the_parts_that_it_had() -> None:
    rule = {"monitor": "max val/accuracy", "patience": 7, "min_delta": 0.0}
    off = SettingChange(1, 5, "early_stopping", rule, None)
    values = changeable(settings())
    sizes = dataclasses.replace(batching(4, None), micro_batch_size=4)
    with refused("rule-incomplete", example={"monitor": "max val/accuracy"}):
        changes_of(
            values,
            [Wish("early_stopping.patience", 2)],
            from_step=10,
            sizes=sizes,
            earlier=[off],
        )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lr", ["optimizer.lr"]),
        ("weight_decay", ["optimizer.weight_decay"]),
        ("optimizer.name", []),
        ("batchsize", ["batch_size"]),
        ("seed", []),
    ],
)
def test_a_setting_that_is_no_change_names_the_one_that_is_meant(
    name: str, meant: list[str]
) -> None:
    with refused("setting-cannot-change", setting=name, meant=meant), naming_way_out():
        changes(Wish(name, 1))


def test_a_rate_of_several_optimizers_means_each_of_them() -> None:
    optimizers = {"one": sf.optim.adamw(lr=1e-3), "other": sf.optim.adamw(lr=1e-3)}
    meant = ["optimizer.one.lr", "optimizer.other.lr"]
    with refused("setting-cannot-change", meant=meant), naming_way_out():
        changes(Wish("lr", 1e-4), optimizer=optimizers)


def test_a_micro_batch_size_that_stays_is_not_told() -> None:
    line = SettingChange(1, 5, "batch_size", 8, 16, {"micro_batch_size": [8, 8]})
    assert "micro_batch_size" not in described(line)
    smaller = SettingChange(1, 5, "batch_size", 8, 12, {"micro_batch_size": [8, 6]})
    assert "micro_batch_size" in described(smaller)
