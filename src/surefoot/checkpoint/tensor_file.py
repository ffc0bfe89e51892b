"""A file of tensors (safetensors) read by rows and written piece by piece: in memory is only what is asked for.

It is eight bytes with the length of its header, the header as JSON (of each tensor type, shape and the bytes it takes), and
the numbers, row after row, so that rows lie in one stretch: https://huggingface.co/docs/safetensors#format. A file that is
read whole is the library's business; to write one it would first copy it.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.checkpoint.filesystem import DISK, Files
from surefoot.errors import CheckpointError

CHUNK_BYTES = 16 << 20
_SMALL_BYTES = 1 << 20  # of a tensor that is not worth a write of its own
_HEADER_BYTES = 100 << 20  # the library's own limit
_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_NAMES = {held: name for name, held in _TYPES.items()}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by width in bytes
TYPES = frozenset(_NAMES)  # of numbers that come back; the library writes some that it does not read


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a file: its bytes are those from `start` on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stretch:
    """Rows of a tensor in one file, the first of which is row `first` of the whole."""

    path: Path
    entry: Entry
    first: int = 0


@dataclass(frozen=True)
class Stored:
    """A tensor that is on disk, whole in one file or by rows in several, and is read when it is asked for."""

    dtype: torch.dtype
    shape: torch.Size
    stretches: tuple[Stretch, ...]
    disk: Files = DISK

    def whole(self) -> Tensor:
        read = torch.empty(self.shape, dtype=self.dtype)
        for stretch in self.stretches:
            row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
            _fill(bytes_of(read)[stretch.first * row_bytes :], stretch, self.disk)
        return read

    def rows(self, start: int, stop: int) -> Tensor:
        """The rows from `start` up to `stop`; nothing else is read."""
        read = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        for stretch in self.stretches:
            begin, end = max(start, stretch.first), min(stop, stretch.first + stretch.entry.shape[0])
            if begin < end:
                target = bytes_of(read)[(begin - start) * row_bytes : (end - start) * row_bytes]
                _fill(target, stretch, self.disk, skipped=(begin - stretch.first) * row_bytes)
        return read

    def chunks(self) -> Iterator[bytes]:
        """All its bytes in the order of rows, a few megabytes at a time."""
        for stretch in self.stretches:
            yield from _chunks(stretch, 0, stretch.entry.size_bytes, self.disk)


def entries(path: Path, *, disk: Files = DISK) -> dict[str, Entry]:
    """What a file holds, by its header alone; a `ValueError` in one line for what is no such file."""
    size = disk.size(path)
    length = int.from_bytes(disk.read(path, start=0, length=8), "little")
    if not 2 <= length <= min(size - 8, _HEADER_BYTES):
        raise ValueError("not safetensors: its header has no length that can be")
    try:
        header = json.loads(disk.read(path, start=8, length=length))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"not safetensors: {str(problem).splitlines()[0]}") from problem
    if not isinstance(header, dict):
        raise ValueError(f"not safetensors: its header is a {type(header).__name__}")
    return {
        name: _entry(name, held, begin=8 + length, size=size) for name, held in header.items() if name != "__metadata__"
    }


def laid_out(tensors: Mapping[str, tuple[torch.dtype, Iterable[int]]], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file that holds tensors of these types and shapes, whose bytes follow in this order.

    The widest types come first, as the library wants it: then every number lies at a multiple of its width. Raises
    `ValueError` where they do not.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start, narrowest = 0, math.inf
    for name, (dtype, given) in tensors.items():
        shape = list(given)
        if dtype.itemsize > narrowest:
            raise ValueError(f"{name}: wider than what lies before it")
        narrowest = dtype.itemsize
        stop = start + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _entry(name: str, held: Any, *, begin: int, size: int) -> Entry:
    match held:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(start), int(stop)]} if kind in _TYPES:
            if all(isinstance(length, int) and length >= 0 for length in shape):
                entry = Entry(_TYPES[kind], tuple(shape), begin + start)
                if start >= 0 and stop - start == entry.size_bytes and begin + stop <= size:
                    return entry
    raise ValueError(f"not safetensors: its header says of {name} what cannot be")


def file_of(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """A file that holds these tensors, stretch after stretch: small ones put together, large ones where they lie in memory.

    They must not change until it is written. Raises `ValueError` or `TypeError` for a tensor that is not in one stretch on the
    host, or shares memory with another, which would be two when it is read.
    """
    in_order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    for name in in_order:
        if tensors[name].layout != torch.strided or not tensors[name].is_contiguous():
            raise ValueError(f"{name} does not lie in one stretch: use tensor.contiguous()")
    _refuse_shared(tensors)
    begin = laid_out({name: (tensors[name].dtype, tensors[name].shape) for name in in_order}, {})
    return list(_stretches([memoryview(begin), *(bytes_of(tensors[name]) for name in in_order)]))


def _refuse_shared(tensors: Mapping[str, Tensor]) -> None:
    end, before = 0, ""
    for name in sorted((name for name in tensors if tensors[name].numel()), key=lambda name: tensors[name].data_ptr()):
        if tensors[name].data_ptr() < end:
            raise ValueError(f"{before} and {name} share memory: use tensor.clone()")
        end, before = tensors[name].data_ptr() + tensors[name].nbytes, name


def _stretches(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    gathered = bytearray()
    for piece in pieces:
        if len(piece) < _SMALL_BYTES:
            gathered += piece
        if gathered and (len(piece) >= _SMALL_BYTES or len(gathered) >= CHUNK_BYTES):
            yield memoryview(gathered)
            gathered = bytearray()
        if len(piece) >= _SMALL_BYTES:
            for start in range(0, len(piece), CHUNK_BYTES):
                yield piece[start : start + CHUNK_BYTES]
    if gathered:
        yield memoryview(gathered)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor that lies in one stretch on the host."""
    numbers: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits (NaN equals NaN, 0.0 is not -0.0); compared on the host.

    >>> equal_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan])), equal_bits(torch.zeros(1), -torch.zeros(1))
    (True, False)
    """
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = [each.detach().cpu().reshape(-1) for each in (one, other)]
    if one.is_complex():
        flat = [torch.view_as_real(each).reshape(-1) for each in flat]
    return torch.equal(*(each.view(_INTEGERS[each.element_size()]) for each in flat))


def _fill(target: memoryview, stretch: Stretch, disk: Files, *, skipped: int = 0) -> None:
    """Read into memory what a stretch holds after its first bytes, as much as fits."""
    length, place = min(len(target), stretch.entry.size_bytes - skipped), 0
    for data in _chunks(stretch, skipped, skipped + length, disk):
        target[place : place + len(data)] = data
        place += len(data)


def _chunks(stretch: Stretch, begin: int, end: int, disk: Files) -> Iterator[bytes]:
    for start in range(begin, end, CHUNK_BYTES):
        length = min(CHUNK_BYTES, end - start)
        try:
            data = disk.read(stretch.path, start=stretch.entry.start + start, length=length)
        except OSError as problem:
            raise CheckpointError(f"cannot read {stretch.path}: {problem.strerror or problem}") from problem
        if len(data) != length:
            raise CheckpointError(f"cannot read {stretch.path}: it has become shorter")
        yield data
