"""Rows of Arrow and Parquet tables as samples, read by index without loading the table."""

import os
import re
import warnings
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch
from torch import Tensor

from surefoot.config.extras import refuse_missing
from surefoot.config.keywords import known_keywords
from surefoot.config.paths import local_path
from surefoot.data.fingerprints import hash_of, spaced
from surefoot.data.part_names import part_of
from surefoot.data.scan import TABLES, kind_of, scan
from surefoot.data.table_sources import reading_tables, table_of
from surefoot.data.table_types import joined_schema
from surefoot.errors import ConfigError, DataError, first_line

_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # in the name of a folder
_FLOATS = ("halffloat", "float", "double")
_INTEGERS = ("int8", "int16", "int32", "int64")
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
_NUMBERS = {"bool", *_FLOATS, *_INTEGERS, *_UNSIGNED}
_READERS = {  # of files that are no tables here
    ".csv": "pandas.read_csv(path)",
    ".tsv": "pandas.read_csv(path, sep='\\t')",
    ".json": "pandas.read_json(path)",
    ".jsonl": "pandas.read_json(path, lines=True)",
    ".ndjson": "pandas.read_json(path, lines=True)",
    ".xlsx": "pandas.read_excel(path)",
}
_BLOCKS = 16  # of neighboring rows that the fingerprint reads: each may decode a row group
_DECODED = 64  # row groups decoded for fewer than 4 rows each: reading is slow


