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
from surefoot.data.scan import (
    JSON_LINES,
    PARQUET,
    TEXT,
    Scan,
    is_packed_again,
    kind_of,
    printable,
    scan,
)
from surefoot.data.text.files import decode_utf8, open_unpacked
from surefoot.errors import DataError, first_line

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
        kind = kind_of(self.path)
        if kind in PARQUET:
            yield from _rows(self.path, column=column, start=start)
        elif kind in (*JSON_LINES, ".json"):  # .json only if the input names the file itself
            yield from _texts(self.path, column=column, start=start)
        elif start == 0:
            yield decode_utf8(b"".join(_lines(self.path)), str(self.path))


def document_files(inputs: Sequence[Path | str], *, out: Path | None = None) -> list[DocumentFile]:
    """List the document files in the inputs, sorted by path; files below `out` are skipped.

    Input directories are searched for text (.txt, .text, .md, .rst, .py), JSON lines (.jsonl,
    .ndjson), both plain, .gz or .zst, and Parquet (.parquet, .pq, .parq), as `scan` says. If a
    directory has JSON lines or Parquet, .md and .py files are skipped as documentation. An
    input file with the suffix .json has JSON lines, and an input file with an unknown suffix is
    text. Raises `DataError` for missing or empty inputs, and `ConfigError` for Parquet without
    pyarrow.
    """
    return files_of([scan_documents(path, out=out) for path in inputs])


def scan_documents(path: Path | str, *, out: Path | None = None) -> Scan:
    """List the document files of one input; raise `DataError` if a directory has none."""
    path = local_path(path, setting="inputs")
    if is_packed_again(path):
        raise DataError(
            "table-compressed-again",
            problem=f"{path}: Parquet files are already compressed and are not read gzipped",
            remedy=f"gunzip {path}",
            path=path,
        )
    if out is not None and path.is_dir() and path.resolve().is_relative_to(out.resolve()):
        raise DataError(
            "input-in-output",
            problem=f"the input directory {path} is in the output directory {out}",
            remedy="choose another output directory",
            path=path,
            out=out,
        )
    kinds = (*TEXT, *JSON_LINES, *PARQUET)
    found = scan(path, kinds, out=out)
    if not found.files:
        raise DataError(
            "no-documents-in-directory",
            problem=f"no documents in the directory {path}: no file ends in {', '.join(kinds)}",
            reason=found.line() or None,
            remedy="to read a .json file with one object per line, give the file's path",
            path=path,
        )
    return found


def files_of(scans: Sequence[Scan]) -> list[DocumentFile]:
    """Return the files of scanned inputs, by input and path; raise `DataError` if they are
    empty.
    """
    files = []
    for found in scans:
        for path in found.files:
            is_input = path == found.path
            name = path.name if is_input else path.relative_to(found.path).as_posix()
            files.append(_document_file(path, name))
    empty = [file for file in files if file.size == 0 and kind_of(file.path) not in TEXT]
    if empty or not any(file.size for file in files):
        name = printable((empty or files)[0].path) if files else "nothing"
        raise DataError("input-empty", problem=f"{name} is empty: 0 bytes", path=name)
    if tables := [file.path for file in files if kind_of(file.path) in PARQUET]:
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
    counts = Counter(kind_of(file.path) or "of no known kind, read as text" for file in files)
    return f"{len(files):,} file{'s' * (len(files) != 1)}: {', '.join(f'{count:,} {kind}' for kind, count in counts.items())}"


def _document_file(file: Path, name: str) -> DocumentFile:
    stat = file.stat()
    return DocumentFile(file, name, size=stat.st_size, changed_ns=stat.st_mtime_ns)


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
        kind = "Parquet" if kind_of(path) in PARQUET else "an Arrow or Parquet file"
        raise DataError(
            f"{path} is damaged, or is not {kind}: {(first_line(problem) or type(problem).__name__)[:200]}\n  was it copied completely?"
        ) from problem


def _check_text(text: Any, column: str, where: str) -> str:
    if not isinstance(text, str | None):
        raise DataError(f"{where}: {column!r} is a {type(text).__name__}, not text{_HINT}")
    return text or ""
