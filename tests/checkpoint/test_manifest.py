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
from torch import Tensor

from in_one import in_one
from refused import refused
from same_bits import assert_same_bits
from surefoot.checkpoint import Checkpoint, tensor_file
from surefoot.checkpoint.filesystem import Disk
from surefoot.checkpoint.format import DamageError, write, write_tensors
from surefoot.checkpoint.manifest import Pieces, as_json, bounds, from_bytes, from_json, piece_file
from surefoot.checkpoint.reader import files_of, open_checkpoint, read
from surefoot.checkpoint.tensor_file import file_header, file_of, stored_in
from surefoot.errors import CheckpointError

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


class RanksThatHaveWritten:
    """The other ranks, with the files that they have written already."""

    def __init__(self, files: dict[str, tuple[int, str]]) -> None:
        self.files = files

    def begin(self) -> None: ...

    def entries(self) -> dict[str, tuple[int, str]]:
        return self.files

    def abandon(self) -> None: ...


def write_by_ranks(
    directory: Path, tensors: dict[str, Tensor], *, count: int, once: dict[str, Tensor]
) -> Path:
    """A checkpoint of a model whose tensors lie over `count` ranks."""
    shapes = {"model": {name: tuple(tensor.shape) for name, tensor in tensors.items()}}

    def pieces(rank: int) -> Pieces:
        parts = {name: _rows(tensor, rank, count) for name, tensor in tensors.items()}
        return Pieces(rank, count, shapes, {"model": parts})

    written: dict[str, tuple[int, str]] = {}
    beside = directory.with_name(f"{directory.name}-other-ranks")
    for rank in range(1, count):
        beside.mkdir(exist_ok=True)
        written |= write_tensors(Checkpoint(1, {}, pieces=pieces(rank)), directory=beside)
    checkpoint = Checkpoint(1, {"model": once}, {"a": 1}, pieces=pieces(0))
    write(checkpoint, directory=directory, others=RanksThatHaveWritten(written))
    for file in written:
        (beside / file).rename(directory / file)
    return directory


def _rows(tensor: Tensor, rank: int, count: int) -> Tensor:
    start, stop = bounds(len(tensor), rank, count)
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
    path = write_by_ranks(tmp_path / "c", tensors, count=count, once=once)
    for checkpoint in (read(path), open_checkpoint(path)):
        assert checkpoint.state == {"a": 1}  # what tells of the pieces is not the run's
        assert_same(checkpoint.tensors("model"), tensors | once)


def assert_same(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        name: tensor.dtype for name, tensor in expected.items()
    }
    assert_same_bits(tensors, expected)


class Counting:
    """A disk that counts the bytes that are read."""

    def __init__(self) -> None:
        self.bytes_read = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(Disk(), name)

    def read(self, path: Path, *, start: int, length: int) -> bytes:
        data = Disk().read(path, start=start, length=length)
        self.bytes_read += len(data)
        return data


@in_one
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("readers", [1, 2, 3, 4, 6])
def test_each_of_any_number_of_readers_gets_its_rows_and_reads_little_else(
    count: int, readers: int, tmp_path: Path
) -> None:
    tensor = torch.randn(1000, 50)
    path = write_by_ranks(tmp_path / "c", {"w": tensor}, count=count, once={})
    for reader in range(readers):
        start, stop = bounds(1000, reader, readers)
        disk = Counting()

        stored: Any = open_checkpoint(path, disk=disk).files["model"]["w"]
        bytes_to_open = disk.bytes_read
        rows = stored.rows(start, stop)

        assert torch.equal(rows, tensor[start:stop])
        assert disk.bytes_read - bytes_to_open == (stop - start) * 50 * 4
        assert bytes_to_open < 10_000  # manifest, state and headers


def test_a_manifest_of_pieces_is_of_another_format_than_one_of_whole_files(tmp_path: Path) -> None:
    write_by_ranks(tmp_path / "pieces", {"w": torch.ones(4)}, count=2, once={})
    write(Checkpoint(1, {"model": {"w": torch.ones(4)}}), directory=tmp_path / "whole")

    assert format_version(tmp_path / "pieces") == 6
    assert format_version(tmp_path / "whole") == 5


def format_version(directory: Path) -> int:
    return int(json.loads((directory / "manifest.json").read_text())["format_version"])


def test_only_the_chosen_files_are_named_with_all_their_pieces_and_the_state(
    tmp_path: Path,
) -> None:
    path = write_by_ranks(tmp_path / "c", {"w": torch.ones(4)}, count=2, once={})
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
    checkpoint = Checkpoint(1, {"model": {}}, pieces=pieces)

    with refused("checkpoint-not-saved", CheckpointError, step=1):
        write(checkpoint, directory=tmp_path / "c", others=RanksThatHaveWritten({}))

    assert not (tmp_path / "c" / "manifest.json").exists()


def test_pieces_that_do_not_make_the_whole_are_damage(tmp_path: Path) -> None:
    pieces = Pieces(0, 1, {"model": {"w": (4, 2)}}, {"model": {"w": torch.ones(3, 2)}})
    write(Checkpoint(1, {"model": {}}, pieces=pieces), directory=tmp_path / "c")
    for reader in (read, open_checkpoint):
        with refused("checkpoint-damaged", DamageError, path=tmp_path / "c"):
            reader(tmp_path / "c")


