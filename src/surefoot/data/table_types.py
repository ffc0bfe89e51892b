"""The columns of a table that consists of several files: one type for each, which holds the values
of all files.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.errors import DataError

Columns = Mapping[str, Any]  # types of pyarrow by name


def joined_schema(files: Sequence[tuple[Path | str, Columns]]) -> tuple[Any, list[str]]:
    """Return the schema of files with the same columns in any order, and the names of the columns
    whose type differs between them.

    Raises `DataError` for other columns, and for types that have no common one.
    """
    import pyarrow

    first_file, first = files[0]
    for file, columns in files:
        if columns.keys() != first.keys():
            raise _other_columns(file, columns, first_file, first)
    fields = []
    converted = []
    for name, kind in first.items():
        differing = [(file, columns[name]) for file, columns in files if columns[name] != kind]
        if differing:
            kinds = [kind, *dict.fromkeys(other for _, other in differing)]
            kind = _common(kinds)  # noqa: PLW2901
            if kind is None:
                raise _other_type(name, [*first], (first_file, kinds[0]), differing[0])
            converted.append(f"{name} ({', '.join(map(str, kinds))})")
        fields.append(pyarrow.field(name, kind))
    return pyarrow.schema(fields), converted


def _common(kinds: Sequence[Any]) -> Any:
    """Return the type that holds the values of all types, or None: numbers become double or the
    larger integer, text and bytes text.
    """
    import pyarrow
    from pyarrow import types

    plain = [_plain(kind) for kind in kinds]
    try:
        schemas = [pyarrow.schema([("x", kind)]) for kind in plain]
        common = pyarrow.unify_schemas(schemas, promote_options="permissive").field("x").type
    except (pyarrow.ArrowException, TypeError):
        return None
    is_text = any(types.is_string(kind) or types.is_large_string(kind) for kind in plain)
    if is_text and (types.is_binary(common) or types.is_large_binary(common)):
        return pyarrow.large_string() if types.is_large_binary(common) else pyarrow.string()
    return common


def _plain(kind: Any) -> Any:
    """Return the type of the values of a dictionary, of a view, and of lists of them."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(kind):
        return _plain(kind.value_type)
    if types.is_string_view(kind):
        return pyarrow.string()
    if types.is_binary_view(kind):
        return pyarrow.binary()
    if types.is_list(kind):
        return pyarrow.list_(_plain(kind.value_type))
    if types.is_large_list(kind):
        return pyarrow.large_list(_plain(kind.value_type))
    return kind


def _other_columns(
    file: Path | str, columns: Columns, first_file: Path | str, first: Columns
) -> DataError:
    common = [name for name in first if name in columns]
    remedy = "give each kind of file its own table"
    if common:
        remedy = f"read the columns that all files have: sf.data.Table(paths, columns={common})"
    return DataError(
        "table-columns-differ",
        problem=f"{file} has other columns than {first_file}: {', '.join(columns)}, not"
        f" {', '.join(first)}",
        remedy=remedy,
        columns=[*columns],
        first=[*first],
    )


def _other_type(
    name: str, names: Sequence[str], first: tuple[Path | str, Any], other: tuple[Path | str, Any]
) -> DataError:
    others = [other for other in names if other != name]
    remedy = ["write it in one type, as pandas does by .astype and pyarrow by .cast"]
    if others:
        remedy.append(f"or leave it out: sf.data.Table(paths, columns={others})")
    return DataError(
        "table-types-differ",
        problem=f"column {name!r} is {other[1]} in {other[0]}, and {first[1]} in {first[0]}",
        remedy=remedy,
        column=name,
        types=[str(first[1]), str(other[1])],
    )
