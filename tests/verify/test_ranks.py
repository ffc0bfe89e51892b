"""A run that several ranks trained is proved by one process bit for bit, or to rounding if its sums
depend on the ranks; 15 s.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import forged
import small_runs
import surefoot as sf
from rank_processes import Ranks
from stated import numbers_in
from surefoot.tools.verify.verdict import Verdict

STEPS = 8


def with_mean(model: Any, batch: Any) -> Any:
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]), {
        "size": sf.Mean(logits.square().sum(), logits.numel())
    }


def build(run_dir: Path, *, sync: str = "auto", **changes: Any) -> sf.Run:
    """Four micro-batches a step, whose loss has a mean to log."""
    changes = {"loss": with_mean} | changes
    settings = {
        "batch_size": 8,
        "micro_batch_size": 2,
        "length": f"{STEPS} steps",
        "keep_last": 9,
        "clip": "norm 1.0",
    }
    if sync != "auto":
        changes["parallel"] = sf.ddp(sync=sync)  # type: ignore[arg-type]
    return small_runs.build(run_dir, **(settings | {"log_every": "1 steps"} | changes))


def trained(run_dir: str, **changes: Any) -> None:
    build(Path(run_dir), **changes).train()


def verified(run_dir: Path, **changes: Any) -> Verdict:
    return sf.load(build(run_dir, **changes)).verify(steps="all")


def proved(run_dir: str, **changes: Any) -> dict[str, Any]:
    """What a process of its own says: under FSDP it opens a process group, which no other test may
    find here.
    """
    verdict = verified(Path(run_dir), **changes)
    (outcome,) = verdict.outcomes
    problems = [str(problem) for problem in verdict.problems]
    return {
        "problems": problems,
        "exact": outcome.exact,
        "text": str(verdict),
        "unlike": outcome.unlike,
    }


@pytest.fixture(scope="module")
def ddp(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "ddp"
    ranks(4, trained, run_dir=str(run_dir))
    return run_dir


def test_a_run_of_four_ranks_is_proved_in_one_process_bit_for_bit(ddp: Path) -> None:
    verdict = verified(ddp)
    assert (verdict.problems, verdict.whole) == ([], True), str(verdict)
    (outcome,) = verdict.outcomes
    assert outcome.exact
    assert outcome.records == [*range(1, STEPS + 1)]


def _one_bit(tensors: dict[str, Tensor]) -> None:
    tensors["4.weight"].view(torch.int32)[0, 0] ^= 1


def test_one_bit_of_a_weight_is_seen(ddp: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(ddp, tmp_path / "ddp"))
    forged.tensors_changed(forged.checkpoint(run_dir, 4), _one_bit)
    verdict = verified(run_dir)
    (problem,) = verdict.problems
    assert (problem.kind, problem.step, verdict.exit_status) == ("differs", 4, 8)
    assert problem.quantity == "4.weight[0, 0]"
    assert 1 in numbers_in(problem.text)  # value of so many


def test_one_bit_of_a_record_is_seen(ddp: Path, tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(ddp, tmp_path / "ddp"))
    forged.record_changed(
        run_dir, lambda each: each.update(loss=math.nextafter(each["loss"], math.inf)), step=6
    )
    verdict = verified(run_dir)
    (problem,) = verdict.problems
    assert (problem.kind, problem.step, problem.quantity, verdict.exit_status) == (
        "differs",
        6,
        "loss",
        8,
    )


def test_a_repeated_step_of_four_ranks_has_no_note_and_the_bits_of_the_record(ddp: Path) -> None:
    replay = sf.load(build(ddp)).replay(6)
    assert replay.notes == ()
    assert replay.logged is not None
    assert replay.logged.equal


@pytest.mark.fast("plain sums", "fsdp")
@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ({"exact_sums": False}, False),
        ({"sync": "every"}, False),
        ({"parallel": "fsdp"}, True),
        ({"parallel": "fsdp", "clip": "value 0.01"}, False),
    ],
    ids=["plain sums", "every", "fsdp", "fsdp, value"],
)
def test_bits_are_compared_only_if_they_do_not_depend_on_the_ranks(
    ranks: Ranks, tmp_path: Path, changes: dict[str, Any], exact: bool
) -> None:
    """Under FSDP, one process shards the model over itself."""
    run_dir = str(tmp_path / "run")
    ranks(2, trained, run_dir=run_dir, **changes)
    (verdict,) = ranks(1, proved, run_dir=run_dir, **changes)
    assert verdict["problems"] == [], verdict["text"]
    assert verdict["exact"] == exact
    if exact:
        (unsharded,) = ranks(1, proved, run_dir=run_dir)
        assert (unsharded["exact"], unsharded["unlike"] != "") == (False, True)
    else:
        assert 2 in numbers_in(verdict["unlike"])  # ranks trained it
