"""A fault that only one of two ranks meets: found and told by rank 0, and by one process
afterwards; about 4 s.
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import faulty_runs
import surefoot as sf
from faulty_runs import Config
from rank_processes import Ranks
from recorded import training_records
from stated import numbers_in
from surefoot.checkpoint import Store
from surefoot.tools.replay.inspect_step import look
from surefoot.tools.replay.on_divergence import inspect_diverged_step
from surefoot.tools.replay.rerun import execution, shares_of
from surefoot.tracking.jsonl import records


def train(**settings: Any) -> dict[str, Any]:
    """The text, the step, and what was seen of a divergence, if there is one."""
    sys.argv = ["surefoot"]
    try:
        faulty_runs.build(Config(**settings)).train()
    except sf.DivergedError as error:
        return {"text": str(error), "step": error.step, "seen": json.dumps(error.seen)}
    return {"text": "", "step": None, "seen": ""}


def fault_of_rank_1(**changes: Any) -> tuple[Config, int]:
    """A run whose faulty sample rank 1 of 2 meets first, and the step in which it does."""
    for sample in range(faulty_runs.SAMPLES):
        config = Config(sample=sample, **changes)
        step, micro_batch = faulty_runs.first_step_of(replace(config, fault="none"))
        if micro_batch == 1 and step > 0:
            return config, step
    raise AssertionError


@pytest.mark.fast("fsdp")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_sample_of_rank_1_is_named_with_its_rank(
    parallel: str, ranks: Ranks, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config, step = fault_of_rank_1(fault="magnitude")
    settings = vars(replace(config, run_dir=str(run_dir), parallel=parallel))

    first, second = ranks(2, train, **settings)
    replay = sf.load(faulty_runs.build(replace(config, run_dir=str(run_dir)))).replay(step)

    assert first["step"] == second["step"] == step
    assert first["text"] == second["text"]
    assert f"surefoot replay {run_dir} --step {step}" in first["text"]
    where = f"output of blocks.1.act (Act), from sample {config.sample} (rank 1)"
    assert where in replay.look.verdict
    report = json.loads((run_dir / "crash" / f"step-{step:08d}.json").read_text())["seen"]
    notes_of_fsdp = [note for note in replay.notes if "(fsdp)" in note]
    if parallel == "ddp":
        assert where in first["text"]
        assert report["first"]["rank"] == 1
        assert [of_rank["finite"] for of_rank in report["ranks"]] == [True, False]
        page = (run_dir / "crash" / f"step-{step:08d}.txt").read_text()
        (title,) = [line for line in page.splitlines() if line.startswith(f"step {step}, ")]
        assert numbers_in(title) == [step, 1, 2]  # the rank, of how many
        assert notes_of_fsdp == []
    else:
        assert report.keys() == {"not_looked_at"}
        assert "surefoot replay" in report["not_looked_at"]
        (note,) = notes_of_fsdp
        rank_count, *_ = numbers_in(note)
        assert rank_count == 2


def test_the_rank_of_a_micro_batch_is_named_where_ranks_have_unequal_shares() -> None:
    """Of four micro-batches, the last of three ranks has two."""
    parts = faulty_runs.build(fault_in_last_micro_batch()).parts
    sizes = parts.pipeline.sizes
    with execution(parts, parts.packed()) as again:
        in_order = look(again.next_step(), samples=0, shares=shares_of({"ranks": 3}, sizes))
        shares = shares_of({"ranks": 3, "shards": 3}, sizes)
        taking_turns = look(again.next_step(), samples=0, shares=shares)

    assert in_order.first is not None
    assert in_order.first.micro_batch == 3
    assert in_order.first.rank == 2
    assert taking_turns.first is not None
    assert taking_turns.first.micro_batch == 3
    assert taking_turns.first.rank == 0


def fault_in_last_micro_batch() -> Config:
    """Of the four of step 0."""
    for sample in range(faulty_runs.SAMPLES):
        config = Config(fault="magnitude", micro_batch_size=2, sample=sample)
        if faulty_runs.first_step_of(replace(config, fault="none")) == (0, 3):
            return config
    raise AssertionError


@pytest.mark.slow
def test_steps_of_two_ranks_are_made_again_by_one_process_with_the_same_bits(
    ranks: Ranks, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    ranks(2, train, run_dir=str(run_dir), length="12 steps")
    store = Store(run_dir / "checkpoints")
    parts = faulty_runs.build(Config(run_dir=str(run_dir))).parts
    known_records = records(run_dir / "metrics.jsonl")
    with execution(parts, store.at(4), records=known_records) as again:
        steps = list(again.steps(12))
        weights = deepcopy(again.parts.state.models["model"].state_dict())

    logged = {record["step"]: record["loss"] for record in training_records(run_dir)}
    for step in steps:
        assert step.numbers().loss == logged[step.index + 1]
    for name, tensor in store.at(12).tensors("model").items():
        assert torch.equal(weights[name], tensor), name


def test_where_several_ranks_meet_a_fault_the_first_micro_batch_is_named(ranks: Ranks) -> None:
    _, result = ranks(2, train, fault="step", step=3)

    assert result["step"] == 3
    assert "at step 3 (max_bad_steps is 0)" in result["text"]
    assert " micro-batch 0 (rank 0)" in result["text"]
    seen = json.loads(result["seen"])
    assert [of_rank["first"]["micro_batch"] for of_rank in seen["ranks"]] == [0, 1]
    assert seen["first"]["micro_batch"] == 0
    assert seen["first"]["rank"] == 0


def look_with_error_on_rank_1(**settings: Any) -> list[Any]:
    """What each rank is told of the looks of all."""
    run = faulty_runs.build(Config(**settings))
    if run.parts.world.rank == 1:

        def fail(model: Any, batch: Any) -> Any:
            raise RuntimeError("out of luck")

        run.parts = replace(run.parts, tasks=(replace(run.parts.task, loss=fail),))
    look_at_step = inspect_diverged_step(run.parts, [3])
    assert not isinstance(look_at_step, str)
    looks: list[Any] = look_at_step.plain["ranks"]
    return looks


def test_where_one_rank_cannot_look_the_others_do_not_wait_for_it(ranks: Ranks) -> None:
    for of_rank_0, of_rank_1 in ranks(2, look_with_error_on_rank_1):
        assert of_rank_0["finite"]
        assert of_rank_1 == {"not_looked_at": "RuntimeError: out of luck"}
