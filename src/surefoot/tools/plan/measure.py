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
    weights: list[Tensor] = []
    for model in state.models.values():
        weights += model.parameters()
    averages: list[Tensor] = []
    for average in state.ema_models.values():
        averages += average.model.parameters()
        averages += average.precise.values()
    weight_bytes = tensor_bytes(weights)
    gradient_bytes = tensor_bytes(state.parameters)
    average_bytes = tensor_bytes(averages)
    texts = [f"weights {in_words(weight_bytes)}", f"gradients {in_words(gradient_bytes)}"]
    if average_bytes:
        texts.append(f"averages {in_words(average_bytes)}")
    of_optimizers = [state_bytes(trained.optimizer) for trained in state.optimizers.values()]
    optimizer_bytes = sum(size for size in of_optimizers if size is not None)
    if None in of_optimizers:
        texts.append("optimizer: unknown before its first step")
    else:
        texts.append(f"optimizer {in_words(optimizer_bytes)}")
    total = (
        weight_bytes + gradient_bytes + average_bytes + optimizer_bytes + measured.activation_bytes
    )
    lines = [
        ", ".join(texts),
        f"activations of one micro-batch {in_words(measured.activation_bytes)} (measured);"
        f" total {in_words(total)}",
    ]
    if parts.computed_again is not None:
        lines.append(f"activation checkpointing: {parts.computed_again}")
    step_s = measured.pass_s * -(-parts.pipeline.sizes.pieces // parts.world.ranks)
    times = parts.plan.times
    steps = f"{times.stop_step:,} steps"
    if times.stop_step < parts.length.steps:
        steps += " until stop_after"
    lines += [
        f"{measured_time(measured.pass_s)} for a micro-batch's forward and backward pass (measured), "
        f"{measured_time(step_s)} per step without its update",
        f"about {duration(step_s * times.stop_step)} for {steps}, without updates and evaluation",
    ]
    if times.limit_s is not None and step_s * times.stop_step > times.limit_s:
        last_step = int(times.limit_s / step_s)
        lines.append(
            f"time_limit ends the session after {duration(times.limit_s)}, before step {last_step:,}"
        )
    return lines


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
    lines = []
    often = evaluator.names(at_end=False)
    end = evaluator.names(at_end=True)
    if often:
        steps = parts.plan.times.stop_step
        counted_steps = min(steps, _LOOKED_AT)  # approximate in a run of millions of steps
        due = sum(map(parts.plan.times.evaluate_due, range(1, counted_steps + 1)))
        times = round(due * steps / counted_steps)
        one_s = sum(took_s[name] for name in often)
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
