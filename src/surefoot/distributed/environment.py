"""The rank of this process, its rendezvous address, its parent process, and its import of torch.
Torch-free.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.errors import ConfigError, Setting

if TYPE_CHECKING:
    from surefoot.distributed.slurm import SlurmTask

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun in a rank's environment
LAUNCHER = "SUREFOOT_LAUNCHER"  # set in a rank's environment: the process id of surefoot's launcher
# set beside it: the directory in which a rank leaves its error for the launcher
ERRORS = "SUREFOOT_ERRORS"
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_SPINS = "60000"  # about 3 ms; GNU OpenMP's own 300,000 keep an idle thread busy for 10 ms and more
# the latter two within the machine
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPI = (  # the same four values
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel
)


@dataclass(frozen=True)
class Placement:
    """The ranks and sizes of one process, named as in torch.distributed. `local_rank` counts within
    the machine.

    `meeting` is the address for torch's rendezvous, either "env://" for MASTER_ADDR and MASTER_PORT
    or "tcp://...". `apart` is true if the process sees one GPU that no other process of the machine
    sees, as with srun --gpus-per-task.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    meeting: str = "env://"
    apart: bool = False


def placed(environment: Mapping[str, str]) -> Placement:
    """Return the placement from torchrun or a compatible launcher, mpirun, or Slurm's srun. Without
    a launcher, the process is alone.

    If launchers are nested, the innermost launcher counts. A torchrun inside a Slurm step must
    include the processes of the other machines. If MASTER_ADDR and MASTER_PORT are set, they
    replace the address computed for Slurm.

    >>> placed({})
    Placement(rank=0, world_size=1, local_rank=0, local_world_size=1, meeting='env://', apart=False)
    >>> placed({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    Placement(rank=5, world_size=8, local_rank=1, local_world_size=4, meeting='env://', apart=False)
    >>> step = {
    ...     "SLURM_JOB_ID": "17",
    ...     "SLURM_STEP_ID": "0",
    ...     "SLURM_STEP_NODELIST": "gpu[1-2]",
    ...     "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    ... }
    >>> placed(
    ...     step
    ...     | {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}
    ... )
    Placement(rank=5, world_size=8, local_rank=1, local_world_size=4, meeting='tcp://gpu1:61457', apart=False)
    """
    mpi = _by_mpi(environment)
    task = None
    if "SLURM_STEP_ID" in environment:
        from surefoot.distributed.slurm import task as slurm_task

        task = slurm_task(environment)
    if "WORLD_SIZE" in environment:
        return _by_torchrun(environment, task)
    # processes of mpirun inherit the variables of their Slurm step; srun's own MPI has the same
    # ranks as srun
    if task is not None and (mpi is None or (mpi.rank, mpi.world_size) == (task.rank, task.tasks)):
        return _by_slurm(environment, task)
    if mpi is not None and "MASTER_ADDR" not in environment:
        raise ConfigError(
            "mpirun-without-address",
            problem=f"mpirun started {mpi.world_size} processes, but MASTER_ADDR is not set",
            reason="they cannot find each other",
            remedy="type mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..., where HOST is the"
            " machine of rank 0",
            processes=mpi.world_size,
        )
    return mpi or Placement()


def more_processes_than_gpus(processes: int, *, gpus: int) -> ConfigError:
    """Return the error of a machine with fewer GPUs than processes."""
    return ConfigError(
        "more-processes-than-gpus",
        problem=f"{processes} processes need a GPU each, and the machine has {gpus}",
        remedy=[Setting("nproc", max(gpus, 1)), Setting("device", "cpu")],
        processes=processes,
        gpus=gpus,
    )


def started_by_launcher() -> bool:
    """Return whether surefoot's own launcher started this process."""
    return LAUNCHER in os.environ


def leave_error(error: Mapping[str, object]) -> None:
    """Leave an error, as JSON, for surefoot's launcher, which names the ranks that met another
    error than rank 0. Does nothing in other processes.
    """
    if ERRORS in os.environ:
        with suppress(OSError):  # the launcher has ended
            path = Path(os.environ[ERRORS], f"rank-{os.environ['RANK']}.json")
            path.write_text(json.dumps(error), encoding="utf-8")


def tie_to_launcher() -> None:
    """End this process when the launcher that started it ends. Ranks above 0 get no standard
    input.
    """
    if TORCHRUN in os.environ:
        end_with_parent(os.getppid())
    if not started_by_launcher():
        return
    end_with_parent(int(os.environ[LAUNCHER]))
    if os.environ.get("RANK") != "0":
        with open(os.devnull, encoding="utf-8") as nothing:
            os.dup2(nothing.fileno(), 0)


def die_with(parent: int) -> None:
    """End this process when its parent process `parent` ends. Work since the last checkpoint is
    lost.
    """
    if sys.platform != "linux":
        # standard input is a pipe that only the parent holds
        _end_unless(lambda: bool(os.read(0, 4096)))
    end_with_parent(parent)


