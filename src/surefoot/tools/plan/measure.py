"""The measured time and memory of one micro-batch's forward and backward pass. The gradients are
discarded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.errors import DataError, DivergedError, first_line
from surefoot.memory import in_words, peak, tensor_bytes
from surefoot.optim.kinds.kind import state_bytes
from surefoot.run.components import RunComponents
from surefoot.tracking.format import duration, measured_time
from surefoot.train.timed_pass import timed_pass

_LOOKED_AT = 100_000  # steps in which evaluations are counted
_MEASURED_S = 0.03  # after this time no further pass begins


@dataclass(frozen=True)
class Measurement:
    """One micro-batch's targets, its bytes stored for the backward pass, and the least seconds of
    both passes.
    """

    targets: int
    activation_bytes: int
    pass_s: float


def measure(parts: RunComponents) -> Measurement:
    """Run the first micro-batch forward and backward a few times. With activation checkpointing,
    the memory is the peak.
    """
    micro_batch = parts.pipeline.again(0)[0]
    saved_bytes: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in parts.state.parameters}

    def packed(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in weights:
            saved_bytes[pointer] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        timed_pass(parts.task, parts.state, micro_batch)
    activation_bytes = sum(saved_bytes.values())
    if parts.computed_again is not None and not parts.compiled:
        with peak(parts.device) as peak_memory:
            timed_pass(parts.task, parts.state, micro_batch)
        activation_bytes = peak_memory.memory_bytes
    times: list[float] = []
    while len(times) < 2 or (len(times) < 10 and sum(times) < _MEASURED_S):
        took_s, targets = timed_pass(parts.task, parts.state, micro_batch)
        times.append(took_s)
    return Measurement(targets, activation_bytes, min(times))  # other programs only add time


def memory_and_time(parts: RunComponents, measured: Measurement) -> list[str]:
    """List the bytes of weights, gradients, optimizer state, weight averages and activations, and
    the seconds of a step and of the run.
    """
    state = parts.state
    optimizer_bytes = [state_bytes(trained.optimizer) for trained in state.optimizers.values()]
    sizes = {
        "weights": tensor_bytes(
            parameter for model in state.models.values() for parameter in model.parameters()
        ),
        "gradients": tensor_bytes(state.parameters),
        "averages": tensor_bytes(
            tensor
            for average in state.ema_models.values()
            for tensor in (*average.model.parameters(), *average.precise.values())
        ),
        "optimizer": sum(size for size in optimizer_bytes if size is not None),
    }
    known = [name for name in sizes if name != "optimizer" or None not in optimizer_bytes]
    texts = [
        f"{name} {in_words(sizes[name])}" for name in known if sizes[name] or name != "averages"
    ]
    texts += ["optimizer: unknown before its first step"] * (None in optimizer_bytes)
    step_s = measured.pass_s * -(-parts.pipeline.sizes.pieces // parts.world.ranks)
    return [
        ", ".join(texts),
        f"activations of one micro-batch {in_words(measured.activation_bytes)} (measured); total"
        f" {in_words(sum(sizes.values()) + measured.activation_bytes)}",
        *(
            []
            if parts.computed_again is None
            else [f"activation checkpointing: {parts.computed_again}"]
        ),
        f"{measured_time(measured.pass_s)} for a micro-batch's forward and backward pass (measured), "
        f"{measured_time(step_s)} per step without its update",
        f"about {duration(step_s * parts.length.steps)} for {parts.length.steps:,} steps, without updates and evaluation",
    ]


def evaluation_time(parts: RunComponents) -> list[str]:
    """List the estimated seconds of one evaluation, of all evaluations and of the final
    evaluations, from a few batches of each split.
    """
    evaluator = parts.evaluator
    if not evaluator.splits:
        return []
    if parts.compiled:
        return ["evaluation: not measured, because that would compile the model"]
    try:
        took_s = {name: evaluator.seconds(name, limit_s=_MEASURED_S) for name in evaluator.splits}
    except (DataError, DivergedError) as problem:
        return [f"evaluation: not measured: {first_line(problem)}"]
    lines, often, end = [], evaluator.names(at_end=False), evaluator.names(at_end=True)
    if often:
        steps, due = parts.length.steps, parts.plan.times.evaluate_due
        known = min(steps, _LOOKED_AT)  # approximate in a run of millions of steps
        one_s, times = (
            sum(took_s[name] for name in often),
            round(sum(map(due, range(1, known + 1))) * steps / known),
        )
        lines.append(
            f"about {measured_time(one_s)} per evaluation of {', '.join(often)}, {measured_time(one_s * times)} for all {times:,}"
            " (measured with a few batches)"
        )
    if end:
        end_s = sum(took_s[name] for name in end)
        lines.append(
            f"about {measured_time(end_s)} for {', '.join(end)}, evaluated once, at the end"
        )
    return lines
