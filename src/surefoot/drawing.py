"""What all pictures have in common: colours and dashes, fonts, and two files, PNG and SVG; the same figure gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from surefoot.config.paths import write_whole
from surefoot.errors import ConfigError

# Okabe and Ito 2008, told apart with every kind of colour vision: https://jfly.uni-koeln.de/color/ (yellow is too pale for lines)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# as many as have no common divisor with the colours: 35 pairs, all different
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (10, 3)))
_SETTINGS: Any = {
    "svg.hashsalt": "surefoot",  # the same figure gives the same file
    "svg.fonttype": "none",  # text that can be searched
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib
    "font.size": 9.0,
}
_WITHOUT_DATE: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None}}


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib with settings of our own while a figure is made and written; imported here, since that makes loggers."""
    import matplotlib as mpl

    with mpl.rc_context(_SETTINGS):
        yield


def made(directory: Path) -> Path:
    """A directory for pictures, made where it is missing; `ConfigError` where it cannot be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise _refused(directory, problem) from problem
    return directory


def write(figure: Any, path: Path, *, dpi: int = 120) -> list[Path]:
    """Write a figure to PATH.png and PATH.svg, each whole or not at all; returns both.

    The directory is made where it is missing. Raises `ConfigError` where a file cannot be written.
    """
    pictures = {kind: _rendered(figure, kind, dpi) for kind in _WITHOUT_DATE}
    files = []
    try:
        made(path.parent)
        for kind, picture in pictures.items():
            files.append(path.with_name(f"{path.name}.{kind}"))
            write_whole(files[-1], picture)
    except (OSError, ValueError) as problem:  # ValueError: no name at all
        raise _refused(path, problem) from problem
    return files


def _refused(path: Path, problem: Exception) -> ConfigError:
    why = problem.strerror if isinstance(problem, OSError) else problem
    return ConfigError(f"cannot write to {path}: {why}\n  choose another place: --out PATH")


def _rendered(figure: Any, kind: str, dpi: int) -> bytes:
    held = BytesIO()
    figure.savefig(held, format=kind, dpi=dpi, metadata=_WITHOUT_DATE[kind])
    return held.getvalue()
