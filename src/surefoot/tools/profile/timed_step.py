"""A run's step with a stopwatch around its phases: the same calls in the same order, without
changes to `train/loop.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from surefoot.data.loader import Feed, MicroBatch
from surefoot.distributed.strategy import Alone
from surefoot.train.loop import State, Step, Task, forward_backward, update
from surefoot.train.step_watch import LossWatch
from surefoot.train.timed_pass import zero_rates

REST = "rest"
RANGE = "surefoot: "  # prefix of a phase's range in a trace


class Stopwatch:
    """A stopwatch that assigns the time between readings of `now` to phases. Only the innermost of
    nested phases counts.

    `between` subtracts two readings. Under a profiler, each phase is also a range of the trace.

    >>> ticks = iter([0.0, 1.0, 4.0, 9.0, 10.0, 11.0])
    >>> watch = Stopwatch(now=lambda: next(ticks))
    >>> watch.start()
    >>> with watch.phase("forward"):
    ...     pass
    >>> with watch.phase("backward"):
    ...     watch.lap()
    {'rest': 6.0, 'forward': 3.0, 'backward': 1.0}
    """

    def __init__(
        self,
        now: Callable[[], Any] = perf_counter,
        between: Callable[[Any, Any], float] = lambda then, now: now - then,
    ) -> None:
        self.now = now
        self.between = between
        self.stack: list[tuple[str, Any]] = []
        self.marks: list[tuple[str, Any]] = []  # a phase, and the time of its start or continuation

    def start(self) -> None:
        self.marks = [(self._phase, self.now())]

    def enter(self, phase: str) -> None:
        """Start a phase, which lasts until `leave`."""
        marked = record_function(RANGE + phase)
        marked.__enter__()  # type: ignore[no-untyped-call]
        self.stack.append((phase, marked))
        self.marks.append((phase, self.now()))

    def leave(self) -> None:
        _, marked = self.stack.pop()
        marked.__exit__(None, None, None)
        self.marks.append((self._phase, self.now()))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of the block as a phase, and not in the phase around it."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def lap(self) -> dict[str, float]:
        """Return the seconds of each phase since `start`. The sum is exactly the elapsed time."""
        marks = [*self.marks, (self._phase, self.now())]
        taken: dict[str, float] = {}
        for (phase, then), (_, now) in pairwise(marks):
            taken[phase] = taken.get(phase, 0.0) + self.between(then, now)
        return taken

    @property
    def _phase(self) -> str:
        return self.stack[-1][0] if self.stack else REST


def stopwatch(device: torch.device) -> Stopwatch:
    """Return a stopwatch for a device. On CUDA, the stopwatch records events in the stream, so that
    a step never waits.
    """
    if device.type != "cuda":
        return Stopwatch()

    def marked() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(then: torch.cuda.Event, now: torch.cuda.Event) -> float:
        now.synchronize()
        return float(then.elapsed_time(now)) / 1e3

    return Stopwatch(marked, seconds)


class Stepping:
    """Consecutive steps of a run, with the rates of `zero_rates`."""

    def __init__(self, task: Task, state: State, feed: Feed, watch: Stopwatch) -> None:
        self.plain_state = state
        self.feed = feed
        self.watch = watch
        self.task = zero_rates(task, state)
        self.begin(state.step)

    def begin(self, step: int) -> None:
        self.next = step
        self.feed.start(step)

    def make(self, micro_batches: Sequence[MicroBatch] | None = None) -> dict[str, float]:
        """Run the next step, with these micro-batches if given, and wait for the device. Returns
        the seconds of each phase.
        """
        task = self.task
        state = self.plain_state
        watch = self.watch
        assert task.loss is not None
        with ExitStack() as afterwards:
            forward: Any
            if isinstance(task.forward, dict):
                forward = {}
                for name, model in task.forward.items():
                    forward[name] = _with_timed_forward(model, watch, afterwards)
            else:
                forward = _with_timed_forward(task.forward, watch, afterwards)
            loss_watch = LossWatch(lambda loss: _in_phase("loss", loss, watch))
            task = replace(task, forward=forward, ranks=_timed_ranks(task.ranks, watch))
            state = replace(state, buffers=_timed_buffers(state.buffers, watch))
            watch.start()
            if micro_batches is None:
                with watch.phase("waiting"):
                    micro_batches = self.feed.micro_batches(self.next)
            step = Step(self.next, micro_batches, task, state, _watch=loss_watch)
            forward_backward(step)
            with watch.phase("optimizer"):
                update(step)
            taken = watch.lap()
        self.next += 1
        return taken

    def seconds(self) -> float:
        """Run the next step and return its seconds."""
        return sum(self.make().values())


def _with_timed_forward(model: Any, watch: Stopwatch, afterwards: ExitStack) -> Any:
    if not isinstance(model, nn.Module) or is_compiled(model):
        return _StandIn(model, called=_in_phase("forward", model, watch))
    forward = _in_phase("forward", model.forward, watch, splits=True)
    afterwards.enter_context(with_forward(model, forward))
    return model


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` wraps the module."""
    return "_orig_mod" in vars(module).get("_modules", {})


@contextmanager
def with_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward method of a module in this context."""
    attributes = vars(module)
    own = {"forward": attributes["forward"]} if "forward" in attributes else {}
    attributes["forward"] = forward
    try:
        yield
    finally:
        del attributes["forward"]
        attributes.update(own)


def _in_phase(
    phase: str, function: Callable[..., Any], watch: Stopwatch, *, splits: bool = False
) -> Callable[..., Any]:
    # with `splits`, a loss among the arguments is a phase too, which is impossible in compiled code

    def called(*inputs: Any, **named: Any) -> Any:
        # a model that calls the loss itself, as surefoot's GPT does
        if splits and callable(named.get("loss")):
            named["loss"] = _in_phase("loss", named["loss"], watch)
        with watch.phase(phase):
            return function(*inputs, **named)

    return called


def _timed_ranks(ranks: Any, watch: Stopwatch) -> Any:

    def started(part: Tensor, scale: Tensor | None) -> Any:
        exchange = ranks.started(part, scale)
        watch.enter("backward")
        return exchange

    shared = () if isinstance(ranks, Alone) else ("begin_sum", "summed", "norm_inputs")
    timed = {name: _in_phase("communication", getattr(ranks, name), watch) for name in shared}
    return _StandIn(ranks, started=started, **timed)


def _timed_buffers(buffers: Any, watch: Stopwatch) -> Any:
    # the backward pass ends at `end_pass`, the first call after `backward()`

    def end_pass(*, counted: bool) -> None:
        watch.leave()
        buffers.end_pass(counted=counted)

    return _StandIn(buffers, end_pass=end_pass)


class _StandIn:
    def __init__(
        self,
        original: Any,
        *,
        called: Callable[..., Any] | None = None,
        **timed: Callable[..., Any],
    ) -> None:
        self.original = original
        self.called = called or original
        self.timed = timed

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.called(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        return self.timed.get(name) or getattr(self.original, name)
