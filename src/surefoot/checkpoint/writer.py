"""Background saves of checkpoints, with one thread per save. Ranks exchange messages without a
process group.

Rank 0 creates the directory and sends "begin". Ranks with pieces write their files, then report
sizes and hashes, or a failure. After all reports, rank 0 commits or gives up, and sends the outcome
to all ranks.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from traceback import clear_frames
from typing import Any

from torch._C._distributed_c10d import Store as Mail

from surefoot.checkpoint.format import Checkpoint, Entries, not_saved, write_tensors
from surefoot.checkpoint.store import NotPrunedError, Store
from surefoot.errors import CheckpointError, Setting, error_of_dict, first_line

_PATIENCE_S = 86_400.0  # as for a collective; the heartbeat detects a dead rank much earlier
_LAST_PATIENCE_S = 20.0  # if this process or the other ranks are about to exit
_PAUSE_S = 0.2  # the maximum between two checks


class Writer:
    """A background writer that saves one checkpoint at a time, and continues after failed saves.

    The thread is not a daemon, so the interpreter waits for a running save before exit. A running
    save owns the store: call `wait` before using the store. `saved` is the last saved step. With
    several ranks, the writers of all ranks share `mail`, submit the same steps, and receive the
    same outcomes.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int = 0,
        mail: Mail | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.rank = rank
        self.mail = mail
        self.now = now
        self.took_s = 0.0  # duration of the last finished save
        self.saved: int | None = None
        # of the last save, which succeeded nevertheless
        self.not_pruned: NotPrunedError | None = None
        # of the last finished save, None after a success
        self.failure: CheckpointError | None = None
        self._thread: threading.Thread | None = None
        self._save_count = 0
        self._hurried = threading.Event()

    def submit(self, checkpoint: Checkpoint, *, protected: Collection[int] = ()) -> None:
        """Wait for the running save, then start a save and return. The tensors must not change
        afterwards.
        """
        self.wait()
        self._save_count += 1
        thread = threading.Thread(
            target=self._save,
            args=(checkpoint, protected),
            name="surefoot-checkpoint",
            daemon=False,
        )
        try:
            thread.start()
        except RuntimeError:  # the thread limit is reached, or the interpreter is about to exit
            self._save(checkpoint, protected)
        else:
            self._thread = thread

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def hurry(self) -> None:
        """Shorten all later waits for other ranks, because a failure of this rank also ends the
        other ranks.
        """
        self._hurried.set()

    def _save(self, checkpoint: Checkpoint, protected: Collection[int]) -> None:
        step = checkpoint.step
        self.not_pruned = None
        start = self.now()
        try:
            if self.mail is None:
                self.store.save(checkpoint, protected=protected)
            else:
                messages = SaveMessages(
                    self.mail, save=self._save_count, hurried=self._hurried.is_set
                )
                if self.rank == 0:
                    save_leading(self.store, checkpoint, messages, protected=protected)
                else:
                    save_following(self.store, checkpoint, messages, rank=self.rank)
            self.saved = step
            self.failure = None
        # a bug must reach the caller too: a thread's traceback would be lost
        except Exception as problem:
            del checkpoint
            _clear_tracebacks(problem)
            if isinstance(problem, NotPrunedError):
                self.saved = step
                self.failure = None
                self.not_pruned = problem
            else:
                self.failure = _failure(step, problem)
        finally:
            self.took_s = self.now() - start


