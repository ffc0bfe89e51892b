"""Weight files with the names of Hugging Face, for other libraries. At most one tensor is in memory
during a write.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from surefoot.checkpoint.format import reason_of
from surefoot.checkpoint.tensor_file import CHUNK_BYTES, Stored, bytes_of, file_header
from surefoot.config.paths import write_whole
from surefoot.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True)
class Written:
    """A tensor to write, transposed if `turned`."""

    name: str
    stored: Stored
    turned: bool = False

    @property
    def shape(self) -> list[int]:
        sizes = list(self.stored.shape)
        if self.turned:
            sizes.reverse()
        return sizes

    @property
    def size_bytes(self) -> int:
        return self.stored.shape.numel() * self.stored.dtype.itemsize

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes to write. Only a transposed tensor is loaded completely."""
        if not self.turned:
            yield from self.stored.chunks()
        else:
            tensor = self.stored.load()
            columns = max(1, CHUNK_BYTES // max(1, len(tensor) * tensor.element_size()))
            for start in range(0, tensor.shape[1], columns):
                yield bytes_of(tensor[:, start : start + columns].t().contiguous())


def write_weights(
    tensors: Sequence[Written],
    directory: Path,
    *,
    max_bytes: int,
    aliases: Mapping[str, str],
    beside: Iterable[tuple[str, bytes]] = (),
) -> list[str]:
    """Write tensors as files of at most `max_bytes`, and the additional files `beside`; return the
    file names.

    A tensor above `max_bytes` gets its own file. `aliases` maps further names of tied tensors,
    which `safetensors.torch.load_model` reads from the metadata. Old weights are removed, index
    first, and the new index is written last, so an interrupted write never looks complete.
    """
    # in order, each file as full as possible
    groups: list[list[Written]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.size_bytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.size_bytes
    count = len(groups)
    files = [WEIGHTS]
    if count > 1:
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in [INDEX, *os.listdir(directory)]:
            if _OURS.fullmatch(name):
                (directory / name).unlink(missing_ok=True)
        for file, group in zip(files, groups, strict=True):
            _write(group, directory / file, aliases)
        if count > 1:
            where = {}
            for file, group in zip(files, groups, strict=True):
                for tensor in group:
                    where[tensor.name] = file
            metadata: dict[str, Any] = {"total_size": sum(tensor.size_bytes for tensor in tensors)}
            if aliases:
                metadata["tied"] = dict(aliases)
            index = {"metadata": metadata, "weight_map": where}
            write_whole(directory / INDEX, (json.dumps(index, indent=2) + "\n").encode())
            files.append(INDEX)
        for name, data in beside:
            write_whole(directory / name, data)
            files.append(name)
    except OSError as problem:
        raise not_written(directory, problem) from problem
    return files


def not_written(directory: Path, problem: OSError) -> CheckpointError:
    """Return the error of weights that cannot be written."""
    return CheckpointError(
        "weights-not-written",
        problem=f"cannot write to {directory}: {problem.strerror or problem}",
        path=directory,
    )


def read_weights(path: Path) -> dict[str, Tensor]:
    """Load all tensors of a file or of a directory of files; raise `CheckpointError` if a file is
    missing or invalid.
    """
    directory = path.parent
    files = [path.name]
    if path.is_dir():
        directory = path
        files = [WEIGHTS]
    tensors: dict[str, Tensor] = {}
    try:
        if path.is_dir() and (directory / INDEX).is_file():
            index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
            files = sorted({str(file) for file in index["weight_map"].values()})
        for file in files:
            if Path(file).name != file:
                raise ValueError(f"{INDEX} names {file!r}, which is not in the same directory")
        for file in files:
            tensors |= load_file(directory / file)
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        SafetensorError,
    ) as problem:
        raise CheckpointError(
            "weights-unreadable",
            problem=f"cannot read weights from {path}: {reason_of(problem)}",
            path=path,
        ) from problem
    return tensors


def _write(group: Sequence[Written], path: Path, aliases: Mapping[str, str]) -> None:
    in_order = sorted(group, key=lambda tensor: -tensor.stored.dtype.itemsize)
    layout = {tensor.name: (tensor.stored.dtype, tensor.shape) for tensor in in_order}
    metadata = {"format": "pt"}
    for alias, name in aliases.items():
        if name in layout:
            metadata[alias] = name
    header = file_header(layout, metadata)
    contents = chain.from_iterable(tensor.chunks() for tensor in in_order)
    write_whole(path, chain([header], contents))
