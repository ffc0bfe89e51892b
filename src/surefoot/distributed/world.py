"""Where this process stands among the others, on which device it computes, and what processes tell each other.

Tensors on the device are added up by the default process group (NCCL, or gloo on the CPU). Small things travel as JSON over a
second group, always gloo on the CPU: no step on a device waits for those. One process needs neither.
"""

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from surefoot.distributed.environment import Placement, placed
from surefoot.distributed.heartbeat import Heartbeat, alone
from surefoot.distributed.rendezvous import connect
from surefoot.errors import ConfigError, first_line


@dataclass(frozen=True)
class World:
    """One process and its device. The names are torch.distributed's."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    side: dist.ProcessGroup | None = None  # None where there is one process
    store: Store | None = None
    heart: Heartbeat = field(default_factory=alone)  # who of the others lives
    host: str = field(default_factory=socket.gethostname)
    on_meta: int = 0  # for so many ranks it is meant, and there is none; 0 in a world that is real
    planned: int = 0  # likewise, and this process is none of them; 0 where it is as large as it will be

    @property
    def ranks(self) -> int:
        """How many share a step: those that are there, or that will be.

        >>> World(torch.device("cpu")).ranks, World(torch.device("cpu"), planned=4).ranks
        (1, 4)
        """
        return self.planned or self.size

    @property
    def is_main(self) -> bool:
        """True on the one process that writes files and lines."""
        return self.rank == 0

    def gathered(self, value: Any) -> list[Any]:
        """The JSON value of every rank, by rank; collective: all ranks must call it, and wait for each other.

        >>> World(torch.device("cpu")).gathered({"step": 7})
        [{'step': 7}]
        """
        if self.side is None:
            return [json.loads(json.dumps(value))]
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(payload)]), group=self.side)
        longest = max(int(length) for length in lengths)
        received = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(received, torch.nn.functional.pad(payload, (0, longest - len(payload))), group=self.side)
        return [json.loads(bytes(text[: int(length)].numpy())) for text, length in zip(received, lengths, strict=True)]

    def from_main(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank, what the others give being ignored; collective."""
        return self.gathered(value if self.is_main else None)[0]

    def mailbox(self, name: str) -> Store:
        """Keys and values that all ranks see, over a connection of its own: for a thread beside the training.

        Each call gives an empty one: what was left in another of that name is not found. So all ranks must ask equally often.
        Each attempt of a restarted group has its own. Only where there are several processes.
        """
        assert self.store is not None
        return PrefixStore(f"{name}-{next(_mailboxes)}", self.store.clone())  # type: ignore[attr-defined]  # torch has it, its stubs do not

    def add_up(self, tensor: Tensor) -> None:
        """The tensor's sum over all ranks, in place, on its device; the host waits only where that is the device. Collective."""
        if self.side is not None:
            dist.all_reduce(tensor)


class Consensus:
    """What all ranks must do at the same step, as whole numbers from 0 on, by name: the largest of what the ranks say counts.

    A signal reaches one process, a clock runs on each, a user's code may call `run.stop()` anywhere. Told by each at one step, it
    is known to all at the next, and waited for by none; one process agrees with itself at once.

    >>> agreement = Consensus(World(torch.device("cpu")), names=("stop", "save"))
    >>> agreement.exchange(stop=15)
    {'stop': 15, 'save': 0}
    """

    def __init__(self, world: World, *, names: Sequence[str]) -> None:
        self.world, self.names = world, tuple(names)
        self.sent: torch.Tensor | None = None
        self.work: dist.Work | None = None

    def exchange(self, **own: int) -> dict[str, int]:
        """Tell the others, and hear what all ranks together said at the last call (0 at the first); collective."""
        agreed = self._receive()
        own_numbers = {name: own.get(name, 0) for name in self.names}
        if self.world.side is None:
            return own_numbers
        self.sent = torch.tensor([*own_numbers.values()])
        self.work = dist.all_reduce(self.sent, op=dist.ReduceOp.MAX, group=self.world.side, async_op=True)
        return agreed

    def now(self, **own: int) -> dict[str, int]:
        """As `exchange`, but wait for what the others say in this very call; what was still on its way is in it too."""
        before, after = self.exchange(**own), self._receive()
        return {name: max(before[name], after[name]) for name in self.names}

    def peek(self) -> dict[str, int]:
        """What all ranks say in the last exchange, waited for by this one alone; the next call hears it too."""
        if self.work is None or self.sent is None:
            return dict.fromkeys(self.names, 0)
        self.work.wait()
        return dict(zip(self.names, self.sent.tolist(), strict=True))

    def _receive(self) -> dict[str, int]:
        agreed = self.peek()
        self.work = self.sent = None
        return agreed


