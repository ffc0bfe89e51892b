"""The files of a tape, without a run: their order on the disk, their hashes, what is dropped, and
who may append. (1 s)
"""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rank_processes import Ranks
from refused import refused
from stream_runs import Disk, build, finite, row
from surefoot.data.loader import StoppedError
from surefoot.data.streams import reader
from surefoot.data.streams import tape as tape_module
from surefoot.data.streams.reader import COMPARED, HowToRead, SourcePosition
from surefoot.data.streams.recorder import Recorder
from surefoot.data.streams.rows import decode, encode
from surefoot.data.streams.shards import ENTRY, ZERO, DroppedError, Shards, chained, shards_in
from surefoot.data.streams.stream import Stream
from surefoot.data.streams.tape import Tape
from surefoot.data.streams.writer import TapeWriter
from surefoot.errors import ConfigError, DataError
from surefoot.seeding import untouched
from waiting import HangLimit, wait_until

BATCH = 8  # rows of a step
HOW = HowToRead(seed=0, is_one_rank=False)
ROWS = 100


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Closes what a test opens."""
    writers = list[TapeWriter]()
    begin = TapeWriter._begin_in

    def noted(writer: TapeWriter, directory: Path) -> None:
        writers.append(writer)
        begin(writer, directory)

    monkeypatch.setattr(TapeWriter, "_begin_in", noted)
    yield
    for writer in writers:
        writer.close()


def append(writer: TapeWriter, rows: range) -> None:
    for number in rows:
        encoded = encode([number, bytes(150)])
        entry = ENTRY.pack(writer.end + len(encoded), chained(writer.digest, encoded))
        writer.append(memoryview(entry), memoryview(encoded))


def recorded(
    directory: Path, *, limit_bytes: int = 8_000, disk: Disk | None = None, rows: int = ROWS
) -> TapeWriter:
    writer = TapeWriter(directory, head=BATCH, limit_bytes=limit_bytes)
    writer.disk = disk or writer.disk
    append(writer, range(rows))
    return writer


def rows_on(directory: Path) -> list[int]:
    shards = Shards(directory)
    return [decode(shards.row(number))[0] for number in range(shards.look())]


def tape_of(directory: Path, *, rows: int = ROWS, is_live: bool = False) -> Tape:
    return Tape(Stream(finite(rows)), directory, head=BATCH, samples=rows, is_live=is_live)


# --- the disk -------------------------------------------------------------------------------------


def test_the_rows_of_the_first_step_have_a_shard_of_their_own_however_they_arrive(
    tmp_path: Path,
) -> None:
    writer = TapeWriter(tmp_path, head=BATCH, limit_bytes=8_000_000)
    for rows in (range(5), range(5, 20), range(20, 30)):
        entries = b""
        together = b""
        digest = writer.digest
        for number in rows:
            together += (encoded := encode([number, bytes(150)]))
            digest = chained(digest, encoded)
            entries += ENTRY.pack(writer.end + len(together), digest)
        writer.append(memoryview(entries), memoryview(together))
    assert shards_in(tmp_path) == [0, BATCH]
    assert rows_on(tmp_path) == list(range(30))


def test_at_every_moment_each_entry_has_its_row(tmp_path: Path) -> None:
    class Looking(Disk):
        def append(self, handle: int, data: memoryview) -> None:
            super().append(handle, data)
            shards = Shards(tmp_path)
            for number in range(max(0, shards.look() - 2), shards.rows):
                assert decode(shards.row(number))[0] == number

    assert recorded(tmp_path, disk=Looking()).rows == ROWS


def test_the_end_is_written_behind_rows_that_are_on_the_disk(tmp_path: Path) -> None:
    ends_at_flush = []

    class Looking(Disk):
        def flush(self, handle: int) -> None:
            ends_at_flush.append((tmp_path / "end.json").exists())

    writer = recorded(tmp_path, disk=Looking())
    ends_at_flush.clear()
    writer.finish()
    assert ends_at_flush == [False, False]
    tape = tape_of(tmp_path)
    assert (tape.wait(ROWS - 1), tape.wait(ROWS), tape.length) == (True, False, ROWS)
    writer.close()
    last = max(tmp_path.glob("rows-*.bin"))
    last.write_bytes(last.read_bytes()[:-1] + b"\x01")
    TapeWriter(tmp_path, head=BATCH, limit_bytes=8_000).cut_damaged(0)
    assert not (tmp_path / "end.json").exists(), "the cut rows are read again"


def test_every_flipped_byte_of_a_tape_is_an_error(tmp_path: Path) -> None:
    recorded(tmp_path).close()
    assert Shards(tmp_path).intact() == (ROWS, None)
    for file in sorted(tmp_path.glob("rows-*")):
        intact = file.read_bytes()
        for at in range(0, len(intact), max(1, len(intact) // 5)):
            file.write_bytes(intact[:at] + bytes([intact[at] ^ 4]) + intact[at + 1 :])
            assert Shards(tmp_path).intact()[1] is not None, (file, at)
            if file.suffix == ".bin":
                with refused("stream-tape-damaged", DataError, path=file):
                    rows_on(tmp_path)
        file.write_bytes(intact)


def test_a_second_writer_goes_on_behind_the_last_row_and_cuts_at_damage(tmp_path: Path) -> None:
    recorded(tmp_path, rows=50).close()
    newest = max(tmp_path.glob("rows-*.bin"))
    newest.write_bytes(newest.read_bytes() + b"torn")
    with max(tmp_path.glob("rows-*.idx")).open("ab") as entries:
        entries.write(bytes(ENTRY.size - 1))  # a torn entry
    writer = TapeWriter(tmp_path, head=BATCH, limit_bytes=8_000)
    assert writer.rows == 50
    append(writer, range(50, 60))
    writer.close()
    assert Shards(tmp_path).intact() == (60, None)
    last = max(tmp_path.glob("rows-*.bin"))
    last.write_bytes(last.read_bytes()[:-1] + b"\x01")
    writer = TapeWriter(tmp_path, head=BATCH, limit_bytes=8_000)
    assert "row 59 " in str(writer.cut_damaged(40))
    append(writer, range(59, 70))
    writer.close()
    assert Shards(tmp_path).intact() == (70, None)
    assert rows_on(tmp_path) == list(range(70))


def test_a_kill_between_the_two_files_of_a_shard_leaves_none_of_them(tmp_path: Path) -> None:
    recorded(tmp_path, rows=20).close()
    for half in (
        "rows-000000000012.bin",
        "rows-000000000020.bin",
    ):  # of a shard that was dropped, and of a new one
        (tmp_path / half).touch()
    append(TapeWriter(tmp_path, head=BATCH, limit_bytes=8_000), range(20, 25))
    assert not (tmp_path / "rows-000000000012.bin").exists()
    assert rows_on(tmp_path) == list(range(25))


def open_writer(directory: str) -> str:
    try:
        TapeWriter(Path(directory), head=BATCH, limit_bytes=8_000)
    except ConfigError as refused:
        return refused.code
    return ""


def test_two_processes_never_append_to_one_tape(ranks: Ranks, tmp_path: Path) -> None:
    writer = recorded(tmp_path, rows=10)
    assert open_writer(str(tmp_path)) == "stream-tape-locked"
    assert ranks(1, open_writer, directory=str(tmp_path)) == ["stream-tape-locked"]
    writer.close()
    assert ranks(1, open_writer, directory=str(tmp_path)) == [""]


@pytest.mark.skipif(sys.platform == "win32", reason="fcntl")
@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (errno.EAGAIN, "stream-tape-locked"),
        (errno.EACCES, "stream-tape-locked"),  # what some systems say of a lock
        (errno.ENOLCK, ""),
        (errno.EOPNOTSUPP, ""),
    ],
)
def test_only_a_file_system_without_locks_goes_without_one(
    error: int, refused: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("fcntl.lockf", fail)
    assert open_writer(str(tmp_path)) == refused


def test_a_larger_batch_size_keeps_the_rows_of_a_damaged_tape(tmp_path: Path) -> None:
    recorded(tmp_path, rows=30).close()
    last = max(tmp_path.glob("rows-*.bin"))
    last.write_bytes(last.read_bytes()[:-1] + b"\x01")
    run = Recorder(Stream(finite(ROWS)), tmp_path, batch_size=50, how=HOW, workers=0)
    run.cut_damaged(BATCH)
    rows = run.writer.rows
    run.close()
    assert rows == 29


# --- the budget -----------------------------------------------------------------------------------


def dropped_by_run(
    directory: Path, saved_step: Any, *, demanded: int = ROWS
) -> tuple[Recorder, Tape]:
    """A full tape of a run that demands rows up to `demanded`."""
    stream = Stream(finite(ROWS))
    stream.tape_bytes = 4_000
    run = Recorder(stream, directory, batch_size=BATCH, how=HOW, workers=0)
    append(run.writer, range(ROWS))
    run.saved_step = saved_step
    run.demanded = demanded
    run._make_room()
    return run, tape_of(directory)


def test_dropped_rows_are_those_before_a_step_and_this_step_is_named(tmp_path: Path) -> None:
    run, tape = dropped_by_run(tmp_path, lambda: 9)
    kept = tape.first_kept()
    first = tape.first_step(BATCH)
    assert 2 * BATCH < kept <= 9 * BATCH
    assert kept % BATCH, "a step is there in part"
    assert first == -(-kept // BATCH)
    tape.refuse_dropped(first, first + 1, BATCH)
    tape.refuse_dropped(0, 0, BATCH)  # the first step's rows stay
    with refused("stream-steps-dropped", DataError, step=1, first=first):
        tape.refuse_dropped(0, 1, BATCH)
    with refused("stream-steps-dropped", DataError, step=first - 1, first=first):
        tape.refuse_dropped(first - 1, first + 1, BATCH)
    assert [decode(tape.shards.row(number))[0] for number in (0, BATCH - 1, kept, ROWS - 1)] == [
        0,
        7,
        kept,
        99,
    ]
    for number in (BATCH, kept - 1):
        with refused("stream-row-dropped", DroppedError, row=number, first=kept):
            tape[number]
    assert sum(file.stat().st_size for file in tmp_path.glob("rows-*")) == pytest.approx(
        run.writer.size_bytes, abs=500
    )


def test_a_second_epoch_needs_rows_that_were_not_dropped(tmp_path: Path) -> None:
    run, tape = dropped_by_run(tmp_path / "dropped", lambda: 9)
    run.writer.finish()
    with refused("stream-repeats-dropped-rows", DataError, rows=ROWS, first=tape.first_kept()):
        tape.end_of_stream(ROWS)
    recorded(tmp_path / "complete").finish()
    assert tape_of(tmp_path / "complete").end_of_stream(ROWS) == ROWS


def test_an_epoch_of_declared_rows_waits_for_no_row_behind_it(tmp_path: Path) -> None:
    recorded(tmp_path, rows=24)
    tape = Tape(Stream(finite(24), samples=24), tmp_path, head=BATCH, samples=24, is_live=False)
    assert [tape.end_of_stream(last) for last in (7, 23, 24, 70)] == 4 * [24]


@pytest.mark.parametrize(
    ("saved_step", "needed_from"),
    [(lambda: 3, 3 * BATCH), (lambda: None, 0), (None, ROWS - 9 * BATCH)],
    ids=["checkpoint", "no checkpoint yet", "no checkpoints"],
)
def test_no_row_is_dropped_that_a_resume_or_a_late_rank_reads(
    saved_step: Any, needed_from: int, tmp_path: Path
) -> None:
    _, tape = dropped_by_run(tmp_path, saved_step)
    assert tape.first_kept() <= needed_from
    assert tape.first_kept() > 0 or needed_from <= 3 * BATCH


def test_a_full_tape_wants_a_checkpoint_that_releases_rows(tmp_path: Path) -> None:
    run, _ = dropped_by_run(tmp_path, lambda: 0)
    assert run.wants_save
    run.saved_step = lambda: 12  # the rows are released already
    assert not run.wants_save
    run.saved_step, run.demanded = lambda: 0, BATCH  # the current step still needs the oldest shard
    assert not run.wants_save


def test_a_full_tape_still_takes_the_row_that_a_step_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "_is_full", lambda recorder: True)
    monkeypatch.setattr(reader, "_SENT_BYTES", 1)
    tape = tape_of(tmp_path, is_live=True)
    limit = HangLimit()
    tape.recorder = Recorder(tape.stream, tmp_path, batch_size=BATCH, how=HOW, workers=0)
    tape.stop_requested = lambda: limit.is_over
    try:
        assert tape.wait(row=20)
        assert tape.shards.look() == 21
    finally:
        tape.close()


def test_a_source_that_is_faster_than_the_run_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded: 1,000 bytes and a row wait, and what is being sent; not the whole source."""

    class SlowPipe:
        def send_bytes(self, message: bytes) -> None:
            assert wait_until(lambda: not source.is_alive() or bool(outbox.changed._waiters))  # type: ignore[attr-defined]
            waiting.append(outbox.waiting_bytes)

    def put_all() -> None:
        for _ in range(200):
            outbox.put("r", bytes(300))

    monkeypatch.setattr(reader, "_WAITING_BYTES", 1_000)
    monkeypatch.setattr(reader, "_SENT_BYTES", 1)
    waiting = list[int]()
    source = threading.Thread(target=put_all)
    outbox = reader._Outbox(SlowPipe(), 0, ZERO)  # type: ignore[arg-type]
    source.start()
    source.join()
    outbox.close()
    assert len(waiting) == 200
    assert 900 < max(waiting) < 1_000 + 300


