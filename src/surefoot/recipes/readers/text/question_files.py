"""Multiple-choice questions from JSON lines: HellaSwag, ARC, PIQA, OpenBookQA, COPA, WinoGrande and
LAMBADA.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.config.paths import local_path
from surefoot.data.order import permutation
from surefoot.data.scan import no_such
from surefoot.data.text_files import not_an_object
from surefoot.errors import DataError, out_of_range
from surefoot.recipes.readers.text.documents import json_lines
from surefoot.recipes.readers.text.encode import RefusedTextError, encode_texts
from surefoot.recipes.readers.text.multiple_choice import Question, without_questions
from surefoot.seeding import stream_key
from surefoot.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class _Record:
    contexts: Sequence[str]
    endings: Sequence[str]  # as many as contexts, each with its leading space
    label: int
    source: str


# keys of the contexts (a text or a list), of the endings (likewise), and of the index of the right
# ending
_LAYOUTS: tuple[tuple[str, ...], ...] = (
    ("ctx", "endings", "label"),  # HellaSwag
    ("query", "choices", "gold"),  # ARC, PIQA, OpenBookQA, COPA
    ("context_options", "continuation", "gold"),  # WinoGrande
    ("context", "continuation"),  # LAMBADA
)


def load_questions(
    path: Path | str, tokenizer: Tokenizer, *, number: int | None = None, seed: int = 0
) -> list[Question]:
    """Load the questions of a file as tokens, in file order; if `number` is given, `seed` chooses
    at most `number` questions.

    The file has one JSON object per line, in UTF-8, plain or gzipped. The keys are
    `ctx, endings, label` (HellaSwag), `query, choices, gold`, `context_options, continuation, gold`
    (one ending after several contexts) or `context, continuation` (one ending). Other keys are
    ignored. Endings are encoded separately; a space is inserted if no white space separates context
    and ending. Raises `DataError` with file and line for any invalid line of the file.

    >>> import tempfile
    >>> from surefoot.tokenizers import ByteTokenizer
    >>> path = Path(tempfile.mkdtemp()) / "questions.jsonl"
    >>> _ = path.write_text('{"query": "1 + 1 =", "choices": ["2", "3"], "gold": 0}')
    >>> (question,) = load_questions(path, ByteTokenizer())
    >>> bytes(question.endings[question.label].tolist())
    b' 2'
    """
    path = local_path(path, setting="path")
    if number is not None and number < 1:
        raise out_of_range("number", number, "1 question or more")
    if not path.is_file():
        raise no_such(path, kind="file")
    layout: tuple[str, ...] = ()
    records: list[_Record] = []
    for source, record in json_lines(path):
        if not isinstance(record, dict):
            raise not_an_object(source, record)
        layout = layout or _layout(record, source)
        records.append(_record(record, layout, source))
        endings = len(records[-1].endings)
        expected = len(records[0].endings)
        if endings != expected:
            raise DataError(
                "question-choices-differ",
                problem=f"{source} has {endings} endings, and earlier questions {expected}",
                reason="questions with different numbers of choices have no common chance accuracy",
                remedy="put them into separate files",
                where=source,
                endings=endings,
                expected=expected,
            )
    if not records:
        raise without_questions(path)
    if number is not None and number < len(records):
        chosen = permutation(stream_key(seed, "questions"), len(records), np.arange(number))
        records = [records[index] for index in sorted(chosen.tolist())]
    return _encode(records, tokenizer)


def _layout(record: dict[str, Any], source: str) -> tuple[str, ...]:
    best = max(_LAYOUTS, key=lambda layout: sum(key in record for key in layout) / len(layout))
    if not any(key in record for key in best):
        known = "; ".join(map(", ".join, _LAYOUTS))
        raise DataError(
            "question-keys-unknown",
            problem=f"{source} has the keys {_list_keys(record)}",
            reason=f"the keys of a question must be one of: {known}",
            where=source,
            keys=[*record],
        )
    return best


def _record(record: dict[str, Any], layout: tuple[str, ...], source: str) -> _Record:
    missing = [key for key in layout if key not in record]
    if missing:
        raise DataError(
            "question-keys-missing",
            problem=f"{source} has no {', no '.join(map(repr, missing))}; its keys are"
            f" {_list_keys(record)}",
            remedy=f"required keys: {', '.join(layout)}",
            where=source,
            missing=missing,
        )
    context_key, ending_key, *label_keys = layout
    contexts = _texts(record[context_key], context_key, source)
    endings = _texts(record[ending_key], ending_key, source)
    number = max(len(contexts), len(endings))
    if min(len(contexts), len(endings)) not in (1, number):
        raise DataError(
            "question-texts-unpaired",
            problem=f"{source}: {context_key!r} has {len(contexts)} texts and {ending_key!r} has"
            f" {len(endings)}, so they cannot be paired",
            remedy="give a single text for one of the two, or as many of both",
            where=source,
            contexts=len(contexts),
            endings=len(endings),
        )
    right = 0
    for key in label_keys:
        if number < 2:
            raise DataError(
                "question-of-one-ending",
                problem=f"{source} has {number} ending, and a question needs at least 2",
                where=source,
            )
        right = _right(record[key], key, source, number=number)
    if not label_keys and number > 1:
        raise DataError(
            "question-without-answer-key",
            problem=f"{source} has several endings, and no key for the right one",
            where=source,
        )
    if len(contexts) == 1:
        contexts = contexts * number
    if len(endings) == 1:
        endings = endings * number
    spaced = []
    for prefix, ending in zip(contexts, endings, strict=True):
        has_space = prefix[-1].isspace() or ending[0].isspace()
        spaced.append(ending if has_space else f" {ending}")
    return _Record(contexts, spaced, right, source)


def _texts(value: Any, key: str, source: str) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise DataError(
            "question-text-empty",
            problem=f"{source}: {key!r} is {_cut(json.dumps(value))}: expected text that is not"
            " empty",
            where=source,
            key=key,
        )
    return list(texts)


def _right(value: Any, key: str, source: str, *, number: int) -> int:
    # some copies of HellaSwag have a numeric string
    is_text = isinstance(value, str) and value.isascii() and value.isdigit()
    is_number = isinstance(value, int) and not isinstance(value, bool)
    index = int(value) if is_text or is_number else -1
    if not 0 <= index < number:
        is_hidden = value in ("", None, -1)
        hint = "is it a test set without answers? The validation set has answers"
        raise DataError(
            "question-answer-invalid",
            problem=f"{source}: {key!r} is {_cut(json.dumps(value))}: expected an index from 0 to"
            f" {number - 1}",
            reason=hint if is_hidden else None,
            where=source,
            key=key,
            value=value,
        )
    return index


def _encode(records: Sequence[_Record], tokenizer: Tokenizer) -> list[Question]:
    sources: dict[str, str] = {}  # text -> its first source
    for record in records:
        for text in (*record.contexts, *record.endings):
            sources.setdefault(text, record.source)
    try:
        encoded = encode_texts(tokenizer, [*sources])
    except RefusedTextError as problem:
        source = [*sources.values()][problem.index]
        raise problem.why.inside(source) from problem
    tokens = dict(zip(sources, encoded, strict=True))
    questions = []
    for record in records:
        contexts = [tokens[text] for text in record.contexts]
        endings = [tokens[text] for text in record.endings]
        questions.append(Question(contexts, endings, record.label, record.source))
    return questions


def _list_keys(record: dict[str, Any]) -> str:
    return _cut(", ".join(record)) or "none"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
