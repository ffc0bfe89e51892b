"""The translation recipe: from settings to a run with network, pairs, metrics, samples and
predictions. Imports no torch.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.extras import refuse_missing
from surefoot.config.setting import checked, number
from surefoot.recipes.gpt.corpus import first_lines, saved_tokenizer_path
from surefoot.recipes.optimizer_settings import Optimizer, refuse_default_data
from surefoot.recipes.shared_errors import impossible_shape, refuse_beyond_context
from surefoot.recipes.translation import corpus as texts
from surefoot.recipes.translation.config import MEANT_FOR, Config, Data
from surefoot.recipes.translation.predict import (
    Predict,
    TranslationSearch,
    answers,
    corpus_metrics,
    panel,
    translate,
)

_EXAMPLES = 3  # example translations of a sample


def check(config: Config, *, reads_data: bool = True) -> list[Any]:
    """Validate the settings and return the parts that need no data. Raises `ConfigError` with all
    problems. With `reads_data`, missing data and packages are problems too."""
    checks: list[Callable[[], Any]] = [
        # the sizes of vocabularies are unknown until the text is read
        lambda: network_shape(config, source=300, target=300),
        _as_usual(config.optimizer).spec,
        config.schedule.spec,
        config.check,
        *_value_checks(config),
    ]
    if reads_data:
        packages = ["tokenizers", "sacrebleu"]
        if config.data.path is None and config.preset not in MEANT_FOR:
            packages.append("babel")  # renders phrases
        checks += [
            lambda: refuse_missing("the recipe translation", *packages),
            lambda: refuse_default_data(config.preset, config.data.path, MEANT_FOR),
        ]
    return checked(*checks)


def build(config: Config) -> "sf.Run":
    """Build the run of a configuration without starting it."""
    _, optimizer, schedule, *_ = check(config)
    corpus = texts.bilingual(config, saved=saved_tokenizer_path(config.run_dir))
    network = _network_of(config, corpus.source, corpus.target)
    at_end = TranslationSearch(
        corpus.source, corpus.target, config.beam_size, config.length_penalty
    )
    while_training = replace(at_end, beam_size=config.val_beam_size)
    scored = corpus.val[: config.val_pairs]

    def sample(model: Any) -> str:
        examples = scored[:: max(1, len(scored) // _EXAMPLES)][:_EXAMPLES]
        translations = translate(model, [source for source, _ in examples], at_end)
        samples = []
        for (source, reference), translation in zip(examples, translations, strict=True):
            samples.append(f"{source}\n  reference: {reference}\n  output:    {translation}")
        return "\n".join(samples)

    def in_words(batch: Any) -> str:
        source_BS, target_BT = batch
        source = corpus.source.decode(source_BS[0].tolist())
        target = corpus.target.decode(target_BT[0].tolist())
        return f"{first_lines(source)}\n  -> {first_lines(target)}"

    # compiled code with scores would compute the loss in another order
    with_scores = config.compile is False
    derived: dict[str, Any] | None = None
    if not config.label_smoothing:
        derived = {"perplexity": sf.metrics.perplexity}
    elif with_scores:
        derived = {"perplexity": _perplexity}
    loss_note = None
    if config.label_smoothing:
        loss_note = f"label smoothing {config.label_smoothing:g}"
    best = "max val/bleu" if config.best == "bleu" else "min val/loss"
    language = config.data.target
    splits = {"val": _split(corpus, scored, while_training, language=language, at_end=False)}
    if corpus.test is not None:
        splits["test"] = _split(corpus, corpus.test, at_end, language=language, at_end=True)
    return sf.Run(
        model=lambda **dropout: sf.models.Seq2Seq(replace(network, **dropout)),
        model_settings={
            "dropout": network.dropout,
            "attention_dropout": network.attention_dropout,
            "activation_dropout": network.activation_dropout,
        },
        loss=texts.cross_entropy(config.label_smoothing, with_scores=with_scores),
        count_unit="tokens",
        count_fn=texts.targets_of,
        train_data=corpus.train,
        optimizer=optimizer,
        schedule=schedule,
        splits=splits,
        sample_fn=sample,
        sample_summary=at_end.in_words,
        loss_note=loss_note,
        derived=derived,
        panels_fn=lambda model: [panel(model, scored, while_training, language=language)],
        describe_fn=in_words,
        extra_files=corpus.files,
        predict_example=scored[0][0],
        data_summary=_summary(corpus, len(scored)),
        identity={
            "data": {"tokenizer": corpus.chosen},
            "model": asdict(network),
            "label_smoothing": config.label_smoothing,
        },
        **config.run_settings(best),
    )


def _split(
    corpus: texts.Bilingual,
    sentences: list[tuple[str, str]],
    search: TranslationSearch,
    *,
    language: str,
    at_end: bool,
) -> "sf.Split":
    """Return a split whose translations are compared with the original texts."""
    # sorted by length, so that batches have little padding; the order of a split changes no metric
    ordered = sorted(sentences, key=lambda pair: (len(pair[0]), pair))
    pairs = corpus.pairs(ordered)
    # compared with the original text, because decoded tokens may differ from it
    originals: dict[tuple[int, ...], list[str]] = {}
    places = pairwise(pairs.target_starts.tolist())
    for (_, reference), (start, end) in zip(ordered, places, strict=True):
        tokens = _without_padding(pairs.target[start:end].tolist())
        originals.setdefault(tokens, []).append(reference)

    def predict(model: Any, batch: Any) -> tuple[list[str], list[str]]:
        sources, targets = batch
        rows = [list(_without_padding(row)) for row in sources.tolist()]
        hypotheses = sf.generate.beam_search(
            model, rows, beam_size=search.beam_size, length_penalty=search.length_penalty
        )
        translations = [corpus.target.decode(hypothesis.tokens) for hypothesis in hypotheses]
        return translations, targets.tolist()

    def compare(translations: list[str], targets: list[list[int]]) -> dict[str, float | str]:
        # texts with the same tokens are in the order of the split
        uses = Counter[tuple[int, ...]]()
        references = []
        for row in targets:
            tokens = _without_padding(row)
            candidates = originals[tokens]
            references.append(candidates[uses[tokens] % len(candidates)])
            uses[tokens] += 1
        return corpus_metrics(references, translations, language=language)

    return sf.Split(
        pairs,
        metrics=sf.metrics.whole_split(compare),
        batch_size=64,
        predict=predict,
        derived={"perplexity": sf.metrics.perplexity},
        at_end=at_end,
    )


def _without_padding(row: list[int]) -> tuple[int, ...]:
    return tuple(token for token in row if token != texts.PADDING)


def _summary(corpus: texts.Bilingual, scored: int) -> list[str]:
    about, *more = corpus.in_words
    count = len(corpus.val)
    of_all = f" of {count:,}" if scored < count else ""
    return [f"{about}; {scored:,}{of_all} validation pairs", *more]


def _perplexity(values: Mapping[str, float]) -> float:
    """Return the perplexity of a training record, never from a smoothed loss."""
    return sf.metrics.perplexity({"loss": values.get("unsmoothed_loss", math.nan)})


_USUAL = 32  # assumed tokens per sentence if no data are read


def outline(config: Config) -> "sf.Run | None":
    """Return the run without its data, to compute memory and time. Returns None if initial weights
    determine the vocabulary size.
    """
    if config.init_from is not None:
        return None
    _, optimizer, schedule, *_ = check(config, reads_data=False)
    data = config.data
    vocab_size = texts.promised_vocabulary(data.vocab_size)
    source_size = None if data.shared_vocab else vocab_size
    network = network_shape(config, source=source_size, target=vocab_size)
    subwords = f"{vocab_size:,} subwords"
    if not data.shared_vocab:
        subwords += " for each language"
    length = min(_USUAL, data.max_source_tokens, data.max_target_tokens)
    row = [0] * (length - 1)  # plus the end token
    return sf.Run(
        model=lambda: sf.models.Seq2Seq(network),
        loss=texts.cross_entropy(config.label_smoothing),
        count_unit="tokens",
        train_data=sf.data.TokenPairs([row] * 64, [row] * 64),
        optimizer=optimizer,
        schedule=schedule,
        data_summary=[
            f"not read: the settings give {subwords},",
            f"and sentences have {length} tokens here",
        ],
        **config.run_settings(None),
    )


def _network_of(config: Config, source: Any, target: Any) -> Any:
    """Return the network's configuration for two tokenizers, which are one if it is shared."""
    source_size = None if source is target else source.vocab_size
    return network_shape(config, source=source_size, target=target.vocab_size)


