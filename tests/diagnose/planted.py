"""Short real runs as configurations: healthy ones, and ones with one fault each that must be found
by its name.

Recipes are built through their Config with small settings; a fault that no setting can plant is
planted in a small network on scikit-learn's digits, as a file of a user's would have it. Each run
takes a few seconds on one core.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import surefoot as sf
from surefoot.config.tree import layered
from surefoot.recipes import gpt, images, translation
from surefoot.tools.diagnose.finding import Finding

EVERY: dict[str, Any] = {
    "log_every": "2 steps",
    "layer_stats_every": "8 steps",
    "save_every": "1000 steps",
}
SMALL: dict[str, dict[str, Any]] = {
    "gpt": {
        "model.layers": 2,
        "model.width": 32,
        "model.heads": 2,
        "model.context": 32,
        "data.tokenizer": "bytes",
        "batch_size": 8,
        "length": "120 steps",
        "evaluate_every": "20 steps",
        "cloze_questions": 0,
        "sample_tokens": 0,
    },
    "images": {
        "length": "80 steps",
        "evaluate_every": "20 steps",
        "batch_size": 32,
        "augmentation.randaugment": 0,
    },
    "translation": {
        "data.phrase_count": 1000,
        "data.vocab_size": 280,
        "model.encoder_layers": 1,
        "model.decoder_layers": 1,
        "model.width": 32,
        "model.mlp_width": 64,
        "model.heads": 2,
        "length": "120 steps",
        "evaluate_every": "30 steps",
        "val_pairs": 16,
        "batch_size": "512 tokens",
        "ema": None,
    },
}


@dataclass(frozen=True)
class Planted:
    """A run, and the name of the finding that must be found in it; None for a healthy one."""

    name: str
    fault: str | None
    build: Callable[[Path], sf.Run]


def recipe(name: str, **changes: Any) -> Callable[[Path], sf.Run]:
    """A recipe's run with small settings, some of them changed; a double underscore stands for the
    dot of a name.
    """
    module: Any = {"gpt": gpt, "images": images, "translation": translation}[name]

    def build(run_dir: Path) -> sf.Run:
        values = SMALL[name] | EVERY
        for setting, value in changes.items():
            values[setting.replace("__", ".")] = value
        if name == "gpt":
            values["data.path"] = str(_text(run_dir.parent))
        values |= {"run_dir": str(run_dir), "precision": "fp32"}
        run: sf.Run = module.build(layered(module.Config, [("test", values)])[0])
        return run

    return build


def _text(place: Path) -> Path:
    """A real text that every machine has: modules of Python's own."""
    file = place / "text.txt"
    if not file.exists():
        sources = sorted(Path(os.__file__).parent.glob("*.py"))[10:24]
        file.write_text("".join(source.read_text(errors="ignore") for source in sources)[:150_000])
    return file


# --- runs of one's own: a small network on digits -------------------------------------------------


@cache
def digits() -> tuple[Tensor, Tensor]:
    """All 1,797 in one fixed order: pixels from 0 to 1, and labels."""
    from sklearn.datasets import load_digits  # takes a second: only where it is used

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(data.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(data.target)[order].long()
    return inputs, labels


def network(
    activation: Callable[[], nn.Module] = nn.ReLU, *, hidden: int = 2, width: int = 48
) -> nn.Sequential:
    """A plain one: `hidden` layers and a head."""
    layers: list[nn.Module] = []
    inputs = 64
    for _ in range(hidden):
        layers += [nn.Linear(inputs, width), activation()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 10))


def linear_in(model: nn.Sequential, place: int) -> nn.Linear:
    layer = model[place]
    assert isinstance(layer, nn.Linear)
    return layer


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def own(change: Callable[[], dict[str, Any]] = dict, **settings: Any) -> Callable[[Path], sf.Run]:
    """A run on digits; `change` makes the settings that hold something new for each run, such as a
    counter.
    """

    def build(run_dir: Path) -> sf.Run:
        inputs, labels = digits()
        usual: dict[str, Any] = {
            "model": network,
            "loss": loss,
            "train_data": TensorDataset(inputs[:1500], labels[:1500]),
            "splits": {
                "val": sf.Split(
                    (inputs[1500:], labels[1500:]), metrics=sf.metrics.accuracy, batch_size=297
                )
            },
            "batch_size": 32,
            "length": "160 steps",
            "optimizer": sf.optim.adamw(lr=3e-3),
            "schedule": sf.schedules.cosine(warmup="5%"),
            "evaluate_every": "20 steps",
            "precision": "fp32",
            "run_dir": run_dir,
        }
        return sf.Run(**(usual | EVERY | settings | change()))

    return build


