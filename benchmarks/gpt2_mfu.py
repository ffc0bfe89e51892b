"""GPT-2 124M at context 1,024 on one card: tokens a second and MFU of surefoot against a plain
script like nanoGPT, in turns.

    python benchmarks/gpt2_mfu.py [--peak 989e12] [--micro-batch 16] [--accumulate 4] [--rounds 7]
    python benchmarks/gpt2_mfu.py --tiny          # any CPU: that it runs, no figure

The plain script: the same shape (12 layers, 12 heads, 768 channels, tied head of 50,304 classes),
bf16 autocast, fused AdamW, torch.compile of the model with its loss, torch's attention, gradients
accumulated over the micro-batches and limited to a norm of 1. surefoot trains its own GPT of that
shape with precision = "bf16" and compile = True, twice: with the recipe's loss, which never holds
all logits, and with all logits at once, as the plain script has them. Tokens are random, in memory
on the device; a round is some steps of each way in turn, between two waits for the device; printed
are medians over rounds.

MFU: model FLOPs utilisation (Chowdhery et al. 2022, appendix B: https://arxiv.org/abs/2204.02311),
tokens a second times 6 N + 12 L T D operations a token over the card's stated peak (--peak, in
operations per second; without it that of `PEAKS`, which quotes the makers' datasheets for dense
bf16). N counts matrices that are multiplied with, the head among them and the embeddings not;
attention counts in full though half of it is masked. nanoGPT's own figure counts positions too,
which is 0.6 % more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from plain_gpt import PlainGPT
from torch import Tensor, nn

import surefoot as sf
from surefoot.tools.profile.flops import gpt_flops

PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
}  # by a word of the card's name


@dataclass(frozen=True)
class Shape:
    """What both train."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    vocab_size: int = 50_304
    micro_batch: int = 16
    accumulate: int = 4

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.micro_batch * self.accumulate * self.context


class WithLoss(nn.Module):
    """A model with its loss, which are compiled together."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor) -> Tensor:
        """The mean over all targets."""
        return F.cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def plain(shape: Shape, rows: Tensor, *, compiles: bool) -> Callable[[], None]:
    """A step as a plain script makes it."""
    network = PlainGPT(
        layers=shape.layers,
        heads=shape.heads,
        width=shape.width,
        context=shape.context,
        vocab_size=shape.vocab_size,
    )
    model: Any = WithLoss(network).to(rows.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    called = torch.compile(model) if compiles else model
    parts = torch.split(rows, shape.micro_batch)
    made = iter(range(1 << 40))

    def step() -> None:
        for _ in range(shape.accumulate):
            with torch.autocast(rows.device.type, dtype=torch.bfloat16):
                loss = called(parts[next(made) % len(parts)]) / shape.accumulate
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def of_recipe(model: Any, held: Any) -> Any:
    (rows,) = held
    return model(
        rows[:, :-1],
        loss=lambda hidden, head: sf.losses.linear_cross_entropy(hidden, head, rows[:, 1:]),
    )


def of_all_logits(model: Any, held: Any) -> Tensor:
    (rows,) = held
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def surefoot(
    shape: Shape, rows: Tensor, loss: Callable[[Any, Any], Any], *, compiles: bool, device: str
) -> sf.Run:
    """The same training by surefoot."""
    network = sf.models.GPTConfig(
        shape.layers,
        shape.heads,
        shape.width,
        shape.context,
        shape.vocab_size,
        family="gpt2",
        tie_embeddings=True,
    )
    return sf.Run(
        model=lambda: sf.models.GPT(network),
        loss=loss,
        count_fn=lambda held: held[0][:, 1:].numel(),
        train_data=(rows,),
        batch_size=shape.micro_batch * shape.accumulate,
        micro_batch_size=shape.micro_batch,
        length="100000 steps",
        optimizer=sf.optim.adamw(lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1),
        clip="norm 1.0",
        precision="bf16",
        compile=compiles,
        device=device,
        log_every="1000 steps",
        layer_stats_every=None,
        console=False,
    )


def stepping(run: sf.Run, open_runs: ExitStack) -> Callable[[], None]:
    """Steps of an open run."""
    open_runs.enter_context(run)
    made: Iterator[sf.Step] = iter(run)

    def step() -> None:
        next(made)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, uncompiled, on the CPU")
    parser.add_argument(
        "--peak", type=float, help="operations per second that the card is stated to do in bf16"
    )
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument(
        "--seconds",
        type=float,
        help="end when each way was timed for so long, whatever --rounds says",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        help="end this many seconds after the start, with the rounds that were made",
    )
    arguments = parser.parse_args()
    tiny = arguments.tiny
    if not tiny and not torch.cuda.is_available():
        sys.exit("there is no GPU here: --tiny shows that this runs")
    shape = Shape(micro_batch=arguments.micro_batch, accumulate=arguments.accumulate)
    if tiny:
        shape = Shape(
            layers=2, heads=2, width=32, context=32, vocab_size=128, micro_batch=2, accumulate=2
        )
    device = "cpu" if tiny else "cuda"
    compiles = not tiny
    started = perf_counter()
    torch.manual_seed(0)
    rows = torch.randint(
        shape.vocab_size, (16 * shape.micro_batch, shape.context + 1), device=device
    )

    with ExitStack() as open_runs:
        runs = [
            surefoot(shape, rows, loss, compiles=compiles, device=device)
            for loss in (of_recipe, of_all_logits)
        ]
        model: Any = runs[0].state.models["model"]
        operations = gpt_flops(model, tokens=1, length=shape.context)
        ways = {
            "plain": plain(shape, rows, compiles=compiles),
            "surefoot": stepping(runs[0], open_runs),
            "surefoot, all logits": stepping(runs[1], open_runs),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        timed_s = 0.0
        for round_index in range(arguments.rounds + 1):
            for name, step in ways.items():
                _wait(device)
                step_started = perf_counter()
                for _ in range(arguments.steps):
                    step()
                _wait(device)
                elapsed_s = perf_counter() - step_started
                if round_index:  # the first compiles
                    rates[name].append(arguments.steps * shape.tokens / elapsed_s)
                    timed_s += elapsed_s
            enough = arguments.seconds is not None and timed_s >= arguments.seconds * len(ways)
            over = arguments.limit_s is not None and perf_counter() - started > arguments.limit_s
            if round_index and (enough or over):
                break

    where = "a CPU (a tiny shape: no figure)" if tiny else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {where}, {shape}")
    print(f"{operations / 1e6:,.4g} million operations a token (6 N + 12 L T D)")
    found = {name: median(held) for name, held in rates.items()}
    print(f"{len(rates['plain'])} rounds of {arguments.steps} steps, {timed_s:.0f} s")
    peak = arguments.peak or (None if tiny else stated_peak(torch.cuda.get_device_name()))
    for name, rate in found.items():
        share = f", MFU {rate * operations / peak:.1%}" if peak else ""
        print(f"{name:<22}{rate:>12,.0f} tokens/s{share}, {rate / found['plain']:.3f} of plain")


def stated_peak(card: str) -> float | None:
    """Operations per second of a card in dense bf16, as its maker states them; None for one that
    `PEAKS` does not hold.
    """
    return next((peak for word, peak in PEAKS.items() if word in card), None)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
