"""Reading of individual samples, each under the seed of (seed, epoch, sample)."""

import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch.utils.data import Dataset

from surefoot.data.batch_lists import BatchLists
from surefoot.data.fingerprints import hash_of
from surefoot.data.gathering import first_few, read_many_fn
from surefoot.data.order import Ids, MicroBatches, sample_bits
from surefoot.data.sample_arguments import SampleArguments, WithArguments
from surefoot.errors import DataError, SurefootError, behind, comes_of_user, first_line
from surefoot.seeding import LazySeeding, fold, seed_generators, stream_key, untouched

Collate = Callable[[list[Any]], Any]
SeedFn = Callable[[int], Any]


def read_each(
    arguments: SampleArguments,
    ids: Sequence[int],
    *,
    seeds: Sequence[int] = (),
    seed: SeedFn | None = None,
    step: int,
) -> list[Any]:
    """Return samples; raise a `DataError` with the sample and the step if the data set raises.

    The next of `seeds` seeds the `rng` before each read, and is passed to `seed` if that is given.
    """
    dataset = arguments.dataset
    is_seeded = arguments.is_seeded
    samples: list[Any] = []
    sample = ids[0]
    bits = 0
    try:
        if seed is None and not is_seeded:
            for sample in ids:
                samples.append(dataset[sample])
            return samples
        for sample, bits in zip(ids, seeds, strict=True):
            if is_seeded:
                arguments.seed(bits)
            if seed is not None:
                seed(bits)
            samples.append(dataset[sample])
    except SurefootError:
        raise
    except Exception as problem:
        raise _unreadable_sample(dataset, sample, bits, problem, step=step) from problem
    return samples


def _unreadable_sample(
    dataset: Any, sample: int, bits: int, problem: Exception, *, step: int
) -> DataError:
    takes_arguments = isinstance(dataset, WithArguments)
    name = type(dataset.dataset if takes_arguments else dataset).__name__
    cure = f"to reproduce the error: {_reading_expression(dataset, sample, bits)}"
    missing = [argument for argument in ("rng", "step") if f"'{argument}'" in str(problem)]
    if isinstance(problem, TypeError) and missing and not takes_arguments:
        names = ", ".join(missing)
        cure = (
            f"{name} reads another data set, whose __getitem__ takes {names}, and passes none"
            f" on\nadd the argument to {name}: def __getitem__(self, index, {names}), and read"
            f" dataset.__getitem__(index, {names})"
        )
    return DataError(
        "sample-unreadable",
        problem=f"sample {sample} of {name} cannot be read (step {step}):"
        f" {type(problem).__name__}: {first_line(problem)}",
        remedy=cure,
        sample=sample,
        step=step,
        kind=name,
    )


def _reading_expression(dataset: Any, sample: int, bits: int) -> str:
    """Return the expression that reads a sample as a run does."""
    if not isinstance(dataset, WithArguments):
        return f"dataset[{sample}]"
    texts = [str(sample)]
    if "rng" in dataset.arguments:
        texts.append(f"rng=np.random.Generator(np.random.Philox(key={bits}))")
    if "step" in dataset.arguments:
        texts.append(f"step={dataset.arguments['step']}")
    return f"dataset.__getitem__({', '.join(texts)})"


