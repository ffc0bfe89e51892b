"""The campaign of streams finds no fault in its first tries, and sees one that is there. (20 s;
slow: a part of `make campaign-streams`.)
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "streams_campaign.py"


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import streams_campaign

    return streams_campaign


def test_a_process_that_is_left_and_a_row_that_differs_are_seen(
    campaign: object, tmp_path: Path
) -> None:
    (tmp_path / f"process-{os.getpid()}").touch()
    assert campaign.alive(tmp_path) == [os.getpid()]  # type: ignore[attr-defined]
    drawn = [campaign.drawn_case(number) for number in range(40)]  # type: ignore[attr-defined]
    assert {case["event"] for case in drawn} == set(campaign.EVENTS)  # type: ignore[attr-defined]
    assert {case["children"] for case in drawn} == set(campaign.CHILDREN)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_first_tries_end_with_the_same_bits() -> None:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--tries", "4"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 tries, 0 failed" in ended.stdout
