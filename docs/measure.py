"""Measure the source: its size, how much one statement holds, and how closely its parts are tied.

    python docs/measure.py                  `src` and each package
    python docs/measure.py benchmarks tests       other directories, with the same ruler
    python docs/measure.py --list NAME            every case of a count, such as "chains"

Tokens are Python's own, without comments, layout and docstrings. Ternaries, comprehensions and
parallel assignments (`a, b = c, d`) are counted per 1,000 statements; a docstring is a statement.
The numbers are a mirror: no test holds them, and none is a goal.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "surefoot"
ABOVE_THE_CORE = ("tools", "recipes", "program", "saved_run", "cli", "__main__")
MANY_FIELDS = 5
LONG_CHAIN = 3
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
PLAIN_RUN = """
import sys, torch, surefoot as sf
x = torch.randn(16, 2)
run = sf.Run(
    model=lambda: torch.nn.Linear(2, 1),
    loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    train_data=(x, x.sum(1, keepdim=True)),
    splits={"val": sf.Split((x, x.sum(1, keepdim=True)))},
    length="2 epochs",
    batch_size=4,
    optimizer=sf.optim.sgd(lr=0.1),
    run_dir=sys.argv[1],
    console=False,
    report=False,
)
run.train()
names = sorted(name for name in sys.modules if name.partition(".")[0] == "surefoot")
print("loaded:", *names)
"""


@dataclass
class Measures:
    """Counts of some files, which add up."""

    files: int = 0
    tokens: int = 0
    statements: int = 0
    ternaries: int = 0
    comprehensions: int = 0
    parallel: int = 0

    def __add__(self, other: Measures) -> Measures:
        total = Measures()
        for name in vars(self):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        return total

    def row(self, name: str) -> str:
        statements = max(1, self.statements)
        per_thousand = [
            f"{1000 * count / statements:>10.0f}"
            for count in (self.ternaries, self.comprehensions, self.parallel)
        ]
        tokens_a_statement = self.tokens / statements
        return (
            f"{name:<14} {self.files:>6} {self.tokens:>8,} {tokens_a_statement:>10.1f}"
            f" {''.join(per_thousand)}"
        )


HEADER = (
    f"{'':<14} {'files':>6} {'tokens':>8} {'/statement':>10}"
    f" {'ternaries':>10}{'compreh.':>10}{'parallel':>10}"
)


def measure(text: str) -> Measures:
    """Count one file. A string alone, such as a docstring, has no tokens.

    >>> measure('"Doc."\\na, b = 1, 2  # two\\nc = [d if d else 0 for d in (a, b)]')
    Measures(files=1, tokens=24, statements=3, ternaries=1, comprehensions=1, parallel=1)
    """
    tree = ast.parse(text)
    texts = [node for node in ast.walk(tree) if is_text(node)]
    lines_of_texts = {
        line for node in texts for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    counts = Measures(files=1)
    counts.tokens = sum(line not in lines_of_texts for line in lines_of_tokens(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            counts.statements += 1
        if isinstance(node, ast.IfExp):
            counts.ternaries += 1
        if isinstance(node, COMPREHENSIONS):
            counts.comprehensions += 1
        if is_parallel(node):
            counts.parallel += 1
    return counts


def lines_of_tokens(text: str) -> Iterator[int]:
    """The line of each token but layout. A formatted text is one token in every Python."""
    depth = 0  # of formatted texts, which Python 3.12 and later take apart
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_END":
            depth -= 1
        elif kind == "FSTRING_START":
            depth += 1
            if depth == 1:
                yield token.start[0]
        elif depth == 0 and token.type not in LAYOUT:
            yield token.start[0]


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a string alone."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def is_parallel(node: ast.AST) -> bool:
    """Whether a statement assigns several values to several targets at once."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


@dataclass
class File:
    """A module of the source, parsed once."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return str(self.path.relative_to(SOURCE))

    @property
    def part(self) -> str:
        """The package, or the module itself if it stands at the top."""
        return self.path.relative_to(SOURCE).parts[0].removesuffix(".py")


def read_source() -> list[File]:
    files = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        files.append(File(path, text, ast.parse(text)))
    return files


def repeated_class_names(files: Iterable[File]) -> dict[str, list[str]]:
    """Where each class name that occurs twice or more stands."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.name}:{node.lineno}")
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def names_from_the_core(files: Iterable[File]) -> dict[str, list[str]]:
    """The modules of the core that tools import, with the names that they take from each."""
    taken: dict[str, set[str]] = defaultdict(set)
    for file in files:
        if file.part != "tools":
            continue
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            package, _, module = node.module.partition(".")
            if package == "surefoot" and module and module.split(".")[0] not in ABOVE_THE_CORE:
                taken[module].update(alias.name for alias in node.names)
    return {module: sorted(names) for module, names in sorted(taken.items())}