def scored_by_accuracy() -> dict[str, Any]:
    """A split without a loss: one that a sum scores is refused."""
    inputs, labels = digits()
    held_out = inputs[1500:], labels[1500:]
    return {"splits": {"val": sf.Split(held_out, metrics=sf.metrics.accuracy, loss=False)}}


class Samples:
    """Digits that are read one by one, each of which takes a while."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.inputs, self.labels = digits()

    def __len__(self) -> int:
        return 1500

    def __getitem__(self, sample: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        return self.inputs[sample], self.labels[sample]


class Unused(nn.Sequential):
    """A network with a layer that is not called."""

    def __init__(self) -> None:
        super().__init__(*network())
        self.spare = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for part in list(self.children())[:-1]:
            x = part(x)
        return x


class CutOff(nn.Sequential):
    """A network with a layer from whose output the gradient is cut off."""

    def __init__(self) -> None:
        super().__init__(*network())

    def forward(self, x: Tensor) -> Tensor:
        for place, part in enumerate(self.children()):
            x = part(x).detach() if place == 0 else part(x)
        return x


def with_nan(fraction: float) -> dict[str, Any]:
    inputs, labels = digits()
    inputs = inputs[:640].clone()
    inputs[: max(1, int(fraction * len(inputs))), 3] = math.nan
    return {"train_data": TensorDataset(inputs, labels[:640])}


def with_labels(change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    inputs, labels = digits()
    return {"train_data": TensorDataset(inputs[:1500], change(labels[:1500]))}


def with_nan_in_the_split() -> dict[str, Any]:
    inputs, labels = digits()
    held_out = inputs[1500:].clone()
    held_out[7, 3] = math.nan
    return {"splits": {"val": sf.Split((held_out, labels[1500:]), metrics=sf.metrics.accuracy)}}


def shuffled(labels: Tensor) -> Tensor:
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]


def mostly_zero(labels: Tensor) -> Tensor:
    return torch.where(torch.arange(len(labels)) % 33 == 0, labels, torch.zeros_like(labels))


def sharing(share: float) -> dict[str, Any]:
    inputs, labels = digits()
    shared = int(297 * share)
    held_out = (
        torch.cat([inputs[1500 + shared :], inputs[:shared]]),
        torch.cat([labels[1500 + shared :], labels[:shared]]),
    )
    return {"splits": {"val": sf.Split(held_out, metrics=sf.metrics.accuracy, batch_size=297)}}


def dead() -> nn.Module:
    model = network()
    nn.init.constant_(linear_in(model, 2).bias, -100.0)
    return model


def half_dead() -> nn.Module:
    model = network()
    with torch.no_grad():
        linear_in(model, 2).bias[:30] = -100.0
    return model


def saturated() -> nn.Module:
    model = network(nn.Tanh)
    with torch.no_grad():
        linear_in(model, 0).weight.mul_(100)
    return model


def one_large() -> nn.Module:
    """A layer of weights a hundred thousand times as large as usual, divided by as much behind it:
    its function is the usual one.
    """

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 1e5

    model = network()
    model[2] = Scaled(48, 48)
    with torch.no_grad():
        linear_in(model, 2).weight.mul_(1e5)
    return model


def few() -> dict[str, Any]:
    inputs, labels = digits()
    return {
        "train_data": TensorDataset(inputs[:100], labels[:100]),
        "length": "400 steps",
        "log_every": "5 steps",
    }


class Counting:
    """A loss that knows how many times it was called to train, and does something of it: state that
    no checkpoint holds.
    """

    def __init__(self, change: Callable[[int, Tensor], Tensor]) -> None:
        self.calls = 0
        self.change = change

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        usual = loss(model, batch)
        if not (model.training and torch.is_grad_enabled()):
            return usual
        self.calls += 1
        return self.change(self.calls, usual)


def counting(change: Callable[[int, Tensor], Tensor]) -> dict[str, Any]:
    return {"loss": Counting(change), "check_state": False}


def leaking() -> dict[str, Any]:
    kept: list[Tensor] = []

    def keep(calls: int, usual: Tensor) -> Tensor:
        # new to the process; an allocator would hand out memory that earlier tests freed
        pages = mmap(-1, 1_600_000)
        kept.append(torch.frombuffer(pages, dtype=torch.float32).fill_(calls))
        return usual

    return counting(keep)


def sleeping(seconds: Callable[[int], float]) -> dict[str, Any]:
    def wait(calls: int, usual: Tensor) -> Tensor:
        time.sleep(seconds(calls))
        return usual

    return counting(wait)


def smoothed_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def with_perplexity() -> dict[str, Any]:
    inputs, labels = digits()
    held_out = sf.Split(
        (inputs[1500:], labels[1500:]),
        derived={"perplexity": sf.metrics.perplexity},
        batch_size=297,
    )
    return {
        "loss": smoothed_loss,
        "splits": {"val": held_out},
        "identity": {"label_smoothing": 0.1},
    }


def slow_scores(outputs: Any, targets: Any) -> dict[str, sf.Mean]:
    time.sleep(0.02)
    return {"accuracy": sf.metrics.accuracy(outputs, targets)}


def evaluating_long() -> dict[str, Any]:
    inputs, labels = digits()
    return {
        "splits": {"val": sf.Split((inputs[1500:], labels[1500:]), metrics=slow_scores)},
        "evaluate_every": "8 steps",
    }


def noisy() -> dict[str, Any]:
    """A linear regression whose targets are a signal and three times as much noise, each sample's
    its own.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2000, 64, generator=generator) / 8
    signal = inputs @ torch.randn(64, 100, generator=generator)
    data = TensorDataset(inputs, signal + 3 * torch.randn(2000, 100, generator=generator))

    def squared(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return {"model": lambda: nn.Linear(64, 100), "loss": squared, "train_data": data, "splits": {}}


def growing() -> dict[str, Any]:
    return counting(lambda calls, usual: usual * 1.04**calls)


def uphill() -> dict[str, Any]:
    """From step 80 on the gradient is turned around."""

    def turn(calls: int, usual: Tensor) -> Tensor:
        return usual if calls <= 80 else -usual + 2 * usual.detach()

    return counting(turn)


def with_a_jump() -> dict[str, Any]:
    return counting(lambda calls, usual: usual + 5.0 if calls == 91 else usual)


def linear() -> dict[str, Any]:
    """A network without activations and with squared errors, which nothing holds when the rate is
    too high.
    """

    def squared(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), F.one_hot(batch[1], 10).float())

    return {"model": lambda: network(nn.Identity), "loss": squared}


