"""Scaling on paper against what torch holds and sends: one process, and two and four on gloo; 20
seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

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
from surefoot.tools.plan.network_model import Machine, Timing
from surefoot.tools.plan.summary import gradient_bytes
from surefoot.tools.plan.workload import Spread, Weight, Workload, units, workload

CONTEXT = 8
ROWS = 2
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

    def of_hidden(hidden: Any, head: Any) -> Any:
        return sf.losses.linear_cross_entropy(hidden, head, targets)

    return model(inputs, loss=of_hidden)


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
    """The state of an optimizer, without its counters."""
    tensors = []
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and name not in ("step", "weight_sum", "mu_product"):
                tensors.append(value)
    return local_bytes(tensors)


def local_bytes(tensors: Iterable[Any]) -> int:
    """Of each tensor what is here."""
    parts = []
    for tensor in tensors:
        parts.append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    return tensor_bytes(parts)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.fast("adamw", "plain sgd", "adafactor", "muon", "schedule_free")
@pytest.mark.parametrize("name", SPECS)
def test_one_process_holds_what_was_computed(name: str) -> None:
    settings: dict[str, Any] = {"optimizer": SPECS[name]}
    if name != "schedule_free":  # it averages itself
        settings["ema"] = 0.9
    run = run_of(**settings)
    gradient_bytes_held = 0
    with run:
        for step in run.steps():
            sf.forward_backward(step)
            gradients = [parameter.grad for parameter in run.state.parameters]
            gradient_bytes_held = tensor_bytes(grad for grad in gradients if grad is not None)
            sf.update(step)

    computed = cluster.memory(work_of(**settings), Spread("none", 1), micro_batches=1)

    model = run.state.models["model"]
    average = run.state.ema_models["model"].model
    beside_weights = [*average.parameters(), *average.buffers(), *model.buffers()]
    assert computed.parameters == tensor_bytes(model.parameters())
    assert computed.gradients == gradient_bytes_held
    assert computed.optimizer == kept_bytes(run.state.optimizers["model"].optimizer)
    assert computed.averages + computed.buffers == tensor_bytes(beside_weights)


class Collectives(TorchDispatchMode):
    """Bytes that each rank sends, by the payload of every collective that torch calls."""

    TIMES: ClassVar = {"allreduce_": 2, "_allgather_base_": 1, "_reduce_scatter_base_": 1}

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_iter(args) if isinstance(leaf, Tensor)]
            payload = max(tensor.nbytes for tensor in tensors)
            group = next(argument for argument in args if isinstance(argument, torch.ScriptObject))
            size = dist.ProcessGroup.unbox(group).size()
            times = self.TIMES[func._schema.name.split("::")[1]]
            self.sent += times * payload * (size - 1) / size
        return func(*args, **(kwargs or {}))


def shard(model: nn.Module, size: int, settings: dict[str, Any]) -> None:
    """Put a model under FSDP2, block by block."""
    replicas = settings.get("replicas", 1)
    if replicas > 1:
        shape = (replicas, size // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy()
    if settings.get("gather_dtype") == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    reshard = settings.get("reshard_after_forward", True)
    for block in blocks_of(model).values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


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
        shard(model, world.size, settings)
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
        "gradients": local_bytes(parameter.grad for parameter in model.parameters()),
        "optimizer": kept_bytes(optimizer),
        "sent": counted.sent,
    }


@dataclass(frozen=True)
class Case:
    """How a step is shared, and in how many micro-batches."""

    kind: Literal["ddp", "fsdp"]
    micro_batches: int
    settings: dict[str, Any]


CASES = {
    2: [
        Case("ddp", 1, {}),
        Case("ddp", 2, {"sync": "last"}),
        Case("ddp", 2, {"sync": "every"}),
        Case("fsdp", 1, {"sync": "every"}),
        Case("fsdp", 2, {"sync": "last"}),
        Case("fsdp", 2, {"sync": "every"}),
        Case("fsdp", 1, {"reshard_after_forward": False}),
        Case("fsdp", 1, {"gather_dtype": "bf16"}),
    ],
    4: [Case("fsdp", 2, {"sync": "every"}), Case("fsdp", 1, {"replicas": 2})],
}


@pytest.mark.fast("2")
@pytest.mark.parametrize("size", CASES)
def test_ranks_hold_and_send_what_was_computed(size: int, ranks: Ranks) -> None:
    work = work_of()

    measured = ranks.each(size, one_step, [vars(case) for case in CASES[size]])

    for case, of_ranks in zip(CASES[size], measured, strict=True):
        spread = Spread(case.kind, size, **case.settings)
        memory = cluster.memory(work, spread, micro_batches=case.micro_batches)
        timing = network_model.timing(work, spread, MACHINE, micro_batches=case.micro_batches)
        first = of_ranks[0]  # which holds most rows
        assert memory.parameters == first["parameters"], spread
        assert memory.gradients == first["gradients"], spread
        assert memory.optimizer == first["optimizer"], spread
        for rank in of_ranks:
            assert rank["parameters"] <= memory.parameters, spread
            assert rank["sent"] == timing.sent_bytes, spread


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
            _, payload, boxed_group, _, lengths = args[:5]
            group = dist.ProcessGroup.unbox(boxed_group)
            to_itself = lengths[group.rank()] if lengths else payload.numel() // group.size()
            self.sent += (payload.numel() - to_itself) * payload.element_size()
        return func(*args, **(kwargs or {}))


def sent_and_planned(*, pieces: int, replicas: int | None) -> tuple[int, int]:
    """Bytes of gradients that this rank sends in a step of a run, and those that `plan` prints for
    rank 0.
    """

    def two_layers() -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6))  # 90 numbers; rows of 7 are padded

    run = sf.Run(
        model=two_layers,
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
    parameters = [*two_layers().parameters()]
    _, planned = gradient_bytes([parameters], run.parts.pipeline.sizes, ranks, shares[0].step)
    return counted.sent, planned


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
    arguments = [{"pieces": pieces, "replicas": replicas} for pieces, replicas in cases]

    measured = ranks.each(size, sent_and_planned, arguments)

    for case, of_ranks in zip(cases, measured, strict=True):
        sent, planned = of_ranks[0]
        assert sent == planned, case


def test_replicas_exchange_subtrees_once_in_a_step() -> None:
    work = work_of()

    def to_replicas(**settings: Any) -> float:
        spread = Spread("fsdp", 4, replicas=2, sync="every", **settings)
        windows = network_model.windows(work, spread, micro_batches=3)
        return sum(window.times * window.to_replicas for window in windows)

    shard_bytes = sum(weight.shard_bytes(2) for weight in work.weights)
    assert to_replicas() == 3 * shard_bytes
    # of 6 micro-batches, 4 and 2 are subtrees
    assert to_replicas(exact_sums=True) == 2 * shard_bytes / 2 + shard_bytes / 2


@pytest.mark.parametrize(
    "settings", [{}, {"reshard_after_forward": False}, {"sync": "every"}, {"gather_dtype": "bf16"}]
)
def test_more_ranks_never_need_more_memory(settings: dict[str, Any]) -> None:
    work = work_of(optimizer=sf.optim.muon(1e-3), ema=0.9)
    totals = [bytes_that_stay(work, Spread("fsdp", world, **settings)) for world in range(1, 80)]
    assert totals == sorted(totals, reverse=True)


def bytes_that_stay(work: Workload, spread: Spread) -> int:
    """Without buffers for the exchange, which are padded to the number of ranks."""
    memory = cluster.memory(work, spread, micro_batches=2)
    return (
        memory.parameters + memory.gradients + memory.optimizer + memory.averages + memory.updating
    )


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
    on_device = cluster.memory(work, plain, micro_batches=1)
    offloaded = cluster.memory(work, replace(plain, cpu_offload=True), micro_batches=1)

    names = ("parameters", "gradients", "optimizer", "averages")
    assert offloaded.host == sum(getattr(on_device, name) for name in names)
    assert [getattr(offloaded, name) for name in names] == [0, 0, 0, 0]


def test_a_weight_that_two_blocks_share_stands_outside_of_both() -> None:
    blocks = [nn.Sequential(nn.Linear(4, 4)) for _ in range(3)]
    blocks[2][0].weight = blocks[0][0].weight

    outside, inside = units({"model": nn.Sequential(*blocks)})

    assert [weight.shape for weight in outside] == [(4, 4), (4,), (4,)]
    (block,) = inside
    assert [weight.shape for weight in block] == [(4, 4), (4,)]


# --- time -----------------------------------------------------------------------------------------

MACHINE = Machine(1e12, 0.5, 10**9, bandwidth=1e9, node_bandwidth=1e10, node_size=4)


SPREADS = [
    Spread("ddp", 16),
    Spread("ddp", 16, sync="every"),
    Spread("fsdp", 16, replicas=1, reshard_after_forward=True, sync="every"),
    Spread("fsdp", 16, replicas=4, reshard_after_forward=True, sync="every"),
    Spread("fsdp", 16, replicas=1, reshard_after_forward=False, sync="every"),
    Spread("fsdp", 16, replicas=4, reshard_after_forward=False, sync="every"),
]
FORWARD_FLOPS = 2e7  # of a sample
BACKWARD_FLOPS = 4e7


def work_of_blocks(samples: int) -> Workload:
    """Six blocks and one weight outside; arithmetic grows with the samples."""
    return Workload(
        outside=(Weight((100, 512)),),
        blocks=((Weight((512, 512)),),) * 6,
        state_bytes=lambda _: 0,
        update_bytes=lambda _: 0,
        averages=0,
        buffer_bytes=0,
        pass_bytes=0,
        flops=(FORWARD_FLOPS * samples, BACKWARD_FLOPS * samples),
        samples=samples,
    )


@pytest.mark.parametrize("spread", SPREADS)
def test_communication_is_hidden_from_the_batch_on_that_is_named(spread: Spread) -> None:
    def timing(samples: int) -> Timing:
        return network_model.timing(work_of_blocks(samples), spread, MACHINE, micro_batches=3)

    least = timing(1).hidden_from

    assert least > 1
    assert timing(least).exposed_s == 0.0
    assert timing(least - 1).exposed_s > 0.0


@pytest.mark.parametrize("kind", ["none", "ddp", "fsdp"])
def test_one_process_sends_nothing(kind: Any) -> None:
    timing = network_model.timing(work_of_blocks(1), Spread(kind, 1), MACHINE, micro_batches=3)
    assert timing.sent_bytes == 0.0
    assert timing.hidden_from == 1


def test_ddp_and_unsharded_fsdp_send_the_same() -> None:
    work = work_of()
    replicated = network_model.timing(work, Spread("fsdp", 8, replicas=8), MACHINE, micro_batches=2)
    ddp = network_model.timing(work, Spread("ddp", 8), MACHINE, micro_batches=2)
    assert replicated.sent_bytes == ddp.sent_bytes


def test_exact_sums_need_memory_for_what_a_rank_receives_and_on_a_gpu_for_the_sum_itself() -> None:
    """Under FSDP with exact sums, an all-to-all takes the place of the reduce-scatter, which
    receives a shard only.
    """
    work = work_of_blocks(1)

    def memory(**settings: bool) -> Any:
        spread = Spread("fsdp", 8, sync="every", **settings)
        return cluster.memory(work, spread, micro_batches=1)

    plain = memory()
    exact = memory(exact_sums=True)
    offloaded = memory(exact_sums=True, cpu_offload=True)

    assert exact.exchanged - plain.exchanged == 4 * 512 * 512
    assert plain.sums == 0
    assert exact.sums == 0
    assert offloaded.sums == exact.gradients
