"""Two processes make the losses of one, under DDP and under FSDP2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from gpu_lines.machine import Skip
from gpu_lines.runs import assert_close, gpt_run, losses_of

WORKER = str(Path(__file__).with_name("__main__.py"))


def check(device: str) -> str:
    """Train in one process, then in two."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        raise Skip(f"two processes need two GPUs, and this machine has {torch.cuda.device_count()}")
    alone, differences = losses_of(gpt_run(device)), {}
    for kind in ("ddp", "fsdp"):
        with TemporaryDirectory() as scratch:
            environment = {**os.environ, "PARALLEL": kind, "LOSSES": f"{scratch}/losses.json"}
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            ended = subprocess.run(
                [*command, WORKER, "rank", "--device", device],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert ended.returncode == 0, f"{kind} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
            losses = json.loads(Path(scratch, "losses.json").read_text())
        differences[kind] = assert_close(losses, alone, relative=1e-3)
    return ", ".join(f"{kind}: losses differ by at most {number:.1e}" for kind, number in differences.items())


def train_here(device: str) -> None:
    """Train as one of the two, and write the losses."""
    losses = losses_of(gpt_run(device, parallel=os.environ["PARALLEL"]))
    if os.environ["RANK"] == "0":
        Path(os.environ["LOSSES"]).write_text(json.dumps(losses))
