"""Saving beside the training: one thread for each save, so that none idles or has to be stopped at exit."""

from __future__ import annotations

from collections.abc import Collection
from threading import Event, Thread
from traceback import clear_frames
from typing import TYPE_CHECKING

from surefoot.checkpoint.format import Contents
from surefoot.checkpoint.store import NotPrunedError, Store
from surefoot.errors import CheckpointError

if TYPE_CHECKING:
    from surefoot.checkpoint.sharded_writer import Mail


class Writer:
    """Saves into a store in the background, one checkpoint at a time, and outlives saves that fail.

    The thread is not a daemon: an interpreter that ends waits for the save in flight, and for nothing else.
    As long as one is in flight the store belongs to it: call `wait` before using the store. `saved` is the
    last step that was saved. Of several ranks each has one, with a `mail`box between them: they submit the same steps, and
    learn the same of each.
    """

    def __init__(self, store: Store, *, rank: int = 0, mail: Mail | None = None) -> None:
        self.store, self.rank, self.mail = store, rank, mail
        self.saved: int | None = None
        self.not_pruned: NotPrunedError | None = None  # of the last save, which is on disk all the same
        self.failure: CheckpointError | None = (
            None  # of the last finished save; None where it succeeded, and before the first
        )
        self._thread: Thread | None = None
        self._begun = 0  # saves
        self._hurried = Event()

    def submit(self, contents: Contents, *, protected: Collection[int] = ()) -> None:
        """Begin to save, after the save in flight, and return. The tensors must not change any more."""
        self.wait()
        self._begun += 1
        thread = Thread(target=self._save, args=(contents, protected), name="surefoot-checkpoint", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # no more threads allowed, or the interpreter is about to end
            self._save(contents, protected)
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

    def _save(self, contents: Contents, protected: Collection[int]) -> None:
        step, self.not_pruned = contents.step, None
        try:
            if self.mail is None:
                self.store.save(contents, protected=protected)
            else:
                from surefoot.checkpoint.sharded_writer import Board, save_following, save_leading

                board = Board(self.mail, save=self._begun, hurried=self._hurried.is_set)
                if self.rank == 0:
                    save_leading(self.store, contents, board, protected=protected)
                else:
                    save_following(self.store, contents, board, rank=self.rank)
        except NotPrunedError as problem:
            del contents
            _let_go(problem)
            self.saved, self.failure, self.not_pruned = step, None, problem
        except Exception as problem:  # a bug must reach the caller too: nobody reads a thread's traceback
            del contents
            _let_go(problem)
            reason = f"step {step} is not saved: {type(problem).__name__}: {problem}"
            self.failure = problem if isinstance(problem, CheckpointError) else CheckpointError(reason)
        else:
            self.saved, self.failure = step, None


def _let_go(problem: BaseException | None) -> None:
    """Clear the frames that an exception remembers: or who keeps it keeps every tensor too."""
    while problem is not None:
        clear_frames(problem.__traceback__)
        problem = problem.__cause__ or problem.__context__
