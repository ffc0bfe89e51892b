"""Rules of structure: names at the top, tools that a run does not load, lengths of lines,
docstrings. Layers and circles are the import contract of `make check`; stubs are
checked by tests/test_public_names.py. (3 s)
"""

import ast
import importlib
import io
import json
import os
import re
import sys
import tokenize
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import surefoot as sf

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

SOURCE = Path(sf.__file__).parent
ROOT = SOURCE.parents[1]
FILES = sorted(SOURCE.rglob("*.py"))
COLUMNS = 100
PRAGMA = re.compile(r"# (noqa|type: )")
TOP = {
    "__init__.py",
    "__init__.pyi",
    "__main__.py",
    "py.typed",
    "errors.py",
    "seeding.py",
    "mean.py",
    "memory.py",
    "program.py",
    "saved_run.py",
}


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """Each file of the source, parsed once for all tests of this file."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


@cache
def loaded() -> dict[str, set[str]]:
    """Modules of ours that have been imported after each of two imports, in a fork that has none of
    ours before.
    """
    modules = ("surefoot.train.loop", "surefoot.run.run")
    read, write = os.pipe()
    with warnings.catch_warnings(action="ignore"):
        process = os.fork()
    if process == 0:
        status = 1
        try:
            for name in ours():
                del sys.modules[name]
            found = {}
            for module in modules:
                importlib.import_module(module)
                found[module] = sorted(ours())
            os.write(write, json.dumps(found).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as told:
        text = told.read()
    assert os.waitpid(process, 0)[1] == 0
    return {module: set(names) for module, names in json.loads(text).items()}


def ours() -> set[str]:
    """Modules of ours that this process has imported."""
    return {name for name in sys.modules if name.split(".")[0] == "surefoot"}


def test_only_ten_files_stand_at_the_top() -> None:
    assert {path.name for path in SOURCE.iterdir() if path.is_file()} == TOP


def test_what_a_run_imports_holds_no_tool() -> None:
    above = {
        name
        for name in loaded()["surefoot.run.run"]
        if name.split(".")[1:2] in (["tools"], ["recipes"])
    }
    assert above == set()


def code_past_the_limit(text: str) -> list[int]:
    """The lines with more than `COLUMNS` columns of code and comments.

    Texts do not count, since a message is not broken, nor do `noqa` and `type: ignore`.
    """
    lines = text.split("\n")
    columns = {number: len(line) for number, line in enumerate(lines, 1) if len(line) > COLUMNS}
    if not columns:
        return []
    for node in texts_in(ast.parse(text)):
        assert node.end_lineno is not None
        for number in range(node.lineno, node.end_lineno + 1):
            start = node.col_offset if number == node.lineno else 0
            end = node.end_col_offset if number == node.end_lineno else len(lines[number - 1])
            if number in columns and end is not None:
                columns[number] -= end - start
    too_long = [number for number, width in columns.items() if width > COLUMNS]
    if not any(PRAGMA.search(lines[number - 1]) for number in too_long):
        return too_long
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_pragma = token.type == tokenize.COMMENT and PRAGMA.match(token.string)
        if is_pragma and token.start[0] in columns:
            columns[token.start[0]] -= len(token.string)
    return [number for number, width in columns.items() if width > COLUMNS]


def texts_in(node: ast.AST) -> Iterator[ast.expr]:
    """The texts in a module, formatted ones as a whole."""
    if isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    ):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from texts_in(child)


def test_lines_end_at_100_columns_except_for_texts() -> None:
    too_long = [
        f"{path.relative_to(ROOT)}:{number}"
        for directory in ("src", "tests", "benchmarks", "docs", "examples")
        for path in sorted((ROOT / directory).rglob("*.py"))
        if path.name != "speed_table.py"  # written by benchmarks/precision.py
        for number in code_past_the_limit(path.read_text(encoding="utf-8"))
    ]
    assert too_long == []


@pytest.mark.parametrize(
    ("line", "is_too_long"),
    [
        (f"a = {'b' * 100}", True),
        (f"a = 1  # {'b' * 100}", True),
        (f"a = '{'b' * 100}'", False),
        (f"a = {'b' * 80}  # type: ignore[attr-defined]", False),
    ],
)
def test_code_and_comments_count_and_texts_do_not(line: str, is_too_long: bool) -> None:
    assert code_past_the_limit(f"first = 1\n{line}\n") == ([2] if is_too_long else [])


def test_messages_call_the_package_sf_as_readme_does(trees: dict[Path, ast.Module]) -> None:
    wrong = []
    for path, tree in trees.items():
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docstrings
            ):
                names = re.findall(
                    r"(?<![\w/.-])surefoot\.[\w.]+\(|surefoot\.(?:Mean|Run|Split)\b|[=( ]surefoot\.$",
                    node.value,
                )
                wrong += [f"{path.relative_to(SOURCE)}:{node.lineno} {name}" for name in names]
    assert not wrong


def test_every_public_function_and_class_has_a_docstring(trees: dict[Path, ast.Module]) -> None:
    missing = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}"
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not any("overload" in ast.dump(each) for each in node.decorator_list)
        and ast.get_docstring(node) is None
    ]
    assert not missing
