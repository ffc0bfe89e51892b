"""The text of `surefoot plan --world-size N`: the memory of a run and the time of a step on many
GPUs.
"""

from collections.abc import Iterable
from dataclasses import replace

from surefoot.distributed.blocks import refuse_unshardable
from surefoot.errors import ConfigError, first_line
from surefoot.memory import in_words
from surefoot.optim.kinds.kind import kind_of, refuse_shards, state_bytes
from surefoot.run.components import RunComponents
from surefoot.run.run import without_loss
from surefoot.tools.plan.cluster import Case, fits, shared, spread, tokens_each
from surefoot.tools.plan.meta_pass import Pass, dry_pass
from surefoot.tools.plan.network_model import Machine, ring_bandwidth, windows
from surefoot.tools.plan.summary import Section, parameters_by_module
from surefoot.tools.plan.workload import Spread, workload
from surefoot.tracking.format import counted, measured_time, text_table, three_digits, with_unit

_PURPOSES = {  # the purpose of each `Memory` field, and whether only FSDP uses it
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "averages": "averaged weights",
    "buffers": "buffers",
    "sums": "sums of gradients along a tree",
    "whole_gradients": "unsharded gradients, until the last micro-batch",
    "gathered": "gathered parameters",
    "exchanged": "gradients in transit",
    "passing": "activations of a pass, peak",
    "updating": "copies during the update (not during a pass)",
}


def sections(parts: RunComponents, machine: Machine) -> list[Section]:
    """Return the sections of a plan: the machine, the step, and memory, traffic and time of the
    run's strategy and alternatives.
    """
    if parts.task.loss is None:
        raise without_loss()
    world, tokens, refused = parts.world.on_meta, tokens_each(parts), refusal(parts)
    rows, micro_batches, note = shared(parts, ranks=world)
    own = spread(parts, ranks=world)
    if refused is not None and own.kind == "fsdp":
        raise refused
    gather_dtypes = dict.fromkeys((own.gather_dtype, "fp32"))
    passes = {
        gather_dtype: dry_pass(parts, rows=rows, weights_narrow=gather_dtype == "bf16")
        for gather_dtype in gather_dtypes
    }
    works = {gather_dtype: workload(parts, passed) for gather_dtype, passed in passes.items()}
    cases = [
        Case(name, chosen, works[chosen.gather_dtype], micro_batches, machine)
        for name, chosen in strategies_of(own, node_size=machine.node_size).items()
        if refused is None or chosen.kind != "fsdp"
    ]
    mine = next(case for case in cases if case.strategy == own)
    strategies = [*table(cases), *([] if refused is None else [first_line(refused)])]
    all_sections = [
        Section("data", list(parts.settings.data_summary)),
        Section("parameters by module", parameters_by_module(parts.state.models)),
        Section("assumptions", assumptions(machine, world=world)),
        Section("one step", step(parts, mine, passes[own.gather_dtype], tokens=tokens, note=note)),
        Section(f"memory per GPU, {mine.name}", memory_lines(parts, mine)),
        Section(
            f"sent by each GPU per step, {mine.name}", traffic_lines(mine) if world > 1 else []
        ),
        Section(f"time per step, {mine.name}", time_lines(mine, tokens=tokens)),
        Section("strategies", strategies if world > 1 else []),
    ]
    return [section for section in all_sections if section.lines]


def refusal(parts: RunComponents) -> ConfigError | None:
    """Return the error that prevents sharding the run. Returns None if sharding is possible."""
    try:
        for model in parts.state.models.values():
            refuse_unshardable(model)
        for trained in parts.state.optimizers.values():
            refuse_shards(kind_of(trained.optimizer), name=type(trained.optimizer).__name__)
    except ConfigError as problem:
        return problem
    return None


def strategies_of(own: Spread, *, node_size: int) -> dict[str, Spread]:
    """Return the run's strategy and its alternatives by name. With several nodes, one alternative
    has a replica per node.
    """
    if own.kind == "none":
        return {"one process": own}
    world = own.world
    plain = (
        replace(own, reshard_after_forward=True, replicas=1)
        if own.kind == "fsdp"
        else Spread("fsdp", world, sync="every", exact_sums=own.exact_sums)
    )
    strategies = {
        "ddp": own if own.kind == "ddp" else Spread("ddp", world, exact_sums=own.exact_sums),
        "fsdp": plain,
        "fsdp, reshard off": replace(plain, reshard_after_forward=False),
    }
    if world > node_size > 1 and world % node_size == 0:
        strategies[f"fsdp, {world // node_size} replicas"] = replace(
            plain, replicas=world // node_size
        )
    if own not in strategies.values():
        strategies = {
            f"fsdp{f', {own.replicas} replicas' * (own.replicas > 1)}, as set": own,
            **strategies,
        }
    return strategies


