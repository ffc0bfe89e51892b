"""Token shards on disk: memory-mapped files of 16- or 32-bit integers, described by `tokens.json`.

A shard is a raw little-endian array (`.bin`). `tokens.json` is written last, so a directory without
`tokens.json` is incomplete.
"""

import errno
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import file_digest, sha256
from itertools import compress
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from surefoot.config.paths import local_path, write_whole
from surefoot.data.part_names import check_parts
from surefoot.data.scan import no_such, unreadable
from surefoot.errors import Command, DataError, Remedy, out_of_range
from surefoot.tokenizers.tokenizer import outside_vocabulary

Tokens = NDArray[Any]
Part = TypeVar("Part")

INDEX = "tokens.json"
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Shard:
    """A token file: its name in the directory, the number of tokens, and the SHA-256 of its
    bytes.
    """

    name: str
    count: int
    sha256: str


@dataclass(frozen=True)
class TokenShards:
    """Memory-mapped token shards; `arrays` has one array per shard.

    >>> import tempfile
    >>> shards = write_shards(
    ...     np.arange(10), tempfile.mkdtemp() + "/shards", vocab_size=10, shard_tokens=6
    ... )
    >>> len(shards), [array.tolist() for array in TokenShards.open(shards.directory).arrays]
    (10, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]])
    """

    directory: Path
    vocab_size: int
    shards: Sequence[Shard]
    arrays: Sequence[Tokens]

    @classmethod
    def open(cls, directory: Path | str) -> Self:
        """Open the shards of a directory; raise `DataError` if a shard is missing, empty, or of the
        wrong size.

        Only the sizes are checked; `refuse_damaged()` checks the contents.
        """
        directory = local_path(directory, setting="directory")
        vocab_size, dtype, shards = _read_index(directory)
        arrays = [_mmap(directory / shard.name, shard, dtype) for shard in shards]
        return cls(directory, vocab_size, shards, arrays)

    def __len__(self) -> int:
        return sum(len(array) for array in self.arrays)

    def divided(self, val_fraction: float) -> tuple[Self, Self]:
        """Return (training, validation) as views; the last `val_fraction` of the tokens is for
        validation.
        """
        validation_count = round(len(self) * val_fraction)
        training_count = len(self) - validation_count
        check_parts(training_count, validation_count, val_fraction, what="tokens", cure="0.01")
        training = list[Tokens]()
        validation = list[Tokens]()
        left = training_count
        for array in self.arrays:
            cut = min(left, len(array))
            left -= cut
            if cut > 0:
                training.append(array[:cut])
            if cut < len(array):
                validation.append(array[cut:])
        return replace(self, arrays=training), replace(self, arrays=validation)

    def refuse_damaged(self, *, max_bytes: int = 4 << 30) -> int:
        """Raise `DataError` with the names of damaged shards (wrong SHA-256); return the number of
        checked shards.

        If all shards exceed `max_bytes`, only evenly spaced shards of about `max_bytes` in total
        are checked.
        """
        size_bytes = sum(shard.count for shard in self.shards) * self.arrays[0].itemsize
        distance = max(1, -(-size_bytes // max_bytes))
        chosen = self.shards[::distance]
        with ThreadPoolExecutor(8) as pool:
            damaged = pool.map(lambda shard: is_damaged(self.directory, shard), chosen)
        paths = [str(self.directory / shard.name) for shard in compress(chosen, damaged)]
        if paths:
            more = f", and {len(paths) - 1} more" if len(paths) > 1 else ""
            anew: Remedy = "write it again"
            if (self.directory / "prepare.json").is_file():
                anew = Command(f"surefoot data prepare {self.directory} ...")
            raise DataError(
                "shard-damaged",
                problem=f"token shard {paths[0]}{more} is damaged: its SHA-256 is not the recorded"
                " one",
                remedy=["copy it again, or repeat the same command", anew],
                paths=paths,
            )
        return len(chosen)

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of tokens, the vocabulary size, and a hash of the SHA-256 of all
        shards.
        """
        digest = sha256("".join(shard.sha256 for shard in self.shards).encode()).hexdigest()
        return {"tokens": len(self), "vocabulary": self.vocab_size, "sha256": digest}


def write_shards(
    tokens: Tokens | Iterable[Tokens],
    directory: Path | str,
    *,
    vocab_size: int,
    shard_tokens: int = 100_000_000,
) -> TokenShards:
    """Write one token array or several concatenated token arrays as shards of `shard_tokens`
    tokens; return the opened shards.

    A token takes two bytes if `vocab_size` is at most 65,536, otherwise four. Raises `DataError`
    for a token outside the vocabulary, for empty input, and for a directory that already has
    shards.

    >>> import tempfile
    >>> len(
    ...     write_shards([np.arange(5), np.arange(3)], tempfile.mkdtemp() + "/shards", vocab_size=5)
    ... )
    8
    """
    directory = local_path(directory, setting="directory")
    if (directory / INDEX).exists():
        raise already_there(directory)
    for setting, value in (("vocab_size", vocab_size), ("shard_tokens", shard_tokens)):
        if value < 1:
            raise out_of_range(setting, value, "1 or more")
    directory.mkdir(parents=True, exist_ok=True)
    parts = _checked([tokens] if isinstance(tokens, np.ndarray) else tokens, vocab_size)
    shards = list[Shard]()
    for pieces, _, _ in cut_shards(enumerate(parts), shard_tokens):
        shard = write_shard(pieces, directory, number=len(shards), vocab_size=vocab_size)
        shards.append(shard)
    if not shards:
        raise without_tokens(directory)
    return write_index(shards, directory, vocab_size=vocab_size)


def already_there(directory: Path) -> DataError:
    """Return the error for a directory with token shards that are not to be continued."""
    return DataError(
        "shards-already-there",
        problem=f"{directory} already holds token shards",
        remedy="choose another directory, or delete this one first",
        path=directory,
    )


def without_tokens(directory: Path) -> DataError:
    """Return the error for shards of empty documents."""
    return DataError(
        "shards-without-tokens",
        problem=f"no tokens to write into {directory}: all documents are empty",
        path=directory,
    )


def write_shard(
    pieces: Sequence[Tokens], directory: Path, *, number: int, vocab_size: int
) -> Shard:
    """Write one shard and return its index entry, after the bytes are on disk."""
    path = directory / f"shard-{number:05d}.bin"
    dtype = _DTYPES[_dtype_name(vocab_size)]
    data = np.concatenate(pieces).astype(dtype).tobytes()
    write_whole(path, data)
    return Shard(path.name, len(data) // dtype.itemsize, sha256(data).hexdigest())


def write_index(shards: Sequence[Shard], directory: Path, *, vocab_size: int) -> TokenShards:
    """Write the index file, which makes the shards of a directory one data set; return this data
    set.
    """
    index = {
        "format_version": 1,
        "dtype": _dtype_name(vocab_size),
        "vocabulary": vocab_size,
        "shards": [vars(shard) for shard in shards],
    }
    write_whole(directory / INDEX, json.dumps(index, indent=1).encode())
    return TokenShards.open(directory)


def _dtype_name(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _checked(parts: Iterable[Tokens], vocab_size: int) -> Iterator[Tokens]:
    before = 0
    for part in parts:
        array = np.asarray(part)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise not_tokens(array)
        outside = np.flatnonzero((array < 0) | (array >= vocab_size))
        if outside.size:
            first = int(outside[0])
            raise outside_vocabulary(int(array[first]), before + first, vocab_size)
        before += len(array)
        yield array


def cut_shards(
    parts: Iterable[tuple[Part, Tokens]], shard_tokens: int, *, skip: int = 0
) -> Iterator[tuple[list[Tokens], Part, int]]:
    """Yield the tokens of each shard, and the part and token index where the next shard starts;
    skip the first `skip` tokens.
    """
    pieces: list[Tokens] = []
    room = shard_tokens
    for part, tokens in parts:
        first = skip
        skip = 0
        while first < len(tokens):
            piece = tokens[first : first + room]
            pieces.append(piece)
            first += len(piece)
            room -= len(piece)
            if room == 0:
                yield pieces, part, first
                pieces = []
                room = shard_tokens
            following = (part, first)
    if pieces:
        yield pieces, *following


def _read_index(directory: Path) -> tuple[int, np.dtype[Any], list[Shard]]:
    path = directory / INDEX
    if not directory.is_dir():
        raise no_such(directory, kind="directory of token shards")
    if not path.is_file():
        raise DataError(
            "shards-unfinished",
            problem=f"no token shards in {directory}: {INDEX}, written last, is missing",
            remedy="write them again",
            path=directory,
        )
    try:
        index = json.loads(path.read_bytes())
        shards = [
            Shard(str(shard["name"]), int(shard["count"]), str(shard["sha256"]))
            for shard in index["shards"]
        ]
        vocab_size = int(index["vocabulary"])
        dtype = _DTYPES[index["dtype"]]
        version = index["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise _not_an_index(path, f"{type(problem).__name__}: {problem}") from problem
    if version != 1:
        raise DataError(
            "shard-format-unknown",
            problem=f"{path} has format version {version}, but this surefoot reads 1",
            remedy="update surefoot, or write the shards again",
            path=path,
            version=version,
        )
    for shard in shards:
        if Path(shard.name).name != shard.name or shard.name in ("", ".", ".."):
            raise _not_an_index(path, f"{shard.name!r} is not a plain file name")
    if sum(shard.count for shard in shards) == 0:
        raise _not_an_index(path, "it lists no tokens")
    return vocab_size, dtype, shards


def _not_an_index(path: Path, why: str) -> DataError:
    return DataError(
        "shard-index-invalid",
        problem=f"{path} is not an index of token shards: {why}",
        remedy="write them again",
        path=path,
    )


def not_tokens(array: Tokens) -> DataError:
    """Return the error for an array that is no row of tokens."""
    return DataError(
        "tokens-not-integers",
        problem="tokens must be a 1-dimensional array of integers, found"
        f" {array.dtype} of shape {array.shape}",
        remedy="encode text first: sf.tokenizers.ByteTokenizer().encode(text)",
        shape=list(array.shape),
    )


def _mmap(path: Path, shard: Shard, dtype: np.dtype[Any]) -> Tokens:
    expected = shard.count * dtype.itemsize
    try:
        size = path.stat().st_size
    except OSError as problem:
        raise unreadable(path, problem) from problem
    if size != expected or size == 0:
        raise wrong_size(path, size, expected)
    # a plain array over the mapping: indexing of np.memmap is several times slower
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def is_damaged(directory: Path, shard: Shard) -> bool:
    """Return True if a shard is missing, unreadable, or has the wrong SHA-256; the complete file is
    read.

    Raises `DataError` if the file cannot be accessed but may be intact, for example without
    permission.
    """
    path = directory / shard.name
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest() != shard.sha256
    except OSError as problem:
        if problem.errno in (errno.ENOENT, errno.EIO):
            return True
        raise unreadable(path, problem) from problem


def wrong_size(path: Path, size: int, expected: int) -> DataError:
    """Return the error for a file of tokens with more or fewer bytes than it is to have."""
    return DataError(
        "file-of-wrong-size",
        problem=f"{path} has {size:,} bytes, and its tokens need {expected:,}",
        remedy="copy it again, or write it again",
        path=path,
        size=size,
        expected=expected,
    )
