"""Windows of tokens, shuffled, as the loop is given them: tokens a second, beside copying as many
bytes from memory to memory.

The tokens are 16-bit numbers in memory; a batch is inputs and targets, 64-bit each, as embeddings
and losses take them. The copy is of tensors of that size that lie ready.
"""

from __future__ import annotations

from itertools import count

import numpy as np
import torch

import surefoot as sf
from growing.told import Clock, Told, seconds
from surefoot.data.loader import Feed
from surefoot.data.order import Order

SHAPES = ((12, 64), (8, 128), (32, 512), (64, 1024), (512, 1024))  # windows, tokens of context
TOKENS = 20_000_000


def told(now: Clock, *, short: bool) -> Told:
    tokens = np.random.default_rng(0).integers(
        0, 2048, TOKENS // (10 if short else 1), dtype=np.uint16
    )
    rows = [
        f"{'batch':>6} {'context':>8} {'us a batch':>11} {'million tokens/s':>17} {'GB/s':>6} {'memcpy GB/s':>12} {'ratio':>6}"
    ]
    fed: list[tuple[float, float]] = []
    copied: list[tuple[float, float]] = []
    for batch, context in SHAPES[:3] if short else SHAPES:
        windows = sf.data.TrainWindows(tokens, context=context, seed=0)
        feed = Feed(
            windows,
            Order(0, samples=len(windows), batch_size=batch),
            seed=0,
            device=torch.device("cpu"),
        )
        feed.start(0)
        steps = count()
        times = max(20, 2_000_000 // (batch * context))
        many = range(times)

        def made(feed: Feed = feed, steps: count[int] = steps, many: range = many) -> None:
            for _ in many:
                feed.micro_batches(next(steps))

        ready = [torch.zeros(batch, context, dtype=torch.int64) for _ in range(2)]
        there = [torch.empty_like(each) for each in ready]

        def copy(
            ready: list[torch.Tensor] = ready, there: list[torch.Tensor] = there, many: range = many
        ) -> None:
            for _ in many:
                for source, target in zip(ready, there, strict=True):
                    target.copy_(source)

        taken, plain = (seconds(call, now, times=3) / times for call in (made, copy))
        held = batch * context
        size = 2 * 8 * batch * context
        fed.append((held, held / taken))
        copied.append((held, held / plain))
        rows.append(
            f"{batch:>6} {context:>8} {taken * 1e6:>11.1f} {held / taken / 1e6:>17.0f} {size / taken / 1e9:>6.2f}"
            f" {size / plain / 1e9:>12.2f} {taken / plain:>6.2f}"
        )
    return Told(
        rows,
        f"feed: {fed[-1][1] / 1e6:.0f} million tokens/s in batches of {fed[-1][0]:,.0f}, memcpy {copied[-1][1] / 1e6:.0f}",
        "feeding windows of tokens",
        "tokens of a batch",
        "tokens a second",
        {"feed": fed, "memcpy": copied},
    )
