"""Ranks that find each other, or do not: waited for at the start for minutes, and afterwards for as
long as it takes. (about 10 s)
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from forked_ranks import alive
from rank_processes import forks, on_ranks
from refused import refused
from surefoot.distributed import environment, rendezvous, world
from surefoot.distributed.heartbeat import Heartbeat
from surefoot.distributed.rank_sums import RankSums
from surefoot.distributed.tree_sum import TreeSum
from surefoot.errors import RankLostError
from waiting import wait_until

pytestmark = forks
START_S = 5  # who has not met for so long is given up
STEP = {
    "SLURM_JOB_ID": str(os.getpid()),
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "here",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], list[int]]:
    """Do something as two tasks of a step; returns how each has ended."""
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rendezvous, "_START", timedelta(seconds=START_S))

    return lambda call: both(
        call, [STEP | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    )


def both(call: Callable[[int], None], environments: list[dict[str, str]]) -> list[int]:
    """How two ranks end that do something, each in its environment."""
    return on_ranks(2, call, environment=lambda rank: environments[rank])


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store of a launcher that starts ranks again and again, as torchrun does. Silence counts
    after 4 s.
    """
    monkeypatch.setattr(rendezvous, "Heartbeat", partial(Heartbeat, every_s=0.1, silent_s=4.0))
    monkeypatch.setattr(rendezvous, "_START", timedelta(seconds=30))
    return TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )


