"""A translator from one language into another: of phrases that every machine can render, of Multi30k, or of files of yours.

Importing this module does not import torch: the names behind `sf.` are resolved when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import surefoot as sf
from surefoot.config import default, ordered, setting
from surefoot.recipes import bilingual as texts
from surefoot.recipes.corpus import saved
from surefoot.recipes.in_words import pair_in_words
from surefoot.recipes.settings import (
    Optimizer,
    RecipeSettings,
    Schedule,
    checked,
    refuse_default_data,
)
from surefoot.recipes.target_tokens import PADDING, of_tokens, smoothed, targets_of
from surefoot.recipes.translations import Predict, answers, judged, shown, translated

_SHOWN = 3  # example translations of a sample


@dataclass(frozen=True, kw_only=True)
class Data:
    """Sentences with their translations, and how they become numbers."""

    path: str | None = None
    """A directory with train.en and train.de (val and test beside them), or a .tsv or .jsonl file; absent: phrases."""
    source: str = "en"
    """The language translated from, as the files name it; of phrases, a locale such as en or pt_BR."""
    target: str = "de"
    """The language translated into."""
    phrases: int = 24_000
    """How many phrases there are where no path is given."""
    held_out_fraction: float = 0.03
    """How many pairs are scored and not trained on, chosen by a hash of the source, where there is no validation file."""
    tokenizer: Literal["bpe", "unigram"] = "bpe"
    """How words are cut into subwords: byte pairs, or a unigram model; trained on what is trained on."""
    vocabulary: int | None = None
    """How many different subwords; absent: 1024, or those of --init."""
    shared: bool = True
    """Whether both languages have one vocabulary and one embedding."""
    max_source: int = 128
    """Pairs with more tokens in the source are not trained on."""
    max_target: int = 128
    """Pairs with more tokens in the target are not trained on."""
    empty: Literal["stop", "skip"] = "stop"
    """Stop at pairs with an empty side, or leave such out, counted and reported."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of the network."""

    encoder_layers: int = 2
    """Blocks that read the source."""
    decoder_layers: int = 2
    """Blocks that write the target."""
    heads: int = 4
    """Attention heads a block."""
    width: int = 128
    """Channels between blocks; a multiple of the heads."""
    hidden: int = 512
    """Units between the two layers of an MLP."""
    context: int = 512
    """The most tokens of a source, and of a target."""
    dropout: float = 0.0
    """Fraction of units dropped while training, of the embeddings and of what each part adds."""
    attention_dropout: float = 0.0
    """Fraction of attention weights dropped; slow on the CPU."""
    activation_dropout: float = 0.0
    """Fraction of units dropped between the layers of an MLP."""
    norm: Literal["pre", "post"] = "pre"
    """pre: norms before each part, which trains easily; post: after it, as first published."""
    norm_kind: Literal["layer", "rms"] = "layer"
    """layer: mean taken away, divided by the deviation, with a bias; rms: divided by the root mean square."""
    query_key_norm: bool = False
    """RMS norms of each head's queries and keys."""
    positions: Literal["sinusoidal", "learned", "rotary"] = "sinusoidal"
    """What tells places apart; sinusoidal ones are known for lengths that are rare in training too; rotary ones turn the
    queries and keys of a side's attention to itself."""
    activation: Literal["relu", "gelu", "relu2"] = "relu"
    """Between the layers of an MLP; relu2 is ReLU squared."""
    zero_start: bool = False
    """Start what each block adds at zero; for norms before each part."""
    tied: bool = True
    """Whether the head is the target's embedding."""


