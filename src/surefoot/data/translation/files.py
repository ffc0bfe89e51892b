"""Sentence pairs from two plain text files with aligned lines, or from one file of TSV or JSON
lines.
"""

import json
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from surefoot.config.keywords import known_keywords
from surefoot.config.paths import local_path
from surefoot.data.scan import no_such
from surefoot.data.text.files import check_parts, decode_utf8, open_unpacked
from surefoot.errors import ConfigError, DataError

Sentences = list[tuple[str, str]]  # a source and its translation
OnEmpty = Literal["error", "skip"]  # treatment of pairs with an empty side

_VALIDATION = ("val", "valid", "validation", "dev")
_TEST = ("test", "test_2016_flickr")
_TABLES = (".tsv", ".jsonl")
_SIDES = ("source", "target")
_OTHER_LANGUAGES = "for other languages: --data.source ... --data.target ..."


@dataclass(frozen=True)
class Origin:
    """The origin of sentence pairs: the file with the sources, and the line of each pair, counted
    from 1.
    """

    file: Path
    lines: Sequence[int]

    def of(self, index: int) -> str:
        return f"{self.file}, line {self.lines[index]}"


@dataclass(frozen=True)
class ParallelText:
    """Training, validation and test sentence pairs; if no test part exists, `test` is None.

    If a part has no file of its own, its origin is None. `left_out` is the number of pairs skipped
    because a side is empty.

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


class _Part(NamedTuple):
    pairs: Sentences | None = None
    origin: Origin | None = None
    left_out: int = 0


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

    `path` is a directory or a file, plain or .gz. A directory needs train.en and train.de, or
    train.tsv, or train.jsonl. Optional parts are val (or valid, validation, dev) and test (or
    test_2016_flickr). A file may be corpus.en (next to corpus.de), .tsv or .jsonl. TSV: source and
    target are the first two columns, unless a header line names their columns. JSON lines: {"en":
    ..., "de": ...}, optionally inside {"translation": ...}. Without a validation part, a hash of
    the source selects `val_fraction` of the training pairs; pairs with equal sources stay together.
    Only a line feed ends a line; surrounding white space is stripped. Raises `DataError` with file
    and line for unreadable text, and for pairs with an empty side unless `on_empty` is "skip".

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "train.tsv"
    >>> _ = path.write_text("".join(f"word {n}\\tWort {n}\\n" for n in range(99)))
    >>> text = load_pairs(path, val_fraction=0.2)
    >>> len(text.train) + len(text.val), text.train[0]
    (99, ('word 0', 'Wort 0'))
    """
    if on_empty not in get_args(OnEmpty):
        raise ConfigError(f"on_empty = {on_empty!r}: choose error or skip")
    if source == target:
        raise ConfigError(
            f"source and target are both {source!r}: name two languages, as in the suffixes of the files"
        )
    path = local_path(path, setting="path")
    validation = test = _Part()
    if not path.is_dir():
        training = _file(path, source, target, on_empty)
    else:
        names, read = (
            _names(path, source, target),
            partial(_part, source=source, target=target, on_empty=on_empty),
        )
        if "train" not in names:
            there = ", ".join(sorted(file.name for file in path.iterdir())[:12]) or "nothing"
            raise DataError(
                f"no training text in {path}: neither train.{source} and train.{target} nor train.tsv or train.jsonl (.gz too)\n"
                f"  found: {there}\n  {_OTHER_LANGUAGES}"
            )
        training = read(path / "train")
        test = next(
            (read(path / name) for name in (*_TEST, *names) if name in names and "test" in name),
            test,
        )
        validation = next((read(path / name) for name in _VALIDATION if name in names), validation)
    pairs, held_out = training.pairs or [], validation.pairs
    if held_out is None:
        pairs, held_out = split_pairs(pairs, val_fraction=val_fraction)
    left_out = training.left_out + validation.left_out + test.left_out
    return ParallelText(pairs, held_out, test.pairs, validation.origin, test.origin, left_out)


def split_pairs(pairs: Sentences, *, val_fraction: float) -> tuple[Sentences, Sentences]:
    """Split pairs into training and validation pairs by a hash of the source; other pairs do not
    affect the choice.

    >>> training, held_out = split_pairs([(str(n), "x") for n in range(100)], val_fraction=0.2)
    >>> len(training) + len(held_out), 10 < len(held_out) < 30
    (100, True)
    """
    limit = val_fraction * (1 << 64)
    chosen = [
        int.from_bytes(blake2b(one.encode(), digest_size=8).digest(), "little") < limit
        for one, _ in pairs
    ]
    training = [pair for pair, is_held_out in zip(pairs, chosen, strict=True) if not is_held_out]
    held_out = [pair for pair, is_held_out in zip(pairs, chosen, strict=True) if is_held_out]
    check_parts(
        len(training),
        len(held_out),
        val_fraction,
        what="pairs",
        cure="0.1, or add a validation file",
    )
    return training, held_out


def _names(path: Path, source: str, target: str) -> list[str]:
    there = {file.name.removesuffix(".gz") for file in path.iterdir() if file.is_file()}
    tables = {name.removesuffix(end) for name in there for end in _TABLES if name.endswith(end)}
    first, second = (
        {name.removesuffix(f".{language}") for name in there if name.endswith(f".{language}")}
        for language in (source, target)
    )
    alone = {
        name
        for name in first ^ second
        if name in ("train", *_VALIDATION) or name.startswith("test")
    }
    return sorted(tables | first & second | alone)


