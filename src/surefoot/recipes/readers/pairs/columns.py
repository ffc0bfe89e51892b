"""Tables of sentence pairs: which columns hold the pairs, whether the first line is a header, and
whether cells stand in the quotes of a spreadsheet.
"""

import csv
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from surefoot.errors import DataError, Setting
from surefoot.recipes.readers.pairs.languages import language_code

# words of headers: above sources, above targets, above either, and above ids and facts of a pair
_SOURCES = "source src input original prompt instruction question"
_TARGETS = "target tgt trg output translation translated reference completion response answer"
_TEXTS = "text sentence sentences segment phrase content column language string line word words"
_FACTS = (
    "id ids no nr num number index idx key row score similarity distance url domain corpus"
    " license attribution user username date lang locale split"
)
_SOURCE = frozenset(_SOURCES.split())
_TARGET = frozenset(_TARGETS.split())
_OF_TEXT = _SOURCE | _TARGET | frozenset(_TEXTS.split())
_OF_ROWS = frozenset(_FACTS.split())
_WORD = re.compile(r"[^\W_]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")  # sourceText
_SIDE_NUMBER = re.compile(r"[0-9]$")  # sentence1, text2
# addresses, domains, names of files, numbers, and ids with digits: one word without white space
_ID = re.compile(r"https?://.*|[\w-]+(\.[\w-]+)+/?|[!-~]*[0-9][!-~]*", re.ASCII)
_ASCII_WORD = re.compile(r"[!-~]+")
_LOOKED_AT = 1000  # rows that decide whether a column holds text
_QUOTED = re.compile(r'"(?:[^"]|"")*"')


@dataclass(frozen=True)
class PairTable:
    """The rows of a table, each with the number of its line, and the columns of source and target.
    `notes` say how the table was read.
    """

    rows: list[tuple[int, list[str]]]
    columns: tuple[int, int]
    notes: list[str]


def read_table(lines: Sequence[str], where: str, *, source: str, target: str) -> PairTable:
    """Return the table in the lines of a file, without blank lines and without its header.

    Raises `DataError` if it is not clear which columns hold the pairs.
    """
    rows = _plain_rows(lines)
    notes = []
    if any('"' in line for line in lines):
        quoted = _line_in_quotes(rows)
        unquoted = _rows_in_quotes(lines, rows, quoted)
        if unquoted is not None:
            rows = unquoted
            notes.append("the quotes of a spreadsheet are taken off")
        elif quoted is not None:
            notes.append(
                f"line {quoted} has the quotes of a spreadsheet, which stay: others have not"
            )
    if not rows:  # cells of empty quotes only
        return PairTable([], (0, 1), notes)
    first_line, first = rows[0]
    columns = header_columns(first, f"{where}, line {first_line}", source=source, target=target)
    if columns is not None and any(_repeats(rows[:2], column) for column in columns):
        columns = None  # of the names of languages, in every row
    has_header = columns is not None
    if columns is None:
        columns, has_header = _text_columns([row for _, row in rows], where)
    if has_header:
        rows = rows[1:]
        notes.append(f"line {first_line} is a header")
    if len(first) > 2:
        notes.append(f"columns {columns[0] + 1} and {columns[1] + 1} of {len(first)} are used")
    longer = [number for number, row in rows if len(row) > len(first)]
    if longer:
        count = "1 row has" if len(longer) == 1 else f"{len(longer):,} rows have"
        notes.append(f"{count} more columns than line {first_line}, as line {longer[0]}")
    return PairTable(rows, columns, notes)


def table_as_before(lines: Sequence[str], *, source: str, target: str) -> PairTable:
    """Return the table as runs read it that began before behavior 10: only a header with exactly
    the names of both languages is known.
    """
    rows = _plain_rows(lines)
    names = rows[0][1]
    if source in names and target in names:
        return PairTable(rows[1:], (names.index(source), names.index(target)), [])
    return PairTable(rows, (0, 1), [])


