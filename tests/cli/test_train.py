"""train, resume and evaluate as a user types them, on runs of one file; what mistakes are answered
is in test_bad_input.py.

7 seconds.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot
from command_line import error_of, output_of
from fake_slurm import weights
from stated import numbers_by_line
from surefoot.cli.main import main, verb_function
from surefoot.config import user_code
from surefoot.program import Program, find_program
from surefoot.tracking.change_journal import read_changes
from surefoot.tracking.format import number
from surefoot.tracking.jsonl import records

PROGRAM = """
from dataclasses import dataclass, field
from typing import Literal
import torch
from torch import nn
import torch.nn.functional as F
import surefoot as sf

@dataclass(frozen=True)
class Optimizer:
    lr: float = 0.1

@dataclass(frozen=True)
class Config:
    length: str
    run_dir: str = "runs/mine"
    schedule: Literal["constant", "cosine", "wsd", "wsd in steps"] = "constant"
    stop_after: str | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)

SCHEDULES = {
    "constant": sf.schedules.constant(2),
    "cosine": sf.schedules.cosine(2),
    "wsd": sf.schedules.wsd("25%", cooldown="25%"),
    "wsd in steps": sf.schedules.wsd(2, cooldown=2),
}

def build(config: Config):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(40, 4, generator=generator), torch.randn(40, 1, generator=generator)
    return sf.Run(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)),
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        train_data=data, batch_size=6, length=config.length, optimizer=sf.optim.adamw(lr=config.optimizer.lr),
        schedule=SCHEDULES[config.schedule], stop_after=config.stop_after,
        splits={"all": sf.Split(data)}, evaluate_every="2 steps", save_every="2 steps", log_every="1 steps",
        best="min all/loss", keep_last=9, run_dir=config.run_dir, report=False,
    )

def plain():
    return build(Config(length="8 steps", run_dir="runs/plain"))

def script():
    return 3
"""

SMALL_GPT = [
    "gpt",
    "--data.path=text.txt",
    "--model.width=16",
    "--model.context=8",
    "--model.layers=1",
    "--model.heads=2",
    "--sample-tokens=0",
    "--cloze-questions=0",
    "--report=false",
]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def text_file(program: Path) -> None:
    Path("text.txt").write_text("to be or not to be, that is the question\n" * 40)


def train(*flags: str) -> None:
    """`surefoot train program.py:build` with these flags."""
    main(["train", "program.py:build", *flags])


def newest_checkpoint(run_dir: str) -> str:
    name, _ = weights(Path(run_dir))
    return name


def same_weights(run_dir: str, other: str) -> bool:
    return weights(Path(run_dir)) == weights(Path(other))


def config_of(run_dir: str) -> dict[str, Any]:
    """The settings that a run has written."""
    return tomllib.loads(Path(run_dir, "config.toml").read_text())


def files_of_runs() -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in Path("runs").rglob("*") if file.is_file()}


def losses_by_step(run_dir: str) -> dict[int, float]:
    """The scores that a run has recorded."""
    evaluations = [
        record for record in records(Path(run_dir, "metrics.jsonl")) if record["kind"] == "eval"
    ]
    return {record["step"]: record["all/loss"] for record in evaluations}


def test_a_function_with_settings_is_trained_and_every_setting_is_written_with_its_origin(
    program: Path,
) -> None:
    Path("mine.toml").write_text('length = "3 steps"\n[optimizer]\nlr = 0.02\n')
    train("--config=mine.toml", "--run-dir=runs/a", "--length=4 steps")
    text = Path("runs/a/config.toml").read_text()
    lines = {line.partition(" =")[0]: line for line in text.splitlines() if " = " in line}
    assert lines["length"] == 'length = "4 steps" # flag'
    assert lines["lr"].endswith("# file")
    assert lines["schedule"].endswith("# default")
    assert config_of("runs/a")["program"]["path"] == str(program)
    assert newest_checkpoint("runs/a") == "step-00000004"


@pytest.mark.parametrize(
    ("flags", "tied", "deterministic"),
    [
        (["--deterministic", "--model.tie-embeddings=true"], True, True),
        (["--model.tie-embeddings", "true", "--deterministic"], True, True),
        (["--model.tie-embeddings", "--deterministic", "false"], True, False),
        (["--model.tie-embeddings=False", "--deterministic=TRUE"], False, True),
    ],
)
def test_what_is_true_or_false_may_be_written_in_any_way(
    flags: list[str], tied: bool, deterministic: bool
) -> None:
    from surefoot.cli.settings import configured
    from surefoot.recipes.gpt.config import Config

    config, _ = configured(Config, [], flags, verb="train gpt")
    assert config.model.tie_embeddings == tied
    assert config.deterministic == deterministic


def test_a_setting_without_default_may_come_from_a_flag_alone(program: Path) -> None:
    train("--length=3 steps")
    assert config_of("runs/mine")["length"] == "3 steps"


def test_an_error_while_a_program_is_read_is_told_with_its_line(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program.write_text("import a_module_that_nobody_has\n" + program.read_text())
    assert "[program-fails]" in error_of(capsys, "train", "program.py:build", "--length=3 steps")


def test_a_setting_that_nobody_gives_is_asked_for(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "[setting-missing]" in error_of(
        capsys, "train", "program.py:build", "--optimizer.lr", "0.1"
    )
    assert not Path("runs").exists()


def test_a_function_without_settings_is_trained(program: Path) -> None:
    main(["train", "program.py:plain"])
    assert newest_checkpoint("runs/plain") == "step-00000008"


def test_a_function_without_settings_refuses_flags(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "[program-without-settings]" in error_of(
        capsys, "train", "program.py:plain", "--length", "9 steps"
    )


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ("", None),
        ("steps=4, lr=0.1", None),
        ("*numbers, **names", None),
        ("config: Config", "Config"),
        ("config: Config, steps=4", "Config"),
        ("config: Config = Config(lr=0.1)", "Config"),
    ],
)
def test_a_function_is_called_with_its_settings_or_without_an_argument(
    arguments: str, settings: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    kind = program_with(arguments, tmp_path).config
    assert getattr(kind, "__name__", None) == settings


@pytest.mark.parametrize(
    ("arguments", "required"),
    [
        ("steps", ["steps"]),
        ("config: Config, steps", ["config", "steps"]),
        ("steps=4, *, lr", ["lr"]),
    ],
)
def test_a_function_that_needs_other_arguments_is_refused(
    arguments: str, required: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(surefoot.ConfigError) as error:
        program_with(arguments, tmp_path)
    assert error.value.code == "program-arguments"
    assert error.value.fields["required"] == required


def program_with(arguments: str, directory: Path) -> Program:
    text = f"""
