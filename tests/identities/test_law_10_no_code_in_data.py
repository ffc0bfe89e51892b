"""Law 10: nothing surefoot writes or reads is pickled; no file it opens can make it run code. 1
second.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from equal_checkpoints import newest_intact
from in_one import in_one
from refused import refused
from surefoot.checkpoint import Checkpoint, Store
from surefoot.checkpoint.format import DamageError, write
from surefoot.checkpoint.reader import read, read_manifest, verify
from surefoot.cli.main import main
from surefoot.data.text.shards import TokenShards, write_shards
from surefoot.errors import CheckpointError, DataError
from surefoot.tools.verify.verdict import Verdict
from surefoot.tracking.jsonl import records
from written_runs import written

SOURCES = sorted((Path(__file__).parents[2] / "src" / "surefoot").rglob("*.py"))

MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "ruamel",
}
CALLS = {"eval", "exec", "__import__"}
ARGUMENTS = {"allow_pickle", "weights_only", "pickle_module"}
ATTRIBUTES = {
    "torch.load",
    "torch.save",
    "torch.hub",
    "torch.package",
    "torch.jit.load",
    "torch.export.load",
    "torch.distributed.checkpoint",
    "dist.checkpoint",
    "torch.distributed.broadcast_object_list",  # the object collectives pickle what they send
    "torch.distributed.all_gather_object",
    "torch.distributed.gather_object",
    "torch.distributed.scatter_object_list",
    "torch.distributed.send_object_list",
    "torch.distributed.recv_object_list",
}


def code_in_data(source: str) -> Iterator[str]:
    """Everything in a file of Python by which data could become code, one line each."""
    full_names: dict[str, str] = {}  # of what is imported, by its name in this file
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in CALLS:
                yield f"line {node.lineno}: {node.func.id}(...)"
        elif isinstance(node, ast.keyword) and node.arg in ARGUMENTS:
            yield f"line {node.value.lineno}: {node.arg}="
        for name in used_names(node, full_names):
            if name.partition(".")[0] in MODULES or name in ATTRIBUTES:
                yield f"line {node.lineno}: {name}"  # type: ignore[attr-defined]


def used_names(node: ast.AST, full_names: dict[str, str]) -> list[str]:
    """The full names that a node imports, or that it reads; imports are added to `full_names`."""
    names = []
    if isinstance(node, ast.Import):
        for alias in node.names:
            names.append(alias.name)
            package = alias.name.partition(".")[0]
            if alias.asname:
                full_names[alias.asname] = alias.name
            else:
                full_names[package] = package
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            full_name = f"{node.module}.{alias.name}"
            names.append(full_name)
            full_names[alias.asname or alias.name] = full_name
    elif isinstance(node, ast.Attribute):
        names.append(dotted_name(node, full_names))
    return names


def dotted_name(node: ast.expr, full_names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value, full_names)}.{node.attr}"
    if isinstance(node, ast.Name):
        return full_names.get(node.id, node.id)
    return "?"


@in_one
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-2:]))
def test_no_source_file_can_turn_data_into_code(path: Path) -> None:
    assert list(code_in_data(path.read_text(encoding="utf-8"))) == []


@in_one
@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x', weights_only=True)",
        "import torch as t\nt.save({}, 'x')",
        "from torch import load",
        "import yaml",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "eval('1')",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
    ],
)
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert list(code_in_data(source)) != []


def test_there_are_sources_to_search() -> None:
    assert len(SOURCES) > 10


# ---- hostile files ----


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.canary,)


def pickled(canary: Path, scratch: Path) -> bytes:
    return pickle.dumps(Bomb(canary))


def torch_saved(canary: Path, scratch: Path) -> bytes:
    torch.save({"w": Bomb(canary)}, scratch)
    return scratch.read_bytes()


def old_torch_saved(canary: Path, scratch: Path) -> bytes:
    torch.save({"w": Bomb(canary)}, scratch, _use_new_zipfile_serialization=False)
    return scratch.read_bytes()


def tagged(canary: Path, scratch: Path) -> bytes:
    return f"!!python/object/apply:pathlib.Path.touch ['{canary}']\n".encode()


def tagged_json(canary: Path, scratch: Path) -> bytes:
    return json.dumps(
        {"__reduce__": ["pathlib.Path.touch", str(canary)], "py/object": "pathlib.Path"}
    ).encode()


def nested(canary: Path, scratch: Path) -> bytes:
    return b"[" * 500_000


def header_of_a_terabyte(canary: Path, scratch: Path) -> bytes:
    return (1 << 40).to_bytes(8, "little") + b"{}"


def tensor_of_a_terabyte(canary: Path, scratch: Path) -> bytes:
    tensor = {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}
    header = json.dumps({"w": tensor}).encode()
    return len(header).to_bytes(8, "little") + header


HOSTILE = [
    pickled,
    torch_saved,
    old_torch_saved,
    tagged,
    tagged_json,
    nested,
    header_of_a_terabyte,
    tensor_of_a_terabyte,
]
FILES = ["manifest.json", "state.json", "model.safetensors"]


def test_the_bombs_are_live(tmp_path: Path) -> None:
    (tmp_path / "bomb").write_bytes(torch_saved(tmp_path / "canary", tmp_path / "scratch"))
    torch.load(tmp_path / "bomb", weights_only=False)
    assert (tmp_path / "canary").exists()


def read_manifest_body(directory: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    del body["sha256"]
    return body


def write_manifest_body(directory: Path, body: dict[str, Any]) -> None:
    """With a hash that is that of the body."""
    text = json.dumps(body, sort_keys=True, indent=1) + "\n"
    body = {**body, "sha256": sha256(text.encode()).hexdigest()}
    (directory / "manifest.json").write_text(json.dumps(body, sort_keys=True, indent=1) + "\n")


def make_hashes_sound(directory: Path) -> None:
    """Make the manifest fit the files, as whoever made them would."""
    body = read_manifest_body(directory)
    for file, entry in body["files"].items():
        data = (directory / file).read_bytes()
        entry["bytes"] = len(data)
        entry["sha256"] = sha256(data).hexdigest()
    write_manifest_body(directory, body)


@contextmanager
def nothing_runs(canary: Path) -> Iterator[None]:
    """No bomb has gone off, and no module that could set one off is loaded."""
    modules_before = set(sys.modules)
    yield
    assert not canary.exists()
    packages = {name.partition(".")[0] for name in set(sys.modules) - modules_before}
    assert packages.isdisjoint(MODULES)


@in_one
@pytest.mark.parametrize("sound", [False, True], ids=["as it is", "with sound hashes"])
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: str(hostile.__name__))
def test_a_hostile_file_in_a_checkpoint_runs_nothing(
    hostile: Callable[[Path, Path], bytes], file: str, sound: bool, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    store = Store(tmp_path / "checkpoints")
    for step in (1, 2):
        store.save(Checkpoint(step, {"model": {"w": torch.ones(3)}}, {"a": 1}))
    (store.path(2) / file).write_bytes(hostile(canary, tmp_path / "scratch"))
    if sound and file != "manifest.json":
        make_hashes_sound(store.path(2))

    with nothing_runs(canary):
        newest, damaged = newest_intact(store)
        problems = verify(store.path(2))
        store.newest_step()

    assert newest is not None
    is_mere_json = sound and file == "state.json" and hostile is tagged_json
    if is_mere_json:
        assert newest.step == 2
        assert damaged == []
    else:
        assert newest.step == 1
        assert [damage.path for damage in damaged] == [store.path(2)]
        assert problems or sound


by_hostile = pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: str(hostile.__name__))


@by_hostile
def test_a_hostile_line_of_records_runs_nothing(
    hostile: Callable[[Path, Path], bytes], tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    line = hostile(canary, tmp_path / "scratch")
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"kind": "train", "step": 1}\n' + line + b'\n{"kind": "train", "step": 2}\n')

    with nothing_runs(canary):
        assert [record["step"] for record in records(file)] == [1, 2]


@by_hostile
def test_a_hostile_index_of_tokens_runs_nothing(
    hostile: Callable[[Path, Path], bytes], tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    write_shards(np.arange(9), tmp_path / "shards", vocab_size=9)
    (tmp_path / "shards" / "tokens.json").write_bytes(hostile(canary, tmp_path / "scratch"))

    with nothing_runs(canary), refused("shard-index-invalid", DataError):
        TokenShards.open(tmp_path / "shards")


@by_hostile
def test_a_hostile_file_of_settings_runs_nothing(
    hostile: Callable[[Path, Path], bytes], tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    run = tmp_path / "run"
    run.mkdir()
    config = run / "config.toml"
    config.write_bytes(hostile(canary, tmp_path / "scratch"))

    with nothing_runs(canary):
        for command in (
            ["resume", str(run)],
            ["evaluate", str(run)],
            ["train", "gpt", f"--config={config}", f"--run-dir={tmp_path / 'other'}"],
        ):
            with pytest.raises(SystemExit) as end:
                main(command)
            assert end.value.code == 2


@pytest.mark.parametrize(
    "file",
    [
        "../secret",
        "/etc/hostname",
        "a/../../secret",
        "bomb.pkl",
        "model.safetensors\n",
        "weights.pt",
    ],
)
def test_a_manifest_cannot_name_a_file_elsewhere_or_of_another_kind(
    file: str, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    write(Checkpoint(1, {}, {}), directory=checkpoint)
    (tmp_path / "secret").write_text("secret")
    body = read_manifest_body(checkpoint)
    body["files"][file] = {"bytes": 6, "sha256": sha256(b"secret").hexdigest()}
    write_manifest_body(checkpoint, body)

    for read_some in (read, read_manifest):
        with pytest.raises(DamageError, match=re.escape(repr(file))):
            read_some(checkpoint)


def test_what_a_checkpoint_holds_is_safetensors_and_json(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(Checkpoint(1, {"model": {"w": torch.ones(3)}, "kept": {}}, {"a": None}))
    assert sorted(path.name for path in store.path(1).iterdir()) == [
        "kept.safetensors",
        "manifest.json",
        "model.safetensors",
        "state.json",
    ]
    for path in store.path(1).glob("*.json"):
        assert isinstance(json.loads(path.read_text()), dict)
    for path in store.path(1).glob("*.safetensors"):
        data = path.read_bytes()
        header_size = int.from_bytes(data[:8], "little")
        assert isinstance(json.loads(data[8 : 8 + header_size]), dict)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
def test_a_pipe_in_place_of_the_settings_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "config.toml"
    os.mkfifo(pipe)

    def write_late() -> None:
        """Opens as soon as somebody reads, so that no reader hangs."""
        with suppress(OSError):
            pipe.write_text('kind = "script"')

    threading.Thread(target=write_late, daemon=True).start()
    newest: Any = SimpleNamespace(saved=SimpleNamespace(best_step=None))
    with refused("run-without-best-checkpoint", CheckpointError):
        Store(tmp_path / "checkpoints").best_step(newest)


ESCAPE = "\x1b[2J"  # clears a terminal


def assert_escaped(text: str) -> None:
    """It has no control character, but the rest of the text."""
    assert "[2J" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    "command",
    [["diagnose", "a"], ["compare", "a", "b"], ["resume", "a"]],
    ids=lambda words: words[0],
)
def test_texts_of_a_run_cannot_steer_the_terminal(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = range(1, 60)
    records = [{"kind": "train", "step": step, "loss": float(step), "lr": 0.1} for step in steps]
    records += [{"kind": "eval", "step": step, f"val{ESCAPE}/loss": float(step)} for step in steps]
    records += [{"kind": "event", "step": 60, "event": f"failed: {ESCAPE}"}]
    config = f'[program]\nkind = "recipe"\nrecipe = "gpt"\n[{json.dumps(ESCAPE)}]\nlr = 1.0\n'
    for name in ("a", "b"):
        run = written(tmp_path / name, records, config=config)
        (run / "checkpoints").mkdir()

    with suppress(SystemExit):
        main(command)

    assert_escaped("".join(capsys.readouterr()))


def test_a_verdict_cannot_steer_the_terminal() -> None:
    assert_escaped(str(Verdict("a", proved=[ESCAPE], not_proved=[], problems=[])))
