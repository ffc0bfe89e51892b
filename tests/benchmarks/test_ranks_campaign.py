"""The campaign of ranks tells a cell whose hash differs from one whose hash does not. (1 s; slow: a
minute)
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ranks_campaign.py"


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import ranks_campaign

    return ranks_campaign  # type: ignore[no-any-return]


def test_a_cell_with_another_hash_or_an_error_is_counted_and_named(campaign: ModuleType) -> None:
    cell = {"optimizer": "adamw", "strategy": "ddp", "precision": "fp32", "micro_batches": 8}
    a = "a" * 64
    b = "b" * 64
    hashes = {1: [a, a, a, "ValueError"], 2: [a, b, "ValueError: no", "ValueError"]}
    lines, different = campaign.table([cell] * 4, hashes)
    assert different == 3
    assert ["DIFFERS" in line for line in lines] == [
        False,
        False,
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert [line.strip() for line in lines if line.startswith(" ")] == [
        "on 2: ValueError: no",
        "on 1: ValueError",
        "on 2: ValueError",
    ]


@pytest.mark.slow
def test_the_short_campaign_finds_one_hash_in_every_cell_and_chain() -> None:
    ended = subprocess.run(
        [sys.executable, SCRIPT, "--short"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 of 4 cells have one hash on 1, 2, 3 ranks; 2 of 2 chains" in ended.stdout
