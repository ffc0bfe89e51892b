"""The rendezvous of ranks: process groups, store, key prefix and heartbeat, from start to exit."""

import atexit
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import (
    _get_default_group,
    _get_default_store,
    _set_pg_timeout,
    _world,
)
from torch.distributed.rendezvous import rendezvous

from surefoot.distributed.environment import TORCHRUN, Placement, end_with_parent
from surefoot.distributed.heartbeat import MAILBOX, MEETING, NONCE, Heartbeat
from surefoot.distributed.liveness import RankConnections
from surefoot.distributed.no_heartbeat import NoHeartbeat
from surefoot.distributed.side_channel import SideChannel
from surefoot.errors import (
    ConfigError,
    RankLostError,
    first_line,
    is_refusal,
    leave_script,
    name_rank,
    print_uncaught,
)

# the private one is deprecated from torch 2.15 on
_set_timeout: Any = getattr(dist, "set_timeout", _set_pg_timeout)
_ANYWHERE = "192.0.2.1"  # an address reserved for documentation (RFC 5737); nothing is sent there
_ADDRESS_OF = 0x8915  # SIOCGIFADDR in linux/sockios.h
# timeout of every wait for a rank that has arrived: compilation and evaluation take long, and the
# heartbeat detects dead ranks
PATIENCE = timedelta(days=1)
_START = timedelta(minutes=5)  # timeout for all ranks to arrive
# timeout of connections to a launcher's store and to ranks; gloo multiplies it by five
_CONNECT = timedelta(minutes=1)


def wait_for_message(work: dist.Work, message: Tensor) -> None:
    """Wait for a point-to-point message. The host waits only on the CPU, where gloo's own timeout
    of a message is that of connecting, whatever the group's is.
    """
    if message.is_cpu:
        work.wait(PATIENCE)
    else:
        work.wait()  # on a stream of the device; with a timeout, the host would wait


def interface_towards(host: str) -> str | None:
    """Return the network interface that reaches `host`, or the interface of the default route if
    `host` is this machine.

    Returns None if the interface is unknown; gloo then chooses. Sends nothing. Linux and IPv4 only.

    >>> interface_towards("no such machine.invalid") in (None, interface_towards("192.0.2.1"))
    True
    """
    if sys.platform != "linux":
        return None
    names = _interface_names()
    for target in (host, _ANYWHERE):
        name = names.get(_own_address(target), "lo")
        if name != "lo":
            return name
    return None


