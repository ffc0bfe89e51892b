"""The records that a run has written, of one kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot.tracking.jsonl import records


def records_of_kind(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """As readers see them: without those that a resume has superseded."""
    return [record for record in records(run_dir / "metrics.jsonl") if record["kind"] == kind]


def training_records(run_dir: Path) -> list[dict[str, Any]]:
    return records_of_kind(run_dir, "train")
