"""surefoot compare as it is typed: variants trained, killed, gone on with, failing, compared, searched for. (60 s)

Each variant is a process that imports torch, which takes most of the time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli import programs, variant
from surefoot.cli.asked import asked_of, planned_of, trial
from surefoot.cli.main import main
from surefoot.sinks import records

PROGRAM = """
import os, signal, time
from dataclasses import dataclass, field
import torch
from torch import nn
import torch.nn.functional as F
import surefoot as sf
from surefoot.recipes.settings import Optimizer, checked

@dataclass(frozen=True)
class Config:
    out: str = "runs/mine"
    length: str = "30 steps"
    seed: int = 0
    width: int = 8
    step_s: float = 0.0
    huge: bool = False
    optimizer: Optimizer = field(default_factory=Optimizer)

def check(config: Config):
    return checked(config.optimizer.spec)

def build(config: Config):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 4, generator=generator)
    data = inputs, inputs.sum(dim=1, keepdim=True) + torch.randn(60, 1, generator=generator)

    def loss(model, batch):
        if model.training:
            time.sleep(config.step_s)
        if config.huge:
            raise torch.OutOfMemoryError("no room")
        return F.mse_loss(model(batch[0]), batch[1])

    return sf.Run(
        model=lambda: nn.Sequential(nn.Linear(4, config.width), nn.Dropout(0.2), nn.Linear(config.width, 1)),
        loss=loss, train=data, batch_size=7, length=config.length, optimizer=config.optimizer.spec(), seed=config.seed,
        evaluate={"held-out": sf.Split(data), "test": sf.Split(data, at_end=True)}, evaluate_every="5 steps",
        save_every="3 steps", log_every="1 steps", best="min held-out/loss", out=config.out, precision="fp32",
    )
