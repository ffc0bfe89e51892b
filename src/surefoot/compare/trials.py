"""The processes that train the variants of a comparison: started, watched, stopped; each is a run like any other.

The output of a variant is in logs/NAME.log, its end in results/NAME.json, its progress in its metrics.jsonl.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surefoot.config.paths import make_no_follow, open_no_follow, open_regular, read_regular
from surefoot.tracking.format import duration, number
from surefoot.tracking.jsonl import parse_record
from surefoot.tracking.record import Record

if TYPE_CHECKING:
    from surefoot.tracking.run_directory import RunDirectory  # imports torch

Status = Literal["finished", "diverged", "out of memory", "failed", "pruned", "stopped"]
RESULTS, LOGS = "results", "logs"
_BY_EXIT: dict[int, Status] = {5: "diverged", 6: "out of memory"}
_STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM}
_MAX_MESSAGE = 240  # letters of an error in a table
TO_THE_END: set[Status] = {"finished", "diverged", "pruned"}  # what would end in the same way again


@dataclass(frozen=True)
class Outcome:
    """How a variant ended, and in words why, where it did not finish."""

    status: Status
    said: str = ""


@dataclass
class Standing:
    """How far a variant is, as far as its records tell."""

    step: int = 0
    steps: int | None = None
    loss: float | None = None
    score: float | None = None
    eta_s: float | None = None

    def take(self, record: Record, *, score: str | None) -> None:
        self.step = int(record["step"])
        if record["kind"] == "train":
            self.loss = record.get("loss_applied", record.get("loss"))
            self.eta_s = record.get("eta_s")
        elif record["kind"] == "eval" and score in record:
            self.score = record[score]

    def values(self) -> list[str]:
        texts = [f"step={self.step}" + (f"/{self.steps}" if self.steps else "")]
        known = (("loss", self.loss, number), ("score", self.score, number), ("left", self.eta_s, duration))
        return texts + [f"{name}={form(value)}" for name, value, form in known if value is not None]


@dataclass
class Trial:
    """One variant being trained."""

    name: str
    process: subprocess.Popen[bytes]
    metrics: Path
    log_start: int
    fresh: bool  # begun in this session, not gone on with
    started: float = field(default_factory=time.monotonic)
    ending: Literal["", "stopped", "pruned"] = ""  # what it was told to end for
    read_bytes: int = 0  # of `metrics`
    standing: Standing = field(default_factory=Standing)

    def new_records(self) -> list[Record]:
        """The records since the last call; a line that is not whole yet is left for the next."""
        try:
            with open_regular(self.metrics) as file:
                file.seek(self.read_bytes)
                data = file.read()
        except OSError:  # not begun yet
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self.read_bytes += len(complete)
        return [record for text in complete.splitlines() if (record := parse_record(text)) is not None]


class Trials:
    """The variants being trained at this moment. `command` makes the command line that trains one of them."""

    def __init__(
        self, directory: "RunDirectory", command: Callable[[str], list[str]], *, threads: int, cwd: str
    ) -> None:
        self.directory, self.command, self.threads, self.cwd = directory, command, threads, cwd
        self.running: dict[str, Trial] = {}

    def start(self, name: str) -> None:
        path = self.directory.path
        for folder in (RESULTS, LOGS):
            make_no_follow(path / folder)
        metrics = path / name / "metrics.jsonl"
        fresh = not metrics.exists()
        with open(open_no_follow(path / LOGS / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as log:
            begin = log.tell()
            process = subprocess.Popen(
                self.command(name),
                stdin=subprocess.PIPE,  # the end of it is the end of this process: see `die_with` in distributed/environment.py
                stdout=log,
                stderr=subprocess.STDOUT,
                env=with_threads(self.threads),
                cwd=self.cwd,
                start_new_session=True,  # Ctrl-C is for this process, which tells them
            )
        self.running[name] = Trial(name, process, metrics, begin, fresh)

    def ended(self) -> list[tuple[Trial, Outcome]]:
        """The variants that have ended since the last call; the result of each is on disk when this returns."""
        outcomes = []
        for name, trial in list(self.running.items()):
            if trial.process.poll() is None:
                continue
            outcome = self._outcome(trial, self._over(name))
            if outcome.status not in ("finished", "stopped"):
                write_outcome(self.directory, name, outcome)
            outcomes.append((trial, outcome))
        return outcomes

    def stop(self, trial: Trial, why: Literal["stopped", "pruned"]) -> None:
        """Have a variant save and end, once: a second signal would end it at once."""
        if not trial.ending:
            trial.ending = why
            trial.process.terminate()

    def close(self) -> None:
        """Kill whatever still runs: this process ends in another way than it should."""
        for name, trial in list(self.running.items()):
            trial.process.kill()
            self._over(name)

    def _over(self, name: str) -> int:
        """Wait for the end of a process; its exit status."""
        with self.running.pop(name).process as process:  # closes the pipe
            return process.wait()

    def _outcome(self, trial: Trial, code: int) -> Outcome:
        saved = outcome_of(self.directory.path, trial.name)
        if saved is not None and saved["status"] == "finished":  # whatever ended the process after it had said so
            return Outcome("finished")
        if trial.ending == "pruned" and (code in _STOPPED or code == 0):
            return Outcome("pruned")
        if code in _STOPPED:
            return Outcome("stopped")
        if code < 0:
            short = ": is memory short?" * (code == -signal.SIGKILL)
            return Outcome("failed", f"killed by {signal.Signals(-code).name}{short}")
        return Outcome(_BY_EXIT.get(code, "failed"), self._error_message(trial))

    def _error_message(self, trial: Trial) -> str:
        """The error that a variant ended with, as its log has it."""
        with (self.directory.path / LOGS / f"{trial.name}.log").open("rb") as log:
            log.seek(trial.log_start)
            lines = log.read().decode(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        errors += [line for line in lines if line.strip()][-1:] or ["it said nothing"]
        return errors[0][:_MAX_MESSAGE]


def with_threads(threads: int) -> dict[str, str]:
    """The environment of a process that computes with this number of threads."""
    return os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))


def write_outcome(directory: "RunDirectory", name: str, outcome: Outcome, **further: Any) -> None:
    """Keep how a variant ended, whole or not at all."""
    directory.write_text(f"{RESULTS}/{name}.json", json.dumps({**vars(outcome), **further}) + "\n")


def outcome_of(directory: Path, name: str) -> dict[str, Any] | None:
    """The saved result of a variant; None if it has not ended, or if the file cannot be read."""
    try:
        outcome = json.loads(read_regular(directory / RESULTS / f"{name}.json"))
    except (OSError, ValueError):
        return None
    return outcome if isinstance(outcome, dict) and "status" in outcome else None


def is_over(directory: Path, name: str) -> bool:
    """Whether a variant need not be trained (again): it finished, diverged, or was pruned, and its directory is there."""
    outcome = outcome_of(directory, name)
    return outcome is not None and outcome["status"] in TO_THE_END and (directory / name).is_dir()
