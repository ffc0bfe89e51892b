"""How processes find each other, and what ends with them: the two groups, the store, the heartbeat.

torchrun's store outlives the ranks of an attempt. So every key of a start stands behind a nonce: no rank hears a dead one.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store, _set_pg_timeout, _world
from torch.distributed.rendezvous import rendezvous

from surefoot.errors import ConfigError, RankLostError, SurefootError, error_lines
from surefoot.heartbeat import MAILBOX, MEETING, NONCE, Heartbeat, Lines, Unheard
from surefoot.interfaces import towards
from surefoot.placement import Placement, end_with_torchrun

_PATIENCE = timedelta(
    days=1
)  # of collectives: compiling and long evaluations take their time; who is dead is seen otherwise
_START = timedelta(minutes=5)  # until all ranks are there
_CONNECT = timedelta(minutes=1)  # to ranks that are there, for which gloo multiplies it by five; to a launcher's store


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


def has_met() -> bool:
    """Whether this process has found other ranks."""
    return bool(_met)


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
    end_with_torchrun(os.environ)
    rank, size = place.rank, place.world_size
    main_host = urlsplit(place.meeting).hostname or os.environ.get("MASTER_ADDR", "")
    if size > place.local_world_size and "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = towards(main_host)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface  # gloo reads it for every group, and is told in no other way
    theirs = dist.is_initialized()  # by the user's script: its default group is used
    heart: Heartbeat | Unheard = Unheard()
    try:
        store: Store = _get_default_store() if theirs else _open_store(place)
        if size > 1:
            nonce, heart = _agree_on_nonce(store, rank=rank, size=size, main_host=main_host)
            store = PrefixStore(nonce, store)
        side = _make_groups(device, store, place, theirs=theirs)
    except (dist.DistError, RuntimeError, ValueError) as problem:
        if (lost := heart.cause(problem)) is not None:
            raise lost from problem
        reason = str(problem).split("\n", maxsplit=1)[0]
        refusal = ConfigError(
            f"rank {rank} of {size} does not find the others: {reason}\n"
            "  are all of them started, and may they reach MASTER_ADDR and MASTER_PORT?"
        )
        heart.failed(refusal)
        heart.stop()
        raise refusal from problem
    _met.append(Met(side, store, heart))
    if size > 1:
        _tell_of_uncaught()
    atexit.register(_fall_silent if theirs else _part)


def _open_store(place: Placement) -> Store:
    """The store at which the ranks of this start meet; rank 0 serves it where no launcher does."""
    if place.world_size == 1:
        return HashStore()
    wait = _CONNECT if _in_launcher() else _START  # a launcher serves its store before it starts a rank
    store, _, _ = next(
        rendezvous(place.meeting, rank=place.rank, world_size=place.world_size, timeout=min(wait, _START))
    )
    return store  # type: ignore[no-any-return]


def _make_groups(device: torch.device, store: Store, place: Placement, *, theirs: bool) -> dist.ProcessGroup:
    """Make the default group, where the user's script has not, and the one on the CPU, which is returned; collective."""
    connect = min(_CONNECT, _START)
    if (
        theirs
    ):  # what it is called stays, but groups are made at this store from now on, away from keys of an earlier start
        group = _get_default_group()
        _world.pg_map[group] = (_world.pg_map[group][0], store)
    else:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("device", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=connect,
            device_id=device if device.type == "cuda" else None,
        )
    side = dist.new_group(backend="gloo", timeout=connect)
    for each in (side,) if theirs else (dist.group.WORLD, side):
        _set_pg_timeout(_PATIENCE, each)  # only now: who cannot connect at the start is not waited for that long
    return side  # type: ignore[no-any-return]


def _agree_on_nonce(store: Store, *, rank: int, size: int, main_host: str) -> tuple[str, Heartbeat]:
    """What stands before all keys of this start, drawn by rank 0, and the heart of this process, which beats; collective.

    Each other rank leaves a word that it has drawn, and rank 0 answers it with the nonce. A word that a dead rank has left
    is answered too, and nobody reads that. (The default group cannot carry the nonce: it is made by keys itself.)
    """
    letters = PrefixStore(MEETING, store)
    word, deadline = secrets.token_hex(8), time.monotonic() + _START.total_seconds()
    if rank == 0:
        watched = letters.check([NONCE])  # by our own launcher, which has drawn it and sees processes end
        nonce = letters.get(NONCE).decode() if watched else word
        lines = None if watched else Lines.listening(nonce)
        heart = _start_heart(store, nonce, lines, rank=0, size=size)
        try:
            _answer(letters, f"{nonce} {lines.port if lines else 0}", heart, size=size, deadline=deadline)
        except RuntimeError:
            heart.stop()
            raise
        return nonce, heart
    letters.set(f"word-{rank}", word)
    _wait(lambda: letters.check([word]), "rank 0 does not answer", deadline=deadline)
    nonce, port = letters.get(word).decode().split()
    lines = Lines.leading_to(main_host, int(port), nonce, rank=rank) if int(port) else None
    return nonce, _start_heart(store, nonce, lines, rank=rank, size=size)


def _answer(letters: Store, answer: str, heart: Heartbeat, *, size: int, deadline: float) -> None:
    """Answer the word of every other rank, until each has told that it lives."""
    missing, answered = set(range(1, size)), set[bytes]()

    def all_live() -> bool:
        for rank in sorted(missing):
            if heart.hears(rank):
                missing.discard(rank)
            elif rank in heart.ended:
                raise RuntimeError(f"rank {rank} ended while it came")
            elif letters.check([f"word-{rank}"]) and (word := letters.get(f"word-{rank}")) not in answered:
                answered.add(word)
                letters.set(word.decode(), answer)
        return not missing

    _wait(all_live, "not all of them have come", deadline=deadline)


def _wait(fact: Callable[[], bool], problem: str, *, deadline: float) -> None:
    """Return when it is a fact; raises `RuntimeError` where it does not become one in time."""
    pause_s = 0.002
    while not fact():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{problem} within {_START.total_seconds():.0f} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)


def _start_heart(store: Store, nonce: str, lines: Lines | None, *, rank: int, size: int) -> Heartbeat:
    mailbox = PrefixStore(f"{nonce}/{MAILBOX}", store.clone())  # type: ignore[attr-defined]  # torch has it, its stubs do not
    host, in_launcher = socket.gethostname(), _in_launcher()
    heart = Heartbeat(mailbox, rank=rank, size=size, host=host, in_launcher=in_launcher, lines=lines)
    heart.start()
    return heart


def _in_launcher() -> bool:
    """Whether the store is the launcher's, and lives as long as that."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _tell_of_uncaught() -> None:
    """Tell the other ranks of an exception that ends this process; it ends with 7 where one of them is the cause.

    The command line does so itself. This is for scripts, and for what happens there outside of a run. One rank says what all
    of them end of; an error of ours needs no frames.
    """
    before = sys.excepthook

    def uncaught(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
        lost = problem if isinstance(problem, RankLostError) else None
        if lost is None and isinstance(problem, Exception) and (lost := told_to_ranks(problem)) is not None:
            lost.__cause__ = problem
        ends_by: BaseException = problem if lost is None else lost
        speaks = not isinstance(ends_by, Exception) or speaks_of(ends_by)
        if speaks and isinstance(ends_by, SurefootError):
            print(error_lines(ends_by), file=sys.stderr)
        elif speaks:
            before(kind, problem, trace)
        if lost is not None:
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
