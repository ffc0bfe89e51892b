"""One checkpoint on disk: what is written comes back, and nothing else is taken for it. 1
second.
"""

from __future__ import annotations

import json
import math
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from in_one import in_one
from refused import refused
from surefoot.checkpoint import Checkpoint
from surefoot.checkpoint.format import DamageError, size_bytes, write
from surefoot.checkpoint.manifest import Manifest, from_bytes, to_bytes
from surefoot.checkpoint.reader import read, read_manifest, verify
from surefoot.checkpoint.state_json import SavedState, hints_of
from surefoot.checkpoint.tensor_file import HostMemory, host_copy
from surefoot.errors import CheckpointError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)

# the values of these have shapes of their own
SAVED_KEYS = {*hints_of(SavedState), "sharded"}
other_keys = st.text().filter(lambda key: key not in SAVED_KEYS)


def small(**changes: Any) -> Checkpoint:
    fields: dict[str, Any] = {
        "step": 7,
        "files": {"model": {"w": torch.arange(6.0)}, "ema": {"w": torch.ones(2)}},
        "state": {"a": 1},
    }
    return Checkpoint(**(fields | changes))


@in_one
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)], ids=str)
def test_a_tensor_comes_back_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    write(Checkpoint(1, {"model": {"blocks.0/weight é": tensor}}), directory=tmp_path / "c")

    restored = read(tmp_path / "c").tensors("model")["blocks.0/weight é"]

    assert restored.dtype == tensor.dtype
    assert restored.shape == tensor.shape
    assert torch.equal(restored, tensor)


def test_values_that_are_not_finite_come_back_bit_for_bit_in_tensors(tmp_path: Path) -> None:
    tensor = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45])
    write(Checkpoint(1, {"model": {"w": tensor}}), directory=tmp_path / "c")

    restored = read(tmp_path / "c").tensors("model")["w"]

    assert torch.equal(restored.view(torch.int32), tensor.view(torch.int32))


def test_what_is_read_can_be_changed_in_place_without_changing_the_file(tmp_path: Path) -> None:
    write(small(), directory=tmp_path / "c")
    read(tmp_path / "c").files["model"]["w"].add_(1)
    assert torch.equal(read(tmp_path / "c").files["model"]["w"], torch.arange(6.0))


@settings(max_examples=25)
@given(
    state=st.dictionaries(other_keys, json_values, max_size=5),
    step=st.integers(0, 10**9),
)
def test_state_and_step_come_back_exactly(
    state: dict[str, Any], step: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("checkpoints") / "c"
    write(Checkpoint(step, {}, state, (5, "ff")), directory=directory)

    restored = read(directory)

    assert repr(restored.state) == repr(state)  # `==` would let 1 stand for True
    assert restored.step == step
    assert restored.log == (5, "ff")
    assert restored.files == {}


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"best": {"loss": math.nan}}, "state['best']['loss']"),
        ({"a": [1.0, -math.inf]}, "state['a'][1]"),
        ({"betas": (0.9, 0.95)}, "state['betas']"),
        ({"seen": {3: 1}}, "state['seen']"),
        ({"t": torch.ones(1)}, "state['t']"),
    ],
)
def test_state_that_would_come_back_changed_is_refused_by_name(
    state: dict[str, Any], name: str, tmp_path: Path
) -> None:
    with refused("not-writable-into-checkpoint", CheckpointError, name=name):
        write(small(state=state), directory=tmp_path / "c")


def tied() -> dict[str, torch.Tensor]:
    weight = torch.ones(4)
    return {"a": weight, "b": weight}