def test_a_disk_that_fails_is_an_error_and_not_the_end_of_the_stream(tmp_path: Path) -> None:
    class Full(Disk):
        def append(self, handle: int, data: memoryview) -> None:
            raise OSError(28, "No space left on device")

    tape = tape_of(tmp_path, is_live=True, rows=20)
    tape.recorder = Recorder(tape.stream, tmp_path, batch_size=BATCH, how=HOW, workers=0)
    tape.recorder.writer.disk = Full()
    looks = itertools.count()
    tape.stop_requested = lambda: next(looks) > 1_000  # it waits for a row that never comes
    try:
        with refused("stream-tape-not-written", DataError, row=0):
            tape.wait(row=0)
    finally:
        tape.close()


# --- a request to stop ----------------------------------------------------------------------------


def test_behind_a_stop_no_row_is_appended_and_every_reader_stops_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()

    def sleep(seconds: float) -> None:
        assert next(looks) < 100, "it waits for a row that never comes"
        time.sleep(seconds)

    def stalling() -> Iterator[Any]:
        yield from map(row, range(10))
        threading.Event().wait()

    tape = Tape(Stream(stalling), tmp_path, head=BATCH, samples=ROWS, is_live=True)
    tape.recorder = Recorder(tape.stream, tmp_path, batch_size=BATCH, how=HOW, workers=0)
    other = tape_of(tmp_path, is_live=True)  # of another rank
    try:
        assert tape.wait(row=9)
        monkeypatch.setattr(
            tape_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
        )
        tape.stop_requested = lambda: True
        with pytest.raises(StoppedError):
            tape.wait(row=10)
        assert other.wait(row=9)  # it arrived before
        with pytest.raises(StoppedError):
            other.wait(row=10)
    finally:
        tape.close()
    assert not (tmp_path / "end.json").exists()
    Recorder(
        tape.stream, tmp_path, batch_size=BATCH, how=HOW, workers=0
    ).close()  # the next session
    assert not (tmp_path / "failed.json").exists()


