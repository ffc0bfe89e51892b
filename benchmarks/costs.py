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
from typing import Any

import numpy as np
import torch
from growing import checks, feed, plan, read, resume, save, start
from growing.told import Told
from loops.conditions import reported

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
        draw(found, arguments.picture)
    for told in found.values():
        print(told.last)


def draw(found: Mapping[str, Told], path: Path) -> None:
    """A field for each cost: curves on logarithmic axes, or bars where there is nothing that
    grows.
    """
    from matplotlib.figure import Figure

    from surefoot.report.figures import COLORS, drawing

    with drawing():
        columns = min(3, len(found))
        rows = -(-len(found) // columns)
        figure: Any = Figure(figsize=(4.0 * columns, 2.9 * rows), layout="constrained")
        fields = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in fields[len(found) :]:
            axes.remove()
        for axes, told in zip(fields, found.values(), strict=False):
            axes.set_title(told.title, loc="left", fontsize=10, fontweight="bold")
            axes.grid(visible=True, color="0.9", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            if told.x:
                lines(axes, told, COLORS)
            else:
                bars(axes, told, COLORS[0])
        figure.savefig(path, metadata={"Date": None})


def lines(axes: Any, told: Told, colours: Any) -> None:
    for place, (name, points) in enumerate(told.curves.items()):
        axes.loglog(
            *np.array(points).T, "o-", color=colours[place], markersize=4, linewidth=1.6, label=name
        )
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, high / 100), high * 1.5)  # what is flat looks flat
    axes.set_xlabel(told.x)
    axes.set_ylabel(told.y)
    axes.legend(frameon=False, fontsize=8)


def bars(axes: Any, told: Told, colour: Any) -> None:
    names = list(told.curves)
    values = [points[0][1] for points in told.curves.values()]
    axes.barh(names, values, color=colour)
    axes.invert_yaxis()
    axes.set_xlabel(told.y)
    axes.bar_label(axes.containers[0], fmt="%.2f", padding=3, fontsize=8)
    axes.margins(x=0.15)


if __name__ == "__main__":
    with reported():
        main()
