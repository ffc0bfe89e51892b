"""The seeding of Python, NumPy and torch with a 64-bit hash of (seed, stream, address).

An address is (step, micro-batch) or (epoch, sample). Random values do not depend on the number of
ranks or workers.
"""

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

from surefoot.errors import ConfigError

_MASK = (1 << 64) - 1
# the first number of each generator after seed 0
_AFTER_0 = {
    "python": random.Random(0).random(),
    "numpy": np.random.RandomState(0).random(),
    "torch": torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(0)).item(),
}
_HOLDERS: Counter[tuple[int, int]] = Counter()  # (process, thread) pairs that hold the generators
_HOLDERS_LOCK = threading.Lock()


def stream_key(seed: int, stream: str) -> int:
    """Return the 64-bit key of a seed and a named stream ("train", "order", "augment", ...).

    >>> stream_key(0, "train") != stream_key(0, "order") != stream_key(1, "order")
    True
    """
    return int.from_bytes(blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest(), "little")


def fold(key: int, *address: int) -> int:
    """Mix integers into a 64-bit key, one after another. Two integers take about 1 us.

    The mixing function is the finalizer of SplitMix64 (Steele, Lea and Flood 2014, figure 15:
    https://doi.org/10.1145/2714064.2660195), a bijection of 64 bits in which each input bit flips
    half of the output bits.

    >>> fold(7, 1, 2) != fold(7, 2, 1)
    True
    """
    for part in address:
        key = (key + 0x9E3779B97F4A7C15 + part) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key


def seed_generators(bits: int) -> None:
    """Seed the global generators of Python, NumPy and torch (including accelerators) with 64 bits,
    in about 10 us on the CPU.

    `torch.manual_seed` takes 100 us, because it queues the seed for lazily initialized devices.
    """
    random.seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)
    seed_torch(bits)


def seed_torch(bits: int) -> None:
    """Seed only torch's global generators, in 1/6 of the time of `seed_generators`. See
    `LazySeeding`.
    """
    torch.default_generator.manual_seed(bits)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(bits)
    elif _mps():
        torch.mps.manual_seed(bits)


def seeded_bits() -> int:
    """Return the bits of the last call of `seed_generators`: the hash of (seed, epoch, sample)
    while a sample is read.

    >>> with untouched():
    ...     seed_generators(2**64 - 5)
    ...     seeded_bits() == 2**64 - 5
    True
    """
    _reads["seed"] += 1
    return torch.default_generator.initial_seed()


_reads = Counter[str]()  # calls of `seeded_bits`, which count as draws


class LazySeeding:
    """Seeding of the global generators for each sample, from the first draw on. Seeding takes
    longer than a read from memory.

    `begin` brings the undrawn generators to a known state. `drawn` returns True if code has drawn
    from one of them since, so that it must be repeated with the function that `seed_fn` then
    returns. A draw is missed with probability 2**-53.

    >>> with untouched():
    ...     seeding = LazySeeding()
    ...     seeding.begin()
    ...     alone = seeding.drawn()
    ...     seeding.begin()
    ...     alone, random.random() < 1, seeding.drawn(), seeding.undrawn
    (False, True, True, ['numpy'])
    """

    def __init__(self) -> None:
        self.undrawn = ["python", "numpy", "torch"]

    def begin(self) -> None:
        self.seed_reads = _reads["seed"]
        if "python" in self.undrawn:
            random.seed(0)
        if "numpy" in self.undrawn:
            np.random.seed(0)
        if "torch" in self.undrawn:
            if torch.cuda.is_initialized() or _mps():  # type: ignore[no-untyped-call]
                self.undrawn.remove("torch")
            else:
                torch.default_generator.manual_seed(0)

    def drawn(self) -> bool:
        before = self.undrawn
        undrawn = [name for name in before if _NUMBERS[name]() == _AFTER_0[name]]
        # code that draws may also use `torch.initial_seed()`
        if undrawn != before or _reads["seed"] != self.seed_reads:
            self.undrawn = [name for name in undrawn if name != "torch"]
        return self.undrawn != before

    def seed_fn(self) -> Callable[[int], Any] | None:
        """Return the function that seeds the drawn generators and torch's with 64 bits, or None if
        no generator was drawn from.
        """
        # a build with CUDA may initialize it while a later sample of the micro-batch is read
        has_devices = torch.backends.cuda.is_built() or _mps()  # type: ignore[no-untyped-call]
        seed_fns: dict[str, Callable[[int], Any]] = {
            "python": random.seed,
            "numpy": lambda bits: np.random.seed(bits & 0xFFFFFFFF),
            "torch": seed_torch if has_devices else torch.default_generator.manual_seed,
        }
        drawn = [seed for name, seed in seed_fns.items() if name not in self.undrawn]
        if not drawn:
            return None
        if len(drawn) == 1:
            return drawn[0]
        return lambda bits: [seed(bits) for seed in drawn]

    def torch_seed_fns(self) -> list[Callable[[int], Any]]:
        """Return two functions that seed torch's generators differently, and the drawn generators
        alike.
        """
        seed = self.seed_fn() or seed_torch

        def seed_both(change: int, bits: int) -> None:
            seed(bits)
            seed_torch(fold(bits, change))

        return [partial(seed_both, 0), partial(seed_both, 1)]


@contextmanager
def hold_generators() -> Iterator[None]:
    """Reserve the process's global generators for this thread. Raises `ConfigError` if another
    thread holds them.
    """
    # with the process, because a forked worker inherits the table but has its own generators
    holder = (os.getpid(), threading.get_ident())
    with _HOLDERS_LOCK:
        for process, thread in _HOLDERS:
            if process == holder[0] and thread != holder[1]:
                raise ConfigError(
                    "runs-in-two-threads",
                    problem="a run is open or being built in another thread of this process",
                    reason="both would use the same random generators, so neither could be reproduced",
                    remedy="run them one after the other, or each in its own process",
                )
        _HOLDERS[holder] += 1
    try:
        yield
    finally:
        with _HOLDERS_LOCK:
            _HOLDERS[holder] -= 1
            if not _HOLDERS[holder]:
                del _HOLDERS[holder]


@contextmanager
def untouched() -> Iterator[None]:
    """Restore the global generators after the block. Raises `ConfigError` if another thread holds
    them.
    """
    with hold_generators():
        states = [(generator, generator.get_state()) for generator in global_generators()]
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)


class GlobalGenerator(NamedTuple):
    """A generator of the whole process, such as the one behind `random.random`."""

    name: str
    get_state: Callable[[], Any]
    set_state: Callable[[Any], None]


def global_generators() -> list[GlobalGenerator]:
    """Return the generators of Python, NumPy and torch, which each step seeds anew."""
    generators = [
        GlobalGenerator("random", random.getstate, random.setstate),
        GlobalGenerator("numpy.random", np.random.get_state, np.random.set_state),
        GlobalGenerator("torch", torch.get_rng_state, torch.set_rng_state),
    ]
    cuda = torch.cuda
    if cuda.is_initialized():  # type: ignore[no-untyped-call]
        all_devices = GlobalGenerator("torch.cuda", cuda.get_rng_state_all, cuda.set_rng_state_all)
        generators.append(all_devices)
    if _mps():
        mps = torch.mps
        generators.append(GlobalGenerator("torch.mps", mps.get_rng_state, mps.set_rng_state))
    return generators


@cache
def _mps() -> bool:
    return torch.backends.mps.is_available()


_NUMBERS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": np.random.random,  # other draws of NumPy take 100 times as long
    "torch": lambda: torch.rand((), dtype=torch.float64).item(),
}
