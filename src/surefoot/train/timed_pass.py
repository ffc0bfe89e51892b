"""Passes and steps that are timed, without lasting effects on weights."""

from dataclasses import replace
from time import perf_counter, process_time

import torch

from surefoot.data.loader import MicroBatch
from surefoot.optim.clipping import clear
from surefoot.train.loop import State, Step, Task, forward_backward


def zero_rates(task: Task, state: State) -> Task:
    """Return the task with a learning rate of 0. Rates stay if an optimizer gets a closure, since
    they steer its evaluations.
    """
    if any(trained.takes_closure for trained in state.optimizers.values()):
        return task
    return replace(task, factors=lambda _: 0.0)


def timed_pass(task: Task, state: State, micro_batch: MicroBatch) -> tuple[float, int]:
    """Time one micro-batch forward and backward, without lasting effects; return the seconds and
    the number of targets.
    """
    # on one CPU thread, process time is independent of other processes
    on_one_thread = task.precision.device.type == "cpu" and torch.get_num_threads() == 1
    clock = process_time if on_one_thread else perf_counter
    start_s = clock()
    step = Step(state.step, [micro_batch], task, state)
    float(forward_backward(step))  # waits for the device
    took_s = clock() - start_s
    clear(state.parameters)
    state.buffers.undo()
    return took_s, int(step.target_count)