@known_keywords
class Table:
    """Data set of the rows of an Arrow table, a DataFrame, or Arrow or Parquet files: each row is a
    dictionary by column.

    source: a `pyarrow.Table`, a DataFrame of pandas or polars, a LazyFrame of polars, a data set of
    pyarrow or lance or a `ParquetFile` (which are read into memory), or the path of a file or a
    directory, or several paths. Files in a directory are sorted by path, and a folder label=cat in
    it is a column `label`. Files are memory-mapped and need not fit into memory. columns: the names
    of the columns to read (default: all). max_cache_bytes: limit of the decoded row groups of
    Parquet files that each process keeps, at least one group.

    Numbers and lists of numbers become tensors of the column's type, text `str`, binary values
    `bytes`, structs dictionaries, null None, and all others Python objects. NaN stays NaN. A column
    whose type differs between files has the type that holds all their values: double for int64 and
    double, text for text and binary. `reading_notes` say what was done, which files of a directory
    are not read, and that rows of train/ and test/, say, are together. Needs pyarrow (the extra
    "hub"). Raises `DataError` for damaged files, unknown columns, files with different columns, and
    values that no sample can hold.

    >>> import pyarrow
    >>> table = Table(pyarrow.table({"tokens": [[5, 6], [7, 8]], "label": [0, 1]}))
    >>> len(table), table[1]
    (2, {'tokens': tensor([7, 8]), 'label': tensor(1)})
    """

    def __init__(
        self, source: Any, *, columns: Sequence[str] | None = None, max_cache_bytes: int = 1 << 28
    ) -> None:
        _refuse_other_kinds(source)
        refuse_missing("sf.data.Table", "pyarrow")
        if isinstance(columns, str):
            raise ConfigError(
                "table-columns-one-text",
                problem=f"Table: columns = {columns!r} is one text",
                remedy=f"give a list of names: columns=[{columns!r}]",
                setting="columns",
                value=columns,
            )
        self.source = source
        self.columns = columns
        self.max_cache_bytes = max_cache_bytes
        contents = _read_source(source, columns)
        self.reading_notes: tuple[str, ...] = tuple(contents.notes)
        self._pieces = contents.pieces
        self._ends = [*accumulate(piece.rows for piece in self._pieces)]
        self._schema = contents.schema
        self._decoded: OrderedDict[int, Any] = OrderedDict()
        self._reads = 0  # of rows, since their speed was last checked
        self._decodings = 0

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, sample: int) -> dict[str, Any]:
        if not 0 <= sample < len(self):
            raise IndexError(f"row {sample} is outside a table of {len(self)} rows")
        index = bisect_right(self._ends, sample)
        piece = self._pieces[index]
        batch = self._batch(index)
        row = sample - (self._ends[index - 1] if index else 0)
        values = {}
        for name, read in piece.readers.items():
            try:
                values[name] = read(batch, row)
            except (ValueError, OverflowError, ArithmeticError) as problem:
                raise _unreadable_value(name, sample, self._schema, problem) from problem
        return values

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of rows, the names of the columns, and a hash of evenly spaced rows,
        whatever the kind of file.
        """
        return {"samples": len(self), "columns": list(self._schema.names), "sha256": self._hash}

    def write_arrow(self, path: str | Path) -> "Table":
        """Write all rows to an uncompressed Arrow file, atomically, and return its table, whose
        rows are read in any order.

        >>> import pyarrow, tempfile
        >>> table = Table(pyarrow.table({"x": [1.0, 2.0]}))
        >>> table.write_arrow(Path(tempfile.mkdtemp()) / "x.arrow")[1]
        {'x': tensor(2., dtype=torch.float64)}
        """
        import pyarrow

        path = local_path(path, setting="path")
        partly = path.with_name(f".{path.name}.partial")
        with partly.open("wb") as file:
            with pyarrow.ipc.new_file(file, self._schema) as writer:
                for piece in self._pieces:
                    writer.write(piece.batch_of(self._schema))
            file.flush()
            os.fsync(file.fileno())
        partly.replace(path)
        return Table(path)

    def __reduce__(self) -> Any:  # workers that are not forked open the files again
        build = partial(Table, columns=self.columns, max_cache_bytes=self.max_cache_bytes)
        return build, (self.source,)

    @cached_property
    def _hash(self) -> str:
        if len(self) == 0:
            return hash_of([])
        block_rows = -(-len(spaced(self[0], len(self))) // _BLOCKS)
        first_rows = np.linspace(0, len(self) - block_rows, _BLOCKS).astype(int).tolist()
        rows = set[int]()
        for first_row in first_rows:
            rows.update(range(first_row, first_row + block_rows))
        return hash_of([self[row] for row in sorted(rows)])

    def _batch(self, index: int) -> Any:
        """Return the rows of a piece: mapped, or decoded and kept."""
        group = self._pieces[index].rows_at
        if not isinstance(group, _RowGroup):
            return group
        self._reads += 1
        if index not in self._decoded:
            self._decoded[index] = group.decode()
            self._decodings += 1
            if self._decodings % _DECODED == 0:
                is_slow = self._reads < 4 * _DECODED
                self._reads = 0
                if is_slow:  # Python shows equal warnings once
                    warnings.warn(
                        f"{group.path}: most rows decode a row group again, because their order is random\n"
                        "  write an Arrow file once, and train on the table that it returns: table.write_arrow('train.arrow')",
                        stacklevel=3,
                    )
            cache_bytes = sum(rows.nbytes for rows in self._decoded.values())
            while cache_bytes > self.max_cache_bytes and len(self._decoded) > 1:
                _, oldest = self._decoded.popitem(last=False)
                cache_bytes -= oldest.nbytes
        self._decoded.move_to_end(index)
        return self._decoded[index]


@dataclass(frozen=True)
class _RowGroup:
    path: Path
    file: Any
    index: int
    names: list[str]

    def decode(self) -> Any:
        with reading_tables(self.path):
            table = self.file.read_row_group(self.index, columns=self.names, use_threads=False)
            return table.combine_chunks()


@dataclass(frozen=True)
class _Piece:
    """Neighboring rows: a mapped record batch, or a row group to decode, and how each column of the
    table is read from it. `folders` are the values in the names of its folders.
    """

    rows_at: Any
    rows: int
    readers: Mapping[str, Callable[[Any, int], Any]]
    folders: Mapping[str, Any]

    def batch_of(self, schema: Any) -> Any:
        """Return the rows with the columns and types of a table."""
        import pyarrow

        batch = self.rows_at.decode() if isinstance(self.rows_at, _RowGroup) else self.rows_at
        if batch.schema.equals(schema):
            return batch
        columns = []
        for field in schema:
            if field.name not in batch.schema.names:
                value = pyarrow.scalar(self.folders[field.name], field.type)
                column = pyarrow.repeat(value, batch.num_rows)
            else:
                column = batch.column(field.name)
                if column.type != field.type:
                    column = column.cast(field.type)
            columns.append(column)
        return type(batch).from_arrays(columns, schema=schema)


@dataclass(frozen=True)
class _File:
    """The mapped record batches of one file or table, or the row groups to decode, each with its
    number of rows; their schema; and the values in the names of its folders.
    """

    where: Path | str
    rows_at: list[tuple[Any, int]]
    schema: Any
    folders: Mapping[str, Any]

    @property
    def columns(self) -> dict[str, Any]:
        """The type of each column by name."""
        import pyarrow

        columns = {field.name: field.type for field in self.schema}
        for name, value in self.folders.items():
            columns[name] = pyarrow.null() if value is None else pyarrow.scalar(value).type
        return columns


@dataclass(frozen=True)
class _Contents:
    """What a table is made of."""

    pieces: list[_Piece]
    schema: Any
    notes: list[str]


def _read_source(source: Any, columns: Sequence[str] | None) -> _Contents:
    paths = source if isinstance(source, list | tuple) else [source]
    notes = list[str]()
    files = list[_File]()
    if all(isinstance(path, str | os.PathLike) for path in paths):
        for path in paths:
            files += _read_path(local_path(path, setting="source"), columns, notes)
    else:
        table = table_of(source, columns)
        files.append(_of_batches(table.to_batches(), table.schema, "the table", columns))
    if not files:
        import pyarrow

        return _Contents([], pyarrow.schema([]), notes)
    names_of_folders = set[str]()
    for file in files:
        names_of_folders.update(file.folders)
    if names_of_folders:
        names = sorted(names_of_folders)
        files = _with_numbers(files, names)
        notes.append(f"columns of the names of folders: {', '.join(names)}")
    schema = files[0].schema
    if names_of_folders or not all(file.schema.equals(schema) for file in files):
        schema, converted = joined_schema([(file.where, file.columns) for file in files])
        if converted:
            notes.append(f"columns of several types: {', '.join(converted)}")
    pieces = []
    readers_of = dict[Any, dict[str, Callable[[Any, int], Any]]]()  # many files have the same
    for file in files:
        types = file.columns
        key = (*map(str, types.items()), *file.folders.items())
        if key not in readers_of:
            readers_of[key] = {
                field.name: _column_reader(field, types[field.name], file.folders)
                for field in schema
            }
        readers = readers_of[key]
        pieces += [_Piece(at, rows, readers, file.folders) for at, rows in file.rows_at]
    return _Contents(pieces, schema, notes)


def _read_path(root: Path, columns: Sequence[str] | None, notes: list[str]) -> list[_File]:
    """Return the table of a file, or the tables in a directory; add to `notes` what was done."""
    listing = scan(root, TABLES)
    not_read = listing.line()
    if not listing.files:
        raise DataError(
            "no-table-in-directory",
            problem=f"no table in the directory {root}: no file ends in {', '.join(TABLES)}",
            reason=not_read or None,
            path=root,
        )
    if not_read:
        notes.append(not_read)
    parts = {part_of(path.relative_to(root)) for path in listing.files}
    named_parts = sorted(part for part in parts if part is not None)
    if len(named_parts) > 1:
        notes.append(f"rows of several parts are one table: {', '.join(named_parts)}")
    files = []
    for path in listing.files:
        with reading_tables(path):
            files.append(_of_file(path, columns, _folders(path, root)))
    return files


def _refuse_other_kinds(source: Any) -> None:
    paths = source if isinstance(source, list | tuple) else [source]
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            continue
        reader = _READERS.get(kind_of(Path(path)))
        if reader is not None and not Path(path).is_dir():
            raise DataError(
                "table-of-another-kind",
                problem=f"{path} is no Arrow and no Parquet file",
                reason=f"those end in {', '.join(TABLES)}",
                remedy=f"read it first: Table({reader})",
                path=str(path),
            )


def _folders(file: Path, root: Path) -> dict[str, Any]:
    """Return the columns in the names of the folders between a directory and its file, as Hive and
    Spark write them: label=cat/0.parquet.
    """
    columns = dict[str, Any]()
    for folder in file.relative_to(root).parts[:-1]:
        name, is_column, value = folder.partition("=")
        if is_column and name:
            columns[unquote(name)] = None if value == _NO_VALUE else unquote(value)
    return columns


def _with_numbers(files: Sequence[_File], names: Sequence[str]) -> list[_File]:
    """Return the files with integers for the values in the names of folders, if all of a name are
    integers as Python writes them.
    """
    with_integers = set()
    for name in names:
        values = [file.folders[name] for file in files if file.folders.get(name) is not None]
        if all(re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", value, re.ASCII) for value in values):
            with_integers.add(name)
    converted = []
    for file in files:
        folders = dict(file.folders)
        for name, value in folders.items():
            if name in with_integers and value is not None:
                folders[name] = int(value)
        converted.append(replace(file, folders=folders))
    return converted


def _of_file(path: Path, columns: Sequence[str] | None, folders: Mapping[str, Any]) -> _File:
    import pyarrow.parquet

    with path.open("rb") as opened:
        magic = opened.read(6)
    if magic.startswith(b"PAR1"):
        # neither threads nor buffers: workers are forked
        file = pyarrow.parquet.ParquetFile(path, memory_map=True, pre_buffer=False)
        schema, folders = _select(file.schema_arrow, path, columns, folders)
        groups = []
        for index in range(file.num_row_groups):
            rows = file.metadata.row_group(index).num_rows
            groups.append((_RowGroup(path, file, index, schema.names), rows))
        return _File(path, groups, schema, folders)
    mapped = pyarrow.memory_map(str(path))
    allocated_bytes = pyarrow.total_allocated_bytes()
    if magic != b"ARROW1":  # the stream format, of the cache of `datasets`
        reader = pyarrow.ipc.open_stream(mapped)
        return _of_batches(list(reader), reader.schema, path, columns, folders)
    reader = pyarrow.ipc.open_file(mapped)
    batches = [reader.get_batch(index) for index in range(min(1, reader.num_record_batches))]
    mapped_bytes = sum(batch.nbytes for batch in batches)
    if pyarrow.total_allocated_bytes() - allocated_bytes > mapped_bytes // 2:
        raise DataError(
            "table-compressed",
            problem=f"{path} is compressed, so its rows cannot be memory-mapped",
            remedy=[
                "write it uncompressed: pyarrow.feather.write_feather(table, path,"
                " compression='uncompressed')",
                "or keep it in memory: Table(pyarrow.feather.read_table(path))",
            ],
            path=path,
        )
    batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
    return _of_batches(batches, reader.schema, path, columns, folders)


def _of_batches(
    batches: Sequence[Any],
    schema: Any,
    where: Path | str,
    columns: Sequence[str] | None,
    folders: Mapping[str, Any] = MappingProxyType({}),
) -> _File:
    selected, folders = _select(schema, where, columns, folders)
    rows_at = []
    for batch in batches:
        if batch.num_rows:
            rows_at.append((batch.select(selected.names), batch.num_rows))
    return _File(where, rows_at, selected, folders)


def _select(
    schema: Any, where: Path | str, columns: Sequence[str] | None, folders: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the columns to read: those in the file, and those in the names of its folders."""
    if len({*schema.names}) < len(schema.names):
        raise DataError(
            "table-column-twice",
            problem=f"{where} has two columns of the same name: {', '.join(schema.names)}",
            remedy="rename one",
        )
    folders = {name: value for name, value in folders.items() if name not in schema.names}
    if columns is None:
        return schema, folders
    available = [*schema.names, *folders]
    unknown = [name for name in columns if name not in available]
    if unknown:
        raise DataError(
            "table-column-unknown",
            problem=f"{where} has no column {unknown[0]!r}; available: {', '.join(available)}",
            column=unknown[0],
            available=available,
        )
    for name in {*schema.names} - {*columns}:
        schema = schema.remove(schema.get_field_index(name))
    return schema, {name: value for name, value in folders.items() if name in columns}


