"""FSDP2: models of which every rank holds some rows of every parameter. The second half of `distributed/strategy.py`.

Torch's `fully_shard` gathers weights when they are used and spreads gradients. Here is what a run needs around it: plain
tensors for the optimizer (`shards.Shard`), the norm of the whole gradient, whole weights for sampling.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from surefoot.config.parallel import Strategy
from surefoot.distributed.blocks import gathered, is_batch_norm, refuse_unshardable
from surefoot.distributed.rendezvous import replicated
from surefoot.distributed.shards import Shard, add_up, held_of
from surefoot.distributed.strategy import Called, Sums
from surefoot.distributed.world import World


@dataclass
class FullySharded:
    """One model, sharded; `shards` are the parameters as the optimizer has them, by those that the model holds.

    A parameter of the model is a DTensor between passes, and whole while its block is being passed.
    """

    model: nn.Module
    shards: dict[nn.Parameter, Shard]
    world: World
    parallel: Strategy
    group: dist.ProcessGroup  # the ranks that hold the model together
    parts: list[tuple[FSDPModule, bool]]  # gathered together, and whether they are let go after their forward pass
    together: bool = True
    gradients_copied: bool = False  # shards have gradients, or had them until they were cleared
    unsharded: bool = False
    counted: bool = True
    used: set[int] = field(default_factory=set)  # numbers of parameters that got a gradient, where some may get none

    def __post_init__(self) -> None:
        self.trained = [(p, shard) for p, shard in self.shards.items() if shard.requires_grad]
        self.model.register_forward_hook(self._after_forward)
        if self.parallel.find_unused_parameters and self.trained:
            self._watch_use()

    @property
    def root(self) -> FSDPModule:
        return self.parts[-1][0]

    def start_pass(self, *, last: bool, counted: bool = True) -> None:
        """Before each micro-batch: whether its gradients are added up over the ranks. All ranks must make every pass."""
        if self.gradients_copied:  # what was cleared on one side, since gradients were there, is cleared on the other
            self.gradients_copied = False
            for parameter, shard in self.trained:
                if parameter.grad is None or shard.grad is None:
                    parameter.grad = shard.grad = None
        together = last or self.parallel.sync == "every"
        self.counted = counted
        if together is not self.together:
            self.together = together
            self.root.set_requires_gradient_sync(together)

    @torch.no_grad()
    def copy_gradients_to_shards(self) -> None:
        """After the last pass: give each shard its rows of the gradient; the model's parameter has the same memory as its own.

        So code that goes through the model's parameters does the right thing too, if DTensors can do it. What got no gradient
        on any rank has none. Only where that is allowed (`find_unused_parameters`) ranks tell each other, and wait.
        """
        idle = set[int]()
        if self.parallel.find_unused_parameters:
            received, self.used = self.world.gathered(sorted(self.used)), set()
            idle = set(range(len(self.trained))).difference(*received)
        for index, (parameter, shard) in enumerate(self.trained):
            gradient: Any = parameter.grad
            if gradient is not None and index in idle and shard.grad is None:
                parameter.grad = None
            elif gradient is not None:
                shard.grad = gradient.to_local()
        self.gradients_copied = True

    @contextmanager
    def unshard(self) -> Iterator[None]:
        """Every rank holds the whole weights, and may call the model by itself, as often as it likes; then as before. Collective."""
        self.unsharded = True
        for part, _ in self.parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            # shards again; and forgets the passes made here: by their order, which may differ from rank to rank, torch would
            # gather weights in the next backward pass, and ranks would wait for each other for ever
            self.root.reset_iter_state()
            for part, reshard in self.parts:
                part.set_reshard_after_forward(reshard, recurse=False)
            self.unsharded = False

    def _after_forward(self, *_: Any) -> None:
        """Let weights go after a pass that no backward follows: what is kept would be old after the next update."""
        if self.unsharded or torch.is_grad_enabled():
            return
        for part, _reshards in self.parts:
            part.reshard()
        if not self.trained:  # torch notes every pass until a backward one
            self.root.reset_iter_state()

    def _watch_use(self) -> None:
        """Take note of which parameters get a gradient, by hooks on them as they are while they are whole."""
        self.root.set_reduce_scatter_unused_params(True)
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        with self.unshard():
            unsharded_parameters = dict(self.model.named_parameters())
            for index, name in enumerate(names):
                unsharded_parameters[name].register_post_accumulate_grad_hook(partial(self._note_use, index))  # type: ignore[no-untyped-call]

    def _note_use(self, index: int, _: Tensor) -> None:
        if self.counted:
            self.used.add(index)


@dataclass
class Fsdp:
    """Models of which every rank holds a part: what a step shares with the others (`strategy.Ranks`)."""

    world: World
    parallel: Strategy
    nominal: float | None
    models: dict[str, FullySharded]
    model_copies: list[FullySharded] = field(default_factory=list)  # for averages of weights
    local_times: float | None = None  # what a rank has before the last pass is not told
    called: dict[str, Called] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = Sums(self.world)
        self.begin_sum, self.started = self.sums.begin, self.sums.started

    def start_pass(self, *, counted: bool, last: bool) -> bool:
        """Every rank makes every pass: weights are gathered in each."""
        for model in self.models.values():
            model.start_pass(last=last, counted=counted)
        for called in self.called.values():
            called.void = not counted
        return True

    def summed(self, total: Tensor, counted: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:  # noqa: ARG002
        """Loss and count of all ranks; the shards have their gradients. Where they are kept on the CPU, so is what decides on them."""
        for model in self.models.values():
            model.copy_gradients_to_shards()
        total_loss, number = self.sums.end(total)
        return (total_loss.cpu(), number.cpu()) if self.parallel.cpu_offload else (total_loss, number)

    def whole_norm(self, norm: Tensor) -> Tensor:
        """The root of the sum of squares over the ranks that hold a model together."""
        group = next(iter(self.models.values())).group
        return norm if group.size() == 1 else add_up(norm.to(torch.float64).square_(), group).sqrt_().to(norm.dtype)

    def through(self, forwards: Mapping[str, Any]) -> dict[str, Called]:
        for name, called in self.called.items():
            called.through = forwards[name]
        return self.called

    def follow_trainable(self) -> None:
        """Nothing: what is trained was settled when the models were sharded (`Trainable` refuses another)."""

    @contextmanager
    def whole(self, models: Iterable[nn.Module]) -> Iterator[None]:
        wanted = set(models)
        with ExitStack() as last_first:
            for sharded_model in [*self.models.values(), *self.model_copies]:
                if sharded_model.model in wanted:
                    last_first.enter_context(sharded_model.unshard())
            yield


def shard_model(model: nn.Module, world: World, parallel: Strategy) -> FullySharded:
    """Shard a model in place: each of its blocks (`blocks_of`) is gathered by itself, all else together. Collective.

    Names stay. Every rank must come with equal weights and buffers; buffers stay whole. Afterwards a copy cannot be made of
    it, and its class is another: what looks at modules or parameters does so before. Raises `ConfigError` for what cannot be
    sharded.
    """
    refuse_unshardable(model)
    mesh, group = _mesh(world, parallel)
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if parallel.cpu_offload else OffloadPolicy()
    parts: list[tuple[FSDPModule, bool]] = []
    for block in gathered(model, parallel):
        reshard = (
            parallel.reshard_after_forward and block is not model
        )  # the model's own are needed first in the backward pass
        settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard, "offload_policy": offload}
        settings["mp_policy"] = _policy(parallel, is_model=block is model, exact=is_batch_norm(block))
        parts.append((fully_shard(block, **settings), reshard))
        if block is not model:
            # torch.compile begins anew inside of each block, and passes over torch's own code: that of an nn.Sequential, say
            vars(block).setdefault("forward", partial(_forward, block))
    fully_shard.state(model)._lazy_init()  # type: ignore[attr-defined]  # else the first block called by itself would be the root
    shards: dict[nn.Parameter, Shard] = {}
    for name, parameter in model.named_parameters():
        local, rows = held_of(parameter)
        assert rows is not None  # it has just been sharded
        shards[parameter] = Shard(local, rows, called=name, requires_grad=parameter.requires_grad)
    return FullySharded(model, shards, world, parallel, group, parts)


def _forward(block: nn.Module, /, *inputs: Any, **named: Any) -> Any:
    return type(block).forward(block, *inputs, **named)


def _policy(parallel: Strategy, *, is_model: bool, exact: bool) -> MixedPrecisionPolicy:
    """In which format a part is gathered and computes; a model's outputs are float32, and so are the gradients that travel."""
    if parallel.gather_dtype == "fp32":
        return MixedPrecisionPolicy()
    if exact:  # running statistics stay float32, and torch's kernels want weights of their type
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32 if is_model else None
    )


def _mesh(world: World, parallel: Strategy) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """Torch's picture of the ranks, and the group that holds a model together."""
    kind = world.device.type
    if parallel.replicas == 1:
        everyone = dist.group.WORLD
        assert everyone is not None  # `world.joined` made it
        return DeviceMesh.from_group(everyone, kind, mesh_dim_names=("shard",)), everyone
    groups = replicated(parallel.replicas)
    ranks = torch.arange(world.size).view(parallel.replicas, -1)
    return DeviceMesh.from_group([*groups], kind, mesh=ranks, mesh_dim_names=("replicate", "shard")), groups[1]
