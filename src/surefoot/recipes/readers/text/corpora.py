"""Documents of text files and of the source of Python's standard library, and their division into
training and validation.
"""

import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import numpy as np

from surefoot.data.part_names import check_parts
from surefoot.data.scan import TEXT, scan_as_before
from surefoot.data.text_files import decode_utf8, open_unpacked
from surefoot.errors import DataError, Setting

_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# generated tables and text, drawings
_TABLES = {"encodings", "pydoc_data", "lib2to3", "turtledemo", "ensurepip"}

Part = TypeVar("Part", str, np.ndarray)


def texts_as_before(path: Path) -> dict[str, str]:
    """Read text files as runs did that began before behavior 10: every kind of file that is named,
    and the text files of a directory.
    """
    if path.is_dir():
        documents = _read(scan_as_before(path, TEXT).files, below=path)
    else:
        documents = {path.name: _read_text(path)}
    if not any(text.strip() for text in documents.values()):
        raise without_text(path)
    return documents


def without_text(path: Path) -> DataError:
    """Return the error for files without a character."""
    return DataError(
        "no-text", problem=f"{path} holds no text: it is empty or only white space", path=path
    )


def stdlib_documents() -> dict[str, str]:
    """Return the source of the running Python's standard library as {name: text}: about 10 MB in
    500 files, without tests.

    >>> "json/decoder.py" in stdlib_documents()
    True
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(_source_files(root), key=lambda file: file.parts)
    if not files:
        raise DataError(
            "stdlib-without-source",
            problem=f"this Python has no source files of its standard library in {root}",
            remedy=("give a text file or a directory:", Setting("data.path")),
            path=root,
        )
    return _read(files, below=root)


def split_documents(
    documents: Mapping[str, str], *, val_fraction: float
) -> tuple[list[str], list[str]]:
    """Split documents into training and validation documents by a hash of their names; a single
    document is cut near its end.

    The validation documents hold about `val_fraction` of the characters, and at most 2 *
    `val_fraction`. If every document is too large, the smallest is chosen. If documents are added,
    most choices stay the same. Raises `DataError` if a part is empty.

    >>> split_documents({"a": "abcdefghij"}, val_fraction=0.2)
    (['abcdefgh'], ['ij'])
    """
    if len(documents) == 1:
        (document,) = documents.values()
        beginning, end = split_sequence(document, val_fraction=val_fraction)
        return [beginning], [end]
    characters_wanted = val_fraction * sum(len(text) for text in documents.values())
    characters = 0
    names_held_out: set[str] = set()
    for name in sorted(documents, key=_digest):
        if characters >= characters_wanted:
            break
        # a very large document stays in training
        if characters + len(documents[name]) <= 2 * characters_wanted:
            names_held_out.add(name)
            characters += len(documents[name])
    if not names_held_out:
        names_held_out.add(min(documents, key=lambda name: (len(documents[name]), name)))
    training = list[str]()
    held_out = list[str]()
    for name, text in documents.items():
        part = held_out if name in names_held_out else training
        part.append(text)
    check_parts(
        len(training),
        len(held_out),
        val_fraction,
        what="documents",
        cure="0.1, or add documents",
    )
    return training, held_out


def _digest(name: str) -> bytes:
    return blake2b(name.encode(errors="surrogateescape")).digest()


def split_sequence(sequence: Part, *, val_fraction: float = 0.1) -> tuple[Part, Part]:
    """Split text or tokens into a training part and a validation part; the last `val_fraction` is
    for validation.

    >>> split_sequence("abcdefghij", val_fraction=0.2)
    ('abcdefgh', 'ij')
    """
    cut = 0
    if 0 < val_fraction < 1:
        cut = len(sequence) - round(len(sequence) * val_fraction)
    what = "characters" if isinstance(sequence, str) else "tokens"
    check_parts(cut, len(sequence) - cut, val_fraction, what=what, cure="0.1, or add text")
    return sequence[:cut], sequence[cut:]


def _source_files(root: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(root):
        # not entered: site-packages may be very large
        below[:] = [name for name in below if name not in _NOT_SOURCE | _TABLES]
        for name in names:
            # it is written when Python is built, and differs between machines
            is_of_machine = name.startswith("_sysconfigdata")
            if name.endswith(".py") and not is_of_machine:
                yield Path(folder, name)


def _read_text(file: Path) -> str:
    with open_unpacked(file) as source:
        return decode_utf8(source.read(), str(file))


def _read(files: Iterable[Path], *, below: Path) -> dict[str, str]:
    texts = {}
    for file in files:
        text = _read_text(file)
        if text:
            name = file.relative_to(below).as_posix()
            texts[name] = text if text.endswith("\n") else text + "\n"
    return texts
