"""Translations by a trained encoder-decoder, their metrics, and `surefoot predict`."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import surefoot as sf
from surefoot.config.paths import local_path
from surefoot.recipes.optimizer_settings import note
from surefoot.recipes.shared_errors import nothing_to_predict, read_inputs
from surefoot.tokenizers.subwords import END

_EXAMPLES = 30  # sentences translated for a report
_CHARACTERS = (
    "ja",
    "ko",
    "th",
    "lo",
    "km",
    "my",
    "bo",
)  # written without spaces, or scored by character


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Options for the translation of sentences."""

    beam_size: int | None = None
    """Beam size; 1 is greedy search. Default: the run's."""
    length_penalty: float | None = None
    """Length penalty. 0 prefers short translations; larger values prefer longer ones. Default: the
    run's.
    """
    file: str | None = None
    """A file with one sentence per line. The output has the same number of lines."""
    batch_size: int = 32
    """Number of sentences translated at once. Changes only memory and speed."""
    device: str = "auto"
    """Device of the model: "cpu", "cuda" or "mps". auto is the accelerator if there is one."""


@dataclass(frozen=True)
class Search:
    """The tokenizers of both languages, and the settings of the beam search."""

    source: Any
    target: Any
    beam_size: int
    length_penalty: float

    @property
    def in_words(self) -> str:
        """How translations are searched."""
        if self.beam_size == 1:
            return "the likeliest token at each place (1 beam)"
        return f"beam search with {self.beam_size} beams, length penalty {self.length_penalty:g}"


def translate(
    model: Any, sentences: Sequence[str], search: Search, *, batch_size: int = 32
) -> list[str]:
    """Translate each sentence to one line; an empty sentence stays empty. Raises `DataError` for a
    sentence that is too long.
    """
    rows = {
        index: search.source.encode(sentence.strip())
        for index, sentence in enumerate(sentences)
        if sentence.strip()
    }
    for index in rows:
        if (why := _too_long(model, search.source, sentences[index])) is not None:
            raise sf.DataError(
                "sentence-too-long",
                problem=f"sentence {index + 1} {why}",
                sentence=index + 1,
            )
    hypotheses = sf.generate.beam_search(
        model,
        [[*row.tolist(), END] for row in rows.values()],
        beam_size=search.beam_size,
        length_penalty=search.length_penalty,
        batch_size=batch_size,
    )
    texts = (search.target.decode(hypothesis.tokens) for hypothesis in hypotheses)
    lines = {
        index: text.replace("\n", " ").replace("\r", " ")
        for index, text in zip(rows, texts, strict=True)
    }
    return [lines.get(index, "") for index in range(len(sentences))]


