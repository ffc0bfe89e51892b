"""Sentence pairs from two plain text files with aligned lines, or from one file of TSV or JSON
lines.
"""

import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import get_args

from surefoot.config.behavior import PAIRS_AS_MEANT, newest_behavior
from surefoot.config.keywords import known_keywords
from surefoot.config.paths import local_path, look_at
from surefoot.data.part_names import PARTS, check_parts, part_of
from surefoot.data.scan import (
    COMPRESSED,
    LeftOut,
    Scan,
    kind_of,
    no_such,
    printable,
    scan,
    scan_as_before,
)
from surefoot.errors import DataError, out_of_range
from surefoot.recipes.readers.pairs.languages import of_one_language
from surefoot.recipes.readers.pairs.part_files import (
    OTHER_LANGUAGES,
    OnEmpty,
    Origin,
    PairReading,
    Part,
    Sentences,
    plain_name,
    read_both,
    read_pair_table,
)

_VALIDATION = PARTS["val"]
_TEST = ("test", "test_2016_flickr")
_TABLES = (".tsv", ".jsonl")
_OTHER_PART = "another file of this directory has its part, or it names no part"
_NAMES_SHOWN = 12
_IN_FOLDER = "pairs are read from the directory itself, and not from folders in it"


@dataclass(frozen=True)
class ParallelText:
    """Training, validation and test sentence pairs; if no test part exists, `test` is None.

    If a part has no file of its own, its origin is None. `left_out` is the number of pairs skipped
    because a side is empty. `notes` say how the files were read, and what was not.

    >>> text = ParallelText(
    ...     train=[("one", "eins"), ("two", "zwei")], val=[("three", "drei")], test=None
    ... )
    >>> [source for source, _ in text.train], text.val[0], text.left_out
    (['one', 'two'], ('three', 'drei'), 0)
    """

    train: Sentences
    val: Sentences
    test: Sentences | None
    val_origin: Origin | None = field(default=None, compare=False)
    test_origin: Origin | None = field(default=None, compare=False)
    left_out: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False)


@known_keywords
def load_pairs(
    path: Path | str,
    *,
    source: str = "en",
    target: str = "de",
    val_fraction: float = 0.02,
    on_empty: OnEmpty = "error",
) -> ParallelText:
    """Load parallel text; `source` and `target` are the language names in file suffixes, TSV
    headers or JSON keys.

    `path` is a directory or a file, plain or compressed. A directory needs train.en and train.de,
    or train.tsv, or train.jsonl. Optional parts are val (or valid, validation, dev) and test (or
    another name with test or eval as a word). A file may be corpus.en (next to corpus.de), .tsv or
    .jsonl. TSV: source and target are the first two columns of text, unless a header line names
    their columns: by the languages ("en", "English") or as source and target. Quotes that a
    spreadsheet has put around cells are taken off. JSON lines: {"en": ..., "de": ...}, optionally
    inside {"translation": ...}. Without a validation part, a hash of the source selects
    `val_fraction` of the training pairs; pairs with equal sources stay together. Only a line feed
    ends a line; surrounding white space is stripped, and lines without text are skipped in tables
    and at the end of text files. `notes` of the result say what was recognized, and what was not
    read. Raises `DataError` with file and line for unreadable text, for NUL bytes, for a first line
    that may be a header, and for pairs with an empty side (or null) unless `on_empty` is "skip".

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "train.tsv"
    >>> _ = path.write_text("".join(f"word {n}\\tWort {n}\\n" for n in range(99)))
    >>> text = load_pairs(path, val_fraction=0.2)
    >>> len(text.train) + len(text.val), text.train[0]
    (99, ('word 0', 'Wort 0'))
    """
    return read_pairs(
        path,
        source=source,
        target=target,
        val_fraction=val_fraction,
        on_empty=on_empty,
        behavior=newest_behavior(),
    )


