"""How tensors that lie over several ranks are spread over files: each rank writes its own rows. No file in here.

    model.00001-of-00002.safetensors    the first half of the rows of each tensor, and all that is not spread
    model.00002-of-00002.safetensors    the other half

Of a tensor of n rows each of the `count` files has ceil(n / count), the last ones fewer or none, as `torch.chunk` cuts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]  # of whole tensors, by file and name

_PIECE = re.compile(r"(?P<name>.+)\.(?P<number>\d{5,})-of-(?P<count>\d{5,})")


@dataclass(frozen=True)
class Pieces:
    """What one of `count` ranks holds of the tensors that lie over all of them; `place` counts from 0."""

    place: int
    count: int
    shapes: Shapes
    files: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


def piece_file(name: str, place: int, count: int) -> str:
    """The file of a rank's rows.

    >>> piece_file("model", 0, 2)
    'model.00001-of-00002'
    """
    return f"{name}.{place + 1:05d}-of-{count:05d}"


def logical_name(file: str) -> str:
    """The name of what a file, given without its ending, is a piece of; a whole one's is its own.

    >>> logical_name("model.00001-of-00002"), logical_name("model-generator")
    ('model', 'model-generator')
    """
    found = _PIECE.fullmatch(file)
    return file if found is None else found["name"]


def is_piece(file: str) -> bool:
    """Whether a file, given without its ending, is called as a piece is."""
    return _PIECE.fullmatch(file) is not None


def bounds(rows: int, place: int, count: int) -> tuple[int, int]:
    """The first of `rows` rows that lies at a place, and the one after the last.

    >>> [bounds(5, place, 4) for place in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-rows // count)
    return min(place * each, rows), min((place + 1) * each, rows)


def as_json(pieces: Pieces) -> dict[str, Any]:
    """What a checkpoint says of its pieces."""
    shapes = {file: {name: list(shape) for name, shape in held.items()} for file, held in pieces.shapes.items()}
    return {"pieces": pieces.count, "shapes": shapes}


def from_json(told: Any) -> Pieces | None:
    """What `as_json` gave, None for None; `ValueError` for anything else."""
    match told:
        case None:
            return None
        case {"pieces": int(count), "shapes": dict(files)} if count > 0:
            return Pieces(0, count, {file: _shapes(file, held) for file, held in files.items()})
    raise ValueError("says of its pieces what cannot be")


def _shapes(file: str, held: Any) -> dict[str, tuple[int, ...]]:
    match held:
        case dict():
            shapes = {name: tuple(shape) for name, shape in held.items() if isinstance(shape, list) and shape}
            if len(shapes) == len(held) and all(isinstance(n, int) and n >= 0 for s in shapes.values() for n in s):
                return shapes
    raise ValueError(f"says of the pieces of {file} what cannot be")
