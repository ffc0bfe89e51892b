"""The kill campaign: train, kill with SIGKILL, resume, compare with the uninterrupted run bit for
bit; again and again.

    python benchmarks/kills.py [--kills 200]

Appends one line of JSON for each run to benchmarks/results/kills.jsonl and goes on where it
stopped. The run is that of tests/small_runs.py; each is killed one to four times: by the clock,
inside an accumulation window, or before a file operation of a save, with 0 or 2 workers. Everything
is drawn from the number of the run, so a failure can be repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from rank_processes import Ranks
from small_runs import outcome
from zygote import Zygote

RESULTS = Path(__file__).parent / "results" / "kills.jsonl"


def one_run(
    zygote: Zygote, number: int, reference: dict[str, Any], directory: Path
) -> dict[str, Any]:
    """Kill and resume one run; which kills landed, and whether every bit is the same."""
    draw = random.Random(number)
    run_dir = directory / f"run-{number}"
    kills = []
    for _ in range(draw.choice([1, 1, 2, 3, 4])):
        workers = draw.choice([0, 0, 2])
        kind = draw.choice(["clock", "pass", "operation"])
        spec: dict[str, Any] = {"workers": workers}
        if kind == "clock":
            spec["after_s"] = round(draw.uniform(0.0, 0.7), 3)
        else:
            spec[kind] = draw.randint(1, 52 if kind == "pass" else 130)
        if zygote.run(run_dir, **spec) == -signal.SIGKILL:
            kills.append({kind: spec[kind if kind != "clock" else "after_s"], "workers": workers})
    status = zygote.run(run_dir, workers=draw.choice([0, 2]))
    same = status == 0 and outcome(run_dir) == reference
    litter = [
        left.name for left in (run_dir / "checkpoints").iterdir() if left.name.startswith(".")
    ]
    return {
        "run": number,
        "kills": kills,
        "resumed": status == 0,
        "same_bits": same,
        "litter": litter,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    arguments = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    done = (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )
    with tempfile.TemporaryDirectory() as directory, Ranks(Path(directory)) as ranks:
        zygote = Zygote(ranks)
        run_dir = Path(directory) / "reference"
        assert zygote.run(run_dir) == 0
        reference = outcome(run_dir)
        while sum(len(run["kills"]) for run in done) < arguments.kills:
            killed = one_run(zygote, len(done), reference, Path(directory))
            killed["date"] = time.strftime("%Y-%m-%d")
            done.append(killed)
            with RESULTS.open("a") as file:
                file.write(json.dumps(killed) + "\n")
    kills = sum(len(run["kills"]) for run in done)
    dates = [run["date"] for run in done]
    print(f"from {min(dates)} to {max(dates)}; delete {RESULTS.name} to begin anew")
    print(
        f"runs {len(done)}, kills {kills}, resumed without help {sum(run['resumed'] for run in done)},"
    )
    print(
        f"same bits {sum(run['same_bits'] for run in done)}, litter left in {sum(bool(run['litter']) for run in done)}"
    )
    sys.exit(0 if all(run["same_bits"] and not run["litter"] for run in done) else 1)


if __name__ == "__main__":
    main()
