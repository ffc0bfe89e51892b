"""The table of number formats: complete, and enough to add one that trains, is planned and is named
by a setting. (2 s)
"""

from __future__ import annotations

import re
from typing import get_args, get_type_hints

import pytest
import torch

import small_runs
from refused import refused
from surefoot.cli.plan import _assumed
from surefoot.config import tree
from surefoot.config.train_settings import TrainSettings
from surefoot.distributed.world import on_meta
from surefoot.tools.plan.meta_pass import dry_pass
from surefoot.tools.profile.flops import measure_peak_flops
from surefoot.train.precision import FORMATS, Format


def round_weights(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Weights as they are in bfloat16."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = Format(autocast=torch.bfloat16, scaled=True, convert=round_weights, h100_flops=1e12)
    monkeypatch.setitem(FORMATS, "rounded", rounded)
    choices = ", ".join(f'"{name}"' for name in ("auto", *FORMATS))
    monkeypatch.setitem(TrainSettings.__annotations__, "precision", f"Literal[{choices}]")
    monkeypatch.setattr(tree, "_type_hints", {})  # types that were read before


def test_the_choices_of_the_setting_are_the_formats_and_auto() -> None:
    assert set(get_args(get_type_hints(TrainSettings)["precision"])) == {"auto", *FORMATS}


def test_a_format_that_is_added_trains_and_is_part_of_the_run(added: None) -> None:
    run = small_runs.build(None, precision="rounded", length="2 steps")

    for weight in run.state.models["model"].parameters():
        assert torch.equal(weight, weight.bfloat16().float())
    assert run.parts.run_state.precision.loss_scale is not None
    assert run.parts.plan.identity["precision"] == "rounded"
    run.train()
    assert run.state.step == 2


def test_a_format_that_is_added_is_planned_as_narrow_as_it_is(added: None) -> None:
    def kept_bytes(precision: str) -> int:
        with on_meta(1):
            run = small_runs.build(None, precision=precision)
            return dry_pass(run.parts).kept_bytes

    assert kept_bytes("rounded") == kept_bytes("bf16")
    assert kept_bytes("rounded") < kept_bytes("fp32")
    assert measure_peak_flops(torch.device("cpu"), "rounded", limit_s=0.001) > 0
    assert _assumed({}, precision="rounded").flops == 1e12


def test_a_format_that_is_not_there_is_refused_with_those_that_are(added: None) -> None:
    with refused("setting-of-wrong-type", setting="precision") as caught:
        small_runs.build(None, precision="rounder")
    value, *formats = re.findall(r'"(\w+)"', caught.value.problem)
    assert value == "rounder"
    assert formats == ["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "rounded"]
