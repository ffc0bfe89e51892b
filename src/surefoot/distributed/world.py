"""The rank and device of this process, and the communication with the other ranks.

The default process group (NCCL, or gloo on the CPU) sums tensors on the device. A second group,
always gloo on the CPU, sends small values (`side_channel.py`). A single process needs neither
group.
"""

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from surefoot.distributed.environment import Placement, more_processes_than_gpus, placed
from surefoot.distributed.no_heartbeat import NoHeartbeat
from surefoot.errors import ConfigError, Setting, first_line

if TYPE_CHECKING:
    from surefoot.distributed.heartbeat import Heartbeat
    from surefoot.distributed.side_channel import Message, SideChannel


@dataclass(frozen=True)
class World:
    """One process and its device. The names follow torch.distributed."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    side: "SideChannel | None" = None  # None for a single process
    store: Store | None = None
    heartbeat: "Heartbeat | NoHeartbeat" = field(default_factory=NoHeartbeat)  # of the other ranks
    host: str = field(default_factory=socket.gethostname)
    on_meta: int = 0  # number of planned ranks on the meta device, else 0
    planned: int = 0  # number of planned ranks without this process, else 0

    @property
    def ranks(self) -> int:
        """The number of ranks that share a step, in the current or the planned run.

        >>> World(torch.device("cpu")).ranks, World(torch.device("cpu"), planned=4).ranks
        (1, 4)
        """
        return self.planned or self.size

    @property
    def is_main(self) -> bool:
        """True on rank 0, the only rank that writes files and console lines."""
        return self.rank == 0

    def gathered(self, value: Any) -> list[Any]:
        """Return the JSON value of every rank, by rank. Collective: every rank must call the method
        and waits for the others.

        >>> World(torch.device("cpu")).gathered({"step": 7})
        [{'step': 7}]
        """
        if self.side is None:
            return [json.loads(json.dumps(value))]
        return self.side.gathered(value)

    def from_main(self, value: Any) -> Any:
        """Return rank 0's JSON value on every rank, and ignore the other ranks' values.
        Collective.
        """
        return self.gathered(value if self.is_main else None)[0]

    def agree(self, number: int) -> bool:
        """Return whether all ranks pass the same integer. Collective: the host waits for other
        hosts, never for a device.
        """
        return self.side is None or self.side.agree(number)

    def during(self, call: str, *, meet: bool = False) -> AbstractContextManager[None]:
        """Name the exchanges of this context, for the error of ranks in different calls. The name
        completes "rank 0 is ...", and is the same on all ranks. With `meet`, wait first until all
        ranks are in this call: the user's code makes it.
        """
        return nullcontext() if self.side is None else self.side.during(call, meet=meet)

    def announce(self, call: str) -> None:
        """Name a call of this rank to the other ranks. Raises `ConfigError` if a rank is in another
        call: on the CPU at once, since the call would wait for the other ranks, and on another
        device later, so that the host does not wait. Collective.
        """
        if self.side is not None:
            message = self.side.post(call=call)
            if self.device.type == "cpu":
                self.side.read(message)

    def read_announced(self) -> None:
        """Compare the announced calls, before the host waits for the device. Collective."""
        if self.side is not None and self.side.posted:
            self.side.read(self.side.posted[-1])

    def mailbox(self, name: str) -> Store:
        """Open an empty key-value store that all ranks share, over a separate connection. Requires
        several processes.

        All ranks must open the same number of stores. Each attempt of a restarted group has
        separate stores.
        """
        assert self.store is not None
        return PrefixStore(f"{name}-{next(_mailboxes)}", self.store.clone())  # type: ignore[attr-defined]  # missing in torch's stubs

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks in place, on its device. The host waits only if that device
        is the CPU. Collective.
        """
        if self.side is not None:
            dist.all_reduce(tensor)


