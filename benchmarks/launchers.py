"""The files of examples/launch: rank 0 of two processes is killed with SIGKILL, and the run must
end with the same bits.

    python benchmarks/launchers.py [--only "Ray Train" Slurm ...] [--write]

Each file starts examples/launch/train.py, which waits here from about step 150 on until a process
is killed. When 100 steps are saved, the process of rank 0 gets SIGKILL. Where the launcher does not
start the processes again, the same command is typed again. The step in a line is that of the last
record before. Weights are compared with those of a run of two processes under
`surefoot train --nproc 2` that nobody disturbed. The files for Kubernetes, Kubeflow and SkyPilot
are checked against their schemas; besides, their commands run here with the variables that they get
there, without Kubernetes or a cloud. A launcher or a schema that is not installed is a line that
says so. With --write the result is appended to benchmarks/results/launchers.txt.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch

from launched import EXAMPLES, LAUNCHERS, SCHEMAS, killed, reference

RESULTS = Path(__file__).parent / "results" / "launchers.txt"


def lines(only: list[str], directory: Path) -> Iterator[str]:
    """One line for each launcher, then one for each schema."""
    chosen = [launcher for launcher in LAUNCHERS if not only or launcher.name in only]
    undisturbed = reference(directory / "undisturbed") if chosen else ("", {})
    for number, launcher in enumerate(chosen):
        shown = f"{launcher.name:27}{launcher.file:17}"
        if reason := launcher.missing():
            yield f"{shown} not run: {reason}"
            continue
        outcome = killed(launcher, directory / f"{number}-{launcher.file}", undisturbed=undisturbed)
        again = "by itself" if outcome.starts == 1 else "typed again"
        bits = "same bits" if outcome.same_bits and outcome.sessions > 1 else "OTHER BITS"
        yield f"{shown} killed at step {outcome.killed_at}, {again}, {outcome.sessions} sessions, {bits}"
    for file, (module, check) in SCHEMAS.items():
        if importlib.util.find_spec(module) is None:
            yield f"{file:17} schema not checked: {module} is not installed"
            continue
        check(EXAMPLES / file)
        package = importlib.metadata.packages_distributions()[module][0]
        yield f"{file:17} schema of {package} {importlib.metadata.version(package)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", default=[], help="names of launchers")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    head = f"# {date.today()}, python benchmarks/launchers.py, torch {torch.__version__}, two processes on a machine with 2 cores"
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="launchers-"))
        files = [sys.stdout] + ([stack.enter_context(RESULTS.open("a"))] if arguments.write else [])
        for line in chain([head], lines(arguments.only, Path(directory)), [""]):
            for file in files:
                print(line, file=file, flush=True)


if __name__ == "__main__":
    main()
