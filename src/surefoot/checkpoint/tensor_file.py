"""Copies tensors to the host. Reads and writes safetensors files by rows, without a complete copy
in memory: https://huggingface.co/docs/safetensors#format.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from surefoot.checkpoint.filesystem import DISK, Disk
from surefoot.errors import CheckpointError

CHUNK_BYTES = 16 << 20
_SMALL_BYTES = 1 << 20  # smaller tensors are merged into one write
_HEADER_BYTES = 100 << 20  # the limit of the safetensors library
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
# without dtypes that the library can write but not read
NAMES = {dtype: name for name, dtype in _TYPES.items()}
# by width in bytes; faster to compare than bytes
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Stretch(NamedTuple):
    """Rows of a tensor in one file, from byte offset `start`."""

    path: Path
    start: int
    rows: int  # 1 for a scalar


class Readable(Protocol):
    """What a `Stored` tensor is read from."""

    def read(self, path: Path, *, start: int, length: int) -> bytes | memoryview:
        """Return `length` bytes from offset `start`."""


@dataclass(frozen=True)
class InMemory:
    """Rows of a tensor on the host, instead of a file."""

    kept: Tensor

    def read(self, path: Path, *, start: int, length: int) -> memoryview:  # noqa: ARG002
        return bytes_of(self.kept)[start : start + length]


@dataclass(frozen=True)
class Stored:
    """A tensor on disk, in one or several files, that is read on demand."""

    dtype: torch.dtype
    shape: torch.Size
    stretches: tuple[Stretch, ...]
    disk: Readable = DISK

    def followed_by(self, others: Iterable["Stored"]) -> "Stored":
        """Return the tensor with the rows of `others` appended."""
        stretches = list(self.stretches)
        for other in others:
            stretches += other.stretches
        rows = sum(stretch.rows for stretch in stretches)
        shape = torch.Size((rows, *self.shape[1:]))
        return replace(self, shape=shape, stretches=tuple(stretches))

    def cut(self, start: int, stop: int) -> "Stored":
        """Return the tensor of the rows from `start` to `stop` (exclusive), without reading."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        stretches = []
        first_row = 0  # of the stretch
        for stretch in self.stretches:
            begin = max(start - first_row, 0)
            end = min(stop - first_row, stretch.rows)
            if begin < end:
                offset = stretch.start + begin * row_bytes
                stretches.append(Stretch(stretch.path, offset, end - begin))
            first_row += stretch.rows
        shape = torch.Size((stop - start, *self.shape[1:]))
        return replace(self, shape=shape, stretches=tuple(stretches))

    def load(self) -> Tensor:
        row_count = self.shape[0] if self.shape else 1
        return self.rows(0, row_count).view(self.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the rows from `start` to `stop` (exclusive). Other rows are not read."""
        read = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        target = bytes_of(read)
        offset = 0
        first_row = 0  # of the stretch
        for stretch in self.stretches:
            begin = max(start - first_row, 0)
            end = min(stop - first_row, stretch.rows)
            for data in self._chunks(stretch, begin, end):
                target[offset : offset + len(data)] = data
                offset += len(data)
            first_row += stretch.rows
        return read

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield all bytes in row order, at most `CHUNK_BYTES` at a time."""
        for stretch in self.stretches:
            yield from self._chunks(stretch, 0, stretch.rows)

    def _chunks(self, stretch: Stretch, begin: int, end: int) -> Iterator[bytes | memoryview]:
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        stop = stretch.start + end * row_bytes
        for start in range(stretch.start + begin * row_bytes, stop, CHUNK_BYTES):
            length = min(CHUNK_BYTES, stop - start)
            try:
                data = self.disk.read(stretch.path, start=start, length=length)
                if len(data) != length:
                    raise OSError("the file has become shorter")
            except OSError as problem:
                raise CheckpointError(
                    "checkpoint-file-unreadable",
                    problem=f"cannot read {stretch.path}: {problem.strerror or problem}",
                    path=stretch.path,
                ) from problem
            yield data


def rows_in_memory(kept: Tensor, start: int, shape: Sequence[int]) -> Stored:
    """Return a tensor of `shape` of which only the rows from `start` on are there, as `kept`."""
    behind = shape[0] - start - len(kept)
    # the rows of other ranks are never read
    stretches = tuple(Stretch(Path(), 0, rows) for rows in (start, len(kept), behind))
    return Stored(kept.dtype, torch.Size(shape), stretches, InMemory(kept))


def stored_in(path: Path, *, disk: Disk = DISK) -> dict[str, Stored]:
    """Return the tensors of a file without reading their values; raise a one-line `ValueError` for
    an invalid file.
    """
    size = disk.size(path)
    length = int.from_bytes(disk.read(path, start=0, length=8), "little")
    if not 2 <= length <= min(size - 8, _HEADER_BYTES):
        raise ValueError("not a safetensors file: its header length is invalid")
    try:
        header = json.loads(disk.read(path, start=8, length=length))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"not a safetensors file: {str(problem).splitlines()[0]}") from problem
    if not isinstance(header, dict):
        raise ValueError(f"not a safetensors file: its header is a {type(header).__name__}")
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        tensors[name] = _stored(path, disk, name, entry, begin=8 + length, size=size)
    return tensors


