"""Losses of the translation recipe's `tiny` preset over its first steps, on a text that every
machine has; 6 seconds.

They pin everything at once: text, subwords, batches, initialisation, model, smoothed loss,
clipping, optimizer, schedule. A change that is meant changes them with a line in CHANGELOG.md; one
that is not meant is found here. Rounding differs between builds of torch and kinds of CPU, so they
agree to 2e-3.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from run_files import records_of
from surefoot.config.tree import layered
from surefoot.recipes import translation

GOLDEN = {
    "pre": [5.138162, 3.772656, 3.311690],
    "post": [5.169934, 4.022198, 3.691187],
}
DIGITS = {
    "en": ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
    "de": ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"],
}


def spelled(number: int, digits: list[str]) -> str:
    return " ".join(digits[int(digit)] for digit in str(number))


@pytest.mark.slow
@pytest.mark.parametrize("norm", GOLDEN)
def test_the_first_losses_are_what_they_were(norm: str, tmp_path: Path) -> None:
    for language, digits in DIGITS.items():
        lines = [f"{spelled(number * number, digits)}.\n" for number in range(1200)]
        (tmp_path / f"numbers.{language}").write_text("".join(lines))
    changes = {
        "data.path": str(tmp_path / "numbers"),
        "data.vocab_size": 300,
        "model.norm_placement": norm,
        "run_dir": str(tmp_path / "run"),
        "length": "12 steps",
        "batch_size": "1024 tokens",
        "log_every": "4 steps",
        "evaluate_every": "100 steps",
        "precision": "fp32",
        "beam_size": 1,
    }
    layers = [("preset", translation.PRESETS["tiny"]), ("test", changes)]
    config, _ = layered(translation.Config, layers)

    translation.build(config).train()

    losses = [record["loss"] for record in records_of(tmp_path / "run", "train")]
    assert losses == pytest.approx(GOLDEN[norm], abs=2e-3)
