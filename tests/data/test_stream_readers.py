"""Who reads the source of a stream: how this process starts and ends, and what it sees of the ranks.
About 10 s of CPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

import stream_runs
import surefoot as sf
from rank_processes import Ranks
from refused import refused
from stated import lines_naming, numbers_in
from stream_runs import build, endless, row, train
from surefoot.data.streams.one_rank import as_one_rank
from surefoot.data.streams.shards import Shards
from surefoot.errors import DataError
from waiting import wait_until

ROWS = 40
PLAIN = {"decode_fn": lambda recorded: (recorded["x"], recorded["y"])}
SHORT: dict[str, Any] = {"length": "5 steps", "check_state": False, "stream": PLAIN}


# --- how it ends ----------------------------------------------------------------------------------


def has_ended(process: str) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"  # until the system has awaited it


def crash() -> None:
    os.kill(os.getpid(), signal.SIGUSR2)  # SIGSEGV would print a traceback here


def leave() -> None:
    os._exit(3)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "code", "fields"),
    [
        (be_killed, "stream-reader-killed", {"signal": "SIGKILL"}),
        (crash, "stream-reader-crashed", {"signal": "SIGUSR2"}),
        (leave, "stream-reader-exited", {"status": 3}),
        (sys.exit, "stream-row-failed", {"row": 20}),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_reader_that_ends_is_named_although_its_children_hold_the_pipe(
    end: Any, code: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    child = tmp_path / "child"

    def ending() -> Iterator[Any]:
        # a child that no hook of Python sees, as a library starts it
        own = ctypes.CDLL(None).fork()
        if own == 0:
            while True:
                signal.pause()
        child.write_text(str(own))
        yield from map(row, range(20))
        end()

    with refused(code, DataError, **fields):
        train(build(tmp_path / "run", ending, **SHORT))
    assert has_ended(child.read_text())


def test_a_pool_that_decodes_rows_ends_with_the_run(tmp_path: Path) -> None:
    def shell() -> Iterator[Any]:
        process = subprocess.Popen(["sleep", "600"])
        (tmp_path / str(process.pid)).touch()
        yield from endless()

    train(build(tmp_path / "run", shell, **SHORT))
    (child,) = [path.name for path in tmp_path.iterdir() if path.name.isdigit()]
    assert has_ended(child)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_in_a_session_of_its_own_is_named_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def daemon() -> Iterator[Any]:
        process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (tmp_path / str(process.pid)).touch()
        yield from endless()

    try:
        train(build(None, daemon, console=True, **SHORT))
    finally:
        (child,) = [path.name for path in tmp_path.iterdir() if path.name.isdigit()]
        os.kill(int(child), signal.SIGKILL)
    assert f"process {child} (sleep)" in capsys.readouterr().out


# --- how it starts --------------------------------------------------------------------------------


STARTS = [
    "fork",
    "thread",
    pytest.param("spawn", marks=pytest.mark.slow),  # imports torch
]


@pytest.mark.parametrize("start", STARTS)
def test_every_start_method_records_the_same_tape_and_goes_on_after_a_kill(
    start: str, ranks: Ranks, tmp_path: Path
) -> None:
    expected = train(build(tmp_path / "auto", **SHORT))
    run_dir = tmp_path / "run"
    spec = {"run_dir": str(run_dir), "pass": 5, "stream": {"start": start, "decode_fn": None}}
    place = ranks.start(1, plain_session, spec=spec)
    (outcome,) = ranks.outcomes(place)
    assert outcome.status == -signal.SIGKILL, outcome.text
    changes = SHORT | {"stream": PLAIN | {"start": start}}
    resumed = train(build(run_dir, **changes))
    before = [json.loads(line) for line in run_dir.with_suffix(".ids").read_text().splitlines()]
    together = {each[0]: each for each in before + resumed}
    assert list(together.values()) == expected
    tapes = [Shards(tmp_path / name / "tape").entry_before(ROWS) for name in ("auto", "run")]
    assert tapes[0] == tapes[1]


def plain_session(spec: dict[str, Any]) -> None:
    """A session of `stream_runs`, killed in a pass, over rows of this module."""
    spec = spec | {"changes": {"length": "5 steps"}}
    spec["stream"] = PLAIN | {"start": spec["stream"]["start"]}
    stream_runs.session(spec, source=endless)


def test_a_source_that_cannot_be_sent_to_a_spawned_process_is_refused(tmp_path: Path) -> None:
    def inside() -> Iterator[Any]:
        return endless()

    with refused("stream-source-not-picklable", DataError, setting="start", value="spawn"):
        build(tmp_path / "run", inside, stream={"start": "spawn"})


class Exiting:
    """A script without `if __name__ == "__main__":` ends like this in a spawned process."""

    def __iter__(self) -> Iterator[Any]:
        return endless()

    def __reduce__(self) -> Any:
        return os._exit, (1,)


@pytest.mark.slow
def test_a_spawned_process_that_fails_to_import_the_script_says_what_to_write() -> None:
    with refused("stream-reader-exited", DataError, status=1, row=0, start="spawn") as caught:
        build(None, Exiting(), stream={"start": "spawn"})
    assert '__name__ == "__main__"' in str(caught.value.reason)


def test_an_unknown_start_is_refused() -> None:
    with refused("setting-out-of-range", setting="start", value="forkserver"):
        sf.data.Stream(endless, start="forkserver")


@pytest.mark.parametrize("kind", ["random", "numpy.random", "torch"])
def test_a_source_that_draws_is_not_read_by_a_thread(kind: str) -> None:
    draws = {"random": stream_runs.random.random, "numpy.random": np.random.rand, "torch": drawn}

    def drawing() -> Iterator[Any]:
        for each in endless():
            draws[kind]()
            yield each

    with refused("stream-thread-draws", DataError, generator=kind, setting="start"):
        build(None, drawing, stream={"start": "thread"})


def drawn() -> Any:
    return torch.rand(1)


def test_a_thread_whose_source_waits_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.data.streams.source_reader._END_S", 0.01)
    end = threading.Event()

    def waiting() -> Iterator[Any]:
        yield from map(row, range(30))
        end.wait()

    changes = SHORT | {"stream": PLAIN | {"start": "thread"}, "stop_after": "2 steps"}
    try:
        train(build(tmp_path / "run", waiting, console=True, **changes))
    finally:
        end.set()
    assert len(lines_naming(capsys.readouterr().out, "note: ", " thread ")) == 1


def test_a_run_without_a_console_warns_of_a_first_row_that_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.data.streams.tape._START_S", 0.0)
    monkeypatch.setattr("warnings.warn", lambda text, **_: (tmp_path / "warned").write_text(text))

    def late() -> Iterator[Any]:
        wait_until((tmp_path / "warned").exists)
        yield from endless()

    build(None, late)
    text = (tmp_path / "warned").read_text()
    assert numbers_in(text.splitlines()[0]) == [0]  # seconds without a row
    assert 'start="spawn"' in text


# --- what it sees of the ranks --------------------------------------------------------------------


def test_the_variables_of_every_launcher_are_those_of_one_process() -> None:
    launched = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "SLURM_PROCID": "3", "A": "b"}
    assert as_one_rank(launched) == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "SLURM_PROCID": "0",
    }


def by_environment() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def by_torch() -> tuple[int, int]:
    dist.barrier()  # a collective of the source has this process alone
    assert get_worker_info() is None
    return dist.get_rank(), dist.get_world_size()


def by_guarded_torch() -> tuple[int, int]:
    return by_torch() if dist.is_initialized() else (0, 1)


class Shared(IterableDataset[Any]):
    """Rows that the ranks share among themselves, as sources for DDP are written."""

    def __init__(self, place: Any) -> None:
        self.place = place

    def __iter__(self) -> Iterator[Any]:
        rank, ranks = self.place()
        return map(row, range(rank, 4 * ROWS, ranks))


def names_on_tape(run_dir: Path) -> list[str]:
    from surefoot.data.streams.rows import decode

    shards = Shards(run_dir / "tape")
    assert shards.look() >= ROWS
    return [decode(shards.row(number))["name"] for number in range(ROWS)]


class Logged(IterableDataset[Any]):
    """All rows, whatever the rank, which it knows for a log."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        return endless()


