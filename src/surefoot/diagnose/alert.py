"""Findings of severity error, sent to a web address or to a command by a thread that a run never
waits for.
"""

import json
import os
import queue
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from surefoot.diagnose.finding import Finding
from surefoot.errors import ConfigError

_PATIENCE_S = 10.0  # for one alert
_AT_END_S = 12.0  # for all alerts that are left when the session ends
_MOST_WAITING = 100


@dataclass(eq=False)
class Alert:
    """A target of alerts: "https://..." or a command with arguments, which no shell reads. Raises
    `ConfigError` for anything else.

    >>> Alert("https://example.org/hook/secret").name, Alert("python3 alert.py").name
    ('https://example.org', 'python3')
    """

    target: str
    name: str = ""  # in messages: without a path, which may be a secret
    command: list[str] = field(default_factory=list)
    failures: deque[str] = field(default_factory=deque)
    waiting: queue.Queue[bytes | None] = field(default_factory=lambda: queue.Queue(_MOST_WAITING))
    thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        if "://" in self.target.partition(" ")[0]:
            url = urlsplit(self.target)
            if (
                url.scheme not in ("http", "https")
                or not url.hostname
                or any(map(str.isspace, self.target))
            ):
                raise ConfigError(
                    f"--alert {url.scheme}://... is not a web address: alerts are sent by http or https\n"
                    "  write --alert https://HOST/PATH, or a command: --alert 'python3 alert.py'"
                )
            self.name = f"{url.scheme}://{url.hostname}"
            return
        try:
            self.command = shlex.split(self.target)
        except ValueError as problem:
            raise ConfigError(
                f"--alert {self.target!r} is not a command: {problem}\n  close the quotation mark"
            ) from problem
        if not self.command or shutil.which(self.command[0]) is None:
            raise ConfigError(
                f"--alert {self.target!r} is neither a web address nor a command that exists\n"
                "  write --alert https://HOST/PATH, or a command: --alert 'python3 alert.py'"
            )
        self.name = Path(self.command[0]).name

    def send(self, finding: Finding, *, run: str | Path, step: int) -> None:
        """Send a finding from a thread. Never waits, and never raises."""
        path = os.path.abspath(run)
        words = (
            f"{finding.severity.upper()} {finding.name} in {path}, step {step:,}: {finding.message}"
        )
        body = {
            "text": words,
            "run": path,
            "host": socket.gethostname(),
            "step": step,
            "finding": finding.to_dict(),
        }
        try:
            if self.thread is None:
                self.thread = threading.Thread(
                    target=self._deliver, name="surefoot sends alerts", daemon=True
                )
                self.thread.start()
            self.waiting.put_nowait(json.dumps(body).encode())
        except (queue.Full, RuntimeError, ValueError) as problem:
            self._failed(problem)

    def problems(self) -> list[str]:
        """Return one line for each alert that was not delivered, and forget these lines."""
        return [self.failures.popleft() for _ in range(len(self.failures))]

    def close(self) -> None:
        """Wait a few seconds for alerts that are being sent."""
        if self.thread is not None:
            end = time.monotonic() + _AT_END_S
            while not self.waiting.empty() and time.monotonic() < end:
                time.sleep(0.01)
            if self.waiting.empty():
                self.waiting.put(None)
                self.thread.join(max(0.0, end - time.monotonic()))
            if self.thread.is_alive():
                self._failed(TimeoutError(f"not sent within {_AT_END_S:.0f} s"))
            self.thread = None

    def _deliver(self) -> None:
        while (body := self.waiting.get()) is not None:
            try:
                self._run(body) if self.command else self._post(body)
            except Exception as problem:  # whatever a network or a program does
                self._failed(problem)

    def _post(self, body: bytes) -> None:
        from urllib.request import HTTPRedirectHandler, Request, build_opener

        class Stay(HTTPRedirectHandler):
            def redirect_request(self, *_: Any) -> None:
                """Follow no redirect: it would arrive as GET, without the finding."""

        headers = {"Content-Type": "application/json", "User-Agent": "surefoot"}
        with build_opener(Stay).open(
            Request(self.target, data=body, headers=headers), timeout=_PATIENCE_S
        ):
            pass

    def _run(self, body: bytes) -> None:
        # a session of its own: a Ctrl-C in the terminal is for the run
        nowhere = subprocess.DEVNULL
        subprocess.run(
            self.command,
            input=body,
            stdout=nowhere,
            stderr=nowhere,
            timeout=_PATIENCE_S,
            check=True,
            start_new_session=True,
        )

    def _failed(self, problem: Exception) -> None:
        match problem:
            case subprocess.CalledProcessError():
                why = f"exit status {problem.returncode}"
            case subprocess.TimeoutExpired():
                why = f"not done after {_PATIENCE_S:.0f} s"
            case queue.Full():
                why = "too many alerts are waiting"
            case _:
                why = str(getattr(problem, "reason", None) or problem) or type(problem).__name__
        self.failures.append(
            f"WARNING: an alert did not reach {self.name}: {why.partition(chr(10))[0]}"
        )
