"""Programs that take no second to start and do what their arguments say, in the place of a rank
that trains.

    toys.py "1:exit 3" "0:sleep"        rank 1 ends with 3, rank 0 sleeps; a rank without a word ends with 0

Each writes its process number, and what it knows of its place, to a file in the directory TOYS.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from surefoot.distributed.environment import leave_error, tie_to_launcher

_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)


def main() -> None:
    tie_to_launcher()
    rank = os.environ["RANK"]
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    place = {name: os.environ.get(name) for name in _VARIABLES}
    place["store"] = os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    process = {"pid": os.getpid(), "parent": os.getppid(), "attempt": attempt}
    partial = Path(os.environ["TOYS"], f".{rank}-{attempt}")
    partial.write_text(json.dumps(process | place))
    partial.rename(Path(os.environ["TOYS"], f"rank-{rank}-{attempt}.json"))
    for argument in sys.argv[1:]:
        ranks, deed = argument.split(":", 1)
        if ranks in (rank, f"{rank}.{attempt}", "all"):
            _do(*deed.split(" ", 1))


def _do(deed: str, argument: str = "") -> None:
    match deed:
        case "exit":
            sys.exit(int(argument))
        case "say":
            print(argument, file=sys.stderr, flush=True)
        case "refuse":  # as a command does with an error of surefoot
            leave_error({"message": argument})
            print(f"error: {argument}", file=sys.stderr, flush=True)
            sys.exit(2)
        case "kill":
            time.sleep(0.1)
            os.kill(os.getpid(), int(argument))
        case "sleep":
            time.sleep(float(argument or 10_000))
        case "hear":  # until the launcher has said this
            while argument not in Path(os.environ["TOYS"], "stderr").read_text():
                time.sleep(0.01)
        case "hold":  # until the test lets it go on
            while not Path(os.environ["TOYS"], "go-on").exists():
                time.sleep(0.01)
        # as a run does: the first signal is answered in a moment, a second one at once
        case "save":
            signal.signal(signal.SIGTERM, _saving)
            signal.signal(signal.SIGINT, _saving)
            _be_ready()
            time.sleep(10_000)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _be_ready()
            time.sleep(10_000)
        case "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"])
            Path(os.environ["TOYS"], "child").write_text(str(child.pid))
            time.sleep(10_000)


def _be_ready() -> None:
    """Tell the test that signals are answered from now on."""
    Path(os.environ["TOYS"], f"ready-{os.environ['RANK']}").touch()


def _saving(number: int, frame: object) -> None:
    signal.signal(number, lambda number, frame: os._exit(128 + number))
    print(f"saved for {signal.Signals(number).name}", file=sys.stderr, flush=True)
    with Path(os.environ["TOYS"], f"saved-{os.environ['RANK']}").open("a") as file:
        file.write("once\n")
    time.sleep(0.2)
    os._exit(128 + number)


if __name__ == "__main__":
    main()