# --- the checkpoint and the source ----------------------------------------------------------------


def test_a_tape_of_other_rows_or_of_fewer_rows_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path / "mine").close()
    writer = recorded(tmp_path / "other", rows=60)
    writer.append(  # row 60 differs
        memoryview(ENTRY.pack(writer.end + 1, chained(writer.digest, b"x"))), memoryview(b"x")
    )
    append(writer, range(61, ROWS))
    writer.close()
    mine, other = tape_of(tmp_path / "mine"), tape_of(tmp_path / "other")
    for step in (0, 7, 12):
        mine.require(mine.facts(step, BATCH))
    other.require(mine.facts(7, BATCH))
    code = "stream-tape-not-of-checkpoint"
    with refused(code, DataError, rows=64, known=100):
        other.require(mine.facts(8, BATCH))
    recorded(tmp_path / "short", rows=50).close()
    with refused(code, DataError, rows=56, known=50):
        tape_of(tmp_path / "short").require(mine.facts(7, BATCH))
    assert mine.fingerprint()["sha256"] == chained(ZERO, mine.shards.row(0)).hex()
    assert (
        mine.facts(0, BATCH)["rows"] == BATCH
    )  # the first step's rows are compared by a resume before step 1


class Notes:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def put(self, kind: str, message: bytes) -> None:
        self.texts.append(message.decode())


