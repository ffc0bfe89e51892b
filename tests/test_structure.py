"""Rules of structure: names at the top, tools that a run does not load, lengths of lines,
docstrings. Layers and circles are the import contract of `make check`; stubs are
checked by tests/test_public_names.py. (3 s)
"""

import ast
import importlib
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import surefoot as sf
from forked import Forked
from rank_processes import forks

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


def modules_of_surefoot() -> set[str]:
    """Modules of surefoot that this process has imported."""
    return {name for name in sys.modules if name.split(".")[0] == "surefoot"}


def print_modules_of_a_run() -> None:
    """Print the modules of surefoot that `Run` imports, in a process that has imported others."""
    for name in modules_of_surefoot():
        del sys.modules[name]
    importlib.import_module("surefoot.run.run")
    print(*sorted(modules_of_surefoot()), sep="\n")


def test_only_ten_files_stand_at_the_top() -> None:
    assert {path.name for path in SOURCE.iterdir() if path.is_file()} == TOP


@forks
def test_what_a_run_imports_holds_no_tool() -> None:
    with Forked(print_modules_of_a_run, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        modules = process.stdout.read().split()
    assert process.returncode == 0

    assert "surefoot.train.loop" in modules
    above = ("surefoot.tools", "surefoot.recipes")
    assert [name for name in modules if name.startswith(above)] == []


def code_past_the_limit(text: str) -> list[int]:
    """The lines with more than `COLUMNS` columns of code and comments.

    Texts do not count, since a message is not broken, nor do `noqa` and `type: ignore`.
    """
    lines = text.split("\n")
    columns = {number: len(line) for number, line in enumerate(lines, 1) if len(line) > COLUMNS}
    if not columns:
        return []
    for node in texts_in(ast.parse(text)):
        for number, width in columns_of(node, lines):
            if number in columns:
                columns[number] -= width
    too_long = [number for number, width in columns.items() if width > COLUMNS]
    if not any(PRAGMA.search(lines[number - 1]) for number in too_long):
        return too_long
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_pragma = token.type == tokenize.COMMENT and PRAGMA.match(token.string)
        if is_pragma and token.start[0] in columns:
            columns[token.start[0]] -= len(token.string)
    return [number for number, width in columns.items() if width > COLUMNS]


def columns_of(node: ast.expr, lines: list[str]) -> Iterator[tuple[int, int]]:
    """Each line on which an expression stands, and how many of its columns it takes."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    for number in range(node.lineno, node.end_lineno + 1):
        start = node.col_offset if number == node.lineno else 0
        end = node.end_col_offset if number == node.end_lineno else len(lines[number - 1])
        yield number, end - start


def texts_in(node: ast.AST) -> Iterator[ast.expr]:
    """The texts in a module, formatted ones as a whole."""
    is_plain_text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    if is_plain_text or isinstance(node, ast.JoinedStr):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from texts_in(child)


@pytest.mark.parametrize("directory", ["src", "tests", "benchmarks", "docs", "examples"])
def test_lines_end_at_100_columns_except_for_texts(directory: str) -> None:
    too_long = []
    for path in sorted((ROOT / directory).rglob("*.py")):
        if path.name != "speed_table.py":  # written by benchmarks/precision.py
            numbers = code_past_the_limit(path.read_text(encoding="utf-8"))
            too_long += [f"{path.relative_to(ROOT)}:{number}" for number in numbers]
    assert too_long == []


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        (f"a = {'b' * 100}", [2]),
        (f"a = 1  # {'b' * 100}", [2]),
        (f"a = '{'b' * 100}'", []),
        (f"a = {'b' * 80}  # type: ignore[attr-defined]", []),
    ],
)
def test_code_and_comments_count_and_texts_do_not(line: str, numbers: list[int]) -> None:
    assert code_past_the_limit(f"first = 1\n{line}\n") == numbers


def test_messages_call_the_package_sf_as_readme_does(trees: dict[Path, ast.Module]) -> None:
    long_name = re.compile(
        r"(?<![\w/.-])surefoot\.[\w.]+\(|surefoot\.(?:Mean|Run|Split)\b|[=( ]surefoot\.$"
    )
    wrong = []
    for path, tree in trees.items():
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and id(node) not in docstrings:
                names = long_name.findall(node.value)
                wrong += [f"{path.relative_to(SOURCE)}:{node.lineno} {name}" for name in names]
    assert wrong == []


def needs_docstring(node: ast.stmt) -> bool:
    """Whether a statement defines a public function or class, which is no overload."""
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
        return False
    return not any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_every_public_function_and_class_has_a_docstring(trees: dict[Path, ast.Module]) -> None:
    missing = []
    for path, tree in trees.items():
        for node in tree.body:
            if needs_docstring(node) and ast.get_docstring(node) is None:
                missing.append(f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}")
    assert missing == []
