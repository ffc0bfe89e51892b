"""Models whose parameters are sharded by rows over the ranks, with FSDP2.

Torch's `fully_shard` gathers weights on use and reduce-scatters gradients. This module adds plain
tensors for the optimizer (`shards.Shard`), and whole weights for sampling.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from surefoot.config.parallel import Strategy
from surefoot.distributed.blocks import fsdp_units, is_batch_norm, refuse_unshardable
from surefoot.distributed.exact_fsdp import CopyPasses, UnitSum, sum_exactly
from surefoot.distributed.rendezvous import replicated
from surefoot.distributed.shards import Shard, local_part
from surefoot.distributed.used_parameters import without_gradient
from surefoot.distributed.world import World
from surefoot.errors import ConfigError, Setting


@dataclass
class FullySharded:
    """One sharded model. `shards` maps the parameters of the model to those of the optimizer.

    A model's parameter is a DTensor between passes, and a whole tensor during its block's forward
    and backward pass.
    """

    model: nn.Module
    shards: dict[nn.Parameter, Shard]
    world: World
    parallel: Strategy
    group: dist.ProcessGroup  # the ranks that share one sharded copy
    # each unit, and whether its weights are freed after the forward pass
    parts: list[tuple[FSDPModule, bool]]
    together: bool = True
    gradients_copied: bool = False  # since then, gradients may have been cleared
    unsharded: bool = False
    in_step: bool = False  # between `begin` and `end`: a backward pass may follow a call
    counted: bool = True
    # of the step: indices of parameters with a gradient, in a pass with targets and in any pass,
    # and of units in the order of their calls
    used: set[int] = field(default_factory=set)
    touched: set[int] = field(default_factory=set)
    order: list[int] = field(default_factory=list)
    passes: CopyPasses | None = None  # with exact sums
    sums: list[UnitSum] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trained = [(p, shard) for p, shard in self.shards.items() if shard.requires_grad]
        self.model.register_forward_hook(self._after_forward)
        paths = {id(module): path for path, module in self.model.named_modules()}
        self.unit_paths = [paths[id(part)] for part, _ in self.parts]
        self.indices = {parameter: index for index, (parameter, _) in enumerate(self.trained)}
        self.units: dict[int, int] = {}  # by the id of torch's group of parameters
        for unit, (part, _) in enumerate(self.parts):
            for group in _groups_of(part):
                self.units[id(group)] = unit
        self.watched: set[int] = set()  # units whose use of parameters is noted
        self.root.set_reduce_scatter_unused_params(True)  # else ranks might add unlike gradients

    @property
    def root(self) -> FSDPModule:
        return self.parts[-1][0]

    def sum_exactly(self, passes: CopyPasses) -> None:
        """Add gradients along a tree of micro-batches."""
        self.passes = passes
        self.sums = sum_exactly([part for part, _ in self.parts], self.shards, passes)

    def begin(self) -> None:
        """Start the passes and the sums of a call of `forward_backward`."""
        if self.in_step:  # an exception ended the call before
            self.root.reset_iter_state()
        self.in_step = True
        self.used.clear()
        self.touched.clear()
        self.order.clear()
        for unit in self.sums:
            unit.begin()

    def end_pass(self) -> None:
        """Shard the weights that the last pass gathered, and that no backward pass has freed: the
        next update would leave them outdated.
        """
        if self._calls():
            self.root.reset_iter_state()

    def note_order(self) -> None:
        """Note the units that the forward pass has called."""
        for group in self._calls():
            unit = self.units[id(group)]
            self.order.append(unit)
            if unit not in self.watched:
                self.watched.add(unit)
                self._watch_use(group)

    def start_pass(self, *, last: bool, counted: bool = True) -> None:
        """Set whether the next micro-batch reduces gradients over the ranks. All ranks must run
        every pass.
        """
        self.end_pass()
        if self.passes is not None:
            for unit in self.sums:
                unit.end_pass()
        elif self.gradients_copied:
            # a gradient cleared on a parameter or its shard is cleared on both
            self.gradients_copied = False
            for parameter, shard in self.trained:
                if parameter.grad is None or shard.grad is None:
                    parameter.grad = None
                    shard.grad = None
        together = last or self.parallel.sync == "every"
        self.counted = counted
        if together is not self.together:
            self.together = together
            self.root.set_requires_gradient_sync(together)

    @torch.no_grad()
    def copy_gradients_to_shards(self, step: int) -> None:
        """Give each shard its rows of the gradient after the last pass, in the memory of the
        parameter's own gradient.

        A shard gets None if no rank has its gradient. With `find_unused_parameters`, ranks exchange
        lists of used parameters, and wait for each other; otherwise all ranks use the same ones.
        """
        used = [self.touched]
        if self.parallel.find_unused_parameters:
            used = self.world.gathered(sorted(self.used))
        idle = set(range(len(self.trained))).difference(*used)
        if self.passes is not None:
            unused = {self.trained[index][0] for index in idle}
            for unit in self.sums:
                unit.finish(unused)
            return
        lost = []
        for index, (parameter, shard) in enumerate(self.trained):
            gradient: Any = parameter.grad
            if gradient is None and index in self.touched:
                lost.append(shard.called)  # of passes before the last, in which torch would add it
            elif gradient is not None and index in idle and shard.grad is None:
                parameter.grad = None
            elif gradient is not None:
                shard.grad = gradient.to_local()
        if lost:
            raise without_gradient(lost, step)
        self.gradients_copied = True

    def end(self) -> None:
        """End the passes of a call of `forward_backward`."""
        self.in_step = False
        self.end_pass()

    @contextmanager
    def unshard(self) -> Iterator[None]:
        """Gather the whole weights on every rank in this context. Each rank may call the model
        independently. Collective.
        """
        # by this mark transformers' generate() waits for all ranks after each token
        marked = []
        for module in self.model.modules():
            if getattr(module, "_is_fsdp_managed_module", False):
                module._is_fsdp_managed_module = False  # type: ignore[assignment]
                marked.append(module)
        self.unsharded = True
        for part, _ in self.parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            # reshards, and forgets the passes of this context: torch would prefetch weights in
            # their order in the next backward pass, and ranks with different orders would wait for
            # each other forever
            self.root.reset_iter_state()
            for part, reshard in self.parts:
                part.set_reshard_after_forward(reshard, recurse=False)
            self.unsharded = False
            for module in marked:
                module._is_fsdp_managed_module = True  # type: ignore[assignment]

    def _after_forward(self, *_: Any) -> None:
        # without a backward pass, unsharded weights would be outdated after the next update; a
        # backward pass of the user's own gathers them again
        may_go_back = self.in_step and torch.is_grad_enabled()
        if self.unsharded or may_go_back:
            return
        for part, _reshards in self.parts:
            part.reshard()
        if not self.trained:  # torch records every pass until a backward pass
            if self.in_step:
                self.note_order()
            self.root.reset_iter_state()

    def _calls(self) -> list[Any]:
        """Return torch's list of the called units, which the end of a backward pass clears."""
        return fully_shard.state(self.model)._comm_ctx.post_forward_order  # type: ignore[attr-defined,no-any-return]

    def _watch_use(self, group: Any) -> None:
        # the gathered parameters of a unit stay the same objects; they exist since its first call
        for fsdp_param in group.fsdp_params:
            index = self.indices.get(fsdp_param.sharded_param)
            if index is not None:
                note_use = partial(self._note_use, index)
                fsdp_param.unsharded_param.register_post_accumulate_grad_hook(note_use)

    def _note_use(self, index: int, _: Tensor) -> None:
        self.touched.add(index)
        if self.counted:
            self.used.add(index)


