"""Law 19: a run whose settings change is a function of (configuration, journal of changes, seed,
step).
"""

from __future__ import annotations

import shlex
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from identities.changed_runs import (
    CHANGED_AT,
    SAMPLES,
    assert_same_end,
    data,
    given_the_journal_of,
    halved,
    loss,
    model,
    on_two_ranks,
    optimizer_state,
    run_in,
    same,
    samples_read,
    weights,
)
from rank_processes import forks
from refused import refused
from surefoot.checkpoint.reader import read
from surefoot.errors import Command
from surefoot.run.run import Run


def changed_run(run_dir: Path, *, at: int = CHANGED_AT, **settings: Any) -> Run:
    """Return a run that was stopped after `at` steps and then changed, to go on with."""
    run_in(run_dir, stop_after=f"{at} steps").train()
    sf.load(run_dir).change("a test", **settings)
    return run_in(run_dir)


def rates(run_dir: Path) -> list[float]:
    return [record["lr"] for record in sf.load(run_dir).records("train")]


EVERYTHING: dict[str, Any] = {
    "optimizer.lr": 1e-3,
    "optimizer.weight_decay": 0.5,
    "optimizer.betas": [0.8, 0.99],
    "batch_size": 16,
    "clip": "value 0.1",
    "ema": 0.5,
    "length": "6 epochs",
}


def test_a_run_given_its_journal_from_the_start_ends_with_the_same_bits(tmp_path: Path) -> None:
    run = changed_run(tmp_path / "changed", **EVERYTHING)
    run.train()

    given = run_in(given_the_journal_of(tmp_path / "changed", tmp_path / "given"))
    given.train()

    assert same(weights(given), weights(run))


def test_a_loop_of_ones_own_goes_on_across_a_change(tmp_path: Path) -> None:
    run = changed_run(tmp_path / "changed", **EVERYTHING)
    run.train()

    given = run_in(given_the_journal_of(tmp_path / "changed", tmp_path / "given"))
    steps = steps_of(given)

    assert steps == list(range(28))
    assert same(weights(given), weights(run))


def test_a_loop_ends_at_a_change_where_no_function_builds_its_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    given = model()
    run_in(tmp_path, model=given, stop_after="10 steps").train()
    sf.load(tmp_path).change(batch_size=16)
    without_steps = given_the_journal_of(tmp_path, tmp_path / "given")

    first = steps_of(run_in(without_steps, model=given))
    second = steps_of(run_in(without_steps, model=given))

    assert first == list(range(CHANGED_AT))
    assert second == list(range(CHANGED_AT, 17))


def test_a_model_of_before_a_change_refuses_to_be_called(tmp_path: Path) -> None:
    run = given_changes(tmp_path, **EVERYTHING)
    with run:
        before = run.state.model
        for step in run:
            run.state.model(torch.zeros(1, 4))
            if step.index < CHANGED_AT:
                continue
            with refused("model-of-earlier-settings", model="Sequential"):
                before(torch.zeros(1, 4))
            with refused("model-of-earlier-settings", model="Linear"):
                before[0](torch.zeros(1, 4))
            break


def test_a_part_that_both_models_have_can_be_called_after_a_change(tmp_path: Path) -> None:
    part = nn.Linear(4, 4)

    def with_part() -> nn.Module:
        return nn.Sequential(part, model())

    run = run_in(tmp_path, model=with_part)
    with run:
        before = run.state.model
        for step in run:
            if step.index == CHANGED_AT - 1:
                run.change("optimizer.lr", 1e-3)
            part(torch.zeros(1, 4))
    assert run.state.model is not before


def test_an_optimizer_of_before_a_change_refuses_a_rate(tmp_path: Path) -> None:
    run = given_changes(tmp_path, **EVERYTHING)
    with run:
        optimizer = run.state.optimizers["model"].optimizer
        for step in run:
            if step.index < CHANGED_AT:
                optimizer.param_groups[0]["lr"] *= 0.9
                continue
            with refused("optimizer-of-earlier-settings"):
                optimizer.param_groups[0]["lr"] *= 0.9
            break


