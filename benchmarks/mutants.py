"""The campaign of mutants: small faults put into the source one by one, each of which the test that
is named must find.

    python benchmarks/mutants.py
    python benchmarks/mutants.py --areas errors reports
    python benchmarks/mutants.py --draw loop --seed 17 --count 20

The first puts every mutant of mutants.toml into a copy of the package, one after the other, runs
the test that kills it, and appends a dated summary to results/mutants.txt: killed, survived, and
stale (its line is gone). It leaves with 1 unless all are killed, or are explained as equivalent to
the source. The second does so for some areas. The third prints new mutants; who adds them names
their tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from mutating.drawing import draw
from mutating.stored import AREAS, Mutant, StaleError, definitions, load, locate, mutated

HERE = Path(__file__).parent
STORED = HERE / "mutants.toml"
RESULTS = HERE / "results" / "mutants.txt"
LIMIT_S = 300.0  # a loop that never ends is killed too
Outcome = Literal["killed", "survived", "stale", "equivalent"]


def failures(tests: Collection[str], *, root: Path, source: Path) -> list[str]:
    """What pytest says at its end where one of these tests of `root` fails with the package in
    `source`; nothing where all pass.
    """
    environment = os.environ | {
        "PYTHONPATH": str(source),
        "PYTHONDONTWRITEBYTECODE": "1",  # a file changed twice in a second may have a stale one
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # a second of imports that no test needs
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    limit_s = LIMIT_S + 10 * len(tests)
    try:
        ended = subprocess.run(
            command,
            cwd=root,
            env=environment,
            capture_output=True,
            check=False,
            timeout=limit_s,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return [f"no end within {limit_s:.0f} s"]
    return (ended.stdout + ended.stderr).splitlines()[-5:] if ended.returncode else []


def campaign(mutants: Sequence[Mutant], *, root: Path, source: Path) -> list[Outcome]:
    """What became of each mutant; its line is printed as soon as it is known."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "src"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        tests = sorted({mutant.killed_by for mutant in mutants if mutant.killed_by})
        broken = failures(tests, root=root, source=copy) if tests else []
        if broken:
            raise SystemExit(
                "\n".join(["a test that is to kill a mutant fails without any:", *broken])
            )
        functions = definitions(copy)
        for mutant in mutants:
            outcome: Outcome = "equivalent"
            try:
                definition, index = locate(mutant, functions)
            except StaleError:
                outcome = "stale"
            else:
                if mutant.killed_by:
                    definition.file.write_text(mutated(mutant, definition, index), encoding="utf-8")
                    outcome = (
                        "killed"
                        if failures([mutant.killed_by], root=root, source=copy)
                        else "survived"
                    )
                    definition.file.write_text("\n".join(definition.lines) + "\n", encoding="utf-8")
            outcomes.append(outcome)
            print(
                f"{len(outcomes):>4} {outcome:<10}  {mutant.area:<10}  {mutant.kind:<12}  {mutant.words}",
                flush=True,
            )
    return outcomes


def summary(mutants: Sequence[Mutant], outcomes: Sequence[Outcome]) -> str:
    """A table of counts by area, and every mutant that survived or is stale."""
    kinds: tuple[Outcome, ...] = ("killed", "equivalent", "survived", "stale")
    lines = [f"{'area':<12}" + "".join(f"{kind:>12}" for kind in kinds)]
    areas = [area for area in AREAS if any(mutant.area == area for mutant in mutants)]
    for area in [*areas, "all"]:
        of_area = [
            outcome
            for mutant, outcome in zip(mutants, outcomes, strict=True)
            if area in (mutant.area, "all")
        ]
        lines.append(f"{area:<12}" + "".join(f"{of_area.count(kind):>12}" for kind in kinds))
    for mutant, outcome in zip(mutants, outcomes, strict=True):
        if outcome in ("survived", "stale"):
            lines.append(f"{outcome}: {mutant.words}  ({mutant.killed_by})")
    return "\n".join(lines)


def as_toml(mutant: Mutant) -> str:
    """A table of mutants.toml; texts in single quotes stand as they are."""
    fields = {
        name: field
        for name, field in vars(mutant).items()
        if field and (name, field) != ("number", 1)
    }
    lines = [
        f"{name} = {field if isinstance(field, int) else quoted(field)}"
        for name, field in fields.items()
    ]
    return "\n".join(["[[mutant]]", *lines])


def quoted(text: str) -> str:
    """A text of one line as TOML has it."""
    return f"'{text}'" if "'" not in text else f"'''{text}'''"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=[*AREAS])
    parser.add_argument("--draw", choices=AREAS, help="print new mutants of an area")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--without", nargs="*", default=[], help="functions to leave out")
    arguments = parser.parse_args()
    root = HERE.parent
    mutants = load(STORED) if STORED.exists() else []
    if arguments.draw:
        package = root / "src" / "surefoot"
        without = [
            *arguments.without,
            *(mutant.function for mutant in mutants),
        ]  # those that have one already
        functions = definitions(package)
        drawn = draw(
            functions,
            package,
            arguments.draw,
            seed=arguments.seed,
            count=arguments.count,
            without=without,
        )
        print("\n\n".join(as_toml(mutant) for mutant in drawn))
        return
    started = time.monotonic()
    mutants = [mutant for mutant in mutants if mutant.area in arguments.areas]
    outcomes = campaign(mutants, root=root, source=root / "src")
    table = summary(mutants, outcomes)
    command = "make campaign-mutants"
    if set(arguments.areas) != set(AREAS):
        command = f"python benchmarks/mutants.py --areas {' '.join(arguments.areas)}"
    with RESULTS.open("a", encoding="utf-8") as file:
        head = f"# {time.strftime('%Y-%m-%d')}, {command}: {len(mutants)} mutants"
        file.write(f"{head}, {time.monotonic() - started:.0f} s\n{table}\n\n")
    print(table)
    sys.exit(any(outcome in ("survived", "stale") for outcome in outcomes))


if __name__ == "__main__":
    main()