from dataclasses import dataclass
@dataclass(frozen=True)
class Config:
    lr: float
def build({arguments}): ...
"""
    (directory / "with_arguments.py").write_text(text)
    return find_program(f"{directory}/with_arguments.py:build")


def test_a_function_that_returns_no_run_is_refused(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "script() returned int" in error_of(capsys, "train", "program.py:script")


@pytest.mark.fast("build-runs/mine", "plain-mine", "build-latest")
@pytest.mark.parametrize("typed", ["runs/mine", "mine", "latest"])
@pytest.mark.parametrize("function", ["build", "plain"])
def test_a_run_is_resumed_by_path_by_name_or_as_the_latest(
    function: str, typed: str, program: Path
) -> None:
    name = "plain"
    arguments = ["program.py:plain"]
    if function == "build":
        name = "mine"
        arguments = ["program.py:build", "--length=8 steps"]
    main(["train", *arguments])
    Path(f"runs/{name}").rename("runs/whole")
    interrupt_at(5, "train", *arguments)
    assert newest_checkpoint(f"runs/{name}") < "step-00000005"

    main(["resume", typed.replace("mine", name)])

    assert same_weights(f"runs/{name}", "runs/whole")


def test_a_constant_run_is_extended_to_the_bits_of_one_of_that_length(program: Path) -> None:
    train("--length=9 steps", "--run-dir=runs/long")
    train("--length=5 steps")
    main(["resume", "mine", "--length", "9 steps"])
    assert same_weights("runs/mine", "runs/long")
    assert config_of("runs/mine")["length"] == "5 steps"
    assert [change.now for change in read_changes(Path("runs/mine"))] == ["9 steps"]


def test_a_cosine_run_is_extended_on_record_alone(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--length=5 steps", "--schedule=cosine")
    files = files_of_runs()
    longer = ["train", "program.py:build", "--length=9 steps", "--schedule=cosine"]
    message = error_of(capsys, *longer, status=4)
    assert "[length-changed]" in message
    assert "from step 3 on" in message
    assert files_of_runs() == files

    main(["resume", "mine", "--length", "9 steps"])
    assert newest_checkpoint("runs/mine") == "step-00000009"


def test_a_wsd_run_is_extended_before_its_cooldown_to_the_bits_of_one_of_that_length(
    program: Path,
) -> None:
    """Percentages stay what they were of the 8 steps with which it began, also in the sessions
    after that.
    """
    train("--length=12 steps", "--schedule=wsd in steps", "--run-dir=runs/long")
    train("--length=8 steps", "--schedule=wsd", "--stop-after=7 steps")
    interrupt_at(9, "resume", "mine", "--length=12 steps")
    assert newest_checkpoint("runs/mine") < "step-00000012"

    main(["resume", "mine"])

    assert same_weights("runs/mine", "runs/long")


def test_a_wsd_run_is_extended_on_record_alone_once_its_cooldown_has_begun(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--length=8 steps", "--schedule=wsd")
    files = files_of_runs()
    longer = ["train", "program.py:build", "--length=12 steps", "--schedule=wsd"]
    assert "[length-changed]" in error_of(capsys, *longer, status=4)
    assert files_of_runs() == files

    main(["resume", "mine", "--length", "12 steps"])
    assert newest_checkpoint("runs/mine") == "step-00000012"


def test_a_changed_setting_is_refused_naming_both_values(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--length=3 steps")
    assert "[settings-changed]" in error_of(
        capsys, "resume", "mine", "--optimizer.lr", "0.3", status=4
    )
    assert config_of("runs/mine")["optimizer"]["lr"] == 0.1


def test_a_run_that_would_go_on_elsewhere_is_not_resumed(
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["train", "program.py:plain"])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "[run-of-another-directory]" in error_of(capsys, "resume", str(tmp_path / "runs/plain"))
    assert not Path("runs").exists()


def test_a_length_in_which_the_schedule_no_longer_fits_is_refused(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """25 % of 20 steps are 5, and stay so; in a run of 6 steps they leave no room for the
    cool-down.
    """
    train("--schedule=wsd", "--length=20 steps", "--stop-after=1 steps")
    message = error_of(capsys, "resume", "mine", "--length", "6 steps", status=2)
    assert "[schedule-cooldown-too-long]" in message
    assert read_changes(Path("runs/mine")) == ()


@pytest.mark.parametrize("checkpoint", ["newest", "best", "4"])
def test_evaluating_a_checkpoint_gives_what_the_run_logged(
    checkpoint: str, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--length=8 steps", "--optimizer.lr=0.9")
    losses = losses_by_step("runs/mine")
    best_step = min(losses, key=lambda step: losses[step])
    assert best_step != 8  # at this rate the last is not the best

    output = output_of(capsys, "evaluate", "mine", "--checkpoint", checkpoint)

    step = {"newest": 8, "best": best_step, "4": 4}[checkpoint]
    assert output == f"step={step} all/loss={number(losses[step])}\n"


def test_evaluating_changes_nothing_in_the_run(program: Path) -> None:
    train("--length=3 steps")
    files = files_of_runs()
    main(["evaluate", "latest"])
    assert files_of_runs() == files


def test_a_checkpoint_that_does_not_exist_is_named_with_those_that_do(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--length=4 steps")
    assert "available: 0, 2, 4" in error_of(
        capsys, "evaluate", "mine", "--checkpoint", "3", status=4
    )
    error_of(capsys, "evaluate", "mine", "--checkpoint", "last")


@pytest.fixture
def script_run(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that a script has trained."""
    monkeypatch.setattr(sys, "argv", ["my script.py", "--fast"])
    find_program("program.py:plain").build().train()
    assert config_of("runs/plain")["program"]["kind"] == "script"


