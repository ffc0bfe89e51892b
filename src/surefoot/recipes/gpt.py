"""A GPT trained on text: the source of Python's own standard library, or any file or folder of yours.

Importing this module does not import torch: the names behind `sf.` are resolved when `build` uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import surefoot as sf
from surefoot import schedules
from surefoot.config import Settings, run_arguments
from surefoot.optimizers.specs import named


@dataclass(frozen=True, kw_only=True)
class Data:
    """The text and how it becomes numbers."""

    path: str | None = None
    """A text file, or a directory of them; absent: the source of Python's standard library."""
    tokenizer: Literal["bytes", "characters"] = "bytes"
    """What a token is: one of 256 bytes of UTF-8, or one of the characters that the text has."""
    held_out_fraction: float = 0.05
    """How much of the end of the text is scored and not trained on."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of the network."""

    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Attention heads a block."""
    width: int = 128
    """Channels between blocks; a multiple of twice the heads."""
    context: int = 128
    """How many tokens the model sees at once."""
    dropout: float = 0.0
    """Fraction of units dropped while training."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How gradients become updates."""

    name: Literal["adamw", "sgd"] = "adamw"
    """The optimizer."""
    lr: float = 3e-3
    """Base learning rate, reached where warm-up ends."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; biases, norms and embeddings have none."""
    betas: tuple[float, float] | None = None
    """How slowly AdamW's averages of gradient and square move; absent: 0.9 and 0.99."""
    momentum: float | None = None
    """Momentum of SGD; absent: 0."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over the run, as a factor on the base rate."""

    name: Literal["constant", "linear", "cosine"] = "cosine"
    """Its shape after warm-up."""
    warmup: str = "5%"
    """How long the rate rises from near 0."""
    floor: float = 0.0
    """The factor at the last step."""


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Train a GPT on text."""

    out: str | None = "runs/gpt"
    """Directory of the run; it goes on by itself where there is a checkpoint."""
    length: str = "2500 steps"
    """How long to train."""
    batch_size: int = 8
    """Windows of one step."""
    evaluate_every: str = "25%"
    """How often the held-out part is scored."""
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    sample_tokens: int = 400
    """How many tokens of sample are shown at the end; 0 shows none."""
    sample_prompt: str | None = None
    """What the sample goes on from; absent: a line end, and "def " for the default text."""


def build(config: Config) -> sf.Run:
    """The run that a configuration describes, not yet started."""
    data, shape = config.data, config.model
    text = sf.load_text(Path(data.path)) if data.path is not None else sf.stdlib_text()
    training_text, held_out_text = sf.held_out_split(text, held_out_fraction=data.held_out_fraction)
    tokenizer = sf.CharacterTokenizer.of(text) if data.tokenizer == "characters" else sf.ByteTokenizer()
    training, held_out = tokenizer.encode(training_text), tokenizer.encode(held_out_text)

    try:
        network = sf.models.GPTShape(
            layers=shape.layers,
            heads=shape.heads,
            width=shape.width,
            context=shape.context,
            vocabulary=tokenizer.vocabulary,
            dropout=shape.dropout,
        )
    except ValueError as problem:
        raise sf.ConfigError(f"model: {problem}") from problem

    def model() -> Any:
        return sf.models.GPT(network)

    def loss(model: Any, batch: Any) -> sf.Mean:
        inputs_BT, targets_BT = batch
        return sf.cross_entropy(model(inputs_BT), targets_BT)

    prompt = ("\n" if data.path is not None else "\ndef ") if config.sample_prompt is None else config.sample_prompt

    def sample(model: Any) -> str:
        tokens = sf.generate.sample(
            model,
            tokenizer.encode(prompt).tolist(),
            count=config.sample_tokens,
            context=shape.context,
            temperature=0.7,
            seed=config.seed,
        )
        return tokenizer.decode(tokens)

    settings = run_arguments(config)
    if config.early_stopping is not None:
        settings["early_stopping"] = sf.EarlyStopping("min held-out/loss", patience=config.early_stopping)
    return sf.Run(
        model=model,
        loss=loss,
        train=sf.Windows(training, context=shape.context, seed=config.seed),
        optimizer=_optimizer(config.optimizer),
        schedule=schedules.Schedule(config.schedule.name, warmup=config.schedule.warmup, floor=config.schedule.floor),
        evaluate={"held-out": sf.Split(sf.HeldOut(held_out, context=shape.context), batch_size=64)},
        sample=sample if config.sample_tokens else None,
        best="min held-out/loss",
        **settings,
    )


def _optimizer(chosen: Optimizer) -> Any:
    betas = chosen.betas or ((0.9, 0.99) if chosen.name == "adamw" else None)
    return named(
        chosen.name,
        lr=chosen.lr,
        weight_decay=chosen.weight_decay,
        settings={"betas": betas, "momentum": chosen.momentum},
    )
