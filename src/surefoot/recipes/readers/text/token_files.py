"""Token files of other projects: llm.c's, whose header names their type, and nanoGPT's, which have
none. A pickle beside them is never read.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from surefoot.data.part_names import PARTS, part_of
from surefoot.data.scan import JSON_LINES, TABLES, TEXT, scan
from surefoot.data.text.shards import Shard, Tokens, TokenShards, wrong_size
from surefoot.data.text_files import open_unpacked
from surefoot.errors import ConfigError, DataError, Setting
from surefoot.tokenizers.tokenizer import outside_vocabulary

TOKEN_FILE = ".bin"
_HEADER = 256 * 4  # bytes of llm.c's header: 256 integers, of which 3 are used


class _Form(NamedTuple):
    version: int
    dtype: str


# first integer of a file -> its form: dev/data/data_common.py of https://github.com/karpathy/llm.c
FORMS = {20240520: _Form(1, "<u2"), 20240801: _Form(7, "<u4")}
_GPT2 = 20240520
_WITHOUT_HEADER = _Form(0, "<u2")
_OF_TEXT = ("bpe", "bytes", "characters")  # tokenizers that no such file was made with
_NANOGPT = re.compile(r"(train|val|valid|validation|dev|test)[.]bin", re.IGNORECASE)
_AT_ONCE = 1 << 20  # tokens
_BLOCKS_CHECKED = 128  # of _AT_ONCE tokens: more would take longer than a second from a disk
# of the tokens in a fingerprint
_BLOCKS = 64
_BLOCK = 1 << 13


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens; `magic` is the first integer of its header, or 0 without a header."""

    path: Path
    magic: int


@dataclass(frozen=True)
class TokenFiles:
    """The token files of a path: for training, for validation (if files are called so), and one
    line about what is there and not read."""

    path: Path
    training: Sequence[TokenFile]
    validation: Sequence[TokenFile]
    not_read: str

    @property
    def is_gpt2(self) -> bool:
        """True if the header of every file says that its tokens are GPT-2's."""
        return all(file.magic == _GPT2 for file in (*self.training, *self.validation))


def find_token_files(path: Path, tokenizer: str | None) -> TokenFiles | None:
    """Return the token files of a path, or None if it is to be read as text.

    A directory with token files and text is read as text if `tokenizer` is one of text, and if its
    files have no header and no tokenizer is named. Raises `ConfigError` for files without a header
    unless `tokenizer` is "gpt2", since nothing says what their tokens are.
    """
    if path.is_dir():
        return _in_directory(path, tokenizer)
    if not path.is_file() or path.suffix.lower() != TOKEN_FILE:
        return None
    file = TokenFile(path, _magic(path))
    _refuse_without_tokenizer([file], path, tokenizer)
    return TokenFiles(path, [file], [], "")


def _in_directory(path: Path, tokenizer: str | None) -> TokenFiles | None:
    listing = scan(path, (TOKEN_FILE,))
    files = [TokenFile(file, _magic(file)) for file in listing.files]
    with_header = [file for file in files if file.magic]
    if not with_header:
        files = [file for file in files if _NANOGPT.fullmatch(file.path.name)]
    if not files:
        return None
    has_text = bool(scan(path, (*TEXT, *JSON_LINES, *TABLES)).files)
    is_text_meant = tokenizer in _OF_TEXT
    if tokenizer is None:
        is_text_meant = not with_header
    if has_text and is_text_meant:
        return None
    if with_header and len(with_header) < len(files):
        other = next(file for file in files if not file.magic)
        raise DataError(
            "token-files-differ",
            problem=f"{other.path} has no header of llm.c, and {with_header[0].path} has one",
            remedy="keep token files of one kind in a directory",
            path=other.path,
        )
    _refuse_without_tokenizer(files, path, tokenizer)
    parts: dict[str, list[TokenFile]] = {part: [] for part in PARTS}
    for file in files:
        parts[part_of(file.path.relative_to(path)) or "training"].append(file)
    if not parts["training"]:
        raise DataError(
            "token-files-without-training",
            problem=f"{path} has token files for validation or test only",
            remedy="name the file to train on",
            path=path,
        )
    lines = [listing.line()]
    if parts["test"]:
        names = ", ".join(file.path.name for file in parts["test"][:3])
        lines.append(f"not read: {names}, for a test")
    not_read = "; ".join(line for line in lines if line)
    return TokenFiles(path, parts["training"], parts["val"], not_read)


