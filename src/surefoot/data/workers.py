"""Reading of individual samples, in this process or in loader workers; each read is seeded by (seed, epoch, sample)."""

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from surefoot.data.dataset_checks import read_each
from surefoot.data.gathering import first_few, read_many_fn
from surefoot.data.order import Ids, MicroBatches
from surefoot.errors import ConfigError, DataError, SurefootError, behind, comes_of_user, first_line
from surefoot.seeding import LazySeeding, fold, seed_generators, stream_key, untouched

Collate = Callable[[list[Any]], Any]

_LEFT_TO_THE_PARENT = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]
_WAIT_S = 5.0
_SOCKET = 107  # the maximal length of a socket path on Linux
_HANGS_AFTER = 4  # waits of `_WAIT_S` for a worker before a warning; doubled after each warning


class Reading(Dataset[Any]):
    """A data set of micro-batches, indexed by (step, index within the step).

    Every sample is read under its own seed. At first, only torch's generators are seeded, because seeding Python's and NumPy's
    generators takes longer than a read from memory. If a read draws from one of these two, the micro-batch is read again, and that
    generator is seeded too from then on. Code that restores the generators after its draws is not detected.
    """

    def __init__(self, dataset: Any, plan: MicroBatches, *, seed: int, collate_fn: Collate) -> None:
        self.dataset, self.plan, self.collate = dataset, plan, collate_fn
        self.read_many = read_many_fn(dataset)
        self.sample_key, self.collate_key = stream_key(seed, "augment"), stream_key(seed, "collate")
        self.seeding = LazySeeding()

    def __getitem__(self, address: tuple[int, int]) -> Any:
        """Return a micro-batch or a `SurefootError`; the loader would wrap a raised error in its traceback."""
        try:
            return self._read(*address, *self.plan.micro_batches(address[0])[address[1]])
        except SurefootError as problem:
            if (cause := behind(problem)) is not None:  # the cause is lost between processes
                problem.add_note("".join(traceback.format_exception(cause)))
            problem.of_user = comes_of_user(problem)
            return problem

    def here(self, step: int, index: int, ids: Ids, epochs: Ids, *, puts_back: bool) -> Any:
        """Read the micro-batch of these samples in this process on one thread; restore the global generators if `puts_back` is true."""
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
            if not self.seeding.drawn():
                return batch
        return self._build(step, index, ids, epochs, seed=seed_generators)

    def _build(self, step: int, index: int, ids: Ids, epochs: Ids, *, seed: Callable[[int], Any]) -> Any:
        if not len(ids):
            return None
        samples = self._read_samples(ids, epochs, step, seed)
        seed(fold(self.collate_key, step, index))
        try:
            return self.collate(samples)
        except SurefootError:
            raise
        except Exception as problem:
            from surefoot.data.collate import collate, why_not

            why = f"{type(problem).__name__}: {first_line(problem)}\n  correct Run(collate_fn=...)"
            if self.collate is collate:
                why = why_not(samples, ids.tolist(), otherwise=why)
            raise DataError(
                f"samples {first_few(ids)} of step {step} cannot be put into one batch\n  {why}"
            ) from problem

    def _read_samples(self, ids: Ids, epochs: Ids, step: int, seed: Callable[[int], Any]) -> list[Any]:
        numbers: list[int] = ids.tolist()
        if self.read_many is not None:
            with suppress(Exception):  # reading one by one names the sample
                return self.read_many(numbers)
        # all keys first: a loop that does one thing is quicker
        keys = {epoch: fold(self.sample_key, epoch) for epoch in set(epochs.tolist())}
        seeds = [fold(keys[epoch], sample) for sample, epoch in zip(numbers, epochs.tolist(), strict=True)]
        return read_each(self.dataset, numbers, seeds, seed, step=step)


def _check_temporary_directory() -> None:
    # with a longer socket path (see unix(7)), a thread of the worker would fail and the run would wait forever
    path = tempfile.gettempdir()
    limit = _SOCKET - len("/pymp-12345678/listener-12345678")  # as multiprocessing names it
    if sys.platform == "linux" and len(os.fsencode(path)) > limit:
        raise ConfigError(
            f"workers: the path of the temporary directory has {len(os.fsencode(path))} bytes: {path}\n"
            f"  a worker sends its tensors through a socket in that directory, so the path may have at most {limit}\n"
            "  set a shorter one: TMPDIR=/tmp"
        )


