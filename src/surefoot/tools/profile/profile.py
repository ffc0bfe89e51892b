"""Profile a run's step: time, operators, memory, arithmetic, and faster variants."""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from surefoot.config.paths import local_path
from surefoot.errors import first_line, out_of_range
from surefoot.optim.clipping import clear
from surefoot.run.components import RunComponents
from surefoot.run.run import Run, check_run, trial_steps
from surefoot.tools.profile.flops import Flops, count_flops, measure_peak_flops
from surefoot.tools.profile.result import Profile, VariantGain, middle_half, write_profile
from surefoot.tools.profile.timed_step import Stepping
from surefoot.tools.profile.trace import (
    MemoryLine,
    copied_s,
    device_busy_s,
    memory_line,
    operators,
    run_profiler,
)
from surefoot.tools.profile.variants import USUAL, StepVariant, stepping, variants
from surefoot.tools.report.figures import make_directory, writing_to
from surefoot.tracking.format import counted as number_of
from surefoot.tracking.run_directory import output_into_run

_WARM_UP = 3
_UNDER_PROFILER = 2
_LEAST_STEPS = 4
_FEWEST_PAIRS = 4  # whatever the time
_MOST_PAIRS = 25


def measure(
    run: Run,
    *,
    what: str = "run",
    out: str | Path | None = None,
    steps: int = 12,
    speedups: Sequence[str] = USUAL,
    peak_flops: float | None = None,
    shapes: bool = False,
    max_seconds: float = 20.0,
    progress_fn: Callable[[str], None] | None = None,
) -> Profile:
    """Measure time and memory of a run's steps, and variants that may be faster.

    On several ranks every rank makes this call: each returns its own profile, rank 0 writes its
    files, and no variant is tried. `communication` is then the wait for sums over the ranks. FSDP
    gathers weights in the forward and backward passes, whose time includes that.

    Steps use the run's data from its current step on, with a learning rate of 0; only an optimizer
    with a closure keeps its rate. Afterwards the run and its directory are the same, bit for bit.

    `steps` are timed after a warm-up, two more run under torch's profiler, and the operations of
    one more are counted. Each variant in `speedups` (`surefoot.tools.profile.variants.NAMES`) alternates
    with the unchanged run, step by step.

    out: a directory for profile.json, profile.txt, trace.json.gz and memory.svg, and with the extra
    `plots` memory.png. If None, nothing is written. peak_flops: the peak operations per second of
    the device (such as 989e12). If None, the peak is measured with matrix products. shapes: list an
    operator separately for each shape of its inputs. max_seconds: the approximate time of the whole
    profile. The result names the variants left out for lack of time.

    >>> data = torch.randn(64, 4), torch.randn(64, 1)
    >>> run = Run(
    ...     model=lambda: torch.nn.Linear(4, 1),
    ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     train_data=data,
    ...     optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
    ...     batch_size=16,
    ...     length="9 epochs",
    ...     device="cpu",
    ...     console=False,
    ... )
    >>> measured = measure(run, steps=4, speedups=(), peak_flops=1e9)
    >>> isinstance(measured, Profile), measured.flops.by_phase, "forward" in measured.phases.seconds
    (True, {'forward': 128, 'backward': 128}, True)

    Raises `ConfigError` if the run has no loss function, or is in the middle of a step.
    """
    check_run(run, call="sf.profile.measure()", verb="profile")
    if steps < _LEAST_STEPS:
        meaning = f"{_LEAST_STEPS} or more: the mean of the middle half needs them"
        raise out_of_range("steps", steps, meaning)
    directory = None if out is None or run.rank > 0 else local_path(out, setting="out")
    if directory is not None:
        _refuse_run(directory)
    until = perf_counter() + max_seconds
    tell = progress_fn if progress_fn is not None and run.rank == 0 else _say_nothing
    with trial_steps(run, call="sf.profile.measure()") as parts:
        if directory is not None:
            make_directory(directory)  # fails before the slow part
        base = stepping(parts)
        with closing(base.feed):
            usual = _measure_usual(
                parts,
                base,
                steps=steps,
                shapes=shapes,
                until=until - 0.7 * max_seconds,
                tell=tell,
            )
            if directory is not None:
                _write_trace(usual.trace, directory / "trace.json.gz")
            peak = peak_flops or measure_peak_flops(parts.device, parts.plan.precision)
            outcomes, left_out = _outcomes(
                parts, base, speedups, until=until, limit_s=max_seconds, tell=tell
            )
        on_device = parts.device.type == "cuda"
        trace = usual.trace
        measured = Profile(
            what=what,
            setting=_setting(parts),
            phases=middle_half(usual.laps),
            operators=operators(trace, steps=_UNDER_PROFILER, shapes=shapes, on_device=on_device),
            memory=usual.memory,
            flops=usual.flops,
            peak=peak,
            peak_given=peak_flops is not None,
            tokens=usual.tokens,
            tries=rank(outcomes),
            not_tried=left_out,
            ranks=parts.world.size,
            busy_s=device_busy_s(trace, steps=_UNDER_PROFILER) if on_device else None,
            copied_s=copied_s(trace, steps=_UNDER_PROFILER) if on_device else None,
        )
    return measured if directory is None else write_profile(measured, directory)


