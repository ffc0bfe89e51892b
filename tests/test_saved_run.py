"""`sf.load`: what a run's directory tells, what is done with it, and what of that executes the
run's program.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from refused import refused
from run_files import records_of, same_tensors
from stated import numbers_in
from surefoot.cli.main import main
from surefoot.tools.compare.trained import read_run as compared_run
from surefoot.tools.report.directory_watch import DirectoryWatch
from surefoot.tracking.run_directory import directory_of_start

PROGRAM = """
from pathlib import Path
import torch, surefoot as sf
with Path("executed").open("a") as file:
    file.write("x")

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def build():
    data = torch.linspace(-1, 1, 8)[:, None], 3 * torch.linspace(-1, 1, 8)[:, None]
    return sf.Run(model=lambda: torch.nn.Linear(1, 1), loss=loss, train_data=data, batch_size=4, length="4 steps",
        optimizer=sf.optim.sgd(lr=0.1), splits={"val": sf.Split(data)}, evaluate_every="2 steps", best="min val/loss", ema=0.5,
        save_every="2 steps", log_every="2 steps", run_dir="run", device="cpu", precision="fp32", console=False, report=False)
"""
READING: dict[str, Callable[[sf.SavedRun], object]] = {
    "step": lambda run: run.step,
    "status": lambda run: run.status,
    "settings": lambda run: run.settings,
    "metrics": lambda run: run.metrics,
    "checkpoints": lambda run: run.checkpoints,
    "records": lambda run: run.records(),
    "dataframe": lambda run: run.dataframe(),
    "panels": lambda run: run.panels(),
    "diagnose": lambda run: run.diagnose(),
    "report": lambda run: run.report("page.html"),
    "export": lambda run: run.export("weights"),
    "load_model": lambda run: run.load_model(linear),
    "verify of files": lambda run: run.verify(windows=0),
}
EXECUTING: dict[str, Callable[[sf.SavedRun], object]] = {
    "evaluate": lambda run: run.evaluate(),
    "predict": lambda run: run.predict("val"),
    "replay": lambda run: run.replay(1),
    "verify": lambda run: run.verify(),
    "load_model": lambda run: run.load_model(),
}


def linear() -> nn.Module:
    return nn.Linear(1, 1)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    mean: torch.Tensor = (model(batch[0]) - batch[1]).square().mean()
    return mean


def build(run_dir: Path | None, **changes: Any) -> sf.Run:
    data = torch.linspace(-1, 1, 8)[:, None], 3 * torch.linspace(-1, 1, 8)[:, None]
    settings: dict[str, Any] = {
        "model": linear,
        "loss": loss,
        "train_data": data,
        "batch_size": 4,
        "length": "4 steps",
        "optimizer": sf.optim.adamw(lr=0.1),
        "splits": {"val": sf.Split(data), "test": sf.Split(data, at_end=True)},
        "save_every": "2 steps",
        "log_every": "1 steps",
        "ema": 0.5,
        "device": "cpu",
        "run_dir": run_dir,
        "console": False,
        "report": False,
    }
    return sf.Run(**(settings | changes))


@pytest.fixture(scope="module")
def of_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which a program stands, and the run that it has trained."""
    place = tmp_path_factory.mktemp("of-file")
    before = Path.cwd()
    (place / "program.py").write_text(PROGRAM)
    os.chdir(place)
    try:
        main(["train", "program.py:build"])
    finally:
        os.chdir(before)
    return place


