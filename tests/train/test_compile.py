"""Images with their channels last: asked for or looked up, stored with the run, the same training
to rounding. 2 s.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from refused import refused
from stated import numbers_in
from surefoot.checkpoint import Store
from surefoot.config import speed_table
from surefoot.run import facts as run_facts
from surefoot.run.messages import precision_in_words
from surefoot.train.compile import layout
from surefoot.train.plan import speed_facts


class Net(nn.Sequential):
    """More than a quarter of it in convolutions; the first tells in which layout it was given
    images.
    """

    def __init__(self, kind: type[nn.Conv2d] = nn.Conv2d) -> None:
        super().__init__(
            kind(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            kind(8, 32, 3, stride=2),
            nn.Flatten(),
            nn.Linear(32 * 9, 4),
        )


def side_by_side(images: Tensor) -> bool:
    return images.is_contiguous(memory_format=torch.channels_last)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def built(run_dir: Path | None = None, **changes: Any) -> sf.Run:
    generator = torch.Generator().manual_seed(0)
    data = (
        torch.randn(32, 3, 8, 8, generator=generator),
        torch.randint(4, (32,), generator=generator),
    )
    arguments: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train_data": data,
        "batch_size": 8,
        "length": "4 steps",
        "optimizer": sf.optim.adamw(lr=1e-3),
        "splits": {"same": sf.Split(data, metrics=sf.metrics.accuracy)},
        "ema": 0.9,
        "report": False,
        "run_dir": run_dir,
        "console": False,
    }
    return sf.Run(**(arguments | {"precision": "auto", "channels_last": "auto"} | changes))


def layouts_seen(run: sf.Run) -> set[bool]:
    """Of what the first convolutions of a run's models are given from now on."""
    seen: set[bool] = set()
    for model in (run.state.models["model"], run.state.ema_models["model"].model):
        model[0].register_forward_pre_hook(lambda _, inputs: seen.add(side_by_side(inputs[0])))  # type: ignore[index]
    return seen


Gains = dict[str, float]


@pytest.fixture
def gains(monkeypatch: pytest.MonkeyPatch) -> Gains:
    """How many times as fast each format and layout is, by a table for networks of images on this
    processor.
    """
    held = {"bf16": 2.0, "channels last": 1.3, "bf16, channels last": 4.0}
    version = ".".join(torch.__version__.split(".")[:2])
    every = (1, 1 << 30)
    kinds = ("convolution", "convolution, channels last")
    rows = [speed_table.Row(kind, every, every, every, held) for kind in kinds]
    monkeypatch.setattr(speed_table, "TABLE", {("fast", version): ("2026-11-22", rows)})
    monkeypatch.setattr(run_facts, "instruction_set", lambda: "fast")
    return held


@pytest.mark.parametrize(
    ("found", "chosen", "why"),
    [
        ((2.0, 1.3, 4.0), ("bf16", True), "measured at least 4.00 times as fast as fp32"),
        ((2.0, 1.3, 2.1), ("bf16", False), "measured at least 2.00 times as fast as fp32"),
        (
            (1.3, 2.0, 2.1),
            ("fp32", True),
            "bf16 was measured hardly faster, channels last at least 2.00 times as fast",
        ),
        ((1.0, 1.0, 1.0), ("fp32", False), "bf16 was measured hardly faster"),
    ],
)
def test_format_and_layout_are_chosen_together(
    found: tuple[float, ...], chosen: tuple[str, bool], why: str, gains: Gains
) -> None:
    gains |= dict(zip(list(gains), found, strict=True))
    run = built()
    assert run.parts.plan.reasons.precision == why
    seen = layouts_seen(run)
    run.train()
    assert (run.parts.run_state.precision.name, run.parts.layout.channels_last) == chosen
    assert run.parts.plan.identity["channels_last"] == chosen[1]
    assert seen == {chosen[1]}  # in training, and where averaged weights are scored


