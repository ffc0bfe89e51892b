"""A real Slurm of one machine: slurmctld and slurmd with a configuration and a state of their own,
for as long as a test needs them.

It needs Debian's package slurm-wlm, and no munge: both daemons and all commands belong to one user
of one machine. The machine has eight processors as far as Slurm is concerned.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from tied import tied
from waiting import wait_until

_DAEMONS = ("slurmctld", "slurmd")
_COMMANDS = (*_DAEMONS, "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
_CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
MailProg=/bin/true
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no Slurm here, or None."""
    absent = [name for name in _COMMANDS if shutil.which(name, path=_path(os.environ)) is None]
    if absent:
        return f"{absent[0]} is not installed: apt install slurm-wlm"
    lacking = [name for name in ("auth_none", "cred_none") if not any(_plugins(name))]
    return (
        f"this Slurm has no {lacking[0].replace('_', '/')}, and there is no munge"
        if lacking
        else None
    )


def _plugins(name: str) -> Iterator[Path]:
    """The files of a plugin, where distributions and `make install` have them."""
    slurmd = Path(shutil.which("slurmd", path=_path(os.environ)) or "/usr/sbin/slurmd").resolve()
    for library in ("lib", "lib64", "lib/*"):
        for folder in ("slurm", "slurm-wlm"):
            yield from slurmd.parents[1].glob(f"{library}/{folder}/{name}.so")


@contextmanager
def real_slurm(directory: Path) -> Iterator[dict[str, str]]:
    """The variable by which Slurm's commands reach a cluster of this machine; its files are in
    `directory`. Ends all its jobs.
    """
    for name in ("state", "spool"):
        (directory / name).mkdir(parents=True)
    conf = directory / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    conf.write_text(
        _CONF.format(host=host, user=getpass.getuser(), directory=directory, ports=free_ports(2))
    )
    of_cluster = {"SLURM_CONF": str(conf)}
    environment = os.environ | of_cluster | {"PATH": _path(os.environ)}
    daemons = []
    try:
        for name, options in zip(_DAEMONS, (["-D", "-c"], ["-D"]), strict=True):
            with (directory / f"{name}.out").open("w") as out:
                daemons.append(
                    subprocess.Popen(
                        tied([name, *options]),
                        env=environment,
                        cwd=directory,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        assert wait_until(
            lambda: ask(environment, "sinfo", "--noheader", "--format=%t").strip() == "idle"
        ), _log(directory)
        yield of_cluster
    finally:
        if len(daemons) == len(_DAEMONS):
            ask(environment, "scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}")
            ask(environment, "scancel", f"--user={getpass.getuser()}")
            wait_until(lambda: not ask(environment, "squeue", "--noheader").strip())
        for process in reversed(daemons):
            process.terminate()
        for process in daemons:
            if not wait_until(partial(_has_ended, process)):
                process.kill()
                process.wait()


def ask(environment: Mapping[str, str], *command: str) -> str:
    """What a command of Slurm prints; nothing where it fails."""
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    ).stdout


def state(environment: Mapping[str, str], job: int) -> str:
    """The state of a job, such as RUNNING, COMPLETED or PENDING."""
    shown = ask(environment, "scontrol", "show", "job", str(job))
    return next(
        (word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")),
        "unknown",
    )


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def _path(environment: Mapping[str, str]) -> str:
    return f"{environment.get('PATH', '')}:/usr/sbin:/sbin"  # of the daemons


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]


def _log(directory: Path) -> str:
    return "\n".join(file.read_text() for file in sorted(directory.glob("slurm*.log")))