def assumptions(machine: Machine, *, world: int) -> list[str]:
    """List the assumed values of the machine with their sources."""
    texts = {
        "node_size": f"{counted(world, 'GPU')}, {counted(-(-world // machine.node_size), 'node')} of {machine.node_size}",
        "flops": f"{machine.flops / 1e12:.4g} TFLOP/s per GPU",
        "mfu": f"{machine.mfu:.0%} of the peak is used, recomputation included",
        "gpu_memory": f"{in_words(machine.memory_bytes)} per GPU",
        "bandwidth": f"{in_words(machine.bandwidth)}/s per GPU to other nodes, in each direction",
        "node_bandwidth": f"{in_words(machine.node_bandwidth)}/s per GPU inside a node, in each direction",
    }
    return text_table(
        [(text, f"[{machine.origins[name]}]") for name, text in texts.items()], left=(0, 1)
    )


def step(
    parts: RunComponents, case: Case, passed: Pass, *, tokens: float | None, note: str | None
) -> list[str]:
    """List the samples of a step and the results of the dry pass."""
    world, rows, each = case.strategy.world, passed.samples, case.micro_batches
    forward, backward = passed.flops
    return [
        f"{_samples(world * each * rows, tokens)} = {counted(world, 'rank')}"
        f" x {each} micro-batch{'es' * (each > 1)} x {rows:,}",
        *([note] if note else []),
        f"a micro-batch in {parts.plan.precision}: forward {with_unit(forward, 'FLOP')}, backward {with_unit(backward, 'FLOP')}",
        f"it stores {in_words(passed.kept_bytes)} for the backward pass and needs at most {in_words(passed.peak_bytes)}"
        " (dry pass on the meta device)",
    ]


def memory_lines(parts: RunComponents, case: Case) -> list[str]:
    """List the memory by purpose, and compare the sum with the available memory."""
    memory = case.memory
    table = [
        (what, in_words(getattr(memory, name)), "")
        for name, what in _PURPOSES.items()
        if getattr(memory, name)
    ]
    table.append(("total, at most", in_words(memory.total), fits(memory, case.machine)))
    lines = text_table(table, left=(0, 2))
    if any(state_bytes(trained.optimizer) is None for trained in parts.state.optimizers.values()):
        lines.insert(
            -1, "optimizer state is not included: its size is unknown before the first step"
        )
    if memory.host:
        lines.append(f"in host memory: {in_words(memory.host)} for each GPU")
    return lines


def traffic_lines(case: Case) -> list[str]:
    """List the bytes sent during each pass, the passes per step, and the sum."""
    shards, copies = case.strategy.shards, case.strategy.copies
    lines = []
    for window in windows(case.work, case.strategy, micro_batches=case.micro_batches):
        ways = {
            f"among {shards} shards": window.to_shards,
            f"among {copies} replicas": window.to_replicas,
        }
        if amounts := ", ".join(
            f"{in_words(number)} {way}" for way, number in ways.items() if number
        ):
            lines.append(f"{window.times} x during a {window.part} pass: {amounts}")
    ring = {"shards": (shards, 1), "replicas": (copies, shards)}
    speeds = ", ".join(
        f"{in_words(ring_bandwidth(case.machine, members=members, stride=stride))}/s among {name}"
        for name, (members, stride) in ring.items()
        if members > 1
    )
    return [*lines, f"{in_words(case.timing.sent_bytes)} in total, at {speeds}"]


def time_lines(case: Case, *, tokens: float | None) -> list[str]:
    """List the seconds of computation and communication, and the smallest batch size that hides all
    communication.
    """
    timing, world, samples = case.timing, case.strategy.world, case.timing.hidden_from
    hidden_s = timing.communication_s - timing.exposed_s
    samples_per_s = world * case.micro_batches * case.work.samples / timing.step_s
    rate, unit = (
        (samples_per_s, "samples/s") if tokens is None else (samples_per_s * tokens, "tokens/s")
    )
    of_step = (
        f"{measured_time(timing.step_s)} per step without its update: {three_digits(rate)} {unit}"
    )
    if world == 1:
        return [of_step]
    return [
        f"computation {measured_time(timing.compute_s)}, communication {measured_time(timing.communication_s)}:"
        f" {measured_time(hidden_s)} hidden, {measured_time(timing.exposed_s)} exposed",
        of_step,
        f"communication is hidden if a GPU's micro-batch has at least {_samples(samples, tokens)},",
        f"that is {_samples(samples * world, tokens)} per step",
    ]


def table(cases: Iterable[Case]) -> list[str]:
    """Format the cases as a table with one line each."""
    head = ("strategy", "memory", "", "sent", "hidden from", "exposed", "step")
    rows = [
        (
            case.name,
            in_words(case.memory.total),
            fits(case.memory, case.machine),
            in_words(case.timing.sent_bytes),
            f"{case.timing.hidden_from:,} per GPU",
            measured_time(case.timing.exposed_s),
            measured_time(case.timing.step_s),
        )
        for case in cases
    ]
    return text_table([head, *rows], left=(0, 2))


def _samples(samples: int, tokens: float | None) -> str:
    text = counted(samples, "sample")
    return text if tokens is None else f"{text} ({round(samples * tokens):,} tokens)"
