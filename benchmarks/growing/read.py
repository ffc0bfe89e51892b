"""Reading the records of a run, drawing its page, and looking for what is wrong with it, by the
number of records.

Each is done in a process of its own; its memory is the most that this process had at any time, the
interpreter and all. Of the most records, also the CPU seconds (user and system) of the commands
`surefoot report` and `surefoot diagnose`, their start included: medians of three processes each, in
turns.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from growing.records import write_records
from growing.told import Clock, Told

NUMBERS = (1_000, 10_000, 100_000, 1_000_000)
WAYS = ("read", "page", "diagnose")


def told(now: Clock, *, short: bool) -> Told:
    numbers = NUMBERS[:2] if short else NUMBERS
    found: dict[str, dict[int, tuple[float, float]]] = {way: {} for way in WAYS}
    sizes: dict[int, tuple[float, float]] = {}
    for number in numbers:
        with tempfile.TemporaryDirectory() as directory:
            run = Path(directory)
            write_records(run / "metrics.jsonl", number, every=50)
            for way in WAYS:
                found[way][number] = in_process(way, run, cpu=now is process_time)
            sizes[number] = (
                (run / "metrics.jsonl").stat().st_size / 1e6,
                (run / "report.html").stat().st_size / 1e6,
            )
            if number == numbers[-1]:
                (run / "config.toml").touch()
                commands = of_commands(run)
    most = numbers[-1]
    head = f"{'records':>9} {'file MB':>8} {'page MB':>8}" + "".join(
        f" {way + ' s':>11} {'MB':>5}" for way in WAYS
    )
    rows = [
        f"{number:>9,} {sizes[number][0]:>8.1f} {sizes[number][1]:>8.2f}"
        + "".join(f" {found[way][number][0]:>11.2f} {found[way][number][1]:>5.0f}" for way in WAYS)
        for number in numbers
    ]
    return Told(
        [
            head,
            *rows,
            *(
                f"surefoot {name}: {seconds:.2f} s of CPU for {most:,} records"
                for name, seconds in commands.items()
            ),
        ],
        f"records: of {most:,} "
        + ", ".join(f"{way} {found[way][most][0]:.1f} s" for way in WAYS)
        + "; CPU of "
        + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in commands.items())
        + f"; at most {max(found[way][most][1] for way in WAYS):.0f} MB of memory",
        "reading records",
        "records",
        "seconds",
        {way: [(number, found[way][number][0]) for number in numbers] for way in WAYS},
    )


def of_commands(run: Path) -> dict[str, float]:
    """CPU seconds of the commands, medians of three in turns."""
    code = "from surefoot.cli.main import main; main()"
    taken: dict[str, list[float]] = {}
    for _ in range(3):
        for name in ("report", "diagnose"):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(
                [sys.executable, "-c", code, name, str(run)],
                stdout=subprocess.DEVNULL,
                check=True,
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            taken.setdefault(name, []).append(seconds)
    return {name: median(seconds) for name, seconds in taken.items()}


def in_process(way: str, run: Path, *, cpu: bool) -> tuple[float, float]:
    """Seconds, and megabytes of memory."""
    command = [sys.executable, "-m", "growing.read", way, str(run), *["cpu"] * cpu]
    beside = Path(__file__).parents[1]
    lines = subprocess.run(
        command, cwd=beside, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()
    taken, memory = json.loads(lines[-1])
    return taken, memory


def main() -> None:
    import numpy  # noqa: F401  # before the clock starts

    from surefoot.saved_run import load
    from surefoot.tools.report.series import read_reported_run
    from surefoot.tools.report.write import write_page

    ways: dict[str, Callable[[Path], object]] = {
        "read": read_reported_run,
        "page": write_page,
        "diagnose": lambda run: load(run).diagnose(),
    }
    now = process_time if "cpu" in sys.argv else perf_counter
    begun = now()
    ways[sys.argv[1]](Path(sys.argv[2]))
    taken = now() - begun
    print(json.dumps([taken, peak_mb()]))


def peak_mb() -> float:
    """The most memory of this process; what `getrusage` tells counts on Linux that of the process
    that started it, too.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # macOS counts bytes
    return next(
        int(line.split()[1]) / 1e3
        for line in status.read_text().splitlines()
        if line.startswith("VmHWM")
    )


if __name__ == "__main__":
    main()
