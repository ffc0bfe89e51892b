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
from recorded import records_of_kind, training_records
from stated import lines_naming
from surefoot.distributed.consistency import checksums
from surefoot.distributed.world import joined
from waiting import wait_until


def outcomes_of(ranks: Ranks, size: int, function: Any, **arguments: Any) -> list[Outcome]:
    """How each rank ends, also with an error."""
    return ranks.outcomes(ranks.start(size, function, **arguments))


def saved_steps(run_dir: str | Path) -> list[int]:
    names = [path.name for path in Path(run_dir, "checkpoints").iterdir()]
    return sorted(int(name.removeprefix("step-")) for name in names)


# --- what is said ---------------------------------------------------------------------------------


def raise_error_with_rank() -> None:
    raise sf.ConfigError(f"rate {joined('cpu').rank} is wrong")


def test_a_rank_with_an_error_of_its_own_says_which_rank_it_is(ranks: Ranks) -> None:
    first, second = outcomes_of(ranks, 2, raise_error_with_rank)
    assert first.text.splitlines()[0] == "error: rate 0 is wrong"
    assert second.text.splitlines()[0] == "error: rank 1: rate 1 is wrong"


def message_of(rank: int) -> dict[str, Any]:
    return {"rank": rank, "text": "é" * rank * 1000, "number": [float("inf"), 0.1]}


def exchange_messages() -> tuple[list[Any], Any]:
    world = joined("cpu")
    message = message_of(world.rank)
    return world.gathered(message), world.from_main(message if world.is_main else None)


def test_ranks_tell_each_other_json_of_any_length(ranks: Ranks) -> None:
    for gathered, from_main in ranks(3, exchange_messages):
        assert gathered == [message_of(0), message_of(1), message_of(2)]
        assert from_main == message_of(0)


def find_left_message() -> bool:
    """Whether a mailbox has what was set in an earlier one of the same name."""
    world = joined("cpu")
    first = world.mailbox("checkpoint")
    first.set("1/outcome", "of the first run")
    world.gathered(None)
    second = world.mailbox("checkpoint")
    is_there = second.check(["1/outcome"])
    world.gathered(None)
    return is_there


def test_what_a_run_left_in_its_mailbox_the_next_one_of_the_process_does_not_find(
    ranks: Ranks,
) -> None:
    assert ranks(2, find_left_message) == [False, False]


def evaluate_by_failing_metric(*, run_dir: str) -> int:
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
    return run.state.step


@pytest.mark.slow
def test_what_a_metric_of_the_whole_split_gives_up_all_ranks_give_up(
    ranks: Ranks, tmp_path: Path
) -> None:
    run_dir = str(tmp_path / "run")
    assert ranks(2, evaluate_by_failing_metric, run_dir=run_dir) == [4, 4]


def let_others_wait(*, where: str, parallel: str) -> int:
    """Rank 0 waits in code of the user's until it is said to let the others wait."""

    def wait(*_: Any) -> str:
        stall = heartbeat.stall
        assert wait_until(lambda: stall.is_over and any(where in place for place in stall.places))
        return "said"

    settings: dict[str, Any] = {"steps": 4, "parallel": parallel, "splits": {}}
    if where == "sample_fn":
        settings |= {"sample_fn": wait, "sample_every": "2 steps"}
    run = world_runs.built(log_every="100 steps", **settings)
    heartbeat = run.parts.world.heartbeat
    heartbeat.every_s = 0.1
    heartbeat.stall.after_s = 0.5
    with run:
        for step in run:
            if where == "body" and run.rank == 0 and step.index == 2:
                wait()
    return run.state.step


@pytest.mark.parametrize(
    ("where", "parallel", "place"),
    [("sample_fn", "fsdp", "sample_fn"), ("body", "ddp", "the body of step 2")],
)
def test_a_rank_that_lets_others_wait_is_named_with_what_it_does(
    ranks: Ranks, where: str, parallel: str, place: str
) -> None:
    first, second = outcomes_of(ranks, 2, let_others_wait, where=where, parallel=parallel)
    assert first.result == 4, first.text
    assert second.result == 4, second.text
    assert lines_naming(first.text, "note: no rank has gone", f"rank 0 is in {place}, rank 1 in ")
    assert "note:" not in second.text


class Counted(world_runs.Augmented):
    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def __getitem__(self, sample: int) -> Any:
        self.read.add(sample)
        return super().__getitem__(sample)