def network_shape(config: Config, *, source: int | None, target: int) -> Any:
    """Return the network's configuration for these vocabulary sizes. Raises `ConfigError` if the
    network cannot be built.
    """
    try:
        return sf.models.Seq2SeqConfig(
            vocab_size=target, source_vocab_size=source, **asdict(config.model)
        )
    except ValueError as problem:
        raise impossible_shape(problem) from problem


def predict(
    config: Config, options: Predict, inputs: Sequence[str], *, run: Path, checkpoint: Any
) -> Iterator[str]:
    """Yield the translation of each input."""
    from surefoot.train.model_weights import load_weights  # imports torch

    source, target = texts.saved_tokenizers(run)
    network = _network_of(config, source, target)
    model = load_weights(sf.models.Seq2Seq(network), checkpoint, device=options.device)
    search = TranslationSearch(source, target, config.beam_size, config.length_penalty)
    return answers(model, inputs, options, search)


def _as_usual(optimizer: Optimizer) -> Optimizer:
    betas = optimizer.betas
    if betas is None and optimizer.name == "adamw":
        betas = (0.9, 0.98)
    return replace(optimizer, betas=betas, weight_decay=optimizer.weight_decay or 0.0)


def _value_checks(config: Config) -> Iterator[Callable[[], Any]]:
    least = {
        "vocab_size": sf.tokenizers.SubwordTokenizer.min_vocab_size,  # all bytes and three more
        "phrase_count": 100,
        "max_source_tokens": 2,
        "max_target_tokens": 2,
    }
    for name, min_value in least.items():
        value = getattr(config.data, name)
        if value is not None:
            yield partial(number(min_value=min_value), value, setting=f"data.{name}")
    yield lambda: _refuse_one_language(config.data)
    for name in ("max_source_tokens", "max_target_tokens"):
        tokens = getattr(config.data, name)
        yield partial(refuse_beyond_context, f"data.{name}", tokens, context=config.model.context)


def _refuse_one_language(data: Data) -> None:
    if data.source == data.target:
        raise sf.ConfigError(
            "languages-equal",
            problem=f"data.source and data.target are both {data.source!r}",
            remedy="name two languages",
            setting="data.target",
            value=data.target,
        )
