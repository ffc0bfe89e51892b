"""Starting: the command's help, importing the package, and a run of the gpt recipe on its default text up to the first step.

Each in a fresh interpreter, in turns; wall seconds (the least of all turns, and the median) and the processor's, of which there may be
more than of the wall's: tokenizers use all cores.
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
from surefoot import between_steps
from surefoot.cli.main import main

def made(self, step):
    os._exit(0)

between_steps.BetweenSteps.made = made
main(["train", "gpt", "--run-dir", sys.argv[1]])
"""
WAYS = {
    "python": ["-c", "pass"],
    "import surefoot": ["-c", "import surefoot"],
    "surefoot --help": ["-m", "surefoot", "--help"],
    "import torch": ["-c", "import torch"],
    "train gpt, first step": ["-c", FIRST_STEP],
}


def told(now: Clock, *, short: bool) -> Told:
    del now  # other processes are timed: by the wall, and their processor time beside it
    walls: dict[str, list[float]] = {name: [] for name in WAYS}
    used: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(1 if short else 5):
        for name, arguments in WAYS.items():
            with tempfile.TemporaryDirectory() as directory:
                before, begun = children_s(), perf_counter()
                subprocess.run(
                    [sys.executable, *arguments, directory], check=True, stdout=subprocess.DEVNULL, env=os.environ
                )
                walls[name].append(perf_counter() - begun)
                used[name].append(children_s() - before)
    rows = [f"{'':>22} {'wall s':>8} {'median':>8} {'processor s':>12}"]
    rows += [
        f"{name:>22} {min(walls[name]):>8.3f} {median(walls[name]):>8.3f} {median(used[name]):>12.3f}" for name in WAYS
    ]
    return Told(
        rows,
        f"start: surefoot --help {min(walls['surefoot --help']):.2f} s, import surefoot {min(walls['import surefoot']):.2f} s,"
        f" train gpt to its first step {min(walls['train gpt, first step']):.1f} s",
        "starting",
        "",
        "seconds",
        {name: [(place, min(times))] for place, (name, times) in enumerate(walls.items())},
    )


def children_s() -> float:
    """Processor seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
