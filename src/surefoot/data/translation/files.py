"""Sentences and their translations from files: two of plain text, line by line, or one of TSV or JSON lines.

What becomes of them as tokens: `data/translation/pairs.py`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Literal, get_args

from surefoot.config.paths import local_path
from surefoot.data.text.files import decoded, no_such
from surefoot.errors import ConfigError, DataError

Sentences = list[tuple[str, str]]  # a source and its translation
Empty = Literal["stop", "skip"]  # what a pair with an empty side does

_VALIDATION = ("val", "valid", "validation", "dev")
_TABLES = (".tsv", ".jsonl")
_ONE_IN = 1 << 64
_SIDES = ("source", "target")
_TOLD = 3  # pairs with an empty side that are named
_OTHER_LANGUAGES = "other languages: --data.source ... --data.target ..."


@dataclass(frozen=True)
class Origin:
    """Where the pairs of a part were read: the file (of two, that of the source), and the line of each, from 1."""

    file: Path
    lines: Sequence[int]

    def of(self, place: int) -> str:
        return f"{self.file}, line {self.lines[place]}"


@dataclass(frozen=True)
class Parallel:
    """Sentence pairs to train on, to score while training, and to score once at the end (None: no such part).

    The origins are those of parts with files of their own; None of what is held out of the training pairs. `left_out`
    counts the pairs with an empty side, where such are skipped.
    """

    training: Sentences
    held_out: Sentences
    test: Sentences | None
    held_out_origin: Origin | None = field(default=None, compare=False)
    test_origin: Origin | None = field(default=None, compare=False)
    left_out: int = 0


@dataclass(frozen=True)
class _Part:
    pairs: Sentences
    origin: Origin
    left_out: int


def load_pairs(
    path: Path | str,
    *,
    source: str = "en",
    target: str = "de",
    held_out_fraction: float = 0.02,
    empty: Empty = "stop",
) -> Parallel:
    """Parallel text at `path`; `source` and `target` name the languages as the files do.

    A directory with train.en and train.de; val (or valid, validation, dev) and test beside them, Multi30k's
    test_2016_flickr too. Or train.tsv or train.jsonl there, or the path of one such file, or of a plain one, corpus.en. Each
    may be compressed (.gz). TSV: source and target are the first two columns, or those that a first line names. JSON lines:
    {"en": ..., "de": ...}, also inside {"translation": ...}. Where there is no validation part, `held_out_fraction` of the
    training pairs is held out, by a hash of the source, so that equal sources stay together.

    Lines end in a line feed and nothing else; white space around a sentence is taken away. Raises `DataError` for what
    cannot be read, naming file and line, and for pairs with an empty side, unless `empty` is "skip".
    """
    if empty not in get_args(Empty):
        raise ConfigError(f"empty = {empty!r}: stop, or skip")
    if source == target:
        raise ConfigError(f"source and target are both {source!r}: name two languages, as the ends of the files do")
    path = local_path(path, setting="path")
    validation = test = None
    if not path.is_dir():
        training = _file(path, source, target, empty)
    else:
        names = _names(path, source, target)
        parts = {name: part for name in names if (part := _part(path, name, source, target, empty))}
        if "train" not in parts:
            there = ", ".join(sorted(file.name for file in path.iterdir())[:12]) or "nothing"
            raise DataError(
                f"no text to train on in {path}: neither train.{source} and train.{target} nor train.tsv or train.jsonl (.gz too)\n"
                f"  there are: {there}\n  {_OTHER_LANGUAGES}"
            )
        training = parts.pop("train")()
        tests = [name for name in ("test", "test_2016_flickr", *parts) if name in parts and "test" in name]
        test = parts[tests[0]]() if tests else None
        validation = next((parts[name]() for name in _VALIDATION if name in parts), None)
    if validation is None:
        pairs, held_out = held_out_pairs(training.pairs, held_out_fraction=held_out_fraction)
    else:
        pairs, held_out = training.pairs, validation.pairs
    return Parallel(
        pairs,
        held_out,
        None if test is None else test.pairs,
        held_out_origin=None if validation is None else validation.origin,
        test_origin=None if test is None else test.origin,
        left_out=sum(part.left_out for part in (training, validation, test) if part is not None),
    )


def held_out_pairs(pairs: Sentences, *, held_out_fraction: float) -> tuple[Sentences, Sentences]:
    """The pairs to train on and those to score, by a hash of the source: about the fraction, whatever stands beside them.

    >>> training, held_out = held_out_pairs([(str(n), "x") for n in range(100)], held_out_fraction=0.2)
    >>> len(training) + len(held_out), 10 < len(held_out) < 30
    (100, True)
    """
    limit = held_out_fraction * _ONE_IN
    chosen = [int.from_bytes(blake2b(one.encode(), digest_size=8).digest(), "little") < limit for one, _ in pairs]
    training = [pair for pair, is_held_out in zip(pairs, chosen, strict=True) if not is_held_out]
    held_out = [pair for pair, is_held_out in zip(pairs, chosen, strict=True) if is_held_out]
    if not 0 < held_out_fraction < 1 or not training or not held_out:
        raise DataError(
            f"held_out_fraction = {held_out_fraction} of {len(pairs)} pairs leaves {len(training)} to train on and "
            f"{len(held_out)} to score\n"
            "  give a fraction between 0 and 1, such as 0.1, more pairs if there are few, or a validation part of their own"
        )
    return training, held_out


def _names(path: Path, source: str, target: str) -> list[str]:
    names = [file.name.removesuffix(".gz") for file in path.iterdir()]
    ends = (f".{source}", f".{target}", *_TABLES)
    return sorted({name.removesuffix(end) for name in names for end in ends if name.endswith(end)})


def _part(path: Path, name: str, source: str, target: str, empty: Empty) -> Callable[[], _Part] | None:
    """How to read one part of a directory; None where its files are not there, but for a part of which only one side is."""
    for end in _TABLES:
        table = _there(path / f"{name}{end}")
        if table is not None:
            return lambda: _table(table, source, target, empty)
    sides = [_there(path / f"{name}.{language}") for language in (source, target)]
    if sides == [None, None]:
        return None
    if None in sides and name != "train" and name not in _VALIDATION and not name.startswith("test"):
        return None
    return lambda: _lines_of_both(path / name, source, target, empty)


def _file(path: Path, source: str, target: str, empty: Empty) -> _Part:
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if plain.suffix in _TABLES and path.is_file():
        return _table(path, source, target, empty)
    stem = plain.with_suffix("") if plain.suffix in (f".{source}", f".{target}") else path
    if any(_there(Path(f"{stem}.{language}")) for language in (source, target)):
        return _lines_of_both(stem, source, target, empty)
    if path.is_file():
        raise DataError(
            f"{path} is neither .tsv nor .jsonl, nor does its name end in .{source} or .{target}\n"
            "  name it so, or give the languages as the files have them: --data.source ... --data.target ..."
        )
    raise no_such(path)


def _there(path: Path) -> Path | None:
    return next((file for file in (path, path.with_name(f"{path.name}.gz")) if file.is_file()), None)


def _lines_of_both(stem: Path, source: str, target: str, empty: Empty) -> _Part:
    files = []
    for language in (source, target):
        file = _there(stem.with_name(f"{stem.name}.{language}"))
        if file is None:
            beside = (other.name.removesuffix(".gz") for other in stem.parent.glob(f"{stem.name}.*"))
            others = sorted({name.removeprefix(f"{stem.name}.") for name in beside})
            raise DataError(
                f"{stem}.{language} is missing (.gz too): there is {stem.name} in {', '.join(others)}\n"
                f"  {_OTHER_LANGUAGES}"
            )
        files.append(file)
    first, second = files
    sources, targets = _lines(first), _lines(second)
    if len(sources) != len(targets):
        raise DataError(
            f"{first} has {len(sources)} lines, {second} has {len(targets)}: each line of one is the translation of the same of the other\n"
            "  a line may hold other line breaks than a line feed: was one of them written by a program that splits there?"
        )
    pairs = [(one.strip(), other.strip()) for one, other in zip(sources, targets, strict=True)]
    return _without_empty(pairs, (first, second), first_line=1, empty=empty)


def _table(path: Path, source: str, target: str, empty: Empty) -> _Part:
    lines = _lines(path)
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        wheres = (f"{path}, line {number}" for number in range(1, len(lines) + 1))
        pairs, first = [_of_json(line, where, source, target) for line, where in zip(lines, wheres, strict=True)], 0
    else:
        rows = [line.split("\t") for line in lines]
        named = bool(rows) and source in rows[0] and target in rows[0]
        columns, first = (rows[0].index(source), rows[0].index(target)) if named else (0, 1), int(named)
        pairs = []
        for place, row in enumerate(rows[first:], start=first):
            if len(row) <= max(columns):
                raise DataError(
                    f"{path}, line {place + 1}: {len(row)} column{'s' * (len(row) != 1)}, and a source and a target are needed,"
                    f" with a tab between them\n  found: {lines[place][:60]!r}"
                )
            pairs.append((row[columns[0]].strip(), row[columns[1]].strip()))
    return _without_empty(pairs, (path, path), first_line=first + 1, empty=empty)


def _of_json(line: str, where: str, source: str, target: str) -> tuple[str, str]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{where} is no JSON: {problem}\n  found: {line[:60]!r}") from problem
    inner = found.get("translation", found) if isinstance(found, dict) else None
    if not isinstance(inner, dict) or source not in inner or target not in inner:
        keys = ", ".join(map(str, inner)) if isinstance(inner, dict) else f"none, it is {line[:40]!r}"
        raise DataError(f"{where}: no text under {source!r} and {target!r}; its keys: {keys}\n  {_OTHER_LANGUAGES}")
    for language in (source, target):
        if not isinstance(inner[language], str):
            raise DataError(
                f"{where}: the value of {language!r} is no text: {json.dumps(inner[language])[:60]}\n"
                "  write it as one, in quotes, or take the line out"
            )
    try:
        f"{inner[source]}{inner[target]}".encode()
    except UnicodeEncodeError as problem:
        raise DataError(f"{where} holds half a character: {problem.object[problem.start]!r}") from problem
    return inner[source].strip(), inner[target].strip()


def _lines(path: Path) -> list[str]:
    """The lines of a file, compressed or not; only a line feed ends one (and a carriage return before it goes)."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise DataError(f"{path} is damaged: {problem}\n  is it whole, and compressed by gzip?") from problem
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror}") from problem
    lines = decoded(data, str(path)).split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    if not lines:
        raise DataError(f"{path} is empty")
    return lines


def _without_empty(pairs: Sentences, files: tuple[Path, Path], *, first_line: int, empty: Empty) -> _Part:
    """The pairs of which both sides hold something; `DataError` counts the others, unless they are to be skipped."""
    wrong = [place for place, pair in enumerate(pairs) if not all(pair)]
    if wrong and empty == "stop":
        told = ""
        for place in wrong[:_TOLD]:
            side = pairs[place].index("")
            other = f"its {_SIDES[1 - side]} is {pairs[place][1 - side][:60]!r}"
            told += f"{files[side]}, line {place + first_line}: the {_SIDES[side]} is empty, and {other}\n"
        many = "one pair has" if len(wrong) == 1 else f"{len(wrong):,} pairs have"
        hint = "take them out of the data on both sides, or leave them out: --data.empty skip"
        raise DataError(f"{told}  {many} an empty side: {hint}")
    kept = [place for place, pair in enumerate(pairs) if all(pair)]
    if not kept:
        raise DataError(f"{files[0]}: no pair has text on both sides")
    lines = [place + first_line for place in kept]
    return _Part([pairs[place] for place in kept], Origin(files[0], lines), len(wrong))
