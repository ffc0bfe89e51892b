"""Findings in runs whose settings were changed on record: none for what a change explains, and each
one for the same records without the change. (5 s)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from diagnose.histories import (
    EVERY,
    RECORDS,
    always,
    data_check,
    event,
    falling,
    find,
    finds,
    history,
    judge,
    jump,
    noisy_gradients,
    scores,
    train,
    wobble,
)
from surefoot.config.setting_change import SettingChange
from surefoot.tools.diagnose.checks import CHECKS, format_findings, verdicts
from surefoot.tools.diagnose.finding import Finding, Unknown
from surefoot.tools.diagnose.history import History
from surefoot.tools.diagnose.reading import history_in
from surefoot.tools.diagnose.run_settings import RunDescription
from surefoot.tracking.record import Record

AT = 40  # the record at which settings change
CHANGED_AT = AT * EVERY


def changed(setting: str, was: Any, now: Any, *, step: int = CHANGED_AT) -> dict[str, Any]:
    """The fields of a run in which a setting was changed."""
    change = SettingChange(1, step, setting, was, now)
    return {"changes": (change,), "in_force": {setting: now}}


LR = changed("optimizer.lr", 1e-4, 1e-3)
BATCH = changed("batch_size", 8, 64)
CLIP = changed("clip", "norm 0.01", "norm 1.0")
DROPOUT = changed("dropout", 0.5, 0.0)


def up_for_a_while(place: int) -> float:
    """A loss that jumps at the change, and recovers within some records."""
    return falling(place) + (3.0 if AT <= place < AT + 4 else 0.0)


def higher_from(place: int) -> float:
    """A loss that is another quantity from the change on: it falls from a higher level."""
    return falling(place) if place < AT else 3 + falling(place - AT)


# a finding, what it would be found in, and the change that explains it
EXPLAINED: dict[str, tuple[str, Sequence[Record], dict[str, Any]]] = {
    "spike after another rate": ("loss-spikes", train(up_for_a_while), LR),
    "spike some steps after another rate": (
        "loss-spikes",
        train(lambda place: falling(place) + (3.0 if place == AT + 5 else 0.0)),
        LR,
    ),
    "spike of the largest loss": (
        "loss-spikes",
        train(loss_max=up_for_a_while, loss_max_step=lambda place: EVERY * (place + 1)),
        LR,
    ),
    "another dropout": ("diverged", train(higher_from), DROPOUT),
    "gradient of smaller batches": (
        "growing-gradient",
        train(grad_norm=lambda place: (0.5 if place < AT else 30.0) * (1 + 0.01 * place)),
        changed("batch_size", 64, 1),
    ),
    "throughput of smaller batches": (
        "falling-throughput",
        train(targets_per_s=lambda place: jump(100, 40, at=AT)(place) - 0.1 * place),
        changed("batch_size", 64, 8),
    ),
    "clipped before a looser limit": (
        "often-clipped",
        train(clip_fraction=jump(1.0, 0.95, at=RECORDS), grad_norm=always(5.0)),
        changed("clip", "norm 0.01", "norm 1.0", step=RECORDS * EVERY),
    ),
    "noise of the smaller batch": (
        "batch-too-small",
        noisy_gradients(8, 10_000.0, watched=8),
        changed("batch_size", 8, 64, step=RECORDS * EVERY),
    ),
    "improved by another rate": (
        "still-improving",
        [*train(), *scores([4, 3, 2.9, 2.8, 2.8, 2.8, 2.8, 2.8, 2.0, 1.8]), *event("finished")],
        changed("optimizer.lr", 1e-3, 1e-4, step=RECORDS * EVERY * 9 // 10),
    ),
    "overfitted before more dropout": (
        "overfitting",
        [*train(), *scores([2, 1, 1.5, 1.8, 2.0, 2.2])],
        changed("dropout", 0.0, 0.5),
    ),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_what_a_change_explains_is_no_finding(name: str) -> None:
    finding, records, change = EXPLAINED[name]
    assert finds(finding, history(records))
    assert not finds(finding, history(records, **change))


def spikes_later(place: int) -> float:
    return falling(place) + (3.0 if place == RECORDS - 6 else 0.0)


def rises_later(place: int) -> float:
    return falling(place) if place < RECORDS - 8 else 9.0


LATER: dict[str, tuple[str, Sequence[Record]]] = {
    "spike": ("loss-spikes", train(spikes_later)),
    "divergence": ("diverged", train(rises_later)),
    "gradient": (
        "growing-gradient",
        train(grad_norm=lambda place: 0.5 * 1.3 ** max(0, place - AT)),
    ),
    "throughput": (
        "falling-throughput",
        train(targets_per_s=lambda place: 100 - 4.0 * max(0, place - AT)),
    ),
    "clipping": ("often-clipped", train(clip_fraction=always(1.0), grad_norm=always(5.0))),
}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("change", [LR, BATCH, CLIP], ids=["lr", "batch_size", "clip"])
def test_what_goes_wrong_later_is_found_in_a_changed_run(name: str, change: Any) -> None:
    finding, records = LATER[name]
    assert finds(finding, history(records, **change))


@pytest.mark.parametrize("change", [LR, BATCH, CLIP, DROPOUT], ids=["lr", "batch", "clip", "loss"])
@pytest.mark.parametrize("at", [0, 1, 29, 30, 59, 60])
def test_a_healthy_run_is_healthy_whatever_was_changed_when(change: Any, at: int) -> None:
    (of_journal,) = change["changes"]
    step = {"changes": (SettingChange(1, EVERY * at, of_journal.setting, 1, 2),)}
    run = history(data_check(), train(), scores([4, 3, 2, 1.9, 1.89, 1.89]), **(change | step))
    assert [verdict for verdict in verdicts(run) if isinstance(verdict, Finding)] == []
    assert len(verdicts(run)) == len(CHECKS)


def too_high(place: int) -> float:
    return 4.0 + 0.2 * place if place < AT else falling(place - AT)


def test_a_rate_that_was_lowered_is_not_too_high_any_more() -> None:
    records = train(too_high)
    lowered = changed("optimizer.lr", 1e-2, 1e-4)
    assert finds("rate-too-high", history(records))
    assert not finds("rate-too-high", history(records, **lowered))


def test_a_rate_that_was_raised_too_far_is_found() -> None:
    def loss(place: int) -> float:
        return falling(place) if place < AT else 6.0 + 0.01 * wobble(place)

    assert finds("rate-too-high", history(train(loss), **LR))


def test_the_name_of_the_schedule_is_the_last_one_that_was_chosen() -> None:
    continued = {
        "shape": "continued",
        "first": {"shape": "one_cycle", "warmup": 500},
        "second": {"shape": "cosine", "warmup": 0},
        "at": 400,
    }
    run = history(train(), schedule=continued)
    assert run.described.shape == "cosine"
    assert run.described.last_warmup == (0, 200)
    assert not finds("long-warm-up", run)
    assert finds("long-warm-up", history(train(), schedule=continued | {"shape": "joined"}))


def test_fp16_that_was_left_explains_its_few_skipped_steps() -> None:
    skipped = train(skipped=jump(1.0, 0.0, at=5))
    left = changed("precision", "fp16", "fp32")
    assert find("non-finite-steps", history(skipped)).severity == "warning"
    assert find("non-finite-steps", history(skipped, **left)).severity == "note"


def test_a_decay_that_was_changed_says_nothing_about_the_average_of_all_steps() -> None:
    slow = {"ema": 0.9999, "ema_ramp": False, "behavior": 99}
    assert finds("average-too-slow", history(train(), **slow))
    verdict = judge("average-too-slow", history(train(), **slow, **changed("ema", 0.5, 0.9999)))
    assert isinstance(verdict, Unknown)


IN_FORCE = {
    "batch_size": 8,
    "clip": "off",
    "ema": 0.9,
    "optimizer.name": "adamw",
    "optimizer.lr": 3e-3,
    "optimizer.weight_decay": 0.1,
}


@pytest.mark.parametrize(
    ("name", "value", "typed"),
    [
        ("clip", "norm 1.0", "clip='norm 1.0'"),
        ("optimizer.lr", 1e-4, "optimizer.lr=0.0001"),
        ("batch_size", 64, "batch_size=64"),
        ("ema", 0.5, "ema=0.5"),
    ],
)
@pytest.mark.parametrize("program", ["recipe", "file", "script"])
def test_a_remedy_changes_a_run_that_goes_on(
    name: str, value: Any, typed: str, program: str
) -> None:
    run = RunDescription(name="runs/a b", program=program, in_force=IN_FORCE, goes_on=True)
    remedy = run.typed(name, value)
    assert remedy.startswith(f"surefoot change 'runs/a b' {typed} (now")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer.weight_decay", 0.0),
        ("workers", 4),
        ("model.dropout", 0.1),
        ("log_every", "1 steps"),
    ],
)
def test_what_cannot_change_keeps_its_flag(name: str, value: Any) -> None:
    run = RunDescription(program="recipe", in_force=IN_FORCE, goes_on=True)
    assert run.typed(name, value).startswith(f"--{name.replace('_', '-')}")


def test_a_run_that_is_over_gets_no_change_of_a_step() -> None:
    over = RunDescription(program="recipe", in_force=IN_FORCE)
    assert over.typed("clip", "norm 1.0").startswith("--clip")


# --- of real runs ---------------------------------------------------------------------------------


def run_in(run_dir: Path, **settings: Any) -> sf.Run:
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    chosen: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 1),
        "loss": lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        "train_data": (inputs, inputs.sum(1, keepdim=True)),
        "optimizer": sf.optim.sgd(lr=1e-2),
        "schedule": sf.schedules.cosine("10%"),
        "batch_size": 8,
        "length": "40 steps",
        "device": "cpu",
        "console": False,
        "report": False,
        "log_every": "1 steps",
        "run_dir": run_dir,
    }
    return sf.Run(**(chosen | settings))


def test_the_values_of_now_are_those_in_force(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="10 steps").train()
    before = history_in(tmp_path).described
    assert (before.lr, before.shape, before.steps) == (1e-2, "cosine", 40)
    sf.load(tmp_path).change(
        **{"optimizer.lr": 1e-3, "schedule": "linear", "length": "60 steps", "clip": "norm 2.0"}
    )

    def check(described: RunDescription) -> None:
        assert (described.lr, described.shape, described.steps) == (1e-3, "linear", 60)
        assert described.clip == ("norm", 2.0)
        assert described.goes_on
        assert len(described.changes) == 4

    check(history_in(tmp_path).described)  # before a step has them
    run_in(tmp_path, stop_after="20 steps").train()
    check(history_in(tmp_path).described)
    run_in(tmp_path).train()
    assert not history_in(tmp_path).described.goes_on


def test_a_change_that_is_to_come_holds_in_no_step_yet(tmp_path: Path) -> None:
    run_in(tmp_path / "changed", stop_after="30 steps").train()
    sf.load(tmp_path / "changed").change(clip="norm 2.0")
    journal = (tmp_path / "changed" / "changes.jsonl").read_bytes()
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "changes.jsonl").write_bytes(journal)
    run_in(tmp_path / "given", stop_after="10 steps").train()
    described = history_in(tmp_path / "given").described
    assert described.changes == ()
    assert described.clip is not None
    assert described.clip[0] == "off"


def test_findings_while_it_trains_know_the_changes(tmp_path: Path) -> None:
    from surefoot.run.after import live_findings_of

    run_in(tmp_path, stop_after="10 steps").train()
    sf.load(tmp_path).change(**{"optimizer.lr": 1e-3})
    run = run_in(tmp_path)
    described = live_findings_of(run.parts, None, resumed=True).described
    assert [change.from_step for change in described.changes] == [10]
    assert described.typed("optimizer.lr", 1e-4).startswith("surefoot change")
    assert described.lr == 1e-3


def test_the_report_of_findings_names_the_changes() -> None:
    run = history(train(), **LR)
    assert f"step {CHANGED_AT}" in format_findings(run, verdicts(run)).split("\n")[1]


def test_a_run_made_longer_after_its_end_is_not_judged_as_if_it_had_ended() -> None:
    improving = [*train(), *scores([4, 3, 2.5, 2.2, 1.5, 1.0]), *event("finished")]
    assert finds("still-improving", history(improving))
    longer: dict[str, Any] = changed("length", "600 steps", "900 steps", step=RECORDS * EVERY)
    run: History = history(improving, planned_steps=900, **longer)
    assert isinstance(judge("still-improving", run), Unknown)
    assert not finds("ended-early", run)


def test_of_several_optimizers_the_first_has_its_changed_values_and_its_name() -> None:
    of_beginning = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}
    present = {"optimizer.critic.lr": 1e-4, "optimizer.critic.weight_decay": 0.0}
    described = RunDescription(
        identity={"optimizer": {"critic": of_beginning, "actor": of_beginning}},
        in_force={**present, "optimizer.actor.lr": 1e-2},
        goes_on=True,
    )
    assert described.lr == 1e-4
    assert described.present("optimizer.weight_decay") == 0.0
    remedy = described.typed("optimizer.lr", 1e-5)
    assert remedy == "surefoot change RUN optimizer.critic.lr=1e-05 (now 0.0001)"
