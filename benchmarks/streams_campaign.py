"""The campaign of streams: sources that start processes, raise, hang, exit, die and change; each run
must say what happened, leave no process, and go on to the same bits.

    python benchmarks/streams_campaign.py [--tries 40] [--seconds 600] [--write]

A try draws a number of ranks (1 or 2), how the reader starts, what the source starts (nothing, a
pool of processes, a bare fork, a program), the size of the tape (all rows fit, or a budget drops the
oldest), what happens, and at which row. A first session meets it: the run must end with the code of
its error, or with the status of its signal. A second session has a source that works. The losses and
samples of all steps must be those of a run that nothing happened to, and no process that the source
noted may be alive after either session. A source that changes gives other rows from some row on
after the first session, so only the steps that were on the tape are compared. With --write the
result is appended to benchmarks/results/streams-campaign.txt. Leaves with 1 if a try fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

import surefoot as sf
from rank_processes import Outcome, Ranks
from stream_runs import FEATURES, build, row, train
from waiting import wait_until

RESULTS = Path(__file__).parent / "results" / "streams-campaign.txt"
STEPS, BATCH = 12, 8
HEAVY = 20_000  # bytes of a row, so that a tape of 1 MB drops rows
EVENTS = {  # the code of the error, or the status of the process
    "raises": "stream-row-failed",
    "exits": "stream-reader-exited",
    "is killed": "stream-reader-killed",
    "hangs": 128 + signal.SIGTERM,
    "run is killed": -signal.SIGKILL,
    "changes": 0,
}
CHILDREN = ("nothing", "pool", "fork", "program")
Case = dict[str, Any]


class Source:
    """Rows, processes that it starts, and what happens at one row."""

    def __init__(self, case: Case, *, meets_event: bool) -> None:
        self.case = case
        self.meets_event = meets_event
        self.noted = Path(case["directory"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.case["start"] != "thread":
            self.note(os.getpid())
        self.start_children()
        for number in range(10_000):
            if number == self.case["at"] and self.meets_event:
                self.happen(self.case["event"])
            is_other = self.case["event"] == "changes" and not self.meets_event
            each = row(number + 5_000 if is_other and number >= self.case["at"] else number)
            each["bytes"] = bytes(HEAVY)
            yield each

    def note(self, process: int) -> None:
        (self.noted / f"process-{process}").touch()

    def start_children(self) -> None:
        match self.case["children"]:
            case "fork":
                child = os.fork()
                if child == 0:
                    threading.Event().wait()
                self.note(child)
            case "program":
                self.note(subprocess.Popen(["sleep", "3600"]).pid)
            case "pool":
                self.pool = ProcessPoolExecutor(2, mp_context=get_context("fork"))
                self.pool.submit(int).result()
                for process in self.pool._processes:
                    self.note(process)

    def happen(self, event: str) -> None:
        if event == "raises":
            raise OSError("the server is gone")
        if event == "exits":
            os._exit(3)
        if event == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if event in ("hangs", "run is killed"):
            (self.noted / "reached").touch()
            threading.Event().wait()


def session(case: Case, meets_event: bool, steps: int | None) -> str:
    """Train on this rank until the end or the event; return the code of the error, or ""."""
    directory = Path(case["directory"])
    torch.set_num_threads(1)
    stream = {
        "start": case["start"],
        "tape_size": case["tape_size"],
        "decode_fn": decoded,
    }
    try:
        run = build(
            directory / "run",
            Source(case, meets_event=meets_event),
            stream=stream,
            length=f"{STEPS} steps",
            save_every="2 steps",
            stop_after=None if steps is None else f"{steps} steps",
            check_state=False,
            accept_change=["data"] if case["event"] == "changes" else [],
        )
        train(run, directory / f"steps-{run.rank}")
    except sf.SurefootError as problem:
        return problem.code or str(problem)
    return ""


def decoded(recorded: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return recorded["x"] + 0.1 * torch.rand(FEATURES), recorded["y"]


def drawn_case(number: int) -> Case:
    """The case of a try, drawn from its number."""
    draw = random.Random(number)
    ranks = draw.choice([1, 1, 2])
    event = draw.choice(list(EVENTS))
    starts = 7 * ["fork"] + ["spawn"]
    if ranks == 1 and event in ("raises", "run is killed", "changes"):
        starts += 2 * ["thread"]
    start = draw.choice(starts)
    children = draw.choice(CHILDREN) if start != "thread" else "nothing"
    return {
        "ranks": ranks,
        "start": start,
        "children": children,
        "event": event,
        "at": draw.randint(0 if event in ("raises", "exits", "is killed") else 20, 60),
        "tape_size": draw.choice(["1 MB", "10 GB"]),
    }


def alive(directory: Path) -> list[int]:
    """The noted processes that still run."""
    processes = list[int]()
    for path in directory.glob("process-*"):
        process = int(path.name.partition("-")[2])
        with suppress(FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                processes.append(process)
    return processes


def steps_of(directory: Path, rank: int) -> dict[int, Any]:
    file = directory / f"steps-{rank}"
    lines = file.read_text().splitlines() if file.exists() else []
    return {each[0]: each for each in map(json.loads, lines)}


def first_session(ranks: Ranks, case: Case) -> list[Outcome]:
    """The session that meets the event."""
    directory = Path(case["directory"])
    event = case["event"]
    steps = case["at"] // BATCH if event == "changes" else None
    place = ranks.start(case["ranks"], session, case=case, meets_event=True, steps=steps)
    if event in ("hangs", "run is killed"):
        ended = place / "status-0"
        wait_until(lambda: (directory / "reached").exists() or ended.exists())
        # rank 0 has begun its steps: before, a signal has its usual effect
        wait_until(lambda: bool(steps_of(directory, 0)) or ended.exists())
        number = signal.SIGTERM if event == "hangs" else signal.SIGKILL
        hit = range(1) if event == "hangs" else range(case["ranks"])
        for rank in hit:
            with suppress(ProcessLookupError):
                os.kill(int((place / f"pid-{rank}").read_text()), number)
    return ranks.outcomes(place)


def problem_of(ranks: Ranks, case: Case, reference: list[dict[int, Any]]) -> str:
    """What went wrong in a try, or ""."""
    directory = Path(case["directory"])
    expected = EVENTS[case["event"]]
    outcome = first_session(ranks, case)[0]
    if isinstance(expected, str):
        if outcome.result != expected:
            return f"status {outcome.status}, {outcome.result or outcome.text[-300:]!r}"
    elif outcome.status != expected:
        return f"status {outcome.status}: {outcome.text[-300:]!r}"
    if not wait_until(lambda: not alive(directory), limit_s=60.0):
        return f"left after the first session: {alive(directory)}"
    place = ranks.start(case["ranks"], session, case=case, meets_event=False, steps=None)
    for rank, second in enumerate(ranks.outcomes(place)):
        if second.status or second.result:
            return f"second session, rank {rank}: {second.result or second.text[-300:]!r}"
    if not wait_until(lambda: not alive(directory), limit_s=60.0):
        return f"left after the second session: {alive(directory)}"
    compared = case["at"] // BATCH if case["event"] == "changes" else STEPS
    for rank in range(case["ranks"]):
        steps = steps_of(directory, rank)
        if sorted(steps) != list(range(STEPS)):
            return f"rank {rank} made the steps {sorted(steps)}"
        different = [step for step in range(compared) if steps[step] != reference[rank][step]]
        if different:
            return f"rank {rank} differs from step {different[0]} on"
    return ""


def reference_of(ranks: Ranks, size: int, directory: Path) -> list[dict[int, Any]]:
    """The steps of each rank of a run that nothing happens to."""
    directory.mkdir()
    case = drawn_case(0) | {
        "ranks": size,
        "start": "fork",
        "children": "nothing",
        "event": "nothing",
        "tape_size": "10 GB",
        "directory": str(directory),
    }
    place = ranks.start(size, session, case=case, meets_event=False, steps=None)
    for outcome in ranks.outcomes(place):
        assert (outcome.status, outcome.result) == (0, ""), outcome.text
    return [steps_of(directory, rank) for rank in range(size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tries", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=600.0, help="no try begins after these")
    parser.add_argument(
        "--write", action="store_true", help="append the result to benchmarks/results"
    )
    arguments = parser.parse_args()
    load = f"load {os.getloadavg()[0]:.1f}"
    begin_s = time.monotonic()
    lines = list[str]()
    failed = 0
    tries = 0
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as scratch, Ranks(Path(scratch)) as ranks:
        references = {
            size: reference_of(ranks, size, Path(scratch) / f"reference-{size}") for size in (1, 2)
        }
        for number in range(arguments.tries):
            if time.monotonic() - begin_s > arguments.seconds:
                break
            directory = Path(scratch) / f"try-{number}"
            directory.mkdir()
            case = drawn_case(number) | {"directory": str(directory)}
            problem = problem_of(ranks, case, references[case["ranks"]])
            tries += 1
            failed += bool(problem)
            words = [str(case[name]) for name in ("ranks", "start", "children", "tape_size")]
            event = f"{case['event']} at row {case['at']}"
            lines.append(f"{number:>3}  {'  '.join(f'{word:<8}' for word in words)}  {event:<25}")
            lines[-1] += f"  {problem or 'same bits'}"
            print(lines[-1], flush=True)
    took_s = time.monotonic() - begin_s
    head = f"{datetime.now(UTC):%Y-%m-%d}: {tries} tries, {failed} failed"
    head += (
        f"; torch {torch.__version__}, {os.cpu_count()} cores, {load} at the start, {took_s:.0f} s"
    )
    columns = "try  ranks     start     starts    tape      what happens"
    text = "\n".join([head, columns, *lines])
    print(head)
    if arguments.write:
        before = RESULTS.read_text() + "\n" if RESULTS.exists() else ""
        RESULTS.write_text(before + text + "\n")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
