"""`surefoot diagnose RUN`: findings about a run, from its records. Torch-free."""

import json
import sys
from dataclasses import dataclass

from surefoot.cli.options import RunOption, find_run, only_options


@dataclass(frozen=True, kw_only=True)
class Diagnose(RunOption):
    """Show what is wrong with a run, or worth knowing, from its records: the numbers
    and steps that show it, likely causes, and what to try with the present value.
    The run may be finished, dead or training; it is not changed. Errors come first:
    the run is broken or useless. Warnings cost quality or time. Notes may be
    harmless. Without findings, the output says what was checked.

      surefoot diagnose latest
      surefoot diagnose runs/mine --all
    """

    all: bool = False
    """Show also what is healthy, and what is unknown because too little is recorded."""
    json: bool = False
    """Print one JSON object: run, steps, findings, healthy, unknown."""
    strict: bool = False
    """Exit with 1 if there is an error; without this option always with 0."""


def diagnose(arguments: list[str]) -> None:
    """Print the findings of a run."""
    options = only_options(Diagnose, arguments, verb="diagnose")
    from surefoot.diagnose.checks import format_findings, verdicts
    from surefoot.diagnose.finding import Healthy, Unknown, worst_first
    from surefoot.diagnose.reading import history_in

    run = find_run(options.run)
    history = history_in(run)
    all_verdicts = verdicts(
        history,
        broken=lambda check, problem: print(  # a fault of surefoot's own in one finding; the others are told
            f"warning: the finding {check.name} cannot be made: {type(problem).__name__}: {problem}", file=sys.stderr
        ),
    )
    findings = worst_first(all_verdicts)
    if options.json:
        report = {
            "run": str(run),
            "steps_made": history.step,
            "steps": history.described.steps,
            "findings": [finding.to_dict() for finding in findings],
            "healthy": {verdict.name: verdict.message for verdict in all_verdicts if isinstance(verdict, Healthy)},
            "unknown": {verdict.name: verdict.message for verdict in all_verdicts if isinstance(verdict, Unknown)},
        }
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        print(format_findings(history, all_verdicts, every=options.all))
    if options.strict and any(finding.severity == "error" for finding in findings):
        sys.exit(1)
