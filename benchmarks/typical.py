"""Typical runs beside the plain loop that an expert writes for the same, with fused AdamW. The aim
of most is 1.02 or less.

    python benchmarks/typical.py [--seconds 20] [--of resnet,buffers]

Both loops train side by side in one process and one thread: a stretch of steps of one, then of the
other. Printed is the median over all pairs of stretches of the ratio of their CPU times (of wall
times with workers), with its quartiles. surefoot has its defaults on: console, records,
TensorBoard, checkpoints, layers watched, findings.

resnet      ResNet-18 of width 16 on 32x32 images, batch 8: 60 buffers of batch normalization
buffers     a GPT that keeps its causal mask, 4 MB, in a persistent buffer
jpegs       JPEG files through a DataLoader that crops and flips them at random, without workers and with 2
logging     every step is logged: the plain loop writes the loss, the norm and the rate to TensorBoard
layers      statistics of layers at every step, beside a plain loop that computes none
evaluation  an evaluation of 32 batches with two metrics after every 10 steps, a perceptron of 784-256-10
ema         averaged weights, beside torch's AveragedModel
accumulate  4 micro-batches per step
small       many small parameters: 100 layers of width 16
flat        the logging of every 50 steps, beside the fastest loop known to us: all weights and gradients are views of one tensor
            each, updated by one kernel, and batches are taken from memory by index. Its aim is 1.10
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from loops.alternating import paired_seconds, ratio_text
from loops.conditions import reported
from loops.models import CLASSES, MLP, SAMPLES, VOCABULARY
from loops.training import CLIP, RATE, WINDOW
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import surefoot as sf

STEPS = 1_000_000
Plain = Callable[["Case"], Iterator[None]]


@dataclass(frozen=True)
class Case:
    """A model, its samples, the plain loop, and what surefoot's run is told beside them."""

    model: Callable[[], nn.Module]
    dataset: Callable[[Path], Any]
    plain: Plain
    batch_size: int = 32
    stretch: int = 20  # steps
    workers: int = 0
    clip: bool = True
    settings: Callable[[Path], dict[str, Any]] = field(default=lambda place: {})  # noqa: ARG005
    place: Path = Path()

    def loader(self) -> DataLoader[Any]:
        """The DataLoader that both loops are given."""
        return DataLoader(
            self.dataset(self.place),
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
        )


# The models and samples.


class BasicBlock(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride > 1 or before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def resnet18(width: int = 16) -> nn.Module:
    blocks: list[nn.Module] = []
    before = width
    for stage in range(4):
        for block in range(2):
            blocks.append(BasicBlock(before, width << stage, 2 if stage and not block else 1))
            before = width << stage
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES)
    )


class MaskedAttention(nn.Module):
    """Attention with its mask in a persistent buffer, as in nanoGPT before PyTorch 2.0: 1024 x 1024
    float32 are 4 MB.
    """

    def __init__(self, width: int = 64, context: int = 1024) -> None:
        super().__init__()
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(context, context)))
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inward(x).chunk(3, dim=-1)
        length = x.shape[1]
        weights = (q @ k.transpose(-2, -1)) / 8
        weights = weights.masked_fill(self.mask[:length, :length] == 0, float("-inf")).softmax(-1)
        return self.outward(weights @ v)  # type: ignore[no-any-return]


class MaskedGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 64)
        self.attention = MaskedAttention()
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        return self.head((h + self.attention(h)).mean(1))  # type: ignore[no-any-return]


