"""Trained tokenizers and tokens in the user's cache directory, so that a second start reads them.

An entry is a file with a SHA-256 hash, followed by arrays in the format safetensors. The name of the file is a hash of everything that
determines the arrays. A damaged entry is replaced. If the directory cannot be written, each start makes everything.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np

from surefoot.config.paths import read_regular, user_cache
from surefoot.data.text.files import encode_documents
from surefoot.data.text.shards import Tokens
from surefoot.tokenizers import bpe
from surefoot.tokenizers.bpe import BPETokenizer
from surefoot.tokenizers.tokenizer import Tokenizer

MAX_BYTES = 1 << 30  # of all entries
MIN_CHARACTERS = 1 << 20  # a smaller text is encoded in less than a second
_ABANDONED_S = 3600.0  # age of a half written file whose process was killed
_SUFFIX, _PARTIAL = ".tokens", ".partial"
_CHECKSUM = 32  # bytes

Arrays = dict[str, np.ndarray]


class TextCache:
    """The tokenizers and tokens of one text, divided into training and validation documents. They are read, or made and written.

    >>> from surefoot.tokenizers import ByteTokenizer
    >>> TextCache(["ab"], ["c"]).encoded(ByteTokenizer())[0].tolist()
    [97, 98, 256]
    """

    def __init__(self, training: Sequence[str], held_out: Sequence[str]) -> None:
        self.training, self.held_out = training, held_out
        self.directory: Path | None = None  # None: nothing is cached
        self.key: list[str] = []
        if sum(map(len, training)) + sum(map(len, held_out)) >= MIN_CHARACTERS:
            with suppress(OSError):  # the source is not there
                self.key = [*_versions(), _hash(training), _hash(held_out)]
                directory = user_cache("tokens")
                self.directory = directory if directory.is_absolute() else None  # relative: there is no home directory

    def trained_tokenizer(self, *, vocab_size: int) -> BPETokenizer:
        """Return a tokenizer trained on the training documents."""

        def train() -> Arrays:
            tokenizer = BPETokenizer.train(self.training, vocab_size=vocab_size)
            return {"json": np.frombuffer(tokenizer.to_json().encode(), np.uint8)}

        return BPETokenizer.from_json(self._cached(["bpe", str(vocab_size)], train)["json"].tobytes().decode())

    def encoded(self, tokenizer: Tokenizer) -> tuple[Tokens, Tokens]:
        """Return the tokens of the training documents and of the validation documents, as `encode_documents` does."""

        def encode() -> Arrays:
            return {
                "training": encode_documents(self.training, tokenizer),
                "held_out": encode_documents(self.held_out, tokenizer),
            }

        is_slow = isinstance(tokenizer, BPETokenizer)  # others encode as fast as a file is read
        arrays = self._cached(["tokens", tokenizer.to_json()], encode) if is_slow else encode()
        return arrays["training"], arrays["held_out"]

    def _cached(self, key: Sequence[str], make: Callable[[], Arrays]) -> Arrays:
        if self.directory is None:
            return make()
        path = self.directory / f"{_hash([*self.key, *key])}{_SUFFIX}"
        arrays = None
        with suppress(OSError):
            arrays = _read(path)
        if arrays is None:
            arrays = make()
            with suppress(OSError):
                _write(path, arrays)
        return arrays


def _versions() -> list[str]:
    # what determines tokens besides text and settings
    import tokenizers

    sources = (__file__, bpe.__file__, encode_documents.__code__.co_filename)
    return [tokenizers.__version__, *(sha256(Path(source).read_bytes()).hexdigest() for source in sources)]


def _hash(texts: Iterable[str]) -> str:
    digest = sha256()
    for text in texts:
        encoded = text.encode(errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def _checksum(path: Path, content: bytes) -> bytes:
    # with the name, so that an entry cannot stand for another
    return sha256(path.name.encode() + content).digest()


def _read(path: Path) -> Arrays | None:
    from safetensors.numpy import load

    content = read_regular(path, limit=MAX_BYTES)
    checksum, content = content[:_CHECKSUM], content[_CHECKSUM:]
    if checksum != _checksum(path, content) or (os.name == "posix" and path.stat().st_uid != os.getuid()):
        return None
    with suppress(OSError):
        os.utime(path)  # the least recently used are deleted
    return load(content)


def _write(path: Path, arrays: Arrays) -> None:
    from safetensors.numpy import save

    content = save(arrays)
    if len(content) > MAX_BYTES // 2:
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(suffix=_PARTIAL, dir=path.parent)  # other processes may write the same entry
    try:
        with open(handle, "wb") as file:
            file.write(_checksum(path, content) + content)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    _delete_old(path.parent)


def _delete_old(directory: Path) -> None:
    with os.scandir(directory) as files:
        statuses = [(file.path, file.stat()) for file in files if file.name.endswith((_SUFFIX, _PARTIAL))]
    total = 0
    for path, status in sorted(statuses, key=lambda each: each[1].st_mtime, reverse=True):
        total += status.st_size
        if total > MAX_BYTES or (path.endswith(_PARTIAL) and time.time() - status.st_mtime > _ABANDONED_S):
            Path(path).unlink(missing_ok=True)
