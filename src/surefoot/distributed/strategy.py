"""What a step shares with the other ranks, whatever the strategy: sums, norms, and who calls the model. `Alone` shares nothing."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from surefoot.errors import ConfigError

if TYPE_CHECKING:
    from surefoot.distributed.world import World


def refuse_ranks(ranks: int, *, pieces: int, batch_size: int | str, is_resumed: bool = False) -> None:
    """Raise `ConfigError` where the micro-batches of a step cannot be divided among the ranks; names numbers that can.

    A run that has `is_resumed` keeps its micro-batches.
    """
    if pieces % ranks == 0:
        return
    able = [number for number in range(1, pieces + 1) if pieces % number == 0]
    below, above = [number for number in able if number < ranks][-1:], [number for number in able if number > ranks][:1]
    near = " or ".join(map(str, below + above))
    raise ConfigError(
        f"{ranks} ranks cannot share the {pieces} micro-batch{'es' * (pieces != 1)} of a step (batch_size {batch_size}) evenly\n"
        f"  nearest that can: {near} rank{'s' * (near != '1')}{'; or another --micro-batch-size' * (not is_resumed)}"
    )


class Ranks(Protocol):
    """What a step shares with the other processes. Nothing here waits for a device but where the CPU is it."""

    nominal: float | None
    """What losses are divided by on the way, the same on every rank; None: this process knows all counts of a step."""

    @property
    def local_times(self) -> float | None:
        """Before the last pass of a step this rank has the gradient of its own passes, times this; None where it has not."""

    def start_pass(self, *, counted: bool, last: bool) -> bool:
        """Before each micro-batch of a step: whether its pass is made. What counts nothing is passed with gradients of 0."""

    def begin_sum(self, total: Tensor | None, counted: Tensor | float) -> None:
        """Before the last backward pass: begin to add the losses of all ranks up."""

    def started(self, part: Tensor, scale: Tensor | None) -> Tensor:
        """What the backward pass starts from: a part of the loss, under the loss scale where there is one."""

    def summed(self, total: Tensor, counted: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:
        """After the last one: loss and count of all ranks; from now on each has the whole gradient, or its part of it."""

    def whole_norm(self, norm: Tensor) -> Tensor:
        """The norm of the whole gradient, from that of what this rank holds."""

    def through(self, forwards: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have the models called through these from now on, such as the same ones compiled; what the loss calls, by name."""

    def follow_trainable(self) -> None:
        """Share the gradients of what is trainable now; every rank must have frozen the same."""

    def whole(self, models: Iterable[nn.Module]) -> AbstractContextManager[object]:
        """In it each rank may call these models, or parts of them, by itself and as often as it likes. Collective at both ends."""


class Alone:
    """One process: it has all micro-batches, and nothing is shared."""

    nominal: float | None = None
    local_times: float | None = 1.0

    def start_pass(self, *, counted: bool, last: bool) -> bool:  # noqa: ARG002
        """What counts nothing is not passed at all."""
        return counted

    def begin_sum(self, total: Tensor | None, counted: Tensor | float) -> None: ...

    def started(self, part: Tensor, scale: Tensor | None) -> Tensor:
        return part if scale is None else part * scale

    def summed(self, total: Tensor, counted: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:
        return total, counted

    def whole_norm(self, norm: Tensor) -> Tensor:
        return norm

    def through(self, forwards: Mapping[str, Any]) -> Mapping[str, Any]:
        return forwards

    def follow_trainable(self) -> None: ...

    def whole(self, models: Iterable[nn.Module]) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()


@dataclass
class Sums:
    """The loss and the count of all ranks: one small tensor that is added up while the last backward pass runs."""

    world: "World"
    buffer: Tensor | None = None
    work: dist.Work | None = None

    def begin(self, total: Tensor | None, counted: Tensor | float) -> None:
        """Begin; the device is not waited for."""
        wide = torch.float32 if self.world.device.type == "mps" else torch.float64
        self.buffer = torch.zeros(2, dtype=wide, device=self.world.device)
        if total is not None:
            self.buffer[0] = total
        self.buffer[1] = counted
        self.work = None if self.world.side is None else dist.all_reduce(self.buffer, async_op=True)

    def started(self, part: Tensor, scale: Tensor | None) -> Tensor:
        """Times the number of ranks: DDP and FSDP take the mean over them, and we want the sum."""
        return part * self.world.size if scale is None else part * (scale * self.world.size)

    def end(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and count of all ranks; on the CPU this waits for the others, on a device the device does."""
        assert self.buffer is not None  # every step has a last pass
        if self.work is not None:
            self.work.wait()
        total, counted = self.buffer.unbind()
        self.buffer = self.work = None
        return total.to(like.dtype), counted


class Called:
    """A model as the loss calls it on one of several ranks: through what watches its gradients, else the model itself."""

    def __init__(self, model: nn.Module, through: Any) -> None:
        self.model, self.through = model, through
        self.void = False  # what is passed counts nothing

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's outputs; where nothing is counted, gradients of 0 go back through them whatever the loss makes of them."""
        outputs = self.through(*inputs, **named)
        if self.void:
            for tensor in pytree.tree_leaves(outputs):  # those of a `Mean` too: `means` says how it comes apart
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
