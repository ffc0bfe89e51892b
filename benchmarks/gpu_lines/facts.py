"""The head of a result: which machine, which versions, and which packages are absent."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from gpu_lines.stand_ins import STAND_INS

RUNTIME = (
    "numpy",
    "triton",
    "safetensors",
    "tomlkit",
    "rich",
    "tyro",
    "tokenizers",
    "jinja2",
    "resvg_py",
    "tensorboard",
)
WANTED = (*RUNTIME, "pytest", "hypothesis")


def check(device: str) -> str:
    """Return the head."""
    rows = [f"torch {torch.__version__}, python {platform.python_version()}, {platform.system()}"]
    if device == "cuda" and torch.cuda.is_available():
        cudnn: Any = torch.backends.cudnn
        count = torch.cuda.device_count()
        properties = torch.cuda.get_device_properties(0)
        rows.append(
            f"{count} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB, capability {properties.major}."
            f"{properties.minor}, CUDA {torch.version.cuda}, driver {_driver()}, cuDNN {cudnn.version()}"
        )
    absent = [name for name in WANTED if name in STAND_INS.absent or find_spec(name) is None]
    rows.append(
        f"installed: {', '.join(f'{name} {_version(name)}' for name in WANTED if name not in absent)}"
    )
    named = [
        f"{name} (a stand-in is used)" if name in STAND_INS.absent else name for name in absent
    ]
    return "\n".join([*rows, f"absent: {', '.join(named) or 'none of them'}"])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version"


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
