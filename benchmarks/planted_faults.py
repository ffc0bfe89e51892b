"""The campaign of planted faults: short real runs, healthy ones and ones with one fault each,
trained and diagnosed.

    python benchmarks/planted_faults.py [--seed 1]

Appends a dated table to benchmarks/results/diagnose.txt: the fault, whether it was found by its
name, and what else was found. The runs are those of tests/diagnose/planted.py. Leaves with 1 where
a fault was missed or a healthy run was called broken.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch

from diagnose.planted import ALL, EVERY, HEALTHY, Planted, trained

RESULTS = Path(__file__).parent / "results" / "diagnose.txt"


def row(planted: Planted, run_dir: Path) -> tuple[bool, str]:
    """Whether it went as it should, and a line of the table."""
    found = trained(planted, run_dir)
    names = [finding.name for finding in found]
    errors = [finding.name for finding in found if finding.severity == "error"]
    good = not errors if planted.fault is None else planted.fault in names
    verdict = (
        ("no error" if good else f"ERROR {', '.join(errors)}")
        if planted.fault is None
        else "found"
        if good
        else "MISSED"
    )
    others = [
        f"{finding.name} ({finding.severity})" for finding in found if finding.name != planted.fault
    ]
    return (
        good,
        f"{planted.name:<46}  {planted.fault or '-':<25}  {verdict:<9}  {', '.join(others) or '-'}",
    )


def main() -> None:
    """Train all, one after the other, and append the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0, help="the seed of every run")
    seed = parser.parse_args().seed
    EVERY["seed"] = seed
    torch.set_num_threads(1)
    begun = time.monotonic()
    lines = []
    bad = 0
    with tempfile.TemporaryDirectory() as place:
        for number, planted in enumerate(ALL):
            good, line = row(planted, Path(place) / str(number))
            bad += not good
            lines.append(line)
            print(line, flush=True)
    took_s = time.monotonic() - begun
    faults = len(ALL) - len(HEALTHY)
    summary = (
        f"seed {seed}: {len(HEALTHY)} healthy runs and {faults} faults, "
        f"{bad} not as they should be, {took_s:.0f} s"
    )
    head = f"{'run':<46}  {'fault':<25}  {'verdict':<9}  other findings"
    with RESULTS.open("a") as file:
        file.write(
            f"# {time.strftime('%Y-%m-%d')}, torch {torch.__version__}: {summary}\n{head}\n"
            + "\n".join(lines)
            + "\n\n"
        )
    print(summary)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
