"""Runs the lines of benchmarks/gpu.sh one after the other, each in a process of its own under a
time limit, and writes the result.

    python benchmarks/gpu.py [--device cpu] [--only LINE,LINE] [--out FILE] [--commit TEXT] [--budget-s 570]

This file imports nothing but the standard library: a torch that hangs or is broken fails a line and
not the rest. Each line is a function `check(device)` in benchmarks/gpu_lines/: it returns its
figures, raises AssertionError if a claim is false, and `Skip` if the machine lacks what it needs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results" / "gpu.txt"
BUDGET_S = 570.0  # of ten minutes
SKIPPED = 77  # the exit status of a line that the machine cannot run
QUOTED_LINES = 25  # of the output of a line that fails


@dataclass(frozen=True)
class Line:
    """One line: what it claims, and how long it may take on a GPU."""

    claim: str
    limit_s: float


LINES = {
    "tests": Line("the tests that are marked gpu pass", 120),
    "waiting": Line("law 12: 20 steps wait for the device not once", 60),
    "skipping": Line(
        "a step whose gradient is not finite changes no bit, and waits for nothing", 60
    ),
    "memory": Line("the peak of the allocator is what was allocated", 40),
    "recompute": Line("recomputed activations give the same losses, with dropout in attention", 60),
    "norms": Line("sync_batch_norm changes nothing in one process", 40),
    "bf16": Line("bf16 trains: the loss falls", 60),
    "fp16": Line("fp16 trains: the loss falls, overflows are skipped and halve the scale", 60),
    "compile": Line(
        "a compiled run makes the losses of a plain one and compiles nothing twice", 120
    ),
    "resume": Line("deterministic: killed by SIGKILL and resumed, the same bits", 120),
    "ranks": Line(
        "two processes make the bits of one, under DDP and FSDP2; one GPU: FSDP2 makes them twice",
        120,
    ),
    "speed": Line("GPT-2 124M beside a plain script: tokens per second and MFU", 330),
}


@dataclass(frozen=True)
class Outcome:
    """How a line ended, and what it printed."""

    status: str
    text: str
    seconds: float


def run_limited(command: Sequence[str], *, limit_s: float) -> Outcome:
    """Run a command; kill it and all that it started at the end of the limit."""
    started = monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "LINE_LIMIT_S": f"{limit_s:.0f}"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            return Outcome("FAIL", f"{text}\nnot over after {limit_s:.0f} s", monotonic() - started)
    status = {0: "PASS", SKIPPED: "SKIP"}.get(process.returncode, "FAIL")
    if status == "FAIL":
        text += f"\nended with {process.returncode}"
    return Outcome(status, text, monotonic() - started)


def line_command(name: str, device: str) -> list[str]:
    """The command that checks one line."""
    return [sys.executable, str(HERE / "gpu_lines" / "__main__.py"), name, "--device", device]


def written(name: str, outcome: Outcome) -> list[str]:
    """The rows of the result: the last row that the line printed, or many if it failed."""
    rows = [row for row in outcome.text.splitlines() if row.strip()] or [""]
    figures = rows[-1] if outcome.status != "FAIL" else LINES[name].claim if name in LINES else ""
    quoted = [f"      | {row}" for row in rows[-QUOTED_LINES:]] if outcome.status == "FAIL" else []
    return [f"{outcome.status}  {name:<10} {outcome.seconds:>4.0f} s  {figures}", *quoted]


def digest_of_sources() -> str:
    """Twelve digits that tell which sources ran, where no git is at hand."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def commit_at_hand() -> str:
    """The commit of the working tree, marked if files differ from it."""
    try:
        named = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no git here)"
    return named.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run in tiny sizes"
    )
    parser.add_argument(
        "--only", default=",".join(LINES), help="lines by name, with a comma between"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="file to append the result to; by default results/gpu.txt on a GPU, none on a CPU",
    )
    parser.add_argument("--commit", help="the commit, where the copy that runs has no git")
    parser.add_argument(
        "--budget-s", type=float, help="seconds for all lines together; 570 on a GPU, none on a CPU"
    )
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    device = arguments.device
    if unknown := [name for name in names if name not in LINES]:
        parser.error(f"--only {','.join(unknown)}: the lines are {', '.join(LINES)}")
    out = arguments.out or (RESULTS if device == "cuda" else None)
    failures = run_lines(
        {name: line_command(name, device) for name in names},
        head=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {device}, commit {arguments.commit or commit_at_hand()}, "
        f"sources {digest_of_sources()}",
        facts=line_command("facts", device),
        run_dir=out,
        budget_s=arguments.budget_s or (BUDGET_S if device == "cuda" else float("inf")),
        slack=1.0 if device == "cuda" else 10.0,
    )
    sys.exit(1 if failures else 0)


def run_lines(
    commands: dict[str, list[str]],
    *,
    head: str,
    facts: list[str],
    run_dir: Path | None,
    budget_s: float,
    slack: float,
) -> int:
    """Run each command, print and append its rows at once; return how many failed.

    `slack` multiplies the limits: a dry run is made on any CPU.
    """
    started = monotonic()
    counts = {"PASS": 0, "SKIP": 0, "FAIL": 0}

    def write(row: str) -> None:
        print(row, flush=True)
        if run_dir is not None:
            with run_dir.open("a") as file:
                file.write(row + "\n")

    write(head)
    for row in run_limited(facts, limit_s=90 * slack).text.splitlines()[-QUOTED_LINES:]:
        write(row)
    for name, command in commands.items():
        eta_s = budget_s - (monotonic() - started)
        limit_s = min(LINES[name].limit_s * slack if name in LINES else 60 * slack, eta_s)
        outcome = (
            run_limited(command, limit_s=limit_s)
            if eta_s > 0
            else Outcome("FAIL", "no time was left", 0.0)
        )
        counts[outcome.status] += 1
        for row in written(name, outcome):
            write(row)
    write(
        f"{', '.join(f'{count} {status}' for status, count in counts.items())}; {monotonic() - started:.0f} s\n"
    )
    return counts["FAIL"]


if __name__ == "__main__":
    main()
