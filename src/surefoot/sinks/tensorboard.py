"""Records as TensorBoard scalars, texts, images and hparams; what a resume supersedes is purged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        """Add the numbers of a record under its kind, at its step; the pictures of panels, and a run's outcome as hparams."""
        match record["kind"]:
            case "sample":
                self.writer.add_text("sample", f"```\n{record['text']}\n```", record["step"])
            case "panels":
                self._add_pictures(record)
            case "outcome":
                self._add_outcome(record)
            case kind if kind not in _NO_CURVES:
                prefix = "" if kind == "scores" else f"{kind}/"
                self._add(
                    [self.summary.Value(tag=prefix + name, simple_value=value) for name, value in _numbers(record)],
                    record,
                )

    def close(self) -> None:
        """Write out what is still held back."""
        self.writer.close()

    def _add_pictures(self, record: Record) -> None:
        from surefoot.sinks.pictured import pictured

        values = []
        for panel in record["panels"]:
            drawn = pictured(panel)
            if drawn is not None:
                held = {"width": drawn.width, "height": drawn.height, "colorspace": 3}
                image = self.summary.Image(encoded_image_string=drawn.png, **held)
                values.append(self.summary.Value(tag=f"panels/{panel['title']}", image=image))
        self._add(values, record)

    def _add_outcome(self, record: Record) -> None:
        """Settings beside the scores that stand as scalars already, for the table in which TensorBoard compares runs."""
        from torch.utils.tensorboard.summary import hparams

        scores = [*record["scores"], *(f"end/{name}" for name in record.get("scores_at_end", {}))]
        settings = {name: _plain(value) for name, value in record["settings"].items() if value is not None}
        parts = hparams(settings, dict.fromkeys(scores, 0.0))  # type: ignore[no-untyped-call]  # values: those of the scalars
        for part in parts:
            self._add(part.value, record)

    def _add(self, values: Any, record: Record) -> None:
        # all in one event: one by one they cost ten times as much
        writer = self.writer._get_file_writer()  # type: ignore[no-untyped-call]
        writer.add_summary(self.summary(value=values), record["step"])


def _numbers(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [
        (name, value)
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _plain(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
