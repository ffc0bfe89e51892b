"""Streaming of documents from text, JSON lines and Parquet files of any size, starting at any
document.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from surefoot.config.extras import needed_for, refuse_missing
from surefoot.config.paths import local_path
from surefoot.data.text.files import SUFFIXES, decode_utf8, no_such, open_unpacked
from surefoot.errors import DataError, first_line

_LINES = (".jsonl", ".ndjson")
_PARQUET = ".parquet"
_HINT = "\n  name the column that holds the text: --column NAME"


@dataclass(frozen=True)
class DocumentFile:
    """A document file: path, name relative to the input, size in bytes, and modification time in
    ns.
    """

    path: Path
    name: str
    size: int
    changed_ns: int

    def documents(self, *, column: str, start: int = 0) -> Iterator[str]:
        """Yield the documents from index `start`; an empty document is "".

        A text file is one document. Each JSON line or Parquet row is a document with its text in
        `column`. Raises `DataError` with file and line for unreadable text.
        """
        if _kind(self.path) == _PARQUET:
            yield from _rows(self.path, column=column, start=start)
        elif _kind(self.path) in (
            *_LINES,
            ".json",
        ):  # .json only if the input names the file itself
            yield from _texts(self.path, column=column, start=start)
        elif start == 0:
            yield decode_utf8(b"".join(_lines(self.path)), str(self.path))


def document_files(inputs: Sequence[Path | str], *, out: Path | None = None) -> list[DocumentFile]:
    """List the document files in the inputs, sorted by path; files below `out` are skipped.

    Input directories are searched for text (.txt, .text, .md, .rst, .py), JSON lines (.jsonl,
    .ndjson), both plain or .gz, and .parquet. If a directory has JSON lines or Parquet, .md and .py
    files are skipped as documentation. An input file with the suffix .json has JSON lines, and an
    input file with an unknown suffix is text. Raises `DataError` for missing or empty inputs, and
    `ConfigError` for Parquet without pyarrow.
    """
    files = []
    for path in [local_path(path, setting="inputs") for path in inputs]:
        if path.is_dir():
            files += [
                _document_file(file, file.relative_to(path).as_posix())
                for file in _below(path, out=out)
            ]
        elif path.name.endswith(f"{_PARQUET}.gz"):
            raise DataError(
                f"{path}: Parquet files are already compressed and are not read gzipped\n  gunzip {path}"
            )
        elif path.is_file():
            files.append(_document_file(path, path.name))
        else:
            raise no_such(path)
    empty = [file for file in files if file.size == 0 and _kind(file.path) not in SUFFIXES]
    if empty or not any(file.size for file in files):
        raise DataError(f"{(empty or files)[0].path if files else 'nothing'} is empty: 0 bytes")
    if tables := [file.path for file in files if _kind(file.path) == _PARQUET]:
        refuse_missing(f"the Parquet file {tables[0]}", "pyarrow")
    return files


def kinds(files: Sequence[DocumentFile]) -> str:
    """Format the number of files of each kind as one line.

    >>> kinds(
    ...     [
    ...         DocumentFile(Path(name), name, size=1, changed_ns=0)
    ...         for name in ("a.jsonl", "b.jsonl.gz", "c.txt", "d")
    ...     ]
    ... )
    '4 files: 2 .jsonl, 1 .txt, 1 of no known kind, read as text'
    """
    counts = Counter(_kind(file.path) or "of no known kind, read as text" for file in files)
    return f"{len(files):,} file{'s' * (len(files) != 1)}: {', '.join(f'{count:,} {kind}' for kind, count in counts.items())}"


def _below(directory: Path, *, out: Path | None) -> list[Path]:
    here, left_out = directory.resolve(), None if out is None else out.resolve()
    if left_out is not None and here.is_relative_to(left_out):
        raise DataError(
            f"the input directory {directory} is in the output directory {out}\n  choose another output directory"
        )
    files = [
        file
        for file in directory.rglob("*")
        if file.is_file()
        and _kind(file) in (*SUFFIXES, *_LINES, _PARQUET)
        and not (
            left_out is not None and (here / file.relative_to(directory)).is_relative_to(left_out)
        )
    ]
    if any(_kind(file) in (*_LINES, _PARQUET) for file in files):
        files = [
            file for file in files if _kind(file) not in (".md", ".py")
        ]  # documentation and scripts of the data
    if not files:
        raise DataError(
            f"no documents in the directory {directory}: no file ends in {', '.join((*SUFFIXES, *_LINES, _PARQUET))}\n"
            "  to read a .json file with one object per line, give the file's path"
        )
    return sorted(files, key=lambda file: file.parts)


def _document_file(file: Path, name: str) -> DocumentFile:
    stat = file.stat()
    return DocumentFile(file, name, size=stat.st_size, changed_ns=stat.st_mtime_ns)


def _kind(path: Path) -> str:
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    return path.suffix if plain.suffix == _PARQUET else plain.suffix


def json_lines(path: Path, *, start: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield ("FILE, line N", JSON value) for each nonblank line from index `start`; the file may be
    gzipped.
    """
    lines = ((number, line) for number, line in enumerate(_lines(path), start=1) if line.strip())
    for number, line in islice(lines, start, None):
        where, text = f"{path}, line {number}", decode_utf8(line, str(path), first_line=number)
        try:
            yield where, json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise DataError(
                f"{where} is not JSON: {problem}\n  expected one JSON object per line"
            ) from problem


def _texts(path: Path, *, column: str, start: int) -> Iterator[str]:
    for where, record in json_lines(path, start=start):
        if not isinstance(record, dict) or column not in record:
            there = (
                f"available: {', '.join(record)}"
                if isinstance(record, dict)
                else f"it is a {type(record).__name__}"
            )
            raise DataError(f"{where} has no {column!r}; {there}{_HINT}")
        yield _check_text(record[column], column, where)


def _lines(path: Path) -> Iterator[bytes]:
    with open_unpacked(path) as file:
        yield from file


def _rows(path: Path, *, column: str, start: int) -> Iterator[str]:
    with needed_for(f"the Parquet file {path}", "pyarrow"):
        import pyarrow.parquet
    with reading_tables(path), pyarrow.parquet.ParquetFile(path) as file:
        schema, row = file.schema_arrow, 0
        if column not in schema.names:
            raise DataError(
                f"{path} has no column {column!r}; available: {', '.join(schema.names)}{_HINT}"
            )
        if str(schema.field(column).type) not in ("string", "large_string", "string_view"):
            raise DataError(
                f"{path}: column {column!r} holds {schema.field(column).type}, not text{_HINT}"
            )
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if row + rows <= start:
                row += rows
                continue
            for batch in file.iter_batches(1024, row_groups=[group], columns=[column]):
                for text in batch.column(0).to_pylist():
                    if row >= start:
                        yield _check_text(text, column, f"{path}, row {row}")
                    row += 1


@contextmanager
def reading_tables(path: Path) -> Iterator[None]:
    """Convert errors of pyarrow to a `DataError` with the path."""
    import pyarrow

    try:
        yield
    except (pyarrow.lib.ArrowException, OSError) as problem:
        kind = "Parquet" if path.suffix == _PARQUET else "an Arrow or Parquet file"
        raise DataError(
            f"{path} is damaged, or is not {kind}: {(first_line(problem) or type(problem).__name__)[:200]}\n  was it copied completely?"
        ) from problem


def _check_text(text: Any, column: str, where: str) -> str:
    if not isinstance(text, str | None):
        raise DataError(f"{where}: {column!r} is a {type(text).__name__}, not text{_HINT}")
    return text or ""