def read_pairs(
    path: Path | str,
    *,
    source: str,
    target: str,
    val_fraction: float,
    on_empty: OnEmpty,
    behavior: int,
) -> ParallelText:
    """Load parallel text as `load_pairs`, for a run of a `behavior`."""
    if on_empty not in get_args(OnEmpty):
        raise out_of_range("on_empty", on_empty, "error or skip")
    if source == target:
        raise of_one_language(source)
    path = local_path(path, setting="path")
    reading = PairReading(source, target, on_empty, as_meant=behavior >= PAIRS_AS_MEANT)
    if path.is_dir():
        training, validation, test, notes = _directory(path, reading)
    else:
        training = _file(path, reading)
        validation = Part()
        test = Part()
        notes = []
    pairs = training.pairs or []
    held_out = validation.pairs
    if held_out is None:
        pairs, held_out = split_pairs(pairs, val_fraction=val_fraction)
    left_out = training.left_out + validation.left_out + test.left_out
    for part in (training, validation, test):
        notes += part.notes
    if left_out:
        pairs_are = "pairs with an empty side are"
        if left_out == 1:
            pairs_are = "pair with an empty side is"
        notes.append(f"{left_out:,} {pairs_are} left out (on_empty)")
    return ParallelText(
        pairs,
        held_out,
        test.pairs,
        val_origin=validation.origin,
        test_origin=test.origin,
        left_out=left_out,
        notes=tuple(notes),
    )


def split_pairs(pairs: Sentences, *, val_fraction: float) -> tuple[Sentences, Sentences]:
    """Split pairs into training and validation pairs by a hash of the source; other pairs do not
    affect the choice.

    >>> training, held_out = split_pairs([(str(n), "x") for n in range(100)], val_fraction=0.2)
    >>> len(training) + len(held_out), 10 < len(held_out) < 30
    (100, True)
    """
    limit = val_fraction * (1 << 64)
    training = []
    held_out = []
    for pair in pairs:
        source, _ = pair
        digest = blake2b(source.encode(), digest_size=8).digest()
        if int.from_bytes(digest, "little") < limit:
            held_out.append(pair)
        else:
            training.append(pair)
    check_parts(
        len(training),
        len(held_out),
        val_fraction,
        what="pairs",
        cure="0.1, or add a validation file",
    )
    return training, held_out


# --- the files of a directory ---------------------------------------------------------------------


def _directory(path: Path, reading: PairReading) -> tuple[Part, Part, Part, list[str]]:
    """Return the parts for training, validation and test, and notes on which files were read."""
    validation = Part()
    test = Part()
    notes = list[str]()
    listing = _listing(path, reading)
    files = _by_name(path, listing.files, reading)
    names = _names(files, reading)
    if "train" not in names:
        raise _no_training_text(path, reading)
    training = _part("train", path, files, reading)
    test_name = _test_name(names, reading)
    if test_name is not None:
        test = _part(test_name, path, files, reading)
        if test_name != "test" and reading.as_meant:
            notes.append(f"the test part is {printable(test_name)}")
    for name in _VALIDATION:
        if name in names:
            validation = _part(name, path, files, reading)
            break
    if reading.as_meant:
        used = dict.fromkeys([*training.files, *validation.files, *test.files])
        not_read = _without(listing, [*used]).line()
        if not_read:
            notes.append(not_read)
    return training, validation, test, notes


def _listing(path: Path, reading: PairReading) -> Scan:
    languages = [f".{language}" for language in (reading.source, reading.target)]
    if reading.as_meant:
        return scan(path, [*_TABLES, *map(str.lower, languages)], documentation=())
    return scan_as_before(path, [*_TABLES, *languages, ".gz"])


def _by_name(path: Path, files: Sequence[Path], reading: PairReading) -> dict[str, Path]:
    """Return the files of a directory itself by their names without `.gz` or `.zst`. A plain file
    comes before a compressed one.
    """
    by_name = dict[str, Path]()
    for file in files:
        if file.parent == path:
            by_name.setdefault(plain_name(file.name, reading), file)
    return by_name


