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
# languages that are written without spaces, or scored by character
_CHARACTERS = ("ja", "ko", "th", "lo", "km", "my", "bo")


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
class TranslationSearch:
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
    model: Any, sentences: Sequence[str], search: TranslationSearch, *, batch_size: int = 32
) -> list[str]:
    """Translate each sentence to one line; an empty sentence stays empty. Raises `DataError` for a
    sentence that is too long.
    """
    rows: dict[int, list[int]] = {}
    for index, sentence in enumerate(sentences):
        if not sentence.strip():
            continue
        tokens = search.source.encode(sentence.strip()).tolist()
        why = _too_long(model, len(tokens), sentence)
        if why is not None:
            raise sf.DataError(
                "sentence-too-long",
                problem=f"sentence {index + 1} {why}",
                sentence=index + 1,
            )
        rows[index] = [*tokens, END]
    hypotheses = sf.generate.beam_search(
        model,
        [*rows.values()],
        beam_size=search.beam_size,
        length_penalty=search.length_penalty,
        batch_size=batch_size,
    )
    lines = [""] * len(sentences)
    for index, hypothesis in zip(rows, hypotheses, strict=True):
        text = search.target.decode(hypothesis.tokens)
        lines[index] = text.replace("\n", " ").replace("\r", " ")
    return lines


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

    equal = sum(one == other for one, other in zip(translations, references, strict=True))
    # a signature is known after its score
    bleu = BLEU(tokenize=_words(language), force=True)
    bleu_score = bleu.corpus_score(translations, [references]).score
    chrf = CHRF()
    chrf_score = chrf.corpus_score(translations, [references]).score
    return {
        "bleu": bleu_score,
        "chrf": chrf_score,
        "exact": equal / len(references),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def panel(
    model: Any, pairs: Sequence[tuple[str, str]], search: TranslationSearch, *, language: str
) -> "sf.report.Examples":
    """Return a panel of the best, the worst and some random translations of sentences in `pairs`,
    by sentence BLEU.
    """
    from sacrebleu.metrics.bleu import BLEU

    spread = pairs[:: max(1, -(-len(pairs) // _EXAMPLES))][:_EXAMPLES]
    translations = translate(model, [source for source, _ in spread], search)
    # effective_order ignores n-grams longer than the sentence
    bleu = BLEU(tokenize=_words(language), effective_order=True)
    rows = []
    for (source, reference), translation in zip(spread, translations, strict=True):
        score = bleu.sentence_score(translation, [reference]).score
        rows.append((source, reference, translation, min(100.0, score)))
    return sf.report.Examples.best_and_worst(
        f"{len(rows)} of {len(pairs):,} validation sentences translated",
        "sentence BLEU, 0 to 100",
        rows,
    )


def _words(language: str) -> str:
    """Return how sacrebleu cuts texts of a language into words."""
    short = language.replace("-", "_").split("_")[0]
    if short == "zh":
        return "zh"
    if short in _CHARACTERS:
        return "char"
    return "13a"


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
    sentences = []
    is_piped = list(inputs) == ["-"]
    if not is_piped:
        for number, text in enumerate(inputs, start=1):
            for line in text.removesuffix("\n").split("\n"):
                sentences.append(Sentence(line.removesuffix("\r"), f"input {number}"))
    if file is not None:
        sentences += _lines(read_inputs(local_path(file, setting="file")), file)
    has_nothing = not inputs and file is None
    if is_piped or has_nothing:
        waits_for_keys = has_nothing and sys.stdin is not None and sys.stdin.isatty()
        if sys.stdin is None or waits_for_keys:
            what = "a sentence, a file with one sentence per line, or lines on standard input"
            raise nothing_to_predict(what, example='"Two dogs play in the snow."')
        sentences += _lines(sys.stdin.buffer.read(), "standard input")
    return sentences


def answers(
    model: Any, inputs: Sequence[str], options: Predict, search: TranslationSearch
) -> Iterator[str]:
    """Yield the translations, one per line. Failed lines are empty, and a final `DataError` counts
    them.
    """
    sentences = sentences_of(inputs, options.file)
    if options.beam_size is not None:
        search = replace(search, beam_size=options.beam_size)
    if options.length_penalty is not None:
        search = replace(search, length_penalty=options.length_penalty)
    note(f"translated by {search.in_words} (--beam-size, --length-penalty)")
    # a long file is translated in parts, large enough to batch sentences of equal length
    at_once = max(1, 16 * options.batch_size)
    failed = 0
    for first in range(0, len(sentences), at_once):
        texts = []
        for sentence in sentences[first : first + at_once]:
            tokens = len(search.source.encode(sentence.text.strip()))
            why = sentence.refused or _too_long(model, tokens, sentence.text)
            if why is None:
                texts.append(sentence.text)
            else:
                texts.append("")
                failed += 1
                print(f"warning: {sentence.where} {why}", file=sys.stderr)
        lines = translate(model, texts, search, batch_size=options.batch_size)
        yield "".join(f"{line}\n" for line in lines)
    if failed:
        plural = "s" * (len(sentences) != 1)
        raise sf.DataError(
            "lines-not-translated",
            problem=f"{failed:,} of {len(sentences):,} line{plural} could not be translated",
            reason="they are empty in the output and named in the warnings",
            failed=failed,
            lines=len(sentences),
        )


def _too_long(model: Any, tokens: int, text: str) -> str | None:
    limit = model.shape.context - 1  # one position is for the end token
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
    if not data:
        return []
    sentences = []
    # the last line may lack its line feed
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n"), start=1):
        position = f"{where}, line {number}"
        encoding = "utf-8-sig" if number == 1 else "utf-8"
        try:
            text = line.decode(encoding).removesuffix("\r")
        except UnicodeDecodeError:
            sentences.append(Sentence("", position, "is not UTF-8 text"))
        else:
            sentences.append(Sentence(text, position))
    return sentences
