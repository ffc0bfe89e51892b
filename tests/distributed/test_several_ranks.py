"""What several ranks agree on, what they refuse, and what they find out about each other. (30 s)"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from identities import world_runs
from rank_processes import Outcome, Ranks
from stated import lines_naming
from surefoot.distributed.consistency import checksums
from surefoot.distributed.world import joined
from surefoot.tracking.jsonl import records
from waiting import wait_until


def refused(ranks: Ranks, size: int, function: Any, **arguments: Any) -> list[Outcome]:
    return ranks.outcomes(ranks.start(size, function, **arguments))


# --- what is said ---------------------------------------------------------------------------------


def differently_refused() -> None:
    raise sf.ConfigError(f"rate {joined('cpu').rank} is wrong")


def test_a_rank_with_an_error_of_its_own_says_which_rank_it_is(ranks: Ranks) -> None:
    first, second = refused(ranks, 2, differently_refused)
    assert first.text.splitlines()[0] == "error: rate 0 is wrong"
    assert second.text.splitlines()[0] == "error: rank 1: rate 1 is wrong"


def told() -> list[Any]:
    world = joined("cpu")
    own = {"rank": world.rank, "text": "é" * world.rank * 1000, "number": [float("inf"), 0.1]}
    return [world.gathered(own), world.from_main(own if world.is_main else None)]


def test_ranks_tell_each_other_json_of_any_length(ranks: Ranks) -> None:
    wanted = [
        {"rank": rank, "text": "é" * rank * 1000, "number": [float("inf"), 0.1]}
        for rank in range(3)
    ]
    for gathered, from_main in ranks(3, told):
        assert gathered == wanted
        assert from_main == wanted[0]


def left_over() -> list[bool]:
    world = joined("cpu")
    first = world.mailbox("checkpoint")
    first.set("1/outcome", "of the first run")
    world.gathered(None)
    second = world.mailbox("checkpoint")
    found = second.check(["1/outcome"])
    world.gathered(None)
    return [found]


def test_what_a_run_left_in_its_mailbox_the_next_one_of_the_process_does_not_find(
    ranks: Ranks,
) -> None:
    assert ranks(2, left_over) == [[False], [False]]


def evaluated_by(*, run_dir: str) -> list[Any]:
    def diverged(outputs: Any, targets: Any) -> float:
        raise sf.DivergedError("the model's logits are not finite")

    data = torch.zeros(5, 6), torch.zeros(5), torch.zeros(5)
    split = sf.Split(
        data,
        metrics=sf.metrics.whole_split(diverged),
        predict=lambda model, batch: tuple(batch[:2]),
        loss=False,
    )
    run = world_runs.built(
        run_dir=run_dir, steps=4, splits={"given-up": split}, evaluate_every="2 steps"
    )
    run.train()
    return [run.state.step]


@pytest.mark.slow
def test_what_a_metric_of_the_whole_split_gives_up_all_ranks_give_up(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(2, evaluated_by, run_dir=str(tmp_path / "run")) == [[4], [4]]


def wait_until_said(*, where: str, parallel: str) -> list[int]:
    """Rank 0 waits in code of the user's until it is said to let the others wait."""

    def wait(*_: Any) -> str:
        stall = heartbeat.stall
        assert wait_until(lambda: stall.is_over and any(where in place for place in stall.places))
        return "said"

    samples: dict[str, Any] = {"sample_fn": wait, "sample_every": "2 steps"}
    run = world_runs.built(
        steps=4,
        parallel=parallel,
        splits={},
        log_every="100 steps",
        **(samples if where == "sample_fn" else {}),
    )
    heartbeat = run.parts.world.heartbeat
    heartbeat.every_s, heartbeat.stall.after_s = 0.1, 0.5
    with run:
        for step in run:
            if where == "body" and run.rank == 0 and step.index == 2:
                wait()
    return [run.state.step]


