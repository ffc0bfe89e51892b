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
def page() -> str:
    """The page that the script makes."""
    script: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "anatomy.py"))
    before = sys.gettrace()
    text: str = script["page"]()
    assert sys.gettrace() is before
    return text


def words_and_fractions(page: str) -> tuple[str, list[float]]:
    """The page without microseconds and without its fractions, and these: whole numbers and words
    must be the same.
    """
    timeless = re.sub(r"[\d,]+ µs", "some µs", page)
    return NUMBER.sub("#", timeless), [float(number) for number in NUMBER.findall(timeless)]


def test_the_page_is_what_the_script_makes(page: str) -> None:
    stored = (ROOT / "docs" / "explained" / "anatomy.md").read_text()
    expected_words, expected_fractions = words_and_fractions(stored)

    words, fractions = words_and_fractions(page)

    again = "run python benchmarks/anatomy.py --write"
    assert words == expected_words, again
    # equal on the machine that made the page; elsewhere forty steps of other rounding lie between
    assert fractions == pytest.approx(expected_fractions, rel=0.02), again


def test_the_loss_of_the_step_is_the_mean_of_its_micro_batches(page: str) -> None:
    first, second = re.findall(r"mean loss ([\d.]+)", page)
    (of_step,) = re.findall(r"loss of the step ([\d.]+)", page)
    assert float(of_step) == pytest.approx((float(first) + float(second)) / 2, rel=1e-4)


def test_the_row_of_the_step_has_its_loss_and_norm(page: str) -> None:
    (loss,) = re.findall(r"loss of the step ([\d.]+)", page)
    ((loss_of_row, norm_of_row),) = re.findall(
        r"The row of this step: 20, ([\d.]+), 64, ([\d.]+), ", page
    )
    assert float(loss_of_row) == float(loss)
    assert f"norm {norm_of_row};" in page


def test_the_ratio_of_the_update_is_that_of_the_norms(page: str) -> None:
    ((update_norm, weight_norm, ratio),) = re.findall(
        r"has norm ([\d.]+), and the weights have norm ([\d.]+): a ratio of ([\d.]+)\. The",
        " ".join(page.split()),
    )
    assert float(ratio) == pytest.approx(float(update_norm) / float(weight_norm), rel=1e-3)
