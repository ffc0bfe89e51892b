"""AdamW for a small model on one flat tensor per parameter group, so that a group needs one kernel
call.

Parameters and their state become views of flat tensors; objects, shapes and checkpoint entries stay
the same. Gradients are copied after backward. If a gradient is missing, the group is updated
parameter by parameter from this step on, so that decay and momentum do not change the parameter
without a gradient. The same applies if a parameter leaves the flat tensor (`parameter.data = ...`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.distributed.shards import rows_of
from surefoot.optim.adamw_fused import StraightToKernel, adamw_kernel
from surefoot.optim.clipping import present
from surefoot.optim.in_place import read_on_cpu

# of one group: above, copying gradients costs more than the kernel calls
_MAX_ELEMENTS = 1 << 20
_ALIGNED = 16  # elements of 4 bytes: 64 bytes, the alignment of torch's allocator
APART = "updated_apart"  # a key of parameter groups, also in checkpoints


@dataclass
class FlatGroup:
    """A parameter group in flat tensors; `steps` has one counter per parameter, as in torch's
    AdamW.
    """

    parameters: list[nn.Parameter]
    weights: Tensor
    gradients: Tensor
    means: Tensor
    squares: Tensor
    steps: Tensor

    def __post_init__(self) -> None:
        self.addresses = [piece.data_ptr() for piece in parts(self.weights, self.parameters)]
        self.pieces = parts(self.gradients, self.parameters)
        self.counters = list(self.steps.unbind())

    def present_gradients(self) -> list[Tensor] | None:
        """Return the gradients, or None if a gradient is missing or a parameter left the flat
        tensor.
        """
        gradients = present(self.parameters)
        if len(gradients) < len(self.parameters):
            return None
        if [parameter.data_ptr() for parameter in self.parameters] != self.addresses:
            return None
        return gradients

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer's state is in these tensors; a loaded checkpoint replaces
        the state.
        """
        return optimizer.state.get(self.parameters[-1], {}).get("step") is self.counters[-1]

    def take_over(self, optimizer: Optimizer) -> bool:
        """Copy existing state into the flat tensors, with zeros for missing state; return False if
        step counts differ.
        """
        states = [optimizer.state.get(parameter, {}) for parameter in self.parameters]
        step_counts = {read_on_cpu(state["step"]) if state else None for state in states}
        if len(step_counts) > 1:
            return False  # one counter cannot serve parameters with different step counts
        means = parts(self.means, self.parameters)
        squares = parts(self.squares, self.parameters)
        for index, parameter in enumerate(self.parameters):
            flat_state = {
                "step": self.counters[index],
                "exp_avg": means[index],
                "exp_avg_sq": squares[index],
            }
            former_state = states[index]
            for key, piece in flat_state.items():
                if former_state:
                    piece.copy_(former_state[key])
                else:
                    piece.zero_()
            optimizer.state[parameter] = flat_state
        return True

    def update(self, group: dict[str, Any], found_inf: Tensor) -> None:
        """Update the weights in one kernel, after the step counters; not at all where `found_inf`
        is 1.
        """
        adamw_kernel(
            group,
            [self.weights],
            [self.gradients],
            [self.means],
            [self.squares],
            self.counters[:1],
            found_inf=found_inf,
        )


