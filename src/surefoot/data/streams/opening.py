"""The tape of a run: built before its directory may be written, and opened by its sessions. Rank 0
records; all ranks read files.
"""

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from surefoot.checkpoint.filesystem import Disk
from surefoot.config.batch_size import Batching
from surefoot.config.behavior import STREAM_OF_ONE_RANK
from surefoot.config.durations import planned
from surefoot.config.paths import absolute_path, local_path
from surefoot.data.dataset_checks import check_samples
from surefoot.data.order import NOTHING_PASSED, Passed
from surefoot.data.streams.own_source import check_own_sources
from surefoot.data.streams.reader import HowToRead
from surefoot.data.streams.recorder import Recorder
from surefoot.data.streams.shards import not_of_checkpoint, recorded_head
from surefoot.data.streams.stream import Stream, as_stream, built_by_rank
from surefoot.data.streams.tape import Tape
from surefoot.data.streams.writer import is_unlocked
from surefoot.distributed.world import World
from surefoot.errors import ConfigError, DataError, Setting, SurefootError, error_of_dict

_VISIBLE_S = 5.0  # for which a network file system may hide new files
_ABANDONED_S = 3600.0
PREFIX = "surefoot-tape-"


def build_tape(
    settings: Any,
    data: Any,
    world: World,
    *,
    run_dir: Path | None,
    sizes: Batching,
    passed: Passed,
    behavior: int,
) -> Tape:
    """Return the tape of a run: the recorded one, read only, or a new one in a temporary directory.
    `passed` is what steps of other batch sizes have read. Collective.

    Raises `ConfigError` for a length in epochs if the stream declares no number of rows, and
    `DataError` if its first rows cannot be recorded, or differ when they are read again.
    """
    stream = as_stream(data.dataset)
    batch_size = sizes.batch_size
    length = settings.length
    seed = settings.seed
    planned_length = planned(length, samples_per_epoch=1, batch_size=1)
    if stream.samples is None and planned_length.in_epochs:
        raise ConfigError(
            "length-of-stream-unknown",
            problem=f"length = {length!r}: the number of rows of a stream is not known beforehand",
            remedy=[
                Setting("length", "1000 steps"),
                "declare the rows of an epoch: train_data=sf.data.Stream(source, samples=...)",
            ],
            setting="length",
            value=length,
        )
    how = how_to_read(stream, seed, world, behavior=behavior)
    tape = begin_tape(
        stream,
        directory_of(stream, run_dir),
        world,
        how=how,
        batch_size=batch_size,
        samples=stream.samples or passed.position(planned_length.steps, batch_size),
        workers=data.workers,
        passed=passed,
    )
    is_new = tape.is_live
    with ExitStack() as unless_complete:
        unless_complete.callback(tape.abandon)
        tape.say = partial(print, flush=True) if settings.console and world.is_main else None
        check_samples(tape.beginning(), seed=seed)
        if is_new:  # the run begins
            check_own_sources(tape, how, world)
        unless_complete.pop_all()
    return tape


def how_to_read(stream: Stream, seed: int, world: World, *, behavior: int) -> HowToRead:
    """Return how rank 0 reads the source of a stream. Raises `ConfigError` or `DataError` if it
    would read a rank's share instead.
    """
    if stream.start_method == "thread" and world.size > 1:
        raise ConfigError(
            "stream-thread-on-ranks",
            problem=f"start = 'thread' reads the source in the process of rank 0 of {world.size}",
            reason="a source that gives each rank its share would give a part of its rows",
            remedy=Setting("start", "spawn"),
            setting="start",
            value="thread",
            ranks=world.size,
        )
    # a run that began earlier goes on with a source that knows its rank
    is_one_rank = world.size > 1 and behavior >= STREAM_OF_ONE_RANK
    built = built_by_rank(stream.source)
    if is_one_rank and built is not None:
        raise DataError(
            "stream-built-by-rank",
            problem=f"the stream is a {built} that was built on rank {world.rank} of {world.size}",
            reason="it has already taken the share of its rank, and rank 0 alone reads it for all",
            remedy=f"give the function that builds it: lambda: {built}(...)",
            source=built,
        )
    return HowToRead(seed, is_one_rank)


