"""Records one at a time are those that `records` gives, whatever a file holds; 1 second."""

from __future__ import annotations

import json
import random
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from in_one import in_one
from surefoot.report.series import read_reported_run
from surefoot.tracking import jsonl
from surefoot.tracking.jsonl import records, stream_records
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
    run = written(tmp_path / "run", several_sessions(seed))
    assert repr(list(stream_records(run / "metrics.jsonl"))) == repr(records(run / "metrics.jsonl"))


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
    assert list(stream_records(file)) == [train(3)]


def test_what_stands_behind_a_size_is_not_read(tmp_path: Path) -> None:
    before = written(tmp_path / "before", [train(1), train(2)]) / "metrics.jsonl"
    now = (
        written(tmp_path / "now", [train(1), train(2), {"kind": "resume", "step": 1}, train(3)])
        / "metrics.jsonl"
    )
    assert list(stream_records(now, size_bytes=before.stat().st_size)) == [train(1), train(2)]
    assert list(stream_records(now)) == [train(1), {"kind": "resume", "step": 1}, train(3)]


def test_a_resume_is_found_wherever_a_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [train(1), train(2), {"kind": "resume", "step": 1}, train(3)]
    file = written(tmp_path / "run", lines) / "metrics.jsonl"
    for block_bytes in range(1, file.stat().st_size + 2):
        monkeypatch.setattr(jsonl, "_BLOCK_BYTES", block_bytes)
        assert jsonl.resume_count(file) == 1, block_bytes


def test_what_happened_to_a_run_outlives_a_resume(tmp_path: Path) -> None:
    told = [
        train(5),
        {"kind": "event", "step": 9, "event": "stopped by SIGTERM"},
        {"kind": "resume", "step": 4},
    ]
    run = written(tmp_path / "run", [*told, train(6)])
    assert [event.what for event in read_reported_run(run).recorded.events] == [
        "stopped by SIGTERM",
        "resumed after step 4",
    ]
    assert list(read_reported_run(run).recorded.train["loss"].points()) == [(6, 2.0)]


def test_numbers_that_are_not_finite_come_back_nested_ones_too(tmp_path: Path) -> None:
    record = layers(10) | {
        "grad_norm": {"up.weight": None},
        "nonfinite": {"grad_norm/up.weight": "inf"},
    }
    (found,) = stream_records(written(tmp_path / "run", [record]) / "metrics.jsonl")
    assert found["grad_norm"] == {"up.weight": float("inf")}
    (found,) = stream_records(
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
    loss = read_reported_run(written(tmp_path / "run", told)).recorded.train["loss"]
    assert (loss.points(), loss.strange) == ([(1, 2.0), (2, 1.5)], [2, 3])


def test_of_many_watched_steps_neighbours_become_one_with_the_largest_of_their_values(
    tmp_path: Path,
) -> None:
    several = [
        layers(step, grad_norm={"up": 7.0 if step == 401 else 1.0}) for step in range(1, 1000)
    ]
    held = read_reported_run(written(tmp_path / "run", several)).recorded.layers
    assert len(held.tables) == len(held.steps) <= 240
    assert held.size == 8
    assert [table["grad_norm"]["up"] for table in held.tables].count(7.0) == 1
    assert held.tables[401 // 8]["grad_norm"]["up"] == 7.0


def test_of_many_samples_a_few_at_even_distances_and_the_last_are_kept(tmp_path: Path) -> None:
    told = [{"kind": "sample", "step": step, "text": f"text {step}"} for step in range(1, 101)]
    kept = [step for step, _ in read_reported_run(written(tmp_path / "run", told)).recorded.samples]
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
        assert repr(jsonl.parse_lines(block)) == repr(
            [jsonl.parse_record(text) for text in BytesIO(block)]
        )
