"""How processes find each other, and what ends with them: the two groups, the store, the heartbeat."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from surefoot.errors import ConfigError, RankLostError
from surefoot.heartbeat import MAILBOX, Heartbeat, Unheard
from surefoot.interfaces import towards
from surefoot.placement import Placement

_PATIENCE = timedelta(
    days=1
)  # of collectives: compiling and long evaluations take their time; who is dead is seen otherwise
_START = timedelta(minutes=5)  # until all ranks are there


class Met(NamedTuple):
    """What a process has of the others: a group on the CPU beside the default one, keys and values, and who of them lives."""

    side: dist.ProcessGroup
    store: Store
    heart: Heartbeat | Unheard


def met(device: torch.device, place: Placement) -> Met:
    """Find the other ranks and make the two groups, or find those that were made; collective.

    Raises `ConfigError` where the others do not come.
    """
    if not _met:
        _meet(device, place)
    _met[0].heart.building()
    return _met[0]


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


_met: list[Met] = []  # once this process has joined
_grids: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}  # further ones, by the number of replicas


def _meet(device: torch.device, place: Placement) -> None:
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
    _met.append(Met(side, store, Unheard() if size == 1 else _beating(store, rank=rank, size=size)))
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
