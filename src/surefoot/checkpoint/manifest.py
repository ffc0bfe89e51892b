"""The manifest of a checkpoint: the size and SHA-256 of every file, and a hash of the manifest.
Opens no file; imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 5
FORMAT_OF_PIECES = 6  # for sharded tensors, which readers of format 5 would miss
FORMAT_OF_BASES = 7  # for tensors in older checkpoints, which readers of formats 5 and 6 would miss
FORMATS = (FORMAT_VERSION, FORMAT_OF_PIECES, FORMAT_OF_BASES)
MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)\.safetensors")
_PIECE = re.compile(r"(?P<name>.+)\.(?P<number>\d{5,})-of-(?P<count>\d{5,})")


@dataclass(frozen=True)
class Pieces:
    """The rows of sharded tensors on rank `rank` (from 0) of `count` ranks."""

    rank: int
    count: int
    # shapes of the complete tensors, by file and name
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
    files: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


def piece_file(name: str, rank: int, count: int) -> str:
    """Return the name, without suffix, of the file with a rank's rows.

    >>> piece_file("model", 0, 2)
    'model.00001-of-00002'
    """
    return f"{name}.{rank + 1:05d}-of-{count:05d}"


def logical_name(file: str) -> str:
    """Return the key in `Checkpoint.files` for a file name without suffix: "model" for each piece
    of the model.

    >>> logical_name("model.00001-of-00002"), logical_name("model-generator")
    ('model', 'model-generator')
    """
    match = _PIECE.fullmatch(file)
    return file if match is None else match["name"]


def bounds(rows: int, rank: int, count: int) -> tuple[int, int]:
    """Return the range (start, stop) of the rows that a rank holds of a tensor with `rows` rows.

    >>> [bounds(5, rank, 4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    most = -(-rows // count)
    return min(rank * most, rows), min((rank + 1) * most, rows)


def as_json(pieces: Pieces) -> dict[str, Any]:
    """Return the entry of state.json from which `from_json` restores the counts and shapes, without
    tensors.
    """
    shapes = {}
    for file, of_tensors in pieces.shapes.items():
        shapes[file] = {name: list(shape) for name, shape in of_tensors.items()}
    return {"pieces": pieces.count, "shapes": shapes}


def from_json(body: Any) -> Pieces | None:
    """Return the `Pieces` from the result of `as_json`, or None for None; raise `ValueError` for
    other values.
    """
    match body:
        case None:
            return None
        case {"pieces": int(count), "shapes": dict(files)} if count > 0:
            return Pieces(0, count, {file: _shapes(file, shapes) for file, shapes in files.items()})
    raise ValueError("its entry for pieces is invalid")


def _shapes(file: str, entry: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(entry, dict) or not all(map(_is_shape, entry.values())):
        raise ValueError(f"its entry for the pieces of {file} is invalid")
    return {name: tuple(shape) for name, shape in entry.items()}


def _is_shape(value: Any) -> bool:
    """Return True for the shape of a tensor with rows."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(size, int) and size >= 0 for size in value)


@dataclass(frozen=True)
class Base:
    """An older checkpoint that has tensors of this one: the SHA-256 of its manifest, and names of
    tensors by file.
    """

    step: int
    sha256: str
    tensors: Mapping[str, Sequence[str]]

    @property
    def count(self) -> int:
        return sum(map(len, self.tensors.values()))


@dataclass(frozen=True)
class Manifest:
    """The expected files of a checkpoint: (bytes, SHA-256) of each file, and of metrics.jsonl at
    `step`.

    Each of `bases` has the tensors of the checkpoint that its own files lack. `sha256` is the hash
    of the manifest's bytes.
    """

    step: int
    files: Mapping[str, tuple[int, str]]
    log: tuple[int, str] | None
    bases: Sequence[Base] = ()
    sha256: str = field(default="", compare=False, repr=False)


def to_bytes(manifest: Manifest) -> bytes:
    """Return the manifest as canonical JSON. Equivalent JSON with other bytes counts as damage.

    >>> from_bytes(to_bytes(Manifest(7, {"state.json": (3, "ab")}, None)))
    Manifest(step=7, files={'state.json': (3, 'ab')}, log=None, bases=())
    """
    files = {}
    version = FORMAT_VERSION
    for file, (length, digest) in manifest.files.items():
        files[file] = {"bytes": length, "sha256": digest}
        if _PIECE.fullmatch(file.removesuffix(".safetensors")):
            version = FORMAT_OF_PIECES
    if manifest.bases:
        version = FORMAT_OF_BASES
    log = None
    if manifest.log is not None:
        log_length, log_digest = manifest.log
        log = {"bytes": log_length, "sha256": log_digest}
    body: dict[str, Any] = {
        "files": files,
        "format_version": version,
        "metrics": log,
        "step": manifest.step,
    }
    if manifest.bases:
        body["bases"] = [
            {"sha256": base.sha256, "step": base.step, "tensors": dict(base.tensors)}
            for base in manifest.bases
        ]
    own_digest = sha256(_canonical(body)).hexdigest()
    return _canonical(body | {"sha256": own_digest})


def from_bytes(data: bytes) -> Manifest:
    """Return the manifest from the result of `to_bytes`; raise `ValueError` for other bytes or a
    path outside the directory.
    """
    body = json.loads(data)
    if not isinstance(body, dict):
        raise ValueError(f"holds a {type(body).__name__}, not a JSON object")
    digest = body.pop("sha256", None)
    if (
        digest != sha256(_canonical(body)).hexdigest()
        or _canonical(body | {"sha256": digest}) != data
    ):
        raise ValueError("hash differs")
    match body:
        case {"format_version": int(version)} if version not in FORMATS:
            raise ValueError(
                f"has format {version}, of another version of surefoot: this version reads {FORMAT_VERSION} to {FORMAT_OF_BASES}"
            )
        case {"files": dict(files), "metrics": log, "step": int(step)} if (
            step >= 0 and STATE in files
        ):
            for file in files:
                if file != STATE and not TENSORS.fullmatch(file):
                    raise ValueError(f"{file!r} is not a checkpoint file")
            bases = body.get("bases", [])
            if not isinstance(bases, list):
                raise ValueError(f"{bases!r:.80} does not list older checkpoints")
            return Manifest(
                step,
                bases=tuple(_base(base, step) for base in bases),
                log=None if log is None else _entry(log),
                files={file: _entry(entry) for file, entry in files.items()},
                sha256=sha256(data).hexdigest(),
            )
    raise ValueError("has no step or no files")


def _canonical(body: Mapping[str, Any]) -> bytes:
    return (json.dumps(body, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _entry(entry: Any) -> tuple[int, str]:
    match entry:
        case {"bytes": int(length), "sha256": str(digest)} if length >= 0:
            return length, digest
    raise ValueError(f"{entry!r} is not a length and a hash")


def _base(entry: Any, own_step: int) -> Base:
    match entry:
        case {"sha256": str(digest), "step": int(step), "tensors": dict(tensors)} if (
            0 <= step < own_step
        ):
            if all(map(_is_list_of_names, tensors.values())):
                return Base(step, digest, tensors)
    raise ValueError(f"{entry!r:.80} does not name an older checkpoint and its tensors")


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
