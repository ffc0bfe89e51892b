"""What a training loop costs: surefoot and its peers against the plain PyTorch loop, microseconds a
step; the last line is our ratio.

    python benchmarks/overhead.py [--short] [--rounds 25] [--steps N] [--only surefoot,Ignite] [--of mlp/memory,gpt/loader] [--cpu]

Two models whose step is short: an MLP (32-64-10, batch 32) and a GPT (2 layers of width 64, context
32, batch 8), each with its samples in memory and read one by one by a DataLoader; one thread. Every
loop trains the same module from the same weights on the same batches: AdamW, the norm limited to
1.0, warm-up then cosine, the loss told every 50 steps. All losses and the weights at the end are
compared first, and a loop that differs is not timed. What is on in each stands in its file in
`loops/`: surefoot has everything on, checkpoints too. Peers are an extra: pip install
surefoot[peers].

A loop's time is read off the moments at which it asks for data, in windows of 50 steps. In a round
each loop trains once, in turns; a ratio is that of the medians of the windows of one round.
"surefoot DataLoader" is given a shuffled DataLoader: `loader_port.py` measures it beside the same
DataLoader in a plain loop.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import product
from statistics import median
from time import perf_counter, process_time

import torch
from loops.conditions import reported
from loops.models import gpt, mlp
from loops.peers import PEERS, Loop, Peer, differs, outcome

WORKS = {"mlp": mlp, "gpt": gpt}
DATA = ("memory", "loader")
STEPS = {"mlp": 600, "gpt": 200}  # of one training that is timed
SHORT = {"mlp": 400, "gpt": 250}
SHORT_CASES = ["mlp/memory", "gpt/loader"]
Loops = dict[Peer, Loop]


def installed(only: Sequence[str]) -> Loops:
    """The loops that are to be timed; what is not installed is left out with a line that says
    so.
    """
    found: Loops = {}
    for peer in PEERS:
        if only and peer.name not in only and not peer.name.startswith("plain"):
            continue
        try:
            found[peer] = peer.loop()
        except ModuleNotFoundError as problem:
            print(
                f"{peer.name} is left out: no module {problem.name}; try: pip install 'surefoot[peers]'"
            )
    return found


def same(loops: Loops, name: str, *, loader: bool, steps: int) -> Loops:
    """Those whose losses and weights are those of the plain loop; of each other one a line."""
    found: Loops = {}
    for peer, loop in loops.items():
        problem = differs(peer, loop, WORKS[name](), steps=steps, loader=loader)
        if problem is None:
            found[peer] = loop
        else:
            print(f"{peer.name} FAILED and is not timed: {problem}")
    return found


def timed(
    loops: Loops, name: str, *, loader: bool, steps: int, rounds: int, now: Callable[[], float]
) -> dict[str, tuple[float, list[float]]]:
    """For each loop seconds of a step, and its ratio to the plain loop in every round; a first
    round warms up.
    """
    windows: dict[str, list[float]] = {peer.name: [] for peer in loops}
    ratios: dict[str, list[float]] = {peer.name: [] for peer in loops}
    for round_ in range(rounds + 1):
        found: dict[str, list[float]] = {}
        turned = round_ % len(loops)
        for peer, loop in [*loops.items()][turned:] + [*loops.items()][:turned]:
            made = outcome(loop, WORKS[name](), steps=steps, loader=loader, now=now)
            found[peer.name] = made.step_s
        if round_:
            for named, step_s in found.items():
                windows[named] += step_s
                ratios[named].append(median(step_s) / median(found["plain"]))
    return {named: (median(windows[named]), ratios[named]) for named in windows}


def table(title: str, found: dict[str, tuple[float, list[float]]]) -> str:
    """One line a loop, the quickest first."""
    lines = [f"{title:<20}  us a step   x plain   least to most of {len(found['plain'][1])} rounds"]
    for named, (step_s, ratios) in sorted(found.items(), key=lambda pair: median(pair[1][1])):
        lines.append(
            f"  {named:<18}  {step_s * 1e6:9.1f}   {median(ratios):7.3f}   {min(ratios):.3f} to {max(ratios):.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, help="without it 25")
    parser.add_argument(
        "--steps", type=int, help="of each training; without it 600 for the MLP, 200 for the GPT"
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help="one round of few steps: the MLP in memory, the GPT from a loader",
    )
    parser.add_argument(
        "--only",
        default="",
        help="loops by name, with a comma between; the plain ones are always there",
    )
    parser.add_argument("--of", default="", help="models and data, as in mlp/memory,gpt/loader")
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="the process's CPU time, where others use the machine too",
    )
    arguments = parser.parse_args()
    rounds, compared_steps, steps = (1, 50, SHORT) if arguments.short else (25, 200, STEPS)
    cases = (
        SHORT_CASES
        if arguments.short
        else [f"{name}/{data}" for name, data in product(WORKS, DATA)]
    )
    torch.set_num_threads(1)
    print(f"python {sys.version.split()[0]}, {torch.backends.cpu.get_cpu_capability()}, 1 thread")
    loops = installed([name for name in arguments.only.split(",") if name])
    print(
        ", ".join(
            f"{package} {version(package)}"
            for package in dict.fromkeys(peer.package for peer in loops)
        )
    )
    ours: float | None = None
    for case in arguments.of.split(",") if arguments.of else cases:
        name, data = case.split("/")
        found = timed(
            same(loops, name, loader=data == "loader", steps=compared_steps),
            name,
            loader=data == "loader",
            steps=arguments.steps or steps[name],
            rounds=arguments.rounds or rounds,
            now=process_time if arguments.cpu else perf_counter,
        )
        print(table(f"{name}, {data}", found), flush=True)
        if case == "mlp/memory" and "surefoot" in found:
            ours = median(found["surefoot"][1])
    if ours is not None:
        print(f"surefoot/plain {ours:.3f}")


if __name__ == "__main__":
    with reported():
        main()
