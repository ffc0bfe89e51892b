"""Weighted mixture of several data sets, and the order of its samples."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from surefoot.config.keywords import known_keywords
from surefoot.config.mixture_weights import (
    SLOTS,
    WEIGHTS,
    first_of_next_block,
    quotas,
    weight_of,
)
from surefoot.config.ramps import Ramp, ramp_of
from surefoot.data.dataset_checks import check_samples, fingerprint
from surefoot.data.gathering import Gather, by_sample, gather_fn
from surefoot.data.nested import children, is_opaque, rebuilt
from surefoot.data.order import NOTHING_PASSED, Blocks, Ids, Passed, by_epoch
from surefoot.errors import DataError, first_line
from surefoot.seeding import fold, stream_key


@known_keywords
class Mixture:
    """Weighted mixture of data sets by name: {"web": (pages, 0.7), "books": (books, 0.3)}.

    In every block of 1,000 samples, each data set's share is proportional to its weight. Weights
    need not sum to 1. A weight may change on the way: "0.8, 0.5 from 50%". Each data set has its
    own order and epochs. `mixture[i]` indexes the concatenated data sets. A data set with only
    `gather` cannot be mixed with a data set without `gather`.

    >>> from torch import zeros
    >>> len(Mixture({"web": ((zeros(30), zeros(30)), 0.7), "books": ((zeros(10), zeros(10)), 0.3)}))
    40
    """

    def __init__(self, parts: Mapping[str, tuple[Any, float | str]]) -> None:
        if not parts:
            raise DataError(
                "mixture-without-parts",
                problem="a mixture has no data set",
                remedy="give {name: (dataset, weight), ...}",
            )
        self.names = list(parts)
        self.weights: list[float] = []  # of a weight with several values, the first one
        self.ramps: dict[str, Ramp] = {}  # of such weights, by their settings
        for name, (_, weight) in parts.items():
            setting = f"{WEIGHTS}.{name}"
            ramp = ramp_of(weight, setting=setting)
            if ramp is None:
                self.weights.append(weight_of(weight, setting=setting))
            else:
                self.weights.append(ramp.first)
                self.ramps[setting] = ramp
        self.sizes = [_checked_size(name, dataset) for name, (dataset, _) in parts.items()]
        self.datasets = [by_sample(dataset) for dataset, _ in parts.values()]
        quotas(self.weights)  # raises if a weight is invalid or too small
        self.ends = list(accumulate(self.sizes))
        self.gather_fns = [gather_fn(dataset) for dataset in self.datasets]
        single = []  # data sets that are read by sample
        batched = []  # data sets that are only read in whole batches
        for name, dataset, gather in zip(self.names, self.datasets, self.gather_fns, strict=True):
            if gather is None:
                single.append(name)
            if not hasattr(dataset, "__getitem__"):
                batched.append(name)
        if not single:  # without `gather`, the mixture is read by sample
            self.gather = self._gather
        if batched and single:
            raise DataError(
                "mixture-of-samples-and-batches",
                problem=f"{', '.join(batched)} can only be read in whole batches, and"
                f" {', '.join(single)} only by sample",
                reason="they cannot be mixed",
                remedy="give all parts __getitem__, or all parts gather(ids, epochs)",
                batched=batched,
                single=single,
            )

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, sample: int) -> Any:
        if not 0 <= sample < self.ends[-1]:
            raise IndexError(f"sample {sample} is outside a mixture of {self.ends[-1]} samples")
        source = bisect_right(self.ends, sample)
        return self.datasets[source][sample - self.ends[source] + self.sizes[source]]

    def weights_by_name(self) -> dict[str, float]:
        """Return the weights of the data sets, in order."""
        return dict(zip(self.names, self.weights, strict=True))

    def with_weights(self, weights: Mapping[str, float]) -> "Mixture":
        """Return the mixture of the same data sets with other weights."""
        other = copy(self)
        other.weights = [weights[name] for name in self.names]
        return other

    def concatenated(self) -> dict[str, Any]:
        """Return the data sets by name, in order."""
        return dict(zip(self.names, self.datasets, strict=True))

    def fingerprint(self) -> dict[str, Any]:
        """Return the fingerprints and weights of all parts."""
        parts = {}
        for name, dataset, weight in zip(self.names, self.datasets, self.weights, strict=True):
            parts[name] = {"weight": weight, **fingerprint(dataset)}
        return {"parts": parts}

    def _gather(self, ids: Ids, epochs: Ids) -> Any:
        gather_fns = cast("list[Gather]", self.gather_fns)
        sources = np.searchsorted(self.ends, ids, side="right")
        offsets = ids - np.array([0, *self.ends])[sources]
        batches = []
        rows_of_batches = []
        for source in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == source)
            batches.append(gather_fns[source](offsets[rows], epochs[rows]))
            rows_of_batches.append(rows)
        order = torch.from_numpy(np.argsort(np.concatenate(rows_of_batches)))
        try:
            return _interleave(batches, order)
        except (RuntimeError, TypeError, KeyError, ValueError) as problem:
            raise DataError(
                "mixture-samples-differ",
                problem=f"samples of {', '.join(self.names)} cannot be put into one batch:"
                f" {first_line(problem)}",
                reason="the parts of a mixture must have samples of the same structure and shape",
                parts=self.names,
            ) from problem


class MixtureOrder:
    """Order that mixes several sources in fixed proportions; each source has its own order and
    epochs.

    Every shuffled block of 1,000 samples has the exact quota of each source (largest remainder). A
    sample id is the offset of the source plus the index within the source. An epoch of the mixture
    has as many samples as all sources together.

    `weights_from` has the weights since the beginning, each with the number of samples after which
    they were set; `weights` are the last of them. They hold from the next block on, and each source
    goes on where its last block has ended.
    """

    def __init__(
        self,
        seed: int,
        *,
        sizes: Sequence[int],
        weights: Sequence[float],
        batch_size: int,
        passed: Passed = NOTHING_PASSED,
        weights_from: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> None:
        self.samples = sum(sizes)
        self.batch_size = batch_size
        self.key = stream_key(seed, "order")
        self.slot_key = stream_key(seed, "mixture")
        self.sizes = list(sizes)
        self.weights = list(weights)
        self.offsets = np.cumsum(self.sizes) - self.sizes
        self.blocks = Blocks(batch_size, passed)

        quotas_of_blocks: dict[int, list[int]] = {}  # by the first block that has them
        for samples, of_sources in weights_from or [(0, weights)]:
            quotas_of_blocks[first_of_next_block(samples) // SLOTS] = quotas(of_sources)
        self.first_blocks = np.array(list(quotas_of_blocks))
        self.quotas = np.array(list(quotas_of_blocks.values()))
        self.first_slots = np.cumsum(self.quotas, axis=1) - self.quotas
        sources = np.arange(len(self.sizes))
        self.source_of_slot = np.stack([np.repeat(sources, row) for row in self.quotas])
        blocks_before = np.diff(self.first_blocks)[:, None]
        self.drawn = np.zeros_like(self.quotas)  # of each source, before the first block
        self.drawn[1:] = np.cumsum(blocks_before * self.quotas[:-1], axis=0)

    def ids(self, step: int) -> tuple[Ids, Ids]:
        return self.blocks.step(step, self._at)

    def to_dict(self) -> dict[str, Any]:
        return {"order": "mixture", "sizes": self.sizes, "weights": self.weights}

    def _at(self, positions: Ids) -> tuple[Ids, Ids]:
        blocks, slots = np.divmod(positions, SLOTS)
        shuffled = by_epoch(self.slot_key, SLOTS, blocks, slots)
        rows = np.searchsorted(self.first_blocks, blocks, side="right") - 1
        sources = self.source_of_slot[rows, shuffled]
        # index within the source: the quotas of all earlier blocks, plus the index within this
        # block
        whole_blocks = blocks - self.first_blocks[rows]
        places = self.drawn[rows, sources] + whole_blocks * self.quotas[rows, sources]
        places += shuffled - self.first_slots[rows, sources]
        ids = np.empty_like(positions)
        epochs = np.empty_like(positions)
        for source in np.unique(sources):
            here = sources == source
            size = self.sizes[source]
            key = fold(self.key, int(source))
            epochs[here], offsets = np.divmod(places[here], size)
            ids[here] = self.offsets[source] + by_epoch(key, size, epochs[here], offsets)
        return ids, epochs


def _checked_size(name: str, dataset: Any) -> int:
    try:
        return check_samples(dataset, seed=0)
    except DataError as problem:
        raise problem.inside(f"part {name!r} of the mixture") from problem


def _interleave(batches: Sequence[Any], order: Tensor) -> Any:
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches)).index_select(0, order.to(first.device, non_blocking=True))
    names = None if is_opaque(first) else children(first)
    if names is not None:
        parts_of_batches = [children(batch) or {} for batch in batches]
        combined = []
        for name in names:
            column = [parts[name] for parts in parts_of_batches]
            combined.append(_interleave(column, order))
        return rebuilt(first, combined)
    raise TypeError(f"expected tensors, found a {type(first).__name__}")
