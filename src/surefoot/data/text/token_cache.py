"""Trained tokenizers and tokens in the user's cache directory, so that a second start reads them.

An entry is a file with a SHA-256 hash, followed by arrays in the format safetensors. The name of
the file is a hash of everything that determines the arrays. A damaged entry is replaced. Each start
makes everything if others can write the directory, or the user cannot.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np

from surefoot.config.extras import needed_for
from surefoot.config.paths import open_regular, user_cache
from surefoot.data.text import document_tokens
from surefoot.data.text.document_tokens import encode_documents
from surefoot.data.text.shards import Tokens
from surefoot.tokenizers import bpe, long_words
from surefoot.tokenizers import tokenizer as protocol
from surefoot.tokenizers.bpe import BPETokenizer
from surefoot.tokenizers.tokenizer import Tokenizer

MAX_BYTES = 1 << 30  # of all entries
MIN_CHARACTERS = 1 << 20  # a smaller text is encoded in less than a second
_ABANDONED_S = 3600.0  # age of a half written file whose process was killed
_SUFFIX = ".tokens"
_PARTIAL = ".partial"
_CHECKSUM = 32  # bytes

Arrays = dict[str, np.ndarray]


class TextCache:
    """The tokenizers and tokens of one text, divided into training and validation documents. They
    are read, or made and written.

    If `enabled` is False, nothing is read or written. `directory` is None until an entry was read
    or written in it.

    >>> from surefoot.tokenizers import ByteTokenizer
    >>> TextCache(["ab"], ["c"]).encoded(ByteTokenizer())[0].tolist()
    [97, 98, 256]
    """

    def __init__(
        self, training: Sequence[str], val: Sequence[str], *, enabled: bool = True
    ) -> None:
        self.training = training
        self.val = val
        characters = sum(map(len, training)) + sum(map(len, val))
        self.enabled = enabled and characters >= MIN_CHARACTERS
        self.directory: Path | None = None

    def trained_tokenizer(self, *, vocab_size: int) -> BPETokenizer:
        """Return a tokenizer trained on the training documents."""

        def train() -> Arrays:
            tokenizer = BPETokenizer.train(self.training, vocab_size=vocab_size)
            return {"json": np.frombuffer(tokenizer.to_json().encode(), np.uint8)}

        arrays = self._cached(["bpe", str(vocab_size)], train)
        return BPETokenizer.from_json(arrays["json"].tobytes().decode())

    def encoded(self, tokenizer: Tokenizer) -> tuple[Tokens, Tokens]:
        """Return the tokens of the training documents and of the validation documents, as
        `encode_documents` does.
        """

        def encode() -> Arrays:
            return {
                "training": encode_documents(self.training, tokenizer),
                "val": encode_documents(self.val, tokenizer),
            }

        if isinstance(tokenizer, BPETokenizer):
            arrays = self._cached(["tokens", tokenizer.to_json()], encode)
        else:  # others encode as fast as a file is read
            arrays = encode()
        return arrays["training"], arrays["val"]

    @cached_property
    def _key(self) -> list[str]:
        # empty: our source cannot be read, and nothing is cached
        with suppress(OSError):
            return [*_versions(), _hash(self.training), _hash(self.val)]
        return []

    def _cached(self, key: Sequence[str], make: Callable[[], Arrays]) -> Arrays:
        directory = user_cache("tokens")
        has_home = directory.is_absolute()
        if not self.enabled or not has_home or not self._key:
            return make()
        path = directory / f"{_hash([*self._key, *key])}{_SUFFIX}"
        with suppress(OSError):
            arrays = _read(path)
            if arrays is not None:
                self.directory = directory
                return arrays
        arrays = make()
        with suppress(OSError):
            if _write(path, arrays):
                self.directory = directory
        return arrays


def _versions() -> list[str]:
    """Return what determines tokens besides text and settings."""
    with needed_for("a byte-pair tokenizer", "tokenizers"):
        import tokenizers

    modules = (bpe, long_words, protocol, document_tokens)
    sources = [__file__, *(str(module.__file__) for module in modules)]
    hashes = [sha256(Path(source).read_bytes()).hexdigest() for source in sources]
    return [tokenizers.__version__, *hashes]


def _hash(texts: Iterable[str]) -> str:
    digest = sha256()
    for text in texts:
        encoded = text.encode(errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def _checksum(path: Path, content: bytes) -> bytes:
    # with the name, so that an entry cannot stand for another
    digest = sha256(path.name.encode())
    digest.update(content)  # without a copy
    return digest.digest()


def _refuse_foreign(status: os.stat_result) -> None:
    if os.name == "posix" and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise PermissionError("other users can write it")


def _read(path: Path) -> Arrays | None:
    from safetensors.numpy import load

    _refuse_foreign(path.parent.stat())
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        _refuse_foreign(status)
        if status.st_size > MAX_BYTES:
            return None
        checksum = file.read(_CHECKSUM)
        content = file.read(status.st_size)
    if checksum != _checksum(path, content):
        return None
    with suppress(OSError):
        os.utime(path)  # the least recently used are deleted
    return load(content)


def _write(path: Path, arrays: Arrays) -> bool:
    from safetensors.numpy import save

    if sum(array.nbytes for array in arrays.values()) > MAX_BYTES // 2:
        return False
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_foreign(path.parent.stat())
    content = save(arrays)  # a copy of all bytes
    # other processes may write the same entry
    handle, partial = tempfile.mkstemp(suffix=_PARTIAL, dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(_checksum(path, content))
            file.write(content)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    _delete_old(path.parent)
    return True


def _delete_old(directory: Path) -> None:
    """Delete the least recently used entries of a cache that is too large, and abandoned files."""
    with os.scandir(directory) as entries:
        files = [entry for entry in entries if entry.name.endswith((_SUFFIX, _PARTIAL))]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    total_bytes = 0
    for file in files:
        status = file.stat()  # as it was for the sort
        total_bytes += status.st_size
        is_old = time.time() - status.st_mtime > _ABANDONED_S
        if total_bytes > MAX_BYTES or (is_old and file.name.endswith(_PARTIAL)):
            Path(file.path).unlink(missing_ok=True)
