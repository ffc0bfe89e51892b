"""How a tensor that is spread over ranks lies in the whole: by rows, along dimension 0, as FSDP2 spreads parameters.

An optimizer works on `Shard`s: plain tensors, which share their memory with what the model holds. So nothing between the
gradient and the update needs to know of sharding but what looks at more than one number at a time.
"""

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True)
class Rows:
    """The rows `start` up to `stop` that a rank holds of a tensor of `shape`; both may be equal, and then it holds none.

    `group` are the ranks that hold all of them together, in the order of rows; `replica` tells apart groups that hold the same
    rows (0 where there is one, and on those that save).
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    group: dist.ProcessGroup
    replica: int = 0

    @property
    def starts(self) -> list[int]:
        """Where the rows of each rank of the group begin, and after them where the last ones end."""
        rows, ranks = self.shape[0], self.group.size()
        return [min(rank * -(-rows // ranks), rows) for rank in range(ranks)] + [rows]


class Shard(nn.Parameter):
    """This rank's rows of a parameter, as a parameter of their own that shares their memory; `called` is its name in the model."""

    rows: Rows
    called: str

    def __new__(cls, local: Tensor, rows: Rows, *, called: str = "", requires_grad: bool = True) -> Self:
        shard: Any = super().__new__(cls, local.detach(), requires_grad=requires_grad)
        shard.rows, shard.called = rows, called
        return shard  # type: ignore[no-any-return]

    def __init__(self, local: Tensor, rows: Rows, *, called: str = "", requires_grad: bool = True) -> None: ...


def rows_of(parameter: Tensor) -> Rows | None:
    """How a parameter lies in the whole; None where this rank holds all of it."""
    return parameter.rows if isinstance(parameter, Shard) else None


def rows_of_state(parameter: Tensor, value: Tensor) -> Rows | None:
    """How what an optimizer keeps of a parameter lies in the whole: by the same rows, whatever is in them; numbers are everywhere.

    That holds of every optimizer that may run on shards (`optim.kinds.kind`). A kernel's momentum may be a matrix.
    """
    rows = rows_of(parameter)
    return None if rows is None or value.ndim == 0 else replace(rows, shape=(rows.shape[0], *value.shape[1:]))


def name_of(parameter: Tensor, names: Mapping[Tensor, str]) -> str:
    """What a parameter that an optimizer has is called in its model; `names` are those of the model's own parameters."""
    return parameter.called if isinstance(parameter, Shard) else names[parameter]


def holders(parameters: Iterable[Tensor]) -> dist.ProcessGroup | None:
    """The ranks that hold these parameters together; None where this rank holds all of them.

    Those of one optimizer are either all whole or all spread over the same ranks.
    """
    return next((parameter.rows.group for parameter in parameters if isinstance(parameter, Shard)), None)


def add_up(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of a tensor over a group, in place; itself where there is none. Collective; the host waits only on the CPU."""
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def held_of(tensor: Tensor) -> tuple[Tensor, Rows | None]:
    """What this rank holds of a tensor of a model, sharing its memory, and how it lies in the whole; None where it is all of it."""
    if isinstance(tensor, Shard):
        return tensor, tensor.rows
    if not dist.is_initialized():
        return tensor, None
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor, None
    mesh = tensor.device_mesh  # replicas, where there are several, come first
    group, replica = mesh.get_group(mesh.ndim - 1), mesh.get_local_rank(0) if mesh.ndim > 1 else 0
    local: Tensor = DTensor.to_local(tensor.detach())  # type: ignore[arg-type]
    start = Rows(tuple(tensor.shape), 0, 0, group).starts[group.rank()]
    return local, Rows(tuple(tensor.shape), start, start + len(local), group, replica)


def saved_state(model: nn.Module) -> dict[str, Any]:
    """What a model's own `state_dict` gives, with the tensors as they lie in it; an own one may take no arguments."""
    with torch.no_grad():
        try:
            inspect.signature(model.state_dict).bind(keep_vars=True)
        except TypeError:
            return model.state_dict()
        return model.state_dict(keep_vars=True)


def extra_states(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """The modules that keep state by `get_extra_state`, each with a copy of it, for their `set_extra_state`."""
    own = [part for part in model.modules() if type(part).get_extra_state is not nn.Module.get_extra_state]
    both = [part for part in own if type(part).set_extra_state is not nn.Module.set_extra_state]
    return [(part, copy.deepcopy(part.get_extra_state())) for part in both]


def plain_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor by its name; of one that wraps others, as quantised weights do, those: NAME.ATTRIBUTE."""
    wrapper: Any = tensor
    if held_of(tensor)[1] is not None or not is_traceable_wrapper_subclass(wrapper):
        return {name: tensor}
    parts = [plain_tensors(f"{name}.{part}", getattr(wrapper, part)) for part in wrapper.__tensor_flatten__()[0]]
    return {inner: each for named in parts for inner, each in named.items()}


def class_name(model: nn.Module) -> str:
    """What a model's class was called before it was sharded, for which torch makes a class of it and its own.

    >>> class_name(nn.Linear(1, 1))
    'Linear'
    """
    kind = type(model)
    return kind.__bases__[-1].__name__ if kind.__bases__[0].__name__ == "FSDPModule" else kind.__name__


def shard_shape(shape: Sequence[int], shards: int) -> tuple[int, ...]:
    """The shape of what the first of `shards` ranks holds of a tensor.

    >>> shard_shape((10, 3), 4), shard_shape((), 4)
    ((3, 3), ())
    """
    return (-(-shape[0] // shards), *shape[1:]) if shape else ()
