"""The sentence pairs of one file of TSV or JSON lines, or of two files with aligned lines."""

import json
import unicodedata
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from surefoot.data.scan import COMPRESSED, kind_of, printable
from surefoot.data.text_files import decode_utf8, not_json, open_unpacked, text_with_nul
from surefoot.errors import DataError, Setting
from surefoot.recipes.readers.pairs.columns import header_columns, read_table, table_as_before
from surefoot.recipes.readers.text.corpora import without_text
from surefoot.tokenizers.tokenizer import encodable

Sentences = list[tuple[str, str]]  # a source and its translation
OnEmpty = Literal["error", "skip"]  # treatment of pairs with an empty side

OTHER_LANGUAGES = (
    "for other languages:",
    Setting("data.source", "..."),
    Setting("data.target", "..."),
)
_KEYS_SHOWN = 6
_SIDES = ("source", "target")
# letters and marks without ink: fillers of Hangul, the empty pattern of Braille
_BLANK_LETTERS = "\u115f\u1160\u2800\u3164\uffa0\ufe0e\ufe0f"


@dataclass(frozen=True)
class Origin:
    """The origin of sentence pairs: the file with the sources, and the line of each pair, counted
    from 1.
    """

    file: Path
    lines: Sequence[int]

    def of(self, index: int) -> str:
        return f"{self.file}, line {self.lines[index]}"


class Part(NamedTuple):
    """The pairs of one part, such as training, and where they come from. `notes` say how its files
    were read.
    """

    pairs: Sentences | None = None
    origin: Origin | None = None
    left_out: int = 0
    notes: Sequence[str] = ()
    files: Sequence[Path] = ()


@dataclass(frozen=True)
class PairReading:
    """The languages of the pairs, and how their files are read."""

    source: str
    target: str
    on_empty: OnEmpty
    as_meant: bool  # False for a run that began earlier


def is_blank(text: str) -> bool:
    """Return True for text without anything to see: white space, and characters of no width.

    >>> is_blank(" \\u200b\\ufeff"), is_blank("\\u200ba")
    (True, False)
    """
    for char in text:
        is_white = char.isspace() or char in _BLANK_LETTERS
        if not is_white and unicodedata.category(char) not in ("Cf", "Cc"):
            return False
    return True


def plain_name(name: str, reading: PairReading) -> str:
    """Return the name of a file without `.gz` or `.zst`, and without case."""
    if not reading.as_meant:
        return name.removesuffix(".gz")
    name = name.lower()
    for end in COMPRESSED:
        name = name.removesuffix(end)
    return name


def read_both(stem: Path, sides: Sequence[Path | None], reading: PairReading) -> Part:
    """Return the pairs of two files with aligned lines. `stem` is their path without the language.
    Raises `DataError` if one is None, or if their lines do not correspond.
    """
    files = list[Path]()
    for language, file in zip((reading.source, reading.target), sides, strict=True):
        if file is None:
            names = [
                plain_name(other.name, reading) for other in stem.parent.glob(f"{stem.name}.*")
            ]
            others = sorted({name.removeprefix(f"{stem.name}.") for name in names})
            raise DataError(
                "pairs-language-missing",
                problem=f"{stem}.{language} is missing (compressed or not);"
                f" {stem.name} is available in: {', '.join(others)}",
                remedy=OTHER_LANGUAGES,
                language=language,
                available=others,
            )
        files.append(file)
    source_file, target_file = files
    sources = _lines(source_file, reading)
    targets = _lines(target_file, reading)
    # blank lines at the end of a file are no pairs
    rows = max(_lines_with_text(sources), _lines_with_text(targets))
    sources = sources[:rows]
    targets = targets[:rows]
    if len(sources) != len(targets):
        raise DataError(
            "pairs-line-counts",
            problem=f"{source_file} has {len(sources)} lines, but {target_file} has {len(targets)}",
            reason="line n of one must translate line n of the other, and only a line feed ends a"
            " line",
            remedy="did a program also split at other line breaks in one file?",
            lines=[len(sources), len(targets)],
        )
    pairs = [(one.strip(), other.strip()) for one, other in zip(sources, targets, strict=True)]
    numbers = range(1, rows + 1)
    notes = list[str]()
    if rows and reading.as_meant:
        header = header_columns(
            pairs[0], f"{source_file}, line 1", source=reading.source, target=reading.target
        )
        if header is not None:
            pairs = pairs[1:]
            numbers = numbers[1:]
            notes.append(f"{stem.name}: line 1 is a header")
    return _complete(pairs, numbers, files, notes, reading)


def _lines_with_text(lines: Sequence[str]) -> int:
    count = len(lines)
    while count and not lines[count - 1].strip():
        count -= 1
    return count


