"""Streams on a tape: exact from the tape on, however a run is killed and whatever the source does.
About 9 s of CPU.
"""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import random
import re
import signal
import threading
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
from surefoot.tools.plan.summary import batch_arithmetic
from surefoot.tools.replay.replay import replay_step
from surefoot.tools.verify.files import check_files
from surefoot.tools.verify.verify import verify
from waiting import wait_until

SIGKILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Index, loss and sample ids of each step."""
    return train(build(tmp_path_factory.mktemp("uninterrupted") / "run"))


def input_and_label(recorded: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """A `decode_fn` that draws nothing."""
    return recorded["x"], recorded["y"]


AS_RECORDED = {"decode_fn": input_and_label}


def rows_read(steps: list[Any]) -> list[int]:
    """The numbers of the rows that steps have read, in their order."""
    numbers = []
    for _, _, micro_batches in steps:
        for sample_ids in micro_batches:
            numbers += sample_ids
    return numbers


def val_losses(run_dir: Path) -> list[float]:
    return [record["val/loss"] for record in sf.load(run_dir).records("eval")]


def read_printed(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, as one line."""
    return " ".join(capsys.readouterr().out.split())


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        same_form = a.dtype == b.dtype and a.shape == b.shape
        return same_form and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and equal(list(a.values()), list(b.values()))
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
    ("recorded", "pattern"),
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
def test_a_row_that_no_tape_can_hold_is_named(recorded: Any, pattern: str) -> None:
    with pytest.raises(NotRecordableError, match=pattern):
        encode(recorded)


def test_damaged_bytes_of_a_row_are_an_error_and_nothing_else() -> None:
    """Law 10: a row is data."""
    generator = random.Random(3)
    intact = encode({"x": torch.ones(3), "a": np.ones(2), "t": ("b", b"c", [1, None])})
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
        flipped = bytearray(intact)
        flipped[generator.randrange(len(flipped))] ^= 1 << generator.randrange(8)
        cut = intact[: generator.randrange(len(intact))]
        damaged += [bytes(flipped), cut]

    for encoded in damaged:
        with suppress(ValueError):
            decode(bytearray(encoded))


# --- what a run sees ------------------------------------------------------------------------------


def test_steps_see_the_rows_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    inputs: list[torch.Tensor] = []
    micro_batches: list[list[int]] = []

    with build(tmp_path / "run", stream=AS_RECORDED, length="3 steps") as run:
        for step in run:
            inputs += [micro_batch.batch[0] for micro_batch in step.micro_batches]
            micro_batches += [part.sample_ids.tolist() for part in step.micro_batches]

    assert micro_batches == [list(range(first, first + 4)) for first in range(0, 24, 4)]
    arrived = torch.stack([row(number)["x"] for number in range(24)])
    torch.testing.assert_close(torch.cat(inputs), arrived, rtol=0, atol=0)


def plain() -> Iterator[tuple[torch.Tensor, int]]:
    return map(input_and_label, endless())


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
    expected = train(build(None, stream=AS_RECORDED, length="4 steps"))

    assert train(build(None, train_data=source, length="4 steps")) == expected


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
        for recorded in endless():
            random.random()
            np.random.rand()
            torch.rand(3)
            yield recorded

    assert train(build(None, drawing)) == uninterrupted
    assert train(build(None, drawing, seed=1)) != uninterrupted


def drawn() -> Iterator[dict[str, Any]]:
    while True:
        yield {"x": torch.rand(stream_runs.FEATURES) + random.random(), "y": 1}


def test_a_source_that_draws_its_rows_repeats_under_the_seed_of_the_run() -> None:
    def draw_and_train() -> list[Any]:
        return train(build(None, drawn, length="2 steps", check_state=False))

    assert draw_and_train() == draw_and_train()


@pytest.mark.slow
def test_a_source_that_draws_its_rows_goes_on_after_a_resume(tmp_path: Path) -> None:
    whole = train(build(tmp_path / "a", drawn))

    steps = train(build(tmp_path / "b", drawn, stop_after="5 steps"))
    steps += train(build(tmp_path / "b", drawn))

    assert steps == whole


