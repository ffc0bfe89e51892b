"""Drawing mutants from the source with a seed: six kinds of small changes, each of one line of a
function.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutating.stored import AREAS, Definition, Mutant, StaleError, locate

KINDS = ("comparison", "off by one", "constant", "min or max", "sign", "dropped line")
_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
_OPPOSITE = {
    "min": "max",
    "amin": "amax",
    "argmin": "argmax",
    "minimum": "maximum",
    "nanmin": "nanmax",
}
_OPPOSITE |= {largest: smallest for smallest, largest in _OPPOSITE.items()}
_SIGNS: dict[type[ast.operator], tuple[str, str]] = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}


Change = tuple[str, int, int, str]
"""Kind, first column, the one after the last, and what stands there then."""


@dataclass(frozen=True, order=True)
class Site:
    """A change that could be made: in a line of a file, from one column up to another."""

    kind: str
    line: int
    start: int
    stop: int
    new: str


def draw(
    functions: Sequence[Definition],
    package: Path,
    area: str,
    *,
    seed: int,
    count: int,
    without: Collection[str] = (),
) -> list[Mutant]:
    """`count` mutants of an area of a package, as many of each kind as there can be, at most one in
    a function.

    `functions` are all of the package; `without` names those to leave out.
    """
    dice = random.Random(f"{seed} {area}")
    by_kind: dict[str, list[tuple[Definition, Site]]] = {kind: [] for kind in KINDS}
    for definition in functions:
        module = str(definition.file.relative_to(package).with_suffix(""))
        if (
            f"{module}/".startswith(tuple(f"{part}/" for part in AREAS[area]))
            and definition.function not in without
        ):
            for site in sorted(sites(definition)):
                by_kind[site.kind].append((definition, site))
    for choices in by_kind.values():
        dice.shuffle(choices)
    drawn: list[Mutant] = []
    while len(drawn) < count and any(by_kind.values()):
        for kind in KINDS:
            mutant = _next(area, by_kind[kind], functions, {each.function for each in drawn})
            if mutant is not None and len(drawn) < count:
                drawn.append(mutant)
    return drawn


def _next(
    area: str,
    choices: list[tuple[Definition, Site]],
    functions: Sequence[Definition],
    used: Collection[str],
) -> Mutant | None:
    """The next that is of a function without one, and can be found again by its text; taken from
    `choices`.
    """
    while choices:
        definition, site = choices.pop()
        line = definition.lines[site.line]
        old = line.strip()
        new = (line[: site.start] + site.new + line[site.stop :]).strip()
        number = definition.find(old).index(site.line) + 1
        mutant = Mutant(area, site.kind, definition.function, old, new, number)
        try:
            _, index = locate(mutant, functions)
        except StaleError:
            continue
        if definition.function not in used and index == site.line:
            return mutant
    return None


def sites(definition: Definition) -> Iterator[Site]:
    """All changes that could be made in a function, but for what stands in messages, annotations
    and decorators.
    """
    for statement in definition.node.body:
        for node in _walk(statement):
            for kind, start, stop, new in _changes(node, definition.lines):
                index = node.lineno - 1
                if definition.lines[index].isascii():  # columns are counted in bytes
                    yield Site(kind, index, start, stop, new)


def _walk(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The statements and expressions of a tree whose values matter."""
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr | ast.Raise):
                yield from _walk(child)


def _changes(node: ast.expr | ast.stmt, lines: Sequence[str]) -> Iterator[Change]:
    """The changes at a node that stands on one line."""
    if node.end_lineno != node.lineno:
        return
    yield from _of_operators(node, lines[node.lineno - 1])
    yield from _of_numbers(node)
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        end = node.func.end_col_offset or 0
        if name in _OPPOSITE:
            yield "min or max", end - len(name), end, _OPPOSITE[name]
    elif isinstance(node, ast.stmt) and _may_be_dropped(node):
        yield *_of("dropped line", node), "pass"


def _of_operators(node: ast.expr | ast.stmt, line: str) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        for left, right, operation in zip(sides, sides[1:], node.ops, strict=False):
            old, others = _COMPARISONS[type(operation)]
            for new in others:
                yield from _between("comparison", line, left, right, old, new)
    elif isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        if not _is_sequence(node.left) and not _is_sequence(node.right):
            yield from _between("sign", line, node.left, node.right, *_SIGNS[type(node.op)])
    elif (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and not isinstance(node.operand, ast.Constant)
    ):
        yield "sign", node.col_offset, node.col_offset + 1, ""


def _of_numbers(node: ast.expr | ast.stmt) -> Iterator[Change]:
    counts: list[ast.AST | None] = []  # where a whole number is a count or an index
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        counts = [node.left, node.right]
    elif isinstance(node, ast.Compare):
        counts = [node.left, *node.comparators]
    elif isinstance(node, ast.Subscript):
        counts = (
            [node.slice.lower, node.slice.upper]
            if isinstance(node.slice, ast.Slice)
            else [node.slice]
        )
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("range", "enumerate")
    ):
        counts = [*node.args, *(keyword.value for keyword in node.keywords)]
    for count in counts:
        yield from _off_by_one(count)
    number = node.value if isinstance(node, ast.Constant) else None
    if isinstance(number, float) and number != 0:
        yield from ((*_of("constant", node), repr(new)) for new in (2 * number, number / 2))
    elif isinstance(number, int) and not isinstance(number, bool) and number > 1:
        yield from (
            (*_of("constant", node), str(new))
            for new in ((2 * number, number // 2) if number % 2 == 0 else (2 * number,))
        )


def _may_be_dropped(node: ast.stmt) -> bool:
    """Whether it is a call, or changes what is there anyway: a name that is never bound would fail
    at once.
    """
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Continue)


def _off_by_one(node: ast.AST | None) -> Iterator[Change]:
    if (
        isinstance(node, ast.Constant)
        and type(node.value) is int
        and node.end_lineno == node.lineno
    ):
        yield from (
            (*_of("off by one", node), str(new))
            for new in (node.value + 1, node.value - 1)
            if new >= 0
        )


def _of(kind: str, node: ast.expr | ast.stmt) -> tuple[str, int, int]:
    return kind, node.col_offset, node.end_col_offset or 0


def _between(
    kind: str, line: str, left: ast.expr, right: ast.expr, old: str, new: str
) -> Iterator[Change]:
    """The operator between two sides that stand on one line."""
    start = left.end_col_offset or 0
    stop = right.col_offset
    match = re.search(rf"(?<![\w<>=!]){re.escape(old)}(?![\w<>=!])", line[start:stop])
    if match is not None:
        yield kind, start + match.start(), start + match.end(), new


def _is_sequence(node: ast.AST) -> bool:
    """Whether a plus beside it puts sequences together."""
    return isinstance(node, ast.List | ast.Tuple | ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