def shard_model(
    model: nn.Module, world: World, parallel: Strategy, *, exact: bool = False
) -> FullySharded:
    """Shard a model in place: each block (`blocks_of`) is a unit, and the remaining weights are
    another unit. Collective.

    Parameter names are kept. Every rank must pass equal weights and buffers; buffers stay
    replicated. Afterwards the model cannot be copied and has another class, so inspect modules and
    parameters first. Raises `ConfigError` if the model cannot be sharded, or if torch is too old.
    With `exact`, torch does not sum over replicas (`Fsdp.sum_exactly` does).
    """
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise ConfigError(
            "fsdp-needs-newer-torch",
            problem="parallel = fsdp needs torch 2.13 or newer",
            reason=f"this is torch {torch.__version__}",
            remedy=Setting("parallel", "ddp"),
            setting="parallel",
            value="fsdp",
        )
    refuse_unshardable(model)
    mesh, group = _mesh(world, parallel, exact=exact)
    offload = OffloadPolicy()
    if parallel.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    parts: list[tuple[FSDPModule, bool]] = []
    for block in fsdp_units(model, parallel):
        is_model = block is model
        # the backward pass needs the model's own weights first
        reshard = parallel.reshard_after_forward and not is_model
        part: Any = fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=_policy(parallel, is_model=is_model, exact=is_batch_norm(block)),
            offload_policy=offload,
        )
        parts.append((part, reshard))
        if not is_model:
            # torch.compile starts a new graph in each block, and skips torch's own forward methods,
            # such as nn.Sequential's
            vars(block).setdefault("forward", partial(_forward, block))
    fully_shard.state(model)._lazy_init()  # type: ignore[attr-defined]  # else the first block called directly would be the root
    shards: dict[nn.Parameter, Shard] = {}
    for name, parameter in model.named_parameters():
        local, rows = local_part(parameter)
        assert rows is not None  # it has just been sharded
        shards[parameter] = Shard(local, rows, called=name, requires_grad=parameter.requires_grad)
    return FullySharded(model, shards, world, parallel, group, parts)


def _groups_of(part: FSDPModule) -> list[Any]:
    return fully_shard.state(part)._fsdp_param_groups  # type: ignore[attr-defined,no-any-return]


def _forward(block: nn.Module, /, *inputs: Any, **named: Any) -> Any:
    return type(block).forward(block, *inputs, **named)


def _policy(parallel: Strategy, *, is_model: bool, exact: bool) -> MixedPrecisionPolicy:
    if parallel.gather_dtype == "fp32":
        return MixedPrecisionPolicy()
    if exact:  # running statistics stay float32, and torch's kernels need weights of the same dtype
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32 if is_model else None,
    )


def _mesh(world: World, parallel: Strategy, *, exact: bool) -> tuple[DeviceMesh, dist.ProcessGroup]:
    device_type = world.device.type
    if parallel.replicas == 1:
        everyone = dist.group.WORLD
        assert everyone is not None  # created by `world.joined`
        return DeviceMesh.from_group(everyone, device_type, mesh_dim_names=("shard",)), everyone
    across, within = replicated(parallel.replicas)
    if exact:
        return DeviceMesh.from_group(within, device_type, mesh_dim_names=("shard",)), within
    ranks = torch.arange(world.size).view(parallel.replicas, -1)
    mesh = DeviceMesh.from_group(
        [across, within], device_type, mesh=ranks, mesh_dim_names=("replicate", "shard")
    )
    return mesh, within
