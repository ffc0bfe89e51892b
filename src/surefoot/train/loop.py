"""The training loop of a run.

`steps` calls `forward_backward` and `update`; a loop over `run.steps()` calls both itself. Samples,
random numbers and learning rates are functions of the step's index. No step reads a tensor on the
host; only `periodic` wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from surefoot.distributed.strategy import Alone, Ranks
from surefoot.errors import ConfigError
from surefoot.mean import Mean, Reduction, add_logged, correction
from surefoot.optim.clipping import clear, gradient_norm, refuse_unused
from surefoot.optim.skip_step import should_skip
from surefoot.optim.trainable import Trainable
from surefoot.seeding import fold, seed_generators
from surefoot.tracking.record import Phase, refuse_own
from surefoot.train.batch_norm_buffers import BatchStatistics
from surefoot.train.loss_accumulator import LossSum, add_metrics, count_skipped, leave_out
from surefoot.train.step_watch import UNWATCHED, Watch, in_step

if TYPE_CHECKING:
    from surefoot.config.train_settings import TrainSettings
    from surefoot.data.loader import MicroBatch
    from surefoot.optim.build import RunOptimizer
    from surefoot.optim.ema import EmaModel
    from surefoot.schedules.curves import Factors
    from surefoot.tracking.shown import ShownKind
    from surefoot.train.precision import Precision

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Task:
    """The constant parts of every step: model, loss, precision, settings and schedule."""

    forward: Any  # the model or {name: model}, compiled if the setting says so
    loss: Loss | None
    key: int  # random key of the stream "train"
    precision: Precision
    factors: Factors  # step -> factor on each group's base learning rate
    settings: TrainSettings
    # step -> factors of each optimizer's groups; None: all groups have those of `factors`
    group_factors: Callable[[int], dict[str, list[float]]] | None = None
    momentum: Factors | None = None  # step -> momentum; None: constant
    ranks: Ranks = field(default_factory=Alone)  # communication with other processes

    def factors_of(self, optimizer: str, step: int) -> float | list[float]:
        """Return the schedule's factor for all groups of an optimizer, or one for each."""
        if self.group_factors is None:
            return self.factors(step)
        return self.group_factors(step)[optimizer]


