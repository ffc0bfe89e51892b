"""The files of examples/launch, each started here: rank 0 is killed, and the run must end with the
same bits.

`tests/launch/test_launch_examples.py` asserts that, and `benchmarks/launchers.py` writes it down.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import real_slurm
from fake_slurm import weights
from surefoot.tracking.jsonl import records
from tied import tied
from waiting import wait_until

EXAMPLES = Path(__file__).parents[1] / "examples" / "launch"
PROGRAM = f"{EXAMPLES / 'train.py'}:build"
KILLED_AFTER = 100  # steps that are saved
_WAITING = """

import time
from pathlib import Path

loss_of_points, calls = loss, iter(range(300))  # two micro-batches in each step of a process


def loss(model, batch):
    while next(calls, None) is None and Path(__file__).with_name("hold").exists():
        time.sleep(0.01)
    return loss_of_points(model, batch)
"""
_MOST_STARTS = 3
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "unknown")


@dataclass(frozen=True)
class Outcome:
    """What became of a run: `starts` are the commands that were typed, `sessions` the times that
    training began.
    """

    killed_at: int
    starts: int
    sessions: int
    same_bits: bool
    log: str


@dataclass(frozen=True)
class Launcher:
    """How a file of the examples is started, and what that needs. `command` takes the directory of
    `waiting_examples`.
    """

    name: str
    file: str
    command: Callable[[Path], list[str]]
    missing: Callable[[], str | None]
    on_slurm: bool = False
    restarts: bool = False  # starts the processes again if one dies


def reference(directory: Path) -> tuple[str, dict[str, str]]:
    """The weights of a run of two processes that nobody disturbs, without a launcher of others."""
    command = [
        sys.executable,
        "-m",
        "surefoot",
        "train",
        PROGRAM,
        "--nproc",
        "2",
        "--run-dir",
        str(directory / "run"),
    ]
    subprocess.run(command, env=_environment(directory), check=True, capture_output=True)
    return weights(directory / "run")


def waiting_examples(directory: Path) -> Path:
    """A copy of the examples. Its training waits from about step 150 on until the file that is
    returned is removed.
    """
    shutil.copytree(EXAMPLES, directory / "launch")
    with (directory / "launch" / "train.py").open("a") as program:
        program.write(_WAITING)
    hold = directory / "launch" / "hold"
    hold.touch()
    return hold


def killed(
    launcher: Launcher, directory: Path, *, undisturbed: tuple[str, dict[str, str]]
) -> Outcome:
    """Start a file of the examples, kill rank 0 in its midst, and start it again unless it goes on
    by itself.
    """
    run_dir = directory / "run"
    log = directory / "log"
    hold = waiting_examples(directory)
    shell = slurm(directory) if launcher.on_slurm else nullcontext(_environment(directory))
    with shell as environment:
        killed_at = _start(launcher.command(directory), log, environment, watch=run_dir, hold=hold)
        starts = 1
        while starts < _MOST_STARTS and not is_finished(run_dir):
            _start(launcher.command(directory), log, environment)
            starts += 1
        sessions = json.loads((run_dir / "environment.json").read_text())["sessions"]
        same = is_finished(run_dir) and weights(run_dir) == undisturbed
        return Outcome(killed_at, starts, len(sessions), same, log.read_text())


@contextmanager
def slurm(directory: Path) -> Iterator[dict[str, str]]:
    """The environment of a shell that reaches a Slurm of this machine, and finds surefoot and
    torchrun.
    """
    with real_slurm.real_slurm(directory / "slurm") as of_cluster:
        yield _environment(directory) | of_cluster


def _start(
    command: list[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    watch: Path | None = None,
    hold: Path | None = None,
) -> int:
    """Wait until a command and its job have ended. Kill rank 0 of the run in `watch` in its midst,
    then remove `hold`. Return the step.
    """
    killed_at = 0
    with log.open("a") as out:
        process = subprocess.Popen(
            tied(command, signal.SIGTERM),  # by which launchers end what they started
            env=environment,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    is_over = _over(process, log, environment)
    try:
        if watch is not None:
            wait_until(lambda: steps_saved(watch) >= KILLED_AFTER or is_over())
            assert not is_over(), log.read_text()
            os.kill(first_rank(watch), signal.SIGKILL)
            killed_at = last_step(watch)
        if hold is not None:
            hold.unlink()
        assert wait_until(is_over), log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(
                process.pid, signal.SIGKILL
            )  # nobody has waited for it, so no other group has its number
        process.wait()
    return killed_at


def _exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit status, or None while it is alive. `poll` would give its number to another
    process.
    """
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None if ended is None else ended.si_status


def _shell(name: str, *further: str) -> Callable[[Path], list[str]]:
    def command(directory: Path) -> list[str]:
        program = f"{directory / 'launch' / 'train.py'}:build"
        return [
            *further,
            str(directory / "launch" / name),
            program,
            "--run-dir",
            str(directory / "run"),
        ]

    return command


def _mpirun(directory: Path) -> list[str]:
    port = real_slurm.free_ports(1)[0]
    return ["env", f"MASTER_PORT={port}", *_shell("mpirun.sh", "bash")(directory)]


def _nodes(name: str) -> Callable[[Path], list[str]]:
    script = str(Path(__file__).with_name("nodes.py"))
    return lambda directory: [
        sys.executable,
        script,
        str(directory / "launch" / name),
        str(directory / "run"),
    ]


