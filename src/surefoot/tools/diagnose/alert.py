"""Findings of severity error, sent to a web address or to a command by a thread that a run never
waits for.
"""

import json
import os
import queue
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from surefoot.errors import ConfigError
from surefoot.tools.diagnose.finding import Finding

_PATIENCE_S = 10.0  # for one alert
_AT_END_S = 12.0  # for all alerts that are left when the session ends
_MOST_WAITING = 100
_NOT_IN_HOST = re.compile(r"[^\w.:%-]")
_NUMBERS = re.compile(r"[\d.]+")

TEST = Finding("alert-test", "note", "This is a test of --alert: alerts arrive.")


@dataclass(eq=False)
class Alert:
    """A target of alerts: "https://..." or a command with arguments, which no shell reads. Raises
    `ConfigError` for anything else. A user and password in an address are sent as a header.

    >>> Alert("https://me:secret@example.org/hook").name, Alert("python3 alert.py").name
    ('https://example.org', 'python3')
    """

    target: str
    name: str = ""  # in messages: without what may be a secret, such as a path
    headers: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    failures: deque[str] = field(default_factory=deque)
    waiting: queue.Queue[bytes | None] = field(default_factory=lambda: queue.Queue(_MOST_WAITING))
    thread: threading.Thread | None = None
    process: subprocess.Popen[bytes] | None = None  # the command that is running
    is_closed: bool = False

    def __post_init__(self) -> None:
        if "://" in self.target.partition(" ")[0]:
            self._take_address()
        else:
            self._take_command()

    def _take_address(self) -> None:
        why = None
        try:
            url = urlsplit(self.target)
            port = url.port  # raises ValueError for anything but 0 to 65535
            host = (url.hostname or "").encode("idna").decode()  # as a connection will do
        except ValueError:
            # the exception is not shown: it may quote a password
            raise _no_address(self.target, "its host or port is wrong") from None
        if url.scheme not in ("http", "https"):
            why = "alerts are sent by http or https"
        elif not host:
            why = "it names no host"
        elif port == 0:
            why = "nothing can listen on port 0"
        elif not (self.target.isascii() and self.target.isprintable()) or " " in self.target:
            why = "it has characters that an address cannot have: write them as %20 and so on"
        elif _NOT_IN_HOST.search(host):
            why = "its host has characters that no host can have"
        elif _NUMBERS.fullmatch(host) and not _is_ip_address(host):
            why = "its numbers are no IP address"
        if why is not None:
            raise _no_address(self.target, why)
        where = f"[{host}]" if ":" in host else host
        if port is not None:
            where += f":{port}"
        self.name = f"{url.scheme}://{where}"
        self.headers = {"Content-Type": "application/json", "User-Agent": "surefoot"}
        if url.username or url.password:
            user = f"{unquote(url.username or '')}:{unquote(url.password or '')}"
            self.headers["Authorization"] = f"Basic {b64encode(user.encode()).decode()}"
        self.target = urlunsplit(url._replace(netloc=where))

    def _take_command(self) -> None:
        try:
            self.command = shlex.split(self.target)
            program = shutil.which(self.command[0]) if self.command else None
        except ValueError as problem:  # a quotation mark, or a zero byte
            raise ConfigError(
                "alert-not-a-command",
                problem=f"--alert {_first_word(self.target)} is not a command: {problem}",
                remedy=["--alert https://HOST/PATH", "--alert 'python3 alert.py'"],
                setting="alert",
            ) from problem
        if program is None:
            raise ConfigError(
                "alert-target-unknown",
                problem=f"--alert {_first_word(self.target)} is neither a web address nor a command"
                " that exists",
                remedy=["--alert https://HOST/PATH", "--alert 'python3 alert.py'"],
                setting="alert",
            )
        self.command[0] = os.path.abspath(program)  # whatever the current directory is later
        self.name = Path(program).name

    def test(self, *, run: str | Path) -> None:
        """Send a note that says that it is a test, and wait for it. Raises `ConfigError` if it does
        not arrive.
        """
        try:
            self._deliver(_body(TEST, run=run, step=0))
        except Exception as problem:  # whatever a network or a program does
            raise ConfigError(
                "alert-test-failed",
                problem=f"the test alert did not reach {self.name}: {_reason(problem)}",
                remedy=["correct --alert", "to start without the test, leave out --alert-test"],
                setting="alert",
            ) from None

    def send(self, finding: Finding, *, run: str | Path, step: int) -> None:
        """Send a finding from a thread. Never waits, and never raises."""
        try:
            if self.thread is None:
                self.thread = threading.Thread(
                    target=self._deliver_all, name="surefoot sends alerts", daemon=True
                )
                self.thread.start()
            self.waiting.put_nowait(_body(finding, run=run, step=step))
        except (queue.Full, RuntimeError, ValueError) as problem:
            self._failed(problem)

    def problems(self) -> list[str]:
        """Return one line for each alert that was not delivered, and forget these lines."""
        return [self.failures.popleft() for _ in range(len(self.failures))]

    def close(self) -> None:
        """Wait a few seconds for alerts that are being sent, then end the command that is left."""
        if self.thread is not None:
            end = time.monotonic() + _AT_END_S
            while not self.waiting.empty() and time.monotonic() < end:
                time.sleep(0.01)
            if self.waiting.empty():
                self.waiting.put(None)
                self.thread.join(max(0.0, end - time.monotonic()))
            if self.thread.is_alive():
                self._failed(TimeoutError(f"not sent within {_AT_END_S:.0f} s"))
                self.is_closed = True
                self._end_command()
            self.thread = None

    def _deliver_all(self) -> None:
        while True:
            body = self.waiting.get()
            if body is None or self.is_closed:
                return
            try:
                self._deliver(body)
            except Exception as problem:  # whatever a network or a program does
                self._failed(problem)

    def _deliver(self, body: bytes) -> None:
        if self.command:
            self._run(body)
        else:
            self._post(body)

    def _post(self, body: bytes) -> None:
        from urllib.error import HTTPError
        from urllib.request import HTTPRedirectHandler, Request, build_opener

        class Stay(HTTPRedirectHandler):
            def redirect_request(self, *_: Any) -> None:
                """Follow no redirect: it would arrive as GET, without the finding."""

        request = Request(self.target, data=body, headers=self.headers)
        try:
            build_opener(Stay).open(request, timeout=_PATIENCE_S).close()
        except HTTPError as answer:
            answer.close()
            raise

    def _run(self, body: bytes) -> None:
        # a session of its own: a Ctrl-C in the terminal is for the run, and one signal ends the
        # command with all that it has started
        nowhere = subprocess.DEVNULL
        with subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=nowhere,
            stderr=nowhere,
            start_new_session=True,
        ) as self.process:
            try:
                if self.is_closed:  # since the caller looked
                    self._end_command()
                self.process.communicate(body, timeout=_PATIENCE_S)
            except BaseException:
                self._end_command()
                raise
        if self.process.returncode != 0:
            raise subprocess.CalledProcessError(self.process.returncode, self.name)

    def _end_command(self) -> None:
        """End the command that is running, and every process of its group."""
        process = self.process
        if process is None or process.poll() is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            if sys.platform == "win32":
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGKILL)

    def _failed(self, problem: Exception) -> None:
        self.failures.append(f"WARNING: an alert did not reach {self.name}: {_reason(problem)}")


