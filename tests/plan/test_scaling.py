"""Scaling on paper against what torch holds and sends: one process, and two and four on gloo; 20
seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import surefoot as sf
from rank_processes import Ranks
from surefoot.distributed.blocks import blocks_of
from surefoot.distributed.world import joined, on_meta
from surefoot.memory import tensor_bytes
from surefoot.tools.plan import cluster, network_model
from surefoot.tools.plan.meta_pass import dry_pass
from surefoot.tools.plan.network_model import Machine
from surefoot.tools.plan.summary import gradient_bytes
from surefoot.tools.plan.workload import Spread, Weight, Workload, units, workload

CONTEXT, ROWS = 8, 2
# nothing divides evenly by 2 and by 4
SHAPE = sf.models.GPTConfig(
    layers=3, heads=2, width=14, context=CONTEXT, vocab_size=37, family="gpt2", tie_embeddings=True
)
SPECS: dict[str, Any] = {
    "adamw": sf.optim.adamw(1e-3),
    "sgd": sf.optim.sgd(1e-3, momentum=0.9),
    "plain sgd": sf.optim.sgd(1e-3),
    "lion": sf.optim.lion(1e-3),
    "adafactor": sf.optim.adafactor(1e-2),
    "muon": sf.optim.muon(1e-3),
    "nadam": sf.optim.nadam(1e-3),
    "schedule_free": sf.optim.schedule_free(1e-3),
}


def loss(model: Any, batch: Any) -> Any:
    inputs, targets = batch
    return model(
        inputs, loss=lambda hidden, head: sf.losses.linear_cross_entropy(hidden, head, targets)
    )


def run_of(**changes: Any) -> sf.Run:
    tokens = torch.randint(37, (400,), generator=torch.Generator().manual_seed(0)).numpy()
    settings: dict[str, Any] = {
        "model": lambda: sf.models.GPT(SHAPE),
        "loss": loss,
        "train_data": sf.data.TrainWindows(tokens, context=CONTEXT, seed=0),
        "batch_size": ROWS,
        "length": "2 steps",
        "optimizer": sf.optim.adamw(1e-3),
        "precision": "fp32",
        "device": "cpu",
        "console": False,
    }
    return sf.Run(**(settings | changes))


def work_of(**changes: Any) -> Workload:
    with on_meta(1):
        run = run_of(**changes)
    return workload(run.parts, dry_pass(run.parts))


def kept_bytes(optimizer: torch.optim.Optimizer) -> int:
    counters = ("step", "weight_sum", "mu_product")
    return local_bytes(
        held
        for state in optimizer.state.values()
        for key, held in state.items()
        if isinstance(held, Tensor) and key not in counters
    )


def local_bytes(tensors: Iterable[Any]) -> int:
    """Of each tensor what is here."""
    return sum(
        tensor_bytes([held.to_local()]) if isinstance(held, DTensor) else tensor_bytes([held])
        for held in tensors
    )


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.fast("adamw", "plain sgd", "adafactor", "muon", "schedule_free")
@pytest.mark.parametrize("name", SPECS)
def test_one_process_holds_what_was_computed(name: str) -> None:
    run = run_of(optimizer=SPECS[name], ema=None if name == "schedule_free" else 0.9)
    gradients = 0
    with run:
        for step in run.steps():
            sf.forward_backward(step)
            gradients = tensor_bytes(
                held.grad for held in run.state.parameters if held.grad is not None
            )
            sf.update(step)
    found = cluster.memory(
        work_of(optimizer=SPECS[name], ema=None if name == "schedule_free" else 0.9),
        Spread("none", 1),
        micro_batches=1,
    )
    model = run.state.models["model"]
    average = run.state.ema_models["model"].model

    assert found.parameters == tensor_bytes(model.parameters())
    assert found.gradients == gradients
    assert found.optimizer == kept_bytes(run.state.optimizers["model"].optimizer)
    assert found.averages + found.buffers == tensor_bytes(
        [*average.parameters(), *average.buffers(), *model.buffers()]
    )


class Collectives(TorchDispatchMode):
    """Bytes that each rank sends, by the payload of every collective that torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            payload = max(
                tensor.numel() * tensor.element_size()
                for tensor in tree_iter(args)
                if isinstance(tensor, Tensor)
            )
            group = next(
                dist.ProcessGroup.unbox(held)
                for held in args
                if isinstance(held, torch.ScriptObject)
            )
            times = {"allreduce_": 2, "_allgather_base_": 1, "_reduce_scatter_base_": 1}[
                func._schema.name.split("::")[1]
            ]
            self.sent += times * payload * (group.size() - 1) / group.size()
        return func(*args, **(kwargs or {}))


