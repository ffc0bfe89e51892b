"""The corpus of a translation run: sentence pairs as tokens, their tokenizers, and the parts for
training and evaluation.
"""

from dataclasses import dataclass
from functools import partial
from itertools import chain
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

# in the run's directory, if the vocabularies are separate
TARGET_TOKENIZER = "tokenizer.target.json"
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
        test = "no test split"
        if self.test is not None:
            test = f"{len(self.test):,} for the test at the end"
        if self.source is self.target:
            subwords = f"{self.source.vocab_size:,} subwords for both languages"
        else:
            subwords = f"{self.source.vocab_size:,} and {self.target.vocab_size:,} subwords"
        return [
            self.about,
            f"{len(self.train):,} pairs for training, {len(self.val):,} for validation, {test}",
            subwords,
        ]

    @property
    def files(self) -> dict[str, str]:
        files = {TOKENIZER: self.source.to_json()}
        if self.target is not self.source:
            files[TARGET_TOKENIZER] = self.target.to_json()
        return files

    def pairs(self, sentences: Sentences) -> Any:
        return sf.data.TokenPairs.from_text(sentences, source=self.source, target=self.target)


def bilingual(config: Config, *, saved: Path | None = None) -> Bilingual:
    """Return the pairs at `data.path` in tokens (None: phrases from CLDR), and print the number of
    pairs too long to train on. `saved` is the tokenizer that the run wrote at its start. Without
    `saved`, the tokenizer of the initial weights is used if there is one."""
    data = config.data
    init = config.init_from
    parts, about = _read_parts(config)
    path = saved
    if saved is None and init is not None:
        path = beside(local_path(init, setting="init_from"))
    if path is None:
        tokenizers = _train_tokenizers(parts.train, data)
        sentences = chain.from_iterable(parts.train)
        cut_words = describe_long_words(sentences, tokenizers[0].tokenizer.pre_tokenizer)
        if cut_words is not None:
            about = f"{about}; {cut_words}"
    else:
        tokenizers = saved_tokenizers(path.parent)
        if saved is None:
            _refuse_unlike(data, tokenizers, path)
    source, target = tokenizers
    pairs = sf.data.TokenPairs.from_text(
        parts.train,
        source=source,
        target=target,
        max_source_tokens=data.max_source_tokens,
        max_target_tokens=data.max_target_tokens,
    )
    if pairs.left_out:
        note(
            f"note: {pairs.left_out:,} of {len(parts.train):,} training pairs are left out, longer"
            f" than {data.max_source_tokens} and {data.max_target_tokens} tokens"
            " (data.max_source_tokens, data.max_target_tokens)"
        )
    context = config.model.context
    held_out = _within(context, parts.val, tokenizers, origin=parts.val_origin)
    test = None
    if parts.test is not None:
        test = _within(context, parts.test, tokenizers, origin=parts.test_origin)
    chosen = f"{data.tokenizer}, {promised_vocabulary(data.vocab_size)} tokens"
    if not data.shared_vocab:
        chosen += " for each side"
    if init is not None:
        chosen = f"the tokenizer of init_from, or {chosen}"
    return Bilingual(pairs, held_out, test, source, target, chosen, about)


def _read_parts(config: Config) -> "tuple[sf.data.ParallelText, str]":
    """Return the pairs at `data.path`, or phrases, and what the header says of them."""
    data = config.data
    if data.path is None:
        phrases = sf.data.cldr_phrases(
            data.source, data.target, count=data.phrase_count, seed=config.seed
        )
        training, held_out = sf.data.split_pairs(phrases, val_fraction=data.val_fraction)
        about = (
            f"phrases in {data.source} and {data.target}, rendered from CLDR (data.path is not set)"
        )
        return sf.data.ParallelText(training, held_out, None), about
    parts = read_pairs(
        data.path,
        source=data.source,
        target=data.target,
        val_fraction=data.val_fraction,
        on_empty=data.on_empty,
        behavior=behavior_in(config.run_dir),
    )
    about = f"pairs of {data.path}, {data.source} to {data.target}"
    if parts.notes:
        about += f" ({'; '.join(parts.notes)})"
    return parts, about


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
    """Return the sentences that the model can evaluate. Those of a file must all be short enough;
    of sentences held out from training, some may be left out.
    """
    source, target = tokenizers
    pairs = sf.data.TokenPairs.from_text(sentences, source=source, target=target)
    lengths = pairs.lengths.max(axis=1)
    long = (lengths > context).nonzero()[0].tolist()
    if not long:
        return sentences
    is_of_file = origin is not None
    if is_of_file or len(long) == len(sentences):
        first = long[0]
        where = "an evaluation pair"
        if is_of_file:
            where = f"{origin.of(first)}: an evaluation pair"
        more = f"; {len(long) - 1:,} more are too long" if len(long) > 1 else ""
        raise sf.DataError(
            "pair-exceeds-context",
            problem=f"{where} has {lengths[first]} tokens, more than the model's context of"
            f" {context}{more}",
            reason=f"{sentences[first][0][:60]!r} ...",
            remedy=["remove it", ("a larger", Setting("model.context"))],
            tokens=int(lengths[first]),
            context=context,
        )
    are = "is" if len(long) == 1 else "are"
    note(
        f"note: {len(long):,} of {len(sentences):,} validation pairs {are} longer than the model's"
        f" context of {context} tokens (model.context) and not evaluated"
    )
    return [
        pair for pair, length in zip(sentences, lengths.tolist(), strict=True) if length <= context
    ]


def saved_tokenizers(run: Path) -> tuple[Any, Any]:
    """Load the source and target tokenizers of a run. Raises `CheckpointError` if a file is
    missing or damaged.
    """
    source = _saved(run / TOKENIZER)
    target = source
    if (run / TARGET_TOKENIZER).is_file():
        target = _saved(run / TARGET_TOKENIZER)
    return source, target


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
    train = partial(
        sf.tokenizers.SubwordTokenizer.train,
        vocab_size=promised_vocabulary(data.vocab_size),
        kind=data.tokenizer,
    )
    sources = [source for source, _ in pairs]
    targets = [target for _, target in pairs]
    if data.shared_vocab:
        shared = train(sources + targets)
        return shared, shared
    return train(sources), train(targets)


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
    logits = hidden @ head_VC.to(hidden.dtype).T
    is_real = targets != PADDING
    is_right = (logits.argmax(dim=-1) == targets) & is_real
    loss = sf.losses.cross_entropy(logits, targets, ignore_index=PADDING)
    return loss, {"accuracy": sf.Mean(is_right.sum(), is_real.sum())}


def targets_of(batch: Any) -> int:
    """Return the number of target tokens after the first, without padding."""
    return int((batch[1][:, 1:] != PADDING).sum())


def _real(hidden_BTC: Any, targets_BT: Any) -> tuple[Any, Any]:
    # padding is removed on the CPU only: on other devices the host would wait for the number of
    # tokens
    if not hidden_BTC.is_cpu:
        return hidden_BTC, targets_BT
    is_real_BT = targets_BT != PADDING
    return hidden_BTC[is_real_BT], targets_BT[is_real_BT]
