"""`surefoot submit ...`: the same run as `surefoot train ...`, as a job of Slurm that goes on by itself.

submitit writes the batch script and has the job requeued; what it is told to start is `Training`, a command line. Its own files, among
them a pickle of that command line, lie in a directory for logs and never in that of the run.
"""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.cli import processes, programs
from surefoot.cli.building import from_file, layers_below
from surefoot.cli.flags import configured
from surefoot.cli.help import VERBS
from surefoot.cli.options import number, option, options, whole
from surefoot.config import flatten
from surefoot.config.paths import local_path
from surefoot.errors import ConfigError, first_line

_SAVING_S = 120  # between the signal and the end of a job's time
_SHORTEST_H = 0.1
_SIGNAL = ("SUBMITIT_PREEMPT_SIGNAL", "TERM")  # the one that surefoot answers by saving; submitit's own is USR2
OWN = ("nodes", "gpus-per-node", "tasks-per-node", "cpus-per-task", "hours", "partition", "requeues", "logs", "sbatch")


@dataclass(frozen=True)
class Training:
    """One process of the job: a command line of surefoot. submitit calls it again after each requeue, and it goes on."""

    arguments: tuple[str, ...]

    def __call__(self) -> None:
        """Train; where it was told to stop and has saved, let submitit have the job requeued."""
        from surefoot.cli.main import main

        if os.environ.get("SUBMITIT_EXECUTOR") == "local":
            _submitit("submitit.helpers").TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
            with suppress(OSError, KeyError):
                Path(os.environ["SUBMITIT_FOLDER"]).rmdir()  # submitit makes one that is called %j, and leaves it empty
        sys.argv = ["surefoot", *self.arguments]
        try:
            main(list(self.arguments))
        except SystemExit as end:
            if end.code == 128 + signal.SIGTERM:
                signal.raise_signal(signal.SIGTERM)  # submitit's handler is back in its place since the run has ended
            raise

    def checkpoint(self) -> Any:
        """What is to be called after the requeue: submitit's protocol. All that has changed since is in the run's directory."""
        return _submitit("submitit.helpers").DelayedSubmission(self)


def submit(arguments: list[str]) -> None:
    """`surefoot submit RECIPE|FILE.py:build --hours H [--nodes N] [--gpus-per-node N] [settings]`: train as a job of Slurm."""
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("submit what? surefoot submit gpt --hours 12 --gpus-per-node 8 --out runs/large")
    if {"-h", "--help"} & set(arguments):
        print(f"{VERBS['submit']}\nSettings, which come before or after these:\n", flush=True)
    local = "--local" in arguments
    rest, given = [argument for argument in arguments if argument != "--local"], dict[str, str | None]()
    rest, further = options(rest, "--sbatch")
    for name in OWN[:-1]:
        rest, given[name] = option(rest, f"--{name}")
    helped = {"-h", "--help"} & set(rest)
    asked = _asked({"hours": "1"} | dict.fromkeys(OWN[:4]) if helped else given)
    tasks = asked["nodes"] * asked["tasks_per_node"]
    check_training(rest, tasks=tasks, local=local)
    if local:
        for name in ["--sbatch"] * bool(further) + ["--partition"] * (given["partition"] is not None):
            raise ConfigError(f"{name} is for Slurm, and --local is without it: leave one of them out")
    else:
        asked |= {
            "slurm_partition": given["partition"],
            "slurm_setup": [
                f"export {'='.join(_SIGNAL)}",
                'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"',  # since Slurm 22.05 srun does not take it over
            ],
            "slurm_srun_args": ["--kill-on-bad-exit=0"],  # a rank that has ended: the others are writing the checkpoint
            "slurm_additional_parameters": {"requeue": True, "signal": f"TERM@{_SAVING_S}", **_pairs(further)},
        }
    requeues = whole("--requeues", given["requeues"] or "10", least=0)
    job = _submitted(
        Training(("train", *rest)),
        asked,
        local_path(given["logs"] or "slurm", setting="--logs"),
        requeues=requeues,
        local=local,
    )
    size = "1 process" if tasks == 1 else f"{asked['nodes']} x {asked['tasks_per_node']} processes"
    hours = f"{given['hours']} hour{'s' * (given['hours'] != '1')}"
    print(f"submitted  job {job.job_id}: {size}, {hours}, and again up to {requeues} times")
    print(f"  command  {shlex.join(['surefoot', 'train', *rest])}")
    print(f"  look     tail -f {_short(job.paths.stdout)}")
    print(f"  stop     {'kill -INT' if local else 'scancel'} {job.job_id}")


