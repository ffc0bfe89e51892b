"""A text preview of a run, without training or writing files."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from surefoot.config.batch_size import Batching
from surefoot.data.buckets import Buckets
from surefoot.distributed.rank_sums import RankSums
from surefoot.distributed.shards import Shard, assign_owners, class_name, name_of
from surefoot.distributed.tree_sum import sums_in_memory
from surefoot.errors import CheckpointError
from surefoot.memory import in_words
from surefoot.optim.kinds.kind import kind_of
from surefoot.optim.param_groups import first_and_last
from surefoot.run.components import RunComponents
from surefoot.run.messages import choice_lines, precision_in_words, reading_notes
from surefoot.seeding import untouched
from surefoot.tools.plan.measure import Measurement, evaluation_time, measure, memory_and_time
from surefoot.tools.plan.workload import Weight
from surefoot.tracking.format import counted, text_table
from surefoot.train.plan import Origin
from surefoot.train.state_dict import parameter_names

if TYPE_CHECKING:
    from surefoot.data.streams.tape import Tape

_LOOKED_AT = 100_000  # steps searched for the highest learning rate


@dataclass(frozen=True)
class Section:
    """A heading of the preview and its lines."""

    title: str
    lines: list[str]

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"  {line}" for line in self.lines)])


def sections(parts: RunComponents) -> list[Section]:
    """Return the sections of a preview: parameters, batches, learning rates, watched scores,
    memory and time, and the choices for "auto" settings.
    """
    measured, costs, about = None, list[str](), parts.pipeline.data.about
    if parts.task.loss is not None:
        with untouched(), parts.numerics():
            measured = measure(parts)
            costs = [*memory_and_time(parts, measured), *evaluation_time(parts)]
    about_data = [*parts.settings.data_summary, *([f"from {about}"] if about else [])]
    all_sections = [
        Section("data", [*about_data, *reading_notes(parts)]),
        Section("parameters by module", parameters_by_module(parts.state.models)),
        Section("parameters by optimizer group", parameters_by_group(parts)),
        Section("batches", batch_arithmetic(parts, measured)),
        Section("learning rate", learning_rates(parts)),
        Section("watches", [each.in_words for each in parts.run_state.watches]),
        Section("memory and time", costs),
        Section("chosen", chosen(parts)),
        Section("settings", settings_by_origin(parts)),
    ]
    return [section for section in all_sections if section.lines]


def parameters_by_module(models: dict[str, nn.Module]) -> list[str]:
    """List each direct submodule of each model with its class and parameter count. A list of equal
    blocks takes one line.
    """
    rows: list[tuple[str, str, int]] = []
    for name, model in models.items():
        prefix, first = f"{name}." if len(models) > 1 else "", len(rows)
        own = sum(parameter.numel() for parameter in model.parameters(recurse=False))
        if own or not list(model.named_children()):
            rows.append((name, class_name(model), own))
        for part, child in model.named_children():
            kinds = Counter(
                class_name(block) for block in (child if isinstance(child, nn.ModuleList) else ())
            )
            what = ", ".join(f"{number} x {kind}" for kind, number in kinds.items()) or class_name(
                child
            )
            if numbers := _numbers(child.parameters()):
                rows.append((f"{prefix}{part}", what, numbers))
        tied = sum(numbers for _, _, numbers in rows[first:]) - _numbers(model.parameters())
        if tied > 0:
            rows.append((f"{prefix}(tied, counted twice above)", "", -tied))
    total = sum(_numbers(model.parameters()) for model in models.values())
    frozen = total - sum(
        _numbers(p for p in model.parameters() if p.requires_grad) for model in models.values()
    )
    rows.append(("total", f"{frozen:,} frozen" if frozen else "", total))
    return text_table([(name, what, f"{numbers:,}") for name, what, numbers in rows], left=(0, 1))


def parameters_by_group(parts: RunComponents) -> list[str]:
    """List the groups of each optimizer (base learning rate, decay, size), the frozen parameters,
    and the skip rule.
    """
    lines = []
    for name, trained in parts.state.optimizers.items():
        optimizer, names = trained.optimizer, parameter_names(parts.state.models[name])
        names |= {shard: shard.called for shard in trained.parameters if isinstance(shard, Shard)}
        rates_differ = len({group["initial_lr"] for group in optimizer.param_groups}) > 1
        whose = "" if name == "model" else f" of {name}"
        lines.append(
            f"{type(optimizer).__name__}{whose}: a bad step is skipped {trained.skip.description}"
        )
        kind = kind_of(optimizer)
        if parts.plan.parallel.kind == "fsdp" and kind is not None:
            lines.append(f"  each rank updates its own rows, {kind.on_shards}")
        for index, group in enumerate(optimizer.param_groups):
            members, which = [name_of(each, names) for each in group["params"]], ""
            if "by" in group:  # the parameters are divided between optimizers
                which = f", by {group['by']}: {_abbreviate(members)}"
            elif rates_differ:
                which = f": {first_and_last(members)}"
            lines.append(
                f"  group {index}: {counted(len(members), 'tensor')}, {_numbers(group['params']):,} elements,"
                f" lr {group['initial_lr']:g}, weight decay {group.get('weight_decay', 0):g}{which}"
            )
        if frozen := {
            parameter: called for parameter, called in names.items() if not parameter.requires_grad
        }:
            which = first_and_last([*frozen.values()])
            lines.append(
                f"  frozen: {counted(len(frozen), 'tensor')}, {_numbers(frozen):,} elements: {which}"
            )
    return lines


def batch_arithmetic(parts: RunComponents, measured: Measurement | None) -> list[str]:
    """List ranks, micro-batches, steps and epochs, and the targets per step as measured on the
    first micro-batch.
    """
    length, sizes, plan, tape = (
        parts.length,
        parts.pipeline.sizes,
        parts.pipeline.plan,
        parts.pipeline.tape,
    )
    ranks, pieces, size, unit = parts.world.ranks, sizes.pieces, sizes.micro_batch_size, sizes.unit
    each, per_epoch = sizes.on_each_rank(ranks), length.samples_per_epoch / length.batch_size
    together = (
        f"batch normalization averages over the micro-batches of {counted(ranks, 'rank')}:"
        " another number of ranks changes the results"
    )
    return [
        f"{sizes.batch_size:,} {unit} per step = {counted(ranks, 'rank')}"
        f" x {each} micro-batch{'es' * (pieces > ranks)} x {size:,}",
        *(
            [f"{plan.padded_fraction():.1%} of the tokens are padding"]
            if isinstance(plan, Buckets)
            else []
        ),
        f"{length.steps:,} steps read {plan.samples:,} rows"
        if tape is not None and tape.stream.samples is None
        else f"{plan.samples:,} samples per epoch = {per_epoch:,.2f} steps{parts.pipeline.order_text}; "
        f"{length.steps:,} steps = {length.epochs:,.2f} epochs",
        *([] if tape is None else _stream(tape, sizes.batch_size)),
        *([together] if parts.settings.sync_batch_norm else []),
        *_sums(parts),
        *(
            [
                f"{measured.targets * pieces:,} targets per step, estimated from the first micro-batch"
            ]
            if measured
            else []
        ),
    ]


def _sums(parts: RunComponents) -> list[str]:
    ranks, sizes, sharded = (
        parts.world.ranks,
        parts.pipeline.sizes,
        parts.plan.parallel.kind == "fsdp",
    )
    if sizes.pieces == 1:
        return []
    if not parts.pipeline.exact:
        return [
            "gradients are added in the order of the ranks: equal up to rounding on another number of ranks"
        ]
    shards = ranks // parts.plan.parallel.replicas if sharded else 1
    more, which = (
        sums_in_memory(sizes.shares(ranks // shards), each=shards),
        "each shard" if sharded else "them",
    )
    shard, sent = gradient_bytes(
        [each.parameters for each in parts.state.optimizers.values()], sizes, ranks, shards
    )
    return [
        "gradients are added along a tree of micro-batches: the same bits on any number of ranks"
        + (
            f"; {more} more cop{'ies' if more > 1 else 'y'} of {which} ({in_words(more * shard)})"
            * (more > 0)
        )
        + f"; rank 0 sends {in_words(sent)} of gradients per step" * (ranks > 1)
    ]


def gradient_bytes(
    optimizers: list[list[nn.Parameter]], sizes: Batching, ranks: int, shards: int
) -> tuple[int, int]:
    """Return the bytes of a shard of all gradients, and those that rank 0 sends in a step, also for
    norms under FSDP.
    """
    shard = norms = 0
    for parameters in optimizers:
        own = [
            Weight(tuple(each.shape), each.element_size()).shard_bytes(shards)
            for each in parameters
        ]
        owners = assign_owners(tuple(each.numel() for each in parameters), shards)
        shard += sum(own)
        norms += sum(size for size, owner in zip(own, owners, strict=True) if owner)
    passes, copies = (
        max(map(len, sizes.shares(ranks, shards=shards))),
        RankSums(sizes.shares(ranks // shards), rank=0),
    )
    return shard, (shards - 1) * shard * passes + norms + copies.bytes_sent(shard)


def _stream(tape: "Tape", batch_size: int) -> list[str]:
    lines = [tape.in_words()]
    if not tape.is_live:
        lines.append(f"{tape.directory} has {tape.shards.look():,} rows")
        if first := tape.first_step(batch_size):
            lines.append(
                f"earlier rows were dropped: steps can be repeated from a checkpoint at step {first:,} or later"
            )
    return lines


def learning_rates(parts: RunComponents) -> list[str]:
    """List group 0's learning rate at the first, highest, middle and last step, the ratios of other
    groups, and the plateau rule.
    """
    steps = parts.length.steps
    groups = next(iter(parts.state.optimizers.values())).optimizer.param_groups
    base = groups[0]["initial_lr"]
    factors_of_base = {
        group["initial_lr"] / base: None for group in groups if base
    }  # each once, in order
    of_base = ", ".join(f"{factor:.4g}" for factor in factors_of_base)
    factors, stride = parts.task.factors, max(1, steps // _LOOKED_AT)
    near = max(range(0, steps, stride), key=factors)
    fastest = max(range(max(0, near - stride), min(steps, near + stride)), key=factors)
    feedback = parts.run_state.feedback
    marked_steps = {"first": 0, "highest": fastest, "middle": steps // 2, "last": steps - 1}
    rows = [
        (what, "step", f"{step:,}", f"{base * factors(step):.4g}")
        for what, step in marked_steps.items()
    ]
    settings = parts.plan.schedule.to_dict()
    plain = [
        f", {name} {value}"
        for name, value in settings.items()
        if name != "shape" and not isinstance(value, dict)
    ]
    return [
        settings["shape"] + "".join(plain),
        *text_table(rows, left=(0, 3)),
        *(
            [f"shown for group 0; learning rates of the groups relative to it: {of_base}"]
            if len(factors_of_base) > 1
            else []
        ),
        *(
            []
            if parts.task.group_factors is None
            else ["the scheduler gives other groups other factors"]
        ),
        *([] if feedback is None else [f"or lower: {feedback.plateau.in_words}"]),
    ]


def chosen(parts: RunComponents) -> list[str]:
    """List the "auto" choices with their reasons, followed by where checkpoints go."""
    precision = f"device {parts.device}, precision {precision_in_words(parts, parts.plan.reasons)}"
    return [precision, *choice_lines(parts, parts.plan.reasons), *_directory(parts)]


def settings_by_origin(parts: RunComponents) -> list[str]:
    """List where the settings come from; those with their default are counted."""
    names: dict[Origin, list[str]] = {"given": [], "auto": [], "beginning": [], "default": []}
    for name, origin in parts.plan.origins.items():
        names[origin].append(name)
    given = []
    for name in names["given"]:
        value = getattr(parts.settings, name)
        is_plain = isinstance(value, bool | int | float | str)
        given.append(f"{name} {value}" if is_plain else name)
    lines = {
        "given": ", ".join(given),
        "auto": ", ".join(names["auto"]),
        "as the run began": ", ".join(names["beginning"]),
        "default": f"{len(names['default'])} others",
    }
    return [f"{origin}: {text}" for origin, text in lines.items() if text]


def _directory(parts: RunComponents) -> list[str]:
    if parts.directory is None or parts.checkpointing is None:
        return ["nothing is saved: run_dir is not set"]
    path = parts.directory.path
    try:
        if (checkpoint := parts.checkpointing.newest()) is None:
            return [f"checkpoints go to {path}"]
        parts.refuse_other_settings(checkpoint)
        parts.refuse_another_architecture(checkpoint)
    except CheckpointError as problem:
        return [f"{path} holds a run that train cannot resume:", *str(problem).splitlines()]
    return [f"{path} holds this run at step {checkpoint.step:,}: train resumes from it"]


def _abbreviate(names: Iterable[str]) -> str:
    """Join names; equal names in consecutive blocks become one name with a range of block numbers.

    >>> _abbreviate(
    ...     ["embedding.weight", "blocks.0.up.weight", "blocks.1.up.weight", "blocks.2.up.weight"]
    ... )
    'embedding.weight, blocks.0-2.up.weight'
    """
    blocks = defaultdict[tuple[str, str], list[str]](list)
    for name in names:
        before, number, after = [*re.split(r"\.(\d+)\.", name, maxsplit=1), "", ""][:3]
        blocks[before, after].append(number)
    return ", ".join(
        before
        + (
            f".{places[0]}{f'-{places[-1]}' if len(places) > 1 else ''}.{after}"
            if places[0]
            else ""
        )
        for (before, after), places in blocks.items()
    )


def _numbers(parameters: Iterable[Tensor]) -> int:
    return sum({id(parameter): parameter.numel() for parameter in parameters}.values())
