"""`surefoot replay` as a user types it: what it prints, what it compares with, what it refuses;
about 3 s.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import faulty_runs
import surefoot as sf
from refused import refused
from stated import numbers_in
from surefoot.cli.main import main
from surefoot.tools.replay.replay import report_cost
from surefoot.tracking.jsonl import records

Ran = Callable[..., tuple[int, str, str]]
FILE = Path(faulty_runs.__file__)


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Ran:
    """`surefoot` with these arguments: its exit status, and what it printed."""
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    monkeypatch.chdir(tmp_path)

    def ran(*arguments: str) -> tuple[int, str, str]:
        status = 0
        try:
            main(list(arguments))
        except SystemExit as end:
            status = int(end.code or 0)
        return (status, *capsys.readouterr())

    return ran


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 steps, a checkpoint every 4 and a record every 3."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    main(["train", f"{FILE}:build", "--run-dir", str(run_dir), "--log-every", "3 steps"])
    return run_dir


def test_the_page_says_from_where_and_shows_the_step(trained: Path, command: Ran) -> None:
    status, page, said = command("replay", str(trained), "--step", "5", "--samples", "2")
    assert status == 0
    title, _, _, repeated = page.splitlines()[:4]
    assert title == f"{trained}, step 5 of 24"
    _, of_json, _ = command("replay", str(trained), "--step", "5", "--samples", "0", "--json")
    assert (json.loads(of_json)["first"], json.loads(of_json)["finite"]) == (None, True)
    how, compared = repeated.split("; ")
    assert "step-00000004" in how
    assert numbers_in(how) == [2]  # steps
    assert all(name in compared.split() for name in ("loss", "grad_norm"))
    assert said.startswith("from step-00000004: 2 steps ")
    ids = [
        sample
        for held in faulty_runs.build(faulty_runs.Config()).parts.pipeline.samples(5)
        for sample in held
    ]
    assert all(f" {sample}" in page for sample in ids)
    assert page.count("    batch[0]  (6)") == 2
    assert all(len(line) <= 100 for line in page.splitlines() if str(trained) not in line)
    for name in ("blocks.1.up ", "blocks.1.up.weight", "norm.bias"):
        assert f"\n{name}" in page


@pytest.mark.parametrize(
    ("step", "where"),
    [(5, "the record"), (6, "step-00000008"), (4, None), (0, None), (23, "the record")],
)
def test_a_step_is_compared_with_what_the_run_has_noted_of_it(
    step: int, where: str | None, trained: Path, command: Ran
) -> None:
    _, page, _ = command("replay", str(trained), "--step", str(step), "--json", "--samples", "0")
    logged = json.loads(page)["logged"]
    assert (logged and (logged["where"], logged["equal"])) == (where and (where, True))


def test_a_record_that_was_changed_is_told(trained: Path, command: Ran, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "edited")
    file = tmp_path / "edited" / "metrics.jsonl"
    (loss,) = (
        record["loss"]
        for record in records(file)
        if record["kind"] == "train" and record["step"] == 6
    )
    file.write_text(file.read_text().replace(repr(loss), repr(loss + 1e-9)))
    _, page, _ = command("replay", "edited", "--step", "5")
    assert f": loss {loss + 1e-9!r}, now {loss!r}" in " ".join(page.split())
    _, page, _ = command("replay", "edited", "--step", "5", "--json", "--samples", "0")
    logged = json.loads(page)["logged"]
    assert not logged["equal"]
    assert (logged["then"]["loss"], logged["now"]["loss"]) == (loss + 1e-9, loss)


def test_nothing_is_written_into_the_run(trained: Path, command: Ran) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    command("replay", str(trained), "--step", "9")
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(
    trained: Path, command: Ran, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path / "damaged")
    file = tmp_path / "damaged" / "checkpoints" / "step-00000008" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    status, page, said = command("replay", "damaged", "--step", "9", "--samples", "0")
    assert status == 0
    assert "step-00000008 is damaged" in said
    assert "repeated from step-00000004, 6 steps" in page


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--step", "24"], 2, "[step-not-in-run]"),
        (["--step", "-1"], 2, "[setting-out-of-range]"),
        ([], 2, "[step-or-search]"),
        (["--step", "3", "--bisect-nan"], 2, "[step-or-search]"),
        (["--step", "3", "--nproc", "2"], 2, "[one-process-only]"),
        (["--step", "3", "--batch-size", "4"], 4, "[settings-changed]"),
        (["--step", "3", "--sampels", "4"], 2, "[setting-unknown]"),
        (["--stp", "3"], 2, "[setting-unknown]"),
    ],
)
def test_what_cannot_be_is_one_clear_error(
    arguments: list[str], status: int, said: str, trained: Path, command: Ran
) -> None:
    ended, page, error = command("replay", str(trained), *arguments)
    assert (ended, page) == (status, "")
    assert said in error
    assert len([line for line in error.splitlines() if not line.startswith("from step-")]) <= 5


def test_of_another_run_it_is_said_that_its_steps_cannot_be_made_and_not_how_to_resume_it(
    trained: Path, command: Ran
) -> None:
    _, _, error = command("replay", str(trained), "--step", "3", "--batch-size", "4", "--json")
    described = json.loads(error.splitlines()[-1])
    assert described["code"] == "settings-changed"
    assert "resume" not in described["message"]
    assert [list(remedy) for remedy in described["remedies"]] == [["text"]]
    assert "--run-dir" not in error


def test_a_run_is_held_by_one_process_whole_whatever_shared_it() -> None:
    from surefoot.config.parallel import FSDPSettings
    from surefoot.program import for_one_process
    from surefoot.recipes.images.config import Config

    config = Config(parallel="fsdp", fsdp=FSDPSettings(replicas=2, gather_dtype="bf16"))
    held, sharded = (
        for_one_process(config, Path("runs/a"), sharded=sharded) for sharded in (False, True)
    )
    assert (held.parallel, held.fsdp, held.run_dir) == ("none", FSDPSettings(), "runs/a")
    assert (sharded.parallel, sharded.fsdp) == ("fsdp", FSDPSettings(gather_dtype="bf16"))
    assert for_one_process(None, Path("runs/a")) is None


def test_a_run_without_checkpoints_is_refused(trained: Path, command: Ran, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "checkpoints")
    status, _, error = command("replay", "bare", "--step", "3")
    assert status == 4
    assert "[run-without-checkpoint]" in error


def test_the_run_of_a_script_is_replayed_in_that_script(command: Ran) -> None:
    run = faulty_runs.build(faulty_runs.Config(run_dir="script", length="4 steps"))
    run.train()
    status, _, error = command("replay", "script", "--step", "2")
    assert status == 2
    assert "sf.load(run) has evaluate(), replay(step)" in error
    again = sf.load(
        faulty_runs.build(faulty_runs.Config(run_dir="script", length="4 steps"))
    ).replay(step=2)
    assert again.logged is not None
    assert again.logged.equal
    assert str(again).startswith(f"{Path('script').absolute()}, step 2 of 4\n")
    with refused("run-without-directory"):
        sf.load(faulty_runs.build(faulty_runs.Config())).replay(step=2)


def test_steps_of_a_loop_of_ones_own_are_refused_with_what_to_do(
    command: Ran, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "import torch, surefoot as sf\n"
        "def build():\n"
        "    return sf.Run(model=lambda: torch.nn.Linear(4, 1), train_data=(torch.ones(9, 4),), batch_size=3, length='3 steps',\n"
        "        optimizer=sf.optim.sgd(lr=0.1), run_dir='own', device='cpu', console=False)\n"
    )
    assert command("train", "own.py:build")[0] == 2  # it has no loss; what was begun is there
    status, _, error = command("replay", "own", "--step", "0")
    assert status == 2
    assert "[steps-of-own-loop]" in error


def test_a_body_of_the_users_is_said_not_to_be_repeated(command: Ran) -> None:
    def build() -> sf.Run:
        return faulty_runs.build(faulty_runs.Config(run_dir="body", length="4 steps"))

    with build() as run:
        for step in run:
            assert step.loss is not None
    assert len(sf.load(build()).replay(step=2).notes) == 1
    run = faulty_runs.build(faulty_runs.Config(run_dir="bare", length="4 steps"))
    run.train()
    assert (
        not sf.load(faulty_runs.build(faulty_runs.Config(run_dir="bare", length="4 steps")))
        .replay(step=2)
        .notes
    )


def test_a_text_is_shown_as_text(command: Ran, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on a mat while birds sang\n" * 60)
    small = [
        "--model.layers=1",
        "--model.width=16",
        "--model.heads=2",
        "--model.context=16",
        "--length=4 steps",
    ]
    data = [
        "--data.path=text.txt",
        "--data.tokenizer=characters",
        "--cloze-questions=0",
        "--sample-tokens=0",
    ]
    assert command("train", "gpt", "--run-dir=texts", *small, *data)[0] == 0
    _, page, _ = command("replay", "texts", "--step", "1", "--samples", "1", "--json")
    shown = json.loads(page)["samples"][0]["shown"]
    assert len(eval(shown)) == 17  # what the model sees, and the last target
    assert eval(shown) in "the cat sat on a mat while birds sang\n" * 3


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ([], "from step-00000004: 6 steps to repeat"),
        (
            [{"kind": "train", "step": 20, "training_s": 190.0, "data_wait_s": 10.0}],
            "from step-00000004: 6 steps to repeat, about 1m00s at the recorded speed",
        ),
    ],
)
def test_the_cost_is_told_by_the_time_of_the_steps_on_record(
    known: list[dict[str, float | str]], said: str
) -> None:
    told: list[str] = []
    report_cost(4, 10, [], known, told.append)
    assert told == [said]