class SaveMessages:
    """The messages of one save, prefixed with the save's number. Waits for ranks are short while
    `hurried` returns True.
    """

    def __init__(
        self,
        mail: Mail,
        *,
        save: int,
        patience_s: float = _PATIENCE_S,
        hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        self.mail = mail
        self.save = save
        self.patience_s = patience_s
        self.hurried = hurried

    def send(self, what: str, value: Any) -> None:
        """Send a message; raise `CheckpointError` if the connection is lost."""
        try:
            self.mail.set(f"{self.save}/{what}", json.dumps(value))
        except RuntimeError as problem:
            raise _cut_off(first_line(problem)) from problem

    def receive(self, *what: str, of: str) -> tuple[str, Any]:
        """Wait for the first of several messages; return its name and value. `of` is the name of
        the sender in errors.
        """
        start = time.monotonic()
        hurried_since: float | None = None
        pause_s = 0.005
        while True:
            try:
                for name in what:
                    key = f"{self.save}/{name}"
                    if self.mail.check([key]):
                        return name, json.loads(self.mail.get(key))
            except RuntimeError as problem:
                raise _cut_off(first_line(problem)) from problem
            now = time.monotonic()
            is_in_hurry = self.hurried() or not threading.main_thread().is_alive()
            if hurried_since is None and is_in_hurry:
                hurried_since = now
            is_late = now - start > self.patience_s
            is_hurry_over = hurried_since is not None and now - hurried_since > _LAST_PATIENCE_S
            if is_late or is_hurry_over:
                raise _cut_off(f"no message from {of} for {now - start:,.0f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)


class Writers:
    """The other ranks that write pieces, as seen by rank 0 (`format.Others`)."""

    def __init__(self, messages: SaveMessages, store: Store, checkpoint: Checkpoint) -> None:
        self.messages = messages
        self.store = store
        self.step = checkpoint.step
        self.started = False
        rank_count = 1 if checkpoint.pieces is None else checkpoint.pieces.count
        self.awaited = list(range(1, rank_count))

    def begin(self) -> None:
        self.started = True
        self.messages.send("begin", {"step": self.step})

    def entries(self) -> Entries:
        """Wait for the other ranks; return length and hash of their files. Raises `CheckpointError`
        if one could not write.
        """
        merged = Entries()
        failed = None
        while self.awaited:
            rank = self.awaited.pop(0)
            _, report = self.messages.receive(f"piece-{rank}", of=f"the rank of piece {rank + 1}")
            with suppress(RuntimeError):  # no other rank needs this key
                self.messages.mail.delete_key(f"{self.messages.save}/piece-{rank}")
            for file, (length, digest) in report["files"].items():
                merged[file] = (int(length), str(digest))
            failed = failed or report["failed"]
        if failed:
            raise error_of_dict(failed)
        for file in merged:
            path = self.store.partial(self.step) / file
            try:
                self.store.disk.size(path)
            except OSError as problem:
                raise _unseen(self.step, "rank 0", path) from problem
        return merged

    def abandon(self) -> None:
        if self.started:
            with suppress(CheckpointError):
                self.entries()


def save_leading(
    store: Store, checkpoint: Checkpoint, messages: SaveMessages, *, protected: Collection[int]
) -> None:
    """Save on rank 0, and send the outcome to all ranks; raise the errors of `Store.save`."""
    try:
        store.save(checkpoint, protected=protected, others=Writers(messages, store, checkpoint))
    except Exception as problem:
        kind = "not_pruned" if isinstance(problem, NotPrunedError) else "problem"
        messages.send("outcome", {kind: _failure(checkpoint.step, problem).to_dict()})
        raise
    messages.send("outcome", {})


def save_following(
    store: Store, checkpoint: Checkpoint, messages: SaveMessages, *, rank: int
) -> None:
    """Write the pieces of a rank other than 0, if any; then return or raise the same result as rank
    0.
    """
    pieces = checkpoint.pieces
    if pieces is None:
        _, message = messages.receive("outcome", of="rank 0")
    else:
        kind, message = messages.receive("begin", "outcome", of="rank 0")
        if kind == "begin":
            report = _write_pieces(store, checkpoint, leader_step=message["step"], rank=rank)
            messages.send(f"piece-{pieces.rank}", report)
            _, message = messages.receive("outcome", of="rank 0")
    if "problem" in message:
        raise error_of_dict(message["problem"])
    if "not_pruned" in message:
        raise error_of_dict(message["not_pruned"], kind=NotPrunedError)


def _write_pieces(
    store: Store, checkpoint: Checkpoint, *, leader_step: int, rank: int
) -> dict[str, Any]:
    step = checkpoint.step
    where = f"rank {rank} on {socket.gethostname()}"
    try:
        if leader_step != step:
            raise not_saved(leader_step, f"it is at step {step}")
        store.guard()
        files = write_tensors(checkpoint, directory=store.partial(step), disk=store.disk)
        return {"files": files, "failed": None}
    except FileNotFoundError as problem:
        failed = _unseen(step, where, problem.filename or store.partial(step))
    except OSError as problem:
        failed = store.not_saved(step, problem).inside(where)
    except Exception as problem:  # a bug must reach the caller too
        failed = _failure(step, problem).inside(where)
    return {"files": {}, "failed": failed.to_dict()}


def _failure(step: int, problem: Exception) -> CheckpointError:
    if isinstance(problem, CheckpointError):
        return problem
    return not_saved(step, f"{type(problem).__name__}: {problem}")


def _unseen(step: int, where: str, path: Path | str) -> CheckpointError:
    return not_saved(
        step,
        f"{where} cannot find {path}",
        where="all ranks write to one directory, which must be on a file system that every machine"
        " shares",
        remedy=Setting("run_dir"),
    )


def _cut_off(why: str) -> CheckpointError:
    return CheckpointError(
        "ranks-out-of-contact", problem=f"the ranks have lost contact with each other: {why}"
    )


def _clear_tracebacks(problem: BaseException | None) -> None:
    """Clear the frames of an exception's tracebacks, which would keep every tensor alive."""
    while problem is not None:
        clear_frames(problem.__traceback__)
        problem = problem.__cause__ or problem.__context__
