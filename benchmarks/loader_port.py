"""What a port that passes its DataLoader to `Run` costs, beside the same DataLoader in a plain loop
with fused AdamW.

    python benchmarks/loader_port.py [--seconds 20] [--of tiny,arrays] [--workers 0,2]

Both loops train side by side in one process: 25 steps of one, then 25 of the other, so that a
machine whose speed changes slows both. Printed is the median over all such pairs of the ratio of
their times, with its quartiles. surefoot has its defaults on: console, records, TensorBoard,
checkpoints, layers watched, every sample seeded. Without workers the time is the process's CPU
time. With workers it is wall time, which their reading hides in both loops.

`tiny` samples are rows of two tensors, which a data set of one's own returns; `tensors` is a
`TensorDataset` of the same; `arrays` are 28x28 bytes that become a normalized tensor; `torch`,
`numpy` and `python` flip each such picture at random, by a draw from that global generator. `rng`
flips them by a draw from a `np.random.Generator`, which the plain loop's data set holds itself, and
which surefoot hands to `__getitem__(index, rng)`. `sequential`, `weighted` and `batches` are `tiny`
samples with `shuffle=False`, a `WeightedRandomSampler`, and a `batch_sampler` of random batches.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from loops.alternating import paired_seconds, ratio_text
from loops.conditions import reported
from loops.models import BATCH, CLASSES, MLP
from loops.training import CLIP, RATE, WINDOW, Rows
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import surefoot as sf

SAMPLES, STEPS, PAIR = 32_768, 1_000_000, 25


class Arrays(Dataset[tuple[Tensor, int]]):
    """Pictures of 28x28 bytes, and a transform as torchvision's `ToTensor` and `Normalize` have
    it.
    """

    def __init__(self, draw: Callable[[], float] | None = None) -> None:
        generator = np.random.default_rng(0)
        self.images = generator.integers(256, size=(SAMPLES, 28, 28), dtype=np.uint8)
        self.labels = generator.integers(CLASSES, size=SAMPLES).tolist()
        self.draw = draw

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.read(index, self.draw)

    def read(self, index: int, draw: Callable[[], float] | None) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.images[index]).unsqueeze(0).to(torch.float32).div(255)
        if draw is not None and draw() < 0.5:
            image = image.flip(-1)
        return image.sub(0.5).div(0.25), self.labels[index]


class DrawingArrays(Arrays):
    """The same pictures, flipped by a draw from the generator that surefoot seeds for each
    sample.
    """

    def __getitem__(self, index: int, rng: np.random.Generator) -> tuple[Tensor, int]:  # type: ignore[override]  # noqa: PLE0302
        return self.read(index, rng.random)


def tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 32, generator=generator), torch.randint(
        CLASSES, (SAMPLES,), generator=generator
    )


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, CLASSES))


CASES: dict[str, tuple[Callable[[], Any], Callable[[], nn.Module]]] = {
    "tiny": (lambda: Rows(*tensors()), MLP),
    "tensors": (lambda: TensorDataset(*tensors()), MLP),
    "arrays": (Arrays, perceptron),
    "torch": (lambda: Arrays(lambda: torch.rand(()).item()), perceptron),
    "numpy": (lambda: Arrays(lambda: float(np.random.random())), perceptron),
    "python": (lambda: Arrays(random.random), perceptron),
    "rng": (lambda: Arrays(np.random.default_rng(0).random), perceptron),
    **dict.fromkeys(("sequential", "weighted", "batches"), (lambda: Rows(*tensors()), MLP)),
}


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(np.random.default_rng(0).random(SAMPLES).tolist(), SAMPLES)


WAYS: dict[str, Callable[[], dict[str, Any]]] = {  # of a DataLoader; other cases shuffle
    "sequential": lambda: {"batch_size": BATCH, "drop_last": True},
    "weighted": lambda: {"batch_size": BATCH, "sampler": weighted(), "drop_last": True},
    "batches": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(SAMPLES)), BATCH, drop_last=True)
    },
}


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loader(case: str, workers: int, dataset: Any = None) -> DataLoader[Any]:
    way = (
        WAYS[case]() if case in WAYS else {"batch_size": BATCH, "shuffle": True, "drop_last": True}
    )
    dataset = CASES[case][0]() if dataset is None else dataset
    return DataLoader(dataset, num_workers=workers, persistent_workers=workers > 0, **way)


def plain(case: str, workers: int) -> Iterator[None]:
    model = CASES[case][1]()
    batches = loader(case, workers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    step = 0
    while True:
        for batch in batches:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            step += 1
            if step % WINDOW == 0:
                print(f"step {step}/{STEPS} loss {value.item():.4f}")
            yield


def surefoot(case: str, workers: int, place: str) -> Iterator[None]:
    run = sf.Run(
        model=CASES[case][1](),
        loss=loss,
        train_data=loader(case, workers, DrawingArrays() if case == "rng" else None),
        length=f"{STEPS} steps",
        optimizer=sf.optim.adamw(lr=RATE),
        clip=f"norm {CLIP}",
        precision="fp32",
        run_dir=place,
        log_every=f"{WINDOW} steps",
        report=False,
    )
    with run:
        for _ in run:
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each case")
    parser.add_argument("--of", default=",".join(CASES), help="cases, with a comma between")
    parser.add_argument("--workers", default="0,2")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, 1 thread; surefoot / plain with fused AdamW: median, quartiles, pairs of {PAIR} steps"
    )
    for workers in map(int, arguments.workers.split(",")):
        for case in arguments.of.split(","):
            with tempfile.TemporaryDirectory() as place:
                loops = [surefoot(case, workers, place), plain(case, workers)]
                pairs = paired_seconds(
                    loops, steps=PAIR, seconds=arguments.seconds, wall=workers > 0
                )
            print(f"{case:<10} {workers} workers  {ratio_text(pairs, steps=PAIR)}", flush=True)


if __name__ == "__main__":
    with reported():
        main()
