"""Milliseconds a step of 1 or 2 ranks, with and without accumulation, against a hand-written loop
around bare DDP or FSDP.

    python benchmarks/ranks.py [--rounds 15] [--short]                   one rank
    torchrun --nproc-per-node 2 benchmarks/ranks.py [--fsdp]             two, over gloo, one core each
    python benchmarks/ranks.py --lanes                                   one rank, orders of addition

The gpt recipe's default network (0.9 M parameters, 128 tokens of context) on random tokens,
micro-batches of 4 rows. The bare loop: `DistributedDataParallel`, `no_sync` but for the last
micro-batch, clip_grad_norm_ 1.0, fused AdamW, a cosine by LambdaLR, the loss of rank 0 read every
20 steps. With `--fsdp`: `fully_shard` on each block and on the model, whose gradients are reduced
in every micro-batch. surefoot does the same with the loss and count of all ranks summed in every
step, agreement on signals, skipping, records and checkpoints on. Both are timed in windows of 20
steps inside the same processes, in turns; the ratio is that of the medians, on rank 0.

Bytes are counted by the loopback device (Linux; over TCP, as gloo sends): what all ranks of this
machine sent together in a window, with the headers of TCP. Other programs add to them. Nothing else
sends in a network namespace of its own:

    unshare -rn sh -c "ip link set lo up; torchrun --nproc-per-node 2 benchmarks/ranks.py"

`--lanes` compares three ways of adding the gradients of 8 micro-batches in one process: in `.grad`,
as torch does; along a tree; and in lanes. A lane adds consecutive micro-batches in `.grad`. The
sums of the lanes are added along a tree.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from loops.conditions import reported
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import surefoot as sf
from surefoot.distributed.tree_sum import Gradients, TreeSum, add_gradients
from surefoot.distributed.world import joined
from surefoot.memory import tensor_bytes
from surefoot.models.gpt import GPT
from surefoot.models.gpt_layers import GPTConfig
from surefoot.tools.plan.network_model import windows
from surefoot.tools.plan.workload import Spread, Workload, units

SAMPLES, CONTEXT, VOCABULARY, ROWS, WINDOW = 4096, 128, 257, 4, 20
Batches = list[tuple[Tensor, Tensor]]  # of the micro-batches of a step
MICRO_BATCHES = 8  # of `--lanes`
NETWORK = Path("/proc/net/dev")


def network() -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCABULARY, context=CONTEXT, layers=4, heads=4, width=128))


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def bare(
    data: tuple[Tensor, Tensor], *, rank: int, ranks: int, pieces: int, steps: int, sharded: bool
) -> Iterator[None]:
    """The loop that its user would have written, one step at a time; `pieces` micro-batches a step
    on each rank.
    """
    torch.manual_seed(0)
    model: Any = network()
    if sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    generator = torch.Generator().manual_seed(0)
    step = 0
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--short", action="store_true", help="one round, without accumulation")
    parser.add_argument("--fsdp", action="store_true", help="instead of DDP")
    parser.add_argument(
        "--lanes", action="store_true", help="compare orders of addition in one process instead"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.lanes:
        compare_orders(rounds=arguments.rounds)
        return
    world = joined("cpu", sharded=True)
    if (
        world.size > 1 and sys.platform == "linux"
    ):  # a core each: where two share one, nothing is measured
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    tokens = torch.randint(
        VOCABULARY, (SAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )
    data = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    rounds = 1 if arguments.short else arguments.rounds
    how = "FSDP" if arguments.fsdp else "DDP"
    for pieces in (1,) if arguments.short else (1, 4):
        spread: dict[str, Any] = {
            "rank": world.rank,
            "ranks": world.size,
            "sharded": arguments.fsdp,
        }
        theirs, ours = measured(data, **spread, pieces=pieces, rounds=rounds)
        if world.is_main:
            of_pairs = sorted(
                mine / other for (mine, _), (other, _) in zip(ours, theirs, strict=True)
            )
            (their_s, their_bytes), (our_s, our_bytes) = (
                map(median, zip(*each, strict=True)) for each in (theirs, ours)
            )
            print(
                f"{world.size} rank{'s' * (world.size > 1)} x {pieces} micro-batch{'es' * (pieces > 1)}:"
                f" bare {how} {their_s / WINDOW * 1e3:7.2f} ms, surefoot {our_s / WINDOW * 1e3:7.2f} ms a step,"
                f" surefoot/bare {our_s / their_s:.3f}"
                f" (of windows side by side {of_pairs[len(of_pairs) // 4]:.3f} to {of_pairs[-len(of_pairs) // 4]:.3f})\n"
                f"  sent by all ranks: bare {in_mb(their_bytes / WINDOW)}, surefoot {in_mb(our_bytes / WINDOW)} a step;"
                f" computed by `plan`: {in_mb(computed(arguments.fsdp, world.size, pieces))}",
                flush=True,
            )
    if world.is_main:
        print(
            f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, 1 thread a rank, gloo"
        )


def measured(
    data: tuple[Tensor, Tensor], *, rank: int, ranks: int, sharded: bool, pieces: int, rounds: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Seconds of windows of both loops, in turns, and bytes that all ranks of this machine sent in
    each.
    """
    steps = (rounds + 2) * WINDOW
    theirs: list[tuple[float, float]] = []
    ours: list[tuple[float, float]] = []
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
                for windows_of, made in ((theirs, plain), (ours, of_run)):
                    dist.barrier()
                    sent = sent_bytes()
                    begun = perf_counter()
                    for _ in range(WINDOW):
                        next(made)
                    took = perf_counter() - begun
                    dist.barrier()  # all have sent
                    if turn:  # the first of each warms up
                        windows_of.append((took, sent_bytes() - sent))
    return theirs, ours


