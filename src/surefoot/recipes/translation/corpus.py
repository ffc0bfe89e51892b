"""The corpus of a translation run: sentence pairs as tokens, their tokenizers, and the parts for
training and evaluation.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.paths import local_path
from surefoot.errors import Setting
from surefoot.recipes.gpt.corpus import TOKENIZER, beside
from surefoot.recipes.optimizer_settings import note
from surefoot.recipes.readers.pairs.files import read_pairs
from surefoot.recipes.shared_errors import reading_run_file, vocab_size_without_effect
from surefoot.recipes.translation.config import Config, Data
from surefoot.tokenizers.long_words import describe_long_words
from surefoot.tracking.run_reader import behavior_in

TARGET_TOKENIZER = (
    "tokenizer.target.json"  # in the run's directory, if the vocabularies are separate
)
PADDING = 0
_VOCABULARY = 1024
Sentences = list[tuple[str, str]]  # a source and its translation


@dataclass(frozen=True)
class Bilingual:
    """Training pairs as tokens, sentences for validation and test with their translations, and the
    tokenizers.
    """

    train: Any
    val: Sentences
    test: Sentences | None
    source: Any
    target: Any  # the same object as `source` if the vocabulary is shared
    chosen: str  # tokenizer settings, which a resume compares
    about: str

    @property
    def in_words(self) -> list[str]:
        test = (
            "no test split" if self.test is None else f"{len(self.test):,} for the test at the end"
        )
        tokenizers = (self.source,) if self.source is self.target else (self.source, self.target)
        sizes = [f"{tokenizer.vocab_size:,}" for tokenizer in tokenizers]
        return [
            self.about,
            f"{len(self.train):,} pairs for training, {len(self.val):,} for validation, {test}",
            f"{' and '.join(sizes)} subwords{' for both languages' if len(sizes) == 1 else ''}",
        ]

    @property
    def files(self) -> dict[str, str]:
        own = {} if self.target is self.source else {TARGET_TOKENIZER: self.target.to_json()}
        return {TOKENIZER: self.source.to_json(), **own}

    def pairs(self, sentences: Sentences) -> Any:
        return sf.data.TokenPairs.from_text(sentences, source=self.source, target=self.target)


def bilingual(config: Config, *, saved: Path | None = None) -> Bilingual:
    """Return the pairs at `data.path` in tokens (None: phrases from CLDR), and print the number of
    pairs too long to train on. `saved` is the tokenizer that the run wrote at its start. Without
    `saved`, the tokenizer of the initial weights is used if there is one."""
    data, init, context = config.data, config.init_from, config.model.context
    source, target, fraction = data.source, data.target, data.val_fraction
    if data.path is None:
        drawn = sf.data.cldr_phrases(source, target, count=data.phrase_count, seed=config.seed)
        parts = sf.data.ParallelText(*sf.data.split_pairs(drawn, val_fraction=fraction), None)
        about = f"phrases in {source} and {target}, rendered from CLDR (data.path is not set)"
    else:
        parts = read_pairs(
            data.path,
            source=source,
            target=target,
            val_fraction=fraction,
            on_empty=data.on_empty,
            behavior=behavior_in(config.run_dir),
        )
        about = f"pairs of {data.path}, {source} to {target}"
        if parts.notes:
            about += f" ({'; '.join(parts.notes)})"
    path = (
        saved
        if saved is not None or init is None
        else beside(local_path(init, setting="init_from"))
    )
    if path is None:
        tokenizers = _train_tokenizers(parts.train, data)
        sentences = (sentence for pair in parts.train for sentence in pair)
        cut_words = describe_long_words(sentences, tokenizers[0].tokenizer.pre_tokenizer)
        if cut_words is not None:
            about = f"{about}; {cut_words}"
    else:
        tokenizers = saved_tokenizers(path.parent)
        if saved is None:
            _refuse_unlike(data, tokenizers, path)
    pairs = sf.data.TokenPairs.from_text(
        parts.train,
        source=tokenizers[0],
        target=tokenizers[1],
        max_source_tokens=data.max_source_tokens,
        max_target_tokens=data.max_target_tokens,
    )
    if pairs.left_out:
        note(
            f"note: {pairs.left_out:,} of {len(parts.train):,} training pairs are left out, longer than"
            f" {data.max_source_tokens} and {data.max_target_tokens} tokens (data.max_source_tokens, data.max_target_tokens)"
        )
    held_out = _within(context, parts.val, tokenizers, origin=parts.val_origin)
    test = (
        None
        if parts.test is None
        else _within(context, parts.test, tokenizers, origin=parts.test_origin)
    )
    chosen = f"{data.tokenizer}, {promised_vocabulary(data.vocab_size)} tokens{'' if data.shared_vocab else ' for each side'}"
    chosen = chosen if init is None else f"the tokenizer of init_from, or {chosen}"
    return Bilingual(pairs, held_out, test, *tokenizers, chosen, about)


def _refuse_unlike(data: Data, tokenizers: tuple[Any, Any], path: Path) -> None:
    if data.vocab_size is not None:
        why = f"the weights of init_from have their own tokenizer, {path}"
        raise vocab_size_without_effect(data.vocab_size, why)
    is_shared = tokenizers[0] is tokenizers[1]
    actual = {"tokenizer": tokenizers[0].kind, "shared_vocab": is_shared}
    for name, value in actual.items():
        asked = getattr(data, name)
        if asked != value:
            raise sf.ConfigError(
                "tokenizer-unlike-that-of-weights",
                problem=f"data.{name} = {asked!r}: the weights of init_from have {value!r}, {path}",
                remedy=Setting(f"data.{name}", value),
                setting=f"data.{name}",
                value=asked,
                expected=value,
            )


def _within(
    context: int, sentences: Sentences, tokenizers: tuple[Any, Any], *, origin: Any
) -> Sentences:
    lengths = sf.data.TokenPairs.from_text(
        sentences, source=tokenizers[0], target=tokenizers[1]
    ).lengths.max(axis=1)
    long = (lengths > context).nonzero()[0].tolist()
    if long and (origin is not None or len(long) == len(sentences)):
        where = (
            "an evaluation pair" if origin is None else f"{origin.of(long[0])}: an evaluation pair"
        )
        more = f"; {len(long) - 1:,} more are too long" if len(long) > 1 else ""
        raise sf.DataError(
            "pair-exceeds-context",
            problem=f"{where} has {lengths[long[0]]} tokens, more than the model's context of"
            f" {context}{more}",
            reason=f"{sentences[long[0]][0][:60]!r} ...",
            remedy=["remove it", ("a larger", Setting("model.context"))],
            tokens=int(lengths[long[0]]),
            context=context,
        )
    if long:
        note(
            f"note: {len(long):,} of {len(sentences):,} validation pairs {'is' if len(long) == 1 else 'are'} longer than the model's"
            f" context of {context} tokens (model.context) and not evaluated"
        )
    return [
        pair for pair, length in zip(sentences, lengths.tolist(), strict=True) if length <= context
    ]


def saved_tokenizers(run: Path) -> tuple[Any, Any]:
    """Load the source and target tokenizers of a run. Raises `CheckpointError` if a file is
    missing or damaged.
    """
    first = _saved(run / TOKENIZER)
    own = run / TARGET_TOKENIZER
    return first, _saved(own) if own.is_file() else first


def _saved(path: Path) -> Any:
    with reading_run_file(path, content="the text of the run's tokens"):
        return sf.tokenizers.SubwordTokenizer.load(path)


def promised_vocabulary(vocab_size: int | None) -> int:
    """Return the number of subwords per language that the settings determine.

    >>> promised_vocabulary(None)
    1024
    """
    return _VOCABULARY if vocab_size is None else vocab_size


def _train_tokenizers(pairs: Sentences, data: Data) -> tuple[Any, Any]:
    trained = partial(
        sf.tokenizers.SubwordTokenizer.train,
        vocab_size=promised_vocabulary(data.vocab_size),
        kind=data.tokenizer,
    )
    sources, targets = [one for one, _ in pairs], [other for _, other in pairs]
    return (
        (trained(sources + targets),) * 2
        if data.shared_vocab
        else (trained(sources), trained(targets))
    )


def cross_entropy(label_smoothing: float, *, with_scores: bool = False) -> Any:
    """Return the loss: cross-entropy over real target tokens as a counted mean, with label
    smoothing in training. In evaluation, and with `with_scores` in training too, the loss comes
    with the next-token accuracy, given the reference's previous tokens."""

    of_tokens: Any = sf.losses.linear_cross_entropy
    if with_scores:
        of_tokens = sf.losses.linear_cross_entropy_with_scores

    def loss(model: Any, batch: Any) -> Any:
        source_BS, target_BT = batch

        def of_hidden(hidden_BTC: Any, head_VC: Any) -> Any:
            if not model.training:
                return _evaluated(hidden_BTC, head_VC, target_BT)
            hidden, targets = _real(hidden_BTC, target_BT[:, 1:])
            return of_tokens(
                hidden, head_VC, targets, ignore_index=PADDING, label_smoothing=label_smoothing
            )

        return model(source_BS, target_BT[:, :-1], loss=of_hidden)

    return loss


def _evaluated(
    hidden_BTC: Any, head_VC: Any, target_BT: Any
) -> "tuple[sf.Mean, dict[str, sf.Mean]]":
    hidden, targets = _real(hidden_BTC, target_BT[:, 1:])
    logits, real = hidden @ head_VC.to(hidden.dtype).T, targets != PADDING
    right = (logits.argmax(dim=-1) == targets) & real
    loss = sf.losses.cross_entropy(logits, targets, ignore_index=PADDING)
    return loss, {"accuracy": sf.Mean(right.sum(), real.sum())}


def targets_of(batch: Any) -> int:
    """Return the number of target tokens after the first, without padding."""
    return int((batch[1][:, 1:] != PADDING).sum())


def _real(hidden_BTC: Any, targets_BT: Any) -> tuple[Any, Any]:
    # padding is removed on the CPU only: on other devices the host would wait for the number of
    # tokens
    if not hidden_BTC.is_cpu:
        return hidden_BTC, targets_BT
    real_BT = targets_BT != PADDING
    return hidden_BTC[real_BT], targets_BT[real_BT]