def header_columns(
    cells: Sequence[str], where: str, *, source: str, target: str
) -> tuple[int, int] | None:
    """Return the columns of source and target if these cells are a header, None if they are a pair.

    Raises `DataError` if they may be either, or name other languages.

    >>> header_columns(["id", "German", "English"], "line 1", source="en", target="de")
    (2, 1)
    >>> header_columns(["Good morning", "Guten Morgen"], "line 1", source="en", target="de")
    """
    # pandas' index has no name, and its columns have numbers
    first = 1 if len(cells) > 2 and cells[0] == "" else 0
    numbers = [str(number) for number in range(len(cells) - first)]
    if [*cells[first:]] == numbers:
        return first, first + 1
    asked = [language_code(language) or language.casefold() for language in (source, target)]
    headings = [_Heading.of(cell, asked) for cell in cells]
    texts = [column for column, heading in enumerate(headings) if not heading.is_of_rows]
    of_source_language = [column for column in texts if headings[column].language == asked[0]]
    of_target_language = [column for column in texts if headings[column].language == asked[1]]
    if of_source_language and of_target_language:
        return of_source_language[0], of_target_language[0]
    are_different = len({*map(str.casefold, cells)}) == len(cells)
    is_header = len(cells) > 1 and all(heading.is_of_header for heading in headings)
    is_header = is_header and are_different
    called_source = [column for column in texts if headings[column].words & _SOURCE]
    called_target = [column for column in texts if headings[column].words & _TARGET]
    if is_header and called_source and called_target:
        return called_source[0], called_target[0]
    languages = [heading.language for heading in headings if heading.language is not None]
    if len({*languages}) < len(languages):  # a word of one language and its translation
        return None
    if is_header and not languages and len(texts) == 2:
        return texts[0], texts[1]
    are_languages = bool(of_source_language or of_target_language) or _are_names(headings)
    if is_header and len(languages) > 1 and are_languages:
        raise DataError(
            "pairs-of-other-languages",
            problem=f"{where} is a header of the languages {', '.join(languages)}",
            reason=f"the run translates from {source} to {target}",
            remedy=(Setting("data.source", languages[0]), Setting("data.target", languages[1])),
            languages=languages,
        )
    has_header_words = is_header and not languages
    pairs = zip(headings, asked, strict=False)
    at_its_side = any(heading.language == language for heading, language in pairs)
    is_name = any(heading.is_name and heading.language in asked for heading in headings)
    if has_header_words or at_its_side or is_name:
        raise DataError(
            "pairs-first-line-unclear",
            problem=f"{where} may be a header or a pair: {' | '.join(cells)[:60]}",
            reason="a header that is trained on is a wrong translation",
            remedy=[
                f"if it is a header, name the columns of the pairs {source} and {target} in it",
                "if it is a pair, move the line behind another one",
            ],
        )
    return None


@dataclass(frozen=True)
class _Heading:
    """A cell of the first row, seen as the heading of its column."""

    words: frozenset[str]
    language: str | None
    is_name: bool  # a language by its name, such as German, and not by a code
    is_of_rows: bool  # a column of ids or scores, say
    is_of_header: bool  # every word is one of headers

    @classmethod
    def of(cls, cell: str, asked: Sequence[str]) -> "_Heading":
        whole = language_code(cell) or cell.strip().casefold()
        spaced = _CAMEL.sub(" ", cell).casefold()
        words = [_SIDE_NUMBER.sub("", word) or word for word in _WORD.findall(spaced)]
        is_of_facts = not words or not _OF_ROWS.isdisjoint(words)
        is_asked = whole in asked and len(words) == 1
        is_language = language_code(cell) is not None and not is_of_facts
        if is_asked or is_language:
            is_name = len(cell.strip()) > 3 and "-" not in cell and "_" not in cell
            return cls(frozenset(words), whole, is_name, is_of_rows=False, is_of_header=True)
        others = [word for word in words if word not in _OF_TEXT | _OF_ROWS]
        codes = {language_code(word) or (word if word in asked else None) for word in others}
        language = codes.pop() if len(codes) == 1 else None
        is_of_header = not others or language is not None
        return cls(
            frozenset(words),
            language,
            is_name=language is not None and max(map(len, others)) > 3,
            is_of_rows=is_of_facts,
            is_of_header=is_of_header,
        )


