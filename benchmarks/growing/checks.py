"""The checks before and in the first two steps of a run: CPU seconds, passes, and bytes of state.

A run with a directory checks once, when it begins, that a checkpoint holds all state, that loss and
samples are what they seem, and that weights survive a save. Each check is called as a session calls
it, over a GPT of 4 layers and 128 channels on the CPU, and over one of 1e9 parameters on the meta
device, whose tensors have no numbers: there a read gives 1, and the seconds are those of the host.
"hashed" and "copied" are bytes of state, as multiples of the weights' bytes. Operators are those of
torch, which say the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import surefoot as sf
from growing.told import Clock, Told
from surefoot.checkpoint.snapshot import Snapshot
from surefoot.data.dataset_checks import check_samples, check_split
from surefoot.distributed.world import on_meta
from surefoot.models import GPT, GPTConfig
from surefoot.train.components import Components
from surefoot.train.loop import steps
from surefoot.train.model_weights import refuse_lossy
from surefoot.train.state_check import StateCheck, fingerprints, loss_contract

SMALL = GPTConfig(layers=4, heads=4, width=128, context=128, vocab_size=2048, family="gpt2")
LARGE = GPTConfig(layers=19, heads=16, width=2048, context=128, vocab_size=20_000, family="gpt2")


@dataclass
class Cost:
    """What one check took."""

    name: str
    cpu_s: float = 0.0
    passes: int = 0
    hashed_bytes: int = 0
    copied_bytes: int = 0
    operators: int = 0


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class FakeReads(Operators):  # type: ignore[no-untyped-call]
    """Also answers what the host reads of tensors on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        is_meta = any(
            isinstance(each, Tensor) and each.is_meta for each in pytree.tree_leaves(args)
        )
        if is_meta and name in ("_local_scalar_dense", "is_nonzero", "equal"):
            return True if name != "_local_scalar_dense" else 1.0
        if is_meta and name == "_to_copy" and str(kwargs.get("device")) == "cpu":
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


@dataclass
class Costs:
    """The costs of the checks so far; the last one is counted."""

    operators: Operators | None
    of_checks: list[Cost] = field(default_factory=list)
    passes: Iterator[int] = field(default_factory=count)  # an int would be state of the model

    @contextmanager
    def taken(self, name: str) -> Iterator[None]:
        """Add what the block takes to the cost of this name."""
        if not self.of_checks or self.of_checks[-1].name != name:
            self.of_checks.append(Cost(name))
        cost = self.of_checks[-1]
        operators_before = 0 if self.operators is None else self.operators.count
        first_pass = next(self.passes)
        begun = process_time()
        try:
            yield
        finally:
            cost.cpu_s += process_time() - begun
            cost.passes += next(self.passes) - first_pass - 1
            if self.operators is not None:
                cost.operators += self.operators.count - operators_before

    @contextmanager
    def counted(self, parts: Components) -> Iterator[None]:
        """Count passes, and the bytes of snapshots."""
        plain = Snapshot.__init__
        passes = self.passes

        def counting(snapshot: Snapshot, *arguments: Any, **options: Any) -> None:
            plain(snapshot, *arguments, **options)
            self.of_checks[-1].hashed_bytes += snapshot.hashed_bytes
            self.of_checks[-1].copied_bytes += snapshot.copied_bytes

        def add_pass(*_: Any) -> None:
            next(passes)

        setattr(Snapshot, "__init__", counting)  # noqa: B010
        models = parts.state.models.values()
        handles = [model.register_forward_pre_hook(add_pass) for model in models]
        try:
            yield
        finally:
            setattr(Snapshot, "__init__", plain)  # noqa: B010
            for handle in handles:
                handle.remove()


class NothingDue:
    """A run between whose steps nothing is done."""

    stopping = False

    def evaluate_due(self, done: int) -> bool:  # noqa: ARG002
        return False

    log_due = save_due = evaluate_due

    def metrics_after(self, done: int) -> dict[str, float]:  # noqa: ARG002
        return {}

    def evaluate(self, step: sf.Step) -> None: ...
    def log(self) -> None: ...
    def save(self) -> None: ...


def next_token_loss(model: Any, batch: Any) -> Tensor:
    tokens_BT = batch[0]
    logits_BTV = model(tokens_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())


def build(shape: GPTConfig) -> sf.Run:
    tokens = torch.randint(shape.vocab_size, (64, shape.context + 1))
    return sf.Run(
        model=lambda: GPT(shape),
        loss=next_token_loss,
        train_data=(tokens,),
        splits={"val": sf.Split((tokens[:8],))},
        batch_size=8,
        micro_batch_size=4,  # the loss contract is checked at the start of such a run
        length="2 steps",
        optimizer=sf.optim.adamw(1e-3),
        device="cpu",
        console=False,
        report=False,
    )