@pytest.mark.parametrize("verb", ["resume", "evaluate", "predict"])
def test_a_subcommand_for_a_run_of_a_script_names_its_command(
    verb: str, script_run: None, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_of(capsys, verb, "plain")
    assert "[run-of-script]" in message
    assert "python 'my script.py' --fast" in message


def test_the_code_that_is_named_for_the_model_of_a_script_loads_it(
    script_run: None, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_of(capsys, "predict", "plain")
    code = re.search(r"sf\.load\('.*'\)\.load_model\(model\)", message)
    assert code is not None
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.zero_()
    exec(code[0], {"sf": surefoot, "model": model})
    assert model[0].weight.any()


def test_a_changed_program_is_named_when_it_is_resumed(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--length=3 steps")
    program.write_text(PROGRAM + "\n# changed\n")
    main(["resume", "mine"])
    assert re.search(r"note: .*program\.py", capsys.readouterr().out)


def test_a_changed_program_is_named_before_it_is_executed(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--length=3 steps")
    capsys.readouterr()
    program.write_text("raise SystemExit(7)\n" + PROGRAM)
    with pytest.raises(SystemExit) as end:
        main(["resume", "mine"])
    assert end.value.code == 7
    assert re.search(r"note: .*program\.py", capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "program.py:plain", "--config", "mine.toml"],
        ["plan", "program.py:plain", "--config", "mine.toml"],
        ["resume", "plain", "--seed", "1"],
        ["evaluate", "plain", "--nonsense", "1"],
    ],
    ids=" ".join,
)
def test_a_function_without_settings_refuses_them_for_every_verb(
    arguments: list[str], program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", "program.py:plain"])
    Path("mine.toml").write_text("seed = 1\n")
    assert "[program-without-settings]" in error_of(capsys, *arguments)


@pytest.mark.parametrize("flag", ["--preset", "--init-from"])
def test_what_is_for_the_start_of_a_run_is_refused_at_its_resume(
    flag: str, text_file: None, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", *SMALL_GPT, "--length=2 steps", "--run-dir=runs/mine"])
    assert "[option-of-other-kind]" in error_of(capsys, "resume", "mine", flag, "small")


def test_what_ended_the_last_session_does_not_end_the_resumed_one(text_file: None) -> None:
    of_one_session = ["--stop-after=2 steps", "--time-limit=10 min"]
    main(["train", *SMALL_GPT, "--length=5 steps", "--run-dir=runs/a", *of_one_session])
    assert newest_checkpoint("runs/a") == "step-00000002"
    main(["resume", "a"])
    assert newest_checkpoint("runs/a") == "step-00000005"


# a program that leaves a trace when it is executed
WITH_CANARY = "from pathlib import Path; Path('canary').touch()\n" + PROGRAM


def test_a_program_that_came_with_the_run_is_not_executed(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever sends a run directory sends data: a file of Python in it must not run because
    config.toml says so.
    """
    train("--length=3 steps")
    evil = Path("runs/mine/program.py").resolve()
    evil.write_text(WITH_CANARY)
    config = Path("runs/mine/config.toml")
    config.write_text(config.read_text().replace(str(program), str(evil)))
    for verb in ("resume", "evaluate"):
        assert "[program-not-trusted]" in error_of(capsys, verb, "mine")
    assert not Path("canary").exists()


def test_out_of_memory_has_its_own_status_and_says_what_to_make_smaller(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As CUDA raises it; the CPU has no such error."""
    fail = """
def fail():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
"""
    program.write_text(PROGRAM.replace("F.mse_loss(model(batch[0]), batch[1])", "fail()") + fail)
    message = error_of(capsys, "train", "program.py:plain", status=6)
    assert message.startswith("error: CUDA out of memory")
    assert "--micro-batch-size" in message
    assert "Traceback" not in message


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_no_run(program: Path) -> None:
    """`surefoot train ... | head -1`."""
    command = [
        sys.executable,
        "-c",
        "from surefoot.cli.main import main; main()",
        "train",
        "program.py:plain",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait() == 0
    assert errors == ""
    assert newest_checkpoint("runs/plain") == "step-00000008"


def interrupt_at(index: int, verb: str, *arguments: str) -> None:
    """Run a subcommand whose update is Ctrl-C in the step with this index, and not a signal that
    would be waited for.
    """
    from surefoot.train.loop import update

    def update_or_interrupt(step: Any, *names: str) -> None:
        if step.index == index:
            raise KeyboardInterrupt
        update(step, *names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("surefoot.train.loop.update", update_or_interrupt)
        with pytest.raises(KeyboardInterrupt):
            verb_function(verb)(list(arguments))


def test_a_program_named_by_a_relative_path_is_not_executed(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """surefoot writes whole paths: an archive could bring a program that lies beside its run."""
    train("--length=3 steps")
    Path("evil.py").write_text(WITH_CANARY)
    config = Path("runs/mine/config.toml")
    config.write_text(config.read_text().replace(str(program), "evil.py"))
    for verb in ("resume", "evaluate"):
        assert "[path-of-code-unresolved]" in error_of(capsys, verb, "mine")
    assert not Path("canary").exists()


@pytest.mark.parametrize(
    "place",
    ["/proc/self/cwd/evil.py", "{here}/link/evil.py", "{here}/runs/../evil.py", "evil.py\\u0000"],
)
def test_a_program_beside_a_run_is_not_executed_by_whatever_path_it_is_named(
    place: str, program: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An archive could bring a program beside its run, with its right hash."""
    train("--length=3 steps")
    evil = program.rename("evil.py")
    evil.write_text(WITH_CANARY)
    Path("link").symlink_to(tmp_path)
    config = Path("runs/mine/config.toml")
    text = config.read_text().replace(str(program), place.format(here=tmp_path))
    text = re.sub("sha256 = .*", f'sha256 = "{user_code.digest(evil)}"', text)
    config.write_text(text)
    for verb in ("resume", "evaluate"):
        assert "[path-of-code-unresolved]" in error_of(capsys, verb, "mine")
    assert not Path("canary").exists()


def test_a_file_that_is_no_program_is_refused(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("notes.txt").write_text("3")
    assert "[program-missing]" in error_of(capsys, "train", "notes.txt:build")


def test_a_stop_that_lies_behind_is_said_to_be_nothing(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--length=8 steps", "--stop-after=4 steps")
    output = output_of(capsys, "resume", "mine", "--stop-after", "2 steps")
    assert [4, 2] in numbers_by_line(output)


def test_an_option_of_the_verb_s_own_may_have_been_meant(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--length=3 steps")
    assert "try: --checkpoint\n  [setting-unknown]" in error_of(
        capsys, "evaluate", "mine", "--checkpont", "best"
    )


def test_a_relative_path_of_data_is_explained_in_another_directory(
    text_file: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["train", *SMALL_GPT, "--length=5 steps", "--stop-after=2 steps", "--run-dir=runs/a"])
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for verb in ("resume", "evaluate"):
        assert f"start in {tmp_path}" in error_of(capsys, verb, "../runs/a", status=3)


def test_commands_to_type_are_those_that_work_here(
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A shell without the environment's folder in PATH finds no `surefoot`."""
    script = tmp_path / "env" / "bin" / "surefoot"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["env/bin/surefoot"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "bin" / "python"))
    train("--length=4 steps", "--stop-after=2 steps")
    assert "resume with:  env/bin/surefoot resume runs/mine" in capsys.readouterr().out
    monkeypatch.setenv("PATH", str(tmp_path / "env" / "bin"))
    output = output_of(capsys, "resume", "mine")
    assert "evaluate it: surefoot evaluate runs/mine" in output


def test_a_mean_of_checkpoints_is_said_to_be_of_their_steps_and_the_best_to_be_the_best(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--length=8 steps")
    capsys.readouterr()
    main(["evaluate", "mine", "--checkpoint", "average 3"])
    printed = capsys.readouterr()
    assert "4, 6, 8 of runs/mine on all" in printed.err
    assert printed.out.startswith("mean_of_steps=4,6,8 all/loss=")
    main(["evaluate", "mine", "--checkpoint", "best"])
    assert "best) of runs/mine on all" in capsys.readouterr().err


def test_the_end_of_a_run_names_predict_where_its_program_has_one(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--length=4 steps", "--run-dir=runs/a")
    assert "use it:" not in capsys.readouterr().out
    program.write_text(PROGRAM + "\nclass Predict: ...\ndef predict(): ...\n")
    train("--length=4 steps", "--run-dir=runs/b")
    assert "surefoot predict runs/b INPUT" in capsys.readouterr().out


def test_another_data_set_is_named_before_all_that_goes_with_it(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--length=4 steps")
    program.write_text(PROGRAM.replace("randn(40", "randn(50"))
    message = error_of(capsys, "train", "program.py:build", "--length", "8 steps", status=4)
    assert "[data-changed]" in message
    assert "--init-from" not in message
    command = "surefoot train program.py:build --length '8 steps' --run-dir runs/mine-2"
    assert f"type: {command}\n" in message
