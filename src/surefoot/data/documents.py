"""Documents in files of any size, one after the other: text, JSON lines and Parquet, from any document on."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from surefoot.data.text import SUFFIXES
from surefoot.errors import ConfigError, DataError

_JSON = (".jsonl", ".ndjson", ".json")
_PARQUET = ".parquet"
_GZIP = b"\x1f\x8b"
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class DocumentFile:
    """A file of documents: its path, its name below what was given, which other copies of the data share, and its bytes."""

    path: Path
    name: str
    size: int

    def documents(self, *, column: str, start: int = 0) -> Iterator[str]:
        """Its documents from number `start` on; "" for those that hold nothing.

        A text file is one document, a line of JSON and a row of Parquet are one each, and their text is in `column`. Raises
        `DataError`, naming file and line, for what cannot be read.
        """
        kind = _kind(self.path)
        if kind == _PARQUET:
            yield from _rows(self.path, column=column, start=start)
        elif kind in _JSON:
            yield from _json_lines(self.path, column=column, start=start)
        elif start == 0:
            yield _text(self.path)


def document_files(inputs: Sequence[Path | str]) -> list[DocumentFile]:
    """The files that are named, and those below directories (text, JSON lines, Parquet; gzipped or not), sorted by path.

    A file that is named itself is text where its name says nothing else. Raises `DataError` for what is missing or empty.
    """
    found = []
    for given in map(Path, inputs):
        if given.is_dir():
            below = (file for file in given.rglob("*") if file.is_file() and _kind(file) in _known())
            files = sorted(below, key=lambda file: file.parts)
            if not files:
                raise DataError(f"no documents in the directory {given}: no file ends in {', '.join(_known())}")
            found += [DocumentFile(file, file.relative_to(given).as_posix(), file.stat().st_size) for file in files]
        elif given.is_file():
            found.append(DocumentFile(given, given.name, given.stat().st_size))
        else:
            raise DataError(
                f"no file or directory {given} (looked in {Path.cwd()})\n"
                "  is it spelled right, and relative to where you are?"
            )
    empty = [file for file in found if file.size == 0 and _kind(file.path) not in SUFFIXES]
    if empty or not any(file.size for file in found):
        raise DataError(f"{(empty or found)[0].path if found else 'nothing'} is empty: 0 bytes")
    return found


def _known() -> tuple[str, ...]:
    return (*SUFFIXES, *_JSON, _PARQUET)


def _kind(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix


def _text(path: Path) -> str:
    data = b"".join(_lines(path))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(
            f"{path} is not UTF-8 text: byte {problem.start} is 0x{data[problem.start]:02x}\n"
            "  is it a binary file? Otherwise convert it: iconv -f latin1 -t utf-8"
        ) from problem


def _json_lines(path: Path, *, column: str, start: int) -> Iterator[str]:
    """Lines that are not blank are documents."""
    lines = ((number, line) for number, line in enumerate(_lines(path), start=1) if line.strip())
    for number, line in islice(lines, start, None):
        where = f"{path}, line {number}"
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as problem:
            raise DataError(
                f"{where} is not UTF-8: its byte {problem.start} is 0x{line[problem.start]:02x}"
            ) from problem
        except (ValueError, RecursionError) as problem:
            raise DataError(f"{where} is no JSON: {problem}\n  one JSON object a line is expected") from problem
        if not isinstance(record, dict) or column not in record:
            there = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}"
            raise DataError(f"{where} has no {column!r}: there is {there}\n  say where the text is: --column NAME")
        yield _checked(record[column], column, where)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as plain:
            zipped = plain.read(len(_GZIP)) == _GZIP
        with gzip.open(path) if zipped else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as problem:
        raise DataError(f"{path} cannot be read: {problem}\n  was it copied whole?") from problem


def _rows(path: Path, *, column: str, start: int) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as problem:
        raise ConfigError(f"{path}: reading Parquet needs pyarrow\n  pip install 'surefoot[hub]'") from problem
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_column(file.schema_arrow, column, path)
            row = 0
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row + rows <= start:
                    row += rows
                    continue
                for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=[column]):
                    for text in batch.column(0).to_pylist():
                        if row >= start:
                            yield _checked(text, column, f"{path}, row {row}")
                        row += 1
    except (pyarrow.lib.ArrowException, OSError) as problem:
        said = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise DataError(f"{path} is damaged, or no Parquet: {said[:200]}\n  was it copied whole?") from problem


def _check_column(schema: Any, column: str, path: Path) -> None:
    if column not in schema.names:
        raise DataError(
            f"{path} has no column {column!r}: there are {', '.join(schema.names)}\n  say where the text is: --column NAME"
        )
    if str(schema.field(column).type) not in ("string", "large_string", "string_view"):
        raise DataError(
            f"{path}: column {column!r} holds {schema.field(column).type}, not text\n  say where the text is: --column NAME"
        )


def _checked(text: Any, column: str, where: str) -> str:
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(
            f"{where}: {column!r} is a {type(text).__name__}, not text\n  say where the text is: --column NAME"
        )
    return text
