"""The mean weights of several checkpoints (Vaswani et al. 2017, section 6.1,
https://arxiv.org/abs/1706.03762).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.module_state import without_extra_state
from surefoot.checkpoint.store import Store
from surefoot.errors import CheckpointError, Setting


def average_weights(store: Store, count: int) -> Checkpoint:
    """Return the newest checkpoint with the mean weights of the `count` newest checkpoints after
    step 0.

    Models and their moving averages are summed in float64. Parameters that no optimizer trains (a
    momentum encoder), integer tensors, extra state (`get_extra_state`) and all other state come from
    the newest checkpoint. A model that is loaded from the result also takes its buffers from the
    newest one (`of_newest`). Use the result for evaluation, not to resume. Raises `CheckpointError`
    for too few or damaged checkpoints, different models, or different 8-bit codes (quantized
    weights).

    >>> import tempfile, torch
    >>> store = Store(tempfile.mkdtemp())
    >>> for step in (1, 2):
    ...     _ = store.save(Checkpoint(step, {"model": {"weight": torch.full((1,), float(step))}}))
    >>> average_weights(store, 2).files["model"]["weight"]
    tensor([1.5000])
    """
    steps = last_steps(store, count)
    if count < 1 or len(steps) < count:
        raise CheckpointError(
            "too-few-checkpoints-to-average",
            problem=f"cannot average the last {count} checkpoints: {store.directory} has"
            f" {len(steps)} after step 0 ({', '.join(map(str, steps)) or 'none'})",
            remedy=[
                "average fewer, or keep more while training",
                Setting("keep_last", max(count, 1)),
                ("a shorter", Setting("save_every")),
            ],
            count=count,
            available=steps,
            path=store.directory,
        )
    newest = store.at(steps[-1])
    averaged: dict[str, dict[str, Tensor]] = {}
    sums: dict[str, dict[str, Tensor]] = {}
    for name in newest.files:
        if name.partition("-")[0] in ("model", "ema"):
            averaged[name] = newest.tensors(name)
            sums[name] = _in_float64(without_extra_state(averaged[name]))
    for step in steps[:-1]:
        checkpoint = store.at(step, only=averaged)
        for name in averaged:
            _add(sums[name], without_extra_state(checkpoint.tensors(name)), step=step)
    for name, totals in sums.items():
        untrained = _untrained(newest, name)
        for key, total in totals.items():
            if total.is_floating_point() and key not in untrained:
                dtype = averaged[name][key].dtype
                averaged[name][key] = (total / count).to(dtype)
    of_newest = {name: newest.files[name] for name in averaged}
    return replace(newest, files={**newest.files, **averaged}, of_newest=of_newest)


def last_steps(store: Store, count: int) -> list[int]:
    """Return the steps of the newest checkpoints after step 0, at most `count` steps."""
    return [step for step in store.steps() if step > 0][-count:]


def _untrained(checkpoint: Checkpoint, file: str) -> set[str]:
    """Return the parameters of a model that no optimizer trains, by their names in its file."""
    trainable = checkpoint.state.get("trainable", {})
    names: set[str] = {*trainable.get("in_no_optimizer", ())}
    models = [name for name in checkpoint.files if name.partition("-")[0] == "model"]
    if len(models) == 1:
        return names
    model = file.partition("-")[2] or "model"
    prefix = f"{model}."
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def _in_float64(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    converted = {}
    for name, tensor in tensors.items():
        converted[name] = tensor.double() if tensor.is_floating_point() else tensor
    return converted


def _add(sums: dict[str, Tensor], tensors: Mapping[str, Tensor], *, step: int) -> None:
    misfit = _first_misfit(sums, tensors)
    if misfit is not None or len(tensors) != len(sums):
        raise CheckpointError(
            "average-of-different-models",
            problem=f"the checkpoint of step {step} has a different model than the newest:"
            f" {misfit or 'it has more tensors'}",
            step=step,
            tensor=misfit,
        )
    for name, total in sums.items():
        if total.is_floating_point():
            total.add_(tensors[name])
        elif total.dtype in (torch.int8, torch.uint8) and not torch.equal(total, tensors[name]):
            raise CheckpointError(
                "average-of-quantized-weights",
                problem=f"{name} at step {step} has different 8-bit codes than in the newest"
                " checkpoint: quantized weights have no mean",
                reason="averaged scales would fit neither set of codes",
                remedy="use one checkpoint",
                step=step,
                tensor=name,
            )


def _first_misfit(sums: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str | None:
    for name, total in sums.items():
        if name not in tensors or tensors[name].shape != total.shape:
            return name
    return None