def sent_bytes() -> float:
    """Return the bytes that this machine has sent to itself, or NaN where the system does not
    tell.
    """
    devices = (
        (line.split(":") for line in NETWORK.read_text().splitlines() if ":" in line)
        if NETWORK.exists()
        else ()
    )
    return next(
        (float(counters.split()[8]) for name, counters in devices if name.strip() == "lo"), math.nan
    )


def in_mb(number: float) -> str:
    return "not available" if math.isnan(number) else f"{number / 1e6:.2f} MB"


def computed(sharded: bool, ranks: int, pieces: int) -> float:
    """Return the bytes that all ranks send in a step, as `surefoot plan --world-size` computes
    them.
    """
    work = Workload(
        *units({"model": network()}), lambda _: 0, lambda _: 0, 0, 0, 0, (1.0, 1.0), ROWS
    )
    spread = (
        Spread("fsdp", ranks, sync="every", exact_sums=True)
        if sharded
        else Spread("ddp", ranks, exact_sums=True)
    )
    every = windows(work, spread, micro_batches=pieces)
    return ranks * sum(each.times * (each.to_shards + each.to_replicas) for each in every)


def shared(directory: str) -> str:
    """Rank 0's directory, on every rank."""
    return str(joined("cpu", sharded=True).from_main(directory))


