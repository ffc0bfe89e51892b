"""Loader workers: processes that read micro-batches of individual samples."""

import atexit
import gc
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from surefoot.data.gathering import first_few
from surefoot.data.reading import MicroBatchReader
from surefoot.data.shared_memory import locks_named, shared_memory_full
from surefoot.errors import ConfigError, DataError, Setting, SurefootError, first_line

_LEFT_TO_THE_PARENT = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
]
_WAIT_S = 5.0
_SOCKET = 107  # the maximal length of a socket path on Linux
_HANGS_AFTER = 4  # waits of `_WAIT_S` for a worker before a warning; doubled after each warning


def _check_temporary_directory() -> None:
    # with a longer socket path (see unix(7)), a thread of the worker would fail and the run would
    # wait forever
    path = tempfile.gettempdir()
    length = len(os.fsencode(path))
    limit = _SOCKET - len("/pymp-12345678/listener-12345678")  # as multiprocessing names it
    if sys.platform == "linux" and length > limit:
        raise ConfigError(
            "temporary-path-too-long",
            problem=f"workers: the path of the temporary directory has {length} bytes: {path}",
            reason="a worker sends its tensors through a socket in that directory, so the path may"
            f" have at most {limit}",
            remedy="set a shorter one: TMPDIR=/tmp",
            path=path,
            length=length,
            limit=limit,
        )


class Workers:
    """Loader processes that prefetch the micro-batches of steps `first` to `stop`; `close` ends the
    processes.
    """

    def __init__(
        self,
        reader: MicroBatchReader,
        *,
        first: int,
        stop: int | None,
        pieces: range,
        workers: int,
        pin: bool,
        say: Callable[[str], None],
    ) -> None:
        _check_temporary_directory()
        self.plan = reader.plan
        self.first = first
        self.pieces = pieces
        self.workers = workers
        self.say = say
        self.taken = 0  # micro-batches
        # waits before the next warning, by worker
        self.named_after = dict.fromkeys(range(workers), _HANGS_AFTER)
        self.processes: set[Any] = set()
        others = set(multiprocessing.active_children())
        with warnings.catch_warnings(), _deaths_named():
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader = DataLoader(
                reader,
                batch_size=None,
                sampler=_addresses(reader, first, stop, pieces),
                num_workers=workers,
                collate_fn=_as_it_is,
                pin_memory=pin,
                worker_init_fn=partial(begin_process, os.getpid(), gc.isenabled()),
                timeout=_WAIT_S,  # after each wait, the loader checks for dead workers
                multiprocessing_context="fork" if sys.platform == "linux" else None,
                generator=torch.Generator(),  # otherwise the loader draws from the global generator
            )
            with start_of_process(), locks_named():
                self.batches: Any = iter(loader)
            try:
                self.processes = set(multiprocessing.active_children()) - others
                # at exit, Python waits for the workers, which ignore SIGTERM: end the workers first
                atexit.register(self.close)
            except BaseException:  # a worker died, or Ctrl-C: the others would never end
                self.close()
                raise

    def next(self) -> Any:
        """Return the next batch. A worker that takes long is named; its error is raised here, also
        its death.
        """
        worker = self.taken % self.workers  # the loader reads from the workers in turn
        for waits in count(1):
            try:
                with _deaths_named():
                    batch = next(self.batches)
                break
            except RuntimeError as problem:
                if "DataLoader timed out" not in str(problem):
                    raise
                if waits == self.named_after[worker]:
                    self.say(self._hanging(worker, waits * _WAIT_S))
                    self.named_after[worker] *= 2
        self.taken += 1
        if isinstance(batch, SurefootError):
            raise batch
        return batch

    def _hanging(self, worker: int, waited_s: float) -> str:
        steps, nth = divmod(self.taken, len(self.pieces))
        step = self.first + steps
        ids, _ = self.plan.micro_batches(step)[self.pieces[nth]]
        pid = self.batches._workers[worker].pid
        return (
            f"warning: loader worker {worker} (process {pid}) has been reading samples {first_few(ids)} of step {step}"
            f" for {waited_s:.0f} s\n"
            "  the run waits for it: is a disk or a server slow, or does __getitem__ wait for a lock?\n"
            f"  try --workers 0; to see its stack: py-spy dump --pid {pid}"
        )

    def close(self) -> None:
        """End the worker processes; kill a process that still reads a sample after five seconds."""
        atexit.unregister(self.close)
        # the traceback of an error may keep the iterator alive: run the cleanup of its __del__ now
        self.batches._shutdown_workers()
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()
            assert process.pid is not None  # it has started
            end_group(process.pid)


