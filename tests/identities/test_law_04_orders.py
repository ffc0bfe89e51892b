"""Law 4 for every order: killed and resumed, with other workers each time, a run ends with the same
bits. (15 s)
"""

from __future__ import annotations

import json
import os
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import small_runs
import surefoot as sf
from identities import world_runs
from rank_processes import Ranks
from refused import refused_change
from small_runs import outcome
from zygote import Zygote

SIGKILLED = -signal.SIGKILL
SHORT = {"length": "16 steps", "evaluate_every": "8 steps"}
ORDERS: dict[str, dict[str, Any]] = {
    "sequential": {"changes": {"order": "sequential", **SHORT}},
    # step 6 of an epoch has four samples, and an empty micro-batch
    "lanes": {"changes": {"order": "lanes", **SHORT}},
    "weighted": {
        "weights": [0.1 + sample % 4 for sample in range(small_runs.SAMPLES)],
        "changes": SHORT,
    },
    "batches": {"batches": True, "changes": {"workers": None, "micro_batch_size": 6, **SHORT}},
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_run_of_any_order_is_bit_equal_however_often_it_is_killed(
    order: str, ranks: Ranks, tmp_path: Path
) -> None:
    zygote = Zygote(ranks)
    spec = ORDERS[order]

    def start(workers: int, **kill: int) -> int:
        """The status of a session; a loader of batches has its own workers."""
        changes = dict(spec["changes"])
        if order != "batches":
            changes["workers"] = workers
        return zygote.run(tmp_path / "killed", **{**spec, "changes": changes, **kill})

    assert zygote.run(tmp_path / "whole", **spec) == 0
    assert start(workers=2, **{"pass": 12}) == SIGKILLED
    assert start(workers=1, **{"pass": 9}) == SIGKILLED
    assert start(workers=0) == 0

    expected = outcome(tmp_path / "whole")
    assert expected["step"] == "step-00000016"
    assert outcome(tmp_path / "killed") == expected


@pytest.mark.parametrize("order", ["sequential", "lanes", "weighted", "batches"])
def test_replay_and_verify_know_every_order(order: str, tmp_path: Path) -> None:
    def build() -> sf.Run:
        changes: dict[str, Any] = {"order": order}
        if order == "weighted":
            changes = {"order": sf.data.Weighted([1.0, 3.0] * 26)}
        if order == "batches":
            data: Any = small_runs.Augmented()
            loader = small_runs.DataLoader(data, batch_sampler=small_runs.Batches())
            changes = {"train_data": loader, "batch_size": None, "micro_batch_size": 6}
        return small_runs.build(tmp_path / "run", length="9 steps", **changes)

    build().train()
    saved = sf.load(build())
    verdict = saved.verify()
    assert (verdict.problems, verdict.whole) == ([], True), str(verdict)
    replay = saved.replay(step=6)
    read = [zip(*part, strict=True) for part in build().parts.pipeline.plan.micro_batches(6)]
    samples = sorted((sample.id, sample.epoch) for sample in replay.look.samples)
    assert samples == sorted((int(sample), int(epoch)) for part in read for sample, epoch in part)


def test_another_order_is_another_run(tmp_path: Path) -> None:
    small_runs.build(tmp_path / "run", length="2 steps").train()
    with refused_change("data.plan.order", "'sequential'"):
        small_runs.build(tmp_path / "run", length="2 steps", order="sequential").train()
    weights = [1.0] * small_runs.SAMPLES
    small_runs.build(
        tmp_path / "weighted", length="2 steps", order=sf.data.Weighted(weights)
    ).train()
    other = sf.data.Weighted([*weights[1:], 2.0])
    with refused_change("data.plan.weights.sha256"):
        small_runs.build(tmp_path / "weighted", length="2 steps", order=other).train()


def word_lm(run_dir: str, kill_at: int | None) -> None:
    """The example, killed in a forward pass."""
    run = world_runs.word_lm(run_dir=run_dir, length="14 steps", report=False, check_state=False)
    passes = [0]

    def count(*_: Any) -> None:
        passes[0] += 1
        if passes[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    run.state.model.register_forward_pre_hook(count)
    run.train()


def saved_bits(run_dir: Path) -> dict[str, Any]:
    newest = max((run_dir / "checkpoints").glob("step-*"))
    state = json.loads((newest / "state.json").read_text())
    del (
        state["clock"],
        state["fingerprints"]["sources"]["data"],
    )  # a data set that kills has another text
    return state | {
        file.name: sha256(file.read_bytes()).hexdigest() for file in newest.glob("*.safetensors")
    }


def test_the_state_of_a_word_level_lstm_survives_a_kill(ranks: Ranks, tmp_path: Path) -> None:
    def train(name: str, kill_at: int | None = None) -> int:
        start = ranks.start(1, word_lm, run_dir=str(tmp_path / name), kill_at=kill_at)
        (end,) = ranks.outcomes(start)
        assert end.status in (0, SIGKILLED), end.text
        return end.status

    assert train("whole") == 0
    for kill_at in (38, 30):
        assert train("killed", kill_at) == SIGKILLED
    assert train("killed") == 0
    assert saved_bits(tmp_path / "killed") == saved_bits(tmp_path / "whole")
