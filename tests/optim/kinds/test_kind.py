"""The tables of optimizers: complete, and enough to add one that trains, resumes, is planned, and
runs on shards. (12 s)
"""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import small_runs
import surefoot as sf
from optim import heavy_ball
from rank_processes import Ranks
from refused import refused
from same_bits import assert_same_bits, weights
from surefoot.optim.kinds.kind import all_kinds, state_bytes
from surefoot.optim.optimizers import OPTIMIZERS, named
from surefoot.optim.skip_step import skipping
from surefoot.recipes.optimizer_settings import Optimizer
from surefoot.tools.plan.summary import sections

ROOT = Path(__file__).parents[3]


def test_each_optimizer_that_is_declared_has_a_kind_of_its_name() -> None:
    names = [kind.name for kind in all_kinds() if kind.name is not None]

    assert sorted(names) == sorted(OPTIMIZERS)


def test_each_optimizer_is_a_public_function_and_its_settings_are_flags() -> None:
    flags = {field.name for field in dataclasses.fields(Optimizer)}

    assert [name for name in OPTIMIZERS if not callable(getattr(sf.optim, name))] == []
    for declaration in OPTIMIZERS.values():
        assert set(declaration.known) <= flags


def test_the_first_table_of_the_docs_has_every_optimizer() -> None:
    table = (ROOT / "docs/guides/optimizers.md").read_text().split("\n\n")[1]

    assert {name for name in OPTIMIZERS if f"`{name}`" not in table} == set()


def test_a_recipe_begins_with_the_rates_that_are_declared() -> None:
    for name, declaration in OPTIMIZERS.items():
        spec = Optimizer(name=name).spec()
        assert (spec.lr, spec.weight_decay) == declaration.first_run, name


def test_an_optimizer_that_is_added_trains_and_resumes_to_the_bit(tmp_path: Path) -> None:
    def trained(run_dir: Path, **changes: Any) -> sf.Run:
        optimizer = heavy_ball.heavy_ball(0.01)
        run = small_runs.build(run_dir, optimizer=optimizer, length="10 steps", **changes)
        run.train()
        return run

    with heavy_ball.added():
        whole = trained(tmp_path / "whole")
        trained(tmp_path / "cut", stop_after="4 steps")
        resumed = trained(tmp_path / "cut")

    assert_same_bits(weights(resumed), weights(whole))


def test_an_optimizer_that_is_added_is_planned() -> None:
    with heavy_ball.added():
        run = small_runs.build(None, optimizer=heavy_ball.heavy_ball(0.01))
        lines = [line for section in sections(run.parts) for line in section.lines]
        way = skipping(run.state.optimizers["model"].optimizer, torch.device("cpu"))

    assert any(line.endswith(way.description) for line in lines)


def test_an_optimizer_is_known_only_as_long_as_it_is_added() -> None:
    with heavy_ball.added():
        run = small_runs.build(None, optimizer=heavy_ball.heavy_ball(0.01))
        trained = run.state.optimizers["model"]
    numbers = sum(parameter.numel() for parameter in trained.parameters)

    assert state_bytes(trained.optimizer) is None
    with heavy_ball.added():
        assert state_bytes(trained.optimizer) == 4 * numbers


def test_an_optimizer_that_is_added_refuses_what_it_does_not_know() -> None:
    with heavy_ball.added():
        with refused("setting-out-of-range", setting="optimizer.friction", value=2):
            heavy_ball.heavy_ball(0.1, friction=2)
        with refused("optimizer-setting-foreign", setting="optimizer.friction", optimizer="lion"):
            named("lion", lr=0.1, settings={"friction": 0.5})


def test_an_optimizer_that_is_added_makes_the_same_steps_on_the_shards_of_two_ranks(
    ranks: Ranks,
) -> None:
    (alone,) = ranks(1, heavy_ball.trained)
    for together in ranks(2, heavy_ball.trained, sharding={}):
        assert sum(step["skipped"] for step in together["steps"]) == 1
        torch.testing.assert_close(together["weights"], alone["weights"], rtol=1e-9, atol=1e-9)


def test_an_optimizer_that_is_added_can_be_named_by_a_flag() -> None:
    code = """
import sys
sys.path.insert(0, "tests")
from optim import heavy_ball_named
with heavy_ball_named.added():
    from surefoot.config.tree import layered
    from surefoot.recipes.images.config import Config
    config, _ = layered(Config, [("flag", {"optimizer.name": "heavy_ball"})])
    print(config.optimizer.spec().to_dict())
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )

    assert ended.stderr == ""
    assert ast.literal_eval(ended.stdout) == {
        "name": "heavy_ball",
        "lr": 0.02,
        "weight_decay": 0.1,
        "decay": "matrices",
        "friction": 0.9,
    }
