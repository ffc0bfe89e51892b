"""Inspect the first bad step of a run that has just diverged, with the current state: that of the last good step."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from surefoot.errors import first_line
from surefoot.replay.findings import First, Look, sections
from surefoot.replay.inspect_step import MOST_GRADIENTS, look
from surefoot.seeding import untouched
from surefoot.train.components import Components
from surefoot.train.loop import Step

_SAMPLES = 8


@dataclass(frozen=True)
class Seen:
    """The traces of a step from all ranks, merged. `plain` is JSON, `text` for people; `first` the first fault of any rank."""

    finite: bool
    first: First | None
    plain: dict[str, Any]
    text: str

    @property
    def said(self) -> str | None:
        """The fault in a sentence; None where none was found."""
        if self.first is not None:
            reaches = f"; it reaches first {self.first.reaches}" if self.first.reaches else ""
            return f"first non-finite: {self.first}{reaches}"
        return "made again it is finite: it depends on more than weights and samples" if self.finite else None


def seen_at_hand(parts: Components, bad: Sequence[int]) -> Seen | str:
    """Inspect the first of some bad steps, or the last if the first is finite now, without changing anything; collective.

    Each rank looks at its own micro-batches, with the plain model. A text with the reason if that is impossible or fails.
    """
    alone = "surefoot replay looks at it in one process"
    why_not = {
        "the state at hand is not that before the step": parts.task.loss is None or len(parts.state.optimizers) > 1,
        f"its models are sharded: {alone}": parts.parallel.kind == "fsdp",
        f"its batch statistics are those of all ranks: {alone}": parts.world.size > 1
        and parts.settings.sync_batch_norm,
    }
    if any(why_not.values()):
        return next(why for why, holds in why_not.items() if holds)
    parts.doing(f"looking at step {bad[0]}")
    found: Seen | str = "no step was skipped"
    for step in dict.fromkeys((bad[0], bad[-1])):
        found = _together(parts, step, _own(parts, step))
        if isinstance(found, str) or not found.finite:
            break
    return found


def _own(parts: Components, step: int) -> Look | str:
    """The trace of this rank's own micro-batches; a text if tracing failed."""
    try:
        with untouched(), closing(parts.pipeline.feed(workers=0)) as feed:
            feed.start(step, stop=step + 1)
            micro_batches = feed.micro_batches(step)
        return look(
            Step(step, micro_batches, parts.task, parts.state),
            samples=_SAMPLES,
            passed_alone=MOST_GRADIENTS,
            describe=parts.settings.describe_fn,
            ranks=parts.world.size,
            pieces=parts.pipeline.plan.pieces,
        )
    except Exception as problem:
        return f"{type(problem).__name__}: {first_line(problem)}"


def _together(parts: Components, step: int, own: Look | str) -> Seen | str:
    """The traces of all ranks, the same on all of them; collective."""
    heard: list[dict[str, Any]] = parts.world.gathered({"why": own} if isinstance(own, str) else _told(own))
    if not (looked := [one for one in heard if "why" not in one]):
        return str(heard[0]["why"])
    faults = [one for one in looked if one["first"] is not None]
    faults.sort(key=lambda one: -1 if one["first"]["micro_batch"] is None else one["first"]["micro_batch"])
    shown = next(iter(faults or (one for one in looked if not one["finite"])), looked[0])
    first = First(**shown["first"] | {"samples": tuple(shown["first"]["samples"])}) if faults else None
    plain, whose = shown["plain"], ""
    if len(heard) > 1:
        names = {"why": "not_looked_at", "verdict": "verdict", "finite": "finite", "first": "first"}
        plain = {**plain, "ranks": [{name: one[key] for key, name in names.items() if key in one} for one in heard]}
        whose = f", as rank {heard.index(shown)} of {len(heard)} has seen its own micro-batches"
    return Seen(all(one["finite"] for one in looked), first, plain, text=f"step {step}{whose}\n{shown['text']}")


def _told(own: Look) -> dict[str, Any]:
    lines = [f"  {own.verdict}", *(f"  note: {note}" for note in own.notes), *sections(own, samples=_SAMPLES)]
    return {
        "verdict": own.verdict,
        "first": None if own.first is None else asdict(own.first),
        "finite": own.finite,
        "plain": own.to_dict(),
        "text": "\n".join(lines),
    }
