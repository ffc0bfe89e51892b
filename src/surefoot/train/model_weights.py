"""The weights of a run's models and of their averages in a checkpoint."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from surefoot.checkpoint import module_state
from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.reader import interprets
from surefoot.checkpoint.snapshot import Snapshot
from surefoot.distributed.shards import saved_state
from surefoot.distributed.world import device_called
from surefoot.errors import CheckpointError, out_of_range
from surefoot.train.loop import State

PRECISE = "ema_float32"  # the file of the averages of 16-bit weights; "ema" has them in 16 bits


@interprets
def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    name: str = "model",
    device: str = "auto",
    weights: Literal["auto", "averaged", "trained"] = "auto",
    statistics_follow: bool = False,
) -> nn.Module:
    """Load a checkpoint's weights into a model, move it to a device and return it in evaluation
    mode.

    The default "auto" loads the averaged weights if the run has them. `name` is the model's name in
    a run of several models. Warns if the weights are the mean of several checkpoints, of which
    batch norms have no statistics, unless these follow. Raises `CheckpointError` if the weights do
    not fit.
    """
    if weights not in ("auto", "averaged", "trained"):
        raise out_of_range("weights", weights, "one of auto, averaged, trained")
    where = f"step {checkpoint.step}"
    file = file_name("ema", name)
    if weights == "trained" or (weights == "auto" and file not in checkpoint.files):
        file = file_name("model", name)
    if file not in checkpoint.files:
        available = sorted(checkpoint.files)
        raise CheckpointError(
            "checkpoint-without-weights",
            problem=f"{where} has no {file}; available: {', '.join(available)}",
            step=checkpoint.step,
            file=file,
            available=available,
        )
    state = _with_buffers(model_state(checkpoint, file, name), model, checkpoint, file)
    module_state.load_model(model, state, where=where, same_ties=False)()
    if checkpoint.of_newest and not statistics_follow and norms_with_statistics({name: model}):
        warn_of_statistics(
            checkpoint, because="sf.load had only the directory of the run, and no data"
        )
    return model.to(device_called(device)).eval()


def norms_with_statistics(models: Mapping[str, nn.Module]) -> dict[tuple[str, str], _BatchNorm]:
    """Return the batch norms that have statistics, by the names of their model and module.

    >>> list(norms_with_statistics({"model": nn.Sequential(nn.BatchNorm1d(2), nn.LayerNorm(2))}))
    [('model', '0')]
    """
    norms = {}
    for name, model in models.items():
        for path, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.running_mean is not None:
                norms[name, path] = module
    return norms


def warn_of_statistics(checkpoint: Checkpoint, *, because: str) -> None:
    """Warn that a mean of checkpoints was loaded with the batch statistics of its newest one."""
    warnings.warn(
        f"batch norms have the statistics of step {checkpoint.step}, not of the mean weights: {because}",
        stacklevel=3,
    )


@contextmanager
def weights_of(state: State, checkpoint: Checkpoint) -> Iterator[None]:
    """Load the weights of another checkpoint of this run in the block; restore the current weights
    at the end.
    """
    for name, average in state.ema_models.items():
        average.refresh(state.models[name])  # a later refresh would average the loaded weights
    models = models_of(state)
    with Snapshot({file_name(kind, name): model for kind, name, model in models}, keep=True):
        checks = []
        where = f"step {checkpoint.step}"
        for kind, name, model in models:
            file = _evaluated_file(state, kind, name, checkpoint)
            saved = model_state(checkpoint, file, name)
            checks.append(module_state.load_model(model, saved, where=where))
        for check in checks:
            check()
        yield


def _evaluated_file(state: State, kind: str, name: str, checkpoint: Checkpoint) -> str:
    """Return the file of the weights that a model or an average takes from a checkpoint, whose run
    may have begun or ended the average since: what is evaluated now takes what was evaluated then.
    """
    had_average = file_name("ema", name) in checkpoint.files
    if kind == "ema" and not had_average:
        return file_name("model", name)
    if kind == "model" and had_average and name not in state.ema_models:
        return file_name("ema", name)
    return file_name(kind, name)


def refuse_lossy(state: State) -> None:
    """Raise `CheckpointError` if a checkpoint could not restore a trained parameter or its
    average.
    """
    for kind, name, model in models_of(state):
        module_state.refuse_lossy(
            model, trained=_trained(state.models[name]), name=file_name(kind, name)
        )


def load_models(state: State, checkpoint: Checkpoint, *, where: str) -> list[Callable[[], None]]:
    """Load the models and their averages; return functions that check later that saving would give
    the same tensors. An average that the checkpoint does not have is left as it is.
    """
    checks = []
    for kind, name, model in models_of(state):
        if kind == "ema" and file_name(kind, name) not in checkpoint.files:
            continue
        trained = _trained(state.models[name])
        before = dict(model.named_parameters())
        file = file_name(kind, name)
        saved = _with_buffers(model_state(checkpoint, file, name), model, checkpoint, file)
        checks.append(module_state.load_model(model, saved, where=where))
        after = dict(model.named_parameters())
        for parameter_name, parameter in before.items():
            if parameter_name in trained and after.get(parameter_name) is not parameter:
                raise CheckpointError(
                    "parameter-replaced-by-loading",
                    problem=f"{where}: loading replaced the parameter {parameter_name} of"
                    f" {type(model).__name__}",
                    reason="the optimizer would train the old parameter, which the model no longer"
                    " uses",
                    remedy="let its load_state_dict copy values into the existing parameter",
                    parameter=parameter_name,
                )
    return checks


def models_of(state: State) -> list[tuple[str, str, nn.Module]]:
    """Return kind ("model" or "ema"), name and module of every model and every average."""
    models = [("model", name, model) for name, model in state.models.items()]
    averages = [("ema", name, average.model) for name, average in state.ema_models.items()]
    return models + averages


def model_state(checkpoint: Checkpoint, file: str, name: str) -> module_state.ModelState:
    """Return one model's tensors, aliases and extra state from a checkpoint."""
    aliases = checkpoint.saved.aliases.get(name, {})
    extra = checkpoint.saved.extra.get(file, {})
    return module_state.ModelState(checkpoint.files[file], aliases, extra)


def _with_buffers(
    state: module_state.ModelState, model: nn.Module, checkpoint: Checkpoint, file: str
) -> module_state.ModelState:
    # a mean of queues or of batch statistics is neither
    newest = checkpoint.of_newest.get(file)
    if newest is None:
        return state
    buffers = {id(buffer) for buffer in model.buffers()}
    tensors = dict(state.tensors)
    for name, value in saved_state(model).items():
        if id(value) in buffers and name in newest:
            tensors[name] = newest[name]
    return state._replace(tensors=tensors)


def file_name(kind: str, name: str) -> str:
    """Return a model's file name: `kind` for the model "model", otherwise kind and name, such as
    "model-generator".
    """
    return kind if name == "model" else f"{kind}-{name}"


def _trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}
