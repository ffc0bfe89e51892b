"""What a directory of pictures holds: parts, classes, labels, and what is not used.

Parts are named as in Hugging Face's `datasets`, without case. A part has a folder for each class, or
a file of labels (`labels_file`). A folder that is named as a part, but holds pictures and no folders,
is a class if it stands beside other classes.
"""

import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from pathlib import Path

import numpy as np

from surefoot.data.part_names import PARTS
from surefoot.data.scan import (
    OTHER_KIND,
    PICTURES,
    LeftOut,
    Level,
    Scan,
    level_of,
    printable,
    scan,
    scan_as_before,
)
from surefoot.errors import DataError, Setting
from surefoot.recipes.readers.images.folder import LabeledFiles, first_names
from surefoot.recipes.readers.images.labels_file import (
    LabelsFile,
    classes_of,
    labels_files,
    pictures_by_name,
)

NO_LABELS = "pictures without labels: surefoot predict RUN DIR names them"
NO_PICTURES = "it holds no pictures"
NO_PART = "a folder beside train/ that is no part"
SECOND = "another folder is this part"
NO_CLASS = "it is in no class folder"
NO_ROW = "the file of labels does not name it"

_SUFFIXES_BEFORE = (
    *(".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"),
)
_PARTS_BEFORE = {
    "training": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}


LabelsReader = Callable[[], list[LabelsFile]]