@dataclass
class State:
    """The state that steps change and checkpoints hold, after `step` updates."""

    models: dict[str, nn.Module]
    optimizers: dict[str, RunOptimizer]
    ema_models: dict[str, EmaModel] = field(default_factory=dict)
    step: int = 0
    buffers: BatchStatistics = field(default_factory=BatchStatistics)
    lr_factor: float = 1.0  # on every learning rate of the schedule; lowered by `plateau`
    trainable: Trainable = field(default_factory=Trainable)  # the parameters of `optimizers`
    # what `step.log_image` and others call while a session is open: kind, name, value, step
    show: Callable[[ShownKind, str, Any, int], None] | None = field(default=None, repr=False)

    @property
    def model(self) -> nn.Module:
        """The only model. Raises `ConfigError` if the run has several models."""
        if len(self.models) > 1:
            names = ", ".join(self.models)
            raise ConfigError(
                "several-models",
                problem=f"state.model: there are several models, {names}",
                remedy="choose one: state.models['NAME']",
                models=list(self.models),
            )
        return next(iter(self.models.values()))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters of all models."""
        return [
            parameter for trained in self.optimizers.values() for parameter in trained.parameters
        ]


@dataclass(slots=True)
class Step:
    """One training step. `run.steps()` yields it before the update. Reading one of its tensors
    waits for the device.
    """

    index: int  # from 0; records count finished steps
    micro_batches: Sequence[MicroBatch]
    _task: Task = field(repr=False)
    state: State
    loss: Tensor | None = None  # mean over the targets of the global batch
    target_count: Tensor | float = 0
    lr: Tensor | float | None = None  # base learning rate, of the first optimizer that was updated
    grad_norm: Tensor | None = None  # of all optimizers' gradients together, before clipping
    grad_norms: dict[str, Tensor] = field(default_factory=dict)  # by optimizer
    clip_fractions: dict[str, Tensor | None] = field(default_factory=dict)  # by optimizer, 0 to 1
    skipped: Tensor | None = None  # 1.0 if the update was not applied, else 0.0
    # of the evaluation after this step; in the body of `run.steps()`, of the one before it
    metrics: dict[str, float] = field(default_factory=dict)
    _logged: dict[str, Any] = field(default_factory=dict, repr=False)
    _metrics_of_loss: frozenset[str] = frozenset()  # names in `_logged`
    # for `update`: loss, factor of the gradients, loss function, True if one call computed them
    _pending: tuple[Tensor, Tensor | float, Loss, bool] | None = field(default=None, repr=False)
    _watch: Watch = field(default=UNWATCHED, repr=False)

    def log(self, *, reduce: Reduction = "mean", **values: Tensor | float | Mean) -> None:
        """Add values to the next training record. Tensors are copied and stay on the device.

        `reduce` puts the values of the steps since the last record together, and those of all
        ranks: their "mean", "sum", "max", "min", or the "last", of the lowest rank that logs it.
        """
        refuse_own(values)
        add_logged(self._logged, values, reduce=reduce, of_loss=self._metrics_of_loss)

    def log_text(self, **texts: str) -> None:
        """Show texts at this step in TensorBoard and the run's trackers. Those of rank 0 are
        shown.
        """
        self._show("text", texts)

    def log_image(self, **images: Any) -> None:
        """Show images: (C, H, W), (H, W, C) or (H, W), from 0 to 1 or of whole numbers to 255, or
        PIL images. A shape such as (4, 6, 3) is (C, H, W) of a tensor and (H, W, C) of an array.
        Waits for the device. Otherwise like `log_text`.
        """
        self._show("image", images)

    def log_histogram(self, **values: Any) -> None:
        """Show histograms of all finite numbers in tensors or arrays. Waits for the device.
        Otherwise like `log_text`.
        """
        self._show("histogram", values)

    def _show(self, kind: ShownKind, values: dict[str, Any]) -> None:
        if self.state.show is not None:
            for name, value in values.items():
                self.state.show(kind, name, value, self.index + 1)


class Periodic(Protocol):
    """The work of a run between steps. Only these methods may wait for the device. `done` is the
    number of finished steps.
    """

    @property
    def stopping(self) -> bool: ...

    def metrics_after(self, done: int) -> dict[str, float]: ...
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
    periodic: Periodic,
    length: int,
    opened: bool = False,
    watch: Callable[[int], Watch] = lambda index: UNWATCHED,  # noqa: ARG005
) -> Generator[Step]:
    """Train to step `length`; yield each step after its update. If `opened`, yield it before, and
    the caller updates.

    The caller's code runs at `yield`, before logging and saving, so a checkpoint includes the
    effects of this code.
    """
    clear(state.parameters)  # left by an unfinished step
    state.buffers.undo()
    while state.step < length and not periodic.stopping:
        clock("data_wait")
        step = Step(state.step, feed(state.step), task, state, _watch=watch(state.step))
        clock("training")
        if opened:
            step.metrics = periodic.metrics_after(step.index)
            # draws before the body's first pass repeat at a resume
            seed_generators(fold(task.key, step.index))
            try:
                yield step
            except GeneratorExit:  # `break` after the update: the step counts
                if step.skipped is not None:
                    state.step += 1
                    record(step)
                raise
            finally:
                state.buffers.undo()  # of passes without an update
            refuse_unused(state.parameters, step=step.index)
        else:
            forward_backward(step)
            update(step)
        state.step += 1
        record(step)

        if periodic.evaluate_due(state.step):
            clock("evaluating")
            periodic.evaluate(step)
        if not opened:
            clock("user")
            yield step
        if periodic.log_due(state.step):
            clock("training")  # reading waits for the device to finish these steps
            periodic.log()
        if periodic.save_due(state.step):
            clock("saving")
            periodic.save()


def forward_backward(step: Step, loss: Loss | None = None) -> Tensor:
    """Add the gradient of the global batch's mean loss to the parameters; return this loss as a
    device tensor.

    `loss(model, batch)` returns a scalar mean over `micro_batch.count` targets, or a `Mean` with
    its own count, or None to leave the micro-batch out. The loss may also return a tuple of the
    mean and (outputs, targets), which only evaluations use, or of the mean and a dictionary of
    `Mean` to log. The gradient of the batch's total loss is divided once by the total count, for
    any micro-batch size. Each micro-batch draws its random numbers from (seed, step, micro-batch
    index), so a second call in a step draws the same.
    """
    task, state, ranks = step._task, step.state, step._task.ranks
    loss = loss or task.loss
    if loss is None:
        raise ConfigError(
            "run-without-loss",
            problem="this run has no loss function",
            remedy="call forward_backward(step, loss)",
            setting="loss",
        )
    own_count = sum(micro_batch.count for micro_batch in step.micro_batches)
    sums = LossSum(ranks.nominal or own_count or 1)
    state.trainable.follow(in_step=True)
    state.buffers.begin(step, loss)
    ranks.begin(step)
    scale = task.precision.loss_scale
    watched_loss = step._watch.over(in_step(loss, step), step.micro_batches)
    for micro_batch in step.micro_batches:
        seed_generators(fold(task.key, step.index, micro_batch.index))
        counted = micro_batch.count > 0
        if not counted:
            count_skipped(step, micro_batch)
        last = micro_batch is step.micro_batches[-1]
        if not ranks.start_pass(micro_batch, last=last):
            continue
        state.buffers.start_pass(micro_batch.index, counted=counted)
        with task.precision.autocast():
            result = watched_loss(task.forward, micro_batch.batch)
        if result is None:
            leave_out(step, micro_batch)
            state.buffers.end_pass(counted=False)
            continue
        part, share, further = sums.add(result, micro_batch.count)
        del result  # frees other outputs before the backward pass
        if further:
            add_metrics(step, further)
        if last:
            state.buffers.pass_on()
            ranks.begin_sum(sums)
        task.precision.backward(ranks.started(part, None if scale is None else scale.scale), share)
        state.buffers.end_pass(counted=counted)

    total, total_count = ranks.summed(sums.total_on(task.precision.device), sums.counted)
    factor = correction(sums.nominal, total_count, like=total)
    mean = total if total_count is None else total * factor
    step._pending = (mean, factor, loss, step._pending is None)
    if step.loss is None:
        step.loss = mean
        step.target_count = sums.plain if total_count is None else total_count
    return mean


def update(step: Step, *names: str) -> None:
    """Take one step of the named optimizers (default: all), then clear every gradient.

    If the gradient or the loss is not finite, parameters, optimizer state, averages and buffers
    stay bit-equal. The device decides this, not the host. After more than `max_bad_steps`
    consecutive such updates, all later updates are skipped too.
    """
    state, scale = step.state, step._task.precision.loss_scale
    if step._pending is None:
        raise ConfigError(
            "update-without-gradient",
            problem="update(step) has no gradient to use",
            remedy="call forward_backward(step) first",
            step=step.index,
        )
    loss, factor, *_ = step._pending
    if scale is not None:
        factor = factor / scale.scale
    updated = names or state.optimizers
    step._watch.before(updated, factor)
    skipped = reduce(torch.maximum, [_update_one(step, name, loss, factor) for name in updated])
    step._watch.after(updated)
    if scale is not None:  # after all gradients with this scale were used
        scale.update(skipped > 0)
    step.grad_norm = reduce(torch.hypot, step.grad_norms.values())
    step._pending = None
    step.skipped = skipped if step.skipped is None else torch.maximum(step.skipped, skipped)
    state.buffers.finish(skipped)
    clear(state.parameters)


def _update_one(step: Step, name: str, loss: Tensor, factor: Tensor | float) -> Tensor:
    task, trained = step._task, step.state.optimizers[name]
    scale = task.precision.loss_scale
    gradients = trained.gradients()
    norm = gradient_norm(task.ranks.norm_inputs(trained.parameters, gradients), factor=factor)
    step.grad_norms[name] = norm
    limit = task.settings.max_bad_steps
    loss_scale = None if scale is None else scale.scale
    in_a_row = trained.bad_in_a_row
    skipped = should_skip(norm, loss, in_a_row, max_bad_steps=limit, loss_scale=loss_scale)
    clipped = trained.clipping.apply(gradients, factor=factor, norm=norm, skipped=skipped)
    step.clip_fractions[name] = clipped
    momentum = None if task.momentum is None else task.momentum(step.index)
    factors = task.factors_of(name, step.index)
    trained.set_rate(factors, lowered=step.state.lr_factor, momentum=momentum)
    step.lr = trained.rates.used if step.lr is None else step.lr
    trained.skip.apply(trained.optimizer, skipped, step)
    if name in step.state.ema_models:
        step.state.ema_models[name].update(1.0 - skipped)
    return skipped
