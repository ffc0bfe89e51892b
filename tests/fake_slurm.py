"""A Slurm of one machine, as far as scripts and submitit see of it: sbatch, srun, scontrol requeue,
scancel --signal.

`installed` puts the commands into a directory for the PATH. A job's script runs in the background;
its machines are addresses of the loopback. Signals reach the tasks of a step and nobody else, as
with proctrack/cgroup; SIGTERM to srun itself kills them. A job that was requeued starts again when
its script has ended.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from waiting import wait_until

_COMMANDS = ("sbatch", "srun", "scontrol", "scancel")
_FIRST_JOB = 901593
PROGRAM = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from dataclasses import dataclass
import small_runs

@dataclass(frozen=True)
class Config:
    run_dir: str
    pause_s: float = 0.0

def build(config: Config):
    def loss(model, batch):
        time.sleep(config.pause_s)
        return small_runs.loss(model, batch)
    return small_runs.build(config.run_dir, loss=loss, console=True, save_every="1000 steps", log_every="1 step", identity={{}})
"""

# `srun -N1 -n4` on one machine, as HPX's tracker shows it (TheHPXProject/hpx#692), the place of its
# second task
ONE_MACHINE = {
    "SLURM_CPUS_ON_NODE": "4",
    "SLURM_GTIDS": "0,1,2,3",
    "SLURM_JOBID": "901593",
    "SLURM_JOB_ID": "901593",
    "SLURM_JOB_NODELIST": "t-cn0117",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "t-cn0117",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "t-cn0117",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4",
}
THREE_MACHINES = ONE_MACHINE | {
    "SLURM_JOB_NODELIST": "gpu[001-002,007]",
    "SLURM_STEP_NODELIST": "gpu[001-002,007]",
    "SLURM_NTASKS": "11",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}
OUTSIDE_OF_STEPS = {
    "no Slurm": {},
    "a shell of salloc": {
        "SLURM_JOB_ID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_JOB_NODELIST": "a[1-2]",
        "SLURM_NNODES": "2",
    },
    "a script of sbatch": {
        "SLURM_JOB_ID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    },
    "ssh to a machine of a job": {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "4294967292"},
    "the interactive step of salloc": ONE_MACHINE
    | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},
    "srun -n1": ONE_MACHINE
    | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "srun -n1 of an old version": {
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_JOB_ID": "5",
    },
}


def installed(place: Path) -> dict[str, str]:
    """The environment in which the commands are found; their state is in `place`."""
    (place / "bin").mkdir(parents=True)
    for name in (*_COMMANDS, "surefoot"):
        starts = (
            f"{__file__} {name}"
            if name != "surefoot"
            else "-c 'from surefoot.cli.main import main; main()'"
        )
        file = place / "bin" / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {starts} "$@"\n')
        file.chmod(0o755)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "SUBMITIT"))
    }
    return kept | {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "FAKE_SLURM": str(place)}


def weights(run: Path) -> tuple[str, dict[str, str]]:
    newest = max((run / "checkpoints").glob("step-*"))
    return newest.name, {
        file.name: sha256(file.read_bytes()).hexdigest() for file in newest.glob("*.safetensors")
    }


class Job:
    """One job, from outside."""

    def __init__(self, place: Path, number: int) -> None:
        self.place = place
        self.number = number

    def tasks(self) -> list[int]:
        """The process of each task that runs."""
        try:
            return [int(pid) for pid in (self.place / f"{self.number}.tasks").read_text().split()]
        except FileNotFoundError:
            return []

    def signal_tasks(self, number: int) -> None:
        """As `scancel --signal`, --signal at the end of the job's time, and a pre-emption do."""
        _signal_tasks(self.place, self.number, number)

    @property
    def statuses(self) -> list[int]:
        """What the script ended with, each time it was started."""
        file = self.place / f"{self.number}.statuses"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def wait(self) -> None:
        """Return when the script has ended and is not started again."""
        assert wait_until((self.place / f"{self.number}.over").exists), (
            f"job {self.number} has not ended"
        )


def submitted(place: Path, text: str) -> Job:
    """The job that sbatch says it has submitted."""
    found = re.search(r"job (\d+)", text)
    assert found is not None, text
    return Job(place, int(found[1]))