class Forgetful:
    """A source whose states are wrong, but for that of its beginning."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        return map(row, itertools.count(self.position))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Skipped:
    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __iter__(self) -> Iterator[Any]:
        return map(row, itertools.count(self.first))

    def skip(self, n: int) -> Skipped:
        return Skipped(n)


@pytest.mark.parametrize(
    ("source", "note"),
    [
        (finite(ROWS), "its first 40 rows were read again and discarded"),
        (Forgetful(), "its first 40 rows were read again and discarded"),
        (Skipped(), f"its source has skipped {40 - COMPARED} rows"),
        (
            lambda: (row(number if number < 39 else -1) for number in itertools.count()),
            "WARNING: the source gives",
        ),
        (finite(39), "WARNING: the source gives"),
    ],
    ids=["again", "wrong state", "skip", "other row", "shorter"],
)
def test_the_source_is_compared_with_the_last_rows_of_the_tape(source: Any, note: str) -> None:
    stream = Stream(source)
    notes = Notes()
    tail = {number: chained(b"", encode(row(number))) for number in range(40 - COMPARED, 40)}
    rows = reader._advanced(stream, 40, tail, [[30, {"position": 33}]], notes)  # type: ignore[arg-type]
    assert note in notes.texts[0]
    if "WARNING" not in note:
        assert next(rows)["name"] == "row 40"


@pytest.mark.parametrize(
    ("samples", "last"), [(50, b"e"), (None, b"x")], ids=["declared", "broken"]
)
def test_the_reader_counts_on_behind_the_tape(
    samples: int | None, last: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Iterator[Any]:
        yield from map(row, range(60))
        raise OSError("broken")

    for module, name in ((reader, "begin_process"), (reader.torch, "set_num_threads")):
        monkeypatch.setattr(module, name, lambda *_, **__: None)  # in this process
    own, other = multiprocessing.Pipe(duplex=False)
    with untouched():
        position = SourcePosition(40, 0, ZERO, tail={}, states=[], head=BATCH)
        reader.read_source(Stream(broken, samples=samples), other, os.getpid(), HOW, position)
    other.close()
    messages = list[bytes]()
    with suppress(EOFError):
        while True:
            messages.append(own.recv_bytes())
    rows = sum(
        int.from_bytes(message[1:5], "little") for message in messages if message[:1] == b"r"
    )
    assert rows == (samples or 60) - 40
    assert messages[-1][:1] == last
    if last == b"x":
        error = json.loads(messages[-1][1:])["error"]
        assert (error["code"], error["fields"]) == ("stream-row-failed", {"row": 60})


def test_the_writer_of_a_fork_is_left_alone(tmp_path: Path) -> None:
    run, _ = dropped_by_run(tmp_path, None)
    run.pid = os.getpid() + 1  # as in a forked process
    run.close()
    assert run.writer.lock is not None


def test_an_empty_stream_is_refused_by_name() -> None:
    with refused("stream-empty", DataError):
        build(None, finite(0))
