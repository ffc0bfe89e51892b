"""Streams on a tape: exact from the tape on, however a run is killed and whatever the source does.
About 9 s of CPU.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import stream_runs
import surefoot as sf
from forked import Forked
from rank_processes import Ranks
from refused import refused
from stated import numbers_in
from stream_runs import Drawn, build, endless, finite, noisy, row, train
from surefoot.data.dataset_checks import fingerprint
from surefoot.data.streams import opening
from surefoot.data.streams.opening import PREFIX
from surefoot.data.streams.rows import NotRecordableError, decode, encode
from surefoot.data.streams.shards import Shards
from surefoot.errors import ConfigError, DataError
from surefoot.tools import leakage_check
from waiting import wait_until

SIGKILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Index, loss and sample ids of each step."""
    return train(build(tmp_path_factory.mktemp("uninterrupted") / "run"))


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b) or repr(a) == repr(b)


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recorded",
    [
        None,
        True,
        -(2**70),
        -0.0,
        float("nan"),
        float("-inf"),
        "text \ud800 \N{SNOWMAN}",
        b"\x00bytes",
        (1, [2, (3, {})], {"a": None, 5: False}),
        torch.tensor(3.5),
        torch.randn(2, 3).t(),
        torch.empty(0, 4, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.randn(2, dtype=torch.complex64).conj(),
        np.arange(6, dtype=">i2").reshape(2, 3).T,
        np.array(["a", "bc"]),
        np.array("2020-01-01", dtype="M8[D]"),
        np.zeros((0, 2), np.float32),
        torch.from_numpy(np.lib.stride_tricks.as_strided(np.zeros(1), (0,), (0,))),
        np.float16(2.5),
        [torch.ones(3, dtype=torch.uint8), b"x", torch.ones(1, dtype=torch.float64)],
    ],
    ids=lambda row: type(row).__name__,
)
def test_a_row_comes_back_as_it_was(recorded: Any) -> None:
    assert equal(decode(bytearray(encode(recorded))), recorded)


@pytest.mark.parametrize(
    ("recorded", "named"),
    [
        ({"a": [1, {2}]}, r"the row\['a'\]\[1\] is a set"),
        (torch.nn.Parameter(torch.ones(1)), "Parameter"),
        (np.array([object()]), "ndarray of object"),
        ({"x": np.ma.masked_array([1.0, 2.0], mask=[False, True])}, r"the row\['x'\] is a masked"),
        ([np.ma.masked], r"the row\[0\] is a masked array"),
        (torch.ones(1, dtype=torch.complex128), "complex128"),
        ({(1, 2): 3}, "keys must be text or integers"),
        (torch.ones(2).to_sparse(), "Tensor"),
        ([10**5000], "digits"),
    ],
)
def test_a_row_that_no_tape_can_hold_is_named(recorded: Any, named: str) -> None:
    with pytest.raises(NotRecordableError, match=named):
        encode(recorded)


def test_damaged_bytes_of_a_row_are_an_error_and_nothing_else() -> None:
    """Law 10: a row is data."""
    generator = random.Random(3)
    good = encode({"x": torch.ones(3), "a": np.ones(2), "t": ("b", b"c", [1, None])})
    hostile = [
        b'["a","|O8",[1]]',
        b'["t","F32",[1099511627776]]',
        b'["a","<f4",[-1]]',
        b'["z"]',
        b"[" * 3000,
        b'["d",[[]],1]',
    ]
    damaged = [len(text).to_bytes(4, "little") + text + bytes(64) for text in hostile]
    for _ in range(500):
        torn = bytearray(good)
        torn[generator.randrange(len(torn))] ^= 1 << generator.randrange(8)
        damaged += [bytes(torn), good[: generator.randrange(len(good))]]
    for each in damaged:
        with suppress(ValueError):
            decode(bytearray(each))


# --- what a run sees ------------------------------------------------------------------------------


def test_steps_see_the_rows_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    seen: list[Any] = []
    run = build(
        tmp_path / "run",
        stream={"decode_fn": lambda each: (each["x"], each["y"])},
        length="3 steps",
    )
    with run:
        for step in run:
            seen += [part.batch[0] for part in step.micro_batches]
            assert [part.sample_ids.tolist() for part in step.micro_batches] == [
                list(range(8 * step.index, 8 * step.index + 4)),
                list(range(8 * step.index + 4, 8 * step.index + 8)),
            ]
    torch.testing.assert_close(
        torch.cat(seen), torch.stack([row(number)["x"] for number in range(24)]), rtol=0, atol=0
    )