@dataclass
class Adding:
    """An order of addition: `lanes` sums in `.grad`, which are then added along a tree."""

    name: str
    lanes: int
    cpu_s: list[float] = field(default_factory=list)

    def share(
        self, model: nn.Module, batches: Batches, own: range
    ) -> tuple[TreeSum[Gradients], int]:
        """Return the sums of the micro-batches `own` along a tree of lanes, and the most bytes of
        gradients after a backward pass.
        """
        parameters = list(model.parameters())
        length = MICRO_BATCHES // self.lanes
        most = 0
        tree: TreeSum[Gradients] = TreeSum(add_gradients, own.start // length)
        for index in own:
            loss(model, batches[index]).backward()  # type: ignore[no-untyped-call]
            gradients = [parameter.grad for parameter in parameters]
            pending = [value for _, _, value in tree.subtrees if value is not None]
            most = max(
                most,
                sum(
                    tensor_bytes(each for each in sums if each is not None)
                    for sums in (gradients, *pending)
                ),
            )
            if (index + 1) % length == 0 or index == own[
                -1
            ]:  # a rank ends the only lane of torch's order early
                tree.add(index // length, gradients)
                for parameter in parameters:
                    parameter.grad = None
        return tree, most

    def of_ranks(self, model: nn.Module, batches: Batches, ranks: int) -> tuple[Tensor, int] | None:
        """Return the flat sum over the ranks, computed one after the other, and the most bytes of
        one. None if lanes do not suffice.
        """
        if self.lanes > 1 and self.lanes % ranks:
            return None
        length = MICRO_BATCHES // ranks
        shares = [
            self.share(model, batches, range(rank * length, (rank + 1) * length))
            for rank in range(ranks)
        ]
        together: TreeSum[Gradients] = TreeSum(add_gradients)
        if self.lanes == 1:  # rank by rank, as in an all-reduce
            totals = [total for tree, _ in shares if (total := tree.total()) is not None]
            together.add(0, reduce(lambda older, newer: add_gradients(newer, older), totals))
        else:
            for tree, _ in shares:
                for first, leaves, value in tree.subtrees:
                    together.add(first, value, leaves=leaves)
        total = together.total() or []
        return torch.cat([each.flatten() for each in total if each is not None]), max(
            most for _, most in shares
        )


def compare_orders(*, rounds: int) -> None:
    """Print CPU times, memory, and whether the bits are those of one rank."""
    torch.manual_seed(0)
    model = network()
    with torch.no_grad():  # new blocks have weights of 0, and gradients of 0
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    tokens = torch.randint(VOCABULARY, (MICRO_BATCHES, ROWS, CONTEXT + 1))
    batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens]
    whole = tensor_bytes(model.parameters())
    ways = [
        Adding(".grad", 1),
        Adding("tree, or 8 lanes", 8),
        Adding("2 lanes", 2),
        Adding("4 lanes", 4),
    ]
    for turn in range(rounds + 1):
        for nth in range(len(ways)):
            way = ways[(turn + nth) % len(ways)]
            begun = process_time()
            tree, _ = way.share(model, batches, range(MICRO_BATCHES))
            tree.total()
            if turn:  # the first of each warms up
                way.cpu_s.append(process_time() - begun)
    for way in ways:
        ratios = sorted(own / other for own, other in zip(way.cpu_s, ways[0].cpu_s, strict=True))
        alone = way.of_ranks(model, batches, 1)
        texts = []
        for ranks in (1, 2, 4):
            shared_by_all = way.of_ranks(model, batches, ranks)
            if shared_by_all is None or alone is None:
                texts.append(f"{ranks} ranks: impossible")
                continue
            total, most = shared_by_all
            differ = int((total.view(torch.int32) != alone[0].view(torch.int32)).sum())
            bits = f"{differ:,} numbers differ from 1 rank's" if differ else "bits of 1 rank"
            texts.append(f"{ranks} rank{'s' * (ranks > 1)}: {most / whole:.2f} gradients, {bits}")
        print(
            f"{way.name:16} {median(way.cpu_s) * 1e3:7.2f} ms of CPU a step, ratio to .grad {median(ratios):.3f}"
            f" ({ratios[len(ratios) // 4]:.3f} to {ratios[-len(ratios) // 4]:.3f}); {'; '.join(texts)}",
            flush=True,
        )
    print(
        f"{MICRO_BATCHES} micro-batches, {whole // 4:,} numbers, torch {torch.__version__}, 1 thread"
    )


if __name__ == "__main__":
    with reported(
        int(os.environ.get("WORLD_SIZE", "1")), speaks=os.environ.get("RANK", "0") == "0"
    ):
        main()