def _are_names(headings: Sequence[_Heading]) -> bool:
    """Return True if no language stands there as a code, which may be a word, such as `it`."""
    return all(heading.is_name for heading in headings if heading.language is not None)


def _plain_rows(lines: Sequence[str]) -> list[tuple[int, list[str]]]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append((number, line.split("\t")))
    return rows


def _line_in_quotes(rows: Sequence[tuple[int, list[str]]]) -> int | None:
    """Return the first line with a cell in quotes whose own quotes are doubled, or None."""
    for number, row in rows:
        for cell in row:
            if '""' not in cell:
                continue
            text = cell.strip()
            if '""' in text[1:-1] and _QUOTED.fullmatch(text):
                return number
    return None


def _rows_in_quotes(
    lines: Sequence[str], plain: Sequence[tuple[int, list[str]]], quoted: int | None
) -> list[tuple[int, list[str]]] | None:
    """Return the rows of a table that a spreadsheet has written, or None if its quotes are text.

    Spreadsheets put quotes around a cell that holds quotes, tabs or line feeds, and double the
    quotes in it. Sentences of speech have quotes around them, too.
    """
    cells = 0
    cells_with_quote = 0
    for _, row in plain:
        cells += len(row)
        cells_with_quote += sum(cell.startswith('"') for cell in row)
    if not cells_with_quote:
        return None
    ended = (line.removesuffix("\r") + "\n" for line in lines)
    reader = csv.reader(ended, "excel-tab", strict=True)
    rows = []
    end = 0
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                rows.append((end + 1, [cell.replace("\n", " ") for cell in row]))
            end = reader.line_num
    except csv.Error:  # quotes as in text
        return None
    plain_widths = {len(row) for _, row in plain}
    widths = {len(row) for _, row in rows}
    quotes_hold_tabs = len(plain_widths) > 1 and len(widths) == 1
    are_all_quoted = cells_with_quote == cells
    if are_all_quoted or quotes_hold_tabs or quoted is not None:
        return rows
    return None


def _text_columns(rows: Sequence[Sequence[str]], where: str) -> tuple[tuple[int, int], bool]:
    """Return the first two columns that hold text, and True if the first row is a header: it has
    words where the others have numbers.

    With more than two columns, one of numbers, addresses, domains, ids or the names of languages is
    none. Raises `DataError` if one of the two holds single words, and later columns hold sentences.
    """
    width = Counter(len(row) for row in rows).most_common(1)[0][0]
    if width <= 2:
        return (0, 1), False
    texts = [column for column in range(width) if _most_are(_is_text, rows, column)]
    sentences = [column for column in texts if not _most_are(_ASCII_WORD.fullmatch, rows, column)]
    are_others_sentences = len(sentences) > 1 and sentences[:2] != texts[:2]
    if len(texts) < 2 or are_others_sentences:
        raise DataError(
            "pairs-columns-unclear",
            problem=f"{where} has {width} columns, and it is not clear which two hold the pairs",
            reason="columns of numbers, addresses, ids or names of languages are no sentences",
            remedy="write a first line that names the columns, such as id<TAB>en<TAB>de",
            columns=width,
        )
    others = [cell for column, cell in enumerate(rows[0]) if column not in texts]
    return (texts[0], texts[1]), any(map(_is_text, others))


def _repeats(rows: Sequence[tuple[int, list[str]]], column: int) -> bool:
    cells = [row[column] for _, row in rows if len(row) > column]
    return len(cells) == 2 and cells[0] == cells[1]


def _most_are(test: Callable[[str], object], rows: Sequence[Sequence[str]], column: int) -> bool:
    cells = [row[column].strip() for row in rows[:_LOOKED_AT] if len(row) > column]
    filled = [cell for cell in cells if cell]
    return 2 * sum(bool(test(cell)) for cell in filled) > len(filled)


def _is_text(cell: str) -> bool:
    cell = cell.strip()
    is_fact = _ID.fullmatch(cell) is not None or language_code(cell) is not None
    return bool(cell) and not is_fact
