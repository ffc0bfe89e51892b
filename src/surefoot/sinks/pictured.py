"""A panel of a run as one picture, for those who show pictures and nothing else."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.tracking.format import compact

if TYPE_CHECKING:
    from PIL.Image import Image

_CELL = 28  # pixels of one count
_LETTER = 7  # pixels of one letter's width, about
_TILE = 64  # pixels of one picture
_LONGEST_NAME = 16


@dataclass(frozen=True)
class Drawn:
    """A PNG file."""

    png: bytes
    width: int
    height: int


def pictured(panel: Mapping[str, Any]) -> Drawn | None:
    """A confusion matrix or the pictures of a panel (as `panels.written` gives it) as a picture; None of any other kind.

    >>> drawn = pictured({"kind": "confusion-matrix", "title": "", "classes": ("a", "b"), "counts": ((3, 1), (0, 4))})
    >>> drawn.png[1:4], drawn.width == drawn.height
    (b'PNG', True)
    """
    match panel["kind"]:
        case "confusion-matrix":
            image = _matrix(panel["classes"], panel["counts"])
        case "pictures" if panel["pictures"]:
            image = _tiles([base64.b64decode(one["png"]) for one in panel["pictures"]])
        case _:
            return None
    file = io.BytesIO()
    image.save(file, "png")
    return Drawn(file.getvalue(), image.width, image.height)


def _matrix(classes: Any, counts: Any) -> Image:
    """The darker, the larger the share of its row; rows are the right classes, as is written at the left and at the top."""
    from PIL import Image, ImageDraw

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
            left, share = margin + column * _CELL, count / max(1, sum(line))
            shade = round(255 * (1 - share))
            draw.rectangle((left, top, left + _CELL - 2, top + _CELL - 2), fill=(shade, shade, 255))
            if count:
                ink = "white" if share > 0.5 else "black"
                draw.text((left + 3, top + _CELL // 3), compact(count), fill=ink)
    return image


def _tiles(pngs: list[bytes]) -> Image:
    """Pictures side by side, row after row, each pixel as large as fits."""
    from PIL import Image

    across = min(8, len(pngs))
    image = Image.new("RGB", (across * (_TILE + 2), -(-len(pngs) // across) * (_TILE + 2)), "white")
    for place, data in enumerate(pngs):
        with Image.open(io.BytesIO(data), formats=["PNG"]) as one:
            scale = min(_TILE / one.width, _TILE / one.height)
            size = (max(1, round(one.width * scale)), max(1, round(one.height * scale)))
            tile = one.convert("RGB").resize(size, Image.Resampling.NEAREST)
        image.paste(tile, (place % across * (_TILE + 2), place // across * (_TILE + 2)))
    return image
