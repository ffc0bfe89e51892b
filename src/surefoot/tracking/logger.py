"""The sinks of a session's records: console, metrics.jsonl, TensorBoard and trackers. A failing
sink does not end the run.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from surefoot.checkpoint.format import Checkpoint
from surefoot.tracking.console import Screen, TextLog
from surefoot.tracking.jsonl import JsonLines
from surefoot.tracking.record import Record, Sink
from surefoot.tracking.run_directory import RunDirectory

if TYPE_CHECKING:
    from surefoot.tracking.external.client import Tracker
    from surefoot.tracking.tensorboard import TensorBoard


class Journal:
    """Writer of records to all sinks; `open` adds the files of a run's directory."""

    def __init__(self, console: Screen | None, text_log: TextLog | None = None) -> None:
        self.text = None if text_log is None else text_log.console
        self.screens = [screen for screen in (console, self.text) if screen is not None]
        self.sinks: list[Sink] = [*self.screens]
        self.metrics: JsonLines | None = None
        self.board: TensorBoard | None = None
        self.trackers: list[Tracker] = []
        self.failed_sinks: set[int] = set()  # ids of the sinks with a printed warning

    def open(
        self,
        directory: RunDirectory,
        *,
        step: int,
        saved: Checkpoint | None,
        unit: str,
        tensorboard: bool,
    ) -> None:
        """Open the record files of a directory, and continue them after `step` steps from the
        checkpoint `saved`.
        """
        noted = None if saved is None else saved.log
        self.metrics = JsonLines(directory.metrics, noted_bytes=noted[0] if noted else 0)
        self.sinks.append(self.metrics)
        if tensorboard:
            from surefoot.tracking.tensorboard import TensorBoard

            metrics = None if saved is None else directory.metrics
            self.board = TensorBoard(
                directory.path / "tensorboard", from_step=step, unit=unit, metrics=metrics
            )
            self.sinks.append(self.board)
        if saved is None:
            return
        if noted is not None and not self.metrics.holds(*noted):
            self._say(
                f"warning: {directory.metrics} differs from its content at step {saved.step}: records were lost"
            )
        self.write({"kind": "resume", "step": step})

    def make_again(self, directory: RunDirectory) -> bool:
        """Recreate deleted record files; return True if a file was recreated."""
        deleted = []
        for sink in (self.metrics, self.board):
            if sink is not None and sink.appended.was_deleted():
                deleted.append(sink.appended)
        for file in deleted:
            directory.refuse_links()
            file.path.parent.mkdir(parents=True, exist_ok=True)
            file.make_again()
        return bool(deleted)

    def follow(
        self, names: Sequence[str], directory: RunDirectory, *, settings: dict[str, Any]
    ) -> None:
        if not names:
            return
        from surefoot.tracking.external.client import Tracker

        self.trackers = [Tracker(name, out=directory.path, settings=settings) for name in names]
        self.sinks += self.trackers

    def write(self, record: Record) -> None:
        self._hand(record, self.sinks)

    def show(self, record: Record) -> None:
        """Send a record to all sinks except metrics.jsonl, which already contains the record."""
        self._hand(record, [sink for sink in self.sinks if sink is not self.metrics])

    def step_recorded(self) -> None:
        """Tell the console that the newest step has all its records."""
        for screen in self.screens:
            screen.step_recorded()

    def _hand(self, record: Record, sinks: Sequence[Sink]) -> None:
        for sink in sinks:
            try:
                sink.write(record)
            except Exception as problem:
                if sink is self.metrics and not isinstance(problem, OSError):
                    raise  # the main record file must not be lost by an internal error
                if id(sink) not in self.failed_sinks:
                    self.failed_sinks.add(id(sink))
                    self._say(
                        f"WARNING: records do not reach {self._name(sink)}: {_words(problem)}; training continues"
                    )
            else:
                self.failed_sinks.discard(id(sink))

    def close(self) -> None:
        """Close all sinks in reverse order; a failing one is a warning."""
        for tracker in self.trackers:  # the trackers finish concurrently
            tracker.ask_to_close()
        with ExitStack() as last_first:
            for sink in reversed(self.sinks):
                last_first.callback(self._close, sink)

    def state(self) -> tuple[int, str] | None:
        """Return the length and hash of metrics.jsonl for a checkpoint, or None if no file is
        open.
        """
        return None if self.metrics is None else self.metrics.state()

    def _close(self, sink: Sink) -> None:
        try:
            sink.close()
        except Exception as problem:
            self._say(f"WARNING: records are missing in {self._name(sink)}: {_words(problem)}")

    def _name(self, sink: Sink) -> str:
        if sink is self.metrics:
            return "metrics.jsonl"
        if sink is self.board:
            return "tensorboard"
        if sink is self.text:
            return "log.txt"
        for tracker in self.trackers:
            if sink is tracker:
                return tracker.name
        return "the console"

    def _say(self, text: str) -> None:
        for screen in self.screens:
            screen.say(text)


def _words(problem: Exception) -> str:
    if isinstance(problem, OSError):
        return str(problem.strerror or problem)
    return f"{type(problem).__name__}: {problem}".partition("\n")[0]