def test_a_registered_scheduler_goes_on_across_a_change(tmp_path: Path) -> None:
    def train(run_dir: Path, *, stop_after: str | None) -> Run:
        run = run_in(run_dir, stop_after=stop_after, schedule=None)
        with run:
            optimizer = run.state.optimizers["model"].optimizer
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
            run.register_state("scheduler", scheduler)
            for _ in run:
                scheduler.step()
        return run

    train(tmp_path / "restarted", stop_after="10 steps")
    sf.load(tmp_path / "restarted").change(**{"optimizer.weight_decay": 0.5, "clip": "value 0.1"})
    restarted = train(tmp_path / "restarted", stop_after=None)
    given_dir = given_the_journal_of(tmp_path / "restarted", tmp_path / "given")
    given = train(given_dir, stop_after=None)
    assert same(weights(given), weights(restarted))
    assert rates(tmp_path / "given") == rates(tmp_path / "restarted")


def given_changes(run_dir: Path, **settings: Any) -> Run:
    """Return a new run that has its journal from the start."""
    run_in(run_dir / "first", stop_after=f"{CHANGED_AT} steps").train()
    sf.load(run_dir / "first").change("a test", **settings)
    return run_in(given_the_journal_of(run_dir / "first", run_dir / "given"))


@pytest.mark.parametrize("damaged", ["the change", "all since the change"])
def test_a_run_goes_back_over_a_change_whose_checkpoints_are_damaged(
    tmp_path: Path, damaged: str
) -> None:
    run = given_changes(tmp_path, **EVERYTHING)
    run.train()

    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "given", copy)
    names = {f"step-{CHANGED_AT:08d}"}
    if damaged == "all since the change":
        names |= {f"step-{step:08d}" for step in sf.load(copy).checkpoints if step > 0}
    else:
        later = [step for step in sf.load(copy).checkpoints if step > CHANGED_AT]
        for step in later:
            shutil.rmtree(copy / "checkpoints" / f"step-{step:08d}")
    for name in names:
        for file in (copy / "checkpoints" / name).glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-8])
    again = run_in(copy)
    again.train()

    assert again.state.step == 28
    assert same(weights(again), weights(run))
    steps = [record["step"] for record in sf.load(copy).records("train")]
    assert steps == list(range(1, 29))


def steps_of(run: Run) -> list[int]:
    with run:
        return [step.index for step in run]


@forks
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_that_are_given_the_journal_train_as_those_that_were_changed(
    parallel: str, tmp_path: Path
) -> None:
    of_ranks: dict[str, Any] = {"parallel": parallel, "micro_batch_size": 4}
    changed = tmp_path / "changed"
    on_two_ranks(changed, stop_after=f"{CHANGED_AT} steps", **of_ranks)
    sf.load(changed).change(**EVERYTHING)
    on_two_ranks(changed, **of_ranks)

    given = given_the_journal_of(changed, tmp_path / "given")
    on_two_ranks(given, **of_ranks)

    assert_same_end(given, changed, step=28)


@pytest.mark.parametrize("stopped_at", [11, 17])
def test_a_changed_run_resumes_to_the_same_bits(stopped_at: int, tmp_path: Path) -> None:
    whole = changed_run(tmp_path / "whole", **EVERYTHING)
    whole.train()

    changed_run(tmp_path / "stopped", **EVERYTHING)
    run_in(tmp_path / "stopped", stop_after=f"{stopped_at} steps").train()
    resumed = run_in(tmp_path / "stopped")
    resumed.train()

    assert same(weights(resumed), weights(whole))