def test_a_run_is_one_that_names_what_was_chosen(gains: Gains) -> None:
    runs = built(), built(precision="bf16", channels_last=True)
    for run in runs:
        run.train()
    for one, other in zip(
        *(run.state.models["model"].state_dict().values() for run in runs), strict=True
    ):
        assert torch.equal(one, other)


def test_a_resume_goes_on_in_the_layout_it_began_with(tmp_path: Path, gains: Gains) -> None:
    whole = built()
    whole.train()
    built(tmp_path / "run", stop_after="2 steps").train()
    gains |= dict.fromkeys(gains, 1.0)
    resumed = built(tmp_path / "run")
    resumed.train()
    assert resumed.parts.layout.channels_last
    for one, other in zip(whole.state.parameters, resumed.state.parameters, strict=True):
        assert torch.equal(one, other)
    assert sf.load(built(tmp_path / "run")).verify(steps="all").exit_status == 0
    with refused(
        "settings-changed", sf.CheckpointError, changes=["channels_last was True, now False"]
    ):
        built(tmp_path / "run", channels_last=False).train()


def test_a_run_that_names_the_format_that_was_chosen_goes_on_in_its_layout(
    tmp_path: Path, gains: Gains
) -> None:
    built(tmp_path / "run", stop_after="2 steps").train()
    resumed = built(tmp_path / "run", precision="bf16")  # as its configuration has it from then on
    resumed.train()
    assert resumed.parts.layout.channels_last
    newest = Store(tmp_path / "run" / "checkpoints").newest_intact()
    assert newest is not None
    scored = built(precision="bf16")
    scored.load_checkpoint(newest[0])
    assert scored.parts.layout.channels_last


def test_it_is_the_same_training_to_rounding() -> None:
    runs = [
        built(precision="fp32", channels_last=asked, optimizer=sf.optim.sgd(lr=0.1))
        for asked in (False, True)
    ]
    for run in runs:
        run.train()
    for one, other in zip(*(run.state.parameters for run in runs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_is_named_stays_and_is_told_beside_what_auto_would_choose(gains: Gains) -> None:
    named = built(precision="fp32")
    chosen = named.parts.plan.reasons
    assert (chosen.precision, chosen.compile, chosen.unknown) == (None, None, False)
    settled, beside = precision_in_words(named.parts, chosen).split("; ")
    assert settled == "fp32"
    assert " bf16 (" in beside
    assert numbers_in(beside) == [4]  # times as fast
    assert not named.parts.plan.channels_last
    as_they_come = built(channels_last=False)
    assert numbers_in(as_they_come.parts.plan.reasons.precision or "") == [2]
    assert not as_they_come.parts.layout.channels_last
    laid_out = built(channels_last=True)
    parts = laid_out.parts
    facts = speed_facts(
        parts.settings,
        run_facts.world_facts(parts.world),
        run_facts.data_facts(parts.pipeline, {}, reads_shape=True),
        run_facts.model_facts(laid_out.state.models, {}, {}, was_compiled=False),
    )
    assert isinstance(facts, speed_table.Facts)
    assert facts.layers == "convolution, channels last"


def test_models_without_convolutions_are_left_alone_and_other_inputs_too() -> None:
    linear = nn.Linear(2, 1)
    convolution = nn.Conv2d(2, 2, 1)
    layout(True, [linear])
    assert not linear._forward_pre_hooks
    found = layout(True, [convolution])
    numbers = torch.zeros(1, 2, 3, 4, dtype=torch.int64)
    assert found.before(convolution, (numbers, "text"))[0] is numbers  # type: ignore[index]


@pytest.mark.parametrize("wrong", ["often", 1, None])
def test_what_is_neither_a_truth_nor_auto_is_refused(wrong: Any) -> None:
    with refused("setting-of-wrong-type", setting="channels_last"):
        built(channels_last=wrong)


def test_the_header_says_so(gains: Gains, capsys: pytest.CaptureFixture[str]) -> None:
    built(console=True).train()
    printed = " ".join(capsys.readouterr().out.split())
    (why,) = re.findall(r" precision bf16, channels last \(auto: ([^)]*)\)", printed)
    assert numbers_in(why) == [4]