class Deep(nn.Module):
    """100 narrow layers: 200 small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(32, 16)
        self.outward = nn.Linear(16, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(100))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return self.outward(x)  # type: ignore[no-any-return]


def images(place: Path) -> Dataset[Any]:  # noqa: ARG001
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(512, 3, 32, 32, generator=generator),
        torch.randint(CLASSES, (512,), generator=generator),
    )


def rows(place: Path) -> Dataset[Any]:  # noqa: ARG001
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 32, generator=generator),
        torch.randint(CLASSES, (SAMPLES,), generator=generator),
    )


def pixels(place: Path) -> Dataset[Any]:  # noqa: ARG001
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, 784, generator=generator),
        torch.randint(CLASSES, (SAMPLES,), generator=generator),
    )


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def texts(place: Path) -> Dataset[Any]:  # noqa: ARG001
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randint(VOCABULARY, (SAMPLES, 32), generator=generator),
        torch.randint(CLASSES, (SAMPLES,), generator=generator),
    )


class Jpegs(Dataset[tuple[Tensor, int]]):
    """Files of 160x120 pixels; a random crop of 96x96 and a random flip, drawn from Python's
    `random` as PIL users do.
    """

    def __init__(self, place: Path) -> None:
        self.files = sorted(place.glob("*.jpg"))
        if not self.files:
            generator = np.random.default_rng(0)
            for number in range(256):
                small = Image.fromarray(generator.integers(256, size=(12, 16, 3), dtype=np.uint8))
                small.resize((160, 120), Image.Resampling.BICUBIC).save(
                    place / f"{number:03}.jpg", quality=90
                )
            self.files = sorted(place.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.files[index]) as file:
            image = file.convert("RGB")
        left = random.randint(0, 64)
        top = random.randint(0, 24)
        image = image.crop((left, top, left + 96, top + 96))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        array = torch.from_numpy(np.asarray(image, dtype=np.float32)).permute(2, 0, 1)
        return array.div(255).sub(0.5).div(0.25), index % CLASSES


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loss_and_outputs(model: Any, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]), (logits, batch[1])


# The plain loops.


def simple(
    case: Case, after: Callable[[nn.Module, Tensor, Tensor, float, int], None] | None = None
) -> Iterator[None]:
    """Clipping, fused AdamW, a cosine, the loss printed every 50 steps;
    `after(model, loss, norm, lr, step)` follows a step.
    """
    model = case.model()
    loader = case.loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    step = 0
    while True:
        for batch in loader:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            step += 1
            if step % WINDOW == 0:
                print(f"step {step}/{STEPS} loss {value.item():.4f}")
            if after is not None:
                after(model, value, norm, optimizer.param_groups[0]["lr"], step)
            yield


def logged(case: Case) -> Iterator[None]:
    """Loss, norm and rate of every step to TensorBoard and as a line of text, as most scripts have
    it.
    """
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(case.place / "plain-tensorboard")) as writer:

        def write(model: nn.Module, value: Tensor, norm: Tensor, lr: float, step: int) -> None:  # noqa: ARG001
            writer.add_scalar("train/loss", value.item(), step)
            writer.add_scalar("train/grad_norm", norm.item(), step)
            writer.add_scalar("train/lr", lr, step)
            print(f"step {step}/{STEPS} loss {value.item():.4f}")

        yield from simple(case, write)


def evaluated(case: Case) -> Iterator[None]:
    """Loss, accuracy and top-3 accuracy over a split in batches, after every 10 steps."""
    inputs, targets = pixels(case.place).tensors  # type: ignore[attr-defined]
    batches = [*zip(inputs.split(case.batch_size), targets.split(case.batch_size), strict=True)]

    def evaluate(model: nn.Module, value: Tensor, norm: Tensor, lr: float, step: int) -> None:  # noqa: ARG001
        if step % 10:
            return
        model.eval()
        sums = torch.zeros(3)
        with torch.no_grad():
            for x, y in batches:
                logits = model(x)
                sums[0] += F.cross_entropy(logits, y, reduction="sum")
                sums[1] += (logits.argmax(-1) == y).sum()
                sums[2] += (logits.topk(3).indices == y.unsqueeze(-1)).any(-1).sum()
        model.train()
        print(f"step {step}", *(sums / len(inputs)).tolist())

    return simple(case, evaluate)


def averaged(case: Case) -> Iterator[None]:
    """torch's own exponential average of the weights."""
    average: list[Any] = []

    def update(model: nn.Module, value: Tensor, norm: Tensor, lr: float, step: int) -> None:  # noqa: ARG001
        if not average:
            multi_avg_fn = torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)  # type: ignore[no-untyped-call]
            average.append(torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=multi_avg_fn))
        average[0].update_parameters(model)

    return simple(case, update)


def accumulated(case: Case) -> Iterator[None]:
    """Four micro-batches per step, the loss divided by their number."""
    model = case.model()
    batches = cycle(case.loader())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    step = 0
    while True:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        for part in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            value = loss(model, part) / 4
            value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        step += 1
        if step % WINDOW == 0:
            print(f"step {step}/{STEPS} loss {value.item():.4f}")
        yield


