"""Skipping of bad steps on the device: parameters and optimizer state keep their bits, and the host
does not wait.

Zeroed gradients would not skip a step: momentum, weight decay and step counters would still change
parameters and state.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from surefoot.distributed.shards import rows_of
from surefoot.errors import ConfigError
from surefoot.optim.adamw_fused import straight_to_kernel
from surefoot.optim.in_place import (
    Restoring,
    explain_missing_closure,
    fused_sgd_writes,
    read_on_cpu,
)
from surefoot.optim.kinds.kind import inner_optimizers, kind_of, shapes_of, state_bytes

_VECTOR = 16  # numbers in the widest instruction
_LARGE = 1e38  # the sum of two smaller float32 values does not overflow


class Skip(Protocol):
    """A method that takes or skips an optimizer's step."""

    @property
    def description(self) -> str:
        """A phrase that describes the method and its cost."""

    def apply(self, optimizer: Optimizer, found_inf: Tensor, step: Any = None) -> None:
        """Take a step if `found_inf` (float32, on the device) is 0; if it is 1, change no bit.

        Only `ClosureStep` uses the training step: it evaluates this step's loss again, and may set
        `found_inf` to 1.
        """


def should_skip(
    norm: Tensor,
    loss: Tensor,
    bad_in_a_row: Tensor,
    *,
    max_bad_steps: int,
    loss_scale: Tensor | None = None,
) -> Tensor:
    """Return 1.0 if the update must be skipped, else 0.0, on the device; count it in
    `bad_in_a_row`.

    After more than `max_bad_steps` consecutive bad updates, every later update is skipped and
    counted. With a `loss_scale` above 1, an update with overflowed gradients is skipped but not
    counted, since a smaller scale may prevent the overflow.

    >>> bad_in_a_row = torch.zeros(())
    >>> norms = (1.0, torch.inf, torch.inf, 1.0)
    >>> [
    ...     float(should_skip(torch.tensor(norm), torch.tensor(2.0), bad_in_a_row, max_bad_steps=1))
    ...     for norm in norms
    ... ]
    [0.0, 1.0, 1.0, 1.0]
    """
    # without gradients, the norm is on the CPU
    on_cpu = norm.is_cpu and loss.is_cpu and bad_in_a_row.is_cpu
    # shortcut for most steps: the general arithmetic needs nine torch calls to return 0 and keep
    # the counter at 0
    plain = on_cpu and loss_scale is None and abs(read_on_cpu(norm) + read_on_cpu(loss)) < _LARGE
    if plain and read_on_cpu(bad_in_a_row) == 0.0:
        return torch.zeros_like(bad_in_a_row, dtype=torch.float32)
    probe = norm + loss
    bad = torch.ne(probe - probe, 0)  # inf - inf and NaN - NaN are NaN, which differs from 0
    skipped = (bad | (bad_in_a_row > max_bad_steps)).float()
    if loss_scale is None:
        bad_in_a_row.add_(1).mul_(skipped)
    else:
        is_overflow = bad & torch.isfinite(loss) & (loss_scale > 1)
        bad_in_a_row.add_(torch.logical_not(is_overflow)).mul_(skipped)
    return skipped


