"""Planning one epoch, which is asking for the samples of every step of it, by the number of
samples.

order: one permutation of all samples. mixture: three sources, 5 : 3 : 2. by tokens: batches of
4,096 tokens of pairs whose lengths are like those of sentences, planned from the lengths. Memory is
the most that NumPy held at a time, without what the lengths themselves take; of epochs of more than
a million samples that of the first million, but of batches by tokens of them all.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np

from growing.told import Clock, Told
from surefoot.data.buckets import Buckets
from surefoot.data.mixture import MixtureOrder
from surefoot.data.order import Order

BATCH, TOKENS = 64, 4096
COUNTED = 1_000_000  # samples of which memory is counted, which takes time
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
Epoch = Callable[[int], object]  # plans so many samples of it
MOST_BY_TOKENS = 10_000_000  # samples: the lengths of 100,000,000 pairs alone take 1.6 GB


def told(now: Clock, *, short: bool) -> Told:
    sizes = SIZES[:3] if short else SIZES
    found: dict[str, dict[int, tuple[float, float]]] = {}
    rows = [
        f"{'plan':>10} {'samples':>12} {'s an epoch':>11} {'ns a sample':>12} {'memory MB':>10}"
    ]
    for name, of_epoch in (("order", order), ("mixture", mixture), ("by tokens", by_tokens)):
        found[name] = {}
        for samples in sizes:
            if name == "by tokens" and samples > MOST_BY_TOKENS:
                continue
            found[name][samples] = taken, peak = measured(of_epoch(samples), samples, now)
            rows.append(
                f"{name:>10} {samples:>12,} {taken:>11.4f} {taken / samples * 1e9:>12.1f} {peak:>10.2f}"
            )
    most = sizes[-1]
    taken, peak = found["order"][most]
    return Told(
        rows,
        f"plan: an epoch of {most:,} samples in {taken:.2f} s ({taken / most * 1e9:.0f} ns a sample), {peak:.1f} MB at a time",
        "planning an epoch",
        "samples",
        "seconds",
        {
            name: [(samples, taken) for samples, (taken, _) in of.items()]
            for name, of in found.items()
        },
    )


def measured(epoch: Epoch, samples: int, now: Clock) -> tuple[float, float]:
    """Seconds, and megabytes: in two passes, since counting memory takes time."""
    begun = now()
    epoch(samples)
    taken = now() - begun
    tracemalloc.start()
    epoch(min(samples, COUNTED))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return taken, peak / 1e6


def order(samples: int) -> Epoch:
    def epoch(most: int) -> None:
        plan = Order(0, samples=samples, batch_size=BATCH)
        for step in range(-(-most // BATCH)):
            plan.ids(step)

    return epoch


def mixture(samples: int) -> Epoch:
    parts = [samples // 2, samples // 3]

    def epoch(most: int) -> None:
        plan = MixtureOrder(
            0, sizes=[*parts, samples - sum(parts)], weights=[0.5, 0.3, 0.2], batch_size=BATCH
        )
        for step in range(-(-most // BATCH)):
            plan.ids(step)

    return epoch


def by_tokens(samples: int) -> Epoch:
    draw = np.random.default_rng(0)
    long = np.clip(draw.lognormal(2.6, 0.5, samples), 1, 200)
    lengths = np.stack(
        [long, np.clip(long * draw.lognormal(0.0, 0.2, samples), 1, 200)], axis=1
    ).astype(np.int64)

    def epoch(most: int) -> None:
        plan = Buckets(0, lengths=lengths, tokens=TOKENS, pieces=1)
        for step in range(plan.steps * most // samples):
            plan.micro_batches(step)

    return epoch
