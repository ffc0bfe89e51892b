"""A GPT trained on text: the source of Python's own standard library, or any file or folder of yours.

Importing this module does not import torch: the names behind `sf.` are resolved when they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import surefoot as sf
from surefoot.config import default, ordered, setting
from surefoot.recipes import corpus as texts
from surefoot.recipes import questions as asked_questions
from surefoot.recipes.in_words import text_in_words
from surefoot.recipes.prompts import Predict, continuations
from surefoot.recipes.settings import (
    Optimizer,
    RecipeSettings,
    Schedule,
    checked,
    refuse_default_data,
)
from surefoot.recipes.tinted import tinted_held_out


@dataclass(frozen=True, kw_only=True)
class Data:
    """The text and how it becomes numbers."""

    path: str | None = None
    """A text file, a directory of them, or of token shards; absent: the source of Python's standard library."""
    tokenizer: str | None = None
    """bpe (trained on the text), bytes, characters, gpt2, or a tokenizer's file or directory; absent: that of --init, or bpe."""
    vocabulary: int | None = None
    """bpe: how many different tokens; absent: 2048."""
    held_out_fraction: float = 0.05
    """How much of the text is scored and not trained on: whole documents, or the end of a single one."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of the network."""

    family: Literal["modern", "gpt2"] = "modern"
    """modern: rotary positions, RMS norms, normalised queries and keys, no biases; gpt2: as published."""
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
    activation: Literal["relu2", "swiglu", "gelu"] | None = None
    """Between the layers of an MLP; absent: relu2 (squared ReLU), and gelu for gpt2."""
    tied: bool | None = None
    """Whether the head is the embedding; absent: only for gpt2."""
    smear: bool = False
    """modern: whether each token's vector takes in a learned share of the embedding of the token before."""
    ngrams: int = 1
    """modern: how many tokens in a row have a vector together, beside their own: 2, 3 or 4 at most; 1: none."""
    ngram_rows: int | None = None
    """Vectors of each length, which n-grams share where there are more of them; absent: 32,768."""


@ordered
@dataclass(kw_only=True)
class Config(RecipeSettings):
    """Train a GPT on text."""

    preset: (
        Literal["tiny", "shakespeare", "small", "gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1558m", "modern-124m"]
        | None
    ) = setting(None, observer=True, after="")
    """A complete configuration to start from; tiny is the default. Files and flags change it."""
    out: str | Path | None = default("runs/gpt")
    length: str = default("2500 steps")
    batch_size: int | str = default(8)
    evaluate_every: str = default("25%")
    data: Data = setting(factory=Data, identity=True)
    model: Model = setting(factory=Model, identity=True)
    optimizer: Optimizer = setting(factory=Optimizer, identity=True, after="workers")
    schedule: Schedule = setting(factory=Schedule, identity=True)
    cloze_questions: int | None = setting(None, observer=True, after="check_state")
    """Questions of which of four pieces of held-out text really follows; 0 asks none. Absent: 200, where there is text for them."""
    multiple_choice: tuple[str, ...] | None = setting(None, observer=True)
    """Files of multiple-choice questions to score too, each as NAME=FILE: hellaswag=hellaswag_val.jsonl."""
    multiple_choice_questions: int = setting(500, observer=True)
    """How many of each such file, the same at every evaluation; `surefoot evaluate RUN --on NAME=FILE` asks all."""
    sample_tokens: int = setting(200, observer=True)
    """How many tokens a sample has; 0 shows none."""
    sample_prompt: str | None = setting(None, observer=True)
    """What a sample goes on from; absent: a line end, and "def " for the default text."""


