"""The result of a profile, as JSON and as text of at most 100 columns."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from surefoot.memory import in_words
from surefoot.tools.profile.flops import Flops
from surefoot.tools.profile.trace import MemoryLine, Operator, memory_chart
from surefoot.tools.report.figures import draw_beside, write_file
from surefoot.tracking.format import measured_time, shortened, text_table, with_unit

_LITTLE = 0.02  # smaller gains count as noise
PHASES = ("waiting", "forward", "loss", "backward", "communication", "optimizer", "rest")


@dataclass(frozen=True)
class Phases:
    """The seconds of a step by phase, with the sum `step_s`. The averaged steps take between
    `low_s` and `high_s`.
    """

    seconds: dict[str, float]
    low_s: float
    high_s: float
    steps: int  # timed in total

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    def share(self, phase: str) -> float:
        """Return the fraction of a step's time in this phase, from 0 to 1."""
        return self.seconds.get(phase, 0.0) / self.step_s if self.step_s else 0.0


def middle_half(laps: Sequence[Mapping[str, float]]) -> Phases:
    """Average the phases over the middle half of the steps by duration. This mean is as robust as a
    median, and the phases sum to a step.

    >>> laps = [
    ...     {"forward": 1.0, "rest": 1.0},
    ...     {"forward": 1.5, "rest": 1.0},
    ...     {"forward": 2.0, "rest": 50.0},
    ... ]
    >>> middle_half(laps).seconds, middle_half(laps).step_s
    ({'forward': 1.5, 'rest': 1.0}, 2.5)
    """
    ordered = sorted(laps, key=lambda lap: sum(lap.values()))
    spared = len(ordered) // 4 if len(ordered) > 3 else (len(ordered) - 1) // 2
    half = ordered[spared : len(ordered) - spared]
    names = [name for name in PHASES if any(name in lap for lap in half)]
    return Phases(
        {name: sum(lap.get(name, 0.0) for lap in half) / len(half) for name in names},
        sum(half[0].values()),
        sum(half[-1].values()),
        len(laps),
    )


@dataclass(frozen=True)
class VariantGain:
    """The gain of a variant, a speedup between `low` and `high` (see `interval`), or the problem
    that prevented the measurement.
    """

    name: str
    flag: str
    changes: str = ""
    speedup: float = math.nan
    low: float = math.nan
    high: float = math.nan
    pairs: int = 0
    first_s: float = 0.0  # the first step, with compilation
    problem: str | None = None

    @property
    def in_noise(self) -> bool:
        """True if the gain may be noise: the interval contains 1, or the speedup is almost 1."""
        return self.low <= 1.0 <= self.high or abs(self.speedup - 1.0) < _LITTLE

    @property
    def is_faster(self) -> bool:
        return self.problem is None and not self.in_noise and self.speedup > 1

    def to_dict(self) -> dict[str, Any]:
        """Return the gain as JSON values, without those that were not measured (NaN)."""
        values = {}
        for name, value in asdict(self).items():
            if not isinstance(value, float) or not math.isnan(value):
                values[name] = value
        return {**values, "in_noise": self.in_noise}


@dataclass(frozen=True)
class Profile:
    """The profile of one step of this process, in seconds, bytes and operations. Shares are
    fractions from 0 to 1.
    """

    what: str
    setting: str
    phases: Phases
    operators: list[Operator]
    memory: MemoryLine
    flops: Flops
    peak: float  # operations per second
    peak_given: bool
    tokens: float  # targets of a step
    tries: list[VariantGain]
    not_tried: list[str]  # left out for lack of time
    busy_s: float | None = None  # working time of the device, on CUDA
    copied_s: float | None = None  # time of copies from the host, on CUDA
    files: tuple[str, ...] = ()
    ranks: int = 1  # that share a step

    @property
    def flops_per_s(self) -> float:
        """The model's operations per second: its forward and backward passes over the time of the
        whole step.
        """
        return self.flops.model / self.phases.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, `flops_per_s` relative to the peak (Chowdhery et al. 2022,
        appendix B).
        """
        return self.flops_per_s / self.peak

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as JSON values, as in profile.json."""
        flops = asdict(self.flops) | {"model": self.flops.model, "done": self.flops.done}
        speed = {"flops_per_s": self.flops_per_s, "mfu": self.mfu, "step_s": self.phases.step_s}
        tries = [gain.to_dict() for gain in self.tries]
        return asdict(self) | speed | {"flops": flops, "tries": tries}

    def __str__(self) -> str:
        """Return time, operators, memory, arithmetic and suggestions as paragraphs."""
        sections = [
            _time(self),
            _operators(self),
            _memory(self),
            _arithmetic(self),
            _suggestions(self),
        ]
        if self.files:
            sections.append(["files written", *(f"  {name}" for name in self.files)])
        return "\n\n".join("\n".join(line.rstrip() for line in lines) for lines in sections)


def write_profile(profile: Profile, directory: Path) -> Profile:
    """Write all files except the existing trace. Returns the profile with the names of its
    files.
    """
    title = f"memory of a step of {profile.what}"
    pictures = draw_beside([memory_chart(profile.memory)], directory / "memory", title=title)
    text = directory / "profile.txt"
    numbers = directory / "profile.json"
    files = [text, numbers, directory / "trace.json.gz", *pictures]
    saved = replace(profile, files=tuple(str(file) for file in files))
    in_json = json.dumps(saved.to_dict(), indent=1, allow_nan=False)
    write_file(numbers, f"{in_json}\n".encode())
    write_file(text, f"{saved}\n".encode())
    return saved


_NAMES = {
    "waiting": "waiting for data",
    "optimizer": "optimizer, clipping",
    "rest": "Python and the rest",
}

