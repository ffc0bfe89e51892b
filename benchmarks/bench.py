"""Every benchmark in its short form, one after the other, and what the last lines of each say:
`make bench`. Writes no result.

    python benchmarks/bench.py [--data DIRECTORY] [--only overhead,costs] [--busy]

DIRECTORY holds the data of those that need any: tinyshakespeare/input.txt, fashion-mnist/ and
multi30k/. A benchmark whose data are not there is left out, with a line that says so. The figures
of a short form are rough: few rounds, small sizes. The line below them says how fast the machine
was, and how many cores other programs used. With more than 0.3 no figure is printed, unless --busy
is there. Leaves with 1 where a benchmark failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from loops.conditions import BEGINNING, Conditions

HERE = Path(__file__).parent
MOST_S = 300.0  # of one of them


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder, what its short form is asked by, and how many of its last lines tell
    what it found.
    """

    script: str
    lines: int
    arguments: tuple[str, ...] = ("--short",)
    data: str | None = None  # handed over as --data
    ranks: int = 1


BENCHMARKS = {
    "overhead": Benchmark("overhead.py", 1),
    "typical": Benchmark("typical.py", 11, arguments=("--seconds", "3")),
    "loader port": Benchmark("loader_port.py", 10, arguments=("--seconds", "3", "--workers", "0")),
    "tape": Benchmark("tape.py", 3, arguments=("--seconds", "3")),
    "machine": Benchmark("machine.py", 4),
    "quality": Benchmark("quality.py", 3, data="tinyshakespeare/input.txt"),
    "fashion-mnist": Benchmark("fashion_mnist.py", 2, data="fashion-mnist"),
    "multi30k": Benchmark("multi30k.py", 2, data="multi30k"),
    "comparisons": Benchmark("comparisons.py", 8, data="fashion-mnist"),
    "costs": Benchmark("costs.py", 7),
    "observing": Benchmark("observing.py", 2),
    "ranks 1": Benchmark("ranks.py", 3),
    "ranks 2": Benchmark("ranks.py", 3, ranks=2),
    "kernels": Benchmark("kernels.py", 9, arguments=()),
    "optimizers": Benchmark("optimizers.py", 10, arguments=("--steps", "8")),
    "activations": Benchmark("activations.py", 8, arguments=("--rounds", "1")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--data", type=Path, help="the directory that holds the data sets' directories"
    )
    parser.add_argument("--only", default=",".join(BENCHMARKS))
    parser.add_argument(
        "--busy", action="store_true", help="print figures that other programs disturbed"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = arguments.only.split(",")
    failed = []
    disturbed = []
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"--only {','.join(unknown)}: the benchmarks are {', '.join(BENCHMARKS)}")
    for name in names:
        begun = perf_counter()
        conditions = Conditions()
        conditions.begin()
        lines, good = told(BENCHMARKS[name], arguments.data)
        conditions.end()
        if not good:
            failed.append(name)
        elif not conditions.is_quiet:
            disturbed.append(name)
            if not arguments.busy:
                lines = []
        lines.append(str(conditions))
        for place, line in enumerate(lines):
            print(
                f"{'' if place else name:<14} {'' if place else f'{perf_counter() - begun:.0f} s':>6}  {line}",
                flush=True,
            )
    if disturbed and not arguments.busy:
        print(f"no figures, since other programs ran: {', '.join(disturbed)}")
        print(
            f"  run them again when the machine is idle, or add --busy: --only {','.join(disturbed)}"
        )
    if failed:
        print(f"failed: {', '.join(failed)}")
        sys.exit(1)


def told(asked: Benchmark, data: Path | None) -> tuple[list[str], bool]:
    """The last lines of a benchmark, or why it was left out; and whether it did not fail."""
    script = HERE / asked.script
    arguments = list(asked.arguments)
    if asked.data is not None:
        if data is None or not (data / asked.data).exists():
            return [
                f"left out: no {asked.data} in {'--data, which is absent' if data is None else data}"
            ], True
        arguments += ["--data", str(data / asked.data)]
    launcher = (
        ["-m", "torch.distributed.run", "--nproc-per-node", str(asked.ranks)]
        if asked.ranks > 1
        else []
    )
    command = [sys.executable, *launcher, str(script), *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S, check=False)
    except subprocess.TimeoutExpired:
        return [f"FAILED: not over after {MOST_S:.0f} s"], False
    if ended.returncode:
        return [
            f"FAILED with {ended.returncode}: {line}"
            for line in ended.stderr.strip().splitlines()[-1:] or [""]
        ], False
    printed = [
        line
        for line in ended.stdout.splitlines()
        if line.strip() and not line.startswith(BEGINNING)
    ]
    return printed[-asked.lines :], True


if __name__ == "__main__":
    main()