def fields_of_parts(files: Iterable[File]) -> dict[str, list[str]]:
    """The fields of `parts` that each module reads, for modules that read many."""
    fields: dict[str, set[str]] = defaultdict(set)
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Attribute) and _last_name(node.value) == "parts":
                fields[file.name].add(node.attr)
    return {name: sorted(read) for name, read in sorted(fields.items()) if len(read) > MANY_FIELDS}


def chains(files: Iterable[File]) -> list[str]:
    """Attribute chains of three dots or more, such as `run.parts.state.models`.

    A chain that begins with an imported module, as `torch.nn.functional.pad`, does not count.
    """
    lines = []
    for file in files:
        modules = set(_imported_modules(file.tree))
        inner = set()
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.Attribute) or node in inner:
                continue
            names = [node.attr]
            value = node.value
            while isinstance(value, ast.Attribute):
                inner.add(value)
                names.append(value.attr)
                value = value.value
            root = value.id if isinstance(value, ast.Name) else "..."
            if len(names) >= LONG_CHAIN and root not in modules:
                chain = ".".join([root, *reversed(names)])
                lines.append(f"{file.name}:{node.lineno} {chain}")
    return lines


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name.islower():
                    yield alias.asname or alias.name


def loaded_by_a_plain_run() -> list[str]:
    """The modules that a run with a directory and one split has imported at its end.

    The page of the run, which imports other modules, is not written.
    """
    with tempfile.TemporaryDirectory() as directory:
        ended = subprocess.run(
            [sys.executable, "-c", PLAIN_RUN, str(Path(directory) / "run")],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE.parent)},
        )
    last_line = ended.stdout.splitlines()[-1]
    return last_line.removeprefix("loaded: ").split()


def path_of(module: str) -> Path:
    path = SOURCE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@dataclass
class Structure:
    """How closely the parts of the source are tied, by the name of a count."""

    counts: dict[str, str] = field(default_factory=dict)  # a line each
    cases: dict[str, list[str]] = field(default_factory=dict)  # what `--list` prints


def structure(files: list[File], loaded: list[str], tokens: Mapping[Path, int]) -> Structure:
    found = Structure()

    repeated = repeated_class_names(files)
    found.counts["classes"] = f"{len(repeated)} class names occur twice or more"
    found.cases["classes"] = [f"{name}: {', '.join(where)}" for name, where in repeated.items()]

    loaded_tokens = sum(tokens[path_of(module)] for module in loaded)
    found.counts["loads"] = (
        f"{len(loaded)} modules with {loaded_tokens:,} tokens are loaded by a plain run"
    )
    found.cases["loads"] = loaded

    taken = names_from_the_core(files)
    name_count = sum(len(names) for names in taken.values())
    found.counts["core"] = f"{name_count} names of {len(taken)} core modules are imported by tools"
    found.cases["core"] = [f"{module}: {', '.join(names)}" for module, names in taken.items()]

    parts = fields_of_parts(files)
    found.counts["parts"] = f"{len(parts)} modules read more than {MANY_FIELDS} fields of `parts`"
    found.cases["parts"] = [f"{name}: {', '.join(read)}" for name, read in parts.items()]

    found.cases["chains"] = chains(files)
    found.counts["chains"] = (
        f"{len(found.cases['chains'])} attribute chains have {LONG_CHAIN} dots or more"
    )
    return found


def print_directories(directories: Iterable[str]) -> None:
    print(HEADER)
    for directory in directories:
        total = Measures()
        for path in sorted(Path(directory).rglob("*.py")):
            total += measure(path.read_text(encoding="utf-8"))
        print(total.row(directory))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directories", nargs="*", help="directories to measure instead of src")
    parser.add_argument("--list", metavar="NAME", help="classes, loads, core, parts or chains")
    arguments = parser.parse_args()
    if arguments.directories:
        print_directories(arguments.directories)
        return
    files = read_source()
    measured = {file.path: measure(file.text) for file in files}
    tokens = {path: counts.tokens for path, counts in measured.items()}
    found = structure(files, loaded_by_a_plain_run(), tokens)
    if arguments.list:
        if arguments.list not in found.cases:
            parser.error(f"--list {arguments.list}: the counts are {', '.join(found.cases)}")
        print(*found.cases[arguments.list], sep="\n")
        return
    by_part: dict[str, Measures] = defaultdict(Measures)
    for file in files:
        by_part[file.part] += measured[file.path]
    print(HEADER)
    print(sum(measured.values(), Measures()).row("src"))
    for part, counts in sorted(by_part.items(), key=lambda entry: -entry[1].tokens):
        print(counts.row(part))
    print()
    for name, line in found.counts.items():
        print(f"{line}  (--list {name})")
    most = Counter(line.split()[1] for line in found.cases["chains"]).most_common(3)
    print("  most frequent:", ", ".join(f"{chain} {count}" for chain, count in most))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the reader has seen enough, as in `--list chains | head`
        sys.stderr.close()