def costs_of(run: sf.Run, operators: Operators | None = None) -> list[Cost]:
    """Call each check as a session does, and count what it takes.

    Counting operators takes time itself, so it is left to a run of its own.
    """
    parts = run.parts
    costs = Costs(operators=operators)
    with operators or nullcontext(), costs.counted(parts):
        for name, call in checks(parts).items():
            with costs.taken(name):
                call()
        make_checked_steps(parts, costs)
    return costs.of_checks


def checks(parts: Components) -> dict[str, Callable[[], object]]:
    data = parts.pipeline.checked
    seed = parts.pipeline.seed
    state_check = StateCheck(parts.task, parts.state, {}, parts.world, exact=True)

    def check_splits() -> None:
        for name, split in parts.evaluator.splits.items():
            check_split(name, split.data, seed=seed)

    return {
        "samples": lambda: check_samples(data, seed=seed, batch_size=8),
        "splits": check_splits,
        "state after passes": lambda: state_check.check_beginning(parts.pipeline),
        "loss contract": lambda: loss_contract(parts),
        "saved weights": lambda: refuse_lossy(parts.state),
        "program": lambda: fingerprints(parts, at_beginning=True),
        "metrics": lambda: parts.evaluator.check_metrics([]),
    }


def make_checked_steps(parts: Components, costs: Costs) -> None:
    """Make two steps whose updates are checked; only the check counts."""
    check = StateCheck(parts.task, parts.state, {}, parts.world, exact=True, has_passed=True)
    before = check.before
    after = check.after

    def timed_before(names: Iterable[str], factor: Tensor | float) -> None:
        with costs.taken("state after updates"):
            before(names, factor)

    def timed_after(names: Iterable[str]) -> None:
        with costs.taken("state after updates"):
            after(names)

    check.before, check.after = timed_before, timed_after  # type: ignore[method-assign]
    for step in steps(
        parts.task,
        parts.state,
        feed=parts.pipeline.again,
        record=lambda _: None,
        clock=lambda _: None,
        periodic=NothingDue(),
        length=2,
        watch=lambda _: check,
    ):
        with costs.taken("state after updates"):
            check.check_step(step)


def weight_bytes(run: sf.Run) -> int:
    return sum(each.nbytes for each in run.state.model.parameters())


def small_costs() -> tuple[list[Cost], int]:
    run = build(SMALL)
    costs = costs_of(run)
    for cost, counted in zip(costs, costs_of(build(SMALL), Operators()), strict=True):
        cost.operators = counted.operators
    return costs, weight_bytes(run)


def large_costs() -> tuple[list[Cost], int]:
    with on_meta(1):
        run = build(LARGE)
    return costs_of(run, FakeReads()), weight_bytes(run)


def rows_of(costs: Sequence[Cost], weights: int) -> list[str]:
    rows = []
    for cost in [*costs, total(costs)]:
        hashed = cost.hashed_bytes / weights
        copied = cost.copied_bytes / weights
        rows.append(
            f"{cost.name:>22} {cost.cpu_s:>8.3f} {cost.operators:>9} {cost.passes:>7}"
            f" {hashed:>8.2f} {copied:>8.2f}"
        )
    return rows


def total(costs: Sequence[Cost]) -> Cost:
    whole = Cost("all checks")
    for cost in costs:
        whole.cpu_s += cost.cpu_s
        whole.passes += cost.passes
        whole.hashed_bytes += cost.hashed_bytes
        whole.copied_bytes += cost.copied_bytes
        whole.operators += cost.operators
    return whole


def told(now: Clock, *, short: bool) -> Told:
    del now  # the processor's time of this process, whatever others do
    columns = f"{'CPU s':>8} {'operators':>9} {'passes':>7} {'hashed':>8} {'copied':>8}"
    header = f"{'':>22} {columns}"
    small_rounds = [small_costs() for _ in range(1 if short else 3)]
    small, small_weights = min(small_rounds, key=lambda costs: total(costs[0]).cpu_s)
    small_s = median(total(costs).cpu_s for costs, _ in small_rounds)
    large, large_weights = large_costs()
    rows = [f"4 x 128 GPT, {small_weights / 4e6:.2f} million parameters, CPU", header]
    rows += rows_of(small, small_weights)
    rows += [f"{large_weights / 4e9:.2f}e9 parameters, meta device", header]
    rows += rows_of(large, large_weights)
    whole = total(large)
    return Told(
        rows,
        f"checks: {small_s:.2f} CPU s and {total(small).passes} passes for a 4 x 128 GPT; state of"
        f" 1e9 parameters is copied {whole.copied_bytes / large_weights:.1f} times and hashed"
        f" {whole.hashed_bytes / large_weights:.1f} times",
        "checks at the start",
        "",
        "seconds",
        {cost.name: [(0.0, cost.cpu_s)] for cost in small},
    )