@pytest.mark.parametrize(("rows", "count"), [(5, 4), (8, 3), (3, 8), (0, 2), (1, 1)])
def test_rows_are_cut_as_torch_cuts(rows: int, count: int) -> None:
    lengths = []
    for rank in range(count):
        start, stop = bounds(rows, rank, count)
        lengths.append(stop - start)

    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(count)] if rows else []
    assert lengths == chunks + [0] * (count - len(chunks))
    assert sum(lengths) == rows


# ---- the files themselves, against the library ----

types_and_shapes = st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 3), max_size=3))
kinds_by_name = st.dictionaries(
    st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__"),
    types_and_shapes,
    max_size=5,
)
Kinds = dict[str, tuple[torch.dtype, list[int]]]


def random_tensors(kinds: Kinds) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (dtype, shape) in kinds.items():
        tensors[name] = torch.randint(0, 2, shape, generator=generator).to(dtype)
    return tensors


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_is_read_here(file: Path, tensors: dict[str, Tensor]) -> None:
    stored = stored_in(file)
    assert stored.keys() == tensors.keys()
    for name, entry in stored.items():
        assert entry.dtype == tensors[name].dtype
        assert torch.equal(entry.load(), tensors[name])
        assert b"".join(entry.chunks()) == bytes_of(tensors[name])


@given(kinds_by_name)
@settings(max_examples=60)
def test_what_is_laid_out_here_the_library_reads(
    tmp_path_factory: pytest.TempPathFactory, kinds: Kinds
) -> None:
    tensors = random_tensors(kinds)
    widest_first = sorted(tensors, key=lambda name: -tensors[name].element_size())
    entries = {name: (tensors[name].dtype, tensors[name].shape) for name in widest_first}

    header = file_header(entries, {"format": "pt"})
    file = tmp_path_factory.mktemp("files") / "ours.safetensors"
    file.write_bytes(header + b"".join(bytes_of(tensors[name]) for name in widest_first))

    assert_same_bits(safetensors.torch.load_file(file), tensors)
    assert_is_read_here(file, tensors)


@given(kinds_by_name)
@settings(max_examples=60)
def test_what_the_library_writes_is_read_here(
    tmp_path_factory: pytest.TempPathFactory, kinds: Kinds
) -> None:
    tensors = random_tensors(kinds)
    file = tmp_path_factory.mktemp("files") / "theirs.safetensors"
    safetensors.torch.save_file(tensors, file)

    assert_is_read_here(file, tensors)


@given(kinds_by_name, st.integers(1, 40), st.integers(40, 100))
@settings(max_examples=60)
def test_however_a_file_is_cut_it_is_one_that_the_library_reads(
    kinds: Kinds, small: int, chunk: int
) -> None:
    tensors = random_tensors(kinds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "_SMALL_BYTES", small)
        patch.setattr(tensor_file, "CHUNK_BYTES", chunk)
        stretches = file_of(tensors)

    assert all(0 < len(stretch) < chunk + small for stretch in stretches[1:])
    assert_same_bits(safetensors.torch.load(b"".join(stretches)), tensors)


def test_large_tensors_are_written_from_where_they_lie() -> None:
    tensors = {"large": torch.zeros(5 << 20), "small": torch.zeros(3)}
    _, *stretches = file_of(tensors)
    assert [len(stretch) for stretch in stretches] == [16 << 20, 4 << 20, 12]

    for tensor in tensors.values():
        tensor.fill_(1)

    last_bytes = [stretch[3] for stretch in stretches]
    assert last_bytes == [0x3F, 0x3F, 0]  # of 1.0, and of the copy of 0.0


def test_neighbours_in_one_buffer_are_written() -> None:
    buffer = torch.arange(6.0)

    stretches = file_of({"b": buffer[:2], "none": buffer[3:3], "a": buffer[2:]})

    tensors = safetensors.torch.load(b"".join(stretches))
    assert tensors["a"].tolist() == [2.0, 3.0, 4.0, 5.0]


def test_tensors_that_overlap_are_refused_by_name() -> None:
    buffer = torch.arange(6.0)

    with pytest.raises(ValueError, match=r"\ba and b .*tensor\.clone\(\)"):
        file_of({"b": buffer[2:], "a": buffer[:3]})


def entry(dtype: str, shape: list[int], offsets: list[int]) -> bytes:
    return json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"[1]", id="a list"),
        pytest.param(b"{", id="cut off"),
        pytest.param(b'{"w": 3}', id="no entry"),
        pytest.param(entry("F32", [2], [0, 4]), id="too few bytes"),
        pytest.param(entry("F32", [2], [8, 16]), id="behind the end"),
        pytest.param(entry("F32", [-2], [0, 8]), id="negative"),
        pytest.param(entry("X9", [2], [0, 8]), id="unknown type"),
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
    path = write_by_ranks(tmp_path / "c", {"w": torch.ones(4, 2)}, count=2, once={})
    stored: Any = open_checkpoint(path).files["model"]["w"]
    last = path / f"{piece_file('model', 1, 2)}.safetensors"
    last.write_bytes(last.read_bytes()[:-4])

    with refused("checkpoint-file-unreadable", CheckpointError, path=last):
        stored.load()