def joined(device: str, *, sharded: bool = False) -> World:
    """The world as the launcher made it: alone, or one of several ranks that find each other here; collective.

    A second call finds the same groups. `sharded`: alone too there is a group, of one. Raises `ConfigError` for more
    processes than there are devices, and where the others do not come.
    """
    if _meta_ranks.get():
        return World(device_called(device), on_meta=_meta_ranks.get())
    placement = placed(os.environ)
    planned = _planned.get() if placement.world_size == 1 else 0
    if placement.world_size == 1 and not sharded:
        return World(device_called(device), planned=planned)
    own_device = _own_device(device, placement)
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    ranks = placement.rank, placement.world_size, placement.local_rank
    return World(own_device, *ranks, *connect(own_device, placement), planned=planned)


@contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Only kernels that give the same bits in every run; where there is none, torch raises. Then as before."""
    before = torch.are_deterministic_algorithms_enabled()
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def on_meta(ranks: int) -> AbstractContextManager[None]:
    """Every run that is built in this block has its models on torch's meta device: shapes without numbers, which take no memory.

    Whatever its `device` says. It is meant for so many ranks, is one of none, can be computed with and not trained.

    >>> with on_meta(512):
    ...     world = joined("cpu")
    >>> world.device, world.size, world.on_meta
    (device(type='meta'), 1, 512)
    """
    return _set(_meta_ranks, ranks)


def planned_for(ranks: int) -> AbstractContextManager[None]:
    """Every run that is built in this block is cut for so many ranks, of which this process is none: to be looked at, not trained.

    >>> with planned_for(4):
    ...     world = joined("cpu")
    >>> world.size, world.ranks
    (1, 4)
    """
    return _set(_planned, ranks)


def device_called(name: str) -> torch.device:
    """The device of that name, which must be usable here; "auto" is the accelerator torch reports, else the CPU."""
    if _meta_ranks.get():
        return torch.device("meta")
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as problem:
        raise ConfigError(
            f"device = {name!r} cannot be used here: {first_line(problem)}\n  try: --device cpu, or --device auto"
        ) from problem
    return torch.device(name)


_meta_ranks: ContextVar[int] = ContextVar("ranks on meta", default=0)
_planned: ContextVar[int] = ContextVar("ranks of a plan", default=0)
_mailboxes = count()  # how many were asked for; all ranks count alike


@contextmanager
def _set(variable: ContextVar[int], ranks: int) -> Iterator[None]:
    before = variable.set(ranks)
    try:
        yield
    finally:
        variable.reset(before)


def _own_device(name: str, placement: Placement) -> torch.device:
    device = device_called(name)
    if device.type != "cuda":
        return device
    there, processes = torch.cuda.device_count(), placement.local_world_size
    is_only_one = placement.apart and there == 1
    if processes > there and not is_only_one:
        raise ConfigError(
            f"{processes} processes on a machine with {there} GPU{'s' * (there != 1)}: each needs one of its own\n"
            f"  try: --nproc {there}, or --device cpu"
        )
    return torch.device("cuda", 0 if is_only_one else placement.local_rank)
