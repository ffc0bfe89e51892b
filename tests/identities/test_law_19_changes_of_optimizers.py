"""Law 19 for weight decays that begin or end, and for several optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from identities.changed_runs import (
    CHANGED_AT,
    assert_same_end,
    data,
    given_the_journal_of,
    halved,
    loss,
    on_two_ranks,
    optimizer_state,
    run_in,
)
from rank_processes import forks
from refused import refused
from surefoot.run.run import Run
from surefoot.tracking.change_journal import read_changes

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda decay: sf.optim.adamw(1e-2, weight_decay=decay),
    "sgd": lambda decay: sf.optim.sgd(1e-2, momentum=0.9, weight_decay=decay),
    "muon": lambda decay: sf.optim.muon(1e-2, weight_decay=decay),
    "schedule_free": lambda decay: sf.optim.schedule_free(1e-2, weight_decay=decay),
    "parts": lambda decay: sf.optim.adamw(
        1e-2, weight_decay=decay, lr_multipliers=sf.optim.layer_decay(0.5)
    ),
}


def settings_of(name: str, decay: float) -> dict[str, Any]:
    settings: dict[str, Any] = {"optimizer": OPTIMIZERS[name](decay), "ema": None}
    if name == "schedule_free":
        settings["schedule"] = None
    return settings


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.5), (0.5, 0.0)])
def test_a_decay_begins_and_ends_as_in_a_run_given_its_journal(
    name: str, before: float, after: float, tmp_path: Path
) -> None:
    settings = settings_of(name, before)
    changed = tmp_path / "changed"
    run_in(changed, stop_after=f"{CHANGED_AT} steps", **settings).train()
    sf.load(changed).change(**{"optimizer.weight_decay": after})
    for stop in (11, 17):
        run_in(changed, stop_after=f"{stop} steps", **settings).train()
    run_in(changed, **settings).train()
    given = given_the_journal_of(changed, tmp_path / "given")
    run_in(given, **settings).train()
    assert_same_end(given, changed)


def test_a_decay_that_ended_begins_again(tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    settings = settings_of("adamw", 0.0)
    for step, decay in ((4, 0.5), (8, 0.0), (12, 0.25)):
        run_in(changed, stop_after=f"{step} steps", **settings).train()
        sf.load(changed).change(**{"optimizer.weight_decay": decay})
    run = run_in(changed, **settings)
    run.train()
    given = given_the_journal_of(changed, tmp_path / "given")
    run_in(given, **settings).train()
    assert_same_end(given, changed)
    groups = run.state.optimizers["model"].optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]


@forks
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_begin_a_decay_as_those_that_were_given_the_journal(
    parallel: str, tmp_path: Path
) -> None:
    settings = settings_of("adamw", 0.0) | {"parallel": parallel, "micro_batch_size": 4}
    changed = tmp_path / "changed"
    on_two_ranks(changed, stop_after=f"{CHANGED_AT} steps", **settings)
    sf.load(changed).change(**{"optimizer.weight_decay": 0.5})
    on_two_ranks(changed, **settings)
    given = given_the_journal_of(changed, tmp_path / "given")
    on_two_ranks(given, **settings)
    assert_same_end(given, changed)


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.5), (0.5, 0.0)])
def test_steps_after_a_decay_begins_or_ends_are_those_of_a_plain_loop(
    before: float, after: float, tmp_path: Path
) -> None:
    settings = settings_of("adamw", before) | {"model": lambda: nn.Linear(4, 1), "clip": "off"}
    run_in(tmp_path, stop_after=f"{CHANGED_AT} steps", **settings).train()
    plain = sf.load(tmp_path).load_model(nn.Linear(4, 1))
    sf.load(tmp_path).change(**{"optimizer.weight_decay": after})
    run = run_in(tmp_path, **settings)
    run.train()

    assert isinstance(plain, nn.Linear)
    optimizer = torch.optim.AdamW(
        [
            {"params": [plain.weight], "weight_decay": after},
            {"params": [plain.bias], "weight_decay": 0.0},
        ]
    )
    state = optimizer_state(tmp_path, step=CHANGED_AT)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    inputs, targets = data()
    for step in range(CHANGED_AT, run.parts.length.steps):
        ids = torch.cat(
            [torch.from_numpy(ids) for ids, _ in run.parts.pipeline.plan.micro_batches(step)]
        )
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * run.parts.task.factors(step)
        optimizer.zero_grad()
        loss(plain, [inputs[ids], targets[ids]]).backward()
        optimizer.step()
    for mine, theirs in zip(run.state.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_parts_of_a_model_keep_their_rates_in_the_new_groups(tmp_path: Path) -> None:
    settings = settings_of("parts", 0.0)
    run_in(tmp_path, stop_after=f"{CHANGED_AT} steps", **settings).train()
    sf.load(tmp_path).change(**{"optimizer.weight_decay": 0.5})
    run = run_in(tmp_path, **settings)
    with run:
        groups = run.state.optimizers["model"].optimizer.param_groups
        numbers = [(group["initial_lr"], group["weight_decay"]) for group in groups]
    assert numbers == [(1e-2, 0.5), (1e-2, 0.0), (5e-3, 0.5), (5e-3, 0.0)]


def test_what_the_body_wrote_to_a_rate_stays_in_the_new_groups(tmp_path: Path) -> None:
    settings = settings_of("adamw", 0.0)
    halved(run_in(tmp_path, stop_after=f"{CHANGED_AT} steps", **settings))
    sf.load(tmp_path).change(**{"optimizer.weight_decay": 0.5})
    run = run_in(tmp_path, **settings)
    with run:
        rates = run.state.optimizers["model"].rates
        assert rates.bases == [pytest.approx(5e-3)] * 2


# --- several optimizers ---------------------------------------------------------------------------


def several(run_dir: Path, **settings: Any) -> Run:
    def both(models: dict[str, nn.Module], batch: list[Tensor]) -> Tensor:
        return loss(nn.Sequential(models["first"], models["second"]), batch)

    chosen: dict[str, Any] = {
        "model": {"first": lambda: nn.Linear(4, 4), "second": lambda: nn.Linear(4, 1)},
        "loss": both,
        "optimizer": {
            "first": sf.optim.adamw(1e-2, weight_decay=0.0),
            "second": sf.optim.sgd(1e-2, momentum=0.9),
        },
        "ema": None,
    }
    return run_in(run_dir, **(chosen | settings))


CHANGES: dict[str, Any] = {
    "optimizer.first.lr": 1e-3,
    "optimizer.first.weight_decay": 0.5,
    "optimizer.second.momentum": 0.5,
}


def test_one_of_several_optimizers_changes(tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    several(changed, stop_after=f"{CHANGED_AT} steps").train()
    sf.load(changed).change(**CHANGES)
    several(changed, stop_after="15 steps").train()
    run = several(changed)
    run.train()
    given = given_the_journal_of(changed, tmp_path / "given")
    several(given).train()
    assert_same_end(given, changed)

    first = run.state.optimizers["first"].optimizer.param_groups
    assert [group["weight_decay"] for group in first] == [0.5, 0.0]
    assert {group["initial_lr"] for group in first} == {1e-3}
    (second,) = run.state.optimizers["second"].optimizer.param_groups
    assert (second["momentum"], second["initial_lr"]) == (0.5, 1e-2)
    assert sf.load(changed).settings_at(LATER)["optimizer.first.lr"] == 1e-3


LATER = CHANGED_AT + 1


@pytest.mark.parametrize(
    ("setting", "value", "code"),
    [
        ("optimizer.lr", 1e-3, "setting-cannot-change"),
        ("optimizer.third.lr", 1e-3, "setting-cannot-change"),
        ("optimizer.first.name", "sgd", "setting-cannot-change"),
        ("optimizer.first.momentum", 0.9, "setting-cannot-change"),
        ("optimizer.first.lr", -1, "setting-out-of-range"),
    ],
)
def test_what_one_of_several_optimizers_cannot_be_is_refused(
    setting: str, value: Any, code: str, tmp_path: Path
) -> None:
    several(tmp_path, stop_after="2 steps").train()
    with refused(code):
        sf.load(tmp_path).change(**{setting: value})
    assert read_changes(tmp_path) == ()


def test_an_optimizer_of_the_program_is_changed_in_the_body(tmp_path: Path) -> None:
    run_in(tmp_path, optimizer=torch.optim.SGD, stop_after="2 steps").train()
    with refused("change-of-own-optimizer"):
        sf.load(tmp_path).change(**{"optimizer.lr": 1e-3})


def test_a_program_with_another_rate_of_one_optimizer_is_told_the_line_to_type(
    tmp_path: Path,
) -> None:
    several(tmp_path, stop_after="2 steps").train()
    optimizers = {
        "first": sf.optim.adamw(1e-2, weight_decay=0.0),
        "second": sf.optim.sgd(1e-3, momentum=0.9),
    }
    with pytest.raises(sf.CheckpointError) as refusal:
        several(tmp_path, optimizer=optimizers).train()
    assert refusal.value.code == "settings-changed"
    assert "optimizer.second.lr=0.001" in str(refusal.value.remedies[0])
