"""Reader that loads the micro-batches of each step from a data set to the device."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import default_collate

from surefoot.data.batch_lists import BatchLists
from surefoot.data.dataset_checks import checked_count, rows
from surefoot.data.gathering import by_sample, gather_fn, gathered, sample_count
from surefoot.data.nested import Movable, children, rebuilt
from surefoot.data.order import Cut, Ids, InOrder, MicroBatches, Plan
from surefoot.data.reading import Collate, MicroBatchReader
from surefoot.errors import ConfigError, DataError, Setting, SurefootError

if TYPE_CHECKING:
    from surefoot.data.workers import Workers


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one forward and backward pass, with tensors on the device."""

    batch: Any  # None without samples, or if `collate_fn` returned None
    count: int
    """The number of targets in the mean loss, as an integer on the host."""
    index: int
    """The index of the micro-batch within its step."""
    sample_ids: Ids
    epochs: Ids
    """The epoch of each sample; draws with replacement are numbered instead (see `data/orders.py`).
    """
    is_padding: bool = False
    """True if the batch only equalizes the number of forward passes on all ranks; the results are
    dropped. In a step with `sample_ids`, `collate_fn` returned None for these.
    """


class StoppedError(SurefootError):
    """A request to stop that came while a step waited for its data. The session catches it, and
    saves the steps before.
    """


