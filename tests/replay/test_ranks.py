"""A fault that only one of two ranks meets: found and told by rank 0, and by one process
afterwards; about 4 s.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import faulty_runs
import surefoot as sf
from faulty_runs import Config
from rank_processes import Ranks
from stated import numbers_in
from surefoot.checkpoint import Store
from surefoot.tools.replay.inspect_step import look
from surefoot.tools.replay.on_divergence import inspect_diverged_step
from surefoot.tools.replay.rerun import execution, shares_of
from surefoot.tracking.jsonl import records


def trained(**settings: Any) -> dict[str, Any]:
    """Train; what was said of the divergence."""
    sys.argv = ["surefoot"]
    try:
        faulty_runs.build(Config(**settings)).train()
    except sf.DivergedError as problem:
        return {"said": str(problem), "step": problem.step, "seen": json.dumps(problem.seen)}
    return {"said": "", "step": None, "seen": ""}


def of_rank_1(**changes: Any) -> tuple[Config, int]:
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
    config, step = of_rank_1(fault="magnitude")
    settings = vars(replace(config, run_dir=str(run_dir), parallel=parallel))
    told = ranks(2, trained, **settings)
    assert [one["step"] for one in told] == [step, step]
    assert told[0]["said"] == told[1]["said"]
    where = f"output of blocks.1.act (Act), from sample {config.sample} (rank 1)"
    report = json.loads((run_dir / "crash" / f"step-{step:08d}.json").read_text())["seen"]
    if parallel == "ddp":
        assert where in told[0]["said"]
        assert report["first"]["rank"] == 1
        page = (run_dir / "crash" / f"step-{step:08d}.txt").read_text()
        (title,) = [line for line in page.splitlines() if line.startswith(f"step {step}, ")]
        assert numbers_in(title) == [step, 1, 2]  # the rank, of how many
        assert [one["finite"] for one in report["ranks"]] == [True, False]
    else:
        assert report.keys() == {"not_looked_at"}
        assert "surefoot replay" in report["not_looked_at"]
    assert f"surefoot replay {run_dir} --step {step}" in told[0]["said"]

    again = sf.load(faulty_runs.build(replace(config, run_dir=str(run_dir)))).replay(step)
    assert where in again.look.verdict
    of_ranks = [note for note in again.notes if "(fsdp)" in note]
    assert [numbers_in(note)[0] for note in of_ranks] == ([2] if parallel == "fsdp" else [])


def test_the_rank_of_a_micro_batch_is_named_where_ranks_have_unequal_shares() -> None:
    """Of four micro-batches, the last of three ranks has two."""
    samples = range(faulty_runs.SAMPLES)
    configs = (Config(fault="magnitude", micro_batch_size=2, sample=sample) for sample in samples)
    config = next(
        each for each in configs if faulty_runs.first_step_of(replace(each, fault="none")) == (0, 3)
    )
    parts = faulty_runs.build(config).parts
    with execution(parts, parts.packed()) as again:
        sizes = parts.pipeline.sizes
        first = look(again.next_step(), samples=0, shares=shares_of({"ranks": 3}, sizes)).first
        taking_turns = look(
            again.next_step(), samples=0, shares=shares_of({"ranks": 3, "shards": 3}, sizes)
        ).first
    assert first is not None
    assert (first.micro_batch, first.rank) == (3, 2)
    assert taking_turns is not None
    assert (taking_turns.micro_batch, taking_turns.rank) == (3, 0)


@pytest.mark.slow
def test_steps_of_two_ranks_are_made_again_by_one_process_with_the_same_bits(
    ranks: Ranks, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    ranks(2, trained, run_dir=str(run_dir), length="12 steps")
    known = records(run_dir / "metrics.jsonl")
    store = Store(run_dir / "checkpoints")
    with execution(
        faulty_runs.build(Config(run_dir=str(run_dir))).parts, store.at(4), records=known
    ) as again:
        made = list(again.steps(12))
        weights = {
            name: held.clone()
            for name, held in again.parts.state.models["model"].state_dict().items()
        }
    logged = {record["step"]: record["loss"] for record in known if record["kind"] == "train"}
    for each in made:
        assert each.numbers().loss == logged[each.index + 1]
    for name, held in store.at(12).tensors("model").items():
        assert torch.equal(weights[name], held), name


def test_where_several_ranks_meet_a_fault_the_first_micro_batch_is_named(ranks: Ranks) -> None:
    told = ranks(2, trained, fault="step", step=3)
    seen = json.loads(told[1]["seen"])
    assert [one["first"]["micro_batch"] for one in seen["ranks"]] == [0, 1]
    assert (seen["first"]["micro_batch"], seen["first"]["rank"]) == (0, 0)
    assert " micro-batch 0 (rank 0)" in told[1]["said"]
    assert "at step 3 (max_bad_steps is 0)" in told[1]["said"]
    assert told[1]["step"] == 3


def looked_at_badly(**settings: Any) -> list[Any]:
    """A look that fails on rank 1 alone: what each rank is told of it."""
    run = faulty_runs.build(Config(**settings))
    if run.parts.world.rank == 1:

        def failing(model: Any, batch: Any) -> Any:
            raise RuntimeError("out of luck")

        run.parts = replace(run.parts, tasks=(replace(run.parts.task, loss=failing),))
    found = inspect_diverged_step(run.parts, [3])
    assert not isinstance(found, str)
    return found.plain["ranks"]


def test_where_one_rank_cannot_look_the_others_do_not_wait_for_it(ranks: Ranks) -> None:
    for told in ranks(2, looked_at_badly):
        assert told[0]["finite"]
        assert told[1] == {"not_looked_at": "RuntimeError: out of luck"}
