"""Panels that a report shows beside its curves, as plain data; `report/task_panels.py` makes them from a model."""

import base64
import json
import math
from collections.abc import Mapping, Sized
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, get_args

from surefoot.errors import ConfigError

LONGEST = 20_000  # characters of one text
LARGEST = 1_024  # pixels of one side of a picture
_MOST = 5_000  # pieces, points, examples, pictures of one panel
_MOST_CLASSES = 100
VERSION = 1  # of the format
_PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"


def check(holds: bool, otherwise: str) -> None:
    """Raise `ConfigError` if a value is invalid."""
    if not holds:
        raise ConfigError(f"a panel cannot be shown: {otherwise}")


def check_texts(*texts: Any) -> None:
    """Raise if one is not a text, is too long, or holds half a character, which no file can hold."""
    for text in texts:
        check(isinstance(text, str), f"a text is a {type(text).__name__}")
        check(len(text) <= LONGEST, f"a text has {len(text):,} characters, and {LONGEST:,} can be shown")
        check(not any("\ud800" <= one <= "\udfff" for one in text), "a text holds half a surrogate pair")


def check_number(value: Any, what: str, *, least: float = -math.inf, most: float = math.inf) -> None:
    """Raise unless it is absent or a finite number in these limits."""
    if value is not None:
        check(isinstance(value, int | float) and not isinstance(value, bool), f"{what} is a {type(value).__name__}")
        check(math.isfinite(value) and least <= value <= most, f"{what} is {value}; None where there is none")


def is_count(value: Any) -> bool:
    """Whether it is an integer of 0 or more that other programs can hold too.

    >>> is_count(3), is_count(True), is_count(-1)
    (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def check_count(parts: Sized, what: str) -> None:
    """Raise if there are more parts than can be shown."""
    check(len(parts) <= _MOST, f"{len(parts):,} {what}, and {_MOST:,} can be shown")


def check_png(text: Any) -> None:
    """Raise if it is not the base64 of a PNG file of few pixels."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (AttributeError, ValueError) as problem:
        raise ConfigError("a panel cannot be shown: a picture's png is no base64") from problem
    check(data.startswith(_PNG) and len(data) >= len(_PNG) + 8, "a picture's png is no PNG file")
    wide, high = (int.from_bytes(data[place : place + 4], "big") for place in (16, 20))
    check(0 < wide <= LARGEST and 0 < high <= LARGEST, f"a picture has {wide} x {high} pixels, at most {LARGEST} each")


Group = Literal["best", "worst", "random"]


@dataclass(frozen=True, kw_only=True)
class TextHeatmap:
    """A text in pieces, each with a number that says how strongly it is tinted; the joined pieces are the text.

    unit: "nats" for losses (0 and more), "fraction" for 0..1. A piece that has no number is not tinted.

    >>> TextHeatmap(title="val", legend="loss", unit="nats", pieces=(("def", None), (" f", 0.7))).text
    'def f'
    """

    kind: ClassVar[str] = "text-heatmap"
    title: str
    legend: str
    unit: Literal["nats", "fraction"]
    pieces: tuple[tuple[str, float | None], ...]

    def __post_init__(self) -> None:
        check_texts(self.title, self.legend, *(text for text, _ in self.pieces))
        check(self.unit in ("nats", "fraction"), f"unit is {self.unit!r}: nats or fraction")
        check_count(self.pieces, "pieces")
        for text, value in self.pieces:
            check_number(value, f"the number of {text!r}", least=0.0, most=math.inf if self.unit == "nats" else 1.0)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A model's output for one source, with its reference; `group` says why it was chosen."""

    source: str
    reference: str
    output: str
    score: float | None
    group: Group


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Texts side by side; `legend` says what the score is."""

    kind: ClassVar[str] = "examples"
    title: str
    legend: str
    examples: tuple[Example, ...]

    def __post_init__(self) -> None:
        check_texts(self.title, self.legend)
        check_count(self.examples, "examples")
        for one in self.examples:
            check(isinstance(one, Example), f"an example is a {type(one).__name__}: give surefoot.report.Example(...)")
            check_texts(one.source, one.reference, one.output)
            check_number(one.score, "a score")
            check(one.group in ("best", "worst", "random"), f"group is {one.group!r}: best, worst or random")


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Values over steps that the run's records do not have: {name: ((step, value), ...)}."""

    kind: ClassVar[str] = "curves"
    title: str
    legend: str
    curves: Mapping[str, tuple[tuple[int, float | None], ...]]

    def __post_init__(self) -> None:
        check_texts(self.title, self.legend, *self.curves)
        points = [point for curve in self.curves.values() for point in curve]
        check_count(points, "points")
        for step, value in points:
            check(is_count(step), f"a point's step is {step!r}: a whole number from 0 on")
            check_number(value, "a point's value")


@dataclass(frozen=True, kw_only=True)
class ConfusionMatrix:
    """The number of samples of each true class (row) with each predicted class (column)."""

    kind: ClassVar[str] = "confusion-matrix"
    title: str
    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_texts(self.title, *self.classes)
        number = len(self.classes)
        check(number <= _MOST_CLASSES, f"{number:,} classes, and {_MOST_CLASSES} can be shown")
        square = len(self.counts) == number and all(len(row) == number for row in self.counts)
        check(square, f"counts of {len(self.counts)} rows for {number} classes: one row and one column for each class")
        check(all(is_count(one) for row in self.counts for one in row), "counts are whole numbers from 0 on")


@dataclass(frozen=True, kw_only=True)
class Image:
    """A small image (a PNG file as base64), its true class, its prediction and the error of that."""

    png: str
    caption: str = ""
    label: str | None = None
    guess: str | None = None
    probability: float | None = None  # that the model gave its guess
    label_probability: float | None = None  # that it gave the right class
    loss: float | None = None  # in nats


@dataclass(frozen=True, kw_only=True)
class ImageGrid:
    """Pictures in a row."""

    kind: ClassVar[str] = "pictures"
    title: str
    pictures: tuple[Image, ...]

    def __post_init__(self) -> None:
        check_texts(self.title)
        check_count(self.pictures, "pictures")
        for one in self.pictures:
            check(isinstance(one, Image), f"a picture is a {type(one).__name__}: give surefoot.report.Image(...)")
            check_png(one.png)
            check_texts(one.caption, *(name for name in (one.label, one.guess) if name is not None))
            check_number(one.loss, "the loss of a picture", least=0.0)
            for chance in (one.probability, one.label_probability):
                check_number(chance, "a probability", least=0.0, most=1.0)


Panel = TextHeatmap | Examples | Curves | ConfusionMatrix | ImageGrid
PANELS: dict[str, type[Panel]] = {panel.kind: panel for panel in get_args(Panel)}


@dataclass(frozen=True, kw_only=True)
class Panels:
    """The panels of the weights after `step` steps."""

    step: int
    panels: tuple[Panel, ...]

    def to_json(self) -> str:
        """As it stands in `panels.json`.

        >>> Panels(step=3, panels=()).to_json()
        '{"format_version": 1, "step": 3, "panels": []}\\n'
        """
        panels = [written(panel) for panel in self.panels]
        return json.dumps({"format_version": VERSION, "step": self.step, "panels": panels}, allow_nan=False) + "\n"


def written(panel: Panel) -> dict[str, Any]:
    """A panel as JSON has it, its `kind` first.

    >>> written(ConfusionMatrix(title="val", classes=("cat",), counts=((4,),)))
    {'kind': 'confusion-matrix', 'title': 'val', 'classes': ('cat',), 'counts': ((4,),)}
    """
    return {"kind": panel.kind, **asdict(panel)}