def file_header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the header of a file with these tensors in order; raise `ValueError` unless wider
    dtypes come first (alignment).
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    narrowest: float = math.inf
    for name, (dtype, shape) in tensors.items():
        if dtype.itemsize > narrowest:
            raise ValueError(f"{name}: its dtype is wider than the dtype before it")
        narrowest = dtype.itemsize
        stop = start + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _stored(path: Path, disk: Disk, name: str, entry: Any, *, begin: int, size: int) -> Stored:
    match entry:
        case {
            "dtype": str(kind),
            "shape": list(shape),
            "data_offsets": [int(start), int(stop)],
        } if kind in _TYPES:
            if all(isinstance(length, int) and length >= 0 for length in shape):
                size_bytes = math.prod(shape) * _TYPES[kind].itemsize
                if start >= 0 and stop - start == size_bytes and begin + stop <= size:
                    stretch = Stretch(path, begin + start, shape[0] if shape else 1)
                    return Stored(_TYPES[kind], torch.Size(shape), (stretch,), disk)
    raise ValueError(f"not a safetensors file: its header entry for {name} is invalid")


def file_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> list[memoryview]:
    """Return a file with these tensors as memory segments, without copies of large tensors.

    Raises `ValueError` or `TypeError` for a tensor that is not contiguous on the host, or shares
    memory with another tensor.
    """
    in_order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    for name in in_order:
        if tensors[name].layout != torch.strided or not tensors[name].is_contiguous():
            raise ValueError(f"{name} is not contiguous: use tensor.contiguous()")
    not_empty = [name for name in tensors if tensors[name].numel()]
    in_memory = sorted(not_empty, key=lambda name: tensors[name].data_ptr())
    for before, name in pairwise(in_memory):
        if tensors[name].data_ptr() < tensors[before].data_ptr() + tensors[before].nbytes:
            raise ValueError(f"{before} and {name} share memory: use tensor.clone()")
    layout = {name: (tensors[name].dtype, tensors[name].shape) for name in in_order}
    segments = [memoryview(file_header(layout, metadata or {}))]
    segments += [bytes_of(tensors[name]) for name in in_order]
    return list(_stretches(segments))


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


def not_writable(what: str, why: str, *, remedy: str | None = None) -> CheckpointError:
    """Return the error of something that the format of checkpoints cannot hold."""
    return CheckpointError(
        "not-writable-into-checkpoint",
        problem=f"cannot save {what}: {why}",
        remedy=remedy,
        name=what,
    )


def host_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the host. Raises `CheckpointError` for a tensor that only its
    class can rebuild.
    """
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        what = f"a {type(tensor).__name__}"
        raise not_writable(what, "only its class can reassemble its parts")
    memory = _MEMORY.get()
    if memory is None or tensor.layout != torch.strided or tensor.is_quantized:
        return tensor.detach().to("cpu", copy=True).contiguous()
    return memory.take(tensor.dtype, tensor.shape).copy_(tensor.detach())


class HostMemory:
    """Memory for the copies of a state, which every save uses again: new memory takes four times as
    long to fill.
    """

    def __init__(self) -> None:
        self.lent: list[Tensor] = []
        self.free: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = defaultdict(list)

    @contextmanager
    def reused(self) -> Iterator[None]:
        """`host_copy` copies into this memory. The copies of the block before must not be needed
        any more.
        """
        for tensor in self.lent:
            self.free[tensor.dtype, tensor.shape].append(tensor)
        self.lent = []
        token = _MEMORY.set(self)
        try:
            yield
        finally:
            _MEMORY.reset(token)
            self.free.clear()  # of tensors that the state lost

    def take(self, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        free = self.free[dtype, shape]
        tensor = free.pop() if free else torch.empty(shape, dtype=dtype)
        self.lent.append(tensor)
        return tensor


_MEMORY: ContextVar[HostMemory | None] = ContextVar("memory", default=None)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, without a copy."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():  # its stride may be 0, if it is made from an array of NumPy
        return memoryview(b"")
    numbers: Any = flat.view(torch.uint8).numpy()
    return memoryview(numbers)


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if dtypes, shapes and bits are equal, on any devices. NaN equals NaN; 0.0 differs
    from -0.0.

    >>> (
    ...     equal_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan])),
    ...     equal_bits(torch.zeros(1), -torch.zeros(1)),
    ... )
    (True, False)
    """
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.device != b.device:
        a = a.cpu()
        b = b.cpu()
    return torch.equal(_as_integers(a), _as_integers(b))


def _as_integers(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(_INTEGERS.get(flat.element_size(), torch.uint8))