def skipping(optimizer: Any, device: torch.device) -> Skip:
    """Return the skip method for an optimizer on a device; raise `ConfigError` if the optimizer
    cannot skip there.

    Fused AdamW, Adam, SGD, Adagrad and the optimizers of `kinds/` skip inside their own update. The
    step of any other optimizer is not called on the CPU, and is undone from copies on other
    devices. The meta device counts as CUDA.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> skipping(torch.optim.AdamW([weight], fused=True), torch.device("cpu")).description
    'inside the fused AdamW kernel'
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "optimizer-of-sparse-gradients",
            problem="SparseAdam takes only sparse gradients, which a run cannot sum, clip or check",
            remedy="use sf.optim.adam(...), and nn.Embedding without sparse=True",
            setting="optimizer",
            value=name,
        )
    groups = optimizer.param_groups
    sgd_groups = groups if isinstance(optimizer, torch.optim.SGD) else []
    for group in sgd_groups:
        if group.get("fused") and not all(map(fused_sgd_writes, group["params"])):
            raise ConfigError(
                "fused-sgd-of-16-bits",
                problem="torch's fused SGD does not update 16-bit weights on the CPU",
                remedy="build it with SGD(..., fused=False), or keep the weights in float32",
                setting="optimizer",
                value=name,
            )
    kind = kind_of(optimizer)
    way = "copies" if kind is None else kind.skip
    if way == "part by part":
        return PartByPart(tuple((part, skipping(part, device)) for part in optimizer.parts))
    if way == "own arithmetic" or (way == "own arithmetic off the CPU" and device.type != "cpu"):
        return InsideKernel("inside its own update, which then writes nothing")
    # SGD does not dampen the gradient of its first applied step
    is_dampened = any(group["momentum"] and group["dampening"] for group in sgd_groups)
    is_known = device.type in ("cpu", "cuda", "meta")  # torch's kernels honor the flag there
    is_fused = is_known and all(group.get("fused") for group in groups)
    if way == "fused kernel" and is_fused and not is_dampened:
        if sgd_groups:
            _fill_momentum_buffers(optimizer)
        is_ragged = any(any(map(_is_ragged, group["params"])) for group in groups)
        straight = None if is_ragged else straight_to_kernel(optimizer)
        return straight or InsideKernel(f"inside the fused {name} kernel", pads=is_ragged)
    if device.type == "cpu":
        return BranchOnCpu(
            f"by not calling {name} (a branch on the CPU, which waits for no device)"
        )
    if any(group.get("capturable") is False for group in groups):
        raise ConfigError(
            "optimizer-not-capturable",
            problem=f"{name} counts its steps on the host",
            reason=f"it does not know whether {device.type} skipped a step",
            remedy=f"build it with {name}(..., capturable=True)",
            setting="optimizer",
            value=name,
        )
    if is_dampened:
        raise ConfigError(
            "sgd-with-dampening",
            problem="SGD with dampening computes its first step differently",
            reason=f"the host does not know whether {device.type} skipped it",
            remedy="leave dampening out: a smaller lr does the same",
            setting="optimizer",
            value=name,
        )
    inner = tuple(inner_optimizers(optimizer).values())
    return Restoring(name, parameter_bytes=parameter_bytes(optimizer), inner=inner)


def _fill_momentum_buffers(sgd: Optimizer) -> None:
    """Give SGD the buffers of its first step.

    Fused SGD (torch 2.13) creates its buffers from uninitialized memory, and a skipped first step
    leaves them uninitialized. Without dampening, buffers of zeros give the same first step.
    """
    for group in sgd.param_groups:
        if group["momentum"]:
            for parameter in group["params"]:
                state = sgd.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)


def update_bytes(skip: Skip, optimizer: Optimizer, *, shards: int = 1) -> int:
    """Return the temporary bytes of an update on the first of `shards` ranks: copies to restore,
    and Muon's matrices.

    >>> from surefoot.optim.kinds.muon import BatchedMuon
    >>> muon = BatchedMuon([torch.nn.Parameter(torch.zeros(8, 32))])
    >>> update_bytes(skipping(muon, torch.device("meta")), muon)
    1792
    """
    if isinstance(skip, PartByPart):
        return max(update_bytes(part_skip, part, shards=shards) for part, part_skip in skip.parts)
    kind = kind_of(optimizer)
    if kind is not None and kind.update_bytes is not None:
        return kind.update_bytes([shape for shape, _ in shapes_of(optimizer, 1)], shards)
    from surefoot.optim.closure_step import ClosureStep  # which few runs need

    if isinstance(skip, ClosureStep):
        return skip.copied_bytes + (state_bytes(optimizer) or 0)
    if not isinstance(skip, Restoring):
        return 0
    return parameter_bytes(optimizer, shards) + (state_bytes(optimizer, shards=shards) or 0)


def parameter_bytes(optimizer: Optimizer, shards: int = 1) -> int:
    """Return the bytes of an optimizer's parameters on the first of `shards` ranks."""
    return sum(math.prod(shape) * item for shape, item in shapes_of(optimizer, shards))


