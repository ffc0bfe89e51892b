"""What the live parts of a run cost: the time of a step with them on, as by default, against off.
Asked: at most 2 %.

    python benchmarks/observing.py [--rounds 20] [--of mlp,gpt] [--cpu] [--short]

Two runs of each model in one process, one thread: both log, write their records and have a console;
one of them looks at its layers every 200 steps and asks its records for findings, as every run does
by itself, the other does not. They take turns, 200 steps at a time, so that each such window of the
first has one watched step; the medians of the windows are compared. The MLP (32-64-10, batch 32) is
that of overhead.py, of which a step is hardly anything; the GPT has 2 layers of width 64 and a
context of 64, batch 8.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import torch
import torch.nn.functional as F
from loops.conditions import reported
from loops.models import BATCH, CLASSES, FEATURES, MLP, SAMPLES
from torch import nn
from torch.utils.data import TensorDataset

import surefoot as sf

WINDOW, WARM = 200, 2  # steps; windows that are not counted
OFF: dict[str, Any] = {"layer_stats_every": None}


def mlp() -> dict[str, Any]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(CLASSES, (SAMPLES,)))

    def loss(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    return {
        "model": MLP,
        "loss": loss,
        "train_data": data,
        "batch_size": BATCH,
        "optimizer": sf.optim.adamw(lr=1e-3),
    }


def gpt() -> dict[str, Any]:
    from surefoot.models.gpt import GPT
    from surefoot.models.gpt_layers import GPTConfig

    shape = GPTConfig(vocab_size=256, context=64, layers=2, heads=2, width=64)
    tokens = np.random.default_rng(0).integers(0, 256, 100_000)

    def loss(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return {
        "model": lambda: GPT(shape),
        "loss": loss,
        "train_data": sf.data.TrainWindows(tokens, context=64, seed=0),
        "batch_size": 8,
        "optimizer": sf.optim.adamw(lr=1e-3),
    }


def stepping(
    settings: dict[str, Any], run_dir: Path, steps: int, stack: ExitStack
) -> Iterator[None]:
    """A run, begun, that makes one window of steps each time it is asked."""
    asked = settings.get("layer_stats_every", "") is not None
    # findings cannot be switched off: nobody would want to
    silent = Mock(sentence=lambda: "")
    with (
        nullcontext()
        if asked
        else patch("surefoot.run.after.live_findings_of", return_value=silent)
    ):
        run = stack.enter_context(
            sf.Run(
                **settings,
                length=f"{steps} steps",
                run_dir=run_dir,
                precision="fp32",
                save_every="1000000 steps",
            )
        )
    for step in run:
        # a record is written after its step was yielded: windows go from first step to first step
        if step.index % WINDOW == 0 and step.index:
            yield


def compared(
    make: Callable[[], dict[str, Any]], rounds: int, now: Callable[[], float]
) -> tuple[float, float, list[float]]:
    """Microseconds a step with and without, and the ratio of each pair of windows."""
    quiet = StringIO()
    on: list[float] = []
    off: list[float] = []
    steps = (rounds + WARM + 1) * WINDOW
    with tempfile.TemporaryDirectory() as place, redirect_stdout(quiet), ExitStack() as stack:
        runs = {
            name: stepping(make() | changes, Path(place) / name, steps, stack)
            for name, changes in (("on", {}), ("off", OFF))
        }
        for round_ in range(rounds + WARM):
            for name, taken in (("on", on), ("off", off))[:: 1 if round_ % 2 else -1]:
                started = now()
                next(runs[name])
                if round_ >= WARM:
                    taken.append((now() - started) / WINDOW * 1e6)
        for run in runs.values():
            run.close()  # type: ignore[attr-defined]  # a generator
    return median(on), median(off), [one / other for one, other in zip(on, off, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--of", default="mlp,gpt")
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="the process's CPU time, where others use the machine too",
    )
    parser.add_argument("--short", action="store_true", help="the MLP alone, five rounds")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.of = "mlp"
        arguments.rounds = 5
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, 1 thread, python {sys.version.split()[0]}"
    )
    for name in arguments.of.split(","):
        on, off, ratios = compared(
            {"mlp": mlp, "gpt": gpt}[name],
            arguments.rounds,
            process_time if arguments.cpu else perf_counter,
        )
        middle = sorted(ratios)[len(ratios) // 4 : -(len(ratios) // 4) or None]
        print(
            f"{name}: on {on:.1f} us, off {off:.1f} us a step; on/off {on / off:.4f}; of pairs the median "
            f"{median(ratios):.4f}, the middle half {middle[0]:.4f} to {middle[-1]:.4f}"
        )


if __name__ == "__main__":
    with reported():
        main()
