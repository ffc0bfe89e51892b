"""The plan of a run: a table of settings and facts, and what each comes to. Nothing is built, read or
trained. 1 s.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest

import surefoot as sf
from refused import refused
from surefoot.config import speed_table
from surefoot.config.batch_size import batching
from surefoot.config.behavior import newest_behavior
from surefoot.config.parallel import Strategy
from surefoot.config.speed_table import Row
from surefoot.tracking.run_reader import Beginning, beginning_in, new_beginning
from surefoot.train.plan import (
    DataFacts,
    ModelFacts,
    Plan,
    Reasons,
    SizeFacts,
    WorldFacts,
    resolve,
    resolve_timeline,
)
from surefoot.train.run_settings import RunSettings

MEASURED = WorldFacts(device="cpu", computes_bf16=False, instructions="fast", torch="9.9")
UNMEASURED = replace(MEASURED, instructions="none")
GPU = WorldFacts(device="cuda", computes_bf16=True, instructions="none", torch="9.9")
OLD_GPU = replace(GPU, computes_bf16=False)

DATA = DataFacts(
    identity={"samples": 64},
    splits={"val": {"samples": 16}},
    first_batch=(True, (16, 3, 4, 4)),
)
MODELS = ModelFacts(
    optimizer={"name": "adamw", "lr": 1e-3},
    groups=({"lr": 1e-3},),
    every_group=({"lr": 1e-3},),
    layers="convolution",
    width=40,
    has_images=True,
    takes_closure=False,
    was_compiled=False,
)
SIZES = SizeFacts(batching(16, 16), epoch=64, step=16)
VARIED = replace(SIZES, varied="batches of many shapes")


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 and channels last are fast here, on one kind of processor."""
    gains = {"bf16": 2.0, "channels last": 1.3, "bf16, channels last": 4.0}
    rows = [Row("convolution", (1, 999), (1, 9999), (1, 1), gains)]
    monkeypatch.setattr(speed_table, "TABLE", {("fast", "9.9"): ("2026-11-30", rows)})
    monkeypatch.setattr(speed_table, "COMPILE", {"cpu": False})


def settings(**changes: Any) -> RunSettings:
    arguments: dict[str, Any] = {
        "model": None,
        "loss": lambda model, batch: model(batch),
        "train_data": (),
        "optimizer": None,
        "batch_size": 16,
        "length": "40 steps",
    }
    return RunSettings(**(arguments | changes))


def plan(
    *,
    world: WorldFacts = MEASURED,
    sizes: SizeFacts = SIZES,
    data: DataFacts = DATA,
    models: ModelFacts = MODELS,
    beginning: Beginning | None = None,
    kind: Any = "none",
    **changes: Any,
) -> Plan:
    chosen = settings(**changes)
    beginning = beginning or new_beginning()
    timeline = resolve_timeline(chosen, sizes, beginning, exact_sums=True)
    return resolve(chosen, world, timeline, data, models, beginning, parallel=Strategy(kind=kind))


def begun(identity: dict[str, Any] | None = None, **changes: Any) -> Beginning:
    """The beginning of a run that a plan began."""
    saved = json.loads(json.dumps(plan(**changes).identity))
    return beginning_in(saved | (identity or {}))


AUTO = {"precision": "auto", "channels_last": "auto"}


@pytest.mark.parametrize(
    ("changes", "precision", "channels_last"),
    [
        ({}, "fp32", False),
        ({"precision": "bf16"}, "bf16", False),
        (AUTO, "bf16", True),
        ({"precision": "auto"}, "bf16", False),
        ({"precision": "auto", "channels_last": True}, "fp32", True),  # another row: not measured
        ({"precision": "fp32", "channels_last": "auto"}, "fp32", False),
        ({**AUTO, "world": UNMEASURED}, "fp32", False),
        ({**AUTO, "world": OLD_GPU}, "fp32", False),
        ({**AUTO, "world": GPU}, "bf16", False),
        ({**AUTO, "loss": None}, "fp32", False),
        ({**AUTO, "models": replace(MODELS, layers=None)}, "fp32", False),
        ({**AUTO, "models": replace(MODELS, width=1000)}, "fp32", False),
        ({**AUTO, "data": replace(DATA, first_batch=None)}, "fp32", False),
        ({**AUTO, "data": replace(DATA, first_batch=(False, (16, 3, 4, 4)))}, "fp32", False),
        ({"channels_last": True, "models": replace(MODELS, has_images=False)}, "fp32", False),
    ],
)
def test_precision_and_memory_format(
    changes: dict[str, Any], precision: str, channels_last: bool
) -> None:
    resolved = plan(**changes)

    assert resolved.precision == resolved.identity["precision"] == precision
    assert resolved.channels_last == resolved.identity["channels_last"] == channels_last


