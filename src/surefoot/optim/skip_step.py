"""How a bad step is skipped: parameters and optimizer state stay as they were, and the host does not know.

A zeroed gradient would not skip a step: momentum, decay and the step counter would move on.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.errors import ConfigError
from surefoot.optim.adamw_fused import straight_to_kernel
from surefoot.optim.in_place import Restoring, fused_sgd_writes, read_on_cpu
from surefoot.optim.kinds.kind import kind_of, shapes_of, state_bytes

_LARGE = 1e38  # below it no sum of two numbers of 32 bits overflows


class Skip(Protocol):
    """One way to take an optimizer's step, or not."""

    @property
    def description(self) -> str:
        """A phrase that describes the way and its cost."""

    def apply(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        """Step where `found_inf` (float32, on the device) is 0; where 1, no bit of anything changes."""


def should_skip(
    norm: Tensor, loss: Tensor, bad_in_a_row: Tensor, *, max_bad_steps: int, loss_scale: Tensor | None = None
) -> Tensor:
    """1.0 where this update is not to be applied, else 0.0, on the device; counts it in `bad_in_a_row`, the latch.

    Past `max_bad_steps` bad ones in a row every later one is skipped: the count then only grows. Under a `loss_scale`, an overflow
    that a smaller scale may cure is skipped, but does not count as divergence.

    >>> bad_in_a_row = torch.zeros(())
    >>> norms = (1.0, torch.inf, torch.inf, 1.0)
    >>> [float(should_skip(torch.tensor(norm), torch.tensor(2.0), bad_in_a_row, max_bad_steps=1)) for norm in norms]
    [0.0, 1.0, 1.0, 1.0]
    """
    on_cpu = norm.is_cpu and loss.is_cpu and bad_in_a_row.is_cpu  # the norm of no gradients is, on any device
    # most steps: the general arithmetic would come to 0 and leave the latch at 0, by nine calls of torch
    plain = on_cpu and loss_scale is None and abs(read_on_cpu(norm) + read_on_cpu(loss)) < _LARGE
    if plain and read_on_cpu(bad_in_a_row) == 0.0:
        return torch.zeros((), dtype=torch.float32)
    bad = torch.ne((probe := norm + loss) - probe, 0)  # inf - inf and NaN - NaN are NaN, which equals nothing
    skipped = (bad | (bad_in_a_row > max_bad_steps)).float()
    counted = 1 if loss_scale is None else torch.logical_not(bad & torch.isfinite(loss) & (loss_scale > 1))
    bad_in_a_row.add_(counted).mul_(skipped)
    return skipped


def skipping(optimizer: Any, device: torch.device) -> Skip:
    """The way for this optimizer on this device; an optimizer that cannot skip there is refused by name.

    Fused AdamW, Adam, SGD and Adagrad and those of `kinds/` skip by themselves; others are not called on the CPU, and undone
    elsewhere. The meta device counts as CUDA.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> skipping(torch.optim.AdamW([weight], fused=True), torch.device("cpu")).description
    'inside the fused AdamW kernel'
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates the loss several times within a step; surefoot's step evaluates it once\n"
            "  use another optimizer, such as surefoot.optim.adamw(...)"
        )
    sgd = optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else []
    if not all(fused_sgd_writes(each) for group in sgd if group.get("fused") for each in group["params"]):
        raise ConfigError(
            "torch's fused SGD leaves weights of 16 bits on the CPU as they are\n"
            "  build it with SGD(..., fused=False), or keep the weights in float32"
        )
    kind = kind_of(optimizer)
    way = "copies" if kind is None else kind.skip
    if way == "part by part":
        return PartByPart(tuple((part, skipping(part, device)) for part in optimizer.parts))
    if way == "own arithmetic" or (way == "own arithmetic off the CPU" and device.type != "cpu"):
        return InsideKernel("inside its own arithmetic, which writes nothing then")
    # the first step that a dampened SGD applies differs from all others: its gradient is not dampened
    dampened = any(group["momentum"] and group["dampening"] for group in sgd)
    known_device = device.type in ("cpu", "cuda", "meta")  # where torch's kernels honour the flag
    all_fused = known_device and all(group.get("fused") for group in optimizer.param_groups)
    if way == "fused kernel" and all_fused and not dampened:
        # Left to itself the fused SGD (torch 2.13) makes its buffers from uninitialised memory in its first step, and leaves them
        # so if that is skipped; without dampening its first step amounts to a start from zeros.
        for parameter in (each for group in sgd if group["momentum"] for each in group["params"]):
            if optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        return straight_to_kernel(optimizer) or InsideKernel(f"inside the fused {name} kernel")
    if device.type == "cpu":
        return BranchOnCpu(f"by not calling {name} (a branch on the CPU, which waits for nothing there)")
    if any(group.get("capturable") is False for group in optimizer.param_groups):
        raise ConfigError(
            f"{name} counts its steps on the host, which is not told of a step skipped on {device.type}\n"
            f"  build it with {name}(..., capturable=True)"
        )
    if dampened:
        raise ConfigError(
            f"SGD with dampening takes its first step unlike all others, and whether {device.type} skipped it"
            " the host is not told\n  leave dampening out: a smaller lr does the same"
        )
    return Restoring(name, parameter_bytes=sum(math.prod(shape) * item for shape, item in shapes_of(optimizer, 1)))


def update_bytes(skip: Skip, optimizer: Optimizer, *, shards: int = 1) -> int:
    """Temporary bytes of an update on the first of several ranks: copies to restore, and the matrices that Muon multiplies.

    >>> from surefoot.optim.kinds.muon import BatchedMuon
    >>> muon = BatchedMuon([torch.nn.Parameter(torch.zeros(8, 32))])
    >>> update_bytes(skipping(muon, torch.device("meta")), muon)
    1792
    """
    if isinstance(skip, PartByPart):
        return max(update_bytes(own, part, shards=shards) for part, own in skip.parts)
    kind = kind_of(optimizer)
    if kind is not None and kind.update_bytes is not None:
        return kind.update_bytes([shape for shape, _ in shapes_of(optimizer, 1)], shards)
    if not isinstance(skip, Restoring):
        return 0
    return sum(math.prod(shape) * item for shape, item in shapes_of(optimizer, shards)) + (
        state_bytes(optimizer, shards=shards) or 0
    )


@dataclass(frozen=True)
class InsideKernel:
    """The optimizer reads the flag itself, on the device: no copy, no wait."""

    description: str

    def apply(self, optimizer: Any, found_inf: Tensor) -> None:
        """Hand the flag to the kernel, as `torch.amp.GradScaler` does."""
        optimizer.found_inf = found_inf
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # a later step by hand must not find it


@dataclass(frozen=True)
class PartByPart:
    """Each part of a composite optimizer in its own way."""

    parts: tuple[tuple[Optimizer, Skip], ...]

    @property
    def description(self) -> str:
        return ", and ".join(dict.fromkeys(skip.description for _, skip in self.parts))

    def apply(self, optimizer: Any, found_inf: Tensor) -> None:
        optimizer.hand_over()
        for part, skip in self.parts:
            skip.apply(part, found_inf)
        optimizer.release()


@dataclass(frozen=True)
class BranchOnCpu:
    """A plain branch, on the one device where reading a number waits for nothing."""

    description: str

    def apply(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        step_unless_on_cpu(optimizer, found_inf)


def step_unless_on_cpu(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Take the step unless the flag is set, which must be on the CPU."""
    if read_on_cpu(found_inf) == 0:
        optimizer.step()
