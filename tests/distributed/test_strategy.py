"""How several processes work together, as a setting: what it means, and what is refused. (1 s)"""

from __future__ import annotations

import typing
from typing import Any

import pytest

import surefoot as sf
from in_one import in_one
from refused import refused
from surefoot.config import parallel
from surefoot.config.parallel import DDPSettings, FSDPSettings, Strategy, strategy_for, strategy_of
from surefoot.errors import Setting


@pytest.mark.parametrize(
    ("kind", "ranks", "meant"),
    [
        ("auto", 1, ("none", "last")),
        ("auto", 2, ("ddp", "last")),
        ("ddp", 1, ("ddp", "last")),
        ("fsdp", 1, ("fsdp", "every")),
        ("none", 1, ("none", "last")),
    ],
)
def test_auto_is_ddp_among_several_and_fsdp_alone_adds_up_with_every_micro_batch(
    kind: Any, ranks: int, meant: tuple[str, str]
) -> None:
    found = strategy_for(kind, ranks=ranks)
    assert (found.kind, found.sync) == meant


OTHER: dict[str, Any] = {
    "sync": "every",
    "find_unused_parameters": True,
    "blocks": ("head",),
    "reshard_after_forward": False,
    "cpu_offload": True,
    "gather_dtype": "bf16",
    "replicas": 2,
}


def test_every_setting_is_tried_here() -> None:
    assert OTHER.keys() == vars(FSDPSettings()).keys()


@in_one
@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("kind", typing.get_args(parallel.Kind))
def test_a_setting_that_a_strategy_has_no_use_for_is_refused(kind: Any, name: str) -> None:
    of_both = name in vars(DDPSettings())
    own: Any = {"fsdp": FSDPSettings(**{name: OTHER[name]}), "ddp": DDPSettings()}
    if of_both and kind != "fsdp":
        own = {"fsdp": FSDPSettings(), "ddp": DDPSettings(**{name: OTHER[name]})}
    if kind == "fsdp" or (of_both and kind != "none"):
        for ranks in (
            (2, 4) if name == "replicas" else (1, 2)
        ):  # the same settings, whatever number of processes is there
            assert vars(strategy_for(strategy_of(kind, **own), ranks=ranks))[name] == OTHER[name]
        return
    with refused("setting-of-other-strategy", parallel=kind) as error:
        strategy_for(strategy_of(kind, **own), ranks=1)
    assert error.value.fields["setting"].partition(".")[2] == name
    assert (Setting("parallel", "auto") in error.value.remedies) == of_both


def test_an_argument_of_ddp_is_refused_under_fsdp() -> None:
    with refused("setting-of-other-strategy", setting="ddp.find_unused_parameters", value=True):
        strategy_of("fsdp", ddp=DDPSettings(find_unused_parameters=True), fsdp=FSDPSettings())


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(sf.ConfigError) as caught:
        Strategy(kind="dpd", sync="never", gather_dtype="fp8", replicas=0)  # type: ignore[arg-type]
    named = [problem.fields["setting"] for problem in caught.value.problems]
    assert named == ["parallel", "sync", "gather_dtype", "replicas"]


def test_replicas_that_do_not_divide_the_ranks_are_refused_with_numbers_that_do() -> None:
    assert strategy_for(sf.fsdp(replicas=3), ranks=6).replicas == 3
    with refused("replicas-not-divisor", value=4, ranks=6) as error:
        strategy_for(sf.fsdp(replicas=4), ranks=6)
    assert error.value.remedies == (Setting("fsdp.replicas", 3), ("8 ranks",))


def test_several_processes_without_a_strategy_are_refused() -> None:
    with refused("parallel-none-on-ranks", ranks=2):
        strategy_for("none", ranks=2)
