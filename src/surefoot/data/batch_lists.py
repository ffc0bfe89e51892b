"""The order of a sampler that lists the batches of each epoch."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler

from surefoot.data.fingerprints import hash_of
from surefoot.data.order import NOTHING_PASSED, Ids, Passed
from surefoot.errors import CheckpointError, ConfigError, Setting
from surefoot.seeding import fold, seed_generators, stream_key, untouched

MAX_SAVED = 10_000_000  # samples of an epoch; of a longer list a checkpoint holds the hash
_MAX_EPOCHS_READ = 20  # a sampler that gives more samples than this many epochs has no end
_OR_DATA = "or give the data set: train_data=loader.dataset, batch_size=..."
# a repeated sample of an epoch has the epoch's number plus 2**32 for each repeat
_REPEAT_SHIFT = 32


@runtime_checkable
class HasEpochs(Protocol):
    """A sampler whose batches depend on the number of the epoch."""

    def set_epoch(self, epoch: int) -> Any:
        """Set the number of the epoch."""


@runtime_checkable
class Wraps(Protocol):
    """A sampler that takes samples from another sampler."""

    sampler: Any


class BatchLists:
    """Plan of the batches that a sampler lists in each epoch: one step per batch, divided evenly
    into `pieces` micro-batches.

    The list of an epoch is read after `set_epoch`, if the sampler has it, with the global
    generators seeded by (seed, epoch). At the start, the first epochs are read twice. Raises
    `ConfigError` if the two lists differ, if a list has no end, or if the number of batches differs
    between epochs.

    A list may also depend on state of the sampler, which changes during an epoch. So the list in
    use is part of a checkpoint.

    has_torch_batches: torch's BatchSampler makes the batches of the samples that a sampler lists.
    """

    def __init__(
        self, seed: int, sampler: Any, *, samples: int, has_torch_batches: bool = False
    ) -> None:
        self.sampler = sampler
        self.dataset_size = samples
        self.has_torch_batches = has_torch_batches
        self.name = type(sampler.sampler if isinstance(sampler, Wraps) else sampler).__name__
        self.seed = seed
        self.key = stream_key(seed, "order")
        self.pieces = 1
        self.passed = NOTHING_PASSED
        self.lists: dict[int, EpochList] = {}  # by epoch, of those in use; shared with `cut`
        self.saved: dict[int, str] = {}  # hash of the list of a checkpoint that only has its hash
        first = self._read(0)
        first_again = self._read(0)
        second = self._read(1)
        if hash_of(first) != hash_of(first_again):
            raise ConfigError(
                "sampler-not-repeatable",
                problem=f"{self.name} lists other batches when it is read again for the same epoch",
                reason="a resumed run would read other samples",
                remedy=[
                    "let it draw from random, np.random or torch's global generator, or seed its"
                    " own in set_epoch(epoch)",
                    _OR_DATA,
                ],
                sampler=self.name,
            )
        self.steps = len(first)
        self._check_count(1, second)
        sizes = [len(batch) for batch in first]
        self.samples = sum(sizes)
        self.largest = max(sizes)
        self.size_count = len(set(sizes))
        self.fingerprint = hash_of(first)

    def cut(self, pieces: int, passed: Passed = NOTHING_PASSED) -> "BatchLists":
        plan = copy(self)
        plan.pieces = pieces
        plan.passed = passed
        return plan

    def resized(self, batch_size: int) -> "BatchLists":
        """Return the plan of the same samples in batches of another size. Raises `ConfigError` if
        not torch's BatchSampler makes them.
        """
        if not self.has_torch_batches:
            raise ConfigError(
                "batch-size-cannot-change",
                problem=f"batch_size cannot change while this run goes on: {self.name} lists the"
                " batches",
                reason="their size is a matter of the program",
                remedy=("change it back:", Setting("batch_size", self.largest)),
                setting="batch_size",
                value=batch_size,
            )
        batches = BatchSampler(self.sampler.sampler, batch_size, drop_last=False)
        return BatchLists(self.seed, batches, samples=self.dataset_size, has_torch_batches=True)

    def micro_batches(self, step: int) -> Sequence[tuple[Ids, Ids]]:
        epoch, index = self.passed.epoch_of(step, self.steps)
        batches = self._batches_of(epoch)
        entries = slice(batches.ends[index], batches.ends[index + 1])
        ids = np.array_split(batches.ids[entries].copy(), self.pieces)
        epochs = np.array_split(batches.epochs[entries].copy(), self.pieces)
        return list(zip(ids, epochs, strict=True))

    def begin(self, step: int) -> bool:
        """Read the list of an epoch anew if `step` begins it. Return True if the list was read
        before and is another one now: batches that were read ahead are of the old one.
        """
        epoch, index = self.passed.epoch_of(step, self.steps)
        for earlier in [*self.lists]:
            if earlier < epoch - 1:
                del self.lists[earlier]
        if index or epoch not in self.lists:
            return False
        before = self.lists.pop(epoch)
        return not self._batches_of(epoch).equals(before)

    def hash_at(self, step: int) -> str:
        """Return a hash of the list of this step's epoch."""
        epoch, _ = self.passed.epoch_of(step, self.steps)
        return self._batches_of(epoch).sha256

    def state(self, step: int) -> tuple[dict[str, Tensor], dict[str, int | str] | None]:
        """Return the list in use after `step` steps, as tensors and facts; nothing between two
        epochs, and no tensors of a list that is too long.
        """
        epoch, index = self.passed.epoch_of(step, self.steps)
        if not index or epoch not in self.lists:
            return {}, None
        batches = self.lists[epoch]
        facts: dict[str, int | str] = {"epoch": epoch, "sha256": batches.sha256}
        if len(batches.ids) > MAX_SAVED:
            return {}, facts
        dtype = np.int32 if self.dataset_size < 1 << 31 else np.int64
        tensors = {
            "ids": torch.from_numpy(batches.ids.astype(dtype)),
            "ends": torch.from_numpy(batches.ends),
        }
        return tensors, facts

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None) -> None:
        """Use the list of a checkpoint. Other lists are read anew."""
        self.lists.clear()
        self.saved.clear()
        if facts is None:
            return
        epoch = int(facts["epoch"])
        self.saved[epoch] = str(facts["sha256"])
        if tensors:
            ids = tensors["ids"].numpy().astype(np.int64)
            self.lists[epoch] = EpochList.of(ids, tensors["ends"].numpy(), epoch=epoch)

    def to_dict(self) -> dict[str, Any]:
        return {
            "order": f"batches of {self.name}",
            "samples": self.samples,
            "sha256": self.fingerprint,
        }

    def _batches_of(self, epoch: int) -> "EpochList":
        if epoch not in self.lists:
            read = self._read(epoch)
            self._check_count(epoch, read)
            ends = np.cumsum([0, *map(len, read)])
            batches = EpochList.of(np.concatenate(read), ends, epoch=epoch)
            if self.saved.get(epoch, batches.sha256) != batches.sha256:
                raise CheckpointError(
                    "sampler-lists-otherwise",
                    problem=f"{self.name} lists other batches in epoch {epoch} than before the"
                    " checkpoint",
                    reason=f"its list has more than {MAX_SAVED:,} samples, so the checkpoint holds"
                    " its hash alone, and the run would read other samples",
                    remedy="let its list depend on the epoch alone, or save and stop only between"
                    " two epochs",
                    epoch=epoch,
                )
            self.lists[epoch] = batches
        return self.lists[epoch]

    def _read(self, epoch: int) -> list[Ids]:
        batches = list[Ids]()
        left = _MAX_EPOCHS_READ * self.dataset_size + 1000
        with untouched():
            seed_generators(fold(self.key, epoch))
            for sampler in _with_wrapped(self.sampler):
                if isinstance(sampler, HasEpochs):
                    sampler.set_epoch(epoch)
            for batch in self.sampler:
                ids = self._checked(batch, nth=len(batches))
                batches.append(ids)
                left -= len(ids)
                if left < 0:
                    raise ConfigError(
                        "sampler-without-end",
                        problem=f"{self.name} lists more samples than {_MAX_EPOCHS_READ} epochs of"
                        " the data set have",
                        remedy=["let it end after one epoch; the run repeats it", _OR_DATA],
                        sampler=self.name,
                    )
        if not batches:
            raise ConfigError(
                "sampler-without-batches",
                problem=f"{self.name} lists no batch",
                remedy=["check its arguments", _OR_DATA],
                sampler=self.name,
            )
        return batches

    def _check_count(self, epoch: int, batches: list[Ids]) -> None:
        if len(batches) != self.steps:
            raise ConfigError(
                "sampler-epochs-differ",
                problem=f"{self.name} lists {len(batches)} batches in epoch {epoch}, but"
                f" {self.steps} in epoch 0",
                reason="the epoch of a step is computed from this number",
                remedy=["let it list as many batches in every epoch", _OR_DATA],
                sampler=self.name,
                epoch=epoch,
                batches=len(batches),
                first=self.steps,
            )

    def _checked(self, batch: Any, *, nth: int) -> Ids:
        try:
            ids = np.array([int(sample) for sample in batch], dtype=np.int64)
        except (TypeError, ValueError):
            ids = np.empty(0, np.int64)
        if not ids.size or ids.min() < 0 or ids.max() >= self.dataset_size:
            raise ConfigError(
                "sampler-batch-invalid",
                problem=f"{self.name} lists {repr(batch)[:60]} as batch {nth}",
                reason="a batch lists one or more numbers of samples, from 0 to"
                f" {self.dataset_size - 1}",
                remedy=_OR_DATA,
                sampler=self.name,
                batch=nth,
            )
        return ids


@dataclass(frozen=True)
class EpochList:
    """The batches of an epoch, one behind the other: batch k has the entries from `ends[k]` to
    `ends[k + 1]`.
    """

    ids: Ids
    epochs: Ids  # of each entry; a repeated sample has a larger number
    ends: Ids

    @staticmethod
    def of(ids: Ids, ends: Ids, *, epoch: int) -> "EpochList":
        ordered = np.argsort(ids, kind="stable")
        repeats = np.empty_like(ids)
        repeats[ordered] = np.arange(len(ids)) - np.searchsorted(ids[ordered], ids[ordered])
        return EpochList(ids, epoch + (repeats << _REPEAT_SHIFT), ends)

    @property
    def sha256(self) -> str:
        return sha256(self.ids.tobytes() + self.ends.tobytes()).hexdigest()

    def equals(self, other: "EpochList") -> bool:
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.ends, other.ends)


def _with_wrapped(sampler: Any) -> Iterator[Any]:
    for _ in range(8):  # a sampler may wrap itself
        yield sampler
        if not isinstance(sampler, Wraps):
            return
        sampler = sampler.sampler
