"""Documents of text files, JSON lines and tables of any size: in memory, or one by one from any
document on.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

from surefoot.config.extras import refuse_missing
from surefoot.config.keywords import known_keywords
from surefoot.config.paths import local_path
from surefoot.data.part_names import part_of
from surefoot.data.scan import (
    DOCUMENTATION,
    JSON_LINES,
    PARQUET,
    TABLES,
    TEXT,
    Scan,
    is_packed_again,
    kind_of,
    printable,
    scan,
)
from surefoot.data.table_sources import reading_tables
from surefoot.data.text_files import (
    decode_utf8,
    not_json,
    open_unpacked,
    refuse_nul,
    text_with_nul,
)
from surefoot.errors import DataError, Setting, out_of_range
from surefoot.recipes.readers.text.corpora import without_text

_KEYS_SHOWN = 8
_BINARY = {".bin": "token-file", ".pkl": "pickle", ".pickle": "pickle"}
# what can be decoded, and is no prose: kind in words, and how its text becomes documents
NO_PROSE = {
    ".json": ("JSON", "write one object per line into a .jsonl file, with the text in `text`"),
    ".csv": ("a table of comma-separated values", "write its text into a .jsonl or .parquet file"),
    ".tsv": ("a table of tab-separated values", "write its text into a .jsonl or .parquet file"),
    ".html": ("HTML", "extract its text"),
    ".htm": ("HTML", "extract its text"),
    ".xhtml": ("HTML", "extract its text"),
    ".xml": ("XML", "extract its text"),
    ".svg": ("a drawing", "extract its text"),
    ".rtf": ("formatted text with its commands", "save it as plain text"),
    ".ipynb": ("a notebook", "convert it: jupyter nbconvert --to markdown FILE"),
}
_BY_CONTENT = (
    (b"<!doctype html", ".html"),
    (b"<html", ".html"),
    (b"<?xml", ".xml"),
    (b"<svg", ".svg"),
    (b"{\\rtf", ".rtf"),
)
_OF_ANY_CONTENT = (".txt", ".text")  # their first bytes tell more than these names
_MAGIC = ((b"PAR1", ".parquet"), (b"ARROW1", ".arrow"))
_HEAD = 1 << 10  # bytes of a file that tell its kind

ReadAs = Literal["text"]


@dataclass
class Unread:
    """What rows hold that is not read: the names of other keys or columns, and empty rows."""

    keys: set[str] = field(default_factory=set)
    empty_rows: int = 0


@dataclass(frozen=True)
class DocumentFile:
    """A document file: path, name relative to the input, size in bytes, modification time in ns,
    and the suffix of its kind.
    """

    path: Path
    name: str
    size: int
    changed_ns: int
    kind: str = ".txt"

    @property
    def has_rows(self) -> bool:
        """True if a row is a document, False if the file is one."""
        return self.kind in (*JSON_LINES, ".json", *TABLES)

    def documents(
        self, *, column: str, start: int = 0, unread: Unread | None = None
    ) -> Iterator[str]:
        """Yield the documents from index `start`; an empty document is "".

        A text file is one document. Each JSON line or row of a table is a document with its text in
        `column`; its other keys or columns, and empty rows, are noted in `unread`. Raises
        `DataError` with file and line for unreadable text.
        """
        unread = Unread() if unread is None else unread
        if self.has_rows:
            if self.kind in TABLES:
                rows = _rows(self.path, self.kind, column=column, start=start, unused=unread.keys)
            else:
                rows = _texts(self.path, column=column, start=start, unused=unread.keys)
            for text in rows:
                if not text:
                    unread.empty_rows += 1
                yield text
        elif start == 0:
            data = b"".join(_lines(self.path))
            refuse_nul(data, self.path)
            yield decode_utf8(data, str(self.path))


@dataclass(frozen=True)
class Documents:
    """The documents of a path, {name: text}; one line about what is there and not read, or ""."""

    texts: dict[str, str]
    not_read: str
    has_rows: bool = False


@known_keywords
def load_documents(
    path: Path | str, *, column: str = "text", read_as: ReadAs | None = None
) -> dict[str, str]:
    """Read a file, or the files below a directory, as {name: text}, sorted by path: text (.txt,
    .text, .md, .rst, .py), the `column` of JSON lines (.jsonl, .ndjson) and of tables (.parquet,
    .arrow, .feather). Files may be compressed (.gz, .zst).

    A text file is a document, and so is each row of the others, named FILE:1 and so on. Text is
    decoded as UTF-8. Empty documents of a directory and empty rows are skipped, and a missing final
    newline of a file in a directory is added. Links are followed. Names that begin with "." or "_"
    are left out, and README and LICENSE where other data files are. Raises `DataError` for a
    missing or empty file, and for one that is no prose, such as JSON, CSV or HTML;
    `read_as="text"` reads it as text.

    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> _ = (root / "a.txt").write_text("one"), (root / "b.md").write_text("two")
    >>> load_documents(root)
    {'a.txt': 'one\\n', 'b.md': 'two\\n'}
    """
    path = local_path(path, setting="path")
    return read_documents(
        scan_documents(path, read_as=read_as), column=column, read_as=read_as
    ).texts


def read_documents(
    listing: Scan, *, column: str = "text", read_as: ReadAs | None = None
) -> Documents:
    """Read the documents of a scanned path into memory."""
    files = files_of([listing], read_as=read_as)
    texts = dict[str, str]()
    unread = Unread()
    for file in files:
        for index, text in enumerate(file.documents(column=column, unread=unread), start=1):
            if not file.has_rows and file.path == listing.path:
                texts[file.name] = text  # unchanged
            elif not file.has_rows and text:
                texts[file.name] = text if text.endswith("\n") else f"{text}\n"
            elif text:
                texts[f"{file.name}:{index}"] = text
    if not any(text.strip() for text in texts.values()):
        raise without_text(listing.path)
    lines = [listing.line(), describe_parts(files), describe_rows(unread, column=column)]
    has_rows = any(file.has_rows for file in files)
    return Documents(texts, "; ".join(line for line in lines if line), has_rows)


def describe_parts(files: Sequence[DocumentFile]) -> str:
    """Return one line about files named for validation or test beside those for training, or "".

    >>> names = ("train.txt", "val.txt", "test.txt")
    >>> describe_parts([DocumentFile(Path(name), name, size=1, changed_ns=0) for name in names])
    '2 files named for validation or test are read like those for training'
    """
    of_data = [file for file in files if kind_of(file.path) not in DOCUMENTATION]
    parts = Counter(part_of(PurePath(file.name)) for file in of_data)
    others = parts["val"] + parts["test"]
    if not parts["training"] or not others:
        return ""
    named = "1 file" if others == 1 else f"{others:,} files"
    are = "is" if others == 1 else "are"
    return f"{named} named for validation or test {are} read like those for training"


def describe_rows(unread: Unread, *, column: str) -> str:
    """Return one line about the keys and rows that are not read, or "".

    >>> describe_rows(Unread({"url", "id"}, empty_rows=2), column="text")
    'of each row only text is read, not id, url; 2 empty rows are left out'
    """
    facts = []
    if unread.keys:
        shown = sorted(unread.keys)[:_KEYS_SHOWN]
        hidden = len(unread.keys) - len(shown)
        more = f" and {hidden} more" if hidden else ""
        facts.append(f"of each row only {column} is read, not {', '.join(shown)}{more}")
    if unread.empty_rows:
        rows_are = "empty row is" if unread.empty_rows == 1 else "empty rows are"
        facts.append(f"{unread.empty_rows:,} {rows_are} left out")
    return "; ".join(facts)


def scan_documents(
    path: Path | str, *, out: Path | None = None, read_as: ReadAs | None = None
) -> Scan:
    """List the document files of one input, which `files_of` then describes; files below `out` are
    skipped.

    A directory is searched for text (.txt, .text, .md, .rst, .py), JSON lines (.jsonl, .ndjson),
    both plain, .gz or .zst, and tables (.parquet, .arrow, .feather), as `scan` says; one without any
    of these for .json files with JSON lines. If a directory has JSON lines or tables, .md and .py
    files are skipped as documentation. An input file with the suffix .json has JSON lines, and one
    with an unknown suffix is text. Raises `DataError` if the input is missing, or a directory
    without documents, and `ConfigError` for another `read_as`.
    """
    if read_as not in (None, *get_args(ReadAs)):
        raise out_of_range("read_as", read_as, "text, or None")
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
    kinds: tuple[str, ...] = (*TEXT, *JSON_LINES, *TABLES)
    if read_as == "text":
        kinds = (*TEXT, *JSON_LINES, *NO_PROSE)
    listing = scan(path, kinds, out=out)
    if not listing.files and read_as is None:
        listing = _rows_named_json(path, listing, out=out)
    if not listing.files:
        raise DataError(
            "no-documents-in-directory",
            problem=f"no documents in the directory {path}: no file ends in {', '.join(kinds)}",
            reason=listing.line() or None,
            remedy="give the path of one file",
            path=path,
        )
    return listing


def _rows_named_json(path: Path, listing: Scan, *, out: Path | None) -> Scan:
    """Return a directory whose only data are .json files with JSON lines, as C4's: with these."""
    listed = scan(path, (".json",), out=out)
    rows = [file for file in listed.files if _begins_with_objects(file)]
    left_out = [entry for entry in listing.left_out if entry.path not in rows]
    return replace(listing, files=rows, left_out=left_out)


