"""`subprocess.Popen` for the variants of a comparison, by fork from this process, which has
imported torch: that takes seconds.

All else is as it is: a process of its own, which is signalled, killed, and dies with its parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import IO, Any, Self

import pytest


class Forked:
    """A process that does what `call` does, with the standard streams that are asked for."""

    def __init__(
        self, call: Callable[[], object], *, stdout: Any, stderr: Any = None, session: bool = False
    ) -> None:
        read, write = os.pipe() if stdout == subprocess.PIPE else (None, stdout.fileno())
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _be(call, write, errors=stderr is not None, session=session)
        self.stdin: IO[bytes] = open(os.devnull, "wb")  # noqa: SIM115  # held, as a pipe is
        self.stdout: IO[str] | None = None
        if read is not None:
            os.close(write)
            self.stdout = os.fdopen(read, "r", encoding="utf-8")

    def poll(self) -> int | None:
        return self._waited(os.WNOHANG)

    def wait(self) -> int | None:
        return self._waited(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _waited(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.stdin.close()
        self.wait()


def variants_are_forked(monkeypatch: pytest.MonkeyPatch, *, trained: bool = True) -> None:
    """Have comparisons fork the process that looks at their settings, and those that train variants
    if these are to be.
    """
    import torch.utils.tensorboard  # noqa: F401  # what every run imports when it begins: here it is once for all

    from surefoot.cli import compare_worker
    from surefoot.tools.compare import (
        trials,
    )

    forking = SimpleNamespace(Popen=_variant, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    for module in (compare_worker, trials) if trained else (compare_worker,):
        monkeypatch.setattr(module, "subprocess", forking)


def _variant(
    command: Sequence[str],
    *,
    stdin: Any,
    stdout: Any,
    env: dict[str, str],
    cwd: str,
    stderr: Any = None,
    start_new_session: bool = False,
) -> Forked:
    from surefoot.cli import compare_worker

    assert stdin == subprocess.PIPE
    assert command[:3] == [sys.executable, "-m", "surefoot.cli.compare_worker"]

    def call() -> None:
        os.environ.update(env)
        os.chdir(cwd)
        sys.argv = list(command[2:])
        compare_worker.main()

    return Forked(call, stdout=stdout, stderr=stderr, session=start_new_session)


def _be(call: Callable[[], object], output: int, *, errors: bool, session: bool) -> None:
    """Be a fresh process as far as signals and streams go, and end."""
    status = 1
    try:
        if session:
            os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        os.dup2(output, 1)
        if errors:
            os.dup2(output, 2)
        os.close(output)
        sys.stdin, sys.stdout, sys.stderr = (
            open(os.devnull),  # noqa: SIM115
            open(1, "w", closefd=False),  # noqa: SIM115
            open(2, "w", closefd=False),  # noqa: SIM115
        )
        call()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
