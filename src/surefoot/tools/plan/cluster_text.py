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
from surefoot.tools.plan.workload import Spread, Workload, workload
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
    world = parts.world.on_meta
    tokens = tokens_each(parts)
    refused = refusal(parts)
    rows, micro_batches, note = shared(parts, ranks=world)
    own = spread(parts, ranks=world)
    if refused is not None and own.kind == "fsdp":
        raise refused
    passes: dict[str, Pass] = {}
    works: dict[str, Workload] = {}
    for gather_dtype in dict.fromkeys((own.gather_dtype, "fp32")):
        passed = dry_pass(parts, rows=rows, weights_narrow=gather_dtype == "bf16")
        passes[gather_dtype] = passed
        works[gather_dtype] = workload(parts, passed)
    cases = []
    for name, strategy in strategies_of(own, node_size=machine.node_size).items():
        if refused is None or strategy.kind != "fsdp":
            work = works[strategy.gather_dtype]
            cases.append(Case(name, strategy, work, micro_batches, machine))
    mine = next(case for case in cases if case.strategy == own)
    traffic = []
    strategies = []
    if world > 1:
        traffic = traffic_lines(mine)
        strategies = table(cases)
        if refused is not None:
            strategies.append(first_line(refused))
    all_sections = [
        Section("data", list(parts.settings.data_summary)),
        Section("parameters by module", parameters_by_module(parts.state.models)),
        Section("assumptions", assumptions(machine, world=world)),
        Section("one step", step(parts, mine, passes[own.gather_dtype], tokens=tokens, note=note)),
        Section(f"memory per GPU, {mine.name}", memory_lines(parts, mine)),
        Section(f"sent by each GPU per step, {mine.name}", traffic),
        Section(f"time per step, {mine.name}", time_lines(mine, tokens=tokens)),
        Section("strategies", strategies),
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
    ddp = Spread("ddp", world, exact_sums=own.exact_sums)
    fsdp = Spread("fsdp", world, sync="every", exact_sums=own.exact_sums)
    if own.kind == "ddp":
        ddp = own
    if own.kind == "fsdp":
        fsdp = replace(own, reshard_after_forward=True, replicas=1)
    strategies = {
        "ddp": ddp,
        "fsdp": fsdp,
        "fsdp, reshard off": replace(fsdp, reshard_after_forward=False),
    }
    if world > node_size > 1 and world % node_size == 0:
        nodes = world // node_size
        strategies[f"fsdp, {nodes} replicas"] = replace(fsdp, replicas=nodes)
    if own in strategies.values():
        return strategies
    replicas = f", {own.replicas} replicas" if own.replicas > 1 else ""
    return {f"fsdp{replicas}, as set": own, **strategies}


def assumptions(machine: Machine, *, world: int) -> list[str]:
    """List the assumed values of the machine with their sources."""
    nodes = counted(-(-world // machine.node_size), "node")
    texts = {
        "node_size": f"{counted(world, 'GPU')}, {nodes} of {machine.node_size}",
        "flops": f"{machine.flops / 1e12:.4g} TFLOP/s per GPU",
        "mfu": f"{machine.mfu:.0%} of the peak is used, recomputation included",
        "gpu_memory": f"{in_words(machine.memory_bytes)} per GPU",
        "bandwidth": f"{in_words(machine.bandwidth)}/s per GPU to other nodes, in each direction",
        "node_bandwidth": f"{in_words(machine.node_bandwidth)}/s per GPU inside a node, in each direction",
    }
    rows = [(text, f"[{machine.origins[name]}]") for name, text in texts.items()]
    return text_table(rows, left=(0, 1))


def step(
    parts: RunComponents, case: Case, passed: Pass, *, tokens: float | None, note: str | None
) -> list[str]:
    """List the samples of a step and the results of the dry pass."""
    world = case.strategy.world
    micro_batches = case.micro_batches
    of_ranks = "micro-batches" if micro_batches > 1 else "micro-batch"
    forward, backward = passed.flops
    lines = [
        f"{_samples(world * micro_batches * passed.samples, tokens)} = {counted(world, 'rank')}"
        f" x {micro_batches} {of_ranks} x {passed.samples:,}"
    ]
    if note:
        lines.append(note)
    lines += [
        f"a micro-batch in {parts.plan.precision}: forward {with_unit(forward, 'FLOP')}, backward {with_unit(backward, 'FLOP')}",
        f"it stores {in_words(passed.kept_bytes)} for the backward pass and needs at most {in_words(passed.peak_bytes)}"
        " (dry pass on the meta device)",
    ]
    return lines


def memory_lines(parts: RunComponents, case: Case) -> list[str]:
    """List the memory by purpose, and compare the sum with the available memory."""
    memory = case.memory
    rows = []
    for name, purpose in _PURPOSES.items():
        size = getattr(memory, name)
        if size:
            rows.append((purpose, in_words(size), ""))
    rows.append(("total, at most", in_words(memory.total), fits(memory, case.machine)))
    lines = text_table(rows, left=(0, 2))
    optimizers = [trained.optimizer for trained in parts.state.optimizers.values()]
    if any(state_bytes(optimizer) is None for optimizer in optimizers):
        unknown = "optimizer state is not included: its size is unknown before the first step"
        lines.insert(-1, unknown)
    if memory.host:
        lines.append(f"in host memory: {in_words(memory.host)} for each GPU")
    return lines


def traffic_lines(case: Case) -> list[str]:
    """List the bytes sent during each pass, the passes per step, and the sum."""
    shards = case.strategy.shards
    copies = case.strategy.copies
    lines = []
    for window in windows(case.work, case.strategy, micro_batches=case.micro_batches):
        amounts = []
        if window.to_shards:
            amounts.append(f"{in_words(window.to_shards)} among {shards} shards")
        if window.to_replicas:
            amounts.append(f"{in_words(window.to_replicas)} among {copies} replicas")
        if amounts:
            lines.append(f"{window.times} x during a {window.part} pass: {', '.join(amounts)}")
    speeds = []
    if shards > 1:
        bandwidth = ring_bandwidth(case.machine, members=shards, stride=1)
        speeds.append(f"{in_words(bandwidth)}/s among shards")
    if copies > 1:
        bandwidth = ring_bandwidth(case.machine, members=copies, stride=shards)
        speeds.append(f"{in_words(bandwidth)}/s among replicas")
    lines.append(f"{in_words(case.timing.sent_bytes)} in total, at {', '.join(speeds)}")
    return lines


def time_lines(case: Case, *, tokens: float | None) -> list[str]:
    """List the seconds of computation and communication, and the smallest batch size that hides all
    communication.
    """
    timing = case.timing
    world = case.strategy.world
    samples_per_s = world * case.micro_batches * case.work.samples / timing.step_s
    speed = f"{three_digits(samples_per_s)} samples/s"
    if tokens is not None:
        speed = f"{three_digits(samples_per_s * tokens)} tokens/s"
    of_step = f"{measured_time(timing.step_s)} per step without its update: {speed}"
    if world == 1:
        return [of_step]
    hidden_s = timing.communication_s - timing.exposed_s
    samples = timing.hidden_from
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
    rows = [head]
    for case in cases:
        memory = case.memory
        timing = case.timing
        rows.append(
            (
                case.name,
                in_words(memory.total),
                fits(memory, case.machine),
                in_words(timing.sent_bytes),
                f"{timing.hidden_from:,} per GPU",
                measured_time(timing.exposed_s),
                measured_time(timing.step_s),
            )
        )
    return text_table(rows, left=(0, 2))


def _samples(samples: int, tokens: float | None) -> str:
    text = counted(samples, "sample")
    return text if tokens is None else f"{text} ({round(samples * tokens):,} tokens)"
