"""Where the records of a sitting go: the console, metrics.jsonl and TensorBoard. One that cannot take them ends no run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from surefoot.checkpoint.format import Contents
from surefoot.directory import RunDirectory
from surefoot.record import Record, Sink
from surefoot.sinks import JsonLines, Screen, TensorBoard


class Journal:
    """All that take records; with `open` those of a run's directory too."""

    def __init__(self, console: Screen | None) -> None:
        self.console = console
        self.sinks: list[Sink] = [console] if console is not None else []
        self.metrics: JsonLines | None = None
        self.failing: list[Sink] = []  # those that have been warned of

    def open(self, directory: RunDirectory, *, step: int, found: Contents | None) -> None:
        """Go on with the files of a directory after `step` steps; `found` is the checkpoint that they are gone on from."""
        self.metrics = JsonLines(directory.metrics)
        self.sinks += [self.metrics, TensorBoard(directory.path / "tensorboard", from_step=step)]
        if found is None:
            return
        if found.log is not None and not self.metrics.holds(*found.log):
            self._say(f"warning: {directory.metrics} is not what it was at step {found.step}: records were lost")
        self.write({"kind": "resumed", "step": step})

    def write(self, record: Record) -> None:
        """Hand a record to all that take them."""
        self._hand(record, self.sinks)

    def show(self, record: Record) -> None:
        """Hand a record of what is kept elsewhere in the directory to all but the file of records."""
        self._hand(record, [sink for sink in self.sinks if sink is not self.metrics])

    def _hand(self, record: Record, sinks: Sequence[Sink]) -> None:
        for sink in sinks:
            try:
                sink.write(record)
            except OSError as problem:
                self._warn_of(sink, problem)
            else:
                self.failing = [other for other in self.failing if other is not sink]

    def close(self) -> None:
        """Close all of them, whichever fails."""
        with ExitStack() as last_first:
            for sink in reversed(self.sinks):
                last_first.callback(self._close, sink)

    def state(self) -> tuple[int, str] | None:
        """What a checkpoint notes of the file of records; None where there is none."""
        return None if self.metrics is None else self.metrics.state()

    def _close(self, sink: Sink) -> None:
        try:
            sink.close()
        except OSError as problem:
            self._say(f"WARNING: records are missing in {_name(sink)}: {problem.strerror or problem}")

    def _warn_of(self, sink: Sink, problem: OSError) -> None:
        if sink not in self.failing:
            self.failing.append(sink)
            self._say(f"WARNING: records do not reach {_name(sink)}: {problem.strerror or problem}; training goes on")

    def _say(self, text: str) -> None:
        if self.console is not None:
            self.console.say(text)


def _name(sink: Sink) -> str:
    return {JsonLines: "metrics.jsonl", TensorBoard: "tensorboard"}.get(type(sink), "the console")