@dataclass(frozen=True)
class PictureLayout:
    """The labeled pictures of each part ("training", and "val" and "test" if they exist), and all
    classes.
    """

    path: Path
    parts: dict[str, LabeledFiles]
    classes: tuple[str, ...]
    left_out: list[LeftOut] = field(default_factory=list)
    labels: list[LabelsFile] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Return a line for each part that lacks classes, for pictures without labels, and for
        columns of a file of labels that are not used, such as split.
        """
        lines = []
        for file in self.labels:
            if file.unused:
                columns = first_names([*map(printable, file.unused)])
                lines.append(
                    f"{printable(file.path.name)} has columns that are not used: {columns}"
                )
        for part, files in self.parts.items():
            there = {*files.labels.tolist()}
            absent = [name for index, name in enumerate(self.classes) if index not in there]
            if absent:
                lines.append(f"{part} has no picture of {first_names(absent)}")
        for entry in self.left_out:
            if entry.reason == NO_LABELS:
                lines.append(f"{printable(entry.path.name)}/ has {NO_LABELS}")
        return lines

    def not_read(self) -> str:
        """Return one line about the files and folders that are not used, or "" without any."""
        return Scan(self.path, all_paths(self.parts), self.left_out).line()


def all_paths(parts: Mapping[str, LabeledFiles]) -> list[Path]:
    """Return the pictures of all parts."""
    paths = []
    for files in parts.values():
        paths += files.paths
    return paths


@dataclass(frozen=True)
class _Directory:
    """The pictures of a directory: those that stand in it, and those below each of its folders.
    `tables` are the CSV files that stand in it.
    """

    path: Path
    direct: list[Path]
    folders: dict[str, list[Path]]
    left_out: list[LeftOut]
    tables: list[Path] = field(default_factory=list)

    @property
    def pictures(self) -> list[Path]:
        pictures = [*self.direct]
        for in_folder in self.folders.values():
            pictures += in_folder
        return pictures

    @property
    def full_folders(self) -> list[str]:
        return [name for name, pictures in self.folders.items() if pictures]


@dataclass(frozen=True)
class _Labels:
    """A file of labels, and the label of each picture that it names."""

    file: LabelsFile
    of_picture: dict[Path, str]


def class_name(folder: str) -> str:
    """Return the name of a folder as one of a class: composed, and with escapes for bytes that are
    not UTF-8, so that every file and terminal takes it.

    >>> class_name("cafe" + chr(0x301)) == "caf" + chr(0xE9)
    True
    """
    return unicodedata.normalize("NFC", printable(folder))


def read_layout(root: Path, classes: Sequence[str] | None) -> PictureLayout:
    """Find parts, classes and labels in a directory. `classes` are the names of all classes, in
    order, if the user gives them. Raises `DataError` if it could be read in two ways.
    """
    asked = None if classes is None else tuple(class_name(name) for name in classes)
    top = level_of(root)
    named: dict[str, list[_Directory]] = {}
    for part, part_names in PARTS.items():
        named[part] = [_directory(path) for path in _folders_named(top, part_names)]
    of_parts = list(chain.from_iterable(named.values()))
    # read where class folders give no labels, and once
    in_root = cache(partial(labels_files, _tables(top.files)))
    for training in named["training"]:
        labels = _labels_for(training, of_parts, root=root, in_root=in_root, of_training=True)
        if labels is not None or training.full_folders:
            return _read_parts(root, top, training, named, labels, in_root, asked)
    return _read_one_part(root, of_parts, in_root, asked)


def _read_parts(
    root: Path,
    top: Level,
    training: _Directory,
    named: dict[str, list[_Directory]],
    labels: _Labels | None,
    in_root: LabelsReader,
    asked: tuple[str, ...] | None,
) -> PictureLayout:
    """Read a directory that has a folder for the training part."""
    if asked is not None:
        names = asked
    elif labels is not None:
        names = _classes_of_labels(labels)
    else:
        names = _classes_of_folders(training)
    _refuse_few(names, training, labels, in_root)
    labels_used = dict[Path, LabelsFile]()
    if labels is not None:
        labels_used[labels.file.path] = labels.file
    parts = {"training": _files_of(training, labels, names)}
    left_out = _left_in(training, parts["training"], labels)
    used = {training.path}
    of_parts = list(chain.from_iterable(named.values()))
    for part in ("val", "test"):
        for directory in named[part]:
            labels = _labels_for(directory, of_parts, root=root, in_root=in_root, of_training=False)
            used.add(directory.path)
            if part in parts:
                left_out.append(LeftOut(directory.path, SECOND, is_folder=True))
            elif not directory.pictures:
                left_out.append(LeftOut(directory.path, NO_PICTURES, is_folder=True))
            elif labels is None and _has_no_labels(directory, names):
                left_out.append(LeftOut(directory.path, NO_LABELS, is_folder=True))
            else:
                parts[part] = _files_of(directory, labels, names)
                if labels is not None:
                    labels_used[labels.file.path] = labels.file
                left_out += _left_in(directory, parts[part], labels)
    left_out += _left_beside(top, {*used, *labels_used})
    return PictureLayout(root, parts, names, left_out, [*labels_used.values()])


def _left_beside(top: Level, used: Collection[Path]) -> list[LeftOut]:
    """Return the folders and files beside the parts that are not used."""
    left_out = []
    for path in _folders(top):
        if path not in used:
            is_second = path.name.lower() in PARTS["training"]
            left_out.append(LeftOut(path, SECOND if is_second else NO_PART, is_folder=True))
    left_out += top.left_out
    for path in top.files:
        if path not in used:
            is_picture = path.suffix.lower() in PICTURES
            left_out.append(LeftOut(path, NO_CLASS if is_picture else OTHER_KIND))
    return left_out


def _read_one_part(
    root: Path,
    of_parts: list[_Directory],
    in_root: LabelsReader,
    asked: tuple[str, ...] | None,
) -> PictureLayout:
    """Read a directory whose pictures are all for training."""
    top = _directory(root)
    for directory in of_parts:
        if directory.full_folders:
            raise _no_training_part(directory.path)
    flat = [directory.path.name for directory in of_parts if directory.direct]
    plain = [name for name in top.full_folders if name not in flat]
    labels = _labels_for(top, [top], root=root, in_root=in_root, of_training=True, ignored=flat)
    if labels is not None:
        names = asked or _classes_of_labels(labels)
        _refuse_few(names, top, labels, in_root)
        files = _files_of(top, labels, names)
        left_out = _left_in(top, files, labels)
        return PictureLayout(root, {"training": files}, names, left_out, [labels.file])
    unlabeled = []
    for name in flat:
        is_training = name.lower() in PARTS["training"]
        if asked is not None and class_name(name) not in asked:
            unlabeled.append(name)
        elif asked is None and not (is_training and plain):
            _refuse_flat_part(root, name, plain, in_root)
    if asked is None:
        _refuse_looks_like_parts(top)
    for name in unlabeled:
        del top.folders[name]
    left_out = [LeftOut(root / name, NO_LABELS, is_folder=True) for name in unlabeled]
    for directory in of_parts:
        if not directory.pictures:
            del top.folders[directory.path.name]
            left_out.append(LeftOut(directory.path, NO_PICTURES, is_folder=True))
    names = _classes_of_folders(top) if asked is None else asked
    _refuse_few(names, top, None, in_root)
    files = _files_of(top, None, names)
    return PictureLayout(root, {"training": files}, names, [*left_out, *_left_in(top, files, None)])


def _directory(path: Path) -> _Directory:
    listing = scan(path, PICTURES)
    depth = len(path.parts)
    folders: dict[str, list[Path]] = {}
    for folder in listing.folders:
        if len(folder.parts) == depth + 1:
            folders[folder.name] = []
    direct = []
    for picture in listing.files:
        inside = picture.parts[depth:]
        if len(inside) == 1:
            direct.append(picture)
        else:
            folders[inside[0]].append(picture)
    others = [entry.path for entry in listing.left_out if entry.reason == OTHER_KIND]
    tables = _tables([file for file in others if len(file.parts) == depth + 1])
    return _Directory(path, direct, folders, listing.left_out, tables)


def _tables(files: Sequence[Path]) -> list[Path]:
    return [file for file in files if file.suffix.lower() == ".csv"]


def _folders(level: Level) -> list[Path]:
    return sorted([*level.folders, *level.links])


def _folders_named(level: Level, names: Sequence[str]) -> list[Path]:
    """Return the folders with one of these names, without case; the usual names first."""
    folders = [path for path in _folders(level) if path.name.lower() in names]

    def rank(path: Path) -> tuple[bool, int]:
        return path.name not in names, names.index(path.name.lower())

    return sorted(folders, key=rank)


def _labels_for(
    directory: _Directory,
    of_parts: Sequence[_Directory],
    *,
    root: Path,
    in_root: LabelsReader,
    of_training: bool,
    ignored: Sequence[str] = (),
) -> _Labels | None:
    """Return the labels of a file that stands in a directory or in `root` and names pictures of the
    directory. Class folders need none. Names may leave out a folder that holds all pictures, and in
    `root` the training part.
    """
    full = [name for name in directory.full_folders if name not in ignored]
    if len(full) > 1 or not directory.pictures:
        return None
    files = []
    pictures = directory.pictures
    inside = {*pictures}
    below = [directory.path, *(directory.path / name for name in full)]
    if directory.path != root:
        files = labels_files(directory.tables)
    if not files:
        files = in_root()
        pictures = list(chain.from_iterable(part.pictures for part in of_parts))
        below = [root, *below] if of_training else [root]
    if not files:
        return None
    by_name = pictures_by_name(pictures, below=below)
    naming = [file for file in files if file.names_any(inside, by_name)]
    if len(naming) > 1:
        raise DataError(
            "labels-files-several",
            problem=f"{printable(naming[0].path)} and {printable(naming[1].path)} both name pictures"
            f" of {printable(directory.path)}",
            remedy="keep the one with the labels to train on",
            paths=[file.path for file in naming],
        )
    if not naming:
        return None
    (file,) = naming
    return _Labels(file, file.labels_of(by_name))


def _classes_of_folders(directory: _Directory) -> tuple[str, ...]:
    """Return the names of class folders; raise `DataError` if one of them is empty."""
    for name, pictures in directory.folders.items():
        if not pictures:
            raise DataError(
                "class-without-images",
                problem=f"class folder {printable(directory.path / name)} holds no image: every class"
                f" needs at least one file of {', '.join(PICTURES[:3])} ...",
                reason=Scan(directory.path, [], directory.left_out).line() or None,
                remedy=[
                    "add images, or remove the folder",
                    ("name all classes, with or without images, with", Setting("data.classes")),
                ],
                path=directory.path / name,
            )
    return tuple(dict.fromkeys(map(class_name, directory.folders)))


def _classes_of_labels(labels: _Labels) -> tuple[str, ...]:
    return classes_of(map(class_name, labels.of_picture.values()))


def _files_of(
    directory: _Directory, labels: _Labels | None, classes: Sequence[str]
) -> LabeledFiles:
    """Return the pictures of a part with their labels, sorted by class and path."""
    of_class: dict[str, list[Path]] = {name: [] for name in classes}
    if labels is None:
        for folder, pictures in directory.folders.items():
            if class_name(folder) not in of_class:
                raise _unknown_class(directory.path / folder, classes)
            of_class[class_name(folder)] += pictures
    else:
        inside = {*directory.pictures}
        for picture, label in labels.of_picture.items():
            name = class_name(label)
            if name not in of_class:
                raise _unknown_class(labels.file.path, classes, label=name)
            if picture in inside:
                of_class[name].append(picture)
    paths = []
    counts = []
    for pictures in of_class.values():
        paths += sorted(pictures, key=lambda picture: picture.parts)
        counts.append(len(pictures))
    return LabeledFiles(paths, np.repeat(np.arange(len(counts)), counts))


def _left_in(directory: _Directory, files: LabeledFiles, labels: _Labels | None) -> list[LeftOut]:
    """Return what is in a part and is not used."""
    used = {*files.paths}
    reason = NO_CLASS if labels is None else NO_ROW
    left_out = [LeftOut(path, reason) for path in directory.pictures if path not in used]
    for entry in directory.left_out:
        is_used = labels is not None and entry.path == labels.file.path
        if not is_used:
            left_out.append(entry)
    return left_out


def _has_no_labels(directory: _Directory, classes: Sequence[str]) -> bool:
    """Return True for pictures in no folder, or in one that is no class, such as test/images."""
    full = directory.full_folders
    if len(full) == 1:
        return class_name(full[0]) not in classes
    return not full


def _unknown_class(path: Path, classes: Sequence[str], label: str | None = None) -> DataError:
    what = "" if label is None else f": label {label!r}"
    return DataError(
        "class-unknown",
        problem=f"{printable(path)}{what} is not one of the classes: {first_names(classes)}",
        reason="is it misplaced, or missing from the training part?",
        remedy=("to name all classes:", Setting("data.classes")),
        path=path,
        label=label,
    )


def _no_training_part(part: Path) -> DataError:
    return DataError(
        "training-part-missing",
        problem=f"{printable(part)} has class folders, and there is no training part beside it: no"
        " train/ with class folders",
        remedy="give a directory with a folder of images for each class, or with such folders in"
        " train/, val/ and test/",
        path=part,
    )


def _refuse_few(
    classes: Sequence[str],
    directory: _Directory,
    labels: _Labels | None = None,
    in_root: LabelsReader = list,
) -> None:
    if len(classes) > 1:
        return
    only = directory.full_folders
    reason = _no_names(labels_files(directory.tables) or in_root())
    if labels is not None:
        reason = f"all labels of {printable(labels.file.path)} are {first_names(classes)}"
    elif len(only) == 1 and reason is None:
        reason = f"all of its pictures are in {printable(only[0])}/: is that the directory to give?"
    elif directory.direct and reason is None:
        reason = "its pictures are in no folder, and no file names their labels"
    raise DataError(
        "images-without-classes",
        problem=f"{printable(directory.path)} holds no training data: no IDX files, no CIFAR-10, and"
        f" no folders of at least two classes",
        reason=reason,
        remedy="give a directory with a folder of images for each class, or with such folders in"
        " train/, val/ and test/; or put labels.csv, with the columns file and label, beside the"
        " images",
        path=directory.path,
    )


def _no_names(files: Sequence[LabelsFile]) -> str | None:
    """Return a line about a file of labels of which no row names a picture."""
    for file in files:
        for _, name, _ in file.rows[:1]:
            return f"{printable(file.path)} names {name!r}, and no picture here"
    return None


def _refuse_flat_part(root: Path, name: str, plain: Sequence[str], in_root: LabelsReader) -> None:
    """Refuse a folder without class folders that is named as a part: is it a class?"""
    reason = None if plain else _no_names(in_root())
    remedy: list[str | tuple[str | Setting, ...]] = [
        f"put class folders, or labels.csv with the columns file and label, into {name}/"
    ]
    if plain:
        remedy = [
            (f"if {name}/ is no class:", Setting("data.classes", plain)),
            ("if it is one:", Setting("data.classes", sorted([*plain, name]))),
        ]
    raise DataError(
        "part-or-class",
        problem=f"{printable(root / name)} is named as a part, and holds pictures without labels",
        reason=reason or "it could be a class, or pictures without labels",
        remedy=remedy,
        path=root / name,
    )


def _refuse_looks_like_parts(top: _Directory) -> None:
    """Refuse folders such as seg_train/ and seg_test/, or trainset/ and testset/, if they have
    folders themselves.
    """
    alike: dict[str, str] = {}
    for folder in _with_folders(top):
        part = _part_in_words(folder)
        if part is not None:
            alike[folder] = part
    if "training" not in alike.values():
        alike = _begun_as_parts(top)
    if "training" in alike.values():
        name = next(folder for folder, part in alike.items() if part == "training")
        raise DataError(
            "classes-look-like-parts",
            problem=f"{printable(top.path)} has no train/, but {printable(name)}/, which has folders",
            reason="as classes, its folders would be learned to be told from each other",
            remedy=[
                f"if {printable(name)}/ holds the training part, rename it to train/",
                ("if it is a class:", Setting("data.classes", tuple(map(class_name, top.folders)))),
            ],
            path=top.path / name,
        )


def _with_folders(top: _Directory) -> list[str]:
    """Return the names of the folders that have pictures in folders of their own."""
    depth = len(top.path.parts)
    names = []
    for name, pictures in top.folders.items():
        if any(len(picture.parts) > depth + 2 for picture in pictures):
            names.append(name)
    return names


def _part_in_words(folder: str) -> str | None:
    """Return the part that the first such word of a folder's name names, or None."""
    for word in re.split(r"[^a-z]+", folder.lower()):
        for part, names in PARTS.items():
            if word in names:
                return part
    return None


