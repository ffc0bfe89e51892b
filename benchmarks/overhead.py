"""Microseconds a step against a hand-written plain PyTorch loop with the same features; the last line is the ratio.

    python benchmarks/overhead.py [--rounds 9] [--steps 2000]

A 2-layer MLP (32-64-10), batch 32, in-memory data, one thread. The plain loop: slicing a shuffled permutation, zero_grad,
forward, backward, clip_grad_norm_ 1.0, AdamW with its defaults, warm-up-cosine by LambdaLR, the loss read and printed every
50 steps. surefoot does the same with its console lines, JSONL, TensorBoard and checkpoint duties on. Both are timed in
windows of 50 steps inside one process, in turns, and the medians are compared.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import surefoot as sf

SAMPLES, FEATURES, CLASSES, BATCH, WINDOW, WARMUP = 4096, 32, 10, 32, 50, 100


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def plain(inputs: Tensor, labels: Tensor, steps: int) -> list[float]:
    """Seconds of each window of 50 steps of the loop that its user would have written."""
    torch.manual_seed(0)
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def factor(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / (WARMUP + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    windows: list[float] = []
    step, started = 0, perf_counter()
    while step < steps:
        order = torch.randperm(SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            chosen = order[start : start + BATCH]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[chosen]), labels[chosen])
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            step += 1
            if step % WINDOW == 0:
                print(f"step {step}/{steps} loss {loss.item():.4f}")
                windows.append(perf_counter() - started)
                started = perf_counter()
            if step == steps:
                break
    return windows


def surefoot(inputs: Tensor, labels: Tensor, steps: int) -> list[float]:
    """Seconds of each window of 50 steps of the same training by surefoot, all duties on."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    windows: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        run = sf.Run(
            model=MLP,
            loss=loss,
            train=TensorDataset(inputs, labels),
            batch_size=BATCH,
            length=f"{steps} steps",
            optimizer=sf.adamw(lr=1e-3),
            schedule=sf.warmup_cosine(warmup=f"{WARMUP} steps"),
            out=directory,
            log_every=f"{WINDOW} steps",
            save_every="500 steps",
        )
        with run:
            started = perf_counter()
            for step in run:
                # a window's log is written after its last step was yielded: count from first step to first step
                if step.index % WINDOW == 0 and step.index:
                    now = perf_counter()
                    windows.append(now - started)
                    started = now
    return windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs, labels = torch.randn(SAMPLES, FEATURES), torch.randint(CLASSES, (SAMPLES,))

    ratios: list[float] = []
    both: tuple[list[float], list[float]] = ([], [])
    for index in range(arguments.rounds + 1):
        quiet = StringIO()
        with redirect_stdout(quiet):
            theirs = plain(inputs, labels, arguments.steps)[2:]
            ours = surefoot(inputs, labels, arguments.steps)[2:]
        if index == 0:
            continue  # warms up caches and imports
        ratios.append(median(ours) / median(theirs))
        both[0].extend(theirs)
        both[1].extend(ours)
        print(
            f"round {index}: plain {median(theirs) / WINDOW * 1e6:6.1f} us  "
            f"surefoot {median(ours) / WINDOW * 1e6:6.1f} us  ratio {ratios[-1]:.3f}"
        )
    per_step = [median(windows) / WINDOW * 1e6 for windows in both]
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, 1 thread, python {sys.version.split()[0]}"
    )
    print(
        f"medians of windows: plain {per_step[0]:.1f} us, surefoot {per_step[1]:.1f} us a step; "
        f"ratios {min(ratios):.3f} to {max(ratios):.3f}"
    )
    print(f"surefoot/plain {median(ratios):.3f}")


if __name__ == "__main__":
    main()
