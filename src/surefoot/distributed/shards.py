"""Sharded tensors: rows along dimension 0, as FSDP2 distributes parameters.

Optimizers work on `Shard`s, plain tensors in the model's memory. Only code that combines elements
needs to know about sharding.
"""

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True)
class Rows:
    """The rows from `start` to `stop` (exclusive) that a rank holds of a tensor of `shape`. Equal
    bounds mean no rows.

    `group` has the ranks that together hold all rows, in row order. `replica` is the index among
    groups with the same rows; only index 0 saves.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    group: dist.ProcessGroup
    replica: int = 0

    @property
    def starts(self) -> list[int]:
        """The first row of each rank of the group, followed by the total number of rows."""
        rows, ranks = self.shape[0], self.group.size()
        return [min(rank * -(-rows // ranks), rows) for rank in range(ranks)] + [rows]

    @property
    def heights(self) -> list[int]:
        """The number of rows of each rank of the group."""
        return [stop - start for start, stop in pairwise(self.starts)]


class Shard(nn.Parameter):
    """A rank's rows of a parameter, as a parameter that shares memory with the model. `called` is
    the parameter's name in the model.
    """

    rows: Rows
    called: str

    def __new__(
        cls, local: Tensor, rows: Rows, *, called: str = "", requires_grad: bool = True
    ) -> Self:
        shard: Any = super().__new__(cls, local.detach(), requires_grad=requires_grad)
        shard.rows, shard.called = rows, called
        return shard  # type: ignore[no-any-return]

    def __init__(
        self, local: Tensor, rows: Rows, *, called: str = "", requires_grad: bool = True
    ) -> None: ...


def rows_of(parameter: Tensor) -> Rows | None:
    """Return this rank's rows of a parameter. Returns None if the parameter is not sharded."""
    return parameter.rows if isinstance(parameter, Shard) else None


def rows_of_state(parameter: Tensor, value: Tensor) -> Rows | None:
    """Return the rows of an optimizer's state tensor, equal to the parameter's rows. Returns None
    for scalars and unsharded tensors.

    All optimizers that support shards (`optim.kinds.kind`) keep state by rows. Other dimensions may
    differ from the parameter's.
    """
    rows = rows_of(parameter)
    return (
        None
        if rows is None or value.ndim == 0
        else replace(rows, shape=(rows.shape[0], *value.shape[1:]))
    )


def name_of(parameter: Tensor, names: Mapping[Tensor, str]) -> str:
    """Return the model's name for an optimizer's parameter. `names` maps the model's own parameters
    to their names.
    """
    return parameter.called if isinstance(parameter, Shard) else names[parameter]


def holders(parameters: Iterable[Tensor]) -> dist.ProcessGroup | None:
    """Return the process group that shards the parameters of one optimizer. Returns None if the
    parameters are not sharded.
    """
    return next(
        (parameter.rows.group for parameter in parameters if isinstance(parameter, Shard)), None
    )


