"""Weights to start from: what fits is copied, and all that was loaded, renamed, skipped or is new
is told; 1 second.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from refused import refused
from same_bits import assert_same_bits, weights
from small_runs import build
from surefoot.checkpoint import Checkpoint, Store
from surefoot.checkpoint.init_weights import load_initial_weights
from surefoot.checkpoint.module_state import model_tensors
from surefoot.distributed.world import World
from surefoot.errors import CheckpointError

ALONE = World(torch.device("cpu"))


def net(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))


def words_of(report: str, kind: str) -> list[str]:
    """The words of the line that begins with this one; none if there is no such line."""
    for line in report.splitlines():
        words = line.split()
        if words[:1] == [kind]:
            return words
    return []


def tied() -> nn.Module:
    model = untied()
    model[1].weight = model[0].weight
    return model


def untied() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))


def test_every_tensor_is_counted_once_under_what_became_of_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = net().state_dict()
    target = net()
    tensors = {
        "0.weight": source["0.weight"],
        "module.0.bias": source["0.bias"],
        "1.weight": torch.ones(5, 5),
        "x": torch.ones(7),
    }
    file = tmp_path / "weights.safetensors"
    save_file(tensors, file)
    before = deepcopy(target.state_dict())

    report = load_initial_weights({"model": target}, file, world=ALONE)

    assert words_of(report, "loaded")[1:5] == ["1", "tensors", "12", "values"]
    assert words_of(report, "renamed")[1:5] == ["1", "tensors", "3", "values"]
    assert words_of(report, "skipped")[1:5] == ["2", "tensors", "32", "values"]
    assert words_of(report, "new")[1:5] == ["2", "tensors", "8", "values"]
    assert "1.weight ([5, 5], here [2, 3])" in report
    assert " x (" in report
    after = target.state_dict()
    assert torch.equal(after["0.weight"], source["0.weight"])
    assert torch.equal(after["0.bias"], source["0.bias"])
    assert torch.equal(after["1.weight"], before["1.weight"])
    assert torch.equal(after["1.bias"], before["1.bias"])


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

    report = load_initial_weights(started.state.models, tmp_path / "run", world=ALONE)

    assert "step 5" in report
    assert "step-00000008" in report
    assert "(averaged weights)" in report
    average = fifth.state.ema_models["model"].model.state_dict()
    assert_same_bits(weights(started), average)


def test_a_damaged_checkpoint_named_itself_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "run", length="4 steps").train()
    place = tmp_path / "run" / "checkpoints" / "step-00000004"
    (place / "model.safetensors").write_bytes(b"nothing")
    models = build(None).state.models

    with refused("checkpoint-damaged", CheckpointError, path=place):
        load_initial_weights(models, place, world=ALONE)


def test_of_several_models_each_takes_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = dict(net().state_dict())
    second = dict(net().state_dict())
    state = {"aliases": {"a": {}, "b": {}}}
    checkpoint = Checkpoint(1, {"model-a": first, "model-b": second}, state)
    Store(tmp_path / "checkpoints").save(checkpoint)
    models = {"b": net(), "a": net()}

    load_initial_weights(models, tmp_path, world=ALONE)

    assert_same_bits(models["a"].state_dict(), first)
    assert_same_bits(models["b"].state_dict(), second)


def test_a_tied_weight_is_filled_once_and_not_called_new(tmp_path: Path) -> None:
    source = tied()
    target = tied()
    tensors, aliases, *_ = model_tensors(source)
    checkpoint = Checkpoint(1, {"model": tensors}, {"aliases": {"model": aliases}})
    Store(tmp_path / "checkpoints").save(checkpoint)

    report = load_initial_weights({"model": target}, tmp_path, world=ALONE)

    assert words_of(report, "new") == []
    assert_same_bits(target.state_dict(), source.state_dict())


def test_weights_that_are_one_here_are_not_overwritten_by_another(tmp_path: Path) -> None:
    """An embedding and a head of their own, loaded into a model in which they are one: the head
    must not win in silence.
    """
    torch.manual_seed(0)
    source = untied()
    target = tied()
    file = tmp_path / "weights.safetensors"
    save_file(source.state_dict(), file)

    report = load_initial_weights({"model": target}, file, world=ALONE)

    assert torch.equal(target.state_dict()["0.weight"], source[0].weight)
    assert "1.weight (tied to 0.weight here)" in report
    assert words_of(report, "skipped")[1] == "1"
    assert words_of(report, "loaded")[1] == "1"
