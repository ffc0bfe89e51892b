"""Saving beside the training: one thread for each save, which several ranks agree on by messages, without a process group.

Rank 0 makes the directory and says "begin"; the ranks that hold pieces write theirs and report lengths and hashes, or that they
failed; rank 0 commits when all have reported, or gives up, and tells all the outcome.
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

from surefoot.checkpoint.format import Checkpoint, Entries, write_tensors
from surefoot.checkpoint.store import NotPrunedError, Store
from surefoot.errors import CheckpointError, first_line

_PATIENCE_S = 1800.0  # with a rank that says nothing; one that has died is noticed much earlier, by its heartbeat
_LAST_PATIENCE_S = 20.0  # where this process wants to end, or those that it waits for are ended
_PAUSE_S = 0.2  # at most, between two looks


class Writer:
    """Saves into a store in the background, one checkpoint at a time, and outlives saves that fail.

    The thread is not a daemon: an interpreter that ends waits for the save in flight. The store belongs to that save: call
    `wait` before using it. `saved` is the last step that was saved. Each of several ranks has one, with a `mail`box between
    them: they submit the same steps, and learn the same of each.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int = 0,
        mail: Mail | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.rank, self.mail, self.now = store, rank, mail, now
        self.took_s = 0.0  # the last finished save
        self.saved: int | None = None
        self.not_pruned: NotPrunedError | None = None  # of the last save, which is on disk all the same
        self.failure: CheckpointError | None = None  # of the last finished save, unless it succeeded
        self._thread: threading.Thread | None = None
        self._save_count = 0
        self._hurried = threading.Event()

    def submit(self, checkpoint: Checkpoint, *, protected: Collection[int] = ()) -> None:
        """Begin to save, after the save in flight, and return. The tensors must not change any more."""
        self.wait()
        self._save_count += 1
        thread = threading.Thread(
            target=self._save, args=(checkpoint, protected), name="surefoot-checkpoint", daemon=False
        )
        try:
            thread.start()
        except RuntimeError:  # no more threads allowed, or the interpreter is about to end
            self._save(checkpoint, protected)
        else:
            self._thread = thread

    def wait(self) -> None:
        """Return when no save is in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def hurry(self) -> None:
        """Wait for other ranks a moment at most from now on: this one fails, and that ends them."""
        self._hurried.set()

    def _save(self, checkpoint: Checkpoint, protected: Collection[int]) -> None:
        step, self.not_pruned, start = checkpoint.step, None, self.now()
        try:
            if self.mail is None:
                self.store.save(checkpoint, protected=protected)
            else:
                board = Board(self.mail, save=self._save_count, hurried=self._hurried.is_set)
                if self.rank == 0:
                    save_leading(self.store, checkpoint, board, protected=protected)
                else:
                    save_following(self.store, checkpoint, board, rank=self.rank)
            self.saved, self.failure = step, None
        except Exception as problem:  # a bug must reach the caller too: nobody reads a thread's traceback
            del checkpoint
            _clear_tracebacks(problem)
            if isinstance(problem, NotPrunedError):
                self.saved, self.failure, self.not_pruned = step, None, problem
            else:
                text = f"step {step} is not saved: {type(problem).__name__}: {problem}"
                self.failure = problem if isinstance(problem, CheckpointError) else CheckpointError(text)
        finally:
            self.took_s = self.now() - start


class Board:
    """The messages of one save, by its number; `hurried` tells whether to wait for others no longer than a moment."""

    def __init__(
        self, mail: Mail, *, save: int, patience_s: float = _PATIENCE_S, hurried: Callable[[], bool] = lambda: False
    ) -> None:
        self.mail, self.save, self.patience_s, self.hurried = mail, save, patience_s, hurried

    def send(self, what: str, value: Any) -> None:
        """Leave a message; `CheckpointError` where nobody takes it."""
        try:
            self.mail.set(f"{self.save}/{what}", json.dumps(value))
        except RuntimeError as problem:
            raise _cut_off(problem) from problem

    def receive(self, *what: str, of: str) -> tuple[str, Any]:
        """The first of some messages to be there, and which it is; waits for it, `of` whom the error would tell."""
        start, pause_s = time.monotonic(), 0.005
        ending: float | None = None
        while True:
            try:
                for each in what:
                    if self.mail.check([f"{self.save}/{each}"]):
                        return each, json.loads(self.mail.get(f"{self.save}/{each}"))
            except RuntimeError as problem:
                raise _cut_off(problem) from problem
            now = time.monotonic()
            if ending is None and (self.hurried() or not threading.main_thread().is_alive()):
                ending = now
            if now - start > self.patience_s or (ending is not None and now - ending > _LAST_PATIENCE_S):
                raise CheckpointError(f"{of} has said nothing for {now - start:,.0f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)


class Writers:
    """The ranks besides rank 0 that write pieces, as rank 0 sees them (`format.Others`)."""

    def __init__(self, board: Board, store: Store, checkpoint: Checkpoint) -> None:
        self.board, self.store, self.step, self.started = board, store, checkpoint.step, False
        # in the order of rows
        self.awaited = list(range(1, 1 if checkpoint.pieces is None else checkpoint.pieces.count))

    def begin(self) -> None:
        self.started = True
        self.board.send("begin", {"step": self.step})

    def entries(self) -> Entries:
        merged, failed = Entries(), ""
        while self.awaited:
            rank = self.awaited.pop(0)
            report = self.board.receive(f"piece-{rank}", of=f"the rank of piece {rank + 1}")[1]
            with suppress(RuntimeError):  # nobody else will look for it
                self.board.mail.delete_key(f"{self.board.save}/piece-{rank}")
            merged |= {file: (int(length), str(digest)) for file, (length, digest) in report["files"].items()}
            failed = failed or report["failed"]
        if failed:
            raise CheckpointError(failed)
        for file in merged:
            try:
                self.store.disk.size(self.store.partial(self.step) / file)
            except OSError as problem:
                raise CheckpointError(_unseen(self.step, "rank 0", self.store.partial(self.step) / file)) from problem
        return merged

    def abandon(self) -> None:
        if self.started:
            with suppress(CheckpointError):
                self.entries()


def save_leading(store: Store, checkpoint: Checkpoint, board: Board, *, protected: Collection[int]) -> None:
    """Rank 0's part of a save, and its outcome to all; raises as `Store.save` does."""
    try:
        store.save(checkpoint, protected=protected, others=Writers(board, store, checkpoint))
    except Exception as problem:
        kind = "not_pruned" if isinstance(problem, NotPrunedError) else "problem"
        board.send("outcome", {kind: str(problem) or type(problem).__name__})
        raise
    board.send("outcome", {})


