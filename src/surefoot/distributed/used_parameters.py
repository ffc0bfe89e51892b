"""The refusal of a parameter that a rank, or a pass, gives no gradient while other ranks do."""

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest

from surefoot.distributed.world import World
from surefoot.errors import ConfigError, Setting

_SHOWN = 3
# of torch's error about a backward pass after which DDP still waits for gradients
_WITHOUT = re.compile(r"did not receive grad[^:]*: ([\d ]+)")


def without_gradient(names: Sequence[str], step: int | None = None) -> ConfigError:
    """Return the error about parameters that get no gradient on some rank. `step` is None before
    the first step.
    """
    count = len(names)
    listed = ", ".join(names[:_SHOWN])
    if count > _SHOWN:
        listed += ", ..."
    they_get = "1 parameter gets"
    them = "it"
    if count != 1:
        they_get = f"{count} parameters get"
        them = "them"
    of_step = "" if step is None else f"in step {step}, "
    return ConfigError(
        "unused-parameters",
        problem=f"{of_step}{they_get} no gradient, and other processes would wait for {them}:"
        f" {listed}",
        reason="processes add the gradients of the same parameters in every step",
        remedy=[
            "freeze unused parameters: requires_grad_(False), or sf.optim.frozen(...) in the"
            " optimizer's lr_multipliers",
            (
                Setting("ddp.find_unused_parameters", True),
                "of sf.ddp or sf.fsdp, if that changes from batch to batch",
            ),
        ],
        names=list(names),
        step=step,
    )


def mark_of(used: Iterable[int], order: Iterable[int] = ()) -> int:
    """Return a number of 32 bits that stands for the parameters with a gradient, in any order, and
    for an order of calls.

    >>> mark_of([3, 1]) == mark_of([1, 3]), mark_of([1]) == mark_of([1, 3])
    (True, False)
    """
    return hash((frozenset(used), tuple(order))) & 0xFFFFFFFF  # of integers, equal in each process


def refuse_unlike_use(world: World, names: Sequence[str], used: Iterable[int], step: int) -> None:
    """Raise `ConfigError` on all ranks if a parameter has a gradient on some ranks only. `names`
    are those of all parameters, and `used` the indices of those with a gradient. Collective.
    """
    by_rank = [set(indices) for indices in world.gathered(sorted(used))]
    everywhere = set.intersection(*by_rank)
    somewhere = set.union(*by_rank)
    unlike = sorted(somewhere - everywhere)
    if unlike:
        raise without_gradient([names[index] for index in unlike], step)


def refuse_unlike_calls(orders: Sequence[Sequence[str] | None], step: int | None = None) -> None:
    """Raise `ConfigError` if ranks called the blocks that FSDP gathers in another order. `orders`
    has the names of the called blocks by rank, or None for a rank whose pass failed.
    """
    known = [(rank, order) for rank, order in enumerate(orders) if order is not None]
    for rank, order in known[1:]:
        base, reference = known[0]
        for first, other in zip_longest(reference, order, fillvalue="nothing more"):
            if first != other:
                of_step = "" if step is None else f"in step {step}, "
                raise ConfigError(
                    "unlike-blocks",
                    problem=f"{of_step}rank {rank} calls {other}, but rank {base} calls {first}",
                    reason="FSDP gathers each block from all ranks at once, so no rank may skip one"
                    " that others call",
                    remedy=[
                        ("blocks that are always called:", Setting("fsdp.blocks")),
                        (Setting("parallel", "ddp"), Setting("ddp.find_unused_parameters", True)),
                    ],
                    step=step,
                    rank=rank,
                    calls=[first, other],
                )


def indices_in(problem: RuntimeError) -> Collection[int]:
    """Return the indices of the parameters that DDP names in its error.

    >>> indices_in(RuntimeError("Parameter indices which did not receive grad for rank 0: 2 3\\n"))
    [2, 3]
    """
    named = _WITHOUT.search(str(problem))
    return [] if named is None else [int(index) for index in named[1].split()]
