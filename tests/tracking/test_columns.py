"""Lines read in columns have the records and the bits of the lines parsed one by one; 1 second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.tracking.columns import Columns, columns_of, in_columns
from surefoot.tracking.jsonl import line, line_blocks, parse_record, records


def values(parts: list[Columns | list[dict[str, Any]]]) -> tuple[str, str]:
    """The training records, and the others."""
    found = [
        record
        for part in parts
        for record in (part.records() if isinstance(part, Columns) else part)
    ]
    train = [record for record in found if record["kind"] == "train"]
    return repr(train), repr([record for record in found if record["kind"] != "train"])


def train(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 1 / (step + 1), "targets": 64, **more}


def test_records_of_one_form_are_columns_with_the_type_of_their_values() -> None:
    columns = columns_of([train(step) for step in range(40)])
    assert columns is not None
    assert {name: numbers.dtype for name, numbers in columns.values.items()} == {
        "step": np.int64,
        "loss": np.float64,
        "targets": np.int64,
    }
    assert columns.records() == [train(step) for step in range(40)]


@pytest.mark.parametrize("odd", [None, "a", True, [1], {"a": 1}, 1 << 64, 2.5])
def test_records_with_a_value_of_another_type_are_no_columns(odd: Any) -> None:
    alike = [train(step, samples=8) for step in range(40)]
    assert columns_of(alike) is not None
    assert columns_of([*alike, train(40, samples=odd)]) is None


def test_a_block_with_skipped_steps_keeps_its_order() -> None:
    several = [train(step, skipped=int(step == 50)) for step in range(60)]
    several.insert(20, {"kind": "resume", "step": 20})
    lines = "".join(f"{line(record)}\n" for record in several).encode()
    assert list(in_columns([(lines, None)])) == [several]


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
    expected = [record for record in one_by_one if record is not None]
    assert values(list(in_columns([(lines, None)]))) == values([expected])


def test_of_a_resumed_run_the_columns_hold_what_was_not_superseded(tmp_path: Path) -> None:
    file, texts = tmp_path / "metrics.jsonl", list[str]()
    for start, end in ((0, 3000), (2500, 5000), (1200, 4000), (4000, 4100)):
        texts += [line({"kind": "resume", "step": start})] if start else []
        for step in range(start + 1, end + 1):
            texts += [line({"kind": "train", "step": step, "loss": 1 / step, "of": len(texts)})]
            texts += (
                [line({"kind": "eval", "step": step, "val/loss": 2.0})] if step % 100 == 0 else []
            )
        texts += [line({"kind": "event", "step": end, "event": "stopped"})]
    file.write_text("".join(f"{text}\n" for text in texts))
    parts = list(in_columns(line_blocks(file)))
    assert values(parts) == values([records(file)])
    assert sum(len(part) for part in parts if isinstance(part, Columns)) >= 4000
    assert json.loads(texts[-1]) == (parts[-1][-1] if isinstance(parts[-1], list) else None)
