"""Inspection of the first bad step of a run that has just diverged, from the state of the last good
step.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from surefoot.errors import first_line
from surefoot.seeding import untouched
from surefoot.tools.replay.findings import First, Look, sections
from surefoot.tools.replay.inspect_step import MOST_GRADIENTS, look
from surefoot.train.components import Components
from surefoot.train.loop import Step

_SAMPLES = 8


@dataclass(frozen=True)
class DivergenceReport:
    """The traces of a step from all ranks: `plain` as JSON, `text` for people, and the `first`
    fault of any rank.
    """

    finite: bool
    first: First | None
    plain: dict[str, Any]
    text: str

    @property
    def sentence(self) -> str | None:
        if self.first is not None:
            reaches = f"; first affected module: {self.first.reaches}" if self.first.reaches else ""
            return f"first non-finite: {self.first}{reaches}"
        return (
            "the step is finite when repeated: it depends on more than weights and samples"
            if self.finite
            else None
        )


def inspect_diverged_step(parts: Components, bad: Sequence[int]) -> DivergenceReport | str:
    """Inspect the first bad step, or the last bad step if the first is now finite. Collective.

    No state changes. Each rank inspects its own micro-batches with the plain model. Returns the
    reason as text if the inspection fails.
    """
    alone = "surefoot replay inspects it in one process"
    why_not = {
        "the state before the step is not available": parts.task.loss is None
        or len(parts.state.optimizers) > 1,
        f"its models are sharded: {alone}": parts.plan.parallel.kind == "fsdp",
        f"its batch statistics include all ranks: {alone}": parts.world.size > 1
        and parts.settings.sync_batch_norm,
    }
    if any(why_not.values()):
        return next(why for why, holds in why_not.items() if holds)
    parts.doing(f"inspecting step {bad[0]}")
    report: DivergenceReport | str = "no step was skipped"
    for step in dict.fromkeys((bad[0], bad[-1])):
        report = _gather_reports(parts, step, _own(parts, step))
        if isinstance(report, str) or not report.finite:
            break
    return report


def _own(parts: Components, step: int) -> Look | str:
    try:
        with untouched(), closing(parts.pipeline.feed(workers=0)) as feed:
            feed.start(step, stop=step + 1)
            micro_batches = feed.micro_batches(step)
        return look(
            Step(step, micro_batches, parts.task, parts.state),
            samples=_SAMPLES,
            passed_alone=MOST_GRADIENTS,
            describe=parts.settings.describe_fn,
            shares=parts.pipeline.shares,
            user_state=parts.run_state.user_state.objects,
        )
    except Exception as problem:
        return f"{type(problem).__name__}: {first_line(problem)}"


def _gather_reports(parts: Components, step: int, own: Look | str) -> DivergenceReport | str:
    reports: list[dict[str, Any]] = parts.world.gathered(
        {"why": own} if isinstance(own, str) else _report_of(own)
    )
    if not (inspected := [each for each in reports if "why" not in each]):
        return str(reports[0]["why"])
    faults = [each for each in inspected if each["first"] is not None]
    faults.sort(
        key=lambda each: (
            -1 if each["first"]["micro_batch"] is None else each["first"]["micro_batch"]
        )
    )
    report = next(iter(faults or (each for each in inspected if not each["finite"])), inspected[0])
    first = (
        First(**report["first"] | {"samples": tuple(report["first"]["samples"])})
        if faults
        else None
    )
    plain, whose = report["plain"], ""
    if len(reports) > 1:
        names = {"why": "not_looked_at", "verdict": "verdict", "finite": "finite", "first": "first"}
        plain |= {
            "ranks": [
                {name: each[key] for key, name in names.items() if key in each} for each in reports
            ]
        }
        whose = f", from the micro-batches of rank {reports.index(report)} of {len(reports)}"
    finite, text = (
        all(each["finite"] for each in inspected),
        f"step {step}{whose}\n{report['text']}",
    )
    return DivergenceReport(finite, first, plain, text=text)


def _report_of(own: Look) -> dict[str, Any]:
    lines = [
        f"  {own.verdict}",
        *(f"  note: {note}" for note in own.notes),
        *sections(own, samples=_SAMPLES),
    ]
    return {
        "verdict": own.verdict,
        "first": None if own.first is None else asdict(own.first),
        "finite": own.finite,
        "plain": own.to_dict(),
        "text": "\n".join(lines),
    }