def samples_read_before_first_step() -> tuple[set[int], set[int]]:
    """And those of the step on this rank."""
    data = Counted()
    run = world_runs.built(train_data=data, splits={})
    looked_at = {0, len(data) // 2, len(data) - 1}  # before a run is built
    with run:
        read = data.read - looked_at
        step = next(iter(run))
        samples_of_step = set[int]()
        for micro_batch in step.micro_batches:
            samples_of_step |= set(micro_batch.sample_ids.tolist())
        return read, samples_of_step


def test_a_rank_reads_only_its_own_micro_batches_ahead(ranks: Ranks) -> None:
    for read, samples_of_step in ranks(2, samples_read_before_first_step):
        assert read
        assert read <= samples_of_step


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


def train_following(*, run_dir: str, stop_after: str | None = None) -> list[Any]:
    run = world_runs.built(
        model=Following,
        run_dir=run_dir,
        steps=6,
        splits={},
        stop_after=stop_after,
        check_state=False,  # which refuses passes that write weights
    )
    run.train()
    return [parameter.tolist() for parameter in run.state.models["model"].parameters()]


@pytest.mark.slow
def test_the_pass_that_ranks_make_together_at_a_start_moves_no_parameter(
    ranks: Ranks, tmp_path: Path
) -> None:
    whole = ranks(2, train_following, run_dir=str(tmp_path / "whole"))
    run_dir = str(tmp_path / "resumed")
    stopped = ranks(2, train_following, run_dir=run_dir, stop_after="3 steps")
    resumed = ranks(2, train_following, run_dir=run_dir)
    assert stopped != whole
    assert resumed == whole


# --- stopping, saving -----------------------------------------------------------------------------


def ask_on_rank_1(*, run_dir: str, how: str) -> int:
    """Rank 1 asks in the body of step 5; returns the last step of this rank."""
    run = world_runs.built(run_dir=run_dir, steps=500, splits={})
    with run:
        for step in run:
            if step.index == 5 and run.rank == 1:
                match how:
                    case "stop":
                        run.stop()
                    case "save":
                        run.save()
                    case "signal":
                        os.kill(os.getpid(), signal.SIGTERM)
            if how == "save" and step.index == 12:
                break
    return step.index


def test_where_one_rank_stops_the_run_all_stop_at_the_same_step(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks(2, ask_on_rank_1, run_dir=str(tmp_path / "run"), how="stop")
    assert first == second
    assert saved_steps(tmp_path / "run") == [0, first + 1]
    assert 6 <= first + 1 <= 9


@pytest.mark.slow
def test_where_one_rank_asks_for_a_save_all_save_at_the_same_step(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(2, ask_on_rank_1, run_dir=str(tmp_path / "run"), how="save")
    _, saved, _ = saved_steps(tmp_path / "run")
    assert 6 <= saved <= 8


@pytest.mark.slow
def test_a_signal_of_one_rank_ends_all_at_the_same_step(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = outcomes_of(ranks, 2, ask_on_rank_1, run_dir=str(tmp_path / "run"), how="signal")
    assert [outcome.status for outcome in outcomes] == [143, 143]
    _, saved = saved_steps(tmp_path / "run")
    assert 6 <= saved <= 9


def ask(*, run_dir: str, how: str, where: str, only: int | None = None) -> tuple[int, list[int]]:
    """The finished steps and the saved steps of a run that is asked to stop or to save in step 5."""
    run_dir = f"{run_dir}-{how}-{where}"

    def ask_now() -> None:
        if only in (None, run.rank) and run.state.step in (5, 6):
            if how == "stop":
                run.stop()
            else:
                run.save()

    def sample(model: Any) -> str:
        ask_now()
        return ""

    def score(outputs: Any, targets: Any) -> float:
        ask_now()
        return 0.0

    settings: dict[str, Any] = {"splits": {}}
    if where == "sample":
        settings |= {"sample_fn": sample, "sample_every": "6 steps"}
    if where == "metric":
        split = sf.Split(
            (torch.zeros(5, 6), torch.zeros(5), torch.zeros(5)),
            metrics=sf.metrics.whole_split(score),
            predict=lambda _, batch: tuple(batch[:2]),
            loss=False,
        )
        settings = {"splits": {"val": split}, "evaluate_every": "6 steps"}
    run = world_runs.built(run_dir=run_dir, steps=9, **settings)
    with run:
        for step in run.steps() if where == "updates" else run:
            if where == "updates":
                sf.forward_backward(step)
                sf.update(step)
            if where in ("body", "updates") and step.index == 5:
                ask_now()
    return run.state.step, saved_steps(run_dir)


# by what is asked for: the finished and the saved steps
EFFECTS = {"stop": (6, [0, 6]), "save": (9, [0, 6, 9])}


@pytest.mark.fast("some")
@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([("stop", "body"), ("stop", "sample"), ("save", "body")], id="some"),
        pytest.param(
            [("stop", "updates"), ("stop", "metric"), ("save", "updates"), ("save", "metric")],
            id="others",
        ),
    ],
)
def test_a_request_takes_effect_after_the_same_step_on_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path, requests: list[tuple[str, str]]
) -> None:
    """Rank 0 alone samples, and computes a metric of the whole split."""
    for how, where in requests:
        assert ask(run_dir=str(tmp_path / "one"), how=how, where=where) == EFFECTS[how]

    cases = [{"how": how, "where": where} for how, where in requests]
    results = ranks.each(2, ask, cases, run_dir=str(tmp_path / "two"))
    for (how, _), on_ranks in zip(requests, results, strict=True):
        assert on_ranks == [EFFECTS[how]] * 2


def test_a_request_of_one_rank_takes_effect_one_step_later(ranks: Ranks, tmp_path: Path) -> None:
    cases = [{"how": "stop"}, {"how": "save"}]
    stopped, saved = ranks.each(2, ask, cases, run_dir=str(tmp_path / "run"), where="body", only=1)
    assert stopped == [(7, [0, 7])] * 2
    assert saved == [(9, [0, 7, 9])] * 2


def train_with_time_limit_on_rank_1(*, run_dir: str) -> int:
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
    first, second = ranks(2, train_with_time_limit_on_rank_1, run_dir=str(tmp_path / "run"))
    assert first == second < 100_000


def train_with_time_limit_and_evaluations(*, run_dir: str) -> int:
    run = world_runs.built(
        run_dir=run_dir, steps=100_000, evaluate_every="1 steps", time_limit="2 s"
    )
    run.train()
    return run.state.step


@pytest.mark.slow
def test_an_evaluation_after_every_step_does_not_swallow_what_ranks_agree_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks(2, train_with_time_limit_and_evaluations, run_dir=str(tmp_path / "run"))
    assert first == second < 100_000


def signal_on_all_ranks(*, run_dir: str) -> None:
    run = world_runs.built(run_dir=run_dir, steps=500, splits={}, console=True)
    with run:
        for step in run:
            if step.index == 5:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)


