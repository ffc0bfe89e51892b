"""Where this process stands among the others, on which device it computes, and what processes tell each other.

There are two ways between them. Tensors on the device are added up by the default process group (NCCL, or gloo on the CPU).
Small things travel as JSON over a second group, always gloo on the CPU: no step on a device waits for those. One process
needs neither.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from surefoot.errors import ConfigError, RankLostError
from surefoot.heartbeat import MAILBOX, Heartbeat, Unheard
from surefoot.interfaces import towards
from surefoot.placement import Placement, placed

_PATIENCE = timedelta(
    days=1
)  # of collectives: compiling and long evaluations may take their time; a dead rank is seen otherwise
_START = timedelta(minutes=5)  # until all ranks are there


@dataclass(frozen=True)
class World:
    """One process and its device. The names are torch.distributed's."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    side: dist.ProcessGroup | None = None  # None where there is one process
    store: Store | None = None
    heart: Heartbeat | Unheard = field(default_factory=Unheard)  # who of the others lives
    host: str = field(default_factory=socket.gethostname)
    on_paper: int = 0  # for so many ranks it is meant, and there is none; 0 in a world that is real
    planned: int = (
        0  # for so many ranks it is meant, and this process is none of them; 0 where it is as large as it will be
    )

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
        told = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(told)]), group=self.side)
        longest = max(int(length) for length in lengths)
        heard = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(heard, torch.nn.functional.pad(told, (0, longest - len(told))), group=self.side)
        return [json.loads(bytes(text[: int(length)].numpy())) for text, length in zip(heard, lengths, strict=True)]

    def from_main(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank, what the others give being ignored; collective."""
        return self.gathered(value if self.is_main else None)[0]

    def mailbox(self, name: str) -> Store:
        """Keys and values that all ranks see, over a connection of its own: for a thread beside the training.

        Each call gives an empty one: what was left in another of that name is not found. So all ranks must ask equally often.
        Each attempt of a restarted group has its own. Only where there are several processes.
        """
        if self.store is None:
            raise RuntimeError("one process has nobody to leave a message for")
        return PrefixStore(f"{name}-{next(_mailboxes)}", self.store.clone())  # type: ignore[attr-defined]  # torch has it, its stubs do not

    def barrier(self) -> None:
        """Return when every rank has called it; collective."""
        if self.side is not None:
            dist.barrier(group=self.side)

    def sum_begun(self, tensor: Tensor) -> dist.Work | None:
        """Begin to add a tensor up in place over all ranks, on its device; `wait` on what is returned makes it so. Collective."""
        return None if self.side is None else dist.all_reduce(tensor, async_op=True)

    def add_up(self, tensor: Tensor) -> None:
        """The tensor's sum over all ranks, in place, on its device; the host waits only where that is the device. Collective."""
        if self.side is not None:
            dist.all_reduce(tensor)


def joined(device: str, *, sharded: bool = False) -> World:
    """The world as the launcher made it: alone, or one of several ranks that find each other here; collective.

    A second call finds the same groups. `sharded`: alone too there is a group, of one. Raises `ConfigError` for more
    processes than there are devices, and where the others do not come.
    """
    if _paper.get():
        return World(device_called(device), on_paper=_paper.get())
    place = placed(os.environ)
    planned = _planned.get() if place.world_size == 1 else 0
    if place.world_size == 1 and not sharded:
        return World(device_called(device), planned=planned)
    found = _own_device(device, place)
    if found.type == "cuda":
        torch.cuda.set_device(found)
    if not _met:
        _meet(found, place)
    side, store, heart = _met[0]
    heart.building()
    return World(found, place.rank, place.world_size, place.local_rank, side, store, heart, planned=planned)


def told_to_ranks(problem: Exception) -> RankLostError | None:
    """Tell the other ranks of what ends this process, if there are any; which of them was lost, where that is why."""
    for _, _, heart in _met:
        if (lost := heart.cause(problem)) is not None:
            return lost
        heart.failed(problem)
    return None


def speaks_of(problem: Exception) -> bool:
    """Whether this process is to say of what it ends; of several ranks that end of the same, one does."""
    return all(heart.speaks_of(problem) for _, _, heart in _met)


def replicated(replicas: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Two groups that this rank is in, where so many of neighbouring ranks hold the same: across those, and its own.

    The first has `replicas` ranks, the second the others' share. Collective; a second call finds the same groups.
    """
    if replicas not in _grids:
        table = torch.arange(dist.get_world_size()).view(replicas, -1)
        new_groups: Any = dist.new_subgroups_by_enumeration
        across, _ = new_groups(table.T.tolist(), timeout=_PATIENCE)
        within, _ = new_groups(table.tolist(), timeout=_PATIENCE)
        _grids[replicas] = across, within
    return _grids[replicas]


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


@contextmanager
def on_paper(ranks: int) -> Iterator[None]:
    """Every run that is built in this block has its models on torch's meta device: shapes without numbers, which take no memory.

    Whatever its `device` says. It is meant for so many ranks, is one of none, can be computed with and not trained.

    >>> with on_paper(512):
    ...     world = joined("cpu")
    >>> world.device, world.size, world.on_paper
    (device(type='meta'), 1, 512)
    """
    before = _paper.set(ranks)
    try:
        yield
    finally:
        _paper.reset(before)


@contextmanager
def planned_for(ranks: int) -> Iterator[None]:
    """Every run that is built in this block is cut for so many ranks, of which this process is none: to be looked at, not trained.

    >>> with planned_for(4):
    ...     world = joined("cpu")
    >>> world.size, world.ranks
    (1, 4)
    """
    before = _planned.set(ranks)
    try:
        yield
    finally:
        _planned.reset(before)


def device_called(name: str) -> torch.device:
    """The device of that name, which must be usable here; "auto" is the accelerator torch reports, else the CPU."""
    if _paper.get():
        return torch.device("meta")
    if name == "auto":
        return (
            (torch.accelerator.current_accelerator() or torch.device("cpu"))
            if torch.accelerator.is_available()
            else torch.device("cpu")
        )
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).split("\n", maxsplit=1)[0]
        raise ConfigError(
            f"device = {name!r} cannot be used here: {reason}\n  try: --device cpu, or --device auto"
        ) from problem
    return device


_paper: ContextVar[int] = ContextVar("ranks on paper", default=0)
_planned: ContextVar[int] = ContextVar("ranks of a plan", default=0)
_met: list[tuple[dist.ProcessGroup, Store, Heartbeat | Unheard]] = []  # the groups of this process, once it has joined
_mailboxes = count()  # how many were asked for; all ranks count alike
_grids: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}  # further ones, by the number of replicas


def _own_device(name: str, place: Placement) -> torch.device:
    device = device_called(name)
    if device.type != "cuda":
        return device
    there, processes = torch.cuda.device_count(), place.local_world_size
    if place.apart and there == 1:
        return torch.device("cuda", 0)
    if processes > there:
        raise ConfigError(
            f"{processes} processes on a machine with {there} GPU{'s' * (there != 1)}: each needs one of its own\n"
            f"  try: --nproc {there}, or --device cpu"
        )
    return torch.device("cuda", place.local_rank)


def _meet(device: torch.device, place: Placement) -> None:
    """Find the other ranks and make the two groups."""
    rank, size = place.rank, place.world_size
    if size > place.local_world_size and "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = towards(urlsplit(place.meeting).hostname or os.environ.get("MASTER_ADDR", ""))
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface  # gloo reads it for every group, and is told in no other way
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    theirs = dist.is_initialized()  # by the user's script: its default group is used, and left as it is
    try:
        if theirs:
            store: Store = _get_default_store()
        elif size == 1:
            store = HashStore()
        else:
            store, _, _ = next(rendezvous(place.meeting, rank=rank, world_size=size, timeout=_START))
        if not theirs:
            dist.init_process_group(
                backend,
                store=PrefixStore("device", store),
                rank=rank,
                world_size=size,
                timeout=_START,
                device_id=device if device.type == "cuda" else None,
            )
        side = dist.new_group(backend="gloo", timeout=_START)
        for group in (side,) if theirs else (dist.group.WORLD, side):
            _set_pg_timeout(_PATIENCE, group)  # only now: who cannot connect at the start is not waited for that long
    except (dist.DistError, RuntimeError, ValueError) as problem:
        reason = str(problem).split("\n", maxsplit=1)[0]
        raise ConfigError(
            f"rank {rank} of {size} does not find the others: {reason}\n"
            "  are all of them started, and may they reach MASTER_ADDR and MASTER_PORT?"
        ) from problem
    _met.append((side, store, Unheard() if size == 1 else _beating(store, rank=rank, size=size)))
    if size > 1:
        _tell_of_uncaught()
    atexit.register(_fall_silent if theirs else _part)


def _beating(store: Store, *, rank: int, size: int) -> Heartbeat:
    """The heart of this process, which beats from now on."""
    in_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    mailbox = PrefixStore(MAILBOX, store.clone())  # type: ignore[attr-defined]  # torch has it, its stubs do not
    heart = Heartbeat(mailbox, rank=rank, size=size, host=socket.gethostname(), in_launcher=in_launcher)
    heart.start()
    return heart


def _tell_of_uncaught() -> None:
    """Tell the other ranks of an exception that ends this process; it ends with 7 where one of them is the cause.

    The command line does so itself. This is for scripts, and for what happens there outside of a run.
    """
    before = sys.excepthook

    def uncaught(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
        lost = problem if isinstance(problem, RankLostError) else None
        if lost is None and isinstance(problem, Exception) and (lost := told_to_ranks(problem)) is not None:
            lost.__cause__ = problem
        if lost is None:
            before(kind, problem, trace)
            return
        before(RankLostError, lost, lost.__traceback__)
        sys.exit(lost.exit_status)

    sys.excepthook = uncaught


def _part() -> None:
    """Leave the groups; at exit, where the others may be gone."""
    _fall_silent()
    _grids.clear()
    with suppress(Exception):
        dist.destroy_process_group()


def _fall_silent() -> None:
    """Be missed by nobody."""
    for _, _, heart in _met:
        heart.stop()
    _met.clear()
