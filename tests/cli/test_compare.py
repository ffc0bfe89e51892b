"""surefoot compare as it is typed: variants trained, killed, gone on with, failing, compared,
searched for. (20 s)

Variants are forked from this process; one test starts them as they are started elsewhere, and they
come out the same.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from forked import Forked, variants_are_forked
from refused import refused
from stated import numbers_in
from surefoot.cli import compare_worker
from surefoot.cli.compare_plan import Compare, planned_of, trial
from surefoot.cli.compare_runs import _introduction as introduction
from surefoot.cli.compare_runs import compare_existing
from surefoot.cli.main import main
from surefoot.cli.options import verb_options
from surefoot.program import find_program
from surefoot.tools.compare import plan as planned
from surefoot.tools.compare import runner
from surefoot.tools.compare.results import ONE_SEED
from surefoot.tools.compare.runner import VariantsInOrder
from surefoot.tracking.jsonl import records
from waiting import wait_until
from written_runs import scores, written

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc"),
    pytest.mark.filterwarnings(
        "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
    ),
]

PROGRAM = """
import os, signal, time
from dataclasses import dataclass, field
import torch
from torch import nn
import torch.nn.functional as F
import surefoot as sf
from surefoot.config.setting import checked
from surefoot.recipes.optimizer_settings import Optimizer

@dataclass(frozen=True)
class Config:
    run_dir: str = "runs/mine"
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
        loss=loss, train_data=data, batch_size=7, length=config.length, optimizer=config.optimizer.spec(), seed=config.seed,
        splits={"val": sf.Split(data), "test": sf.Split(data, at_end=True)}, evaluate_every="5 steps",
        save_every="3 steps", log_every="1 steps", best="min val/loss", run_dir=config.run_dir, precision="fp32", report=False,
    )
"""
SLOW = [
    "program.py:build",
    "--vary",
    "optimizer.name=adamw,sgd",
    "--optimizer.lr",
    "0.01",
    "--step-s",
    "0.05",
]


def moved_to(place: Path, patch: pytest.MonkeyPatch) -> Path:
    patch.chdir(place)
    patch.setattr(sys, "argv", ["surefoot"])
    (place / "program.py").write_text(PROGRAM)
    return place


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a program, where variants are processes as elsewhere."""
    return moved_to(tmp_path, monkeypatch)


