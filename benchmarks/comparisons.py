"""How often `surefoot compare` calls luck better or worse, and how often it sees a bad rate.

    python benchmarks/comparisons.py --data DIR [--short]

A pool of short runs is trained once on 2,000 images of Fashion-MNIST: 120 seeds at the same
settings, and the first 30 of them with a learning rate ten times too small. Then three seeds are
compared with three others, by each of three scores: the loss (a mean over samples), accuracy (a
mean with few values), and macro F1 (of the whole split).

* 200 comparisons of the same settings: at most 5 % may be called better or worse.
* 50 with the small rate, with the same three seeds and with others: at least 45 must be worse.

The full form appends a dated table to benchmarks/results/comparisons.txt. Leaves with 1 where a
bound is missed.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from surefoot.cli.compare_worker import scores_by_batch
from surefoot.tools.compare.results import compared
from surefoot.tools.compare.trained import Compared, read_run
from surefoot.tools.compare.variants import Variant

RESULTS = Path(__file__).parent / "results" / "comparisons.txt"
SCORES = ("min val/loss", "max val/accuracy", "max val/macro_f1")
TRAIN = 2000
VAL = 1000
CLASSES = 10
RATE = 3e-3
Pool = dict[tuple[float, int], dict[str, Compared]]  # by rate and seed, then by score


def macro_f1(outputs: Tensor, targets: Tensor) -> float:
    """The mean over classes of 2 hits / (predicted + actual)."""
    predicted = outputs.argmax(dim=1)
    hits = torch.bincount(targets[predicted == targets], minlength=CLASSES)
    both = torch.bincount(predicted, minlength=CLASSES) + torch.bincount(targets, minlength=CLASSES)
    return float((2 * hits / both.clamp(min=1)).mean())


def images(data: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Training and validation images, in the order of the files."""
    train = sf.data.load_images(data).train
    assert isinstance(train, sf.data.ImageArrays)
    inputs, labels = train.gather(np.arange(TRAIN + VAL), np.zeros(TRAIN + VAL, dtype=np.int64))
    return {"train": (inputs[:TRAIN], labels[:TRAIN]), "val": (inputs[TRAIN:], labels[TRAIN:])}


def built(data: dict[str, tuple[Tensor, Tensor]], rate: float, seed: int, place: Path) -> sf.Run:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        outputs = model(batch[0])
        return F.cross_entropy(outputs, batch[1]), (outputs, batch[1])

    return sf.Run(
        model=lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, CLASSES)
        ),
        loss=loss,
        train_data=data["train"],
        batch_size=50,
        length="120 steps",
        optimizer=sf.optim.adamw(lr=rate),
        seed=seed,
        splits={
            "val": sf.Split(
                data["val"],
                metrics=[sf.metrics.accuracy, sf.metrics.whole_split(macro_f1)],
                batch_size=500,
            )
        },
        evaluate_every="60 steps",
        save_every="60 steps",
        log_every="60 steps",
        run_dir=place,
        precision="fp32",
        device="cpu",
        console=False,
        report=False,
    )


def trained(
    data: dict[str, tuple[Tensor, Tensor]], rate: float, seed: int, place: Path
) -> dict[str, Compared]:
    """What `surefoot compare` would read of a run that it has trained, by score."""
    run = built(data, rate, seed, place)
    run.train()
    of_scores = {}
    for score in SCORES:
        curves = read_run(place, metric=score)
        variant = Variant(place.name, "", {}, {"seed": seed})
        of_scores[score] = Compared(
            variant, curves, batches=scores_by_batch(run, curves, draws=True)
        )
    return of_scores


def verdict(score: str, pool: Pool, *variants: tuple[float, Sequence[int]]) -> str:
    """What is said of the second of two variants, each a rate and its seeds, beside the first."""
    runs = []
    for name, (rate, seeds) in zip("ab", variants, strict=True):
        for seed in seeds:
            run = pool[rate, seed][score]
            runs.append(replace(run, variant=replace(run.variant, group=name)))
    return next(row for row in compared(runs, baseline="a").rows if row.name == "b").verdict


def triples(seeds: Sequence[int], generator: random.Random) -> list[list[int]]:
    mixed = generator.sample(seeds, len(seeds))
    return [mixed[start : start + 3] for start in range(0, len(mixed) - 2, 3)]


def disjoint(seeds: Sequence[int], count: int) -> list[tuple[list[int], list[int]]]:
    """So many pairs of three seeds and three others."""
    generator = random.Random(0)
    pairs = list[tuple[list[int], list[int]]]()
    while len(pairs) < count:
        mixed = triples(seeds, generator)
        pairs += zip(mixed[::2], mixed[1::2], strict=False)
    return pairs[:count]


def without_data(pool: Pool) -> Pool:
    """The same runs, evaluated on other data each: errors then cover seeds only."""
    return {
        key: {score: replace(run, batches=None) for score, run in of_scores.items()}
        for key, of_scores in pool.items()
    }


def row(score: str, pool: Pool, *, covers: str, equal: int, slow: int) -> tuple[bool, str]:
    """Whether the bounds hold for a score, and a line of the table."""
    seeds = [seed for rate, seed in pool if rate == RATE]
    slow_seeds = [seed for rate, seed in pool if rate != RATE]
    luck = Counter(
        verdict(score, pool, (RATE, one), (RATE, other)) for one, other in disjoint(seeds, equal)
    )
    others, same = Counter[str](), Counter[str]()
    for one, other in disjoint(slow_seeds, slow):
        others[verdict(score, pool, (RATE, one), (RATE / 10, other))] += 1
        same[verdict(score, pool, (RATE, other), (RATE / 10, other))] += 1
    wrong = luck["better"] + luck["worse"]
    holds = wrong <= 0.05 * equal and min(others["worse"], same["worse"]) >= 0.9 * slow
    return holds, (
        f"{score:<18}{covers:<17}{wrong:>3} of {equal} ({luck['better']} better, {luck['worse']} worse)"
        f"{others['worse']:>12} of {slow}{same['worse']:>12} of {slow}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", required=True, help="directory of Fashion-MNIST's four files")
    parser.add_argument("--short", action="store_true", help="about half a minute")
    arguments = parser.parse_args()
    count, slow_count, equal, slow = (12, 6, 20, 4) if arguments.short else (120, 30, 200, 50)
    torch.set_num_threads(1)
    began = time.process_time()
    data = images(arguments.data)
    settings = [(RATE, seed) for seed in range(count)]
    settings += [(RATE / 10, seed) for seed in range(slow_count)]
    with tempfile.TemporaryDirectory() as place:
        pool = {
            (rate, seed): trained(data, rate, seed, Path(place) / f"{rate:g}-{seed}")
            for rate, seed in settings
        }
        rows = [
            row(score, runs, covers=covers, equal=equal, slow=slow)
            for covers, runs in {"seeds and data": pool, "seeds only": without_data(pool)}.items()
            for score in SCORES
        ]
    lines = [
        f"# {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {len(pool)} runs,"
        f" {time.process_time() - began:.0f} CPU s",
        f"{'score':<18}{'the error covers':<17}{'same settings, other seeds':<34}{'rate / 10: worse':<22}the same seeds: worse",
        *(line for _, line in rows),
    ]
    print("\n".join(lines))
    if not arguments.short:
        with RESULTS.open("a") as file:
            file.write("\n".join(lines) + "\n\n")
    sys.exit(not all(holds for holds, _ in rows))


if __name__ == "__main__":
    main()
