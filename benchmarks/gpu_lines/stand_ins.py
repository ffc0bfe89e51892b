"""Stand-ins for the packages without which no run is built or written: lazy_loader, orjson,
safetensors and tomlkit.

They are used only where the package is absent, and the result says so. They hold what a run of a
script needs, and no more: https://huggingface.co/docs/safetensors#format,
https://toml.io/en/v1.0.0.
"""

from __future__ import annotations

import ast
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@dataclass
class StandIns:
    """Which packages are absent."""

    absent: list[str] = field(default_factory=list)


STAND_INS = StandIns()


def fill_in() -> None:
    """Put a stand-in where a package is absent."""
    if find_spec("lazy_loader") is None:
        loader = ModuleType("lazy_loader")
        vars(loader).update(attach=attach, attach_stub=attach_stub)
        sys.modules["lazy_loader"] = loader
        STAND_INS.absent.append("lazy_loader")
    if find_spec("orjson") is None:
        parser = ModuleType("orjson")
        vars(parser).update(loads=json.loads)
        sys.modules["orjson"] = parser
        STAND_INS.absent.append("orjson")
    if find_spec("safetensors") is None:
        package, tensors = ModuleType("safetensors"), ModuleType("safetensors.torch")
        vars(package).update(SafetensorError=ValueError, torch=tensors, __path__=[])
        vars(tensors).update(load=load, save=save, load_file=load_file, save_file=save_file)
        sys.modules |= {"safetensors": package, "safetensors.torch": tensors}
        STAND_INS.absent.append("safetensors")
    if find_spec("tomlkit") is None:
        module = ModuleType("tomlkit")
        vars(module).update(document=Document, comment=comment, dumps=dumps)
        sys.modules["tomlkit"] = module
        STAND_INS.absent.append("tomlkit")


# --- lazy_loader ----------------------------------------------------------------------------------


Lazy = tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]


def attach_stub(package: str, file: str) -> Lazy:
    """`__getattr__`, `__dir__` and `__all__` of a package, by the relative imports of its stub."""
    homes = {
        alias.name: line.module
        for line in ast.parse(Path(file).with_suffix(".pyi").read_text()).body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
    return lazy(package, homes)


def attach(package: str, submod_attrs: dict[str, list[str]]) -> Lazy:
    """The same, by the names of each module."""
    homes = {name: module for module, names in submod_attrs.items() for name in names}
    return lazy(package, homes)


def lazy(package: str, homes: Mapping[str, str | None]) -> Lazy:
    """The same, by the module of each name; None for a name that is a module."""

    def resolve(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"{package} has no attribute {name}")
        if homes[name] is None:
            return import_module(f"{package}.{name}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return resolve, lambda: sorted(homes), sorted(homes)


# --- safetensors ----------------------------------------------------------------------------------

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def save(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a file."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    body = b""
    for name, tensor in tensors.items():
        numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(body), len(body) + len(numbers)]
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        body += numbers
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def load(data: bytes) -> dict[str, Tensor]:
    """The tensors of a file's bytes."""
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        numbers = torch.frombuffer(
            bytearray(data[size + first : size + last] or b"\0"), dtype=torch.uint8
        )
        count = math.prod(entry["shape"])
        dtype = DTYPES[entry["dtype"]]
        tensors[name] = (
            numbers.view(dtype).view(entry["shape"])
            if count
            else torch.empty(entry["shape"], dtype=dtype)
        )
    return tensors


def save_file(
    tensors: dict[str, Tensor], path: str | Path, metadata: dict[str, str] | None = None
) -> None:
    Path(path).write_bytes(save(tensors, metadata))


def load_file(path: str | Path) -> dict[str, Tensor]:
    return load(Path(path).read_bytes())


# --- tomlkit --------------------------------------------------------------------------------------


class Document:
    """A TOML document: comments, then tables."""

    def __init__(self) -> None:
        self.comments: list[str] = []
        self.tables: dict[str, Any] = {}

    def add(self, text: str) -> None:
        self.comments.append(text)

    def __setitem__(self, name: str, table: Any) -> None:
        self.tables[name] = table


def comment(text: str) -> str:
    return f"# {text}"


def dumps(document: Document | dict[str, Any]) -> str:
    """The text, with every table in one line."""
    tables, comments = (
        (document.tables, document.comments) if isinstance(document, Document) else (document, [])
    )
    rows = [f"{_text(name)} = {_inline(table)}" for name, table in tables.items()]
    return "\n".join([*comments, *rows, ""])


def _inline(node: Any) -> str:
    if isinstance(node, dict):
        return (
            "{"
            + ", ".join(f"{_text(str(name))} = {_inline(entry)}" for name, entry in node.items())
            + "}"
        )
    if isinstance(node, list | tuple):
        return "[" + ", ".join(map(_inline, node)) + "]"
    if isinstance(node, float):
        return repr(node) if math.isfinite(node) else str(node)
    if isinstance(node, str):
        return _text(node)
    if isinstance(node, bool | int):
        return json.dumps(node)
    raise TypeError(f"{node!r} cannot stand in TOML")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