@pytest.mark.slow
def test_a_row_needs_encode_and_decode_if_no_tape_can_hold_it() -> None:
    def sets() -> Iterator[Any]:
        for recorded in endless():
            yield {*recorded["x"].tolist()}

    with refused("stream-row-not-recordable", DataError, row=0):
        build(None, train_data=sets)
    both = {"encode_fn": sorted, "decode_fn": lambda numbers: (torch.tensor(numbers), 1)}
    assert len(train(build(None, sets, stream=both, length="2 steps"))) == 2


# --- killed ---------------------------------------------------------------------------------------


def by_index(steps: list[Any]) -> dict[int, Any]:
    """Steps by their index: of a step that was repeated, the last."""
    return {step[0]: step for step in steps}


def steps_of(run_dir: Path) -> dict[int, Any]:
    """What all sessions of a run have noted of its steps."""
    lines = run_dir.with_suffix(".ids").read_text().splitlines()
    return by_index([json.loads(line) for line in lines])


@pytest.fixture(scope="module")
def session(ranks: Ranks) -> Callable[..., int]:
    """Start a run in a process of its own; the status with which this ends."""

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

    assert steps_of(run_dir) == by_index(uninterrupted)
    tape = Shards(run_dir / "tape")
    assert tape.intact() == (tape.look(), None)


END = {"rows": 19}  # the third step has three rows of the first epoch, and five of the second
# shards of 125 kB, of which the oldest are dropped
FULL = {"heavy": 8_000, "stream": {"tape_size": "1 MB"}}


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
    settings = {key: setting for key, setting in kill.items() if key in (*END, *FULL)}
    assert session(tmp_path / "whole", **settings) == 0

    assert session(tmp_path / "run", **kill) == SIGKILLED
    assert session(tmp_path / "run", **settings) == 0

    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole")


