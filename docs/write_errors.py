"""Write the table of error codes into docs/reference/errors.md anew, made of the source: python
docs/write_errors.py.

An error with a code is raised in one form: the code, `problem`, `reason` and `remedy` are literals
in the call. So the table needs no run. An inserted value stands as `{name}`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from surefoot import errors

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "surefoot"
PAGE = ROOT / "docs" / "reference" / "errors.md"
HEAD = "| Code | Class | Message | What to do |\n|---|---|---|---|\n"


@dataclass(frozen=True)
class Entry:
    """A place in the source that raises an error with a code."""

    code: str
    kind: str
    where: str
    message: str
    remedy: str


def entries() -> list[Entry]:
    """The errors with a code, by code and place."""
    return read_source()[0]


@cache
def read_source() -> tuple[list[Entry], dict[str, str]]:
    """The errors with a code, and the name of the base class of each class of error."""
    found = []
    bases = {}
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        if "Error(" not in text:
            continue
        module = ast.parse(text)
        found += entries_in(module, path)
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and node.bases:
                bases[node.name] = name_of(node.bases[0])
    return sorted(found, key=lambda entry: (entry.code, entry.where)), bases


def entries_in(module: ast.Module, path: Path) -> Iterator[Entry]:
    constants = dict(text_constants(module))
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if "problem" not in keywords:
            continue
        kind = ast.unparse(node.func).rpartition(".")[2]
        if not kind.endswith("Error"):
            continue
        code = node.args[0]
        assert isinstance(code, ast.Constant), f"{path}:{node.lineno}: the code is no literal"
        sentences = [written(keywords["problem"])]
        if "reason" in keywords:
            sentences.append(written(keywords["reason"]))
        remedies = []
        if "remedy" in keywords:
            for remedy in written_remedies(keywords["remedy"]):
                is_bare_name = remedy.startswith("{") and remedy.endswith("}")
                name = remedy[1:-1] if is_bare_name else ""
                remedies.append(constants.get(name, "as the message says" if name else remedy))
        yield Entry(
            str(code.value),
            kind,
            f"{path}:{node.lineno}",
            "; ".join(sentences),
            ", or ".join(remedies),
        )


def text_constants(module: ast.Module) -> Iterator[tuple[str, str]]:
    """The names and values of a module's constants that are text."""
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                yield name, text


def written(node: ast.expr) -> str:
    """The text of a literal, with the names of inserted values in braces."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(written(part) for part in parts)
        case ast.FormattedValue(value=value):
            return f"{{{name_of(value)}}}"
    return f"{{{name_of(node)}}}"


def name_of(node: ast.expr) -> str:
    match node:
        case ast.Attribute(value=ast.Call(), attr="__name__"):
            return "type"
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return name_of(value)
    return "..."


def written_remedies(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.List(elts=parts):
            for part in parts:
                yield from written_remedies(part)
        case ast.Tuple(elts=parts):
            yield " ".join(remedy for part in parts for remedy in written_remedies(part))
        case ast.Starred(value=ast.GeneratorExp(elt=part)) | ast.ListComp(elt=part):
            yield from written_remedies(part)
        case ast.Call(func=ast.Name(id="Setting"), args=[name, *values]):
            shown = " = ".join(written_value(part) for part in (name, *values))
            yield f"`{shown}`"
        case ast.Call(func=ast.Name(id="Command"), args=[line]):
            yield f"`{written(line)}`"
        case _:
            yield written(node)


def written_value(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and not isinstance(node.value, str):
        return repr(node.value)
    if isinstance(node, ast.Tuple):
        return " ".join(written_value(part) for part in node.elts)
    return written(node)


def table() -> str:
    """The rows of all codes, in Markdown."""
    rows = []
    statuses = exit_statuses()
    for entry in entries():
        status = statuses[entry.kind]
        cells = (f"`{entry.code}`", f"`{entry.kind}` ({status})", entry.message, entry.remedy)
        in_one_line = (" ".join(cell.split("\n")).replace("|", "\\|") for cell in cells)
        rows.append("| " + " | ".join(in_one_line) + " |\n")
    return HEAD + "".join(rows)


def exit_statuses() -> dict[str, int]:
    """The exit status of each class of error, by its name: that of its base class in errors.py."""
    statuses = {
        name: kind.exit_status
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.SurefootError)
    }
    _, bases = read_source()
    for name in bases:
        base = name
        while base not in statuses and base in bases:
            base = bases[base]
        if base in statuses:
            statuses[name] = statuses[base]
    return statuses


def with_table(text: str) -> str:
    """The page with the table in the place of the one that it has."""
    return re.sub(re.escape(HEAD) + r"(\|.*\n)*", lambda _: table(), text)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
