"""Functions in the user's files that build a run or a network, and hashes of their text. Imports no
torch.
"""

import ast
import importlib.util
import inspect
import linecache
import os
import stat
import sys
import textwrap
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from surefoot.errors import ConfigError, Remedy, Setting, SurefootError, first_line, is_own

_LARGEST_BYTES = 64 << 20  # size limit of a program
_IMPORTED_NOW: list[Path] = []  # by `names_in`, at the moment
_NOT_OWN = {"builtins", "surefoot", "torch"}  # their classes are not hashed


def names_in(path: Path, *, function: str, form: str) -> dict[str, Any]:
    """Run a file and return the names that it defines, among them `function`. The file may import
    modules from its directory. Raises `ConfigError` if the path is not a Python file, running it
    fails, or the function is missing; `form` shows its signature."""
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(
            "program-missing",
            problem=f"no file {path} of Python, with a name that ends in .py (looked in {Path.cwd()})",
            path=path,
        )
    path = path.resolve()
    # random.py must not hide `random`
    name = path.stem if path.stem not in sys.modules else f"_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses look up field types there
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    _IMPORTED_NOW.append(path)
    try:
        specification.loader.exec_module(module)
    except SurefootError:
        raise
    except Exception as problem:
        file, line = _location(problem, path)
        where = file if line is None else f"{file}, line {line}"
        raise ConfigError(
            "program-fails",
            problem=f"{where}: {type(problem).__name__}: {first_line(problem)}",
            reason=f"{path.name} was run to find {function!r}",
            remedy=("to see more:", f"python {path.name}"),
            path=file,
            line=line,
        ) from problem
    finally:
        _IMPORTED_NOW.remove(path)
    names = vars(module)
    if not callable(names.get(function)):
        raise ConfigError(
            "function-missing",
            problem=f"{path} has no function {function!r}",
            remedy=f"write {form}",
            path=path,
            function=function,
        )
    return names


def refuse_training_at_import() -> None:
    """Raise `ConfigError` if the user's file trains while a command imports it."""
    if _IMPORTED_NOW:
        raise ConfigError(
            "program-trains-at-import",
            problem=f"{_IMPORTED_NOW[-1]} trains when it is imported",
            reason="a command imports a program only to build its run",
            remedy="put run.train() below `if __name__ == '__main__':`, and return the run from"
            " `def build()`",
            path=_IMPORTED_NOW[-1],
        )


def digest(path: Path) -> str | None:
    """Return a hash of a file's contents; None if it is missing, or too large for a program."""
    if not path.is_file() or path.stat().st_size > _LARGEST_BYTES:
        return None
    return sha256(path.read_bytes()).hexdigest()


def _is_resolved(path: Path) -> bool:
    """Return True if a path is absolute and contains no link. surefoot records only such paths;
    other paths could lead to a run's files.
    """
    with suppress(OSError, RuntimeError, ValueError):
        return path == path.resolve()
    return False


def refuse_unresolved(path: Path, *, file: Path | str, run: Path | None = None) -> None:
    """Raise `ConfigError` if a file of a run names a path of user code that surefoot would not have
    written there. The path may not be in the directory `run`.
    """
    why = None
    if not _is_resolved(path):
        why = "is relative or leads through a link"
    elif run is not None and path.is_relative_to(run.resolve()):
        why = "is inside the run"
    if why is not None:
        raise ConfigError(
            "path-of-code-unresolved",
            problem=f"{file} names {path}, which {why}",
            reason="surefoot never writes such a path: it could lead to files that came with the run",
            remedy="if it is yours, keep it outside the run, and write its absolute path, without"
            f" links, into {file}",
            file=file,
            path=path,
        )


def refuse_changed(path: Path, *, was: str | None, run: Path, resuming: bool = False) -> None:
    """Raise `ConfigError` if the program may differ from the one that the run's user started: it is
    in the run's directory, or has no recorded hash. Unless `resuming`, a changed hash or a file
    that other users could change is refused, too."""
    if not path.is_file():
        return
    if path.resolve().is_relative_to(run.resolve()):
        cause = "inside"
        reason = f"it is inside {run}, came with the run, and anyone may have written it"
    elif was is None:
        cause = "unrecorded"
        reason = f"{run} does not record it as its program"
    elif resuming:
        return
    elif digest(path) != was:
        cause = "changed"
        reason = f"its text has changed since it built {run}"
    else:
        open_to_others = _written_by_others(path.resolve(), run=run)
        if open_to_others is None:
            return
        cause = "writable"
        reason = f"other users could have changed it: they can write to {open_to_others}"
    remedy: Remedy = ("to run it anyway:", Setting("run_changed_program"))
    if resuming:
        config = run / "config.toml"
        remedy = f"if it is yours, copy it out of {run}, and write the new path into {config}"
    raise ConfigError(
        "program-not-trusted",
        problem=f"{path} would run with your permissions, and may not be the run's program",
        reason=reason,
        remedy=remedy,
        path=path,
        run=run,
        cause=cause,
    )