class Consensus:
    """Agreement between ranks on integers by name, such as the step at which to stop.

    Signals, clocks and `run.stop()` can differ between ranks. Each rank sends its values at one
    step, and all ranks know the values of all ranks at the next step, without waiting. A single
    process knows the values at once.

    >>> agreement = Consensus(World(torch.device("cpu")), names=("stop", "save"))
    >>> agreement.exchange(stop=15)
    {'stop': [15], 'save': [0]}
    """

    def __init__(self, world: World, *, names: Sequence[str]) -> None:
        self.world = world
        self.names = tuple(names)
        self.sent: Message | None = None

    def exchange(self, *, call: str = "", **own: int) -> dict[str, list[int]]:
        """Send the values of this rank (default: 0), and return those that all ranks sent in the
        previous call, by rank (0 at the first call). `call` names this exchange. Collective.
        """
        before = self.take()
        numbers = [own.get(name, 0) for name in self.names]
        if self.world.side is None:
            return {name: [number] for name, number in zip(self.names, numbers, strict=True)}
        self.sent = self.world.side.post(numbers, call=call)
        return before

    def peek(self) -> dict[str, list[int]]:
        """Wait for the last exchange, on this rank only, and return its values by rank. The next
        call returns the same values. Not collective.
        """
        if self.sent is None or self.world.side is None:
            return {name: [0] * self.world.size for name in self.names}
        by_rank = self.world.side.read(self.sent).numbers()
        values = {}
        for index, name in enumerate(self.names):
            values[name] = [numbers[index] for numbers in by_rank]
        return values

    def take(self) -> dict[str, list[int]]:
        """Like `peek`, but the next call returns 0 for every value."""
        agreed = self.peek()
        self.sent = None
        return agreed


def joined(device: str, *, sharded: bool = False) -> World:
    """Return the world of this process after it has met the other ranks; later calls return the
    same groups. Collective.

    With `sharded`, a single process has a group too. Raises `ConfigError` if processes outnumber
    devices or ranks do not arrive.
    """
    if _meta_ranks.get():
        return World(device_called(device), on_meta=_meta_ranks.get())
    placement = placed(os.environ)
    planned = _planned.get() if placement.world_size == 1 else 0
    if placement.world_size == 1 and not sharded:
        return World(device_called(device), planned=planned)
    from surefoot.distributed.rendezvous import connect

    own_device = _own_device(device, placement)
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    side, store, heartbeat = connect(own_device, placement)
    return World(
        own_device,
        placement.rank,
        placement.world_size,
        placement.local_rank,
        side=side,
        store=store,
        heartbeat=heartbeat,
        planned=planned,
    )


@contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Use only deterministic kernels in this context. Torch raises an error if an operation has no
    deterministic kernel.
    """
    before = torch.are_deterministic_algorithms_enabled()
    if device.type == "cuda":
        # cuBLAS reads it when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def on_meta(ranks: int) -> AbstractContextManager[None]:
    """Build runs in this context on torch's meta device, whose tensors have shapes but no memory.
    `device` settings are ignored.

    A run is planned for `ranks` ranks. Its passes can be computed, but the run cannot be trained.

    >>> with on_meta(512):
    ...     world = joined("cpu")
    >>> world.device, world.size, world.on_meta
    (device(type='meta'), 1, 512)
    """
    return _set(_meta_ranks, ranks)


def planned_for(ranks: int) -> AbstractContextManager[None]:
    """Build runs in this context for `ranks` planned ranks. Such a run can be inspected, but not
    trained.

    >>> with planned_for(4):
    ...     world = joined("cpu")
    >>> world.size, world.ranks
    (1, 4)
    """
    return _set(_planned, ranks)


def device_called(name: str) -> torch.device:
    """Return the device of this name; "auto" is torch's accelerator, else the CPU. Raises
    `ConfigError` if the device is unusable.
    """
    if _meta_ranks.get():
        return torch.device("meta")
    if name == "auto":
        accelerator = None
        if torch.accelerator.is_available():
            accelerator = torch.accelerator.current_accelerator()
        return accelerator or torch.device("cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as problem:
        why = first_line(problem)
        if "device type at start" in why:  # torch lists all of its device types
            why = "torch has no device of that name"
            if name.startswith("gpu"):
                why += ", and calls a GPU of NVIDIA or AMD cuda"
        devices = ["cpu", "auto"]
        if name.startswith("gpu"):
            devices.insert(0, "cuda")
        raise ConfigError(
            "device-unusable",
            problem=f"device = {name!r} cannot be used here: {why}",
            remedy=[Setting("device", device) for device in devices],
            setting="device",
            value=name,
        ) from problem
    return torch.device(name)


_meta_ranks: ContextVar[int] = ContextVar("ranks on meta", default=0)
_planned: ContextVar[int] = ContextVar("ranks of a plan", default=0)
_mailboxes = count()  # number of opened mailboxes, equal on all ranks


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
    gpus = torch.cuda.device_count()
    processes = placement.local_world_size
    is_only_one = placement.apart and gpus == 1
    if processes > gpus and not is_only_one:
        raise more_processes_than_gpus(processes, gpus=gpus)
    return torch.device("cuda", 0 if is_only_one else placement.local_rank)
