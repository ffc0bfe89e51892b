"""Law 12: no function that a step reaches waits for the device.

On a GPU torch raises at each synchronisation; on a CPU, a dispatch mode raises where a tensor
becomes a number on the host.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_lines.runs import breaking_data, breaking_run, is_tiny, optimizers
from surefoot.data.loader import Feed
from surefoot.data.order import Order
from surefoot.train.loop import Step, steps

STEPS = 20
ALLOWED = ("read_on_cpu", "step_unless_on_cpu")  # by design, on the CPU alone
CASES: dict[str, dict[str, Any]] = {
    "fp16 with ema": {"precision": "fp16", "ema": 0.9},
    "bf16": {"precision": "bf16"},
    "clip by value": {"clip": "value 0.1"},
    "adaptive clip": {
        "clip": "adaptive 0.01",
        "model": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
    },
    "automatic clip": {"clip": "auto 0.9"},
}


def check(device: str) -> str:
    """Check every case in the loop alone, then count the waits of a whole run."""
    cases = CASES | {
        name: {"optimizer": optimizer} for name, optimizer in optimizers(device).items()
    }
    for name, changes in cases.items():
        run = breaking_run(device, **changes)
        micro_batches = _micro_batches(device)
        arguments: dict[str, Any] = {
            "feed": micro_batches.__getitem__,
            "record": run.parts.run_state.meter.add,
            "clock": lambda _: None,
            "periodic": NothingDue(),
        }
        for _ in steps(run.parts.task, run.state, length=2, **arguments):
            pass  # the first steps load kernels
        try:
            with no_waiting(device):
                for _ in steps(run.parts.task, run.state, length=STEPS, **arguments):
                    pass
        except (RuntimeError, AssertionError) as problem:
            raise AssertionError(f"{name}: {problem}") from problem
    return f"{len(cases)} cases of {STEPS} steps; whole run: {_waits_of_a_run(device)}"


class NothingDue:
    """A run between whose steps nothing is done."""

    stopping = False

    def evaluate_due(self, done: int) -> bool:  # noqa: ARG002  # as the loop calls it
        return False

    log_due = save_due = evaluate_due

    def metrics_after(self, done: int) -> dict[str, float]:  # noqa: ARG002  # as the loop calls it
        return {}

    def evaluate(self, step: Step) -> None: ...

    def log(self) -> None: ...

    save = log


def _micro_batches(device: str) -> list[Any]:
    """Those of all steps, on the device beforehand."""
    order = Order(0, samples=40, batch_size=8)
    feed = Feed(breaking_data(), order, seed=0, micro_batch_size=4, device=torch.device(device))
    feed.start(0)
    batches = [feed.micro_batches(step) for step in range(STEPS)]
    if not is_tiny(device):
        torch.cuda.synchronize()
    return batches


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Raise where the host waits for the device."""
    if is_tiny(device):
        with _NothingRead():  # type: ignore[no-untyped-call]
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class _NothingRead(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default or _is_allowed(), (
            "a tensor is read on the host"
        )
        return func(*args, **(kwargs or {}))


def _is_allowed() -> bool:
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name not in ALLOWED:
        frame = frame.f_back
    return frame is not None


def _waits_of_a_run(device: str) -> str:
    """How often a whole run waits in its steps, data and body included; a figure, not a claim."""
    if is_tiny(device):
        return "not counted on a CPU"
    run = breaking_run(device, length=f"{STEPS + 5} steps")
    waits = list[warnings.WarningMessage]()
    with run, ExitStack() as counting:
        for step in run:
            if step.index == 3:
                torch.cuda.set_sync_debug_mode("warn")
                counting.callback(torch.cuda.set_sync_debug_mode, "default")
                waits = counting.enter_context(warnings.catch_warnings(record=True))
                warnings.simplefilter("always")
            if step.index == STEPS + 3:
                counting.close()
    places = [
        f"{wait.filename.rpartition('/')[2]}:{wait.lineno}"
        for wait in waits
        if "synchroniz" in str(wait.message)
    ]
    return f"{len(places)} waits in {STEPS} steps {' '.join(sorted(set(places))[:6])}".strip()
