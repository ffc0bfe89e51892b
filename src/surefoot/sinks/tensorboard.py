"""Records as TensorBoard scalars and texts; what a resume supersedes is purged."""

from __future__ import annotations

from pathlib import Path

from surefoot.record import Record


class TensorBoard:
    """An event directory; `from_step` is the step a run goes on from, and nothing later of an older sitting is shown."""

    def __init__(self, directory: Path, *, from_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # imports protobuf and more: half a second

        self.writer = SummaryWriter(str(directory), purge_step=from_step + 1)

    def write(self, record: Record) -> None:
        """Add the numbers of a record under its kind, at its step."""
        if record["kind"] == "sample":
            self.writer.add_text("sample", f"```\n{record['text']}\n```", record["step"])
            return
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                tag = name if record["kind"] == "scores" else f"{record['kind']}/{name}"
                self.writer.add_scalar(tag, value, record["step"])

    def close(self) -> None:
        """Write out what is still held back."""
        self.writer.close()
