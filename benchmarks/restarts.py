"""The campaign of restarts: ranks of a run are killed and stopped; it must come back by itself and
end with the same bits.

    python benchmarks/restarts.py [--tries 20] [--launcher torchrun]

Appends one line of JSON for each try to benchmarks/results/restarts.jsonl and goes on where it
stopped: so many tries under each launcher. The run is that of tests/small_program.py on 2 or 4
ranks, under `--nproc` and under torchrun, each with `--max-restarts`; one to three times a random
rank gets SIGKILL, or SIGSTOP, at a random moment, that of starting included. Under `--nproc`
processes are forked from this one, which has imported torch; under torchrun they are processes of
their own. There a rank is stopped only once the run has begun: before, ranks wait five minutes for
each other. Silence is noticed after 4 s instead of 20; all else is as users have it. Everything but
the moment at which the system delivers a signal is drawn from the number of the try.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch

from forked_ranks import PROGRAM, Launched, bits, steps_made, surefoot
from under_torchrun import Torchrun, torchrun
from waiting import wait_until

LAUNCHERS = ("surefoot", "torchrun")
LONG_S = 1800.0  # nothing is slow: the machine may be busy
RESULTS = Path(__file__).parent / "results" / "restarts.jsonl"


def one_try(number: int, references: dict[int, dict[str, Any]], directory: Path) -> dict[str, Any]:
    """Train one run whose ranks are killed and stopped; what was done to it, and how it ended."""
    draw = random.Random(number)
    size, deaths = draw.choice([2, 4]), draw.choice([1, 1, 2, 3])
    run_dir = directory / f"run-{number}"
    flags = [
        "--pause-s",
        "0.03",
        "--nproc",
        str(size),
        "--max-restarts",
        str(deaths),
        "--run-dir",
        str(run_dir),
    ]
    done = []
    start_s = time.monotonic()
    with surefoot(
        directory / f"processes-{number}", "train", PROGRAM, *flags, silent_s=4.0
    ) as group:
        for attempt in range(deaths):
            rank = draw.randrange(size)
            signal_number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            after_s = round(draw.uniform(0.0, 2.5), 3)
            pid = group.pid(rank, attempt)
            time.sleep(after_s)
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:  # the run was finished before
                break
            done.append({"rank": rank, "signal": signal_number.name, "after_s": after_s})
            another = group.directory / f"rank-0-{attempt + 1}"
            _until_started_again(another, group)
            if group.process.poll() is not None:
                break
        status = group.wait()
    same = status == 0 and bits(run_dir) == references[size]
    return {"try": number, "ranks": size, "deaths": done, "status": status, "same_bits": same} | {
        "litter": _litter(run_dir),
        "orphans": len(group.left()),
        "seconds": round(time.monotonic() - start_s, 1),
    }


def one_try_of_torchrun(
    number: int, references: dict[int, dict[str, Any]], directory: Path
) -> dict[str, Any]:
    """The same, under torchrun: each death comes while ranks start, or so many steps after they
    have gone on.
    """
    draw = random.Random(1000 + number)
    size, deaths = draw.choice([2, 4]), draw.choice([1, 1, 2, 3])
    out = directory / f"run-of-torchrun-{number}"
    flags = ["train", PROGRAM, "--pause-s", "0.03", "--run-dir", str(out)]
    done = []
    start_s = time.monotonic()
    with torchrun(
        directory / f"of-torchrun-{number}", *flags, size=size, max_restarts=deaths
    ) as group:
        for attempt in range(deaths):
            rank = draw.randrange(size)
            after_s = round(draw.uniform(0.0, 2.5), 3)
            steps = draw.choice([None, 0, 4, 8])  # None: while they start
            stops = draw.random() < 1 / 3 and steps is not None
            signal_number = signal.SIGSTOP if stops else signal.SIGKILL
            pid = group.pid(rank, attempt)
            if steps is not None:
                _until_gone_on(out, steps)
            time.sleep(after_s)
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:  # the run was finished before
                break
            done.append(
                {
                    "rank": rank,
                    "signal": signal_number.name,
                    "after_s": after_s,
                    "after_steps": steps,
                }
            )
            again = group.directory / f"rank-0-{attempt + 1}"
            wait_until(partial(_is_over, group, again, pid, out), limit_s=LONG_S)
            if group.left() == [pid] and _is_finished(
                out
            ):  # stopped after its last word: nobody is left to miss it
                os.kill(pid, signal.SIGCONT)
                break
            if group.process.poll() is not None:
                break
        status = group.wait(seconds=LONG_S)
        same = status == 0 and bits(out) == references[size]
        if not same:
            print(group.said, file=sys.stderr)
    return {
        "try": number,
        "launcher": "torchrun",
        "ranks": size,
        "deaths": done,
        "status": status,
    } | {
        "same_bits": same,
        "litter": _litter(out),
        "orphans": len(group.left()),
        "seconds": round(time.monotonic() - start_s, 1),
    }


def _until_gone_on(run_dir: Path, steps: int) -> None:
    """Until a run writes records again, and has saved so many further steps."""
    metrics = run_dir / "metrics.jsonl"
    target = steps_made(run_dir) + steps
    length = metrics.stat().st_size if metrics.exists() else 0
    wait_until(
        lambda: (
            metrics.exists() and metrics.stat().st_size > length and steps_made(run_dir) >= target
        ),
        limit_s=LONG_S,
    )


def _is_over(group: Torchrun, again: Path, pid: int, run_dir: Path) -> bool:
    """Whether ranks are started again, or none will be."""
    return (
        again.exists()
        or group.process.poll() is not None
        or (_is_finished(run_dir) and group.left() == [pid])
    )


def _is_finished(run_dir: Path) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and '"event": "finished"' in metrics.read_text()


def _litter(run_dir: Path) -> list[str]:
    return [left.name for left in (run_dir / "checkpoints").iterdir() if left.name.startswith(".")]


def _until_started_again(rank: Path, group: Launched | Torchrun) -> None:
    wait_until(lambda: rank.exists() or group.process.poll() is not None, limit_s=LONG_S)


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # of what is forked, as tests have it
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--launcher", choices=LAUNCHERS, help="one of them (default: each in turn)")
    arguments = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    tries = (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        references = dict[int, dict[str, Any]]()
        for size in (2, 4):
            run_dir = directory / f"reference-{size}"
            with surefoot(
                directory / f"p-{size}",
                "train",
                PROGRAM,
                "--nproc",
                str(size),
                "--run-dir",
                str(run_dir),
            ) as group:
                assert group.wait() == 0, group.said
            references[size] = bits(run_dir)
        for launcher in [arguments.launcher] if arguments.launcher else LAUNCHERS:
            make_try = one_try_of_torchrun if launcher == "torchrun" else one_try
            while (number := len(of_launcher(tries, launcher))) < arguments.tries:
                tries.append(make_try(number, references, directory))
                with RESULTS.open("a") as file:
                    file.write(json.dumps(tries[-1] | {"date": time.strftime("%Y-%m-%d")}) + "\n")
    for launcher in LAUNCHERS:
        own = of_launcher(tries, launcher)
        print(f"{launcher}: tries {len(own)}, deaths {sum(len(one['deaths']) for one in own)},")
        print(
            f"same bits {sum(one['same_bits'] for one in own)}, processes left {sum(one['orphans'] for one in own)}"
        )
    sys.exit(
        0
        if all(one["same_bits"] and not one["orphans"] and not one["litter"] for one in tries)
        else 1
    )


def of_launcher(tries: list[dict[str, Any]], launcher: str) -> list[dict[str, Any]]:
    """The tries under one launcher; those of before torchrun joined do not name theirs."""
    return [one for one in tries if one.get("launcher", "surefoot") == launcher]


if __name__ == "__main__":
    main()
