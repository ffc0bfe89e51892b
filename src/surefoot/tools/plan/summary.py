"""A text preview of a run, without training or writing files."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

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
from surefoot.train.changed_settings import described
from surefoot.train.plan import Origin
from surefoot.train.ramps import length_after
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
    measured = None
    costs = []
    if parts.task.loss is not None:
        with untouched(), parts.numerics():
            measured = measure(parts)
            costs = [*memory_and_time(parts, measured), *evaluation_time(parts)]
    about_data = list(parts.settings.data_summary)
    if parts.pipeline.data.about:
        about_data.append(f"from {parts.pipeline.data.about}")
    all_sections = [
        Section("data", [*about_data, *reading_notes(parts)]),
        Section("parameters by module", parameters_by_module(parts.state.models)),
        Section("parameters by optimizer group", parameters_by_group(parts)),
        Section("batches", batch_arithmetic(parts, measured)),
        Section("changes on the way", first_changes(parts)),
        Section("learning rate", learning_rates(parts)),
        Section("watches", [watch.in_words for watch in parts.run_state.watches]),
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
        prefix = f"{name}." if len(models) > 1 else ""
        listed = sum(parameter.numel() for parameter in model.parameters(recurse=False))
        if listed or not list(model.named_children()):
            rows.append((name, class_name(model), listed))
        for child_name, child in model.named_children():
            count = _numbers(child.parameters())
            if count:
                rows.append((f"{prefix}{child_name}", _blocks_or_class(child), count))
                listed += count
        tied = listed - _numbers(model.parameters())
        if tied > 0:
            rows.append((f"{prefix}(tied, counted twice above)", "", -tied))
    total = 0
    trained = 0
    for model in models.values():
        total += _numbers(model.parameters())
        trained += _numbers(weight for weight in model.parameters() if weight.requires_grad)
    frozen = total - trained
    rows.append(("total", f"{frozen:,} frozen" if frozen else "", total))
    return text_table([(name, what, f"{count:,}") for name, what, count in rows], left=(0, 1))


def _blocks_or_class(child: nn.Module) -> str:
    """Return the number and class of the blocks in a list, else the class of a module."""
    if not isinstance(child, nn.ModuleList) or not len(child):
        return class_name(child)
    kinds = Counter(class_name(block) for block in child)
    return ", ".join(f"{number} x {kind}" for kind, number in kinds.items())


def parameters_by_group(parts: RunComponents) -> list[str]:
    """List the groups of each optimizer (base learning rate, decay, size), the frozen parameters,
    and the skip rule.
    """
    lines = []
    for name, trained in parts.state.optimizers.items():
        optimizer = trained.optimizer
        names = parameter_names(parts.state.models[name])
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
            members = [name_of(parameter, names) for parameter in group["params"]]
            which = ""
            if "by" in group:  # the parameters are divided between optimizers
                which = f", by {group['by']}: {_abbreviate(members)}"
            elif rates_differ:
                which = f": {first_and_last(members)}"
            lines.append(
                f"  group {index}: {counted(len(members), 'tensor')}, {_numbers(group['params']):,} elements,"
                f" lr {group['initial_lr']:g}, weight decay {group.get('weight_decay', 0):g}{which}"
            )
        frozen = [parameter for parameter in names if not parameter.requires_grad]
        if frozen:
            which = first_and_last([names[parameter] for parameter in frozen])
            lines.append(
                f"  frozen: {counted(len(frozen), 'tensor')}, {_numbers(frozen):,} elements: {which}"
            )
    return lines


def batch_arithmetic(parts: RunComponents, measured: Measurement | None) -> list[str]:
    """List ranks, micro-batches, steps and epochs, and the targets per step as measured on the
    first micro-batch.
    """
    length = parts.length
    sizes = parts.pipeline.sizes
    plan = parts.pipeline.plan
    tape = parts.pipeline.tape
    ranks = parts.world.ranks
    micro_batches = "micro-batches" if sizes.pieces > ranks else "micro-batch"
    lines = [
        f"{sizes.batch_size:,} {sizes.unit} per step = {counted(ranks, 'rank')}"
        f" x {sizes.on_each_rank(ranks)} {micro_batches} x {sizes.micro_batch_size:,}"
    ]
    if isinstance(plan, Buckets):
        lines.append(f"{plan.padded_fraction():.1%} of the tokens are padding")
    if tape is not None and tape.stream.samples is None:
        lines.append(f"{length.steps:,} steps read {plan.samples:,} rows")
    else:
        per_epoch = length.samples_per_epoch / length.batch_size
        lines.append(
            f"{plan.samples:,} samples per epoch = {per_epoch:,.2f} steps{parts.pipeline.order_text}; "
            f"{length.steps:,} steps = {length.epochs:,.2f} epochs"
        )
    if tape is not None:
        lines += _stream(tape, sizes.batch_size)
    if parts.settings.sync_batch_norm:
        lines.append(
            f"batch normalization averages over the micro-batches of {counted(ranks, 'rank')}:"
            " another number of ranks changes the results"
        )
    if sizes.pieces > 1:
        lines.append(_sums(parts))
    if measured:
        lines.append(
            f"{measured.targets * sizes.pieces:,} targets per step, estimated from the first micro-batch"
        )
    return lines


def first_changes(parts: RunComponents) -> list[str]:
    """List the changes with which the journal of a new run will begin, and how long it then is."""
    lines = []
    for number, change in enumerate(parts.first_changes, start=1):
        lines.append(described(replace(change, number=number)))
    length = length_after(parts.first_changes, parts.length, text=parts.settings.length)
    if length.steps != parts.length.steps:
        lines.append(f"{length.steps:,} steps in all, not {parts.length.steps:,}")
    return lines


def _sums(parts: RunComponents) -> str:
    """Say how the gradients of micro-batches are added, and what that costs."""
    if not parts.pipeline.exact:
        return "gradients are added in the order of the ranks: equal up to rounding on another number of ranks"
    ranks = parts.world.ranks
    sizes = parts.pipeline.sizes
    shards = 1
    which = "them"
    if parts.plan.parallel.kind == "fsdp":
        shards = ranks // parts.plan.parallel.replicas
        which = "each shard"
    parameters = [trained.parameters for trained in parts.state.optimizers.values()]
    shard_bytes, sent_bytes = gradient_bytes(parameters, sizes, ranks, shards)
    line = "gradients are added along a tree of micro-batches: the same bits on any number of ranks"
    more = sums_in_memory(sizes.shares(ranks // shards), each=shards)
    if more > 0:
        copies = "copies" if more > 1 else "copy"
        line += f"; {more} more {copies} of {which} ({in_words(more * shard_bytes)})"
    if ranks > 1:
        line += f"; rank 0 sends {in_words(sent_bytes)} of gradients per step"
    return line


def gradient_bytes(
    optimizers: list[list[nn.Parameter]], sizes: Batching, ranks: int, shards: int
) -> tuple[int, int]:
    """Return the bytes of a shard of all gradients, and those that rank 0 sends in a step, also for
    norms under FSDP.
    """
    shard = 0
    norms = 0
    for parameters in optimizers:
        owners = assign_owners(tuple(parameter.numel() for parameter in parameters), shards)
        for parameter, owner in zip(parameters, owners, strict=True):
            weight = Weight(tuple(parameter.shape), parameter.element_size())
            size = weight.shard_bytes(shards)
            shard += size
            if owner:  # another rank than 0
                norms += size
    passes = max(len(share) for share in sizes.shares(ranks, shards=shards))
    copies = RankSums(sizes.shares(ranks // shards), rank=0)
    return shard, (shards - 1) * shard * passes + norms + copies.bytes_sent(shard)


def _stream(tape: "Tape", batch_size: int) -> list[str]:
    lines = [tape.in_words()]
    if not tape.is_live:
        lines.append(f"{tape.directory} has {tape.shards.look():,} rows")
        first = tape.first_step(batch_size)
        if first:
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
    factors = parts.task.factors
    stride = max(1, steps // _LOOKED_AT)
    near = max(range(0, steps, stride), key=factors)
    highest = max(range(max(0, near - stride), min(steps, near + stride)), key=factors)
    marked_steps = {"first": 0, "highest": highest, "middle": steps // 2, "last": steps - 1}
    rows = []
    for what, step in marked_steps.items():
        rows.append((what, "step", f"{step:,}", f"{base * factors(step):.4g}"))
    settings = parts.plan.schedule.to_dict()
    head: str = settings["shape"]
    for name, value in settings.items():
        if name != "shape" and not isinstance(value, dict):
            head += f", {name} {value}"
    lines = [head, *text_table(rows, left=(0, 3))]
    of_base = [group["initial_lr"] / base for group in groups if base]
    if len(set(of_base)) > 1:
        relative = ", ".join(f"{factor:.4g}" for factor in of_base)
        lines.append(f"shown for group 0; learning rates of all groups relative to it: {relative}")
    if parts.task.group_factors is not None:
        lines.append("the scheduler gives other groups other factors")
    if parts.run_state.feedback is not None:
        lines.append(f"or lower: {parts.run_state.feedback.plateau.in_words}")
    return lines


def chosen(parts: RunComponents) -> list[str]:
    """List the "auto" choices with their reasons, followed by where checkpoints go."""
    precision = f"device {parts.device}, precision {precision_in_words(parts, parts.plan.reasons)}"
    return [precision, *choice_lines(parts, parts.plan.reasons), *_directory(parts)]


def settings_by_origin(parts: RunComponents) -> list[str]:
    """List where the settings come from. Objects and functions are not listed, and settings with
    their default are counted.
    """
    names: dict[Origin, list[str]] = {origin: [] for origin in get_args(Origin)}
    for name, origin in parts.plan.origins.items():
        names[origin].append(name)
    given = []
    for name in names["given"]:
        value = getattr(parts.settings, name)
        if isinstance(value, bool | int | float | str) and value != "":
            given.append(f"{name} {value}")
    lines = {
        "given": ", ".join(given),
        "auto": ", ".join(names["auto"]),
        "as the run began": ", ".join(names["beginning"]),
        "changed on the way": ", ".join(names["changed"]),
        "default": f"{len(names['default'])} others",
    }
    return [f"{origin}: {text}" for origin, text in lines.items() if text]


def _directory(parts: RunComponents) -> list[str]:
    if parts.directory is None or parts.checkpointing is None:
        return ["nothing is saved: run_dir is not set"]
    path = parts.directory.path
    try:
        checkpoint = parts.checkpointing.newest()
        if checkpoint is None:
            return [f"checkpoints go to {path}"]
        parts.refuse_other_settings(checkpoint)
        parts.refuse_another_architecture(checkpoint)
    except CheckpointError as problem:
        return [f"{path} holds a run that train cannot resume:", *str(problem).splitlines()]
    return [f"{path} holds this run at step {checkpoint.step:,}: train resumes from it"]


def _abbreviate(names: Iterable[str]) -> str:
    """Join names; equal names in consecutive blocks become one name with a range of block numbers.

    >>> _abbreviate(["embedding.weight", "blocks.0.up.weight", "blocks.1.up.weight"])
    'embedding.weight, blocks.0-1.up.weight'
    """
    blocks = defaultdict[tuple[str, str], list[str]](list)  # numbers by what is around them
    for name in names:
        match = re.search(r"\.(\d+)\.", name)
        if match is None:
            blocks[name, ""].append("")
        else:
            blocks[name[: match.start()], name[match.end() :]].append(match[1])
    texts = []
    for (before, after), numbers in blocks.items():
        if not numbers[0]:
            texts.append(before)
        elif len(numbers) == 1:
            texts.append(f"{before}.{numbers[0]}.{after}")
        else:
            texts.append(f"{before}.{numbers[0]}-{numbers[-1]}.{after}")
    return ", ".join(texts)


def _numbers(parameters: Iterable[Tensor]) -> int:
    """Count elements; those of a tied parameter once."""
    counts = {id(parameter): parameter.numel() for parameter in parameters}
    return sum(counts.values())
