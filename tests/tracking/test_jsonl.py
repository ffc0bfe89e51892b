"""What is read of a file of records, whatever it holds and however much is read at once; 1
second.
"""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any

import pytest

from in_one import in_one
from surefoot.tools.report.series import read_reported_run
from surefoot.tracking import appended_file
from surefoot.tracking.jsonl import (
    RecordReader,
    line,
    parse_lines,
    parse_record,
    read_records,
    records,
    resume_count,
)
from written_runs import falling, layers, scores, train, written


def write_records(directory: Path, *lines: dict[str, Any]) -> Path:
    """A file of these records, in a new directory."""
    return written(directory, list(lines)) / "metrics.jsonl"


def records_of_six_sessions(seed: int) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    lines: list[dict[str, Any]] = []
    step = 0
    for _ in range(6):
        for _ in range(generator.randrange(8)):
            step += generator.randrange(1, 4)
            lines.append(generator.choice([train(step), scores(step, loss=float("nan"))]))
        step = generator.randrange(step + 1)
        lines.append({"kind": "resume", "step": step})
    return lines


@in_one
@pytest.mark.parametrize("seed", range(20))
def test_what_a_resume_supersedes_is_left_out(seed: int, tmp_path: Path) -> None:
    lines = records_of_six_sessions(seed)
    file = write_records(tmp_path / "run", *lines)
    expected: list[dict[str, Any]] = []
    for record in lines:
        if record["kind"] == "resume":
            expected = [earlier for earlier in expected if earlier["step"] <= record["step"]]
        expected.append(record)

    assert repr(records(file)) == repr(expected)
    for most_bytes in (60, 300, 2000):
        assert repr(read_in_blocks(RecordReader(file), most_bytes)) == repr(expected)


def read_in_blocks(reader: RecordReader, most_bytes: int) -> list[dict[str, Any]]:
    """All records, of which those before a new start are dropped."""
    lines: list[dict[str, Any]] = []
    while True:
        block = reader.read(most_bytes=most_bytes)
        if block.starts_over:
            lines = []
        lines += block.records
        if not block.has_more:
            return lines