def _written_by_others(path: Path, *, run: Path) -> Path | None:
    """Return the file itself or the first directory above it that another user can write, or None."""
    if sys.platform == "win32":
        return None
    trusted = {0, os.getuid()}
    if os.getuid() == 0:
        trusted.add(run.stat().st_uid)  # root may run what a user has trained
    for ancestor in (path, *path.parents):
        status = ancestor.stat()
        if status.st_uid not in trusted:
            return ancestor
        # In a sticky directory nobody can replace a file of another user. But anybody can add one
        # beside the program, and Python would import it.
        is_sticky = status.st_mode & stat.S_ISVTX
        if is_sticky and ancestor not in (path, path.parent):
            continue
        others = stat.S_IWOTH
        is_own_group = status.st_gid == os.getgid() == os.getuid()  # a user's private group
        if not is_own_group:
            others |= stat.S_IWGRP
        if status.st_mode & others:
            return ancestor
    return None


def note_changed(path: Path, *, was: str | None) -> None:
    """Print a note if a file exists and has changed since the start of the run."""
    if digest(path) not in (None, was):
        print(f"note: {path} has changed since the run started: results may differ", flush=True)


def text_hashes(objects: Iterable[Any]) -> dict[str, str]:
    """Return hashes of the source text of the user's functions by name, including functions that
    they name. An object is hashed by its class and base classes, a `functools.partial` by its
    function. Comments, docstrings, formatting, the standard library, installed packages and
    surefoot are ignored."""
    texts = defaultdict[str, set[str]](set)
    for function in own_functions(objects):
        code = function.__code__
        path = Path(code.co_filename)
        # a notebook cell's name differs between processes
        where = f" in {path.name}" if os.path.isfile(path) else ""
        texts[f"{function.__qualname__}(){where}"].add(_hash_of_text(code))
    return {name: " ".join(sorted(texts[name])) for name in sorted(texts)}


def globals_of(objects: Iterable[Any]) -> dict[str, Any]:
    """Return the global variables that the user's functions name, without modules, classes and
    functions. The functions are those of `text_hashes`."""
    variables = dict[str, Any]()
    for function in own_functions(objects):
        for name in sorted(_names(function.__code__) & function.__globals__.keys()):
            value = function.__globals__[name]
            if not isinstance(value, ModuleType | type) and not inspect.isroutine(value):
                variables[name] = value
    return variables


def own_functions(objects: Iterable[Any]) -> Iterator[FunctionType]:
    """Yield the user's functions in objects, and those that they name, each text once."""
    known = set[tuple[str, str, str]]()
    waiting = [entry.func if isinstance(entry, partial) else entry for entry in objects]
    while waiting:
        part = waiting.pop()
        if isinstance(part, type):
            waiting += _own_methods(part)
            continue
        function = part
        if isinstance(part, MethodType):
            function = part.__func__
        if callable(function):
            function = inspect.unwrap(function)
        if not isinstance(function, FunctionType):
            waiting.append(type(function))
            continue
        code = function.__code__
        path = Path(code.co_filename)
        if not is_own(path) or path.name.startswith("<frozen"):
            continue
        text = (function.__qualname__, path.name, _hash_of_text(code))
        if text not in known:
            known.add(text)
            yield function
            used = [function.__globals__.get(name) for name in _names(code)]
            waiting += [entry for entry in used if isinstance(entry, type | FunctionType)]


def _own_methods(kind: type) -> list[FunctionType]:
    """Return the methods of a class and of its base classes that belong to the user."""
    methods = []
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] in _NOT_OWN:
            continue
        for attribute in vars(owner).values():
            method = attribute
            if isinstance(attribute, staticmethod | classmethod):
                method = attribute.__func__
            if isinstance(method, FunctionType):
                methods.append(method)
    return methods


def _names(code: CodeType) -> set[str]:
    """Return the names in the code of a function, and in functions inside it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


@cache
def _hash_of_text(code: CodeType) -> str:
    text = code.co_code.hex()
    with suppress(Exception):
        linecache.checkcache(code.co_filename)
        lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
        text = textwrap.dedent("".join(inspect.getblock(lines))) or text
        # the lines of a lambda inside a call may not parse: they are hashed as text
        tree = ast.parse(text)
        for part in ast.walk(tree):
            if not isinstance(part, ast.FunctionDef | ast.ClassDef):
                continue
            if ast.get_docstring(part) is not None:
                part.body = part.body[1:] or [ast.Pass()]
        text = ast.unparse(tree)
    return sha256(text.encode()).hexdigest()[:16]


def _location(problem: Exception, path: Path) -> tuple[str, int | None]:
    if isinstance(problem, SyntaxError) and problem.filename is not None:
        return problem.filename, problem.lineno
    for frame in reversed(traceback.extract_tb(problem.__traceback__)):
        if Path(frame.filename).is_relative_to(path.parent):
            return frame.filename, frame.lineno
    return str(path), None