def weighted(weights: Tensor) -> dict[str, Any]:
    """A loss with weights of classes, and a split without accuracy, so that only losses tell."""

    def weighed(model: nn.Module, batch: Any) -> sf.Mean:
        total = F.cross_entropy(model(batch[0]), batch[1], weight=weights, reduction="sum")
        return sf.Mean(total, weights[batch[1]].sum())

    return {"loss": weighed} | scored_by_loss()


def scored_by_loss() -> dict[str, Any]:
    inputs, labels = digits()
    return {"splits": {"val": sf.Split((inputs[1500:], labels[1500:]), batch_size=297)}}


def times(factor: float) -> dict[str, Any]:
    """A loss on another scale."""
    return {"loss": lambda model, batch: factor * loss(model, batch)} | scored_by_loss()


def many_classes() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(100, 64, generator=generator)
    labels = torch.randint(0, 100, (4000,), generator=generator)
    inputs = centers[labels] + torch.randn(4000, 64, generator=generator)
    return {
        "model": lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 100)),
        "train_data": TensorDataset(inputs[:3000], labels[:3000]),
        "splits": {"val": sf.Split((inputs[3000:], labels[3000:]), batch_size=500)},
    }


def with_equal_pictures() -> dict[str, Any]:
    inputs, labels = digits()
    return {"train_data": TensorDataset(inputs[:1].repeat(1500, 1), labels[:1500])}


def without_targets() -> dict[str, Any]:
    inputs, labels = digits()
    ignored = torch.full_like(labels[:1500], -100)
    return {
        "train_data": TensorDataset(inputs[:1500], ignored),
        "count_fn": lambda batch: int((batch[1] != -100).sum()),
    }


