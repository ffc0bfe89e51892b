"""Starting: the help, imports, `plan gpt`, and runs of two recipes on their default data up to the
end of the first step.

Each runs in a fresh interpreter, in turns, with torch's own number of threads. A row has the least
and the median wall seconds, and the median of the CPU seconds (user and system) of all its
processes. "no cache" has an empty cache directory, and the others have what an earlier start has
written there.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from statistics import median
from time import perf_counter

from growing.told import Clock, Told

FIRST_STEP = """
import os, sys
from surefoot.cli import main, train

build = train.build_run

def build_and_end(*arguments, **options):
    run = build(*arguments, **options)
    from surefoot.run.periodic import PeriodicWork  # imports torch, which the command does later than this line
    PeriodicWork.evaluate_due = lambda self, done: os._exit(0)  # called after the first step
    return run

train.build_run = build_and_end
main.main(["train", *sys.argv[1:]])
"""
WAYS = {
    "python": ["-c", "pass"],
    "import surefoot": ["-c", "import surefoot"],
    "surefoot --help": ["-m", "surefoot", "--help"],
    "import torch": ["-c", "import torch"],
    "train gpt, no cache": ["-c", FIRST_STEP, "gpt", "--run-dir=RUN"],
    "train gpt, first step": ["-c", FIRST_STEP, "gpt", "--run-dir=RUN"],
    "plan gpt": ["-m", "surefoot", "plan", "gpt", "--run-dir=RUN"],
    "train images, first step": ["-c", FIRST_STEP, "images", "--run-dir=RUN"],
}


def told(now: Clock, *, short: bool) -> Told:
    del now  # other processes are timed: by the wall, and their processor time beside it
    walls: dict[str, list[float]] = {name: [] for name in WAYS}
    used: dict[str, list[float]] = {name: [] for name in WAYS}
    # as a user has them: the threads that torch chooses, and compiled modules beside the source
    without = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(1 if short else 3):
            for name, arguments in WAYS.items():
                with tempfile.TemporaryDirectory() as directory:
                    ours = {"XDG_CACHE_HOME": directory if name.endswith("no cache") else cache}
                    typed = [argument.replace("RUN", f"{directory}/run") for argument in arguments]
                    if not used[name] and not name.endswith(
                        "no cache"
                    ):  # compiles modules, and fills the cache
                        run(typed, environment | ours)
                        typed = [argument.replace("/run", "/again") for argument in typed]
                    before = children_s()
                    begun = perf_counter()
                    run(typed, environment | ours)
                    walls[name].append(perf_counter() - begun)
                    used[name].append(children_s() - before)
    rows = [f"{'':>24} {'wall s':>8} {'median':>8} {'CPU s':>8}"]
    rows += [
        f"{name:>24} {min(walls[name]):>8.3f} {median(walls[name]):>8.3f} {median(used[name]):>8.3f}"
        for name in WAYS
    ]
    first = ("train gpt, first step", "plan gpt", "train images, first step")
    return Told(
        rows,
        f"start: surefoot --help {min(walls['surefoot --help']):.2f} s, import surefoot {min(walls['import surefoot']):.2f} s;"
        f" CPU seconds: {'; '.join(f'{name} {median(used[name]):.1f}' for name in first)}",
        "starting",
        "",
        "seconds",
        {name: [(place, min(times))] for place, (name, times) in enumerate(walls.items())},
    )


def run(arguments: list[str], environment: dict[str, str]) -> None:
    subprocess.run(
        [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment
    )


def children_s() -> float:
    """Processor seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
