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

from forked import Forked
from rank_processes import Ranks, forks
from stated import numbers_in
from surefoot.checkpoint import Store
from surefoot.cli.main import main
from surefoot.tracking.jsonl import records

TEXT = "the quick brown fox jumps over the lazy dog and runs away from it. " * 120
NETWORK = [
    "--model.layers",
    "2",
    "--model.width",
    "16",
    "--model.heads",
    "2",
    "--model.context",
    "16",
]
SETTINGS = [
    *NETWORK,
    "--data.tokenizer",
    "characters",
    "--batch-size",
    "8",
    "--micro-batch-size",
    "2",
    "--ema",
    "0.9",
    "--precision",
    "fp32",
]
EVERY = [
    "--evaluate-every",
    "2 steps",
    "--save-every",
    "1 steps",
    "--log-every",
    "1 steps",
    "--sample-tokens",
    "4",
    "--cloze-questions",
    "0",
    "--report",
    "false",
]


def train(text: str, run_dir: str, more: list[str]) -> None:
    main(
        [
            "train",
            "gpt",
            "--data.path",
            text,
            "--run-dir",
            run_dir,
            *SETTINGS,
            *EVERY,
            "--length",
            "6 steps",
            *more,
        ]
    )


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


def scores(printed: str) -> dict[str, float]:
    """The numbers of lines such as "val/loss 2.3" in what `evaluate` prints."""
    words = printed.replace("=", " ").split()
    return {
        name: float(value) for name, value in itertools.pairwise(words) if name.startswith("val/")
    }


def test_checkpoints_in_pieces_are_kept_and_removed_as_whole_ones_are(runs: Path) -> None:
    steps = [path.name for path in sorted((runs / "sharded" / "checkpoints").iterdir())]
    wanted = {
        0,
        2,
        4,
        6,
        5,
    }  # the first, every second, the last two; and the best by val/loss, which is one of them
    assert {int(name.removeprefix("step-")) for name in steps} == wanted
    for name in steps:
        files = {file.name for file in (runs / "sharded" / "checkpoints" / name).iterdir()}
        pieces = {
            f"{kind}.0000{n}-of-00002.safetensors"
            for kind in ("model", "ema", "optimizer")
            for n in (1, 2)
        }
        assert pieces <= files


@forks
def test_evaluate_scores_what_ranks_have_saved_as_they_did(runs: Path) -> None:
    last = [line for line in records(runs / "sharded" / "metrics.jsonl") if line["kind"] == "eval"][
        -1
    ]
    evaluate = ["evaluate", str(runs / "sharded"), "--checkpoint", "6"]
    with Forked(lambda: main(evaluate), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = process.stdout.read()
    found = scores(said)
    assert found, said
    for name, value in found.items():
        assert value == pytest.approx(last[name], rel=1e-3)


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
        said = process.stdout.read()
    report, _, group = said.rstrip().rpartition("\n")
    assert group == "no group is open"
    verdict = json.loads(report)
    assert (verdict["exit_status"], verdict["whole"], verdict["problems"]) == (0, True, [])
    assert all(window["exact"] for window in verdict["windows"])


def test_predict_continues_a_prompt_with_the_weights_of_both_ranks(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    main(
        [
            "predict",
            str(runs / "sharded"),
            "the quick",
            "--max-new-tokens",
            "5",
            "--temperature",
            "0",
        ]
    )
    assert "the quick" in capsys.readouterr().out


def test_compare_puts_a_sharded_run_beside_one_of_one_process(
    runs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(
        ["compare", str(runs / "sharded"), str(runs / "alone"), "--out", str(tmp_path / "compared")]
    )
    table = json.loads((tmp_path / "compared" / "comparison.json").read_text())
    assert "sharded" in json.dumps(table)
    assert "alone" in json.dumps(table)
    capsys.readouterr()


@pytest.mark.slow
def test_a_run_of_one_process_starts_from_sharded_weights(runs: Path) -> None:
    out = runs / "started"
    train(
        str(runs / "text.txt"),
        str(out),
        ["--init-from", str(runs / "sharded"), "--stop-after", "1 steps"],
    )
    first = Store(out / "checkpoints").at(0)
    given = Store(runs / "sharded" / "checkpoints").at(6)
    averaged = given.tensors("ema")
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
    said = " ".join(capsys.readouterr().out.split())
    assert (
        first[first.index("weight decay") : first.index("clip")] in said
    )  # sizes of whole parameters
    (note,) = re.findall(r"[^;]*\(fsdp\), [^;]*\(none\): ", said)
    assert numbers_in(note)[-2:] == [2, 1]  # ranks
    losses = {}
    for name in ("half", "alone"):
        lines = records(runs / name / "metrics.jsonl")
        losses[name] = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses["half"] == pytest.approx(losses["alone"], abs=1e-3)  # Muon amplifies rounding
