"""Write docs/reference/api.md and a page per namespace in docs/reference/api/, from the docstrings:
python docs/write_api.py.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import surefoot
from surefoot.config.setting import KeywordsDoc

SOURCE = Path(surefoot.__file__).parent
REFERENCE = Path(__file__).parent / "reference"
OF_RESULTS = (
    "surefoot.recipes.export",
    "surefoot.tools.diagnose",
    "surefoot.tools.replay",
    "surefoot.tools.verify",
)
HEAD = """# Public names

Each name in the stubs (`.pyi`) of `surefoot` and of its packages has an entry with an example.
`sf` is `import surefoot as sf`. An example is part of a docstring, where `make test` runs it. Names
of the same module need no prefix there.

These pages are generated: `python docs/write_api.py`.
"""


class Example(NamedTuple):
    """An example of a docstring: the public name that it belongs to, and its text with prompts and
    output.
    """

    owner: str
    text: str


def public_names() -> dict[str, Any]:
    """{"sf.data.Mixture": object}: first those of `sf`, then those of its namespaces and of the
    packages of results.
    """
    names = dict[str, Any]()
    for prefix, package in _namespaces().items():
        stub = SOURCE.parent / package.replace(".", "/") / "__init__.pyi"
        module = importlib.import_module(package)
        for line in ast.parse(stub.read_text()).body:
            if isinstance(line, ast.ImportFrom) and line.module is not None:
                values = {each.name: getattr(module, each.name) for each in line.names}
                names |= {
                    f"{prefix}.{name}": value
                    for name, value in values.items()
                    if not inspect.ismodule(value)
                }
    return names


def examples(names: dict[str, Any]) -> dict[str, Example | None]:
    """The example of each name: its own, or that of another name which uses it; None without
    any.
    """
    own = {name: _example_of(value) for name, value in names.items()}
    best = dict[str, Example | None]()
    for name, value in names.items():
        near = [other for other in names if names[other].__module__ == value.__module__]
        using = (other for other in [name, *near, *names] if own[other] and shows(own[other], name))
        best[name] = next((Example(other, own[other]) for other in using), None)
    return best


def shows(text: str, name: str) -> bool:
    """True if an example prints something, and calls a name or its method, raises or catches it, or
    tests for it.
    """
    own, parsed = name.rpartition(".")[2], doctest.DocTestParser().get_examples(text)
    calls, tree = list[str](), ast.parse("".join(each.source for each in parsed))
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kind]):
                calls += _parts(kind)
            case ast.Call(func=function):
                calls += _parts(function)
            case ast.ExceptHandler(type=ast.expr() as kind):
                calls += _parts(kind)
    raised = any(each.exc_msg and f".{own}: " in each.exc_msg for each in parsed)
    return raised or (own in calls and any(each.want for each in parsed))


def pages(names: dict[str, Any]) -> dict[str, str]:
    """{"api/data.md": text}: the page of each namespace, and api.md with the list of all."""
    chosen, packages = examples(names), dict[str, list[str]]()
    for name in names:
        packages.setdefault(name.rpartition(".")[0], []).append(name)
    index, written = [HEAD], dict[str, str]()
    for package, members in packages.items():
        file = f"api/{package.rpartition('.')[2]}.md"
        about = _linked(_first_line(importlib.import_module(_namespaces().get(package, package))))
        index.append(f"## [{package}]({file})\n\n{about}\n")
        index.append("\n".join(f"* [`{name}`]({file}#{_anchor(name)})" for name in members) + "\n")
        entries = [entry for name in members for entry in _entry(name, names[name], chosen[name])]
        written[file] = "\n".join([f"# {package}\n", f"{about}\n", *entries])
    return {"api.md": "\n".join(index), **written}


def _entry(name: str, value: Any, example: Example | None) -> Iterator[str]:
    """The parts of a name's entry: signature, docstring, example, members."""
    yield f"## `{name}`\n"
    parameters = _parameters(value)
    if callable(value):
        yield f"```python\n{_signature(name, parameters)}\n```\n"
    yield from (
        f"{paragraph}\n"
        for paragraph in _paragraphs(value, {text.split(":")[0] for text in parameters})
    )
    if example is not None:
        yield f"```python\n{example.text}```\n"
        if example.owner != name:
            package, _, own = example.owner.rpartition(".")
            yield f"This is the example of [`{own}`]({package.rpartition('.')[2]}.md#{_anchor(example.owner)}).\n"
    if inspect.isclass(value) and (members := list(_members(value))):
        yield "\n".join(f"* `.{member}`: {_linked(text)}" for member, text in members) + "\n"


def _namespaces() -> dict[str, str]:
    """{"sf.data": "surefoot.data"}: the package of each namespace, and the packages of results."""
    packages = {name: name for name in OF_RESULTS}
    for line in ast.parse((SOURCE / "__init__.pyi").read_text()).body:
        if not isinstance(line, ast.ImportFrom):
            continue
        for each in line.names:
            parts = ["surefoot", *(line.module or "").split("."), each.name]
            package = ".".join(part for part in parts if part)
            if (SOURCE.parent / package.replace(".", "/")).is_dir():
                packages[f"sf.{each.name}"] = package
    names = sorted(packages, key=lambda name: name.rpartition(".")[2])
    return {"sf": "surefoot"} | {name: packages[name] for name in names}


