"""The loop: a whole training run on one page.

`steps` is the run. It calls `forward_backward` and `update`, the two that a loop of your own calls (level 3). Samples, random
numbers and rates are computed from the step's number. Nothing in a step reads a tensor on the host; `duties.log` waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from surefoot.distributed.strategy import Alone, Ranks
from surefoot.errors import ConfigError
from surefoot.mean import Mean, add_each, as_logged, correction
from surefoot.optim.clipping import clear, gradient_norm, refuse_unused
from surefoot.optim.skip_step import should_skip
from surefoot.optim.trainable import Trainable
from surefoot.seeding import fold, seed_generators
from surefoot.tracking.record import Phase, refuse_own
from surefoot.train.batch_norm_buffers import BatchStatistics
from surefoot.train.loss_accumulator import LossSum
from surefoot.train.step_watch import UNWATCHED, Watch

if TYPE_CHECKING:  # what a step is handed
    from surefoot.config.train_settings import TrainSettings
    from surefoot.data.loader import MicroBatch
    from surefoot.optim.build import RunOptimizer
    from surefoot.optim.ema import EmaModel
    from surefoot.schedules.curves import Factors
    from surefoot.train.precision import Precision

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Task:
    """What does not change from step to step: how a batch becomes gradients, and gradients an update."""

    forward: Any  # the model, or {name: model} where there are several; compiled where asked for
    loss: Loss | None
    key: int  # of the stream "train"
    precision: Precision
    factors: Factors  # step -> factor on each group's base rate
    settings: TrainSettings
    momentum: Factors | None = None  # step -> momentum; None: it stays
    ranks: Ranks = field(default_factory=Alone)  # what a step shares with other processes


@dataclass
class State:
    """What changes from step to step, and what a checkpoint holds: `step` updates have been made."""

    models: dict[str, nn.Module]
    optimizers: dict[str, RunOptimizer]
    ema_models: dict[str, EmaModel] = field(default_factory=dict)
    step: int = 0
    buffers: BatchStatistics = field(default_factory=BatchStatistics)
    lr_factor: float = 1.0  # on every rate of the schedule; an evaluation lowers it, where a plateau was asked for
    trainable: Trainable = field(default_factory=Trainable)  # which parameters `optimizers` have

    @property
    def model(self) -> nn.Module:
        """The only model; `ConfigError` if there are several."""
        if len(self.models) > 1:
            names = ", ".join(self.models)
            raise ConfigError(f"state.model of several models, {names}\n  take one by name: state.models['NAME']")
        return next(iter(self.models.values()))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every trained parameter of every model."""
        return [parameter for trained in self.optimizers.values() for parameter in trained.parameters]


@dataclass(slots=True)
class Step:
    """One optimizer update, before (level 3) or after it was made. Tensors are on the device: reading one waits for it."""

    index: int  # from 0; records count steps made
    micro_batches: Sequence[MicroBatch]
    _task: Task = field(repr=False)
    state: State
    loss: Tensor | None = None  # mean over everything counted in the global batch
    target_count: Tensor | float = 0
    lr: float | None = None  # base learning rate, of the first optimizer that was updated
    grad_norm: Tensor | None = None  # of the whole gradient, of all optimizers together, before clipping
    grad_norms: dict[str, Tensor] = field(default_factory=dict)  # of each optimizer's
    clip_fractions: dict[str, Tensor | None] = field(default_factory=dict)  # how much of each was limited, 0 to 1
    skipped: Tensor | None = None  # 1.0 where the update was not applied, else 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # filled where this step was evaluated
    _logged: dict[str, Any] = field(default_factory=dict, repr=False)
    _pending: tuple[Tensor, Tensor | float] | None = field(default=None, repr=False)  # loss, factor of unused gradients
    _watch: Watch = field(default=UNWATCHED, repr=False)

    def log(self, **values: Tensor | float | Mean) -> None:
        """Add values to the records, averaged over the log interval; a tensor waits on the device until then, as it is now."""
        refuse_own(values)
        self._logged |= {name: as_logged(name, value) for name, value in values.items()}


class Duties(Protocol):
    """What a run does between steps. Only these may wait for the device; `done` is the number of steps made."""

    @property
    def stopping(self) -> bool: ...

    def evaluate_due(self, done: int) -> bool: ...
    def log_due(self, done: int) -> bool: ...
    def save_due(self, done: int) -> bool: ...
    def evaluate(self, step: Step) -> None: ...
    def log(self) -> None: ...
    def save(self) -> None: ...


