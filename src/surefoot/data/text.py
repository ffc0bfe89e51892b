"""Text to train on: files of yours, or the source of the Python that runs, which is there without any download."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np

from surefoot.errors import DataError

_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_TABLES = {
    "encodings",
    "pydoc_data",
    "lib2to3",
    "turtledemo",
    "ensurepip",
}  # generated tables, generated text, drawings

Part = TypeVar("Part", str, np.ndarray)


def load_text(path: Path | str) -> str:
    """The text of a file, or of all .txt, .text, .md, .rst and .py files below a directory, sorted by path.

    Files are read as UTF-8 and joined with a line end where one does not end in it; nothing else is changed. Raises
    `DataError` for what is missing, empty, or not UTF-8 (naming file and byte).
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(
            (file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file()),
            key=lambda file: file.parts,
        )
        if not files:
            raise DataError(
                f"no text in the directory {path}: no file ends in {', '.join(_SUFFIXES)}\n  give the path of one file"
            )
        text = _joined(_decoded(file) for file in files)
    elif path.is_file():
        text = _decoded(path)
    else:
        raise DataError(
            f"no file or directory {path} (looked in {Path.cwd()})\n  is it spelled right, and relative to where you are?"
        )
    if not text.strip():
        raise DataError(f"{path} holds no text: it is empty, or nothing but white space")
    return text


def stdlib_text() -> str:
    """The source of the running Python's standard library without its tests, about 10 MB, always in the same order.

    It differs between versions of Python; a run's data fingerprint tells them apart.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        (file for file in root.rglob("*.py") if _is_source(file.relative_to(root))),
        key=lambda file: file.parts,
    )
    if not files:
        raise DataError(
            f"this Python has no source of its standard library in {root}\n  give a text file or a directory: --data.path"
        )
    return _joined(_decoded(file) for file in files)


def held_out_split(whole: Part, *, held_out_fraction: float = 0.1) -> tuple[Part, Part]:
    """Text or tokens in two: what comes first to train on, and the end to score.

    >>> held_out_split("abcdefghij", held_out_fraction=0.2)
    ('abcdefgh', 'ij')
    """
    cut = len(whole) - round(len(whole) * held_out_fraction)
    if not 0 < cut < len(whole):
        raise DataError(
            f"held_out_fraction = {held_out_fraction} of {len(whole)} leaves {cut} to train on and {len(whole) - cut} to score\n"
            "  give a fraction between 0 and 1, such as 0.1, and more text if it is short"
        )
    return whole[:cut], whole[cut:]


def _is_source(path: Path) -> bool:
    folders = set(path.parts[:-1])
    # _sysconfigdata is written when Python is built, and names the machine it was built on
    return not folders & (_NOT_SOURCE | _TABLES) and not path.name.startswith("_sysconfigdata")


def _decoded(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise DataError(
            f"{file} is not UTF-8 text: byte {problem.start} is 0x{problem.object[problem.start]:02x}\n"
            "  is it a binary or compressed file? Otherwise convert it: iconv -f latin1 -t utf-8"
        ) from problem
    except OSError as problem:
        raise DataError(f"{file} cannot be read: {problem.strerror}") from problem


def _joined(texts: Iterable[str]) -> str:
    return "".join(text if text.endswith("\n") else text + "\n" for text in texts if text)