def _published(layers: int, heads: int, width: int, *, lr: float, micro_batch_size: int) -> dict[str, Any]:
    """GPT-2 in one of its sizes (Radford et al. 2019, table 2), trained as is usual today (Brown et al. 2020, appendix B)."""
    return {
        "model.family": "gpt2",
        "model.layers": layers,
        "model.heads": heads,
        "model.width": width,
        "model.context": 1024,
        "data.tokenizer": "gpt2",
        "batch_size": 512,
        "micro_batch_size": micro_batch_size,
        "optimizer.lr": lr,
        "optimizer.betas": (0.9, 0.95),
        "schedule.warmup": "715 steps",
        "schedule.floor": 0.1,
        "length": "19073 steps",
        "evaluate_every": "250 steps",
        "save_every": "15 min",
    }


BEST = "min held-out/loss"


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "shakespeare": {
        "data.tokenizer": "characters",
        "data.held_out_fraction": 0.1,
        "model.heads": 2,
        "model.context": 256,
        "model.activation": "swiglu",
        "model.smear": True,
        "length": "1700 steps",
        "precision": "bf16",  # as in the published figures (docs/decisions/0042-auto-reads-a-table.md)
        "clip": "off",
        "optimizer.name": "muon",
        "optimizer.lr": 0.015,
        "optimizer.adamw_lr": 0.012,
        "optimizer.momentum": 0.9,
        "optimizer.ns_steps": 4,
        "schedule.name": "linear",
        "schedule.warmup": "1%",
    },
    "small": {
        "data.vocabulary": 8192,
        "model.layers": 8,
        "model.heads": 8,
        "model.width": 512,
        "model.context": 512,
        "batch_size": 32,
        "micro_batch_size": 8,
        "length": "10000 steps",
        "optimizer.lr": 1e-3,
        "schedule.floor": 0.1,
        "evaluate_every": "5%",
    },
    "gpt2-124m": _published(12, 12, 768, lr=6e-4, micro_batch_size=32),
    "gpt2-350m": _published(24, 16, 1024, lr=3e-4, micro_batch_size=16),
    "gpt2-774m": _published(36, 20, 1280, lr=2.5e-4, micro_batch_size=8),
    "gpt2-1558m": _published(48, 25, 1600, lr=2e-4, micro_batch_size=4) | {"activation_checkpointing": "blocks"},
    "modern-124m": _published(12, 12, 768, lr=1e-3, micro_batch_size=32)
    | {"model.family": "modern", "model.tied": True},
}

_LARGE = "text or token shards, of billions of tokens: --data.path PATH"
_MEANT_FOR = {name: _LARGE for name in PRESETS if name.endswith("m")} | {
    "shakespeare": "a text of about a million characters, such as tiny-shakespeare: --data.path FILE",
}


def check(config: Config) -> list[Any]:
    """What can be made of the settings alone; `ConfigError` with all that is wrong with them, before any data are read."""
    return checked(*_checks(config), lambda: refuse_default_data(config.preset, config.data.path, _MEANT_FOR))


def _checks(config: Config) -> list[Callable[[], Any]]:
    data = config.data
    return [
        lambda: network_shape(config, vocabulary=257),  # the size of the vocabulary is known once the text is read
        config.optimizer.spec,
        config.schedule.spec,
        lambda: config.check(config.schedule),
        lambda: texts.refuse_foreign_vocabulary(data.tokenizer, data.vocabulary),
        lambda: _refuse_negative(config),
        lambda: asked_questions.named(config.multiple_choice or (), taken=("held-out", "cloze")),
    ]