@pytest.mark.parametrize(
    ("where", "parallel", "place"),
    [("sample_fn", "fsdp", "sample_fn"), ("body", "ddp", "the body of step 2")],
)
def test_a_rank_that_lets_others_wait_is_named_with_what_it_does(
    ranks: Ranks, where: str, parallel: str, place: str
) -> None:
    main, other = ranks.outcomes(ranks.start(2, wait_until_said, where=where, parallel=parallel))
    assert (main.result, other.result) == ([4], [4]), main.text + other.text
    notes = [line for line in main.text.splitlines() if line.startswith("note: no rank has gone")]
    assert any(f"rank 0 is in {place}, rank 1 in " in note for note in notes)
    assert "note:" not in other.text


class Counted(world_runs.Augmented):
    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def __getitem__(self, sample: int) -> Any:
        self.read.add(sample)
        return super().__getitem__(sample)


def read_before_the_first_step() -> list[list[int]]:
    data = Counted()
    run = world_runs.built(train_data=data, splits={})
    with run:
        before = sorted(data.read - {0, len(data) // 2, len(data) - 1})  # which are looked at
        step = next(iter(run))
        return [before, [int(sample) for part in step.micro_batches for sample in part.sample_ids]]


def test_a_rank_reads_only_its_own_micro_batches_ahead(ranks: Ranks) -> None:
    for before, own in ranks(2, read_before_the_first_step):
        assert before
        assert set(before) <= set(own)


class Following(world_runs.Net):
    """With a slow copy of a weight, moved in each pass and no buffer, on which the loss depends."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, *inputs: Any) -> Any:
        logits, mask = super().forward(*inputs)
        with torch.no_grad():
            self.slow.lerp_(next(self.parameters()).flatten()[0] + 1, 0.1)
        return logits * (1 + self.slow.detach().clone()), mask


def followed(*, run_dir: str) -> list[Any]:
    runs = []
    for place, stop_after in (("whole", None), ("cut", "3 steps"), ("cut", None)):
        run = world_runs.built(
            model=Following,
            run_dir=f"{run_dir}/{place}",
            steps=6,
            splits={},
            stop_after=stop_after,
            check_state=False,  # which refuses passes that write weights
        )
        run.train()
        runs.append([each.tolist() for each in run.state.models["model"].parameters()])
    return [runs[0] == runs[2], runs[0] != runs[1]]


@pytest.mark.slow
def test_the_pass_that_ranks_make_together_at_a_start_moves_no_parameter(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(2, followed, run_dir=str(tmp_path)) == [[True, True]] * 2


# --- stopping, saving -----------------------------------------------------------------------------


def stopped(*, run_dir: str, how: str) -> dict[str, Any]:
    run = world_runs.built(run_dir=run_dir, steps=500, splits={})
    rank = run.parts.world.rank
    steps = 0
    with run:
        for step in run:
            steps = step.index
            if how == "stop" and step.index == 5 and rank == 1:
                run.stop()
            if how == "save" and step.index == 5 and rank == 1:
                run.save()
            if how == "save" and step.index == 12:
                break
            if how == "signal" and step.index == 5 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
    return {"steps": steps}


@pytest.mark.fast("stop")
@pytest.mark.parametrize("how", ["stop", "save", "signal"])
def test_what_one_rank_asks_for_all_do_at_the_same_step(
    ranks: Ranks, tmp_path: Path, how: str
) -> None:
    run_dir = tmp_path / "run"
    found = refused(ranks, 2, stopped, run_dir=str(run_dir), how=how)
    assert [outcome.status for outcome in found] == ([143, 143] if how == "signal" else [0, 0])
    saved = sorted(
        int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").iterdir()
    )
    match how:
        case "stop":
            assert found[0].result == found[1].result
            assert saved == [0, found[0].result["steps"] + 1]
            assert saved[1] - 5 <= 4
        case "save":
            assert len(saved) == 3
            assert 6 <= saved[1] <= 8
        case "signal":
            assert len(saved) == 2
            assert 6 <= saved[1] <= 9


def asked(*, run_dir: str, how: str, where: str, only: int | None = None) -> list[Any]:
    """The finished steps and the saved steps of a run that is asked to stop or to save in step 5."""
    run_dir = f"{run_dir}-{how}-{where}"

    def ask() -> None:
        if only in (None, run.rank) and run.state.step in (5, 6):
            run.stop() if how == "stop" else run.save()

    def sample(model: Any) -> str:
        ask()
        return ""

    def score(outputs: Any, targets: Any) -> float:
        ask()
        return 0.0

    data = torch.zeros(5, 6), torch.zeros(5), torch.zeros(5)
    scored = sf.metrics.whole_split(score)
    split = sf.Split(data, metrics=scored, predict=lambda _, batch: tuple(batch[:2]), loss=False)
    settings: dict[str, Any] = {
        "body": {"splits": {}},
        "updates": {"splits": {}},
        "sample": {"splits": {}, "sample_fn": sample, "sample_every": "6 steps"},
        "metric": {"splits": {"val": split}, "evaluate_every": "6 steps"},
    }
    run = world_runs.built(run_dir=run_dir, steps=9, **settings[where])
    with run:
        for step in run.steps() if where == "updates" else run:
            if where == "updates":
                sf.forward_backward(step)
                sf.update(step)
            if where in ("body", "updates") and step.index == 5:
                ask()
    names = [path.name for path in Path(run_dir, "checkpoints").iterdir()]
    return [run.state.step, sorted(int(name.removeprefix("step-")) for name in names)]


ASKED_FOR = [
    [("stop", "body"), ("stop", "sample"), ("save", "body")],
    [("stop", "updates"), ("stop", "metric"), ("save", "updates"), ("save", "metric")],
]


@pytest.mark.fast("some")
@pytest.mark.parametrize("every", ASKED_FOR, ids=["some", "others"])
def test_a_request_takes_effect_after_the_same_step_on_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path, every: list[tuple[str, str]]
) -> None:
    """Rank 0 alone samples, and computes a metric of the whole split."""
    for how, where in every:
        expected = [6, [0, 6]] if how == "stop" else [9, [0, 6, 9]]
        assert asked(run_dir=str(tmp_path / "one"), how=how, where=where) == expected
    cases = [{"how": how, "where": where} for how, where in every]
    results = ranks.each(2, asked, cases, run_dir=str(tmp_path / "two"))
    for (how, _), result in zip(every, results, strict=True):
        assert result == [[6, [0, 6]] if how == "stop" else [9, [0, 6, 9]]] * 2


def test_a_request_of_one_rank_takes_effect_one_step_later(ranks: Ranks, tmp_path: Path) -> None:
    cases = [{"how": "stop"}, {"how": "save"}]
    results = ranks.each(2, asked, cases, run_dir=str(tmp_path / "run"), where="body", only=1)
    assert results == [[[7, [0, 7]]] * 2, [[9, [0, 7, 9]]] * 2]


def limited(*, run_dir: str) -> int:
    run = world_runs.built(
        run_dir=run_dir,
        steps=100_000,
        splits={},
        time_limit="0.4 s" if os.environ["RANK"] == "1" else None,
    )
    run.train()
    return run.state.step


def test_a_time_limit_that_is_over_on_one_rank_ends_all_at_the_same_step(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks(2, limited, run_dir=str(tmp_path / "run"))
    assert first == second < 100_000


def limited_and_scored(*, run_dir: str) -> int:
    run = world_runs.built(
        run_dir=run_dir, steps=100_000, evaluate_every="1 steps", time_limit="2 s"
    )
    run.train()
    return run.state.step


@pytest.mark.slow
def test_an_evaluation_after_every_step_does_not_swallow_what_ranks_agree_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    found = ranks.outcomes(ranks.start(2, limited_and_scored, run_dir=str(tmp_path / "run")))
    assert [outcome.status for outcome in found] == [0, 0]
    assert found[0].result == found[1].result < 100_000


def answering(*, run_dir: str) -> None:
    run = world_runs.built(run_dir=run_dir, steps=500, splits={}, console=True)
    with run:
        for step in run:
            if step.index == 5:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)


@pytest.mark.slow
def test_rank_0_answers_a_signal_and_the_others_in_their_logs(ranks: Ranks, tmp_path: Path) -> None:
    first, second = refused(ranks, 2, answering, run_dir=str(tmp_path / "run"))
    assert first.status == second.status == 143
    answer = "SIGTERM: finishing this step, then saving"
    assert answer in first.text
    assert second.text == ""
    assert answer in (tmp_path / "run" / "logs" / "rank-1.log").read_text()


def told_on_one(*, run_dir: str) -> None:
    run = world_runs.built(run_dir=run_dir, steps=500, splits={}, console=True)
    with run:
        for step in run:
            if step.index == 5 and run.parts.world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_the_end_says_which_rank_was_told_to_stop(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = refused(ranks, 2, told_on_one, run_dir=str(tmp_path / "run"))
    assert first.status == 143
    (line,) = lines_naming(first.text, "SIGTERM", " rank 1 ")
    assert re.search(r" step \d+", line)


def early(*, run_dir: str) -> dict[str, Any]:
    stopping = sf.EarlyStopping("min val/loss", patience=1, min_delta=10.0)
    run = world_runs.built(
        run_dir=run_dir, steps=100, early_stopping=stopping, evaluate_every="3 steps"
    )
    run.train()
    (rule,) = run.parts.run_state.stopping
    return {"step": run.state.step, "watch": rule.state()}


def test_early_stopping_and_the_best_are_the_same_on_all_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    (alone,) = ranks(1, early, run_dir=str(tmp_path / "alone"))
    first, second = ranks(2, early, run_dir=str(tmp_path / "run"))
    assert first == second
    assert (
        (first["step"], first["watch"]["step"]) == (alone["step"], alone["watch"]["step"]) == (6, 3)
    )


def ended_by_a_record(*, run_dir: str) -> dict[str, Any]:
    run = world_runs.built(
        run_dir=run_dir,
        steps=100,
        early_stopping=sf.EarlyStopping("min train/own", patience=2),
        best="min train/own",
        log_every="1 steps",
    )
    with run:
        for step in run:
            own = abs(step.index - 3) if run.parts.world.rank == 0 else 5
            step.log(own=own)  # their mean is least in the fourth step
    kept, rule = run.parts.run_state.watches
    return {"step": run.state.step, "best": kept.step, "rule": rule.state()}


def test_a_rule_on_what_ranks_log_ends_all_of_them(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, ended_by_a_record, run_dir=str(tmp_path / "run"))
    assert first == second
    assert (first["step"], first["best"], first["rule"]["value"]) == (6, 4, "2.5")
    scored = [
        line for line in records(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "eval"
    ]
    assert [line["step"] for line in scored] == [6]


# --- who writes what ------------------------------------------------------------------------------


def test_rank_0_writes_the_records_and_every_other_a_log_of_its_own(
    ranks: Ranks, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    ranks(2, world_runs.trained, run_dir=str(run_dir), console=True, steps=10)
    assert [
        record["step"] for record in records(run_dir / "metrics.jsonl") if record["kind"] == "train"
    ] == [5, 10]
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == ["rank-1.log"]
    assert "2 ranks (ddp)" in (run_dir / "logs" / "rank-1.log").read_text()


# --- what is refused ------------------------------------------------------------------------------


def plainly(**changes: Any) -> None:
    world_runs.built(**changes)


@pytest.mark.fast("3-changes0-[more-ranks-than-micro-batches]")
@pytest.mark.parametrize(
    ("size", "changes", "said"),
    [
        (3, {"micro_batch_size": 8}, "[more-ranks-than-micro-batches]"),
        (3, {"micro_batch_size": None}, "[batch-size-not-divisible]"),
        (2, {"parallel": "none"}, "[parallel-none-on-ranks]"),
        (2, {"parallel": "dpd"}, "[setting-of-wrong-type]"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_anything_starts(
    ranks: Ranks, size: int, changes: dict[str, Any], said: str
) -> None:
    outcomes = refused(ranks, size, plainly, **changes)
    assert [outcome.status for outcome in outcomes] == [sf.ConfigError.exit_status] * size
    assert said in outcomes[0].text


@pytest.mark.slow
def test_without_a_micro_batch_size_each_rank_makes_one_and_a_resume_keeps_it(
    ranks: Ranks, tmp_path: Path
) -> None:
    settings = {"micro_batch_size": None, "run_dir": str(tmp_path / "run")}
    ranks(4, world_runs.trained, **settings, stop_after="5 steps")
    (resumed,) = ranks(1, world_runs.trained, **settings)
    (alone,) = ranks(1, world_runs.trained, micro_batch_size=4)
    assert resumed["steps"][0]["samples"] == alone["steps"][5]["samples"]


# --- weights that drift apart ---------------------------------------------------------------------


def spoiled() -> None:
    run = world_runs.built(log_every="2 steps", check_ranks_every="4 steps", splits={})
    with run:
        for step in run:
            if step.index == 4 and run.parts.world.rank == 1:
                with torch.no_grad():
                    run.state.models["model"].get_parameter("hidden.weight")[0, 0] += 1e-3


def diverging(*, run_dir: str) -> None:
    world_runs.built(
        run_dir=run_dir, steps=60, bad=3, optimizer="sgd", max_bad_steps=0, log_every="1 steps"
    ).train()


@pytest.mark.slow
def test_each_rank_that_fails_of_the_same_keeps_a_report_of_its_own(
    ranks: Ranks, tmp_path: Path
) -> None:
    refused(ranks, 2, diverging, run_dir=str(tmp_path / "run"))
    kept = sorted(path.name for path in (tmp_path / "run" / "crash").iterdir())
    assert kept == ["step-00000006-rank-1.json", "step-00000006.json", "step-00000006.txt"]


def test_a_rank_whose_weights_differ_ends_the_run_and_the_first_tensor_is_named(
    ranks: Ranks,
) -> None:
    first, second = refused(ranks, 2, spoiled)
    assert first.status == second.status == sf.DivergedError.exit_status
    assert "[weights-differ-among-ranks]" in first.text


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.cfloat]
)
def test_any_number_that_differs_changes_the_checksum(dtype: torch.dtype) -> None:
    held = torch.ones(3, 2, dtype=dtype)
    other = held.clone()
    other[1, 1] = 0
    assert checksums({"a": held}) != checksums({"a": other})
    assert checksums({"a": held.T}) == checksums({"a": held})


def test_a_module_built_outside_the_seed_is_the_same_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(2, handed_over)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def handed_over() -> torch.Tensor:
    torch.manual_seed(1000 + int(os.environ["RANK"]))
    run = world_runs.built(model=world_runs.Net().double(), steps=3)
    run.train()
    return run.state.models["model"].get_parameter("hidden.weight").detach()


def with_a_summed_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    sf.Run(
        model=torch.nn.Linear(4, 1),
        loss=lambda model, batch: model(batch[0]).square().sum(),
        train_data=(torch.randn(16, 4, generator=generator),),
        batch_size=8,
        micro_batch_size=2,
        optimizer=sf.optim.sgd(lr=0.001),
        length="1 step",
        parallel="ddp",
        device="cpu",
        console=False,
    ).train()


def test_rank_0_alone_warns_of_a_broken_loss_contract_and_names_the_users_line(
    ranks: Ranks,
) -> None:
    first, second = ranks.outcomes(ranks.start(2, with_a_summed_loss))
    assert [first.status, second.status] == [0, 0]
    assert first.text.count("[loss-not-a-mean]") == 1
    (line,) = lines_naming(first.text, "UserWarning: ")
    assert f"{Path(__file__).name}:" in line.partition("UserWarning: ")[0]
    assert "UserWarning" not in second.text