class MicroBatchReader(Dataset[Any]):
    """A data set of micro-batches, indexed by `address(step, index within the step)`.

    Every sample is read under its own seed. At first, no generator is seeded, because seeding takes
    longer than a read from memory. If a read draws from a generator, the micro-batch is read again,
    and from then on that generator and torch's are seeded. A data set that uses
    `torch.initial_seed()` draws from none: torch's generators are also seeded if a few samples
    differ under two seeds. Code that restores the generators after its draws is not detected.

    A data set that takes the argument `step` receives `fixed_step`, or, if that is None, the step.
    """

    def __init__(
        self,
        dataset: Any,
        plan: MicroBatches,
        *,
        seed: int,
        collate_fn: Collate,
        fixed_step: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self.collate = collate_fn
        self.fixed_step = fixed_step
        self.follow_changes()
        self.sample_key = stream_key(seed, "augment")
        self.collate_key = stream_key(seed, "collate")
        self.seeding = LazySeeding()
        self.reads_seed = True  # until a first micro-batch shows that it does not

    def follow_changes(self) -> None:
        """Take the parts of the data set as they are now."""
        self.arguments = SampleArguments(self.dataset)
        self.read_many = read_many_fn(self.dataset)

    def address(self, step: int, index: int) -> tuple[Any, ...]:
        """Return what a worker needs to read a micro-batch. A sampler's list is sent to it, because
        its copy of the sampler does not follow the state of the sampler.
        """
        if isinstance(self.plan, BatchLists):
            return (step, index, *self.plan.micro_batches(step)[index])
        return (step, index)

    def __getitem__(self, address: tuple[Any, ...]) -> Any:
        """Return a micro-batch or a `SurefootError`; the loader would wrap a raised error in its
        traceback.
        """
        from surefoot.data.shared_memory import share_memory, shared_memory_named

        try:
            step, index, *samples = address
            ids, epochs = samples or self.plan.micro_batches(step)[index]
            with shared_memory_named():
                batch = self._read(step, index, ids, epochs)
                share_memory(batch)
            return batch
        except SurefootError as problem:
            cause = behind(problem)
            if cause is not None:  # the cause is lost between processes
                problem.add_note("".join(traceback.format_exception(cause)))
            problem.of_user = comes_of_user(problem)
            return problem

    def here(self, step: int, index: int, ids: Ids, epochs: Ids, *, puts_back: bool) -> Any:
        """Read the micro-batch of these samples in this process on one thread; restore the global
        generators if `puts_back` is true.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the rounding of sums depends on the number of threads
        try:
            with untouched() if puts_back else nullcontext():
                return self._read(step, index, ids, epochs)
        finally:
            torch.set_num_threads(threads)

    def _read(self, step: int, index: int, ids: Ids, epochs: Ids) -> Any:
        while self.seeding.undrawn:
            self.seeding.begin()
            try:
                batch = self._build(step, index, ids, epochs, seed=self.seeding.seed_fn())
            except DataError:  # perhaps of an unseeded draw: read again with all seeds
                break
            if not self.seeding.drawn() and not self._depends_on_seed(step, index, ids, epochs):
                return batch
        return self._build(step, index, ids, epochs, seed=seed_generators)

    def _depends_on_seed(self, step: int, index: int, ids: Ids, epochs: Ids) -> bool:
        """Return True if samples of the first micro-batch depend on torch's seed. Later calls
        return False.
        """
        if not self.reads_seed or "torch" not in self.seeding.undrawn or not len(ids):
            return False
        unknown: dict[str, None] = {}
        with suppress(Exception):  # a batch of four samples may be too small
            batches = [
                self._build(step, index, ids[:4], epochs[:4], seed=seed)
                for seed in self.seeding.torch_seed_fns()
            ]
            hashes = {hash_of(batch, unknown) for batch in batches}
            self.reads_seed = len(hashes) > 1 or bool(unknown)
        if self.reads_seed:
            self.seeding.undrawn.remove("torch")
        return self.reads_seed

    def _build(self, step: int, index: int, ids: Ids, epochs: Ids, *, seed: SeedFn | None) -> Any:
        if not len(ids):
            return None
        samples = self._read_samples(ids, epochs, step, seed)
        if seed is not None:
            seed(fold(self.collate_key, step, index))
        try:
            return self.collate(samples)
        except SurefootError:
            raise
        except Exception as problem:
            from surefoot.data.collate import collate, why_not

            why_and_cure = None
            if self.collate is collate:
                why_and_cure = why_not(samples, ids.tolist())
            if why_and_cure is None:
                error = f"{type(problem).__name__}: {first_line(problem)}"
                why_and_cure = error, "correct Run(collate_fn=...)"
            why, cure = why_and_cure
            raise DataError(
                "samples-not-collated",
                problem=f"samples {first_few(ids)} of step {step} cannot be put into one batch",
                reason=why,
                remedy=cure,
                samples=ids.tolist(),
                step=step,
            ) from problem

    def _read_samples(self, ids: Ids, epochs: Ids, step: int, seed: SeedFn | None) -> list[Any]:
        numbers: list[int] = ids.tolist()
        if self.read_many is not None:
            with suppress(Exception):  # reading one by one names the sample
                return self.read_many(numbers)
        self.arguments.set_step(step if self.fixed_step is None else self.fixed_step)
        is_seeded = seed is not None or self.arguments.is_seeded
        seeds = sample_bits(self.sample_key, ids, epochs).tolist() if is_seeded else ()
        return read_each(self.arguments, numbers, seeds=seeds, seed=seed, step=step)
