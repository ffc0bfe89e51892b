"""Ranks that do not make the same calls: each that notices says where all ranks are. (about 20 s)"""

from __future__ import annotations

from typing import Any

import pytest

import surefoot as sf
from identities import world_runs
from rank_processes import Ranks
from refused import refused
from surefoot.distributed.side_channel import refuse_different_calls
from surefoot.distributed.world import Consensus, joined
from surefoot.errors import ConfigError

CODE = "different-calls-on-ranks"


def refusal(*, case: str, rank: int = 0) -> list[Any]:
    """The code of the error of a run in which one rank makes another call, and all calls."""
    try:
        CASES[case](rank)
    except ConfigError as problem:
        return [problem.code, problem.fields.get("calls")]
    return []


def built(**changes: Any) -> sf.Run:
    settings: dict[str, Any] = {"steps": 8, "log_every": "4 steps", "evaluate_every": "100 steps"}
    return world_runs.built(**(settings | changes))


def in_body(call: Any, **changes: Any) -> Any:
    """A run in which one rank makes a call in the body of step 2."""

    def train(rank: int) -> None:
        run = built(**changes)
        with run:
            for step in run:
                if step.index == 2 and run.rank == rank:
                    call(run)

    return train


def with_updates(*, left_out: str) -> Any:
    """A run in which one rank alone leaves out a call of step 2."""

    def train(rank: int) -> None:
        run = built(splits={}, log_every="8 steps")
        with run:
            for step in run.steps():
                leaves_out = step.index == 2 and run.rank == rank
                if leaves_out and left_out == "both":
                    continue
                sf.forward_backward(step)
                if leaves_out and left_out == "second pass":
                    sf.forward_backward(step)
                if leaves_out and left_out == "update":
                    for parameter in run.state.parameters:
                        parameter.grad = None
                else:
                    sf.update(step)

    return train


def after_the_loop(rank: int) -> None:
    run = built()
    with run:
        for _ in run:
            pass
        if run.rank == rank:
            run.evaluate()


def after_the_run(rank: int) -> None:
    run = built(steps=1)
    run.train()
    if run.rank == rank:
        run.evaluate()


def other_splits(rank: int) -> None:
    data = world_runs.Augmented()
    splits = {name: sf.Split(data, batch_size=8) for name in ("val", "test")}
    run = built(splits=splits)
    with run:
        next(iter(run))
        run.evaluate("val" if run.rank == rank else "test")


CASES: dict[str, Any] = {
    "evaluate": in_body(lambda run: run.evaluate("val")),
    "evaluate, fsdp": in_body(lambda run: run.evaluate("val"), parallel="fsdp"),
    "sample": in_body(lambda run: run.sample(), sample_fn=lambda _: "", sample_every="100 steps"),
    "without update": with_updates(left_out="update"),
    "second pass": with_updates(left_out="second pass"),
    "after the run": after_the_run,
    "without a step": with_updates(left_out="both"),
    "after the loop": after_the_loop,
    "other splits": other_splits,
}
EXPECTED = {
    "evaluate": ["in run.evaluate('val') at step 3", "at the beginning of step 3"],
    "sample": ["in run.sample() at step 3", "at the beginning of step 3"],
    "without update": ["at the beginning of step 3", "in update of step 2 for model"],
    "second pass": ["in forward_backward of step 2", "in update of step 2 for model"],
    "evaluate, fsdp": ["in run.evaluate('val') at step 3", "at the beginning of step 3"],
    "without a step": ["at the beginning of step 3", "in forward_backward of step 2"],
    "after the loop": ["in run.evaluate() at step 8", "at the end of its loop"],
    "other splits": ["in run.evaluate('val') at step 1", "in run.evaluate('test') at step 1"],
}


@pytest.mark.fast("evaluate", "second pass", "after the loop")
@pytest.mark.parametrize("case", EXPECTED)
def test_ranks_in_different_calls_are_told_where_all_ranks_are(ranks: Ranks, case: str) -> None:
    outcomes = ranks.outcomes(ranks.start(2, refusal, case=case))
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    assert [CODE, EXPECTED[case]] in results, [outcome.text for outcome in outcomes]
    assert all(result == [CODE, EXPECTED[case]] for result in results)
    # a rank that waits for a sum of the other is ended with it
    assert all(outcome.status in (0, 1, 7) for outcome in outcomes)


@pytest.mark.slow
def test_a_call_after_another_rank_has_ended_is_refused(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(ranks.start(2, refusal, case="after the run"))
    assert [outcome.result for outcome in outcomes] == [["call-after-a-rank-has-ended", None], []]


def exchanged() -> list[Any]:
    """What ranks read that are in different calls: an agreement, then values of any length."""
    world = joined("cpu")
    agreement = Consensus(world, names=("stop", "save"))
    agreement.exchange(call="here", stop=world.rank)
    before = agreement.exchange(call="here", save=7)
    results: list[Any] = [before, agreement.take(), world.gathered("x" * world.rank)]
    try:
        if world.rank == 0:
            with world.during("in one call"):
                world.gathered(["a long text"] * 100)
        else:
            agreement.exchange(call="in another call", stop=1)
            agreement.take()
    except ConfigError as problem:
        results.append([problem.code, problem.fields["calls"]])
    return results


def test_no_exchange_reads_the_values_of_another(ranks: Ranks) -> None:
    values = [{"stop": [0, 1], "save": [0, 0]}, {"stop": [0, 0], "save": [7, 7]}, ["", "x"]]
    expected = [*values, [CODE, ["in one call", "in another call"]]]
    assert ranks(2, exchanged) == [expected, expected]


@pytest.mark.parametrize(
    ("calls", "places"),
    [
        (["here", "there"], "rank 0 is here, rank 1 is there"),
        (["here", ""], "rank 0 is here, rank 1 is at the start of the run, or between two steps"),
        (["here", "there", "there"], "rank 0 is here, ranks 1, 2 are there"),
        (["here", *["there"] * 7], "rank 0 is here, ranks 1 to 7 are there"),
        (["here", "there"] * 5, "ranks 0, 2, 4, 6, ... are here, ranks 1, 3, 5, 7, ... are there"),
    ],
)
def test_ranks_in_the_same_call_are_named_together(calls: list[str], places: str) -> None:
    with refused(CODE, calls=calls) as caught:
        refuse_different_calls(calls)
    assert caught.value.problem.partition(": ")[2] == places
