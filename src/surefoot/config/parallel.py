"""The setting of the parallel strategy; `surefoot.distributed.strategy` implements it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from surefoot.config.keywords import known_keywords
from surefoot.config.setting import checked, number
from surefoot.config.tree import check_type
from surefoot.errors import ConfigError, Setting

Kind = Literal["auto", "none", "ddp", "fsdp"]
Sync = Literal["auto", "last", "every"]
GatherDtype = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class DDPSettings:
    """The arguments of `sf.ddp`."""

    sync: Sync = "auto"
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
    gather_dtype: GatherDtype = "fp32"
    """Dtype of gathered weights and of the computation. Stored weights are fp32."""
    replicas: int = 1
    """Number of groups of ranks. Each group holds the whole model, sharded over its ranks."""


@dataclass(frozen=True, kw_only=True)
class Strategy(FSDPSettings):
    """The parallel strategy of a run, built by `ddp` or `fsdp`."""

    kind: Kind = "auto"

    def __post_init__(self) -> None:
        checked(
            lambda: check_type("parallel", self.kind, Kind),
            lambda: check_type("sync", self.sync, Sync),
            lambda: check_type("gather_dtype", self.gather_dtype, GatherDtype),
            lambda: number(min_value=1)(self.replicas, setting="replicas"),
        )


@known_keywords
def ddp(*, sync: Sync = "auto", find_unused_parameters: bool = False) -> Strategy:
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
    sync: Sync = "auto",
    find_unused_parameters: bool = False,
    blocks: Sequence[str] = (),
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    gather_dtype: GatherDtype = "fp32",
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
    if kind == "fsdp":
        _refuse_arguments("ddp", ddp, kind=kind)
        return Strategy(kind=kind, **vars(fsdp))
    _refuse_arguments("fsdp", fsdp, kind=kind)
    return Strategy(kind=kind, **vars(ddp))


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
        raise _of_other_strategy(
            f"ddp.{name}", getattr(strategy, name), kind="none", fitting="auto"
        )
    if strategy.kind == "auto":
        strategy = replace(strategy, kind="ddp" if ranks > 1 else "none")
    if strategy.kind == "none" and ranks > 1:
        raise ConfigError(
            "parallel-none-on-ranks",
            problem=f"parallel = none with {ranks} processes: each would train its own model",
            remedy=[Setting("parallel", "ddp"), Setting("parallel", "fsdp"), ("one process",)],
            setting="parallel",
            value="none",
            ranks=ranks,
        )
    if ranks == 1:
        strategy = replace(strategy, replicas=1)
    if ranks % strategy.replicas:
        fewer = max(number for number in range(1, strategy.replicas) if ranks % number == 0)
        fitting_ranks = strategy.replicas * max(1, round(ranks / strategy.replicas))
        raise ConfigError(
            "replicas-not-divisor",
            problem=f"replicas = {strategy.replicas} does not divide {ranks} ranks",
            remedy=[Setting("fsdp.replicas", fewer), (f"{fitting_ranks} ranks",)],
            setting="replicas",
            value=strategy.replicas,
            ranks=ranks,
        )
    if strategy.sync == "auto":
        strategy = replace(strategy, sync="every" if strategy.kind == "fsdp" else "last")
    return strategy


def _refuse_arguments(name: Literal["ddp", "fsdp"], arguments: DDPSettings, *, kind: Kind) -> None:
    """Raise `ConfigError` for an argument of the strategy `name` in a run of another strategy."""
    for field in fields(arguments):
        value = getattr(arguments, field.name)
        if value != field.default:
            raise _of_other_strategy(f"{name}.{field.name}", value, kind=kind, fitting=name)


def _of_other_strategy(setting: str, value: object, *, kind: Kind, fitting: str) -> ConfigError:
    return ConfigError(
        "setting-of-other-strategy",
        problem=f"{setting} = {value!r} has no effect with parallel = {kind}",
        remedy=[("leave out", Setting(setting)), Setting("parallel", fitting)],
        setting=setting,
        value=value,
        parallel=kind,
    )