def read_pair_table(path: Path, reading: PairReading) -> Part:
    """Return the pairs of one file of TSV or JSON lines. Raises `DataError` with the line of what
    is no pair.
    """
    lines = _lines(path, reading)
    if not _lines_with_text(lines):
        raise without_text(path)
    pairs = Sentences()
    numbers = list[int]()
    notes = list[str]()
    if kind_of(path) == ".jsonl":
        unused = Counter[str]()
        for number, line in enumerate(lines, start=1):
            if line.strip():
                pairs.append(_of_json(line, f"{path}, line {number}", reading, unused))
                numbers.append(number)
        if unused:
            keys = ", ".join(printable(key) for key, _ in unused.most_common(_KEYS_SHOWN))
            notes.append(f"{printable(path.name)}: keys that are not used: {keys}")
    else:
        if reading.as_meant:
            table = read_table(lines, str(path), source=reading.source, target=reading.target)
        else:
            table = table_as_before(lines, source=reading.source, target=reading.target)
        for number, row in table.rows:
            pairs.append(_of_row(row, f"{path}, line {number}", columns=table.columns))
            numbers.append(number)
        if table.notes:
            notes.append(f"{printable(path.name)}: {', '.join(table.notes)}")
    return _complete(pairs, numbers, (path, path), notes, reading)


def _of_row(row: Sequence[str], where: str, *, columns: tuple[int, int]) -> tuple[str, str]:
    if len(row) <= max(columns):
        count = "1 column" if len(row) == 1 else f"{len(row)} columns"
        raise DataError(
            "pairs-column-missing",
            problem=f"{where}: {count}; expected a source and a target, separated by a tab",
            reason=f"it is {' | '.join(row)[:60]!r}",
            where=where,
            columns=len(row),
        )
    return row[columns[0]].strip(), row[columns[1]].strip()


def _of_json(line: str, where: str, reading: PairReading, unused: Counter[str]) -> tuple[str, str]:
    """Return the pair of a line, and count the keys that are not used."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise not_json(where, line, problem) from problem
    inner = record.get("translation", record) if isinstance(record, dict) else None
    languages = (reading.source, reading.target)
    if inner is None and isinstance(record, dict):  # {"translation": null}
        inner = dict.fromkeys(languages)
    if not isinstance(inner, dict) or not all(language in inner for language in languages):
        keys = f"none, because it is {line[:40]!r}"
        if isinstance(inner, dict):
            keys = ", ".join(map(str, inner))
        raise DataError(
            "pairs-keys-missing",
            problem=f"{where}: no text under {reading.source!r} and {reading.target!r};"
            f" its keys: {keys}",
            remedy=OTHER_LANGUAGES,
            where=where,
        )
    unused.update(key for key in inner if key not in languages)
    if inner is not record:
        unused.update(key for key in record if key != "translation")
    source = _text(inner[reading.source], reading.source, where)
    target = _text(inner[reading.target], reading.target, where)
    return source, target


def _text(value: object, language: str, where: str) -> str:
    """Return a value as text: "" for null, and for NaN, which is pandas' null."""
    if value is None or value != value:  # noqa: PLR0124
        return ""
    if not isinstance(value, str):
        raise DataError(
            "pairs-value-not-text",
            problem=f"{where}: the value of {language!r} is not text: {json.dumps(value)[:60]}",
            remedy="put it in quotes, or remove the line",
            where=where,
            language=language,
        )
    try:
        return encodable(value).strip()
    except DataError as problem:
        raise problem.inside(where) from None


def _lines(path: Path, reading: PairReading) -> list[str]:
    with open_unpacked(path) as file:
        data = file.read()
    if not data.removeprefix(BOM_UTF8):
        raise without_text(path)
    text = decode_utf8(data, str(path))
    if reading.as_meant and "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise text_with_nul(f"{path}, line {line}")
    return text.removesuffix("\n").split("\n")


def _complete(
    pairs: Sentences,
    numbers: Sequence[int],
    files: Sequence[Path],
    notes: Sequence[str],
    reading: PairReading,
) -> Part:
    """Return the pairs with text on both sides; refuse the others, or leave them out."""
    is_empty = is_blank if reading.as_meant else _is_empty
    complete = Sentences()
    lines = list[int]()
    wrong = list[int]()
    for index, (number, pair) in enumerate(zip(numbers, pairs, strict=True)):
        if reading.as_meant and any("\0" in side for side in pair):  # escaped in JSON
            raise text_with_nul(f"{files[0]}, line {number}")
        if any(map(is_empty, pair)):
            wrong.append(index)
        else:
            complete.append(pair)
            lines.append(number)
    if wrong and reading.on_empty == "error":
        problems = list[str]()
        for index in wrong[:3]:
            pair = pairs[index]
            side = 0 if is_empty(pair[0]) else 1
            problems.append(
                f"{files[side]}, line {numbers[index]}: the {_SIDES[side]} is empty, and its"
                f" {_SIDES[1 - side]} is {pair[1 - side][:60]!r}"
            )
        many = "one pair has" if len(wrong) == 1 else f"{len(wrong):,} pairs have"
        raise DataError(
            "pairs-side-empty",
            problem="\n".join(problems),
            reason=f"{many} an empty side",
            remedy=["remove them on both sides, or skip them:", Setting("data.on_empty", "skip")],
            count=len(wrong),
            lines=[numbers[index] for index in wrong[:3]],
        )
    if not complete:
        raise DataError(
            "pairs-none-complete",
            problem=f"{files[0]}: no pair has text on both sides",
            path=files[0],
        )
    return Part(complete, Origin(files[0], lines), len(wrong), notes, files)


def _is_empty(text: str) -> bool:
    return not text