def build(config: Config) -> sf.Run:
    """The run that a configuration describes, not yet started."""
    data, shape = config.data, config.model
    network, optimizer, schedule, *_ = check(config)
    found = texts.corpus(
        data.path,
        held_out_fraction=data.held_out_fraction,
        tokenizer=data.tokenizer,
        vocabulary=data.vocabulary,
        saved=texts.saved(config.out),
        init=config.init,
    )
    tokenizer = found.tokenizer
    network = network_shape(config, vocabulary=tokenizer.vocabulary)

    def model() -> Any:
        return sf.models.GPT(network)

    def bits_per_byte(scores: Mapping[str, float]) -> float:
        return scores["loss"] * found.targets_per_byte / math.log(2)

    prompt = tokenizer.encode(_prompt(config, tokenizer)).tolist() if config.sample_tokens else []
    if config.sample_tokens and not prompt:
        raise sf.ConfigError("sample_prompt is empty: give at least one character to go on from, or --sample-tokens 0")

    def sample(model: Any) -> str:
        settings: dict[str, Any] = {"count": config.sample_tokens, "context": shape.context, "temperature": 0.7}
        drawn = sf.generate.sample(model, prompt, **settings, seed=config.seed, end=tokenizer.end, caching=True)
        return str(tokenizer.decode(drawn))

    def panels(model: Any) -> list[sf.TintedText]:
        return [tinted_held_out(model, found, context=shape.context)]

    splits = {
        "held-out": sf.Split(
            sf.HeldOut(found.held_out, context=shape.context),
            batch_size=64,
            derived={"perplexity": sf.perplexity, "bits_per_byte": bits_per_byte},
        )
    }
    cloze = None if config.cloze_questions == 0 else _cloze(config, found)
    if cloze is not None:
        splits["cloze"] = cloze
    for name, file in asked_questions.named(config.multiple_choice or ()).items():
        splits[name] = asked_questions.question_split(
            name,
            file,
            tokenizer=tokenizer,
            context=shape.context,
            number=config.multiple_choice_questions,
            seed=config.seed,
        )
    return sf.Run(
        model=model,
        loss=_loss,
        train_data=sf.Windows(found.training, context=shape.context, seed=config.seed),
        optimizer=optimizer,
        schedule=schedule,
        evaluate=splits,
        sample_fn=sample if config.sample_tokens else None,
        panels_fn=panels,
        describe_sample=text_in_words(tokenizer),
        best=BEST,
        files={texts.TOKENIZER: tokenizer.to_json()},
        example="",
        about_data=found.in_words,
        settings={"data": {"tokenizer": found.chosen}, "model": asdict(network)},
        **config.run_settings(BEST),
    )


def outline(config: Config) -> sf.Run | None:
    """The run without its data, to be computed with; None where only the data say how many different tokens there are."""
    data, shape = config.data, config.model
    vocabulary = texts.promised_vocabulary(data.path, tokenizer=data.tokenizer, vocabulary=data.vocabulary)
    if vocabulary is None or config.init is not None:
        return None
    _, optimizer, schedule, *_ = checked(*_checks(config))
    network = network_shape(config, vocabulary=vocabulary)
    import numpy as np

    return sf.Run(
        model=lambda: sf.models.GPT(network),
        loss=_loss,
        train_data=sf.Windows(np.zeros(4 * shape.context, dtype=np.int64), context=shape.context, seed=config.seed),
        optimizer=optimizer,
        schedule=schedule,
        about_data=[f"none were read: {vocabulary:,} different tokens, as the settings say"],
        **config.run_settings(None),
    )


def _loss(model: Any, batch: Any) -> Any:
    inputs_BT, targets_BT = batch
    return model(inputs_BT, loss=lambda hidden, head: sf.linear_cross_entropy(hidden, head, targets_BT))


def _refuse_negative(config: Config) -> None:
    for name, number in (("cloze_questions", config.cloze_questions), ("sample_tokens", config.sample_tokens)):
        if number is not None and number < 0:
            raise sf.ConfigError(f"{name} = {number}: how many, or 0 for none")
    if config.multiple_choice_questions < 1:
        raise sf.ConfigError(
            f"multiple_choice_questions = {config.multiple_choice_questions}: how many of a file, 1 or more"
        )


