"""Translations by a trained encoder-decoder, their quality, and `surefoot predict`."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import surefoot as sf
from surefoot.config.paths import local_path
from surefoot.tokenizers.subwords import END

_EXAMPLES = 30  # sentences are translated for a report
_CHARACTERS = ("ja", "ko", "th", "lo", "km", "my", "bo")  # written without spaces, or scored by the character


@dataclass(frozen=True, kw_only=True)
class Predict:
    """How sentences are translated."""

    beam_size: int | None = None
    """Number of hypotheses kept open; 1 is greedy search. Default: as in the run."""
    length_penalty: float | None = None
    """0 prefers short translations; larger values prefer longer ones. Default: as in the run."""
    file: str | None = None
    """A file with one sentence in each line; as many lines come out."""
    batch_size: int = 32
    """Number of sentences translated at once. Changes memory and speed only."""
    device: str = "auto"
    """Where the model runs: "cpu", "cuda" or "mps". auto is the accelerator if there is one."""


@dataclass(frozen=True)
class Search:
    """How translations are found: the tokenizers of both sides, and the beam search."""

    source: Any
    target: Any
    beam_size: int
    length_penalty: float


def translate(model: Any, sentences: Sequence[str], search: Search, *, batch_size: int = 32) -> list[str]:
    """The translation of each sentence in one line; of an empty one an empty one. `DataError` for one that is too long."""
    rows = {
        index: search.source.encode(sentence.strip()) for index, sentence in enumerate(sentences) if sentence.strip()
    }
    for index in rows:
        if (why := _too_long(model, search.source, sentences[index])) is not None:
            raise sf.DataError(f"sentence {index + 1} {why}")
    hypotheses = sf.generate.beam_search(
        model,
        [[*row.tolist(), END] for row in rows.values()],
        beam_size=search.beam_size,
        length_penalty=search.length_penalty,
        batch_size=batch_size,
    )
    texts = (search.target.decode(hypothesis.tokens) for hypothesis in hypotheses)
    lines = {index: text.replace("\n", " ").replace("\r", " ") for index, text in zip(rows, texts, strict=True)}
    return [lines.get(index, "") for index in range(len(sentences))]


def corpus_metrics(references: Sequence[str], translations: Sequence[str], *, language: str) -> dict[str, float | str]:
    """BLEU and chrF of translations by sacrebleu, with their signatures; and the fraction that equals its reference.

    BLEU: Papineni et al. 2002 (https://aclanthology.org/P02-1040), as sacrebleu makes it comparable (Post 2018:
    https://aclanthology.org/W18-6319). chrF: Popovic 2015 (https://aclanthology.org/W15-3049).
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    bleu, chrf = BLEU(tokenize=_words(language), force=True), CHRF()
    equal = sum(one == other for one, other in zip(translations, references, strict=True))
    return {
        "bleu": bleu.corpus_score(translations, [references]).score,  # before its signature
        "chrf": chrf.corpus_score(translations, [references]).score,
        "exact": equal / len(references),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def panel(model: Any, pairs: Sequence[tuple[str, str]], search: Search, *, language: str) -> "sf.report.Examples":
    """The best, the worst and some random translations of sentences spread over `pairs`, by the BLEU of each sentence."""
    from sacrebleu.metrics.bleu import BLEU

    spread = pairs[:: max(1, -(-len(pairs) // _EXAMPLES))][:_EXAMPLES]
    translations = translate(model, [source for source, _ in spread], search)
    bleu = BLEU(tokenize=_words(language), effective_order=True)  # without the n-grams that a short sentence has not
    rows = [
        (source, reference, translation, min(100.0, bleu.sentence_score(translation, [reference]).score))
        for (source, reference), translation in zip(spread, translations, strict=True)
    ]
    return sf.report.Examples.best_and_worst(
        f"{len(rows)} of {len(pairs):,} held-out sentences translated", "BLEU of the sentence, 0 to 100", rows
    )


def _words(language: str) -> str:
    short = language.replace("-", "_").split("_")[0]
    return "zh" if short == "zh" else "char" if short in _CHARACTERS else "13a"


@dataclass(frozen=True)
class Sentence:
    """One line to translate, where it stands, and why it cannot be read, where that is so."""

    text: str
    where: str
    refused: str | None = None


def sentences_of(inputs: Sequence[str], file: str | None) -> list[Sentence]:
    """All lines of the inputs (an empty one is an empty line) and of the file; of standard input for "-", or without either.

    A line that is not UTF-8 is empty and says so. `DataError` for a file that cannot be read, or is UTF-16.
    """
    piped = list(inputs) == ["-"]
    sentences = [
        Sentence(line.removesuffix("\r"), f"input {number}")
        for number, text in enumerate([] if piped else inputs, start=1)
        for line in text.removesuffix("\n").split("\n")
    ]
    if file is not None:
        try:
            sentences += _lines(local_path(file, setting="file").read_bytes(), file)
        except OSError as problem:
            raise sf.DataError(f"{file} cannot be read: {problem.strerror}") from problem
    if piped or (not inputs and file is None):
        if sys.stdin is None or (sys.stdin.isatty() and not piped):
            raise sf.ConfigError(
                'nothing to translate: give a sentence, as in surefoot predict RUN "Two dogs play in the snow.",\n'
                "  a file with one a line (--file), or lines on standard input"
            )
        sentences += _lines(sys.stdin.buffer.read(), "standard input")
    return sentences


def answers(model: Any, inputs: Sequence[str], options: Predict, search: Search) -> Iterator[str]:
    """The translations, one per line; empty for inputs that fail, which a `DataError` counts at the end."""
    sentences = sentences_of(inputs, options.file)
    own = {name: getattr(options, name) for name in ("beam_size", "length_penalty")}
    search = replace(search, **{name: value for name, value in own.items() if value is not None})
    # a long file is answered as it goes; sentences of one length are many
    failed, at_once = 0, max(1, 16 * options.batch_size)
    for first in range(0, len(sentences), at_once):
        texts = []
        for sentence in sentences[first : first + at_once]:
            why = sentence.refused or _too_long(model, search.source, sentence.text)
            if why is not None:
                failed += 1
                print(f"warning: {sentence.where} {why}", file=sys.stderr)
            texts.append("" if why is not None else sentence.text)
        yield "".join(f"{line}\n" for line in translate(model, texts, search, batch_size=options.batch_size))
    if failed:
        raise sf.DataError(
            f"{failed:,} of {len(sentences):,} line{'s' * (len(sentences) != 1)} could not be translated: empty in the answers,"
            " named in the warnings"
        )


def _too_long(model: Any, source: Any, text: str) -> str | None:
    """Why a sentence is not translated; None where the model takes it."""
    limit, tokens = model.shape.context - 1, len(source.encode(text.strip()))  # an end follows
    if tokens <= limit:
        return None
    return f"has {tokens} tokens, and the model takes {limit}: {text[:60]!r} ...: give it in parts, one sentence a line"


def _lines(data: bytes, where: str) -> list[Sentence]:
    from surefoot.data.text.files import decode_utf8, is_utf_16

    if is_utf_16(data):
        decode_utf8(data, where)
    sentences = []
    # a line feed ends a line, and none is missing where the last has none
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n") if data else [], start=1):
        position = f"{where}, line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\r")
            sentences.append(Sentence(text, position))
        except UnicodeDecodeError:
            sentences.append(Sentence("", position, "is not UTF-8 text"))
    return sentences