@pytest.fixture
def there(of_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(of_file)
    (of_file / "executed").unlink(missing_ok=True)
    return of_file


@pytest.fixture(scope="module")
def of_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("of-script") / "run"
    build(run_dir).train()
    return run_dir


@pytest.fixture
def older(of_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand where the directory of a run of before is, in which the program stands too."""
    shutil.copytree(of_file, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "executed").unlink(missing_ok=True)
    for file in Path("run").glob("checkpoints/*/manifest.json"):
        manifest = json.loads(file.read_bytes())
        manifest["format_version"] = 3
        del manifest["sha256"]
        manifest["sha256"] = sha256(canonical(manifest)).hexdigest()
        file.write_bytes(canonical(manifest))
    config = Path("run/config.toml")
    config.write_text("floor = 0.1  # default\n" + config.read_text())


def canonical(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, sort_keys=True, indent=1) + "\n").encode()


def test_to_name_a_run_reads_nothing() -> None:
    assert sf.load("nowhere/run").path == Path("nowhere/run")


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_saved_run_tells_what_its_directory_holds(of_script: Path) -> None:
    run = sf.load(of_script)

    assert run.step == 4
    assert run.status == "finished"
    assert run.checkpoints == [0, 2, 4]
    assert run.settings["batch_size"] == 4


def test_a_saved_run_has_the_records_of_its_file(of_script: Path) -> None:
    lines = read_lines(of_script)
    losses = [line["loss"] for line in lines if line["kind"] == "train"]

    run = sf.load(of_script)

    assert [record["loss"] for record in run.records("train")] == losses
    assert len(run.records()) == len(lines)


def test_the_metrics_of_a_saved_run_are_the_last_of_each(of_script: Path) -> None:
    metrics = sf.load(of_script).metrics

    *_, last_evaluation = records_of(of_script, "eval")
    (final_evaluation,) = records_of(of_script, "final_eval")
    assert metrics["val/loss"] == last_evaluation["val/loss"]
    assert metrics["test/loss"] == final_evaluation["test/loss"]


def test_a_run_that_was_stopped_says_so_and_where(tmp_path: Path) -> None:
    build(tmp_path / "run", stop_after="3 steps").train()

    run = sf.load(tmp_path / "run")

    assert run.status == "stopped"
    assert run.step == 3


@pytest.fixture(scope="module")
def stopped_after_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("stopped") / "run"
    build(run_dir, length="8 steps", stop_after="5 steps", schedule=sf.schedules.linear()).train()
    return run_dir


@pytest.fixture(params=[2, 4, 5])  # before, at and after the newest checkpoint
def killed(request: pytest.FixtureRequest, stopped_after_5: Path, tmp_path: Path) -> Path:
    """A run whose records end at some step without a word, and whose newest checkpoint is of
    step 4.
    """
    run_dir = shutil.copytree(stopped_after_5, tmp_path / "runs" / "a")
    shutil.rmtree(run_dir / "checkpoints" / "step-00000005")
    with (run_dir / "metrics.jsonl").open("w") as file:
        for line in read_lines(stopped_after_5):
            if line["step"] <= request.param and line["kind"] != "event":
                file.write(f"{json.dumps(line)}\n")
    return run_dir


@pytest.fixture
def last_step(killed: Path) -> int:
    """The last step that the files of the killed run show."""
    return max(4, read_lines(killed)[-1]["step"])


def test_a_killed_run_has_its_last_step_where_it_is_loaded(killed: Path, last_step: int) -> None:
    run = sf.load(killed)

    assert run.step == last_step
    assert run.status == "dead"
    assert run.checkpoints[-1] == 4


def test_a_killed_run_has_its_last_step_where_it_is_diagnosed(
    killed: Path, last_step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    last_record = records_of(killed, "train")[-1]

    (finding,) = [entry for entry in sf.load(killed).diagnose() if entry.name == "ended-early"]
    main(["diagnose", str(killed), "--json"])

    assert finding.step == last_step
    assert finding.numbers["made"] == last_step
    rate = f"at step {last_record['step']} was {last_record['lr']:g}"
    assert any(rate in sentence for sentence in finding.evidence)
    assert json.loads(capsys.readouterr().out)["steps_made"] == last_step


def test_a_killed_run_has_its_last_step_on_its_page(killed: Path, last_step: int) -> None:
    page = sf.load(killed).report().read_text()

    assert set(re.findall(r"ended (?:early, )?at step (\d+) of 8", page)) == {str(last_step)}
    assert f"<dt>steps</dt><dd>{last_step} <small>of 8" in page


def test_a_killed_run_has_its_last_step_in_the_table_of_a_directory(
    killed: Path, last_step: int
) -> None:
    watch = DirectoryWatch(killed.parent)
    watch.look()
    while watch.work():
        pass

    (run,) = watch.runs.values()
    assert run.row is not None
    assert run.row["step"] == last_step


def test_a_killed_run_has_its_last_step_where_it_is_compared(killed: Path, last_step: int) -> None:
    assert compared_run(killed).last_step == last_step


def test_a_dataframe_has_a_row_for_each_record_and_its_step_as_index(of_script: Path) -> None:
    pandas = pytest.importorskip("pandas")
    run = sf.load(of_script)

    frame = run.dataframe("train")

    records = pandas.DataFrame(run.records("train")).drop(columns="kind")
    assert frame.index.name == "step"
    assert frame.reset_index().equals(records[["step", *frame]])


def test_a_dataframe_of_all_records_says_of_which_kind_each_is(of_script: Path) -> None:
    run = sf.load(of_script)
    assert [*run.dataframe()["kind"]] == [record["kind"] for record in run.records()]


def test_a_dataframe_without_records_is_empty_and_has_an_index(of_script: Path) -> None:
    frame = sf.load(of_script).dataframe("sample")
    assert frame.empty
    assert frame.index.name == "step"


@pytest.mark.parametrize("use", [*READING.values(), *EXECUTING.values()])
def test_a_missing_run_is_the_same_error_everywhere(
    use: Callable[[sf.SavedRun], object], of_script: Path
) -> None:
    with refused("run-missing", run=str(of_script.parent / "rum"), nearest=["run"]):
        use(sf.load(of_script.parent / "rum"))


@pytest.mark.parametrize("use", [*READING.values(), *EXECUTING.values()])
def test_a_run_that_was_handed_over_and_never_trained_is_not_a_wrong_path(
    use: Callable[[sf.SavedRun], object], tmp_path: Path
) -> None:
    with refused("run-not-trained", run=str(tmp_path / "run")):
        use(sf.load(build(tmp_path / "run")))


def test_records_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with refused("records-unreadable", path=tmp_path / "metrics.jsonl"):
        sf.load(tmp_path).records()


@pytest.mark.parametrize("weights", ["auto", "averaged", "trained"])
@pytest.mark.parametrize("checkpoint", ["newest", 2, "4"])
def test_a_model_is_given_the_weights_that_are_asked_for(
    of_script: Path, weights: Any, checkpoint: Any
) -> None:
    step = 4 if checkpoint == "newest" else int(checkpoint)
    file = "model" if weights == "trained" else "ema"
    saved = sf.checkpoint.Store(of_script / "checkpoints").at(step)
    module = linear()

    model = sf.load(of_script).load_model(module, checkpoint=checkpoint, weights=weights)

    assert model is module
    assert not model.training
    assert same_tensors(model.state_dict(), saved.tensors(file))


def test_a_class_that_needs_arguments_is_refused_with_what_to_write(of_script: Path) -> None:
    with refused("model-needs-arguments", value="Linear"):
        sf.load(of_script).load_model(torch.nn.Linear)


@pytest.mark.parametrize(
    "use",
    [
        lambda run: run.load_model(linear, checkpoint="best"),
        lambda run: run.export("x", checkpoint="best"),
    ],
)
def test_without_best_no_checkpoint_is_the_best(
    use: Callable[[sf.SavedRun], object], of_script: Path
) -> None:
    with refused("run-without-best-checkpoint", sf.CheckpointError):
        use(sf.load(of_script))


@pytest.mark.parametrize("quoted", ['"script"', "'script'"])
def test_the_kind_of_a_run_is_read_as_toml(
    quoted: str, of_script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = of_script / "config.toml"
    config.write_text(config.read_text().replace('kind = "script"', f"kind = {quoted}"))

    with pytest.raises(SystemExit):
        main(["export", str(of_script), "--checkpoint", "best"])

    assert "[run-without-best-checkpoint]" in capsys.readouterr().err


def test_a_saved_run_shows_its_path_step_and_status(of_script: Path) -> None:
    run = sf.load(of_script)
    assert repr(run) == f"SavedRun({of_script}: step 4, finished)"
    assert str(run) == repr(run)


def test_a_saved_run_that_is_open_shows_that_it_is_running(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with build(run_dir):
        assert repr(sf.load(run_dir)) == f"SavedRun({run_dir}: step 0, running)"


def test_a_saved_run_that_is_not_there_shows_that(tmp_path: Path) -> None:
    run_dir = tmp_path / "none"
    assert repr(sf.load(run_dir)) == f"SavedRun({run_dir}: no run {run_dir})"


def test_a_run_without_records_is_dead(of_script: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(of_script, tmp_path / "run")
    (run_dir / "metrics.jsonl").unlink()
    assert sf.load(run_dir).status == "dead"


def test_a_kind_of_records_that_does_not_exist_is_refused(of_script: Path) -> None:
    with refused("kind-of-records-unknown", value="trian") as caught:
        sf.load(of_script).records("trian")
    (remedy,) = caught.value.remedies
    assert str(remedy).endswith(" train?")


def test_weights_that_are_not_there_are_refused(tmp_path: Path) -> None:
    build(tmp_path / "run", ema=None).train()
    with refused("checkpoint-without-weights", sf.CheckpointError, file="ema"):
        sf.load(tmp_path / "run").load_model(linear, weights="averaged")


def test_weights_of_an_unknown_name_are_refused(of_script: Path) -> None:
    with refused("setting-out-of-range", setting="weights", value="best"):
        sf.load(of_script).load_model(linear, weights="best")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "use", [*READING.values(), sf.SavedRun._repr_html_], ids=[*READING, "HTML"]
)
def test_what_reads_executes_no_program(use: Callable[[sf.SavedRun], object], there: Path) -> None:
    use(sf.load("run"))
    assert not (there / "executed").exists()


@pytest.mark.parametrize("use", [*EXECUTING.values()], ids=[*EXECUTING])
def test_a_changed_program_is_refused_unless_it_is_asked_for(
    use: Callable[[sf.SavedRun], object],
    there: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executed = there / "executed"
    use(sf.load("run"))
    assert executed.exists()
    executed.unlink()

    (there / "program.py").write_text(PROGRAM + "# changed\n")
    try:
        with refused("program-not-trusted", cause="changed"):
            use(sf.load("run"))
        assert not executed.exists()
        use(sf.load("run", run_changed_program=True))
        assert executed.exists()
    finally:
        (there / "program.py").write_text(PROGRAM)


@pytest.mark.usefixtures("there")
def test_a_program_builds_the_model_that_a_class_builds() -> None:
    run = sf.load("run")
    assert same_tensors(run.load_model().state_dict(), run.load_model(linear).state_dict())


@pytest.mark.usefixtures("there")
def test_a_program_evaluates_an_older_checkpoint_again() -> None:
    run = sf.load("run")
    (record,) = [record for record in run.records("eval") if record["step"] == 2]
    assert run.evaluate("val", checkpoint=2) == {"val/loss": record["val/loss"]}


@pytest.mark.usefixtures("there")
def test_a_split_that_a_program_does_not_have_is_refused() -> None:
    with refused("unknown-split", setting="splits", value="other"):
        sf.load("run").evaluate("other")


@pytest.mark.parametrize("use", [*EXECUTING.values()], ids=[*EXECUTING])
def test_a_run_that_was_handed_over_is_what_it_was(
    use: Callable[[sf.SavedRun], object], of_script: Path
) -> None:
    run = build(of_script)
    model = run.state.models["model"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    use(sf.load(run))

    assert run.state.step == 0
    assert same_tensors(model.state_dict(), before)


def other_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return 2 * loss(model, batch)


def test_a_run_that_is_handed_over_with_other_code_is_used_and_verify_finds_it(
    of_script: Path,
) -> None:
    saved = sf.load(build(of_script, loss=other_loss))

    assert saved.evaluate("val")["val/loss"] == 2 * sf.load(of_script).metrics["val/loss"]
    assert saved.verify().exit_status == 8


def contents_and_times(directory: Path) -> dict[Path, tuple[bytes, int]]:
    """What is in each file but the lock, and when it was written."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("arguments", ["resume run", "train program.py:build"])
def test_a_finished_run_that_is_resumed_says_so_and_changes_nothing(
    arguments: str, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (there / "program.py").write_text(PROGRAM.replace("console=False, report=False", "report=True"))
    sf.load(there / "run").report()  # else the page would be made up for
    before = contents_and_times(there / "run")

    try:
        main(arguments.split())
    finally:
        (there / "program.py").write_text(PROGRAM)

    output = capsys.readouterr().out.splitlines()
    (line,) = [line for line in output if not line.startswith("note: ")]
    assert " run is finished: " in line
    assert numbers_in(line.split(". ")[0]) == [4]
    assert contents_and_times(there / "run") == before


def test_a_finished_run_of_a_script_changes_nothing_and_can_still_be_evaluated(
    of_script: Path,
) -> None:
    before = contents_and_times(of_script)

    with build(of_script) as run:
        assert list(run) == []
        assert run.state.step == 4
        assert run.evaluate("val")["val/loss"] == sf.load(of_script).metrics["val/loss"]

    assert contents_and_times(of_script) == before


def test_a_finished_run_whose_last_evaluation_is_missing_goes_on_with_that(tmp_path: Path) -> None:
    build(tmp_path / "run", splits={}).train()

    build(tmp_path / "run").train()

    assert "test/loss" in sf.load(tmp_path / "run").metrics


def test_steps_of_a_script_are_made_again_with_the_run_that_it_builds(of_script: Path) -> None:
    assert sf.load(build(of_script)).verify().whole


def test_a_step_to_replay_is_given_by_place_or_by_name(of_script: Path) -> None:
    by_place = sf.load(build(of_script)).replay(3)
    by_name = sf.load(build(of_script)).replay(step=3)
    assert by_place.logged == by_name.logged


def test_without_the_run_that_a_script_builds_only_files_are_verified(of_script: Path) -> None:
    verdict = sf.load(of_script).verify()

    assert verdict.sound
    assert verdict.outcomes == []
    assert any(" script " in line for line in verdict.not_proved)


def test_without_the_run_that_a_script_builds_nothing_is_evaluated(of_script: Path) -> None:
    with refused("run-of-script", path=of_script):
        sf.load(of_script).evaluate()


def test_a_script_is_named_with_its_directory_and_interpreter(
    of_script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = of_script.absolute()
    started_in = directory_of_start(of_script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with refused("run-of-script") as raised:
        sf.load(run).evaluate()
    command = raised.value.remedies[0].line
    assert command.startswith(f"cd {shlex.quote(str(started_in))} && ")
    assert sys.executable in command or not command.partition("&& ")[2].startswith("python ")


@pytest.mark.parametrize(
    "arguments",
    [
        "resume run",
        "evaluate run",
        "diagnose run",
        "report run",
        "verify run",
        "export run",
        "predict run",
        "replay run --step 1",
        "find-lr run",
        "compare run run",
        "train program.py:build",
        "plan program.py:build",
    ],
)
@pytest.mark.usefixtures("older")
def test_every_verb_refuses_a_directory_of_another_format(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert capsys.readouterr().err.endswith("[run-format-unknown]\n")
    assert ended.value.code == 4


@pytest.mark.parametrize("use", [*(READING | EXECUTING).values()], ids=[*(READING | EXECUTING)])
@pytest.mark.usefixtures("older")
def test_a_saved_run_of_another_format_is_refused(use: Callable[[sf.SavedRun], object]) -> None:
    run = sf.load("run")
    with refused("run-format-unknown", sf.CheckpointError, run="run", format=3):
        use(run)
    assert not Path("executed").exists()


@pytest.mark.usefixtures("older")
def test_a_run_that_would_go_on_in_a_directory_of_another_format_is_refused() -> None:
    with refused("run-format-unknown", sf.CheckpointError, run="run", format=3):
        build(Path("run"))


@pytest.mark.usefixtures("older")
def test_a_run_that_would_start_from_weights_of_another_format_is_refused() -> None:
    with refused("run-format-unknown", sf.CheckpointError, run="run", format=3):
        build(None, init_from="run").train()


def test_a_run_without_a_directory_is_no_saved_run() -> None:
    with refused("run-without-directory"):
        sf.load(build(None))


def test_a_number_is_no_saved_run() -> None:
    with refused("load-needs-a-run", value="int"):
        sf.load(3)  # type: ignore[arg-type]


def test_a_run_that_is_open_is_no_saved_run(tmp_path: Path) -> None:
    run = build(tmp_path / "run")
    with run, refused("run-is-open", path=tmp_path / "run"):
        sf.load(run)