def begin_tape(
    stream: Stream,
    run_tape: Path | None,
    world: World,
    *,
    how: HowToRead,
    batch_size: int,
    samples: int,
    workers: int,
    passed: Passed = NOTHING_PASSED,
) -> Tape:
    """Return the tape in the directory `run_tape`, read only, or a new one in a temporary
    directory, which rank 0 records. Collective.
    """
    record_in = partial(
        Recorder, stream, batch_size=batch_size, how=how, workers=workers, passed=passed
    )
    recorder: Recorder | None = None

    def begin() -> tuple[str, bool, int]:
        nonlocal recorder
        head = None if run_tape is None else recorded_head(run_tape)
        if head is not None:
            return str(run_tape), False, head
        if stream.directory is None:
            _remove_abandoned(Path(tempfile.gettempdir()))
            temporary = tempfile.mkdtemp(prefix=PREFIX)
        else:  # a directory that all machines see
            shared = absolute_path(local_path(stream.directory, setting="directory"))
            name = run_tape.name if run_tape is not None else ""
            temporary = str(shared / f"{PREFIX}{os.getpid()}-{name}")
        recorder = record_in(Path(temporary))
        recorder.saved_step = lambda: 0  # before a session opens the tape, nothing is dropped
        return temporary, True, batch_size

    name, is_live, head = of_main(world, begin)
    directory = Path(name)
    tape = Tape(stream, directory, head=head, samples=samples, is_live=is_live, passed=passed)
    tape.record_in = record_in
    if recorder is not None:
        tape.recorder = recorder
        tape.discard = weakref.finalize(tape, _end_temporary, recorder, directory, os.getpid())
    with ExitStack() as unless_visible:
        unless_visible.callback(tape.abandon)
        check_visible(directory, world)
        unless_visible.pop_all()
    return tape


def directory_of(stream: Stream, run_dir: Path | None) -> Path | None:
    """Return the directory of a run's tape, or None if the tape is temporary."""
    if stream.directory is not None:
        return absolute_path(local_path(stream.directory, setting="directory"))
    return None if run_dir is None else run_dir / "tape"


def open_tape(
    tape: Tape,
    world: World,
    *,
    run_dir: Path | None,
    steps: int,
    facts: Mapping[str, Any] | None,
    saved_step: Callable[[], int | None] | None,
    disk: Disk,
    say: Callable[[str], None],
) -> None:
    """Let rank 0 record behind the rows in the run's directory; `facts` describe the rows of the
    checkpoint. Collective.
    """
    directory = directory_of(tape.stream, run_dir) or tape.directory

    def begin() -> str:
        recorder = tape.recorder
        before = tape.directory
        moves = directory != before
        if recorder is not None and moves and facts is None and recorded_head(directory) is None:
            recorder.move_to(directory)
            shutil.rmtree(before, ignore_errors=True)
        elif recorder is None or moves:
            tape.close()
            if facts is not None and recorded_head(directory) is None:
                raise not_of_checkpoint(directory, rows=facts["rows"], known=0)
            recorder = tape.record_in(directory)
            tape.recorder = recorder
            tape.move_to(directory, is_live=True)
            tape.require(facts)
            recorder.cut_damaged(0 if facts is None else facts["rows"])
        recorder.writer.disk = disk
        recorder.saved_step = saved_step
        recorder.stop = tape.passed.position(steps, recorder.batch_size)
        declared = tape.stream.samples
        recorder.is_repeated = declared is not None and recorder.stop > declared
        return str(directory)

    of_main(world, begin)
    check_visible(directory, world)
    tape.move_to(directory, is_live=True)
    tape.say = say


def of_main(world: World, begin: Callable[[], Any]) -> Any:
    """Return what rank 0 returns, or raise its error on every rank."""
    returned = None
    problem = None
    if world.is_main:
        try:
            returned = begin()
        except SurefootError as failed:
            problem = failed
    described = None if problem is None else problem.to_dict()
    returned, described = world.from_main((returned, described))
    if described is not None:
        raise problem or error_of_dict(described)
    return returned


def check_visible(directory: Path, world: World) -> None:
    """Raise `DataError` if a rank does not see the tape that rank 0 writes. Collective."""
    description = directory / "tape.json"
    limit = time.monotonic() + (_VISIBLE_S if world.size > 1 else 0.0)
    is_visible = description.is_file()
    while not is_visible and time.monotonic() < limit:
        time.sleep(0.05)
        is_visible = description.is_file()
    for rank, rank_sees_it in enumerate(world.gathered(is_visible)):
        if not rank_sees_it:
            raise DataError(
                "stream-tape-invisible",
                problem=f"rank {rank} cannot see the tape {directory} that rank 0 writes",
                remedy="several machines need a directory that they share: sf.data.Stream(source,"
                " directory=...)",
                rank=rank,
                path=directory,
            )


def _remove_abandoned(directory: Path) -> None:
    """Remove the temporary tapes whose process was killed, at least an hour after their last
    shard.
    """
    for path in directory.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if path.is_symlink():
                continue
            is_old = time.time() - path.stat().st_mtime > _ABANDONED_S
            if is_old and is_unlocked(path):
                shutil.rmtree(path, ignore_errors=True)


def _end_temporary(recorder: Recorder, directory: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a process forked from this one
        with suppress(Exception):
            recorder.close()
        if directory.name.startswith(PREFIX):
            shutil.rmtree(directory, ignore_errors=True)
