"""The live diagnosis of a run.

One line is printed when a finding appears or becomes more severe. Only `surefoot diagnose` prints
notes. A resumed run does not repeat the findings of earlier sessions. The diagnosis takes at most
1% of the run's time.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from surefoot.tools.diagnose.alert import Alert
from surefoot.tools.diagnose.checks import findings, in_a_line
from surefoot.tools.diagnose.finding import SEVERITIES, Check, Finding
from surefoot.tools.diagnose.history import History
from surefoot.tools.diagnose.run_settings import RunDescription
from surefoot.tracking.format import counted
from surefoot.tracking.record import Record
from surefoot.tracking.run_records import RunRecords

_ASKED_AFTER = ("train", "eval", "slow_rank")
_TIMES_AS_LONG = 100  # wait until the next check, in durations of the last check
_NAMED = 3  # findings in the final message
_GONE = 0.1  # fraction of all steps: a finding is printed again after a longer absence


@dataclass
class _Reported:
    severity: int
    gone_since: float = math.inf  # the first step without the finding

    def covers(self, severity: int, step: int, longest_absence: float) -> bool:
        """Return False if the finding is more severe now, or was absent for long."""
        return severity >= self.severity and step - self.gone_since <= longest_absence


class LiveFindings:
    """A sink for records that prints the findings of one session on rank 0."""

    def __init__(
        self,
        described: RunDescription,
        *,
        say: Callable[[str], None],
        command: str | None,
        alert: Alert | None = None,
        earlier: Iterable[Record] = (),
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.described = described
        self.say = say
        self.command = command
        self.now = now
        self.alert = alert
        self.alerted: set[str] = set()  # names of findings
        self.records = RunRecords()
        self.reported: dict[str, _Reported] = {}
        self.broken: set[Check] = set()
        self.not_before = 0.0
        # read after the first step, to start faster; None afterwards
        self.earlier: Iterable[Record] | None = earlier
        self.waiting: list[Record] = []  # until `earlier` is read

    def write(self, record: Record) -> None:
        """Add a record, and print and send new findings if a check is due. Never raises."""
        self._take(record)
        if self.alert is not None:
            if record["kind"] == "event":  # a session that failed looks for findings nowhere else
                self.at_end()
            self._say_problems(self.alert)

    def _take(self, record: Record) -> None:
        try:
            if self.earlier is not None:
                self.waiting.append(record)
                if record["kind"] not in _ASKED_AFTER:
                    return
                self._read_earlier()
            else:
                self.records.add(record)
            if record["kind"] in _ASKED_AFTER and self.now() >= self.not_before:
                self._report_new_findings()
        except Exception as problem:  # a failed check does not end a run
            self._give_up(problem)

    def at_end(self) -> list[Finding]:
        """Return the findings of the completed run without notes, the most severe first. Never
        raises.
        """
        try:
            self._read_earlier()
            steps = self.described.steps
            is_complete = self.records.is_complete or self.records.last_step == steps
            goes_on = self.described.goes_on and not is_complete
            over = replace(self.described, standing="over", goes_on=goes_on)
            history = History(over, self.records)
            at_end = findings(history, broken=self._warn_of)
            self._send(at_end, history.step)
        except Exception as problem:
            self._give_up(problem)
            return []
        return [finding for finding in at_end if finding.severity != "note"]

    def sentence(self) -> str:
        """Return a sentence with the final findings and the command that explains them. Returns ""
        without findings.
        """
        at_end = self.at_end()
        if not at_end:
            return ""
        names = []
        for finding in at_end[:_NAMED]:
            since = f" since step {finding.step:,}" if finding.step else ""
            names.append(f"{finding.name}{since}")
        if len(at_end) > _NAMED:
            names.append(f"{len(at_end) - _NAMED} more")
        text = f"{counted(len(at_end), 'finding')}: {', '.join(names)}"
        if self.command is not None:
            return f"{text}: {self.command}"
        lines = [text]
        lines += [in_a_line(finding, command=None) for finding in at_end]
        lines.append(
            "for their evidence and for more checks, set run_dir: surefoot diagnose reads its records"
        )
        return "\n".join(lines)

    def close(self) -> None:
        """Wait a few seconds for alerts that are being sent."""
        if self.alert is not None:
            self.alert.close()
            self._say_problems(self.alert)

    def _send(self, current: Iterable[Finding], step: int) -> None:
        if self.alert is None:
            return
        for finding in current:
            if finding.severity == "error" and finding.name not in self.alerted:
                self.alerted.add(finding.name)
                self.alert.send(finding, run=self.described.name, step=step)

    def _say_problems(self, alert: Alert) -> None:
        for text in alert.problems():
            self.say(text)

    def _read_earlier(self) -> None:
        """Read the records of earlier sessions, whose findings are not reported again."""
        if self.earlier is None:
            return
        earlier = self.earlier
        self.earlier = None
        self.records.extend(earlier)
        if self.records.count:
            _, of_earlier = self._current_findings()
            for finding in of_earlier:
                self.reported[_key(finding)] = _Reported(SEVERITIES.index(finding.severity))
                if finding.severity == "error":
                    self.alerted.add(finding.name)
        self.records.extend(self.waiting)
        self.waiting = []

    def _report_new_findings(self) -> None:
        step, current = self._current_findings()
        self._send(current, step)
        longest_absence = _GONE * max(step, self.described.steps or 0)
        new = None
        for finding in current:
            severity = SEVERITIES.index(finding.severity)
            before = self.reported.get(_key(finding))
            if before is not None and before.covers(severity, step, longest_absence):
                before.gone_since = math.inf
            elif finding.severity != "note" and new is None:  # others are printed next time
                new = finding
                self.reported[_key(finding)] = _Reported(severity)
        present = {_key(finding) for finding in current}
        for key, reported in self.reported.items():
            if key not in present:
                reported.gone_since = min(step, reported.gone_since)
        if new is not None:
            self.say(in_a_line(new, command=self.command))

    def _current_findings(self) -> tuple[int, list[Finding]]:
        start_s = self.now()
        history = History(self.described, self.records)
        current = findings(history, broken=self._warn_of)
        end_s = self.now()
        self.not_before = end_s + _TIMES_AS_LONG * (end_s - start_s)
        return history.step, current

    def _give_up(self, problem: Exception) -> None:
        if self.not_before < math.inf:
            self.not_before = math.inf
            self.say(
                f"note: the checks for findings stopped: {type(problem).__name__}: {problem}; training continues"
            )

    def _warn_of(self, check: Check, problem: Exception) -> None:
        if check not in self.broken:
            self.broken.add(check)
            self.say(
                f"note: the check for {check.name} failed, which is a bug in surefoot:"
                f" {type(problem).__name__}: {problem}; training continues"
            )


def _key(finding: Finding) -> str:
    return f"{finding.name} {finding.numbers.get('rank', '')}"  # each slow rank is printed
