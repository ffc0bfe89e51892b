"""Records as TensorBoard scalars and texts; what a resume supersedes is purged."""

from __future__ import annotations

from pathlib import Path

from surefoot.record import Record

_NO_CURVES = {"layers", "data", "event"}  # nested, or words


class TensorBoard:
    """An event directory; `from_step` is the step a run goes on from, and nothing later of an older sitting is shown."""

    def __init__(self, directory: Path, *, from_step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard.writer import SummaryWriter  # imports protobuf and more: half a second

        # the queue is long, so that a step never waits for the thread that writes
        self.writer = SummaryWriter(str(directory), purge_step=from_step + 1, max_queue=1000, flush_secs=10)
        self.summary = Summary

    def write(self, record: Record) -> None:
        """Add the numbers of a record under its kind, at its step."""
        if record["kind"] == "sample":
            self.writer.add_text("sample", f"```\n{record['text']}\n```", record["step"])
            return
        if record["kind"] in _NO_CURVES:
            return
        prefix = "" if record["kind"] == "scores" else f"{record['kind']}/"
        scalars = [
            self.summary.Value(tag=prefix + name, simple_value=value)
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        ]
        # all in one event: one by one they cost ten times as much
        writer = self.writer._get_file_writer()  # type: ignore[no-untyped-call]
        writer.add_summary(self.summary(value=scalars), record["step"])

    def close(self) -> None:
        """Write out what is still held back."""
        self.writer.close()
