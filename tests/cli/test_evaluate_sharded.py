"""What FSDP has saved on two ranks, used by one process: every verb that reads a run, and pruning
while it is written. 8 seconds.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from command_line import output_of
from forked import Forked
from rank_processes import Ranks, forks
from stated import numbers_in
from surefoot.checkpoint import Store
from surefoot.cli.main import main
from surefoot.tracking.jsonl import records

TEXT = "the quick brown fox jumps over the lazy dog and runs away from it. " * 120
NETWORK = [
    "--model.layers=2",
    "--model.width=16",
    "--model.heads=2",
    "--model.context=16",
]
SETTINGS = [
    *NETWORK,
    "--data.tokenizer=characters",
    "--batch-size=8",
    "--micro-batch-size=2",
    "--ema=0.9",
    "--precision=fp32",
]
EVERY = [
    "--evaluate-every=2 steps",
    "--save-every=1 steps",
    "--log-every=1 steps",
    "--sample-tokens=4",
    "--cloze-questions=0",
    "--report=false",
]


def train(text: str, run_dir: str, more: list[str]) -> None:
    paths = ["--data.path", text, "--run-dir", run_dir]
    main(["train", "gpt", *paths, *SETTINGS, *EVERY, "--length=6 steps", *more])


def printed_by(**settings: Any) -> str:
    with redirect_stdout(StringIO()) as printed:
        train(**settings)
    return " ".join(printed.getvalue().split())


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the text, and two runs of it: of two ranks under FSDP, and of one
    process.
    """
    place = tmp_path_factory.mktemp("runs")
    (place / "text.txt").write_text(TEXT)
    sharded = ["--parallel", "fsdp", "--keep-last", "2", "--keep-every", "2 steps"]
    ranks(2, train, text=str(place / "text.txt"), run_dir=str(place / "sharded"), more=sharded)
    train(str(place / "text.txt"), str(place / "alone"), [])
    return place


def scores_in(printed: str) -> dict[str, float]:
    """The numbers of lines such as "val/loss 2.3" in what `evaluate` prints."""
    words = printed.replace("=", " ").split()
    return {
        name: float(value) for name, value in itertools.pairwise(words) if name.startswith("val/")
    }


def last_evaluation(run_dir: Path) -> dict[str, Any]:
    *_, last = [line for line in records(run_dir / "metrics.jsonl") if line["kind"] == "eval"]
    return last


def test_checkpoints_in_pieces_are_kept_and_removed_as_whole_ones_are(runs: Path) -> None:
    checkpoints = {
        int(path.name.removeprefix("step-")): path
        for path in (runs / "sharded" / "checkpoints").iterdir()
    }
    # the first, every second, the last two; and the best by val/loss, which is one of them
    assert checkpoints.keys() == {0, 2, 4, 5, 6}
    pieces = {
        f"{kind}.0000{number}-of-00002.safetensors"
        for kind, number in itertools.product(("model", "ema", "optimizer"), (1, 2))
    }
    for checkpoint in checkpoints.values():
        assert pieces <= {file.name for file in checkpoint.iterdir()}


@forks
def test_evaluate_scores_what_ranks_have_saved_as_they_did(runs: Path) -> None:
    evaluate = ["evaluate", str(runs / "sharded"), "--checkpoint", "6"]
    with Forked(lambda: main(evaluate), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = process.stdout.read()

    scores = scores_in(output)

    assert scores, output
    recorded = last_evaluation(runs / "sharded")
    for name, score in scores.items():
        assert score == pytest.approx(recorded[name], rel=1e-3)


@forks
def test_verify_repeats_the_steps_of_a_sharded_run_bit_for_bit(runs: Path) -> None:
    """One process shards the weights over itself, as the run did: FSDP's updates round
    otherwise.
    """

    def verify() -> None:
        main(["verify", str(runs / "sharded"), "--all", "--json"])
        print("a group is open" if dist.is_initialized() else "no group is open", flush=True)

    with Forked(verify, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = process.stdout.read()
    report, _, group = output.rstrip().rpartition("\n")
    assert group == "no group is open"
    verdict = json.loads(report)
    assert verdict["exit_status"] == 0
    assert verdict["whole"]
    assert verdict["problems"] == []
    assert all(window["exact"] for window in verdict["windows"])


def test_predict_continues_a_prompt_with_the_weights_of_both_ranks(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-new-tokens=5", "--temperature=0"]
    output = output_of(capsys, "predict", str(runs / "sharded"), "the quick", *flags)
    assert "the quick" in output


def test_compare_puts_a_sharded_run_beside_one_of_one_process(runs: Path, tmp_path: Path) -> None:
    main(["compare", str(runs / "sharded"), str(runs / "alone"), "--out", str(tmp_path / "out")])
    comparison = (tmp_path / "out" / "comparison.json").read_text()
    assert "sharded" in comparison
    assert "alone" in comparison


@pytest.mark.slow
def test_a_run_of_one_process_starts_from_sharded_weights(runs: Path) -> None:
    out = runs / "started"
    flags = ["--init-from", str(runs / "sharded"), "--stop-after", "1 steps"]
    train(str(runs / "text.txt"), str(out), flags)
    first = Store(out / "checkpoints").at(0)
    averaged = Store(runs / "sharded" / "checkpoints").at(6).tensors("ema")
    for name, tensor in first.tensors("model").items():
        torch.testing.assert_close(tensor, averaged[name], rtol=0, atol=0)


@pytest.mark.slow
def test_a_sharded_run_is_gone_on_with_by_one_process_which_is_told(
    runs: Path, capsys: pytest.CaptureFixture[str], ranks: Ranks
) -> None:
    out = runs / "half"
    text = str(runs / "text.txt")
    sharded = ["--parallel", "fsdp", "--stop-after", "3 steps"]
    first, _ = ranks(2, printed_by, text=text, run_dir=str(out), more=sharded)
    capsys.readouterr()
    train(text, str(out), [])
    output = " ".join(capsys.readouterr().out.split())
    sizes_of_whole_parameters = first[first.index("weight decay") : first.index("clip")]
    assert sizes_of_whole_parameters in output
    (note,) = re.findall(r"[^;]*\(fsdp\), [^;]*\(none\): ", output)
    ranks_before, ranks_after = numbers_in(note)[-2:]
    assert (ranks_before, ranks_after) == (2, 1)
    losses = {}
    for name in ("half", "alone"):
        lines = records(runs / name / "metrics.jsonl")
        losses[name] = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses["half"] == pytest.approx(losses["alone"], abs=1e-3)  # Muon amplifies rounding