def _without(listing: Scan, used: Sequence[Path]) -> Scan:
    """Return a listing of the files that were used, in which the others are left out."""
    left_out = [*listing.left_out]
    for file in listing.files:
        if file not in used:
            reason = _OTHER_PART if file.parent == listing.path else _IN_FOLDER
            left_out.append(LeftOut(file, reason))
    return replace(listing, files=list(used), left_out=left_out)


def _names(files: Mapping[str, Path], reading: PairReading) -> list[str]:
    """Return the names of the parts in a directory, such as train."""
    tables = set[str]()
    for end in _TABLES:
        tables |= _stems(files, end)
    sources = _stems(files, plain_name(f".{reading.source}", reading))
    targets = _stems(files, plain_name(f".{reading.target}", reading))
    # a part that lacks a language is named, and refused when it is read
    alone = set[str]()
    for name in sources ^ targets:
        if name in ("train", *_VALIDATION) or name.startswith("test"):
            alone.add(name)
    return sorted(tables | (sources & targets) | alone)


def _stems(names: Iterable[str], end: str) -> set[str]:
    return {name.removesuffix(end) for name in names if name.endswith(end)}


def _test_name(names: Sequence[str], reading: PairReading) -> str | None:
    """Return the name of the test part, or None."""
    tests = [name for name in names if "test" in name]
    if reading.as_meant:  # WMT's are called newstest2014
        tests = [name for name in names if part_of(PurePath(name.removeprefix("news"))) == "test"]
    for name in (*_TEST, *tests):
        if name in tests:
            return name
    return None


def _part(name: str, path: Path, files: Mapping[str, Path], reading: PairReading) -> Part:
    tables = [files[f"{name}{end}"] for end in _TABLES if f"{name}{end}" in files]
    sides = []
    for language in (reading.source, reading.target):
        sides.append(files.get(plain_name(f"{name}.{language}", reading)))
    if not tables:
        return read_both(path / name, sides, reading)
    table, *other_tables = tables
    part = read_pair_table(table, reading)
    beside = [printable(file.name) for file in (*other_tables, *sides) if file is not None]
    if not beside or not reading.as_meant:
        return part
    note = f"{printable(table.name)} is read, and not {' or '.join(beside)}"
    return part._replace(notes=[*part.notes, note])


def _no_training_text(path: Path, reading: PairReading) -> DataError:
    names = sorted(printable(file.name) for file in path.iterdir())
    there = ", ".join(names[:_NAMES_SHOWN])
    return DataError(
        "pairs-no-training-text",
        problem=f"no training text in {path}: neither train.{reading.source} and"
        f" train.{reading.target} nor train.tsv or train.jsonl (compressed or not)",
        reason=f"there is: {there or 'nothing'}",
        remedy=OTHER_LANGUAGES,
        path=path,
    )


# --- one file -------------------------------------------------------------------------------------


def _file(path: Path, reading: PairReading) -> Part:
    kind = kind_of(path)
    if kind in _TABLES and path.is_file():
        return read_pair_table(path, reading)
    plain = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    languages = (reading.source, reading.target)
    is_side = kind in [f".{language}".lower() for language in languages]
    stem = plain.with_suffix("") if is_side else path
    sides = [_there(stem, language) for language in languages]
    if any(sides):
        return read_both(stem, sides, reading)
    if not path.is_file():
        raise no_such(path)
    raise DataError(
        "pairs-kind-unknown",
        problem=f"{path} does not end in .tsv, .jsonl, .{reading.source} or .{reading.target}",
        remedy=["rename it", OTHER_LANGUAGES],
        path=path,
    )


def _there(stem: Path, language: str) -> Path | None:
    """Return the file of a language, plain or compressed, or None."""
    for suffix in (language, language.upper()):
        for end in ("", *COMPRESSED):
            file = stem.with_name(f"{stem.name}.{suffix}{end}")
            status = look_at(file, setting="path")
            if status is not None and stat.S_ISREG(status.st_mode):
                return file
    return None
