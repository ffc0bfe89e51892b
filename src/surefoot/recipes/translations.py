"""What a trained encoder-decoder says: translations of sentences, how good they are, and `surefoot predict`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import surefoot as sf

_CHARACTERS = ("ja", "ko", "th", "lo", "km", "my", "bo")  # written without spaces, or scored by the character


@dataclass(frozen=True, kw_only=True)
class Predict:
    """How sentences are translated."""

    beam: int | None = None
    """Hypotheses kept open; 1 is greedy search. Absent: as the run has it."""
    length_penalty: float | None = None
    """0 prefers short translations; the larger, the longer. Absent: as the run has it."""
    file: str | None = None
    """A file with one sentence a line; as many lines come out."""
    batch_size: int = 32
    """How many sentences are translated at once; changes memory and speed."""
    device: str = "auto"
    """Where the model runs: "cpu", "cuda", "mps"; auto is the accelerator where there is one."""


def translated(
    model: Any,
    sentences: Sequence[str],
    *,
    source: Any,
    target: Any,
    beam: int,
    length_penalty: float,
    batch_size: int = 32,
    first: int = 0,
) -> list[str]:
    """The translation of each sentence in one line; of an empty one an empty one. `first`: the first one's number, from 0."""
    rows = {place: source.encode(sentence.strip()) for place, sentence in enumerate(sentences) if sentence.strip()}
    most = model.shape.context
    long = next((place for place, row in rows.items() if len(row) >= most), None)
    if long is not None:
        raise sf.DataError(
            f"sentence {first + long + 1} has {len(rows[long])} tokens, and the model takes {most - 1}: {sentences[long][:60]!r} ...\n"
            "  give it in parts, one sentence a line"
        )
    found = sf.beam.searched(
        model,
        [[*row.tolist(), sf.beam.END] for row in rows.values()],
        beam=beam,
        length_penalty=length_penalty,
        batch_size=batch_size,
    )
    by_place = dict(zip(rows, found, strict=True))
    return [
        _line(target.decode(by_place[place].tokens)) if place in by_place else "" for place in range(len(sentences))
    ]


def judged(references: Sequence[str], *, language: str) -> Callable[[list[str]], dict[str, float | str]]:
    """Scores of translations against their references: BLEU and chrF by sacrebleu with their signatures, and exact matches.

    BLEU: Papineni et al. 2002 (https://aclanthology.org/P02-1040), as sacrebleu makes it comparable (Post 2018:
    https://aclanthology.org/W18-6319). chrF: Popovic 2015 (https://aclanthology.org/W15-3049).
    """

    def judge(translations: list[str]) -> dict[str, float | str]:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF

        short = language.replace("-", "_").split("_")[0]
        tokenize = "zh" if short == "zh" else "char" if short in _CHARACTERS else "13a"
        bleu, chrf = BLEU(tokenize=tokenize, force=True), CHRF()
        scores: dict[str, float | str] = {
            "bleu": bleu.corpus_score(translations, [references]).score,
            "chrf": chrf.corpus_score(translations, [references]).score,
        }
        same = sum(one == other for one, other in zip(translations, references, strict=True))
        signatures = {"bleu_signature": str(bleu.get_signature()), "chrf_signature": str(chrf.get_signature())}
        return {**scores, "exact": same / len(references), **signatures}

    return judge


def sentences_of(inputs: Sequence[str], file: str | None) -> list[str]:
    """All lines of the inputs and of the file, or of standard input where there are neither."""
    texts = list(inputs)
    if file is not None:
        texts.append(_read(Path(file)))
    if not inputs and file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise sf.ConfigError(
                'nothing to translate: give a sentence, as in surefoot predict RUN "Two dogs play in the snow.",\n'
                "  a file with one a line (--file), or lines on standard input"
            )
        texts.append(_text(sys.stdin.buffer.read(), "standard input"))
    # a line feed ends a line, and none is missing where the last has none
    return [line.removesuffix("\r") for text in texts if text for line in text.removesuffix("\n").split("\n")]


def answers(
    model: Any, inputs: Sequence[str], asked: Predict, *, source: Any, target: Any, beam: int, length_penalty: float
) -> Iterator[str]:
    """The translations, one a line, as many lines as there are in the inputs; several hundred at a time."""
    sentences = sentences_of(inputs, asked.file)
    at_once = 16 * asked.batch_size  # so that a long file is answered as it goes, and sentences of one length are many
    for first in range(0, len(sentences), max(1, at_once)):
        found = translated(
            model,
            sentences[first : first + at_once],
            source=source,
            target=target,
            beam=beam if asked.beam is None else asked.beam,
            length_penalty=length_penalty if asked.length_penalty is None else asked.length_penalty,
            batch_size=asked.batch_size,
            first=first,
        )
        yield "".join(f"{line}\n" for line in found)


def _line(text: str) -> str:
    """The text in one line."""
    return " ".join(text.split("\n")).replace("\r", " ")


def _read(path: Path) -> str:
    try:
        return _text(path.read_bytes(), str(path))
    except OSError as problem:
        raise sf.DataError(f"{path} cannot be read: {problem.strerror}") from problem


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = problem.object[: problem.start].count(b"\n") + 1
        raise sf.DataError(
            f"{where}, line {line} is not UTF-8 text\n  convert it: iconv -f latin1 -t utf-8"
        ) from problem
