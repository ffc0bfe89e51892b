"""What a run would do, in words and numbers, before it does anything: nothing is trained, and nothing is written.

One micro-batch goes forward and backward, to measure its time and memory; its gradients are let go.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from surefoot.data.buckets import Buckets
from surefoot.distributed.shards import Shard, class_name, name_of
from surefoot.errors import CheckpointError, DataError, DivergedError, first_line
from surefoot.memory import in_words, tensor_bytes
from surefoot.optim.memory import state_bytes
from surefoot.optim.param_groups import first_and_last
from surefoot.optim.registry import kind_of
from surefoot.plan.measure import Measured, measure
from surefoot.run.components import RunComponents
from surefoot.schedules.lr_schedule import Joined, Schedule
from surefoot.seeding import untouched
from surefoot.tracking.format import duration, measured_time
from surefoot.tracking.text_table import text_table
from surefoot.train.auto_precision import Chosen, settle_choices
from surefoot.train.state_dict import parameter_names

_LOOKED_AT = 100_000  # steps, in search of the fastest


@dataclass(frozen=True)
class Section:
    """A heading and its lines."""

    title: str
    lines: list[str]

    def __str__(self) -> str:
        """As text, at most 80 columns wide where names allow."""
        return "\n".join([self.title, *(f"  {line}" for line in self.lines)])


def sections(parts: RunComponents) -> list[Section]:
    """Parameters, batch arithmetic, learning rates, memory and time, and what was chosen where settings are "auto"."""
    where = _directory(parts)  # a run that is there has its precision already
    auto = settle_choices(parts)
    found = [
        *([Section("data", list(parts.settings.about_data))] if parts.settings.about_data else []),
        Section("parameters by module", parameters_by_module(parts.state.models)),
        Section("parameters by optimizer group", parameters_by_group(parts)),
        Section("learning rate", learning_rates(parts)),
    ]
    measured = None
    if parts.task.loss is not None:
        with untouched(), parts.numerics():
            measured = measure(parts)
            evaluating = evaluation_time(parts)
        found.append(Section("memory and time", [*memory_and_time(parts, measured), *evaluating]))
    place = [section.title for section in found].index("learning rate")
    found.insert(place, Section("batches", batch_arithmetic(parts, measured)))
    return [*found, Section("chosen", chosen(parts, where, auto))]


def parameters_by_module(models: dict[str, nn.Module]) -> list[str]:
    """Each direct part of each model with its type and number of parameters; a list of equal blocks is one line."""
    rows: list[tuple[str, str, int]] = []
    for name, model in models.items():
        prefix, first = f"{name}." if len(models) > 1 else "", len(rows)
        own = sum(parameter.numel() for parameter in model.parameters(recurse=False))
        if own or not list(model.named_children()):
            rows.append((name, class_name(model), own))
        for part, child in model.named_children():
            blocks = list(child) if isinstance(child, nn.ModuleList) else []
            kinds = Counter(class_name(block) for block in blocks)
            what = ", ".join(f"{number} x {kind}" for kind, number in kinds.items()) or class_name(child)
            if numbers := _numbers(child.parameters()):
                rows.append((f"{prefix}{part}", what, numbers))
        tied = sum(numbers for _, _, numbers in rows[first:]) - _numbers(model.parameters())
        if tied > 0:
            rows.append((f"{prefix}(tied, counted twice above)", "", -tied))
    total = sum(_numbers(model.parameters()) for model in models.values())
    frozen = total - sum(_numbers(p for p in model.parameters() if p.requires_grad) for model in models.values())
    rows.append(("all", f"{frozen:,} of them frozen" if frozen else "", total))
    return text_table([(name, what, f"{numbers:,}") for name, what, numbers in rows], left=(0, 1))


def parameters_by_group(parts: RunComponents) -> list[str]:
    """For each optimizer its groups with base rate, decay, size and (where rates differ) names; what is frozen; how it skips."""
    lines = []
    for name, trained in parts.state.trained.items():
        optimizer, names = trained.optimizer, parameter_names(parts.state.models[name])
        names |= {held: held.called for held in trained.parameters if isinstance(held, Shard)}
        rates_differ = len({group["initial_lr"] for group in optimizer.param_groups}) > 1
        lines.append(
            f"{type(optimizer).__name__}{'' if name == 'model' else f' of {name}'}: a bad step is skipped {trained.skip.description}"
        )
        kind = kind_of(optimizer)
        if parts.parallel.kind == "fsdp" and kind is not None:
            lines.append(f"  each rank updates its own rows, {kind.on_shards}")
        for place, group in enumerate(optimizer.param_groups):
            numbers = _numbers(group["params"])
            # where parameters are divided between optimizers, which ones are whose
            by = (
                f", by {group['by']}: {_shown(name_of(held, names) for held in group['params'])}"
                if "by" in group
                else ""
            )
            lines.append(
                f"  group {place}: {_tensors(len(group['params']))}, {numbers:,} numbers, lr {group['initial_lr']:g}, "
                f"weight decay {group.get('weight_decay', 0):g}{by}"
                + (
                    f": {first_and_last([name_of(held, names) for held in group['params']])}"
                    if rates_differ and not by
                    else ""
                )
            )
        frozen = {parameter: held for parameter, held in names.items() if not parameter.requires_grad}
        if frozen:
            lines.append(
                f"  frozen: {_tensors(len(frozen))}, {_numbers(frozen):,} numbers: {first_and_last([*frozen.values()])}"
            )
    return lines


def _tensors(number: int) -> str:
    return f"{number} tensor{'s' * (number != 1)}"


def batch_arithmetic(parts: RunComponents, measured: Measured | None) -> list[str]:
    """Ranks, accumulation and micro-batch; steps and passes; targets a step, as the first micro-batch has them."""
    length, sizes, plan = parts.length, parts.supply.sizes, parts.supply.plan
    ranks, pieces, size, unit = parts.world.ranks, sizes.pieces, sizes.micro_batch_size, sizes.unit
    each = pieces // ranks
    per_epoch = length.samples_per_epoch / length.batch_size
    padded = [f"{plan.padded_fraction():.1%} of the tokens are padding"] if isinstance(plan, Buckets) else []
    lines = [
        f"{sizes.batch_size:,} {unit} a step = {ranks} rank{'s' * (ranks > 1)}"
        f" x {each} micro-batch{'es' * (each > 1)} x {size:,}",
        *padded,
        f"{plan.samples:,} samples a pass = {per_epoch:,.2f} steps; "
        f"{length.steps:,} steps = {length.epochs:,.2f} passes",
    ]
    if parts.settings.sync_batch_norm:
        lines.append(
            f"batch normalisation is over the micro-batches of {ranks} rank{'s' * (ranks > 1)} together:"
            " with another number of ranks it is another run"
        )
    if measured is not None:
        lines.append(
            f"{measured.targets * pieces:,} targets a step, as many as the loss counts in the first micro-batch"
        )
    return lines


def learning_rates(parts: RunComponents) -> list[str]:
    """The rate of the first group at the first, the fastest, the middle and the last step; of others, and after a plateau."""
    steps = parts.length.steps
    groups = next(iter(parts.state.trained.values())).optimizer.param_groups
    base = groups[0]["initial_lr"]
    factors_of_base = {group["initial_lr"] / base: None for group in groups if base}  # each once, in order
    of_base = ", ".join(f"{factor:.4g}" for factor in factors_of_base)
    factors = parts.task.factors
    stride = max(1, steps // _LOOKED_AT)
    near = max(range(0, steps, stride), key=factors)
    fastest = max(range(max(0, near - stride), min(steps, near + stride)), key=factors)
    shape = _shape(parts.schedule)
    feedback = parts.whole.feedback
    lower = [] if feedback is None else [f"or lower: {feedback.plateau.in_words}"]
    shown = {"first": 0, "fastest": fastest, "middle": steps // 2, "last": steps - 1}
    return [
        shape,
        *text_table(
            [(what, "step", f"{step:,}", f"{base * factors(step):.4g}") for what, step in shown.items()], left=(0, 3)
        ),
        *([f"these are of group 0; groups have of it: {of_base}"] if len(factors_of_base) > 1 else []),
        *lower,
    ]


def memory_and_time(parts: RunComponents, measured: Measured) -> list[str]:
    """Bytes of weights, gradients, optimizer state, averages and activations; seconds of a step and of the run."""
    state = parts.state
    weights = tensor_bytes(parameter for model in state.models.values() for parameter in model.parameters())
    gradients = tensor_bytes(state.parameters)
    kept = [state_bytes(held.optimizer) for held in state.trained.values()]
    known = [size for size in kept if size is not None]
    averages = tensor_bytes(p for average in state.averages.values() for p in average.model.parameters())
    activations = measured.activation_bytes
    total = weights + gradients + sum(known) + averages + activations
    step_s = measured.pass_s * parts.supply.sizes.pieces / parts.world.ranks
    return [
        f"weights {in_words(weights)}, gradients {in_words(gradients)}"
        + (f", averages {in_words(averages)}" if averages else "")
        + (
            f", optimizer {in_words(sum(known))}"
            if len(known) == len(kept)
            else ", optimizer: known after its first step"
        ),
        f"activations of one micro-batch {in_words(activations)} (measured); together {in_words(total)}",
        *([] if parts.computed_again is None else [f"activation checkpointing: {parts.computed_again}"]),
        f"{measured.pass_s * 1000:,.3g} ms for a micro-batch forward and backward (measured), "
        f"{step_s * 1000:,.3g} ms a step before its update",
        f"about {duration(step_s * parts.length.steps)} for {parts.length.steps:,} steps, without updates and evaluation",
    ]


def evaluation_time(parts: RunComponents) -> list[str]:
    """Seconds of one evaluation, of all that the run makes, and of what is scored at its end, from a few batches of each split."""
    scoring = parts.scoring
    if not scoring.splits:
        return []
    if parts.compiled:
        return ["evaluation: not measured, since the model would be compiled for it"]
    try:
        took_s = {name: scoring.seconds(name) for name in scoring.splits}
    except (DataError, DivergedError) as problem:
        return [f"evaluation: not measured: {first_line(problem)}"]
    lines, often, end = [], scoring.names(at_end=False), scoring.names(at_end=True)
    if often:
        one_s, times = sum(took_s[name] for name in often), _evaluations(parts)
        lines.append(
            f"about {measured_time(one_s)} an evaluation of {', '.join(often)}, {measured_time(one_s * times)} for {times:,} of them"
            " (measured with a few batches)"
        )
    if end:
        lines.append(
            f"about {measured_time(sum(took_s[name] for name in end))} for {', '.join(end)}, scored once, at the end"
        )
    return lines


def _evaluations(parts: RunComponents) -> int:
    """How many evaluations the run makes; in a run of millions of steps about."""
    steps, due = parts.length.steps, parts.timetable.evaluate_due
    seen = min(steps, _LOOKED_AT)
    return round(sum(map(due, range(1, seen + 1))) * steps / seen)


def chosen(parts: RunComponents, where: list[str], auto: Chosen) -> list[str]:
    """What settings that say "auto" came to, and why; and `where` the run would go."""
    precision = auto.in_words(parts.whole.precision, channels_last=parts.layout.channels_last)
    return [f"device {parts.device}, precision {precision}", *auto.lines(parts), *where]


def _directory(parts: RunComponents) -> list[str]:
    """Where checkpoints go, and whether a run is there already."""
    if parts.directory is None or parts.saving is None:
        return ["nothing is saved: no out was given"]
    path = parts.directory.path
    try:
        found = parts.saving.newest()
        if found is None:
            return [f"checkpoints go to {path}"]
        parts.continue_from(found)
        parts.refuse_another_architecture(found)
    except CheckpointError as problem:
        return [f"{path} holds a run that train would not go on with:", *str(problem).splitlines()]
    return [f"{path} holds this run at step {found.step:,}: train goes on from there"]


def _shape(schedule: Schedule | Joined) -> str:
    settings = {name: value for name, value in schedule.described().items() if name != "shape"}
    shape = schedule.described()["shape"]
    return f"{shape}" + "".join(f", {name} {value}" for name, value in settings.items() if not isinstance(value, dict))


def _shown(names: Iterable[str]) -> str:
    """All names, of equal ones in a row of blocks the first and the last.

    >>> _shown(["embedding.weight", "blocks.0.up.weight", "blocks.1.up.weight", "blocks.2.up.weight"])
    'embedding.weight, blocks.0-2.up.weight'
    """
    blocks: dict[tuple[str, str], list[str]] = {}
    for name in names:
        found = re.search(r"\.(\d+)\.", name)
        key = (name[: found.start()], name[found.end() :]) if found else (name, "")
        blocks.setdefault(key, []).append(found[1] if found else "")
    return ", ".join(
        before + (f".{places[0]}{f'-{places[-1]}' if len(places) > 1 else ''}.{after}" if places[0] else "")
        for (before, after), places in blocks.items()
    )


def _numbers(parameters: Iterable[Tensor]) -> int:
    return sum({id(parameter): parameter.numel() for parameter in parameters}.values())
