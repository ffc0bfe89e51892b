"""Milliseconds a step of 1 or 2 ranks, with and without accumulation, against a hand-written loop around bare DDP or FSDP.

    python benchmarks/ranks.py [--rounds 15] [--short]                   one rank
    torchrun --nproc-per-node 2 benchmarks/ranks.py [--fsdp]             two, over gloo, one core each

The gpt recipe's default network (0.9 M parameters, 128 tokens of context) on random tokens, micro-batches of 4 rows. The bare
loop: `DistributedDataParallel`, `no_sync` but for the last micro-batch, clip_grad_norm_ 1.0, fused AdamW, a cosine by LambdaLR,
the loss of rank 0 read every 20 steps. With `--fsdp`: `fully_shard` on each block and on the model, whose gradients are reduced in
every micro-batch. surefoot does the same with the loss and count of all ranks summed in every step,
agreement on signals, skipping, records and checkpoints on. Both are timed in windows of 20 steps inside the same processes, in
turns; the ratio is that of the medians, on rank 0.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from loops.conditions import reported
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import surefoot as sf
from surefoot.distributed.world import joined
from surefoot.models.gpt import GPT
from surefoot.models.gpt_layers import GPTConfig

SAMPLES, CONTEXT, VOCABULARY, ROWS, WINDOW = 4096, 128, 257, 4, 20


def network() -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCABULARY, context=CONTEXT, layers=4, heads=4, width=128))


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def bare(
    data: tuple[Tensor, Tensor], *, rank: int, ranks: int, pieces: int, steps: int, sharded: bool
) -> Iterator[None]:
    """The loop that its user would have written, one step at a time; `pieces` micro-batches a step on each rank."""
    torch.manual_seed(0)
    model: Any = network()
    if sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    generator, step = torch.Generator().manual_seed(0), 0
    while True:
        order = torch.randperm(SAMPLES, generator=generator)[rank::ranks]
        for start in range(0, len(order) - pieces * ROWS + 1, pieces * ROWS):
            optimizer.zero_grad()
            for piece in range(pieces):
                chosen = order[start + piece * ROWS : start + (piece + 1) * ROWS]
                with nullcontext() if piece == pieces - 1 or sharded else model.no_sync():
                    part = loss(model, (data[0][chosen], data[1][chosen])) / pieces
                    part.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            step += 1
            if step % WINDOW == 0 and rank == 0:
                print(f"step {step} loss {part.item():.4f}", file=open(os.devnull, "w"))  # noqa: SIM115
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--short", action="store_true", help="one round, without accumulation")
    parser.add_argument("--fsdp", action="store_true", help="instead of DDP")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    world = joined("cpu", sharded=True)
    if world.size > 1 and sys.platform == "linux":  # a core each: where two share one, nothing is measured
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    tokens = torch.randint(VOCABULARY, (SAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    data = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    rounds, how = 1 if arguments.short else arguments.rounds, "FSDP" if arguments.fsdp else "DDP"
    for pieces in (1,) if arguments.short else (1, 4):
        spread: dict[str, Any] = {"rank": world.rank, "ranks": world.size, "sharded": arguments.fsdp}
        theirs, ours = measured(data, **spread, pieces=pieces, rounds=rounds)
        if world.is_main:
            of_pairs = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
            print(
                f"{world.size} rank{'s' * (world.size > 1)} x {pieces} micro-batch{'es' * (pieces > 1)}:"
                f" bare {how} {median(theirs) / WINDOW * 1e3:7.2f} ms, surefoot {median(ours) / WINDOW * 1e3:7.2f} ms a step,"
                f" surefoot/bare {median(ours) / median(theirs):.3f}"
                f" (of windows side by side {of_pairs[len(of_pairs) // 4]:.3f} to {of_pairs[-len(of_pairs) // 4]:.3f})",
                flush=True,
            )
    if world.is_main:
        print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, 1 thread a rank, gloo")


def measured(
    data: tuple[Tensor, Tensor], *, rank: int, ranks: int, sharded: bool, pieces: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of windows of both loops, in turns."""
    steps = (rounds + 2) * WINDOW
    theirs: list[float] = []
    ours: list[float] = []
    plain = bare(data, rank=rank, ranks=ranks, pieces=pieces, steps=steps, sharded=sharded)
    with tempfile.TemporaryDirectory() as directory:
        run = sf.Run(
            model=network,
            loss=loss,
            train_data=data,
            batch_size=ROWS * pieces * ranks,
            micro_batch_size=ROWS,
            length=f"{steps} steps",
            optimizer=sf.optim.adamw(lr=1e-3, weight_decay=0.01),
            schedule=sf.schedules.cosine(warmup="1 steps"),
            clip="norm 1.0",
            precision="fp32",
            parallel="fsdp" if sharded else "auto",
            device="cpu",
            run_dir=shared(directory),
            log_every=f"{WINDOW} steps",
            save_every=f"{10 * WINDOW} steps",
            console=False,
        )
        with run:
            of_run = iter(run)
            for turn in range(rounds + 1):
                for times, made in ((theirs, plain), (ours, of_run)):
                    dist.barrier()
                    begun = perf_counter()
                    for _ in range(WINDOW):
                        next(made)
                    if turn:  # the first of each warms up
                        times.append(perf_counter() - begun)
    return theirs, ours


def shared(directory: str) -> str:
    """Rank 0's directory, on every rank."""
    return str(joined("cpu", sharded=True).from_main(directory))


if __name__ == "__main__":
    with reported(int(os.environ.get("WORLD_SIZE", "1")), speaks=os.environ.get("RANK", "0") == "0"):
        main()