def _without(module: str) -> Callable[[], str | None]:
    return lambda: None if importlib.util.find_spec(module) else f"{module} is not installed"


def _no_mpirun() -> str | None:
    if shutil.which("mpirun") is None:
        return "mpirun is not installed: apt install openmpi-bin"
    version = subprocess.run(
        ["mpirun", "--version"], capture_output=True, text=True, check=False
    ).stdout
    return (
        None
        if "Open MPI" in version
        else f"mpirun is not Open MPI's: {version.strip().partition(chr(10))[0]}"
    )


SMALL = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1")
LAUNCHERS = (
    Launcher("torchrun", "torchrun.sh", _shell("torchrun.sh", "bash"), lambda: None, restarts=True),
    Launcher("mpirun", "mpirun.sh", _mpirun, _no_mpirun),
    Launcher(
        "submitit, on this machine",
        "submitit.sh",
        lambda directory: [*_shell("submitit.sh", "bash")(directory), "--local"],
        _without("submitit"),
    ),
    Launcher(
        "submitit, under Slurm",
        "submitit.sh",
        _shell("submitit.sh", "bash"),
        lambda: real_slurm.missing() or _without("submitit")(),
        on_slurm=True,
    ),
    Launcher(
        "Slurm", "slurm.sh", _shell("slurm.sh", "sbatch", *SMALL), real_slurm.missing, on_slurm=True
    ),
    Launcher(
        "Ray Train",
        "ray_job.py",
        lambda directory: [
            sys.executable,
            str(directory / "launch" / "ray_job.py"),
            str(directory / "run"),
        ],
        _without("ray"),
        restarts=True,
    ),
    Launcher(
        "Kubernetes' variables",
        "kubernetes.yaml",
        _nodes("kubernetes.yaml"),
        _without("yaml"),
        restarts=True,
    ),
    Launcher(
        "Kubeflow's variables",
        "kubeflow.yaml",
        _nodes("kubeflow.yaml"),
        _without("yaml"),
        restarts=True,
    ),
    Launcher(
        "SkyPilot's variables",
        "skypilot.yaml",
        _nodes("skypilot.yaml"),
        _without("yaml"),
        restarts=True,
    ),
)


def _kubernetes(file: Path) -> None:
    from nodes import documents

    for document in documents(file):
        importlib.import_module("kubernetes_validate").validate(document, "1.37", strict=True)


def _kubeflow(file: Path) -> None:
    from nodes import documents

    (document,) = documents(file)
    job = importlib.import_module("kubeflow_trainer_api.models").TrainerV1alpha1TrainJob.from_dict(
        document
    )
    assert job.to_dict() == document, "a key that a TrainJob does not have"


def _skypilot(file: Path) -> None:
    importlib.import_module("sky").Task.from_yaml(str(file))


SCHEMAS = {  # the file, the package that has its schema, and the check
    "kubernetes.yaml": ("kubernetes_validate", _kubernetes),
    "kubeflow.yaml": ("kubeflow_trainer_api", _kubeflow),
    "skypilot.yaml": ("sky", _skypilot),
}


def steps_saved(run_dir: Path) -> int:
    """The step of the newest checkpoint."""
    return max((int(file.name[5:]) for file in run_dir.glob("checkpoints/step-*")), default=0)


def last_step(run_dir: Path) -> int:
    """The step of the last record."""
    return max((record["step"] for record in records(run_dir / "metrics.jsonl")), default=0)


def is_finished(run_dir: Path) -> bool:
    """Whether the run has recorded that it finished."""
    file = run_dir / "metrics.jsonl"
    return file.exists() and '"event": "finished"' in file.read_text()


def first_rank(run_dir: Path) -> int:
    """The process of rank 0, whoever started it: it has the lock of the run's directory open."""
    lock = str(run_dir / ".lock")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(link) == lock:
                return int(link.parts[2])
    raise AssertionError(f"no process has {lock} open")


def _environment(directory: Path) -> dict[str, str]:
    commands = directory / "bin"
    commands.mkdir(parents=True)
    for name, module in (("surefoot", "surefoot"), ("torchrun", "torch.distributed.run")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (commands / name).chmod(0o755)
    mpi = ("ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM", "MCA_rmaps_base_oversubscribe")
    changes = {"PATH": f"{commands}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"} | {
        f"OMPI_{name}": "1" for name in mpi
    }
    of_others = ("SLURM", "SBATCH", "SUBMITIT", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
    return {
        name: value for name, value in os.environ.items() if not name.startswith(of_others)
    } | changes


def _over(
    process: subprocess.Popen[bytes], log: Path, environment: Mapping[str, str]
) -> Callable[[], bool]:
    """Whether a command has ended, and the job that it says it has submitted."""

    def is_over() -> bool:
        status = _exit_status(process)
        if status is None:
            return False
        jobs = re.findall(
            r"(?i)^submitted (?:batch )? ?job (\d+)", log.read_text(), flags=re.MULTILINE
        )
        if not jobs or status:
            return True
        if "SLURM_CONF" in environment:
            return real_slurm.state(environment, int(jobs[-1])) in OVER
        return not is_alive(int(jobs[-1]))

    return is_over


def is_alive(pid: int) -> bool:
    """Whether a process is there, and no mere entry of one that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
