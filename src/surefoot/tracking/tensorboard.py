"""Records as TensorBoard scalars, texts, images and hparams."""

import base64
import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from surefoot.config.paths import make_no_follow, open_regular
from surefoot.tracking.appended_file import AppendedFile
from surefoot.tracking.format import compact
from surefoot.tracking.jsonl import read_records, resume_count
from surefoot.tracking.record import Record, numbers_in
from surefoot.tracking.shown import SHOWN_KINDS, image_in, tag_of

_CELL = 28  # pixels per matrix cell
_LETTER = 7  # approximate pixels of a letter's width
_TILE = 64  # pixels per image
_LONGEST_NAME = 16


def render_panel(panel: Mapping[str, Any]) -> Image.Image | None:
    """Draw a confusion matrix or image panel (from `panel_to_dict`) as one image; return None for
    other kinds.

    >>> render_panel(
    ...     {
    ...         "kind": "confusion-matrix",
    ...         "title": "",
    ...         "classes": ("a", "b"),
    ...         "counts": ((3, 1), (0, 4)),
    ...     }
    ... ).size
    (71, 71)
    """
    match panel["kind"]:
        case "confusion-matrix":
            return _matrix(panel["classes"], panel["counts"])
        case "image-grid" if panel["images"]:
            return _tiles([base64.b64decode(one["png"]) for one in panel["images"]])
    return None


