"""Deterministic resume: a run killed by SIGKILL and started again ends with the bits of one that
was left alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

import surefoot as sf
from gpu_lines.runs import breaking_run, gpt_run

KILLED_AFTER = 10
COMMAND = [sys.executable, str(Path(__file__).with_name("__main__.py"))]


def check(device: str) -> str:
    """Compare checkpoints and records."""
    with TemporaryDirectory() as scratch:
        alone, killed = Path(scratch, "alone"), Path(scratch, "killed")
        _train(CASES, device, alone)
        for name in CASES:
            status = _train([name], device, killed, is_killed=True)
            assert status == -signal.SIGKILL, f"{name} ended with {status}"
        _train(CASES, device, killed)
        for name in CASES:
            expected, bits = _bits(alone / name), _bits(killed / name)
            assert bits.keys() == expected.keys(), f"{name}: {sorted(bits)} and {sorted(expected)}"
            differing = [key for key in bits if bits[key] != expected[key]]
            assert not differing, (
                f"{name}: other bits in {differing}: {bits['losses']} and {expected['losses']}"
            )
    return f"{', '.join(CASES)}: {len(bits['losses'])} losses and all files of the last checkpoint are equal"


def _train(names: Iterable[str], device: str, directory: Path, *, is_killed: bool = False) -> int:
    """Train these cases in one process of its own; return how it ended."""
    environment = {
        **os.environ,
        "CASES": ",".join(names),
        "RUNS": str(directory),
        "KILLED": str(int(is_killed)),
    }
    command = [*COMMAND, "resumed", "--device", device]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert is_killed or ended.returncode == 0, (
        f"ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
    )
    return ended.returncode


def train_here(device: str) -> None:
    """Train the cases that the environment names."""
    for name in os.environ["CASES"].split(","):
        with CASES[name](device, run_dir=str(Path(os.environ["RUNS"], name))) as run:
            for step in run:
                if os.environ["KILLED"] == "1" and step.index == KILLED_AFTER:
                    os.kill(os.getpid(), signal.SIGKILL)


def _gpt(device: str, *, run_dir: str) -> sf.Run:
    """Dropout in attention, bf16, an average, two micro-batches."""
    return gpt_run(device, dropout=0.1, precision="bf16", ema=0.9, **_saving(run_dir))


def _convolutions(device: str, *, run_dir: str) -> sf.Run:
    """Convolutions with batch statistics and the loss scale of fp16, steps that overflow, and a
    last micro-batch across epochs.
    """

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 5)),
            nn.Conv1d(1, 8, 3, padding=1),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(40, 3),
        )

    return breaking_run(device, model=build, precision="fp16", **_saving(run_dir))


def _saving(run_dir: str) -> dict[str, Any]:
    return {
        "run_dir": run_dir,
        "deterministic": True,
        "save_every": "4 steps",
        "log_every": "1 steps",
        "length": "16 steps",
    }


CASES = {"gpt": _gpt, "convolutions": _convolutions}


def _bits(run_dir: Path) -> dict[str, Any]:
    """Hashes of the tensors that were saved last, and the losses as they were written."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    rows = [json.loads(row) for row in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {
        row["step"]: row.get("loss") for row in rows if row["kind"] == "train"
    }  # the last of each step counts
    files = {
        file.name: sha256(file.read_bytes()).hexdigest() for file in newest.glob("*.safetensors")
    }
    return {"step": newest.name, "losses": losses, **files}
