"""Law 19 for parts of a model that are frozen and unfrozen while a run goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from identities.changed_runs import (
    CHANGED_AT,
    LAST,
    assert_same_end,
    data,
    given_the_journal_of,
    halved,
    loss,
    on_two_ranks,
    run_in,
    tensors_of,
)
from identities.test_law_19_changes_of_optimizers import several
from rank_processes import forks
from refused import refused
from surefoot.cli.main import _verb
from surefoot.run.run import Run
from surefoot.tracking.change_journal import read_changes

FIRST = ["0.*"]
BIASES = ["*.bias"]
PARTS = [(FIRST, None), (None, FIRST), (FIRST, ["2.*"]), (None, BIASES), (BIASES, FIRST)]
"""What is frozen before a change and after it. A change of biases changes the groups."""


def settings_of(frozen: list[str] | None, **settings: Any) -> dict[str, Any]:
    lr_multipliers = [] if frozen is None else [sf.optim.frozen(*frozen)]
    adamw = sf.optim.adamw(1e-2, weight_decay=0.1, lr_multipliers=lr_multipliers)
    return {"optimizer": adamw, **settings}


@pytest.mark.parametrize(("before", "after"), PARTS)
@pytest.mark.parametrize("stopped_at", [CHANGED_AT, CHANGED_AT + 1, CHANGED_AT + 2, LAST - 1])
def test_other_parts_are_frozen_as_in_a_run_given_its_journal(
    before: list[str] | None, after: list[str] | None, stopped_at: int, tmp_path: Path
) -> None:
    settings = settings_of(before)
    changed = tmp_path / "changed"
    run_in(changed, stop_after=f"{CHANGED_AT} steps", **settings).train()
    sf.load(changed).change("a test", **{"optimizer.frozen": after})
    run_in(changed, stop_after=f"{stopped_at} steps", **settings).train()
    run_in(changed, **settings).train()

    given = given_the_journal_of(changed, tmp_path / "given")
    run_in(given, **settings).train()
    assert_same_end(given, changed)

    at_change = tensors_of(changed, CHANGED_AT)
    at_end = tensors_of(changed, LAST)
    assert equal_names(at_change, at_end) == names_of(after)
    has_state = {name.split("/")[1] for name in at_end if name.startswith("optimizer/")}
    assert has_state == ALL - names_of(after)


ALL = {"0.weight", "0.bias", "2.weight", "2.bias"}


def names_of(frozen: list[str] | None) -> set[str]:
    return {name for name in ALL for pattern in frozen or [] if Path(name).match(pattern)}


def equal_names(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in ALL if torch.equal(one[f"model/{name}"], other[f"model/{name}"])}


OPTIMIZERS: dict[str, Any] = {
    "adam": sf.optim.adam,
    "sgd": lambda lr, **settings: sf.optim.sgd(lr, momentum=0.9, weight_decay=0.1, **settings),
    "lion": sf.optim.lion,
    "adafactor": sf.optim.adafactor,
    "muon": sf.optim.muon,
    "nadam": sf.optim.nadam,
    "radam": sf.optim.radam,
    "adamw8bit": sf.optim.adamw8bit,
    "schedule_free": sf.optim.schedule_free,
    "layer_decay": lambda lr, lr_multipliers=(), **settings: sf.optim.adamw(
        lr, lr_multipliers=[*lr_multipliers, sf.optim.layer_decay(0.5)], **settings
    ),
}


def deeper() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)
    )


MATRICES = ["2.weight", "4.weight"]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("before", "after"), [(None, MATRICES), (MATRICES, None), (["2.*"], ["0.*", "*.bias"])]
)
def test_every_optimizer_follows(
    name: str, before: list[str] | None, after: list[str] | None, tmp_path: Path
) -> None:
    lr_multipliers = [] if before is None else [sf.optim.frozen(*before)]
    settings: dict[str, Any] = {
        "model": deeper,
        "optimizer": OPTIMIZERS[name](1e-2, lr_multipliers=lr_multipliers),
    }
    if name == "schedule_free":
        settings |= {"ema": None, "schedule": None}
    changed = tmp_path / "changed"
    run_in(changed, stop_after=f"{CHANGED_AT} steps", **settings).train()
    sf.load(changed).change(**{"optimizer.frozen": after, "optimizer.weight_decay": 0.3})
    run_in(changed, stop_after="12 steps", **settings).train()
    run_in(changed, **settings).train()
    given = given_the_journal_of(changed, tmp_path / "given")
    run_in(given, **settings).train()
    assert_same_end(given, changed)


@pytest.mark.parametrize(
    ("frozen", "code"),
    [
        (["embedding.*"], "frozen-parameter-unknown"),
        ("embedding.*", "frozen-parameter-unknown"),
        (["*"], "all-parts-frozen"),
        (["0.*", "2.*"], "all-parts-frozen"),
        ([], "setting-out-of-range"),
        ([3], "setting-out-of-range"),
        (True, "setting-out-of-range"),
    ],
)
def test_parts_that_cannot_be_frozen_are_refused(frozen: Any, code: str, tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="2 steps").train()
    with refused(code):
        sf.load(tmp_path).change(**{"optimizer.frozen": frozen})
    assert read_changes(tmp_path) == ()


def test_a_part_of_no_parameters_is_refused_when_the_run_goes_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": deeper}
    run_in(tmp_path, stop_after="2 steps", **settings).train()
    sf.load(tmp_path).change(**{"optimizer.frozen": "*.running_mean"})  # a buffer
    with refused("frozen-parameter-unknown"):
        run_in(tmp_path, **settings).train()
    sf.load(tmp_path).change(**{"optimizer.frozen": None})
    run_in(tmp_path, **settings).train()
    assert sf.load(tmp_path).step == LAST


@forks
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(("before", "after"), PARTS[:4])
def test_two_ranks_follow(
    before: list[str] | None, after: list[str] | None, parallel: str, tmp_path: Path
) -> None:
    settings = settings_of(before, parallel=parallel, micro_batch_size=4)
    changed = tmp_path / "changed"
    on_two_ranks(changed, stop_after=f"{CHANGED_AT} steps", **settings)
    sf.load(changed).change(**{"optimizer.frozen": after})
    on_two_ranks(changed, stop_after=f"{CHANGED_AT + 1} steps", **settings)
    on_two_ranks(changed, **settings)
    given = given_the_journal_of(changed, tmp_path / "given")
    on_two_ranks(given, **settings)
    assert_same_end(given, changed)
    assert equal_names(tensors_of(changed, CHANGED_AT), tensors_of(changed, LAST)) == names_of(
        after
    )


@pytest.mark.parametrize(("before", "after"), PARTS)
def test_steps_after_a_change_are_those_of_a_plain_loop(
    before: list[str] | None, after: list[str] | None, tmp_path: Path
) -> None:
    settings = settings_of(before, model=two_layers, clip="off", ema=None)
    run_in(tmp_path, stop_after=f"{CHANGED_AT} steps", **settings).train()
    plain = sf.load(tmp_path).load_model(two_layers())
    sf.load(tmp_path).change(**{"optimizer.frozen": after})
    run = run_in(tmp_path, **settings)
    run.train()

    assert isinstance(plain, nn.Module)
    saved = tensors_of(tmp_path, CHANGED_AT)
    optimizer = torch.optim.AdamW(plain.parameters())
    for name, weight in plain.named_parameters():
        weight.requires_grad_(name not in names_of(after))
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"optimizer/{name}/{key}" in saved and weight.requires_grad:
                optimizer.state[weight][key] = saved[f"optimizer/{name}/{key}"]
    optimizer.param_groups.clear()
    for name, weight in plain.named_parameters():
        decay = 0.1 if name.endswith("weight") else 0.0
        optimizer.add_param_group({"params": [weight], "weight_decay": decay})
    inputs, targets = data()
    for step in range(CHANGED_AT, LAST):
        batches = run.parts.pipeline.plan.micro_batches(step)
        ids = torch.cat([torch.from_numpy(ids) for ids, _ in batches])
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * run.parts.task.factors(step)
        optimizer.zero_grad()
        loss(plain, [inputs[ids], targets[ids]]).backward()
        optimizer.step()
    for mine, theirs in zip(run.state.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.parametrize(("before", "after"), PARTS)
def test_averages_of_narrow_weights_follow(
    before: list[str] | None, after: list[str] | None, tmp_path: Path
) -> None:
    settings = settings_of(
        before,
        model=lambda: two_layers().bfloat16(),
        loss=lambda model, batch: loss(model, [each.bfloat16() for each in batch]),
    )
    changed = tmp_path / "changed"
    run_in(changed, stop_after=f"{CHANGED_AT} steps", **settings).train()
    sf.load(changed).change(**{"optimizer.frozen": after})
    run_in(changed, **settings).train()
    given = given_the_journal_of(changed, tmp_path / "given")
    run_in(given, **settings).train()
    assert_same_end(given, changed)

    at_end = tensors_of(changed, LAST)
    has_average = {name.split("/")[1] for name in at_end if name.startswith("ema_float32/")}
    assert has_average == ALL - names_of(after)
    for name in names_of(after):
        assert torch.equal(at_end[f"ema/{name}"], at_end[f"model/{name}"])


def test_an_average_of_a_part_begins_at_its_weights_when_it_is_unfrozen_again(
    tmp_path: Path,
) -> None:
    settings = settings_of(
        None,
        model=lambda: two_layers().bfloat16(),
        loss=lambda model, batch: loss(model, [each.bfloat16() for each in batch]),
        save_every="1 steps",
        keep_last=LAST,
    )
    for step, frozen in ((5, FIRST), (CHANGED_AT, None)):
        run_in(tmp_path, stop_after=f"{step} steps", **settings).train()
        sf.load(tmp_path).change(**{"optimizer.frozen": frozen})
    run_in(tmp_path, stop_after=f"{CHANGED_AT + 1} steps", **settings).train()
    before = tensors_of(tmp_path, CHANGED_AT)["model/0.weight"].float()
    after = tensors_of(tmp_path, CHANGED_AT + 1)
    weights = after["model/0.weight"].float()
    assert not torch.equal(before, weights)
    decay = (2 + CHANGED_AT) / (11 + CHANGED_AT)
    expected = before + (1 - decay) * (weights - before)
    torch.testing.assert_close(after["ema_float32/0.weight"], expected, rtol=1e-6, atol=1e-7)


def test_a_run_with_frozen_parts_is_verified_replayed_evaluated_and_loaded(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = settings_of(
        FIRST, splits={"val": sf.Split(data())}, evaluate_every="6 steps", save_every="4 steps"
    )
    run_in(run_dir, stop_after=f"{CHANGED_AT} steps", **settings).train()
    for step, frozen in ((CHANGED_AT, None), (15, ["2.*"]), (19, BIASES)):
        run_in(run_dir, stop_after=f"{step} steps", **settings).train()
        sf.load(run_dir).change(**{"optimizer.frozen": frozen})
    run = run_in(run_dir, **settings)
    run.train()

    losses = [record["loss"] for record in sf.load(run_dir).records("train")]
    saved = sf.load(run_in(run_dir, **settings))
    for step in (3, CHANGED_AT, 16, 21):
        assert saved.replay(step).look.loss == losses[step]
    verdict = saved.verify(steps="all")
    assert verdict.problems == []
    assert verdict.whole

    score = list(saved.records("eval"))[-1]["val/loss"]
    assert saved.evaluate(checkpoint="newest")["val/loss"] == score
    loaded = saved.load_model(two_layers_with_dropout())
    averages = run.state.ema_models["model"].model
    for mine, theirs in zip(loaded.parameters(), averages.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert [sf.load(run_dir).settings_at(step)["optimizer.frozen"] for step in (0, 10, 15, 19)] == [
        FIRST,
        None,
        ["2.*"],
        BIASES,
    ]


def two_layers_with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def test_a_run_goes_back_over_a_change_of_frozen_parts(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = settings_of(FIRST, save_every="4 steps")
    run_in(run_dir, stop_after=f"{CHANGED_AT} steps", **settings).train()
    sf.load(run_dir).change(**{"optimizer.frozen": None})
    run_in(run_dir, stop_after="18 steps", **settings).train()
    sf.load(run_dir).go_back(6, "too early", **{"optimizer.frozen": ["2.*"]})
    run_in(run_dir, stop_after="14 steps", **settings).train()
    run_in(run_dir, **settings).train()

    given = tmp_path / "given"
    run_in(given, stop_after="6 steps", **settings).train()
    sf.load(given).change(**{"optimizer.frozen": ["2.*"]})
    run_in(given, **settings).train()
    assert_same_end(given, run_dir)


@forks
def test_a_kill_after_any_step_changes_nothing(tmp_path: Path) -> None:
    settings = settings_of(FIRST, save_every="1 steps")
    whole = tmp_path / "whole"
    run_in(whole, stop_after=f"{CHANGED_AT} steps", **settings).train()
    sf.load(whole).change(**{"optimizer.frozen": BIASES})
    shutil.copytree(whole, tmp_path / "changed")
    run_in(whole, **settings).train()
    for last in range(CHANGED_AT, LAST):
        killed = tmp_path / f"killed-{last}"
        shutil.copytree(tmp_path / "changed", killed)
        child = os.fork()
        if child == 0:
            train_until_killed(run_in(killed, **settings), last)
        _, how = os.waitpid(child, 0)
        assert how == signal.SIGKILL
        run_in(killed, **settings).train()
        assert_same_end(whole, killed)


def train_until_killed(run: Run, last: int) -> None:
    try:
        with run:
            for step in run:
                if step.index == last:
                    os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)


def test_what_the_body_has_frozen_stays_frozen(tmp_path: Path) -> None:
    def trained(run_dir: Path) -> Run:
        run = run_in(run_dir, **settings_of(["0.weight"]))
        with run:
            for step in run:
                if step.index == 5:
                    run.state.model[2].bias.requires_grad_(False)
        return run

    def stopped(run_dir: Path) -> None:
        run = run_in(run_dir, **settings_of(["0.weight"]), stop_after=f"{CHANGED_AT} steps")
        with run:
            for step in run:
                if step.index == 5:
                    run.state.model[2].bias.requires_grad_(False)

    changed = tmp_path / "changed"
    stopped(changed)
    sf.load(changed).change(**{"optimizer.frozen": ["2.weight"]})
    trained(changed)
    given = given_the_journal_of(changed, tmp_path / "given")
    trained(given)
    assert_same_end(given, changed)
    constant = equal_names(tensors_of(changed, CHANGED_AT), tensors_of(changed, LAST))
    assert constant == {"2.weight", "2.bias"}
    assert "optimizer/2.bias/exp_avg" in tensors_of(changed, LAST)


def test_what_the_body_wrote_to_a_rate_stays_where_a_group_stays(tmp_path: Path) -> None:
    settings = settings_of(BIASES, ema=None)
    halved(run_in(tmp_path, stop_after=f"{CHANGED_AT} steps", **settings))
    sf.load(tmp_path).change(**{"optimizer.frozen": None})
    run = run_in(tmp_path, **settings)
    with run:
        rates = run.state.optimizers["model"].rates
        assert rates.bases == [pytest.approx(5e-3), pytest.approx(1e-2)]


def test_the_body_asks_for_other_frozen_parts(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run", **settings_of(FIRST))
    with run:
        for step in run:
            if step.index == 6:
                run.change("optimizer.frozen", None, because="the head fits")
    given = given_the_journal_of(tmp_path / "run", tmp_path / "given")
    run_in(given, **settings_of(FIRST)).train()
    assert_same_end(given, tmp_path / "run")
    (change,) = read_changes(given)
    assert (change.from_step, change.was, change.now) == (7, FIRST, None)


def test_one_of_several_optimizers_freezes_a_part(tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    several(changed, stop_after=f"{CHANGED_AT} steps").train()
    with refused("frozen-parameter-unknown"):
        sf.load(changed).change(**{"optimizer.first.frozen": "weights"})
    sf.load(changed).change(**{"optimizer.first.frozen": "weight"})
    several(changed, stop_after="15 steps").train()
    several(changed).train()
    given = given_the_journal_of(changed, tmp_path / "given")
    several(given).train()
    assert_same_end(given, changed)
    now = tensors_of(changed, LAST)
    before = tensors_of(changed, CHANGED_AT)
    weights = [name for name in now if name.startswith("model-")]
    constant = {name for name in weights if torch.equal(now[name], before[name])}
    assert constant == {"model-first/weight"}


@pytest.mark.parametrize("of_program", [FIRST, ["2.*"]])
def test_a_program_may_name_either_parts(of_program: list[str], tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="4 steps", **settings_of(FIRST)).train()
    sf.load(tmp_path).change(**{"optimizer.frozen": "2.*"})
    run_in(tmp_path, stop_after="6 steps", **settings_of(FIRST)).train()
    run_in(tmp_path, **settings_of(of_program)).train()
    assert sf.load(tmp_path).step == LAST
    with refused("changed-setting-differs", value=BIASES):
        run_in(tmp_path, **settings_of(BIASES))


def test_other_parts_in_the_program_alone_are_told_the_line_to_type(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="4 steps", **settings_of(FIRST)).train()
    with pytest.raises(sf.CheckpointError) as refusal:
        run_in(tmp_path, **settings_of(None)).train()
    assert refusal.value.code == "settings-changed"
    assert "optimizer.frozen=null" in str(refusal.value.remedies[0])


def test_another_factor_in_the_program_is_refused_beside_a_change(tmp_path: Path) -> None:
    def decayed(decay: float) -> dict[str, Any]:
        factors = [sf.optim.layer_decay(decay), sf.optim.frozen(*FIRST)]
        return {"optimizer": sf.optim.adamw(1e-2, lr_multipliers=factors)}

    run_in(tmp_path, stop_after="4 steps", **decayed(0.5)).train()
    sf.load(tmp_path).change(**{"optimizer.frozen": None})
    with refused("settings-changed", sf.CheckpointError):
        run_in(tmp_path, **decayed(0.25)).train()
    run_in(tmp_path, **decayed(0.5)).train()
    assert sf.load(tmp_path).step == LAST


@pytest.mark.parametrize("change", [{"optimizer.frozen": BIASES}, {"optimizer.lr": 1e-3}])
def test_a_run_whose_sessions_recorded_no_frozen_parts_is_changed(
    change: dict[str, Any], tmp_path: Path
) -> None:
    run_in(tmp_path, stop_after="4 steps", **settings_of(FIRST)).train()
    file = tmp_path / "environment.json"
    environment = json.loads(file.read_text())
    for session in environment["sessions"]:
        del session["settings"]["optimizer.frozen"]
    file.write_text(json.dumps(environment))

    sf.load(tmp_path).change(**change)
    assert sf.load(tmp_path).settings_at(0)["optimizer.frozen"] == FIRST
    run_in(tmp_path, **settings_of(FIRST)).train()
    assert sf.load(tmp_path).step == LAST


def test_the_parts_of_a_recipe_are_unfrozen(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin = [
        *("train", "images", "--model.width", "4", "--length", "8 steps", "--report", "False"),
        *("--optimizer.frozen", "head.*", "--tensorboard", "False", "--device", "cpu"),
    ]
    _verb([*begin, "--run-dir", str(run), "--stop-after", "4 steps"])
    _verb(["resume", str(run), "--change", "optimizer.frozen=none", "--stop-after", "6 steps"])
    _verb(["resume", str(run)])
    given = given_the_journal_of(run, tmp_path / "given")
    _verb([*begin, "--run-dir", str(given)])
    assert_same_end(given, run, step=8)
    (change,) = read_changes(run)
    assert (change.setting, change.was, change.now) == ("optimizer.frozen", ["head.*"], None)