def of_agent(port: int) -> list[dict[str, str]]:
    """What each of its two ranks finds in its environment."""
    same = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    same |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    return [same | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


@pytest.mark.slow
def test_who_has_met_is_waited_for_longer_than_who_has_not(ranks) -> None:
    def call(rank: int) -> None:
        joined = world.joined("cpu")
        if rank == 1:
            time.sleep(START_S + 1)
        joined.gathered(None)
        if rank == 0:
            time.sleep(START_S + 1)
        sum_of_ranks = torch.tensor([rank + 1.0])
        joined.add_up(sum_of_ranks)
        assert sum_of_ranks.tolist() == [3.0]

    assert ranks(call) == [0, 0]


def test_every_group_waits_for_a_day_once_its_ranks_have_met(ranks) -> None:
    def call(rank: int) -> None:
        joined = world.joined("cpu")
        assert joined.side is not None
        for group in (dist.group.WORLD, joined.side.group, *rendezvous.replicated(2)):
            options = group._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
            assert options._timeout == timedelta(days=1)
        joined.heartbeat.goodbye()
        joined.gathered(None)

    assert ranks(call) == [0, 0]


@pytest.mark.slow
def test_no_message_of_a_step_has_the_timeout_of_a_connection(
    ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo gives a message between two ranks the timeout with which their group was made."""
    connect_s = 2
    monkeypatch.setattr(rendezvous, "_CONNECT", timedelta(seconds=connect_s))

    def call(rank: int) -> None:
        joined = world.joined("cpu")
        agreement = world.Consensus(joined, names=("stop",))
        shares = [range(1), range(1, 2)]
        sums = RankSums(shares, rank=rank)
        replicas = RankSums(shares, rank=rank, group=rendezvous.replicated(2)[0])

        def added(ranks: RankSums) -> float:
            tree: TreeSum[torch.Tensor] = TreeSum(torch.add, ranks.own.start)
            tree.add(rank, torch.tensor([rank + 1.0]))
            return float(ranks.of_tree(tree, like=torch.zeros(1)))

        def agreed() -> int:
            agreement.exchange(stop=3)
            return max(agreement.take()["stop"])

        for result in (
            lambda: added(sums),
            lambda: added(replicas),
            lambda: sum(joined.gathered(rank + 1)),
            agreed,
        ):
            if rank == 1:
                time.sleep(connect_s + 1)
            assert result() == 3
        joined.heartbeat.goodbye()
        joined.gathered(None)

    assert ranks(call) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("comes", ["and leaves again", "never"])
def test_a_rank_that_does_not_come_is_told_in_time(ranks, comes: str) -> None:
    def call(rank: int) -> None:
        if rank == 1:
            if comes == "and leaves again":
                next(
                    rendezvous.rendezvous(
                        world.placed(os.environ).meeting,
                        rank=1,
                        world_size=2,
                        timeout=rendezvous._START,
                    )
                )
            return
        with refused("ranks-not-found", rank=0, ranks=2):
            world.joined("cpu")

    assert ranks(call) == [0, 0]


# --- a store that outlives the ranks of an attempt ------------------------------------------------


def test_ranks_that_are_started_again_on_the_same_store_hear_nothing_of_the_dead(
    agent: TCPStore,
) -> None:
    def dies(rank: int) -> None:
        joined = world.joined("cpu")
        joined.mailbox("checkpoint").set("outcome", "of the first start")
        joined.gathered(None)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        joined.heartbeat.opened(logs=None, fresh_line="")
        time.sleep(60)

    def lives(rank: int) -> None:
        joined = world.joined("cpu")
        assert isinstance(joined.heartbeat, Heartbeat)
        joined.heartbeat.opened(logs=None, fresh_line="")
        before = joined.heartbeat.rounds
        assert wait_until(lambda: joined.heartbeat.rounds > before + 10)
        assert not joined.mailbox("checkpoint").check(["outcome"])
        joined.gathered(None)
        joined.heartbeat.goodbye()
        joined.gathered(None)

    assert both(dies, of_agent(agent.port)) == [RankLostError.exit_status, -signal.SIGKILL]
    assert both(lives, of_agent(agent.port)) == [0, 0]


@pytest.mark.parametrize("late", [0, 1])
def test_groups_that_are_made_again_on_the_same_store_have_no_address_of_a_dead_rank(
    agent: TCPStore, late: int
) -> None:
    def call(rank: int) -> None:
        if rank == late:
            time.sleep(0.5)  # meanwhile the other one would find its address of before
        joined = world.joined("cpu")
        joined.gathered(None)
        os._exit(0)  # without a word, as a rank that is killed

    assert [both(call, of_agent(agent.port)) for _ in range(2)] == [[0, 0], [0, 0]]


@pytest.mark.parametrize("late", [0, 1])
def test_the_group_of_a_script_stays_and_groups_beside_it_have_no_key_of_an_earlier_start(
    agent: TCPStore, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch itself sees to the default group; of that nothing is left on the store here."""
    monkeypatch.setattr(rendezvous, "_CONNECT", timedelta(seconds=30))

    def call(rank: int) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        of_script = dist.group.WORLD
        if rank == late:
            time.sleep(0.5)  # meanwhile the other one would find its address of before
        joined = world.joined("cpu")
        joined.gathered(None)
        replicated, _ = rendezvous.replicated(2)
        for group in (of_script, replicated, dist.new_group()):
            sum_of_ranks = torch.tensor([rank + 1.0])
            dist.all_reduce(sum_of_ranks, group=group)
            assert sum_of_ranks.tolist() == [3.0]
        assert dist.group.WORLD is of_script
        os._exit(0)  # without a word, as a rank that is killed

    for _ in range(2):
        assert both(call, of_agent(agent.port)) == [0, 0]
        for key in agent.list_keys():
            if key.startswith("default_pg/0//cpu"):
                agent.delete_key(key)


def test_a_rank_that_dies_before_the_nonce_reaches_it_is_waited_for_and_may_come_again(
    agent: TCPStore,
) -> None:
    def call(rank: int) -> None:
        if rank == 1:
            letters = PrefixStore(rendezvous.MEETING, agent_of_rank())
            letters.set("word-1", "of one that died")
            assert wait_until(lambda: letters.check(["of one that died"])), (
                "rank 0 answers, and nobody reads it"
            )
        world.joined("cpu").gathered(None)

    def agent_of_rank() -> TCPStore:
        return TCPStore("127.0.0.1", agent.port, is_master=False, timeout=timedelta(seconds=10))

    assert both(call, of_agent(agent.port)) == [0, 0]


def test_a_rank_whose_launcher_is_gone_ends_where_nobody_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environments = of_agent(store.port)
    del store
    monkeypatch.setattr(rendezvous, "_START", timedelta(seconds=2))

    def call(rank: int) -> None:
        del rank
        with refused("ranks-not-found"):
            world.joined("cpu")

    assert both(call, environments) == [0, 0]


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_a_rank_ends_with_whoever_started_it(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    monkeypatch.setattr(environment.sys, "platform", system)
    told, tell = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        if (rank := os.fork()) == 0:
            environment.end_with_parent(os.getppid())
            os.write(tell, b"%8d" % os.getpid())
            time.sleep(60)
            os._exit(0)
        os.waitpid(rank, 0)
        os._exit(0)
    rank = int(os.read(told, 8))
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    assert wait_until(lambda: not alive(rank))
