"""A run's step with a stopwatch at its phases: the same calls in the same order, `train/loop.py` untouched.

What a step calls is replaced by what notes the time and calls it: the model's forward pass, the loss, what ranks share, and the
buffers, whose `end_pass` is the first call after `backward()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from surefoot.data.loader import Feed, MicroBatch
from surefoot.distributed.strategy import Alone
from surefoot.profile.stopwatch import Stopwatch
from surefoot.train.loop import State, Step, Task, forward_backward, update


class Stepping:
    """Steps of a run, one after the other, that change no weight: the learning rate is 0.

    Each call of `make` makes one; it returns what its phases took.
    """

    def __init__(self, task: Task, state: State, feed: Feed, watch: Stopwatch) -> None:
        self.plain_state, self.feed, self.watch = state, feed, watch
        self.task = replace(task, factors=lambda _: 0.0)
        self.begin(state.step)

    def begin(self, step: int) -> None:
        self.next = step
        self.feed.start(step)

    def make(self) -> dict[str, float]:
        """Make the next step and wait for the device to have made it."""
        with watched(self.task, self.plain_state, self.watch) as (task, state):
            self.watch.start()
            with self.watch.phase("waiting"):
                micro_batches = self.feed.micro_batches(self.next)
            self._make(Step(self.next, micro_batches, task, state))
            taken = self.watch.lap()
        self.next += 1
        return taken

    def pass_only(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """A step with these micro-batches, whatever step they are of."""
        with watched(self.task, self.plain_state, self.watch) as (task, state):
            self.watch.start()
            self._make(Step(self.next, micro_batches, task, state))
            return self.watch.lap()

    def seconds(self) -> float:
        """Make the next step; how long it took."""
        return sum(self.make().values())

    def _make(self, step: Step) -> None:
        forward_backward(step)
        with self.watch.phase("optimizer"):
            update(step)


@contextmanager
def watched(task: Task, state: State, watch: Stopwatch) -> Iterator[tuple[Task, State]]:
    """The same task and state, with each phase told to a stopwatch while the block lasts."""
    assert task.loss is not None
    loss = task.loss

    def timed(model: Any, batch: Any) -> Any:
        with watch.phase("loss"):
            return loss(model, batch)

    with ExitStack() as afterwards:
        models: Mapping[str, Any] = task.forward if isinstance(task.forward, dict) else {"model": task.forward}
        called = {name: _seen(model, watch, afterwards) for name, model in models.items()}
        forward = called if isinstance(task.forward, dict) else called["model"]
        ranks: Any = _Ranks(task.ranks, watch)
        buffers: Any = _Buffers(state.buffers, watch)
        yield replace(task, forward=forward, loss=timed, ranks=ranks), replace(state, buffers=buffers)


def _seen(model: Any, watch: Stopwatch, afterwards: ExitStack) -> Any:
    """The model with its forward pass timed: a plain module as itself, anything else (compiled, several ranks) through a stand-in."""
    if not isinstance(model, nn.Module) or "_orig_mod" in vars(model).get("_modules", {}):
        return _Called(model, watch)
    afterwards.enter_context(with_forward(model, _timed(model.forward, watch, splits=True)))
    return model


@contextmanager
def with_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The module with another forward pass while the block lasts."""
    attributes = vars(module)
    own = {"forward": attributes["forward"]} if "forward" in attributes else {}
    attributes["forward"] = forward
    try:
        yield
    finally:
        del attributes["forward"]
        attributes.update(own)


def _timed(forward: Callable[..., Any], watch: Stopwatch, *, splits: bool) -> Callable[..., Any]:
    """The forward pass as a phase; `splits`: a loss that is given to it is one too, which cannot be seen in compiled code."""

    def called(*inputs: Any, **named: Any) -> Any:
        if splits and callable(named.get("loss")):  # a model that is given its loss, as surefoot's GPT is
            named["loss"] = _in_phase("loss", named["loss"], watch)
        with watch.phase("forward"):
            return forward(*inputs, **named)

    return called


def _in_phase(phase: str, function: Callable[..., Any], watch: Stopwatch) -> Callable[..., Any]:
    def called(*inputs: Any, **named: Any) -> Any:
        with watch.phase(phase):
            return function(*inputs, **named)

    return called


class _Called:
    """What the loss calls, timed."""

    def __init__(self, model: Any, watch: Stopwatch) -> None:
        self.model, self.timed = model, _timed(model, watch, splits=False)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.timed(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class _Ranks:
    """What ranks share (`surefoot.distributed.strategy.Ranks`), timed; the backward pass begins where it has said what from."""

    def __init__(self, ranks: Any, watch: Stopwatch) -> None:
        self.ranks, self.watch = ranks, watch
        self.nominal = ranks.nominal

    def _communicating(self) -> AbstractContextManager[None]:
        return nullcontext() if isinstance(self.ranks, Alone) else self.watch.phase("communication")

    def start_pass(self, *, counted: bool, last: bool) -> bool:
        return bool(self.ranks.start_pass(counted=counted, last=last))

    def begin_sum(self, total: Tensor | None, counted: Tensor | float) -> None:
        with self._communicating():
            self.ranks.begin_sum(total, counted)

    def started(self, part: Tensor, scale: Tensor | None) -> Tensor:
        begun: Tensor = self.ranks.started(part, scale)
        self.watch.enter("backward")
        return begun

    def summed(self, total: Tensor, counted: Tensor | float | None) -> Any:
        with self._communicating():
            return self.ranks.summed(total, counted)

    def whole_norm(self, norm: Tensor) -> Tensor:
        with self._communicating():
            whole: Tensor = self.ranks.whole_norm(norm)
        return whole


class _Buffers:
    """Batch statistics (`surefoot.train.batch_norm_buffers`); the backward pass is over where they are told of its end."""

    def __init__(self, buffers: Any, watch: Stopwatch) -> None:
        self.buffers, self.watch = buffers, watch

    def start_pass(self) -> None:
        self.buffers.start_pass()

    def end_pass(self, *, counted: bool = True) -> None:
        self.watch.leave()
        self.buffers.end_pass(counted=counted)

    def finish(self, skipped: Tensor) -> None:
        self.buffers.finish(skipped)

    def undo(self) -> None:
        self.buffers.undo()
