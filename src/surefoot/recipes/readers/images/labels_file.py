"""A CSV file of labels beside pictures: which picture has which class."""

import csv
import io
import posixpath
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from surefoot.data.scan import printable
from surefoot.data.text_files import decode_utf8, open_unpacked
from surefoot.errors import DataError

# compared by their letters alone: Image ID is image_id
FILE_COLUMNS = (
    *("file", "file_name", "image", "path", "file_path"),
    *("image_id", "image_name", "image_path", "img", "id", "id_code"),
)
LABEL_COLUMNS = (
    *("label", "labels", "class", "category", "class_name", "target"),
    *("breed", "species", "diagnosis"),
)
_START = 1 << 16  # bytes of a file in which its header is looked for


@dataclass(frozen=True)
class LabelsFile:
    """The rows of a labels file: line, name of the picture, label; and its columns of other things,
    such as split.
    """

    path: Path
    rows: list[tuple[int, str, str]]
    unused: list[str]

    def labels_of(self, by_name: Mapping[str, Path]) -> dict[Path, str]:
        """Return the label of each picture that a row names. Raises `DataError` for a row without a
        picture or label, and for a picture with two labels.
        """
        labels: dict[Path, str] = {}
        for line, name, label in self.rows:
            picture = by_name.get(_plain(name))
            if picture is None:
                raise self._wrong_row(line, f"names {name!r}, and there is no such picture")
            if not label:
                raise self._wrong_row(line, f"has no label for {name!r}")
            if labels.setdefault(picture, label) != label:
                raise self._wrong_row(line, f"has a second label for {name!r}")
        return labels

    def names_any(self, pictures: Collection[Path], by_name: Mapping[str, Path]) -> bool:
        """Return True if a row names one of the pictures."""
        return any(by_name.get(_plain(name)) in pictures for _, name, _ in self.rows)

    def _wrong_row(self, line: int, what: str) -> DataError:
        return DataError(
            "labels-file-row",
            problem=f"{printable(self.path)}, line {line} {what}",
            remedy="correct the row, or remove it",
            path=self.path,
            line=line,
        )


def labels_files(paths: Iterable[Path]) -> list[LabelsFile]:
    """Return those of some CSV files that have a column of files and one of labels, or two columns
    without a header.
    """
    files = []
    for path in paths:
        file = _read(path)
        if file is not None:
            files.append(file)
    return files


def classes_of(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the classes in order: by number if all are whole numbers, else by name."""
    names = sorted({*labels})
    if all(name.isascii() and name.isdigit() for name in names):
        names.sort(key=int)
    return tuple(names)


def _read(path: Path) -> LabelsFile | None:
    """Return a labels file, or None for another table. That may be large and of any encoding: only
    its start is read.
    """
    with open_unpacked(path) as file:
        start = file.read(_START)
        beginning = start.decode("utf-8-sig", errors="replace").lstrip()
        first_line = beginning.partition("\n")[0]
        delimiter = ";" if first_line.count(";") > first_line.count(",") else ","
        cells = next(csv.reader([first_line], delimiter=delimiter), [])
        header = [_letters(cell) for cell in cells]
        file_column = _column_of(header, FILE_COLUMNS)
        label_column = _column_of(header, LABEL_COLUMNS)
        has_header = file_column is not None and label_column is not None
        if len(header) == 2 and file_column is None and label_column is None:
            file_column = 0
            label_column = 1
        if file_column is None or label_column is None:
            return None
        text = decode_utf8(start + file.read(), printable(path))
    lines = _lines(text, delimiter, path)
    unused = list[str]()
    if has_header:
        used = (file_column, label_column)
        for column, name in enumerate(lines.pop(0)[1]):
            if name and column not in used:
                unused.append(name)
    rows = []
    for line, cells in lines:
        name = cells[file_column] if file_column < len(cells) else ""
        label = cells[label_column] if label_column < len(cells) else ""
        rows.append((line, name, label))
    return LabelsFile(path, rows, unused)


def _letters(cell: str) -> str:
    return "".join(filter(str.isalnum, cell.lower()))


def _column_of(header: list[str], names: Iterable[str]) -> int | None:
    """Return the column of the first name that the header has, or None."""
    for name in map(_letters, names):
        if name in header:
            return header.index(name)
    return None


def _lines(text: str, delimiter: str, path: Path) -> list[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    lines = []
    try:
        for cells in reader:
            if any(cells):
                lines.append((reader.line_num, [cell.strip() for cell in cells]))
    except csv.Error as problem:
        raise DataError(
            "labels-file-damaged",
            problem=f"{printable(path)}, line {reader.line_num} is no row of a CSV file: {problem}",
            remedy="look for a quotation mark that is not closed",
            path=path,
            line=reader.line_num,
        ) from problem
    return lines


def pictures_by_name(pictures: Collection[Path], *, below: Iterable[Path]) -> dict[str, Path]:
    """Return the pictures by their names below each directory, and by those without suffix where
    these are unique.
    """
    by_name: dict[str, Path] = {}
    by_stem: dict[str, set[Path]] = {}
    for directory in below:
        depth = len(directory.parts)
        for picture in pictures:
            if picture.parts[:depth] == directory.parts:
                name = "/".join(picture.parts[depth:])
                by_name.setdefault(name, picture)
                by_stem.setdefault(posixpath.splitext(name)[0], set()).add(picture)
    for stem, named in by_stem.items():
        if len(named) == 1:
            by_name.setdefault(stem, *named)
    return by_name


def _plain(name: str) -> str:
    return posixpath.normpath(name.replace("\\", "/"))
