"""A run's records, thinned: which bytes are read, what a resume supersedes, and a cache that is not
to be trusted; 1 second.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from surefoot.config.paths import open_regular, user_cache
from surefoot.report import thinned
from surefoot.report.headline import headline
from surefoot.report.series import ReportedRun, read_reported_run
from surefoot.report.thinned import Row, ThinnedRun, read_head, read_thinned
from surefoot.tracking.jsonl import line, records
from written_runs import falling, layers, train, written

ROW = Row(
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


class Counted:
    """Counts the bytes that are read of files called metrics.jsonl."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def open(self, path: Path) -> BinaryIO:
        file = open_regular(path)
        return file if path.name != "metrics.jsonl" else CountedFile(file, self)  # type: ignore[return-value]


class CountedFile(io.BufferedReader):
    def __init__(self, file: BinaryIO, counted: Counted) -> None:
        super().__init__(os.fdopen(os.dup(file.fileno()), "rb", buffering=0))
        file.close()
        self.counted = counted

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(size)
        self.counted.read_bytes += len(content)
        return content

    def readline(self, size: int | None = -1, /) -> bytes:
        content = super().readline(size)
        self.counted.read_bytes += len(content)
        return content


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    counted = Counted()
    monkeypatch.setattr(thinned, "open_regular", counted.open)
    return counted


def append(run: Path, *more: dict[str, Any]) -> int:
    with (run / "metrics.jsonl").open("a") as file:
        return file.write("".join(f"{line(record)}\n" for record in more))


def read_all(run: ThinnedRun, **limits: int) -> ThinnedRun:
    for _ in range(10_000):
        if not run.advance(**limits):
            return run
    raise AssertionError("reading never ends")


def same(run: ThinnedRun, path: Path) -> None:
    """It holds what the report reads."""
    reported = read_reported_run(path)
    for kind in ("train", "users", "scores"):
        ours, theirs = getattr(run.recorded, kind), getattr(reported.recorded, kind)
        assert {name: curve.to_json() for name, curve in ours.items()} == {
            n: c.to_json() for n, c in theirs.items()
        }
    for name in ("last_step", "count", "over", "skipped", "eta_s"):
        assert getattr(run.recorded, name) == getattr(reported.recorded, name)
    assert headline(ReportedRun(reported.files, run.recorded, {}, (), running=False)) == headline(
        reported
    )


@pytest.mark.parametrize("most_bytes", [600, 5_000, 1_000_000])
def test_slices_of_any_size_read_what_the_report_reads(tmp_path: Path, most_bytes: int) -> None:
    told = [
        *falling(2000),
        layers(2000),
        train(2010, float("nan")),
        {"kind": "event", "step": 2010, "event": "failed"},
    ]
    path = written(tmp_path / "run", told)
    same(read_all(ThinnedRun(path), most_bytes=most_bytes), path)


@pytest.mark.parametrize("most_bytes", [600, 1_000_000])
@pytest.mark.parametrize("late", [False, True])
def test_what_a_resume_supersedes_is_dropped(tmp_path: Path, most_bytes: int, late: bool) -> None:
    first, again = (
        falling(500),
        [{"kind": "resume", "step": 200}, *(train(step, 9.0) for step in range(210, 400, 10))],
    )
    path = written(tmp_path / "run", first if late else first + again)
    run = read_all(ThinnedRun(path), most_bytes=most_bytes)
    if late:
        append(path, *again)
        read_all(run, most_bytes=most_bytes)
    same(run, path)
    assert run.recorded.train["loss"].last == (390, 9.0)
    history = [record["step"] for record in run.collected.by_kind()["train"]]
    assert history == [
        record["step"] for record in records(path / "metrics.jsonl") if record["kind"] == "train"
    ]


