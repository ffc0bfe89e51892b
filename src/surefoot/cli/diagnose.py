"""`surefoot diagnose RUN`: findings about a run, from its records. Imports no torch."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli.options import RunOption, find_run, needs_option, only_options
from surefoot.distributed.environment import placed, started_by_launcher

if TYPE_CHECKING:
    from surefoot.tools.diagnose.alert import Alert
    from surefoot.tools.diagnose.finding import Check


@dataclass(frozen=True, kw_only=True)
class AlertOption:
    """The option of subcommands that look for findings while a run trains."""

    alert: str | None = None
    """Send each finding of severity error once, as JSON: to a web address (POST), or to the
    standard input of a command. Only for this session."""
    alert_test: bool = False
    """First send a test alert, and start only if it arrives."""


@dataclass(frozen=True, kw_only=True)
class Diagnose(RunOption):
    """Report problems of a run from its records: for each finding its values
    and steps, likely causes, and settings to try with their current values. The
    run may be finished, dead or training; its files are only read. Errors come
    first and mean that the run is broken or useless. Warnings mean lost quality
    or time. Notes may be harmless. Without findings, the checks are listed.

      surefoot diagnose latest
      surefoot diagnose runs/mine --all
    """

    all: bool = False
    """Also show passed checks, and checks without enough records."""
    json: bool = False
    """Print one JSON object with run, steps_made, steps, findings, healthy and unknown."""
    strict: bool = False
    """Exit with status 1 if there is an error. Default: status 0."""


def alert_of(options: AlertOption, *, run: Path | str) -> "Alert | None":
    """Return the target of alerts, or None. Raises `ConfigError` for a target that cannot be one,
    and with --alert-test if a test alert does not arrive. Rank 0 sends it, or the launcher.
    """
    if options.alert is None:
        if options.alert_test:
            raise needs_option("alert_test", "alert", "TARGET")
        return None
    from surefoot.tools.diagnose.alert import Alert

    alert = Alert(options.alert)
    if options.alert_test and placed(os.environ).rank == 0 and not started_by_launcher():
        alert.test(run=run)
    return alert


def diagnose(arguments: list[str]) -> None:
    """Run `surefoot diagnose`: print the findings of a run."""
    options = only_options(Diagnose, arguments, verb="diagnose")
    from surefoot.tools.diagnose.checks import format_findings, verdicts
    from surefoot.tools.diagnose.finding import Healthy, Unknown, worst_first
    from surefoot.tools.diagnose.reading import history_in

    run = find_run(options.run)

    # a bug in one check must not hide the other findings
    def warn(check: "Check", problem: Exception) -> None:
        text = f"warning: check {check.name} failed: {type(problem).__name__}: {problem}"
        print(text, file=sys.stderr)

    history = history_in(run)
    for problem in history.described.problems:
        print(f"warning: {problem}", file=sys.stderr)
    all_verdicts = verdicts(history, broken=warn)
    findings = worst_first(all_verdicts)
    if options.json:
        healthy = [verdict for verdict in all_verdicts if isinstance(verdict, Healthy)]
        unknown = [verdict for verdict in all_verdicts if isinstance(verdict, Unknown)]
        report = {
            "run": str(run),
            "steps_made": history.last_step,
            "steps": history.described.steps,
            "findings": [finding.to_dict() for finding in findings],
            "healthy": {verdict.name: verdict.message for verdict in healthy},
            "unknown": {verdict.name: verdict.message for verdict in unknown},
        }
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        print(format_findings(history, all_verdicts, every=options.all))
    if options.strict and any(finding.severity == "error" for finding in findings):
        sys.exit(1)