@pytest.fixture
def here(real: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a program, where variants are forked and no picture is drawn."""
    variants_are_forked(monkeypatch)
    monkeypatch.setattr("surefoot.tools.report.figures.draw", lambda charts, path, *, title: [])
    return real


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The comparison that `SLOW` is, made without waiting and never interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        place = moved_to(tmp_path_factory.mktemp("whole"), patch)
        variants_are_forked(patch)
        compare(*SLOW[:-2], "--out", "whole")
        patch.undo()
        yield place / "whole"


def compare(*arguments: str) -> dict[str, Any]:
    """What comparison.json holds afterwards."""
    main(["compare", *arguments])
    return held(
        Path(arguments[arguments.index("--out") + 1] if "--out" in arguments else arguments[0])
    )


def held(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "comparison.json").read_text()))


def begun(*arguments: str) -> Forked:
    return Forked(
        lambda: main(["compare", *arguments]), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def wait_for(happened: Any, what: str) -> None:
    assert wait_until(happened), f"never happened: {what}"


def weights(run: Path) -> dict[str, str]:
    newest = max((run / "checkpoints").glob("step-*"))
    return {
        file.name: sha256(file.read_bytes()).hexdigest() for file in newest.glob("*.safetensors")
    } | {"": newest.name}


def sessions(run: Path) -> int:
    return len(json.loads((run / "environment.json").read_text())["sessions"])


def steps_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return max((record["step"] for record in records(path)), default=0) if path.is_file() else 0


def processes_in(place: Path, *, besides: int) -> list[int]:
    """The processes that stand in a directory, without this one and another."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            stands = process.joinpath("cwd").readlink()
        except OSError:  # another's, or gone
            continue
        if stands == place.resolve() and int(process.name) not in (os.getpid(), besides):
            found.append(int(process.name))
    return found


def first_losses(run: Path) -> list[float]:
    return [
        record["loss"] for record in records(run / "metrics.jsonl") if record["kind"] == "train"
    ]


@pytest.mark.slow
def test_killed_with_its_children_and_gone_on_with_it_ends_with_the_same_bits(
    here: Path, whole: Path
) -> None:
    second = here / "killed" / "name=sgd"
    with begun(*SLOW, "--out", "killed") as parent:
        wait_for(lambda: steps_of(second) >= 8, "the second variant's eighth step")
        assert processes_in(here, besides=parent.pid)
        parent.kill()
    wait_for(lambda: not processes_in(here, besides=parent.pid), "the end of the children")
    assert steps_of(second) < 30
    again = compare("killed")
    for name in ("name=adamw", "name=sgd"):
        assert weights(here / "killed" / name) == weights(whole / name)
    assert sessions(here / "killed" / "name=adamw") == 1
    assert sessions(second) == 2
    same = ("variant", "best", "best_step", "final", "difference", "difference_error", "verdict")
    assert [[row[key] for key in same] for row in again["variants"]] == [
        [row[key] for key in same] for row in held(whole)["variants"]
    ]


@pytest.mark.slow
def test_a_process_of_its_own_comes_to_the_same_bits(
    real: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants_are_forked(monkeypatch, trained=False)
    shutil.copytree(whole, real / "own")
    shutil.rmtree(real / "own" / "name=sgd")
    compare("own")
    assert weights(real / "own" / "name=sgd") == weights(whole / "name=sgd")


@pytest.mark.slow
def test_processes_of_their_own_come_to_the_same_bits_and_die_with_their_parent(
    real: Path, whole: Path
) -> None:
    only = [
        "program.py:build",
        "--optimizer.lr",
        "0.01",
        "--vary",
        "optimizer.name=sgd,adamw",
        "--step-s",
        "0.02",
    ]
    parent = Forked(
        lambda: main(["compare", *only, "--out", "own"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with parent:
        wait_for(lambda: steps_of(real / "own" / "name=sgd") >= 8, "the eighth step")
        children = [
            Path(f"/proc/{process}/cmdline") for process in processes_in(real, besides=parent.pid)
        ]
        assert [b"surefoot.cli.compare_worker" in child.read_bytes() for child in children] == [
            True
        ]
        parent.kill()
    wait_for(
        lambda: not any(child.exists() and child.read_bytes() for child in children),
        "the end of the child",
    )
    compare("own")
    assert weights(real / "own" / "name=sgd") == weights(whole / "name=sgd")


def test_a_comparison_tells_what_is_shared_what_differs_and_nothing_of_the_test_split(
    whole: Path,
) -> None:
    found = held(whole)
    assert [row["status"] for row in found["variants"]] == ["finished"] * 2
    # optimizers change neither the first loss nor the samples, and what is measured is told
    first = [first_losses(whole / name)[0] for name in ("name=adamw", "name=sgd")]
    assert first[0] == first[1]
    assert any(note.startswith("shared: ") for note in found["notes"])
    assert not any(note.startswith("not shared: ") for note in found["notes"])
    assert not any(
        record["kind"] == "final_eval" for record in records(whole / "name=sgd" / "metrics.jsonl")
    )
    row = found["variants"][1]
    scores = {each["variant"]: each["best"] for each in found["variants"]}
    assert row["difference"] == pytest.approx(
        scores[row["variant"]] - found["variants"][0]["best"], rel=1e-5
    )
    for suffix in ("svg", "md", "tsv"):
        assert (whole / f"comparison.{suffix}").stat().st_size > 0


@pytest.mark.fast("15-143")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_running_variants_and_says_how_to_go_on(
    here: Path, number: int, status: int
) -> None:
    with begun(*SLOW, "--step-s", "0.2", "--jobs", "2", "--out", "stopped") as parent:
        wait_for(
            lambda: all(
                steps_of(here / "stopped" / f"name={name}") >= 2 for name in ("adamw", "sgd")
            ),
            "steps",
        )
        parent.send_signal(number)
        assert parent.stdout is not None
        said = parent.stdout.read()
    assert parent.returncode == status
    assert "resume with: surefoot compare stopped" in said
    for name in ("adamw", "sgd"):
        run = here / "stopped" / f"name={name}"
        assert int(weights(run)[""].removeprefix("step-")) == steps_of(run) > 0


@pytest.mark.slow
def test_a_variant_is_trained_again_where_its_directory_was_removed_and_else_never(
    here: Path,
) -> None:
    grid = [
        "program.py:build",
        "--vary",
        "optimizer.lr=0.01,0.02",
        "--length",
        "2 steps",
        "--out",
        "again",
    ]
    compare(*grid)
    shutil.rmtree(here / "again" / "lr=0.02")
    result = here / "again" / "results" / "lr=0.01.json"
    before = result.stat().st_mtime_ns
    assert [row["status"] for row in compare("again")["variants"]] == ["finished"] * 2
    assert steps_of(here / "again" / "lr=0.02") == 2
    assert result.stat().st_mtime_ns == before
    assert sessions(here / "again" / "lr=0.01") == 1


@pytest.mark.slow
def test_what_ends_a_process_after_it_has_said_that_it_finished_is_no_failure(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: Any) -> None:
        trained(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    trained = compare_worker.train
    monkeypatch.setattr(compare_worker, "train", killed)
    found = compare(
        "program.py:build",
        "--vary",
        "optimizer.lr=0.01,0.02",
        "--length",
        "2 steps",
        "--out",
        "said",
    )
    assert [row["status"] for row in found["variants"]] == ["finished"] * 2


def test_a_second_comparison_in_the_directory_is_refused_and_disturbs_nothing(
    here: Path, capfd: Any
) -> None:
    with begun(*SLOW, "--out", "both") as parent:
        wait_for(lambda: steps_of(here / "both" / "name=adamw") >= 1, "a step")
        with pytest.raises(SystemExit) as end:
            main(["compare", "both"])
        assert end.value.code == 2
        assert "[run-in-training]" in capfd.readouterr().err
        assert parent.poll() is None
        parent.send_signal(signal.SIGTERM)


def test_a_variant_waits_for_the_one_that_was_killed_to_be_gone(tmp_path: Path) -> None:
    from surefoot.cli.compare_worker import _wait_until_free
    from surefoot.tracking.run_directory import RunDirectory

    def hold() -> None:
        RunDirectory(tmp_path).open()
        (tmp_path / "held").touch()
        time.sleep(0.5)

    with Forked(hold, stdout=subprocess.PIPE) as other:
        wait_for((tmp_path / "held").exists, "the other's hold")
        _wait_until_free(tmp_path)
    assert other.poll() == 0


def test_seeds_go_on_from_the_seed_of_the_run_whoever_has_set_it(here: Path) -> None:
    (here / "program.py").write_text(PROGRAM.replace("seed: int = 0", "seed: int = 7"))
    found = compare("program.py:build", "--seeds", "2", "--length", "2 steps", "--out", "seeds")
    assert [run["settings"]["seed"] for run in found["runs"]] == [7, 8]
    assert not any("shared" in note for note in found["notes"])  # there are no two of one seed


@pytest.mark.slow
def test_a_variant_that_fails_is_a_row_and_stops_no_other(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compare(
        *("program.py:build", "--optimizer.name", "sgd", "--variant", "optimizer.lr=0.01"),
        *(
            "--variant",
            "optimizer.lr=1e30",
            "--variant",
            "optimizer.lr=0.02 huge=true",
            "--out",
            "failing",
        ),
    )
    rows = {row["variant"]: row for row in found["variants"]}
    assert rows["lr=0.01"]["status"] == "finished"
    assert rows["lr=1e_30" if "lr=1e_30" in rows else "lr=1e+30"]["status"].startswith("diverged")
    assert rows["lr=0.02,huge=True"]["status"] == "out of memory at step 0"
    assert "no room" in rows["lr=0.02,huge=True"]["said"]
    main(
        ["compare", "failing"]
    )  # what diverged would do so again; what had no memory is tried again
    assert sessions(here / "failing" / "lr=0.01") == 1
    assert sessions(here / "failing" / "lr=0.02,huge=True") == 2
    assert "out of memory" in capsys.readouterr().out


def test_runs_of_a_script_are_compared_without_flags(here: Path) -> None:
    for width, rate in ((4, 0.1), (8, 0.2)):
        sf.Run(
            model=lambda width=width: nn.Linear(width, 2),
            loss=lambda model, batch: model(batch[0]).square().mean(),
            train_data=(torch.ones(8, width), torch.zeros(8)),
            batch_size=4,
            length="2 steps",
            optimizer=sf.optim.sgd(lr=rate),
            splits={"val": sf.Split((torch.ones(4, width), torch.zeros(4)))},
            evaluate_every="1 steps",
            run_dir=f"mine-{width}",
            console=False,
            report=False,
            tensorboard=False,
        ).train()
    notes = compare("mine-4", "mine-8", "--out", "compared")["notes"]
    assert [note for note in notes if "--" in note] == []
    assert len([note for note in notes if "optimizer.lr = " in note]) == 2
    (sizes,) = [note for note in notes if " bytes of mine-4, " in note]
    assert sizes.startswith("not shared: ")


@pytest.mark.slow
def test_what_is_not_shared_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(
        "program.py:build", "--vary", "width=4,8", "--length=6 steps", "--out", "widths"
    )
    for kind, count in (("not shared: ", 2), ("shared: ", 1)):  # sizes and weights; the order
        assert len([note for note in found["notes"] if note.startswith(kind)]) == count
    for paired in (["--paired"], []):  # what the comparison has left beside its runs is as good
        again = compare(*("widths/width=4", "widths/width=8"), *paired, "--out", "paired")
        assert [row["difference"] for row in again["variants"]] == [
            row["difference"] for row in found["variants"]
        ]
    assert "written: paired/comparison.md, .tsv, .json, " in capsys.readouterr().out
    shutil.rmtree(here / "widths" / "results")
    plain = compare(*("widths/width=4", "widths/width=8"), "--out", "paired")
    assert [row["difference"] for row in plain["variants"]] == [None, None]
    assert any("--paired" in note for note in plain["notes"])
    assert "widths/width=4: --width 4" in plain["notes"]


@pytest.mark.slow
def test_a_search_is_a_comparison_of_its_trials_and_may_be_made_longer(here: Path) -> None:
    pytest.importorskip("optuna")
    space = ["--vary", "optimizer.lr=1e-3..1e-1", "--vary", "optimizer.name=adamw,sgd"]
    found = compare(
        "program.py:build", "--trials", "2", *space, "--pruner", "none", "--out", "search"
    )
    assert {row["variant"] for row in found["variants"]} == {"trial-000", "trial-001"}
    longer = compare("search", "--trials", "3")
    rates = {row["variant"]: row["settings"]["optimizer.lr"] for row in longer["variants"]}
    assert (
        rates | {row["variant"]: row["settings"]["optimizer.lr"] for row in found["variants"]}
        == rates
    )
    assert len(set(rates.values())) == 3
    assert [sessions(here / "search" / f"trial-00{place}") for place in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["gpt", "--vary", "optimizer.name=adamw,sgd", "--vary", "optimizer.momentum=0.9,0.8"],
            "is not a setting of adamw",
        ),
        (["gpt", "--vary", "optimizer.lrr=0.1"], "[setting-unknown]"),
        (["gpt", "--vary", "optimizer.lr"], "[setting-out-of-range]"),
        (["gpt", "--vary", "optimizer.lr=0.1,0.10"], "[variants-equal]"),
        (["gpt", "--vary", "optimizer.lr=1e-4..1e-2"], "[option-missing]"),
        (["gpt", "--vary", "run_dir=a,b"], "[setting-out-of-range]"),
        (["gpt"], "[nothing-varies]"),
        (["gpt", "--vary", "optimizer.lr=0.1,fast"], "[flags-not-understood]"),
        (["gpt", "--vary", "seed=0,1", "--seeds", "2"], "[option-excluded]"),
        (
            ["gpt", "--trials", "3", "--vary", "optimizer.lr=1e-2..1e-4"],
            "[vary-range-empty]",
        ),
        (
            ["gpt", "--trials", "3", "--vary", "optimizer.lr=1e-2..-"],
            "[vary-end-not-a-number]",
        ),
        (["gpt", "--vary", "optimizer.lr=1,2", "--jobs", "none"], "[flags-not-understood]"),
        (["gpt", "--vary", "optimizer.lr=1,2", "--sampler", "random"], "[option-missing]"),
        (["gpt", "--vary", "optimizer.lr=1,2", "--paired"], "[option-of-other-kind]"),
        (
            [
                "gpt",
                "--variant",
                "optimizer.name=adamw",
                "--variant",
                "optimizer.name=adamw seed=0",
            ],
            "[variants-equal]",
        ),
        (
            ["gpt", "--variant", "optimizer.lr=0.1"],
            "[nothing-varies]",
        ),
        (
            ["gpt", "--vary", "optimizer.lr=1,2", "--baseline", "foo"],
            "[baseline-unknown]",
        ),
        (
            ["gpt", "--vary", "optimizer.lr=1,2", "--metric", "val/loss"],
            "[setting-out-of-range]",
        ),
        (
            ["gpt", "--vary", "optimizer.lr=1,2", "--metric", "min loss"],
            "[setting-out-of-range]",
        ),
        (["a", "b", "--jobs", "2"], "[option-of-other-kind]"),
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
    assert len(told.splitlines()) <= 6
    assert not Path("runs").exists()


def test_every_wrong_combination_is_named(here: Path) -> None:
    typed = ["gpt", "--vary", "optimizer.lr=0.1,a,b,c,d,e"]
    options, flags = verb_options(Compare, typed, verb="compare")
    with pytest.raises(sf.ConfigError) as refusal:
        planned_of(find_program("gpt"), flags, options, verb="compare gpt")
    places = [problem.places for problem in refusal.value.problems]
    assert places == [(f"optimizer.lr={value}",) for value in "abcde"]


def test_what_is_typed_for_all_holds_for_every_variant_of_another_optimizer(here: Path) -> None:
    """What a file says is for its own optimizer; what was typed beside --vary is for all of
    them.
    """
    (here / "file.toml").write_text("[optimizer]\nlr = 0.5\nweight_decay = 0.75\n")
    program = find_program("program.py")
    shared = [
        "--config",
        "file.toml",
        "--optimizer.weight-decay",
        "0.25",
        "--optimizer.frozen",
        "0.bias",
    ]
    asked, rest = verb_options(
        Compare, [*shared, "--vary", "optimizer.name=adamw,lion", "--out", "out"], verb="compare"
    )
    plan = planned_of(program, rest, asked, verb="compare")
    asked_search = replace(asked, trials=2)
    search = planned_of(program, rest, asked_search, verb="compare")
    trials = [trial(search, name, {"optimizer.name": name}) for name in ("adamw", "lion")]
    for each in (plan, replace(search, variants=trials)):
        for name in each.names:
            described = compare_worker.build_variant(each, here / "out", name).parts.plan.identity[
                "optimizer"
            ]
            assert described["name"] in name
            assert described["lr"] == {"adamw": 0.5, "lion": 1e-3}[described["name"]]
            assert described["weight_decay"] == 0.25
            assert described["lr_multipliers"] == [{"frozen": ["0.bias"]}]
        assert len(each.names) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trials", "3"], "[option-of-other-kind]"),
        (["--out", "elsewhere"], "[option-of-other-kind]"),
        (
            ["--metric", "min tset/loss"],
            "[setting-out-of-range]",
        ),
        (["--metric", "min test/loss"], "[setting-out-of-range]"),
        (["--metric", "min val/lss"], "[score-missing]"),
        (["--baseline", "foo"], "[baseline-unknown]"),
        (["whole"], "[comparison-in-place-of-run]"),
    ],
)
def test_what_a_comparison_cannot_be_gone_on_with_is_refused(
    whole: Path,
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(whole.parent)
    before = (whole / "compare.toml").read_bytes()
    with pytest.raises(SystemExit) as end:
        main(["compare", "whole", *arguments])
    assert end.value.code == 2
    assert said in capsys.readouterr().err
    assert (whole / "compare.toml").read_bytes() == before


def test_a_reader_that_has_gone_is_no_error(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole.parent)
    monkeypatch.setattr(
        runner, "screen", lambda: runner.Lines(io.StringIO())
    )  # it has read the first lines
    read, write = os.pipe()
    os.close(read)
    pipe = SimpleNamespace(fileno=lambda: write)
    with Forked(lambda: main(["compare", "whole"]), stdout=pipe, stderr=subprocess.STDOUT) as again:
        os.close(write)
        assert again.wait() == 0


def test_a_score_of_no_split_is_not_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(
            [
                "compare",
                "program.py:build",
                "--vary",
                "width=4,8",
                "--metric",
                "min tset/loss",
                "--out",
                "out",
            ]
        )
    assert "[setting-out-of-range]" in capsys.readouterr().err
    plan = planned.read(here / "out")
    assert plan is not None
    assert plan.metric is None


def test_a_plan_tells_what_varies_from_what_was_typed_for_all(whole: Path) -> None:
    lines = (whole / "compare.toml").read_text().splitlines()
    assert 'name = "adamw" # varied' in lines
    assert "lr = 0.01 # flag" in lines
    assert any(line.startswith("run_dir = ") and line.endswith("# per variant") for line in lines)


def test_seeds_are_repeats_of_a_variant_whichever_option_gives_them(here: Path) -> None:
    program = find_program("program.py")

    def groups(*flags: str) -> list[tuple[str, str]]:
        asked, rest = verb_options(Compare, [*flags, "--out", "out"], verb="compare")
        plan = planned_of(program, rest, asked, verb="compare")
        return [(variant.name, variant.group) for variant in plan.variants]

    rates = ["--vary", "optimizer.lr=0.01,0.02"]
    expected = [(f"lr={lr},seed={seed}", f"lr={lr}") for lr in ("0.01", "0.02") for seed in (0, 1)]
    assert groups(*rates, "--seeds", "2") == expected
    assert groups(*rates, "--vary", "seed=0,1") == expected
    assert sorted(groups("--vary", "seed=0,1", *rates)) == expected
    assert groups("--vary", "seed=0,1") == [("seed=0", "seed=0"), ("seed=1", "seed=1")]


def run_of(place: Path, *, seed: int, score: float) -> None:
    written(place, [scores(5, **{"val/loss": score})], config=f"seed = {seed}\n")


def test_a_pattern_names_the_seeds_of_one_variant(here: Path) -> None:
    for name, found in {"a": (1.0, 1.1, 1.05), "b": (2.0, 2.2, 2.1)}.items():
        for seed, score in enumerate(found):
            run_of(here / "runs" / f"{name}-{seed}", seed=seed, score=score)
    apart = compare("runs/a-0", "runs/a-1", "runs/b-0", "--out", "out")
    assert [row["verdict"] for row in apart["variants"]] == ["best", *[ONE_SEED] * 2]
    for names in (["runs/a-*", "runs/b-*"], ["a-*", "b-*"]):  # their names below runs/ will do
        together = compare(*names, "--out", "out")
        rows = [(row["variant"], row["repeats"], row["verdict"]) for row in together["variants"]]
        assert rows == [(names[0], 3, "best"), (names[1], 3, "worse")]


def test_runs_of_one_seed_are_no_repeats(here: Path) -> None:
    for name in ("a-0", "a-1", "b"):
        run_of(here / name, seed=7, score=1.0)
    asked, _ = verb_options(Compare, ["a-*", "b"], verb="compare")
    with refused("repeats-of-one-seed", pattern="a-*", seed=7):
        compare_existing(asked)
    asked, _ = verb_options(Compare, ["a-*", "a-0"], verb="compare")
    with refused("run-named-twice"):
        compare_existing(asked)


def test_the_precision_that_was_chosen_is_in_the_settings_of_every_run(here: Path) -> None:
    """What a run leaves open is chosen once, and said wherever the settings are."""
    changed = PROGRAM.replace('precision="fp32"', "precision=config.precision")
    (here / "program.py").write_text(
        changed.replace("width: int = 8", 'width: int = 8\n    precision: str = "auto"')
    )
    program = find_program("program.py")
    asked, rest = verb_options(
        Compare, ["--vary", "optimizer.lr=0.01,0.02", "--out", "out"], verb="compare"
    )
    plan = planned_of(program, rest, asked, verb="compare")
    plan = replace(plan, found={"precision": "bf16", "chosen": "1.3 times as fast as fp32"})
    run = compare_worker.build_variant(plan, here / "out", "lr=0.02")
    assert run.parts.plan.identity["precision"] == "bf16"
    assert 'precision = "bf16" # auto' in str(run.configuration)
    assert plan.settled == {"precision": "bf16"}
    chooser = VariantsInOrder(plan.names, here / "out")
    runs, precision = introduction(plan, here / "out", chooser, jobs=1).splitlines()
    assert numbers_in(runs)[:3] == [2, 1, plan.threads]  # runs, at once, threads of each
    assert runs.endswith(f" in {here / 'out'}")
    assert precision.startswith("precision: bf16, ")
    assert "(1.3 times as fast as fp32)" in precision
    assert "--precision bf16" in precision
    laid = replace(plan, found=plan.found | {"channels_last": True, "compile": True})
    _, precision, compiled = introduction(laid, here / "out", chooser, jobs=1).splitlines()
    assert precision.startswith("precision: bf16, channels last, ")
    assert "--precision" not in precision  # one that is named leaves images as they come
    assert compiled.startswith("compile: True, ")