def steps(
    task: Task,
    state: State,
    *,
    feed: Callable[[int], Sequence[MicroBatch]],
    record: Callable[[Step], None],
    clock: Callable[[Phase], None],
    duties: Duties,
    length: int,
    opened: bool = False,
    watch: Callable[[int], Watch] = lambda index: UNWATCHED,  # noqa: ARG005
) -> Iterator[Step]:
    """Train until `length` steps are made; yield each of them, made, or (`opened`) still to be made by the caller.

    The caller's code runs at `yield`. A step is recorded and saved after it, so a checkpoint holds its effects too.
    """
    clear(state.parameters)  # what a step that was never finished may have left
    state.buffers.undo()
    while state.step < length and not duties.stopping:
        clock("data_wait")
        step = Step(state.step, feed(state.step), task, state, _watch=watch(state.step))
        clock("training")
        if opened:
            seed_generators(fold(task.key, step.index))  # what the body draws before its first pass, a resume draws too
            try:
                yield step
            except GeneratorExit:  # `break`: an update that was made counts
                if step.skipped is not None:
                    state.step += 1
                    record(step)
                raise
            finally:
                state.buffers.undo()  # passes that no update followed
            refuse_unused(state.parameters, step=step.index)
        else:
            forward_backward(step)
            update(step)
        state.step += 1
        record(step)

        if duties.evaluate_due(state.step):
            clock("evaluating")
            duties.evaluate(step)
        if not opened:
            clock("user")
            yield step
        if duties.log_due(state.step):
            clock("training")  # the device may still be busy with the steps that are read here
            duties.log()
        if duties.save_due(state.step):
            clock("saving")
            duties.save()


def forward_backward(step: Step, loss: Loss | None = None) -> Tensor:
    """Add the gradient of the global batch's mean loss to the parameters; return that loss, on the device.

    `loss(model, batch)` returns a scalar mean over `micro_batch.count` things, or a counted `Mean`, or either of them with
    (outputs, targets), which only evaluations use, or with {name: Mean} to log. However the batch is cut, the gradient is that
    of its total divided once by its count. Each micro-batch draws its random numbers from (seed, step, its index): a second
    call in a step repeats them.
    """
    task, state, ranks = step._task, step.state, step._task.ranks
    loss = loss or task.loss
    if loss is None:
        raise ConfigError("this run has no loss of its own: forward_backward(step, loss) needs one")
    sums = LossSum(ranks.nominal or sum(micro_batch.count for micro_batch in step.micro_batches) or 1)
    scale, loss = task.precision.loss_scale, step._watch.over(loss, step.micro_batches)
    state.trainable.follow(in_step=True)
    for micro_batch in step.micro_batches:
        seed_generators(fold(task.key, step.index, micro_batch.index))
        counted, last = micro_batch.count > 0, micro_batch is step.micro_batches[-1]
        if not ranks.start_pass(counted=counted, last=last):
            continue
        state.buffers.start_pass()
        with task.precision.autocast():
            result = loss(task.forward, micro_batch.batch)
        part, further = sums.add(result, micro_batch.count)
        del result  # outputs beside the loss need not outlive the backward pass
        add_each(step._logged, further)
        if last:
            ranks.begin_sum(sums.total, sums.plain if sums.counted is None else sums.counted)
        ranks.started(part, None if scale is None else scale.scale).backward()  # type: ignore[no-untyped-call]
        state.buffers.end_pass(counted=counted)

    total = torch.zeros((), device=task.precision.device) if sums.total is None else sums.total
    total, total_count = ranks.summed(total, sums.counted)
    factor = correction(sums.nominal, total_count, like=total)
    mean = total if total_count is None else total * factor
    step._pending = (mean, factor)
    if step.loss is None:
        step.loss, step.target_count = mean, sums.plain if total_count is None else total_count
    return mean


def update(step: Step, *names: str) -> None:
    """Take one step of the named optimizers (default: all), then clear every gradient.

    A gradient or loss that is not finite leaves parameters, optimizer state, averages and buffers as they were, bit for bit;
    that is decided on the device, and so is the latch after `max_bad_steps` of them in a row.
    """
    state, scale = step.state, step._task.precision.loss_scale
    if step._pending is None:
        raise ConfigError("update(step) without a gradient: call forward_backward(step) first")
    (loss, factor), step._pending = step._pending, None
    factor = factor if scale is None else factor / scale.scale
    step._watch.before(names or state.optimizers, factor)
    skipped = reduce(torch.maximum, [_update_one(step, name, loss, factor) for name in names or state.optimizers])
    step._watch.after(names or state.optimizers)
    if scale is not None:  # once all gradients made under it are used
        scale.update(skipped > 0)
    step.grad_norm = reduce(torch.hypot, step.grad_norms.values())
    step.skipped = skipped if step.skipped is None else torch.maximum(step.skipped, skipped)
    state.buffers.finish(skipped)
    clear(state.parameters)


def _update_one(step: Step, name: str, loss: Tensor, factor: Tensor | float) -> Tensor:
    task, trained, scale = step._task, step.state.optimizers[name], step._task.precision.loss_scale
    gradients = trained.gradients()
    step.grad_norms[name] = norm = task.ranks.whole_norm(gradient_norm(gradients, factor=factor))
    limit, factor_of_scale = task.settings.max_bad_steps, None if scale is None else scale.scale
    skipped = should_skip(norm, loss, trained.bad_in_a_row, max_bad_steps=limit, loss_scale=factor_of_scale)
    step.clip_fractions[name] = trained.clipping.apply(gradients, factor=factor, norm=norm, skipped=skipped)
    momentum = None if task.momentum is None else task.momentum(step.index)
    trained.set_rate(task.factors(step.index) * step.state.lr_factor, momentum=momentum)
    step.lr = trained.optimizer.param_groups[0]["lr"] if step.lr is None else step.lr
    trained.skip.apply(trained.optimizer, skipped)
    if name in step.state.ema_models:
        step.state.ema_models[name].update(1.0 - skipped)
    return skipped
