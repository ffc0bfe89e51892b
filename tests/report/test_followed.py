"""A run that is followed: which bytes are read, what a resume supersedes, and a cache that is not
to be trusted; 1 second.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from stated import numbers_in
from surefoot.config.paths import open_regular, user_cache
from surefoot.tools.report import followed
from surefoot.tools.report.followed import FollowedRun, RunRow, read_followed, read_head
from surefoot.tools.report.headline import Headline, headline
from surefoot.tools.report.series import ReportedRun, read_reported_run
from surefoot.tools.report.tables import _headline_tile
from surefoot.tracking import jsonl
from surefoot.tracking.jsonl import line, records
from surefoot.tracking.run_records import MOST
from written_runs import falling, layers, train, written

ROW = RunRow(
    step=1,
    planned=None,
    state="dead",
    records=1,
    eta_s=None,
    metric=None,
    last=None,
    best=None,
    best_step=None,
    spark=[],
    findings=[],
    alerted=[],
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return user_cache("runs")


class ByteCount:
    """Counts the bytes that are read of files called metrics.jsonl."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def open(self, path: Path) -> BinaryIO:
        file = open_regular(path)
        if path.name == "metrics.jsonl":
            return CountedFile(file, self)  # type: ignore[return-value]
        return file


class CountedFile(io.BufferedReader):
    def __init__(self, file: BinaryIO, count: ByteCount) -> None:
        super().__init__(os.fdopen(os.dup(file.fileno()), "rb", buffering=0))
        file.close()
        self.count = count

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self.count.read_bytes += len(content)
        return content

    def readline(self, size: int | None = -1, /) -> bytes:
        content = super().readline(size)
        self.count.read_bytes += len(content)
        return content


@pytest.fixture
def byte_count(monkeypatch: pytest.MonkeyPatch) -> ByteCount:
    count = ByteCount()
    monkeypatch.setattr(jsonl, "open_regular", count.open)
    return count


def append(run: Path, *more: dict[str, Any]) -> int:
    with (run / "metrics.jsonl").open("a") as file:
        return file.write("".join(f"{line(record)}\n" for record in more))


def read_all(run: FollowedRun, **limits: int) -> FollowedRun:
    for _ in range(10_000):
        if not run.advance(**limits):
            return run
    raise AssertionError("reading never ends")


def assert_as_reported(run: FollowedRun, path: Path) -> None:
    """It holds what the report reads."""
    reported = read_reported_run(path)
    expected_tables = reported.records.tables()
    for name, table in run.records.tables().items():
        expected = expected_tables[name]
        assert table.state() == expected.state()
        for kind, array in table.arrays().items():
            np.testing.assert_array_equal(array, expected.arrays()[kind])
    assert run.records.state() == reported.records.state()
    assert headline(ReportedRun(reported.files, run.records)) == headline(reported)


@pytest.mark.parametrize("most_bytes", [600, 5_000, 1_000_000])
def test_slices_of_any_size_read_what_the_report_reads(tmp_path: Path, most_bytes: int) -> None:
    lines = [
        *falling(2000),
        layers(2000),
        train(2010, float("nan")),
        {"kind": "event", "step": 2010, "event": "failed"},
    ]
    path = written(tmp_path / "run", lines)
    assert_as_reported(read_all(FollowedRun(path), most_bytes=most_bytes), path)


@pytest.mark.parametrize("most_bytes", [600, 1_000_000])
@pytest.mark.parametrize("is_followed_before", [False, True])
def test_what_a_resume_supersedes_is_dropped(
    tmp_path: Path, most_bytes: int, is_followed_before: bool
) -> None:
    first = falling(500)
    resume = {"kind": "resume", "step": 200}
    second = [train(step, 9.0) for step in range(210, 400, 10)]
    path = written(tmp_path / "run", first)
    run = FollowedRun(path)
    if is_followed_before:
        read_all(run, most_bytes=most_bytes)

    append(path, resume, *second)
    read_all(run, most_bytes=most_bytes)

    assert_as_reported(run, path)
    assert run.records.train.last("loss") == 9.0
    remaining = [record for record in records(path / "metrics.jsonl") if record["kind"] == "train"]
    assert run.records.train.steps.tolist() == [record["step"] for record in remaining]


def test_only_new_bytes_are_read_also_by_another_reader(
    tmp_path: Path, byte_count: ByteCount
) -> None:
    path = written(tmp_path / "run", falling(3000))
    size_bytes = (path / "metrics.jsonl").stat().st_size
    run = read_all(FollowedRun(path))
    assert byte_count.read_bytes == size_bytes
    run.save(ROW)

    new_bytes = append(path, train(3010), train(3020))
    byte_count.read_bytes = 0
    assert read_head(path) is not None
    other = read_followed(path)
    assert byte_count.read_bytes == 0
    read_all(other)
    assert byte_count.read_bytes == new_bytes + 256  # the last bytes are compared
    assert_as_reported(other, path)


