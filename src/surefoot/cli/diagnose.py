"""`surefoot diagnose RUN`: what is wrong with a run, from its records. Torch-free."""

from __future__ import annotations

import json
import sys

from surefoot.cli.options import run_directory
from surefoot.errors import ConfigError


def diagnose(arguments: list[str]) -> None:
    """`surefoot diagnose RUN [--all] [--json] [--strict]`: findings with evidence, causes and what to try."""
    from surefoot.diagnosis import (  # numpy: a tenth of a second
        Finding,
        Unclear,
        Well,
        history_in,
        verdicts,
        worst_first,
    )
    from surefoot.diagnosis.telling import told

    run, flags = run_directory(arguments), arguments[1:]
    for flag in flags:
        if flag not in ("--all", "--json", "--strict"):
            raise ConfigError(f"diagnose takes one run, and --all, --json, --strict: what is {flag!r}?")
    history = history_in(run)
    found = verdicts(history, broken=_warn_of)
    findings = worst_first([verdict for verdict in found if isinstance(verdict, Finding)])
    if "--json" in flags:
        well = {verdict.name: verdict.message for verdict in found if isinstance(verdict, Well)}
        unclear = {verdict.name: verdict.message for verdict in found if isinstance(verdict, Unclear)}
        whole = {
            "run": str(run),
            "steps_made": history.step,
            "steps": history.described.steps,
            "findings": [finding.as_json() for finding in findings],
            "well": well,
            "unclear": unclear,
        }
        print(json.dumps(whole, indent=1, ensure_ascii=False))
    else:
        print(told(history, found, every="--all" in flags))
    if "--strict" in flags and any(finding.severity == "error" for finding in findings):
        sys.exit(1)


def _warn_of(check: object, problem: Exception) -> None:
    """A fault of surefoot's own in one finding; the others are told."""
    name = getattr(check, "__name__", "?")
    print(f"warning: the finding {name} cannot be made: {type(problem).__name__}: {problem}", file=sys.stderr)
