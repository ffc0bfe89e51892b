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
    arguments = {name: f"{__file__} {name}" for name in _COMMANDS}
    arguments["surefoot"] = "-c 'from surefoot.cli.main import main; main()'"
    for name, words in arguments.items():
        file = place / "bin" / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        file.chmod(0o755)
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith(("SLURM", "SUBMITIT")):
            environment[name] = value
    environment["PATH"] = f"{place / 'bin'}:{os.environ['PATH']}"
    environment["FAKE_SLURM"] = str(place)
    return environment


def weights(run: Path) -> tuple[str, dict[str, str]]:
    """The newest checkpoint and the hashes of its tensors."""
    # imports torch, which the commands do without
    from run_files import newest_checkpoint, newest_tensor_hashes

    return newest_checkpoint(run).name, newest_tensor_hashes(run)


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
    match = re.search(r"job (\d+)", text)
    assert match is not None, text
    return Job(place, int(match[1]))


def _sbatch(place: Path, arguments: Sequence[str]) -> int:
    """Start a script in the background, and again as long as it is requeued."""
    script = Path(arguments[0])
    lines = re.findall(r"(?m)^#SBATCH --([\w-]+)(?:=(.*))?$", script.read_text())
    options = {name: value.strip("'\"") for name, value in lines}
    number = _FIRST_JOB + len([*place.glob("*.job")])
    described = [f"{name}={value}" for name, value in options.items()]
    (place / f"{number}.job").write_text("\n".join(described))
    kept = place / f"{number}.sh"  # as Slurm does: the file may change before the job starts again
    kept.write_text(script.read_text())
    print(f"Submitted batch job {number}", flush=True)
    if os.fork():
        return 0
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # who submitted must not wait for the end of what it hears
        os.dup2(nothing, descriptor)
    output = options["output"].replace("%j", str(number)).replace("%t", "0")
    output = output.replace("%x", options.get("job-name", kept.name))
    mode = "a" if options.get("open-mode") == "append" else "w"
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    for restarts in range(9):
        (place / f"{number}.requeued").unlink(missing_ok=True)
        with open(output, mode) as log:
            status = subprocess.call(
                ["bash", str(kept), *arguments[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment_of_job(number, options, restarts),
            )
        with (place / f"{number}.statuses").open("a") as file:
            file.write(f"{status}\n")
        if not (place / f"{number}.requeued").exists():
            break
    (place / f"{number}.over").touch()
    return 0


def _environment_of_job(number: int, options: dict[str, str], restarts: int) -> dict[str, str]:
    nodes = int(options.get("nodes", 1))
    tasks_per_node = int(options.get("ntasks-per-node", 1))
    environment = {
        **os.environ,
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(nodes * tasks_per_node),
        "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
        "SLURM_TASKS_PER_NODE": str(tasks_per_node),
        "SLURM_PROCID": "0",  # of the script, which is no task
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }
    if nodes > 1:
        environment["SLURM_JOB_NODELIST"] = f"127.0.0.[1-{nodes}]"
        environment["SLURM_TASKS_PER_NODE"] = f"{tasks_per_node}(x{nodes})"
    if restarts:
        environment["SLURM_RESTART_COUNT"] = str(restarts)
    return environment


def _srun(place: Path, arguments: Sequence[str]) -> int:
    """Start a command as the tasks of a step, and end with the largest of their statuses."""
    options = {}
    rest = list(arguments)
    while rest[0].startswith("--"):
        option = rest.pop(0)
        if option in ("--output", "--error"):
            options[option] = rest.pop(0)
    tasks = int(os.environ["SLURM_NTASKS"])
    tasks_per_node = int(os.environ["SLURM_NTASKS_PER_NODE"])
    number = int(os.environ["SLURM_JOB_ID"])
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        "SLURM_STEP_TASKS_PER_NODE": os.environ["SLURM_TASKS_PER_NODE"],
    }
    pids = []
    # a program of a test's own, which is trained
    if any(argument.endswith(":build") for argument in rest):
        _import_once_for_all()
    for rank in range(tasks):
        task = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % tasks_per_node),
            "SLURM_NODEID": str(rank // tasks_per_node),
        }
        pid = os.fork()
        if pid == 0:
            os.environ.update(step | task)
            for descriptor, name in ((1, "--output"), (2, "--error")):
                if name in options:
                    path = options[name].replace("%j", str(number)).replace("%t", str(rank))
                    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                    os.dup2(file, descriptor)
            _be(rest)
        pids.append(pid)

    def kill_tasks(*_: object) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill_tasks)  # "forcing job termination"
    (place / f"{number}.tasks").write_text(" ".join(map(str, pids)))
    statuses = []
    for pid in pids:
        _, status = os.waitpid(pid, 0)
        exit_code = os.waitstatus_to_exitcode(status)
        statuses.append(128 - exit_code if exit_code < 0 else exit_code)
    (place / f"{number}.tasks").unlink()
    return max(statuses)


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
    (option,) = [argument for argument in arguments if argument.startswith("--signal=")]
    name_of_signal = option.partition("=")[2]
    _signal_tasks(place, int(arguments[-1]), signal.Signals[f"SIG{name_of_signal}"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
