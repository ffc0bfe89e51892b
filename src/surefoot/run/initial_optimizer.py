"""The state of optimizers at the start of a run that begins from another one: its moments and step
counts, by the names of parameters.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.init_weights import read_initial_checkpoint
from surefoot.checkpoint.nested_state import join_state
from surefoot.checkpoint.optimizer_state import OWN, load_optimizer
from surefoot.distributed.shards import name_of, rows_of
from surefoot.distributed.world import World
from surefoot.optim.build import RunOptimizer
from surefoot.optim.optimizers import AVERAGING
from surefoot.train.loop import State
from surefoot.train.model_weights import file_name
from surefoot.train.state_dict import parameter_names


def take_optimizer_states(state: State, path: Path, *, world: World, now: Any) -> str:
    """Load what fits of the optimizers of a run or a checkpoint, and return a line for each. `now`
    is the identity of the optimizers of this run. Raises `CheckpointError` for a path that is
    neither a run nor a checkpoint. Collective.
    """
    checkpoint, _ = read_initial_checkpoint(path, world)
    before = checkpoint.saved.identity.get("optimizer") or {}
    lines = []
    for name, trained in state.optimizers.items():
        called = "optimizer" if len(state.optimizers) == 1 else f"optimizer {name}"
        kind = _kind(now, name)
        kind_before = _kind(before, name)
        if file_name("optimizer", name) not in checkpoint.files or kind != kind_before:
            lines.append(
                f"  {called}: begins anew, as {kind} here and {kind_before or 'none'} there"
            )
        elif kind in AVERAGING:
            lines.append(f"  {called}: begins anew, because {kind} averages its own steps")
        else:
            lines.append(f"  {called}: {kind}, {_take(state, name, trained, checkpoint)}")
    return "\n".join(lines)


def _kind(identity: Mapping[str, Any], name: str) -> str | None:
    """Return the kind of the optimizer of a model. The identity of a sole optimizer is its own."""
    own = identity.get(name)
    described = own if isinstance(own, Mapping) else identity
    kind = described.get("name")
    return kind if isinstance(kind, str) else None


def _take(state: State, name: str, trained: RunOptimizer, checkpoint: Checkpoint) -> str:
    """Load the state of the parameters that both runs train in the same shape. Returns what was
    taken.
    """
    names = parameter_names(state.models[name])
    fitting = []
    left_out = []
    weights = checkpoint.files[file_name("model", name)]
    for parameter in trained.parameters:
        called = name_of(parameter, names)
        if called in weights and tuple(weights[called].shape) == _whole_shape(parameter):
            fitting.append(called)
        else:
            left_out.append(called)
    loose: dict[str, Tensor] = {}
    for key, tensor in checkpoint.tensors("state").items():
        if key.startswith("optimizer/"):
            loose[key.removeprefix("optimizer/")] = tensor
    nested = join_state(checkpoint.saved.optimizer[name], loose)
    tensors = checkpoint.files[file_name("optimizer", name)]
    taken = {key for key in [*tensors, *nested] if key.rpartition("/")[0] in fitting}
    load_optimizer(
        trained.optimizer,
        {key: tensor for key, tensor in tensors.items() if key in taken},
        {key: value for key, value in nested.items() if key in taken or key == OWN},
        names,
    )
    with_state = {key.rpartition("/")[0] for key in taken}
    left_out += [called for called in fitting if called not in with_state]
    text = f"state of {len(with_state)} parameters after {checkpoint.step} steps"
    if left_out:
        text += f"; without: {', '.join(left_out[:3])}"
        if len(left_out) > 3:
            text += f", and {len(left_out) - 3} more"
    return text


def _whole_shape(parameter: Tensor) -> tuple[int, ...]:
    rows = rows_of(parameter)
    return tuple(parameter.shape if rows is None else rows.shape)
