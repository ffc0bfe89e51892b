"""The bytes of one row of a tape. Nothing is pickled.

A row has the length of its description as four bytes, the description as JSON, and buffers. Each
buffer starts at a multiple of 16 bytes, in the order of the description. Text and numbers stand in
the description. Everything else is a list there that begins with its kind (see `_describe`).
"""

import json
import math
import re
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.checkpoint.tensor_file import NAMES, bytes_of

_ALIGNMENT = 16
_DEPTH = 64
_CACHED_BYTES = 4096  # longer descriptions hold text or lists of numbers, which rarely repeat
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_ARRAY_DTYPE = re.compile(r"[<>|][biufcSUMm][0-9]{1,8}(\[[0-9a-zA-Z]+\])?", re.ASCII)


class NotRecordableError(TypeError):
    """A row that holds something else than a tape can record."""


def encode(row: Any) -> bytes:
    """Return the bytes of a row. Raises `NotRecordableError` with the name of the first entry that
    a tape cannot record.

    >>> decode(bytearray(encode({"text": "a", "ids": np.arange(3), "size": (2, None)})))
    {'text': 'a', 'ids': array([0, 1, 2]), 'size': (2, None)}
    """
    buffers: list[Any] = []
    try:
        text = json.dumps(_describe(row, buffers, "the row", 0), separators=(",", ":")).encode()
    except ValueError as problem:  # an integer with thousands of digits
        raise NotRecordableError(f"the row: {problem}") from problem
    pieces = [len(text).to_bytes(4, "little"), text, bytes(-(4 + len(text)) % _ALIGNMENT)]
    for buffer in buffers:
        pieces += [buffer, bytes(-len(buffer) % _ALIGNMENT)]
    return b"".join(pieces)


def decode(row: bytearray) -> Any:
    """Return the row of these bytes. Tensors and arrays share the memory of `row`. Raises
    `ValueError` for other bytes.
    """
    length = int.from_bytes(row[:4], "little")
    text = bytes(row[4 : 4 + length])
    try:
        description = _parsed(text) if length <= _CACHED_BYTES else json.loads(text)
        built, end = _build(description, row, 4 + length + -(4 + length) % _ALIGNMENT)
    except (TypeError, LookupError, RecursionError) as problem:
        raise ValueError(f"not a row: {type(problem).__name__}: {problem}") from problem
    if end != len(row):
        raise ValueError("not a row: its length is wrong")
    return built


_parsed = lru_cache(256)(json.loads)


def _describe(part: Any, buffers: list[Any], where: str, depth: int) -> Any:
    kind = type(part)
    if part is None or kind in (bool, int, float, str):
        return part
    if kind is Tensor and part.layout == torch.strided and part.dtype in NAMES:
        tensor = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
        buffers.append(bytes_of(tensor))
        return ["t", NAMES[part.dtype], list(part.shape)]
    if isinstance(part, np.ndarray) and kind is not np.ndarray and np.ma.is_masked(part):
        raise NotRecordableError(f"{where} is a masked array (fill it: array.filled(0))")
    if isinstance(part, np.ndarray) and _ARRAY_DTYPE.fullmatch(part.dtype.str):
        buffers.append(np.asarray(part).tobytes())  # of a subclass too
        return ["a", part.dtype.str, list(part.shape)]
    if isinstance(part, np.generic) and _ARRAY_DTYPE.fullmatch(part.dtype.str):
        buffers.append(part.tobytes())
        return ["n", part.dtype.str]
    if kind is bytes:
        buffers.append(part)
        return ["b", len(part)]
    if kind not in (list, tuple, dict) or depth == _DEPTH:
        what = f" of {part.dtype}" if kind in (Tensor, np.ndarray) else ""
        raise NotRecordableError(f"{where} is a {kind.__qualname__}{what}")
    if kind is dict:
        return _describe_dict(part, buffers, where, depth)
    described = ["l" if kind is list else "u"]
    for index, entry in enumerate(part):
        described.append(_describe(entry, buffers, f"{where}[{index}]", depth + 1))
    return described


def _describe_dict(part: dict[Any, Any], buffers: list[Any], where: str, depth: int) -> list[Any]:
    for key in part:
        if type(key) not in (str, int):
            raise NotRecordableError(
                f"{where} has the key {key!r}, and keys must be text or integers"
            )
    described = ["d", list(part)]
    for key, value in part.items():
        described.append(_describe(value, buffers, f"{where}[{key!r}]", depth + 1))
    return described


def _build(description: Any, row: bytearray, start: int) -> tuple[Any, int]:
    if type(description) is not list:
        return description, start
    kind, *parts = description
    if kind == "b":
        size = parts[0]
        text = bytes(row[start : start + size])
        if len(text) != size:
            raise ValueError("not a row: it is too short")
        return text, start + size + -size % _ALIGNMENT
    if kind in ("t", "a", "n"):
        array, size = _array(kind, row, start, *parts)
        return array, start + size + -size % _ALIGNMENT
    keys = parts.pop(0) if kind == "d" else []
    values = []
    for part in parts:
        if type(part) is list:
            part, start = _build(part, row, start)  # noqa: PLW2901
        values.append(part)
    match kind:
        case "l":
            return values, start
        case "u":
            return tuple(values), start
        case "d":
            return dict(zip(keys, values, strict=True)), start
    raise ValueError(f"not a row: unknown kind {kind!r}")


def _array(kind: str, row: bytearray, start: int, name: str, shape: Any = ()) -> tuple[Any, int]:
    if kind != "t" and not _ARRAY_DTYPE.fullmatch(name):
        raise ValueError(f"not a row: dtype {name!r}")
    dtype: Any = _DTYPES[name] if kind == "t" else np.dtype(name)
    count = math.prod(shape)
    size = count * dtype.itemsize
    if min(shape, default=0) < 0 or start + size > len(row):
        raise ValueError("not a row: it is too short")
    if kind == "t":
        if not size:
            return torch.empty(shape, dtype=dtype), 0
        flat = torch.frombuffer(row, dtype=dtype, count=count, offset=start)
        return (flat if len(shape) == 1 else flat.reshape(shape)), size
    array = np.frombuffer(row, dtype, count, start) if size else np.empty(count, dtype)
    return (array[0] if kind == "n" else array.reshape(shape)), size