@dataclass(frozen=True)
class InsideKernel:
    """A skip method for optimizers that read `found_inf` on the device without a copy, as with
    `torch.amp.GradScaler`.
    """

    description: str
    pads: bool = False  # for shards on the CPU (`padded_shards`)

    def apply(self, optimizer: Any, found_inf: Tensor, step: Any = None) -> None:  # noqa: ARG002
        """Step with `found_inf` as an attribute, which the kernel reads on the device: 1.0 changes
        nothing.
        """
        optimizer.found_inf = found_inf
        try:
            with padded_shards(optimizer) if self.pads else nullcontext():
                optimizer.step()
        finally:
            del optimizer.found_inf  # a later manual step must not read the flag


@contextmanager
def padded_shards(optimizer: Optimizer) -> Iterator[None]:
    """Pad the shards of parameters, gradients and state on the CPU to whole vectors of the
    processor in this context.

    torch's fused kernels round the last elements of a tensor on the CPU otherwise than the rest.
    With padding, each element is rounded in the same way on any number of ranks.
    """
    # each parameter with its data, gradient and state before the padding
    ragged: list[tuple[Tensor, Tensor, Tensor, dict[str, Any]]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and _is_ragged(parameter):
                state = optimizer.state[parameter]
                ragged.append((parameter, parameter.data, parameter.grad, state))
    for parameter, data, gradient, state in ragged:
        parameter.grad = None  # torch refuses a gradient of another shape than the data
        parameter.data = _padded(data)
        parameter.grad = _padded(gradient)
        padded_state = {}
        for key, value in state.items():
            is_padded = isinstance(value, Tensor) and value.shape == data.shape
            padded_state[key] = _padded(value) if is_padded else value
        optimizer.state[parameter] = padded_state
    try:
        yield
    finally:
        for parameter, data, gradient, state in ragged:
            changed_state = optimizer.state[parameter]
            data.copy_(parameter.data[: data.numel()].view(data.shape))
            parameter.grad = None
            parameter.data = data
            parameter.grad = gradient
            for key, value in changed_state.items():
                if not isinstance(value, Tensor) or value.ndim == 0:
                    state[key] = value
                elif key in state:
                    state[key].copy_(value[: data.numel()].view(data.shape))
                else:
                    state[key] = value[: data.numel()].view(data.shape)
            optimizer.state[parameter] = state


def _is_ragged(parameter: Tensor) -> bool:
    return parameter.is_cpu and parameter.numel() % _VECTOR > 0 and rows_of(parameter) is not None


def _padded(numbers: Tensor) -> Tensor:
    return functional.pad(numbers.flatten(), (0, -numbers.numel() % _VECTOR))


@dataclass(frozen=True)
class PartByPart:
    """A skip method that applies a separate skip method to each part of a composite optimizer."""

    parts: tuple[tuple[Optimizer, Skip], ...]

    @property
    def description(self) -> str:
        return ", and ".join(dict.fromkeys(skip.description for _, skip in self.parts))

    def apply(self, optimizer: Any, found_inf: Tensor, step: Any = None) -> None:  # noqa: ARG002
        optimizer.hand_over()
        for part, skip in self.parts:
            skip.apply(part, found_inf)
        optimizer.release()


@dataclass(frozen=True)
class BranchOnCpu:
    """A skip method that branches on the host, since reading a CPU tensor waits for no device."""

    description: str

    def apply(self, optimizer: Optimizer, found_inf: Tensor, step: Any = None) -> None:  # noqa: ARG002
        step_unless_on_cpu(optimizer, found_inf)


def step_unless_on_cpu(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Call `optimizer.step` unless the flag, a CPU tensor, is set."""
    if read_on_cpu(found_inf) == 0:
        try:
            optimizer.step()
        except Exception as problem:
            explain_missing_closure(optimizer, problem)
            raise
