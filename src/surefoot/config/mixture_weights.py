"""The weights of a mixture of data sets: its shares of each block of samples. Imports no torch."""

from collections.abc import Sequence
from typing import Any

from surefoot.errors import ConfigError, out_of_range

WEIGHTS = "train_data.weights"
"""The setting of all weights, by the names of the data sets."""
SLOTS = 1000
"""Samples of a block of a mixture; the proportions are exact in each block."""


def quotas(weights: Sequence[float]) -> list[int]:
    """Divide 1,000 slots among the sources by the largest remainder method; ties go to the earlier
    source.

    >>> quotas([1, 1, 1])
    [334, 333, 333]
    """
    slots: list[int] = []
    if all(0 < weight < float("inf") for weight in weights):
        exact = [weight / sum(weights) * SLOTS for weight in weights]
        slots = [int(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda index: slots[index] - exact[index])
        for index in by_remainder[: SLOTS - sum(slots)]:
            slots[index] += 1
    if not slots or 0 in slots:
        raise ConfigError(
            "mixture-weights-invalid",
            problem=f"mixture weights {list(weights)}: each must be finite, and at least 1 sample in"
            f" {SLOTS}",
            remedy="raise the smallest, or remove its data set",
            weights=list(weights),
        )
    return slots


def weight_of(value: Any, *, setting: str) -> float:
    """Return a weight that is a number or the text of one. Raises `ConfigError` for another text.

    >>> weight_of("0.5", setting="train_data.weights.web")
    0.5
    """
    try:
        return float(value)
    except ValueError as problem:
        raise out_of_range(setting, value, "a number above 0") from problem


def first_of_next_block(samples: int) -> int:
    """Return the position of the first block of which no sample was read after `samples` ones.

    >>> first_of_next_block(0), first_of_next_block(1), first_of_next_block(1000)
    (0, 1000, 1000)
    """
    return -(-samples // SLOTS) * SLOTS