@dataclass(frozen=True)
class _UsualSteps:
    """What was measured of the unchanged steps of a run: the seconds of the phases of each, the
    trace of torch's profiler, the memory, and the arithmetic of one step and its targets.
    """

    laps: list[dict[str, float]]
    trace: Any
    memory: MemoryLine
    flops: Flops
    tokens: float


def _measure_usual(
    parts: RunComponents,
    base: Stepping,
    *,
    steps: int,
    shapes: bool,
    until: float,
    tell: Callable[[str], None],
) -> _UsualSteps:
    """Time the unchanged steps until they are enough or it is late, then look into further ones."""
    tell("warming up")
    for _ in range(_WARM_UP):
        base.make()
    tell(f"timing {steps} steps")
    laps = _timed_steps(base, parts, steps, until=until)
    tell("running torch's profiler")
    trace = run_profiler(
        base.make, parts.device, times=_UNDER_PROFILER, shapes=shapes, memory=False
    )
    memory = memory_line(base.make, parts.state, parts.device)
    tell("counting FLOP")
    micro_batches = base.feed.micro_batches(base.next)
    base.next += 1
    flops = count_flops(parts.task, parts.state, micro_batches, parts.pipeline.feed(workers=0))
    tokens = float(sum(micro_batch.count for micro_batch in micro_batches))
    return _UsualSteps(laps, trace, memory, flops, tokens)


def _refuse_run(directory: Path) -> None:
    if (directory / "checkpoints").is_dir():
        raise output_into_run(directory, instead="DIR")


def _timed_steps(
    base: Stepping, parts: RunComponents, steps: int, *, until: float
) -> list[dict[str, float]]:
    """Return the seconds of each phase of so many steps, or of fewer if it is late. Collective."""
    laps: list[dict[str, float]] = []
    while len(laps) < steps:
        is_late = perf_counter() >= until
        # clocks differ between ranks
        if len(laps) >= _LEAST_STEPS and parts.world.from_main(is_late):
            break
        laps.append(base.make())
    return laps


def _say_nothing(_: str) -> None:
    pass


def _outcomes(
    parts: RunComponents,
    base: Stepping,
    names: Sequence[str],
    *,
    until: float,
    limit_s: float,
    tell: Callable[[str], None],
) -> tuple[list[VariantGain], list[str]]:
    if parts.world.size > 1:
        return [], []  # ranks would not agree on when to stop
    outcomes: list[VariantGain] = []
    offered = variants(parts, names)
    base.seconds()
    for index, variant in enumerate(offered):
        eta_s = until - perf_counter()
        if eta_s <= 0:
            return outcomes, [other.flag for other in offered[index:]]
        tell(f"trying {variant.flag}")
        share_s = eta_s / (len(offered) - index)
        outcomes.append(measure_variant(variant, base, limit_s=min(share_s, 0.2 * limit_s)))
    return outcomes, []


def _setting(parts: RunComponents) -> str:
    """Describe the run whose step is measured."""
    sizes = parts.pipeline.sizes
    batch = f"{sizes.batch_size:,} {sizes.unit} per step"
    if sizes.pieces > 1:
        batch += f" in {sizes.pieces} micro-batches"
    words = [batch, parts.plan.precision, _device_in_words(parts.device)]
    if parts.pipeline.workers:
        words.append(f"{parts.pipeline.workers} workers")
    if parts.compiled:
        words.append("compiled")
    if parts.computed_again:
        words.append(f"activation checkpointing ({parts.computed_again})")
    if parts.world.size > 1:
        kind = parts.plan.parallel.kind
        words.append(f"rank {parts.world.rank} of {parts.world.size} ({kind})")
    words.append(f"from step {parts.state.step:,}")
    return ", ".join(words)


