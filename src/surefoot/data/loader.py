"""From step to micro-batches on the device: a plan, a data set, and loader workers where samples are read one by one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from surefoot.data.dataset_checks import rows
from surefoot.data.gathering import by_sample, first_few, gather_fn, sample_count
from surefoot.data.order import Cut, Ids, InOrder, MicroBatches, Plan
from surefoot.data.workers import Collate, Reading, Workers
from surefoot.errors import ConfigError, DataError, SurefootError, first_line


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples for one forward and backward pass: tensors on the device, and which samples they are."""

    batch: Any
    count: int
    """Over how many things the loss is a mean; known to the host."""
    index: int
    """Within the global batch of its step."""
    sample_ids: Ids
    """The samples, by their place in the data set."""
    epochs: Ids
    """The pass over the data that each belongs to."""
    is_padding: bool = False
    """Read only to keep step with other ranks; its results are dropped."""


class Feed:
    """Gives `micro_batches(step)` for one step after the other, from the step it was started at.

    A plan of whole steps is cut into micro-batches of `micro_batch_size` (None: it is one). A batch's `count` is taken on the host
    before it is moved: by default its first dimension. A data set that gathers whole batches (see `gather_fn`) is read in this
    process, whatever `workers` is; with `collate`, tensors are read one by one too.

    `own`: which micro-batches of each step are read here, one of several ranks (default: all). There an empty one comes with
    the samples of another, and a count of 0: each rank has to make a pass.

    `puts_back`: reading in this process leaves the global generators as they were (default), which takes longer than to read a
    small batch. `say` reports a worker that hangs.
    """

    def __init__(
        self,
        dataset: Any,
        plan: Plan | MicroBatches,
        *,
        seed: int,
        device: torch.device,
        micro_batch_size: int | None = None,
        workers: int = 0,
        count: Callable[[Any], int] | None = None,
        collate: Collate | None = None,
        own: range | None = None,
        puts_back: bool = True,
        say: Callable[[str], None] = print,
    ) -> None:
        self.device, self.workers, self.puts_back, self.say = device, workers, puts_back, say
        self.count = count or rows
        self.plan = plan if isinstance(plan, MicroBatches) else Cut(plan, micro_batch_size or plan.batch_size)
        self.own, self.shared = own or range(self.plan.pieces), own is not None
        single = by_sample(dataset)
        if collate is not None and not hasattr(single, "__getitem__"):
            raise ConfigError(
                f"collate_fn is given, but {type(dataset).__name__} makes whole batches itself: leave collate_fn out"
            )
        self.gather = gather_fn(dataset) if collate is None else None
        self.pins = self.gather is not None and device.type == "cuda"  # workers pin what they read themselves
        self.reading = Reading(single, self.plan, seed=seed, collate=collate or default_collate)
        self.ahead: list[MicroBatch] | None = None  # on CUDA: the next step, its copies on their way
        self.reads: Workers | None = None
        self.step, self.stop = 0, -1
        self.latest: int | None = None  # the step last asked for

    def start(self, step: int, *, stop: int | None = None) -> None:
        """The next step asked for will be `step`, the last one before `stop`; starts the workers where there are any."""
        self.close()
        self.step, self.stop = step, -1 if stop is None else stop
        if self.workers and self.gather is None:
            self.reads = Workers(
                self.reading,
                first=step,
                stop=stop,
                pieces=self.own,
                workers=self.workers,
                pin=self.device.type == "cuda",
                say=self.say,
            )

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step, which must follow the one asked for before."""
        if step != self.step:
            raise ValueError(f"feed stands at step {self.step}, asked for {step}: start({step}) first")
        self.step, self.latest = step + 1, step
        if self.device.type != "cuda" or (self.reads is None and self.gather is None):
            return self._build(step)
        current = self._build(step) if self.ahead is None else self.ahead
        # one step ahead on a device with its own clock, so that the copy runs beside the step
        self.ahead = self._build(step + 1) if self.step != self.stop else None
        return current

    def close(self) -> None:
        if self.reads is not None:
            self.reads.close()
        self.ahead = self.reads = None

    def _build(self, step: int) -> list[MicroBatch]:
        micro_batches, pieces = [], self.plan.micro_batches(step)
        for index in self.own:
            ids, epochs = pieces[index]
            batch = self._read(step, index, ids, epochs) if self.reads is None else self.reads.next()
            if not len(ids) and self.shared:
                substitute = next(nth for nth, (piece_ids, _) in enumerate(pieces) if len(piece_ids))
                batch = self._read(step, substitute, *pieces[substitute])
            # views of what the plan keeps: nobody may write there (set after gathering, torch warns of such arrays)
            ids.flags.writeable = epochs.flags.writeable = False
            there = batch if self.device.type == "cpu" else to_device(batch, self.device, pin=self.pins)
            micro_batches.append(MicroBatch(there, self.count(batch) if len(ids) else 0, index, ids, epochs))
        return micro_batches

    def _read(self, step: int, index: int, ids: Ids, epochs: Ids) -> Any:
        if not len(ids):  # the last ones of an epoch, where a step's samples are not of a fixed number
            return None
        if self.gather is None:
            return self.reading.here(step, index, puts_back=self.puts_back)
        try:
            return self.gather(ids, epochs)
        except SurefootError:
            raise
        except Exception as problem:
            raise DataError(
                f"samples {first_few(ids)} cannot be gathered (step {step}): {type(problem).__name__}: {first_line(problem)}"
            ) from problem


def in_order(
    dataset: Any,
    *,
    batch_size: int,
    seed: int,
    device: torch.device,
    workers: int = 0,
    count: Callable[[Any], int] | None = None,
    collate: Collate | None = None,
    max_batches: int | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[MicroBatch]:
    """Every sample of a data set once, first to last; the last batch holds the rest, and the workers end with it.

    A run's `collate` is for samples: a data set that has none, only whole batches, is gathered without it. With `max_batches`, at
    most this number of batches is read, spread evenly, in this process. Rank r reads batches r, r + ranks, ...; ranks with one
    batch fewer get a padding batch marked `is_padding`.
    """
    plan = InOrder(samples=sample_count(dataset), batch_size=batch_size, rank=rank, ranks=ranks)
    feed = Feed(
        dataset,
        plan,
        seed=seed,
        device=device,
        workers=workers if max_batches is None else 0,
        count=count,
        collate=collate if hasattr(dataset, "__getitem__") else None,
    )
    steps = -(-plan.batches // ranks)
    try:
        if max_batches is not None and max_batches < steps:
            for part in range(max_batches):
                step = (2 * part + 1) * steps // (2 * max_batches)  # the middle of each part
                feed.start(step, stop=step + 1)
                yield from feed.micro_batches(step)
            return
        feed.start(0, stop=steps)
        for step in range(steps):
            (batch,) = feed.micro_batches(step)
            yield replace(batch, is_padding=True) if step * ranks + rank >= plan.batches else batch
    finally:
        feed.close()


def to_device(batch: Any, device: torch.device, *, pin: bool = False) -> Any:
    """The same nested lists, tuples and dictionaries with every tensor on the device; copies are not waited for.

    `pin` first copies host tensors into page-locked memory: CUDA waits for copies from other memory.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return (batch.pin_memory() if pin and batch.is_cpu else batch).to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device, pin=pin) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [to_device(value, device, pin=pin) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