@pytest.mark.slow
def test_rank_0_answers_a_signal_and_the_others_in_their_logs(ranks: Ranks, tmp_path: Path) -> None:
    first, second = outcomes_of(ranks, 2, signal_on_all_ranks, run_dir=str(tmp_path / "run"))
    assert first.status == second.status == 143
    answer = "SIGTERM: finishing this step, then saving"
    assert answer in first.text
    assert second.text == ""
    assert answer in (tmp_path / "run" / "logs" / "rank-1.log").read_text()


def signal_on_rank_1(*, run_dir: str) -> None:
    run = world_runs.built(run_dir=run_dir, steps=500, splits={}, console=True)
    with run:
        for step in run:
            if step.index == 5 and run.parts.world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_the_end_says_which_rank_was_told_to_stop(ranks: Ranks, tmp_path: Path) -> None:
    first, _ = outcomes_of(ranks, 2, signal_on_rank_1, run_dir=str(tmp_path / "run"))
    assert first.status == 143
    (line,) = lines_naming(first.text, "SIGTERM", " rank 1 ")
    assert re.search(r" step \d+", line)


def stop_early(*, run_dir: str) -> dict[str, Any]:
    """The finished steps, and the state of the rule."""
    stopping = sf.EarlyStopping("min val/loss", patience=1, min_delta=10.0)
    run = world_runs.built(
        run_dir=run_dir, steps=100, early_stopping=stopping, evaluate_every="3 steps"
    )
    run.train()
    (rule,) = run.parts.run_state.stopping
    return {"finished": run.state.step, "rule": rule.state()}


def test_early_stopping_and_the_best_are_the_same_on_all_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    (alone,) = ranks(1, stop_early, run_dir=str(tmp_path / "alone"))
    first, second = ranks(2, stop_early, run_dir=str(tmp_path / "run"))

    assert first == second
    for result in (alone, first):
        assert result["finished"] == 6
        assert result["rule"]["step"] == 3


def stop_by_record(*, run_dir: str) -> dict[str, Any]:
    run = world_runs.built(
        run_dir=run_dir,
        steps=100,
        early_stopping=sf.EarlyStopping("min train/own", patience=2),
        best="min train/own",
        log_every="1 steps",
    )
    with run:
        for step in run:
            own = abs(step.index - 3) if run.rank == 0 else 5
            step.log(own=own)  # their mean is least in the fourth step
    best, rule = run.parts.run_state.watches
    return {"finished": run.state.step, "best": best.step, "rule": rule.state()}


