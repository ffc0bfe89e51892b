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
from stated import numbers_in
from surefoot.cli.main import main
from surefoot.config import user_code
from surefoot.program import Program, find_program
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

FEW = ("--cloze-questions=0", "--report=false")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def refused(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert isinstance(end.value.code, int)
    return end.value.code


def weights(run: str) -> dict[str, bytes]:
    newest = max(Path(run, "checkpoints").glob("step-*"))
    return {file.name: file.read_bytes() for file in newest.glob("*.safetensors")} | {
        newest.name: b""
    }


def logged(run: str, step: int) -> float:
    found = [record for record in records(Path(run, "metrics.jsonl")) if record["kind"] == "eval"]
    return next(float(record["all/loss"]) for record in found if record["step"] == step)


def test_a_function_with_settings_is_trained_and_every_setting_is_written_with_its_origin(
    program: Path,
) -> None:
    Path("mine.toml").write_text('length = "3 steps"\n[optimizer]\nlr = 0.02\n')
    main(
        [
            "train",
            "program.py:build",
            "--config",
            "mine.toml",
            "--run-dir",
            "runs/a",
            "--length",
            "4 steps",
        ]
    )
    text = Path("runs/a/config.toml").read_text()
    lines = {line.partition(" =")[0]: line for line in text.splitlines() if " = " in line}
    assert lines["length"] == 'length = "4 steps" # flag'
    assert lines["lr"].endswith("# mine.toml") or lines["lr"].endswith("# file")
    assert lines["schedule"].endswith("# default")
    assert tomllib.loads(text)["program"]["path"] == str(program)
    assert max(Path("runs/a/checkpoints").glob("step-*")).name == "step-00000004"


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
    assert (config.model.tie_embeddings, config.deterministic) == (tied, deterministic)


def test_a_setting_without_default_may_come_from_a_flag_alone(program: Path) -> None:
    main(["train", "program.py:build", "--length=3 steps"])
    assert tomllib.loads(Path("runs/mine/config.toml").read_text())["length"] == "3 steps"


def test_an_error_while_a_program_is_read_is_told_with_its_line(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program.write_text("import a_module_that_nobody_has\n" + program.read_text())
    assert refused("train", "program.py:build", "--length=3 steps") == 2
    assert "[program-fails]" in capsys.readouterr().err


def test_a_setting_that_nobody_gives_is_asked_for(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused("train", "program.py:build", "--optimizer.lr", "0.1") == 2
    assert "[setting-missing]" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_function_without_settings_is_trained_and_refuses_flags(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", "program.py:plain"])
    assert max(Path("runs/plain/checkpoints").glob("step-*")).name == "step-00000008"
    assert refused("train", "program.py:plain", "--length", "9 steps") == 2
    assert "[program-without-settings]" in capsys.readouterr().err


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
    assert (None if kind is None else kind.__name__) == settings


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
    assert refused("train", "program.py:script") == 2
    assert "script() returned int" in capsys.readouterr().err


@pytest.mark.fast("build-runs/mine", "plain-mine", "build-latest")
@pytest.mark.parametrize("written", ["runs/mine", "mine", "latest"])
@pytest.mark.parametrize("function", ["build", "plain"])
def test_a_run_is_resumed_by_path_by_name_or_as_the_latest(
    function: str, written: str, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "mine" if function == "build" else "plain"
    flags = ["--length", "8 steps"] if function == "build" else []
    main(["train", f"program.py:{function}", *flags])
    Path(f"runs/{name}").rename("runs/whole")
    monkeypatch.setattr("surefoot.train.loop.update", interrupted_at(5))
    with pytest.raises(KeyboardInterrupt):
        main_unguarded("train", f"program.py:{function}", *flags)
    monkeypatch.undo()
    monkeypatch.chdir(program.parent)
    assert max(weights(f"runs/{name}")) < "step-00000005"
    main(["resume", written.replace("mine", name)])
    assert weights(f"runs/{name}") == weights("runs/whole")


def test_a_constant_run_is_extended_to_the_bits_of_one_of_that_length(program: Path) -> None:
    main(["train", "program.py:build", "--length", "9 steps", "--run-dir", "runs/long"])
    main(["train", "program.py:build", "--length", "5 steps"])
    main(["resume", "mine", "--length", "9 steps"])
    assert weights("runs/mine") == weights("runs/long")
    assert tomllib.loads(Path("runs/mine/config.toml").read_text())["length"] == "9 steps"


def test_a_cosine_run_is_not_extended(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "program.py:build", "--length", "5 steps", "--schedule", "cosine"])
    before = {file: file.read_bytes() for file in Path("runs").rglob("*") if file.is_file()}
    assert refused("resume", "mine", "--length", "9 steps") == 4
    said = capsys.readouterr().err
    assert "[length-changed]" in said
    assert "from step 3 on" in said
    assert {file: file.read_bytes() for file in Path("runs").rglob("*") if file.is_file()} == before


def test_a_wsd_run_is_extended_before_its_cooldown_to_the_bits_of_one_of_that_length(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Percentages stay what they were of the 8 steps with which it began, also in the sessions
    after that.
    """
    main(
        [
            "train",
            "program.py:build",
            "--length",
            "12 steps",
            "--schedule",
            "wsd in steps",
            "--run-dir",
            "runs/long",
        ]
    )
    main(
        [
            "train",
            "program.py:build",
            "--length",
            "8 steps",
            "--schedule",
            "wsd",
            "--stop-after",
            "7 steps",
        ]
    )
    monkeypatch.setattr("surefoot.train.loop.update", interrupted_at(9))
    with pytest.raises(KeyboardInterrupt):
        main_unguarded("resume", "mine", "--length", "12 steps")
    monkeypatch.undo()
    monkeypatch.chdir(program.parent)
    assert max(weights("runs/mine")) < "step-00000012"
    main(["resume", "mine"])
    assert weights("runs/mine") == weights("runs/long")


def test_a_wsd_run_is_not_extended_once_its_cooldown_has_begun(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", "program.py:build", "--length", "8 steps", "--schedule", "wsd"])
    before = {file: file.read_bytes() for file in Path("runs").rglob("*") if file.is_file()}
    assert refused("resume", "mine", "--length", "12 steps") == 4
    assert "[length-changed]" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in Path("runs").rglob("*") if file.is_file()} == before


def test_a_changed_setting_is_refused_naming_both_values(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", "program.py:build", "--length", "3 steps"])
    assert refused("resume", "mine", "--optimizer.lr", "0.3") == 4
    assert "[settings-changed]" in capsys.readouterr().err
    assert tomllib.loads(Path("runs/mine/config.toml").read_text())["optimizer"]["lr"] == 0.1


def test_a_run_that_would_go_on_elsewhere_is_not_resumed(
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["train", "program.py:plain"])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert refused("resume", str(tmp_path / "runs/plain")) == 2
    assert "[run-of-another-directory]" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_length_in_which_the_schedule_no_longer_fits_is_refused_as_a_length(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """25 % of 20 steps are 5, and stay so; in a run of 6 steps they leave no room for the
    cool-down.
    """
    main(
        [
            "train",
            "program.py:build",
            "--schedule",
            "wsd",
            "--length",
            "20 steps",
            "--stop-after",
            "1 steps",
        ]
    )
    assert refused("resume", "mine", "--length", "6 steps") == 4
    assert "[length-changed]" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["newest", "best", "4"])
def test_evaluating_a_checkpoint_gives_what_the_run_logged(
    asked: str, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", "program.py:build", "--length", "8 steps", "--optimizer.lr", "0.9"])
    found = [
        record for record in records(Path("runs/mine/metrics.jsonl")) if record["kind"] == "eval"
    ]
    best = min(found, key=lambda record: record["all/loss"])["step"]
    assert best != 8  # at this rate the last is not the best
    step = {"newest": 8, "best": best, "4": 4}[asked]
    capsys.readouterr()
    main(["evaluate", "mine", "--checkpoint", asked])
    assert capsys.readouterr().out.splitlines() == [
        f"step={step} all/loss={number(logged('runs/mine', step))}"
    ]


def test_evaluating_changes_nothing_in_the_run(program: Path) -> None:
    main(["train", "program.py:build", "--length", "3 steps"])
    before = {file: file.read_bytes() for file in Path("runs").rglob("*") if file.is_file()}
    main(["evaluate", "latest"])
    assert {file: file.read_bytes() for file in Path("runs").rglob("*") if file.is_file()} == before


def test_a_checkpoint_that_does_not_exist_is_named_with_those_that_do(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", "program.py:build", "--length", "4 steps"])
    assert refused("evaluate", "mine", "--checkpoint", "3") == 4
    assert "available: 0, 2, 4" in capsys.readouterr().err
    assert refused("evaluate", "mine", "--checkpoint", "last") == 2


def test_resuming_a_script_s_run_names_its_command(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from surefoot.program import find_program

    monkeypatch.setattr(sys, "argv", ["my script.py", "--fast"])
    find_program("program.py:plain").build().train()  # as a script does
    assert tomllib.loads(Path("runs/plain/config.toml").read_text())["program"]["kind"] == "script"
    for verb in ("resume", "evaluate", "predict"):
        assert refused(verb, "plain") == 2
        said = capsys.readouterr().err
        assert "[run-of-script]" in said
        assert "python 'my script.py' --fast" in said
    code = re.search(r"sf\.load\('.*'\)\.load_model\(model\)", said)  # what it says works
    assert code is not None
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.zero_()
    exec(code[0], {"sf": surefoot, "model": model})
    assert model[0].weight.any()


def test_a_changed_program_is_named_when_it_is_resumed(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", "program.py:build", "--length", "3 steps"])
    program.write_text(PROGRAM + "\n# changed\n")
    main(["resume", "mine"])
    assert re.search(r"note: .*program\.py", capsys.readouterr().out)


def test_a_changed_program_is_named_before_it_is_executed(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", "program.py:build", "--length", "3 steps"])
    capsys.readouterr()
    program.write_text("raise SystemExit(7)\n" + PROGRAM)
    assert refused("resume", "mine") == 7
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
    assert refused(*arguments) == 2
    assert "[program-without-settings]" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--preset", "--init-from"])
def test_what_is_for_the_start_of_a_run_is_refused_at_its_resume(
    flag: str, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("to be or not to be, that is the question\n" * 40)
    small = [
        "--model.width=16",
        "--model.context=8",
        "--model.layers=1",
        "--model.heads=2",
        "--sample-tokens=0",
        *FEW,
    ]
    main(
        ["train", "gpt", "--data.path=text.txt", "--length=2 steps", "--run-dir=runs/mine", *small]
    )
    assert refused("resume", "mine", flag, "small") == 2
    assert "[option-of-other-kind]" in capsys.readouterr().err


def test_what_ended_the_last_session_does_not_end_the_resumed_one(program: Path) -> None:
    Path("text.txt").write_text("to be or not to be, that is the question\n" * 40)
    small = [
        "--model.width=16",
        "--model.context=8",
        "--model.layers=1",
        "--model.heads=2",
        "--sample-tokens=0",
        *FEW,
    ]
    of_one_session = ["--stop-after=2 steps", "--time-limit=10 min"]
    main(
        [
            "train",
            "gpt",
            "--data.path=text.txt",
            "--length=5 steps",
            "--run-dir=runs/a",
            *small,
            *of_one_session,
        ]
    )
    assert max(Path("runs/a/checkpoints").glob("step-*")).name == "step-00000002"
    main(["resume", "a"])
    assert max(Path("runs/a/checkpoints").glob("step-*")).name == "step-00000005"


def test_a_program_that_came_with_the_run_is_not_executed(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever sends a run directory sends data: a file of Python in it must not run because
    config.toml says so.
    """
    main(["train", "program.py:build", "--length", "3 steps"])
    evil = Path("runs/mine/program.py").resolve()
    evil.write_text("from pathlib import Path; Path('canary').touch()\n" + PROGRAM)
    config = Path("runs/mine/config.toml")
    config.write_text(config.read_text().replace(str(program), str(evil)))
    for verb in ("resume", "evaluate"):
        assert refused(verb, "mine") == 2
        assert "[program-not-trusted]" in capsys.readouterr().err
    assert not Path("canary").exists()


def test_out_of_memory_has_its_own_status_and_says_what_to_make_smaller(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As CUDA raises it; the CPU has no such error."""
    raising = 'raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")'
    program.write_text(
        PROGRAM.replace("F.mse_loss(model(batch[0]), batch[1])", "fail()")
        + f"\ndef fail():\n    {raising}\n"
    )
    assert refused("train", "program.py:plain") == 6
    said = capsys.readouterr().err
    assert said.startswith("error: CUDA out of memory")
    assert "--micro-batch-size" in said
    assert "Traceback" not in said


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
        said = process.stderr.read()
        assert (process.wait(), said) == (0, "")
    assert max(Path("runs/plain/checkpoints").glob("step-*")).name == "step-00000008"


def interrupted_at(step: int) -> Any:
    """An update that is Ctrl-C, and no signal that would be waited for, at a step."""
    from surefoot.train.loop import update

    def interrupted(made: Any, *names: str) -> None:
        if made.index == step:
            raise KeyboardInterrupt
        update(made, *names)

    return interrupted


def main_unguarded(*arguments: str) -> None:
    from surefoot.cli.main import verb_function

    verb_function(arguments[0])(list(arguments[1:]))


def test_a_program_named_by_a_relative_path_is_not_executed(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """surefoot writes whole paths: an archive could bring a program that lies beside its run."""
    main(["train", "program.py:build", "--length", "3 steps"])
    Path("evil.py").write_text("from pathlib import Path; Path('canary').touch()\n" + PROGRAM)
    config = Path("runs/mine/config.toml")
    config.write_text(config.read_text().replace(str(program), "evil.py"))
    for verb in ("resume", "evaluate"):
        assert refused(verb, "mine") == 2
        assert "[path-of-code-unresolved]" in capsys.readouterr().err
    assert not Path("canary").exists()


@pytest.mark.parametrize(
    "place",
    ["/proc/self/cwd/evil.py", "{here}/link/evil.py", "{here}/runs/../evil.py", "evil.py\\u0000"],
)
def test_a_program_beside_a_run_is_not_executed_by_whatever_path_it_is_named(
    place: str, program: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An archive could bring a program beside its run, with its right hash."""
    main(["train", "program.py:build", "--length", "3 steps"])
    program.rename("evil.py").write_text(
        "from pathlib import Path; Path('canary').touch()\n" + PROGRAM
    )
    Path("link").symlink_to(tmp_path)
    config = Path("runs/mine/config.toml")
    text = config.read_text().replace(str(program), place.format(here=tmp_path))
    config.write_text(
        re.sub("sha256 = .*", f'sha256 = "{user_code.digest(Path("evil.py"))}"', text)
    )
    for verb in ("resume", "evaluate"):
        assert refused(verb, "mine") == 2
        assert "[path-of-code-unresolved]" in capsys.readouterr().err
    assert not Path("canary").exists()


def test_a_file_that_is_no_program_is_refused(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("notes.txt").write_text("3")
    assert refused("train", "notes.txt:build") == 2
    assert "[program-missing]" in capsys.readouterr().err


def test_a_stop_that_lies_behind_is_said_to_be_nothing(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", "program.py:build", "--length", "8 steps", "--stop-after", "4 steps"])
    capsys.readouterr()
    main(["resume", "mine", "--stop-after", "2 steps"])
    assert [4, 2] in [numbers_in(line) for line in capsys.readouterr().out.splitlines()]


def test_an_option_of_the_verb_s_own_may_have_been_meant(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", "program.py:build", "--length", "3 steps"])
    assert refused("evaluate", "mine", "--checkpont", "best") == 2
    assert "try: --checkpoint\n  [setting-unknown]" in capsys.readouterr().err


def test_a_relative_path_of_data_is_explained_in_another_directory(
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("text.txt").write_text("to be or not to be, that is the question\n" * 40)
    small = [
        "--model.width=16",
        "--model.context=8",
        "--model.layers=1",
        "--model.heads=2",
        "--sample-tokens=0",
        *FEW,
    ]
    main(
        [
            "train",
            "gpt",
            "--data.path=text.txt",
            "--length=5 steps",
            "--stop-after=2 steps",
            "--run-dir=runs/a",
            *small,
        ]
    )
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for verb in ("resume", "evaluate"):
        assert refused(verb, "../runs/a") == 3
        assert f"start in {tmp_path}" in capsys.readouterr().err


def test_commands_to_type_are_those_that_work_here(
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A shell without the environment's folder in PATH finds no `surefoot`."""
    place = tmp_path / "env" / "bin" / "surefoot"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("#!/bin/sh\n")
    place.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["env/bin/surefoot"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "bin" / "python"))
    main(["train", "program.py:build", "--length", "4 steps", "--stop-after", "2 steps"])
    assert "resume with:  env/bin/surefoot resume runs/mine" in capsys.readouterr().out
    monkeypatch.setenv("PATH", str(tmp_path / "env" / "bin"))
    main(["resume", "mine"])
    said = capsys.readouterr().out
    assert "evaluate it: surefoot evaluate runs/mine" in said


def test_a_mean_of_checkpoints_is_said_to_be_of_their_steps_and_the_best_to_be_the_best(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", "program.py:build", "--length", "8 steps"])
    capsys.readouterr()
    main(["evaluate", "mine", "--checkpoint", "average 3"])
    said = capsys.readouterr()
    assert "4, 6, 8 of runs/mine on all" in said.err
    assert said.out.startswith("mean_of_steps=4,6,8 all/loss=")
    main(["evaluate", "mine", "--checkpoint", "best"])
    assert "best) of runs/mine on all" in capsys.readouterr().err


def test_the_end_of_a_run_names_predict_where_its_program_has_one(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", "program.py:build", "--length", "4 steps", "--run-dir", "runs/a"])
    assert "use it:" not in capsys.readouterr().out
    program.write_text(PROGRAM + "\nclass Predict: ...\ndef predict(): ...\n")
    main(["train", "program.py:build", "--length", "4 steps", "--run-dir", "runs/b"])
    assert "surefoot predict runs/b INPUT" in capsys.readouterr().out


def test_another_data_set_is_named_before_all_that_goes_with_it(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", "program.py:build", "--length", "4 steps"])
    program.write_text(
        PROGRAM.replace("randn(40, 4", "randn(50, 4").replace("randn(40, 1", "randn(50, 1")
    )
    assert refused("train", "program.py:build", "--length", "8 steps") == 4
    said = capsys.readouterr().err
    assert "[data-changed]" in said
    assert "--init-from" not in said
    assert (
        "type: surefoot train program.py:build --length '8 steps' --run-dir runs/mine-2\n" in said
    )
