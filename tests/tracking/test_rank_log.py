"""What a rank above 0 says: kept until there is a place for it, and never without bound."""

from __future__ import annotations

import re
from pathlib import Path

from surefoot.tracking.console import RankLog


def test_what_was_said_before_there_is_a_place_comes_first(tmp_path: Path) -> None:
    log = RankLog()
    path = tmp_path / "logs" / "rank-1.log"
    print("first", file=log, flush=True)
    log.open(path)
    print("second", file=log, flush=True)
    log.at_once("third")
    print("fourth", file=log, flush=True)
    time, *lines = path.read_text().splitlines()
    assert re.fullmatch(r"--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4} ---", time)
    assert lines == ["first", "second", "third", "fourth"]


def test_without_a_place_nothing_is_kept_for_long() -> None:
    log = RankLog()
    for _ in range(1000):
        print("x" * 1000, file=log, flush=True)
    log.at_once("nowhere")
    assert len(log.getvalue()) < 100_000