def test_lines_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    good = json.dumps(train(3))
    lines = [
        good,
        '{"kind": "train"',
        "[1]",
        '{"step": 1}',
        '{"kind": 4, "step": 1}',
        '{"kind": "a", "step": "1"}',
        '{"kind": "a", "step": true}',
        '{"kind": "a", "step": -1}',
        "[" * 100_000,
        "\x00\xff",
        "",
        good[:-9],
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    assert list(read_records(file)) == [train(3)]


RESUME = {"kind": "resume", "step": 1}


def test_what_stands_behind_a_size_is_not_read(tmp_path: Path) -> None:
    first_lines = write_records(tmp_path / "first", train(1), train(2))
    size_bytes = first_lines.stat().st_size
    file = write_records(tmp_path / "all", train(1), train(2), RESUME, train(3))
    assert list(read_records(file, size_bytes=size_bytes)) == [train(1), train(2)]
    assert list(read_records(file)) == [train(1), RESUME, train(3)]


def test_a_resume_is_found_wherever_a_block_ends(tmp_path: Path) -> None:
    file = write_records(tmp_path / "run", train(1), train(2), RESUME, train(3))
    for most_bytes in range(1, file.stat().st_size + 2):
        reader = RecordReader(file)
        reader.read(most_bytes=most_bytes)
        assert len(reader.resumed_at) == 1, most_bytes
    assert resume_count(file) == 1


def test_a_last_record_without_its_line_feed_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    text = line(train(1))
    reader = RecordReader(file)

    def read_after(content: str) -> list[dict[str, Any]]:
        file.write_text(content)
        return reader.read().records

    assert read_after(text[:-1]) == []
    assert read_after(text) == [train(1)]
    assert read_after(f"{text}\n") == []
    assert read_after(f"{text}\n{line(train(2))}\n") == [train(2)]


def test_what_happened_to_a_run_outlives_a_resume(tmp_path: Path) -> None:
    lines = [
        train(5),
        {"kind": "event", "step": 9, "event": "stopped by SIGTERM"},
        {"kind": "resume", "step": 4},
        train(6),
    ]
    run = read_reported_run(written(tmp_path / "run", lines))
    events = [event.what for event in run.records.events]
    assert events == ["stopped by SIGTERM", "resumed after step 4"]
    assert list(run.train["loss"].points()) == [(6, 2.0)]


def test_a_number_that_is_not_finite_comes_back(tmp_path: Path) -> None:
    (record,) = read_records(write_records(tmp_path / "run", scores(3, loss=math.nan)))
    assert math.isnan(record["val/loss"])


def test_a_nested_number_that_is_not_finite_comes_back(tmp_path: Path) -> None:
    nonfinite = {"grad_norm": {"up.weight": None}, "nonfinite": {"grad_norm/up.weight": "inf"}}
    (record,) = read_records(write_records(tmp_path / "run", layers(10) | nonfinite))
    assert record["grad_norm"] == {"up.weight": math.inf}


def test_of_a_window_with_a_bad_step_the_loss_of_the_others_is_drawn_beside_its_mark(
    tmp_path: Path,
) -> None:
    lines = [
        train(1),
        train(2, math.nan, loss_applied=1.5),
        train(3, math.nan, loss_applied=0.0),
    ]
    loss = read_reported_run(written(tmp_path / "run", lines)).train["loss"]
    assert loss.points() == [(1, 2.0), (2, 1.5)]
    assert loss.strange == (2, 3)


def test_of_many_samples_a_few_at_even_distances_and_the_last_are_kept(tmp_path: Path) -> None:
    lines = [{"kind": "sample", "step": step, "text": f"text {step}"} for step in range(1, 101)]
    samples = read_reported_run(written(tmp_path / "run", lines)).records.samples
    assert [step for step, _ in samples] == [1, 17, 33, 49, 65, 81, 97, 100]


def peak_bytes_of_reading(run: Path) -> int:
    tracemalloc.start()
    read_reported_run(run)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak_bytes


def test_the_memory_of_reading_does_not_grow_with_the_records(tmp_path: Path) -> None:
    short = written(tmp_path / "short", falling(100_000))
    long = written(tmp_path / "long", falling(400_000))
    peak_bytes_of_reading(short)  # the first allocates what stays
    assert peak_bytes_of_reading(long) < 1.1 * peak_bytes_of_reading(short)


USUAL_LINES = [f"{json.dumps(record)}\n".encode() for record in falling(400)]
NUMBERS = [b"0.1", b"1e-7", b"-0.0", b"5e-324", b"2", b"1e999", b"NaN", b"18446744073709551615"]
TEXTS = [b'"\xc3\xa9"', b'"\\ud800"', b'"\\u00e9\r"', b'"\xff"']
UNUSUAL_LINES = [
    *(b'{"kind": "train", "step": 3, "loss": %s}\n' % number for number in NUMBERS),
    *(b'{"kind": "sample", "step": 1, "text": %s}\n' % text for text in TEXTS),
    b'{"kind": "train", "step": 3, "loss": null, "nonfinite": {"loss": "inf"}}\n',
    b'{"kind": "train"}\n',
    USUAL_LINES[0][:20],
    b"\n",
    b'{"kind": "a", "step": 1}, {"kind": "b", "step": 2}\n',
    b'{"kind": "a", "step": 1, "x": [\n',
]


def assert_parsed_as_one_by_one(block: bytes) -> None:
    one_by_one = [parse_record(text) for text in BytesIO(block)]
    assert repr(parse_lines(block)) == repr(one_by_one)


def test_lines_parsed_together_are_those_parsed_one_by_one() -> None:
    assert_parsed_as_one_by_one(b"".join(USUAL_LINES))


@pytest.mark.parametrize("unusual", UNUSUAL_LINES)
def test_an_unusual_line_is_parsed_among_others_as_by_itself(unusual: bytes) -> None:
    first, second, third, *_ = USUAL_LINES
    assert_parsed_as_one_by_one(first + second + unusual + third)


ODD = [
    b'{"kind": "train", "step": 7, "x": 2.5',
    b'{"kind": "train", "step": 7,, "x": 2.5}',
    b'{"kind": "train", "step": 7, "x": 2.5}}',
    b'{"kind": "train", "step": 7.0, "x": 1.5}',
    b'{"kind": "train", "step": -1, "x": 2.5}',
    b'{"kind": "train", "step": 7, "x": null, "nonfinite": {"x": "nan"}}',
    b'{"kind": "train", "step": 7, "x": 1, "kind": "eval"}',
    b'{"step": 7, "kind": "train", "x": 2.5}',
    b'{"kind": "sample", "step": 1, "text": "\\ud800"}',
    b'{"kind": "eval", "step": 7, "val/loss": 0.5}',
    b"",
    b"{}",
    b"\x00,,}",
]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("place", [0, 35, 80])
def test_an_odd_line_leaves_the_others_as_they_are(odd: bytes, place: int) -> None:
    texts = [line(train(step)).encode() for step in range(80)]
    texts.insert(place, odd)
    assert_parsed_as_one_by_one(b"".join(text + b"\n" for text in texts))


class PartlyWritten(FileIO):
    """A file of which one write accepts at most three bytes."""

    def write(self, content: Any) -> int:
        return super().write(content[:3])


def test_a_deleted_file_is_made_again_in_whole_if_a_write_accepts_only_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = appended_file.AppendedFile(path)
    file.append(b"one\ntwo\nthree\n")
    path.unlink()
    monkeypatch.setattr(file, "_open", lambda: PartlyWritten(path, "a+"))
    file.make_again()
    file.close()
    assert path.read_bytes() == b"one\ntwo\nthree\n"
