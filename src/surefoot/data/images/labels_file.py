"""A CSV file of labels beside pictures: which picture has which class."""

import csv
import io
import posixpath
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from surefoot.data.scan import printable
from surefoot.data.text.files import decode_utf8, open_unpacked
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


@dataclass(frozen=True)
class LabelsFile:
    """The rows of a labels file: line, name of the picture, label; and its columns of other things,
    such as split.
    """

    path: Path
    rows: list[tuple[int, str, str]]
    unused: list[str]

    def labels_of(self, pictures: Collection[Path], *, below: Iterable[Path]) -> dict[Path, str]:
        """Return the label of each picture that a row names. Names are relative to one of the
        directories in `below`, with or without suffix. Raises `DataError` for a row without a
        picture or label, and for a picture with two labels.
        """
        by_name = _by_name(pictures, below)
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

    def names_any(self, pictures: Collection[Path], *, below: Iterable[Path]) -> bool:
        """Return True if a row names one of the pictures."""
        by_name = _by_name(pictures, below)
        return any(_plain(name) in by_name for _, name, _ in self.rows)

    def _wrong_row(self, line: int, what: str) -> DataError:
        return DataError(
            "labels-file-row",
            problem=f"{printable(self.path)}, line {line} {what}",
            remedy="correct the row, or remove it",
            path=self.path,
            line=line,
        )


def labels_files(directory: Path) -> list[LabelsFile]:
    """Return the CSV files that stand in a directory and have a column of files and one of labels,
    or two columns without a header.
    """
    found = []
    for path in sorted(directory.iterdir()):
        is_csv = path.suffix.lower() == ".csv" and not path.name.startswith((".", "_"))
        if is_csv and path.is_file():
            file = _read(path)
            if file is not None:
                found.append(file)
    return found


def classes_of(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the classes in order: by number if all are whole numbers, else by name."""
    names = sorted({*labels})
    if all(name.isascii() and name.isdigit() for name in names):
        names.sort(key=int)
    return tuple(names)


def _read(path: Path) -> LabelsFile | None:
    with open_unpacked(path) as file:
        text = decode_utf8(file.read(), printable(path))
    first_line = text.partition("\n")[0]
    delimiter = ";" if first_line.count(";") > first_line.count(",") else ","
    lines = list(_lines(text, delimiter))
    if not lines:
        return None
    header = [_letters(cell) for cell in lines[0][1]]
    file_column = _column_of(header, FILE_COLUMNS)
    label_column = _column_of(header, LABEL_COLUMNS)
    unused = list[str]()
    if file_column is not None and label_column is not None:
        names = enumerate(lines[0][1])
        used = (file_column, label_column)
        unused = [name for column, name in names if name and column not in used]
        del lines[0]
    elif len(header) == 2 and file_column is None and label_column is None:  # no header
        file_column, label_column = 0, 1
    else:
        return None
    last = max(file_column, label_column)
    rows = []
    for line, cells in lines:
        whole = cells + [""] * (last + 1 - len(cells))
        rows.append((line, whole[file_column], whole[label_column]))
    return LabelsFile(path, rows, unused)


def _letters(cell: str) -> str:
    return "".join(filter(str.isalnum, cell.lower()))


def _column_of(header: list[str], names: Iterable[str]) -> int | None:
    """Return the column of the first name that the header has, or None."""
    for name in map(_letters, names):
        if name in header:
            return header.index(name)
    return None


def _lines(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    for cells in reader:
        if any(cells):
            yield reader.line_num, [cell.strip() for cell in cells]


def _by_name(pictures: Collection[Path], below: Iterable[Path]) -> dict[str, Path]:
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