def files_of(scans: Sequence[Scan], *, read_as: ReadAs | None = None) -> list[DocumentFile]:
    """Return the files of scanned inputs, by input and path; raise `DataError` if they are
    empty or no prose, and `ConfigError` for a table without pyarrow.
    """
    files = []
    for listing in scans:
        for path in listing.files:
            is_input = path == listing.path
            name = path.name if is_input else path.relative_to(listing.path).as_posix()
            kind = ".txt" if read_as == "text" else _kind(path)
            files.append(_document_file(path, name, kind))
    empty = [file for file in files if file.size == 0 and file.has_rows]
    if empty or not any(file.size for file in files):
        name = printable((empty or files)[0].path) if files else "nothing"
        raise DataError("input-empty", problem=f"{name} is empty: 0 bytes", path=name)
    tables = [file.path for file in files if file.kind in TABLES]
    if tables:
        refuse_missing(f"the table {tables[0]}", "pyarrow")
    return files


def _kind(path: Path) -> str:
    """Return the suffix that says how a file is read, by its name or its first bytes; raise
    `DataError` for what is no prose.
    """
    kind = kind_of(path)
    if kind in (*TEXT, *JSON_LINES, *TABLES) and kind not in _OF_ANY_CONTENT:
        return kind
    if kind in _BINARY:
        raise DataError(
            "binary-file",
            problem=f"{printable(path)} is no text: {kind} files hold binary data",
            remedy="token files (.bin) are trained on as they are: surefoot train gpt --data.path"
            " FILE --data.tokenizer gpt2",
            path=path,
            kind=_BINARY[kind],
        )
    head = _head(path)
    if kind == ".json" and _begins_with_object(path):
        return kind
    if kind not in NO_PROSE:
        for magic, table in _MAGIC:
            if head.startswith(magic):
                return table
        start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
        beginning = start.lower()
        by_content = [suffix for sign, suffix in _BY_CONTENT if beginning.startswith(sign)]
        if start.startswith((b"{", b"[")) and _begins_with_json(path):
            by_content.append(".json")
        if not by_content:
            return ".txt"
        kind = by_content[0]
    what, cure = NO_PROSE[kind]
    raise DataError(
        "no-prose",
        problem=f"{printable(path)} is {what}, not prose",
        reason="a model would learn its marks, keys and quotes as text",
        remedy=[cure, Setting("data.read_as", "text")],
        path=path,
        kind=kind,
    )


