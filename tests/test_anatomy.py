"""docs/explained/anatomy.md is what benchmarks/anatomy.py makes, but for its microseconds; 2
seconds.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")


@pytest.fixture(scope="module")
def made() -> str:
    script: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "anatomy.py"))
    before = sys.gettrace()
    page: str = script["page"]()
    assert sys.gettrace() is before
    return page


def parted(page: str) -> tuple[str, list[float]]:
    """The page without microseconds and without its fractions, and these: whole numbers and words
    must be the same.
    """
    timeless = re.sub(r"[\d,]+ µs", "some µs", page)
    return NUMBER.sub("#", timeless), [float(found) for found in NUMBER.findall(timeless)]


def test_the_page_is_what_the_script_makes(made: str) -> None:
    written, numbers = parted((ROOT / "docs" / "explained" / "anatomy.md").read_text())
    words, found = parted(made)
    assert words == written, "run python benchmarks/anatomy.py --write"
    # equal on the machine that made the page; elsewhere forty steps of other rounding lie between
    assert found == pytest.approx(numbers, rel=0.02), "run python benchmarks/anatomy.py --write"


def test_the_numbers_of_the_page_agree_with_each_other(made: str) -> None:
    losses = [float(found) for found in re.findall(r"mean loss ([\d.]+)", made)]
    (whole,) = (float(found) for found in re.findall(r"loss of the step ([\d.]+)", made))
    assert whole == pytest.approx(sum(losses) / 2, rel=1e-4)
    (row,) = re.findall(r"The row of this step: 20, ([\d.]+), 64, ([\d.]+), ", made)
    assert float(row[0]) == whole
    assert f"norm {row[1]};" in made
    moves = re.search(
        r"has norm ([\d.]+), and the weights have norm ([\d.]+): a ratio of ([\d.]+)\. The",
        " ".join(made.split()),
    )
    assert moves is not None
    moved, norm, share = map(float, moves.groups())
    assert share == pytest.approx(moved / norm, rel=1e-3)
