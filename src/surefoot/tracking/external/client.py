"""Client of an experiment tracker: a sink with a bounded queue, and a separate tracker process.

Imports, threads, output and failures of the tracker do not affect the training. `write` never
waits; `close` waits `CLOSING_S` seconds at most.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from surefoot.config.paths import make_no_follow, open_no_follow
from surefoot.tracking.external.run_facts import About, project_and_name
from surefoot.tracking.record import Record

WAITING = 10_000  # maximal number of queued records; the oldest excess records are dropped
CLOSING_S = 30.0  # seconds that `close` waits for a tracker


class Tracker:
    """Sink for Weights & Biases, MLflow or trackio, which write to `out`/trackers or to the user's
    configured directory.

    If data did not reach the tracker, `write` or `close` raises `OSError` once. Later records are
    still sent.
    """

    def __init__(self, name: str, *, out: Path, settings: dict[str, Any]) -> None:
        self.name = name
        self.directory = out / "trackers"
        self.log = self.directory / f"{name}.log"
        project, run = project_and_name(out)
        self.waiting: deque[bytes] = deque()
        self.unsent_line = b""  # the rest of a partly written line
        self.received = b""  # the beginning of a partly read line
        self.problem: str | None = None
        self.is_reported = False
        self.until = math.inf  # the deadline of the tracker process
        self.process: subprocess.Popen[bytes] | None = None
        self._append(asdict(About(name, project, run, str(self.directory.resolve()), settings)))
        try:
            self.process = self._start()
        except OSError as problem:
            self.problem = f"its process could not be started: {problem.strerror or problem}"

    def write(self, record: Record) -> None:
        """Queue a record, and send queued records without waiting."""
        if record["kind"] == "resume":  # a resume does not start a new tracker run
            return
        self._append(record)
        if len(self.waiting) > WAITING:
            self.waiting.popleft()
            self._note(f"it is more than {WAITING:,} records behind")
        self._push()
        self._hear()
        self._tell()

    def ask_to_close(self) -> None:
        if self.until == math.inf:
            self.until = time.monotonic() + CLOSING_S
            self._append({"kind": "close"})
            self._push()

    def close(self) -> None:
        """Send the queued records and wait at most `CLOSING_S` seconds for the tracker to
        finish.
        """
        self.ask_to_close()
        if self.process is not None:
            with self.process as process:  # the context manager closes the pipes
                while process.poll() is None and time.monotonic() < self.until:
                    self._push()
                    self._hear()
                    time.sleep(0.01)
                if process.poll() is None:
                    self._note(
                        f"it did not finish within {CLOSING_S:g} s of the end and was killed"
                    )
                    with suppress(OSError):
                        if sys.platform != "win32":
                            # together with its child processes
                            os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
                process.wait()
                self._hear()
            self.process = None
        self._tell()

    def _start(self) -> subprocess.Popen[bytes]:
        make_no_follow(self.directory)
        import_path = os.pathsep.join(path for path in sys.path if path)  # of this process
        with open(open_no_follow(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "surefoot.tracking.external.worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=os.environ | {"PYTHONPATH": import_path},
                # Ctrl-C reaches only the training, which then asks the tracker to finish
                start_new_session=True,
            )
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        return process

    def _append(self, values: dict[str, Any]) -> None:
        text = json.dumps(values, default=str)
        self.waiting.append(f"{text}\n".encode(errors="backslashreplace"))

    def _push(self) -> None:
        if self.process is None or self.process.stdin is None:
            return
        pipe = self.process.stdin.fileno()
        while self.unsent_line or self.waiting:
            self.unsent_line = self.unsent_line or self.waiting.popleft()
            try:
                self.unsent_line = self.unsent_line[os.write(pipe, self.unsent_line) :]
            except BlockingIOError:
                return
            except OSError:
                # the process has ended; its last message or its exit status is read next
                self.waiting.clear()
                self.unsent_line = b""

    def _hear(self) -> None:
        if self.process is None or self.process.stdout is None:
            return
        part = b"..."
        while part:
            try:
                part = os.read(self.process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                break
            self.received += part
        *lines, self.received = self.received.split(b"\n")
        for line in lines:
            # the starting interpreter may print other lines
            with suppress(ValueError, KeyError, TypeError):
                self._note(str(json.loads(line)["problem"]))
        if not part and self.process.poll():
            self._note(f"its process ended with status {self.process.returncode}; see {self.log}")

    def _note(self, problem: str) -> None:
        """Keep the first problem."""
        self.problem = self.problem or problem

    def _tell(self) -> None:
        if self.problem is not None and not self.is_reported:
            self.is_reported = True
            raise OSError(self.problem)