def one_step(*, kind: str, micro_batches: int, settings: dict[str, Any]) -> dict[str, float]:
    """A rank's step under torch's own DDP or FSDP2: bytes that it holds and sends."""
    world = joined("cpu", sharded=True)
    torch.manual_seed(0)
    model = sf.models.GPT(SHAPE)
    wrapped: Any = model
    if kind == "ddp":
        wrapped = DistributedDataParallel(
            model, gradient_as_bucket_view=True, broadcast_buffers=False
        )
    else:
        replicas = settings.get("replicas", 1)
        shape = (replicas, world.size // replicas) if replicas > 1 else (world.size,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        narrow = settings.get("gather_dtype") == "bf16"
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            if narrow
            else MixedPrecisionPolicy()
        )
        for block in blocks_of(model).values():
            fully_shard(
                block,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=settings.get("reshard_after_forward", True),
            )
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randint(37, (ROWS, CONTEXT)), torch.randint(37, (ROWS, CONTEXT))

    def pass_over(*, last: bool) -> None:
        together = last or settings.get("sync") == "every"
        if kind == "ddp":
            wrapped.require_backward_grad_sync = together
        else:
            wrapped.set_requires_gradient_sync(together)
        loss(wrapped, batch).value.backward()

    for _ in range(2):  # DDP makes its buckets anew after the first pass
        pass_over(last=True)
        optimizer.zero_grad()
    counted = Collectives()
    with counted:
        for place in range(micro_batches):
            pass_over(last=place + 1 == micro_batches)
    optimizer.step()
    return {
        "parameters": local_bytes(model.parameters()),
        "gradients": local_bytes(held.grad for held in model.parameters()),
        "optimizer": kept_bytes(optimizer),
        "sent": counted.sent,
    }


CASES: dict[int, list[tuple[Any, int, dict[str, Any]]]] = {
    2: [
        ("ddp", 1, {}),
        ("ddp", 2, {"sync": "last"}),
        ("ddp", 2, {"sync": "every"}),
        ("fsdp", 1, {"sync": "every"}),
        ("fsdp", 2, {"sync": "last"}),
        ("fsdp", 2, {"sync": "every"}),
        ("fsdp", 1, {"reshard_after_forward": False}),
        ("fsdp", 1, {"gather_dtype": "bf16"}),
    ],
    4: [("fsdp", 2, {"sync": "every"}), ("fsdp", 1, {"replicas": 2})],
}


@pytest.mark.fast("2")
@pytest.mark.parametrize("size", CASES)
def test_ranks_hold_and_send_what_was_computed(size: int, ranks: Ranks) -> None:
    names = ("kind", "micro_batches", "settings")
    work = work_of()
    measured = ranks.each(
        size, one_step, [dict(zip(names, case, strict=True)) for case in CASES[size]]
    )
    for (kind, micro_batches, settings), case in zip(CASES[size], measured, strict=True):
        spread = Spread(kind, size, **settings)
        found = cluster.memory(work, spread, micro_batches=micro_batches)
        first = case[0]  # which holds most rows
        computed = {
            "parameters": found.parameters,
            "gradients": found.gradients,
            "optimizer": found.optimizer,
        }

        assert computed == {name: first[name] for name in computed}, spread
        assert all(rank["parameters"] <= found.parameters for rank in case), spread
        sent = network_model.timing(work, spread, MACHINE, micro_batches=micro_batches).sent_bytes
        assert [rank["sent"] for rank in case] == [sent] * size, spread