def _device_in_words(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu, {number_of(torch.get_num_threads(), 'thread')}"
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _write_trace(trace: Any, path: Path) -> None:
    # for Chrome and Perfetto (https://ui.perfetto.dev)
    with writing_to(path):
        trace.export_chrome_trace(str(path))


def measure_variant(variant: StepVariant, base: Stepping, *, limit_s: float) -> VariantGain:
    """Measure a variant for about `limit_s` seconds. An exception is stored in `problem`."""
    gain = VariantGain(variant.name, variant.flag, variant.changes)
    alternate = _together if variant.workers is None else _apart
    try:
        ratios, first_s = alternate(variant, base, limit_s)
    except Exception as problem:
        clear(base.plain_state.parameters)
        base.plain_state.buffers.undo()
        return replace(gain, problem=first_line(problem) or type(problem).__name__)
    low, high = interval(ratios)
    return replace(
        gain,
        speedup=median(ratios),
        low=low,
        high=high,
        pairs=len(ratios),
        first_s=first_s,
    )


def rank(rows: Sequence[VariantGain]) -> list[VariantGain]:
    """Sort variants: the largest gains first, then variants within the noise, slower variants, and
    failures.
    """
    faster = [row for row in rows if row.is_faster]
    in_noise = [row for row in rows if row.problem is None and row.in_noise]
    failed = [row for row in rows if row.problem is not None]
    slower = [row for row in rows if row not in [*faster, *in_noise, *failed]]
    ranked = []
    for group in (faster, in_noise, slower):
        ranked += sorted(group, key=lambda row: -row.speedup)
    return [*ranked, *failed]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a confidence interval of the median: two values that enclose the median with a
    probability of at least 0.95.

    The interval is valid for any distribution (Conover 1999, Practical Nonparametric Statistics,
    section 3.2). With fewer than six values, the interval is the whole range and has a lower
    probability, such as 7/8 for four values.

    >>> interval([1.0, 2.0, 3.0]), interval(list(range(100)))
    ((1.0, 3.0), (39, 60))
    """
    ordered = sorted(values)
    number = len(values)
    spared = 0
    beyond = 1  # the cases, of all 2^number, with the median beyond one side
    while 20 * 2 * (beyond + math.comb(number, spared + 1)) <= 2**number:
        spared += 1
        beyond += math.comb(number, spared)
    return ordered[spared], ordered[number - 1 - spared]


def _together(variant: StepVariant, base: Stepping, limit_s: float) -> tuple[list[float], float]:
    ratios: list[float] = []
    with variant.entered():
        steps = variant.make()
        first_s = steps.seconds()
        steps.seconds()
    base.seconds()
    steps.begin(base.next)  # both steps of a pair use the same samples
    start_s = perf_counter()

    def changed_seconds() -> float:
        with variant.entered():
            return steps.seconds()

    while _needs_more(len(ratios), start_s, limit_s):
        if len(ratios) % 2 == 0:  # the two take turns to be first
            usual_s = base.seconds()
            changed_s = changed_seconds()
        else:
            changed_s = changed_seconds()
            usual_s = base.seconds()
        ratios.append(usual_s / changed_s)
    steps.feed.close()
    return ratios, first_s


def _needs_more(count: int, start_s: float, limit_s: float, *, fewest: int = _FEWEST_PAIRS) -> bool:
    if count < fewest:
        return True
    return count < _MOST_PAIRS and perf_counter() - start_s < limit_s


def _apart(variant: StepVariant, base: Stepping, limit_s: float) -> tuple[list[float], float]:
    # alternate in blocks of steps: workers prefetch during the other side's steps, so they end
    # after each block
    assert variant.workers is not None
    usual_s: list[float] = []
    changed_s: list[float] = []
    first_s = 0.0
    start_s = perf_counter()
    while _needs_more(len(changed_s), start_s, limit_s, fewest=2 * _FEWEST_PAIRS):
        _, stretch_s = _stretch(base, base.feed.workers)
        usual_s += stretch_s
        steps = variant.make()
        with closing(steps.feed):
            begin_s, stretch_s = _stretch(steps, variant.workers)
        changed_s += stretch_s
        first_s = first_s or begin_s
    return [median(usual_s) / step_s for step_s in changed_s], first_s


def _stretch(steps: Stepping, workers: int) -> tuple[float, list[float]]:
    # the first step, and four steps after the prefetched samples are used up
    steps.begin(steps.next)
    first_s = steps.seconds()
    for _ in range(2 * workers):
        steps.seconds()
    return first_s, [steps.seconds() for _ in range(_FEWEST_PAIRS)]
