"""Tables of other libraries in memory, as a `pyarrow.Table`; errors of files of tables."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.data.scan import PARQUET, kind_of
from surefoot.data.text_files import open_unpacked
from surefoot.errors import DataError, first_line


def table_of(source: Any, columns: Sequence[str] | None) -> Any:
    """Return the `pyarrow.Table` of a source in memory, and no other columns of a DataFrame than
    `columns`. NaN stays NaN, also in a DataFrame of pandas.

    Raises `DataError` for what is no table, and for columns that no table can hold.
    """
    import pyarrow

    source = _loaded(source)
    if _is_of(source, "pandas", "Series") or _is_of(source, "polars", "Series"):
        raise DataError(
            "table-of-one-column",
            problem="a Series is one column, and the rows of a table have names",
            remedy="give a table of it: sf.data.Table(series.to_frame('x'))",
        )
    is_pandas = _is_of(source, "pandas", "DataFrame")
    if is_pandas and columns is not None:
        known = [name for name in source.columns if name in columns]
        if len(known) == len(columns):  # otherwise the error names the columns that are there
            source = source[known]
    if isinstance(source, dict):
        source = {name: _without_pandas(column) for name, column in source.items()}
    try:
        table = _of_pandas(source) if is_pandas else pyarrow.table(source)
    except (
        pyarrow.ArrowException,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
    ) as problem:
        if is_pandas:
            raise _unknown_column(source, problem) from problem
        raise _unknown_source(source, problem) from problem
    for field, column in zip(table.schema, table.columns, strict=True):
        _check_dates(field, column)
    return table


def _loaded(source: Any) -> Any:
    """Return the table of a source that is not read yet: a LazyFrame of polars, a data set, a
    scanner or a Parquet file of pyarrow, a data set of lance.
    """
    package = type(source).__module__.partition(".")[0]
    kind = type(source).__name__
    if (package, kind) == ("polars", "LazyFrame"):
        return source.collect()
    if package == "pyarrow" and kind in ("ParquetFile", "ParquetDataset"):
        return source.read()
    if package in ("pyarrow", "lance") and callable(getattr(source, "to_table", None)):
        return source.to_table()
    return source


def _is_of(source: Any, package: str, kind: str) -> bool:
    """Return True for an object of a class of another library, or of a class that inherits it."""
    for owner in type(source).__mro__:
        if owner.__name__ == kind and owner.__module__.partition(".")[0] == package:
            return True
    return False


def _of_pandas(frame: Any) -> Any:
    """Return the table of a DataFrame. Its index is no column.

    pyarrow makes null of NaN, because pandas writes NaN for values that are missing. Null fits into
    no batch of numbers, so numbers that are not a number stay what they are.
    """
    import pyarrow

    table = pyarrow.Table.from_pandas(frame, preserve_index=False)
    for index, field in enumerate(table.schema):
        series = frame.iloc[:, index]
        if isinstance(series.dtype, np.dtype) and _holds_floats(field.type):
            values = series.to_numpy()
            try:
                column = pyarrow.array(values, type=field.type, from_pandas=False)
            except pyarrow.ArrowException:  # NaN stands for a list
                continue
            table = table.set_column(index, field, column)
    return table


def _without_pandas(column: Any) -> Any:
    """Return a Series of floats as an array, in which NaN is no null; anything else as it is."""
    is_series = _is_of(column, "pandas", "Series")
    if is_series and isinstance(column.dtype, np.dtype) and column.dtype.kind == "f":
        return column.to_numpy()
    return column


def _holds_floats(kind: Any) -> bool:
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _holds_floats(kind.value_type)
    return bool(types.is_floating(kind))


def _unknown_column(frame: Any, problem: Exception) -> DataError:
    import pyarrow

    for index, name in enumerate(frame.columns):
        try:
            pyarrow.Table.from_pandas(frame.iloc[:, [index]], preserve_index=False)
        except Exception as of_column:
            others = [other for other in frame.columns if other != name]
            remedy = ["change it: a complex column into two, its real and its imaginary part"]
            if others:
                remedy.append(f"or leave it out: sf.data.Table(..., columns={others})")
            return DataError(
                "table-column-unreadable",
                problem=f"column {name!r} ({frame.dtypes.iloc[index]}) fits into no table:"
                f" {first_line(of_column)}",
                reason="a table holds numbers, text, bytes, dates, and lists and dictionaries of them",
                remedy=remedy,
                column=str(name),
            )
    return _unknown_source(frame, problem)


def _unknown_source(source: Any, problem: Exception) -> DataError:
    return DataError(
        "table-source-unknown",
        problem=f"a {type(source).__name__} cannot be read as a table: {first_line(problem)}",
        remedy="give a path, a pyarrow.Table or a DataFrame whose columns have different names;"
        " a list of samples is a data set by itself",
    )


def _check_dates(field: Any, column: Any) -> None:
    """Raise `DataError` if dates lie outside the years 1 to 9999, which Python's dates have."""
    from pyarrow import compute, types

    if not (types.is_timestamp(field.type) or types.is_date(field.type)):
        return
    try:
        compute.min_max(column).as_py()
    except (ValueError, OverflowError) as problem:
        raise DataError(
            "table-dates-far",
            problem=f"column {field.name!r} ({field.type}) has dates that Python has not:"
            f" {first_line(problem)}",
            reason="its dates are of the years 1 to 9999",
            remedy="give them as numbers, of days or seconds, or leave the column out of the table",
            column=field.name,
        ) from problem


@contextmanager
def reading_tables(path: Path) -> Iterator[None]:
    """Convert errors of pyarrow to a `DataError` with the path."""
    import pyarrow

    try:
        yield
    except (pyarrow.lib.ArrowException, OSError) as problem:
        with open_unpacked(path) as file:
            file.read(1)  # names a pointer of Git LFS, and a file that cannot be read
        kind = "Parquet" if kind_of(path) in PARQUET else "an Arrow or Parquet file"
        why = first_line(problem) or type(problem).__name__
        raise DataError(
            "table-damaged",
            problem=f"{path} is damaged, or is not {kind}: {why[:200]}",
            remedy="was it copied completely?",
            path=path,
        ) from problem
