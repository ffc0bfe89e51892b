"""The files of examples/launch: each starts the same training, and a rank that is killed costs no
bit. (about 2 s; slow ones 3 min)

The slow ones need the launchers themselves, and are skipped where one is not installed.
`benchmarks/launchers.py` tries all.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import real_slurm
from launched import (
    EXAMPLES,
    LAUNCHERS,
    OVER,
    PROGRAM,
    SCHEMAS,
    Launcher,
    is_alive,
    is_finished,
    killed,
    reference,
    slurm,
    steps_saved,
    waiting_examples,
    weights,
)
from nodes import NODES
from surefoot.cli.options import without
from surefoot.cli.submit import check_training
from waiting import wait_until

ROOT = Path(__file__).parents[2]
TRIED = (
    "torchrun",
    "mpirun",
    "submitit, on this machine",
    "Slurm",
    "Ray Train",
    "Kubernetes' variables",
)


def launcher_named(name: str) -> Launcher:
    (launcher,) = [launcher for launcher in LAUNCHERS if launcher.name == name]
    return launcher


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    return reference(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [launcher for launcher in LAUNCHERS if launcher.name in TRIED],
    ids=lambda launcher: launcher.name,
)
def test_a_run_whose_rank_is_killed_under_a_launcher_ends_with_the_bits_of_one_left_alone(
    launcher: Launcher, tmp_path: Path, undisturbed: tuple[str, dict[str, str]]
) -> None:
    reason = launcher.missing()
    if reason is not None:
        pytest.skip(reason)
    outcome = killed(launcher, tmp_path, undisturbed=undisturbed)
    assert 0 < outcome.killed_at <= 150, "it was killed in its midst, while its loss waited"
    if launcher.restarts:
        assert outcome.starts == 1, outcome.log
    else:
        # on a busy machine, submitit's controller may start before its folder exists, and fail: it
        # is started once more
        assert outcome.starts >= 2, outcome.log
    assert outcome.sessions == 2, outcome.log
    assert outcome.same_bits, outcome.log


@pytest.mark.slow
def test_a_real_slurm_requeues_a_job_that_it_signals_and_the_job_ends_with_the_same_bits(
    tmp_path: Path, undisturbed: tuple[str, dict[str, str]]
) -> None:
    reason = real_slurm.missing()
    if reason is not None:
        pytest.skip(reason)
    run_dir = tmp_path / "run"
    hold = waiting_examples(tmp_path)
    launcher = launcher_named("Slurm")
    with slurm(tmp_path) as environment:
        subprocess.run(
            launcher.command(tmp_path),
            env=environment,
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
        assert wait_until(lambda: steps_saved(run_dir) >= 100)
        # as before a job's time limit
        subprocess.run(["scancel", "--signal=TERM", "1"], env=environment, check=True)
        hold.unlink()
        assert wait_until(lambda: real_slurm.state(environment, 1) in OVER)
        job = real_slurm.ask(environment, "scontrol", "show", "job", "1")
    assert "Restarts=1" in job
    assert is_finished(run_dir)
    assert weights(run_dir) == undisturbed


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory where commands are looked for; it is empty."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr(real_slurm, "_path", lambda environment: environment["PATH"])
    return directory


def write_command(file: Path, output: str) -> None:
    file.write_text(f"#!/bin/sh\necho '{output}'\n")
    file.chmod(0o755)


def test_mpirun_is_missing_unless_it_is_that_of_open_mpi(commands: Path) -> None:
    mpirun = launcher_named("mpirun")
    assert mpirun.missing() == "mpirun is not installed: apt install openmpi-bin"
    write_command(commands / "mpirun", "HYDRA build details:\nVersion: 4.2")
    assert mpirun.missing() == "mpirun is not Open MPI's: HYDRA build details:"
    write_command(commands / "mpirun", "mpirun (Open MPI) 4.1.4")
    assert mpirun.missing() is None


def test_slurm_is_missing_unless_it_can_do_without_munge(commands: Path) -> None:
    assert real_slurm.missing() == "slurmctld is not installed: apt install slurm-wlm"
    for name in real_slurm._COMMANDS:
        write_command(commands / name, "")
    assert real_slurm.missing() == "this Slurm has no auth/none, and there is no munge"
    plugins = commands.parent / "lib" / "x86_64-linux-gnu" / "slurm-wlm"
    plugins.mkdir(parents=True)
    (plugins / "auth_none.so").touch()
    assert real_slurm.missing() == "this Slurm has no cred/none, and there is no munge"
    (plugins / "cred_none.so").touch()
    assert real_slurm.missing() is None


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemon_of_a_test_dies_with_the_killed_process_of_the_test(
    number: signal.Signals,
) -> None:
    program = f"""
