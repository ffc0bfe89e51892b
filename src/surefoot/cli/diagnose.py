"""`surefoot diagnose RUN`: what is wrong with a run, from its records. Torch-free."""

import json
import sys
from dataclasses import dataclass

from surefoot.cli.options import RunOption, find_run, only_options


@dataclass(frozen=True, kw_only=True)
class Diagnose(RunOption):
    """Say what a run's records show to be wrong, or worth knowing: what was found, the
    numbers and steps that show it, likely causes, and what to try, with the value
    of now. The run may be finished, dead, or training now; it is not changed.
    Errors come first: the run is broken or of no use. Warnings cost quality or
    time. Notes are worth knowing, and nothing need be wrong. Where nothing is found
    it says what was looked at.

      surefoot diagnose latest
      surefoot diagnose runs/mine --all
    """

    all: bool = False
    """Tell too what was found well, and what too little is recorded of."""
    json: bool = False
    """One JSON object: run, steps, findings, well, unclear."""
    strict: bool = False
    """Leave with 1 where an error is found; without it with 0, whatever is found."""


def diagnose(arguments: list[str]) -> None:
    """Print the findings of a run."""
    options = only_options(Diagnose, arguments, verb="diagnose")
    from surefoot.diagnose.checks import told, verdicts
    from surefoot.diagnose.finding import Unclear, Well, worst_first
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
            "well": {verdict.name: verdict.message for verdict in all_verdicts if isinstance(verdict, Well)},
            "unclear": {verdict.name: verdict.message for verdict in all_verdicts if isinstance(verdict, Unclear)},
        }
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        print(told(history, all_verdicts, every=options.all))
    if options.strict and any(finding.severity == "error" for finding in findings):
        sys.exit(1)
