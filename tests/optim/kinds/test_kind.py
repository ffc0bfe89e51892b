"""The tables of optimizers: complete, and enough to add one that trains, resumes, is planned, and
runs on shards. (12 s)
"""

from __future__ import annotations

import dataclasses
import re
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
    assert {setting for each in OPTIMIZERS.values() for setting in each.known} - flags == set()


def test_the_first_table_of_the_docs_has_every_optimizer() -> None:
    table = (ROOT / "docs/guides/optimizers.md").read_text().split("\n\n")[1]

    assert {name for name in OPTIMIZERS if f"`{name}`" not in table} == set()


def test_a_recipe_begins_with_the_rates_that_are_declared() -> None:
    for name, declaration in OPTIMIZERS.items():
        spec = Optimizer(name=name).spec()
        assert (spec.lr, spec.weight_decay) == declaration.first_run


def test_an_optimizer_that_is_added_trains_and_resumes_to_the_bit(tmp_path: Path) -> None:
    def weights(run_dir: Path, **changes: Any) -> dict[str, torch.Tensor]:
        run = small_runs.build(
            run_dir, optimizer=heavy_ball.heavy_ball(0.01), length="10 steps", **changes
        )
        run.train()
        return run.state.models["model"].state_dict()

    with heavy_ball.added():
        whole = weights(tmp_path / "whole")
        weights(tmp_path / "cut", stop_after="4 steps")
        resumed = weights(tmp_path / "cut")

    assert all(torch.equal(resumed[name], held) for name, held in whole.items())


def test_an_optimizer_that_is_added_is_planned_and_refuses_what_it_does_not_know() -> None:
    with heavy_ball.added():
        run = small_runs.build(None, optimizer=heavy_ball.heavy_ball(0.01))
        optimizer = run.state.optimizers["model"].optimizer
        numbers = sum(held.numel() for held in run.state.optimizers["model"].parameters)
        text = "\n".join(line for section in sections(run.parts) for line in section.lines)
        with refused("setting-out-of-range", setting="optimizer.friction", value=2):
            heavy_ball.heavy_ball(0.1, friction=2)
        with refused("optimizer-setting-foreign", setting="optimizer.friction", optimizer="lion"):
            named("lion", lr=0.1, settings={"friction": 0.5})

    assert state_bytes(optimizer) is None  # it is gone
    with heavy_ball.added():
        assert state_bytes(optimizer) == 4 * numbers
    with heavy_ball.added():
        way = skipping(optimizer, torch.device("cpu"))
    assert [line for line in text.splitlines() if line.endswith(way.description)]


def test_an_optimizer_that_is_added_makes_the_same_steps_on_the_shards_of_two_ranks(
    ranks: Ranks,
) -> None:
    (alone,) = ranks(1, heavy_ball.trained)
    for together in ranks(2, heavy_ball.trained, sharding={}):
        assert sum(step["skipped"] for step in together["steps"]) == 1
        for name, held in alone["weights"].items():
            torch.testing.assert_close(together["weights"][name], held, rtol=1e-9, atol=1e-9)


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
    assert re.fullmatch(
        r"\{'name': 'heavy_ball', 'lr': 0.02, 'weight_decay': 0.1, 'decay': 'matrices', 'friction': 0.9\}\n",
        ended.stdout,
    )
