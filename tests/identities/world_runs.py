"""Runs whose ranks, accumulation and strategy are varied; what each function returns is compared
over them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import surefoot as sf
from gallery import example

SAMPLES, FEATURES, CLASSES = 101, 6, 3
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: sf.optim.adamw(lr=1e-2, weight_decay=0.1),
    "sgd": lambda: sf.optim.sgd(lr=0.1, momentum=0.9),
    "muon": lambda: sf.optim.muon(lr=0.02),
}


class Augmented:
    """Samples moved about by all three generators."""

    def __init__(self, bad: int = -1) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        self.bad = bad

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> tuple[Tensor, Tensor, int]:
        noise = random.random() + float(np.random.rand()) + torch.rand(FEATURES)
        inputs = (self.inputs[sample] + 0.1 * noise).to(torch.get_default_dtype())
        if sample == self.bad:
            inputs = torch.full_like(inputs, torch.nan)
        return inputs, self.labels[sample], sample


class Batches:
    """A batch sampler: 4 batches of 21 to 24 samples in each epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        for size in (24, 21, 23, 22):
            yield torch.randperm(SAMPLES)[:size].tolist()


class Net(nn.Module):
    """Dropout and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.hidden = nn.Linear(16, 16)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.relu(self.norm(self.into(inputs)))
        mask = F.dropout(torch.ones_like(features), 0.25, training=self.training)
        return self.out(torch.relu(self.hidden(features * mask))), mask


def loss(model: Any, batch: Any) -> Any:
    inputs, labels, _ = batch
    logits, mask = model(inputs)
    correct_count = (logits.argmax(1) == labels).sum()
    # whole numbers, whose sum is the same in any order
    places = torch.arange(1, mask.numel() + 1, dtype=torch.float64, device=mask.device)
    sum_of_places = ((mask > 0) * places.reshape(mask.shape)).sum()
    return F.cross_entropy(logits, labels), {
        "accuracy": sf.Mean(correct_count, len(labels)),
        "mask": sf.Mean(sum_of_places, len(labels)),
    }


def built(
    *,
    optimizer: Any = "adamw",
    steps: int = 20,
    double: bool = True,
    bad: int = -1,
    run_dir: str | None = None,
    **changes: Any,
) -> sf.Run:
    dtype = torch.float64 if double else torch.float32
    torch.set_default_dtype(dtype)
    data = Augmented(bad)
    held_out = data.inputs[:37].to(dtype), data.labels[:37], torch.arange(37)
    if isinstance(optimizer, str):
        optimizer = OPTIMIZERS[optimizer]()
    if isinstance(changes.get("order"), list):
        changes["order"] = sf.data.Weighted(changes["order"])
    if changes.pop("listed", False):
        changes["train_data"] = DataLoader(data, batch_sampler=Batches(), num_workers=1)  # type: ignore[arg-type]
        changes["batch_size"] = None
    settings: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train_data": data,
        "batch_size": 16,
        "micro_batch_size": 4,
        "length": f"{steps} steps",
        "optimizer": optimizer,
        "schedule": sf.schedules.cosine(warmup="10%"),
        "clip": "norm 0.5",
        "ema": 0.9,
        "splits": {"val": sf.Split(held_out, batch_size=8)},
        "evaluate_every": "10 steps",
        "log_every": "5 steps",
        "device": "cpu",
        "precision": "fp32",
        "run_dir": run_dir,
        "console": False,
        "report": False,
    }
    return sf.Run(**(settings | changes))


def trained(**changes: Any) -> dict[str, Any]:
    return train(built(**changes))


def train(run: sf.Run) -> dict[str, Any]:
    """All that may not depend on who made the steps: samples, masks, losses, weights, averages,
    statistics, scores.
    """
    steps: list[Any] = []
    with run:
        for step in run:
            assert step.loss is not None
            assert step.grad_norm is not None
            assert step.skipped is not None
            steps.append(
                {
                    "samples": samples_of_all_ranks(run, step),
                    "mask": mask_of_all_ranks(run),
                    "loss": float(step.loss),
                    "grad_norm": float(step.grad_norm),
                    "skipped": float(step.skipped),
                    "scores": dict(step.metrics),
                }
            )
        scores = run.evaluate()
    return {"steps": steps, "scores": scores, "weights": weights(run)}


def values_of_steps(result: dict[str, Any], name: str) -> list[Any]:
    return [step[name] for step in result["steps"]]


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Between any two numbers of two models."""
    assert first.keys() == second.keys()
    differences = [
        float((first[name].double() - second[name].double()).abs().max()) for name in first
    ]
    return max(differences)


