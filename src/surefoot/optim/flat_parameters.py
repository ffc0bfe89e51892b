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

# elements of one group: above, copying gradients costs more than the kernel calls
_MAX_NUMBERS = 1 << 20
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
        return (
            gradients
            if [parameter.data_ptr() for parameter in self.parameters] == self.addresses
            else None
        )

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
        if len({read_on_cpu(state["step"]) if state else None for state in states}) > 1:
            return False  # one counter cannot serve parameters with different step counts
        means, squares = parts(self.means, self.parameters), parts(self.squares, self.parameters)
        for parameter, state, counter, mean, square in zip(
            self.parameters, states, self.counters, means, squares, strict=True
        ):
            for piece, key in ((counter, "step"), (mean, "exp_avg"), (square, "exp_avg_sq")):
                piece.copy_(state[key] if state else torch.zeros(()))
            optimizer.state[parameter] = {"step": counter, "exp_avg": mean, "exp_avg_sq": square}
        return True


class FlatAdamW:
    """A skip method for flat groups; `fallback` updates the groups with a missing gradient."""

    description = "inside the fused AdamW kernel"

    def __init__(self, optimizer: Optimizer, fallback: StraightToKernel) -> None:
        self.optimizer, self.fallback = optimizer, fallback
        with torch.no_grad():
            self.joined, self.steps, self.groups = lay_out(
                [group["params"] for group in optimizer.param_groups]
            )
        self.pieces = [piece for flat in self.groups for piece in flat.pieces]
        self.parameters = [parameter for flat in self.groups for parameter in flat.parameters]
        self.addresses = [address for flat in self.groups for address in flat.addresses]
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
            if not group.get(APART) and not flat.is_of(optimizer) and not flat.take_over(optimizer):
                group[APART] = True
                for parameter, piece in zip(flat.parameters, flat.pieces, strict=True):
                    parameter.grad = piece  # `piece` holds the clipped gradient
        together = not self._any_apart()
        if together and read_on_cpu(found_inf) != 0:
            return
        moved_on = self.one if together else torch.rsub(found_inf, 1.0)
        if together:
            self.steps.add_(moved_on)
        for index, (group, flat) in enumerate(
            zip(optimizer.param_groups, self.groups, strict=True)
        ):
            if group.get(APART):
                with torch.no_grad():
                    self.fallback.apply_to(optimizer, index, found_inf, moved_on)
                continue
            if not together:
                flat.steps.add_(moved_on)
            state = [flat.means], [flat.squares], flat.counters[:1]
            adamw_kernel(group, [flat.weights], [flat.gradients], *state, found_inf=found_inf)

    def _any_apart(self) -> bool:
        return True in [group.get(APART) for group in self.optimizer.param_groups]


def worth_it(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether a group should be flattened: small, plain, contiguous, unsharded float32
    parameters on the CPU.

    >>> worth_it([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))])
    True
    """
    plain = all(
        p.is_cpu
        and p.dtype == torch.float32
        and p.is_contiguous()
        and not p.untyped_storage().is_shared()
        for p in parameters
    )
    unsharded = all(type(p) is nn.Parameter and rows_of(p) is None for p in parameters)
    return plain and unsharded and sum(p.numel() for p in parameters) <= _MAX_NUMBERS


def none_shared(tensors: Iterable[Tensor]) -> bool:
    """Return whether no two tensors overlap in memory; flattening would separate overlapping
    tensors.

    >>> weight = torch.zeros(4, 4)
    >>> none_shared([weight[:2], weight[2:]]), none_shared([weight, weight.t()])
    (True, False)
    """
    on_cpu = {
        id(each): each
        for each in tensors
        if each.layout == torch.strided and each.is_cpu and each.numel()
    }
    spans = sorted((each.data_ptr(), each.data_ptr() + _extent(each)) for each in on_cpu.values())
    return all(end <= start for (_, end), (start, _) in pairwise(spans))


def _extent(tensor: Tensor) -> int:
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size()


def lay_out(groups: Sequence[list[nn.Parameter]]) -> tuple[Tensor, Tensor, list[FlatGroup]]:
    """Move each group's parameters into one tensor as views; return all gradients, all step
    counters and the groups.
    """
    sizes = [sum(parameter.numel() for parameter in parameters) for parameters in groups]
    counted = [len(parameters) for parameters in groups]
    gradients, steps = (
        torch.zeros(sum(numbers), dtype=torch.float32) for numbers in (sizes, counted)
    )
    of_each = zip(groups, torch.split(gradients, sizes), torch.split(steps, counted), strict=True)
    flat = []
    for parameters, own_gradients, own_steps in of_each:
        weights, means, squares = (torch.zeros_like(own_gradients) for _ in range(3))
        for parameter, piece in zip(parameters, parts(weights, parameters), strict=True):
            piece.copy_(parameter)
            parameter.data = piece
        flat.append(FlatGroup(parameters, weights, own_gradients, means, squares, own_steps))
    return gradients, steps, flat


def parts(tensor: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return a view per parameter of a flat tensor; sizes divisible by 16 come first, for the
    alignment of torch's allocator.
    """
    order = sorted(
        range(len(parameters)), key=lambda index: parameters[index].numel() % _ALIGNED > 0
    )
    pieces = dict(
        zip(order, torch.split(tensor, [parameters[index].numel() for index in order]), strict=True)
    )
    return [pieces[index].view(parameter.shape) for index, parameter in enumerate(parameters)]
