"""Seconds to 90 % test accuracy on Fashion-MNIST against a plain script of the same model; the last line is the ratio.

    python benchmarks/fashion_mnist.py --data DIR [--rounds 3] [--epochs 2] [--threads 2]

Both train surefoot's SimpleCNN of width 32 with AdamW (3e-3, decay 0.1), batches of 256 and label smoothing 0.1, clipped at
1.0, from the same 54,000 images, and look at the same 6,000 held-out images after every epoch. Each stops after the first
epoch with 90 % of them right; its seconds are those of training and evaluation until then, reading the files not counted. The
test part is scored once, with the weights that it stopped with.

surefoot runs its recipe `images` with the preset `fashion-mnist`: whole batches augmented at once, channels last, the number
format that it measures to be faster, warm-up and cosine over `--epochs`, which may be few.
The plain script is what its user would have written
first: a Dataset that augments one image in __getitem__ (crop with padding 1, flip), a DataLoader in the main process or
with `--workers`, float32, no schedule.
"""

from __future__ import annotations

import argparse
import random
from contextlib import redirect_stdout
from io import StringIO
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import surefoot as sf
from surefoot.config import layered
from surefoot.recipes import images as recipe

WANTED = 0.9
BATCH, WIDTH, RATE, DECAY, SMOOTHING, PADDING = 256, 32, 3e-3, 0.1, 0.1, 1


class Augmented(Dataset[tuple[Tensor, int]]):
    """One image at a time: as a tensor, normalised, padded, cut, perhaps mirrored."""

    def __init__(self, data: sf.Images) -> None:
        self.images, self.labels = data.images, data.labels.tolist()
        self.mean, self.std = data.mean[0], data.std[0]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.images[sample, ..., 0]).float().div(255).sub(self.mean).div(self.std)
        padded = F.pad(image, (PADDING,) * 4, value=-self.mean / self.std)
        top, left = random.randrange(2 * PADDING + 1), random.randrange(2 * PADDING + 1)
        piece = padded[top : top + 28, left : left + 28]
        if random.random() < 0.5:
            piece = piece.flip(1)
        return piece.unsqueeze(0), self.labels[sample]


def accuracy(model: nn.Module, data: Any) -> float:
    """The fraction of a data set that is named right."""
    model.eval()
    right = 0
    with torch.no_grad():
        for first in range(0, len(data), BATCH):
            ids = np.arange(first, min(first + BATCH, len(data)))
            inputs, labels = data.gather(ids, np.zeros_like(ids))
            right += int((model(inputs).argmax(dim=1) == labels).sum())
    model.train()
    return right / len(data)


def plain(data: sf.ImageSets, *, epochs: int, seed: int, workers: int) -> tuple[float, int, float]:
    """Seconds and epochs to the wanted accuracy by a loop that its user would have written, and its accuracy on the test part."""
    assert isinstance(data.training, sf.Images)
    torch.manual_seed(seed)
    random.seed(seed)
    started = perf_counter()
    loader = DataLoader(Augmented(data.training), batch_size=BATCH, shuffle=True, num_workers=workers)
    model = sf.models.SimpleCNN(channels=1, classes=10, width=WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    for epoch in range(1, epochs + 1):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels, label_smoothing=SMOOTHING)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if accuracy(model, data.held_out) >= WANTED:
            return perf_counter() - started, epoch, accuracy(model, data.test)
    raise SystemExit(f"the plain script did not reach {WANTED:.0%} in {epochs} epochs")


def surefoot(data: sf.ImageSets, path: str, *, epochs: int, seed: int) -> tuple[float, int, float]:
    """The same by surefoot's recipe."""
    asked = {"data.path": path, "out": None, "length": f"{epochs} epochs", "seed": seed}
    layers = [("preset", recipe.PRESETS["fashion-mnist"]), ("benchmark", asked)]
    run = recipe.build(layered(recipe.Config, layers)[0])
    started = perf_counter()
    with run:
        for step in run:
            if step.scores.get("held-out/accuracy", 0.0) >= WANTED:
                break
    elapsed_s = perf_counter() - started
    if run.scores()["held-out/accuracy"] < WANTED:
        raise SystemExit(f"surefoot did not reach {WANTED:.0%} in {epochs} epochs")
    model = run.state.models["model"]
    return elapsed_s, round(run.state.step * BATCH / len(data.training)), accuracy(model, data.test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True, help="directory of Fashion-MNIST's four files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2, help="length of surefoot's schedule")
    parser.add_argument("--most", type=int, default=30, help="epochs after which the plain script gives up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0, help="of the plain script's DataLoader")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    data = sf.load_images(arguments.data)
    ratios = []
    for seed in range(arguments.rounds):
        quiet = StringIO()
        with redirect_stdout(quiet):
            ours_s, our_epochs, ours = surefoot(data, arguments.data, epochs=arguments.epochs, seed=seed)
            theirs_s, their_epochs, theirs = plain(data, epochs=arguments.most, seed=seed, workers=arguments.workers)
        ratios.append(theirs_s / ours_s)
        print(
            f"round {seed + 1}: plain {theirs_s:6.1f} s, {their_epochs} epochs, test {theirs:.4f}  "
            f"surefoot {ours_s:6.1f} s, {our_epochs} epochs, test {ours:.4f}  ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {arguments.threads} threads")
    print(f"plain/surefoot {median(ratios):.2f}")


if __name__ == "__main__":
    main()