def test_a_line_that_is_not_complete_is_read_when_it_is(tmp_path: Path) -> None:
    path = written(tmp_path / "run", falling(100))
    text = f"{line(train(110, 7.0))}\n"
    run = read_all(FollowedRun(path))
    for part in (text[:20], text[20:]):
        assert run.records.last_step == 100
        with (path / "metrics.jsonl").open("a") as file:
            file.write(part)
        read_all(run)
    assert run.records.train.last("loss") == 7.0


def test_another_file_of_the_same_name_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = written(tmp_path / "run", falling(300))
    run = read_all(FollowedRun(path))
    lines = [f"{line(train(step, 5.0))}\n" for step in range(1, 400)]
    (path / "metrics.jsonl").write_text("".join(lines))
    read_all(run)
    assert_as_reported(run, path)


def test_memory_is_bounded(tmp_path: Path) -> None:
    path = written(tmp_path / "run", [train(step, 1.0 + step % 7) for step in range(1, 9000)])
    run = read_all(FollowedRun(path))
    assert len(run.records.train.steps) <= 2 * MOST + 8


def save_cache(tmp_path: Path, cache: Path) -> tuple[Path, Path]:
    """A run that was read, and the file of its cache."""
    path = written(tmp_path / "run", falling(300))
    read_all(FollowedRun(path)).save(ROW)
    (file,) = cache.iterdir()
    return path, file


@pytest.mark.parametrize("place", ["beginning", "head", "middle", "end"])
def test_a_cache_with_a_flipped_bit_is_thrown_away(tmp_path: Path, cache: Path, place: str) -> None:
    path, file = save_cache(tmp_path, cache)
    assert_as_reported(read_followed(path), path)
    content = bytearray(file.read_bytes())
    places = {"beginning": 10, "head": 80, "middle": len(content) // 2, "end": len(content) - 30}
    content[places[place]] ^= 1
    file.write_bytes(content)
    assert read_followed(path).records.count == 0
    head_is_damaged = place in ("beginning", "head")
    assert (read_head(path) is None) == head_is_damaged


@pytest.mark.parametrize("quarters", range(4))
def test_a_cache_that_was_cut_is_thrown_away(tmp_path: Path, cache: Path, quarters: int) -> None:
    path, file = save_cache(tmp_path, cache)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * quarters // 4])
    assert read_followed(path).records.count == 0


def test_the_cache_of_another_run_is_ignored(tmp_path: Path, cache: Path) -> None:
    path, file = save_cache(tmp_path, cache)
    other = written(tmp_path / "other", falling(500))
    read_all(FollowedRun(other)).save(ROW)
    (file_of_other,) = set(cache.iterdir()) - {file}
    file.write_bytes(file_of_other.read_bytes())
    assert read_head(path) is None
    assert read_followed(path).records.count == 0


def test_the_cache_of_another_version_is_ignored(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = save_cache(tmp_path, cache)
    assert read_head(path) is not None
    monkeypatch.setattr(followed, "_FORMAT", "surefoot run cache 1 0.0.0")
    assert read_head(path) is None
    assert read_followed(path).records.count == 0


def test_a_pickle_in_the_cache_runs_nothing(tmp_path: Path, cache: Path) -> None:
    path, file = save_cache(tmp_path, cache)
    file.write_bytes(b"cos\nsystem\n(S'touch " + os.fsencode(tmp_path / "ran") + b"'\ntR.")
    assert read_followed(path).records.count == 0
    assert not (tmp_path / "ran").exists()


def test_nothing_is_written_into_the_run_and_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "run", falling(300))
    files = sorted(path.rglob("*"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    read_all(FollowedRun(path)).save(ROW)
    assert sorted(path.rglob("*")) == files
    assert read_followed(path).records.count == 0


def test_a_cache_without_records_for_diagnose_is_read(tmp_path: Path, cache: Path) -> None:
    path = written(tmp_path / "run", [{"kind": "sample", "step": 3, "text": "a"}])
    run = read_all(FollowedRun(path))
    run.save(ROW)
    assert read_followed(path).records.count == run.records.count == 1


def test_the_tile_of_a_score_that_is_reached_again_names_the_step_that_reached_it_first() -> None:
    main = Headline(
        "val/accuracy", last_step=160, last=0.96, best_step=96, best=0.96, direction="max"
    )
    _, _, note = _headline_tile(main)
    assert numbers_in(note) == [96]
