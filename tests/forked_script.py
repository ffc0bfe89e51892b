"""A script in a process that is forked from one that has imported torch: an interpreter that
imports it takes two seconds.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from rank_processes import Outcome, Ranks


def run_forked(script: Path, ranks: Ranks) -> Outcome:
    """Run a script as Python would, and return its exit status and what it printed."""
    (outcome,) = ranks.outcomes(ranks.start(1, run_script, script=str(script)))
    return outcome


def run_script(script: str) -> None:
    runpy.run_path(script, run_name="__main__")