def _head(path: Path) -> bytes:
    with open_unpacked(path) as file:
        return file.read(_HEAD)


def _first_lines(path: Path) -> list[bytes]:
    """Return the first two lines that are not blank."""
    lines = []
    with open_unpacked(path) as file:
        for line in file:
            if line.strip():
                lines.append(line.strip())
                if len(lines) == 2:
                    break
    return lines


def _begins_with_object(path: Path) -> bool:
    lines = _first_lines(path)
    return bool(lines) and _is_object(lines[0])


def _begins_with_objects(path: Path) -> bool:
    lines = _first_lines(path)
    return len(lines) > 1 and all(map(_is_object, lines))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _begins_with_json(path: Path) -> bool:
    """Return True for JSON of objects, in one line or indented."""
    lines = _first_lines(path)
    if lines[0] in (b"{", b"["):
        return len(lines) > 1 and lines[1][:1] in (b'"', b"{", b"[")
    try:
        value = json.loads(lines[0])
    except (ValueError, RecursionError):
        return False
    if not value:
        return False
    return isinstance(value, dict) or isinstance(value[0], dict | list)


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
    counted = [f"{count:,} {kind}" for kind, count in counts.items()]
    plural = "" if len(files) == 1 else "s"
    return f"{len(files):,} file{plural}: {', '.join(counted)}"


