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
        if self.finite:
            return "the step is finite when repeated: it depends on more than weights and samples"
        return None


def inspect_diverged_step(parts: Components, bad: Sequence[int]) -> DivergenceReport | str:
    """Inspect the first bad step, or the last bad step if the first is now finite. Collective.

    No state changes. Each rank inspects its own micro-batches with the plain model. Returns the
    reason as text if the inspection fails.
    """
    alone = "surefoot replay inspects it in one process"
    if parts.task.loss is None or len(parts.state.optimizers) > 1:
        return "the state before the step is not available"
    if parts.plan.parallel.kind == "fsdp":
        return f"its models are sharded: {alone}"
    if parts.world.size > 1 and parts.settings.sync_batch_norm:
        return f"its batch statistics include all ranks: {alone}"
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
    own_report = {"why": own} if isinstance(own, str) else _report_of(own)
    reports: list[dict[str, Any]] = parts.world.gathered(own_report)
    inspected = [report for report in reports if "why" not in report]
    if not inspected:
        return str(reports[0]["why"])
    faulty = [report for report in inspected if report["first"] is not None]
    nonfinite = [report for report in inspected if not report["finite"]]
    first = None
    if faulty:
        chosen = min(faulty, key=_micro_batch_of_first)
        values = chosen["first"]
        first = First(**values | {"samples": tuple(values["samples"])})
    elif nonfinite:
        chosen = nonfinite[0]
    else:
        chosen = inspected[0]
    plain = chosen["plain"]
    whose = ""
    if len(reports) > 1:
        plain["ranks"] = [_summary(report) for report in reports]
        whose = f", from the micro-batches of rank {reports.index(chosen)} of {len(reports)}"
    finite = all(report["finite"] for report in inspected)
    return DivergenceReport(finite, first, plain, text=f"step {step}{whose}\n{chosen['text']}")


def _micro_batch_of_first(report: dict[str, Any]) -> int:
    micro_batch = report["first"]["micro_batch"]
    return -1 if micro_batch is None else int(micro_batch)


def _summary(report: dict[str, Any]) -> dict[str, Any]:
    if "why" in report:
        return {"not_looked_at": report["why"]}
    return {name: report[name] for name in ("verdict", "finite", "first")}


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