def with_other_numbers_in_the_split() -> dict[str, Any]:
    inputs, labels = digits()
    return {"splits": {"val": sf.Split((inputs[1500:], (labels[1500:] + 1) % 10))}}


def with_pixels_as_they_are() -> dict[str, Any]:
    """Inputs of thousands: the units die in the first steps, and the bias of the head is left."""
    inputs, labels = digits()
    return {"train_data": TensorDataset(inputs[:1500] * 1000, labels[:1500])} | scored_by_loss()


HEALTHY = [
    Planted("gpt", None, recipe("gpt")),
    Planted("gpt, gpt2 family", None, recipe("gpt", model__family="gpt2", optimizer__lr=1e-3)),
    Planted("gpt, muon", None, recipe("gpt", optimizer__name="muon")),
    Planted(
        "gpt, two micro-batches",
        None,
        recipe("gpt", batch_size=16, micro_batch_size=8, clip="auto 0.9"),
    ),
    Planted("images", None, recipe("images")),
    Planted(
        "images, SGD",
        None,
        recipe("images", optimizer__name="sgd", optimizer__momentum=0.9, optimizer__lr=0.05),
    ),
    Planted(
        "images, mixup and dropout",
        None,
        recipe("images", augmentation__mixup=0.2, model__dropout=0.1),
    ),
    Planted("translation", None, recipe("translation")),
    Planted(
        "translation, averaged, cosine",
        None,
        recipe("translation", ema=0.95, schedule__name="cosine", schedule__warmup="8%"),
    ),
    Planted("own, tanh", None, own(model=lambda: network(nn.Tanh))),
    Planted("own, read by one", None, own(lambda: {"train_data": Samples()})),
    Planted("own, weighted classes", None, own(lambda: weighted(torch.linspace(1, 10, 10)))),
    Planted("own, five times the loss", None, own(lambda: times(5.0))),
    Planted(
        "own, smoothed targets",
        None,
        own(lambda: {"loss": smoothed_loss} | scored_by_loss()),
    ),
    Planted("own, a hundred classes", None, own(many_classes)),
    Planted("own, 20 steps", None, own(length="20 steps", log_every="1 steps")),
]

