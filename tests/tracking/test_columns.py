"""Lines read in columns have the records and the bits that `json` reads; 1 second."""

from __future__ import annotations

import json
import math
import random
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.tracking import columns as module
from surefoot.tracking.columns import Columns, in_columns
from surefoot.tracking.jsonl import _decoder, line, line_blocks, parse_record, records

NUMBERS = (
    "0 -0 0.0 -0.0 1 -7 9223372036854775807 -9223372036854775808 123456789012345678 1234567890123456789 0.5",
    "2.5 0.1 100.0 -0.30000000000000004 9007199254740993.0 1234567890123456.7 0.00012345678901234567 9e-05",
    "1.2345678901234567e-05 -4.9e-06 1e-07 1.5e-22 5e-324 2.2250738585072014e-308 1.7976931348623157e+308 1e16",
    "1E5 2.5e3 4e-300 0.1000000000000000055511151231257827 0.30000000000000001665 179769313486231580793.5",
    "6.40e0 12e-01 1e-99 0e-05 00 01 -01.5 1. .5 - + +1 1.2.3 1..2 1e 1e- e-05 1-2 0x1 1e-0a NaN Infinity null",
    'true "1.5" "a" [1] {"a":1} 1e999 1_0 :1 1: 18446744073709551615',
)


def values(parts: list[Columns | list[dict[str, Any]]]) -> tuple[str, str]:
    """The training records, and the others."""
    found = [
        record
        for part in parts
        for record in (part.records() if isinstance(part, Columns) else part)
    ]
    train = [record for record in found if record["kind"] == "train"]
    return repr(train), repr([record for record in found if record["kind"] != "train"])


def block(numbers: list[str], *, spaced: str = " ") -> bytes:
    return "".join(
        f'{{"kind": "train", "step": {i},{spaced}"x": {each}}}\n' for i, each in enumerate(numbers)
    ).encode()


def parsed(lines: bytes) -> list[dict[str, Any]]:
    return [
        record
        for record in map(parse_record, lines.splitlines(keepends=True))
        if record is not None
    ]


def test_a_number_has_the_bits_that_json_reads() -> None:
    draw = random.Random(3)
    wide = [struct.unpack("d", draw.randbytes(8))[0] for _ in range(3000)]
    usual = [
        draw.choice((-1, 1)) * draw.random() * 10 ** draw.randrange(-7, 10) for _ in range(20_000)
    ]
    short = [round(each, draw.randrange(12)) for each in usual[:5000]]
    neighbours = [math.nextafter(each, draw.choice((0, 1e9))) for each in short]
    long = [
        f"{draw.randrange(10**9)}.{draw.randrange(10**9):09}{draw.randrange(10**5)}"
        for _ in range(5000)
    ]
    texts = [
        repr(each) for each in (*usual, *short, *neighbours, *wide) if math.isfinite(each)
    ] + long
    draw.shuffle(texts)
    lines = block(texts)
    columns = module._columns_in(lines, None)
    assert columns is not None
    train = columns[1] if isinstance(columns[1], Columns) else columns[0]
    assert isinstance(train, Columns)
    assert train.values["x"].tobytes() == struct.pack(f"{len(texts)}d", *map(float, texts))
    halfway = np.array([2**53 + 1, 2**53 + 2, 3])
    assert module._quotients(halfway, np.ones(3))[1].tolist() == [False, True, True]


@pytest.mark.parametrize("library", ["json", "orjson"])
def test_lines_in_columns_are_those_parsed_one_by_one(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "json":
        monkeypatch.setitem(sys.modules, "orjson", None)
    else:
        pytest.importorskip("orjson")
    monkeypatch.setattr(module, "_LEAST_BYTES", 400)
    _decoder.cache_clear()
    for usual in ("0.5", "7"):
        for odd in " ".join(NUMBERS).split():
            for numbers in ([odd] * 20, [*[usual] * 12, odd, *[usual] * 8]):
                lines = block(numbers)
                assert values(list(in_columns([(lines, None)]))) == values([parsed(lines)]), (
                    usual,
                    odd,
                )
    _decoder.cache_clear()


def changed(index: int, texts: list[str]) -> bytes:
    head = f'{{"kind": "train", "step": {index}'
    nested = f'{{"kind": "note", "step": 1, "of": {head}, "x": 2.5}}'
    odd = (
        *(
            line({"kind": "eval", "step": index, "val/loss": 0.5}),
            nested,
            nested + "}",
            f"{nested}\n{texts[0]}",
        ),
        *(
            f'{head}, "x": 2.5',
            f'{head}, "x": 2.5}}}}',
            f'{head}, "x": 2.5,}}',
            f'{head},, "x": 2.5}}',
            f'{head}, "x":2.5}}',
        ),
        *(
            f'{head}, "y": 2.5}}',
            f'{{"step": {index}, "kind": "train", "x": 2.5}}',
            f'{head}, "x": 2.5, "x": 3.5}}',
            "{}",
        ),
        *(
            f'{head}, "x": 1, "y": 2}}',
            f'{head}, "x": 1, "step": 2}}',
            f'{head}, "x": 1, "kind": "eval"}}',
            "",
            "\r",
        ),
        *(
            f'{head}, "a, b": 1}}',
            f'{{"kind": "\\u0074rain", "step": {index}, "x": 2.5}}',
            f"{head}}}",
            f'{head}.0, "x": 1.5}}',
        ),
        *(
            '{"kind": "train", "step": -1, "x": 2.5}',
            f'{head}, "x": null, "nonfinite": {{"x": "nan"}}}}',
            '{"kind": "train"',
        ),
        *(
            line({"kind": "sample", "step": 1, "text": f'"{head}, "x": 1}}\u2028\u00e9,'}),
            f'{head}, "skipped": 1}}',
            "\x00,,}",
        ),
    )
    return "".join(
        f"{each}\n" for each in (*texts[:index], odd[index % len(odd)], *texts[index:])
    ).encode()


def test_a_line_of_another_form_is_read_as_json_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_BYTES", 400)
    for names in ('"x"', '"a, b"', '"skipped"', '"c: d"', '"\u00e9"', '"loss_applied"'):
        texts = (
            block(["0.5", "-1.25"] * 15 if names != '"skipped"' else ["0"] * 30)
            .decode()
            .splitlines()
        )
        texts = [text.replace('"x"', names) for text in texts]
        for index in range(30):
            lines = changed(index, texts)
            inside = (
                b'{"kind": "note", "step": 1, "of": {"kind": "train", "step": 0, "x": 2.5}\n'
                + block(["0.5"] * 30)
            )
            for each in (lines, lines[:-1], inside):
                assert values(list(in_columns([(each, None)]))) == values([parsed(each)]), (
                    names,
                    index,
                )


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
