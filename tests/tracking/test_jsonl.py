"""What is read of a file of records, whatever it holds and however much is read at once; 1
second.
"""

from __future__ import annotations

import json
import random
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


def several_sessions(seed: int) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    found: list[dict[str, Any]] = []
    step = 0
    for _ in range(6):
        for _ in range(generator.randrange(8)):
            step += generator.randrange(1, 4)
            found.append(generator.choice([train(step), scores(step, loss=float("nan"))]))
        step = generator.randrange(step + 1)
        found.append({"kind": "resume", "step": step})
    return found


@in_one
@pytest.mark.parametrize("seed", range(20))
def test_what_a_resume_supersedes_is_left_out(seed: int, tmp_path: Path) -> None:
    told = several_sessions(seed)
    file = written(tmp_path / "run", told) / "metrics.jsonl"
    expected: list[dict[str, Any]] = []
    for record in told:
        if record["kind"] == "resume":
            expected = [before for before in expected if before["step"] <= record["step"]]
        expected.append(record)
    assert repr(records(file)) == repr(expected)
    for most_bytes in (60, 300, 2000):
        assert repr(read_in_blocks(RecordReader(file), most_bytes)) == repr(expected)


def read_in_blocks(reader: RecordReader, most_bytes: int) -> list[dict[str, Any]]:
    """All records, of which those before a new start are dropped."""
    found: list[dict[str, Any]] = []
    while True:
        news = reader.read(most_bytes=most_bytes)
        found = [*news.records] if news.starts_over else [*found, *news.records]
        if not news.has_more:
            return found


def test_lines_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    good = json.dumps(train(3))
    lines = [
        good,
        '{"kind": "train"',
        "[1]",
        '{"step": 1}',
        '{"kind": 4, "step": 1}',
        '{"kind": "a", "step": "1"}',
    ]
    lines += [
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


def test_what_stands_behind_a_size_is_not_read(tmp_path: Path) -> None:
    before = written(tmp_path / "before", [train(1), train(2)]) / "metrics.jsonl"
    now = (
        written(tmp_path / "now", [train(1), train(2), {"kind": "resume", "step": 1}, train(3)])
        / "metrics.jsonl"
    )
    assert list(read_records(now, size_bytes=before.stat().st_size)) == [train(1), train(2)]
    assert list(read_records(now)) == [train(1), {"kind": "resume", "step": 1}, train(3)]


def test_a_resume_is_found_wherever_a_block_ends(tmp_path: Path) -> None:
    lines = [train(1), train(2), {"kind": "resume", "step": 1}, train(3)]
    file = written(tmp_path / "run", lines) / "metrics.jsonl"
    for most_bytes in range(1, file.stat().st_size + 2):
        reader = RecordReader(file)
        reader.read(most_bytes=most_bytes)
        assert len(reader.resumed_at) == 1, most_bytes
    assert resume_count(file) == 1


def test_a_last_record_without_its_line_feed_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    text = line(train(1))
    reader = RecordReader(file)
    for content, found in ((text[:-1], []), (text, [train(1)]), (f"{text}\n", [])):
        file.write_text(content)
        assert reader.read().records == found
    file.write_text(f"{text}\n{line(train(2))}\n")
    assert reader.read().records == [train(2)]


def test_what_happened_to_a_run_outlives_a_resume(tmp_path: Path) -> None:
    told = [
        train(5),
        {"kind": "event", "step": 9, "event": "stopped by SIGTERM"},
        {"kind": "resume", "step": 4},
    ]
    run = written(tmp_path / "run", [*told, train(6)])
    assert [event.what for event in read_reported_run(run).records.events] == [
        "stopped by SIGTERM",
        "resumed after step 4",
    ]
    assert list(read_reported_run(run).train["loss"].points()) == [(6, 2.0)]


def test_numbers_that_are_not_finite_come_back_nested_ones_too(tmp_path: Path) -> None:
    record = layers(10) | {
        "grad_norm": {"up.weight": None},
        "nonfinite": {"grad_norm/up.weight": "inf"},
    }
    (found,) = read_records(written(tmp_path / "run", [record]) / "metrics.jsonl")
    assert found["grad_norm"] == {"up.weight": float("inf")}
    (found,) = read_records(
        written(tmp_path / "other", [scores(3, loss=float("nan"))]) / "metrics.jsonl"
    )
    assert repr(found["val/loss"]) == "nan"


def test_of_a_window_with_a_bad_step_the_loss_of_the_others_is_drawn_beside_its_mark(
    tmp_path: Path,
) -> None:
    told = [
        train(1),
        train(2, float("nan"), loss_applied=1.5),
        train(3, float("nan"), loss_applied=0.0),
    ]
    loss = read_reported_run(written(tmp_path / "run", told)).train["loss"]
    assert (loss.points(), loss.strange) == ([(1, 2.0), (2, 1.5)], (2, 3))


def test_of_many_samples_a_few_at_even_distances_and_the_last_are_kept(tmp_path: Path) -> None:
    told = [{"kind": "sample", "step": step, "text": f"text {step}"} for step in range(1, 101)]
    kept = [step for step, _ in read_reported_run(written(tmp_path / "run", told)).records.samples]
    assert kept == [1, 17, 33, 49, 65, 81, 97, 100]


def test_the_memory_of_reading_does_not_grow_with_the_records(tmp_path: Path) -> None:
    import tracemalloc

    peaks = []
    for count in (10_000, 10_000, 40_000):  # the first allocates what stays
        run = written(tmp_path / f"run-{len(peaks)}", falling(10 * count))
        tracemalloc.start()
        read_reported_run(run)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.1 * peaks[1]


def test_lines_parsed_together_are_those_parsed_one_by_one() -> None:
    usual = [f"{json.dumps(record)}\n".encode() for record in falling(400)]
    number = b'{"kind": "train", "step": 3, "loss": %s}\n'
    numbers = [
        number % each
        for each in (
            b"0.1",
            b"1e-7",
            b"-0.0",
            b"5e-324",
            b"2",
            b"1e999",
            b"NaN",
            b"18446744073709551615",
        )
    ]
    texts = [
        b'{"kind": "sample", "step": 1, "text": %s}\n' % text
        for text in (b'"\xc3\xa9"', b'"\\ud800"', b'"\\u00e9\r"', b'"\xff"')
    ]
    strange = [
        b'{"kind": "train", "step": 3, "loss": null, "nonfinite": {"loss": "inf"}}\n',
        b'{"kind": "train"}\n',
    ]
    torn = [
        usual[0][:20],
        b"\n",
        b'{"kind": "a", "step": 1}, {"kind": "b", "step": 2}\n',
        b'{"kind": "a", "step": 1, "x": [\n',
    ]
    for lines in (
        usual,
        *([*usual[:2], each, usual[2]] for each in numbers + texts + strange + torn),
    ):
        block = b"".join(lines)
        assert repr(parse_lines(block)) == repr([parse_record(text) for text in BytesIO(block)])


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
    lines = b"".join(text + b"\n" for text in texts)
    one_by_one = [parse_record(text) for text in lines.splitlines(keepends=True)]
    assert repr(parse_lines(lines)) == repr(one_by_one)


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
