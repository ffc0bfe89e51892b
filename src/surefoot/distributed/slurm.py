"""Slurm's variables in the environment of a process started by srun. Torch-free.

Only processes started by srun are tasks. The script of sbatch and a shell inside salloc also have
SLURM_NTASKS, but are single processes. The section "output environment variables" of srun's manual
lists the names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product, repeat

from surefoot.errors import ConfigError

# ids from here on are Slurm's own: the batch script, an interactive shell, ...
_FIRST_SPECIAL_STEP = 0xFFFF_0000
_FIRST_PORT = 61440  # above Linux's ephemeral ports (32768 to 60999)
_PORTS = 4096
_GROUP = r"(?:[^\[\],\s]|\[[^\[\]\s]+\])+"


@dataclass(frozen=True)
class SlurmTask:
    """One process of a step. `host` and `port` are the rendezvous address of the step."""

    rank: int
    tasks: int
    local_rank: int
    local_tasks: int
    host: str
    port: int


def task(environment: Mapping[str, str]) -> SlurmTask | None:
    """Return the task of this process in its Slurm step. Returns None outside of a step with
    several tasks.

    Raises `ConfigError` if variables contradict each other. The host is the first host of the step.
    The port depends on job, step and number of restarts, so that simultaneous and requeued jobs on
    a machine use different ports.

    >>> step = {
    ...     "SLURM_JOB_ID": "17",
    ...     "SLURM_STEP_ID": "0",
    ...     "SLURM_STEP_NODELIST": "gpu[07-08]",
    ...     "SLURM_STEP_NUM_TASKS": "5",
    ... }
    >>> step |= {
    ...     "SLURM_STEP_TASKS_PER_NODE": "3,2",
    ...     "SLURM_NODEID": "1",
    ...     "SLURM_PROCID": "4",
    ...     "SLURM_LOCALID": "1",
    ... }
    >>> task(step)
    SlurmTask(rank=4, tasks=5, local_rank=1, local_tasks=2, host='gpu07', port=61457)
    """
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return None
    step = _number(environment, "SLURM_STEP_ID")
    name_of_tasks = "SLURM_NTASKS"
    if "SLURM_STEP_NUM_TASKS" in environment:
        name_of_tasks = "SLURM_STEP_NUM_TASKS"
    tasks = _number(environment, name_of_tasks, default=1)
    rank = _number(environment, "SLURM_PROCID")
    if step >= _FIRST_SPECIAL_STEP or (tasks == 1 and rank == 0):
        return None
    node = _number(environment, "SLURM_NODEID", default=0)
    local_rank = _number(environment, "SLURM_LOCALID")
    named = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodelist = next(filter(None, map(environment.get, named)), None)
    if nodelist is None:
        raise _refusal(
            f"this is task {environment['SLURM_PROCID']} of a step, but {named[0]} is missing"
        )
    nodes = hosts(nodelist)
    on_nodes = _on_nodes(environment, tasks=tasks, nodes=len(nodes))
    where = f"{_listed(on_nodes)} on {_listed(nodes)}"
    if len(on_nodes) != len(nodes) or sum(on_nodes) != tasks:
        raise _refusal(f"{tasks} tasks in total, but {where}")
    if rank >= tasks or node >= len(nodes) or local_rank >= on_nodes[node]:
        raise _refusal(
            f"SLURM_PROCID = {rank}, SLURM_NODEID = {node} and SLURM_LOCALID = {local_rank} are out of range for {tasks} tasks,"
            f" {where}"
        )
    return SlurmTask(
        rank=rank,
        tasks=tasks,
        local_rank=local_rank,
        local_tasks=on_nodes[node],
        host=nodes[0] if len(nodes) > 1 else "127.0.0.1",
        port=port(
            job=_number(environment, "SLURM_JOB_ID"),
            step=step,
            restarts=_number(environment, "SLURM_RESTART_COUNT", default=0),
        ),
    )


def hosts(nodelist: str) -> list[str]:
    """Return the hosts in Slurm's compressed list of machines.

    >>> hosts("gpu[001-003,007],login")
    ['gpu001', 'gpu002', 'gpu003', 'gpu007', 'login']
    >>> hosts("rack[1-2]node[08-09]-ib")
    ['rack1node08-ib', 'rack1node09-ib', 'rack2node08-ib', 'rack2node09-ib']
    """
    if not re.fullmatch(f"{_GROUP}(,{_GROUP})*", nodelist):
        raise _no_nodelist(nodelist)
    names: list[str] = []
    for group in re.findall(_GROUP, nodelist):
        choices: list[list[str]] = []
        for index, piece in enumerate(re.split(r"\[(.*?)\]", group)):
            in_brackets = index % 2 == 1
            if not in_brackets:
                choices.append([piece])
                continue
            numbers: list[str] = []
            for part in piece.split(","):
                numbers += _range(part, nodelist)
            choices.append(numbers)
        names += ["".join(parts) for parts in product(*choices)]
    return names


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each machine from Slurm's compressed list.

    >>> tasks_per_node("4(x2),3")
    [4, 4, 3]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            raise _refusal(f"{text!r} tasks per machine, which does not have the form '4(x2),3'")
        counts += repeat(int(match[1]), int(match[2] or 1))
    return counts


def port(*, job: int, step: int, restarts: int) -> int:
    """Return the rendezvous port of a step, from 61440 to 65535.

    >>> (
    ...     port(job=17, step=0, restarts=0),
    ...     port(job=18, step=0, restarts=0),
    ...     port(job=17, step=0, restarts=1),
    ... )
    (61457, 61458, 62466)
    """
    return _FIRST_PORT + (job + 101 * step + 1009 * restarts) % _PORTS


def _range(part: str, nodelist: str) -> list[str]:
    match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
    if match is None:
        raise _no_nodelist(nodelist)
    width = len(match[1])
    first = int(match[1])
    last = int(match[2] or match[1])
    if last < first:
        raise _no_nodelist(nodelist)
    return [f"{number:0{width}d}" for number in range(first, last + 1)]


def _on_nodes(environment: Mapping[str, str], *, tasks: int, nodes: int) -> list[int]:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in environment:
            return tasks_per_node(environment[name])
    return [tasks] if nodes == 1 else [_number(environment, "SLURM_NTASKS_PER_NODE")] * nodes


def _number(environment: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit()):
        what = "missing" if text is None else repr(text)
        raise _refusal(f"this is a task of a step, but {name} is {what}")
    return int(text)


def _no_nodelist(text: str) -> ConfigError:
    return _refusal(f"the machines {text!r}, which do not have the form 'gpu[001-003,007],login'")


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        "slurm-environment-unusable",
        problem=f"Slurm's environment cannot be used: {what}",
        reason="was a variable exported by hand, or left over from another step?",
        remedy="start the processes with srun, and do not change its variables",
    )


def _listed(things: list[int] | list[str]) -> str:
    texts = [str(thing) for thing in things[:4]]
    if len(things) > 4:
        texts.append(f"... ({len(things)})")
    return ", ".join(texts)