@pytest.mark.parametrize(
    ("changes", "compiles"),
    [
        ({}, False),
        ({"compile": True}, True),
        ({"models": replace(MODELS, was_compiled=True)}, True),
        ({"compile": "auto"}, True),
        ({"compile": "auto", "world": GPU, "models": replace(MODELS, was_compiled=True)}, True),
        ({"compile": "auto", "world": GPU}, False),
        ({"compile": "auto", "kind": "fsdp"}, False),
        ({"compile": "auto", "loss": None}, False),
        ({"compile": "auto", "models": replace(MODELS, takes_closure=True)}, False),
        ({"compile": "auto", "sizes": VARIED}, False),
    ],
)
def test_compilation(
    changes: dict[str, Any], compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_table, "COMPILE", {"cpu": True})
    resolved = plan(**changes)

    assert resolved.compiles is compiles
    assert resolved.identity["compile"] is compiles


@pytest.mark.parametrize(
    "changes", [{"compile": True}, {"models": replace(MODELS, was_compiled=True)}]
)
def test_compiled_code_for_many_shapes_is_refused(changes: dict[str, Any]) -> None:
    with refused("compile-of-many-shapes", batches="batches of many shapes", value=True):
        plan(sizes=VARIED, **changes)


def test_a_run_goes_on_as_it_began_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr(speed_table, "COMPILE", {"cpu": True})
        beginning = begun(**AUTO, compile="auto")

    for world in (MEASURED, UNMEASURED, GPU, OLD_GPU):
        resumed = plan(world=world, beginning=beginning, **AUTO, compile="auto")
        assert (resumed.precision, resumed.channels_last, resumed.compiles) == ("bf16", True, True)
        assert resumed.reasons == Reasons()  # nothing was chosen now


def test_a_named_setting_is_what_it_says_whatever_the_run_began_with() -> None:
    beginning = begun(**AUTO)
    resumed = plan(beginning=beginning, precision="fp32", channels_last=False)

    assert resumed.precision == "fp32"
    assert not resumed.channels_last


@pytest.mark.parametrize(
    ("changes", "explained"),
    [
        ({}, set()),
        (AUTO, {"precision"}),
        ({**AUTO, "world": UNMEASURED}, {"precision"}),
        ({**AUTO, "world": GPU}, set()),
        ({**AUTO, "world": UNMEASURED, "loss": None}, {"precision"}),
        ({"compile": "auto"}, {"compile"}),
        ({"compile": "auto", "world": GPU}, {"compile"}),
    ],
)
def test_reasons_are_given_for_what_was_chosen(
    changes: dict[str, Any], explained: set[str]
) -> None:
    reasons = plan(**changes).reasons

    assert (reasons.precision is not None) == ("precision" in explained)
    assert (reasons.compile is not None) == ("compile" in explained)


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({}, False),
        (AUTO, False),
        ({**AUTO, "world": UNMEASURED}, True),
        ({**AUTO, "world": GPU}, False),
        ({**AUTO, "world": UNMEASURED, "loss": None}, False),  # it cannot be profiled
        ({"compile": "auto"}, False),
        ({"compile": "auto", "world": GPU}, True),
    ],
)
def test_what_could_be_measured_here_is_unknown(changes: dict[str, Any], unknown: bool) -> None:
    assert plan(**changes).reasons.unknown is unknown


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({}, "bf16"),
        (AUTO, None),
        ({**AUTO, "world": UNMEASURED}, None),
        ({**AUTO, "world": GPU}, None),
        ({**AUTO, "world": UNMEASURED, "loss": None}, None),
        ({"compile": "auto"}, "bf16"),
        ({"compile": "auto", "world": GPU}, "bf16"),
    ],
)
def test_reasons_say_what_auto_would_choose_where_a_precision_is_named(
    changes: dict[str, Any], precision: str | None
) -> None:
    auto = plan(**changes).reasons.auto

    if precision is None:
        assert auto is None
    else:
        assert auto is not None
        assert auto.precision == precision


# --- the timeline ---------------------------------------------------------------------------------


def timeline(beginning: Beginning | None = None, **changes: Any) -> Any:
    return resolve_timeline(
        settings(**changes), SIZES, beginning or new_beginning(), exact_sums=True
    )


