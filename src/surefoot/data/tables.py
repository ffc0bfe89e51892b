"""Rows of Arrow and Parquet tables as samples, read by index without loading the table."""

import os
import warnings
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.config.extras import refuse_missing
from surefoot.config.keywords import known_keywords
from surefoot.config.paths import local_path
from surefoot.data.fingerprints import hash_of, spaced
from surefoot.data.scan import TABLES, scan
from surefoot.data.text.documents import reading_tables
from surefoot.errors import ConfigError, DataError, first_line

_NUMBERS = {
    "bool",
    "halffloat",
    "float",
    "double",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
_BLOCKS = 16  # of neighboring rows that the fingerprint reads: each may decode a row group
_DECODED = 64  # row groups decoded for fewer than 4 rows each: reading is slow


@known_keywords
class Table:
    """Data set of the rows of an Arrow table, a DataFrame, or Arrow or Parquet files: each row is a
    dictionary by column.

    source: a `pyarrow.Table`, a DataFrame of pandas or polars, a LazyFrame of polars, a data set of
    pyarrow or lance or a `ParquetFile` (which are read into memory), or the path of a file or a
    directory, or several paths. Files in a directory are sorted by path. Files are memory-mapped
    and need not fit into memory. columns: the names of the columns to read (default: all).
    max_cache_bytes: limit of the decoded row groups of Parquet files that each process keeps, at
    least one group.

    Numbers and lists of numbers become tensors of the column's type, text `str`, binary values
    `bytes`, structs dictionaries, null None, and all others Python objects. Needs pyarrow (the
    extra "hub"). Raises `DataError` for damaged files, unknown columns, and files with different
    columns.

    >>> import pyarrow
    >>> table = Table(pyarrow.table({"tokens": [[5, 6], [7, 8]], "label": [0, 1]}))
    >>> len(table), table[1]
    (2, {'tokens': tensor([7, 8]), 'label': tensor(1)})
    """

    def __init__(
        self, source: Any, *, columns: Sequence[str] | None = None, max_cache_bytes: int = 1 << 28
    ) -> None:
        refuse_missing("sf.data.Table", "pyarrow")
        if isinstance(columns, str):
            raise ConfigError(
                f"Table: columns = {columns!r} is one text\n  give a list of names: columns=[{columns!r}]"
            )
        self.source, self.columns, self.max_cache_bytes = source, columns, max_cache_bytes
        pieces = _pieces(source, columns)
        self._pieces = [piece for piece, _, _ in pieces]
        self._ends = [*accumulate(rows for _, rows, _ in pieces)]
        self._schema = pieces[0][2] if pieces else None
        self._readers = {field.name: _reader(field.type) for field in self._schema or ()}
        self._decoded: OrderedDict[int, Any] = OrderedDict()
        self._reads = self._decodings = 0

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, sample: int) -> dict[str, Any]:
        if not 0 <= sample < len(self):
            raise IndexError(f"row {sample} is outside a table of {len(self)} rows")
        index = bisect_right(self._ends, sample)
        piece, row = self._piece(index), sample - (self._ends[index - 1] if index else 0)
        return {name: read(piece.column(name)[row]) for name, read in self._readers.items()}

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of rows, the names of the columns, and a hash of evenly spaced rows,
        whatever the kind of file.
        """
        return {"samples": len(self), "columns": list(self._readers), "sha256": self._hash}

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
                    writer.write(piece.decode() if isinstance(piece, _RowGroup) else piece)
            file.flush()
            os.fsync(file.fileno())
        partly.replace(path)
        return Table(path)

    def __reduce__(self) -> Any:  # workers that are not forked open the files again
        return partial(Table, columns=self.columns, max_cache_bytes=self.max_cache_bytes), (
            self.source,
        )

    @cached_property
    def _hash(self) -> str:
        block = -(-len(spaced(self[0], len(self))) // _BLOCKS) if len(self) else 0
        firsts = np.linspace(0, len(self) - block, _BLOCKS).astype(int).tolist()
        return hash_of(
            [self[row] for row in sorted({first + row for first in firsts for row in range(block)})]
        )

    def _piece(self, index: int) -> Any:
        piece = self._pieces[index]
        if not isinstance(piece, _RowGroup):
            return piece
        self._reads += 1
        if index not in self._decoded:
            self._decoded[index] = piece.decode()
            self._decodings += 1
            if self._decodings % _DECODED == 0:
                reads, self._reads = self._reads, 0
                if reads < 4 * _DECODED:  # Python shows equal warnings once
                    warnings.warn(
                        f"{piece.path}: most rows decode a row group again, because their order is random\n"
                        "  write an Arrow file once, and train on the table that it returns: table.write_arrow('train.arrow')",
                        stacklevel=3,
                    )
            while (
                len(self._decoded) > 1
                and sum(each.nbytes for each in self._decoded.values()) > self.max_cache_bytes
            ):
                self._decoded.popitem(last=False)
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
            return self.file.read_row_group(
                self.index, columns=self.names, use_threads=False
            ).combine_chunks()


# Each piece: a mapped record batch, or a row group to decode; its number of rows; its schema.
def _pieces(source: Any, columns: Sequence[str] | None) -> list[tuple[Any, int, Any]]:
    import pyarrow

    paths = source if isinstance(source, list | tuple) else [source]
    if not all(isinstance(path, str | os.PathLike) for path in paths):
        source = _loaded(source)
        try:
            is_pandas = type(source).__module__.startswith("pandas")  # whose index is no column
            table = (
                pyarrow.Table.from_pandas(source, preserve_index=False)
                if is_pandas
                else pyarrow.table(source)
            )
        except (TypeError, ValueError) as problem:
            raise DataError(
                f"a {type(source).__name__} cannot be read as a table: {first_line(problem)}\n"
                "  give a path, a pyarrow.Table or a DataFrame; a list of samples is a data set by itself"
            ) from problem
        return _batches(table.to_batches(), table.schema, "the table", columns)
    files = [file for path in paths for file in _files(local_path(path, setting="source"))]
    pieces = list[tuple[Any, int, Any]]()
    for file in files:
        with reading_tables(file):
            for piece in _pieces_of(file, columns):
                pieces.append(piece)
                if not piece[2].equals(pieces[0][2]):
                    now, first = (
                        {field.name: str(field.type) for field in each[2]}
                        for each in (piece, pieces[0])
                    )
                    raise DataError(
                        f"{file} has other columns than {files[0]}: {now}, not {first}\n"
                        "  name the columns that all files have: Table(paths, columns=[...])"
                    )
    return pieces


def _loaded(source: Any) -> Any:
    """Return the table of a source that is not read yet: a LazyFrame of polars, a data set, a
    scanner or a Parquet file of pyarrow, a data set of lance.
    """
    package, kind = type(source).__module__.partition(".")[0], type(source).__name__
    if (package, kind) == ("polars", "LazyFrame"):
        return source.collect()
    if package == "pyarrow" and kind in ("ParquetFile", "ParquetDataset"):
        return source.read()
    if package in ("pyarrow", "lance") and callable(getattr(source, "to_table", None)):
        return source.to_table()
    return source


def _files(path: Path) -> list[Path]:
    found = scan(path, TABLES)
    if not found.files:
        raise DataError(
            "no-table-in-directory",
            problem=f"no table in the directory {path}: no file ends in {', '.join(TABLES)}",
            reason=found.line() or None,
            path=path,
        )
    return found.files


def _pieces_of(path: Path, columns: Sequence[str] | None) -> list[tuple[Any, int, Any]]:
    import pyarrow.parquet

    with path.open("rb") as opened:
        magic = opened.read(6)
    if magic.startswith(b"PAR1"):
        # neither threads nor buffers: workers are forked
        file = pyarrow.parquet.ParquetFile(path, memory_map=True, pre_buffer=False)
        schema = _select(file.schema_arrow, path, columns)
        groups = [
            _RowGroup(path, file, index, schema.names) for index in range(file.num_row_groups)
        ]
        return [(group, file.metadata.row_group(group.index).num_rows, schema) for group in groups]
    mapped, allocated = pyarrow.memory_map(str(path)), pyarrow.total_allocated_bytes()
    if magic != b"ARROW1":  # the stream format, of the cache of `datasets`
        reader = pyarrow.ipc.open_stream(mapped)
        return _batches(list(reader), reader.schema, path, columns)
    reader = pyarrow.ipc.open_file(mapped)
    first = [reader.get_batch(index) for index in range(min(1, reader.num_record_batches))]
    if pyarrow.total_allocated_bytes() - allocated > sum(batch.nbytes for batch in first) // 2:
        raise DataError(
            f"{path} is compressed, so its rows cannot be memory-mapped\n"
            "  write it uncompressed: pyarrow.feather.write_feather(table, path, compression='uncompressed'),\n"
            "  or keep it in memory: Table(pyarrow.feather.read_table(path))"
        )
    return _batches(
        [*map(reader.get_batch, range(reader.num_record_batches))], reader.schema, path, columns
    )


def _batches(
    batches: Sequence[Any], schema: Any, where: Path | str, columns: Sequence[str] | None
) -> list[tuple[Any, int, Any]]:
    selected = _select(schema, where, columns)
    return [
        (batch.select(selected.names), batch.num_rows, selected)
        for batch in batches
        if batch.num_rows
    ]


def _select(schema: Any, where: Path | str, columns: Sequence[str] | None) -> Any:
    if len({*schema.names}) < len(schema.names):
        raise DataError(
            f"{where} has two columns of the same name: {', '.join(schema.names)}\n  rename one"
        )
    if unknown := [name for name in columns or () if name not in schema.names]:
        raise DataError(
            f"{where} has no column {unknown[0]!r}; available: {', '.join(schema.names)}"
        )
    for name in [] if columns is None else {*schema.names} - {*columns}:
        schema = schema.remove(schema.get_field_index(name))
    return schema


def _reader(kind: Any) -> Callable[[Any], Any]:
    from pyarrow import FixedShapeTensorType, types

    if str(kind) in _NUMBERS:
        dtype = torch.from_numpy(np.empty(0, kind.to_pandas_dtype())).dtype
        return lambda scalar: torch.tensor(scalar.as_py(), dtype=dtype) if scalar.is_valid else None
    if types.is_struct(kind):
        readers = {field.name: _reader(field.type) for field in kind}
        return lambda scalar: (
            {name: read(scalar[name]) for name, read in readers.items()}
            if scalar.is_valid
            else None
        )
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        read = (
            _row
            if str(kind.value_type) in _NUMBERS
            else partial(_nested, read=_reader(kind.value_type))
        )
        return lambda scalar: read(scalar) if scalar.is_valid else None
    if isinstance(kind, FixedShapeTensorType):
        return lambda scalar: (
            torch.from_numpy(np.array(scalar.to_numpy())) if scalar.is_valid else None
        )
    return lambda scalar: scalar.as_py()  # None if it is null


def _row(scalar: Any) -> Tensor:
    numbers = scalar.values
    if numbers.null_count:
        raise ValueError(
            "a list of numbers has an empty (null) entry: fill it before, or leave the row out"
        )
    return torch.from_numpy(np.array(numbers.to_numpy(zero_copy_only=False)))


def _nested(scalar: Any, *, read: Callable[[Any], Any]) -> Any:
    parts = [read(part) for part in scalar.values]
    shapes = {part.shape if isinstance(part, Tensor) else None for part in parts}
    return torch.stack(parts) if len(shapes) == 1 and None not in shapes else parts
