"""Records as TensorBoard scalars, texts, images and hparams; what a resume supersedes is purged."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from surefoot.config.paths import make_no_follow
from surefoot.record import Record
from surefoot.sinks.jsonl import AppendedFile

_files = itertools.count()  # of this process
_NO_CURVES = {"layers", "data", "event"}  # nested, or words


class TensorBoard:
    """An event directory; `from_step` is the step a run goes on from, and nothing later of an older sitting is shown."""

    def __init__(self, directory: Path, *, from_step: int) -> None:
        # protobuf and more: half a second
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.directory, self.summary, self.event = directory, summary_pb2.Summary, event_pb2.Event
        make_no_follow(directory)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        self.appended = AppendedFile(directory / name)
        # no thread of torch's writer: one that meets a full disk prints a traceback, and loses what follows
        self.packed = BytesIO()
        self.packing = RecordWriter(self.packed)
        self._append(self.event(wall_time=time.time(), file_version="brain.Event:2"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._append(self.event(wall_time=time.time(), step=from_step + 1, session_log=start))

    def write(self, record: Record) -> None:
        """Add the numbers of a record under its kind, at its step; the pictures of panels, and a run's outcome as hparams."""
        match record["kind"]:
            case "sample":
                from torch.utils.tensorboard.summary import text

                self._add(text("sample", f"```\n{record['text']}\n```").value, record)  # type: ignore[no-untyped-call]
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
            case _:
                self.appended.append(b"")  # what waits for room

    def close(self) -> None:
        """Close the file; `OSError` if values are lost by that."""
        self.appended.close()

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
        summary = self.summary(value=values)
        self._append(self.event(wall_time=time.time(), step=record["step"], summary=summary))

    def _append(self, event: Any) -> None:
        """Write an event in the format of TFRecord; a full disk raises `OSError`, and what waits is written later."""
        self.packing.write(event.SerializeToString())
        content = self.packed.getvalue()
        self.packed.seek(0)
        self.packed.truncate()
        self.appended.append(content)


def _numbers(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [
        (name, value)
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _plain(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
