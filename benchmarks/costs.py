"""Costs that grow with a run, its data or its records, and those of starting: tables, and a picture
of the curves.

    python benchmarks/costs.py [--of resume,plan,save,read,feed,start,checks] [--cpu] [--short] [--picture docs/images/costs.svg]

One thread. What each measures stands at the top of its file in benchmarks/growing. Times are
medians or the least of several; `--cpu` takes this process's processor time, where others use the
machine. `--short` leaves out the large sizes.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter, process_time

import torch
from growing import checks, feed, plan, read, resume, save, start
from growing.told import Told
from loops.conditions import reported

from surefoot.tools.report.charts import Chart, Line
from surefoot.tools.report.figures import picture

COSTS: dict[str, Callable[..., Told]] = {
    "resume": resume.told,
    "plan": plan.told,
    "save": save.told,
    "read": read.told,
    "feed": feed.told,
    "start": start.told,
    "checks": checks.told,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--of", default=",".join(COSTS))
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="the process's CPU time, where others use the machine too",
    )
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--picture", type=Path, help="an SVG file to draw the curves into")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Told] = {}
    for name in arguments.of.split(","):
        found[name] = COSTS[name](
            process_time if arguments.cpu else perf_counter, short=arguments.short
        )
        print(
            "\n".join([f"{name}: {found[name].title}", *found[name].rows]), end="\n\n", flush=True
        )
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, 1 thread, python {sys.version.split()[0]}"
    )
    if arguments.picture is not None:
        arguments.picture.write_text(picture(charts(found), title=""), encoding="utf-8")
    for told in found.values():
        print(told.last)


def charts(found: Mapping[str, Told]) -> list[Chart]:
    """A chart on logarithmic axes for each cost that grows with something."""
    drawn = []
    for name, told in found.items():
        if not told.x:
            continue
        lines = [
            Line(curve, tuple((float(x), float(y)) for x, y in points), series, dots=True)
            for series, (curve, points) in enumerate(told.curves.items())
        ]
        values = [y for line in lines for _, y in line.points]
        least = min(*values, max(values) / 100)  # what is flat looks flat
        drawn.append(
            Chart(
                name,
                told.title,
                tuple(lines),
                scale="log",
                x_scale="log",
                x_name=told.x,
                note=told.y,
                within=(least / 1.5, max(values) * 1.5),
            )
        )
    return drawn


if __name__ == "__main__":
    with reported():
        main()