class Workers:
    """Loader processes that prefetch the micro-batches of steps `first` to `stop`; `close` ends the processes."""

    def __init__(
        self,
        reading: Reading,
        *,
        first: int,
        stop: int | None,
        pieces: range,
        workers: int,
        pin: bool,
        say: Callable[[str], None],
    ) -> None:
        _check_temporary_directory()
        self.plan, self.first, self.pieces, self.workers, self.say = reading.plan, first, pieces, workers, say
        self.taken = 0  # micro-batches
        self.named_after = dict.fromkeys(range(workers), _HANGS_AFTER)  # waits before the next warning, by worker
        were = set(multiprocessing.active_children())
        with warnings.catch_warnings(), _deaths_told():
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            steps = count(first) if stop is None else range(first, stop)
            loader = DataLoader(
                reading,
                batch_size=None,
                sampler=((step, index) for step in steps for index in pieces),
                num_workers=workers,
                collate_fn=_as_it_is,
                pin_memory=pin,
                worker_init_fn=partial(begin_process, os.getpid(), gc.isenabled()),
                timeout=_WAIT_S,  # after each wait, the loader checks for dead workers
                multiprocessing_context="fork" if sys.platform == "linux" else None,
                generator=torch.Generator(),  # otherwise the loader draws from the global generator
            )
            with start_of_process():
                self.batches: Any = iter(loader)
            self.processes = set(multiprocessing.active_children()) - were
            # at exit, Python waits for the workers, which ignore SIGTERM: end the workers first
            atexit.register(self.close)

    def next(self) -> Any:
        """Return the next batch. A worker that takes long is named; its error is raised here, also its death."""
        worker = self.taken % self.workers  # the loader reads from the workers in turn
        for waits in count(1):
            try:
                with _deaths_told():
                    batch = next(self.batches)
                break
            except RuntimeError as problem:
                if "DataLoader timed out" not in str(problem):
                    raise
                if waits == self.named_after[worker]:
                    self.say(self._hanging(worker, waits * _WAIT_S))
                    self.named_after[worker] *= 2
        self.taken += 1
        if isinstance(batch, SurefootError):
            raise batch
        return batch

    def _hanging(self, worker: int, waited_s: float) -> str:
        ahead, nth = divmod(self.taken, len(self.pieces))
        step, pid = self.first + ahead, self.batches._workers[worker].pid
        ids, _ = self.plan.micro_batches(step)[self.pieces[nth]]
        return (
            f"warning: loader worker {worker} (process {pid}) has been reading samples {first_few(ids)} of step {step}"
            f" for {waited_s:.0f} s\n"
            "  the run waits for it: is a disk or a server slow, or does __getitem__ wait for a lock?\n"
            f"  try --workers 0; to see its stack: py-spy dump --pid {pid}"
        )

    def close(self) -> None:
        """End the worker processes; kill a process that still reads a sample after five seconds."""
        atexit.unregister(self.close)
        # the traceback of an error may keep the iterator alive: run the cleanup of its __del__ now
        self.batches._shutdown_workers()
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()


def begin_process(parent: int, collects: bool, _worker: int = 0) -> None:
    """Prepare a process that reads data: it leaves signals to `parent`, and ends with it."""
    # garbage collection would copy inherited memory, and an inherited store would wait for threads of the parent
    gc.freeze()
    if collects:
        gc.enable()
    for number in _LEFT_TO_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_THE_PARENT)
    # torch's watchdog waits for the queue first, so it does not end a worker that is blocked on a full pipe
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


@contextmanager
def _deaths_told() -> Iterator[None]:
    try:
        yield
    except RuntimeError as problem:
        if "DataLoader worker" not in str(problem):
            raise
        raise DataError(
            f"a loader worker ended unexpectedly: {first_line(problem)}\n"
            "  most often memory or /dev/shm is full: try fewer --workers, or --workers 0 to see the error itself"
        ) from problem


@contextmanager
def start_of_process() -> Iterator[None]:
    """Start a process that reads data inside this block."""
    # an early signal would kill a new worker
    collects = gc.isenabled()
    has_masks = hasattr(signal, "pthread_sigmask")  # Windows has none
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_PARENT) if has_masks else set()
    try:
        gc.disable()
        yield
    finally:
        if collects:
            gc.enable()
        if has_masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _as_it_is(batch: Any) -> Any:
    return batch
