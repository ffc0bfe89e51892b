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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    return reference(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [one for one in LAUNCHERS if one.name in TRIED], ids=lambda one: one.name
)
def test_a_run_whose_rank_is_killed_under_a_launcher_ends_with_the_bits_of_one_left_alone(
    launcher: Launcher, tmp_path: Path, undisturbed: tuple[str, dict[str, str]]
) -> None:
    if reason := launcher.missing():
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
    if reason := real_slurm.missing():
        pytest.skip(reason)
    run_dir = tmp_path / "run"
    hold = waiting_examples(tmp_path)
    (launcher,) = (launcher for launcher in LAUNCHERS if launcher.name == "Slurm")
    with slurm(tmp_path) as environment:
        subprocess.run(
            launcher.command(tmp_path),
            env=environment,
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
        assert wait_until(lambda: steps_saved(run_dir) >= 100)
        subprocess.run(
            ["scancel", "--signal=TERM", "1"], env=environment, check=True
        )  # as before a job's time limit
        hold.unlink()
        assert wait_until(lambda: real_slurm.state(environment, 1) in OVER)
        shown = real_slurm.ask(environment, "scontrol", "show", "job", "1")
    assert "Restarts=1" in shown
    assert is_finished(run_dir)
    assert weights(run_dir) == undisturbed


def test_what_cannot_be_tried_here_is_skipped_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mpirun,) = (launcher for launcher in LAUNCHERS if launcher.name == "mpirun")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(real_slurm, "_path", lambda environment: environment["PATH"])
    assert mpirun.missing() == "mpirun is not installed: apt install openmpi-bin"
    assert real_slurm.missing() == "slurmctld is not installed: apt install slurm-wlm"
    (tmp_path / "bin").mkdir()
    for name in ("mpirun", *real_slurm._COMMANDS):
        (tmp_path / "bin" / name).write_text(
            "#!/bin/sh\necho HYDRA build details:\necho Version: 4.2\n"
        )
        (tmp_path / "bin" / name).chmod(0o755)
    assert mpirun.missing() == "mpirun is not Open MPI's: HYDRA build details:"
    assert real_slurm.missing() == "this Slurm has no auth/none, and there is no munge"
    plugins = tmp_path / "lib" / "x86_64-linux-gnu" / "slurm-wlm"
    plugins.mkdir(parents=True)
    (plugins / "auth_none.so").touch()
    assert real_slurm.missing() == "this Slurm has no cred/none, and there is no munge"
    (plugins / "cred_none.so").touch()
    (tmp_path / "bin" / "mpirun").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    assert (mpirun.missing(), real_slurm.missing()) == (None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemon_of_a_test_dies_with_the_killed_process_of_the_test(
    number: signal.Signals,
) -> None:
    program = f"import signal, subprocess, tied; d = subprocess.Popen(tied.tied(['sleep', '600'], signal.{number.name}))"
    program += "; print(d.pid, flush=True); d.wait()"
    environment = os.environ | {"PYTHONPATH": str(Path(real_slurm.__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        daemon = int(process.stdout.readline())
        assert wait_until(
            lambda: b"sleep" in Path(f"/proc/{daemon}/cmdline").read_bytes().split(b"\0")[0]
        )
        process.kill()
    assert wait_until(lambda: not is_alive(daemon))


@pytest.mark.filterwarnings("ignore")  # of the packages with the schemas
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_file_has_the_schema_of_its_kind(name: str) -> None:
    module, check = SCHEMAS[name]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    check(EXAMPLES / name)


@pytest.mark.parametrize("name", NODES)
def test_surefoot_takes_the_command_of_a_file(name: str) -> None:
    for node in range(2):
        command, variables = NODES[name](EXAMPLES / name, node, 29500)
        words = " ".join(command).replace("/shared/train.py", "examples/launch/train.py").split()
        assert words[words.index("train") - 1] == "surefoot"
        check_training([PROGRAM, *without(words[words.index("train") + 2 :], [])], tasks=2)
        assert any(
            name.endswith(("RANK", "NODE_RANK")) and value == str(node)
            for name, value in variables.items()
        )


def test_the_table_has_every_file_and_the_results_say_what_it_says() -> None:
    table = (EXAMPLES / "README.md").read_text()
    results = (ROOT / "benchmarks" / "results" / "launchers.txt").read_text()
    rows = {
        re.findall(r"\]\((\S+?)\)", row)[0]: row
        for row in table.splitlines()
        if row.startswith("| [")
    }
    assert set(rows) == {
        file.name for file in EXAMPLES.iterdir() if file.suffix in (".sh", ".py", ".yaml")
    } - {"train.py"}
    for launcher in LAUNCHERS:
        line = re.search(
            rf"^{re.escape(launcher.name)} +{launcher.file} .*, (.+), 2 sessions, same bits$",
            results,
            re.MULTILINE,
        )
        assert line, f"{launcher.name} was not run"
        how = {"by itself": "restarted by itself", "typed again": "typed again"}[line[1]]
        assert how in rows[launcher.file] or launcher.file in SCHEMAS
    for file in SCHEMAS:
        assert re.search(rf"^{file} +schema of ", results, flags=re.MULTILINE), file
        assert "schema" in rows[file]
        assert "no cl" in rows[file]