def _sbatch(place: Path, arguments: Sequence[str]) -> int:
    """Start a script in the background, and again as long as it is requeued."""
    script = Path(arguments[0])
    asked = dict(
        re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script.read_text(), flags=re.MULTILINE)
    )
    asked = {name: value.strip("'\"") for name, value in asked.items()}
    number = _FIRST_JOB + len([*place.glob("*.job")])
    (place / f"{number}.job").write_text(
        "\n".join(f"{name}={value}" for name, value in asked.items())
    )
    kept = place / f"{number}.sh"  # as Slurm does: the file may change before the job starts again
    kept.write_text(script.read_text())
    print(f"Submitted batch job {number}", flush=True)
    if os.fork():
        return 0
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # who submitted must not wait for the end of what it hears
        os.dup2(nothing, descriptor)
    output = (
        asked["output"]
        .replace("%j", str(number))
        .replace("%x", asked.get("job-name", kept.name))
        .replace("%t", "0")
    )
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    for restarts in range(9):
        (place / f"{number}.requeued").unlink(missing_ok=True)
        with open(output, "a" if asked.get("open-mode") == "append" else "w") as log:
            status = subprocess.call(
                ["bash", str(kept), *arguments[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_of_job(number, asked, restarts),
            )
        with (place / f"{number}.statuses").open("a") as file:
            file.write(f"{status}\n")
        if not (place / f"{number}.requeued").exists():
            break
    (place / f"{number}.over").touch()
    return 0


def _of_job(number: int, asked: dict[str, str], restarts: int) -> dict[str, str]:
    nodes, each = int(asked.get("nodes", 1)), int(asked.get("ntasks-per-node", 1))
    found = {
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_NODELIST": f"127.0.0.[1-{nodes}]" if nodes > 1 else "127.0.0.1",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(nodes * each),
        "SLURM_NTASKS_PER_NODE": str(each),
        "SLURM_TASKS_PER_NODE": f"{each}(x{nodes})" if nodes > 1 else str(each),
        "SLURM_PROCID": "0",  # of the script, which is no task
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }
    return dict(os.environ) | found | ({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {})


def _srun(place: Path, arguments: Sequence[str]) -> int:
    """Start a command as the tasks of a step, and end with the largest of their statuses."""
    options = {}
    rest = list(arguments)
    while rest[0].startswith("--"):
        option = rest.pop(0)
        if option in ("--output", "--error"):
            options[option] = rest.pop(0)
    tasks = int(os.environ["SLURM_NTASKS"])
    each = int(os.environ["SLURM_NTASKS_PER_NODE"])
    number = int(os.environ["SLURM_JOB_ID"])
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        "SLURM_STEP_TASKS_PER_NODE": os.environ["SLURM_TASKS_PER_NODE"],
    }
    pids = []
    if any(
        argument.endswith(":build") for argument in rest
    ):  # a program of a test's own, which is trained
        _import_once_for_all()
    for rank in range(tasks):
        own = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % each),
            "SLURM_NODEID": str(rank // each),
        }
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ.update(step | own)
            for descriptor, name in ((1, "--output"), (2, "--error")):
                if name in options:
                    file = options[name].replace("%j", str(number)).replace("%t", str(rank))
                    os.dup2(
                        os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), descriptor
                    )
            _be(rest)

    def kill_tasks(*_: object) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill_tasks)  # "forcing job termination"
    (place / f"{number}.tasks").write_text(" ".join(map(str, pids)))
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    (place / f"{number}.tasks").unlink()
    return max(128 - status if status < 0 else status for status in statuses)


def _import_once_for_all() -> None:
    """What takes seconds, before the tasks are forked."""
    import torch
    import torch._dynamo
    from torch.utils.tensorboard import writer

    import surefoot as sf

    torch.set_num_threads(1)
    assert writer
    assert sf.Run.__name__ == "Run"


def _be(command: Sequence[str]) -> None:
    """Be one task, and end."""
    if command[0] != "surefoot":
        os.execvp(command[0], list(command))
    from surefoot.cli.main import main

    status = 1
    try:
        sys.argv = list(command)
        main(list(command[1:]))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _signal_tasks(place: Path, number: int, sent: int) -> None:
    for pid in Job(place, number).tasks():
        os.kill(pid, sent)


def main(name: str, arguments: Sequence[str]) -> int:
    place = Path(os.environ["FAKE_SLURM"])
    if name == "sbatch":
        return _sbatch(place, arguments)
    if name == "srun":
        return _srun(place, arguments)
    if name == "scontrol":
        assert arguments[0] == "requeue"
        (place / f"{int(arguments[1])}.requeued").touch()
        return 0
    sent = next(
        argument.partition("=")[2] for argument in arguments if argument.startswith("--signal=")
    )
    _signal_tasks(place, int(arguments[-1]), signal.Signals[f"SIG{sent}"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