def _refuse_without_tokenizer(
    files: Sequence[TokenFile], path: Path, tokenizer: str | None
) -> None:
    has_header = all(file.magic for file in files)
    if has_header and tokenizer in _OF_TEXT:
        raise ConfigError(
            "token-files-of-another-tokenizer",
            problem=f"{path} holds tokens that data.tokenizer = {tokenizer!r} did not make",
            remedy=("name the one that made them:", Setting("data.tokenizer")),
            setting="data.tokenizer",
            value=tokenizer,
            path=path,
        )
    if not has_header and tokenizer != "gpt2":
        raise ConfigError(
            "token-files-without-header",
            problem=f"{path} holds binary data without a header, and nothing says of which tokens",
            reason="nanoGPT writes GPT-2's tokens in this way, and characters with a meta.pkl, which"
            " is never read",
            remedy=[
                ("if they are GPT-2's:", Setting("data.tokenizer", "gpt2")),
                "otherwise train on the text itself",
            ],
            setting="data.tokenizer",
            value=tokenizer,
            path=path,
        )


def _magic(path: Path) -> int:
    with open_unpacked(path) as file:  # names pointers of Git LFS and unreadable files
        head = file.read(4)
    magic = int.from_bytes(head, "little")
    return magic if magic in FORMS else 0


def read_token_files(
    files: TokenFiles, *, vocab_size: int, val_fraction: float
) -> tuple[TokenShards, TokenShards, list[str]]:
    """Return the memory-mapped tokens for training and for validation, and facts about them.

    Without files for validation, these are the last `val_fraction` of the tokens. Raises
    `DataError` for a damaged file, and for a token outside the vocabulary; of more than 134
    million tokens, evenly spaced blocks are checked, and the facts say so.
    """
    training = _shards_of(files.training, files.path, vocab_size)
    held_out = _shards_of(files.validation, files.path, vocab_size)
    largest, checked = _refuse_outside(files, [training, held_out], vocab_size)
    facts = []
    total = len(training) + len(held_out)
    if checked < total:
        facts.append(f"{checked:,} of {total:,} tokens were checked")
    if largest * 4 < vocab_size:
        facts.append(f"the largest token is {largest:,} of {vocab_size:,}")
    if not files.validation:
        training, held_out = training.divided(val_fraction)
    return training, held_out, facts


def _shards_of(files: Sequence[TokenFile], path: Path, vocab_size: int) -> TokenShards:
    shards = []
    arrays = []
    for file in files:
        array = _mapped(file)
        shards.append(Shard(file.path.name, len(array), _digest(array)))
        arrays.append(array)
    return TokenShards(path, vocab_size, shards, arrays)


def _mapped(file: TokenFile) -> Tokens:
    form = FORMS.get(file.magic, _WITHOUT_HEADER)
    dtype = np.dtype(form.dtype)
    size = file.path.stat().st_size
    offset = _HEADER if file.magic else 0
    count = (size - offset) // dtype.itemsize
    if file.magic and size >= _HEADER:
        _, version, stated = np.fromfile(file.path, "<i4", 3).tolist()
        if version != form.version:
            raise DataError(
                "token-file-version",
                problem=f"{file.path} has version {version} of llm.c's token files, and this"
                f" surefoot reads {form.version}",
                remedy="write it again",
                path=file.path,
                version=version,
            )
        count = stated
    if count < 1 or size != offset + count * dtype.itemsize:
        expected = offset + max(count, 1) * dtype.itemsize
        raise wrong_size(file.path, size, expected)
    # a plain array over the mapping: indexing of np.memmap is several times slower
    return np.asarray(np.memmap(file.path, dtype=dtype, mode="r", offset=offset, shape=(count,)))


def _digest(array: Tokens) -> str:
    """Return a hash of evenly spaced blocks: whole files may have hundreds of gigabytes."""
    firsts = np.linspace(0, max(0, len(array) - _BLOCK), _BLOCKS).astype(int)
    digest = sha256(len(array).to_bytes(8, "little"))
    for first in np.unique(firsts).tolist():
        digest.update(array[first : first + _BLOCK].astype("<i8").tobytes())
    return digest.hexdigest()


def _refuse_outside(
    files: TokenFiles, of_parts: Sequence[TokenShards], vocab_size: int
) -> tuple[int, int]:
    """Return the largest token that was checked, and how many were; raise `DataError` for one that
    has no place in the vocabulary."""
    paths = [file.path for file in (*files.training, *files.validation)]
    arrays = list(chain.from_iterable(part.arrays for part in of_parts))
    blocks = []
    for path, array in zip(paths, arrays, strict=True):
        for first in range(0, len(array), _AT_ONCE):
            blocks.append((path, first, array[first : first + _AT_ONCE]))
    count = min(len(blocks), _BLOCKS_CHECKED)
    chosen = np.linspace(0, len(blocks) - 1, count).round().astype(int)
    largest = 0
    checked = 0
    for number in chosen.tolist():
        path, first, block = blocks[number]
        checked += len(block)
        largest = max(largest, int(block.max()))
        if largest >= vocab_size:
            position = int(np.argmax(block >= vocab_size))
            raise outside_vocabulary(int(block[position]), first + position, vocab_size, path=path)
    return largest, checked