def samples_of_all_ranks(run: sf.Run, step: sf.Step) -> list[list[Any]]:
    """The index and the samples of each micro-batch, in order."""
    on_this_rank = [
        [micro_batch.index, micro_batch.sample_ids.tolist()]
        for micro_batch in step.micro_batches
        if not micro_batch.is_padding
    ]
    micro_batches = []
    for on_one_rank in run.parts.world.gathered(on_this_rank):
        micro_batches += on_one_rank
    return sorted(micro_batches)


def mask_of_all_ranks(run: sf.Run) -> float:
    """The sum that `loss` returns of the dropout masks of the newest step."""
    _, logged_means = run.parts.run_state.meter.logged[-1]
    mask_sum = logged_means.get("mask", sf.Mean(0, 0)).total
    return sum(run.parts.world.gathered(float(mask_sum)))


def weights(run: sf.Run) -> dict[str, Tensor]:
    """The whole model and its average, on the host, as every rank has or gathers it."""
    tensors = {}
    for name, tensor in run.state.models["model"].state_dict().items():
        tensors[f"model {name}"] = whole(tensor)
    for average in run.state.ema_models.values():
        for name, tensor in average.model.state_dict().items():
            tensors[f"average {name}"] = whole(tensor)
    return tensors


def weights_of_models(run: sf.Run) -> dict[str, Tensor]:
    """Those of a run of several models."""
    tensors = {}
    for model_name, model in run.state.models.items():
        for name, tensor in model.state_dict().items():
            tensors[f"{model_name} {name}"] = whole(tensor)
    return tensors


def whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().clone()


class FirstGradients:
    """A way to limit gradients that limits none, and keeps those of the first step."""

    def __init__(self) -> None:
        self.remembered: dict[str, Tensor] = {}  # nothing that a checkpoint should have
        self.first: list[Tensor] = []

    def apply(
        self, gradients: list[Tensor], *, factor: Tensor | float, norm: Tensor, skipped: Tensor
    ) -> Tensor | None:
        if not self.first:
            self.first = [gradient.detach() * factor for gradient in gradients]
        torch._foreach_mul_(gradients, factor)
        return None


def first_gradients(**changes: Any) -> list[Tensor]:
    run = built(steps=1, double=False, clip="off", optimizer="sgd", **changes)
    gradients = FirstGradients()
    run.state.optimizers["model"].clipping = gradients
    run.train()
    return gradients.first


def called(*, function: str, **arguments: Any) -> Any:
    """What the function of this name returns; for runs of several kinds one after the other."""
    torch.set_default_dtype(torch.float32)
    return globals()[function](**arguments)


def trained_with(*, strategy: Any = None, **changes: Any) -> dict[str, Any]:
    if strategy is not None:
        changes["parallel"] = sf.ddp(sync=strategy)
    return trained(**changes)


def with_few_targets(*, counts_itself: bool = False) -> dict[str, Any]:
    """Six micro-batches a step, of which most hold no target at all; the loss counts them, or
    `count=` does.
    """
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(60, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (60,), generator=generator)
    labels[torch.rand(60, generator=generator) < 0.85] = -100

    def of_targets(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])  # NaN where no target is there

    def of_its_own_count(model: Any, batch: Any) -> sf.Mean:
        return sf.losses.cross_entropy(model(batch[0]), batch[1])

    run = sf.Run(
        model=lambda: nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)
        ),
        loss=of_its_own_count if counts_itself else of_targets,
        train_data=(inputs, labels),
        batch_size=12,
        micro_batch_size=2,
        count_fn=None if counts_itself else lambda batch: int((batch[1] >= 0).sum()),
        length="5 steps",
        # of two samples batch normalization leaves a sign: Adam would amplify rounding
        optimizer=sf.optim.sgd(lr=0.1),
        device="cpu",
        precision="fp32",
        console=False,
    )
    losses = []
    counts = []
    with run:
        for step in run:
            assert step.loss is not None
            losses.append(float(step.loss))
            counts.append(float(step.target_count))
    return {"losses": losses, "counts": counts, "weights": weights(run)}


class Lengthy:
    """Rows of different lengths."""

    def __init__(self) -> None:
        self.lengths = np.random.default_rng(0).integers(2, 9, size=23)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sample: int) -> Tensor:
        return torch.arange(self.lengths[sample]).to(torch.get_default_dtype()) + sample


