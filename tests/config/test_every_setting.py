"""No setting is forgotten by `surefoot change`: each one that is declared can change, and the guide
and the help name it, or is refused with a code and a way out.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.cli.change import Change
from surefoot.config.batch_size import batching
from surefoot.config.setting import Declared
from surefoot.config.tree import leaves
from surefoot.errors import Setting
from surefoot.recipes import finetune, gpt, images, translation
from surefoot.tools.change.change import naming_way_out
from surefoot.train.changed_settings import Wish, changeable, changes_of
from surefoot.train.run_settings import RunSettings

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "changing-your-mind.md"
OF_RUN = {field.name: field.metadata for field in dataclasses.fields(sf.Run)}
CHANGE_ON_RECORD = [
    name
    for name, metadata in OF_RUN.items()
    if metadata["role"] == "identity" and metadata["changes_at"] != "never"
]
# what the journal, the guide and the help call a setting of a run that goes by another name there
NAMES = {"model_settings": "model", "train_data": "data", "collate_fn": "data"}
BY_CONSENT = {"loss"}  # accept_change
WORDS = {
    "micro_batch_size": "batch size",
    "optimizer": "learning rate",
    "early_stopping": "rules for stopping",
    "plateau": "rules for stopping",
    "ema": "average",
    "model": "dropout",
    "max_bad_steps": "clipping",
    "clip": "clipping",
}


def values_of_run(**settings: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "model": nn.Linear,
        "model_settings": {"in_features": 2, "out_features": 1},
        "loss": lambda model, batch: model(batch[0]).square().mean(),
        "train_data": (torch.ones(4, 2),),
        "batch_size": 2,
        "length": "4 steps",
        "optimizer": sf.optim.adamw(lr=0.1),
    }
    return changeable(RunSettings(**(chosen | settings)))


def refusal_of(name: str) -> sf.ConfigError:
    sizes = dataclasses.replace(batching(2, None), micro_batch_size=2)
    with pytest.raises(sf.ConfigError) as refusal, naming_way_out():
        changes_of(values_of_run(), [Wish(name, "other")], from_step=1, sizes=sizes)
    return refusal.value


def test_the_journal_has_every_setting_that_is_declared_to_change() -> None:
    of_journal = {name.partition(".")[0] for name in values_of_run()}
    declared = {NAMES.get(name, name) for name in CHANGE_ON_RECORD} - BY_CONSENT - {"data"}
    assert declared == of_journal


@pytest.mark.parametrize("name", CHANGE_ON_RECORD)
def test_the_guide_and_the_help_name_what_can_change(name: str) -> None:
    table = GUIDE.read_text().partition("## What can change")[2].partition("\n\nAn optimizer")[0]
    settings = " ".join(row.split(" | ")[0] for row in table.splitlines())
    of_guide = re.findall(r"[a-z_]+", settings)
    name = NAMES.get(name, name)
    assert name in of_guide
    help_text = " ".join((Change.__doc__ or "").split())
    if name not in BY_CONSENT:
        assert WORDS.get(name, name.replace("_", " ")) in help_text


@pytest.mark.parametrize("name", sorted(set(OF_RUN) - set(CHANGE_ON_RECORD)))
def test_every_other_setting_is_refused_with_a_way_out(name: str) -> None:
    error = refusal_of(name)
    assert error.code == "setting-cannot-change"
    assert error.fields["setting"] == name
    ways = [
        way for remedy in error.remedies for way in parts_of(remedy) if isinstance(way, Setting)
    ]
    expected = "init_from" if OF_RUN[name]["role"] == "identity" else name
    assert [way.name for way in ways] == [expected]


def parts_of(remedy: Any) -> tuple[Any, ...]:
    return remedy if isinstance(remedy, tuple) else (remedy,)


@pytest.mark.parametrize("kind", [finetune.Config, gpt.Config, images.Config, translation.Config])
def test_a_setting_of_a_recipe_that_never_changes_is_refused_with_a_way_out(
    kind: type[Declared],
) -> None:
    fixed = [leaf.name for leaf in leaves(kind) if leaf.changes_at == "never" and "." in leaf.name]
    assert fixed
    for name in fixed:
        error = refusal_of(name)
        assert error.code == "setting-cannot-change"
        ways = [way for remedy in error.remedies for way in parts_of(remedy)]
        assert "init_from" in [way.name for way in ways if isinstance(way, Setting)]