def _document_file(file: Path, name: str, kind: str) -> DocumentFile:
    stat = file.stat()
    return DocumentFile(file, name, size=stat.st_size, changed_ns=stat.st_mtime_ns, kind=kind)


def json_lines(path: Path, *, start: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield ("FILE, line N", JSON value) for each nonblank line from index `start`; the file may be
    gzipped.
    """
    numbered = enumerate(_lines(path), start=1)
    with_text = ((number, line) for number, line in numbered if line.strip())
    for number, line in islice(with_text, start, None):
        where = f"{path}, line {number}"
        text = decode_utf8(line, str(path), first_line=number)
        try:
            yield where, json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise not_json(where, text, problem) from problem


def _texts(path: Path, *, column: str, start: int, unused: set[str]) -> Iterator[str]:
    keys: Any = None
    for where, record in json_lines(path, start=start):
        if not isinstance(record, dict) or column not in record:
            there = f"it is a {type(record).__name__}"
            if isinstance(record, dict):
                there = f"available: {', '.join(record)}"
            raise _missing(column, where, there)
        if record.keys() != keys:
            keys = record.keys()
            unused.update(key for key in record if key != column)
        yield _check_text(record[column], column, where)


def _lines(path: Path) -> Iterator[bytes]:
    with open_unpacked(path) as file:
        yield from file


def _rows(path: Path, kind: str, *, column: str, start: int, unused: set[str]) -> Iterator[str]:
    refuse_missing(f"the table {path}", "pyarrow")
    with reading_tables(path):
        row = 0
        opened = _parquet_groups if kind in PARQUET else _arrow_batches
        for schema, rows, batches in opened(path, column):
            _check_column(schema, column, path)
            unused.update(name for name in schema.names if name != column)
            if row + rows <= start:
                row += rows
                continue
            for batch in batches():
                for text in batch.to_pylist():
                    if row >= start:
                        yield _check_text(text, column, f"{path}, row {row}")
                    row += 1


Batches = Callable[[], Iterator[Any]]


def _parquet_groups(path: Path, column: str) -> Iterator[tuple[Any, int, Batches]]:
    """Yield the schema, the number of rows and the column's batches of each row group."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        yield file.schema_arrow, 0, lambda: iter(())  # also of a file without row groups
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows

            def batches(group: int = group) -> Iterator[Any]:
                for batch in file.iter_batches(1024, row_groups=[group], columns=[column]):
                    yield batch.column(0)

            yield file.schema_arrow, rows, batches


def _arrow_batches(path: Path, column: str) -> Iterator[tuple[Any, int, Batches]]:
    """Yield the schema, the number of rows and the column of each record batch, of the file format
    and of the stream format, which `datasets` writes.
    """
    import pyarrow

    with path.open("rb") as file:
        is_file = file.read(6) == b"ARROW1"
    with pyarrow.memory_map(str(path)) as mapped:
        if is_file:
            reader = pyarrow.ipc.open_file(mapped)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            reader = pyarrow.ipc.open_stream(mapped)
            batches = iter(reader)
        yield reader.schema, 0, lambda: iter(())
        for batch in batches:
            texts = batch.column(column)
            yield reader.schema, batch.num_rows, partial(iter, [texts])


def _check_column(schema: Any, column: str, path: Path) -> None:
    if column not in schema.names:
        raise _missing(column, f"{path}", f"available: {', '.join(schema.names)}")
    kind = schema.field(column).type
    if str(getattr(kind, "value_type", kind)) not in ("string", "large_string", "string_view"):
        raise _no_text(column, f"{path}", f"{kind}")


def _check_text(text: Any, column: str, where: str) -> str:
    if not isinstance(text, str | None):
        raise _no_text(column, where, type(text).__name__)
    if text and "\0" in text:
        raise text_with_nul(where)
    return text or ""


def _missing(column: str, where: str, there: str) -> DataError:
    return DataError(
        "column-missing",
        problem=f"{where} has no {column!r}; {there}",
        remedy=("name the column that holds the text:", Setting("data.column")),
        setting="data.column",
        value=column,
        where=where,
    )


def _no_text(column: str, where: str, kind: str) -> DataError:
    return DataError(
        "column-not-text",
        problem=f"{where}: {column!r} is of the type {kind}, not text",
        remedy=("name the column that holds the text:", Setting("data.column")),
        setting="data.column",
        value=column,
        where=where,
    )
