"""surefoot compare as it is typed: variants trained, killed, gone on with, failing, compared,
searched for. (20 s)

Variants are forked from this process; one test starts them as they are started elsewhere, and they
come out the same.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from command_line import error_of
from fake_slurm import weights
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
OPTIMIZERS = [
    "program.py:build",
    "--vary=optimizer.name=adamw,sgd",
    "--optimizer.lr=0.01",
]
SLOW = [*OPTIMIZERS, "--step-s=0.05"]
SHORT_RATES = [
    "program.py:build",
    "--vary=optimizer.lr=0.01,0.02",
    "--length=2 steps",
]


def enter_directory(place: Path, patch: pytest.MonkeyPatch) -> Path:
    patch.chdir(place)
    patch.setattr(sys, "argv", ["surefoot"])
    (place / "program.py").write_text(PROGRAM)
    return place


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a program, where variants are processes as elsewhere."""
    return enter_directory(tmp_path, monkeypatch)


@pytest.fixture
def here(real: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a program, where variants are forked and no picture is drawn."""
    variants_are_forked(monkeypatch)
    monkeypatch.setattr("surefoot.tools.report.figures.draw", lambda charts, path, *, title: [])
    return real


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The comparison of `OPTIMIZERS`, never interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        place = enter_directory(tmp_path_factory.mktemp("whole"), patch)
        variants_are_forked(patch)
        compare(*OPTIMIZERS, "--out", "whole")
        patch.undo()
        yield place / "whole"


def compare(*arguments: str) -> dict[str, Any]:
    """What comparison.json holds afterwards."""
    main(["compare", *arguments])
    directory = arguments[0]
    if "--out" in arguments:
        directory = arguments[arguments.index("--out") + 1]
    return read_comparison(Path(directory))


def read_comparison(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "comparison.json").read_text()))


def start_comparison(*arguments: str) -> Forked:
    return Forked(
        lambda: main(["compare", *arguments]), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def plan_of(*flags: str) -> planned.Plan:
    """What `compare program.py` with these flags would train."""
    options, settings = verb_options(Compare, [*flags, "--out", "out"], verb="compare")
    return planned_of(find_program("program.py"), settings, options, verb="compare")


def wait_for(fact: Callable[[], bool], what: str) -> None:
    assert wait_until(fact), f"never happened: {what}"


def sessions(run: Path) -> int:
    return len(json.loads((run / "environment.json").read_text())["sessions"])


def last_step_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    if not path.is_file():
        return 0
    return max((record["step"] for record in records(path)), default=0)


def processes_in(place: Path, *, besides: int) -> list[int]:
    """The processes that stand in a directory, without this one and another."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            directory = process.joinpath("cwd").readlink()
        except OSError:  # another's, or gone
            continue
        if directory == place.resolve() and int(process.name) not in (os.getpid(), besides):
            processes.append(int(process.name))
    return processes


def first_loss(run: Path) -> float:
    training = (record for record in records(run / "metrics.jsonl") if record["kind"] == "train")
    return float(next(training)["loss"])


def statuses(comparison: dict[str, Any]) -> list[str]:
    return [row["status"] for row in comparison["variants"]]


def notes_beginning(comparison: dict[str, Any], words: str) -> list[str]:
    return [note for note in comparison["notes"] if note.startswith(words)]


@pytest.mark.slow
def test_killed_with_its_children_and_gone_on_with_it_ends_with_the_same_bits(
    here: Path, whole: Path
) -> None:
    second = here / "killed" / "name=sgd"
    with start_comparison(*SLOW, "--out", "killed") as parent:
        wait_for(lambda: last_step_of(second) >= 8, "the second variant's eighth step")
        assert processes_in(here, besides=parent.pid)
        parent.kill()
    wait_for(lambda: not processes_in(here, besides=parent.pid), "the end of the children")
    assert last_step_of(second) < 30

    resumed = compare("killed")

    for name in ("name=adamw", "name=sgd"):
        assert weights(here / "killed" / name) == weights(whole / name)
    assert sessions(here / "killed" / "name=adamw") == 1
    assert sessions(second) == 2
    keys = ("variant", "best", "best_step", "final", "difference", "difference_error", "verdict")
    for row, expected in zip(resumed["variants"], read_comparison(whole)["variants"], strict=True):
        assert {key: row[key] for key in keys} == {key: expected[key] for key in keys}


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
    sgd_first = [
        "program.py:build",
        "--optimizer.lr=0.01",
        "--vary=optimizer.name=sgd,adamw",
        "--step-s=0.02",
    ]
    with start_comparison(*sgd_first, "--out", "own") as parent:
        wait_for(lambda: last_step_of(real / "own" / "name=sgd") >= 8, "the eighth step")
        (child,) = processes_in(real, besides=parent.pid)
        command = Path(f"/proc/{child}/cmdline")
        assert b"surefoot.cli.compare_worker" in command.read_bytes()
        parent.kill()
    # a process that has ended and is not yet waited for has an empty command
    wait_for(lambda: not (command.exists() and command.read_bytes()), "the end of the child")

    compare("own")

    assert weights(real / "own" / "name=sgd") == weights(whole / "name=sgd")


def test_variants_of_an_optimizer_share_weights_and_samples_and_the_comparison_says_so(
    whole: Path,
) -> None:
    comparison = read_comparison(whole)
    assert statuses(comparison) == ["finished", "finished"]
    # optimizers change neither the first loss nor the samples
    assert first_loss(whole / "name=adamw") == first_loss(whole / "name=sgd")
    assert notes_beginning(comparison, "shared: ") != []
    assert notes_beginning(comparison, "not shared: ") == []


def test_the_difference_of_a_variant_is_that_of_its_score_from_the_first(whole: Path) -> None:
    first, second = read_comparison(whole)["variants"]
    assert second["difference"] == pytest.approx(second["best"] - first["best"], rel=1e-5)


def test_a_comparison_does_not_score_the_test_split(whole: Path) -> None:
    kinds = {record["kind"] for record in records(whole / "name=sgd" / "metrics.jsonl")}
    assert "eval" in kinds
    assert "final_eval" not in kinds


@pytest.mark.parametrize("suffix", ["svg", "md", "tsv"])
def test_a_comparison_is_written_as_a_picture_and_tables(suffix: str, whole: Path) -> None:
    assert (whole / f"comparison.{suffix}").stat().st_size > 0


@pytest.mark.fast("15-143")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_running_variants_and_says_how_to_go_on(
    here: Path, number: int, status: int
) -> None:
    runs = [here / "stopped" / "name=adamw", here / "stopped" / "name=sgd"]
    with start_comparison(
        *OPTIMIZERS, "--step-s", "0.2", "--jobs", "2", "--out", "stopped"
    ) as parent:
        wait_for(lambda: all(last_step_of(run) >= 2 for run in runs), "steps")
        parent.send_signal(number)
        assert parent.stdout is not None
        output = parent.stdout.read()

    assert parent.returncode == status
    assert "resume with: surefoot compare stopped" in output
    for run in runs:
        checkpoint, _ = weights(run)
        assert int(checkpoint.removeprefix("step-")) == last_step_of(run) > 0


@pytest.mark.slow
def test_a_variant_is_trained_again_where_its_directory_was_removed_and_else_never(
    here: Path,
) -> None:
    compare(*SHORT_RATES, "--out", "again")
    shutil.rmtree(here / "again" / "lr=0.02")
    result = here / "again" / "results" / "lr=0.01.json"
    written_ns = result.stat().st_mtime_ns

    comparison = compare("again")

    assert statuses(comparison) == ["finished", "finished"]
    assert last_step_of(here / "again" / "lr=0.02") == 2
    assert result.stat().st_mtime_ns == written_ns
    assert sessions(here / "again" / "lr=0.01") == 1


@pytest.mark.slow
def test_what_ends_a_process_after_it_has_said_that_it_finished_is_no_failure(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = compare_worker.train

    def train_and_be_killed(*arguments: Any) -> None:
        train(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(compare_worker, "train", train_and_be_killed)

    comparison = compare(*SHORT_RATES, "--out", "said")

    assert statuses(comparison) == ["finished", "finished"]


def test_a_second_comparison_in_the_directory_is_refused_and_disturbs_nothing(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with start_comparison(*SLOW, "--out", "both") as parent:
        wait_for(lambda: last_step_of(here / "both" / "name=adamw") >= 1, "a step")
        assert "[run-in-training]" in error_of(capfd, "compare", "both")
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

    comparison = compare("program.py:build", "--seeds=2", "--length=2 steps", "--out", "seeds")

    assert [run["settings"]["seed"] for run in comparison["runs"]] == [7, 8]
    # there are no two of one seed
    assert not any("shared" in note for note in comparison["notes"])


@pytest.mark.slow
def test_a_variant_that_fails_is_a_row_and_stops_no_other(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = compare(
        "program.py:build",
        "--optimizer.name=sgd",
        "--variant=optimizer.lr=0.01",
        "--variant=optimizer.lr=1e30",
        "--variant=optimizer.lr=0.02 huge=true",
        "--out",
        "failing",
    )
    rows = {row["variant"]: row for row in comparison["variants"]}
    assert rows["lr=0.01"]["status"] == "finished"
    assert rows["lr=1e+30"]["status"].startswith("diverged")
    assert rows["lr=0.02,huge=True"]["status"] == "out of memory at step 0"
    assert "no room" in rows["lr=0.02,huge=True"]["said"]

    main(["compare", "failing"])

    # what diverged would do so again; what had no memory is tried again
    assert sessions(here / "failing" / "lr=0.01") == 1
    assert sessions(here / "failing" / "lr=0.02,huge=True") == 2
    assert "out of memory" in capsys.readouterr().out


def train_script(run_dir: str, *, width: int, lr: float) -> None:
    """Train a run as a script does."""
    sf.Run(
        model=lambda: nn.Linear(width, 2),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        train_data=(torch.ones(8, width), torch.zeros(8)),
        batch_size=4,
        length="2 steps",
        optimizer=sf.optim.sgd(lr=lr),
        splits={"val": sf.Split((torch.ones(4, width), torch.zeros(4)))},
        evaluate_every="1 steps",
        run_dir=run_dir,
        console=False,
        report=False,
        tensorboard=False,
    ).train()


def test_runs_of_a_script_are_compared_without_flags(here: Path) -> None:
    train_script("mine-4", width=4, lr=0.1)
    train_script("mine-8", width=8, lr=0.2)

    notes = compare("mine-4", "mine-8", "--out", "compared")["notes"]

    assert [note for note in notes if "--" in note] == []
    assert len([note for note in notes if "optimizer.lr = " in note]) == 2
    (sizes,) = [note for note in notes if " bytes of mine-4, " in note]
    assert sizes.startswith("not shared: ")


@pytest.mark.slow
def test_what_is_not_shared_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def differences(comparison: dict[str, Any]) -> list[float | None]:
        return [row["difference"] for row in comparison["variants"]]

    variants = compare(
        "program.py:build", "--vary", "width=4,8", "--length=6 steps", "--out", "widths"
    )
    assert len(notes_beginning(variants, "not shared: ")) == 2  # sizes and weights
    assert len(notes_beginning(variants, "shared: ")) == 1  # the order

    runs = ["widths/width=4", "widths/width=8"]
    paired = compare(*runs, "--paired", "--out", "paired")
    assert differences(paired) == differences(variants)
    # what the comparison has left beside its runs is as good as --paired
    beside_results = compare(*runs, "--out", "paired")
    assert differences(beside_results) == differences(variants)
    assert "written: paired/comparison.md, .tsv, .json, " in capsys.readouterr().out

    shutil.rmtree(here / "widths" / "results")
    unpaired = compare(*runs, "--out", "paired")
    assert differences(unpaired) == [None, None]
    assert any("--paired" in note for note in unpaired["notes"])
    assert "widths/width=4: --width 4" in unpaired["notes"]


@pytest.mark.slow
def test_a_search_is_a_comparison_of_its_trials_and_may_be_made_longer(here: Path) -> None:
    pytest.importorskip("optuna")

    def rates(comparison: dict[str, Any]) -> dict[str, float]:
        return {row["variant"]: row["settings"]["optimizer.lr"] for row in comparison["variants"]}

    space = ["--vary", "optimizer.lr=1e-3..1e-1", "--vary", "optimizer.name=adamw,sgd"]
    two = compare(
        "program.py:build", "--trials", "2", *space, "--pruner", "none", "--out", "search"
    )
    three = compare("search", "--trials", "3")

    assert rates(two).keys() == {"trial-000", "trial-001"}
    assert rates(two).items() < rates(three).items()
    assert len(set(rates(three).values())) == 3
    assert [sessions(here / "search" / f"trial-00{place}") for place in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("typed", "reason"),
    [
        (
            "gpt --vary optimizer.name=adamw,sgd --vary optimizer.momentum=0.9,0.8",
            "is not a setting of adamw",
        ),
        ("gpt --vary optimizer.lrr=0.1", "[setting-unknown]"),
        ("gpt --vary optimizer.lr", "[setting-out-of-range]"),
        ("gpt --vary optimizer.lr=0.1,0.10", "[variants-equal]"),
        ("gpt --vary optimizer.lr=1e-4..1e-2", "[option-missing]"),
        ("gpt --vary run_dir=a,b", "[setting-out-of-range]"),
        ("gpt", "[nothing-varies]"),
        ("gpt --vary optimizer.lr=0.1,fast", "[flags-not-understood]"),
        ("gpt --vary seed=0,1 --seeds 2", "[option-excluded]"),
        ("gpt --trials 3 --vary optimizer.lr=1e-2..1e-4", "[vary-range-empty]"),
        ("gpt --trials 3 --vary optimizer.lr=1e-2..-", "[vary-end-not-a-number]"),
        ("gpt --vary optimizer.lr=1,2 --jobs none", "[flags-not-understood]"),
        ("gpt --vary optimizer.lr=1,2 --sampler random", "[option-missing]"),
        ("gpt --vary optimizer.lr=1,2 --paired", "[option-of-other-kind]"),
        (
            "gpt --variant optimizer.name=adamw --variant 'optimizer.name=adamw seed=0'",
            "[variants-equal]",
        ),
        ("gpt --variant optimizer.lr=0.1", "[nothing-varies]"),
        ("gpt --vary optimizer.lr=1,2 --baseline foo", "[baseline-unknown]"),
        ("gpt --vary optimizer.lr=1,2 --metric val/loss", "[setting-out-of-range]"),
        ("gpt --vary optimizer.lr=1,2 --metric 'min loss'", "[setting-out-of-range]"),
        ("a b --jobs 2", "[option-of-other-kind]"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_trained(
    here: Path, typed: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_of(capsys, "compare", *shlex.split(typed))
    assert reason in message
    assert len(message.splitlines()) <= 6
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
    flags = [
        "--config=file.toml",
        "--optimizer.weight-decay=0.25",
        "--optimizer.frozen=0.bias",
        "--vary=optimizer.name=adamw,lion",
    ]
    grid = plan_of(*flags)
    search = plan_of(*flags, "--trials=2")
    trials = [trial(search, name, {"optimizer.name": name}) for name in ("adamw", "lion")]
    search = replace(search, variants=trials)

    for plan in (grid, search):
        assert len(plan.names) == 2
        for name in plan.names:
            run = compare_worker.build_variant(plan, here / "out", name)
            optimizer = run.parts.plan.identity["optimizer"]
            assert optimizer["name"] in name
            assert optimizer["lr"] == {"adamw": 0.5, "lion": 1e-3}[optimizer["name"]]
            assert optimizer["weight_decay"] == 0.25
            assert optimizer["lr_multipliers"] == [{"frozen": ["0.bias"]}]


@pytest.mark.parametrize(
    ("argument", "code"),
    [
        ("--trials=3", "option-of-other-kind"),
        ("--out=elsewhere", "option-of-other-kind"),
        ("--metric=min tset/loss", "setting-out-of-range"),
        ("--metric=min test/loss", "setting-out-of-range"),
        ("--metric=min val/lss", "score-missing"),
        ("--baseline=foo", "baseline-unknown"),
        ("whole", "comparison-in-place-of-run"),
    ],
)
def test_what_a_comparison_cannot_be_resumed_with_is_refused(
    whole: Path,
    argument: str,
    code: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(whole.parent)
    plan = (whole / "compare.toml").read_bytes()
    assert f"[{code}]" in error_of(capsys, "compare", "whole", argument)
    assert (whole / "compare.toml").read_bytes() == plan


def test_a_reader_that_has_gone_is_no_error(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole.parent)
    # it has read the first lines
    monkeypatch.setattr(runner, "screen", lambda: runner.Lines(io.StringIO()))
    read, write = os.pipe()
    os.close(read)
    pipe = SimpleNamespace(fileno=lambda: write)
    with Forked(lambda: main(["compare", "whole"]), stdout=pipe, stderr=subprocess.STDOUT) as child:
        os.close(write)
        assert child.wait() == 0


def test_a_score_of_no_split_is_not_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(
        capsys,
        "compare",
        "program.py:build",
        "--vary=width=4,8",
        "--metric=min tset/loss",
        "--out=out",
    )
    assert "[setting-out-of-range]" in message
    plan = planned.read(here / "out")
    assert plan is not None
    assert plan.metric is None


def test_a_plan_tells_what_varies_from_what_was_typed_for_all(whole: Path) -> None:
    lines = (whole / "compare.toml").read_text().splitlines()
    assert 'name = "adamw" # varied' in lines
    assert "lr = 0.01 # flag" in lines
    assert any(line.startswith("run_dir = ") and line.endswith("# per variant") for line in lines)


def test_seeds_are_repeats_of_a_variant_whichever_option_gives_them(here: Path) -> None:
    def groups(*flags: str) -> list[tuple[str, str]]:
        return [(variant.name, variant.group) for variant in plan_of(*flags).variants]

    rates = ["--vary", "optimizer.lr=0.01,0.02"]
    expected = [
        ("lr=0.01,seed=0", "lr=0.01"),
        ("lr=0.01,seed=1", "lr=0.01"),
        ("lr=0.02,seed=0", "lr=0.02"),
        ("lr=0.02,seed=1", "lr=0.02"),
    ]
    assert groups(*rates, "--seeds", "2") == expected
    assert groups(*rates, "--vary", "seed=0,1") == expected
    assert sorted(groups("--vary", "seed=0,1", *rates)) == expected
    assert groups("--vary", "seed=0,1") == [("seed=0", "seed=0"), ("seed=1", "seed=1")]


@pytest.fixture
def scored(here: Path) -> Path:
    """Runs of two variants with three seeds each."""
    variants = {"a": (1.0, 1.1, 1.05), "b": (2.0, 2.2, 2.1)}
    for name, scores_of_seeds in variants.items():
        for seed, score in enumerate(scores_of_seeds):
            write_run(here / "runs" / f"{name}-{seed}", seed=seed, score=score)
    return here


def write_run(run_dir: Path, *, seed: int, score: float) -> None:
    written(run_dir, [scores(5, **{"val/loss": score})], config=f"seed = {seed}\n")


def test_runs_that_are_named_one_by_one_are_variants_of_one_seed(scored: Path) -> None:
    comparison = compare("runs/a-0", "runs/a-1", "runs/b-0", "--out", "out")
    assert [row["verdict"] for row in comparison["variants"]] == ["best", ONE_SEED, ONE_SEED]


@pytest.mark.parametrize("names", [("runs/a-*", "runs/b-*"), ("a-*", "b-*")])
def test_a_pattern_names_the_seeds_of_one_variant_with_or_without_their_directory(
    names: tuple[str, str], scored: Path
) -> None:
    comparison = compare(*names, "--out", "out")
    rows = [(row["variant"], row["repeats"], row["verdict"]) for row in comparison["variants"]]
    assert rows == [(names[0], 3, "best"), (names[1], 3, "worse")]


def test_runs_of_one_seed_are_no_repeats(here: Path) -> None:
    for name in ("a-0", "a-1", "b"):
        write_run(here / name, seed=7, score=1.0)
    options, _ = verb_options(Compare, ["a-*", "b"], verb="compare")
    with refused("repeats-of-one-seed", pattern="a-*", seed=7):
        compare_existing(options)


def test_a_run_is_named_once(scored: Path) -> None:
    options, _ = verb_options(Compare, ["a-*", "a-0"], verb="compare")
    with refused("run-named-twice"):
        compare_existing(options)


@pytest.fixture
def bf16_plan(here: Path) -> planned.Plan:
    """The plan of a program that leaves its precision open, for which bf16 was chosen."""
    program = PROGRAM.replace('precision="fp32"', "precision=config.precision")
    program = program.replace("width: int = 8", 'width: int = 8\n    precision: str = "auto"')
    (here / "program.py").write_text(program)
    plan = plan_of("--vary", "optimizer.lr=0.01,0.02")
    return replace(plan, found={"precision": "bf16", "chosen": "1.3 times as fast as fp32"})


def test_the_precision_that_was_chosen_is_in_the_settings_of_every_run(
    bf16_plan: planned.Plan, here: Path
) -> None:
    run = compare_worker.build_variant(bf16_plan, here / "out", "lr=0.02")
    assert run.parts.plan.identity["precision"] == "bf16"
    assert 'precision = "bf16" # auto' in str(run.configuration)
    assert bf16_plan.settled == {"precision": "bf16"}


def test_a_comparison_begins_with_what_runs_and_the_precision_that_was_chosen(
    bf16_plan: planned.Plan, here: Path
) -> None:
    chooser = VariantsInOrder(bf16_plan.names, here / "out")
    runs, precision = introduction(bf16_plan, here / "out", chooser, jobs=1).splitlines()
    run_count, at_once, threads = numbers_in(runs)[:3]
    assert (run_count, at_once, threads) == (2, 1, bf16_plan.threads)
    assert runs.endswith(f" in {here / 'out'}")
    assert precision.startswith("precision: bf16, ")
    assert "(1.3 times as fast as fp32)" in precision
    assert "--precision bf16" in precision


def test_a_comparison_begins_with_the_memory_format_and_compilation_that_were_chosen(
    bf16_plan: planned.Plan, here: Path
) -> None:
    chooser = VariantsInOrder(bf16_plan.names, here / "out")
    plan = replace(bf16_plan, found=bf16_plan.found | {"channels_last": True, "compile": True})
    _, precision, compiled = introduction(plan, here / "out", chooser, jobs=1).splitlines()
    assert precision.startswith("precision: bf16, channels last, ")
    assert "--precision" not in precision  # one that is named leaves images as they come
    assert compiled.startswith("compile: True, ")
