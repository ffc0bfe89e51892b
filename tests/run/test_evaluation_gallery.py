"""Panels in a run: made once when it is over, written whole, never the end of a run; 3 seconds."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import small_runs
import surefoot as sf
from refused import refused
from stated import numbers_in
from surefoot.tracking.panels_file import build_panels
from surefoot.tracking.run_directory import RunDirectory
from surefoot.train.timer import Clock


def matrix(title: str = "seen") -> sf.report.ConfusionMatrix:
    return sf.report.ConfusionMatrix(title=title, classes=("a",), counts=((1,),))


def output_of(model: nn.Module) -> float:
    return float(model(torch.ones(4, 8)).exp().sum())


def of_model(model: nn.Module) -> list[sf.report.TextHeatmap]:
    """A number of the model's outputs, a random number, and its mode."""
    pieces = (
        ("output", output_of(model)),
        ("drawn", float(torch.rand(()))),
        ("training", float(model.training)),
    )
    return [sf.report.TextHeatmap(title="t", legend="", unit="nats", pieces=pieces)]


def build(run_dir: Path | None, **changes: Any) -> sf.Run:
    return small_runs.build(run_dir, **({"length": "6 steps", "early_stopping": None} | changes))


def test_a_run_that_is_over_has_its_panels_and_they_are_of_what_is_evaluated(
    tmp_path: Path,
) -> None:
    run = build(tmp_path / "run", panels_fn=of_model)
    run.train()

    shown = sf.load(tmp_path / "run").panels()
    assert shown is not None
    assert shown.step == 6
    (text,) = shown.panels
    assert isinstance(text, sf.report.TextHeatmap)
    values = dict(text.pieces)
    averaged = run.state.ema_models["model"].model.eval()
    with torch.no_grad():
        assert values["output"] == pytest.approx(output_of(averaged))
    assert values["training"] == 0.0
    assert run.make_panels() == shown  # random numbers too: they are the step's


def test_without_a_directory_or_before_the_end_none_are_made(tmp_path: Path) -> None:
    called: list[nn.Module] = []

    def never(model: nn.Module) -> list[Any]:
        called.append(model)
        return [matrix()]

    build(None, panels_fn=never).train()
    build(tmp_path / "run", panels_fn=never, stop_after="3 steps").train()
    assert sf.load(tmp_path / "run").panels() is None
    assert called == []
    build(tmp_path / "run", panels_fn=of_model).train()
    assert sf.load(tmp_path / "run").panels() is not None


def test_a_run_that_early_stopping_ends_has_them(tmp_path: Path) -> None:
    run = build(
        tmp_path / "run",
        panels_fn=of_model,
        early_stopping=sf.EarlyStopping("min val/loss", patience=1),
        evaluate_every="1 steps",
        length="60 steps",
        optimizer=sf.optim.adamw(lr=2.0),
    )
    run.train()

    assert run.state.step < 60
    assert sf.load(tmp_path / "run").panels() is not None


@pytest.mark.parametrize("step", [2, 5], ids=["in its middle", "in its last step"])
def test_a_run_that_a_signal_ends_has_none(step: int, tmp_path: Path) -> None:
    signals: list[int] = []
    calls: list[int] = []

    def loss_with_signal(model: nn.Module, batch: Any) -> Any:
        if run.state.step == step and not signals:
            signals.append(1)  # a second one would end this process
            signal.raise_signal(signal.SIGTERM)
        return small_runs.loss(model, batch)

    def panels(model: nn.Module) -> list[Any]:
        calls.append(1)
        return [matrix()]

    run = build(tmp_path / "run", panels_fn=panels, loss=loss_with_signal, splits={})
    with pytest.raises(SystemExit):
        run.train()

    assert run.state.step == step + 1
    assert calls == []
    assert sf.load(tmp_path / "run").panels() is None


def failing(model: nn.Module) -> Iterator[sf.report.ConfusionMatrix]:
    yield matrix("first")
    raise ZeroDivisionError("of no use\nand more")


