"""Streams as splits: the first rows of a stream are recorded once, on a tape of their own, and are
the data of the split from then on.
"""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from surefoot.config.paths import absolute_path, local_path
from surefoot.data.streams.opening import begin_tape, check_visible, how_to_read, of_main
from surefoot.data.streams.own_source import check_own_sources
from surefoot.data.streams.shards import recorded_head
from surefoot.data.streams.stream import Stream, as_stream
from surefoot.data.streams.tape import Tape
from surefoot.data.streams.writer import TapeWriter
from surefoot.distributed.world import World
from surefoot.errors import ConfigError, DataError

_HEAD = 8  # rows that are compared between ranks


class TapedRows:
    """The first rows of a stream as a data set: `rows[index]` is a row of the tape."""

    def __init__(self, name: str, tape: Tape, directory: Path | None) -> None:
        self.name = name
        self.tape = tape
        self.directory = directory  # in which the tape belongs, once a session has begun
        declared = tape.samples
        recorded = tape.shards.look()
        has_ended = (tape.directory / "end.json").exists()
        if not tape.is_live and not has_ended and recorded < declared:
            raise ConfigError(
                "split-recorded-with-fewer-rows",
                problem=f"split {name!r} was recorded with {recorded:,} rows, and samples ="
                f" {declared:,}",
                reason="the rows of a split are recorded once, when its run begins",
                remedy=[f"set samples={recorded}", "start another run, which records more"],
                split=name,
                recorded=recorded,
                samples=declared,
            )
        self.samples = declared
        if not tape.wait(declared - 1):  # the stream has ended before
            self.samples = tape.length or 0
        note = (
            f"split {name!r}: the first {self.samples:,} rows of {tape.stream.name}, recorded once"
        )
        if self.samples < declared:
            note += f"; they are all that the stream gave, and samples = {declared:,}"
        self.reading_notes = (note,)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.samples:
            raise IndexError(
                f"row {index} is outside the {self.samples} rows of split {self.name!r}"
            )
        return self.tape[index]

    def open_in_run(self, world: World) -> None:
        """Move the tape into the run's directory, if it is not there. Collective."""
        directory = self.directory
        temporary = self.tape.directory
        if directory is None or directory == temporary:
            return

        def move() -> None:
            if recorded_head(directory) is None:
                limit_bytes = self.tape.stream.tape_bytes
                writer = TapeWriter(temporary, head=self.tape.head, limit_bytes=limit_bytes)
                writer.move_to(directory)
                writer.close()

        of_main(world, move)
        check_visible(directory, world)
        self.tape.move_to(directory, is_live=False)
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of rows, and the hash of all of them."""
        digest = self.tape.shards.entry_before(self.samples)[1]
        return {"samples": self.samples, "sha256": digest.hex()}


def taped_rows(
    source: Any,
    name: str,
    world: World,
    *,
    run_dir: Path | None,
    seed: int,
    behavior: int,
    say: Callable[[str], None] | None,
) -> TapedRows:
    """Return the rows of a split whose data are a stream: those on the run's tape, or those that
    the stream gives now. Collective.

    Raises `DataError` if the stream does not say how many rows it has for the split.
    """
    stream = as_stream(source)
    if stream.samples is None:
        raise DataError(
            "split-stream-without-end",
            problem=f"split {name!r} is the stream {stream.name}, and the number of its rows is not"
            " known",
            reason="a split is evaluated as a whole, so its first rows are recorded when a run"
            " begins",
            remedy="say how many: sf.Split(sf.data.Stream(data, samples=1000))",
            split=name,
        )
    how = how_to_read(stream, seed, world, behavior=behavior)
    directory = _directory_of(stream, name, run_dir)
    tape = begin_tape(
        stream,
        directory,
        world,
        how=how,
        batch_size=min(_HEAD, stream.samples),
        samples=stream.samples,
        workers=0,
    )
    with ExitStack() as unless_complete:
        unless_complete.callback(tape.abandon)
        if tape.recorder is not None:
            tape.recorder.stop = stream.samples
            tape.recorder.is_repeated = True  # no row is dropped
        tape.say = say
        is_new = tape.is_live
        tape.beginning()  # which refuses an empty stream
        rows = TapedRows(name, tape, directory)
        if is_new:
            check_own_sources(tape, how, world)
        tape.close()
        tape.is_live = False
        unless_complete.pop_all()
    return rows


def _directory_of(stream: Stream, name: str, run_dir: Path | None) -> Path | None:
    if stream.directory is not None:
        shared = absolute_path(local_path(stream.directory, setting="directory"))
        return shared / f"split-{name}"
    return None if run_dir is None else run_dir / "tapes" / f"split-{name}"
