"""The campaign of restarts: ranks of a run are killed and stopped; it must come back by itself and end with the same bits.

    python benchmarks/restarts.py [--tries 20]

Appends one line of JSON for each try to benchmarks/results/restarts.jsonl and goes on where it stopped. The run is that of
tests/small_program.py under `--nproc 2` or `--nproc 4` with `--max-restarts`; one to three times a random rank gets
SIGKILL, or SIGSTOP, at a random moment, that of starting included. Processes are forked from this one, which has imported torch, and
silence is noticed after 4 s instead of 20; all else is as users have it. Everything but the moment at which the system
delivers a signal is drawn from the number of the try.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch

from forked_ranks import PROGRAM, Launched, bits, surefoot
from waiting import wait_until

RESULTS = Path(__file__).parent / "results" / "restarts.jsonl"


def one_try(number: int, references: dict[int, dict[str, Any]], directory: Path) -> dict[str, Any]:
    """Train one run whose ranks are killed and stopped; what was done to it, and how it ended."""
    draw = random.Random(number)
    size, deaths = draw.choice([2, 4]), draw.choice([1, 1, 2, 3])
    out = directory / f"run-{number}"
    flags = ["--pause-s", "0.03", "--nproc", str(size), "--max-restarts", str(deaths), "--out", str(out)]
    done = []
    begun = time.monotonic()
    with surefoot(directory / f"processes-{number}", "train", PROGRAM, *flags, silent_s=4.0) as group:
        for attempt in range(deaths):
            rank, signal_number = draw.randrange(size), draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
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
    same = status == 0 and bits(out) == references[size]
    litter = [left.name for left in (out / "checkpoints").iterdir() if left.name.startswith(".")]
    seconds = round(time.monotonic() - begun, 1)
    return {"try": number, "ranks": size, "deaths": done, "status": status, "same_bits": same, "litter": litter} | {
        "orphans": len(group.left()),
        "seconds": seconds,
    }


def _until_started_again(rank: Path, group: Launched) -> None:
    wait_until(lambda: rank.exists() or group.process.poll() is not None)


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # of what is forked, as tests have it
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tries", type=int, default=20)
    arguments = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    done = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    with tempfile.TemporaryDirectory() as place:
        directory, references = Path(place), dict[int, dict[str, Any]]()
        for size in (2, 4):
            out = directory / f"reference-{size}"
            with surefoot(directory / f"p-{size}", "train", PROGRAM, "--nproc", str(size), "--out", str(out)) as group:
                assert group.wait() == 0, group.said
            references[size] = bits(out)
        while len(done) < arguments.tries:
            found = one_try(len(done), references, directory)
            done.append(found)
            with RESULTS.open("a") as file:
                file.write(json.dumps(found | {"date": time.strftime("%Y-%m-%d")}) + "\n")
    print(f"tries {len(done)}, deaths {sum(len(one['deaths']) for one in done)},")
    print(f"same bits {sum(one['same_bits'] for one in done)}, processes left {sum(one['orphans'] for one in done)}")
    sys.exit(0 if all(one["same_bits"] and not one["orphans"] and not one["litter"] for one in done) else 1)


if __name__ == "__main__":
    main()
