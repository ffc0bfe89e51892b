"""Write docs/reference/api.md anew: each public name with its line and an example, made of the stubs: python docs/write_api.py."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import surefoot

SOURCE = Path(surefoot.__file__).parent
HEAD = """# Public names

Every name in the stubs (`.pyi`) of `surefoot` and of its packages. `sf` is `import surefoot as sf`. An example stands in the
docstring of its name, where `make test` runs it: names of the same module need no prefix there.

This page is generated: `python docs/write_api.py`.
"""


def public_names() -> dict[str, Any]:
    """{"sf.data.Mixture": object}: first those of `sf`, then those of its namespaces and of the packages of results."""
    found = dict[str, Any]()
    for stub in [SOURCE / "__init__.pyi", *sorted(SOURCE.glob("*/__init__.pyi"))]:
        package = ".".join(stub.parent.relative_to(SOURCE.parent).parts)
        prefix = re.sub(r"^surefoot\b", "sf", package) if package in _namespaces() else package
        module = importlib.import_module(package)
        for line in ast.parse(stub.read_text()).body:
            if isinstance(line, ast.ImportFrom) and line.module is not None:
                found |= {f"{prefix}.{each.name}": getattr(module, each.name) for each in line.names}
    return found


def examples_of(value: Any) -> str:
    """The first of the examples in the docstrings of a name and of its methods; "" without any."""
    methods = [each for name, each in vars(value).items() if name[0] != "_"] if inspect.isclass(value) else []
    for each in (value, *methods):
        parsed = doctest.DocTestParser().get_examples(inspect.getdoc(each) or "")
        if parsed:
            return "".join(_typed(example.source) + example.want for example in parsed)
    return ""


def without_example(names: dict[str, Any]) -> list[str]:
    """The names that neither have an example nor stand in that of another name."""
    examples = {name: examples_of(value) for name, value in names.items()}
    return [name for name, text in examples.items() if not text and _shown_with(name, examples) is None]


def page(names: dict[str, Any]) -> str:
    """The whole page in Markdown."""
    examples, parts, before = {name: examples_of(value) for name, value in names.items()}, [HEAD], ""
    for name, value in names.items():
        package, _, own = name.rpartition(".")
        if package != before:
            parts.append(f"## `{package}`\n")
            before = package
        lines = [f"### `{name}`\n", f"`{own}{_arguments(value)}`\n" * callable(value), f"{_line(value)}\n"]
        if inspect.isclass(value):
            lines.append("".join(f"* `.{member}`: {_line(each)}\n" for member, each in _members(value)))
        shown_with = _shown_with(name, examples)
        if examples[name]:
            lines.append(f"```python\n{examples[name]}```\n")
        elif shown_with is not None:
            lines.append(f"Shown with `{shown_with}`.\n")
        parts += filter(None, lines)
    return "\n".join(parts)


def _namespaces() -> set[str]:
    lines = ast.parse((SOURCE / "__init__.pyi").read_text()).body
    imports = [line for line in lines if isinstance(line, ast.ImportFrom) and line.module is None]
    return {"surefoot", *(f"surefoot.{each.name}" for line in imports for each in line.names)}


def _typed(source: str) -> str:
    first, *rest = source.splitlines()
    return "".join(f"{line}\n" for line in [f">>> {first}", *(f"... {line}".rstrip() for line in rest)])


def _shown_with(name: str, examples: dict[str, str]) -> str | None:
    own = re.compile(rf"(?<!\w){name.rpartition('.')[2]}[(),]")
    return next((other for other, text in examples.items() if other != name and own.search(text)), None)


def _line(value: Any) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class itself defines, with a docstring."""
    for name, value in vars(kind).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if (
            name[0] != "_"
            and (inspect.isfunction(function) or isinstance(function, property))
            and inspect.getdoc(function)
        ):
            yield name, function


def _arguments(value: Any) -> str:
    """The arguments as they are passed, with their defaults; of many keywords only the first."""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except ValueError:
        return "(...)"
    texts, is_keyword = list[str](), False
    for each in parameters[:12]:
        if each.kind is each.KEYWORD_ONLY and not is_keyword:
            texts.append("*")
            is_keyword = True
        if each.kind is each.VAR_POSITIONAL:
            texts.append(f"*{each.name}")
            is_keyword = True
        elif each.default is each.empty:
            texts.append(each.name)
        else:
            default = getattr(each.default, "__name__", None) or repr(each.default)
            texts.append(f"{each.name}={'...' if '<' in default else default}")
    return f"({', '.join(texts)}{', ...' * (len(parameters) > 12)})"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "reference" / "api.md"
    target.write_text(page(public_names()), encoding="utf-8")
