"""Functions of two commits, for readers who do not know which is which.

    python benchmarks/readings.py draw BEFORE AFTER --out DIR
    python benchmarks/readings.py count DIR

`draw` takes functions of over 15 lines in BEFORE whose code differs in AFTER, twelve for each of three
readers, always the same ones for a seed. `DIR/reader-N.md` has both versions of each, in a random
order; `DIR/key.json` says which is which. A reader writes `DIR/answers-N.json`: for each pair
"first", "second" or "equal". `count` prints how often AFTER was preferred.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = "src/surefoot"
_MIN_LINES = 15
_READERS = 3
_FUNCTIONS = 12  # of each reader


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    draw_parser = commands.add_parser("draw")
    draw_parser.add_argument("before")
    draw_parser.add_argument("after")
    draw_parser.add_argument("--out", type=Path, required=True)
    draw_parser.add_argument("--seed", type=int, default=47)
    count_parser = commands.add_parser("count")
    count_parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "draw":
        draw(arguments.before, arguments.after, arguments.out, seed=arguments.seed)
    else:
        count(arguments.out)


def draw(before: str, after: str, out: Path, *, seed: int) -> None:
    """Write the pairs of each reader, and the key."""
    old = functions_of(before)
    new = functions_of(after)
    names = []
    for name in sorted(old.keys() & new.keys()):
        is_long = len(old[name].splitlines()) > _MIN_LINES
        if is_long and old[name] != new[name]:
            names.append(name)
    numbers = random.Random(seed)
    drawn = numbers.sample(names, _READERS * _FUNCTIONS)
    out.mkdir(parents=True, exist_ok=True)
    key: dict[str, dict[str, str]] = {}
    for reader in range(_READERS):
        pages = []
        for index in range(_FUNCTIONS):
            name = drawn[reader * _FUNCTIONS + index]
            after_is_first = numbers.random() < 0.5
            versions = [new[name], old[name]] if after_is_first else [old[name], new[name]]
            label = f"{reader + 1}.{index + 1}"
            after_is = "first" if after_is_first else "second"
            key[label] = {"function": name, "after": after_is}
            pages.append(
                f"## {label}\n\nfirst:\n\n```python\n{versions[0]}\n```\n\n"
                f"second:\n\n```python\n{versions[1]}\n```\n"
            )
        (out / f"reader-{reader + 1}.md").write_text("\n".join(pages))
    (out / "key.json").write_text(json.dumps(key, indent=1))
    print(f"{len(drawn)} of {len(names)} functions that differ, in {out}")


def count(out: Path) -> None:
    """Print how often the later version was preferred, and the functions for which it was not."""
    key = json.loads((out / "key.json").read_text())
    preferred = 0
    others = []
    for reader in range(_READERS):
        answers = json.loads((out / f"answers-{reader + 1}.json").read_text())
        for label, answer in answers.items():
            if answer == key[label]["after"]:
                preferred += 1
            else:
                how = "equal" if answer == "equal" else "the earlier one"
                others.append(f"{label} {key[label]['function']}: {how}")
    print(f"{preferred} of {len(key)} preferred")
    print("\n".join(others))


def functions_of(commit: str) -> dict[str, str]:
    """Return the code of all functions of a commit's source, by file and qualified name."""
    functions: dict[str, str] = {}
    for path in git("ls-tree", "-r", "--name-only", commit, SOURCE).split():
        if path.endswith(".py"):
            text = git("show", f"{commit}:{path}")
            add_functions(ast.parse(text), text, path.removeprefix(f"{SOURCE}/"), functions)
    return functions


def add_functions(tree: ast.AST, text: str, name: str, functions: dict[str, str]) -> None:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            code = ast.get_source_segment(text, node, padded=True)
            functions[f"{name}:{node.name}"] = code or ""
        elif isinstance(node, ast.ClassDef):
            add_functions(node, text, f"{name}:{node.name}", functions)


def git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