def add_up(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum a tensor over a group in place; without a group, the tensor is unchanged. Collective. The
    host waits only on the CPU.
    """
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def aligned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors. On a GPU, copy those whose address 32 does not divide: kernels would add
    them in another order.
    """
    return [each if each.is_cpu or each.data_ptr() % 32 == 0 else each.clone() for each in tensors]


@cache
def assign_owners(costs: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the rank that works on each tensor. Costly ones are assigned first, each to the rank
    with the least work.

    >>> assign_owners((512, 8, 16, 16), 2)
    (0, 1, 1, 1)
    """
    work, owners = [0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = work.index(min(work))
        work[owners[index]] += costs[index]
    return tuple(owners)


def gather_to_owners(
    tensors: Sequence[Tensor], rows: Sequence[Rows], owners: Sequence[int]
) -> dict[int, Tensor]:
    """Return the whole tensors that this rank owns, by index. `tensors` are this rank's rows of
    all, of one dtype. Collective.
    """
    group = rows[0].group
    rank, ranks = group.rank(), group.size()
    owned = [
        [index for index, owner in enumerate(owners) if owner == peer] for peer in range(ranks)
    ]
    gathered = exchange(
        [[tensors[index] for index in indices] for indices in owned],
        [
            [(rows[index].heights[peer], *rows[index].shape[1:]) for index in owned[rank]]
            for peer in range(ranks)
        ],
        empty=tensors[0].new_empty(0),
        group=group,
    )
    return {
        index: torch.cat([part[nth] for part in gathered]) for nth, index in enumerate(owned[rank])
    }


def exchange(
    sent: list[list[Tensor]],
    shapes: list[list[tuple[int, ...]]],
    *,
    empty: Tensor,
    group: dist.ProcessGroup,
) -> list[list[Tensor]]:
    """Send tensors to each rank of a group, and return those received from each, with these shapes.
    Collective.
    """
    if group.size() == 1:
        return sent
    outgoing = [torch.cat([empty, *(part.reshape(-1) for part in parts)]) for parts in sent]
    sizes = [[prod(shape) for shape in parts] for parts in shapes]
    lengths = [sum(parts) for parts in sizes]
    out = empty.new_empty(sum(lengths))
    dist.all_to_all_single(
        out, torch.cat(outgoing), lengths, [len(part) for part in outgoing], group
    )
    return [
        [
            part.view(shape)
            for part, shape in zip(torch.split(received, parts), part_shapes, strict=True)
        ]
        for received, parts, part_shapes in zip(
            torch.split(out, lengths), sizes, shapes, strict=True
        )
    ]


def held_of(tensor: Tensor) -> tuple[Tensor, Rows | None]:
    """Return this rank's part of a model's tensor, without copying, and the part's rows. The rows
    are None for an unsharded tensor.
    """
    if isinstance(tensor, Shard):
        return tensor, tensor.rows
    if not dist.is_initialized():
        return tensor, None
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor, None
    mesh = tensor.device_mesh  # the replica dimension, if any, comes first
    group = mesh.get_group(mesh.ndim - 1)
    replica = dist.get_rank() // group.size()  # a copy has consecutive ranks
    local: Tensor = DTensor.to_local(tensor.detach())  # type: ignore[arg-type]
    start = Rows(tuple(tensor.shape), 0, 0, group).starts[group.rank()]
    return local, Rows(tuple(tensor.shape), start, start + len(local), group, replica)


def saved_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's `state_dict` with the model's own tensors. An override of `state_dict` that
    takes no arguments gets no arguments.
    """
    with torch.no_grad():
        try:
            inspect.signature(model.state_dict).bind(keep_vars=True)
        except TypeError:
            return model.state_dict()
        return model.state_dict(keep_vars=True)


def extra_states(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Return the modules with `get_extra_state` and `set_extra_state`, each with a copy of its
    extra state.
    """
    own = [
        part
        for part in model.modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    ]
    both = [part for part in own if type(part).set_extra_state is not nn.Module.set_extra_state]
    return [(part, copy.deepcopy(part.get_extra_state())) for part in both]


def plain_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a tensor by name. A wrapper subclass, such as a quantized weight, gives its inner
    tensors as NAME.ATTRIBUTE.
    """
    wrapper: Any = tensor
    if held_of(tensor)[1] is not None or not is_traceable_wrapper_subclass(wrapper):
        return {name: tensor}
    parts = [
        plain_tensors(f"{name}.{part}", getattr(wrapper, part))
        for part in wrapper.__tensor_flatten__()[0]
    ]
    return {inner: each for named in parts for inner, each in named.items()}


def class_name(model: nn.Module) -> str:
    """Return the name of a model's class before sharding. For a sharded model, torch creates a
    combined class.

    >>> class_name(nn.Linear(1, 1))
    'Linear'
    """
    kind = type(model)
    return (
        kind.__bases__[-1].__name__ if kind.__bases__[0].__name__ == "FSDPModule" else kind.__name__
    )


def reset_passes(models: Iterable[nn.Module]) -> None:
    """Shard all weights that a pass has gathered, also one that an exception ended. Unsharded
    models stay as they are.
    """
    for model in models:
        if class_name(model) != type(model).__name__:
            model.reset_iter_state()  # type: ignore[operator]  # of torch's `FSDPModule`


def shard_shape(shape: Sequence[int], shards: int) -> tuple[int, ...]:
    """Return the shape of rank 0's rows if a tensor is split over `shards` ranks.

    >>> shard_shape((10, 3), 4), shard_shape((), 4)
    ((3, 3), ())
    """
    return (-(-shape[0] // shards), *shape[1:]) if shape else ()
