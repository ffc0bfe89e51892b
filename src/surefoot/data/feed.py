"""From step to micro-batches on the device: a plan, a data set, and (for data sets read sample by sample) loader workers.

Nothing here is remembered between steps: a feed started at step k gives what one started at 0 and run up to k gives. Random
augmentation of a sample draws from (seed, epoch, sample), what couples samples from (seed, step, micro-batch).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from surefoot.data.plan import Ids, InOrder, Plan
from surefoot.data.samples import read, rows
from surefoot.errors import DataError
from surefoot.seeding import fold, seed_generators, stream_key, untouched

Count = Callable[[Any], int]
Collate = Callable[[list[Any]], Any]


@runtime_checkable
class Gathers(Protocol):
    """A data set that makes a whole micro-batch at once from ids and epochs; it must not draw from global generators."""

    def __len__(self) -> int: ...  # noqa: D105

    def gather(self, ids: Ids, epochs: Ids) -> Any:
        """The batch of these samples."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples for one forward and backward pass: tensors on the device, and which samples they are."""

    batch: Any
    count: int  # over how many things the loss is a mean
    index: int  # within the global batch of its step
    ids: Ids
    epochs: Ids


class Feed:
    """Gives `micro_batches(step)` for one step after the other, from the step it was started at."""

    def __init__(
        self,
        dataset: Any,
        plan: Plan,
        *,
        seed: int,
        micro_batch_size: int,
        device: torch.device,
        workers: int = 0,
        count: Count | None = None,
        collate: Collate | None = None,
    ) -> None:
        self.plan, self.micro_batch_size, self.device, self.workers = plan, micro_batch_size, device, workers
        self.count = count or rows
        self.pieces = -(-plan.batch_size // micro_batch_size)
        self.tensors = in_memory(dataset)
        self.gathers = dataset if isinstance(dataset, Gathers) else None
        self.reading = _Reading(dataset, plan, seed, micro_batch_size, self.pieces, collate or default_collate)
        self.loader: Iterator[Any] | None = None
        self.ahead: list[MicroBatch] | None = None  # on CUDA: the next step, its copies on their way
        self.step = 0

    def start(self, step: int) -> None:
        """The next step asked for will be `step`; starts the workers where there are any."""
        self.close()
        self.step = step
        if self.workers and self.tensors is None and self.gathers is None:
            loader = DataLoader(
                self.reading,
                batch_size=None,
                sampler=_Addresses(step, self.pieces),
                num_workers=self.workers,
                pin_memory=self.device.type == "cuda",
                worker_init_fn=_leave_signals_to_the_parent,
                multiprocessing_context="fork" if hasattr(signal, "SIGUSR1") else None,
            )
            self.loader = iter(loader)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step, which must follow the one asked for before."""
        if step != self.step:
            raise ValueError(f"feed stands at step {self.step}, asked for {step}: start({step}) first")
        self.step = step + 1
        if self.loader is None:
            return self._read_here(step)
        current = self.ahead if self.ahead is not None else self._received(step)
        # one step ahead on a device with its own clock, so that the copy runs beside the step
        self.ahead = self._received(step + 1) if self.device.type == "cuda" else None
        return current

    def close(self) -> None:
        """End the workers."""
        self.loader = self.ahead = None

    def _read_here(self, step: int) -> list[MicroBatch]:
        ids, epochs = self.plan.ids(step)
        made = []
        for index in range(self.pieces):
            chosen = slice(index * self.micro_batch_size, (index + 1) * self.micro_batch_size)
            batch_ids, batch_epochs = (ids, epochs) if self.pieces == 1 else (ids[chosen], epochs[chosen])
            if self.tensors is not None:
                where = torch.from_numpy(batch_ids)
                batch: Any = [tensor.index_select(0, where if tensor.is_cpu else where.to(tensor.device)) for tensor in self.tensors]
            elif self.gathers is not None:
                batch = self.gathers.gather(batch_ids, batch_epochs)
            else:
                with untouched():
                    batch = self.reading[step, index]
            count = self.micro_batch_size if self.tensors is not None and self.count is rows else self.count(batch)
            made.append(MicroBatch(self._moved(batch), min(count, len(batch_ids)) if self.count is rows else count, index, batch_ids, batch_epochs))
        return made

    def _received(self, step: int) -> list[MicroBatch]:
        assert self.loader is not None
        ids, epochs = self.plan.ids(step)
        made = []
        for index in range(self.pieces):
            chosen = slice(index * self.micro_batch_size, (index + 1) * self.micro_batch_size)
            batch = next(self.loader)
            if isinstance(batch, DataError):
                raise batch
            made.append(MicroBatch(self._moved(batch), self.count(batch), index, ids[chosen], epochs[chosen]))
        return made

    def _moved(self, batch: Any) -> Any:
        return batch if self.device.type == "cpu" else moved(batch, self.device)


def in_order(
    dataset: Any,
    *,
    batch_size: int,
    seed: int,
    device: torch.device,
    workers: int = 0,
    count: Count | None = None,
    collate: Collate | None = None,
) -> Iterator[MicroBatch]:
    """Every sample of a data set once, first to last; the last batch holds what is left."""
    tensors = in_memory(dataset)
    samples = len(tensors[0]) if tensors is not None else len(dataset)
    feed = Feed(
        dataset,
        InOrder(samples=samples, batch_size=batch_size),
        seed=seed,
        micro_batch_size=batch_size,
        device=device,
        count=count,
        collate=collate,
        workers=0,
    )
    feed.start(0)
    for step in range(-(-samples // batch_size)):
        yield from feed.micro_batches(step)


def in_memory(dataset: Any) -> tuple[Tensor, ...] | None:
    """The tensors of a data set that is nothing else, to be gathered without a loader."""
    if type(dataset) is TensorDataset:
        return dataset.tensors
    if isinstance(dataset, tuple) and dataset and all(isinstance(part, Tensor) for part in dataset):
        return dataset
    return None


def moved(batch: Any, device: torch.device) -> Any:
    """The same nested lists, tuples and dictionaries with every tensor on the device; copies are not waited for."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch


class _Reading(Dataset[Any]):
    """A data set of micro-batches, addressed by (step, index): what a loader's worker sees."""

    def __init__(self, dataset: Any, plan: Plan, seed: int, micro_batch_size: int, pieces: int, collate: Collate) -> None:
        self.dataset, self.plan, self.micro_batch_size, self.pieces, self.collate = dataset, plan, micro_batch_size, pieces, collate
        self.sample_key, self.collate_key = stream_key(seed, "augment"), stream_key(seed, "collate")

    def __getitem__(self, address: tuple[int, int]) -> Any:
        step, index = address
        ids, epochs = self.plan.ids(step)
        chosen = slice(index * self.micro_batch_size, (index + 1) * self.micro_batch_size)
        samples = []
        for sample, epoch in zip(ids[chosen].tolist(), epochs[chosen].tolist(), strict=True):
            seed_generators(fold(self.sample_key, epoch, sample))
            samples.append(read(self.dataset, sample, step=step))
        seed_generators(fold(self.collate_key, step, index))
        try:
            return self.collate(samples)
        except (RuntimeError, TypeError, ValueError) as problem:
            shown = ", ".join(str(sample) for sample in ids[chosen][:5])
            raise DataError(
                f"the samples of step {step} cannot be put into one batch (samples {shown} ...): {str(problem).splitlines()[0]}\n"
                "  make them of one shape, or give Run(collate=...)"
            ) from problem


class _Addresses:
    """The addresses of all micro-batches from one step on, without end: what a loader hands to its workers."""

    def __init__(self, first: int, pieces: int) -> None:
        self.first, self.pieces = first, pieces

    def __iter__(self) -> Iterator[tuple[int, int]]:
        step = self.first
        while True:
            for index in range(self.pieces):
                yield step, index
            step += 1

    def __len__(self) -> int:
        return np.iinfo(np.int32).max


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the whole process group; the parent finishes its step and ends the workers."""
    del worker
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