@pytest.mark.parametrize(
    ("panels", "said", "titles"),
    [
        (
            failing,
            "warning: panels after number 1 are missing: ZeroDivisionError: of no use",
            ["first"],
        ),
        (
            lambda model: None,
            "warning: no panels: TypeError: 'NoneType' object is not iterable",
            None,
        ),
        (
            lambda model: ["text"],
            "warning: no panels: a panel cannot be shown: it is a str, not one of TextHeatmap, ",
            None,
        ),
        (
            lambda model: [
                matrix(),
                sf.report.Curves(title="c", legend="", curves={"a": ((-1, 1.0),)}),
            ],
            "a point's step",
            None,
        ),
        (
            lambda model: [
                matrix(),
                sf.report.TextHeatmap(
                    title="long", legend="", unit="nats", pieces=(("x" * 19_000, None),) * 20
                ),
            ],
            "warning: the panel 'long' is left out: all panels may have 300,000 bytes together",
            ["seen"],
        ),
    ],
)
def test_what_goes_wrong_is_one_warning_and_ends_no_run(
    panels: Any,
    said: str,
    titles: list[str] | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    build(tmp_path / "run", panels_fn=panels, console=True).train()

    printed = capsys.readouterr().out
    (warning,) = [line for line in printed.splitlines() if line.startswith("warning")]
    assert said in warning
    assert "finished: 6 steps" in printed
    shown = sf.load(tmp_path / "run").panels()
    if titles is None:
        assert shown is None
    else:
        assert shown is not None
        assert [panel.title for panel in shown.panels] == titles


def test_a_disk_without_room_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write: Callable[..., None] = RunDirectory.write_text

    def full(self: RunDirectory, name: str, text: str) -> None:
        if name == "panels.json":
            raise sf.CheckpointError("cannot write panels.json: No space left on device")
        write(self, name, text)

    monkeypatch.setattr(RunDirectory, "write_text", full)
    build(tmp_path / "run", panels_fn=of_model, console=True).train()
    assert "warning: cannot write panels.json: No space left on device" in capsys.readouterr().out


def endless(model: None) -> Iterator[sf.report.ConfusionMatrix]:
    while True:
        yield matrix()


def test_after_its_time_no_further_panel_is_begun() -> None:
    ticks = iter(range(0, 1000, 20))
    panels, (note,) = build_panels(endless, None, now=lambda: float(next(ticks)))

    assert len(panels) == 4
    assert numbers_in(note) == [4, 60]


def test_when_the_run_is_to_stop_no_further_panel_is_begun() -> None:
    panels, (note,) = build_panels(endless, None, stop=lambda: True)

    assert len(panels) == 1
    assert numbers_in(note) == [1]


def test_a_signal_while_they_are_made_leaves_none(tmp_path: Path) -> None:
    def signalled(model: nn.Module) -> Iterator[sf.report.ConfusionMatrix]:
        yield matrix()
        signal.raise_signal(signal.SIGINT)
        yield matrix()

    with pytest.raises(SystemExit):
        build(tmp_path / "run", panels_fn=signalled).train()
    assert sf.load(tmp_path / "run").panels() is None
    assert not list((tmp_path / "run").glob("*.partial"))


def test_their_seconds_are_those_of_evaluating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[str] = []
    of_panels: list[str] = []
    enter = Clock.enter

    def noted_enter(clock: Clock, phase: Any) -> None:
        phases.append(phase)
        enter(clock, phase)

    def panels(model: nn.Module) -> list[Any]:
        of_panels.append(phases[-1])
        return []

    monkeypatch.setattr(Clock, "enter", noted_enter)
    build(tmp_path / "run", panels_fn=panels).train()

    assert of_panels == ["evaluating"]


def test_a_run_without_panels_refuses_to_make_some() -> None:
    with refused("run-without-function", setting="panels_fn"):
        build(None).make_panels()


def test_panels_json_is_surefoots_own_name() -> None:
    with refused("extra-file-name", value="panels.json"):
        build(None, extra_files={"panels.json": "{}"})


def test_metrics_jsonl_holds_none_of_it(tmp_path: Path) -> None:
    build(tmp_path / "run", panels_fn=of_model).train()

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    kinds = {json.loads(line)["kind"] for line in lines}
    assert "train" in kinds
    assert not kinds & {"panels", "outcome"}