def _own_address(host: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((host, 9))  # UDP: looks up the route and sends nothing
        return str(probe.getsockname()[0])
    return None


def _interface_names() -> dict[str | None, str]:
    import fcntl  # not on Windows

    names: dict[str | None, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF, request)
                names[socket.inet_ntoa(answer[20:24])] = name
    return names


class Connection(NamedTuple):
    """The connection of a process to the other ranks: a CPU group beside the default group, a
    key-value store, and the heartbeat.
    """

    side: SideChannel
    store: Store
    heartbeat: Heartbeat | NoHeartbeat


def connect(device: torch.device, placement: Placement) -> Connection:
    """Find the other ranks, or return the existing connection. Raises `ConfigError` if ranks do not
    arrive. Collective.
    """
    if not _connections:
        _meet(device, placement)
    _connections[0].heartbeat.building()
    return _connections[0]


def report_to_ranks(problem: Exception) -> RankLostError | None:
    """Report the error that ends this process to the other ranks. Returns the lost rank if its loss
    caused the error, else None.
    """
    for _, _, heartbeat in _connections:
        lost = heartbeat.cause(problem)
        if lost is not None:
            return lost
        heartbeat.failed(problem)
    return None


def speaks_of(problem: Exception) -> bool:
    """Return whether this process prints its error. If several ranks have the same error, only one
    rank prints the error. A rank above 0 that prints another error is named in it.
    """
    for _, _, heartbeat in _connections:
        if not heartbeat.speaks_of(problem):
            return False
        if heartbeat.rank > 0:
            name_rank(problem, heartbeat.rank)
    return True


def is_connected() -> bool:
    """Return whether this process has met the other ranks."""
    return bool(_connections)


@contextmanager
def left_afterwards() -> Iterator[None]:
    """Leave the process group on exit, if the block has opened it."""
    was_open = is_connected() or dist.is_initialized()
    try:
        yield
    finally:
        if is_connected() and not was_open:
            _part()


def replicated(replicas: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return two groups of this rank: the `replicas` ranks with the same shard, and the ranks of
    its sharded copy. Collective.
    """
    if replicas not in _grids:
        table = torch.arange(dist.get_world_size()).view(replicas, -1)
        new_groups: Any = dist.new_subgroups_by_enumeration
        across, _ = new_groups(table.T.tolist(), timeout=PATIENCE)
        within, _ = new_groups(table.tolist(), timeout=PATIENCE)
        _grids[replicas] = (across, within)
    return _grids[replicas]


_connections: list[Connection] = []  # once this process has joined
# groups by the number of replicas
_grids: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def _meet(device: torch.device, placement: Placement) -> None:
    if TORCHRUN in os.environ:
        end_with_parent(os.getppid())
    rank = placement.rank
    size = placement.world_size
    main_host = urlsplit(placement.meeting).hostname or os.environ.get("MASTER_ADDR", "")
    if size > placement.local_world_size and "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = interface_towards(main_host)
        if interface is not None:
            # gloo reads only this variable, for every group
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    theirs = dist.is_initialized()  # the user's script made the default group
    heartbeat: Heartbeat | NoHeartbeat = NoHeartbeat()
    try:
        store: Store = _get_default_store() if theirs else _open_store(placement)
        if size > 1:
            nonce, heartbeat = _agree_on_nonce(store, rank=rank, size=size, main_host=main_host)
            store = PrefixStore(nonce, store)
        side = _make_groups(device, store, placement, theirs=theirs)
    except (OSError, RuntimeError, ValueError) as problem:  # torch's DistError is a RuntimeError
        lost = heartbeat.cause(problem)
        if lost is not None:
            raise lost from problem
        refusal = ConfigError(
            "ranks-not-found",
            problem=f"rank {rank} of {size} cannot find the other ranks: {first_line(problem)}",
            reason="have all ranks started, and can they reach MASTER_ADDR and MASTER_PORT?",
            rank=rank,
            ranks=size,
        )
        heartbeat.failed(refusal)
        raise refusal from problem
    _connections.append(Connection(SideChannel(side), store, heartbeat))
    if size > 1:
        _tell_of_uncaught()
    atexit.register(_part, groups=not theirs)


def _open_store(placement: Placement) -> Store:
    if placement.world_size == 1:
        return HashStore()
    # it serves the store first: if nothing listens, it has ended, and torch would retry for minutes
    if _in_launcher():
        host = os.environ.get("MASTER_ADDR", "")
        port = int(os.environ.get("MASTER_PORT", "0"))
        socket.create_connection((host, port), timeout=_CONNECT.total_seconds()).close()
    meetings: Any = rendezvous(
        placement.meeting, rank=placement.rank, world_size=placement.world_size, timeout=_START
    )
    store, *_ = next(meetings)
    return store  # type: ignore[no-any-return]


def _make_groups(
    device: torch.device, store: Store, placement: Placement, *, theirs: bool
) -> dist.ProcessGroup:
    if theirs:
        # keep the group; further groups use this store, away from the keys of an earlier start
        group = _get_default_group()
        backend, _ = _world.pg_map[group]
        _world.pg_map[group] = (backend, store)
    else:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("device", store),
            rank=placement.rank,
            world_size=placement.world_size,
            timeout=_CONNECT,
            device_id=device if device.type == "cuda" else None,
        )
    side: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_CONNECT)
    # only now, so that connecting has the shorter timeout
    if not theirs:
        _set_timeout(PATIENCE, dist.group.WORLD)
    _set_timeout(PATIENCE, side)
    return side


def _agree_on_nonce(store: Store, *, rank: int, size: int, main_host: str) -> tuple[str, Heartbeat]:
    # torchrun's store outlives its ranks: so each other rank leaves a random word, and rank 0
    # answers it with the nonce
    letters = PrefixStore(MEETING, store)
    nonce = secrets.token_hex(8)
    port = 0
    has_launcher = rank == 0 and letters.check([NONCE])
    if rank > 0:
        word = nonce
        letters.set(f"word-{rank}", word)
        nonce, port = json.loads(letters.get(word))  # waits for the answer
    elif has_launcher:  # surefoot's, which drew the nonce and detects ended processes itself
        nonce = letters.get(NONCE).decode()
    lines = RankConnections(nonce)
    if port:
        lines.connect(main_host, port, rank=rank)
    mailbox = PrefixStore(f"{nonce}/{MAILBOX}", store.clone())  # type: ignore[attr-defined]  # missing in torch's stubs
    heartbeat = Heartbeat(
        mailbox, rank=rank, size=size, host=socket.gethostname(), in_launcher=_in_launcher()
    )
    heartbeat.start()
    if rank == 0:
        with socket.create_server(("", 0), backlog=size) as server:
            if not has_launcher:
                port = server.getsockname()[1]
            _answer(letters, json.dumps([nonce, port]), heartbeat, size=size)
            lines.accept(server)
    heartbeat.follow(lines)
    return nonce, heartbeat


def _answer(letters: Store, answer: str, heartbeat: Heartbeat, *, size: int) -> None:
    missing = set(range(1, size))
    answered: set[bytes] = set()
    limit_s = _START.total_seconds()
    start_s = time.monotonic()
    while True:
        missing = {rank for rank in missing if not heartbeat.hears(rank)}
        if not missing:
            return
        for rank in missing:
            if not letters.check([f"word-{rank}"]):
                continue
            word = letters.get(f"word-{rank}")
            if word not in answered:
                letters.set(word.decode(), answer)
                answered.add(word)
        if time.monotonic() - start_s > limit_s:
            raise RuntimeError(f"rank {min(missing)} did not arrive within {limit_s:.0f} s")
        time.sleep(0.02)


def _in_launcher() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _tell_of_uncaught() -> None:
    # for scripts; the command line reports its errors itself
    before = sys.excepthook

    def uncaught(
        _kind: type[BaseException], problem: BaseException, trace: TracebackType | None
    ) -> None:
        lost: RankLostError | None = None
        if isinstance(problem, RankLostError):
            lost = problem
        elif isinstance(problem, Exception):
            lost = report_to_ranks(problem)
            if lost is not None:
                lost.__cause__ = problem
        to_print: BaseException = problem if lost is None else lost
        if not isinstance(to_print, Exception) or speaks_of(to_print):
            print_uncaught(to_print, trace, before)
        if lost is not None:
            sys.exit(lost.exit_status)
        if is_refusal(problem, before):
            leave_script(problem)

    sys.excepthook = uncaught


def _part(*, groups: bool = True) -> None:
    # at exit, where the other ranks may be gone
    for _, _, heartbeat in _connections:
        heartbeat.stop()
    _connections.clear()
    if groups:
        _grids.clear()
        with suppress(Exception):
            dist.destroy_process_group()