"""
PROCESS = "import sys; from surefoot.cli.main import main; sys.argv[0] = 'surefoot'; main()"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def compare(*arguments: str) -> dict[str, Any]:
    """What comparison.json holds afterwards."""
    main(["compare", *arguments])
    out = arguments[arguments.index("--out") + 1] if "--out" in arguments else arguments[0]
    return dict(json.loads(Path(out, "comparison.json").read_text()))


def begun(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, "compare", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ,
    )


def wait_for(happened: Any, what: str) -> None:
    for _ in range(2400):  # processes that import torch, on a machine that may be busy
        if happened():
            return
        time.sleep(0.1)
    pytest.fail(f"never happened: {what}")


def weights(run: Path) -> dict[str, str]:
    newest = max((run / "checkpoints").glob("step-*"))
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in newest.glob("*.safetensors")} | {
        "": newest.name
    }


def sittings(run: Path) -> int:
    return len(json.loads((run / "environment.json").read_text())["sittings"])


def steps_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return max((record["step"] for record in records(path)), default=0) if path.is_file() else 0


def processes_of(directory: Path) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line = (place / "cmdline").read_bytes()
        except OSError:
            continue
        if b"surefoot.cli.variant" in line and str(directory).encode() in line:
            found.append(int(place.name))
    return found


def first_losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run / "metrics.jsonl") if record["kind"] == "train"]


SLOW = ["program.py:build", "--vary", "optimizer.name=adamw,sgd", "--optimizer.lr", "0.01", "--step-s", "0.05"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_with_its_children_and_gone_on_with_it_ends_with_the_same_bits(here: Path) -> None:
    whole = compare(*SLOW, "--out", "whole")
    assert [row["status"] for row in whole["variants"]] == ["finished"] * 2
    with begun(*SLOW, "--out", "killed") as parent:
        second = here / "killed" / "name=sgd"
        wait_for(lambda: steps_of(second) >= 8, "the second variant's eighth step")
        assert processes_of(here / "killed")
        parent.kill()
    wait_for(lambda: not processes_of(here / "killed"), "the end of the children")
    assert steps_of(second) < 30
    again = compare("killed")
    for name in ("name=adamw", "name=sgd"):
        assert weights(here / "killed" / name) == weights(here / "whole" / name)
    assert sittings(here / "killed" / "name=adamw") == 1
    assert sittings(second) == 2
    same = ("variant", "best", "best_step", "final", "difference", "difference_error", "verdict")
    assert [[row[key] for key in same] for row in again["variants"]] == [
        [row[key] for key in same] for row in whole["variants"]
    ]
    # optimizers change neither the first loss nor the samples, and what is measured is told
    first = [first_losses(here / "whole" / name)[0] for name in ("name=adamw", "name=sgd")]
    assert first[0] == first[1]
    assert "shared: initial weights, and the samples in their order" in whole["notes"]
    assert not any(record["kind"] == "end" for record in records(here / "whole" / "name=sgd" / "metrics.jsonl"))
    row = whole["variants"][1]
    scores = {each["variant"]: each["best"] for each in whole["variants"]}
    assert row["difference"] == pytest.approx(scores[row["variant"]] - whole["variants"][0]["best"], rel=1e-5)
    for suffix in ("png", "svg", "md", "tsv"):
        assert (here / "whole" / f"comparison.{suffix}").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_running_variants_and_says_how_to_go_on(here: Path, number: int, status: int) -> None:
    with begun(*SLOW, "--step-s", "0.2", "--jobs", "2", "--out", "stopped") as parent:
        wait_for(lambda: all(steps_of(here / "stopped" / f"name={name}") >= 2 for name in ("adamw", "sgd")), "steps")
        parent.send_signal(number)
        assert parent.stdout is not None
        said = parent.stdout.read()
    assert parent.returncode == status
    assert "go on with: surefoot compare stopped" in said
    for name in ("adamw", "sgd"):
        run = here / "stopped" / f"name={name}"
        assert int(weights(run)[""].removeprefix("step-")) == steps_of(run) > 0


def test_a_variant_that_fails_is_a_row_and_stops_no_other(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(
        *("program.py:build", "--optimizer.name", "sgd", "--variant", "optimizer.lr=0.01"),
        *("--variant", "optimizer.lr=1e30", "--variant", "optimizer.lr=0.02 huge=true", "--out", "failing"),
    )
    rows = {row["variant"]: row for row in found["variants"]}
    assert rows["lr=0.01"]["status"] == "finished"
    assert rows["lr=1e_30" if "lr=1e_30" in rows else "lr=1e+30"]["status"].startswith("diverged")
    assert rows["lr=0.02,huge=True"]["status"] == "out of memory at step 0"
    assert "no room" in rows["lr=0.02,huge=True"]["said"]
    main(["compare", "failing"])  # what diverged would do so again; what had no memory is tried again
    assert sittings(here / "failing" / "lr=0.01") == 1
    assert sittings(here / "failing" / "lr=0.02,huge=True") == 2
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.slow
def test_what_is_not_shared_is_said(here: Path) -> None:
    found = compare("program.py:build", "--vary", "width=4,8", "--length=6 steps", "--out", "widths")
    assert "not shared: the initial weights" in found["notes"]
    assert "shared: the samples in their order" in found["notes"]
    again = compare(*("widths/width=4", "widths/width=8"), "--paired", "--out", "paired")
    assert [row["difference"] for row in again["variants"]] == [row["difference"] for row in found["variants"]]
    plain = compare(*("widths/width=4", "widths/width=8"), "--out", "paired")
    assert [row["difference"] for row in plain["variants"]] == [None, None]
    assert any("was not scored batch by batch" in note for note in plain["notes"])
    assert "widths/width=4: --width 4" in plain["notes"]


@pytest.mark.slow
def test_a_search_is_a_comparison_of_its_trials_and_may_be_made_longer(here: Path) -> None:
    pytest.importorskip("optuna")
    space = ["--vary", "optimizer.lr=1e-3..1e-1", "--vary", "optimizer.name=adamw,sgd"]
    found = compare("program.py:build", "--search", "2", *space, "--pruner", "none", "--out", "search")
    assert {row["variant"] for row in found["variants"]} == {"trial-000", "trial-001"}
    longer = compare("search", "--search", "3")
    rates = {row["variant"]: row["settings"]["optimizer.lr"] for row in longer["variants"]}
    assert rates | {row["variant"]: row["settings"]["optimizer.lr"] for row in found["variants"]} == rates
    assert len(set(rates.values())) == 3
    assert [sittings(here / "search" / f"trial-00{place}") for place in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpt", "--vary", "optimizer.name=adamw,sgd", "--vary", "optimizer.momentum=0.9,0.8"], "foreign to adamw"),
        (["gpt", "--vary", "optimizer.lrr=0.1"], "did you mean"),
        (["gpt", "--vary", "optimizer.lr"], "a setting, =, and what it is to be"),
        (["gpt", "--vary", "optimizer.lr=0.1,0.10"], "two variants are the same"),
        (["gpt", "--vary", "optimizer.lr=1e-4..1e-2"], "ranges are for a search"),
        (["gpt", "--vary", "out=a,b"], "a directory of its own"),
        (["gpt"], "compare what?"),
        (["gpt", "--vary", "optimizer.lr=0.1,fast"], "not a number"),
        (["gpt", "--vary", "seed=0,1", "--seeds", "2"], "--seeds and a varied seed"),
        (["gpt", "--search", "3", "--vary", "optimizer.lr=1e-2..1e-4"], "from a lower number to a higher one"),
        (["gpt", "--search", "3", "--vary", "optimizer.lr=1e-2..-"], "is no number"),
        (["gpt", "--vary", "optimizer.lr=1,2", "--jobs", "none"], "a whole number is needed"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(
    here: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["compare", *arguments])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) <= 5
    assert not Path("runs").exists()


def test_what_is_typed_for_all_holds_for_every_variant_of_another_optimizer(here: Path) -> None:
    """What a file says is for its own optimizer; what was typed beside --vary is for all of them."""
    (here / "file.toml").write_text("[optimizer]\nlr = 0.5\nweight_decay = 0.75\n")
    program = programs.found("program.py")
    shared = ["--config", "file.toml", "--optimizer.weight-decay", "0.25", "--optimizer.frozen", "0.bias"]
    rest, asked = asked_of([*shared, "--vary", "optimizer.name=adamw,lion", "--out", "out"])
    plan, _ = planned_of(program, rest, asked, verb="surefoot compare")
    asked_search = replace(asked, search=2)
    search, _ = planned_of(program, rest, asked_search, verb="surefoot compare")
    trials = [trial(search, name, {"optimizer.name": name}) for name in ("adamw", "lion")]
    for each in (plan, replace(search, variants=trials)):
        for name in each.names:
            described = variant._built(each, here / "out", name).parts.described["optimizer"]
            assert described["name"] in name
            assert described["lr"] == {"adamw": 0.5, "lion": 1e-3}[described["name"]]
            assert described["weight_decay"] == 0.25
            assert described["rates"] == [{"frozen": ["0.bias"]}]
        assert len(each.names) == 2
