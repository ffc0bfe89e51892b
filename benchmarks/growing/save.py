"""What saving costs the training beside it, and how quickly a checkpoint is written, beside the
disk's own speed.

Two runs of a GPT of 4 x 128 with AdamW (1.3 million parameters, 16 MB a checkpoint) on random
tokens, one thread each, take turns, 100 steps at a time: one saves every 100 steps, the other
never. The copying step is the one between whose body and the next the state is copied. A state of
605 MB is copied as a save does it, beside a copy into memory that is there. Checkpoints of other
sizes are written into a store, hashed, flushed and all; the disk's own speed is that of the same
bytes written into one file and flushed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time

import numpy as np
import torch
import torch.nn.functional as F

import surefoot as sf
from growing.told import Clock, Told, seconds
from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.store import Store

EVERY = 100  # steps
SIZES_MB = (1, 16, 128, 512)


def told(now: Clock, *, short: bool) -> Told:
    torch.set_num_threads(1)
    width, rounds, sizes = (32, 2, SIZES_MB[:2]) if short else (128, 8, SIZES_MB)
    saving, plain, copying_s, size_mb = beside_training(width, rounds, now)
    ratios = sorted(one / other for one, other in zip(saving, plain, strict=True))
    rows = [
        f"steps of {median(plain) * 1e3:.2f} ms (mean of {EVERY}), with a save of {size_mb:.1f} MB among them"
        f" {median(saving) * 1e3:.2f} ms: {median(ratios):.4f} times (windows {ratios[0]:.3f} to {ratios[-1]:.3f});"
        f" the step that copies: {copying_s * 1e3:.1f} ms more",
        copying_text(short=short),
        f"{'MB':>5} {'s':>7} {'GB/s':>6} {'disk GB/s':>10} {'ratio':>6}",
    ]
    written: list[tuple[float, float]] = []
    disk: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        for size in sizes:
            taken = checkpoint_s(size, Path(directory))
            own = disk_s(size, Path(directory))
            written.append((size, size / 1e3 / taken))
            disk.append((size, size / 1e3 / own))
            rows.append(
                f"{size:>5} {taken:>7.3f} {size / 1e3 / taken:>6.2f} {size / 1e3 / own:>10.2f} {taken / own:>6.2f}"
            )
    return Told(
        rows,
        f"save: every {EVERY} steps {median(ratios):.3f} times the mean step, {copying_s * 1e3:.1f} ms to copy;"
        f" {written[-1][1]:.2f} GB/s, the disk itself {disk[-1][1]:.2f}",
        "writing a checkpoint",
        "megabytes",
        "gigabytes a second",
        {"checkpoint": written, "plain file": disk},
    )


def beside_training(
    width: int, rounds: int, now: Clock
) -> tuple[list[float], list[float], float, float]:
    """Mean seconds a step of each window with saves and without, how much longer the copying step
    is, and megabytes saved.
    """
    found: dict[str, list[float]] = {"saving": [], "plain": []}
    copying: list[float] = []
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as directory,
        redirect_stdout(StringIO()),
        ExitStack() as stack,
    ):
        runs = {
            name: windows(Path(directory) / name, every, (rounds + 2) * EVERY, width, now, stack)
            for name, every in (("saving", EVERY), ("plain", 1_000_000))
        }
        for turn in range(rounds + 1):
            for name in list(runs)[:: 1 if turn % 2 else -1]:
                taken = next(runs[name])
                if turn:
                    found[name].append(mean(taken))
                    if name == "saving":
                        # the checkpoint of the last step of the window before is copied in its
                        # first
                        copying.append(taken[0] - median(taken[1:]))
        files = (Path(directory) / "saving" / "checkpoints").glob(f"step-{EVERY:08d}/*")
        size = sum(file.stat().st_size for file in files) / 1e6 or 0.0
        for run in runs.values():
            run.close()  # type: ignore[attr-defined]  # a generator
    return found["saving"], found["plain"], median(copying), size


def windows(
    run_dir: Path, every: int, steps: int, width: int, now: Clock, stack: ExitStack
) -> Iterator[list[float]]:
    """A run that makes `EVERY` steps each time it is asked, and tells the seconds of each."""
    from surefoot.models.gpt import GPT
    from surefoot.models.gpt_layers import GPTConfig

    shape = GPTConfig(vocab_size=2048, context=128, layers=4, heads=4, width=width)
    tokens = np.random.default_rng(0).integers(0, 2048, 200_000)

    def loss(model: GPT, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    run = stack.enter_context(
        sf.Run(
            model=lambda: GPT(shape),
            loss=loss,
            train_data=sf.data.TrainWindows(tokens, context=128, seed=0),
            batch_size=8,
            length=f"{steps} steps",
            optimizer=sf.optim.adamw(lr=1e-3),
            precision="fp32",
            save_every=f"{every} steps",
            keep_last=100,
            report=False,
            run_dir=run_dir,
        )
    )
    taken: list[float] = []
    begun: float | None = None
    for step in (
        run
    ):  # a checkpoint is copied after its step was yielded, so in the interval before the next
        if begun is not None:
            taken.append(now() - begun)
        if step.index % EVERY == EVERY - 1 and len(taken) >= EVERY - 1:
            yield taken
            taken = []
        begun = now()


def copying_text(*, short: bool) -> str:
    """How long a state is copied in a save after the first, beside a copy of as many bytes: CPU
    seconds, medians in turns.
    """
    from surefoot.checkpoint.tensor_file import HostMemory, host_copy

    state = [torch.randn(1024, 1025) for _ in range(8 if short else 144)]
    there = torch.empty(len(state), 1024, 1025)
    memory = HostMemory()
    taken: list[tuple[float, float]] = []
    for _ in range(12):
        begun = process_time()
        with memory.reused():
            copies = [host_copy(each) for each in state]
        between = process_time()
        torch.stack(state, out=there)
        taken.append((between - begun, process_time() - between))
        del copies
    ours, plain = (median(seconds) for seconds in zip(*taken[2:], strict=True))
    return (
        f"a state of {there.nbytes / 1e6:.0f} MB is copied in {ours * 1e3:.0f} ms,"
        f" {ours / plain:.2f} times a plain copy of {plain * 1e3:.0f} ms"
    )


def checkpoint_s(size: int, directory: Path) -> float:
    """Seconds to write a checkpoint of so many megabytes, the least of three."""
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"{place}": torch.randint(256, (size * 125_000,), generator=draw, dtype=torch.uint8)
        for place in range(8)
    }
    store = Store(directory / f"store-{size}", keep_last=1)
    steps = iter(range(1, 4))
    return seconds(
        lambda: store.save(Checkpoint(next(steps), {"model": tensors})), perf_counter, times=3
    )


def disk_s(size: int, directory: Path) -> float:
    """Seconds to write as many bytes into one file, flushed; the least of three."""
    data = os.urandom(size * 1_000_000)

    def write() -> None:
        with (directory / "plain").open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())

    return seconds(write, perf_counter, times=3)
