"""The processes that train the variants of a comparison; each process trains one ordinary run.

The output of a variant is in logs/NAME.log, its outcome in results/NAME.json, its progress in
NAME/metrics.jsonl.
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
RESULTS = "results"
LOGS = "logs"
_BY_EXIT: dict[int, Status] = {5: "diverged", 6: "out of memory"}
_STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM}
_MAX_MESSAGE = 240  # characters of an error in a table
# training again would end in the same way
TO_THE_END: set[Status] = {"finished", "diverged", "pruned"}


@dataclass(frozen=True)
class TrialOutcome:
    """The outcome of a variant; `said` holds the reason if it did not finish."""

    status: Status
    said: str = ""


@dataclass
class TrialProgress:
    """The progress of a variant, from its records."""

    step: int = 0
    steps: int | None = None
    loss: float | None = None
    score: float | None = None
    eta_s: float | None = None

    def take(self, record: Record, *, score: str | None) -> None:
        """Update step, loss, score and remaining seconds from a record; other kinds change only the
        step.
        """
        self.step = int(record["step"])
        if record["kind"] == "train":
            self.loss = record.get("loss_applied", record.get("loss"))
            self.eta_s = record.get("eta_s")
        elif record["kind"] == "eval" and score in record:
            self.score = record[score]

    def values(self) -> list[str]:
        values = [f"step={self.step}/{self.steps}" if self.steps else f"step={self.step}"]
        if self.loss is not None:
            values.append(f"loss={number(self.loss)}")
        if self.score is not None:
            values.append(f"score={number(self.score)}")
        if self.eta_s is not None:
            values.append(f"left={duration(self.eta_s)}")
        return values


@dataclass
class Trial:
    """A variant with a running process."""

    name: str
    process: subprocess.Popen[bytes]
    metrics: Path
    log_start: int
    fresh: bool  # begun in this session, not continued
    started: float = field(default_factory=time.monotonic)
    ending: Literal["", "stopped", "pruned"] = ""  # reason of a stop request
    read_bytes: int = 0  # offset into `metrics`
    standing: TrialProgress = field(default_factory=TrialProgress)

    def new_records(self) -> list[Record]:
        """Return the records since the last call; an incomplete line is left for the next call."""
        try:
            with open_regular(self.metrics) as file:
                file.seek(self.read_bytes)
                data = file.read()
        except OSError:  # not begun yet
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self.read_bytes += len(complete)
        parsed = [parse_record(line) for line in complete.splitlines()]
        return [record for record in parsed if record is not None]


class Trials:
    """The variants with running processes. `command(name)` returns the command line that trains a
    variant.
    """

    def __init__(
        self,
        directory: "RunDirectory",
        command: Callable[[str], list[str]],
        *,
        threads: int,
        cwd: str,
    ) -> None:
        self.directory = directory
        self.command = command
        self.threads = threads
        self.cwd = cwd
        self.running: dict[str, Trial] = {}

    def start(self, name: str) -> None:
        """Start the process of a variant, with its output appended to the variant's log. It dies
        with this process.
        """
        path = self.directory.path
        for folder in (RESULTS, LOGS):
            make_no_follow(path / folder)
        metrics = path / name / "metrics.jsonl"
        fresh = not metrics.exists()
        log_file = path / LOGS / f"{name}.log"
        descriptor = open_no_follow(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with open(descriptor, "ab") as log:
            begin = log.tell()
            process = subprocess.Popen(
                self.command(name),
                # closes when this process ends: see `die_with` in distributed/environment.py
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=with_threads(self.threads),
                cwd=self.cwd,
                # Ctrl-C reaches only this process, which stops the variants
                start_new_session=True,
            )
        self.running[name] = Trial(name, process, metrics, begin, fresh)

    def ended(self) -> list[tuple[Trial, TrialOutcome]]:
        """Return the variants that have ended since the last call, after their outcomes are on
        disk.
        """
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
        """Ask a variant to save and end. Repeated calls do nothing: a second signal would end the
        variant without saving.
        """
        if not trial.ending:
            trial.ending = why
            trial.process.terminate()

    def close(self) -> None:
        """Kill all running variants, for example after an error in this process."""
        for name, trial in list(self.running.items()):
            trial.process.kill()
            self._over(name)

    def _over(self, name: str) -> int:
        with self.running.pop(name).process as process:  # closes the pipe
            return process.wait()

    def _outcome(self, trial: Trial, code: int) -> TrialOutcome:
        saved = outcome_of(self.directory.path, trial.name)
        if saved is not None and saved["status"] == "finished":
            return TrialOutcome("finished")  # a later exit status does not matter
        if trial.ending == "pruned" and (code in _STOPPED or code == 0):
            return TrialOutcome("pruned")
        if code in _STOPPED:
            return TrialOutcome("stopped")
        if code == -signal.SIGKILL:
            return TrialOutcome("failed", "killed by SIGKILL (out of host memory?)")
        if code < 0:
            return TrialOutcome("failed", f"killed by {signal.Signals(-code).name}")
        return TrialOutcome(_BY_EXIT.get(code, "failed"), self._error_message(trial))

    def _error_message(self, trial: Trial) -> str:
        with (self.directory.path / LOGS / f"{trial.name}.log").open("rb") as log:
            log.seek(trial.log_start)
            lines = log.read().decode(errors="replace").splitlines()
        message = "the process printed nothing"
        for line in lines:
            if line.startswith("error: "):
                message = line.removeprefix("error: ")
                break
            if line.strip():
                message = line  # the last line, if none is an error
        return message[:_MAX_MESSAGE]


def with_threads(threads: int) -> dict[str, str]:
    """Return this process's environment with the number of compute threads set."""
    return os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))


def write_outcome(
    directory: "RunDirectory", name: str, outcome: TrialOutcome, **further: Any
) -> None:
    """Write the outcome of a variant atomically."""
    directory.write_text(f"{RESULTS}/{name}.json", json.dumps({**vars(outcome), **further}) + "\n")


def outcome_of(directory: Path, name: str) -> dict[str, Any] | None:
    """Read the saved outcome of a variant; return None if the file is missing or damaged."""
    try:
        outcome = json.loads(read_regular(directory / RESULTS / f"{name}.json"))
    except (OSError, ValueError):
        return None
    return outcome if isinstance(outcome, dict) and "status" in outcome else None


def is_over(directory: Path, name: str) -> bool:
    """Return True if a variant needs no more training: it finished, diverged or was pruned, and its
    directory exists.
    """
    outcome = outcome_of(directory, name)
    return outcome is not None and outcome["status"] in TO_THE_END and (directory / name).is_dir()
