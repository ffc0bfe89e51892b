"""Tensors that lie over several files: they come back whole or by rows, and no more is read than
was asked for. 3 seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from in_one import in_one
from refused import refused
from surefoot.checkpoint import Checkpoint, tensor_file
from surefoot.checkpoint.filesystem import Disk
from surefoot.checkpoint.format import DamageError, write, write_tensors
from surefoot.checkpoint.manifest import Pieces, as_json, bounds, from_bytes, from_json, piece_file
from surefoot.checkpoint.reader import files_of, open_checkpoint, read
from surefoot.checkpoint.tensor_file import file_header, file_of, stored_in
from surefoot.errors import CheckpointError

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


class OneAfterTheOther:
    """The other ranks, which have written already."""

    def __init__(self, found: dict[str, tuple[int, str]]) -> None:
        self.found = found

    def begin(self) -> None: ...

    def entries(self) -> dict[str, tuple[int, str]]:
        return self.found

    def abandon(self) -> None: ...


def written(
    directory: Path, tensors: dict[str, torch.Tensor], *, count: int, once: dict[str, torch.Tensor]
) -> Path:
    """A checkpoint of a model whose tensors lie over `count` ranks."""
    shapes = {"model": {name: tuple(held.shape) for name, held in tensors.items()}}
    files: dict[str, tuple[int, str]] = {}
    for place in reversed(range(count)):
        held = {name: _rows(tensor, place, count) for name, tensor in tensors.items()}
        pieces = Pieces(place, count, shapes, {"model": held})
        if place > 0:
            beside = directory.with_name(f"{directory.name}-{place}")
            beside.mkdir()
            files |= write_tensors(Checkpoint(1, {}, pieces=pieces), directory=beside)
        else:
            write(
                Checkpoint(1, {"model": once}, {"a": 1}, pieces=pieces),
                directory=directory,
                others=OneAfterTheOther(files),
            )
    for file in files:
        place = int(file.split(".")[1].split("-")[0]) - 1
        (directory.with_name(f"{directory.name}-{place}") / file).rename(directory / file)
    return directory


def _rows(tensor: torch.Tensor, place: int, count: int) -> torch.Tensor:
    start, stop = bounds(len(tensor), place, count)
    return tensor[start:stop].clone()


@in_one
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tensors_in_any_number_of_pieces_come_back_bit_for_bit(
    count: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors = {
        "w": (4 * torch.randn(5, 3)).to(dtype),
        "long": (4 * torch.randn(11)).to(dtype),
        "none": torch.empty(4, 0, 2, dtype=dtype),
        "deep": (4 * torch.randn(2, 3, 2)).to(dtype),
    }
    once = {"buffer": torch.randn(3), "steps": torch.tensor(7)}
    path = written(tmp_path / "c", tensors, count=count, once=once)
    for found in (read(path), open_checkpoint(path)):
        assert found.state == {"a": 1}  # what tells of the pieces is not the run's
        held = found.tensors("model")
        assert held.keys() == {**tensors, **once}.keys()
        assert all(
            torch.equal(held[name], tensor) and held[name].dtype == tensor.dtype
            for name, tensor in {**tensors, **once}.items()
        )


@in_one
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("readers", [1, 2, 3, 4, 6])
def test_each_of_any_number_of_readers_gets_its_rows_and_reads_little_else(
    count: int, readers: int, tmp_path: Path
) -> None:
    class Counting:
        def __init__(self) -> None:
            self.bytes_read = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(Disk(), name)

        def read(self, path: Path, *, start: int, length: int) -> bytes:
            data = Disk().read(path, start=start, length=length)
            self.bytes_read += len(data)
            return data

    tensor = torch.randn(1000, 50)
    path = written(tmp_path / "c", {"w": tensor}, count=count, once={})
    for place in range(readers):
        disk = Counting()
        stored: Any = open_checkpoint(path, disk=disk).files["model"]["w"]
        about = disk.bytes_read
        disk.bytes_read = 0
        start, stop = bounds(1000, place, readers)
        assert torch.equal(stored.rows(start, stop), tensor[start:stop])
        assert disk.bytes_read == (stop - start) * 50 * 4
        assert about < 10_000  # manifest, state and headers


def test_a_manifest_of_pieces_is_of_another_format_than_one_of_whole_files(tmp_path: Path) -> None:
    written(tmp_path / "pieces", {"w": torch.ones(4)}, count=2, once={})
    write(Checkpoint(1, {"model": {"w": torch.ones(4)}}), directory=tmp_path / "whole")
    versions = [
        json.loads((tmp_path / name / "manifest.json").read_text())["format_version"]
        for name in ("pieces", "whole")
    ]
    assert versions == [6, 5]


def test_only_the_chosen_files_are_named_with_all_their_pieces_and_the_state(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "c", {"w": torch.ones(4)}, count=2, once={})
    manifest = from_bytes((path / "manifest.json").read_bytes())
    assert set(files_of(manifest, ["model"])) == {
        "model.00001-of-00002.safetensors",
        "model.00002-of-00002.safetensors",
        "state.json",
    }
    assert files_of(manifest, []) == ["state.json"]
    with refused("checkpoint-without-tensors", CheckpointError, name="ema", available=["model"]):
        open_checkpoint(path, only=["ema"])


def test_a_piece_that_nobody_wrote_is_refused_before_there_is_a_manifest(tmp_path: Path) -> None:
    pieces = Pieces(0, 2, {"model": {"w": (4,)}}, {"model": {"w": torch.ones(2)}})
    with refused("checkpoint-not-saved", CheckpointError, step=1):
        write(
            Checkpoint(1, {"model": {}}, pieces=pieces),
            directory=tmp_path / "c",
            others=OneAfterTheOther({}),
        )
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_pieces_that_do_not_make_the_whole_are_damage(tmp_path: Path) -> None:
    pieces = Pieces(0, 1, {"model": {"w": (4, 2)}}, {"model": {"w": torch.ones(3, 2)}})
    write(Checkpoint(1, {"model": {}}, pieces=pieces), directory=tmp_path / "c")
    for reader in (read, open_checkpoint):
        with refused("checkpoint-damaged", DamageError, path=tmp_path / "c"):
            reader(tmp_path / "c")


@pytest.mark.parametrize(("rows", "count"), [(5, 4), (8, 3), (3, 8), (0, 2), (1, 1)])
def test_rows_are_cut_as_torch_cuts(rows: int, count: int) -> None:
    cut = [len(part) for part in torch.arange(rows).chunk(count)] if rows else []
    lengths = [
        stop - start for start, stop in (bounds(rows, place, count) for place in range(count))
    ]
    assert lengths == cut + [0] * (count - len(cut))
    assert sum(lengths) == rows


# ---- the files themselves, against the library ----

named = st.dictionaries(
    st.text(min_size=1, max_size=6),
    st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 3), max_size=3)),
    max_size=5,
)


@given(named)
@settings(max_examples=60)
def test_what_is_laid_out_here_the_library_reads_and_the_other_way_round(
    tmp_path_factory: pytest.TempPathFactory, kinds: dict[str, tuple[torch.dtype, list[int]]]
) -> None:
    directory = tmp_path_factory.mktemp("files")
    kinds = {name: kind for name, kind in kinds.items() if name != "__metadata__"}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(0, 2, shape, generator=generator).to(dtype)
        for name, (dtype, shape) in kinds.items()
    }
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    ours = directory / "ours.safetensors"
    theirs = directory / "theirs.safetensors"
    begin = file_header(
        {name: (tensors[name].dtype, tensors[name].shape) for name in order}, {"format": "pt"}
    )
    ours.write_bytes(
        begin
        + b"".join(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes() for name in order)
    )
    safetensors.torch.save_file(tensors, theirs)
    found = safetensors.torch.load_file(ours)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    for file in (ours, theirs):
        read_here = stored_in(file)
        assert read_here.keys() == tensors.keys()
        for name, stored in read_here.items():
            assert stored.dtype == tensors[name].dtype
            assert torch.equal(stored.load(), tensors[name])
            assert (
                b"".join(stored.chunks())
                == tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()
            )


@given(named, st.integers(1, 40), st.integers(40, 100))
@settings(max_examples=60)
def test_however_a_file_is_cut_it_is_one_that_the_library_reads(
    kinds: dict[str, tuple[torch.dtype, list[int]]], small: int, chunk: int
) -> None:
    tensors = {
        name: torch.randint(0, 2, shape).to(dtype)
        for name, (dtype, shape) in kinds.items()
        if name != "__metadata__"
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "_SMALL_BYTES", small)
        patch.setattr(tensor_file, "CHUNK_BYTES", chunk)
        stretches = file_of(tensors)
    assert all(0 < len(stretch) < chunk + small for stretch in stretches[1:])
    found = safetensors.torch.load(b"".join(stretches))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_large_tensors_are_written_from_where_they_lie() -> None:
    tensors = {"large": torch.zeros(5 << 20), "small": torch.zeros(3)}
    stretches = file_of(tensors)
    assert [len(stretch) for stretch in stretches[1:]] == [16 << 20, 4 << 20, 12]
    for tensor in tensors.values():
        tensor.fill_(1)
    assert [stretch[3] for stretch in stretches[1:]] == [
        0x3F,
        0x3F,
        0,
    ]  # of 1.0, and of the copy of 0.0


def test_neighbours_in_one_buffer_are_written_and_what_overlaps_is_refused_by_name() -> None:
    buffer = torch.arange(6.0)
    found = safetensors.torch.load(
        b"".join(file_of({"b": buffer[:2], "none": buffer[3:3], "a": buffer[2:]}))
    )
    assert found["a"].tolist() == [2.0, 3.0, 4.0, 5.0]
    with pytest.raises(ValueError, match=r"\ba and b .*tensor\.clone\(\)"):
        file_of({"b": buffer[2:], "a": buffer[:3]})


@pytest.mark.parametrize(
    "header",
    [
        b"[1]",
        b"{",
        b'{"w": 3}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}',
        b'{"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}}',
    ],
    ids=[
        "a list",
        "cut off",
        "no entry",
        "too few bytes",
        "behind the end",
        "negative",
        "unknown type",
    ],
)
def test_a_header_that_cannot_be_is_refused(header: bytes, tmp_path: Path) -> None:
    file = tmp_path / "f.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=r"\bsafetensors\b"):
        stored_in(file)


@pytest.mark.parametrize(
    "data", [b"", b"\x01", (1 << 60).to_bytes(8, "little"), (200).to_bytes(8, "little") + b"{}"]
)
def test_a_file_without_a_header_is_refused(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "f.safetensors"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"\bsafetensors\b.*\bheader\b"):
        stored_in(file)


@in_one
@pytest.mark.parametrize(
    "stated",
    [
        {"pieces": 0, "shapes": {}},
        {"pieces": -1, "shapes": {}},
        {"pieces": "2", "shapes": {}},
        {"pieces": 2, "shapes": []},
        {"pieces": 2},
        {"pieces": 2, "shapes": {"model": {"w": []}}},
        {"pieces": 2, "shapes": {"model": {"w": [-1]}}},
        {"pieces": 2, "shapes": {"model": {"w": [2.0]}}},
        {"pieces": 2, "shapes": {"model": ["w"]}},
        [],
    ],
)
def test_what_a_state_tells_of_its_pieces_is_checked(stated: Any) -> None:
    with pytest.raises(ValueError, match=r"\bpieces\b"):
        from_json(stated)


def test_what_a_state_tells_of_its_pieces_comes_back() -> None:
    pieces = Pieces(0, 1, {"model": {"w": (0, 3), "v": (2,)}})
    assert from_json(as_json(pieces)) == pieces
    assert from_json(None) is None


@pytest.mark.parametrize("length", range(1, 9))
def test_numbers_begin_at_a_multiple_of_eight_bytes(length: int) -> None:
    assert len(file_header({"n" * length: (torch.float64, [1])}, {})) % 8 == 0


def test_a_narrow_type_before_a_wide_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^b: .*dtype"):
        file_header({"a": (torch.uint8, [1]), "b": (torch.float32, [1])}, {})


def test_a_file_that_became_shorter_meanwhile_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = written(tmp_path / "c", {"w": torch.ones(4, 2)}, count=2, once={})
    stored: Any = open_checkpoint(path).files["model"]["w"]
    last = path / f"{piece_file('model', 1, 2)}.safetensors"
    last.write_bytes(last.read_bytes()[:-4])
    with refused("checkpoint-file-unreadable", CheckpointError, path=last):
        stored.load()
