"""`surefoot submit`: train as a Slurm job, which submitit requeues until the run is finished."""

import importlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tyro.conf import UseAppendAction

from surefoot.cli import processes
from surefoot.cli.options import (
    HELP,
    ProgramOptions,
    by_flag,
    check_excluded,
    limited,
    needs_option,
    target,
    verb_options,
    without,
)
from surefoot.cli.settings import program_settings
from surefoot.cli.train import AcceptChange, Train
from surefoot.config.extras import needed_for
from surefoot.config.paths import run_path
from surefoot.config.tree import MOST_USED
from surefoot.errors import ConfigError, Setting, first_line, out_of_range
from surefoot.program import find_program
from surefoot.tracking.commands import without_directory
from surefoot.tracking.numbered import choose_directory, give_back, is_numbered

_SAVING_S = 120  # from the signal to the job's time limit
_SHORTEST_H = 0.1
_SIGNAL = ("SUBMITIT_PREEMPT_SIGNAL", "TERM")  # surefoot saves on TERM; submitit's default is USR2


@dataclass(frozen=True)
class Training:
    """A surefoot command line for one process of the job. submitit calls it again after each
    requeue, and the run resumes.
    """

    arguments: tuple[str, ...]

    def __call__(self) -> None:
        """Train. If a signal stopped the run after saving it, let submitit requeue the job."""
        from surefoot.cli.main import main

        if os.environ.get("SUBMITIT_EXECUTOR") == "local":
            _submitit("submitit.helpers").TorchDistributedEnvironment().export(
                set_cuda_visible_devices=False
            )
            with suppress(OSError, KeyError):  # submitit leaves an empty directory named %j
                Path(os.environ["SUBMITIT_FOLDER"]).rmdir()
        sys.argv = ["surefoot", *self.arguments]
        try:
            main(list(self.arguments))
        except SystemExit as end:
            if end.code == 128 + signal.SIGTERM:
                signal.raise_signal(signal.SIGTERM)  # submitit's handler, restored at the run's end
            raise

    def checkpoint(self) -> Any:
        """Return the callable for the requeue, as submitit's protocol requires. The run's directory
        has all other state.
        """
        return _submitit("submitit.helpers").DelayedSubmission(self)


@dataclass(frozen=True, kw_only=True)
class Submit(AcceptChange, ProgramOptions):
    """Train as a Slurm job with one process per GPU, through submitit (extra slurm).
    The run saves before the job's time limit and on preemption; the job is then
    requeued and the run resumes with the same bits. All settings of surefoot train
    apply. --run-dir must be on a file system that all machines share.

      surefoot submit gpt --hours 12 --gpus-per-node 8 --run-dir runs/large
      surefoot submit my.py:build --hours 24 --gpus-per-node 4 --sbatch account=lab
      surefoot submit gpt --hours 12 --run-dir runs/large --dry-run
    """

    hours: float | None = field(default=None, metadata=MOST_USED)
    """Time limit of each start of the job, in hours; required."""
    nodes: int = limited(1, min_value=1, most_used=True)
    """Number of machines."""
    gpus_per_node: int = limited(0, min_value=0, most_used=True)
    """GPUs per machine, with one process each."""
    tasks_per_node: int | None = limited(None, min_value=1)
    """Processes per machine without GPUs. Default: 1."""
    cpus_per_task: int | None = limited(None, min_value=1)
    """CPU cores per process. Default: the cluster's number."""
    partition: str | None = field(default=None, metadata=MOST_USED)
    """Slurm partition. Default: the cluster's choice."""
    sbatch: UseAppendAction[tuple[str, ...]] = field(default=(), metadata=MOST_USED)
    """NAME=VALUE, another option of sbatch. Repeatable."""
    requeues: int = limited(10, min_value=0)
    """Maximum number of requeues."""
    logs: str = "slurm"
    """Directory of logs and submitit's files, with one subdirectory per job."""
    local: bool = False
    """Run the job on this machine, for a test."""
    dry_run: bool = field(default=False, metadata=MOST_USED)
    """Print the batch script, also without Slurm, and submit nothing."""

    @property
    def tasks(self) -> int:
        return self.tasks_per_node or max(self.gpus_per_node, 1)