def end_with_parent(parent: int) -> None:
    """End this process when its parent process `parent` ends: by a signal on Linux, by polling on
    macOS. No effect on Windows.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    elif sys.platform != "win32":
        _end_unless(lambda: os.getppid() == parent, every_s=0.5)
    if sys.platform != "win32" and os.getppid() != parent:  # the parent ended before this call
        os._exit(1)


def _end_unless(is_alive: Callable[[], bool], *, every_s: float = 0.0) -> None:
    def watch() -> None:
        while is_alive():
            time.sleep(every_s)
        os._exit(1)

    threading.Thread(target=watch, name="surefoot parent watch", daemon=True).start()


def _by_torchrun(environment: Mapping[str, str], task: "SlurmTask | None") -> Placement:
    size = _number(environment, "WORLD_SIZE", source="WORLD_SIZE")
    # a script exported srun's values under torch's names
    if task is not None and "LOCAL_WORLD_SIZE" not in environment:
        rank = _number(environment, "RANK", source="WORLD_SIZE", default=task.rank)
        if (rank, size) != (task.rank, task.tasks):
            raise ConfigError(
                "rank-of-another-task",
                problem=f"RANK = {rank} and WORLD_SIZE = {size}, but Slurm reports task {task.rank}"
                f" of {task.tasks}",
                remedy="unset RANK and WORLD_SIZE: srun's own variables are enough",
                rank=rank,
                task=task.rank,
                tasks=task.tasks,
            )
        return _by_slurm(environment, task)
    placement = _by_names(environment, _TORCHRUN, source="WORLD_SIZE")
    if task is not None and size == placement.local_world_size:
        raise ConfigError(
            "launchers-apart",
            problem=f"srun started {task.tasks} launchers, but this one knows only its own {size}"
            " processes",
            reason="each would train alone",
            remedy="leave out the launcher: srun surefoot train ..., or give torchrun all machines:"
            f"\n--nnodes {task.tasks} --rdzv-backend c10d --rdzv-endpoint {task.host}:29500",
            launchers=task.tasks,
            host=task.host,
        )
    return placement


def _by_mpi(environment: Mapping[str, str]) -> Placement | None:
    """Return the placement from mpirun, or None without mpirun or with a single process."""
    for names in _MPI:
        rank, size, *_ = names
        if rank in environment and environment.get(size) != "1":
            return _by_names(environment, names, source=rank)
    return None


def _by_slurm(environment: Mapping[str, str], task: "SlurmTask") -> Placement:
    host = environment.get("MASTER_ADDR") or task.host
    if ":" in host:  # IPv6 addresses need brackets
        host = f"[{host}]"
    port = _number(environment, "MASTER_PORT", source="srun", default=task.port)
    return Placement(
        task.rank,
        task.tasks,
        task.local_rank,
        task.local_tasks,
        meeting=f"tcp://{host}:{port}",
        apart="SLURM_GPUS_PER_TASK" in environment or _apart(environment, task.local_rank),
    )


def _by_names(
    environment: Mapping[str, str], names: tuple[str, str, str, str], *, source: str
) -> Placement:
    rank_name, size_name, local_rank_name, local_size_name = names
    rank = _number(environment, rank_name, source=source)
    size = _number(environment, size_name, source=source)
    local_rank = _number(environment, local_rank_name, source=source, default=rank)
    local_size = _number(environment, local_size_name, source=source, default=size)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise ConfigError(
            "rank-out-of-range",
            problem=f"{rank_name} = {rank} and {local_rank_name} = {local_rank} are out of range"
            f" for {size_name} = {size} and {local_size_name} = {local_size}",
            reason="was this shell started by a launcher?",
            remedy=f"unset {size_name}, or open a new shell",
            rank=rank,
            local_rank=local_rank,
        )
    return Placement(rank, size, local_rank, local_size, apart=_apart(environment, local_rank))


def _apart(environment: Mapping[str, str], local_rank: int) -> bool:
    return any(environment.get(name) == str(local_rank) for name in _VISIBLE)


def _number(
    environment: Mapping[str, str], name: str, *, source: str, default: int | None = None
) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit()):
        what = "not set" if text is None else repr(text)
        raise ConfigError(
            "launcher-variable-unusable",
            problem=f"the environment indicates {source}, but {name} is {what}",
            remedy="start several processes with --nproc N, torchrun, or srun; for one process,"
            " unset WORLD_SIZE",
            name=name,
            value=text,
        )
    return int(text)


def shorten_spinning() -> None:
    """Shorten the busy waiting of torch's threads, unless the user has set it or torch is imported
    already.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def import_torch() -> None:
    """Import torch if it is not imported, and exclude it from every collection of garbage."""
    if "torch" in sys.modules or not gc.isenabled():
        return
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