def _no_address(target: str, why: str) -> ConfigError:
    scheme = target.partition("://")[0]
    return ConfigError(
        "alert-not-an-address",
        problem=f"--alert {scheme}://... is not a web address: {why}",
        remedy=["--alert https://HOST:PORT/PATH", "--alert 'python3 alert.py'"],
        setting="alert",
    )


def _is_ip_address(numbers: str) -> bool:
    try:
        socket.inet_aton(numbers)
    except OSError:
        return False
    return True


def _first_word(target: str) -> str:
    """Return the first word of a command: its arguments may be secrets."""
    words = target.split(maxsplit=1)
    if not words:
        return repr(target)
    if len(words) == 1:
        return repr(words[0])
    return f"{words[0]!r} ..."


def _body(finding: Finding, *, run: str | Path, step: int) -> bytes:
    path = os.path.abspath(run)
    words = f"{finding.severity.upper()} {finding.name} in {path}, step {step:,}: {finding.message}"
    body = {
        "text": words,
        "run": path,
        "host": socket.gethostname(),
        "step": step,
        "finding": finding.to_dict(),
    }
    return json.dumps(body).encode()


def _reason(problem: Exception) -> str:
    match problem:
        case subprocess.CalledProcessError():
            why = f"exit status {problem.returncode}"
        case subprocess.TimeoutExpired():
            why = f"not done after {_PATIENCE_S:.0f} s"
        case queue.Full():
            why = "too many alerts are waiting"
        case _:
            why = str(getattr(problem, "reason", None) or problem) or type(problem).__name__
    return why.partition("\n")[0]