def begin_process(parent: int, collects: bool, _worker: int = 0) -> None:
    """Prepare a process that reads data: it leaves signals to `parent`, and ends with it.

    The process leads a group of its own, so that processes that the user's code starts in it end
    with it (see `end_group`).
    """
    if hasattr(os, "setpgid"):
        with suppress(PermissionError):  # it leads a session already
            os.setpgid(0, 0)
    # garbage collection would copy inherited memory, and an inherited store would wait for threads
    # of the parent
    gc.freeze()
    if collects:
        gc.enable()
    for number in _LEFT_TO_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_THE_PARENT)
    # torch's watchdog waits for the queue first, so it does not end a worker that is blocked on a
    # full pipe
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    leave_with_children()


def leave_with_children() -> None:
    """End this process, which began with `begin_process`, and the processes that it has started."""
    if hasattr(os, "getpgrp") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def kill_group(process: int) -> None:
    """Kill a process of `begin_process` and the processes that it has started, after its end
    too.
    """
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process, signal.SIGKILL)


def end_group(process: int) -> None:
    """Kill the processes that an ended process of `begin_process` has started, and wait until they
    are gone.
    """
    kill_group(process)
    limit = time.monotonic() + _WAIT_S
    while _has_members(process) and time.monotonic() < limit:
        time.sleep(0.01)


def _has_members(group: int) -> bool:
    if not hasattr(os, "killpg"):
        return False
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def descendants(process: int) -> dict[int, str]:
    """Return the names of the processes below a living one by their numbers, also of those in other
    groups and sessions. Linux only; elsewhere nothing.
    """
    names = dict[int, str]()
    with suppress(OSError):  # not Linux, or the process has ended
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                names[child] = command_of(child)
                names |= descendants(child)
    return names


def command_of(process: int) -> str:
    """Return the name of a process that runs, or "". Linux only."""
    with suppress(OSError):
        _, name, rest = re.split(r"\((.*)\) ", Path(f"/proc/{process}/stat").read_text())
        return "" if rest.startswith("Z") else name
    return ""


def _addresses(
    reader: MicroBatchReader, first: int, stop: int | None, pieces: range
) -> Iterator[tuple[Any, ...]]:
    for step in count(first) if stop is None else range(first, stop):
        for index in pieces:
            yield reader.address(step, index)


@contextmanager
def _deaths_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as problem:
        if "DataLoader worker" not in str(problem):
            raise
        why = first_line(problem)
        earlier = "" if problem.__context__ is None else first_line(problem.__context__)
        for text in (why, earlier):
            if "Bus error" in text:  # a page of shared memory that could not be had
                raise shared_memory_full(text) from problem
        raise DataError(
            "loader-worker-died",
            problem=f"a loader worker ended unexpectedly: {why}",
            reason="most often memory or /dev/shm is full",
            remedy=[
                ("fewer", Setting("workers")),
                (Setting("workers", 0), "to see the error itself"),
            ],
        ) from problem


@contextmanager
def start_of_process() -> Iterator[None]:
    """Start a process that reads data inside this block."""
    collects = gc.isenabled()
    has_masks = hasattr(signal, "pthread_sigmask")  # Windows has none
    if has_masks:  # an early signal would kill a new worker
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_PARENT)
    try:
        gc.disable()
        yield
    finally:
        if collects:
            gc.enable()
        if has_masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _as_it_is(batch: Any) -> Any:
    return batch