def corpus_metrics(
    references: Sequence[str], translations: Sequence[str], *, language: str
) -> dict[str, float | str]:
    """Return sacrebleu's BLEU and chrF with their signatures, and the fraction of translations
    equal to their reference.

    BLEU: Papineni et al. 2002 (https://aclanthology.org/P02-1040), as standardized by Post 2018
    (https://aclanthology.org/W18-6319). chrF: Popovic 2015 (https://aclanthology.org/W15-3049).
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    bleu, chrf = BLEU(tokenize=_words(language), force=True), CHRF()
    equal = sum(one == other for one, other in zip(translations, references, strict=True))
    return {
        "bleu": bleu.corpus_score(
            translations, [references]
        ).score,  # must be computed before its signature
        "chrf": chrf.corpus_score(translations, [references]).score,
        "exact": equal / len(references),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def panel(
    model: Any, pairs: Sequence[tuple[str, str]], search: Search, *, language: str
) -> "sf.report.Examples":
    """Return a panel of the best, the worst and some random translations of sentences in `pairs`,
    by sentence BLEU.
    """
    from sacrebleu.metrics.bleu import BLEU

    spread = pairs[:: max(1, -(-len(pairs) // _EXAMPLES))][:_EXAMPLES]
    translations = translate(model, [source for source, _ in spread], search)
    bleu = BLEU(
        tokenize=_words(language), effective_order=True
    )  # ignores n-grams longer than the sentence
    rows = [
        (
            source,
            reference,
            translation,
            min(100.0, bleu.sentence_score(translation, [reference]).score),
        )
        for (source, reference), translation in zip(spread, translations, strict=True)
    ]
    return sf.report.Examples.best_and_worst(
        f"{len(rows)} of {len(pairs):,} validation sentences translated",
        "sentence BLEU, 0 to 100",
        rows,
    )


def _words(language: str) -> str:
    short = language.replace("-", "_").split("_")[0]
    return "zh" if short == "zh" else "char" if short in _CHARACTERS else "13a"


@dataclass(frozen=True)
class Sentence:
    """A line to translate, its position in the input, and the reason if it cannot be read."""

    text: str
    where: str
    refused: str | None = None


def sentences_of(inputs: Sequence[str], file: str | None) -> list[Sentence]:
    """Return all lines of the inputs and of the file, or of standard input for "-" or without
    inputs. An empty input is an empty line. A line that is not UTF-8 becomes empty and keeps the
    reason. Raises `DataError` for a file that cannot be read or is UTF-16."""
    piped = list(inputs) == ["-"]
    sentences = [
        Sentence(line.removesuffix("\r"), f"input {number}")
        for number, text in enumerate([] if piped else inputs, start=1)
        for line in text.removesuffix("\n").split("\n")
    ]
    if file is not None:
        sentences += _lines(read_inputs(local_path(file, setting="file")), file)
    if piped or (not inputs and file is None):
        if sys.stdin is None or (sys.stdin.isatty() and not piped):
            what = "a sentence, a file with one sentence per line, or lines on standard input"
            raise nothing_to_predict(what, example='"Two dogs play in the snow."')
        sentences += _lines(sys.stdin.buffer.read(), "standard input")
    return sentences


def answers(model: Any, inputs: Sequence[str], options: Predict, search: Search) -> Iterator[str]:
    """Yield the translations, one per line. Failed lines are empty, and a final `DataError` counts
    them.
    """
    sentences = sentences_of(inputs, options.file)
    own = {name: getattr(options, name) for name in ("beam_size", "length_penalty")}
    search = replace(search, **{name: value for name, value in own.items() if value is not None})
    note(f"translated by {search.in_words} (--beam-size, --length-penalty)")
    # a long file is translated in parts, large enough to batch sentences of equal length
    failed, at_once = 0, max(1, 16 * options.batch_size)
    for first in range(0, len(sentences), at_once):
        texts = []
        for sentence in sentences[first : first + at_once]:
            why = sentence.refused or _too_long(model, search.source, sentence.text)
            if why is not None:
                failed += 1
                print(f"warning: {sentence.where} {why}", file=sys.stderr)
            texts.append("" if why is not None else sentence.text)
        yield "".join(
            f"{line}\n" for line in translate(model, texts, search, batch_size=options.batch_size)
        )
    if failed:
        plural = "s" * (len(sentences) != 1)
        raise sf.DataError(
            "lines-not-translated",
            problem=f"{failed:,} of {len(sentences):,} line{plural} could not be translated",
            reason="they are empty in the output and named in the warnings",
            failed=failed,
            lines=len(sentences),
        )


def _too_long(model: Any, source: Any, text: str) -> str | None:
    limit, tokens = (
        model.shape.context - 1,
        len(source.encode(text.strip())),
    )  # one position is for the end token
    if tokens <= limit:
        return None
    return (
        f"has {tokens} tokens, and the model takes {limit}: {text[:60]!r} ...:"
        " split it, one sentence per line"
    )


def _lines(data: bytes, where: str) -> list[Sentence]:
    from surefoot.data.text_files import decode_utf8, is_utf_16

    if is_utf_16(data):
        decode_utf8(data, where)
    sentences = []
    # the last line may lack its line feed
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n") if data else [], start=1):
        position = f"{where}, line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\r")
            sentences.append(Sentence(text, position))
        except UnicodeDecodeError:
            sentences.append(Sentence("", position, "is not UTF-8 text"))
    return sentences