def by_tokens() -> dict[str, Any]:
    """Batches by tokens, over several epochs, whose last steps have empty micro-batches."""
    torch.set_default_dtype(torch.float64)

    def collate(samples: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)[..., None]

    def of_rows(model: Any, rows: Tensor) -> sf.Mean:
        is_token = rows[..., 0] > 0
        squares = (model(rows)[..., 0] - 1) ** 2
        return sf.Mean((squares * is_token).sum(), is_token.sum())

    run = sf.Run(
        model=lambda: nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)),
        loss=of_rows,
        train_data=Lengthy(),
        collate_fn=collate,
        batch_size="64 tokens",
        micro_batch_size="16 tokens",
        length="5 steps",
        optimizer=sf.optim.adamw(lr=1e-2),
        device="cpu",
        precision="fp32",
        console=False,
    )
    losses = []
    rows = []
    with run:
        for step in run:
            assert step.loss is not None
            losses.append(float(step.loss))
            rows += [len(micro_batch.sample_ids) for micro_batch in step.micro_batches]
    return {"losses": losses, "rows": rows, "weights": weights(run)}


def scored(*, samples: int) -> dict[str, float]:
    """Means, and metrics of the whole split, of a split of any size."""
    generator = torch.Generator().manual_seed(1)
    data = (
        torch.randn(samples, FEATURES, generator=generator),
        torch.randint(CLASSES, (samples,), generator=generator),
    )

    def in_order(logits: Tensor, labels: Tensor) -> float:
        assert len(logits) == len(labels) == samples
        return float((logits.argmax(1) * torch.arange(samples)).sum())  # the order counts

    def confident(logits: Tensor, _: Tensor) -> sf.Mean:
        return sf.Mean(logits.amax(1).sum(), len(logits))

    def of_two(model: Any, batch: Any) -> Any:
        logits = model(batch[0])[0]
        return F.cross_entropy(logits, batch[1]), (logits, batch[1])

    from torchmetrics.classification import MulticlassCalibrationError, MulticlassF1Score

    metrics: dict[str, Any] = {
        "confident": confident,
        "in_order": sf.metrics.whole_split(in_order),
        "report": sf.metrics.ClassificationReport(CLASSES),
        "f1": MulticlassF1Score(CLASSES),
        "calibration": MulticlassCalibrationError(CLASSES),  # keeps every output
    }

    run = built(
        double=False,
        loss=of_two,
        train_data=data,
        micro_batch_size=None,
        batch_size=12,
        ema=None,
        splits={
            "val": sf.Split(data, metrics=metrics, batch_size=5),
        },
    )
    return run.evaluate()


def logged() -> list[float]:
    """The mean over ranks and steps of what each rank logged in its body."""
    run = built(steps=4, log_every="1 steps", splits={})
    written: list[Any] = []
    with run:
        assert run.session is not None
        run.session.journal.sinks.append(Kept(written))
        for step in run:
            step.log(mine=float(run.rank + step.index))
    return [record["mine"] for record in written if "mine" in record]


class Kept:
    """A sink that keeps records."""

    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def write(self, record: Any) -> None:
        self.records.append(record)

    def close(self) -> None: ...


def of_recipe(
    *, recipe: str, texts: str, parallel: str = "auto", steps: int = 3, **changes: Any
) -> dict[str, Any]:
    """A ready-made run of tiny size, dropout and augmentation on; `texts` is a directory for what
    it reads.
    """
    import importlib

    from surefoot.config.tree import layered

    module = importlib.import_module(f"surefoot.recipes.{recipe}")
    settings = {
        "precision": "fp32",
        "parallel": parallel,
        "length": f"{steps} steps",
        "device": "cpu",
        "run_dir": None,
    }
    settings |= {"log_every": "1 steps"} | tiny_settings(recipe, Path(texts)) | changes
    config, _ = layered(module.Config, [("test", settings)])
    run = module.build(config)
    losses = []
    samples = []
    scores = {}
    with run:
        for step in run:
            assert step.loss is not None
            losses.append(float(step.loss))
            samples.append(samples_of_all_ranks(run, step))
            scores |= step.metrics
    return {"losses": losses, "samples": samples, "scores": scores, "weights": weights(run)}


DIGITS = {
    "en": ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
    "de": ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"],
}


