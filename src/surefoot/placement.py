"""Which process of how many this is, as whoever started it says in the environment; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """The numbers of one process, called as in torch.distributed: `local_rank` is its place among those of its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def placed(environment: Mapping[str, str]) -> Placement:
    """The place that torchrun, or a launcher like it, gave this process; alone where none did.

    >>> placed({})
    Placement(rank=0, world_size=1, local_rank=0, local_world_size=1)
    >>> placed({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    Placement(rank=5, world_size=8, local_rank=1, local_world_size=4)
    """
    if "WORLD_SIZE" not in environment:
        return Placement()
    size = _number(environment, "WORLD_SIZE")
    rank = _number(environment, "RANK")
    local_rank = _number(environment, "LOCAL_RANK", default=rank)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", default=size)
    if not (0 <= rank < size and 0 <= local_rank < local_size):
        raise ConfigError(
            f"RANK = {rank} and LOCAL_RANK = {local_rank} are no places among WORLD_SIZE = {size} and"
            f" LOCAL_WORLD_SIZE = {local_size}\n  was this shell started by a launcher? unset WORLD_SIZE, or start it anew"
        )
    return Placement(rank, size, local_rank, local_size)


def _number(environment: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"the environment says WORLD_SIZE, but {name} is {text!r}\n"
            "  start several processes with --nproc N, torchrun, or srun; one without WORLD_SIZE"
        )
    return int(text)
