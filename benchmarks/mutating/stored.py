"""Mutants as they are stored: a function by its qualified name, one of its lines, and what that
line becomes.

No file is named, so a mutant survives when its function moves to another file.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

AREAS = {
    "loop": (
        "train/loop",
        "train/loss_accumulator",
        "mean",
        "losses",
        "train/batch_norm_buffers",
        "train/buffer_groups",
        "distributed/tree_sum",
        "distributed/rank_sums",
        "distributed/exact_ddp",
        "distributed/exact_fsdp",
        "train/meter",
        "train/precision",
    ),
    "checkpoint": ("checkpoint",),
    "data": ("data",),
    "optimizers": ("optim", "schedules", "train/patience"),
    "evaluation": (
        "train/evaluate",
        "run/evaluation",
        "train/metric_results",
        "train/patience",
        "verify",
        "diagnose",
    ),
    "errors": ("errors", "config", "cli", "recipes", "train/run_identity", "data/scan"),
    "reports": ("tracking", "report", "diagnose", "plan", "tune", "profile", "compare"),
}
"""Of each area the files and folders of the package, from which `draw` takes mutants."""

WRITTEN_KINDS = ("dropped part", "lost check", "swapped")
"""Kinds of mutants that only a person writes."""


class StaleError(Exception):
    """The function of a mutant is gone, or the line is not in it any more, or in it more than
    once.
    """


@dataclass(frozen=True)
class Mutant:
    """`old` and `new` are lines without their indentation; `number` counts equal lines of the
    function from 1.
    """

    area: str
    kind: str
    function: str
    old: str
    new: str
    number: int = 1
    killed_by: str = ""
    equivalent: str = ""

    @property
    def words(self) -> str:
        """The change in one line."""
        return f"{self.function}: {self.old}  ->  {self.new}"


@dataclass(frozen=True)
class Definition:
    """A function or method at the top of a file or class: its qualified name and its lines, counted
    from 0.
    """

    function: str
    file: Path
    start: int
    stop: int
    lines: tuple[str, ...]  # of the whole file
    node: ast.FunctionDef | ast.AsyncFunctionDef

    def find(self, line: str) -> list[int]:
        """Where in the file a line of this function stands that is this one but for its
        indentation.
        """
        return [
            index for index in range(self.start, self.stop) if self.lines[index].strip() == line
        ]


def load(file: Path) -> list[Mutant]:
    """The stored mutants."""
    return [
        Mutant(**fields) for fields in tomllib.loads(file.read_text(encoding="utf-8"))["mutant"]
    ]


def definitions(package: Path) -> list[Definition]:
    """All functions of a package's files, in the order of the files' names."""
    return [
        definition for file in sorted(package.rglob("*.py")) for definition in definitions_in(file)
    ]


def definitions_in(file: Path) -> list[Definition]:
    """The functions of a file, and the methods of its classes; what is defined in a function
    belongs to it.
    """
    text = file.read_text(encoding="utf-8")
    lines = tuple(text.splitlines())
    functions = []
    open_nodes: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    while open_nodes:
        prefix, parent = open_nodes.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef):
                open_nodes.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                stop = node.end_lineno or node.lineno
                functions.append(
                    Definition(f"{prefix}{node.name}", file, node.lineno - 1, stop, lines, node)
                )
    return sorted(functions, key=lambda definition: definition.start)


def locate(mutant: Mutant, among: Iterable[Definition]) -> tuple[Definition, int]:
    """The function that a mutant changes, and the index of its line; `StaleError` where that is not
    one line.
    """
    named = [definition for definition in among if definition.function == mutant.function]
    if not named:
        raise StaleError(f"no function {mutant.function}")
    having = [definition for definition in named if definition.find(mutant.old)]
    if len(having) != 1:
        raise StaleError(
            f"{len(having)} of {len(named)} functions {mutant.function} have the line {mutant.old}"
        )
    places = having[0].find(mutant.old)
    if mutant.number > len(places):
        raise StaleError(
            f"{mutant.function} has {len(places)} lines {mutant.old}, not {mutant.number}"
        )
    return having[0], places[mutant.number - 1]


def mutated(mutant: Mutant, definition: Definition, index: int) -> str:
    """The text of the file with the mutant in it."""
    line = definition.lines[index]
    indentation = line[: len(line) - len(line.lstrip())]
    lines = [*definition.lines[:index], indentation + mutant.new, *definition.lines[index + 1 :]]
    return "\n".join(lines) + "\n"
