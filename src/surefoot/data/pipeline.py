"""Data pipeline of a run: batch sizes, the plan of samples, and the feed that reads the samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler

from surefoot.config.batch_size import Batching, batching, one_each
from surefoot.config.parallel import Strategy
from surefoot.data.batch_lists import BatchLists
from surefoot.data.buckets import Buckets, Lengthy
from surefoot.data.dataset_checks import is_stream
from surefoot.data.fingerprints import all_within
from surefoot.data.gathering import sample_count
from surefoot.data.loader import Feed, MicroBatch, in_order
from surefoot.data.mixture import Mixture, MixtureOrder
from surefoot.data.order import NOTHING_PASSED, Arriving, Cut, MicroBatches, Order, Passed, Plan
from surefoot.distributed.strategy import is_exact, refuse_ranks
from surefoot.distributed.world import World
from surefoot.errors import ConfigError, DataError, Setting
from surefoot.seeding import untouched

if TYPE_CHECKING:
    from surefoot.data.streams.tape import Tape


@runtime_checkable
class OpenedBySession(Protocol):
    """A data set that writes into the directory of a run when a session begins."""

    def open_in_run(self, world: World) -> None:
        """Write what belongs there. Collective."""


@dataclass(frozen=True)
class TrainData:
    """The training data set and how it is read, by the settings of the run or by its
    `DataLoader`.
    """

    dataset: Any
    # a name of `config.order`, `Weighted`, or an order of a DataLoader (see `data/orders.py`)
    order: Any
    batch_size: int | str | None
    workers: int
    collate: Callable[[list[Any]], Any] | None
    about: str = ""  # what was taken from a DataLoader, and what was not
    loader: Any = None  # the DataLoader

    @property
    def lists_batches(self) -> bool:
        """True if a sampler lists the batches; `batch_size` is then the largest batch."""
        return isinstance(self.order, MicroBatches)

    def read_objects(self, splits: Mapping[str, Any]) -> dict[str, Any]:
        """Return the objects whose values decide what a step or a split reads, by their names in
        the user's code.
        """
        objects = {"collate_fn": self.collate, "train_data": self.dataset}
        if self.loader is not None:
            objects = {"train_data": self.loader}
            if self.lists_batches or self.draws_by_sampler:
                objects["train_data.batch_sampler"] = self.loader.batch_sampler
        if is_stream(self.dataset):
            from surefoot.data.streams.stream import as_stream

            if as_stream(self.dataset).start_method == "thread":
                del objects["train_data"]  # the thread changes values at any time
        for name, split in splits.items():
            if not is_stream(split.data):  # its rows are recorded before the first step
                objects[f"splits[{name!r}].data"] = split.data
            objects[f"splits[{name!r}].collate_fn"] = split.collate_fn
        return {name: value for name, value in objects.items() if value is not None}

    @property
    def draws_by_sampler(self) -> bool:
        """True if the run took weights or indices from the sampler of its `DataLoader`."""
        sampler = None if self.loader is None else self.loader.sampler
        return type(sampler) in (WeightedRandomSampler, SubsetRandomSampler)

    def with_batch_size(self, batch_size: int | str | None) -> "TrainData":
        """Return the data with another batch size. Raises `ConfigError` if a sampler of the user
        lists the batches.
        """
        order = self.order
        if isinstance(order, BatchLists) and batch_size != self.batch_size:
            order = order.resized(batching(batch_size, None).batch_size)
        return replace(self, batch_size=batch_size, order=order)

    def size_for(self, micro_batch_size: int | str | None) -> int | str | None:
        """Return the batch size; listed batches are rounded up to whole micro-batches, which then
        may be smaller.
        """
        size = self.batch_size
        if not self.lists_batches or not isinstance(size, int):
            return size
        if not isinstance(micro_batch_size, int) or micro_batch_size < 1:
            return size
        return -(-size // micro_batch_size) * micro_batch_size


def planned_sizes(
    data: TrainData,
    micro_batch_size: int | str | None,
    *,
    ranks: int = 1,
    began: int | str | None = None,
) -> Batching:
    """Return the batch and micro-batch sizes, in tokens only if samples differ in length.

    If `micro_batch_size` is None, each rank reads one micro-batch per step. `began` is the first
    micro-batch size of a resumed run.
    """
    train = data.dataset
    micro_batch_size = began if micro_batch_size is None else micro_batch_size
    if micro_batch_size is None and data.lists_batches and isinstance(data.batch_size, int):
        micro_batch_size = -(-data.batch_size // ranks)
    batch_size = data.size_for(micro_batch_size)
    if micro_batch_size is None:
        micro_batch_size = one_each(batch_size, ranks=ranks)
    sizes = batching(batch_size, micro_batch_size)
    refuse_ranks(
        ranks, pieces=sizes.pieces, batch_size=batch_size or 0, is_resumed=began is not None
    )
    if sizes.unit == "samples":
        return sizes
    if not isinstance(train, Lengthy) or is_stream(train):
        raise ConfigError(
            "batch-size-of-unknown-lengths",
            problem=f"batch_size = {batch_size}: {type(train).__name__} does not report the lengths"
            " of its samples",
            remedy=[
                ("give", Setting("batch_size"), "in samples"),
                "a data set that is no stream may have an attribute `lengths`: (samples,) or"
                " (samples, sides)",
            ],
            setting="batch_size",
            value=batch_size,
        )
    return sizes.of_equal_samples(train.lengths) if isinstance(train.lengths, int) else sizes


def tape_of(
    settings: Any,
    data: TrainData,
    world: World,
    *,
    run_dir: Path | None,
    sizes: Batching,
    passed: Passed,
    behavior: int,
) -> "Tape | None":
    """Return the tape of training data that are a stream, or None (see `opening.build_tape`).
    Collective.
    """
    if not is_stream(data.dataset):
        return None
    from surefoot.data.streams.opening import build_tape

    return build_tape(
        settings, data, world, run_dir=run_dir, sizes=sizes, passed=passed, behavior=behavior
    )


def taped_splits(
    settings: Any,
    world: World,
    *,
    run_dir: Path | None,
    behavior: int,
    unless_built: ExitStack,
) -> dict[str, Any]:
    """Return the splits of a run. Those whose data are a stream get its first rows, recorded.
    Collective.
    """
    splits = dict(settings.splits or {})
    streams = [name for name, split in splits.items() if is_stream(split.data)]
    if not streams:
        return splits
    from surefoot.data.streams.split_tape import taped_rows

    say = partial(print, flush=True) if settings.console and world.is_main else None
    for name in streams:
        split = splits[name]
        rows = taped_rows(
            split.data,
            name,
            world,
            run_dir=run_dir,
            seed=settings.seed,
            behavior=behavior,
            say=say,
        )
        unless_built.callback(rows.tape.abandon)
        splits[name] = replace(split, data=rows)
    return splits


def with_splits(data: TrainData, splits: Mapping[str, Any]) -> TrainData:
    """Return the training data with a text that also names what is not taken from the splits'
    loaders.
    """
    texts = [data.about] if data.about else []
    for name, split in splits.items():
        if split.untaken:
            texts.append(f"the DataLoader of split {name!r}{split.untaken}")
    return replace(data, about="; ".join(texts))


def data_plan(
    train: Any,
    *,
    order: Any,
    seed: int,
    samples: int,
    sizes: Batching,
    passed: Passed = NOTHING_PASSED,
    weights_from: Sequence[tuple[int, Sequence[float]]] = (),
) -> MicroBatches:
    """Return the plan of samples: a permutation per epoch or another `order`, a weighted mixture,
    or batches of similar length. `passed` is what steps of other batch sizes have read, and
    `weights_from` that of `MixtureOrder`.
    """
    name = order if isinstance(order, str) else type(order).__name__
    if isinstance(train, Arriving):
        if order not in ("shuffled", "sequential"):
            raise ConfigError(
                "order-of-stream",
                problem=f"order = {name}: a stream has the order of its source",
                remedy=("leave out", Setting("order"), "and order the rows in the source"),
                setting="order",
                value=name,
            )
        return Cut(train.arrival(sizes.batch_size), sizes.micro_batch_size)
    if order != "shuffled":
        if sizes.unit == "tokens" or isinstance(train, Mixture):
            raise ConfigError(
                "order-only-shuffled",
                problem=f"order = {name}: batches sized in tokens and mixtures can only be shuffled",
                reason="the lengths or the weights decide which samples share a step",
                remedy=("leave out", Setting("order")),
                setting="order",
                value=name,
            )
        from surefoot.data.orders import plan_order

        return plan_order(order, seed=seed, samples=samples, sizes=sizes, passed=passed)
    if sizes.unit == "tokens":
        lengths = np.asarray(train.lengths)
        is_of_samples = lengths.ndim in (1, 2) and len(lengths) == samples
        is_integer = lengths.dtype.kind in "iu"
        if not is_of_samples or not is_integer or not lengths.size or lengths.min() <= 0:
            raise DataError(
                "lengths-not-of-samples",
                problem=f"{type(train).__name__}.lengths is {lengths.dtype} of shape"
                f" {lengths.shape}, and the data set has {samples} samples",
                remedy="give integer numbers of tokens, 1 or more: (samples,) or (samples, sides)",
                shape=list(lengths.shape),
                samples=samples,
            )
        return Buckets(
            seed,
            lengths=lengths.astype(np.int64),
            tokens=sizes.micro_batch_size,
            pieces=sizes.pieces,
            passed=passed,
        )
    plan: Plan = Order(seed, samples=samples, batch_size=sizes.batch_size, passed=passed)
    if isinstance(train, Mixture):
        plan = MixtureOrder(
            seed,
            sizes=train.sizes,
            weights=train.weights,
            batch_size=sizes.batch_size,
            passed=passed,
            weights_from=weights_from,
        )
    return Cut(plan, sizes.micro_batch_size)


def _first_with_samples(micro_batches: Sequence[MicroBatch]) -> MicroBatch | None:
    """Return the first micro-batch, or None if there is none or `collate_fn` returned None."""
    if not micro_batches or micro_batches[0].batch is None:
        return None
    return micro_batches[0]


def _one_target(batch: Any) -> int:  # noqa: ARG001
    """Return the count of a batch whose targets do not matter."""
    return 1


@dataclass(frozen=True)
class DataPipeline:
    """The training data, its sample plan, and the settings of the reader."""

    data: TrainData
    plan: MicroBatches
    sizes: Batching
    seed: int
    world: World
    count: Callable[[Any], int] | None
    tape: "Tape | None"  # the data set, if it is a stream
    parallel: Strategy
    exact_sums: bool  # the setting; False for a run of 0.1.0
    passes_step: bool  # to `__getitem__(index, step)`; False for a run that began earlier
    passed: Passed  # by steps of other batch sizes

    @property
    def exact(self) -> bool:
        return is_exact(self.parallel.kind, self.parallel.sync, exact=self.exact_sums)

    @property
    def checked(self) -> Any:
        """The part of the data set that checks may read: all of it, or the first rows of a
        stream.
        """
        return self.dataset if self.tape is None else self.tape.beginning()

    @property
    def dataset(self) -> Any:
        return self.data.dataset

    @property
    def workers(self) -> int:
        return self.data.workers

    @property
    def collate(self) -> Callable[[list[Any]], Any] | None:
        return self.data.collate

    @property
    def order_text(self) -> str:
        """The name of an order that replaces the permutations, after a comma; "" if nothing
        replaces them.
        """
        order = str(self.plan.to_dict()["order"])
        return f", {order}" if order in ("sequential", "lanes", "weighted") else ""

    @property
    def batch_lists(self) -> BatchLists | None:
        """The plan, if it takes the lists of a sampler."""
        return self.plan if isinstance(self.plan, BatchLists) else None

    @property
    def whole_epochs(self) -> dict[str, int] | None:
        """The steps of an epoch, and the step from which on epochs have so many. None if epochs
        begin within a step, or if the batch size cannot change.
        """
        lists = self.batch_lists
        if self.plan.steps is None or (lists is not None and not lists.has_torch_batches):
            return None
        return {"steps": self.plan.steps, "begin": self.passed.steps}

    def plan_with(self, sizes: Batching) -> MicroBatches:
        """Return the plan of the same data and order with other sizes."""
        samples = sample_count(self.dataset) if self.tape is None else self.tape.samples
        return data_plan(
            self.dataset, order=self.data.order, seed=self.seed, samples=samples, sizes=sizes
        )

    def feed(self, *, workers: int, say: Callable[[str], None] = print) -> Feed:
        """Return this rank's feed, not yet started; the caller must seed the global generators
        after each read.
        """
        share = None
        passes = 0
        # ranks that wait for each other in each pass have equally many
        if self.parallel.kind == "fsdp" or self.parallel.sync == "every":
            share = self._share
            passes = max(map(len, self.shares))
        elif self.world.size > 1:
            share = self._share
        return self._feed(workers=workers, share=share, passes=passes, puts_back=False, say=say)

    def samples(self, step: int) -> list[list[int]]:
        """Return the sample ids of this rank's micro-batches of a step without reading the
        samples.
        """
        try:
            pieces = self.plan.micro_batches(step)
        except Exception:  # an error of the plan must not hide the error that is being reported
            return []
        return [pieces[index][0].tolist() for index in self._share]

    def first(self, step: int = 0) -> MicroBatch | None:
        """Return the first micro-batch of this rank in a step, or None if the read fails."""
        return _first_with_samples(self.again(step, share=self._share[:1]))

    def beginning(self) -> MicroBatch | None:
        """Return the first micro-batch of the run, equal on all ranks, or None if the read
        fails.
        """
        return _first_with_samples(self.again(0, share=range(1)))

    def passes(self, steps: int) -> Iterator[tuple[int, MicroBatch]]:
        """Yield the micro-batches with targets of the first steps, each with its step; the same on
        every rank.
        """
        of_beginning = replace(self, plan=self.plan_with(self.sizes))
        feed = of_beginning._feed(workers=self.workers)
        feed.start(0, stop=steps)
        try:
            for step in range(steps):
                for micro_batch in feed.micro_batches(step):
                    if micro_batch.count > 0:
                        yield step, micro_batch
        finally:
            feed.close()

    def again(self, step: int, *, share: range | None = None) -> Sequence[MicroBatch]:
        """Read the micro-batches of any step (all, or those in `share`); return an empty list if
        the read fails.
        """
        feed = self._feed(share=share)
        with untouched():
            try:
                feed.start(step, stop=step + 1)
                return feed.micro_batches(step)
            except Exception:  # a failed read must not hide the error that is being reported
                return []
            finally:
                feed.close()

    def split(
        self,
        dataset: Any,
        *,
        batch_size: int | None,
        max_batches: int | None = None,
        workers: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        counts_targets: bool = True,
    ) -> Iterator[MicroBatch]:
        """Yield the batches of a split once, divided among ranks; with `max_batches`, every rank
        reads the same batches.

        If `workers` or `collate` is None, the split is read as the training data are. Without
        `counts_targets`, the data may have no targets.
        """
        rows = self.sizes.micro_batch_size
        if isinstance(self.plan, Buckets):  # rows that fit even if all have the maximal length
            rows = max(1, rows // int(self.plan.longest.max()))
        are_divided = max_batches is None
        return in_order(
            dataset,
            batch_size=batch_size or rows,
            seed=self.seed,
            device=self.world.device,
            workers=self.workers if workers is None else workers,
            count=self.count if counts_targets else _one_target,
            collate=collate or self.collate,
            max_batches=max_batches,
            rank=self.world.rank if are_divided else 0,
            ranks=self.world.size if are_divided else 1,
        )

    def code(self) -> list[Any]:
        """Return the objects whose source text says how samples are read."""
        objects = [*all_within(self.checked)]
        if self.tape is not None:
            objects += self.tape.stream.code()
        return objects

    def close(self) -> None:
        """Stop reading a stream. Recorded rows can still be read."""
        if self.tape is not None:
            self.tape.close()

    @property
    def shares(self) -> list[range]:
        """The micro-batches of each rank. With exact sums, the ranks of a sharded model copy take
        turns.
        """
        ranks = self.world.size
        shards = 1
        if self.exact and self.parallel.kind == "fsdp":
            shards = max(1, ranks // self.parallel.replicas)
        return self.sizes.shares(ranks, shards=shards)

    @property
    def _share(self) -> range:
        return self.shares[self.world.rank]

    @property
    def _feed(self) -> partial[Feed]:
        return partial(
            Feed,
            self.dataset,
            self.plan,
            seed=self.seed,
            device=self.world.device,
            count=self.count,
            collate=self.collate,
            fixed_step=None if self.passes_step else 0,
        )