def flat(case: Case) -> Iterator[None]:
    """Weights and gradients in one tensor each: one norm, one factor, one fused kernel; rows of a
    permutation, no DataLoader.
    """
    model = case.model()
    inputs, targets = case.dataset(case.place).tensors
    parameters = list(model.parameters())
    weights = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    gradients = torch.zeros_like(weights)
    sizes = [p.numel() for p in parameters]
    for p, own, gradient in zip(
        parameters, torch.split(weights.detach(), sizes), torch.split(gradients, sizes), strict=True
    ):
        p.data = own.view_as(p)
        p.grad = gradient.view_as(p)
    weights.grad = gradients
    optimizer = torch.optim.AdamW([weights], lr=RATE, fused=True)
    (group,) = optimizer.param_groups
    step = 0
    while True:
        order = torch.randperm(len(inputs))
        batches_of_epoch = len(order) // case.batch_size
        rows_of_epoch = order[: batches_of_epoch * case.batch_size].view(-1, case.batch_size)
        for rows_of_batch in rows_of_epoch:
            gradients.zero_()
            batch = inputs.index_select(0, rows_of_batch), targets.index_select(0, rows_of_batch)
            value = loss(model, batch)
            value.backward()  # type: ignore[no-untyped-call]
            norm = torch.linalg.vector_norm(gradients)
            gradients.mul_((CLIP / (norm + 1e-6)).clamp_(max=1.0))
            group["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * step / STEPS))
            optimizer.step()
            step += 1
            if step % WINDOW == 0:
                print(f"step {step}/{STEPS} loss {value.item():.4f}")
            yield


def two_metrics(place: Path) -> dict[str, Any]:
    def top_3_accuracy(outputs: Tensor, targets: Tensor) -> sf.Mean:
        is_among_3 = (outputs.topk(3).indices == targets.unsqueeze(-1)).any(-1)
        return sf.Mean(is_among_3.sum(), len(targets))

    split = sf.Split(pixels(place), metrics=[sf.metrics.accuracy, top_3_accuracy], batch_size=128)
    return {"splits": {"val": split}, "evaluate_every": "10 steps", "loss": loss_and_outputs}


CASES: dict[str, Case] = {
    "resnet": Case(resnet18, images, simple, batch_size=8, stretch=10),
    "buffers": Case(MaskedGPT, texts, simple, batch_size=8),
    "jpegs": Case(small_cnn, Jpegs, simple, batch_size=16, stretch=10),
    "jpegs, 2 workers": Case(small_cnn, Jpegs, simple, batch_size=16, stretch=16, workers=2),
    "logging": Case(MLP, rows, logged, settings=lambda _: {"log_every": "1 steps"}),
    "layers": Case(MLP, rows, simple, settings=lambda _: {"layer_stats_every": "1 steps"}),
    "evaluation": Case(perceptron, pixels, evaluated, batch_size=128, settings=two_metrics),
    "ema": Case(MLP, rows, averaged, settings=lambda _: {"ema": 0.999}),
    "accumulate": Case(MLP, rows, accumulated, settings=lambda _: {"micro_batch_size": 8}),
    "small": Case(Deep, rows, simple, stretch=10),
    "flat": Case(MLP, rows, flat),
}


def surefoot(case: Case) -> Iterator[None]:
    """The same through `Run`, which is given the same DataLoader."""
    settings = {
        "model": case.model(),
        "loss": loss,
        "train_data": case.loader(),
        "length": f"{STEPS} steps",
        "optimizer": sf.optim.adamw(lr=RATE),
        "schedule": sf.schedules.cosine(),
        "clip": f"norm {CLIP}",
        "precision": "fp32",
        "run_dir": case.place / "run",
        "log_every": f"{WINDOW} steps",
        "report": False,
    }
    with sf.Run(**settings | case.settings(case.place)) as run:  # type: ignore[arg-type]
        for _ in run:
            yield


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each case")
    parser.add_argument(
        "--of", default="", help="cases by name or by its beginning, with a comma between"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, 1 thread; surefoot / plain loop"
    )
    for name, case in CASES.items():
        if not name.startswith(tuple(arguments.of.split(","))):
            continue
        with tempfile.TemporaryDirectory() as place:
            placed = replace(case, place=Path(place))
            loops = [surefoot(placed), case.plain(placed)]
            pairs = paired_seconds(
                loops, steps=case.stretch, seconds=arguments.seconds, wall=case.workers > 0
            )
        print(f"{name:<17} {ratio_text(pairs, steps=case.stretch)}", flush=True)


if __name__ == "__main__":
    with reported():
        main()
