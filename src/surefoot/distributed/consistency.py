"""Checks that all ranks have equal settings, shapes and weights, since mismatched ranks would wait
for each other forever.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surefoot.config.durations import Interval
from surefoot.distributed.shards import local_part, plain_tensors, saved_state
from surefoot.distributed.world import World
from surefoot.errors import ConfigError, DivergedError, Remedy

_LONG = 100  # items; longer sequences are compared by length
_WIDE = 60  # characters of a value in a message
_SCALARS = (bool, int, float, str)
# integer dtypes by bytes per element
_AS_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same_on_all_ranks(world: World, settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the `repr` of a setting differs from rank 0's. The message names
    settings and ranks. Collective.
    """
    texts = {name: repr(value) for name, value in settings.items()}
    digest = sha256(json.dumps(texts).encode()).hexdigest()
    if len(set(world.gathered(digest))) == 1:
        return
    first, *others = world.gathered(texts)
    different: dict[str, None] = {}
    problems = []
    for rank, other in enumerate(others, 1):
        for name in dict.fromkeys([*first, *other]):
            if first.get(name) != other.get(name):
                different[name] = None
                main_text = _shortened(first, name)
                text = _shortened(other, name)
                problems.append(f"{name}: rank 0 has {main_text}, rank {rank} has {text}")
    if problems:
        lines = problems
        if len(problems) > 3:
            lines = [*problems[:2], f"and {len(problems) - 2} more"]
        remedies: list[Remedy] = ["start all ranks with the same command and files"]
        if "data.sha256" in different:
            remedies.append(
                "seed the random numbers that make the data, as in torch.manual_seed(0)"
            )
        raise ConfigError(
            "ranks-of-different-settings",
            problem="the ranks were started with different configurations",
            reason="\n".join(lines),
            remedy=remedies,
            settings=[*different],
        )


def comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten settings to plain values by dotted name. Any other value is replaced by the name of
    its class or function.

    >>> comparable(
    ...     {"seed": 3, "model": nn.Linear(2, 1), "settings": {"rate": 0.1, "names": ("a", "b")}}
    ... )
    {'seed': 3, 'model': 'Linear', 'settings.rate': 0.1, 'settings.names': ['a', 'b']}
    """
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        plain = _plain(value)
        if isinstance(plain, dict):
            for part, part_value in comparable(plain).items():
                flat[f"{name}.{part}"] = part_value
        else:
            flat[name] = plain
    return flat


def equal_from_main(models: Mapping[str, nn.Module], world: World) -> None:
    """Broadcast rank 0's weights and buffers to all ranks. Raises `ConfigError` if shapes or dtypes
    differ. Collective.
    """
    if world.size > 1:
        check_same_on_all_ranks(world, shapes(models))
        for model in models.values():
            for tensor in [*model.parameters(), *model.buffers()]:
                # modules built outside the run's seed differ
                dist.broadcast(tensor.detach(), src=0)


def shapes(models: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the dtype and shape of every parameter and buffer by name.

    >>> shapes({"model": nn.Linear(2, 1)})
    {'model.weight': 'float32 (1, 2)', 'model.bias': 'float32 (1,)'}
    """
    texts = {}
    for model_name, model in models.items():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            dtype = str(tensor.dtype).removeprefix("torch.")
            texts[f"{model_name}.{name}"] = f"{dtype} {tuple(tensor.shape)}"
    return texts


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, _SCALARS):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): entry for name, entry in value.items()}
    if isinstance(value, list | tuple) and all(isinstance(entry, _SCALARS) for entry in value):
        return list(value) if len(value) <= _LONG else f"{len(value)} items"
    if isinstance(value, type | FunctionType):
        return value.__qualname__
    if is_dataclass(value) and type(value).__module__.startswith("surefoot."):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return type(value).__qualname__


def _shortened(settings: Mapping[str, str], name: str) -> str:
    text = settings.get(name, "none")
    return text if len(text) <= _WIDE else f"{text[:_WIDE]}..."


def compare_when_due(
    models: Mapping[str, nn.Module],
    world: World,
    every: Interval,
    *,
    compared: int | None,
    done: int,
    last: int,
) -> int | None:
    """Compare the ranks' weights if a comparison is due since step `compared`, or at the first or
    last record. Collective.

    Returns the step of the last comparison.
    """
    if compared is not None and done != last:
        is_due = any(every.due(step) for step in range(compared + 1, done + 1))
        if not is_due:
            return compared
    refuse_different(models, world, step=done)
    return done


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sum of each tensor's bits as integers, by name. A change of a single element
    changes the sum. Waits for the device once.

    >>> checksums({"a": torch.tensor([1.0, 0.0])}) == checksums({"a": torch.tensor([1.0, 1e-30])})
    False
    """
    if not tensors:
        return {}
    sums = torch.stack([_sum_of_bits(tensor.detach()) for tensor in tensors.values()])
    return dict(zip(tensors, sums.tolist(), strict=True))


def refuse_different(models: Mapping[str, nn.Module], world: World, *, step: int) -> None:
    """Raise `DivergedError` with the first different tensor if ranks with the same rows differ in
    weights or buffers. Collective.
    """
    checksums_of_parts = _checksums_by_part(models)
    totals = {part: sum(sums.values()) for part, sums in checksums_of_parts.items()}
    by_rank = world.gathered(totals)
    pairs = _rank_pairs(by_rank)
    if all(by_rank[first][part] == by_rank[rank][part] for part, first, rank in pairs):
        return
    by_rank = world.gathered(checksums_of_parts)
    for part, first, rank in _rank_pairs(by_rank):
        for name, value in by_rank[first][part].items():
            if by_rank[rank][part][name] != value:
                raise DivergedError(
                    "weights-differ-among-ranks",
                    problem=f"after step {step}, the weights of rank {rank} differ from rank"
                    f" {first}'s: {name} is the first different tensor",
                    reason="likely cause: code that changes weights or buffers on one rank only, or"
                    " otherwise on each (if run.rank == 0: ...)\nif the same command differs again,"
                    " it is the code; if not, suspect the memory or the processor there",
                    remedy="do not trust checkpoints since the last comparison: resume from an"
                    " earlier one",
                    after_step=step,
                    rank=rank,
                    other_rank=first,
                    tensor=name,
                )


def _checksums_by_part(models: Mapping[str, nn.Module]) -> dict[str, dict[str, int]]:
    by_part: dict[str, dict[str, Tensor]] = {}
    for model_name, model in models.items():
        prefix = "" if len(models) == 1 else f"{model_name}: "
        for key, value in saved_state(model).items():
            if not isinstance(value, Tensor):
                continue
            for name, tensor in plain_tensors(key, value).items():
                local, rows = local_part(tensor)
                part = "" if rows is None else f"part {rows.group.rank()}"
                by_part.setdefault(part, {})[f"{prefix}{name}"] = local
    return {part: checksums(tensors) for part, tensors in by_part.items()}


def _rank_pairs(by_rank: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, int]]:
    """Yield each part that several ranks have, with the first of them and another one."""
    first_ranks: dict[str, int] = {}
    for rank, parts in enumerate(by_rank):
        for part in parts:
            first = first_ranks.setdefault(part, rank)
            if first != rank:
                yield part, first, rank


def _sum_of_bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        return tensor.sum(dtype=torch.int64)
    return tensor.contiguous().view(_AS_WHOLE[tensor.element_size()]).sum(dtype=torch.int64)
