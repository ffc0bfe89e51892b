"""The manifest of a checkpoint: length and SHA-256 of all that is in it, itself included. No file in here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from surefoot.checkpoint.pieces import is_piece

FORMAT_VERSION = 1
FORMAT_OF_PIECES = 2  # where tensors lie over several files, which those who read the first would not find
MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)\.safetensors")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says it holds: (bytes, SHA-256) of each file, and of metrics.jsonl at its step."""

    step: int
    files: Mapping[str, tuple[int, str]]
    log: tuple[int, str] | None


def to_bytes(manifest: Manifest) -> bytes:
    """The only way to write a manifest: other bytes are damage, even where they would mean the same.

    >>> from_bytes(to_bytes(Manifest(7, {"state.json": (3, "ab")}, None)))
    Manifest(step=7, files={'state.json': (3, 'ab')}, log=None)
    """
    pieces = any(is_piece(file.removesuffix(".safetensors")) for file in manifest.files)
    body: dict[str, Any] = {
        "files": {file: {"bytes": length, "sha256": digest} for file, (length, digest) in manifest.files.items()},
        "format_version": FORMAT_OF_PIECES if pieces else FORMAT_VERSION,
        "metrics": None if manifest.log is None else {"bytes": manifest.log[0], "sha256": manifest.log[1]},
        "step": manifest.step,
    }
    return _canonical(body | {"sha256": sha256(_canonical(body)).hexdigest()})


def from_bytes(data: bytes) -> Manifest:
    """What `to_bytes` wrote; a `ValueError` in one line for anything else, a single flipped bit included.

    File names are checked here: none of them can lead out of the checkpoint's directory.
    """
    body = json.loads(data)
    if not isinstance(body, dict):
        raise ValueError(f"holds a {type(body).__name__}, not named values")
    digest = body.pop("sha256", None)
    if digest != sha256(_canonical(body)).hexdigest() or _canonical(body | {"sha256": digest}) != data:
        raise ValueError("hash differs")
    match body:
        case {"format_version": int(version)} if version not in (FORMAT_VERSION, FORMAT_OF_PIECES):
            raise ValueError(f"is of format {version}, this surefoot reads format {FORMAT_OF_PIECES} and older ones")
        case {"files": dict(files), "metrics": log, "step": int(step)} if step >= 0 and STATE in files:
            for file in files:
                if file != STATE and not TENSORS.fullmatch(file):
                    raise ValueError(f"{file!r} is no file of a checkpoint")
            return Manifest(
                step,
                {file: _entry(held) for file, held in files.items()},
                None if log is None else _entry(log),
            )
    raise ValueError("names no step or no files")


def _canonical(body: Mapping[str, Any]) -> bytes:
    return (json.dumps(body, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _entry(entry: Any) -> tuple[int, str]:
    match entry:
        case {"bytes": int(length), "sha256": str(digest)} if length >= 0:
            return length, digest
    raise ValueError(f"{entry!r} is not a length and a hash")
