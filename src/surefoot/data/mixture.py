"""Several data sets as one, in fixed proportions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from surefoot.data.plan import quotas
from surefoot.data.samples import check_samples, fingerprint
from surefoot.errors import DataError


class Mixture:
    """Data sets by name with their weights: {"web": (pages, 0.7), "books": (books, 0.3)}.

    A run draws from each in proportion to its weight, exactly in every 1,000 samples, and goes through each in its own order
    and its own passes. Weights need not sum to 1. As a data set it is the concatenation of all.
    """

    def __init__(self, parts: Mapping[str, tuple[Any, float]]) -> None:
        if not parts:
            raise DataError("a mixture of no data sets: give {name: (dataset, weight), ...}")
        self.names = list(parts)
        self.datasets = [dataset for dataset, _ in parts.values()]
        self.weights = [float(weight) for _, weight in parts.values()]
        self.sizes = [check_samples(dataset, seed=0) for dataset in self.datasets]
        quotas(self.weights)  # refuses what cannot be kept
        self.ends = list(accumulate(self.sizes))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, sample: int) -> Any:
        source = bisect_right(self.ends, sample)
        if not 0 <= sample < self.ends[-1]:
            raise IndexError(f"sample {sample} of a mixture of {self.ends[-1]}")
        return self.datasets[source][sample - self.ends[source] + self.sizes[source]]

    def fingerprint(self) -> dict[str, Any]:
        """The fingerprints of all parts, with their weights."""
        return {
            "parts": {
                name: {"weight": weight, **fingerprint(dataset)}
                for name, dataset, weight in zip(self.names, self.datasets, self.weights, strict=True)
            }
        }