class HandedOutOnce:
    """Rows of a queue that all processes share: each row is handed out once."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __iter__(self) -> Iterator[Any]:
        import fcntl

        while True:
            with self.file.open("r+b") as counter:
                fcntl.flock(counter, fcntl.LOCK_EX)
                number = len(counter.read())
                counter.write(b".")
            yield row(number)


def on_rank(run_dir: str | None, kind: str, **changes: Any) -> str:
    """Train on this rank; return the code of the error, or ""."""
    rank, ranks = by_environment()
    settings = SHORT | changes
    if kind == "vouched for":
        settings["stream"] = PLAIN | {"same_on_ranks": True}
    sources = {
        "environment": Shared(by_environment),
        "torch": Shared(by_torch),
        "guarded": Shared(by_guarded_torch),
        "fixed": Shared(lambda: (rank, ranks)),
        "vouched for": Shared(lambda: (rank, ranks)),
        "own order": Shared(lambda: (int.from_bytes(os.urandom(4), "little") % ROWS, 1)),
        "logged": Logged(rank),
        "handed out once": HandedOutOnce(Path(f"{run_dir}.queue")),
        "built": stand_in("litdata", "StreamingDataset"),
        "built by a function": lambda: iter(stand_in("litdata", "StreamingDataset")),
        "spawned": stream_runs.endless,
    }
    try:
        train(build(None if run_dir is None else Path(run_dir), sources[kind], **settings))
    except sf.SurefootError as problem:
        return problem.code or str(problem)
    return ""


def stand_in(package: str, name: str) -> Any:
    """A data set of a package that need not be installed, which asks for its rank when it is
    built.
    """

    def build_it(self: Any) -> None:
        self.rank, self.ranks = by_environment()

    def rows(self: Any) -> Iterator[Any]:
        return map(row, range(self.rank, 4 * ROWS, self.ranks))

    body = {"__init__": build_it, "__iter__": rows, "__module__": f"{package}.streaming.dataset"}
    kind = type(name, (IterableDataset,), body)
    module = ModuleType(package)
    setattr(module, name, kind)
    return kind()


@pytest.mark.parametrize(
    "kind",
    [
        "torch",
        "built by a function",
        pytest.param("environment", marks=pytest.mark.slow),
        pytest.param("guarded", marks=pytest.mark.slow),
    ],
)
def test_a_source_that_shares_its_rows_among_ranks_is_read_whole(
    kind: str, ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(2, on_rank, run_dir=str(tmp_path / "run"), kind=kind) == ["", ""]
    assert names_on_tape(tmp_path / "run") == [f"row {number}" for number in range(ROWS)]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("fixed", "stream-split-by-rank"),
        ("built", "stream-built-by-rank"),
        pytest.param("own order", "", marks=pytest.mark.slow),
        pytest.param("vouched for", "", marks=pytest.mark.slow),
    ],
)
def test_a_source_that_the_script_has_split_is_refused(
    kind: str, code: str, ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(2, on_rank, run_dir=str(tmp_path / "run"), kind=kind) == [code, code]


def test_no_other_rank_takes_a_row_from_a_source_that_hands_out_each_row_once(
    ranks: Ranks, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.with_suffix(".queue").touch()
    assert ranks(2, on_rank, run_dir=str(run_dir), kind="handed out once") == ["", ""]
    assert names_on_tape(run_dir) == [f"row {number}" for number in range(ROWS)]


class Permuted:
    """Rows in an order that its own generator draws."""

    def __init__(self, seed: int | None) -> None:
        self.generator = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[Any]:
        return map(row, self.generator.permutation(ROWS).tolist())


@pytest.mark.parametrize("seed", [None, 0])
def test_an_order_without_a_seed_is_noted(
    seed: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    build(None, Permuted(seed), console=True)
    notes = lines_naming(capsys.readouterr().out, "note: ", "(source.generator)")
    assert len(notes) == (seed is None)


@pytest.mark.slow
def test_a_rank_says_why_it_has_read_its_own_source(ranks: Ranks, tmp_path: Path) -> None:
    place = ranks.start(2, on_rank, run_dir=str(tmp_path / "run"), kind="logged", console=True)
    first, other = ranks.outcomes(place)
    (note,) = lines_naming(first.text, "note: ", " rank 1 ", " rank 0 ", " source.rank,")
    assert note.rpartition(": ")[2].split()[-1] == "same"
    assert lines_naming(other.text, "source.rank") == []


@pytest.mark.slow
def test_a_run_of_one_process_over_a_built_data_set_needs_its_function_on_two_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    run_dir = str(tmp_path / "run")
    assert ranks(1, on_rank, run_dir=run_dir, kind="built", stop_after="2 steps") == [""]
    code = "stream-built-by-rank"
    assert ranks(2, on_rank, run_dir=run_dir, kind="built") == [code, code]
    assert ranks(2, on_rank, run_dir=run_dir, kind="built by a function") == ["", ""]
    assert names_on_tape(tmp_path / "run") == [f"row {number}" for number in range(ROWS)]


def test_a_thread_reads_no_stream_on_several_ranks(ranks: Ranks) -> None:
    changes = {"stream": {"start": "thread"}}
    code = "stream-thread-on-ranks"
    assert ranks(2, on_rank, run_dir=None, kind="spawned", **changes) == [code, code]


@pytest.mark.slow
def test_a_spawned_process_sees_one_rank_too(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, spawned_on_rank, run_dir=str(tmp_path / "run")) == ["", ""]
    assert names_on_tape(tmp_path / "run") == [f"row {number}" for number in range(ROWS)]


def spawned_on_rank(run_dir: str) -> str:
    stream = {"start": "spawn", "decode_fn": PLAIN["decode_fn"]}
    try:
        train(build(Path(run_dir), Shared(by_torch), **(SHORT | {"stream": stream})))
    except sf.SurefootError as problem:
        return str(problem)
    return ""


def as_begun_earlier(run_dir: str) -> str:
    import surefoot.tracking.run_reader

    surefoot.tracking.run_reader.newest_behavior = lambda: 1  # type: ignore[assignment]
    return on_rank(run_dir, "environment")


@pytest.mark.slow
def test_a_run_that_began_earlier_goes_on_with_a_source_that_knows_its_rank(
    ranks: Ranks, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    assert ranks(2, as_begun_earlier, run_dir=str(run_dir)) == ["", ""]
    assert names_on_tape(run_dir) == [f"row {2 * number}" for number in range(ROWS)]


@pytest.mark.slow
@pytest.mark.parametrize("nodesplitter", [None, "split_by_node"])
def test_shards_of_webdataset_are_read_whole(
    nodesplitter: str | None, ranks: Ranks, tmp_path: Path
) -> None:
    webdataset = pytest.importorskip("webdataset")
    for shard in range(4):
        with webdataset.TarWriter(str(tmp_path / f"rows-{shard}.tar")) as tar:
            for number in range(10 * shard, 10 * shard + 10):
                sample = {"__key__": f"{number:04d}", "y.cls": number % 3}
                tar.write(sample | {"x.npy": row(number)["x"].numpy()})
    changes = {"directory": str(tmp_path), "nodesplitter": nodesplitter}
    steps = ranks(2, on_shards, **changes)
    assert steps[0] == steps[1] == 5
    assert Shards(tmp_path / "run" / "tape").look() == ROWS


def on_shards(directory: str, nodesplitter: str | None) -> int:
    import webdataset

    more = {} if nodesplitter is None else {"nodesplitter": webdataset.split_by_node}
    urls = directory + "/rows-{0..3}.tar"
    shards = webdataset.WebDataset(urls, shardshuffle=False, **more).decode()
    stream = {"decode_fn": lambda each: (torch.from_numpy(each["x.npy"]), each["y.cls"])}
    return len(train(build(Path(directory) / "run", shards, **(SHORT | {"stream": stream}))))