class GradientBytes(TorchDispatchMode):
    """Bytes of the messages and all-to-alls of a step, which a rank gives for others: subtrees,
    slices, shards, and norms' rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d.send.default:
            self.sent += tensor_bytes(args[0])
        elif func is torch.ops.c10d.alltoall_base_.default:
            _, payload, held, _, lengths = args[:5]
            group = dist.ProcessGroup.unbox(held)
            own = lengths[group.rank()] if lengths else payload.numel() // group.size()
            self.sent += (payload.numel() - own) * payload.element_size()
        return func(*args, **(kwargs or {}))


def sent_and_planned(*, pieces: int, replicas: int | None) -> tuple[int, int]:
    """Bytes of gradients that this rank sends in a step of a run, and those that `plan` prints for
    rank 0.
    """
    run = sf.Run(
        model=lambda: nn.Sequential(
            nn.Linear(5, 7), nn.Linear(7, 6)
        ),  # 90 numbers; rows of 7 are padded
        loss=lambda model, batch: model(batch[0]).square().mean(),
        train_data=(torch.ones(pieces, 5),),
        batch_size=pieces,
        micro_batch_size=1,
        length="2 steps",
        optimizer=sf.optim.sgd(1e-3),
        parallel=sf.fsdp(replicas=replicas) if replicas else "ddp",
        device="cpu",
        console=False,
    )
    ranks = run.world_size
    shares = run.parts.pipeline.shares
    with run:
        for step in run.steps():
            with GradientBytes() as counted:
                sf.forward_backward(step)
                sf.update(step)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6))
    planned = gradient_bytes(
        [[*model.parameters()]], run.parts.pipeline.sizes, ranks, shares[0].step
    )
    return counted.sent, planned[1]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, [(2, None), (6, None), (5, 1)]),  # one subtree, two subtrees, a repeated micro-batch
        (3, [(4, None), (4, 1)]),
        (4, [(5, 2)]),  # rank 0's copy has fewer micro-batches than the other
    ],
)
def test_rank_0_sends_the_bytes_of_gradients_that_plan_prints(
    size: int, cases: list[tuple[int, int | None]], ranks: Ranks
) -> None:
    measured = ranks.each(
        size, sent_and_planned, [{"pieces": pieces, "replicas": many} for pieces, many in cases]
    )
    for case, ((sent, planned), *_) in zip(cases, measured, strict=True):
        assert sent == planned, case


def test_replicas_exchange_subtrees_once_in_a_step() -> None:
    work = work_of()

    def to_replicas(**settings: Any) -> float:
        spread = Spread("fsdp", 4, replicas=2, sync="every", **settings)
        return sum(
            each.times * each.to_replicas
            for each in network_model.windows(work, spread, micro_batches=3)
        )

    shard = sum(weight.shard_bytes(2) for weight in work.weights)
    assert to_replicas() == 3 * shard
    assert (
        to_replicas(exact_sums=True) == 2 * shard / 2 + shard / 2
    )  # of 6 micro-batches, 4 and 2 are subtrees


@pytest.mark.parametrize(
    "settings", [{}, {"reshard_after_forward": False}, {"sync": "every"}, {"gather_dtype": "bf16"}]
)
def test_more_ranks_never_need_more_memory(settings: dict[str, Any]) -> None:
    work = work_of(optimizer=sf.optim.muon(1e-3), ema=0.9)
    totals = [held_bytes(work, Spread("fsdp", world, **settings)) for world in range(1, 80)]
    assert all(more <= fewer for fewer, more in pairwise(totals))


def held_bytes(work: Workload, spread: Spread) -> int:
    """What stays; buffers for the exchange are padded to the number of ranks."""
    found = cluster.memory(work, spread, micro_batches=2)
    return found.parameters + found.gradients + found.optimizer + found.averages + found.updating


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_each_way_to_save_memory_saves_some(micro_batches: int) -> None:
    work = work_of()
    plain = Spread("fsdp", 6, sync="every")

    def total(spread: Spread) -> int:
        return cluster.memory(work, spread, micro_batches=micro_batches).total

    assert total(plain) < total(replace(plain, reshard_after_forward=False))
    assert total(plain) < total(replace(plain, replicas=2)) < total(replace(plain, replicas=3))
    assert total(replace(plain, gather_dtype="bf16")) < total(plain)
    assert total(replace(plain, cpu_offload=True)) < total(plain)
    assert (total(plain) < total(replace(plain, sync="last"))) == (micro_batches > 1)


def test_what_is_offloaded_is_in_the_hosts_memory() -> None:
    work = work_of(ema=0.9)
    plain = Spread("fsdp", 2)
    there = cluster.memory(work, plain, micro_batches=1)
    away = cluster.memory(work, replace(plain, cpu_offload=True), micro_batches=1)
    assert away.host == there.parameters + there.gradients + there.optimizer + there.averages
    assert away.parameters + away.gradients + away.optimizer + away.averages == 0


def test_a_weight_that_two_blocks_share_stands_outside_of_both() -> None:
    blocks = [nn.Sequential(nn.Linear(4, 4)) for _ in range(3)]
    blocks[2][0].weight = blocks[0][0].weight
    outside, found = units({"model": nn.Sequential(*blocks)})
    assert [weight.shape for weight in outside] == [(4, 4), (4,), (4,)]
    assert [[weight.shape for weight in block] for block in found] == [[(4, 4), (4,)]]


# --- time -----------------------------------------------------------------------------------------

MACHINE = Machine(1e12, 0.5, 10**9, bandwidth=1e9, node_bandwidth=1e10, node_size=4)


SPREADS = [
    Spread("ddp", 16),
    Spread("ddp", 16, sync="every"),
    *(
        Spread("fsdp", 16, replicas, reshard, "every")
        for reshard in (True, False)
        for replicas in (1, 4)
    ),
]


def scaled(work: Workload, samples: int) -> Workload:
    """The same with other micro-batches: arithmetic grows with the samples."""
    factor = samples / work.samples
    return replace(work, samples=samples, flops=(work.flops[0] * factor, work.flops[1] * factor))


@pytest.mark.parametrize("spread", SPREADS)
def test_communication_is_hidden_from_the_batch_on_that_is_named(spread: Spread) -> None:
    blocks = ((Weight((512, 512)),),) * 6
    work = Workload((Weight((100, 512)),), blocks, lambda _: 0, lambda _: 0, 0, 0, 0, (2e7, 4e7), 1)
    least = network_model.timing(work, spread, MACHINE, micro_batches=3).hidden_from

    def exposed_s(samples: int) -> float:
        return network_model.timing(
            scaled(work, samples), spread, MACHINE, micro_batches=3
        ).exposed_s

    assert least > 1
    assert exposed_s(least) == 0.0
    assert exposed_s(least - 1) > 0.0


def test_one_process_sends_nothing() -> None:
    work = work_of()
    for kind in ("none", "ddp", "fsdp"):
        found = network_model.timing(work, Spread(kind, 1), MACHINE, micro_batches=3)
        assert (found.sent_bytes, found.hidden_from) == (0.0, 1)


def test_ddp_and_unsharded_fsdp_send_the_same() -> None:
    work = work_of()
    replicated = Spread("fsdp", 8, replicas=8)
    sent = [
        network_model.timing(work, how, MACHINE, micro_batches=2).sent_bytes
        for how in (replicated, Spread("ddp", 8))
    ]
    assert sent[0] == sent[1]


def test_exact_sums_need_memory_for_what_a_rank_receives_and_on_a_gpu_for_the_sum_itself() -> None:
    """Under FSDP with exact sums, an all-to-all takes the place of the reduce-scatter, which
    receives a shard only.
    """
    block = (Weight((1024, 1024)),)
    work = Workload((), (block,) * 4, lambda n: 0, lambda n: 0, 0, 0, 0, (1.0, 2.0), 1)
    plain, exact, offloaded = (
        cluster.memory(
            work,
            Spread("fsdp", 8, sync="every", exact_sums=exact, cpu_offload=offload),
            micro_batches=1,
        )
        for exact, offload in ((False, False), (True, False), (True, True))
    )
    assert exact.exchanged - plain.exchanged == 4 * 1024 * 1024
    assert (plain.sums, exact.sums, offloaded.sums) == (0, 0, exact.gradients)