def submit(arguments: list[str]) -> None:
    """Run `surefoot submit`: send a run to a Slurm cluster."""
    missing = "submit needs a recipe or a program: surefoot submit gpt --hours 12 --gpus-per-node 8 --run-dir runs/large"
    of_train = ("config", "accept_change", "changes")  # passed on to train
    what = target(Submit, arguments, verb="submit", missing=missing)
    options, flags = verb_options(Submit, arguments, verb="submit", but=of_train, help_goes_on=True)
    if options.local:
        others = [name for name in ("dry_run", "sbatch", "partition") if getattr(options, name)]
        check_excluded("local", others, reason="it does not use Slurm")
    tasks = options.nodes * options.tasks
    run_dir = check_training([what, *flags], tasks=tasks, local=options.local)
    if options.hours is None or options.hours < _SHORTEST_H:
        meaning = f"{_SHORTEST_H} or more; after these, the job is requeued and the run resumes"
        raise out_of_range("hours", options.hours, meaning)
    requested: dict[str, Any] = {  # submitit's names
        "name": "surefoot",
        "timeout_min": round(options.hours * 60),
        "nodes": options.nodes,
        "tasks_per_node": options.tasks,
        "gpus_per_node": options.gpus_per_node or None,
        "cpus_per_task": options.cpus_per_task,
        "stderr_to_stdout": True,
    }
    if not options.local:
        requested |= _of_slurm(options)
    words = [what, *flags]
    chosen = None
    if is_numbered(run_dir) and not options.dry_run:  # once, not at each start of the job
        chosen = choose_directory(run_dir, environment={})
        words = [*without_directory(words), "--run-dir", str(chosen)]
    command = shlex.join(["surefoot", "train", *words])
    if options.dry_run:
        print(_script(requested, options), end="")
        print(f"not submitted: each process would call {command}", file=sys.stderr)
        return
    try:
        job = _submitted(Training(("train", *words)), requested, options)
    except ConfigError:
        if chosen is not None:
            give_back(chosen)
        raise
    size = "1 process" if tasks == 1 else f"{options.nodes} x {options.tasks} processes"
    hours = "1 hour" if options.hours == 1 else f"{options.hours:g} hours"
    log = job.paths.stdout
    if log.is_relative_to(Path.cwd()):
        log = log.relative_to(Path.cwd())
    stop = "kill -INT" if options.local else "scancel"
    print(f"submitted  job {job.job_id}: {size}, {hours}, requeued up to {options.requeues} times")
    print(f"  command  {command}")
    print(f"  log      tail -f {log}")
    print(f"  stop     {stop} {job.job_id}")


def _of_slurm(options: Submit) -> dict[str, Any]:
    """Return what is requested of Slurm, by submitit's names."""
    # "account=lab" is an option of sbatch with a value, "exclusive" one without
    more: dict[str, Any] = {}
    for text in options.sbatch:
        name, equals, value = text.removeprefix("--").partition("=")
        more[name] = value if equals else True
    return {
        "slurm_partition": options.partition,
        "slurm_setup": [
            f"export {'='.join(_SIGNAL)}",
            # since Slurm 22.05 srun does not inherit it
            'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"',
        ],
        # after one rank ends, others may still write the checkpoint
        "slurm_srun_args": ["--kill-on-bad-exit=0"],
        "slurm_additional_parameters": {"requeue": True, "signal": f"TERM@{_SAVING_S}", **more},
    }


def check_training(arguments: Sequence[str], *, tasks: int = 1, local: bool = False) -> Any:
    """Return the run directory among the settings, or "". Raise if the settings or the number of
    tasks would be refused, or if the run could not be resumed.
    """
    program = find_program(arguments[0])
    options, flags = verb_options(
        Train, without(arguments, HELP), verb="train", but=processes.among_settings(program)
    )
    for name, words in by_flag(arguments):
        if name in HELP:
            flags += words
    config, _ = program_settings(program, options, flags, verb="submit", option_classes=[Submit])
    program.check(config)
    processes.refuse_tasks(tasks, processes.settled(options, config), config, local=local)
    run_dir = getattr(config, "run_dir", "")
    if run_dir is None:
        raise needs_option("a job that resumes", "run_dir", "runs/NAME")
    return run_dir


def _submitted(training: Training, requested: dict[str, Any], options: Submit) -> Any:
    submitit = _submitit("submitit")
    logs = run_path(options.logs, setting="--logs")
    try:
        executor = submitit.AutoExecutor(
            folder=logs / "%j",
            cluster="local" if options.local else "slurm",
            slurm_max_num_timeout=options.requeues,
            local_max_num_timeout=options.requeues,
        )
        executor.update_parameters(**requested)
        variables = _submitit("submitit.core.utils").environment_variables
        with variables(**dict([_SIGNAL])):  # for local processes
            return executor.submit(training)
    except (RuntimeError, ValueError, OSError) as problem:
        raise ConfigError(
            "job-not-submitted",
            problem=f"the job could not be submitted: {first_line(problem)}",
            reason=None if options.local else "does this machine submit jobs?",
            remedy=None if options.local else ("to test on this machine:", Setting("local")),
        ) from problem


def _script(requested: dict[str, Any], options: Submit) -> str:
    """Return the batch script that submitit would write."""
    slurm = _submitit("submitit.slurm.slurm")
    names = slurm.SlurmExecutor._equivalence_dict()
    parameters = {}
    for name, value in requested.items():
        if value is not None:
            own_name = name.removeprefix("slurm_")
            parameters[names.get(own_name, own_name)] = value
    folder = run_path(options.logs, setting="--logs").absolute() / "%j"
    python = shlex.quote(sys.executable)
    command = f"{python} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    return str(slurm._make_sbatch_string(command=command, folder=folder, **parameters))


def _submitit(module: str) -> Any:
    with needed_for("surefoot submit", "submitit"):
        return importlib.import_module(module)