@ordered
@dataclass(kw_only=True)
class Config(RecipeSettings):
    """Train a translator."""

    preset: Literal["tiny", "multi30k", "multi30k-fast", "base", "big"] | None = setting(None, observer=True, after="")
    """A complete configuration to start from; tiny is the default. Files and flags change it."""
    out: str | Path | None = default("runs/translation")
    length: str = default("900 steps")
    batch_size: int | str = default("2048 tokens")
    evaluate_every: str = default("25%")
    ema: float | None = default(0.99)
    data: Data = setting(factory=Data, identity=True)
    model: Model = setting(factory=Model, identity=True)
    optimizer: Optimizer = setting(factory=Optimizer, identity=True, after="workers")
    """Absent betas of adamw are (0.9, 0.98) here, as Vaswani et al. 2017 have them, and an absent weight decay is 0."""
    schedule: Schedule = setting(factory=lambda: Schedule(name="inverse-sqrt", warmup="10%"), identity=True)
    label_smoothing: float = setting(0.1, identity=True, after="check_state")
    """How much of each target's probability all tokens share while training; scores are without it."""
    best: Literal["bleu", "loss"] = setting("bleu", observer=True, after="evaluate_every")
    """Which score of the held-out part makes a checkpoint the best."""
    beam: int = setting(5, observer=True, after="label_smoothing")
    """Hypotheses kept open when the test part is translated; 1 is greedy search."""
    validation_beam: int = setting(1, observer=True)
    """The same for the held-out part while training; greedy search is several times faster."""
    length_penalty: float = setting(1.0, observer=True)
    """0 prefers short translations; the larger, the longer."""
    validation_pairs: int | None = setting(None, observer=True)
    """How many of the held-out pairs are scored while training. Absent: all."""


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    # the shape that Wu et al. 2021 (https://arxiv.org/abs/2105.14462) found best for so little text, with a wider MLP
    "multi30k": {
        "data.vocabulary": 5000,
        "model.encoder_layers": 4,
        "model.decoder_layers": 4,
        "model.dropout": 0.25,
        "model.activation": "relu2",
        "batch_size": "4096 tokens",
        "length": "3000 steps",
        "precision": "bf16",  # as in the published figures (docs/decisions/0042-auto-reads-a-table.md)
        "evaluate_every": "10%",
        "optimizer.name": "muon",
        "optimizer.lr": 1e-2,
        "optimizer.weight_decay": 0.01,
        "schedule.name": "linear",
        "schedule.warmup": "5%",
        "ema": None,  # the rate falls to zero
    },
    "base": {
        "data.vocabulary": 37_000,
        "model.encoder_layers": 6,
        "model.decoder_layers": 6,
        "model.heads": 8,
        "model.width": 512,
        "model.hidden": 2048,
        "model.dropout": 0.1,
        "model.norm": "post",
        "batch_size": "25000 tokens",
        "length": "100000 steps",
        "evaluate_every": "2000 steps",
        "save_every": "15 min",
        "ema": None,  # instead, score the mean of the last checkpoints: --checkpoint "average 5"
        "keep_last": 5,
        "optimizer.lr": 7e-4,
        "schedule.warmup": "4000 steps",
        "beam": 4,
        "length_penalty": 0.6,
    },
}
_LARGE = "a directory with train.en and train.de, or a .tsv or .jsonl file, of millions of pairs: --data.path PATH"
_MULTI30K = "the directory of Multi30k (train.en, train.de, val.en, val.de ...): --data.path DIR"
_MEANT_FOR = {
    "multi30k": _MULTI30K,
    "multi30k-fast": _MULTI30K,
    "base": _LARGE,
    "big": _LARGE,
}

# a few epochs: there is nothing yet to be kept from overfitting
PRESETS["multi30k-fast"] = PRESETS["multi30k"] | {
    "model.dropout": 0.0,
    "model.activation": "relu",
    "batch_size": "2048 tokens",
    "length": "300 steps",
    "evaluate_every": "50%",
    "best": "loss",
    "label_smoothing": 0.0,
    "optimizer.lr": 2e-2,
}
PRESETS["big"] = PRESETS["base"] | {
    "model.heads": 16,
    "model.width": 1024,
    "model.hidden": 4096,
    "model.dropout": 0.3,
    "length": "300000 steps",
    "optimizer.lr": 5e-4,
}


