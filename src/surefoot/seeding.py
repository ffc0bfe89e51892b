"""Where all randomness comes from: (seed, stream, address) -> 64 bits -> the three generators.

An address names the draw, (step, micro-batch) or (epoch, sample), and no rank, worker or process: their number changes no bit.
"""

import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b

import numpy as np
import torch

from surefoot.errors import ConfigError

_MASK = (1 << 64) - 1
_HOLDERS: Counter[tuple[int, int]] = Counter()  # (process, thread) that draw from the generators now
_HOLDERS_LOCK = threading.Lock()


def stream_key(seed: int, stream: str) -> int:
    """64 bits that stand for one named stream ("train", "order", "augment", ...) of one seed.

    >>> stream_key(0, "train") != stream_key(0, "order") != stream_key(1, "order")
    True
    """
    return int.from_bytes(blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest(), "little")


def fold(key: int, *address: int) -> int:
    """Mix integers into a key, one after the other; 64 bits, about a microsecond for two of them.

    The mixing function is the finalizer of SplitMix64 (Steele, Lea and Flood 2014, figure 15:
    https://doi.org/10.1145/2714064.2660195), a bijection of 64 bits in which each input bit flips half of the output bits.

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
    """Set Python's, NumPy's and torch's global generators (of accelerators too) from 64 bits; about 10 us on the CPU.

    `torch.manual_seed` costs 100 us, because it queues the seed for lazily started devices.
    """
    random.seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)
    seed_torch(bits)


def seed_torch(bits: int) -> None:
    """Set torch's global generators alone, which costs an eighth of setting all; see `GeneratorWatch`."""
    torch.default_generator.manual_seed(bits)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(bits)
    elif _mps():
        torch.mps.manual_seed(bits)


def seeded_bits() -> int:
    """The bits that `seed_generators` was last called with: of a sample that is being read, those of (seed, epoch, sample).

    >>> with untouched():
    ...     seed_generators(2**64 - 5)
    ...     seeded_bits() == 2**64 - 5
    True
    """
    return torch.default_generator.initial_seed()


class GeneratorWatch:
    """Whether Python's and NumPy's global generators have been left alone, found out at the cost of seeding them once.

    They are set to known bits, and later their next numbers are compared with those that follow these bits; that takes them on.

    >>> with untouched():
    ...     undrawn = GeneratorWatch()
    ...     undrawn.begin()
    ...     alone = undrawn.untouched()
    ...     undrawn.begin()
    ...     alone, random.random() < 1, undrawn.untouched()
    (True, True, False)
    """

    def __init__(self) -> None:
        self.expected: tuple[int, float] | None = None

    def begin(self) -> None:
        if self.expected is None:
            _set_known()
            self.expected = _next_numbers()
        _set_known()

    def untouched(self) -> bool:
        """Whether nothing was drawn since `begin`; wrong once in 2**117 times."""
        return _next_numbers() == self.expected


@contextmanager
def hold_generators() -> Iterator[None]:
    """Keep the global generators, which are the process's, for this thread; raise `ConfigError` if another thread holds them."""
    holder = (os.getpid(), threading.get_ident())  # a forked worker inherits the table, and holds generators of its own
    with _HOLDERS_LOCK:
        if any(process == holder[0] and thread != holder[1] for process, thread in _HOLDERS):
            raise ConfigError(
                "a run is open or being built in another thread of this process\n"
                "  both would draw from the same random generators, so neither run could be repeated\n"
                "  run them one after the other, or each in a process of its own"
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
    """Leave the global generators as they were found; `ConfigError` if another thread holds them (`hold_generators`)."""
    with hold_generators():
        python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        mps = torch.mps.get_rng_state() if _mps() else None
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(cpu)
            if cuda:
                torch.cuda.set_rng_state_all(cuda)
            if mps is not None:
                torch.mps.set_rng_state(mps)


@cache
def _mps() -> bool:
    return torch.backends.mps.is_available()


def _set_known() -> None:
    random.seed(0)
    np.random.seed(0)


def _next_numbers() -> tuple[int, float]:
    return random.getrandbits(64), np.random.random()  # whose other draws take a hundred times as long