@pytest.mark.parametrize(
    "tensors",
    [tied(), {"a": torch.ones(2, 3).t()}, {"a": torch.ones(2).to_sparse()}],
    ids=["shared", "strided", "sparse"],
)
def test_tensors_that_cannot_be_written_as_they_are_are_refused(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    with refused("not-writable-into-checkpoint", CheckpointError, name="model.safetensors"):
        write(small(files={"model": tensors}), directory=tmp_path / "c")

    assert verify(tmp_path / "c") == ["manifest.json: missing"]


def test_where_hashing_fails_there_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory() -> Any:
        raise MemoryError

    monkeypatch.setattr("surefoot.checkpoint.format.sha256", no_memory)

    with pytest.raises(MemoryError):
        write(small(), directory=tmp_path / "c")

    assert verify(tmp_path / "c") == ["manifest.json: missing"]


@pytest.mark.parametrize("name", ["", "../model", "a/b", ".hidden", "é"])
def test_a_file_name_that_could_lead_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    with refused("not-writable-into-checkpoint", CheckpointError, name=repr(name)):
        write(small(files={name: {}}), directory=tmp_path / "c")


def test_only_the_chosen_files_are_read_and_checked(tmp_path: Path) -> None:
    write(small(), directory=tmp_path / "c")
    (tmp_path / "c" / "ema.safetensors").unlink()

    restored = read(tmp_path / "c", only=["model"])

    assert list(restored.files) == ["model"]
    assert restored.state == {"a": 1}
    with refused("checkpoint-damaged", DamageError, damage="ema.safetensors: missing"):
        read(tmp_path / "c", only=["ema"])


def test_a_chosen_file_is_checked(tmp_path: Path) -> None:
    write(small(), directory=tmp_path / "c")
    data = bytearray((tmp_path / "c" / "model.safetensors").read_bytes())
    data[-1] ^= 64
    (tmp_path / "c" / "model.safetensors").write_bytes(data)

    with refused("checkpoint-damaged", DamageError, damage="model.safetensors: hash differs"):
        read(tmp_path / "c", only=["model"])


def test_asking_for_tensors_that_were_never_saved_says_which_there_are_and_is_no_damage(
    tmp_path: Path,
) -> None:
    write(small(), directory=tmp_path / "c")
    with refused(
        "checkpoint-without-tensors",
        CheckpointError,
        name="optimizer",
        available=["ema", "model"],
    ):
        read(tmp_path / "c", only=["model", "optimizer"])


def test_verify_names_every_damaged_file(tmp_path: Path) -> None:
    write(small(), directory=tmp_path / "c")
    assert verify(tmp_path / "c") == []
    (tmp_path / "c" / "model.safetensors").write_bytes(b"")
    (tmp_path / "c" / "ema.safetensors").unlink()
    problems = verify(tmp_path / "c")

    files = sorted(problem.partition(":")[0] for problem in problems)
    assert files == ["ema.safetensors", "model.safetensors"]


def test_the_manifest_names_lengths_and_hashes_that_other_tools_can_check(tmp_path: Path) -> None:
    write(small(log=(12, "ab" * 32)), directory=tmp_path / "c")
    body = json.loads((tmp_path / "c" / "manifest.json").read_text())
    for file, entry in body["files"].items():
        data = (tmp_path / "c" / file).read_bytes()
        assert entry == {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    assert body["metrics"] == {"bytes": 12, "sha256": "ab" * 32}
    assert sorted([*body["files"], "manifest.json"]) == sorted(os.listdir(tmp_path / "c"))
    assert read_manifest(tmp_path / "c").step == 7


def test_files_that_are_not_ours_do_not_matter(tmp_path: Path) -> None:
    write(small(), directory=tmp_path / "c")
    (tmp_path / "c" / ".DS_Store").write_bytes(b"?")
    assert verify(tmp_path / "c") == []
    assert read(tmp_path / "c").step == 7


@pytest.mark.parametrize("version", [2, 4, 8])
def test_another_format_is_named_as_such(version: int, tmp_path: Path) -> None:
    write(small(), directory=tmp_path / "c")
    file = tmp_path / "c" / "manifest.json"
    body = json.loads(file.read_text()) | {"format_version": version}
    del body["sha256"]
    digest = sha256(manifest_text(body).encode()).hexdigest()
    file.write_text(manifest_text(body | {"sha256": digest}))

    with refused("checkpoint-damaged", DamageError, path=tmp_path / "c") as caught:
        read(tmp_path / "c")

    assert f"format {version}" in caught.value.fields["damage"]


def manifest_text(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, indent=1) + "\n"


entries = st.tuples(st.integers(0), st.text())
manifests = st.builds(
    Manifest,
    st.integers(0),
    st.dictionaries(st.just("state.json"), entries, min_size=1),
    st.none(),
)


@given(manifests)
def test_a_manifest_comes_back_from_its_bytes(manifest: Manifest) -> None:
    assert from_bytes(to_bytes(manifest)) == manifest


@given(st.binary())
def test_bytes_that_are_no_manifest_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        from_bytes(data)


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes in the file system")
def test_a_pipe_in_the_place_of_a_file_is_damage_and_not_a_hang(tmp_path: Path) -> None:
    write(small(), directory=tmp_path / "c")
    (tmp_path / "c" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "c" / "manifest.json")
    with refused("checkpoint-damaged", DamageError, path=tmp_path / "c"):
        read(tmp_path / "c")


@pytest.mark.parametrize(("tensors", "letters"), [(5000, 1), (1, 1_000_000)])
def test_the_room_asked_for_is_never_less_than_what_is_written(
    tensors: int, letters: int, tmp_path: Path
) -> None:
    """A state of up to a megabyte among it."""
    files = {"model": {f"blocks.{number}.weight": torch.ones(3) for number in range(tensors)}}
    contents = small(files=files, state={"text": "x" * letters})

    write(contents, directory=tmp_path / "c")

    written = sum(path.stat().st_size for path in (tmp_path / "c").iterdir())
    assert written <= size_bytes(contents)


def test_each_save_copies_into_the_memory_of_the_save_before() -> None:
    memory = HostMemory()
    weights = [
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.int64),
    ]
    matrix, *_ = weights
    with memory.reused():
        first = [host_copy(weight) for weight in weights]

    with memory.reused():
        second = [host_copy(weight + 1) for weight in weights[:2]]
    assert second[0].data_ptr() == first[0].data_ptr()
    assert second[0].is_contiguous()
    assert torch.equal(second[0], matrix + 1)
    assert second[1].data_ptr() in {first[1].data_ptr(), first[2].data_ptr()}

    # the state lost the second vector, and got it back
    with memory.reused():
        third = [host_copy(weight) for weight in weights]
    assert len({copy.data_ptr() for copy in third}) == 3
    assert all(map(torch.equal, third, weights))

    outside_of_a_save = host_copy(matrix)
    assert outside_of_a_save.data_ptr() != third[0].data_ptr()
