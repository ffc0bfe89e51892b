"""Inspection of one step with hooks. The first fault is traced to module, tensor and samples, and
all state is restored.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.checkpoint.snapshot import Snapshot
from surefoot.data.loader import MicroBatch
from surefoot.data.nested import named_tensors
from surefoot.distributed.shards import holders, saved_state
from surefoot.errors import ConfigError, Setting
from surefoot.optim.clipping import gradient_norm
from surefoot.tools.replay.findings import First, Look, OfMicroBatch, OfParameter, OfSample
from surefoot.tools.replay.hooks import Event, ModuleHooks, parameters_of, trace_step
from surefoot.tools.replay.per_sample import Probe
from surefoot.tools.replay.tensor_stats import Tally, bad_rows, describe_sample, tally, wide_norm
from surefoot.train.loop import Step

MOST_LOSSES = 512  # maximum number of samples with a separate loss
MOST_GRADIENTS = 64  # maximum number of samples with a separate gradient
_SHORT = 8  # number of samples to describe

Describe = Callable[[Any], str]
"""A function that describes a batch of one sample."""


def look(
    step: Step,
    *,
    samples: int = _SHORT,
    passed_alone: int = MOST_LOSSES,
    describe: Describe | None = None,
    shares: Sequence[range] = (),
    user_state: Mapping[str, Any] | None = None,
) -> Look:
    """Compute the gradients of a step with hooks, without an update, and return a report.

    `describe` describes the `samples` samples with the largest losses (0: no losses of single
    samples). At most `passed_alone` samples run alone. `shares` has the micro-batches of each rank,
    if several ranks share the step. `user_state` has the objects of `run.register_state`. All state
    is restored.
    Raises `ConfigError` for models sharded over ranks.
    """
    loss = step._task.loss
    state = step.state
    if loss is None or holders(state.parameters) is not None:
        raise ConfigError(
            "sharded-step-not-inspected",
            problem="a step of models that FSDP shards cannot be inspected",
            remedy=Setting("parallel", "none"),
        )
    rank_of: dict[int, int] = {}  # by micro-batch, if several ranks share the step
    if len(shares) > 1:
        for rank, share in enumerate(shares):
            rank_of |= dict.fromkeys(share, rank)
    start = Snapshot(state.models, loss, user_state=user_state, keep=True, weights=False)
    with start:
        before = _before(state.models)
        try:
            hooks = trace_step(step, loss)
            assert step.loss is not None  # the forward pass has run
            assert step._pending is not None
            factor = step._pending[1]
            scale = step._task.precision.loss_scale
            if scale is not None:
                factor = factor / scale.scale
            value = float(step.loss)
            norm = float(_norm(step, factor))
            parameters = _gradients(state.models, float(factor))
        finally:
            step._pending = None
            state.buffers.undo()
            start.restore()
        probes = {
            micro_batch.index: Probe(step, micro_batch, start) for micro_batch in step.micro_batches
        }
        first = None
        if not math.isfinite(value) or not math.isfinite(norm):
            first = before or _first(hooks, parameters, probes)
        if first is not None and first.micro_batch is not None:
            first = replace(first, rank=rank_of.get(first.micro_batch))
        sample_reports = _samples(probes, first, samples, passed_alone, describe)
    return Look(
        step=step.index,
        loss=value,
        norm=norm,
        first=first,
        modules=list(hooks.of_modules.values()),
        parameters=parameters,
        micro_batches=[
            OfMicroBatch(
                micro_batch.index,
                rank_of.get(micro_batch.index),
                tuple(micro_batch.sample_ids.tolist()),
                *hooks.losses.get(micro_batch.index, (0, 0.0)),
            )
            for micro_batch in step.micro_batches
        ],
        samples=sample_reports,
        notes=_notes(step, sample_reports),
    )


def _norm(step: Step, factor: Tensor | float) -> Tensor:
    """Return the norm of all gradients, without the values that some optimizers add to their
    groups for it.
    """
    norms = []
    for trained in step.state.optimizers.values():
        groups = trained.optimizer.param_groups
        names_before = [set(group) for group in groups]
        norms.append(gradient_norm(trained.gradients(), factor=factor))
        for group, names in zip(groups, names_before, strict=True):
            for name in group.keys() - names:
                del group[name]
    return reduce(torch.hypot, norms)


def _before(models: Mapping[str, nn.Module]) -> First | None:
    for name, parameter in parameters_of(models).items():
        if tally(parameter).nonfinite:
            return First("weight", name)
    for model_name, model in models.items():
        for name, buffer in model.named_buffers():
            # an infinite buffer may be a mask
            if name in saved_state(model) and buffer.is_floating_point() and tally(buffer).nans:
                return First("buffer", f"{model_name}.{name}" if len(models) > 1 else name)
    return None


def _gradients(models: Mapping[str, nn.Module], factor: float) -> list[OfParameter]:
    gradients = []
    for name, parameter in parameters_of(models).items():
        if parameter.grad is None:
            continue
        stats = tally(parameter.grad)
        gradients.append(
            OfParameter(
                name,
                shape=tuple(parameter.shape),
                weight=wide_norm(parameter),
                norm=wide_norm(parameter.grad) * factor,
                largest=stats.largest * factor,
                nonfinite=stats.nonfinite,
                share=None,
            )
        )
    total = math.hypot(*(gradient.norm for gradient in gradients))
    if not 0 < total < math.inf:
        return gradients
    return [replace(gradient, share=(gradient.norm / total) ** 2) for gradient in gradients]


def _first(
    hooks: ModuleHooks, parameters: Sequence[OfParameter], probes: Mapping[int, Probe]
) -> First | None:
    event = hooks.first()
    if event is None:
        largest = max(parameters, key=lambda parameter: parameter.norm, default=None)
        return None if largest is None else First("norm", largest.name)
    probe = probes[event.micro_batch]
    micro_batch = probe.micro_batch
    data = _in_data(micro_batch, event)
    if data is not None:
        return replace(data, reaches=hooks.reached(event.micro_batch))
    count = len(micro_batch.sample_ids)
    bad = event.rows
    # the rows are unknown, or a layer that mixes samples has spread them
    if not bad or len(bad) == count > 1:
        bad = probe.wrong_samples()
        if len(bad) == count > 1 and not all(probe.goes_wrong([row]) for row in bad):
            bad = []  # the samples fail only together
    return First(
        event.what,
        event.name,
        kind=event.kind,
        micro_batch=event.micro_batch,
        samples=tuple(int(micro_batch.sample_ids[row]) for row in bad),
        every_sample=len(bad) == count > 1,
    )


def _in_data(micro_batch: MicroBatch, event: Event) -> First | None:
    bad_rows_of: dict[str, list[int]] = {}
    for name, tensor in named_tensors(micro_batch.batch):
        stats = tally(tensor) if tensor.is_floating_point() else Tally()
        if stats.nonfinite and not (stats.only_minus and event.what != "input"):
            bad_rows_of[name] = bad_rows(tensor, len(micro_batch.sample_ids)) or []
    if not bad_rows_of:
        return None
    rows = sorted(set(chain.from_iterable(bad_rows_of.values())))
    samples = tuple(int(micro_batch.sample_ids[row]) for row in rows)
    return First("inputs", next(iter(bad_rows_of)), micro_batch=micro_batch.index, samples=samples)


def _samples(
    probes: Mapping[int, Probe],
    first: First | None,
    limit: int,
    passed_alone: int,
    describe: Describe | None,
) -> list[OfSample]:
    if limit == 0:
        return []
    entries: list[tuple[OfSample, Probe, int]] = []  # with the row in the micro-batch
    total = sum(probe.count for probe in probes.values())
    for probe in probes.values():
        micro_batch = probe.micro_batch
        ids_and_epochs = zip(micro_batch.sample_ids, micro_batch.epochs, strict=True)
        for row, (sample_id, epoch) in enumerate(ids_and_epochs):
            loss = norm = None
            if probe.can_cut and len(entries) < passed_alone:
                loss = probe.loss([row], mode="evaluation")
                if total <= MOST_GRADIENTS:
                    norm = probe.gradient_norm([row], mode="evaluation")
            sample = OfSample(int(sample_id), int(epoch), micro_batch.index, loss, norm)
            entries.append((sample, probe, row))
    blamed = () if first is None else first.samples

    def order(entry: tuple[OfSample, Probe, int]) -> tuple[bool, float]:
        sample, _, _ = entry
        if sample.loss is None:
            place = math.inf
        elif math.isfinite(sample.loss):
            place = -sample.loss
        else:
            place = -math.inf
        return sample.id not in blamed, place

    entries.sort(key=order)
    samples = []
    for number, (sample, probe, row) in enumerate(entries):
        shown = _describe(probe, row, describe) if number < limit else None
        samples.append(replace(sample, shown=shown))
    return samples


def _describe(probe: Probe, row: int, describe: Describe | None) -> str | None:
    if not probe.can_cut:
        return None
    one = probe.batch([row])
    try:
        return (describe or describe_sample)(one)
    except Exception as problem:  # an error of the user's function must not prevent the report
        return f"{describe_sample(one)}\n(describe_fn failed: {type(problem).__name__}: {problem})"


def _notes(step: Step, samples: Sequence[OfSample]) -> list[str]:
    notes = []
    passed = sum(sample.loss is not None for sample in samples)
    if samples and not passed:
        notes.append(
            "the batch cannot be split: not every tensor has a row per sample, or single samples cannot run alone"
        )
    if 0 < passed < len(samples):
        notes.append(f"{passed} of {len(samples):,} samples were run alone")
    if any(micro_batch.count == 0 for micro_batch in step.micro_batches):
        notes.append("micro-batches without targets are not run")
    return notes