import signal, subprocess, tied
daemon = subprocess.Popen(tied.tied(["sleep", "600"], signal.{number.name}))
print(daemon.pid, flush=True)
daemon.wait()
"""
    environment = os.environ | {"PYTHONPATH": str(Path(real_slurm.__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        daemon = int(process.stdout.readline())
        command = Path(f"/proc/{daemon}/cmdline")
        assert wait_until(lambda: b"sleep" in command.read_bytes().split(b"\0")[0])
        process.kill()
    assert wait_until(lambda: not is_alive(daemon))


@pytest.mark.filterwarnings("ignore")  # of the packages with the schemas
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_file_has_the_schema_of_its_kind(name: str) -> None:
    module, check = SCHEMAS[name]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    check(EXAMPLES / name)


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("name", NODES)
def test_surefoot_takes_the_command_of_a_file(name: str, node: int) -> None:
    command, variables = NODES[name](EXAMPLES / name, node, 29500)
    words = " ".join(command).split()
    place = words.index("train")
    assert words[place - 1] == "surefoot"
    program, *flags = words[place + 1 :]
    assert program in ("/shared/train.py:build", "examples/launch/train.py:build")
    check_training([PROGRAM, *without(flags, [])], tasks=2)
    ranks = [value for name, value in variables.items() if name.endswith("RANK")]
    assert str(node) in ranks


@pytest.fixture(scope="module")
def table_rows() -> dict[str, str]:
    """The rows of the page on the examples, by the file that each links to first."""
    rows = {}
    for line in (EXAMPLES / "README.md").read_text().splitlines():
        if line.startswith("| ["):
            file, *_ = re.findall(r"\]\((\S+?)\)", line)
            rows[file] = line
    return rows


@pytest.fixture(scope="module")
def results() -> str:
    return (ROOT / "benchmarks" / "results" / "launchers.txt").read_text()


def test_the_table_has_every_file(table_rows: dict[str, str]) -> None:
    files = {file.name for file in EXAMPLES.iterdir() if file.suffix in (".sh", ".py", ".yaml")}
    assert set(table_rows) == files - {"train.py"}


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_the_table_says_of_a_launcher_what_its_result_says(
    launcher: Launcher, table_rows: dict[str, str], results: str
) -> None:
    pattern = rf"^{re.escape(launcher.name)} +{launcher.file} .*, (.+), 2 sessions, same bits$"
    result = re.search(pattern, results, flags=re.MULTILINE)
    assert result is not None
    restart = {"by itself": "restarted by itself", "typed again": "typed again"}[result[1]]
    assert restart in table_rows[launcher.file] or launcher.file in SCHEMAS


@pytest.mark.parametrize("file", SCHEMAS)
def test_the_table_says_of_a_file_that_its_schema_alone_was_checked(
    file: str, table_rows: dict[str, str], results: str
) -> None:
    assert re.search(rf"^{file} +schema of ", results, flags=re.MULTILINE)
    assert "schema" in table_rows[file]
    assert "no cl" in table_rows[file]
