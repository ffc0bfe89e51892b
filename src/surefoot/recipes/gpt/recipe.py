"""The GPT recipe: from settings to a run with network, corpus, metrics, samples and predictions.
Imports no torch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.setting import checked
from surefoot.errors import Setting
from surefoot.recipes.gpt import corpus as texts
from surefoot.recipes.gpt.config import BEST, MEANT_FOR, Config
from surefoot.recipes.gpt.predict import Predict, continuations, empty_prompt
from surefoot.recipes.gpt.questions import (
    named_files,
    predict_endings,
    question_split,
    questions_at_once,
)
from surefoot.recipes.optimizer_settings import refuse_default_data
from surefoot.recipes.shared_errors import impossible_shape
from surefoot.tracking.run_reader import behavior_in

_SAMPLE_TEMPERATURE = 0.7
_TOKENS = 300  # approximate number of tokens shown
_CHOICES = 4  # of a cloze question


def loss_heatmap(model: Any, corpus: texts.Corpus, *, context: int) -> "sf.report.TextHeatmap":
    """Return a heatmap of some windows from the middle of the validation text, with the evaluation
    loss of each token.
    """
    import numpy as np
    import torch.nn.functional as F

    windows = sf.data.EvalWindows(
        corpus.longest_held_out, context=context, end_token=corpus.end_token
    )
    count = min(len(windows), max(1, round(_TOKENS / context)))
    first = (len(windows) - count) // 2
    ids = np.arange(first, first + count)
    device = next(model.parameters()).device
    # of a long context, only the beginning is shown
    inputs_BT, targets_BT, *documents = [
        part_BT[:, : 2 * _TOKENS].to(device) for part_BT in windows.gather(ids, np.zeros_like(ids))
    ]
    logits_BTV = model(inputs_BT, **_documents(documents)).float().cpu()
    targets = targets_BT.flatten().cpu()
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets, reduction="none")
    is_real = targets >= 0  # the last window is padded
    tokens = [int(inputs_BT[0, 0]), *targets[is_real].tolist()]
    return sf.report.TextHeatmap.from_losses(
        "validation text",
        tokens,
        losses[is_real].tolist(),
        tokenizer=corpus.tokenizer,
        legend="the model's loss at each token in nats, given the text before it in its window",
    )


def check(config: Config, *, reads_data: bool = True) -> list[Any]:
    """Validate the settings and return the parts that need no data. Raises `ConfigError` with all
    problems. With `reads_data`, missing data and packages that read them are problems too."""
    checks: list[Callable[[], Any]] = [
        # the vocabulary size is unknown until the text is read
        lambda: network_shape(config, vocab_size=257),
        config.optimizer.spec,
        config.schedule.spec,
        config.check,
        lambda: texts.refuse_foreign_vocabulary(config.data),
        lambda: texts.refuse_end_token_without_file(config.data.tokenizer, config.data.end_token),
        lambda: named_files(config.multiple_choice or (), taken=("val", "val_all", "cloze")),
    ]
    if reads_data:
        checks += [
            lambda: texts.refuse_missing_library(config.data, init=config.init_from),
            lambda: refuse_default_data(config.preset, config.data.path, MEANT_FOR),
        ]
    return checked(*checks)


def build(config: Config) -> "sf.Run":
    """Build the run of a configuration without starting it."""
    _, optimizer, schedule, *_ = check(config)
    corpus = texts.read_corpus(
        config.data,
        saved=texts.saved_tokenizer_path(config.run_dir),
        init=config.init_from,
        behavior=behavior_in(config.run_dir),
    )
    tokenizer = corpus.tokenizer
    context = config.model.context
    network = network_shape(config, vocab_size=tokenizer.vocab_size)
    prompt = []
    if config.sample_tokens:
        prompt = tokenizer.encode(_prompt(config, tokenizer)).tolist()
        if not prompt:
            raise empty_prompt("sample_prompt", Setting("sample_tokens", 0))

    def sample(model: Any) -> list[str]:
        samples = []
        for seed in range(config.seed, config.seed + config.sample_count):
            tokens = sf.generate.sample(
                model,
                prompt,
                max_new_tokens=config.sample_tokens,
                context=context,
                temperature=_SAMPLE_TEMPERATURE,
                seed=seed,
                eos_id=tokenizer.eos_id,
                use_cache=True,
            )
            samples.append(str(tokenizer.decode(tokens)))
        return samples

    def in_words(batch: Any) -> str:
        inputs_BT, targets_BT, *_ = batch
        tokens = [*inputs_BT[0].tolist(), *targets_BT[0, -1:].tolist()]
        return texts.first_lines(repr(tokenizer.decode(tokens)))  # repr: line ends as escapes

    splits = _splits(config, corpus)
    return sf.Run(
        model=lambda dropout: sf.models.GPT(replace(network, dropout=dropout)),
        model_settings={"dropout": network.dropout},
        loss=_loss,
        count_unit="tokens",
        train_data=sf.data.TrainWindows(
            corpus.train, context=context, seed=config.seed, end_token=corpus.end_token
        ),
        optimizer=optimizer,
        schedule=schedule,
        splits=splits,
        sample_fn=sample if config.sample_tokens else None,
        sample_summary=f"temperature {_SAMPLE_TEMPERATURE:g}, seed {config.seed}",
        derived={"perplexity": sf.metrics.perplexity},
        panels_fn=lambda model: [loss_heatmap(model, corpus, context=context)],
        describe_fn=in_words,
        extra_files={texts.TOKENIZER: tokenizer.to_json()},
        predict_example="",
        data_summary=corpus.in_words,
        identity={"data": {"tokenizer": corpus.chosen}, "model": network.to_dict()},
        **config.run_settings(BEST),
    )


def _splits(config: Config, corpus: texts.Corpus) -> "dict[str, sf.Split]":
    tokenizer = corpus.tokenizer
    context = config.model.context
    end_token = corpus.end_token
    all_windows = sf.data.EvalWindows(corpus.val, context=context, end_token=end_token)
    windows = sf.data.EvalWindows(
        corpus.val,
        context=context,
        max_tokens=config.val_tokens,
        seed=config.seed,
        end_token=end_token,
    )
    splits = {"val": _text_split(windows, tokenizer)}
    if len(windows) < len(all_windows):
        splits["val_all"] = _text_split(all_windows, tokenizer, at_end=True)
    if config.cloze_questions != 0:
        cloze = _cloze(config, corpus)
        if cloze is not None:
            splits["cloze"] = cloze
    for name, file in named_files(config.multiple_choice or ()).items():
        splits[name] = question_split(
            name,
            file,
            tokenizer=tokenizer,
            context=context,
            number=config.multiple_choice_questions,
            seed=config.seed,
        )
    return splits


def _text_split(windows: Any, tokenizer: Any, *, at_end: bool = False) -> "sf.Split":
    @cache
    def targets_per_byte() -> float:
        return texts.targets_per_byte(windows, tokenizer)

    return sf.Split(
        windows,
        batch_size=64,
        derived={
            "perplexity": sf.metrics.perplexity,
            "bits_per_byte": lambda scores: scores["loss"] * targets_per_byte() / math.log(2),
        },
        at_end=at_end,
    )


def outline(config: Config) -> "sf.Run | None":
    """Return the run without its data, to compute memory and time. Returns None if the vocabulary
    size depends on the data.
    """
    vocab_size = texts.promised_vocabulary(config.data)
    if vocab_size is None or config.init_from is not None:
        return None
    _, optimizer, schedule, *_ = check(config, reads_data=False)
    network = network_shape(config, vocab_size=vocab_size)
    import numpy as np

    context = config.model.context
    tokens = np.zeros(4 * context, dtype=np.int64)
    return sf.Run(
        model=lambda: sf.models.GPT(network),
        loss=_loss,
        count_unit="tokens",
        train_data=sf.data.TrainWindows(tokens, context=context, seed=config.seed),
        optimizer=optimizer,
        schedule=schedule,
        data_summary=[f"not read: the settings give {vocab_size:,} tokens in the vocabulary"],
        **config.run_settings(None),
    )


def _loss(model: Any, batch: Any) -> Any:
    inputs_BT, targets_BT, *documents = batch
    return model(
        inputs_BT,
        **_documents(documents),
        loss=lambda hidden, head: sf.losses.linear_cross_entropy(hidden, head, targets_BT),
    )


def _documents(parts: Sequence[Any]) -> dict[str, Any]:
    """Return the model's argument for the documents of a batch, which is absent if they are
    joined.
    """
    return {"documents": parts[0]} if parts else {}


def network_shape(config: Config, *, vocab_size: int) -> Any:
    """Return the configuration of the network. Raises `ConfigError` if the network cannot be
    built.
    """
    shape = config.model
    if shape.ngram_buckets is not None and shape.ngrams == 1:
        raise sf.ConfigError(
            "ngram-buckets-without-ngrams",
            problem=f"model.ngram_buckets = {shape.ngram_buckets} has no effect without n-grams",
            remedy=[Setting("model.ngrams", 2), Setting("model.ngram_buckets", None)],
            setting="model.ngram_buckets",
            value=shape.ngram_buckets,
        )
    settings: dict[str, Any] = {"tie_embeddings": shape.family == "gpt2"}
    for name, value in vars(shape).items():
        if value is not None:
            settings[name] = value
    try:
        return sf.models.GPTConfig(vocab_size=vocab_size, **settings)
    except ValueError as problem:
        raise impossible_shape(problem) from problem


def _prompt(config: Config, tokenizer: Any) -> str:
    if config.sample_prompt is not None:
        return config.sample_prompt
    if config.data.path is None:
        return "\ndef "
    if isinstance(tokenizer, sf.tokenizers.CharacterTokenizer):
        return "\n" if "\n" in tokenizer.characters else tokenizer.characters[0]
    for prompt in ("\n", "the", "a"):  # some kinds have no line break
        with suppress(sf.DataError):
            if len(tokenizer.encode(prompt)):
                return prompt
    return "\n"


def _cloze(config: Config, corpus: texts.Corpus) -> "sf.Split | None":
    held_out = corpus.longest_held_out
    context = config.model.context
    count = config.cloze_questions
    if count is None:  # the usual number, if the text is long enough
        if len(held_out) < _CHOICES * 2 * context:
            return None
        count = 100
    try:
        questions = sf.data.cloze_questions(
            held_out, context=context, questions=count, seed=config.seed, choices=_CHOICES
        )
    except sf.DataError:  # a text that repeats itself
        if config.cloze_questions is None:
            return None
        raise
    rows = sf.data.MultipleChoice(
        questions, context=context, byte_counts=corpus.tokenizer.byte_counts
    )
    return sf.Split(
        rows,  # all endings have the same length
        metrics=lambda outputs, targets: {
            "accuracy": sf.metrics.multiple_choice_accuracy(outputs, targets)["acc"]
        },
        predict=predict_endings,
        batch_size=questions_at_once(rows, vocab_size=corpus.tokenizer.vocab_size),
        loss=False,
    )


def evaluate_questions(
    config: Config, on: Mapping[str, Path], *, run: Path, checkpoint: Any
) -> Iterator[tuple[str, float]]:
    """Yield the metrics of a trained model on question files, for `surefoot evaluate --questions`,
    without training data.
    """
    tokenizer = texts.saved_tokenizer(run / texts.TOKENIZER)
    splits = {}
    for name, path in on.items():
        splits[name] = question_split(name, path, tokenizer=tokenizer, context=config.model.context)
    model = _load_model(config, tokenizer, checkpoint, device=config.device)
    precision = config.precision
    if precision == "auto":  # what it came to in training
        precision = checkpoint.saved.identity["precision"]
    for name, split in splits.items():
        metrics = sf.evaluate(
            model, split, device=config.device, precision=precision, seed=config.seed
        )
        for metric, value in metrics.items():
            yield f"{name}/{metric}", value


def predict(
    config: Config, options: Predict, inputs: Sequence[str], *, run: Path, checkpoint: Any
) -> Iterator[str]:
    """Yield the model's continuation of each input."""
    tokenizer = texts.saved_tokenizer(run / texts.TOKENIZER)
    model = _load_model(config, tokenizer, checkpoint, device=options.device)
    return continuations(
        model,
        tokenizer,
        inputs,
        options,
        context=config.model.context,
        otherwise=_prompt(config, tokenizer),
    )


def _load_model(config: Config, tokenizer: Any, checkpoint: Any, *, device: str) -> Any:
    from surefoot.train.model_weights import load_weights  # imports torch

    network = network_shape(config, vocab_size=tokenizer.vocab_size)
    return load_weights(sf.models.GPT(network), checkpoint, device=device)