def save_following(store: Store, checkpoint: Checkpoint, board: Board, *, rank: int) -> None:
    """The part of another rank: its pieces, where it has some; returns and raises as rank 0's."""
    pieces = checkpoint.pieces
    kind, message = board.receive(*(["begin"] if pieces is not None else []), "outcome", of="rank 0")
    if pieces is not None and kind == "begin":
        board.send(f"piece-{pieces.rank}", _write_pieces(store, checkpoint, leader_step=message["step"], rank=rank))
        message = board.receive("outcome", of="rank 0")[1]
    if "problem" in message:
        raise CheckpointError(message["problem"])
    if "not_pruned" in message:
        raise NotPrunedError(message["not_pruned"])


def _write_pieces(store: Store, checkpoint: Checkpoint, *, leader_step: int, rank: int) -> dict[str, Any]:
    """Write the pieces of a rank; what it reports."""
    step, where = checkpoint.step, f"rank {rank} on {socket.gethostname()}"
    try:
        if leader_step != step:
            raise CheckpointError(f"step {leader_step} is not saved: {where} stands after step {step}")
        store.guard()
        return {"files": write_tensors(checkpoint, directory=store.partial(step), disk=store.disk), "failed": ""}
    except FileNotFoundError as problem:
        failed = _unseen(step, where, problem.filename or store.partial(step))
    except OSError as problem:
        first, *more = str(store.not_saved(step, problem)).splitlines()
        failed = "\n".join([f"{first} ({where})", *more])
    except Exception as problem:  # a bug must reach the caller too
        failed = f"step {step} is not saved: {type(problem).__name__}: {problem} ({where})"
    return {"files": {}, "failed": failed}


def _unseen(step: int, where: str, path: Path | str) -> str:
    return (
        f"step {step} is not saved: {where} does not see {path}\n"
        "  all ranks write into one directory: put --run-dir on a file system that every machine shares"
    )


def _cut_off(problem: RuntimeError) -> CheckpointError:
    return CheckpointError(f"the ranks no longer hear of each other: {first_line(problem)}")


def _clear_tracebacks(problem: BaseException | None) -> None:
    """Clear the frames that an exception remembers: or who keeps it keeps every tensor too."""
    while problem is not None:
        clear_frames(problem.__traceback__)
        problem = problem.__cause__ or problem.__context__
