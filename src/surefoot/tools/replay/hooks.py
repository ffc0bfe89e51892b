"""Hooks that record inputs, outputs and gradients of modules in order during one step; recomputed
blocks are recorded once.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.distributed.strategy import without_ranks
from surefoot.mean import Mean
from surefoot.tools.replay.findings import OfModule
from surefoot.tools.replay.tensor_stats import Tally, bad_rows, floating, tally
from surefoot.train.compile import sole_or_all
from surefoot.train.loop import Loss, Step, forward_backward
from surefoot.train.step_watch import LossWatch


@dataclass(frozen=True)
class Event:
    """An observed tensor. `what` and `name` are as in `First`."""

    what: str
    name: str
    micro_batch: int
    stats: Tally
    kind: str  # the module's class
    rows: list[int] | None  # nonfinite rows, if the tensor has a row for each sample

    @property
    def bad(self) -> bool:
        return self.stats.nonfinite > 0


class ModuleHooks:
    """The trace of a step: events in order, and statistics per module."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.events: list[Event] = []
        self.of_modules: dict[str, OfModule] = {}
        self.losses: dict[int, tuple[float, float]] = {}  # (count, mean) of each micro-batch
        self.position = -1  # index of the current micro-batch in the step
        self.forward = False
        self.last: list[Tensor] = []  # outputs of the previous module

    def first(self) -> Event | None:
        """Return the first nonfinite event. Minus infinity is ignored if the next output is finite,
        as after a softmax mask.
        """
        for index, event in enumerate(self.events):
            if event.bad and not (event.stats.only_minus and self._absorbed(index)):
                return event
        return None

    def reached(self, micro_batch: int) -> str:
        for event in self.events:
            if event.what == "output" and event.micro_batch == micro_batch and event.bad:
                return f"{event.name or 'the model'} ({event.kind})"
        return ""

    def _absorbed(self, index: int) -> bool:
        for event in self.events[index + 1 :]:
            if event.what in ("output", "loss"):
                return not event.bad
        return False

    @contextmanager
    def attach(self) -> Iterator[None]:
        """Record inputs and outputs of all modules inside the block. With several models, names
        begin with the model's name.
        """
        with ExitStack() as hooks:
            models = self.step.state.models
            modules: dict[nn.Module, str] = {}
            for model_name, model in models.items():
                prefix = model_name if len(models) > 1 else ""
                for name, module in model.named_modules(prefix=prefix):
                    modules[module] = name
            for module, name in modules.items():
                before = partial(self._check_inputs, name)
                after = partial(self._record_outputs, name)
                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(after).remove)
            for name, parameter in parameters_of(models).items():
                if parameter.requires_grad:
                    see = partial(self._gradient, "gradient", name)
                    hooks.callback(parameter.register_hook(see).remove)  # type: ignore[no-untyped-call]
            yield

    def wrap_loss(self, loss: Loss) -> Loss:
        """Return a loss function that traces the forward pass and records the loss of each
        micro-batch.
        """

        def traced_loss(model: Any, batch: Any) -> Any:
            later = range(self.position + 1, len(self.step.micro_batches))
            self.position = next(
                position for position in later if self.step.micro_batches[position].batch is batch
            )
            micro_batch = self.step.micro_batches[self.position]
            self.forward = True
            self.last = []
            try:
                result = loss(model, batch)
            finally:
                self.forward = False
            value, count = value_of(result)
            if count is None:
                count = micro_batch.count
            self.losses[micro_batch.index] = count, value
            self._record("loss", "", torch.tensor(value))
            return result

        return traced_loss

    def _check_inputs(self, name: str, module: nn.Module, inputs: Any, named: Any) -> None:
        if not self.forward:
            return
        for tensor in floating((inputs, named)):
            if not any(tensor is known for known in self.last):  # otherwise recorded as an output
                self._record("input", name, tensor, type(module).__name__, only_bad=True)

    def _record_outputs(self, name: str, module: nn.Module, _: Any, outputs: Any) -> None:
        kind = type(module).__name__
        tensors = floating(outputs)
        for tensor in tensors:
            if tensor.requires_grad and not tensor.is_leaf:  # a hook on a parameter would remain
                tensor.register_hook(partial(self._gradient, "gradient of output", name, kind=kind))  # type: ignore[no-untyped-call]
        if not self.forward or not tensors:
            return
        if len(tensors) == len(self.last) and all(
            a is b for a, b in zip(tensors, self.last, strict=True)
        ):
            return  # a container returns the output of its last module
        before = self.of_modules.get(name, OfModule(name, kind, 0, Tally()))
        total = Tally()
        for tensor in tensors:
            total = total + self._record("output", name, tensor, kind)
        self.last = tensors
        if not isinstance(outputs, Mean):  # a loss computed by the model is no activation
            self.of_modules[name] = replace(
                before, calls=before.calls + 1, output=before.output + total
            )

    def _gradient(self, what: str, name: str, gradient: Tensor, *, kind: str = "") -> None:
        self._record(what, name, gradient, kind, only_bad=True)

    def _record(
        self, what: str, name: str, tensor: Tensor, kind: str = "", *, only_bad: bool = False
    ) -> Tally:
        stats = tally(tensor)
        if only_bad and not stats.nonfinite:
            return stats
        micro_batch = self.step.micro_batches[self.position]
        bad = None
        if stats.nonfinite and what != "gradient":
            bad = bad_rows(tensor, len(micro_batch.sample_ids))
        self.events.append(Event(what, name, micro_batch.index, stats, kind, bad))
        return stats


def trace_step(step: Step, loss: Loss) -> ModuleHooks:
    """Compute and keep the gradients of a step, with hooks on the plain models and without an
    update.
    """
    hooks = ModuleHooks(step)
    task = step._task
    watch = step._watch
    step._task = replace(
        task, forward=sole_or_all(step.state.models), ranks=without_ranks(task.ranks)
    )
    step._watch = LossWatch(hooks.wrap_loss)
    try:
        with hooks.attach():
            forward_backward(step, loss)
    finally:
        step._task = task
        step._watch = watch
        # their graph has hooks that refer to this object, a circle that no collection finds
        hooks.last = []
    return hooks


def value_of(result: Any) -> tuple[float, float | None]:
    """Return the mean of a loss, and its target count or None; wait for the device.

    >>> value_of(Mean(6.0, 3)), value_of((torch.tensor(0.5), {}))
    ((2.0, 3.0), (0.5, None))
    """
    if isinstance(result, tuple):
        result = result[0]
    if not isinstance(result, Mean):
        return float(Mean(result, 1).detach().value_or(0.0)), None
    mean = result.detach()
    return float(mean.value_or(0.0)), float(mean.count)


def parameters_of(models: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return parameters by name. With several models, each name begins with the model's name."""
    parameters: dict[str, nn.Parameter] = {}
    for model_name, model in models.items():
        prefix = model_name if len(models) > 1 else ""
        parameters.update(model.named_parameters(prefix=prefix))
    return parameters
