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
    loss, state = step._task.loss, step.state
    if loss is None or holders(state.parameters) is not None:
        raise ConfigError(
            "sharded-step-not-inspected",
            problem="a step of models that FSDP shards cannot be inspected",
            remedy=Setting("parallel", "none"),
        )
    rank_of = (
        {index: rank for rank, own in enumerate(shares) for index in own} if len(shares) > 1 else {}
    )
    start = Snapshot(state.models, loss, user_state=user_state, keep=True, weights=False)
    with start:
        before = _before(state.models)
        try:
            hooks = trace_step(step, loss)
            assert step.loss is not None  # the forward pass has run
            assert step._pending is not None
            scale, factor = step._task.precision.loss_scale, step._pending[1]
            factor = factor if scale is None else factor / scale.scale
            value, norm = float(step.loss), float(_norm(step, factor))
            parameters = _gradients(state.models, float(factor))
        finally:
            step._pending = None
            state.buffers.undo()
            start.restore()
        probes = {
            micro_batch.index: Probe(step, micro_batch, start) for micro_batch in step.micro_batches
        }
        finite = math.isfinite(value) and math.isfinite(norm)
        first = None if finite else before or _first(step, hooks, parameters, probes)
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
    norms = []
    for trained in step.state.optimizers.values():
        groups = [(group, dict(group)) for group in trained.optimizer.param_groups]
        norms.append(gradient_norm(trained.gradients(), factor=factor))
        for group, before in groups:
            for name in group.keys() - before.keys():
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
        if parameter.grad is not None:
            stats, norm, shape = (
                tally(parameter.grad),
                wide_norm(parameter.grad) * factor,
                tuple(parameter.shape),
            )
            weight, largest = wide_norm(parameter), stats.largest * factor
            gradients.append(OfParameter(name, shape, weight, norm, largest, stats.nonfinite, None))
    total = math.hypot(*(each.norm for each in gradients))
    return (
        [replace(each, share=(each.norm / total) ** 2) for each in gradients]
        if 0 < total < math.inf
        else gradients
    )


def _first(
    step: Step, hooks: ModuleHooks, parameters: Sequence[OfParameter], probes: Mapping[int, Probe]
) -> First | None:
    event = hooks.first()
    if event is None:
        largest = max(parameters, key=lambda each: each.norm, default=None)
        return None if largest is None else First("norm", largest.name)
    micro_batch = next(each for each in step.micro_batches if each.index == event.micro_batch)
    if (data := _in_data(micro_batch, event)) is not None:
        return replace(data, reaches=hooks.reached(event.micro_batch))
    count, bad = len(micro_batch.sample_ids), event.rows
    if not bad or (
        len(bad) == count and count > 1
    ):  # rows unknown, or spread by a layer that mixes samples
        probe = probes[event.micro_batch]
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
    samples = tuple(
        int(micro_batch.sample_ids[row])
        for row in sorted(set(chain.from_iterable(bad_rows_of.values())))
    )
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
    entries: list[tuple[OfSample, Probe, int]] = []
    total = sum(probe.count for probe in probes.values())
    for probe in probes.values():
        micro_batch = probe.micro_batch
        for row, (sample, epoch) in enumerate(
            zip(micro_batch.sample_ids, micro_batch.epochs, strict=True)
        ):
            loss = norm = None
            if probe.can_cut and len(entries) < passed_alone:
                loss = probe.loss([row], mode="evaluation")
                norm = (
                    probe.gradient_norm([row], mode="evaluation")
                    if total <= MOST_GRADIENTS
                    else None
                )
            entries.append(
                (OfSample(int(sample), int(epoch), micro_batch.index, loss, norm), probe, row)
            )
    blamed = () if first is None else first.samples

    def order(each: tuple[OfSample, Probe, int]) -> tuple[bool, float]:
        loss = each[0].loss
        return each[0].id not in blamed, math.inf if loss is None else -loss if math.isfinite(
            loss
        ) else -math.inf

    entries.sort(key=order)
    return [
        replace(sample, shown=_describe(probe, row, describe)) if number < limit else sample
        for number, (sample, probe, row) in enumerate(entries)
    ]


def _describe(probe: Probe, row: int, describe: Describe | None) -> str | None:
    if not probe.can_cut:
        return None
    one = probe.batch([row])
    try:
        return (describe or describe_sample)(one)
    except Exception as problem:  # an error of the user's function must not prevent the report
        return f"{describe_sample(one)}\n(describe_fn failed: {type(problem).__name__}: {problem})"


def _notes(step: Step, samples: Sequence[OfSample]) -> list[str]:
    passed = sum(sample.loss is not None for sample in samples)
    notes = {
        "the batch cannot be split: not every tensor has a row per sample, or single samples cannot run alone": bool(
            samples
        )
        and not passed,
        f"{passed} of {len(samples):,} samples were run alone": 0 < passed < len(samples),
        "micro-batches without targets are not run": any(
            each.count == 0 for each in step.micro_batches
        ),
    }
    return [note for note, holds in notes.items() if holds]
