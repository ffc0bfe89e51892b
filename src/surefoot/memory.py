"""Memory: how much of a device is free, how much the tensors made in some code take at once, and bytes as people write them."""

import os
import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from surefoot.errors import ConfigError

_STATM = Path("/proc/self/statm")
_UNITS = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}


@dataclass
class Peak:
    """The most bytes of tensors at one time, above those that were there before; known when its block is left."""

    memory_bytes: int = 0


@contextmanager
def peak(device: torch.device) -> Iterator[Peak]:
    """Measure the memory of tensors on a device while the block runs: the free memory that an allocator needs for it.

    On CUDA the allocator is asked, so temporary memory of kernels is in it. Elsewhere, also on the meta device, each operator's results are
    counted while they live. Code compiled by torch.compile is not seen.

    >>> with peak(torch.device("cpu")) as measured:
    ...     total = torch.ones(1000) + torch.ones(1000)
    >>> measured.memory_bytes
    12000
    """
    measured = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        try:
            yield measured
        finally:
            torch.cuda.synchronize(device)
            measured.memory_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    with _Counting(device, measured):
        yield measured


def used_bytes(device: torch.device) -> dict[str, int]:
    """The memory values of a record: the present memory of this process and, on CUDA, the peak of its tensors since the last call.

    `host_memory_bytes` is resident; `host_memory_peak_bytes` replaces it if the system reports only a peak. Waits for no device.

    >>> used_bytes(torch.device("cpu"))["host_memory_bytes"] > 1e7
    True
    """
    memory = _host_bytes()
    if device.type == "cuda":
        memory["device_memory_peak_bytes"] = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    return memory


def free_bytes(device: torch.device) -> int:
    """The memory of a device that this process may still use; `ConfigError` if that is unknown.

    On CUDA with what torch has reserved and not given out. On the CPU what the system says is available without swapping,
    or less where a control group limits it (containers do).
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "cpu" and (available := _available_bytes(Path("/proc/meminfo"))) is not None:
        return min([available, *_left_in_groups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])
    raise ConfigError(
        f"how much memory is free on {device} cannot be told here\n  say how much may be used: --memory 8GB"
    )


def _host_bytes() -> dict[str, int]:
    with suppress(OSError, IndexError, ValueError):  # only Linux has such a file
        return {"host_memory_bytes": int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    try:
        import resource
    except ImportError:  # Windows has none
        return {}
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"host_memory_peak_bytes": largest if sys.platform == "darwin" else largest * 1024}


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of some tensors, each counted once.

    >>> one = torch.zeros(10)
    >>> tensor_bytes([one, one, torch.zeros(5, dtype=torch.float64)])
    80
    """
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def in_words(number: float) -> str:
    """Bytes as a person says them.

    >>> in_words(853), in_words(3_400_000), in_words(1_200_000_000), in_words(999_700), in_words(1.5e12)
    ('853 B', '3.4 MB', '1.2 GB', '1 MB', '1.5 TB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= 0.9995 * size:  # which three digits round to it
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"


def parsed_bytes(text: str, *, setting: str) -> int:
    """The bytes that a text such as "8GB", "512 MB" or "1.5 GiB" means; `ConfigError` for anything else.

    >>> parsed_bytes("8GB", setting="memory"), parsed_bytes("1.5 KiB", setting="memory")
    (8000000000, 1536)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip(), re.ASCII | re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) == 0:
        raise ConfigError(f'{setting} = {text!r}: write it with a unit, as in "8GB", "512 MB" or "1.5 GiB"')
    return int(float(match[1]) * _UNITS[match[2].upper()])


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operators make on a device, until each is freed."""

    def __init__(self, device: torch.device, measured: Peak) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.measured = device, measured
        self.known: set[int] = set()  # storages by address, those that were there before too
        self.now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._know((args, kwargs), are_new=False)  # seen first as an input: it was there before
        returned = func(*args, **(kwargs or {}))
        self._know(returned, are_new=True)
        self.measured.memory_bytes = max(self.measured.memory_bytes, self.now)
        return returned

    def _know(self, nest: Any, *, are_new: bool) -> None:
        for tensor in tree_iter(nest):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device.type and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                address = storage._cdata  # its data's own is 0 on the meta device
                if address not in self.known:
                    self.known.add(address)
                    number = storage.nbytes() if are_new else 0
                    self.now += number
                    weakref.finalize(storage, self._freed, address, number).atexit = False

    def _freed(self, address: int, number: int) -> None:
        self.known.discard(address)
        self.now -= number


def _available_bytes(meminfo: Path) -> int | None:
    line = re.search(r"^MemAvailable:\s+(\d+) kB", _text(meminfo), re.MULTILINE)
    return None if line is None else int(line[1]) * 1024


def _left_in_groups(root: Path, own: Path) -> list[int]:
    """The memory that the control groups of this process, and those above them, leave it; file cache counts as free."""
    free: list[int] = []
    names = {"memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"), "": ("memory.max", "memory.current")}
    for _, controllers, path in (line.split(":", 2) for line in _text(own).splitlines()):
        if controllers not in names:
            continue
        top = root / controllers
        innermost = top / path.lstrip("/")
        for folder in [innermost, *innermost.parents]:
            limit, used = (_number(folder / name) for name in names[controllers])
            if folder.is_relative_to(top) and limit is not None and used is not None:
                cache = re.search(r"^(?:total_)?inactive_file (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
                free.append(max(0, limit - used + (int(cache[1]) if cache else 0)))
    return free


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