def test_steps_after_a_change_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    plain = nn.Linear(4, 1)
    run_in(tmp_path, model=lambda: nn.Linear(4, 1), ema=None, stop_after="10 steps").train()
    before = sf.load(tmp_path).load_model(nn.Linear(4, 1))
    sf.load(tmp_path).change(
        **{"optimizer.lr": 1e-3, "optimizer.weight_decay": 0.5, "batch_size": 16, "clip": "off"}
    )
    run = run_in(tmp_path, model=lambda: nn.Linear(4, 1), ema=None)
    plan = run.parts.pipeline.plan
    factors = run.parts.task.factors
    run.train()

    plain.load_state_dict(before.state_dict())
    optimizer = torch.optim.AdamW(
        [
            {"params": [plain.weight], "weight_decay": 0.5},
            {"params": [plain.bias], "weight_decay": 0.0},
        ]
    )
    state = optimizer_state(tmp_path, step=10)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    inputs, targets = data()
    for step in range(10, run.parts.length.steps):
        ids = torch.cat([torch.from_numpy(ids) for ids, _ in plan.micro_batches(step)])
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * factors(step)
        optimizer.zero_grad()
        loss(plain, [inputs[ids], targets[ids]]).backward()
        optimizer.step()

    for mine, theirs in zip(run.state.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("at", [1, 3, 7, 8, 13])
@pytest.mark.parametrize("batch_size", [4, 12, 16, 60])
def test_every_sample_is_seen_once_an_epoch_across_a_change_of_the_batch_size(
    at: int, batch_size: int, tmp_path: Path
) -> None:
    before = run_in(tmp_path / "seen").parts.pipeline.plan
    run = changed_run(tmp_path / "run", at=at, batch_size=batch_size, length="4 epochs")
    plans: list[tuple[Any, range]] = [
        (before, range(at)),
        (run.parts.pipeline.plan, range(at, run.parts.length.steps)),
    ]

    seen = [pair for plan, steps in plans for pair in samples_read(plan, steps)]

    for epoch in range(4):
        of_epoch = [sample for number, sample in seen if number == epoch]
        assert sorted(of_epoch) == list(range(SAMPLES))


ORDERS: dict[str, dict[str, Any]] = {
    "sequential": {"order": "sequential"},
    "weighted": {"order": sf.data.Weighted([1.0] * SAMPLES, replacement=False)},
    "mixture": {"train_data": sf.data.Mixture({"one": (data(), 1.0), "other": (data(), 1.0)})},
}


@pytest.mark.parametrize("name", ORDERS)
def test_other_orders_too_go_on_where_the_last_batch_ended(name: str, tmp_path: Path) -> None:
    at = 5
    before = run_in(tmp_path / "before", **ORDERS[name]).parts.pipeline.plan
    run_in(tmp_path / "run", stop_after=f"{at} steps", **ORDERS[name]).train()
    sf.load(tmp_path / "run").change(batch_size=12)
    after = run_in(tmp_path / "run", **ORDERS[name]).parts.pipeline.plan

    expected = samples_read(before, range(15))[: at * 8 + 5 * 12]
    assert samples_read(before, range(at)) + samples_read(after, range(at, at + 5)) == expected


def test_a_longer_cosine_goes_on_from_its_present_rate_to_its_end(tmp_path: Path) -> None:
    run = changed_run(tmp_path, at=12, length="40 steps")
    factors = run.parts.task.factors
    run_in(tmp_path / "whole").train()
    whole = rates(tmp_path / "whole")
    run.train()

    changed = rates(tmp_path)
    assert changed[:13] == whole[:13]
    assert all(later < earlier for earlier, later in pairwise(changed[12:]))
    assert factors(40) == 0.0


def test_a_finished_run_goes_on_at_its_last_rate(tmp_path: Path) -> None:
    run_in(tmp_path, length="20 steps").train()
    last_rate = rates(tmp_path)[-1]
    sf.load(tmp_path).change(length="30 steps")
    run_in(tmp_path, length="20 steps").train()
    assert last_rate > 0
    assert rates(tmp_path)[20] == last_rate


@pytest.mark.parametrize("clip", ["auto 0.9", "value 0.1", "adaptive 0.01", "off"])
def test_another_way_to_clip_begins_without_a_memory(clip: str, tmp_path: Path) -> None:
    run_in(tmp_path, clip="auto 0.5", stop_after="10 steps").train()
    sf.load(tmp_path).change(clip=clip)
    run = run_in(tmp_path, clip="auto 0.5")
    with run:
        remembered = run.state.optimizers["model"].clipping.remembered
        assert int(remembered.get("entered", 0)) == 0
        assert ("entered" in remembered) == clip.startswith("auto")
        for _ in run:
            pass
    assert run.state.step == 23


@pytest.mark.parametrize(
    "schedule", [sf.schedules.constant(3), sf.schedules.inverse_sqrt(3), sf.schedules.wsd(3)]
)
def test_a_schedule_that_knows_no_end_yet_is_exactly_that_of_the_longer_run(
    schedule: Any, tmp_path: Path
) -> None:
    run_in(tmp_path / "run", schedule=schedule, stop_after="12 steps").train()
    sf.load(tmp_path / "run").change(length="40 steps")
    longer = run_in(tmp_path / "run", schedule=schedule)

    whole = run_in(tmp_path / "whole", schedule=longer.parts.plan.schedule, length="40 steps")
    factors = [longer.parts.task.factors(step) for step in range(40)]
    assert factors == [whole.parts.task.factors(step) for step in range(40)]
    assert longer.parts.plan.schedule.to_dict()["shape"] == schedule.shape


def test_a_new_schedule_runs_over_the_steps_left_without_a_warm_up(tmp_path: Path) -> None:
    run = changed_run(tmp_path, schedule="linear")
    factors = run.parts.task.factors
    steps = run.parts.length.steps
    assert [factors(step) for step in range(CHANGED_AT, steps)] == [
        (steps - step) / (steps - CHANGED_AT) for step in range(CHANGED_AT, steps)
    ]


def test_a_run_without_changes_has_no_trace_of_a_journal(tmp_path: Path) -> None:
    run = run_in(tmp_path, length="1 epochs")
    run.train()
    assert not (tmp_path / "changes.jsonl").exists()
    assert sf.load(tmp_path).verify().problems == []
    state = (tmp_path / "checkpoints" / "step-00000008" / "state.json").read_text()
    assert '"changes"' not in state


def test_settings_at_a_step_are_those_that_the_step_had(tmp_path: Path) -> None:
    changed_run(tmp_path, **EVERYTHING).train()
    saved = sf.load(tmp_path)
    before = saved.settings_at(CHANGED_AT - 1)
    after = saved.settings_at(CHANGED_AT)
    assert {name: after[name] for name in EVERYTHING} == EVERYTHING
    assert before["optimizer.lr"] == 1e-2
    assert before["length"] == "3 epochs"


@pytest.mark.parametrize("step", [-1, 29])
def test_a_run_has_no_settings_beside_its_steps(step: int, tmp_path: Path) -> None:
    changed_run(tmp_path, **EVERYTHING)
    saved = sf.load(tmp_path)
    assert saved.settings_at(28)["batch_size"] == 16
    with refused("settings-of-no-step", value=step, length=28):
        saved.settings_at(step)


@pytest.mark.parametrize("of_program", [{}, {"batch_size": 16, "length": "6 epochs"}])
def test_a_program_may_have_the_values_of_the_beginning_or_of_now(
    of_program: dict[str, Any], tmp_path: Path
) -> None:
    changed_run(tmp_path, batch_size=16, length="6 epochs")
    run = run_in(tmp_path, **of_program)
    run.train()
    assert run.parts.length.batch_size == 16
    assert run.state.step == 28


def test_any_other_value_in_the_program_is_refused_with_the_line_to_type(tmp_path: Path) -> None:
    changed_run(tmp_path, batch_size=16)
    with pytest.raises(sf.ConfigError) as refusal:
        run_in(tmp_path, batch_size=32)
    problem = refusal.value
    assert problem.code == "changed-setting-differs"
    assert problem.fields["value"] == 32
    assert problem.fields["at_beginning"] == 8
    assert problem.fields["at_present"] == 16
    line = next(remedy.line for remedy in problem.remedies if isinstance(remedy, Command))
    assert shlex.split(line) == ["surefoot", "change", str(tmp_path), "batch_size=32"]


def test_a_rate_that_the_body_wrote_stays_as_a_factor_on_the_new_rate(tmp_path: Path) -> None:
    halved(run_in(tmp_path, stop_after="10 steps"))
    sf.load(tmp_path).change(**{"optimizer.lr": 1e-3})
    run = run_in(tmp_path)
    run.train()
    records = sf.load(tmp_path).records("train")[CHANGED_AT:]
    assert records
    for record in records:
        step = record["step"] - 1
        assert record["lr"] == pytest.approx(0.5e-3 * run.parts.task.factors(step))


def test_a_change_before_the_first_step_is_that_of_a_run_given_its_journal(tmp_path: Path) -> None:
    (tmp_path / "changed").mkdir()
    run_in(tmp_path / "changed", stop_after="1 steps").train()
    shutil.rmtree(tmp_path / "changed" / "checkpoints" / "step-00000001")
    sf.load(tmp_path / "changed").change(length="60 steps", batch_size=12)
    changed = run_in(tmp_path / "changed")
    given = run_in(given_the_journal_of(tmp_path / "changed", tmp_path / "given"))

    factors = [changed.parts.task.factors(step) for step in range(60)]
    assert factors == [given.parts.task.factors(step) for step in range(60)]
    changed.train()
    given.train()
    assert same(weights(changed), weights(given))


def test_a_larger_batch_leaves_the_first_micro_batch_readable(tmp_path: Path) -> None:
    run = changed_run(tmp_path, batch_size=16, micro_batch_size=16)
    run.train()
    assert run.parts.pipeline.again(0)
    fingerprints = read(tmp_path / "checkpoints" / "step-00000017").saved.fingerprints
    assert fingerprints["loss"] is not None
    assert fingerprints["micro_batch"] is not None


def test_a_run_that_was_built_before_a_change_has_it(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="10 steps").train()
    built_before = run_in(tmp_path)
    sf.load(tmp_path).change(batch_size=16)
    built_before.train()
    assert built_before.state.step == 17


def test_a_run_that_was_built_before_a_change_is_refused_if_its_model_was(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="10 steps", model=model()).train()
    built_before = run_in(tmp_path, model=model())
    sf.load(tmp_path).change(batch_size=16)
    with refused("run-changed-meanwhile", sf.CheckpointError):
        built_before.train()


def test_the_rate_of_a_part_of_an_optimizer_changes(tmp_path: Path) -> None:
    muon = sf.optim.muon(lr=1e-2, adamw_lr=3e-3)
    run_in(tmp_path, optimizer=muon, stop_after="10 steps").train()
    sf.load(tmp_path).change(**{"optimizer.adamw_lr": 1e-5})
    run = run_in(tmp_path, optimizer=muon)
    with run:
        initial = {
            group["initial_lr"] for group in run.state.optimizers["model"].optimizer.param_groups
        }
    assert 1e-5 in initial
    assert 3e-3 not in initial


def test_a_program_may_name_the_present_schedule(tmp_path: Path) -> None:
    changed_run(tmp_path, schedule="linear")
    run = run_in(tmp_path, schedule=sf.schedules.linear())
    run.train()
    assert run.state.step == 23


def test_a_run_that_stopped_early_changes_its_patience_first(tmp_path: Path) -> None:
    validation: dict[str, Any] = {
        "splits": {"val": sf.Split(data())},
        "early_stopping": sf.EarlyStopping("max val/loss", patience=1),
        "evaluate_every": "2 steps",
    }
    run_in(tmp_path, **validation).train()
    stopped_at = sf.load(tmp_path).step
    assert stopped_at < 23
    with refused("change-after-early-stopping", step=stopped_at):
        sf.load(tmp_path).change(**{"optimizer.lr": 1e-3})
    sf.load(tmp_path).change(**{"optimizer.lr": 1e-3, "early_stopping.patience": 100})
    run_in(tmp_path, **validation).train()
    assert sf.load(tmp_path).step == 23


def test_a_replayed_step_has_the_settings_that_it_had(tmp_path: Path) -> None:
    run = changed_run(tmp_path, **EVERYTHING)
    run.train()
    records = {record["step"]: record for record in sf.load(tmp_path).records("train")}
    saved = sf.load(run_in(tmp_path))
    for step in (CHANGED_AT, CHANGED_AT + 3):
        assert saved.replay(step).look.loss == records[step + 1]["loss"]


def test_the_checkpoint_with_which_a_change_begins_is_kept(tmp_path: Path) -> None:
    changed_run(tmp_path, **EVERYTHING)
    run_in(tmp_path, save_every="1 steps", keep_last=1).train()
    kept = sf.load(tmp_path).checkpoints
    assert CHANGED_AT in kept
    assert len(kept) < 5

    shutil.rmtree(tmp_path / "checkpoints" / f"step-{CHANGED_AT:08d}")
    with refused("step-before-change", sf.CheckpointError, begin=CHANGED_AT, step=0):
        sf.load(run_in(tmp_path)).replay(CHANGED_AT + 1)


def test_verify_finds_nothing_wrong_with_a_changed_run(tmp_path: Path) -> None:
    changed_run(tmp_path, **EVERYTHING).train()
    verdict = sf.load(run_in(tmp_path)).verify(steps="all")
    assert verdict.problems == []
    assert any(window.problems == [] for window in verdict.outcomes)


def test_verify_knows_the_rates_before_a_change_to_the_bit(tmp_path: Path) -> None:
    rates = {"lr": 0.014, "weight_decay": 0.05}  # 0.003 * (0.014 / 0.003) is not 0.014
    started = run_in(tmp_path, optimizer=sf.optim.adamw(**rates), stop_after="10 steps")
    started.train()
    sf.load(tmp_path).change(**{"optimizer.lr": 0.003})
    run_in(tmp_path, optimizer=sf.optim.adamw(**rates)).train()
    verdict = sf.load(run_in(tmp_path, optimizer=sf.optim.adamw(**rates))).verify(
        windows=1, steps=1
    )
    assert verdict.problems == []
