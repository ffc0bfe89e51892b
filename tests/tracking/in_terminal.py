"""Programs in terminals of their own: a process that has imported torch forks for each, because
importing torch costs seconds.
"""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import re
import select
import signal
import struct
import sys
import termios
import traceback
import warnings
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Self

import pyte

from rank_processes import warn_as_python_does
from waiting import HangLimit

_TESTS = Path(__file__).parents[1]
LIVE = re.compile("[━─]{5}")  # the bar


class Screen:
    """A terminal of some size that can be written to, and read like one."""

    def __init__(self, columns: int = 80, rows: int = 24, *, encoding: str = "utf-8") -> None:
        self.columns = columns
        self.raw = ""
        self.encoding = encoding
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self.screen.set_mode(pyte.modes.LNM)  # a line end starts a new line, as terminals are set
        self.feed = pyte.Stream(self.screen)

    def write(self, text: str) -> int:
        text.encode(self.encoding)
        self.raw += text
        self.feed.feed(text)
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """All that was ever on it, scrolled away or not, without empty lines."""
        gone = [
            "".join(row[column].data for column in range(self.columns))
            for row in self.screen.history.top
        ]
        return [line.rstrip() for line in [*gone, *self.screen.display] if line.strip()]


class Process:
    """A program in a pseudo-terminal, which is its controlling one; at no time it may show two live
    lines.
    """

    def __init__(
        self, warm: Warm, program: str, *, columns: int, environment: dict[str, str]
    ) -> None:
        self.warm = warm
        self.screen = Screen(columns)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.main, side = os.openpty()
        self.resize(columns)
        spec = {"terminal": os.ttyname(side), "program": program, "environment": environment}
        self.pid = int(warm.answer(spec))
        os.close(side)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.screen.screen.resize(24, columns)
        self.screen.columns = columns

    def press(self, key: bytes) -> None:
        os.write(self.main, key)

    def read(self, seconds: float) -> bool:
        """Feed what comes within this time to the screen; false at the end of it all."""
        ready, _, _ = select.select([self.main], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self.main, 65536)
        except OSError:
            return False
        self.screen.write(self.decoder.decode(data).replace("\r\n", "\n"))
        assert sum(bool(LIVE.search(line)) for line in self.screen.lines) <= 1, self.screen.lines
        return bool(data)

    def until(self, text: str) -> None:
        """Wait until `text` was written to the screen."""
        limit = HangLimit()
        while text not in self.screen.raw:
            assert not limit.is_over, self.screen.lines
            assert self.read(0.02), self.screen.lines

    def end(self) -> int:
        """The exit status, when all is read."""
        while self.read(20.0):
            pass
        status = int(self.warm.answer({"wait": self.pid}))
        self.pid = 0
        return status

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.warm.answer({"wait": self.pid})
        os.close(self.main)


class Warm:
    """The process that forks, which is itself a fork of this one."""

    def __enter__(self) -> Self:
        asked, told = os.pipe(), os.pipe()
        with warnings.catch_warnings(action="ignore"):
            self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(asked[1])
                os.close(told[0])
                serve(os.fdopen(asked[0]), os.fdopen(told[1], "w"))
                status = 0
            finally:
                os._exit(status)
        os.close(asked[0])
        os.close(told[1])
        self.questions, self.answers = os.fdopen(asked[1], "w"), os.fdopen(told[0])
        return self

    def answer(self, question: dict[str, Any]) -> str:
        self.questions.write(json.dumps(question) + "\n")
        self.questions.flush()
        return self.answers.readline()

    def __exit__(self, *_: object) -> None:
        self.questions.close()
        os.waitpid(self.pid, 0)
        self.answers.close()


def environment() -> dict[str, str]:
    """That of a process in a terminal which can redraw a line, and that finds this folder's
    neighbours.
    """
    strange = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "JPY_PARENT_PID")
    plain = {name: value for name, value in os.environ.items() if name not in strange}
    paths = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))
    return plain | {"TERM": "xterm-256color", "PYTHONPATH": paths}


def serve(questions: IO[str], answers: IO[str]) -> None:
    """One JSON object a line: a program to start, answered with its process id, or one to wait for,
    with its exit status.
    """
    from torch.utils.tensorboard import writer

    import small_runs

    import_module("surefoot.tracking.live_terminal")
    import_module("rich.console")
    variables = environment()
    os.environ.clear()
    os.environ.update(variables)
    warn_as_python_does()
    assert writer
    assert small_runs.sf.Run.__name__ == "Run"
    for line in questions:
        question = json.loads(line)
        if "wait" in question:
            _, status = os.waitpid(question["wait"], 0)
            print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
            continue
        terminal = os.open(question["terminal"], os.O_RDWR | os.O_NOCTTY)
        child = os.fork()
        if child == 0:
            questions.close()
            answers.close()
            become(question["program"], terminal, question["environment"])
        os.close(terminal)
        print(child, file=answers, flush=True)


def become(program: str, terminal: int, environment: dict[str, str]) -> None:
    """Run a program as Python would in this terminal, and end with it."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for number in (0, 1, 2):
        os.dup2(terminal, number)
    os.environ.update(environment)
    sys.argv = ["program.py"]
    sys.stdin, sys.stdout, sys.stderr = (
        open(0),  # noqa: SIM115
        open(1, "w", buffering=1),  # noqa: SIM115
        open(2, "w", buffering=1),  # noqa: SIM115
    )
    status = 0
    try:
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
