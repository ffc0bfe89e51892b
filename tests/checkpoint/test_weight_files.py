"""Weights in files of other libraries: what was given comes back by name, cut into files and pieces
as asked; 1 second.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from surefoot.checkpoint import weight_files
from surefoot.checkpoint.tensor_file import file_of, stored_in
from surefoot.checkpoint.weight_files import INDEX, WEIGHTS, Written, read_weights, write_weights

TENSORS = {
    "wide": torch.arange(24.0).reshape(4, 6),
    "narrow": torch.arange(10, dtype=torch.bfloat16).reshape(5, 2),
    "steps": torch.tensor(7),
    "line": torch.arange(3.0),
}
TURNED = ("wide", "narrow")
EXPECTED = TENSORS | {name: TENSORS[name].t() for name in TURNED}


def on_disk_tensors(path: Path) -> list[Written]:
    """The tensors in a file, of which the matrices are to be turned."""
    path.write_bytes(b"".join(file_of(TENSORS)))
    on_disk = stored_in(path)
    return [Written(name, on_disk[name], turned=name in TURNED) for name in TENSORS]


def assert_holds(tensors: dict[str, Tensor], names: list[str]) -> None:
    assert sorted(tensors) == sorted(names)
    for name in names:
        assert tensors[name].dtype == EXPECTED[name].dtype
        assert torch.equal(tensors[name], EXPECTED[name]), name


def write(tmp_path: Path, max_bytes: int, **aliases: str) -> list[str]:
    """Write the tensors; the files that this has made, which are all that are there."""
    out = tmp_path / "out"
    files = write_weights(
        on_disk_tensors(tmp_path / "a"), out, max_bytes=max_bytes, aliases=aliases
    )
    assert sorted(files) == sorted(file.name for file in out.iterdir())
    return files


@pytest.mark.parametrize("chunk_bytes", [1, 10, 16, 24, 1 << 20])
def test_one_file_holds_all_and_nothing_lies_beside_it(
    chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few bytes are turned at once."""
    monkeypatch.setattr(weight_files, "CHUNK_BYTES", chunk_bytes)

    files = write(tmp_path, 1000, again="line")

    assert files == [WEIGHTS]
    assert_holds(load_file(tmp_path / "out" / WEIGHTS), list(TENSORS))


@pytest.mark.parametrize(
    ("max_bytes", "parts"),
    [
        (136, [["wide", "narrow", "steps", "line"]]),
        (135, [["wide", "narrow", "steps"], ["line"]]),
        (116, [["wide", "narrow"], ["steps", "line"]]),
        (20, [["wide"], ["narrow"], ["steps", "line"]]),
        (1, [["wide"], ["narrow"], ["steps"], ["line"]]),
    ],
)
def test_each_file_is_as_full_as_it_may_be(
    max_bytes: int, parts: list[list[str]], tmp_path: Path
) -> None:
    """96, 20, 8 and 12 bytes, in this order; what is larger than a file may be has one of its
    own.
    """
    files = write(tmp_path, max_bytes)

    shards = [file for file in files if file != INDEX]
    file_of_tensor = {}
    for file, names in zip(shards, parts, strict=True):
        assert_holds(load_file(tmp_path / "out" / file), names)
        file_of_tensor |= dict.fromkeys(names, file)
    if len(parts) > 1:
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        assert index["metadata"] == {"total_size": 136}
        assert index["weight_map"] == file_of_tensor
    assert_holds(read_weights(tmp_path / "out"), list(TENSORS))


def test_weights_that_were_there_are_replaced(tmp_path: Path) -> None:
    for max_bytes in (1, 1000, 20):
        write(tmp_path, max_bytes)
        assert_holds(read_weights(tmp_path / "out"), list(TENSORS))
