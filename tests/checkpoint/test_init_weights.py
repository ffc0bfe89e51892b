"""Weights to start from: what fits is copied, and all that was loaded, renamed, skipped or is new
is told; 1 second.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from refused import refused
from small_runs import build
from surefoot.checkpoint.init_weights import load_initial_weights
from surefoot.distributed.world import World
from surefoot.errors import CheckpointError

ALONE = World(torch.device("cpu"))


def net(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))


def row(said: str, kind: str) -> list[str]:
    return next((line.split() for line in said.splitlines() if line.split()[:1] == [kind]), [])


def test_every_tensor_is_counted_once_under_what_became_of_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = net().state_dict()
    target = net()
    held = {
        "0.weight": source["0.weight"],
        "module.0.bias": source["0.bias"],
        "1.weight": torch.ones(5, 5),
        "x": torch.ones(7),
    }
    save_file(held, tmp_path / "held.safetensors")
    before = {name: value.clone() for name, value in target.state_dict().items()}
    said = load_initial_weights({"model": target}, tmp_path / "held.safetensors", world=ALONE)
    assert row(said, "loaded")[1:5] == ["1", "tensors", "12", "values"]
    assert row(said, "renamed")[1:5] == ["1", "tensors", "3", "values"]
    assert row(said, "skipped")[1:5] == ["2", "tensors", "32", "values"]
    assert row(said, "new")[1:5] == ["2", "tensors", "8", "values"]
    assert "1.weight ([5, 5], here [2, 3])" in said
    assert " x (" in said
    after = target.state_dict()
    assert torch.equal(after["0.weight"], source["0.weight"])
    assert torch.equal(after["0.bias"], source["0.bias"])
    assert all(torch.equal(after[name], before[name]) for name in ("1.weight", "1.bias"))


def test_of_a_run_the_newest_intact_checkpoint_is_taken_and_a_damaged_one_named(
    tmp_path: Path,
) -> None:
    build(tmp_path / "run", length="8 steps").train()
    fifth = build(tmp_path / "fifth", length="8 steps", stop_after="5 steps")
    fifth.train()
    file = tmp_path / "run" / "checkpoints" / "step-00000008" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    started = build(None)
    said = load_initial_weights(started.state.models, tmp_path / "run", world=ALONE)
    assert "step 5" in said
    assert "step-00000008" in said
    assert "(averaged weights)" in said
    expected = fifth.state.ema_models["model"].model.state_dict()
    found = started.state.models["model"].state_dict()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_damaged_checkpoint_named_itself_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "run", length="4 steps").train()
    place = tmp_path / "run" / "checkpoints" / "step-00000004"
    (place / "model.safetensors").write_bytes(b"nothing")
    with refused("checkpoint-damaged", CheckpointError, path=place):
        load_initial_weights(build(None).state.models, place, world=ALONE)


def test_of_several_models_each_takes_its_own(tmp_path: Path) -> None:
    from surefoot.checkpoint import Checkpoint, Store

    torch.manual_seed(0)
    first, second = net(), net()
    files = {"model-a": dict(first.state_dict()), "model-b": dict(second.state_dict())}
    Store(tmp_path / "run" / "checkpoints").save(
        Checkpoint(1, files, {"aliases": {"a": {}, "b": {}}})
    )
    models = {"b": net(), "a": net()}
    load_initial_weights(models, tmp_path / "run", world=ALONE)
    assert all(
        torch.equal(models["a"].state_dict()[name], value)
        for name, value in first.state_dict().items()
    )
    assert all(
        torch.equal(models["b"].state_dict()[name], value)
        for name, value in second.state_dict().items()
    )


def test_a_tied_weight_is_filled_once_and_not_called_new(tmp_path: Path) -> None:
    from surefoot.checkpoint import Checkpoint, Store
    from surefoot.checkpoint.module_state import model_tensors

    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    source, target = tied(), tied()
    tensors, aliases, *_ = model_tensors(source)
    Store(tmp_path / "checkpoints").save(
        Checkpoint(1, {"model": tensors}, {"aliases": {"model": aliases}})
    )
    said = load_initial_weights({"model": target}, tmp_path, world=ALONE)
    assert row(said, "new") == []
    assert torch.equal(target[1].weight, source[0].weight)


def test_weights_that_are_one_here_are_not_overwritten_by_another(tmp_path: Path) -> None:
    """An embedding and a head of their own, loaded into a model in which they are one: the head
    must not win in silence.
    """
    torch.manual_seed(0)
    source = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    target = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    target[1].weight = target[0].weight
    save_file(source.state_dict(), tmp_path / "held.safetensors")
    said = load_initial_weights({"model": target}, tmp_path / "held.safetensors", world=ALONE)
    assert torch.equal(target[0].weight, source[0].weight)
    assert "1.weight (tied to 0.weight here)" in said
    assert row(said, "skipped")[1] == row(said, "loaded")[1] == "1"