def network_shape(config: Config, *, vocabulary: int) -> Any:
    """The network's shape; `ConfigError` where it cannot be built."""
    shape = config.model
    if shape.ngram_rows is not None and shape.ngrams == 1:
        raise sf.ConfigError(
            f"model.ngram_rows = {shape.ngram_rows} is of tables that are not there\n  --model.ngrams 2, 3 or 4 makes them"
        )
    try:
        return sf.models.GPTShape(
            layers=shape.layers,
            heads=shape.heads,
            width=shape.width,
            context=shape.context,
            vocabulary=vocabulary,
            dropout=shape.dropout,
            family=shape.family,
            activation=shape.activation,
            tied=shape.family == "gpt2" if shape.tied is None else shape.tied,
            smear=shape.smear,
            ngrams=shape.ngrams,
            ngram_rows=32768 if shape.ngram_rows is None else shape.ngram_rows,
        )
    except ValueError as problem:
        raise sf.ConfigError(f"model: {problem}") from problem


def _prompt(config: Config, tokenizer: Any) -> str:
    if config.sample_prompt is not None:
        return config.sample_prompt
    if config.data.path is None:
        return "\ndef "
    only = tokenizer.characters if isinstance(tokenizer, sf.CharacterTokenizer) else "\n"
    return "\n" if "\n" in only else only[0]


_CHOICES = 4


def _cloze(config: Config, found: texts.Corpus) -> sf.Split | None:
    held_out = found.longest_held_out
    wanted, context = config.cloze_questions, config.model.context
    if wanted is None:  # as many as are usual, where there is text for them
        if len(held_out) < _CHOICES * 2 * context:
            return None
        wanted = 200
    try:
        questions = sf.cloze(held_out, context=context, questions=wanted, seed=config.seed, choices=_CHOICES)
    except sf.DataError:  # a text that repeats itself
        if config.cloze_questions is None:
            return None
        raise
    rows = sf.Choices(questions, context=context, byte_counts=found.tokenizer.byte_counts)
    batch_size = asked_questions.questions_at_once(rows, vocabulary=found.tokenizer.vocabulary)
    return sf.Split(rows, scores=_accuracy, batch_size=batch_size, loss=False)


def _accuracy(model: Any, batch: Any) -> dict[str, sf.Mean]:
    return {"accuracy": asked_questions.choice_accuracy(model, batch)["acc"]}  # all endings are of one length


def judged(config: Config, on: Mapping[str, Path], *, run: Path, checkpoint: Any) -> Iterator[tuple[str, float]]:
    """The scores of a trained model over whole files of questions, for `surefoot evaluate --on`; no training data are read."""
    from surefoot.snapshot import load_weights  # imports torch

    tokenizer = texts.saved_tokenizer(run / texts.TOKENIZER)
    context = config.model.context
    splits = {
        name: asked_questions.question_split(name, path, tokenizer=tokenizer, context=context)
        for name, path in on.items()
    }
    model = sf.models.GPT(network_shape(config, vocabulary=tokenizer.vocabulary))
    load_weights(model, checkpoint, device=config.device)
    precision = config.precision  # auto: what the run has found
    if precision == "auto":
        precision = checkpoint.saved.described["precision"]
    for name, split in splits.items():
        scores = sf.split_scores(model, split, device=config.device, precision=precision, seed=config.seed)
        yield from ((f"{name}/{score}", value) for score, value in scores.items())


def predict(config: Config, asked: Predict, inputs: Sequence[str], *, run: Path, checkpoint: Any) -> Iterator[str]:
    """The texts with which a trained model goes on from the inputs, in pieces, for `surefoot predict`."""
    from surefoot.snapshot import load_weights  # imports torch

    tokenizer = texts.saved_tokenizer(run / texts.TOKENIZER)
    model = sf.models.GPT(network_shape(config, vocabulary=tokenizer.vocabulary))
    load_weights(model, checkpoint, device=asked.device)
    otherwise = _prompt(config, tokenizer)
    return continuations(model, tokenizer, inputs, asked, context=config.model.context, otherwise=otherwise)