def _part(stem: Path, source: str, target: str, on_empty: OnEmpty) -> _Part:
    table = next((file for end in _TABLES if (file := _there(Path(f"{stem}{end}")))), None)
    return (
        _lines_of_both(stem, source, target, on_empty)
        if table is None
        else _table(table, source, target, on_empty)
    )


def _file(path: Path, source: str, target: str, on_empty: OnEmpty) -> _Part:
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if plain.suffix in _TABLES and path.is_file():
        return _table(path, source, target, on_empty)
    stem = plain.with_suffix("") if plain.suffix in (f".{source}", f".{target}") else path
    if any(_there(Path(f"{stem}.{language}")) for language in (source, target)):
        return _lines_of_both(stem, source, target, on_empty)
    if not path.is_file():
        raise no_such(path)
    raise DataError(
        f"{path} does not end in .tsv, .jsonl, .{source} or .{target}\n"
        "  rename it, or give the languages as in the suffixes of the files: --data.source ... --data.target ..."
    )


def _there(path: Path) -> Path | None:
    return next(
        (file for file in (path, path.with_name(f"{path.name}.gz")) if file.is_file()), None
    )


def _lines_of_both(stem: Path, source: str, target: str, on_empty: OnEmpty) -> _Part:
    files = []
    for language in (source, target):
        if (file := _there(stem.with_name(f"{stem.name}.{language}"))) is None:
            beside = stem.parent.glob(f"{stem.name}.*")
            there = sorted(
                {other.name.removesuffix(".gz").removeprefix(f"{stem.name}.") for other in beside}
            )
            raise DataError(
                f"{stem}.{language} is missing (.gz too); {stem.name} is available in: {', '.join(there)}\n  {_OTHER_LANGUAGES}"
            )
        files.append(file)
    sources, targets = map(_lines, files)
    if len(sources) != len(targets):
        raise DataError(
            f"{files[0]} has {len(sources)} lines, but {files[1]} has {len(targets)}: line n of one must translate line n of the other\n"
            "  only a line feed ends a line: did a program also split at other line breaks in one file?"
        )
    pairs = [(one.strip(), other.strip()) for one, other in zip(sources, targets, strict=True)]
    return _without_empty(pairs, files, first_line=1, on_empty=on_empty)


def _table(path: Path, source: str, target: str, on_empty: OnEmpty) -> _Part:
    lines, first = _lines(path), 0
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        pair_of = partial(_of_json, source=source, target=target)
    else:
        names = lines[0].split("\t")
        first = int(source in names and target in names)
        pair_of = partial(
            _of_row, columns=(names.index(source), names.index(target)) if first else (0, 1)
        )
    pairs = [
        pair_of(line, f"{path}, line {number}")
        for number, line in enumerate(lines[first:], start=first + 1)
    ]
    return _without_empty(pairs, (path, path), first_line=first + 1, on_empty=on_empty)


def _of_row(line: str, where: str, *, columns: tuple[int, int]) -> tuple[str, str]:
    row = line.split("\t")
    if len(row) <= max(columns):
        raise DataError(
            f"{where}: {len(row)} column{'s' * (len(row) != 1)}; expected a source and a target, separated by a tab\n"
            f"  found: {line[:60]!r}"
        )
    return row[columns[0]].strip(), row[columns[1]].strip()


def _of_json(line: str, where: str, *, source: str, target: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{where} is not JSON: {problem}\n  found: {line[:60]!r}") from problem
    inner = record.get("translation", record) if isinstance(record, dict) else None
    if not isinstance(inner, dict) or source not in inner or target not in inner:
        keys = (
            ", ".join(map(str, inner))
            if isinstance(inner, dict)
            else f"none, because it is {line[:40]!r}"
        )
        raise DataError(
            f"{where}: no text under {source!r} and {target!r}; its keys: {keys}\n  {_OTHER_LANGUAGES}"
        )
    for language in (source, target):
        if not isinstance(inner[language], str):
            raise DataError(
                f"{where}: the value of {language!r} is not text: {json.dumps(inner[language])[:60]}\n"
                "  put it in quotes, or remove the line"
            )
        try:
            inner[language].encode()
        except UnicodeEncodeError as problem:
            raise DataError(
                f"{where} holds half a surrogate pair: {problem.object[problem.start]!r}"
            ) from problem
    return inner[source].strip(), inner[target].strip()


def _lines(path: Path) -> list[str]:
    with open_unpacked(path) as file:
        data = file.read()
    if not data.removeprefix(BOM_UTF8):
        raise DataError(f"{path} is empty")
    return decode_utf8(data, str(path)).removesuffix("\n").split("\n")


def _without_empty(
    pairs: Sentences, files: Sequence[Path], *, first_line: int, on_empty: OnEmpty
) -> _Part:
    wrong = [index for index, pair in enumerate(pairs) if not all(pair)]
    if wrong and on_empty == "error":
        problems = ""
        for index in wrong[:3]:
            side = pairs[index].index("")
            other = f"its {_SIDES[1 - side]} is {pairs[index][1 - side][:60]!r}"
            problems += f"{files[side]}, line {index + first_line}: the {_SIDES[side]} is empty, and {other}\n"
        many = "one pair has" if len(wrong) == 1 else f"{len(wrong):,} pairs have"
        raise DataError(
            f"{problems}  {many} an empty side: remove them on both sides, or skip them: --data.on-empty skip"
        )
    complete = {line: pair for line, pair in enumerate(pairs, start=first_line) if all(pair)}
    if not complete:
        raise DataError(f"{files[0]}: no pair has text on both sides")
    return _Part([*complete.values()], Origin(files[0], [*complete]), len(wrong))