def _asked(given: Mapping[str, str | None]) -> dict[str, Any]:
    """What is asked of any machine, as submitit calls it."""
    if given["hours"] is None:
        raise ConfigError("for how long? --hours 12; when they are over, the job is requeued and goes on")
    hours = number("--hours", given["hours"], example="12")
    if hours < _SHORTEST_H:
        raise ConfigError(f"--hours {given['hours']} is too short to save before the end: {_SHORTEST_H} or more")
    gpus = whole("--gpus-per-node", given["gpus-per-node"] or "0", least=0)
    cores = given["cpus-per-task"]
    return {
        "name": "surefoot",
        "timeout_min": round(hours * 60),
        "nodes": whole("--nodes", given["nodes"] or "1"),
        "tasks_per_node": whole("--tasks-per-node", given["tasks-per-node"] or str(max(gpus, 1))),
        "gpus_per_node": gpus or None,
        "cpus_per_task": None if cores is None else whole("--cpus-per-task", cores),
        "stderr_to_stdout": True,
    }


def check_training(arguments: Sequence[str], *, tasks: int = 1, local: bool = False) -> None:
    """Raise where the run would be refused by its settings alone or by so many tasks, or could not go on."""
    program = programs.found(arguments[0])
    given, several = processes.taken(program, arguments[1:])
    rest, in_file = from_file(program, given)
    if program.config is None:
        processes.refuse_tasks(tasks, several, None, local=local)
        return
    verb = f"surefoot submit {arguments[0]}"
    config, _ = configured(program.config, layers_below(program, in_file, rest), rest, verb=verb, own=[*OWN, "local"])
    program.check(config)
    processes.refuse_tasks(tasks, processes.settled(several, config), config, local=local)
    settings = flatten(config)
    if "out" in settings and settings["out"] is None:
        raise ConfigError("a job that goes on after its time needs a directory\n  add --out runs/NAME, on shared files")


def _submitted(training: Training, asked: dict[str, Any], logs: Path, *, requeues: int, local: bool) -> Any:
    submitit = _submitit("submitit")
    try:
        executor = submitit.AutoExecutor(
            folder=logs / "%j",
            cluster="local" if local else "slurm",
            slurm_max_num_timeout=requeues,
            local_max_num_timeout=requeues,
        )
        executor.update_parameters(**asked)
        with _submitit("submitit.core.utils").environment_variables(**dict([_SIGNAL])):  # for what starts here
            return executor.submit(training)
    except (RuntimeError, ValueError, OSError) as problem:
        where = "" if local else "\n  is this where jobs are submitted? to try it on this machine: --local"
        raise ConfigError(f"the job could not be submitted: {first_line(problem)}{where}") from problem


def _pairs(options: Sequence[str]) -> dict[str, Any]:
    """Further options of sbatch: "account=lab" is one with a value, "exclusive" one without."""
    pairs = [text.removeprefix("--").partition("=") for text in options]
    return {name: value if equals else True for name, equals, value in pairs}


def _submitit(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as problem:
        if problem.name != "submitit":
            raise
        raise ConfigError('surefoot submit needs submitit: pip install "surefoot[slurm]"') from problem


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
