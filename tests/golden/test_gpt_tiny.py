"""Losses of the gpt recipe's `tiny` preset over its first steps, on a text that every machine has;
5 seconds.

They pin everything at once: text, tokenizer, order of windows, initialisation, model, loss,
clipping, optimizer, schedule. A change that is meant changes them with a line in CHANGELOG.md; one
that is not meant is found here. Rounding differs between builds of torch and kinds of CPU, so they
agree to 2e-3.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from run_files import records_of
from surefoot.config.tree import layered
from surefoot.recipes import gpt

GOLDEN = {
    "modern": [3.911508, 1.999079, 1.984223],
    "gpt2": [3.994046, 2.785549, 2.348144],
    "llama": [4.3601, 2.5714, 2.0728],
}


def text() -> str:
    """Squares in words: 60 kB without a file or a random number."""
    lines = [f"{spelled(n)} squared is {spelled(n * n)}." for n in range(1200)]
    return "\n".join(lines) + "\n"


DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def spelled(number: int) -> str:
    return " ".join(DIGITS[int(digit)] for digit in str(number))


@pytest.mark.fast("modern")
@pytest.mark.parametrize("family", GOLDEN)
def test_the_first_losses_are_what_they_were(family: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(text())
    changes = {
        "data.path": str(tmp_path / "text.txt"),
        "model.family": family,
        "precision": "fp32",
        "run_dir": str(tmp_path / "run"),
        "length": "12 steps",
        "log_every": "4 steps",
        "sample_tokens": 0,
        "cloze_questions": 0,
        "evaluate_every": "100 steps",
    }
    config, _ = layered(gpt.Config, [("preset", gpt.PRESETS["tiny"]), ("test", changes)])

    gpt.build(config).train()

    losses = [record["loss"] for record in records_of(tmp_path / "run", "train")]
    assert losses == pytest.approx(GOLDEN[family], abs=2e-3)