def test_a_rule_on_what_ranks_log_ends_all_of_them(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, stop_by_record, run_dir=str(tmp_path / "run"))

    assert first == second
    assert first["finished"] == 6
    assert first["best"] == 4
    assert first["rule"]["value"] == "2.5"
    evaluations = records_of_kind(tmp_path / "run", "eval")
    assert [record["step"] for record in evaluations] == [6]


# --- who writes what ------------------------------------------------------------------------------


def test_rank_0_writes_the_records_and_every_other_a_log_of_its_own(
    ranks: Ranks, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    ranks(2, world_runs.trained, run_dir=str(run_dir), console=True, steps=10)

    assert [record["step"] for record in training_records(run_dir)] == [5, 10]
    (log,) = (run_dir / "logs").iterdir()
    assert log.name == "rank-1.log"
    assert "2 ranks (ddp)" in log.read_text()


# --- what is refused ------------------------------------------------------------------------------


def build_run(**changes: Any) -> None:
    world_runs.built(**changes)


@pytest.mark.fast("3-changes0-more-ranks-than-micro-batches")
@pytest.mark.parametrize(
    ("size", "changes", "code"),
    [
        (3, {"micro_batch_size": 8}, "more-ranks-than-micro-batches"),
        (3, {"micro_batch_size": None}, "batch-size-not-divisible"),
        (2, {"parallel": "none"}, "parallel-none-on-ranks"),
        (2, {"parallel": "dpd"}, "setting-of-wrong-type"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_anything_starts(
    ranks: Ranks, size: int, changes: dict[str, Any], code: str
) -> None:
    outcomes = outcomes_of(ranks, size, build_run, **changes)
    assert [outcome.status for outcome in outcomes] == [sf.ConfigError.exit_status] * size
    assert f"[{code}]" in outcomes[0].text


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


def change_weight_on_rank_1() -> None:
    run = world_runs.built(log_every="2 steps", check_ranks_every="4 steps", splits={})
    with run:
        for step in run:
            if step.index == 4 and run.rank == 1:
                with torch.no_grad():
                    run.state.models["model"].get_parameter("hidden.weight")[0, 0] += 1e-3


def diverge(*, run_dir: str) -> None:
    world_runs.built(
        run_dir=run_dir, steps=60, bad=3, optimizer="sgd", max_bad_steps=0, log_every="1 steps"
    ).train()


@pytest.mark.slow
def test_each_rank_that_fails_of_the_same_keeps_a_report_of_its_own(
    ranks: Ranks, tmp_path: Path
) -> None:
    outcomes_of(ranks, 2, diverge, run_dir=str(tmp_path / "run"))
    reports = sorted(path.name for path in (tmp_path / "run" / "crash").iterdir())
    assert reports == ["step-00000006-rank-1.json", "step-00000006.json", "step-00000006.txt"]


def test_a_rank_whose_weights_differ_ends_the_run_and_the_first_tensor_is_named(
    ranks: Ranks,
) -> None:
    first, second = outcomes_of(ranks, 2, change_weight_on_rank_1)
    assert first.status == second.status == sf.DivergedError.exit_status
    assert "[weights-differ-among-ranks]" in first.text


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.cfloat]
)
def test_any_number_that_differs_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 2, dtype=dtype)
    other = tensor.clone()
    other[1, 1] = 0
    assert checksums({"a": tensor}) != checksums({"a": other})
    assert checksums({"a": tensor.T}) == checksums({"a": tensor})


def train_module_of_other_seed() -> torch.Tensor:
    torch.manual_seed(1000 + int(os.environ["RANK"]))
    run = world_runs.built(model=world_runs.Net().double(), steps=3)
    run.train()
    return run.state.models["model"].get_parameter("hidden.weight").detach()


def test_a_module_built_outside_the_seed_is_the_same_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks(2, train_module_of_other_seed)
    assert torch.equal(first, second)


def train_with_summed_loss() -> None:
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
    first, second = outcomes_of(ranks, 2, train_with_summed_loss)

    assert first.status == second.status == 0
    assert first.text.count("[loss-not-a-mean]") == 1
    (line,) = lines_naming(first.text, "UserWarning: ")
    place, _, _ = line.partition("UserWarning: ")
    assert f"{Path(__file__).name}:" in place
    assert "UserWarning" not in second.text
