"""Runs changed after they were trained, so that hashes hold all the same: only steps that are made
again can tell.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from surefoot.checkpoint.manifest import MANIFEST, Manifest, from_bytes, to_bytes

Edit = Callable[[dict[str, Any]], None]


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def manifest(place: Path) -> Manifest:
    return from_bytes((place / MANIFEST).read_bytes())


def rehashed(place: Path, file: str) -> None:
    """Make the manifest of a checkpoint tell of a file as it is now."""
    held = manifest(place)
    data = (place / file).read_bytes()
    files = dict(held.files) | {file: (len(data), sha256(data).hexdigest())}
    (place / MANIFEST).write_bytes(to_bytes(replace(held, files=files)))


def tensors_changed(
    place: Path, edit: Callable[[dict[str, Tensor]], None], *, file: str = "model"
) -> None:
    """Change tensors of a checkpoint, hashes and all."""
    name = f"{file}.safetensors"
    held = load_file(place / name)
    edit(held)
    save_file(held, place / name)
    rehashed(place, name)


def state_changed(place: Path, edit: Edit) -> None:
    """Change the state of a checkpoint, hashes and all."""
    held = json.loads((place / "state.json").read_text())
    edit(held)
    (place / "state.json").write_text(json.dumps(held, indent=1) + "\n")
    rehashed(place, "state.json")


def record_changed(
    run: Path, edit: Edit, *, step: int, kind: str = "train", hashes: bool = True
) -> int:
    """Change one record, and with `hashes` what all checkpoints have noted of the file; returns the
    number of its line.
    """
    file = run / "metrics.jsonl"
    before = file.read_bytes()
    lines = before.splitlines(keepends=True)
    found = [json.loads(line) for line in lines]
    place = next(
        n for n, record in enumerate(found) if (record["kind"], record["step"]) == (kind, step)
    )
    edit(found[place])
    now = [*lines[:place], json.dumps(found[place]).encode() + b"\n", *lines[place + 1 :]]
    file.write_bytes(b"".join(now))
    if hashes:
        noted_anew(run, [len(b"".join(lines[:n])) for n in range(len(lines) + 1)], now)
    return place + 1


def noted_anew(run: Path, ends: list[int], lines: list[bytes]) -> None:
    """Make every checkpoint tell of as many lines as before, as they are now; `ends` are where
    these ended before.
    """
    for place in (run / "checkpoints").glob("step-*"):
        held = manifest(place)
        if held.log is not None:
            data = b"".join(lines[: ends.index(held.log[0])])
            (place / MANIFEST).write_bytes(
                to_bytes(replace(held, log=(len(data), sha256(data).hexdigest())))
            )


def environment_changed(run: Path, edit: Edit) -> None:
    """Change every session that environment.json tells of."""
    held = json.loads((run / "environment.json").read_text())
    for session in held["sessions"]:
        edit(session)
    (run / "environment.json").write_text(json.dumps(held))