def test_only_new_bytes_are_read_also_by_another_reader(tmp_path: Path, counted: Counted) -> None:
    path = written(tmp_path / "run", falling(3000))
    size = (path / "metrics.jsonl").stat().st_size
    run = read_all(ThinnedRun(path))
    assert counted.read_bytes == size
    run.save(ROW)
    more = append(path, train(3010), train(3020))
    counted.read_bytes = 0
    assert read_head(path) is not None
    other = read_thinned(path)
    assert counted.read_bytes == 0
    read_all(other)
    assert counted.read_bytes == more + 256  # the last bytes are compared
    same(other, path)


def test_a_line_that_is_not_complete_is_read_when_it_is(tmp_path: Path) -> None:
    path, text = written(tmp_path / "run", falling(100)), f"{line(train(110, 7.0))}\n"
    run = read_all(ThinnedRun(path))
    for part in (text[:20], text[20:]):
        assert run.recorded.last_step == 100
        with (path / "metrics.jsonl").open("a") as file:
            file.write(part)
        read_all(run)
    assert run.recorded.train["loss"].last == (110, 7.0)


def test_another_file_of_the_same_name_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = written(tmp_path / "run", falling(300))
    run = read_all(ThinnedRun(path))
    (path / "metrics.jsonl").write_text(
        "".join(f"{line(train(step, 5.0))}\n" for step in range(1, 400))
    )
    read_all(run)
    same(run, path)


def test_memory_is_bounded(tmp_path: Path) -> None:
    path = written(tmp_path / "run", [train(step, 1.0 + step % 7) for step in range(1, 9000)])
    run = read_all(ThinnedRun(path))
    assert len(run.recorded.train["loss"].rows()) <= 600
    assert len(run.collected.by_kind()["train"]) <= 2000


def saved(tmp_path: Path, cache: Path) -> tuple[Path, Path]:
    path = written(tmp_path / "run", falling(300))
    read_all(ThinnedRun(path)).save(ROW)
    return path, next(cache.iterdir())


@pytest.mark.parametrize("part", range(4))
def test_a_damaged_cache_is_thrown_away(tmp_path: Path, cache: Path, part: int) -> None:
    path, file = saved(tmp_path, cache)
    content = file.read_bytes()
    same(read_thinned(path), path)
    at = [10, 80, len(content) // 2, len(content) - 30][part]
    file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    assert read_thinned(path).recorded.count == 0
    assert (read_head(path) is None) == (part < 2)
    file.write_bytes(content[: len(content) * part // 4])
    assert read_thinned(path).recorded.count == 0


def test_the_cache_of_another_run_or_version_is_ignored(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file = saved(tmp_path, cache)
    other = written(tmp_path / "other", falling(500))
    read_all(ThinnedRun(other)).save(ROW)
    (theirs,) = set(cache.iterdir()) - {file}
    file.write_bytes(theirs.read_bytes())
    assert read_head(path) is None
    assert read_thinned(path).recorded.count == 0
    assert read_head(other) is not None
    monkeypatch.setattr(thinned, "_FORMAT", "surefoot run cache 1 0.0.0")
    assert read_head(other) is None
    assert read_thinned(other).recorded.count == 0


def test_a_pickle_in_the_cache_runs_nothing(tmp_path: Path, cache: Path) -> None:
    path, file = saved(tmp_path, cache)
    file.write_bytes(b"cos\nsystem\n(S'touch " + os.fsencode(tmp_path / "ran") + b"'\ntR.")
    assert read_thinned(path).recorded.count == 0
    assert not (tmp_path / "ran").exists()


def test_nothing_is_written_into_the_run_and_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "run", falling(300))
    before = sorted(path.rglob("*"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    read_all(ThinnedRun(path)).save(ROW)
    assert sorted(path.rglob("*")) == before
    assert read_thinned(path).recorded.count == 0


def test_a_cache_without_records_for_diagnose_is_read(tmp_path: Path, cache: Path) -> None:
    path = written(tmp_path / "run", [{"kind": "sample", "step": 3, "text": "a"}])
    run = read_all(ThinnedRun(path))
    run.save(ROW)
    assert read_thinned(path).recorded.count == run.recorded.count == 1