def _matrix(classes: Any, counts: Any) -> Image.Image:
    names = [name[:_LONGEST_NAME] for name in classes]
    margin = 8 + _LETTER * max((len(name) for name in names), default=0)
    side = margin + _CELL * len(names)
    image = Image.new("RGB", (max(side, 1), max(side, 1)), "white")
    draw = ImageDraw.Draw(image)
    for row, (name, line) in enumerate(zip(names, counts, strict=True)):
        top = margin + row * _CELL
        draw.text((2, top + _CELL // 3), name, fill="black")
        upright = Image.new("RGB", (margin, _CELL), "white")
        ImageDraw.Draw(upright).text((2, _CELL // 3), name, fill="black")
        image.paste(upright.rotate(90, expand=True), (top, 0))
        for column, count in enumerate(line):
            left = margin + column * _CELL
            share = count / max(1, sum(line))
            shade = round(255 * (1 - share))
            draw.rectangle((left, top, left + _CELL - 2, top + _CELL - 2), fill=(shade, shade, 255))
            if count:
                color = "white" if share > 0.5 else "black"
                draw.text((left + 3, top + _CELL // 3), compact(count), fill=color)
    return image


def _tiles(pngs: list[bytes]) -> Image.Image:
    across = min(8, len(pngs))
    down = -(-len(pngs) // across)
    pitch = _TILE + 2
    image = Image.new("RGB", (across * pitch, down * pitch), "white")
    for index, data in enumerate(pngs):
        with Image.open(BytesIO(data), formats=["PNG"]) as picture:
            scale = min(_TILE / picture.width, _TILE / picture.height)
            width = max(1, round(picture.width * scale))
            height = max(1, round(picture.height * scale))
            tile = picture.convert("RGB").resize((width, height), Image.Resampling.NEAREST)
        row, column = divmod(index, across)
        image.paste(tile, (column * pitch, row * pitch))
    return image


_files = itertools.count()  # file numbers of this process
# kinds with nested values or texts
_NO_CURVES = {"layer_stats", "data_check", "event", "skipped_range", "slow_rank"}
_SAMPLE_TAG = "sample/text_summary"  # of a text named "sample"
_LONGEST_EVENT = 1 << 27  # bytes
_FILES = "events.out.tfevents.*"


def event_format() -> tuple[Any, Any, Any]:
    """Import TensorBoard's modules of events and summaries, and its writer. This takes half a
    second.
    """
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    return event_pb2, summary_pb2, RecordWriter


class TensorBoard:
    """A TensorBoard event directory; `from_step` is the resumed step, and TensorBoard hides later
    points of older sessions.

    A resume gives `metrics`, the path of metrics.jsonl. Its records are written again if earlier
    sessions did not write them here.
    """

    def __init__(
        self, directory: Path, *, from_step: int, unit: str = "targets", metrics: Path | None = None
    ) -> None:
        # no writer thread of torch: on a full disk that thread prints a traceback and loses later
        # events
        event_pb2, summary_pb2, self.writer = event_format()
        self.directory = directory
        self.summary = summary_pb2.Summary
        self.event = event_pb2.Event
        self.histogram = summary_pb2.HistogramProto
        self.start = event_pb2.SessionLog.START
        self.targets = {f"train/targets{rate}": f"train/{unit}{rate}" for rate in ("", "_per_s")}
        make_no_follow(directory)
        earlier = sorted(directory.glob(_FILES))  # the order in which TensorBoard reads them
        first = from_step + 1  # of the steps whose points TensorBoard drops
        again: list[Any] = []
        # a session may have written no file here
        if metrics is not None and len(earlier) != resume_count(metrics) + 1:
            first, again = self._differing(earlier, metrics, from_step=from_step)
        # TensorBoard reads files in the order of names
        number = f"{socket.gethostname()}.{os.getpid()}.{next(_files):04d}"
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{number}"
        self.appended = AppendedFile(directory / name)
        self._append(self.event(wall_time=time.time(), file_version="brain.Event:2"))
        start = event_pb2.SessionLog(status=self.start)
        self._append(self.event(wall_time=time.time(), step=first, session_log=start))
        for event in again:
            self._append(event)
        if metrics is not None and first <= from_step:
            for record in read_records(metrics):
                if first <= record["step"] <= from_step:
                    self.write(record)

    def write(self, record: Record) -> None:
        """Write a record: values under its kind at its step, panel images, and the outcome of the
        run as hparams.
        """
        match record["kind"]:
            case "panels":
                self._add_pictures(record)
            case "outcome":
                self._add_outcome(record)
            case kind if kind in SHOWN_KINDS:
                self._add_shown(record)
            case kind if kind not in _NO_CURVES:
                self._add(self._values(record), record)
            case _:
                self.appended.append(b"")  # nothing new; only waiting bytes are written

    def close(self) -> None:
        """Close the file; raise `OSError` if values are lost."""
        self.appended.close()

    def _values(self, record: Record) -> Any:
        if record["kind"] == "sample":
            return self._text("sample", f"```\n{record['text']}\n```")
        values = []
        for name, number in numbers_in(record).items():
            tag = self.targets.get(name, name)
            values.append(self.summary.Value(tag=tag, simple_value=number))
        return values

    def _differing(
        self, files: list[Path], metrics: Path, *, from_step: int
    ) -> tuple[int, list[Any]]:
        """Return the first step at which files and records differ, and the later events that no
        record has.
        """
        # by step and first tag; only hashes, because the values may not fit in memory
        hashes: dict[tuple[int, str], int] = {}
        unrecorded: list[Any] = []
        for event in itertools.chain.from_iterable(map(self._events, files)):
            if event.session_log.status == self.start:
                hashes = {key: digest for key, digest in hashes.items() if key[0] < event.step}
                unrecorded = [earlier for earlier in unrecorded if earlier.step < event.step]
            elif event.summary.value and event.step <= from_step:
                value = event.summary.value[0]
                tag = value.tag
                # pictures, histograms, other texts and hparams are not in metrics.jsonl
                is_recorded = value.HasField("simple_value") or tag == _SAMPLE_TAG
                if not is_recorded:
                    unrecorded.append(event)
                else:
                    hashes[event.step, tag] = hash(event.summary.SerializeToString())
        first = from_step + 1
        for record in read_records(metrics):
            step = record["step"]
            if step > from_step or record["kind"] in _NO_CURVES:
                continue
            values = self._values(record)
            if not values:
                continue
            content = self.summary(value=values).SerializeToString()
            if hashes.pop((step, values[0].tag), None) != hash(content):
                first = min(first, step)
        first = min([first, *(step for step, _ in hashes)])
        return first, [event for event in unrecorded if event.step >= first]

    def _events(self, file: Path) -> Iterator[Any]:
        with open_regular(file) as opened:
            # a length of 8 bytes and its checksum of 4, the event, and the event's checksum of 4
            while True:
                head = opened.read(12)
                length = int.from_bytes(head[:8], "little")
                if len(head) < 12 or length > _LONGEST_EVENT:
                    return
                content = opened.read(length + 4)
                if len(content) < length + 4:  # torn by a kill
                    return
                yield self.event.FromString(content[:-4])

    def _add_pictures(self, record: Record) -> None:
        values = []
        for panel in record["panels"]:
            picture = render_panel(panel)
            if picture is None:
                continue
            file = BytesIO()
            picture.save(file, "png")
            image = self.summary.Image(
                encoded_image_string=file.getvalue(),
                colorspace=3,
                width=picture.width,
                height=picture.height,
            )
            values.append(self.summary.Value(tag=f"panels/{panel['title']}", image=image))
        self._add(values, record)

    def _add_shown(self, record: Record) -> None:
        tag = tag_of(record)
        match record["kind"]:
            case "text":
                values = self._text(tag, record["text"])
            case "image":
                picture = image_in(record)
                channels = {"L": 1, "RGB": 3, "RGBA": 4}[picture.mode]
                image = self.summary.Image(
                    encoded_image_string=base64.b64decode(record["png"]),
                    colorspace=channels,
                    width=picture.width,
                    height=picture.height,
                )
                values = [self.summary.Value(tag=tag, image=image)]
            case _:
                values = [self.summary.Value(tag=tag, histo=self._histogram(record))]
        self._add(values, record)

    def _histogram(self, record: Record) -> Any:
        edges = record["edges"]
        return self.histogram(
            min=edges[0],
            max=edges[-1],
            num=record["count"],
            sum=record["sum"],
            sum_squares=record["sum_of_squares"],
            bucket_limit=edges[1:],
            bucket=record["counts"],
        )

    def _text(self, tag: str, content: str) -> Any:
        from torch.utils.tensorboard.summary import text

        return text(tag, content).value  # type: ignore[no-untyped-call]

    def _add_outcome(self, record: Record) -> None:
        from torch.utils.tensorboard.summary import hparams

        scores = [*record["scores"], *record.get("scores_at_end", {})]
        settings = {}
        for name, value in record["settings"].items():
            if value is not None:
                is_plain = isinstance(value, bool | int | float | str)
                settings[name] = value if is_plain else str(value)
        # TensorBoard's table of runs takes its metrics from the existing scalars
        for part in hparams(settings, dict.fromkeys(scores, 0.0)):  # type: ignore[no-untyped-call]
            self._add(part.value, record)

    def _add(self, values: Any, record: Record) -> None:
        # one event for all: separate events take ten times as long
        summary = self.summary(value=values)
        self._append(self.event(wall_time=time.time(), step=record["step"], summary=summary))

    def _append(self, event: Any) -> None:
        packed = BytesIO()
        self.writer(packed).write(event.SerializeToString())
        self.appended.append(packed.getvalue())