class FlatAdamW:
    """A skip method for flat groups; `fallback` updates the groups with a missing gradient."""

    description = "inside the fused AdamW kernel"

    def __init__(self, optimizer: Optimizer, fallback: StraightToKernel) -> None:
        self.optimizer = optimizer
        self.fallback = fallback
        with torch.no_grad():
            parameters_of_groups = [group["params"] for group in optimizer.param_groups]
            self.joined, self.steps, self.groups = lay_out(parameters_of_groups)
        self.pieces: list[Tensor] = []
        self.parameters: list[nn.Parameter] = []
        self.addresses: list[int] = []
        for flat in self.groups:
            self.pieces += flat.pieces
            self.parameters += flat.parameters
            self.addresses += flat.addresses
        self.one = torch.ones(())  # torch adds two tensors twice as fast as a tensor and a number

    def gradients(self) -> list[Tensor]:
        """Return all gradients in one flat tensor, or group by group if a group is updated
        parameter by parameter.
        """
        gradients = present(self.parameters)
        in_place = [parameter.data_ptr() for parameter in self.parameters] == self.addresses
        if in_place and len(gradients) == len(self.parameters) and not self._any_apart():
            torch._foreach_copy_(self.pieces, gradients)
            return [self.joined]
        by_group = [flat.present_gradients() for flat in self.groups]
        for group, grads in zip(self.optimizer.param_groups, by_group, strict=True):
            if grads is None:
                group[APART] = True
        gradients = []
        for group, flat, grads in zip(
            self.optimizer.param_groups, self.groups, by_group, strict=True
        ):
            if group.get(APART):
                gradients += present(flat.parameters)
            else:
                torch._foreach_copy_(flat.pieces, grads or ())
                gradients.append(flat.gradients)
        return gradients

    def apply(self, optimizer: Optimizer, found_inf: Tensor, step: Any = None) -> None:  # noqa: ARG002
        """Update all groups in one kernel each, or not at all where `found_inf` is 1. Changed
        groups go the usual way.
        """
        for group, flat in zip(optimizer.param_groups, self.groups, strict=True):
            if group.get(APART) or flat.is_of(optimizer):
                continue
            if not flat.take_over(optimizer):
                group[APART] = True
                for parameter, piece in zip(flat.parameters, flat.pieces, strict=True):
                    parameter.grad = piece  # `piece` holds the clipped gradient
        if self._any_apart():
            moved_on = torch.rsub(found_inf, 1.0)
            for index, flat in enumerate(self.groups):
                if optimizer.param_groups[index].get(APART):
                    with torch.no_grad():
                        self.fallback.apply_to(optimizer, index, found_inf, moved_on)
                else:
                    flat.steps.add_(moved_on)
                    flat.update(optimizer.param_groups[index], found_inf)
            return
        if read_on_cpu(found_inf) != 0:
            return
        self.steps.add_(self.one)
        for group, flat in zip(optimizer.param_groups, self.groups, strict=True):
            flat.update(group, found_inf)

    def _any_apart(self) -> bool:
        return True in [group.get(APART) for group in self.optimizer.param_groups]


def worth_it(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether a group should be flattened: small, plain, contiguous, unsharded float32
    parameters on the CPU.

    >>> worth_it([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))])
    True
    """
    elements = 0
    for parameter in parameters:
        if type(parameter) is not nn.Parameter or rows_of(parameter) is not None:
            return False
        if not parameter.is_cpu or parameter.dtype != torch.float32:
            return False
        if not parameter.is_contiguous() or parameter.untyped_storage().is_shared():
            return False
        elements += parameter.numel()
    return elements <= _MAX_ELEMENTS


def none_shared(tensors: Iterable[Tensor]) -> bool:
    """Return whether no two tensors overlap in memory; flattening would separate overlapping
    tensors.

    >>> weight = torch.zeros(4, 4)
    >>> none_shared([weight[:2], weight[2:]]), none_shared([weight, weight.t()])
    (True, False)
    """
    spans: dict[int, tuple[int, int]] = {}  # start and end in memory, once for each tensor
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.is_cpu and tensor.numel():
            start = tensor.data_ptr()
            spans[id(tensor)] = (start, start + _extent(tensor))
    return all(end <= start for (_, end), (start, _) in pairwise(sorted(spans.values())))


def _extent(tensor: Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last one."""
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return (last + 1) * tensor.element_size()


def lay_out(groups: Sequence[list[nn.Parameter]]) -> tuple[Tensor, Tensor, list[FlatGroup]]:
    """Move each group's parameters into one tensor as views; return all gradients, all step
    counters and the groups.
    """
    sizes = [sum(parameter.numel() for parameter in parameters) for parameters in groups]
    counts = [len(parameters) for parameters in groups]
    gradients = torch.zeros(sum(sizes), dtype=torch.float32)
    steps = torch.zeros(sum(counts), dtype=torch.float32)
    gradients_of_groups = torch.split(gradients, sizes)
    steps_of_groups = torch.split(steps, counts)
    flat_groups = []
    for index, parameters in enumerate(groups):
        weights = torch.zeros_like(gradients_of_groups[index])
        for parameter, piece in zip(parameters, parts(weights, parameters), strict=True):
            piece.copy_(parameter)
            parameter.data = piece
        flat = FlatGroup(
            parameters,
            weights,
            gradients=gradients_of_groups[index],
            means=torch.zeros_like(weights),
            squares=torch.zeros_like(weights),
            steps=steps_of_groups[index],
        )
        flat_groups.append(flat)
    return gradients, steps, flat_groups


def parts(tensor: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return a view per parameter of a flat tensor; sizes divisible by 16 come first, for the
    alignment of torch's allocator.
    """
    sizes = [parameter.numel() for parameter in parameters]
    order = sorted(range(len(sizes)), key=lambda index: sizes[index] % _ALIGNED > 0)
    pieces = torch.split(tensor, [sizes[index] for index in order])
    views = dict(zip(order, pieces, strict=True))
    return [views[index].view(parameter.shape) for index, parameter in enumerate(parameters)]
