"""The setting of the parallel strategy; `surefoot.distributed.strategy` implements it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from surefoot.config.keywords import known_keywords
from surefoot.errors import ConfigError, refuse_all

Kind = Literal["auto", "none", "ddp", "fsdp"]
KINDS: tuple[Kind, ...] = ("auto", "none", "ddp", "fsdp")


@dataclass(frozen=True, kw_only=True)
class DDPSettings:
    """The arguments of `sf.ddp`."""

    sync: Literal["auto", "last", "every"] = "auto"
    """When ranks sum their gradients: after the last micro-batch of a step, or after every one.
    auto: last for ddp, every for fsdp.
    """
    find_unused_parameters: bool = False
    """Allow parameters without a gradient; otherwise an error names them, at the start or in the
    step.
    """


@dataclass(frozen=True, kw_only=True)
class FSDPSettings(DDPSettings):
    """The arguments of `sf.fsdp`."""

    blocks: tuple[str, ...] = ()
    """Modules whose weights are gathered together, by name or class. Default: the model's repeated
    blocks.
    """
    reshard_after_forward: bool = True
    """Free gathered weights after the forward pass, and gather them again for the backward pass."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state on the CPU, and update them there."""
    gather_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of gathered weights and of the computation. Stored weights are fp32."""
    replicas: int = 1
    """Number of groups of ranks. Each group holds the whole model, sharded over its ranks."""


@dataclass(frozen=True, kw_only=True)
class Strategy(FSDPSettings):
    """The parallel strategy of a run, built by `ddp` or `fsdp`."""

    kind: Kind = "auto"

    def __post_init__(self) -> None:
        refuse_all(
            {
                f"parallel = {self.kind!r}: one of {', '.join(KINDS)}": self.kind not in KINDS,
                f"sync = {self.sync!r}: auto, last or every": (
                    self.sync not in ("auto", "last", "every")
                ),
                f"gather_dtype = {self.gather_dtype!r}: fp32 or bf16": self.gather_dtype
                not in ("fp32", "bf16"),
                f"replicas = {self.replicas}: the number of groups that each hold the model, 1 or more": self.replicas
                < 1,
            }
        )


@known_keywords
def ddp(
    *, sync: Literal["auto", "last", "every"] = "auto", find_unused_parameters: bool = False
) -> Strategy:
    """Return distributed data parallelism: every rank holds the whole model; gradients are summed
    during the backward pass.

    `sync="last"`, the choice of "auto", sums gradients after the last micro-batch of a step;
    "every" sums them after every micro-batch. `find_unused_parameters` allows parameters without a
    gradient; otherwise an error names them, at the start or in the step. Source: Li et al. 2020,
    https://arxiv.org/abs/2006.15704.

    >>> ddp(sync="every").kind
    'ddp'
    """
    return Strategy(kind="ddp", sync=sync, find_unused_parameters=find_unused_parameters)


@known_keywords
def fsdp(
    *,
    sync: Literal["auto", "last", "every"] = "auto",
    find_unused_parameters: bool = False,
    blocks: Sequence[str] = (),
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    gather_dtype: Literal["fp32", "bf16"] = "fp32",
    replicas: int = 1,
) -> Strategy:
    """Return fully sharded data parallelism: each rank holds a shard of every parameter, gradient
    and optimizer state.

    Uses torch's `fully_shard` (Zhao et al. 2023: https://arxiv.org/abs/2304.11277). The weights of
    each of `blocks` (modules by name or class; by default the model's repeated blocks) are gathered
    together. `reshard_after_forward` frees gathered weights after the forward pass. `sync="every"`,
    the choice of "auto", adds each micro-batch to sharded gradients; "last" holds full gradients
    until the last micro-batch. `find_unused_parameters` allows parameters with a gradient on some
    ranks only; all ranks must still call the same blocks in every pass. `cpu_offload` keeps and updates the shards
    on the CPU. `gather_dtype` is the dtype of gathered weights and of the computation. Each of
    `replicas` groups of ranks holds the whole model.

    >>> fsdp(blocks=["Block"]).blocks
    ('Block',)
    """
    return Strategy(
        kind="fsdp",
        sync=sync,
        find_unused_parameters=find_unused_parameters,
        blocks=tuple(blocks),
        reshard_after_forward=reshard_after_forward,
        cpu_offload=cpu_offload,
        gather_dtype=gather_dtype,
        replicas=replicas,
    )


def strategy_of(kind: Kind, *, ddp: DDPSettings, fsdp: FSDPSettings) -> Strategy:
    """Return the strategy that the flags describe. Raises `ConfigError` for an argument of the
    other strategy.

    >>> strategy_of("fsdp", ddp=DDPSettings(), fsdp=FSDPSettings(replicas=2)).replicas
    2
    """
    own, other = (fsdp, ddp) if kind == "fsdp" else (ddp, fsdp)
    name = "ddp" if other is ddp else "fsdp"
    for field in fields(other):
        if (value := getattr(other, field.name)) != field.default:
            raise ConfigError(
                f"{name}.{field.name} = {value!r} is for {name}, and parallel = {kind}\n"
                f"  leave it out, or try: --parallel {name}"
            )
    return Strategy(kind=kind, **vars(own))


def strategy_for(parallel: Kind | Strategy, *, ranks: int) -> Strategy:
    """Return the strategy for a number of ranks; "auto" is DDP for several ranks and "none" for
    one.

    A single rank ignores `replicas`, so that one process can evaluate and resume a run with
    replicas.

    >>> (
    ...     strategy_for("auto", ranks=1).kind,
    ...     strategy_for("auto", ranks=2).kind,
    ...     strategy_for(fsdp(replicas=2), ranks=1).replicas,
    ... )
    ('none', 'ddp', 1)
    """
    strategy = parallel if isinstance(parallel, Strategy) else Strategy(kind=parallel)
    if strategy.kind == "none" and (strategy.find_unused_parameters or strategy.sync == "every"):
        name = "find_unused_parameters" if strategy.find_unused_parameters else "sync"
        raise ConfigError(
            f"ddp.{name} = {vars(strategy)[name]!r} is for several processes, and parallel = none\n"
            "  leave it out, or try: --parallel auto"
        )
    if strategy.kind == "auto":
        strategy = replace(strategy, kind="ddp" if ranks > 1 else "none")
    if strategy.kind == "none" and ranks > 1:
        raise ConfigError(
            f"parallel = none with {ranks} processes: each would train its own model\n"
            "  try: --parallel ddp, --parallel fsdp, or one process"
        )
    if ranks == 1:
        strategy = replace(strategy, replicas=1)
    if ranks % strategy.replicas:
        fewer = max(number for number in range(1, strategy.replicas) if ranks % number == 0)
        raise ConfigError(
            f"replicas = {strategy.replicas} does not divide {ranks} ranks: each replica needs the same number of ranks\n"
            f"  try: --fsdp.replicas {fewer}, or {strategy.replicas * max(1, round(ranks / strategy.replicas))} ranks"
        )
    if strategy.sync == "auto":
        strategy = replace(strategy, sync="every" if strategy.kind == "fsdp" else "last")
    return strategy
