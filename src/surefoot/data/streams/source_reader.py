"""The reader of a source, seen from the run: how its process or thread starts, is heard, and ends."""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import ExitStack
from typing import Any

from surefoot.data.streams.one_rank import environment_of_one_rank
from surefoot.data.streams.reader import (
    HowToRead,
    SourcePosition,
    read_source,
    read_source_in_thread,
)
from surefoot.data.streams.stream import Stream
from surefoot.data.workers import (
    command_of,
    descendants,
    end_group,
    kill_group,
    start_of_process,
)
from surefoot.errors import DataError, first_line

_LOOK_S = 0.2  # between two looks whether a silent reader is alive
_END_S = 5.0  # for which an ended process, or a thread, is awaited


class SourceReader:
    """A process, or a thread, that reads a source and sends its messages (see `reader.py`)."""

    def __init__(self, stream: Stream, how: HowToRead, position: SourcePosition) -> None:
        self.stream = stream
        self.is_closed = False
        self.start_method = stream.start_method
        self.process: Any = None
        self.thread: threading.Thread | None = None
        self.children: dict[int, str] = {}  # at the end, by number
        if self.start_method == "thread":
            self.pipe, their_end = multiprocessing.Pipe(duplex=False)
            self.thread = threading.Thread(
                target=read_source_in_thread,
                args=(stream, their_end, position, self.has_closed),
                name="surefoot-source",
                daemon=True,
            )
            self.thread.start()
        else:
            self._start_process(how, position)

    def has_closed(self) -> bool:
        return self.is_closed

    def receive(self) -> bytes | None:
        """Wait for the next message; return None if the reader has ended, or `close` was called.

        The end of the file is no sign of life: a child process of the source may hold the pipe.
        """
        try:
            while not self.pipe.poll(_LOOK_S):
                if self.is_closed:
                    return None
                if not self._is_alive():
                    if self.process is not None:
                        kill_group(self.process.pid)
                    if not self.pipe.poll(0):
                        return None
            return self.pipe.recv_bytes()
        except (EOFError, OSError):
            return None

    def how_it_ended(self, row: int) -> DataError:
        """Return the error of a reader that has ended without a last message, before `row`."""
        status = 0
        if self.process is not None:
            kill_group(self.process.pid)
            limit = time.monotonic() + _END_S
            # `join` with a limit would wait for all who hold the sentinel of the process
            while self.process.is_alive() and time.monotonic() < limit:
                time.sleep(_LOOK_S / 10)
            status = self.process.exitcode or 0
        if status >= 0:
            reason = "the source, or a library in it, ended its own process, as os._exit does"
            if self.start_method == "spawn" and row == 0:
                reason = (
                    "python imports the script again in a spawned process: "
                    'start the run below `if __name__ == "__main__":`'
                )
            return DataError(
                "stream-reader-exited",
                problem="the process that reads the stream has ended unexpectedly: "
                f"exit status {status}, before row {row}",
                reason=reason,
                remedy="the rows before it are on the tape: correct the source, and start the same command again",
                row=row,
                status=status,
                start=self.start_method,
            )
        name = signal.Signals(-status).name
        if name == "SIGKILL":
            return DataError(
                "stream-reader-killed",
                problem="the process that reads the stream has ended unexpectedly: "
                f"{name}, before row {row}",
                reason="most often its memory is full, and the system has ended it",
                remedy="the rows before it are on the tape: let the source hold less, and start the same command again",
                row=row,
                signal=name,
                start=self.start_method,
            )
        return DataError(
            "stream-reader-crashed",
            problem="the process that reads the stream has ended unexpectedly: "
            f"{name}, before row {row}",
            reason="a library of the source has crashed; several do not work in a forked process (lance, ray, gRPC)",
            remedy='read it in another kind of process: sf.data.Stream(source, start="spawn")',
            row=row,
            signal=name,
            start=self.start_method,
        )

    def close(self) -> None:
        """End the process and its children, or ask the thread to end. `receive` then returns
        None.
        """
        self.is_closed = True
        if self.process is not None:
            self.children |= descendants(self.process.pid)
            self.process.kill()
            kill_group(self.process.pid)

    def join(self) -> str | None:
        """Wait for the end of the reader, once nobody receives any more; return a note of what goes
        on, or None.
        """
        self.pipe.close()
        if self.process is not None:
            self.process.join()
            end_group(self.process.pid)
            self.process.close()
            for child, name in self.children.items():
                if command_of(child) == name:
                    return (
                        f"note: process {child} ({name}), which the source has started in a session"
                        " of its own, still runs"
                    )
            return None
        assert self.thread is not None
        self.thread.join(_END_S)
        if self.thread.is_alive():
            return (
                "note: the thread that reads the stream still waits for its source, and ends with"
                " this process"
            )
        return None

    def _start_process(self, how: HowToRead, position: SourcePosition) -> None:
        context = multiprocessing.get_context(self.start_method)
        self.pipe, their_end = context.Pipe(duplex=False)
        self.process = context.Process(  # type: ignore[attr-defined]
            target=read_source,
            args=(self.stream.for_reader(), their_end, os.getpid(), how, position),
            name="surefoot-source",
        )
        try:
            with ExitStack() as while_it_starts:
                while_it_starts.enter_context(start_of_process())
                if how.is_one_rank and self.start_method != "fork":
                    while_it_starts.enter_context(environment_of_one_rank())
                self.process.start()
        except Exception as problem:  # above all of a source that cannot be copied to the process
            self.pipe.close()
            their_end.close()
            raise _not_started(problem, self.start_method) from problem
        their_end.close()

    def _is_alive(self) -> bool:
        if self.process is not None:
            return bool(self.process.is_alive())
        assert self.thread is not None
        return self.thread.is_alive()


def _not_started(problem: Exception, start_method: str) -> DataError:
    what = f"{type(problem).__name__}: {first_line(problem)}"
    if start_method == "fork":
        return DataError(
            "stream-reader-not-started",
            problem=f"the process that reads the stream cannot start: {what}",
            reason="the machine has no room for another process",
            remedy="let the run hold less memory, or fewer processes: workers=0",
            start=start_method,
        )
    return DataError(
        "stream-source-not-picklable",
        problem=f"the process that reads the stream cannot start: {what}",
        reason=f"start = {start_method!r} sends the source to a new process, so it must be picklable",
        remedy="define the source and its functions at the top of a file, not inside a function or as a lambda",
        setting="start",
        value=start_method,
    )