FAULTY = [
    Planted("gpt, rate 300 times the usual", "rate-too-high", recipe("gpt", optimizer__lr=1.0)),
    Planted(
        "translation, rate 300 times the usual",
        "rate-too-high",
        recipe("translation", optimizer__lr=1.0),
    ),
    Planted("images, rate 100 times too low", "rate-too-low", recipe("images", optimizer__lr=3e-5)),
    Planted("own, rate 300 times too low", "rate-too-low", own(optimizer=sf.optim.adamw(lr=1e-5))),
    Planted(
        "own, SGD at a rate of 100, which kills units",
        "dead-units",
        own(optimizer=sf.optim.sgd(lr=100.0), schedule=None),
    ),
    Planted(
        "own, linear, SGD at 3 without warm-up",
        "diverged",
        own(linear, optimizer=sf.optim.sgd(lr=3.0), schedule=None, clip="off"),
    ),
    Planted(
        "own, uphill from step 80 on",
        "diverged",
        own(uphill),
    ),
    Planted("own, NaN in one sample", "non-finite-steps", own(lambda: with_nan(0.0))),
    Planted(
        "own, NaN in 1 % of the samples",
        "non-finite-steps",
        own(lambda: with_nan(0.01), max_bad_steps=50),
    ),
    Planted(
        "own, a rate of 100",
        "no-better-than-chance",
        own(optimizer=sf.optim.adamw(lr=100.0), schedule=None),
    ),
    Planted(
        "own, a rate of 3 that falls to 0",
        "no-better-than-chance",
        own(optimizer=sf.optim.adamw(lr=3.0)),
    ),
    Planted("own, all pictures equal", "no-better-than-chance", own(with_equal_pictures)),
    Planted(
        "own, pixels as they are",
        "no-better-than-chance",
        own(with_pixels_as_they_are, optimizer=sf.optim.adamw(lr=0.1)),
    ),
    Planted(
        "own, a split with other labels",
        "no-better-than-chance",
        own(with_other_numbers_in_the_split),
    ),
    Planted("own, no targets", "loss-not-falling", own(without_targets)),
    Planted(
        "own, labels shuffled",
        "loss-not-falling",
        own(lambda: with_labels(shuffled), optimizer=sf.optim.adamw(lr=1e-3)),
    ),
    Planted("own, labels constant", "constant-targets", own(lambda: with_labels(torch.zeros_like))),
    Planted(
        "own, a loss that is a sum",
        "loss-contract",
        own(
            scored_by_accuracy,
            loss=lambda model, batch: 0.01 * loss(model, batch) * len(batch[0]),
            micro_batch_size=8,
        ),
    ),
    Planted(
        "own, 97 % of labels the same", "constant-targets", own(lambda: with_labels(mostly_zero))
    ),
    Planted("own, a NaN in the split", "non-finite-scores", own(with_nan_in_the_split)),
    Planted("own, validation in training", "train-validation-overlap", own(lambda: sharing(1.0))),
    Planted(
        "own, a twentieth of validation in training",
        "train-validation-overlap",
        own(lambda: sharing(0.05)),
    ),
    Planted("own, a layer of dead ReLUs", "dead-units", own(model=dead)),
    Planted("own, a layer with more than half dead", "dead-units", own(model=half_dead)),
    Planted("own, tanh with large weights", "saturated-units", own(model=saturated)),
    Planted("own, a layer that is not called", "never-updated", own(model=Unused)),
    Planted("own, a layer cut off", "never-updated", own(model=CutOff)),
    Planted("gpt, tiny clip", "often-clipped", recipe("gpt", clip="norm 0.001")),
    Planted(
        "own, ten sigmoids deep",
        "vanishing-gradient",
        own(model=lambda: network(nn.Sigmoid, hidden=10)),
    ),
    Planted(
        "own, a loss that grows",
        "growing-gradient",
        own(growing, clip="off"),
    ),
    Planted(
        "own, an average slower than the run",
        "average-too-slow",
        own(ema=0.999, ema_ramp=False),
    ),
    Planted("own, 100 samples", "overfitting", own(few)),
    Planted("own, slow samples", "data-bound", own(lambda: {"train_data": Samples(0.0005)})),
    Planted("own, slow evaluation", "evaluating-too-long", own(evaluating_long)),
    Planted(
        "images, saved at every step", "saving-too-long", recipe("images", save_every="1 steps")
    ),
    Planted("own, a loss that keeps tensors", "growing-memory", own(leaking)),
    Planted(
        "translation, warm-up of half the run",
        "long-warm-up",
        recipe("translation", schedule__warmup="50%"),
    ),
    Planted("gpt, ended early", "ended-early", recipe("gpt", stop_after="70 steps")),
    Planted("own, smoothed loss as perplexity", "smoothed-perplexity", own(with_perplexity)),
    Planted(
        "own, batches of 2 with noisy targets",
        "batch-too-small",
        own(
            noisy, batch_size=2, micro_batch_size=1, layer_stats_every="4 steps", length="800 steps"
        ),
    ),
    Planted(
        "own, a jump at step 90",
        "loss-spikes",
        own(with_a_jump),
    ),
    Planted(
        "own, slower and slower",
        "falling-throughput",
        own(lambda: sleeping(lambda calls: calls / 3200)),
    ),
    Planted(
        "own, now fast, now slow",
        "jittering-throughput",
        own(lambda: sleeping(lambda calls: 0.01 + 0.03 * ((calls - 1) // 2 % 2))),
    ),
    Planted("gpt, constant rate", "high-rate-at-end", recipe("gpt", schedule__name="constant")),
    Planted(
        "gpt, too short",
        "still-improving",
        recipe(
            "gpt",
            length="40 steps",
            evaluate_every="8 steps",
            schedule__name="constant",
            log_every="1 steps",
            layer_stats_every="4 steps",
        ),
    ),
    Planted(
        "own, one layer of large weights",
        "unusual-updates",
        own(model=one_large, optimizer=sf.optim.adamw(lr=3e-3, weight_decay=0.0)),
    ),
]

ALL = [*HEALTHY, *FAULTY]


def trained(planted: Planted, run_dir: Path) -> list[Finding]:
    """Train it, whatever becomes of it, and diagnose what it left."""
    run = planted.build(run_dir)
    run.parts = replace(run.parts, console=None)
    with suppress(sf.DivergedError):
        run.train()
    return sf.load(run_dir).diagnose()