@pytest.mark.slow
def test_several_kills_in_one_run(
    session: Callable[..., int], uninterrupted: list[Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    kills: list[dict[str, Any]] = [
        {"torn_append": 2},
        {"torn_append": 9},
        {"pass": 5},
        {"source_kills_at": 90, "workers": 2},
        {"pass": 12},
    ]

    for kill in kills:
        assert session(run_dir, **kill) == SIGKILLED
    assert session(run_dir) == 0

    assert steps_of(run_dir) == by_index(uninterrupted)


def send_when_stalled(ranks: Ranks, sent: int, place: Path, waits: Path) -> list[int]:
    """Send a signal to rank 0 when the run waits for a row; the statuses of all ranks."""
    assert wait_until(lambda: waits.exists() or (place / "status-0").exists())
    os.kill(int((place / "pid-0").read_text()), sent)
    return [outcome.status for outcome in ranks.outcomes(place)]


@pytest.mark.parametrize(
    ("sent", "workers"),
    [
        (signal.SIGTERM, 0),
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_run_whose_source_gives_no_row(
    sent: int,
    workers: int,
    ranks: Ranks,
    session: Callable[..., int],
    uninterrupted: list[Any],
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    spec = {"run_dir": str(run_dir), "stalls_at": 50, "workers": workers}
    place = ranks.start(1, stream_runs.session, spec=spec)

    statuses = send_when_stalled(ranks, sent, place, tmp_path / "run.waits")

    assert statuses == [128 + sent]
    assert list(steps_of(run_dir)) == list(range(6))
    assert session(run_dir) == 0
    assert steps_of(run_dir) == by_index(uninterrupted)


def test_rows_that_a_power_failure_tore_are_read_again(
    uninterrupted: list[Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    tape = run_dir / "tape"
    steps = train(build(run_dir, stop_after="9 steps"))
    data = max(tape.glob("rows-*.bin"), key=lambda file: file.stat().st_size)
    torn = bytearray(data.read_bytes())
    torn[-1000:] = bytes(1000)  # entries reached the disk, and their rows did not
    data.write_bytes(torn)
    assert Shards(tape).intact(72)[1] is not None

    steps += train(build(run_dir))

    assert steps == uninterrupted
    assert Shards(tape).intact()[1] is None


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
    def others() -> Iterator[dict[str, Any]]:
        yield from itertools.islice(endless(), 20)
        while True:
            yield row(0)

    tape = tmp_path / "run" / "tape"
    train(build(tmp_path / "run", stop_after="9 steps"))
    train(build(tmp_path / "other", others, stop_after="9 steps"))

    hidden = tape.rename(tmp_path / "tape")
    with refused("stream-tape-not-of-checkpoint", DataError, rows=72, known=0):
        train(build(tmp_path / "run"))
    assert not (tape / "tape.json").exists()

    foreign = (tmp_path / "other" / "tape").rename(tape)
    with refused("stream-tape-not-of-checkpoint", DataError, rows=72):
        train(build(tmp_path / "run"))

    foreign.rename(tmp_path / "other" / "tape")
    hidden.rename(tape)
    assert len(train(build(tmp_path / "run"))) == 11


@pytest.fixture
def stopped_run(tmp_path: Path) -> Path:
    """The directory of a run that has done two steps."""
    train(build(tmp_path / "run", stop_after="2 steps", check_state=False))
    return tmp_path / "run"


def test_with_another_decode_fn_a_run_is_not_resumed(stopped_run: Path) -> None:
    doubled = {"decode_fn": lambda recorded: (recorded["x"] * 2, recorded["y"])}

    with refused("program-changed", sf.CheckpointError):
        train(build(stopped_run, stream=doubled))


def test_without_its_tape_a_run_is_not_resumed(stopped_run: Path) -> None:
    (stopped_run / "tape").rename(stopped_run.parent / "tape")

    with refused("stream-tape-not-of-checkpoint", DataError, rows=16, known=0):
        train(build(stopped_run))
    assert not (stopped_run / "tape").exists()


def test_without_the_last_rows_of_its_tape_a_run_is_not_resumed(stopped_run: Path) -> None:
    for file in (stopped_run / "tape").glob("rows-*"):
        if file.stem != "rows-000000000000":
            file.unlink()

    with refused("stream-tape-not-of-checkpoint", DataError, rows=16, known=8):
        train(build(stopped_run))


# --- two ranks ------------------------------------------------------------------------------------


def on_rank(run_dir: str | None, **changes: Any) -> list[Any]:
    return train(build(None if run_dir is None else Path(run_dir), **changes))


def test_two_ranks_read_the_tape_that_one_of_them_writes(
    ranks: Ranks, uninterrupted: list[Any], tmp_path: Path
) -> None:
    run_dir = str(tmp_path / "run")

    first = ranks(2, on_rank, run_dir=run_dir, stop_after="7 steps", workers=1)
    second = ranks(2, on_rank, run_dir=run_dir)

    for rank in (0, 1):
        for step, alone in zip(first[rank] + second[rank], uninterrupted, strict=True):
            _, loss, sample_ids = step
            _, loss_alone, sample_ids_alone = alone
            assert sample_ids == [sample_ids_alone[rank]]
            assert loss == pytest.approx(loss_alone, abs=1e-5)


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

    statuses = send_when_stalled(ranks, signal.SIGTERM, place, tmp_path / "run.waits")
    first, second = ranks(2, on_rank, run_dir=str(run_dir))

    assert statuses == 2 * [128 + signal.SIGTERM]
    assert list(by_index(first)) == list(by_index(second)) == list(range(6, 20))
    losses = [loss for _, loss, _ in first]
    expected = [loss for _, loss, _ in uninterrupted[6:]]
    assert losses == pytest.approx(expected, abs=1e-5)


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
    messages = ranks(2, on_two_machines, run_dir=str(tmp_path / "run"))

    for message in messages:
        assert "[stream-tape-invisible]" in message
        assert "sf.data.Stream(source, directory=...)" in message


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
    place = ranks.start(2, failing_on_rank, run_dir=str(tmp_path / "run"))

    first, _ = ranks.outcomes(place)

    assert first.result == ("stream-row-failed", 40)


# --- the source after a resume --------------------------------------------------------------------


def train_and_read_notes(
    run_dir: Path, source: Any, capsys: pytest.CaptureFixture[str], **changes: Any
) -> str:
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


def read_again(log: Path) -> Any:
    """A source without a position: it has nothing to note."""
    return endless


@pytest.mark.parametrize(
    ("make_source", "note"),
    [
        (Positioned, "its source has loaded the state of row"),
        pytest.param(Skipped, "its source has skipped", marks=pytest.mark.slow),
        pytest.param(read_again, "were read again and discarded", marks=pytest.mark.slow),
    ],
)
def test_after_a_resume_the_source_goes_on_behind_the_tape(
    make_source: Callable[[Path], Any],
    note: str,
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
    steps = train(build(run_dir, make_source(log), stop_after="8 steps"))
    log.unlink(missing_ok=True)

    notes = train_and_read_notes(run_dir, make_source(log), capsys)

    assert note in notes
    assert "WARNING" not in notes
    assert steps == uninterrupted[:8]
    assert train(build(run_dir)) == []  # the run is over
    if make_source is not read_again:
        first_given = int(log.read_text().split()[0])
        assert first_given >= 40


@pytest.mark.slow
def test_a_source_that_gives_other_rows_after_a_resume_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    with refused("stream-row-failed", DataError, row=50):
        train(build(run_dir, broken_after(50), length="9 steps"))

    notes = train_and_read_notes(run_dir, other_rows, capsys, length="9 steps")

    (warning,) = re.findall("WARNING: .*", notes)
    assert 50 in numbers_in(warning)


@pytest.mark.slow
def test_a_source_that_gives_other_rows_is_not_named_where_all_are_on_the_tape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    train(build(run_dir, finite(100), stop_after="4 steps", length="9 steps"))

    notes = train_and_read_notes(run_dir, other_rows, capsys, length="9 steps")

    assert "WARNING: " not in notes


def other_rows() -> Iterator[Any]:
    yield from itertools.islice(endless(), 5)
    yield from map(row, itertools.count(1005))


def broken_after(rows: int) -> Any:
    def broken() -> Iterator[Any]:
        yield from itertools.islice(endless(), rows)
        raise OSError("broken")

    return broken


def test_an_error_of_the_source_names_the_row_and_the_run_goes_on(
    uninterrupted: list[Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    noted = run_dir.with_suffix(".ids")

    with refused("stream-row-failed", DataError, row=50) as raised:
        train(build(run_dir, broken_after(50)), noted)
    (trace,) = raised.value.__notes__  # of the source alone
    assert trace.count("Traceback") == 1
    assert trace.endswith("OSError: broken\n")
    assert [json.loads(line) for line in noted.read_text().splitlines()] == uninterrupted[:6]

    train(build(run_dir), noted)
    assert steps_of(run_dir) == by_index(uninterrupted)


def test_a_reader_that_is_killed_is_an_error(tmp_path: Path) -> None:
    def dying() -> Iterator[Any]:
        yield from itertools.islice(endless(), 20)
        os.kill(os.getpid(), signal.SIGKILL)

    with refused("stream-reader-killed", DataError, signal="SIGKILL"):
        train(build(tmp_path / "run", dying, time_limit="5 min"))  # a hang ends


# --- the end of a stream, and epochs --------------------------------------------------------------


@pytest.mark.slow
def test_behind_its_end_a_stream_begins_again_on_the_tape(tmp_path: Path) -> None:
    whole = train(build(tmp_path / "a", finite(20), length="6 steps"))
    steps = train(build(tmp_path / "b", finite(20), length="6 steps", stop_after="4 steps"))
    steps += train(build(tmp_path / "b", finite(20), length="6 steps", workers=2))

    assert rows_read(whole) == [position % 20 for position in range(48)]
    assert steps == whole


@pytest.mark.parametrize("declared", [None, 20])
def test_that_every_epoch_has_one_order_is_said_once(
    declared: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = {"samples": declared}

    train(build(None, finite(20), stream=stream, length="6 steps", console=True))

    printed = read_printed(capsys)
    assert printed.count("every epoch") == 1
    numbers_of_data = numbers_in(printed.partition(" data ")[2].partition(" plan ")[0])
    states_repeats = {20, 2.4} <= {*numbers_of_data}  # rows of the stream, read so often
    assert states_repeats == (declared is None)


def test_nothing_is_said_of_epochs_where_no_row_is_read_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(build(None, finite(20), length="2 steps", console=True))

    assert "every epoch" not in capsys.readouterr().out


def test_a_resumed_run_says_in_its_header_how_often_rows_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(build(tmp_path / "run", finite(25), length="10 steps", stop_after="4 steps"))
    run = build(tmp_path / "run", finite(25), length="10 steps", console=True)

    description = run.parts.pipeline.tape.in_words()
    train(run)

    rows_and_times = [number for number in numbers_in(description) if number in (25, 3.2)]
    assert rows_and_times == [25, 3.2]
    assert read_printed(capsys).count("read 3.2 times") == 1


@pytest.mark.slow
def test_a_declared_number_of_rows_makes_epochs(tmp_path: Path) -> None:
    declared = {"samples": 24}
    run = build(tmp_path / "run", stream=declared, length="2 epochs", evaluate_every="1 epochs")

    steps = train(run)

    assert run.parts.length.steps == 6
    assert rows_read(steps) == 2 * list(range(24))
    assert Shards(tmp_path / "run" / "tape").look() == 24


@pytest.mark.slow
def test_fewer_rows_than_were_declared_are_refused() -> None:
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


def build_heavy(run_dir: Path, **changes: Any) -> sf.Run:
    """A run whose rows take three times the size of its tape."""
    return build(run_dir, heavy, **(HEAVY | changes))


@pytest.fixture(scope="module")
def heavy_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A finished run that has dropped rows, and its steps."""
    run_dir = tmp_path_factory.mktemp("heavy") / "run"
    steps = train(build_heavy(run_dir, stop_after="40 steps"))
    steps += train(build_heavy(run_dir))
    return run_dir, steps


@pytest.mark.slow
def test_old_rows_are_dropped(heavy_run: tuple[Path, list[Any]]) -> None:
    run_dir, steps = heavy_run

    sizes = [file.stat().st_size for file in (run_dir / "tape").glob("rows-*")]

    assert steps == train(build(None, heavy, length="60 steps"))
    assert sum(sizes) < 2_000_000 < 60 * 8 * 8_000
    assert 0 < build_heavy(run_dir).parts.pipeline.tape.first_step(8) <= 55


@pytest.mark.slow
def test_the_plan_says_from_which_step_on_the_rows_are_there(
    heavy_run: tuple[Path, list[Any]],
) -> None:
    run = build_heavy(heavy_run[0])
    first = run.parts.pipeline.tape.first_step(8)

    lines = batch_arithmetic(run.parts, None)

    assert any(f"at step {first:,} or later" in line for line in lines)


@pytest.mark.slow
def test_a_step_whose_rows_are_dropped_is_not_replayed(heavy_run: tuple[Path, list[Any]]) -> None:
    run_dir, _ = heavy_run
    run = build_heavy(run_dir)
    first = run.parts.pipeline.tape.first_step(8)

    with refused("stream-steps-dropped", DataError, first=first):
        replay_step(run.parts, first - 1, path=run_dir, samples=1, say=None)
    replayed = replay_step(build_heavy(run_dir).parts, 57, path=run_dir, samples=1, say=None)
    assert replayed.logged is None or replayed.logged.equal


@pytest.mark.slow
def test_steps_whose_rows_are_dropped_are_not_proved(heavy_run: tuple[Path, list[Any]]) -> None:
    run_dir, _ = heavy_run
    run = build_heavy(run_dir)
    first = run.parts.pipeline.tape.first_step(8)
    saved = sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))
    first_saved = next(step for step in saved if step >= first)

    verdict = verify(
        run,
        check_files(run_dir),
        rebuild=lambda _: build_heavy(run_dir),
        steps="all",
        windows=5,
        seed=None,
        tolerance=0.0,
        say=None,
        progress_fn=None,
    )

    assert not verdict.problems
    assert verdict.outcomes
    unproved = [line for line in verdict.not_proved if line.startswith("steps 0 to ")]
    assert len(unproved) == 1, "no advice to repeat what cannot be repeated"
    assert unproved[0].startswith(f"steps 0 to {first_saved}: ")


@pytest.mark.slow
def test_a_full_tape_asks_for_a_checkpoint(tmp_path: Path) -> None:
    train(build_heavy(tmp_path / "run", save_every="1000 steps"))

    checkpoints = list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(checkpoints) > 3


@pytest.mark.slow
def test_a_stream_that_ends_behind_dropped_rows_is_an_error(tmp_path: Path) -> None:
    with refused("stream-repeats-dropped-rows", DataError, rows=300):
        train(build(tmp_path / "run", lambda: itertools.islice(heavy(), 300), **HEAVY))


def test_epochs_that_do_not_fit_on_the_tape_are_an_error(tmp_path: Path) -> None:
    with refused("stream-tape-full", DataError, setting="tape_size"):
        train(build_heavy(tmp_path / "run", stream={"tape_size": "1 MB", "samples": 240}))


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
def test_a_disk_that_fails_is_an_error_and_the_run_goes_on(tmp_path: Path) -> None:
    class FullAfterTwoAppends(stream_runs.Disk):
        appends = 0

        def append(self, handle: int, data: memoryview) -> None:
            if threading.current_thread().name == "surefoot-tape":
                self.appends += 1
                if self.appends >= 3:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().append(handle, data)

    run_dir = tmp_path / "run"

    with refused("stream-tape-not-written", DataError):
        train(build(run_dir, heavy, disk=FullAfterTwoAppends(), length="60 steps"))
    steps = train(build(run_dir, heavy, length="60 steps"))

    assert max(by_index(steps)) == 59


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


@pytest.mark.slow
def test_nothing_is_left_behind_by_a_run_without_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = build(None)

    run.train()
    assert run.parts.pipeline.tape.recorder is None

    del run
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

    def start(marker: Path) -> Forked:
        with open(os.devnull, "w") as nowhere:
            process = Forked(partial(build, None, partial(stalling, marker)), stdout=nowhere)
        process.stdin.close()
        return process

    def list_tapes() -> set[Path]:
        return {*tmp_path.glob(f"{PREFIX}*")}

    markers = [tmp_path / "killed", tmp_path / "alive"]
    killed, alive = [start(marker) for marker in markers]
    assert wait_until(lambda: all(marker.exists() for marker in markers))
    tapes = list_tapes()
    assert len(tapes) == 2
    os.kill(killed.pid, signal.SIGTERM)
    assert killed.wait() == -signal.SIGTERM

    build(None)
    assert tapes <= list_tapes()  # too young to be removed

    for tape in tapes:
        os.utime(tape, (0, 0))
    build(None)
    (of_alive,) = tapes & list_tapes()

    os.kill(alive.pid, signal.SIGKILL)
    alive.wait()
    build(None)
    assert not of_alive.exists()


def late(marker: Path) -> Iterator[Any]:
    wait_until(marker.exists)
    yield from finite(100)()


def test_a_stream_whose_first_row_is_late_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("surefoot.data.streams.tape._SLOW_S", 0.0)
    announced = tmp_path / "announced"
    printed = list[str]()

    def note_and_go(*values: Any, **_: Any) -> None:
        printed.append(str(values[0]))
        announced.touch()

    monkeypatch.setattr("builtins.print", note_and_go)

    build(None, partial(late, announced), console=True)

    assert numbers_in(printed[0]) == [7]


def test_batches_of_hugging_face_are_no_rows() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": list(range(12))}).to_iterable_dataset(num_shards=3)
    batched = rows.batch(4)
    sources = [
        batched,
        rows.with_format("torch").batch(4),
        batched.map(dict).shuffle(seed=0).take(2),
    ]

    for source in sources:
        with refused("stream-source-of-batches", DataError, batch_size=4):
            sf.data.Stream(source)


def test_rows_of_hugging_face_are_taken() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": list(range(12))}).to_iterable_dataset(num_shards=3)
    batched = rows.batch(4)

    def join(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": list(itertools.chain(*batch["x"]))}

    sf.data.Stream(rows)
    sf.data.Stream(rows.batch(by_column="x"))
    sf.data.Stream(batched.map(join, batched=True))
    sf.data.Stream(lambda: iter(batched))


def test_batches_of_webdataset_are_no_rows() -> None:
    webdataset = pytest.importorskip("webdataset")
    rows = webdataset.WebDataset("rows.tar", shardshuffle=False).decode().to_tuple("x")

    with refused("stream-source-of-batches", DataError, batch_size=4):
        sf.data.Stream(rows.batched(4))
    with refused("stream-source-of-batches", DataError, batch_size=5):
        sf.data.Stream(rows.batched(batchsize=5))
    with refused("stream-source-of-batches", DataError, batch_size=3):
        sf.data.Stream(webdataset.WebLoader(rows, batch_size=3))
    sf.data.Stream(rows.batched(4).unbatched())


@pytest.mark.slow
def test_a_directory_of_ones_own_holds_the_tape(uninterrupted: list[Any], tmp_path: Path) -> None:
    directory = tmp_path / "tape"
    directory.mkdir()
    (directory / "mine.json").write_text("{}")
    stream = {"directory": directory}

    steps = train(build(tmp_path / "run", stream=stream, stop_after="7 steps"))
    steps += train(build(tmp_path / "run", stream=stream))
    of_another_run = train(build(None, broken_after(0), stream=stream))

    assert steps == uninterrupted
    assert of_another_run == uninterrupted
    assert not (tmp_path / "run" / "tape").exists()
    assert (directory / "mine.json").read_text() == "{}"


@pytest.mark.slow
def test_a_directory_in_use_holds_no_second_tape(tmp_path: Path) -> None:
    stream = {"directory": tmp_path / "tape"}

    with build(None, stream=stream), refused("stream-tape-locked", path=tmp_path / "tape"):
        build(None, stream=stream).train()


@pytest.mark.slow
def test_only_runs_with_a_stream_have_a_tape_in_their_checkpoints(tmp_path: Path) -> None:
    def train_and_read_state(name: str, source: Any) -> dict[str, Any]:
        train(build(tmp_path / name, source, length="4 steps"))
        state = tmp_path / name / "checkpoints/step-00000004/state.json"
        return json.loads(state.read_text())

    assert train_and_read_state("stream", endless)["tape"]["rows"] == 32
    assert "tape" not in train_and_read_state("list", Drawn(40))


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
    ("settings", "problem"),
    [
        ({"tape_size": "10"}, "[stream-tape-too-small]"),
        ({"tape_size": "much"}, "with a unit"),
        ({"samples": 0}, "[setting-out-of-range]"),
        ({"encode_fn": 3}, "[setting-out-of-range]"),
        ({"encode": len}, "encode_fn"),
    ],
)
def test_a_wrong_setting_of_a_stream_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sf.data.Stream(endless, **settings)
    assert problem in str(caught.value)


def test_a_loader_of_batches_is_no_stream() -> None:
    with refused("stream-source-of-batches", DataError, source="DataLoader", batch_size=4):
        sf.data.Stream(DataLoader(Plain(), batch_size=4))


def test_a_class_is_no_stream() -> None:
    with refused("stream-source-is-class", DataError, source="Plain"):
        sf.data.Stream(Plain)


# --- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [endless, Plain(), sf.data.Stream(endless)])
def test_a_stream_as_a_split_needs_a_number_of_rows_and_the_cure_can_be_typed(data: Any) -> None:
    with refused("split-stream-without-end", DataError, split="val") as caught:
        build(None, splits={"val": sf.Split(data)})
    (remedy,) = caught.value.remedies
    source = data.source if isinstance(data, sf.data.Stream) else data

    typed = remedy.partition(": ")[2].replace("1000", "3")
    run = build(None, splits={"val": eval(typed, {"sf": sf, "data": source})})

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


def test_rows_of_a_stream_as_a_split_are_scored_as_those_of_a_list(tmp_path: Path) -> None:
    listed = {"splits": {"val": sf.Split(Drawn(10))}, "evaluate_every": "4 steps"}
    train(build(tmp_path / "list", **listed, length="8 steps"))

    train(build(tmp_path / "run", **scored(finite(30), 10), length="8 steps"))

    assert len(val_losses(tmp_path / "list")) == 2
    assert val_losses(tmp_path / "run") == val_losses(tmp_path / "list")


def test_the_first_rows_of_a_split_are_recorded_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    settings = scored(counted(30, log), 10) | {"length": "2 steps", "evaluate_every": "2 steps"}
    run = build(tmp_path / "run", **settings)
    recorded = run.parts.evaluator.splits["val"].data
    temporary = recorded.tape.directory
    assert temporary.exists()

    train(run)
    read = build(tmp_path / "run", **settings).parts.evaluator.splits["val"].data

    assert log.read_text() == "x"  # the rows are those of the start, whatever the source gives
    assert Shards(tmp_path / "run" / "tapes" / "split-val").look() == 10
    assert fingerprint(read) == fingerprint(recorded)
    assert not temporary.exists()


def test_a_stopped_run_goes_on_with_the_rows_of_its_split(tmp_path: Path) -> None:
    log = tmp_path / "log"
    settings = scored(counted(30, log), 10) | {"length": "8 steps"}
    whole = train(build(tmp_path / "a", **settings))
    log.unlink()

    steps = train(build(tmp_path / "b", **settings, stop_after="4 steps"))
    steps += train(build(tmp_path / "b", **settings, workers=2))

    assert steps == whole
    assert val_losses(tmp_path / "b") == val_losses(tmp_path / "a")


def test_more_rows_of_a_split_than_were_recorded_are_refused(tmp_path: Path) -> None:
    source = finite(30)
    train(build(tmp_path, **scored(source, 10), length="8 steps", stop_after="4 steps"))
    with refused("split-recorded-with-fewer-rows", split="val", recorded=10, samples=20):
        build(tmp_path, **scored(source, 20), length="8 steps")


def test_a_split_of_a_stream_that_ends_early_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(build(None, **scored(finite(6), 10), length="2 steps", console=True))

    printed = read_printed(capsys)
    assert re.search(r"split 'val': .*\b6 rows of finite\.<locals>\.<lambda>", printed)
    assert "samples = 10" in printed


def test_a_split_of_an_empty_stream_is_refused() -> None:
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
    (remedy,) = caught.value.remedies

    typed = remedy.partition(": ")[2].replace("1000", "3")
    split = eval(typed, {"sf": sf, "loader": loader})

    assert split.batch_size == 4
    assert split.data.samples == 3


def test_a_decode_fn_with_a_generator_of_its_own_is_refused() -> None:
    generator = np.random.default_rng(0)

    def augment(recorded: dict[str, Any]) -> tuple[torch.Tensor, int]:
        return recorded["x"] + generator.random(), recorded["y"]

    with refused("sample-not-repeatable", DataError):
        build(None, stream={"decode_fn": augment})


def test_batches_in_tokens_are_refused() -> None:
    with refused("batch-size-of-unknown-lengths", setting="batch_size"):
        build(None, batch_size="64 tokens", micro_batch_size=None)


def test_rows_of_a_split_in_the_first_rows_of_the_stream_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leakage_check, "perf_counter", lambda: 0.0)  # however busy the machine is
    held_out = [input_and_label(row(number)) for number in range(4)]
    splits = {"val": sf.Split(held_out)}

    train(build(tmp_path / "run", stream=AS_RECORDED, splits=splits, length="2 steps"))

    (record,) = sf.load(tmp_path / "run").records("data_check")
    assert record["samples"] == 16
    assert record["checked"] == 8
    assert record["overlap"]["val"]["overlapping"] == 4


# --- other libraries ------------------------------------------------------------------------------


@pytest.mark.slow
def test_streaming_data_sets_of_hugging_face(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {
        "x": [row(number)["x"].tolist() for number in range(200)],
        "y": [number % 3 for number in range(200)],
    }
    rows = datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=3)
    shuffled = rows.shuffle(seed=3, buffer_size=20)
    stream = {"decode_fn": lambda recorded: (torch.tensor(recorded["x"]), recorded["y"])}
    steps = train(build(tmp_path / "a", shuffled, stream=stream))
    train(build(tmp_path / "b", shuffled, stream=stream, stop_after="5 steps"))

    notes = train_and_read_notes(tmp_path / "b", shuffled, capsys, stream=stream)

    assert "WARNING" not in notes
    assert rows_read(steps) == list(range(160))
    uninterrupted_tape = Shards(tmp_path / "a" / "tape")
    assert Shards(tmp_path / "b" / "tape").entry_before(160) == uninterrupted_tape.entry_before(160)


@pytest.mark.slow
def test_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    file = str(tmp_path / "rows-0.tar")
    with webdataset.TarWriter(file) as tar:
        for number in range(40):
            inputs = row(number)["x"].numpy()
            tar.write({"__key__": f"{number:04d}", "x.npy": inputs, "y.cls": number % 3})
    rows = webdataset.WebDataset(file, shardshuffle=False).decode()

    def decode_row(recorded: dict[str, Any]) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(recorded["x.npy"]), recorded["y.cls"]

    settings = {"stream": {"decode_fn": decode_row}, "length": "5 steps"}

    steps = train(build(tmp_path / "run", rows, **settings, stop_after="3 steps"))
    steps += train(build(tmp_path / "run", rows, **settings))

    assert steps == train(build(None, finite(40), stream=AS_RECORDED, length="5 steps"))