def _example_of(value: Any) -> str:
    """The first of the examples in the docstrings of a name and of its methods; "" without any."""
    methods = (
        [each for name, each in vars(value).items() if name[0] != "_"]
        if inspect.isclass(value)
        else []
    )
    for each in (value, *methods):
        parsed = doctest.DocTestParser().get_examples(inspect.getdoc(each) or "")
        if parsed:
            return "".join(_typed(example.source) + example.want for example in parsed)
    return ""


def _typed(source: str) -> str:
    first, *rest = source.splitlines()
    return "".join(
        f"{line}\n" for line in [f">>> {first}", *(f"... {line}".rstrip() for line in rest)]
    )


def _parts(expression: ast.expr) -> list[str]:
    return re.split(r"\W+", ast.unparse(expression))


def _anchor(name: str) -> str:
    return name.lower().replace(".", "")


def _linked(text: str) -> str:
    """Markdown in which each address is a link."""
    return re.sub(r"(?<!\]\()(?<![<`])https?://[^\s)]*[^\s).,;:]", r"<\g<0>>", text)


def _first_line(value: Any) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join(_docstring(value).split("\n\n")[0].split())


def _docstring(value: Any) -> str:
    """A docstring without the keywords that docs/reference/settings.md has."""
    return (inspect.getdoc(value) or "").partition(KeywordsDoc.head)[0].rstrip()


def _paragraphs(value: Any, parameters: set[str]) -> Iterator[str]:
    """The paragraphs of a docstring without its examples, each in one line; described parameters
    are items of a list.
    """
    for paragraph in _docstring(value).split("\n\n"):
        text, before = "", ""
        for line in paragraph.split("\n"):
            if line.lstrip().startswith(">>>"):  # up to the end of the paragraph
                break
            words, colon, about = line.replace("`", "", 2 * (line[0] == "`")).partition(": ")
            if colon and set(words.split(", ")) <= parameters:
                text += f"\n* `{words.replace(', ', '`, `')}`: {about}"
            elif (
                "\n* " in text and before.endswith(".") and line[0].isupper()
            ):  # a sentence after the list
                text += f"\n\n{line}"
            else:
                text += f" {line.strip()}"
            before = line
        if text:
            yield _linked(text.strip())


def _members(kind: type) -> Iterator[tuple[str, str]]:
    """The fields, methods and properties that a class itself defines, with their texts."""
    yield from _texts_of_fields(kind)
    for name, value in vars(kind).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        is_member = inspect.isfunction(function) or isinstance(function, property)
        if name[0] != "_" and is_member and inspect.getdoc(function):
            yield name, _first_line(function)


def _texts_of_fields(kind: type) -> Iterator[tuple[str, str]]:
    body = _definition(kind).body
    for node, after in pairwise(body):
        match node, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                yield name, " ".join(text.split())


def _definition(value: Any) -> Any:
    """The syntax of a class or function."""
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value)))).body[0]


def _annotations(value: Any) -> dict[str, str]:
    """The type of each parameter or field, as written in the source."""
    if inspect.isclass(value):
        types = dict[str, str]()
        for kind in reversed(
            [each for each in value.__mro__ if each.__module__.startswith("surefoot")]
        ):
            for node in _definition(kind).body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    types[node.target.id] = ast.unparse(node.annotation)
                elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
                    types |= _annotated(node)
        return types
    return _annotated(_definition(value))


def _annotated(node: ast.FunctionDef) -> dict[str, str]:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return {each.arg: ast.unparse(each.annotation) for each in every if each.annotation is not None}


def _parameters(value: Any) -> list[str]:
    """Parameters with type and default: ["path: str | Path", "*", "seed: int = 0"]."""
    if not callable(value):
        return []
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except ValueError:
        return ["..."]
    types, texts = _annotations(value), list[str]()
    for each in parameters:
        if each.name[0] == "_":
            continue
        if each.kind is each.KEYWORD_ONLY and not any(text.startswith("*") for text in texts):
            texts.append("*")
        stars = "*" * (each.kind is each.VAR_POSITIONAL) + "**" * (each.kind is each.VAR_KEYWORD)
        text = f"{stars}{each.name}" + (f": {types[each.name]}" if each.name in types else "")
        if each.default is not each.empty:
            default = getattr(each.default, "__name__", None) or repr(each.default)
            text += (" = " if each.name in types else "=") + ("..." if "<" in default else default)
        texts.append(text)
    return texts


def _signature(name: str, parameters: list[str]) -> str:
    """The call in one line of at most 88 columns, or with one parameter per line."""
    line = f"{name}({', '.join(parameters)})"
    return (
        line
        if len(line) <= 88
        else "\n".join([f"{name}(", *(f"    {each}," for each in parameters), ")"])
    )


if __name__ == "__main__":
    shutil.rmtree(REFERENCE / "api", ignore_errors=True)
    (REFERENCE / "api").mkdir()
    for file, text in pages(public_names()).items():
        (REFERENCE / file).write_text(text, encoding="utf-8")