class Feed:
    """Reader of the micro-batches of consecutive steps; `start(step)` sets the first step.

    micro_batch_size: samples per micro-batch; if None, each step is one micro-batch. count: a
    function from a batch to its number of targets, called on the host (default: the size of the
    first dimension). workers: number of loader processes, ignored if the data set gathers whole
    batches (see `gather_fn`). collate: a function from samples to a batch. If `collate` is given,
    samples are read individually. share: indices of the micro-batches that this rank reads
    (default: all). If `share` is given, another micro-batch with a count of 0 replaces an empty
    micro-batch, because each rank must run a forward and backward pass. passes: the number of
    micro-batches per step; the last one is repeated with a count of 0 (default: as many as `share`
    has). puts_back: restore the global generators after each read in this process, which takes
    longer than reading a small batch. fixed_step: what a data set that takes `step` receives in
    place of the step. say: a function that receives a warning if a worker hangs.
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
        share: range | None = None,
        passes: int = 0,
        puts_back: bool = True,
        fixed_step: int | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        if not isinstance(plan, MicroBatches):
            plan = Cut(plan, micro_batch_size or plan.batch_size)
        if collate is default_collate:
            collate = None
        self.dataset = dataset
        self.plan = plan
        self.device = device
        self.workers = workers
        self.count = count
        self.passes = passes
        self.puts_back = puts_back
        self.say = say
        self.share = share or range(plan.pieces)
        self.replaces_empty = share is not None
        single = by_sample(dataset)
        if collate is not None and not hasattr(single, "__getitem__"):
            raise ConfigError(
                "collate-fn-without-samples",
                problem=f"collate_fn is given, but {type(dataset).__name__} builds whole batches"
                " itself",
                remedy=("leave out", Setting("collate_fn")),
                setting="collate_fn",
            )
        self.gather = gather_fn(dataset) if collate is None else None
        if collate is None:
            from surefoot.data.collate import collate as default_batch
        # workers pin their own batches, but not the dataclasses in them
        self.pins = device.type == "cuda" and (self.gather is not None or workers > 0)
        self.reader = MicroBatchReader(
            single,
            self.plan,
            seed=seed,
            collate_fn=collate or default_batch,
            fixed_step=fixed_step,
        )
        # on CUDA: the next step, whose copies are in flight
        self.ahead: list[MicroBatch] | None = None
        self.loader_workers: Workers | None = None
        self.step = 0
        self.stop = -1
        self.latest: int | None = None  # the last requested step

    def start(self, step: int, *, stop: int | None = None) -> None:
        """Start reading at `step` until `stop` (exclusive), and start the workers if any are
        configured.
        """
        self.close()
        self.step = step
        self.stop = -1 if stop is None else stop
        if self.workers and self.gather is None:
            from surefoot.data.workers import Workers

            self.loader_workers = Workers(
                self.reader,
                first=step,
                stop=stop,
                pieces=self.share,
                workers=self.workers,
                pin=self.device.type == "cuda",
                say=self.say,
            )

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step; raise `ValueError` if the steps are not
        consecutive.
        """
        if step != self.step:
            raise ValueError(
                f"the feed is at step {self.step}, and step {step} was requested: start({step}) first"
            )
        if isinstance(self.plan, BatchLists) and self.plan.begin(step):
            self.start(step, stop=None if self.stop < 0 else self.stop)  # with the new list
        self.step = step + 1
        self.latest = step
        if self.device.type != "cuda" or (self.loader_workers is None and self.gather is None):
            return self._build(step)
        current = self._build(step) if self.ahead is None else self.ahead
        # read one step ahead on CUDA, so that the copy overlaps with the step
        self.ahead = self._build(step + 1) if self.step != self.stop else None
        return current

    @property
    def reads_in_workers(self) -> bool:
        return self.loader_workers is not None

    def follow_changes(self) -> None:
        """Read the next step in this process from the data set as it is now, also if the step was
        read ahead.
        """
        self.ahead = None
        if self.gather is not None:
            self.gather = gather_fn(self.dataset)
        self.reader.follow_changes()

    def close(self) -> None:
        if self.loader_workers is not None:
            self.loader_workers.close()
        self.ahead = self.loader_workers = None

    def _build(self, step: int) -> list[MicroBatch]:
        micro_batches = []
        pieces = self.plan.micro_batches(step)
        for index in self.share:
            ids, epochs = pieces[index]
            if self.loader_workers is None:
                batch = self._read(step, index, ids, epochs)
            else:
                batch = self.loader_workers.next()
            # on the host, before a batch may move itself
            targets = 0 if batch is None else self._count(batch, ids)
            is_substitute = batch is None and self.replaces_empty
            if is_substitute:
                batch = self._substitute(step, pieces)
            if self.device.type != "cpu":
                batch = to_device(batch, self.device, pin=self.pins)
            is_padding = is_substitute and len(ids) > 0
            micro_batches.append(
                # not the plan's arrays
                MicroBatch(batch, targets, index, ids.copy(), epochs.copy(), is_padding)
            )
        while len(micro_batches) < self.passes:
            last = micro_batches[-1]
            index = last.index + self.share.step
            no_ids = last.sample_ids[:0]
            batch = deepcopy(last.batch)  # a loss may write into it
            micro_batches.append(MicroBatch(batch, 0, index, no_ids, no_ids, is_padding=True))
        return micro_batches

    def _substitute(self, step: int, pieces: Sequence[tuple[Ids, Ids]]) -> Any:
        """Return another micro-batch of the step, whose pass has no targets."""
        for index, (ids, epochs) in enumerate(pieces):
            batch = self._read(step, index, ids, epochs)
            if batch is not None:
                return batch
        raise DataError(
            "step-without-samples",
            problem=f"collate_fn returned None for all micro-batches of step {step}",
            reason="each of several ranks needs a batch for its pass, even one that counts nothing",
            remedy="leave the samples out of the data set",
            step=step,
        )

    def _count(self, batch: Any, ids: Ids) -> int:
        if self.count is not None:
            return checked_count(self.count(batch))
        return rows(batch) if self.gather is not None else rows(batch, samples=len(ids))

    def _read(self, step: int, index: int, ids: Ids, epochs: Ids) -> Any:
        if not len(ids):  # an empty micro-batch at the end of an epoch
            return None
        if self.gather is None:
            return self.reader.here(step, index, ids, epochs, puts_back=self.puts_back)
        return gathered(self.dataset, self.gather, ids, epochs, step=step)


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
    """Yield every sample of a data set once, in order; the last batch may be smaller. Samples are
    those of the first epoch and of step 0.

    `collate` is ignored if the data set has no `__getitem__`. If `max_batches` is given, this
    process reads at most `max_batches` evenly spaced batches. Rank r reads batches r, r + ranks,
    ...; a rank with one batch fewer gets a batch marked `is_padding`.
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
        fixed_step=0,
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
            if step * ranks + rank >= plan.batches:
                batch = replace(batch, is_padding=True)
            yield batch
    finally:
        feed.close()


def to_device(batch: Any, device: torch.device, *, pin: bool = False) -> Any:
    """Copy the tensors of a nested batch to the device asynchronously; objects with a method `to`
    move themselves.

    If `pin` is true, host tensors are first copied to page-locked memory, because copies from
    pageable memory block on CUDA. A part with a method `pin_memory` does both itself.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        if pin and batch.is_cpu and not batch.is_pinned():
            batch = batch.pin_memory()
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Movable) and not isinstance(batch, type):
        movable: Any = copy(batch)  # `to` may change the object, which a data set may still hold
        if pin and isinstance(movable, Pinnable):
            movable = movable.pin_memory()
        if _takes_non_blocking(movable.to):
            return movable.to(device, non_blocking=True)
        return movable.to(device)
    parts = children(batch)
    if parts is None:
        return batch
    return rebuilt(batch, [to_device(part, device, pin=pin) for part in parts.values()])


@runtime_checkable
class Pinnable(Protocol):
    """A batch that copies itself to page-locked memory, such as a `PackedSequence` or a graph."""

    def pin_memory(self) -> Any:
        """Return the copy."""


def _takes_non_blocking(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters
    if "non_blocking" in parameters:
        return True
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
