"""Models under `fully_sharded.sharded`, on every rank compared with a plain copy of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import surefoot as sf
from surefoot.checkpoint.snapshot import Snapshot
from surefoot.config.batch_size import Batching
from surefoot.config.parallel import strategy_for
from surefoot.distributed.fsdp import Fsdp
from surefoot.distributed.sharded_model import shard_model
from surefoot.distributed.spread import spread as chosen_exchange
from surefoot.distributed.world import World, joined
from surefoot.models.gpt import GPT
from surefoot.models.gpt_layers import GPTConfig
from surefoot.optim.clipping import gradient_norm

STEP = SimpleNamespace(index=0)


class Twice(nn.Module):
    """One block that is passed twice, and one that is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.blocks[0](self.blocks[1](self.blocks[0](inputs)))
        return checkpoint(self.blocks[2], hidden, use_reentrant=False)  # type: ignore[no-any-return, no-untyped-call]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 5, num_layers=2)
        self.attention = nn.MultiheadAttention(5, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.lstm(inputs)
        attended: Tensor = self.attention(hidden, hidden, hidden)[0]
        return attended


class Counting(nn.Module):
    """One that returns counted means, as a model that computes its own loss does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> tuple[sf.Mean, dict[str, sf.Mean]]:
        outputs = self.inner(inputs).square()
        return sf.Mean(outputs.sum(), outputs.numel()), {"largest": sf.Mean(outputs.max(), 1)}


def gpt(family: Any = "modern") -> GPT:
    model = GPT(
        GPTConfig(
            layers=2, heads=2, width=8, context=8, vocab_size=11, family=family, tie_embeddings=True
        )
    )
    for held in model.parameters():
        nn.init.normal_(held, std=0.3)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "twice": Twice,
    "recurrent": Recurrent,
    "counting": Counting,
    "gpt": gpt,
    "gpt2": lambda: gpt("gpt2"),
    "llama": lambda: gpt("llama"),
}


def spread(model: nn.Module, *, passes: int = 0, **settings: Any) -> tuple[World, Fsdp, Any]:
    """With `passes` of each rank, sums are exact."""
    world = joined("cpu", sharded=True)
    strategy = strategy_for(sf.fsdp(**settings), ranks=world.size)
    sizes = Batching(passes * world.size, 1)
    shares = sizes.shares(world.size, shards=world.size // strategy.replicas) if passes else None
    held = shard_model(model, world, strategy, exact=passes > 0)
    ranks = Fsdp(world, strategy, 1.0, {"model": held}, shares=shares)
    models = {"model": model}
    ranks.sum_exactly()
    _, calls = chosen_exchange(
        models,
        models,
        world=world,
        parallel=strategy,
        sizes=sizes,
        shares=[],
        exact=True,
        fsdp=ranks,
    )
    return world, ranks, calls["model"]


def loss_of(outputs: Any) -> Tensor:
    if isinstance(outputs, tuple):
        outputs = outputs[0]
    if isinstance(outputs, sf.Mean):
        return torch.as_tensor(outputs.value)
    return outputs.square().mean()  # type: ignore[no-any-return]


def passed(counted: bool) -> Any:
    return SimpleNamespace(count=int(counted), index=0)


def summed(total: Tensor | None) -> Any:
    return SimpleNamespace(total=total, counted=1, plain=1, parts=[])


def batch_of(kind: str, place: int) -> Tensor:
    generator = torch.Generator().manual_seed(place)
    if kind in ("gpt", "gpt2", "llama"):
        return torch.randint(11, (2, 8), generator=generator)
    return torch.randn(4, 3, 5, generator=generator, dtype=torch.float64)


def differences(
    *, kind: str, passes: int = 2, void: bool = False, exact: bool = False, **settings: Any
) -> list[float]:
    """The largest of this rank's gradients' and norms' differences, of three steps of gradient
    descent.
    """
    torch.manual_seed(0)
    model = MODELS[kind]().double()
    plain = copy.deepcopy(model)
    world, ranks, called = spread(model, passes=passes * exact, **settings)
    held = ranks.models["model"]
    rate = 0.1
    if isinstance(model, GPT):  # a block by itself, before the model was ever called
        with torch.no_grad(), ranks.whole([model]):
            model.blocks[0](torch.ones(1, 8, 8, dtype=torch.float64))
    places = [shard.data_ptr() for shard in held.shards.values()]
    found = []
    for step in range(3):
        for place in range(passes * world.size):
            if not (void and place % 2):
                torch.manual_seed(place)
                (loss_of(plain(batch_of(kind, place + step))) / passes).backward()
        total: Tensor | None = None
        ranks.begin(STEP)
        for place in range(passes * world.rank, passes * (world.rank + 1)):
            counted = not (void and place % 2)
            last = place == passes * (world.rank + 1) - 1
            assert ranks.start_pass(passed(counted), last=last)
            torch.manual_seed(place)
            loss = loss_of(called(batch_of(kind, place + step))) / passes
            if not counted:
                loss = loss * torch.nan
            total = loss.detach() if total is None else total + loss.detach()
            if last:
                ranks.begin_sum(summed(total))
            ranks.started(loss, None).backward()
        ranks.summed(torch.zeros(()), None)
        pairs = list(zip(plain.parameters(), held.shards.values(), strict=True))
        gradients = [shard.grad for _, shard in pairs if shard.grad is not None]
        norm = gradient_norm(
            ranks.norm_inputs([shard for _, shard in pairs], gradients), factor=1.0
        )
        whole = torch.linalg.vector_norm(
            torch.stack([each.grad.norm() for each, _ in pairs if each.grad is not None])
        )
        found.append(float((norm - whole).abs()))
        for each, shard in pairs:
            assert (each.grad is None) == (shard.grad is None)
            if each.grad is None or shard.grad is None:
                continue
            rows = each.grad[shard.rows.start : shard.rows.stop]
            found += (rows - shard.grad).abs().flatten().tolist()
            with torch.no_grad():
                each.sub_(each.grad, alpha=rate)
                shard.sub_(shard.grad, alpha=rate)
            each.grad = shard.grad = None
    assert places == [
        shard.data_ptr() for shard in held.shards.values()
    ]  # the same memory as the model's
    found.append(_while_evaluated(model, plain, kind, ranks))
    return found


@torch.no_grad()
def _while_evaluated(model: nn.Module, plain: nn.Module, kind: str, ranks: Fsdp) -> float:
    """Evaluated, changed without a pass of training, and evaluated again, in step and then
    whole.
    """
    model.eval()
    plain.eval()
    found = [loss_of(model(batch_of(kind, 1))) - loss_of(plain(batch_of(kind, 1)))]
    for each, shard in zip(plain.parameters(), ranks.models["model"].shards.values(), strict=True):
        each.mul_(0.5)
        shard.mul_(0.5)
    found.append(loss_of(model(batch_of(kind, 1))) - loss_of(plain(batch_of(kind, 1))))
    with ranks.whole([model]):
        for _ in range(ranks.world.rank):
            found.append(loss_of(model(batch_of(kind, 2))) - loss_of(plain(batch_of(kind, 2))))
    return max(float(each.abs()) for each in found)


def in_halves(*, kind: str) -> dict[str, Any]:
    """Of a model that computes in bfloat16: types of what it returns and of gradients, and the
    relative error of these.
    """
    torch.manual_seed(0)
    model = MODELS[kind]()
    plain = copy.deepcopy(model)
    _, ranks, called = spread(model, gather_dtype="bf16")
    inputs = batch_of(kind, 0)
    inputs = inputs if inputs.dtype == torch.int64 else inputs.float()
    ranks.begin(STEP)
    ranks.start_pass(passed(True), last=True)
    loss = loss_of(called(inputs))
    ranks.begin_sum(summed(loss.detach()))
    ranks.started(loss, None)
    loss.backward()  # of every rank the same: the mean is that of one
    ranks.summed(torch.zeros(()), None)
    loss_of(plain(inputs)).backward()
    pairs = list(zip(plain.parameters(), ranks.models["model"].shards.values(), strict=True))
    rows = [
        (e.grad[s.rows.start : s.rows.stop], s.grad)
        for e, s in pairs
        if e.grad is not None and s.grad is not None
    ]
    error = sum(float((one - other).square().sum()) for one, other in rows)
    size = sum(float(one.square().sum()) for one, _ in rows)
    return {
        "loss": str(loss.dtype),
        "gradients": {str(other.dtype) for _, other in rows},
        "error": (error / size) ** 0.5,
    }


def normalised() -> float:
    """How far running statistics are from a plain model's where weights are gathered in
    bfloat16.
    """
    model: nn.Module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)
    )
    plain = copy.deepcopy(model)
    inputs = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    _, _, called = spread(model, gather_dtype="bf16")
    called(inputs)
    plain(inputs)
    return max(
        float((a - b).abs().max()) for a, b in zip(model.buffers(), plain.buffers(), strict=True)
    )


def cross_entropy_in_forward() -> list[float]:
    """A language model that computes its loss inside `forward`, with the head's matrix, and nothing
    to count on rank 1.
    """
    torch.manual_seed(0)
    model = gpt().double()
    plain = copy.deepcopy(model)
    world, ranks, called = spread(model)

    def head_loss(hidden: Tensor, weight: Tensor) -> sf.Mean:
        targets = torch.ones(hidden.shape[0] * hidden.shape[1], dtype=torch.long)
        return sf.Mean(
            F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets, reduction="sum"),
            len(targets),
        )

    tokens = batch_of("gpt", 0)
    ranks.begin(STEP)
    ranks.start_pass(passed(world.rank == 0), last=True)
    mean = called(tokens, loss=head_loss)
    ranks.begin_sum(summed(None))
    (ranks.started(mean.total, None) * (1.0 if world.rank == 0 else torch.nan)).backward()
    ranks.summed(torch.zeros(()), None)
    plain(tokens, loss=head_loss).total.backward()
    pairs = zip(plain.parameters(), ranks.models["model"].shards.values(), strict=True)
    return [
        float((e.grad[s.rows.start : s.rows.stop] - s.grad).abs().max())
        for e, s in pairs
        if e.grad is not None and s.grad is not None and s.numel()
    ]


def compiled_graphs() -> tuple[int, float]:
    """How many operations are compiled of a model whose blocks are torch's own classes, and the
    largest difference made by that.
    """
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Linear(5, 5), nn.Sequential(*blocks))
    plain = copy.deepcopy(model)
    operations = []

    def backend(graph: Any, _: Any) -> Any:
        operations.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    spread(model, blocks=("1",))
    inputs = torch.ones(2, 5)
    outputs = torch.compile(model, backend=backend, dynamic=False)(inputs)
    return sum(operations), float((outputs - plain(inputs)).abs().max())


def after_failed_passes() -> list[float]:
    """The difference of a plain model's outputs from those after passes that ended in a block: in
    the block of a snapshot, and in a step, before which no `end` was reached.
    """

    class Failing(Twice):
        fails = False

        def forward(self, inputs: Tensor) -> Tensor:
            hidden: Tensor = self.blocks[0](inputs)
            if self.fails:
                self.blocks[1](hidden[:, :2])  # raises: of another width
            return hidden

    model = Failing().eval()
    plain = copy.deepcopy(model)
    _, ranks, called = spread(model, passes=1)
    inputs = torch.ones(2, 5)
    differences = []

    def fail() -> None:
        model.fails = True
        with suppress(RuntimeError):
            called(inputs)
        model.fails = False

    def compare() -> None:
        with torch.no_grad():
            for weight, shard in zip(plain.parameters(), ranks.models["model"].shards, strict=True):
                weight.add_(1.0)
                ranks.models["model"].shards[shard].add_(1.0)
        differences.append(float((called(inputs) - plain(inputs)).abs().max()))

    with Snapshot({"model": model}, keep=True):
        fail()
    compare()
    ranks.begin(STEP)
    fail()
    ranks.begin(STEP)
    compare()
    return differences


def marks() -> list[list[bool]]:
    """Whether modules are marked as those of FSDP: between passes, whole, and afterwards."""
    model = gpt()
    _, ranks, _ = spread(model)

    def has_mark() -> bool:
        return any(getattr(part, "_is_fsdp_managed_module", False) for part in model.modules())

    found = [has_mark()]
    with ranks.whole([model]):
        found.append(has_mark())
    return [[*found, has_mark()]]