def spelled_squares(language: str) -> str:
    """The squares of 0 to 399, a line each: "one six." is 16."""
    lines = []
    for n in range(400):
        words = [DIGITS[language][int(digit)] for digit in str(n * n)]
        lines.append(" ".join(words) + ".\n")
    return "".join(lines)


def write_whole(path: Path, text: str) -> None:
    """Other ranks, which write the same, see the whole file or none."""
    unfinished = path.with_name(f"{path.name}-{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


def tiny_settings(recipe: str, place: Path) -> dict[str, Any]:
    """Settings for models of a few thousand numbers; small data for them is written to `place`."""
    match recipe:
        case "gpt":
            write_whole(place / "squares.txt", spelled_squares("en"))
            return {
                "data.path": str(place / "squares.txt"),
                "data.tokenizer": "bytes",
                "model.layers": 2,
                "model.width": 32,
                "model.context": 32,
                "model.dropout": 0.1,
                "batch_size": 8,
                "micro_batch_size": 2,
                "sample_tokens": 0,
                "cloze_questions": 0,
            }
        case "translation":
            for language in DIGITS:
                write_whole(place / f"squares.{language}", spelled_squares(language))
            return {
                "data.path": str(place / "squares"),
                "data.vocab_size": 300,
                "data.val_fraction": 0.05,
                "model.width": 32,
                "model.mlp_width": 64,
                "model.dropout": 0.1,
                "batch_size": "512 tokens",
                "micro_batch_size": "128 tokens",
                "beam_size": 1,
            }
    return {"model.name": "simple_cnn", "model.width": 4, "batch_size": 16, "micro_batch_size": 4}


def of_corner(*, name: str, sharded: bool = False) -> dict[str, Tensor]:
    """Weights of runs in which gradients lie otherwise in memory, come from several passes, or are
    missing on a rank.
    """
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(96, 3, 6, 6, generator=generator)
    labels = torch.randint(4, (96,), generator=generator)
    if name == "no targets on a rank":  # there, samples are not even finite
        images[torch.arange(96) % 8 >= 4] = torch.nan
    world_size = int(os.environ.get("WORLD_SIZE", "1"))

    def convolution(inputs: int, outputs: int) -> nn.Module:
        kernel = nn.Conv2d(inputs, outputs, 3, padding=1)
        return kernel if sharded else kernel.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def classify(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def of_both(models: Any, batch: Any) -> Tensor:
        return models["b"](torch.tanh(models["a"](batch[0]))).square().mean()  # type: ignore[no-any-return]

    def encode(model: Any, batch: Any) -> Tensor:
        return F.normalize(model(batch[0]))

    def contrast(_: Any, features: Tensor) -> Tensor:
        # the order of the rows matters
        scores = features @ features.T + 0.01 * torch.arange(len(features))[:, None]
        return F.cross_entropy(scores, torch.arange(len(features)))

    class Sometimes(nn.Module):
        """A part that some micro-batches do not use, among them the last of a rank."""

        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(108, 4), nn.Linear(108, 4)

        def forward(self, images: Tensor) -> Tensor:
            inputs = images.flatten(1)
            logits: Tensor = self.always(inputs)
            return logits + self.sometimes(inputs) if images[0, 0, 0, 0] > 0 else logits

    class Noting(nn.Sequential):
        """Buffers that depend on the samples, and are no floats."""

        def __init__(self) -> None:
            super().__init__(nn.Flatten(), nn.Linear(108, 4))
            self.register_buffer("positive", torch.zeros(3, dtype=torch.int64))
            self.register_buffer("flag", torch.tensor(False))

        def forward(self, images: Tensor) -> Tensor:
            self.positive = self.positive + (images > 0).sum(dim=(0, 2, 3))
            self.flag = images.sum() > 0
            return super().forward(images)  # type: ignore[no-any-return]

    def classifier() -> nn.Module:
        return nn.Sequential(convolution(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))

    two_models = {"a": lambda: convolution(3, 4), "b": lambda: convolution(4, 3)}
    cases: dict[str, dict[str, Any]] = {
        "channels last": {
            "model": classifier,
            "loss": classify,
            "batch_size": 24,
        },  # 3 micro-batches on each of two ranks
        "two models": {
            "model": two_models,
            "loss": of_both,
            "batch_size": 8,
            "optimizer": dict.fromkeys("ab", OPTIMIZERS["adamw"]()),
        },
        "two passes": {"model": classifier, "loss": classify, "batch_size": 16},
        "no targets on a rank": {
            "model": two_models,
            "loss": of_both,
            "batch_size": 8,
            "order": "sequential",
            "optimizer": dict.fromkeys("ab", OPTIMIZERS["sgd"]()),
            "count_fn": lambda batch: int((batch[2] % 8 < 4).sum()),
        },
        "seldom used": {
            "model": Sometimes,
            "loss": classify,
            "batch_size": 24,
            "parallel": sf.ddp(find_unused_parameters=True) if world_size > 1 else "auto",
        },
        "integers": {
            "model": Noting,
            "loss": classify,
            "batch_size": 24,
            "buffers": {"positive": "sum"},
        },
        "whole batch": {
            "model": classifier,
            "loss": sf.losses.whole_batch(encode, contrast),
            "batch_size": 16,
        },
    }
    common: dict[str, Any] = {
        "train_data": (images, labels, torch.arange(96)),
        "micro_batch_size": 4,
        "length": "3 steps",
        "optimizer": OPTIMIZERS["sgd"](),
        "device": "cpu",
        "precision": "fp32",
        "console": False,
        "report": False,
    }
    settings = common | cases[name]
    if sharded:
        settings["parallel"] = sf.fsdp(find_unused_parameters=name == "seldom used")
    run = sf.Run(**settings)
    with run:
        if name == "two passes":
            for step in run.steps():
                sf.forward_backward(step)
                sf.forward_backward(step, lambda model, batch: model(batch[0]).square().mean())
                sf.update(step)
        else:
            for _ in run:
                pass
    return weights_of_models(run)


def of_two_models(*, sometimes: bool, **changes: Any) -> dict[str, Tensor]:
    """Two models, of which the second is not used for all samples where that is asked for."""

    def of_both(models: Any, batch: Any) -> Tensor:
        inputs, labels, samples = batch
        loss_of_first = F.cross_entropy(models["first"](inputs)[0], labels)
        if sometimes and int(samples[0]) % 2:
            return loss_of_first
        return loss_of_first + F.cross_entropy(models["second"](inputs)[0], labels)

    two = {"first": Net, "second": Net}
    run = built(model=two, loss=of_both, steps=3, optimizer="sgd", ema=None, splits={}, **changes)
    run.train()
    return weights_of_models(run)


def of_two_models_with(*, strategy: Any, sometimes: bool) -> dict[str, Tensor] | str:
    try:
        return of_two_models(sometimes=sometimes, parallel=sf.ddp(**strategy))
    except sf.ConfigError as refused:
        return refused.code


def of_example(*, name: str, **changes: Any) -> dict[str, Any]:
    """A loop of one's own from the examples: several models, or several passes a step."""
    module = example(name)
    torch.set_default_dtype(torch.float64)
    settings = {
        "length": "6 steps",
        "device": "cpu",
        "precision": "fp32",
        "console": False,
        "report": False,
        "splits": {},
    }
    run = module.build(**(settings | {"batch_size": 16, "micro_batch_size": 4} | changes))
    module.train(run)
    return weights_of_models(run)


def of_word_lm() -> dict[str, Tensor]:
    """Weights and carried state of the LSTM in lanes, over the end of an epoch; lanes of 5 and 6
    windows.
    """
    torch.set_default_dtype(torch.float64)
    run = word_lm(run_dir=None, length="8 steps")
    carried = run.parts.run_state.user_state.objects["lanes"]
    with run:
        for _ in run:
            exchange_lanes(carried, run)
    return weights(run) | {"carried": carried.clone()}


def exchange_lanes(carried: Tensor, run: sf.Run) -> None:
    """Give each rank the state of all lanes, as `docs/guides/data.md` shows: rank 0 saves them."""
    if run.world_size > 1:
        lanes_of_ranks = carried.chunk(run.world_size, dim=1)
        received = [torch.empty_like(lanes) for lanes in lanes_of_ranks]
        torch.distributed.all_gather(received, lanes_of_ranks[run.rank].contiguous())
        carried.copy_(torch.cat(received, dim=1))


def word_lm(**changes: Any) -> sf.Run:
    """The example, on 43 windows in 8 lanes."""
    module = example("word_lm")
    module.LANES = 8
    module.WORDS = 50
    words = torch.randint(50, (43 * module.WINDOW + 1,), generator=torch.Generator().manual_seed(0))
    module.topics = {"text": " ".join(str(word) for word in words.tolist())}
    run: sf.Run = module.build(micro_batch_size=2, console=False, **changes)
    return run
