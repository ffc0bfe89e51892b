"""The two processes of a file for Kubernetes, Kubeflow or SkyPilot, on this machine: its commands,
with the variables that it gets there.

    python tests/nodes.py examples/launch/kubernetes.yaml RUN_DIR

No Kubernetes and no cloud take part. A command that fails is started again at once, which
Kubernetes does too.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import real_slurm

_STARTS = 5  # of one process, the first included
Node = tuple[list[str], dict[str, str]]  # a command and its variables


def documents(file: Path) -> list[dict[str, Any]]:
    """The documents of a YAML file."""
    return [*importlib.import_module("yaml").safe_load_all(file.read_text())]


def kubernetes(file: Path, node: int, port: int) -> Node:
    """As a Pod of the Job: `node` is its completion index. The image starts surefoot."""
    (container,) = documents(file)[1]["spec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: entry.get("value", str(node)) for entry in container["env"]}
    return ["surefoot", *container["args"]], variables | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def kubeflow(file: Path, node: int, port: int) -> Node:
    """As a Pod of the TrainJob: its runtime sets the variables PET_*."""
    trainer = documents(file)[0]["spec"]["trainer"]
    runtime = {
        "NNODES": trainer["numNodes"],
        "NPROC_PER_NODE": trainer["numProcPerNode"],
        "NODE_RANK": node,
    }
    runtime |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables = {entry["name"]: entry["value"] for entry in trainer["env"]}
    return [*trainer["command"], *trainer["args"]], variables | {
        f"PET_{name}": str(it) for name, it in runtime.items()
    }


def skypilot(file: Path, node: int, port: int) -> Node:
    """As a machine of the task."""
    task = documents(file)[0]
    variables = {
        "NUM_NODES": str(task["num_nodes"]),
        "NODE_RANK": str(node),
        "NODE_IPS": "127.0.0.1\n127.0.0.1",
    }
    run = task["run"].replace("29500", str(port))
    return ["bash", "-c", run], {f"SKYPILOT_{name}": value for name, value in variables.items()}


NODES: dict[str, Callable[[Path, int, int], Node]] = {
    "kubernetes.yaml": kubernetes,
    "kubeflow.yaml": kubeflow,
    "skypilot.yaml": skypilot,
}


def main(name: str, run_dir: str) -> int:
    """Be both machines until their commands have succeeded, or one has failed too often."""
    file = Path(name)
    port = real_slurm.free_ports(1)[0]
    there = {"/shared/runs/launched": run_dir, "/shared/train.py": str(file.parent / "train.py")}
    there[" examples/launch/train.py"] = f" {there['/shared/train.py']}"

    def start(node: int) -> subprocess.Popen[bytes]:
        command, variables = NODES[file.name](file, node, port)
        for path, here in there.items():
            command = [argument.replace(path, here) for argument in command]
        return subprocess.Popen(command, env=os.environ | variables, stdin=subprocess.DEVNULL)

    running = {node: start(node) for node in range(2)}
    starts = 2
    while running and starts < 2 * _STARTS:
        for node, process in [*running.items()]:
            if process.poll() == 0:
                del running[node]
            elif process.poll() is not None:
                running[node] = start(node)
                starts += 1
        time.sleep(0.1)
    for process in running.values():
        process.kill()
    return len(running)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