_SHOWN = 12  # operators
_COLUMNS = 96


def _time(profile: Profile) -> list[str]:
    phases = profile.phases
    lines = [
        *wrap(f"profile of {profile.what}: {profile.setting}", _COLUMNS, subsequent_indent="  "),
        f"a step takes {measured_time(phases.step_s)}"
        f" (middle half of {phases.steps} steps: {measured_time(phases.low_s)} to {measured_time(phases.high_s)})",
        "",
    ]
    rows = [("phase", "time", "share", "peak memory")]
    for name, seconds in phases.seconds.items():
        peak = profile.memory.phases.get(name)
        memory = "" if peak is None else in_words(peak.total)
        share = f"{phases.share(name):.0%}"
        rows.append((_NAMES.get(name, name), measured_time(seconds), share, memory))
    total_memory = in_words(profile.memory.peak.total)
    rows.append(("total", measured_time(phases.step_s), "100%", total_memory))
    lines += text_table(rows)
    if profile.busy_s is not None:
        idle = max(0.0, 1 - profile.busy_s / phases.step_s)
        lines.append(
            f"  the device is busy for {measured_time(profile.busy_s)} of this time and idle for {idle:.0%}"
        )
    if profile.copied_s:
        lines.append(
            f"  copies to the device take {measured_time(profile.copied_s)} and overlap its work"
        )
    return lines


def _operators(profile: Profile) -> list[str]:
    listed = profile.operators[:_SHOWN]
    rows = [
        (shortened(row.name, 50), f"{row.calls:.0f}", measured_time(row.self_s), f"{row.share:.0%}")
        for row in listed
    ]
    head, *lines = text_table([("operators by self time", "calls", "time", "share"), *rows])
    paragraph = [head]
    for line, row in zip(lines, listed, strict=True):
        paragraph.append(line)
        if row.shapes:
            paragraph.append(f"    {shortened(row.shapes, 90)}")
    return paragraph


def _memory(profile: Profile) -> list[str]:
    peak = profile.memory.peak
    sizes = {
        "parameters": peak.parameters,
        "gradients": peak.gradients,
        "optimizer state": peak.optimizer,
        "buffers, averages": peak.buffers,
        "activations, results": peak.activations,
    }
    head = f"peak memory of tensors: {in_words(peak.total)}"
    allocated = profile.memory.told_by_allocator
    if allocated is not None:
        head += f" (the allocator reports {in_words(allocated)})"
    rows = []
    for name, size in sizes.items():
        if size:
            rows.append((name, in_words(size), f"{size / max(1, peak.total):.0%}"))
    return [head, *text_table(rows, indent="  ")]


def _arithmetic(profile: Profile) -> list[str]:
    flops = profile.flops
    peak_flop = profile.phases.step_s * profile.peak  # operations that a step could do
    phases = [f"{name} {with_unit(number, 'FLOP')}" for name, number in flops.by_phase.items()]
    by_phase = f"({', '.join(phases)})"
    between = " " if len(by_phase) < 66 else "\n  "
    whose = "given"
    if not profile.peak_given:
        whose = "measured: the best of several matrix products in this precision"
    lines = [
        f"arithmetic: {with_unit(flops.model, 'FLOP')} per step{between}{by_phase}",
        f"  model FLOPs utilization = FLOP of forward and backward / (seconds per step x peak) = {profile.mfu:.1%}",
        f"  {with_unit(profile.flops_per_s, 'FLOP/s')} of {with_unit(profile.peak, 'FLOP/s')} ({whose})",
    ]
    if flops.again:
        lines.append(
            f"  plus {with_unit(flops.again, 'FLOP')} recomputed by activation checkpointing:"
            f" {flops.done / peak_flop:.1%} of the peak in total"
        )
    if flops.formula is not None:
        formula = with_unit(flops.formula, "FLOP")
        utilization = flops.formula / peak_flop
        lines.append(
            f"  by the formula (6 N + 12 L T D) per token: {formula} per step, utilization"
            f" {utilization:.1%}"
        )
    lines.append(
        "  counted: matrix products, convolutions, full attention; ignored: elementwise work, norms, softmax"
    )
    return lines


def _suggestions(profile: Profile) -> list[str]:
    if profile.ranks > 1:
        return ["suggestions: on several ranks nothing is tried; profile one process for them"]
    if not profile.tries and not profile.not_tried:
        return ["suggestions: nothing was tried"]
    lines = ["suggestions, each measured in alternation with the unchanged run"]
    for gain in profile.tries:
        lines += _suggestion(gain)
    if profile.not_tried:
        left = f"not tried for lack of time: {', '.join(profile.not_tried)}; try --max-seconds 120"
        lines += wrap(left, _COLUMNS, initial_indent="  ", subsequent_indent="    ")
    if profile.tries and not any(gain.is_faster for gain in profile.tries):
        lines.append("  none of these makes a step faster")
    return lines


def _suggestion(gain: VariantGain) -> list[str]:
    if gain.problem is not None:
        return [f"  {'':<24}{gain.flag}: could not be tried: {shortened(gain.problem, 60)}"]
    speedup = f"{gain.speedup:.2f}x ({gain.low:.2f} to {gain.high:.2f})"
    margin = f"  {'':<26}"
    lines = wrap(gain.flag, _COLUMNS, initial_indent=f"  {speedup:<24}", subsequent_indent=margin)
    notes = []
    if gain.in_noise:
        notes.append("inside the noise")
    elif not gain.is_faster:
        notes.append("slower")
    if gain.changes:
        notes.append(gain.changes)
    if gain.name == "compiled":
        notes.append(f"first step {gain.first_s:.0f} s")
    if notes:
        lines.append(f"{margin}{'; '.join(notes)}")
    return lines
