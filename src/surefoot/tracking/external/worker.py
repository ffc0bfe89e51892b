"""The tracker process: reads JSON records, reports problems, and redirects the package's prints to
a log.

The process ends at a closing line, or at most `GONE_S` seconds after the training process ends,
even if the package hangs.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Protocol

from surefoot.config.paths import open_no_follow
from surefoot.tracking.external.run_facts import About, TrackerState
from surefoot.tracking.record import Record

GONE_S = 60.0
_LOOKS_S = 1.0  # seconds between two checks for the training process


class Package(Protocol):
    """A tracker package with an open run."""

    def write(self, record: Record) -> None: ...
    def close(self, ending: str) -> None: ...  # "finished", "stopped" or "failed"


def main() -> None:
    """Send the records from standard input to the tracker; standard output carries only
    problems.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S %z')} ---", flush=True)

    def say(problem: str) -> None:
        try:
            print(json.dumps({"problem": problem}), file=answers, flush=True)
        except OSError:  # the training process, which reads the pipe, has ended
            print(problem, flush=True)

    gone = end_with(int(sys.argv[1]))
    ok = follow(_until_over(sys.stdin.buffer, gone), begin, say=say)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if ok else 1)  # all data are sent, and the package's exit handlers may hang


def end_with(training: int) -> threading.Event:
    """End this process `GONE_S` seconds after the training process ends or the returned event is
    set, even if a thread hangs.
    """
    gone = threading.Event()

    def watch() -> None:
        while os.getppid() == training and not gone.wait(_LOOKS_S):
            pass
        time.sleep(GONE_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return gone


def follow(
    lines: Iterator[bytes],
    begin: Callable[[About, TrackerState, Callable[[str], None]], Package],
    *,
    say: Callable[[str], None],
) -> bool:
    """Send records to a tracker, except records sent before a resume; return False if a record did
    not reach the tracker.

    Each step is saved before its record is sent, so a kill in between loses a point but never
    repeats a point.
    """
    about = About(**json.loads(next(lines)))
    path = Path(about.directory) / f"{about.tracker}.json"
    lock = _alone(path)  # before the state is read: an earlier process may still send
    state = TrackerState.read(path)
    sent_before = dict(state.sent)
    ok = True

    @contextmanager
    def telling() -> Iterator[None]:
        nonlocal ok
        try:
            yield
        except Exception as problem:
            ok = False
            traceback.print_exception(problem)
            first = str(problem).strip().partition("\n")[0]
            say(f"{type(problem).__name__}: {first}" if first else type(problem).__name__)

    ending = None
    with telling():
        package = begin(about, state, say)
        state.started = True
        state.write()
    if not ok:
        return False
    for line in lines:
        record = json.loads(line)
        kind = record["kind"]
        step = record.get("step", 0)
        if kind == "close":
            ending = ending or "finished"
            break
        ending = _reported_end(record) or ending
        if step > sent_before.get(kind, -1):
            with telling():
                state.sent[kind] = max(step, state.sent.get(kind, -1))
                state.write()
                package.write(record)
    with telling():
        package.close(ending or "stopped")
    if lock is not None:
        lock.close()
    return ok


def begin(about: About, state: TrackerState, say: Callable[[str], None]) -> Package:
    """Start the tracker, whose package is imported only here, in the tracker's own process."""
    module = import_module(f"surefoot.tracking.external.{about.tracker}")
    package_class = getattr(module, about.tracker.capitalize())
    package: Package = package_class(about, state, say)
    return package


def _until_over(lines: Iterable[bytes], gone: threading.Event) -> Iterator[bytes]:
    # input that ends without a closing line shows that the training process has ended; Windows has
    # no other signal
    yield from lines
    gone.set()


def _reported_end(record: Record) -> str | None:
    if record["kind"] != "event":
        return None
    word = str(record.get("event", "")).split(" ")[0].strip(":,")
    return {"failed": "failed", "diverged": "failed", "stopped": "stopped"}.get(word)


def _alone(path: Path) -> IO[bytes] | None:
    # the tracker process of an earlier session ends by itself: wait for its lock
    if sys.platform == "win32":
        return None
    import fcntl

    lock = os.fdopen(open_no_follow(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT), "r+b")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


if __name__ == "__main__":
    main()
