"""The campaign of changes: random histories of a run (changes of its settings, SIGKILLs between)
end with the bits of a run that was given the whole journal from the start.

    python benchmarks/changes_campaign.py [--tries 300] [--first 0] [--write]

A history has one to four stops, after each of which one to three settings change. On the way to each
stop the run is killed up to twice. A run trains a small network with dropout, averaged weights and
AdamW in a process that is forked from this one. `--write` appends a dated line to
results/changes-campaign.txt. Leaves with 1 where a bit differs.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot as sf

RESULTS = Path(__file__).parent / "results" / "changes-campaign.txt"
SAMPLES = 60
FIRST_STEPS = 24
KILL_WITHIN_S = 0.5


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    errors: Tensor = model(batch[0]) - batch[1]
    return errors.square().mean()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def run_in(run_dir: Path, *, stop_after: int | None = None) -> sf.Run:
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return sf.Run(
        model=model,
        loss=loss,
        train_data=(inputs, inputs.sum(1, keepdim=True)),
        optimizer=sf.optim.adamw(lr=1e-2, weight_decay=0.1),
        schedule=sf.schedules.cosine("10%"),
        clip="norm 1.0",
        ema=0.9,
        batch_size=8,
        length=f"{FIRST_STEPS} steps",
        stop_after=None if stop_after is None else f"{stop_after} steps",
        save_every="2 steps",
        log_every="1 steps",
        device="cpu",
        console=False,
        report=False,
        tensorboard=False,
        run_dir=run_dir,
    )


def drawn_change(draw: random.Random, *, step: int) -> tuple[str, Any]:
    """Return a setting and another value of it."""
    choices: dict[str, list[Any]] = {
        "optimizer.lr": [1e-3, 3e-3, 2e-2],
        "optimizer.weight_decay": [0.01, 0.5],
        "optimizer.betas": [[0.8, 0.99], [0.95, 0.999]],
        "batch_size": [4, 12, 16, 30],
        "micro_batch_size": [1, 2, 4],
        "clip": ["off", "norm 0.1", "value 0.1", "auto 0.9"],
        "ema": [0.5, 0.99],
        "precision": ["bf16", "fp32"],
        "schedule": ["linear", "constant", "cosine", "wsd", "inverse_sqrt"],
        "length": [f"{step + more} steps" for more in (8, 15, 31)],
    }
    name = draw.choice(list(choices))
    return name, draw.choice(choices[name])


def train(run_dir: Path, *, stop_after: int | None, kill_after_s: float | None) -> bool:
    """Train in a process of its own; return True if it was killed before its end."""
    process = os.fork()
    if process == 0:
        try:
            run_in(run_dir, stop_after=stop_after).train()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{run_dir} ended with {code}")
    return code == -signal.SIGKILL


def train_with_kills(run_dir: Path, draw: random.Random, *, stop_after: int | None) -> int:
    """Train up to a stop, killed up to twice on the way; return how often."""
    kills = 0
    for _ in range(draw.randrange(3)):
        kill_after_s = draw.uniform(0.0, KILL_WITHIN_S)
        kills += train(run_dir, stop_after=stop_after, kill_after_s=kill_after_s)
    train(run_dir, stop_after=stop_after, kill_after_s=None)
    return kills


def bits(run_dir: Path) -> dict[str, str]:
    """Return the hash of each tensor file of the newest checkpoint."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    hashes = {"step": newest.name}
    for file in sorted(newest.glob("*.safetensors")):
        hashes[file.name] = sha256(file.read_bytes()).hexdigest()
    return hashes


def one_history(number: int, directory: Path) -> tuple[bool, Counter[str]]:
    """Make a history; return whether its bits are those of the run with the whole journal, and
    counts of what happened.
    """
    draw = random.Random(number)
    run_dir = directory / "changed"
    counts: Counter[str] = Counter()
    for _ in range(draw.randint(1, 4)):
        step = 0
        last_step = FIRST_STEPS
        if run_dir.exists():
            step = sf.load(run_dir).step
            last_step = run_in(run_dir).parts.length.steps
        if step >= last_step:
            break
        counts["kills"] += train_with_kills(
            run_dir, draw, stop_after=draw.randint(step + 1, last_step)
        )
        step = sf.load(run_dir).step
        for _ in range(draw.randint(1, 3)):
            name, value = drawn_change(draw, step=step)
            try:
                sf.load(run_dir).change(f"history {number}", **{name: value})
                counts["changes"] += 1
            except sf.ConfigError as problem:
                counts[f"refused: {problem.code}"] += 1
    counts["kills"] += train_with_kills(run_dir, draw, stop_after=None)

    given = directory / "given"
    given.mkdir()
    if (run_dir / "changes.jsonl").exists():
        shutil.copy(run_dir / "changes.jsonl", given)
    train(given, stop_after=None, kill_after_s=None)
    return bits(given) == bits(run_dir), counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tries", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first history")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    total: Counter[str] = Counter()
    differ = []
    for number in range(arguments.first, arguments.first + arguments.tries):
        with tempfile.TemporaryDirectory() as scratch:
            try:
                is_same, counts = one_history(number, Path(scratch))
            except Exception as problem:
                print(f"history {number}: {type(problem).__name__}: {problem}", flush=True)
                is_same, counts = False, Counter()
        total += counts
        if not is_same:
            differ.append(number)
            print(f"history {number}: the bits differ", flush=True)
    line = (
        f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}: {arguments.tries} histories from"
        f" {arguments.first} on, {total.pop('changes', 0)} changes, {total.pop('kills', 0)} SIGKILLs,"
        f" {len(differ)} with other bits, {time.monotonic() - begun:.0f} s"
    )
    for what, count in sorted(total.items()):
        line += f"; {what} {count} times"
    print(line)
    if arguments.write:
        with RESULTS.open("a") as file:
            file.write(line + "\n")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
