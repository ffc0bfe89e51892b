"""Two processes make the bits of one, under DDP and under FSDP2. On one GPU, one process under
FSDP2 makes the same bits twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import surefoot as sf
from gpu_lines.runs import assert_close, gpt_run, losses_of

WORKER = str(Path(__file__).with_name("__main__.py"))


def check(device: str) -> str:
    """Train in this process, without ranks, and then in one and in two."""
    counts = (1, 2) if device == "cpu" or torch.cuda.device_count() > 1 else (1, 1)
    kinds = ("ddp", "fsdp") if 2 in counts else ("fsdp",)
    alone = losses_of(gpt_run(device, deterministic=True))
    differences = {}
    for kind in kinds:
        runs = [_trained(kind, device, processes=count) for count in counts]
        hashes = [run["hash"] for run in runs]
        assert len(set(hashes)) == 1, (
            f"{kind}: weights on {counts} processes have the hashes {hashes}"
        )
        differences[kind] = assert_close(runs[-1]["losses"], alone, relative=1e-3)
    how = "on 1 and 2 processes" if 2 in counts else "twice"
    largest = ", ".join(f"{kind} {number:.1e}" for kind, number in differences.items())
    return f"the same bits {how}; losses differ from a plain run by at most {largest}"


def _trained(kind: str, device: str, *, processes: int) -> Any:
    with TemporaryDirectory() as scratch:
        environment = {**os.environ, "PARALLEL": kind, "TRAINED": f"{scratch}/trained.json"}
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
        ]
        ended = subprocess.run(
            [*command, WORKER, "rank", "--device", device],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, (
            f"{kind} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
        )
        return json.loads(Path(scratch, "trained.json").read_text())


def train_here(device: str) -> None:
    """Train as one of the processes, and write the losses and the hash of the weights."""
    run = gpt_run(device, parallel=os.environ["PARALLEL"], deterministic=True)
    trained = {"losses": losses_of(run), "hash": hash_of(run)}
    if os.environ["RANK"] == "0":
        Path(os.environ["TRAINED"]).write_text(json.dumps(trained))


def hash_of(run: sf.Run) -> str:
    """The hash of the whole weights. Collective if they are sharded."""
    digest = sha256()
    for name, weight in run.state.model.state_dict().items():
        full = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        digest.update(
            name.encode() + full.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()[:12]