def check(config: Config) -> list[Any]:
    """What can be made of the settings alone; `ConfigError` with all that is wrong with them, before any data are read."""
    return checked(*_checks(config), lambda: refuse_default_data(config.preset, config.data.path, _MEANT_FOR))


def _checks(config: Config) -> list[Callable[[], Any]]:
    data = config.data
    return [
        lambda: network_shape(config, source=300, target=300),  # the vocabularies are known once the text is read
        lambda: _as_usual(config.optimizer).spec(),
        config.schedule.spec,
        lambda: config.check(config.schedule),
        lambda: texts.refuse_small_vocabulary(data.vocabulary),
        lambda: _refuse_wrong(config),
    ]


def build(config: Config) -> sf.Run:
    """The run that a configuration describes, not yet started."""
    data = config.data
    _, optimizer, schedule, *_ = check(config)
    found = texts.bilingual(
        data.path,
        source=data.source,
        target=data.target,
        phrases=data.phrases,
        held_out_fraction=data.held_out_fraction,
        tokenizer=data.tokenizer,
        vocabulary=data.vocabulary,
        shared=data.shared,
        max_source=data.max_source,
        max_target=data.max_target,
        empty=data.empty,
        context=config.model.context,
        seed=config.seed,
        saved=saved(config.out),
        init=config.init,
    )
    network = network_shape(
        config,
        source=None if found.source is found.target else found.source.vocabulary,
        target=found.target.vocabulary,
    )

    scored = found.held_out[: config.validation_pairs]

    def model() -> Any:
        return sf.models.Seq2Seq(network)

    def split(sentences: list[tuple[str, str]], *, beam: int, at_end: bool) -> sf.Split:
        # neighbours of one length, so that batches have little padding: the order of a split changes no score
        ordered = sorted(sentences, key=lambda pair: (len(pair[0]), pair))

        def outputs(model: Any, batch: Any) -> list[str]:
            rows = [[token for token in row if token != PADDING] for row in batch[0].tolist()]
            said = sf.beam.searched(model, rows, beam=beam, length_penalty=config.length_penalty)
            return [found.target.decode(one.tokens) for one in said]

        return sf.Split(
            found.pairs(ordered),
            scores=of_tokens,
            batch_size=64,
            loss=False,
            derived={"perplexity": sf.perplexity},
            outputs=outputs,
            judge=judged([other for _, other in ordered], language=data.target),
            at_end=at_end,
        )

    def sample(model: Any) -> str:
        some = scored[:: max(1, len(scored) // _SHOWN)][:_SHOWN]
        settings: dict[str, Any] = {"beam": config.beam, "length_penalty": config.length_penalty}
        sources = [one for one, _ in some]
        said = translated(model, sources, source=found.source, target=found.target, **settings)
        lines = zip(some, said, strict=True)
        return "\n".join(f"{one}\n  meant: {other}\n  said:  {answer}" for (one, other), answer in lines)

    def panels(model: Any) -> list[sf.Examples]:
        settings: dict[str, Any] = {"beam": config.validation_beam, "length_penalty": config.length_penalty}
        said = shown(model, scored, language=data.target, source=found.source, target=found.target, **settings)
        return [said]

    best = "max validation/bleu" if config.best == "bleu" else "min validation/loss"
    splits = {"validation": split(scored, beam=config.validation_beam, at_end=False)}
    if found.test is not None:
        splits["test"] = split(found.test, beam=config.beam, at_end=True)
    return sf.Run(
        model=model,
        loss=smoothed(config.label_smoothing),
        count=targets_of,
        train_data=found.training,
        optimizer=optimizer,
        schedule=schedule,
        evaluate=splits,
        sample_fn=sample,
        panels_fn=panels,
        describe_sample=pair_in_words(found.source, found.target),
        best=best,
        files=found.files,
        example=scored[0][0],
        about_data=found.in_words,
        settings={
            "data": {"tokenizer": found.chosen},
            "model": asdict(network),
            "label_smoothing": config.label_smoothing,
        },
        **config.run_settings(best),
    )


_USUAL = 32  # tokens of a side of a sentence, where none are read


def outline(config: Config) -> sf.Run | None:
    """The run without its data, to be computed with; None where weights to start from say how many subwords there are."""
    if config.init is not None:
        return None
    _, optimizer, schedule, *_ = checked(*_checks(config))
    vocabulary = texts.promised_vocabulary(config.data.vocabulary)
    network = network_shape(config, source=None if config.data.shared else vocabulary, target=vocabulary)
    length = min(_USUAL, config.data.max_source, config.data.max_target)
    row = [0] * (length - 1)  # and its end
    return sf.Run(
        model=lambda: sf.models.Seq2Seq(network),
        loss=smoothed(config.label_smoothing),
        train_data=sf.Pairs([row] * 64, [row] * 64),
        optimizer=optimizer,
        schedule=schedule,
        about_data=[
            f"none were read: {vocabulary:,} subwords{'' if config.data.shared else ' for each language'}, as the settings say,",
            f"and sentences of {length} tokens",
        ],
        **config.run_settings(None),
    )


def network_shape(config: Config, *, source: int | None, target: int) -> Any:
    """The network's shape for vocabularies of these sizes (source None: one for both); `ConfigError` where it cannot be."""
    try:
        return sf.models.Seq2SeqShape(vocabulary=target, source_vocabulary=source, **asdict(config.model))
    except ValueError as problem:
        raise sf.ConfigError(f"model: {problem}") from problem


def predict(config: Config, asked: Predict, inputs: Sequence[str], *, run: Path, checkpoint: Any) -> Iterator[str]:
    """Translations of the inputs, one a line, for `surefoot predict`."""
    from surefoot.snapshot import load_weights  # imports torch

    source, target = texts.saved_tokenizers(run)
    own = None if source is target else source.vocabulary
    model = sf.models.Seq2Seq(network_shape(config, source=own, target=target.vocabulary))
    load_weights(model, checkpoint, device=asked.device)
    settings: dict[str, Any] = {"beam": config.beam, "length_penalty": config.length_penalty}
    return answers(model, inputs, asked, source=source, target=target, **settings)


def _as_usual(optimizer: Optimizer) -> Optimizer:
    decay = 0.0 if optimizer.weight_decay is None else optimizer.weight_decay
    betas = (0.9, 0.98) if optimizer.name == "adamw" and optimizer.betas is None else optimizer.betas
    return replace(optimizer, betas=betas, weight_decay=decay)


def _refuse_wrong(config: Config) -> None:
    """Raise one `ConfigError` for all settings of this recipe's own that cannot be."""
    data, problems = config.data, []
    if data.source == data.target:
        problems.append(f"data.source and data.target are both {data.source!r}: name two languages")
    for name, number, least in (
        ("beam", config.beam, 1),
        ("validation_beam", config.validation_beam, 1),
        ("validation_pairs", config.validation_pairs, 1),
        ("data.phrases", data.phrases, 100),
        ("data.max_source", data.max_source, 2),
        ("data.max_target", data.max_target, 2),
    ):
        if number is not None and number < least:
            problems.append(f"{name} = {number}: {least} or more")
    for name, most in (("data.max_source", data.max_source), ("data.max_target", data.max_target)):
        if most > config.model.context:
            problems.append(f"{name} = {most} is more than model.context = {config.model.context}")
    if not 0 <= config.label_smoothing < 1:
        problems.append(f"label_smoothing = {config.label_smoothing}: a fraction, at least 0 and below 1")
    if not 0 <= config.length_penalty < float("inf"):
        problems.append(f"length_penalty = {config.length_penalty}: a number from 0 on")
    if problems:
        raise sf.ConfigError("\n".join(problems))