class Iterated(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (stream_runs.noisy(each) for each in endless())


def collate(rows: list[Any]) -> Any:
    return torch.stack([each["x"] for each in rows]), torch.tensor([each["y"] for each in rows])


def plain() -> Iterator[tuple[torch.Tensor, int]]:
    return ((each["x"], each["y"]) for each in endless())


class Plain(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return plain()


class Iterable:
    __iter__ = Plain.__iter__


@pytest.mark.parametrize(
    "source",
    [
        plain,
        pytest.param(Plain(), marks=pytest.mark.slow),
        pytest.param(Iterable(), marks=pytest.mark.slow),
        pytest.param(sf.data.Stream(plain), marks=pytest.mark.slow),
        DataLoader(Plain(), batch_size=None),
        pytest.param(DataLoader(Plain(), batch_size=None, num_workers=1), marks=pytest.mark.slow),
    ],
    ids=[
        "generator function",
        "IterableDataset",
        "iterable",
        "Stream",
        "DataLoader",
        "its workers",
    ],
)
def test_every_kind_of_source_is_training_data(source: Any) -> None:
    losses = train(build(None, train_data=source, length="4 steps"))
    assert losses == train(
        build(None, stream={"decode_fn": lambda each: (each["x"], each["y"])}, length="4 steps")
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_changes_nothing(
    workers: int, uninterrupted: list[Any], tmp_path: Path
) -> None:
    assert train(build(tmp_path / "run", workers=workers)) == uninterrupted


def test_draws_of_the_source_neither_change_nor_follow_those_of_the_training(
    uninterrupted: list[Any],
) -> None:
    def drawing() -> Iterator[dict[str, Any]]:
        for each in endless():
            random.random(), np.random.rand(), torch.rand(3)
            yield each

    assert train(build(None, drawing)) == uninterrupted
    assert train(build(None, drawing, seed=1)) != uninterrupted


def drawn() -> Iterator[dict[str, Any]]:
    while True:
        yield {"x": torch.rand(stream_runs.FEATURES) + random.random(), "y": 1}


def test_a_source_that_draws_its_rows_repeats_under_the_seed_of_the_run() -> None:
    first, second = (
        train(build(None, drawn, length="2 steps", check_state=False)) for _ in range(2)
    )
    assert first == second


@pytest.mark.slow
def test_a_source_that_draws_its_rows_goes_on_after_a_resume(tmp_path: Path) -> None:
    first = train(build(tmp_path / "a", drawn))
    resumed = train(build(tmp_path / "b", drawn, stop_after="5 steps"))
    assert resumed + train(build(tmp_path / "b", drawn)) == first


@pytest.mark.slow
def test_a_row_needs_encode_and_decode_if_no_tape_can_hold_it() -> None:
    def sets() -> Iterator[Any]:
        for each in endless():
            yield {*each["x"].tolist()}

    with refused("stream-row-not-recordable", DataError, row=0):
        build(None, train_data=sets)
    both = {"encode_fn": sorted, "decode_fn": lambda numbers: (torch.tensor(numbers), 1)}
    assert len(train(build(None, sets, stream=both, length="2 steps"))) == 2


# --- killed ---------------------------------------------------------------------------------------


def lines(run_dir: Path) -> dict[int, Any]:
    return {
        each[0]: each
        for each in map(json.loads, run_dir.with_suffix(".ids").read_text().splitlines())
    }


@pytest.fixture(scope="module")
def session(ranks: Ranks) -> Callable[..., int]:
    def run(run_dir: Path, **spec: Any) -> int:
        place = ranks.start(1, stream_runs.session, spec={"run_dir": str(run_dir), **spec})
        (outcome,) = ranks.outcomes(place)
        assert outcome.status in (0, SIGKILLED), outcome.text
        return outcome.status

    return run


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param({"torn_append": 1}, marks=pytest.mark.slow),
        pytest.param({"torn_append": 30, "workers": 2}, marks=pytest.mark.slow),
        {"source_kills_at": 100, "workers": 2},
        *(
            pytest.param({"torn_append": at}, marks=pytest.mark.slow)
            for at in (2, 3, 8, 33, 68, 151, 222)
        ),
        *(
            pytest.param({"operation": at}, marks=pytest.mark.slow)
            for at in (1, 5, 9, 14, 22, 35, 50, 70, 90, 150)
        ),
        *(pytest.param({"pass": at, "workers": 2}, marks=pytest.mark.slow) for at in (1, 9, 33)),
        {"operation": 3, "path": "tape"},  # a flush before a checkpoint
    ],
    ids=str,
)
def test_killed_anywhere_a_run_ends_with_the_same_bits(
    kill: dict[str, Any], session: Callable[..., int], uninterrupted: list[Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    assert session(run_dir, **kill) == SIGKILLED
    assert session(run_dir) == 0
    assert lines(run_dir) == {each[0]: each for each in uninterrupted}
    assert Shards(run_dir / "tape").intact() == (Shards(run_dir / "tape").look(), None)


END = {"rows": 19}  # the third step has three rows of the first epoch, and five of the second
FULL = {
    "heavy": 8_000,
    "stream": {"tape_size": "1 MB"},
}  # shards of 125 kB, of which the oldest are dropped


@pytest.mark.slow
@pytest.mark.parametrize(
    "kill",
    [
        *({"pass": at, "workers": 2} | END for at in (5, 6)),
        {"source_kills_at": 18, "workers": 2} | END,
        *({"operation": at, "path": path} | FULL for path in (".bin", ".idx") for at in (2, 6, 9)),
        *({"pass": at} | FULL for at in (30, 39)),
    ],
    ids=str,
)
def test_killed_at_the_end_of_a_stream_or_at_a_border_of_shards_a_run_ends_with_the_same_bits(
    kill: dict[str, Any], session: Callable[..., int], tmp_path: Path
) -> None:
    again = {key: setting for key, setting in kill.items() if key in (*END, *FULL)}
    assert session(tmp_path / "whole", **again) == 0
    assert session(tmp_path / "run", **kill) == SIGKILLED
    assert session(tmp_path / "run", **again) == 0
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


@pytest.mark.slow
def test_several_kills_in_one_run(
    session: Callable[..., int], uninterrupted: list[Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    for kill in (
        {"torn_append": 2},
        {"torn_append": 9},
        {"pass": 5},
        {"source_kills_at": 90, "workers": 2},
        {"pass": 12},
    ):
        assert session(run_dir, **kill) == SIGKILLED
    assert session(run_dir) == 0
    assert lines(run_dir) == {each[0]: each for each in uninterrupted}


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGTERM, 0),
        *(pytest.param(signal.SIGINT, count, marks=pytest.mark.slow) for count in (0, 2)),
    ],
)
def test_a_signal_ends_a_run_whose_source_gives_no_row(
    number: int,
    workers: int,
    ranks: Ranks,
    session: Callable[..., int],
    uninterrupted: list[Any],
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    spec = {"run_dir": str(run_dir), "stalls_at": 50, "workers": workers}
    place = ranks.start(1, stream_runs.session, spec=spec)
    assert wait_until(lambda: (tmp_path / "run.waits").exists() or (place / "status-0").exists())
    os.kill(int((place / "pid-0").read_text()), number)
    assert ranks.outcomes(place)[0].status == 128 + number
    assert list(lines(run_dir)) == list(range(6))
    assert session(run_dir) == 0
    assert lines(run_dir) == {each[0]: each for each in uninterrupted}


def test_rows_that_a_power_failure_tore_are_read_again(
    uninterrupted: list[Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    losses = train(build(run_dir, stop_after="9 steps"))
    data = max((run_dir / "tape").glob("rows-*.bin"), key=lambda file: file.stat().st_size)
    torn = bytearray(data.read_bytes())
    torn[-1000:] = bytes(1000)  # entries reached the disk, and their rows did not
    data.write_bytes(torn)
    assert Shards(run_dir / "tape").intact(72)[1] is not None
    assert losses + train(build(run_dir)) == uninterrupted
    assert Shards(run_dir / "tape").intact()[1] is None


@pytest.mark.slow
def test_a_damaged_first_step_is_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(build(run_dir, length="3 steps"))
    file = run_dir / "tape" / "rows-000000000000.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with refused("stream-tape-damaged", DataError, path=file):
        build(run_dir, length="3 steps")


@pytest.mark.slow
def test_another_or_no_tape_is_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    other = tmp_path / "other"
    train(build(run_dir, stop_after="9 steps"))
    train(
        build(
            other,
            lambda: (row(number if number < 20 else 0) for number in itertools.count()),
            stop_after="9 steps",
        )
    )
    mine = (run_dir / "tape").rename(tmp_path / "tape")
    code = "stream-tape-not-of-checkpoint"
    with refused(code, DataError, rows=72, known=0):
        train(build(run_dir))
    assert not (run_dir / "tape" / "tape.json").exists()
    (other / "tape").rename(run_dir / "tape")
    with refused(code, DataError, rows=72):
        train(build(run_dir))
    (run_dir / "tape").rename(other / "tape")
    mine.rename(run_dir / "tape")
    assert len(train(build(run_dir))) == 11


def test_without_its_tape_or_with_another_decode_fn_a_run_is_not_resumed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(build(run_dir, stop_after="2 steps", check_state=False))
    with refused("program-changed", sf.CheckpointError):
        train(build(run_dir, stream={"decode_fn": lambda each: (each["x"] * 2, each["y"])}))
    (run_dir / "tape").rename(tmp_path / "tape")
    code = "stream-tape-not-of-checkpoint"
    with refused(code, DataError, rows=16, known=0):
        train(build(run_dir))
    assert not (run_dir / "tape").exists()
    (tmp_path / "tape").rename(run_dir / "tape")
    for file in (run_dir / "tape").glob("rows-*"):
        if file.stem != "rows-000000000000":
            file.unlink()
    with refused(code, DataError, rows=16, known=8):
        train(build(run_dir))


# --- two ranks ------------------------------------------------------------------------------------


def on_rank(run_dir: str | None, **changes: Any) -> list[Any]:
    return train(build(None if run_dir is None else Path(run_dir), **changes))


def test_two_ranks_read_the_tape_that_one_of_them_writes(
    ranks: Ranks, uninterrupted: list[Any], tmp_path: Path
) -> None:
    first = ranks(2, on_rank, run_dir=str(tmp_path / "run"), stop_after="7 steps", workers=1)
    second = ranks(2, on_rank, run_dir=str(tmp_path / "run"))
    for rank in (0, 1):
        for step, alone in zip(first[rank] + second[rank], uninterrupted, strict=True):
            assert step[2] == [alone[2][rank]]
            assert step[1] == pytest.approx(alone[1], abs=1e-5)


def on_rank_with_a_split(run_dir: str | None) -> list[float]:
    split = sf.Split(sf.data.Stream(endless, samples=10, decode_fn=noisy))
    directory = None if run_dir is None else Path(run_dir)
    run = build(directory, splits={"val": split}, length="2 steps")
    train(run)
    return [run.evaluate()["val/loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("saved", [True, False])
def test_two_ranks_score_the_rows_of_a_stream_that_one_of_them_records(
    saved: bool, ranks: Ranks, tmp_path: Path
) -> None:
    run_dir = str(tmp_path / "run") if saved else None
    first, second = ranks(2, on_rank_with_a_split, run_dir=run_dir)
    assert first == second
    assert first == pytest.approx(on_rank_with_a_split(None), abs=1e-5)


@pytest.mark.slow
def test_a_signal_stops_all_ranks_before_the_same_step(
    ranks: Ranks, uninterrupted: list[Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    place = ranks.start(2, stream_runs.session, spec={"run_dir": str(run_dir), "stalls_at": 50})
    assert wait_until(lambda: (tmp_path / "run.waits").exists() or (place / "status-0").exists())
    os.kill(int((place / "pid-0").read_text()), signal.SIGTERM)
    assert [outcome.status for outcome in ranks.outcomes(place)] == 2 * [128 + signal.SIGTERM]
    both = ranks(2, on_rank, run_dir=str(run_dir))
    assert [step[0] for step in both[0]] == [step[0] for step in both[1]] == list(range(6, 20))
    assert [step[1] for step in both[0]] == pytest.approx(
        [step[1] for step in uninterrupted[6:]], abs=1e-5
    )


def on_two_machines(run_dir: str) -> str:
    """Rank 1 does not see the files of rank 0."""
    if os.environ["RANK"] == "1":
        Path.is_file = lambda path: path.name != "tape.json" and os.path.isfile(path)  # type: ignore[method-assign]
    opening._VISIBLE_S = 0.2
    try:
        on_rank(run_dir)
    except DataError as problem:
        return str(problem)
    return ""


@pytest.mark.slow
def test_machines_that_share_no_directory_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2, on_two_machines, run_dir=str(tmp_path / "run")):
        assert "[stream-tape-invisible]" in said
        assert "sf.data.Stream(source, directory=...)" in said


def failing_on_rank(run_dir: str) -> Any:
    def failing() -> Iterator[Any]:
        yield from itertools.islice(endless(), 40)
        raise OSError("the server is gone")

    try:
        on_rank(run_dir, source=failing)
    except DataError as problem:
        return problem.code, problem.fields["row"]
    return None


@pytest.mark.slow
def test_an_error_of_the_source_reaches_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks.outcomes(ranks.start(2, failing_on_rank, run_dir=str(tmp_path / "run")))
    assert outcomes[0].result == ("stream-row-failed", 40)


# --- the source after a resume --------------------------------------------------------------------


def notes_of(run_dir: Path, source: Any, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    capsys.readouterr()
    train(build(run_dir, source, console=True, **changes))
    return capsys.readouterr().out


class Positioned:
    """A source with a position of its own, that counts what it gives in a file."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            with self.log.open("a") as file:
                file.write(f"{self.position - 1}\n")
            yield row(self.position - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Skipped:
    def __init__(self, log: Path, first: int = 0) -> None:
        self.log = log
        self.first = first

    def __iter__(self) -> Iterator[Any]:
        for number in itertools.count(self.first):
            with self.log.open("a") as file:
                file.write(f"{number}\n")
            yield row(number)

    def skip(self, n: int) -> Skipped:
        return Skipped(self.log, self.first + n)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (Positioned, "its source has loaded the state of row"),
        pytest.param(Skipped, "its source has skipped", marks=pytest.mark.slow),
        pytest.param(None, "were read again and discarded", marks=pytest.mark.slow),
    ],
)
def test_after_a_resume_the_source_goes_on_behind_the_tape(
    kind: Any,
    how: str,
    uninterrupted: list[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("surefoot.data.streams.reader._STATE_S", 0.0)
    monkeypatch.setattr("surefoot.data.streams.recorder._AHEAD_STEPS", 1)
    monkeypatch.setattr("surefoot.data.streams.reader._SENT_BYTES", 100)
    monkeypatch.setattr("surefoot.data.streams.reader._WAITING_BYTES", 100)
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    losses = train(
        build(
            run_dir, endless if kind is None else kind(log), stop_after="8 steps", length="20 steps"
        )
    )
    log.unlink(missing_ok=True)
    text = notes_of(run_dir, endless if kind is None else kind(log), capsys)
    assert how in text
    assert "WARNING" not in text
    assert (
        losses + train(build(run_dir)) == uninterrupted[:8]
    )  # the run is over, and read its rows from the tape
    if kind is not None:
        assert int(log.read_text().split()[0]) >= 40


@pytest.mark.slow
def test_a_source_that_gives_other_rows_after_a_resume_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    train(build(run_dir, finite(100), stop_after="4 steps", length="9 steps"))

    def others() -> Iterator[Any]:
        return (row(number if number < 5 else 1000 + number) for number in itertools.count())

    text = notes_of(run_dir, others, capsys, length="9 steps")
    assert "WARNING: " not in text  # all are on the tape
    run_dir = tmp_path / "second"
    with refused("stream-row-failed", DataError, row=50):
        train(build(run_dir, broken_after(50), length="9 steps"))
    text = notes_of(run_dir, others, capsys, length="9 steps")
    (warning,) = re.findall("WARNING: .*", text)
    assert 50 in numbers_in(warning)


def broken_after(rows: int) -> Any:
    def broken() -> Iterator[Any]:
        yield from itertools.islice(endless(), rows)
        raise OSError("broken")

    return broken


def test_an_error_of_the_source_names_the_row_and_the_run_goes_on(
    uninterrupted: list[Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    ids = tmp_path / "ids"
    with refused("stream-row-failed", DataError, row=50) as raised:
        train(build(run_dir, broken_after(50)), ids)
    (trace,) = raised.value.__notes__  # of the source alone
    assert trace.count("Traceback") == 1
    assert trace.endswith("OSError: broken\n")
    assert [json.loads(line) for line in ids.read_text().splitlines()] == uninterrupted[:6]
    train(build(run_dir), ids)
    together = {each[0]: each for each in map(json.loads, ids.read_text().splitlines())}
    assert list(together.values()) == uninterrupted


def test_a_reader_that_is_killed_is_an_error(tmp_path: Path) -> None:
    def dying() -> Iterator[Any]:
        yield from itertools.islice(endless(), 20)
        os.kill(os.getpid(), signal.SIGKILL)

    with refused("stream-reader-killed", DataError, signal="SIGKILL"):
        train(build(tmp_path / "run", dying, time_limit="5 min"))  # a hang ends


# --- the end of a stream, and epochs --------------------------------------------------------------


@pytest.mark.slow
def test_behind_its_end_a_stream_begins_again_on_the_tape(tmp_path: Path) -> None:
    losses = train(build(tmp_path / "run", finite(20), length="6 steps"))
    ids = [sample for _, _, parts in losses for part in parts for sample in part]
    assert ids == [position % 20 for position in range(48)]
    resumed = train(build(tmp_path / "b", finite(20), length="6 steps", stop_after="4 steps"))
    resumed += train(build(tmp_path / "b", finite(20), length="6 steps", workers=2))
    assert resumed == losses


@pytest.mark.parametrize("declared", [None, 20])
def test_that_every_epoch_has_one_order_is_said_once(
    declared: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = {"samples": declared}
    train(build(None, finite(20), stream=stream, length="6 steps", console=True))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("every epoch") == 1
    rows = numbers_in(said.partition(" data ")[2].partition(" plan ")[0])
    assert ({20, 2.4} <= {*rows}) == (not declared)  # rows of the stream, read so often
    train(build(None, finite(20), length="2 steps", console=True))
    assert "every epoch" not in capsys.readouterr().out


def test_a_resumed_run_says_in_its_header_how_often_rows_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(build(tmp_path / "run", finite(25), length="10 steps", stop_after="4 steps"))
    run = build(tmp_path / "run", finite(25), length="10 steps", console=True)
    words = run.parts.pipeline.tape.in_words()
    assert [number for number in numbers_in(words) if number in (25, 3.2)] == [25, 3.2]
    train(run)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("read 3.2 times") == 1


@pytest.mark.slow
def test_a_declared_number_of_rows_makes_epochs(tmp_path: Path) -> None:
    run = build(
        tmp_path / "run", stream={"samples": 24}, length="2 epochs", evaluate_every="1 epochs"
    )
    assert run.parts.length.steps == 6
    assert [sample for _, _, parts in train(run) for part in parts for sample in part] == 2 * list(
        range(24)
    )
    assert Shards(tmp_path / "run" / "tape").look() == 24
    with refused("stream-ended-early", DataError, rows=20, samples=24):
        train(build(None, finite(20), stream={"samples": 24}, length="1 epochs"))


def test_an_epoch_of_a_stream_of_unknown_length_is_refused() -> None:
    with refused("length-of-stream-unknown", setting="length", value="2 epochs"):
        build(None, length="2 epochs")


# --- the budget -----------------------------------------------------------------------------------


def heavy() -> Iterator[dict[str, Any]]:
    for number in itertools.count():
        yield {**row(number), "bytes": bytes(8_000)}


HEAVY = {
    "length": "60 steps",
    "save_every": "5 steps",
    "stream": {"tape_size": "1 MB"},
    "keep_last": 100,
}


@pytest.mark.slow
def test_old_rows_are_dropped_and_what_needs_them_says_so(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    expected = train(build(None, heavy, length="60 steps"))
    losses = train(build(run_dir, heavy, stop_after="40 steps", **HEAVY))
    losses += train(build(run_dir, heavy, **HEAVY))
    assert losses == expected
    sizes = [file.stat().st_size for file in (run_dir / "tape").glob("rows-*")]
    assert sum(sizes) < 2_000_000 < 60 * 8 * 8_000
    run = build(run_dir, heavy, **HEAVY)
    first = run.parts.pipeline.tape.first_step(8)
    assert 0 < first <= 55
    from surefoot.tools.plan.summary import batch_arithmetic
    from surefoot.tools.replay.replay import replay_step
    from surefoot.tools.verify.files import check_files
    from surefoot.tools.verify.verify import verify

    assert any(f"at step {first:,} or later" in line for line in batch_arithmetic(run.parts, None))
    with refused("stream-steps-dropped", DataError, first=first):
        replay_step(run.parts, first - 1, path=run_dir, samples=1, say=None)
    again = replay_step(build(run_dir, heavy, **HEAVY).parts, 57, path=run_dir, samples=1, say=None)
    assert again.logged is None or again.logged.equal
    verdict = verify(
        build(run_dir, heavy, **HEAVY),
        check_files(run_dir),
        steps="all",
        windows=5,
        seed=None,
        tolerance=0.0,
        say=None,
        progress_fn=None,
    )
    assert not verdict.problems
    saved = sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))
    since = next(step for step in saved if step >= first)
    told = [line for line in verdict.not_proved if line.startswith("steps 0 to ")]
    assert len(told) == 1, "no advice to repeat what cannot be repeated"
    assert told[0].startswith(f"steps 0 to {since}: ")
    assert verdict.outcomes


@pytest.mark.slow
def test_a_full_tape_asks_for_a_checkpoint(tmp_path: Path) -> None:
    train(build(tmp_path / "run", heavy, **(HEAVY | {"save_every": "1000 steps"})))
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) > 3


@pytest.mark.slow
def test_a_stream_that_ends_behind_dropped_rows_is_an_error(tmp_path: Path) -> None:
    with refused("stream-repeats-dropped-rows", DataError, rows=300):
        train(build(tmp_path / "run", lambda: itertools.islice(heavy(), 300), **HEAVY))


def test_epochs_that_do_not_fit_on_the_tape_are_an_error(tmp_path: Path) -> None:
    with refused("stream-tape-full", DataError, setting="tape_size"):
        train(
            build(
                tmp_path / "run",
                heavy,
                **(HEAVY | {"stream": {"tape_size": "1 MB", "samples": 240}}),
            )
        )


@pytest.mark.slow
def test_the_reader_is_only_some_steps_ahead(tmp_path: Path) -> None:
    """Bounded: the demand and 16 steps, and what was on its way."""
    run = build(tmp_path / "run", heavy, length="1000 steps")
    with run:
        for step in run:
            if step.index == 5:
                break
        tape = run.parts.pipeline.tape
        assert wait_until(lambda: tape.shards.look() >= (6 + 16) * 8)
        assert tape.shards.look() < (6 + 16) * 8 + 2 * (1 << 18) // 8_000


@pytest.mark.slow
def test_a_disk_that_fails_is_an_error_and_the_run_goes_on(
    uninterrupted: list[Any], tmp_path: Path
) -> None:
    class Full(stream_runs.TornAppend):
        def append(self, handle: int, data: memoryview) -> None:
            import threading

            self.left -= threading.current_thread().name == "surefoot-tape"
            if self.left <= 0 and threading.current_thread().name == "surefoot-tape":
                raise OSError(28, "No space left on device")
            stream_runs.Disk.append(self, handle, data)

    run_dir = tmp_path / "run"
    with refused("stream-tape-not-written", DataError):
        train(build(run_dir, heavy, disk=Full(3), length="60 steps"))
    assert train(build(run_dir, heavy, length="60 steps"))[-1][0] == 59


# --- files and processes --------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = build(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert list(tmp_path.glob(f"{PREFIX}*"))
    run.train()
    assert not list(tmp_path.glob(f"{PREFIX}*"))
    assert not (tmp_path / "run" / "tape" / "failed.json").exists()
    alone = build(None)
    alone.train()
    reader = alone.parts.pipeline.tape.recorder
    assert reader is None
    del alone, run
    import gc

    gc.collect()
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def stalling(marker: Path) -> Iterator[Any]:
    yield row(0)
    marker.touch()
    time.sleep(60.0)


def test_the_next_stream_removes_the_temporary_tape_of_a_killed_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with open(os.devnull, "w") as nowhere:
        builds = [
            partial(build, None, partial(stalling, tmp_path / name)) for name in ("killed", "alive")
        ]
        processes = [Forked(each, stdout=nowhere) for each in builds]
    for each in processes:
        each.stdin.close()
    assert wait_until(lambda: all((tmp_path / name).exists() for name in ("killed", "alive")))
    tapes = {tape.stat().st_mtime_ns: tape for tape in tmp_path.glob(f"{PREFIX}*")}
    os.kill(processes[0].pid, signal.SIGTERM)
    assert processes[0].wait() == -signal.SIGTERM
    assert len(tapes) == 2
    build(None)
    assert {*tapes.values()} <= {*tmp_path.glob(f"{PREFIX}*")}  # too young to be removed
    for tape in tapes.values():
        os.utime(tape, (0, 0))
    build(None)
    (left,) = {*tapes.values()} & {*tmp_path.glob(f"{PREFIX}*")}
    os.kill(processes[1].pid, signal.SIGKILL)
    processes[1].wait()
    build(None)
    assert not left.exists()


def late(marker: Path) -> Iterator[Any]:
    wait_until(marker.exists)
    yield from finite(100)()


def test_a_stream_whose_first_row_is_late_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("surefoot.data.streams.tape._SLOW_S", 0.0)
    printed = list[str]()
    monkeypatch.setattr(
        "builtins.print",
        lambda *text, **_: (printed.append(str(text[0])), (tmp_path / "go").touch()),
    )
    build(None, partial(late, tmp_path / "go"), console=True)
    assert numbers_in(printed[0]) == [7]


def test_batches_of_other_libraries_are_no_rows() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": list(range(12))}).to_iterable_dataset(num_shards=3)
    for batches in (
        rows.batch(4),
        rows.with_format("torch").batch(4),
        rows.batch(4).map(dict).shuffle(seed=0).take(2),
    ):
        with refused("stream-source-of-batches", DataError, batch_size=4):
            sf.data.Stream(batches)
    unbatched = rows.batch(4).map(
        lambda batch: {"x": list(itertools.chain(*batch["x"]))}, batched=True
    )
    for single in (rows, rows.batch(by_column="x"), unbatched, lambda: iter(rows.batch(4))):
        sf.data.Stream(single)
    webdataset = pytest.importorskip("webdataset")
    shards = webdataset.WebDataset("rows.tar", shardshuffle=False).decode().to_tuple("x")
    sf.data.Stream(shards.batched(4).unbatched())
    for batches, size in (
        (shards.batched(4), 4),
        (shards.batched(batchsize=5), 5),
        (webdataset.WebLoader(shards, batch_size=3), 3),
    ):
        with refused("stream-source-of-batches", DataError, batch_size=size):
            sf.data.Stream(batches)


@pytest.mark.slow
def test_a_directory_of_ones_own_holds_the_tape(uninterrupted: list[Any], tmp_path: Path) -> None:
    (tmp_path / "tape").mkdir()
    (tmp_path / "tape" / "mine.json").write_text("{}")
    named = {"directory": tmp_path / "tape"}
    losses = train(build(tmp_path / "run", stream=named, stop_after="7 steps"))
    assert not (tmp_path / "run" / "tape").exists()
    losses += train(build(tmp_path / "run", stream=named))
    assert losses == uninterrupted
    assert (
        train(build(None, broken_after(0), stream=named)) == uninterrupted
    )  # another run reads the same rows
    assert (tmp_path / "tape" / "mine.json").read_text() == "{}"
    with (
        build(None, stream=named, length="30 steps"),
        refused("stream-tape-locked", path=tmp_path / "tape"),
    ):
        build(None, stream=named, length="30 steps").train()


@pytest.mark.slow
def test_only_runs_with_a_stream_have_a_tape_in_their_checkpoints(tmp_path: Path) -> None:
    train(build(tmp_path / "stream", length="4 steps"))
    train(build(tmp_path / "list", stream_runs.Drawn(40), length="4 steps"))
    states = {
        name: json.loads((tmp_path / name / "checkpoints/step-00000004/state.json").read_text())
        for name in ("stream", "list")
    }
    assert states["stream"]["tape"]["rows"] == 32
    assert "tape" not in states["list"]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (endless(), "stream-source-read-once"),
        (iter([1, 2]), "stream-source-read-once"),
        (lambda: 3, "stream-source-not-iterable"),
        (lambda a: iter([]), "stream-source-failed"),
    ],
)
def test_what_is_no_source_is_refused_with_what_to_write(source: Any, code: str) -> None:
    with refused(code, DataError):
        build(None, train_data=source)


@pytest.mark.parametrize("order", ["lanes", sf.data.Weighted([1.0, 2.0])])
def test_an_order_with_a_stream_is_refused(order: Any) -> None:
    with refused("order-of-stream", setting="order"):
        build(None, order=order)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tape_size": "10"}, "[stream-tape-too-small]"),
        ({"tape_size": "much"}, "with a unit"),
        ({"samples": 0}, "[setting-out-of-range]"),
        ({"encode_fn": 3}, "[setting-out-of-range]"),
        ({"encode": len}, "encode_fn"),
    ],
)
def test_a_wrong_setting_of_a_stream_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sf.data.Stream(endless, **settings)
    assert why in str(caught.value)


def test_a_class_and_a_loader_of_batches_are_no_stream() -> None:
    with refused("stream-source-of-batches", DataError, source="DataLoader", batch_size=4):
        sf.data.Stream(DataLoader(Plain(), batch_size=4))
    with refused("stream-source-is-class", DataError, source="Plain"):
        sf.data.Stream(Plain)


# --- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [endless, Plain(), sf.data.Stream(endless)])
def test_a_stream_as_a_split_needs_a_number_of_rows_and_the_cure_can_be_typed(data: Any) -> None:
    with refused("split-stream-without-end", DataError, split="val") as caught:
        build(None, splits={"val": sf.Split(data)})
    (cure,) = caught.value.remedies
    if isinstance(data, sf.data.Stream):
        data = data.source
    split = eval(cure.partition(": ")[2].replace("1000", "3"), {"sf": sf, "data": data})
    run = build(None, splits={"val": split})
    assert len(run.parts.evaluator.splits["val"].data) == 3
    run.parts.pipeline.close()


def counted(rows: int, log: Path) -> Any:
    """A source that gives other rows each time it is read, and notes each time."""

    def source() -> Iterator[dict[str, Any]]:
        times = len(log.read_text()) if log.exists() else 0
        log.write_text("x" * (times + 1))
        yield from (row(number + 100 * times) for number in range(rows))

    return source


def scored(source: Any, rows: int) -> dict[str, Any]:
    stream = sf.data.Stream(source, samples=rows, decode_fn=noisy)
    return {"splits": {"val": sf.Split(stream)}, "evaluate_every": "4 steps"}


def test_a_stream_may_be_a_split_whose_first_rows_are_recorded_once(tmp_path: Path) -> None:
    listed = build(
        tmp_path / "list",
        splits={"val": sf.Split(Drawn(10))},
        evaluate_every="4 steps",
        length="8 steps",
    )
    log = tmp_path / "log"
    run = build(tmp_path / "run", **scored(counted(30, log), 10), length="8 steps")
    temporary = run.parts.evaluator.splits["val"].data.tape.directory
    assert temporary.exists()
    for each in (listed, run):
        train(each)
    scores = [
        [record["val/loss"] for record in sf.load(tmp_path / name).records("eval")]
        for name in ("list", "run")
    ]
    assert scores[0] == scores[1]
    assert len(scores[0]) == 2
    assert log.read_text() == "x"
    assert Shards(tmp_path / "run" / "tapes" / "split-val").look() == 10
    again = build(tmp_path / "run", **scored(counted(30, log), 10), length="8 steps")
    splits = [each.parts.evaluator.splits["val"].data for each in (run, again)]
    assert fingerprint(splits[0]) == fingerprint(splits[1])
    assert log.read_text() == "x"  # the rows are those of the start, whatever the source gives
    assert not temporary.exists()


def test_a_stopped_run_goes_on_with_the_rows_of_its_split(tmp_path: Path) -> None:
    log = tmp_path / "log"
    settings = scored(counted(30, log), 10) | {"length": "8 steps"}
    whole = train(build(tmp_path / "a", **settings))
    log.unlink()
    parts = train(build(tmp_path / "b", **settings, stop_after="4 steps"))
    parts += train(build(tmp_path / "b", **settings, workers=2))
    assert parts == whole
    scores = [
        [record["val/loss"] for record in sf.load(tmp_path / name).records("eval")]
        for name in ("a", "b")
    ]
    assert scores[0] == scores[1]


def test_more_rows_of_a_split_than_were_recorded_are_refused(tmp_path: Path) -> None:
    source = finite(30)
    train(build(tmp_path, **scored(source, 10), length="8 steps", stop_after="4 steps"))
    with refused("split-recorded-with-fewer-rows", split="val", recorded=10, samples=20):
        build(tmp_path, **scored(source, 20), length="8 steps")


def test_a_split_of_a_stream_that_ends_early_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(build(None, **scored(finite(6), 10), length="2 steps", console=True))
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"split 'val': .*\b6 rows of finite\.<locals>\.<lambda>", said)
    assert "samples = 10" in said
    with refused("stream-empty", DataError):
        build(None, **scored(finite(0), 10))


def test_an_error_of_the_source_of_a_split_ends_the_start(tmp_path: Path) -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield row(0)
        raise OSError("no network")

    with refused("stream-row-failed", DataError, row=1):
        build(tmp_path / "run", **scored(source, 10))
    assert not (tmp_path / "run").exists()


def test_a_loader_of_a_stream_is_no_split_and_the_cure_can_be_typed() -> None:
    loader = DataLoader(Plain(), batch_size=4)
    with refused("split-loader-of-stream") as caught:
        sf.Split(loader)
    (cure,) = caught.value.remedies
    split = eval(cure.partition(": ")[2].replace("1000", "3"), {"sf": sf, "loader": loader})
    assert (split.batch_size, split.data.samples) == (4, 3)


def test_a_decode_fn_with_a_generator_of_its_own_is_refused() -> None:
    own = np.random.default_rng(0)
    with refused("sample-not-repeatable", DataError):
        build(None, stream={"decode_fn": lambda each: (each["x"] + own.random(), each["y"])})


def test_batches_in_tokens_are_refused() -> None:
    with refused("batch-size-of-unknown-lengths", setting="batch_size"):
        build(None, batch_size="64 tokens", micro_batch_size=None)


def test_rows_of_a_split_in_the_first_rows_of_the_stream_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leakage_check, "perf_counter", lambda: 0.0)  # however busy the machine is
    plain_rows = {"decode_fn": lambda each: (each["x"], each["y"])}
    held_out = [(row(number)["x"], row(number)["y"]) for number in range(4)]
    train(
        build(
            tmp_path / "run",
            stream=plain_rows,
            splits={"val": sf.Split(held_out)},
            length="2 steps",
        )
    )
    (record,) = sf.load(tmp_path / "run").records("data_check")
    assert (record["samples"], record["checked"], record["overlap"]["val"]["overlapping"]) == (
        16,
        8,
        4,
    )


# --- other libraries ------------------------------------------------------------------------------


@pytest.mark.slow
def test_streaming_data_sets_of_hugging_face(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    texts = {
        "x": [row(number)["x"].tolist() for number in range(200)],
        "y": [number % 3 for number in range(200)],
    }
    streamed = (
        datasets.Dataset.from_dict(texts)
        .to_iterable_dataset(num_shards=3)
        .shuffle(seed=3, buffer_size=20)
    )
    stream = {"decode_fn": lambda each: (torch.tensor(each["x"]), each["y"])}
    losses = train(build(tmp_path / "a", streamed, stream=stream))
    broken = tmp_path / "b"
    train(build(broken, streamed, stream=stream, stop_after="5 steps"))
    text = notes_of(broken, streamed, capsys, stream=stream)
    assert "WARNING" not in text
    ids = [sample for _, _, parts in losses for part in parts for sample in part]
    assert ids == list(range(160))
    from surefoot.data.streams.shards import Shards as Read

    assert Read(broken / "tape").entry_before(160) == Read(tmp_path / "a" / "tape").entry_before(
        160
    )


@pytest.mark.slow
def test_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "rows-0.tar")) as tar:
        for number in range(40):
            tar.write(
                {"__key__": f"{number:04d}", "x.npy": row(number)["x"].numpy(), "y.cls": number % 3}
            )
    shards = webdataset.WebDataset(str(tmp_path / "rows-0.tar"), shardshuffle=False).decode()
    stream = {"decode_fn": lambda each: (torch.from_numpy(each["x.npy"]), each["y.cls"])}
    losses = train(
        build(tmp_path / "run", shards, stream=stream, length="5 steps", stop_after="3 steps")
    )
    losses += train(build(tmp_path / "run", shards, stream=stream, length="5 steps"))
    plain_rows = {"decode_fn": lambda each: (each["x"], each["y"])}
    assert losses == train(build(None, finite(40), stream=plain_rows, length="5 steps"))
