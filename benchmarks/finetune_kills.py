"""The kill campaign of the recipe finetune: kill with SIGKILL, resume, compare with the
uninterrupted run bit for bit.

    python benchmarks/finetune_kills.py [--kills 100]

Appends one line of JSON for each run to benchmarks/results/finetune_kills.jsonl and goes on where
it stopped. The run is that of tests/tuned_runs.py, with LoRA or in full; each is killed one to four
times, in a forward pass or before a file operation of a save. Everything is drawn from the number
of the run, so a failure can be repeated.
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

import peft
import transformers

from rank_processes import Ranks
from tuned_runs import outcome, session, write_chat, write_model

RESULTS = Path(__file__).parent / "results" / "finetune_kills.jsonl"
METHODS = ("lora", "full")


def status(ranks: Ranks, **spec: Any) -> int:
    (ended,) = ranks.outcomes(ranks.start(1, session, spec=spec))
    return ended.status


def one_run(
    ranks: Ranks, number: int, expected: dict[str, Any], directory: Path, spec: dict[str, Any]
) -> dict[str, Any]:
    """Kill and resume one run; which kills landed, and whether every bit is the same."""
    draw = random.Random(number)
    method = METHODS[number % 2]
    run_dir = directory / f"run-{number}"
    spec = spec | {"run_dir": str(run_dir), "changes": {"method": method}}
    kills = []
    for _ in range(draw.choice([1, 2, 3, 4])):
        kind = draw.choice(["pass", "operation"])
        kill = {kind: draw.randint(1, 12 if kind == "pass" else 60)}
        if status(ranks, **spec, **kill) == -signal.SIGKILL:
            kills.append(kill)
    resumed = status(ranks, **spec) == 0
    same = resumed and outcome(run_dir) == expected[method]
    return {"run": number, "method": method, "kills": kills, "resumed": resumed, "same_bits": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    arguments = parser.parse_args()
    assert callable(peft.get_peft_model)  # imported here, so that forked processes have it
    assert transformers.__version__
    done = (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        base = write_model(directory / "base")
        chat = write_chat(directory / "chat.jsonl")
        spec = {"model": str(base), "chat": str(chat)}
        with Ranks(directory) as ranks:
            for method in METHODS:
                assert (
                    status(
                        ranks, run_dir=str(directory / method), changes={"method": method}, **spec
                    )
                    == 0
                )
            expected = {method: outcome(directory / method) for method in METHODS}
            while sum(len(run["kills"]) for run in done) < arguments.kills:
                done.append(one_run(ranks, len(done), expected, directory, spec))
                assert done[-1]["resumed"], done[-1]
                with RESULTS.open("a") as file:
                    file.write(json.dumps(done[-1] | {"date": time.strftime("%Y-%m-%d")}) + "\n")
    same = sum(run["same_bits"] for run in done)
    print(f"runs {len(done)}, kills {sum(len(run['kills']) for run in done)}, same bits {same}")
    sys.exit(0 if same == len(done) else 1)


if __name__ == "__main__":
    main()
