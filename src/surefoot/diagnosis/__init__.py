"""What is wrong with a run, from its records alone: findings with evidence, causes and what to try. Torch-free."""

from surefoot.diagnosis.asking import CHECKS, findings, verdicts
from surefoot.diagnosis.described import Described
from surefoot.diagnosis.finding import SEVERITIES, Finding, Severity, Unclear, Verdict, Well, worst_first
from surefoot.diagnosis.history import History, history_of
from surefoot.diagnosis.reading import collecting, described_in, history_in

__all__ = [
    "CHECKS",
    "SEVERITIES",
    "Described",
    "Finding",
    "History",
    "Severity",
    "Unclear",
    "Verdict",
    "Well",
    "collecting",
    "described_in",
    "findings",
    "history_in",
    "history_of",
    "verdicts",
    "worst_first",
]