@pytest.mark.parametrize(("length", "steps"), [("40 steps", 40), ("2 epochs", 8)])
def test_the_length_is_in_steps(length: str, steps: int) -> None:
    times = timeline(length=length).times
    assert (times.length.steps, times.began.steps, times.stop_step) == (steps, steps, steps)


def test_a_longer_run_keeps_the_intervals_and_rates_with_which_it_began() -> None:
    schedule = sf.schedules.wsd(warmup="10%", cooldown="20%")
    changes: dict[str, Any] = {"schedule": schedule, "evaluate_every": "25%"}
    beginning = begun(length="40 steps", **changes)
    resumed = plan(beginning=beginning, length="80 steps", **changes)

    evaluations = resumed.times.every["evaluate_every"]
    assert (resumed.times.length.steps, resumed.times.began.steps) == (80, 40)
    assert [done for done in range(1, 81) if evaluations.due(done)] == [*range(10, 81, 10)]
    assert resumed.schedule.warmup == 4
    assert resumed.identity["length"] == "80 steps"
    assert resumed.identity["schedule_of_steps"] == 40
    assert resumed.identity["schedule"] == plan(length="40 steps", **changes).identity["schedule"]


def test_a_schedule_that_does_not_fit_the_length_with_which_a_run_began_is_refused() -> None:
    beginning = begun(length="10 steps")
    with refused("schedule-of-shorter-run", sf.CheckpointError, steps=10):
        timeline(beginning, length="40 steps", schedule=sf.schedules.cosine(warmup=20))


def test_a_length_into_which_the_schedule_of_a_run_does_not_fit_is_refused() -> None:
    changes: dict[str, Any] = {"schedule": sf.schedules.wsd(warmup="25%", cooldown="20%")}
    beginning = begun(length="20 steps", **changes)
    with refused("length-changed", sf.CheckpointError, value="6 steps"):
        timeline(beginning, length="6 steps", **changes)


def test_a_length_without_a_unit_is_refused() -> None:
    with refused("duration-without-unit"):
        timeline(length="40")


def test_a_schedule_that_does_not_fit_a_length_is_refused() -> None:
    with refused("schedule-warmup-too-long"):
        timeline(length="40 steps", schedule=sf.schedules.cosine(warmup=50))


def test_a_new_run_has_the_newest_behavior_and_an_older_one_its_own() -> None:
    assert plan().behavior == newest_behavior()
    older = plan(beginning=begun({"behavior": 1}))
    assert older.behavior == 1
    assert "behavior" not in older.identity


def test_the_segments_hold_every_step_once() -> None:
    resolved = plan(length="40 steps")

    steps: list[int] = []
    for segment in resolved.segments:
        steps += range(segment.begin, segment.end)
    assert steps == list(range(40))
    for step in (0, 39, 40, 99):
        assert resolved.segment_of(step) == len(resolved.segments) - 1


def test_the_identity_is_json_and_equal_for_equal_facts() -> None:
    first = json.dumps(plan(**AUTO).identity)
    second = json.dumps(plan(**AUTO).identity)

    assert json.loads(first) == json.loads(second)


def test_an_identity_that_is_no_json_is_refused() -> None:
    with refused("settings-not-json", setting="settings"):
        plan(identity={"seen": {1, 2}})


def test_the_plan_is_resolved_without_torch() -> None:
    code = "import sys, surefoot.train.plan; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert answer.strip() == "False"


@pytest.mark.parametrize(
    ("changes", "name", "origin"),
    [
        ({}, "precision", "default"),
        ({"precision": "bf16"}, "precision", "given"),
        ({"precision": "auto"}, "precision", "auto"),
        ({"precision": "auto", "beginning": {"precision": "bf16"}}, "precision", "beginning"),
        ({"precision": "bf16", "beginning": {"precision": "bf16"}}, "precision", "given"),
        ({"channels_last": True}, "channels_last", "given"),
        ({"seed": 7}, "seed", "given"),
        ({}, "seed", "default"),
        ({}, "micro_batch_size", "auto"),
        ({"beginning": {}}, "micro_batch_size", "beginning"),
        ({"micro_batch_size": 4}, "micro_batch_size", "given"),
        ({}, "log_every", "auto"),
        ({"log_every": "3 steps"}, "log_every", "given"),
        ({}, "batch_size", "given"),
        ({"splits": None}, "splits", "default"),
    ],
)
def test_the_plan_says_where_each_setting_comes_from(
    changes: dict[str, Any], name: str, origin: str
) -> None:
    if "beginning" in changes:
        changes = changes | {"beginning": begun(changes["beginning"])}

    origins = plan(**changes).origins

    assert origins[name] == origin
    assert set(origins) == {field.name for field in fields(RunSettings)}