def _begun_as_parts(top: _Directory) -> dict[str, str]:
    """Return the folders with folders whose names begin as a training and another part do, such as
    trainset/ and valset/, with their parts; none if only one of both is there.
    """
    begun: dict[str, str] = {}
    for folder in _with_folders(top):
        name = folder.lower()
        if name.startswith(("train", "trn")):
            begun[folder] = "training"
        elif name.startswith(("test", "tst", "val", "vld", "dev", "eval")):
            begun[folder] = "other"
    has_both = len({*begun.values()}) == 2
    return begun if has_both else {}


def layout_of_behavior_1(root: Path, classes: Sequence[str] | None) -> PictureLayout:
    """Find parts and classes as runs did that began before behavior 10."""
    folders: dict[str, Path] = {}
    for part, part_names in _PARTS_BEFORE.items():
        for name in part_names:
            if part not in folders and (root / name).is_dir():
                folders[part] = root / name
    if "training" not in folders and folders:
        raise _no_training_part(next(iter(folders.values())))
    training = folders.setdefault("training", root)
    names = tuple(classes or _folder_names_before(training))
    _refuse_few(names, _Directory(training, [], {}, []))
    parts = {}
    for part, path in folders.items():
        for name in _folder_names_before(path):
            if name not in names:
                raise _unknown_class(path / name, names)
        paths = []
        counts = []
        for name in names:
            pictures = scan_as_before(path / name, _SUFFIXES_BEFORE, ignore_case=True).files
            paths += pictures
            counts.append(len(pictures))
        parts[part] = LabeledFiles(paths, np.repeat(np.arange(len(names)), counts))
    return PictureLayout(root, parts, names)


def _folder_names_before(path: Path) -> list[str]:
    names = []
    for folder in path.iterdir():
        if folder.is_dir() and not folder.name.startswith("."):
            names.append(folder.name)
    return sorted(names)
