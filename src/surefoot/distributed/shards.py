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
        rows = self.shape[0]
        ranks = self.group.size()
        most = -(-rows // ranks)
        starts = [min(rank * most, rows) for rank in range(ranks)]
        return [*starts, rows]

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
        shard.rows = rows
        shard.called = called
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
    if rows is None or value.ndim == 0:
        return None
    return replace(rows, shape=(rows.shape[0], *value.shape[1:]))


def name_of(parameter: Tensor, names: Mapping[Tensor, str]) -> str:
    """Return the model's name for an optimizer's parameter. `names` maps the model's own parameters
    to their names.
    """
    return parameter.called if isinstance(parameter, Shard) else names[parameter]


def holders(parameters: Iterable[Tensor]) -> dist.ProcessGroup | None:
    """Return the process group that shards the parameters of one optimizer. Returns None if the
    parameters are not sharded.
    """
    for parameter in parameters:
        if isinstance(parameter, Shard):
            return parameter.rows.group
    return None


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
    copies = []
    for tensor in tensors:
        is_aligned = tensor.is_cpu or tensor.data_ptr() % 32 == 0
        copies.append(tensor if is_aligned else tensor.clone())
    return copies


@cache
def assign_owners(costs: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the rank that works on each tensor. Costly ones are assigned first, each to the rank
    with the least work.

    >>> assign_owners((512, 8, 16, 16), 2)
    (0, 1, 1, 1)
    """
    work = [0] * ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owner = work.index(min(work))
        owners[index] = owner
        work[owner] += costs[index]
    return tuple(owners)


def gather_to_owners(
    tensors: Sequence[Tensor], rows: Sequence[Rows], owners: Sequence[int]
) -> dict[int, Tensor]:
    """Return the whole tensors that this rank owns, by index. `tensors` are this rank's rows of
    all, of one dtype. Collective.
    """
    group = rows[0].group
    own_indices = [index for index, owner in enumerate(owners) if owner == group.rank()]
    sent: list[list[Tensor]] = [[] for _ in range(group.size())]
    for tensor, owner in zip(tensors, owners, strict=True):
        sent[owner].append(tensor)
    shapes: list[list[tuple[int, ...]]] = [[] for _ in range(group.size())]
    for index in own_indices:
        for peer, height in enumerate(rows[index].heights):
            shapes[peer].append((height, *rows[index].shape[1:]))
    received = exchange(sent, shapes, empty=tensors[0].new_empty(0), group=group)
    parts = zip(*received, strict=True)  # of each tensor, by rank
    return {index: torch.cat(of_index) for index, of_index in zip(own_indices, parts, strict=True)}


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
    outgoing = []
    sent_lengths = []
    for tensors in sent:
        outgoing += [tensor.reshape(-1) for tensor in tensors]
        sent_lengths.append(sum(tensor.numel() for tensor in tensors))
    lengths = [sum(map(prod, shapes_of_rank)) for shapes_of_rank in shapes]
    inbox = empty.new_empty(sum(lengths))
    dist.all_to_all_single(inbox, torch.cat([empty, *outgoing]), lengths, sent_lengths, group)
    received = []
    for flat, shapes_of_rank in zip(torch.split(inbox, lengths), shapes, strict=True):
        parts = torch.split(flat, list(map(prod, shapes_of_rank)))
        views = [part.view(shape) for part, shape in zip(parts, shapes_of_rank, strict=True)]
        received.append(views)
    return received


def local_part(tensor: Tensor) -> tuple[Tensor, Rows | None]:
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
    states = []
    for module in model.modules():
        gets = type(module).get_extra_state is not nn.Module.get_extra_state
        sets = type(module).set_extra_state is not nn.Module.set_extra_state
        if gets and sets:
            states.append((module, copy.deepcopy(module.get_extra_state())))
    return states


def plain_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a tensor by name. A wrapper subclass, such as a quantized weight, gives its inner
    tensors as NAME.ATTRIBUTE.
    """
    wrapper: Any = tensor
    if local_part(tensor)[1] is not None or not is_traceable_wrapper_subclass(wrapper):
        return {name: tensor}
    attributes, _ = wrapper.__tensor_flatten__()
    tensors: dict[str, Tensor] = {}
    for attribute in attributes:
        tensors |= plain_tensors(f"{name}.{attribute}", getattr(wrapper, attribute))
    return tensors


def class_name(model: nn.Module) -> str:
    """Return the name of a model's class before sharding. For a sharded model, torch creates a
    combined class.

    >>> class_name(nn.Linear(1, 1))
    'Linear'
    """
    model_class = type(model)
    bases = model_class.__bases__
    if bases[0].__name__ == "FSDPModule":
        return bases[-1].__name__
    return model_class.__name__


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
    if not shape:
        return ()
    rows = -(-shape[0] // shards)
    return (rows, *shape[1:])
