"""Functions in files of the user's own: one that builds a run, or one that builds a network. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from hashlib import sha256
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigError, SurefootError, first_line


def names_in(path: Path, *, function: str, form: str) -> dict[str, Any]:
    """What a file defines when it is run, by name; `function` is there and can be called.

    The file may import its neighbours. `form` says how the function is to be written: "def build(...) -> ...".

    Raises `ConfigError` for what is no file of Python, for an error while it is run, and where the function is missing.
    """
    if not path.is_file():
        raise ConfigError(f"no file {path} (looked in {Path.cwd()})")
    if path.suffix != ".py":
        raise ConfigError(f"{path} is no program: a file of Python ends in .py")
    path = path.resolve()
    name = path.stem if path.stem not in sys.modules else f"_{path.stem}"  # a file called random.py hides no module
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # where dataclasses look up the types of their fields
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        specification.loader.exec_module(module)
    except SurefootError:
        raise
    except Exception as problem:
        raise ConfigError(
            f"{_place(problem, path)}: {type(problem).__name__}: {first_line(problem)}\n"
            f"  {path.name} is run to find {function!r} in it, and cannot be: does `python {path.name}` work?"
        ) from problem
    found = vars(module)
    if not callable(found.get(function)):
        raise ConfigError(f"{path} has no function {function!r}: write {form}")
    return found


def digest(path: Path) -> str | None:
    """A hash of what is in a file; None where there is none."""
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def note_changed(path: Path, *, was: str | None) -> None:
    """Print a note where a file is there and is not what it was when a run began."""
    now = digest(path)
    if now is not None and now != was:
        print(f"note: {path} has changed since this run began: what it goes on with may not be what it was", flush=True)


def _place(problem: Exception, path: Path) -> str:
    """File and line of an error while `path` was run: the innermost one in its folder, where the cause is."""
    if isinstance(problem, SyntaxError) and problem.filename is not None:
        return f"{problem.filename}, line {problem.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(problem.__traceback__)
        if Path(frame.filename).is_relative_to(path.parent)
    ]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else str(path)
