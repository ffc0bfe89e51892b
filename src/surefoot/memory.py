"""Free memory of a device, peak memory of a code block, bytes as text and compared, and the CPU's
instructions for bf16.
"""

import ctypes
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from surefoot.errors import ConfigError, Setting

_STATM = Path("/proc/self/statm")
_UNITS = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}


@dataclass
class Peak:
    """The peak memory of tensors in bytes, relative to the start of the block. Set at the end of
    the block.
    """

    memory_bytes: int = 0


@contextmanager
def peak(device: torch.device) -> Iterator[Peak]:
    """Measure the peak memory of the tensors that a block allocates on a device.

    On CUDA the allocator reports the peak, including temporary memory of kernels. On other devices,
    including meta, the outputs of each operator are counted until they are freed, except in code
    compiled by torch.compile.

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
    """Return the memory fields of a record without synchronizing: host memory and, on CUDA, the
    peak since the last call.

    `host_memory_bytes` is resident memory; `host_memory_peak_bytes` replaces it if the system
    reports only a peak.

    >>> used_bytes(torch.device("cpu"))["host_memory_bytes"] > 1e7
    True
    """
    memory = _host_bytes()
    if device.type == "cuda":
        memory["device_memory_peak_bytes"] = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    return memory


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a device that this process can still allocate. Raises `ConfigError` if
    the number is unknown.

    On CUDA the result includes memory that torch has reserved but not allocated. On the CPU the
    result is the memory available without swapping, limited by the process's control groups, such
    as a container's memory limit.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    available = _available_bytes(Path("/proc/meminfo")) if device.type == "cpu" else None
    if available is not None:
        groups = _left_in_groups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
        return min([available, *groups])
    raise ConfigError(
        "free-memory-unknown",
        problem=f"the free memory of {device} cannot be measured on this machine",
        remedy=Setting("memory", "8GB"),
        device=str(device),
    )


def _host_bytes() -> dict[str, int]:
    with suppress(OSError, IndexError, ValueError):  # only Linux has such a file
        resident_pages = int(_STATM.read_bytes().split()[1])
        return {"host_memory_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE")}
    try:
        import resource
    except ImportError:  # Windows has none
        return {}
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"host_memory_peak_bytes": largest if sys.platform == "darwin" else largest * 1024}


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of tensors. Each tensor is counted once.

    >>> one = torch.zeros(10)
    >>> tensor_bytes([one, one, torch.zeros(5, dtype=torch.float64)])
    80
    """
    each_once = {id(tensor): tensor for tensor in tensors}  # keeps them alive: ids are reused
    return sum(tensor.nbytes for tensor in each_once.values())


def in_words(number: float) -> str:
    """Format bytes with a decimal unit and at most three digits.

    >>> (
    ...     in_words(853),
    ...     in_words(3_400_000),
    ...     in_words(1_200_000_000),
    ...     in_words(999_700),
    ...     in_words(1.5e12),
    ... )
    ('853 B', '3.4 MB', '1.2 GB', '1 MB', '1.5 TB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= 0.9995 * size:  # three digits round up to the unit
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"


def parsed_bytes(text: str, *, setting: str) -> int:
    """Convert a text such as "8GB", "512 MB" or "1.5 GiB" to bytes. Raises `ConfigError` for any
    other text.

    >>> parsed_bytes("8GB", setting="memory"), parsed_bytes("1.5 KiB", setting="memory")
    (8000000000, 1536)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(text), re.ASCII)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) == 0:
        raise ConfigError(
            "not-a-size-in-bytes",
            problem=f"{setting} = {text!r} is no number of bytes with a unit",
            remedy=[Setting(setting, size) for size in ("8GB", "512 MB", "1.5 GiB")],
            setting=setting,
            value=text,
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages from the operator that returns them until they are freed."""

    def __init__(self, device: torch.device, measured: Peak) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.measured = measured
        self.known: set[int] = set()  # addresses of all known storages
        self.now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._know((args, kwargs), are_new=False)  # an unknown input was allocated before the block
        returned = func(*args, **(kwargs or {}))
        self._know(returned, are_new=True)
        self.measured.memory_bytes = max(self.measured.memory_bytes, self.now)
        return returned

    def _know(self, nest: Any, *, are_new: bool) -> None:
        for tensor in tree_iter(nest):
            if not isinstance(tensor, Tensor) or tensor.device.type != self.device.type:
                continue
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            address = storage._cdata  # `data_ptr()` is 0 on the meta device
            if address not in self.known:
                self.known.add(address)
                size = storage.nbytes() if are_new else 0
                self.now += size
                weakref.finalize(storage, self._forget, address, size).atexit = False

    def _forget(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.now -= size


def _available_bytes(meminfo: Path) -> int | None:
    line = re.search(r"^MemAvailable:\s+(\d+) kB", _text(meminfo), re.MULTILINE)
    return None if line is None else int(line[1]) * 1024


def _left_in_groups(root: Path, own: Path) -> list[int]:
    """Return the bytes that each control group around this process still allows, with version 1 or
    2 of control groups. `own` is the file with the process's groups.
    """
    left: list[int] = []
    names = {
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        "": ("memory.max", "memory.current"),
    }
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in names:
            continue
        limit_name, used_name = names[controllers]
        top = root / controllers
        innermost = top / path.lstrip("/")
        for folder in [innermost, *innermost.parents]:
            limit = _number(folder / limit_name)
            used = _number(folder / used_name)
            if folder.is_relative_to(top) and limit is not None and used is not None:
                statistics = _text(folder / "memory.stat")
                file_cache = re.search(r"^(?:total_)?inactive_file (\d+)", statistics, re.MULTILINE)
                if file_cache is not None:  # it counts as free
                    used -= int(file_cache[1])
                left.append(max(0, limit - used))
    return left


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def instruction_set() -> str:
    """Return the CPU's best bf16 instructions as "amx_bf16", "avx512_bf16", "arm_bf16", "none" or
    "unknown".
    """
    try:
        has = torch.cpu.get_capabilities()
    except AttributeError:  # torch 2.11 may lack it; drop when a later one is the minimum
        return "unknown"
    if has.get("architecture") != "x86_64":
        if "bf16" not in has:
            return "unknown"
        return "arm_bf16" if has["bf16"] else "none"
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()  # of the instructions that oneDNN uses
    is_unlimited = limit in ("", "ALL", "DEFAULT")
    if has.get("amx_bf16") and (is_unlimited or "AMX" in limit):
        return "amx_bf16"
    allows_bf16 = is_unlimited or any(name in limit for name in ("AMX", "AVX10", "BF16", "FP16"))
    return "avx512_bf16" if has.get("avx512_bf16") and allows_bf16 else "none"


def equal_on_cpu(one: Tensor, other: Tensor) -> bool:
    """Return whether two contiguous CPU tensors have the same bytes. See `optim.in_place.read_on_cpu`.

    `memcmp` of 4 MB takes 0.2 ms, and a copy 0.25 ms. Raises `RuntimeError` for another device.

    >>> equal_on_cpu(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    True
    >>> equal_on_cpu(torch.tensor([0.0]), torch.tensor([-0.0]))
    False
    """
    if not (one.is_cpu and other.is_cpu):
        raise RuntimeError(f"equal_on_cpu received tensors on {one.device} and {other.device}")
    if one.nbytes != other.nbytes:
        return False
    return _memcmp()(one.data_ptr(), other.data_ptr(), one.nbytes) == 0


@cache
def _memcmp() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL("msvcrt" if os.name == "nt" else None).memcmp
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_int
    return function
