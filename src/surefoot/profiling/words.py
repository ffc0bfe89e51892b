"""A profile as a person reads it, in at most 100 columns."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from surefoot.memory import in_words as bytes_in_words
from surefoot.profiling.watched import PHASES

if TYPE_CHECKING:
    from surefoot.profile.profile import Profile
    from surefoot.profiling.trying import Tried

_NAMES = {
    "waiting": "waiting for data",
    "optimizer": "optimizer, clipping",
    "communication": "communication",
    "rest": "Python and the rest",
}
_SHOWN = 12  # operators
_COLUMNS = 96


def in_words(profile: Profile) -> str:
    """Time, operators, memory, arithmetic and suggestions, each a paragraph."""
    sections = [_time(profile), _operators(profile), _memory(profile), _arithmetic(profile), _suggestions(profile)]
    if profile.files:
        sections.append("\n".join(["written", *(f"  {name}" for name in profile.files)]))
    return "\n".join(line.rstrip() for line in "\n\n".join(sections).splitlines())


def _time(profile: Profile) -> str:
    phases = profile.phases
    lines = [
        *wrap(f"profile of {profile.what}: {profile.setting}", _COLUMNS, subsequent_indent="  "),
        f"a step takes {_ms(phases.step_s)} ms (the middle half of {phases.steps}: {_ms(phases.low_s)} to {_ms(phases.high_s)})",
        "",
        f"{'where it goes':<24}{'ms':>10}{'share':>8}{'memory at its peak':>22}",
    ]
    lines += [
        f"  {_NAMES.get(name, name):<22}{_ms(phases.seconds[name]):>10}{phases.share(name):>8.0%}{_peak_of(profile, name):>22}"
        for name in PHASES
        if name in phases.seconds
    ]
    lines.append(f"  {'together':<22}{_ms(phases.step_s):>10}{1:>8.0%}{bytes_in_words(profile.memory.peak.total):>22}")
    if profile.busy_s is not None:
        idle = max(0.0, 1 - profile.busy_s / phases.step_s)
        lines.append(f"  the device works {_ms(profile.busy_s)} ms of it and is idle for {idle:.0%}")
    if profile.copied_s:
        lines.append(f"  copies to the device take {_ms(profile.copied_s)} ms, beside its work")
    return "\n".join(lines)


def _operators(profile: Profile) -> str:
    lines = [f"{'operators, by their own time':<52}{'calls':>8}{'ms':>10}{'share':>8}"]
    for row in profile.operators[:_SHOWN]:
        lines.append(f"  {_short(row.name, 50):<50}{row.calls:>8.0f}{_ms(row.self_s):>10}{row.share:>8.0%}")
        if row.shapes:
            lines.append(f"    {_short(row.shapes, 90)}")
    return "\n".join(lines)


def _memory(profile: Profile) -> str:
    peak, memory = profile.memory.peak, profile.memory
    parts = {
        "parameters": peak.parameters,
        "gradients": peak.gradients,
        "optimizer state": peak.optimizer,
        "buffers, averages": peak.buffers,
        "activations, results": peak.activations,
    }
    lines = [f"memory of tensors, at its peak {bytes_in_words(peak.total)}"]
    if memory.told_by_allocator is not None:
        lines[0] += f" (the allocator says {bytes_in_words(memory.told_by_allocator)})"
    lines += [
        f"  {name:<22}{bytes_in_words(size):>10}{size / max(1, peak.total):>8.0%}"
        for name, size in parts.items()
        if size
    ]
    return "\n".join(lines)


def _peak_of(profile: Profile, phase: str) -> str:
    held = profile.memory.phases.get(phase)
    return "" if held is None else bytes_in_words(held.total)


def _arithmetic(profile: Profile) -> str:
    flops, step_s = profile.flops, profile.phases.step_s
    by = ", ".join(f"{name} {_si(number)}" for name, number in flops.by_phase.items())
    whose = "given" if profile.peak_given else "measured: the best of matrix products in this format"
    lines = [
        f"arithmetic: {_si(flops.model)}FLOP a step ({by})",
        f"  model FLOPs utilisation = FLOP of forward and backward / (step's seconds x peak) = {profile.mfu:.1%}",
        f"  {_si(profile.flops_per_s)}FLOP/s of {_si(profile.peak)}FLOP/s ({whose})",
    ]
    if flops.again:
        done = flops.done / step_s / profile.peak
        lines.append(f"  and {_si(flops.again)}FLOP again for activation checkpointing: {done:.1%} of the peak is used")
    if flops.formula is not None:
        ratio = flops.formula / step_s / profile.peak
        lines.append(
            f"  by the formula (6 N + 12 L T D) a token: {_si(flops.formula)}FLOP a step, utilisation {ratio:.1%}"
        )
    lines.append("  counted: matrix products, convolutions, attention (in full); not: elementwise work, norms, softmax")
    return "\n".join(lines)


def _suggestions(profile: Profile) -> str:
    if not profile.tries and not profile.not_tried:
        return "suggestions: nothing was tried"
    lines = ["suggestions, each measured in turn with the run as it is"]
    lines += [line for one in profile.tries for line in _suggestion(one)]
    if profile.not_tried:
        left = f"no time for: {', '.join(profile.not_tried)}; give more: --limit 120"
        lines += wrap(left, _COLUMNS, initial_indent="  ", subsequent_indent="    ")
    if profile.tries and not any(one.problem is None and not one.in_noise and one.speedup > 1 for one in profile.tries):
        lines.append("  nothing that was tried makes a step quicker")
    return "\n".join(lines)


def _suggestion(one: Tried) -> list[str]:
    if one.problem is not None:
        return [f"  {'':<24}{one.flag}: could not be tried: {_short(one.problem, 60)}"]
    gained = f"{one.speedup:.2f}x ({one.low:.2f} to {one.high:.2f})"
    verdict = "inside the noise" if one.in_noise else "" if one.speedup > 1 else "slower"
    notes = [note for note in (verdict, one.changes) if note]
    if one.name == "compiled":
        notes.append(f"first step {one.first_s:.0f} s")
    margin = f"  {'':<26}"
    flags = wrap(one.flag, _COLUMNS, initial_indent=f"  {gained:<24}", subsequent_indent=margin)
    return [*flags, *[f"{margin}{'; '.join(notes)}"][: bool(notes)]]


def _ms(seconds: float) -> str:
    """Milliseconds in three or more digits.

    >>> _ms(0.0571), _ms(0.00012), _ms(1.5)
    ('57.1', '0.12', '1500')
    """
    number = seconds * 1e3
    return f"{number:.2f}" if number < 10 else f"{number:.1f}" if number < 1000 else f"{number:.0f}"


def _si(number: float) -> str:
    """A large number with its letter, to be followed by a unit.

    >>> _si(3.2e9), _si(950), _si(1.25e13)
    ('3.2 G', '950 ', '12.5 T')
    """
    for one, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= one:
            return f"{number / one:.3g} {letter}"
    return f"{number:.3g} "


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