def _column_reader(field: Any, kind: Any, folders: Mapping[str, Any]) -> Callable[[Any, int], Any]:
    """Return the function that reads a column of the table in a row of a file, in which it has the
    type `kind`.
    """
    import pyarrow

    name = field.name
    read = _reader(field.type)
    if name in folders:
        value = pyarrow.scalar(folders[name]).cast(field.type)
        return lambda _batch, _row: read(value)
    if kind == field.type:
        return lambda batch, row: read(batch.column(name)[row])
    return lambda batch, row: read(batch.column(name)[row].cast(field.type))


def _unreadable_value(name: str, row: int, schema: Any, problem: Exception) -> DataError:
    others = [other for other in schema.names if other != name]
    remedy = ["change the column in the table, as pandas does by .astype and pyarrow by .cast"]
    if others:
        remedy.append(f"or leave it out: sf.data.Table(..., columns={others})")
    return DataError(
        "table-value-unreadable",
        problem=f"column {name!r} of row {row} ({schema.field(name).type}) cannot be read:"
        f" {first_line(problem)}",
        remedy=remedy,
        column=name,
        row=row,
    )


def _reader(kind: Any) -> Callable[[Any], Any]:
    from pyarrow import FixedShapeTensorType, types

    if str(kind) in _NUMBERS:
        dtype = torch.from_numpy(np.empty(0, kind.to_pandas_dtype())).dtype
        return lambda scalar: torch.tensor(scalar.as_py(), dtype=dtype) if scalar.is_valid else None
    if types.is_struct(kind):
        readers = {field.name: _reader(field.type) for field in kind}

        def read_struct(scalar: Any) -> dict[str, Any] | None:
            if not scalar.is_valid:
                return None
            return {name: read(scalar[name]) for name, read in readers.items()}

        return read_struct
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        if str(kind.value_type) in _NUMBERS:
            return lambda scalar: _row(scalar) if scalar.is_valid else None
        read = _reader(kind.value_type)
        return lambda scalar: _nested(scalar, read) if scalar.is_valid else None
    if isinstance(kind, FixedShapeTensorType):

        def read_tensor(scalar: Any) -> Tensor | None:
            if not scalar.is_valid:
                return None
            return torch.from_numpy(np.array(scalar.to_numpy()))

        return read_tensor
    return lambda scalar: scalar.as_py()  # None if it is null


def _row(scalar: Any) -> Tensor:
    numbers = scalar.values
    if numbers.null_count:
        raise ValueError(
            "a list of numbers has an empty (null) entry: fill it before, or leave the row out"
        )
    return torch.from_numpy(np.array(numbers.to_numpy(zero_copy_only=False)))


def _nested(scalar: Any, read: Callable[[Any], Any]) -> Any:
    entries = [read(entry) for entry in scalar.values]
    if not all(isinstance(entry, Tensor) for entry in entries):
        return entries
    shapes = {entry.shape for entry in entries}
    return torch.stack(entries) if len(shapes) == 1 else entries
