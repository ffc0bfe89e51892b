"""A run's step with a stopwatch at its phases: the same calls in the same order, `train/loop.py` untouched.

What a step calls is replaced by what notes the time and calls it: the model's forward pass, the loss, what ranks share, and the
buffers, whose `end_pass` is the first call after `backward()`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
    with ExitStack() as afterwards:
        models: Mapping[str, Any] = task.forward if isinstance(task.forward, dict) else {"model": task.forward}
        called = {name: _seen(model, watch, afterwards) for name, model in models.items()}
        forward = called if isinstance(task.forward, dict) else called["model"]
        timed = replace(
            task, forward=forward, loss=_in_phase("loss", task.loss, watch), ranks=_timed_ranks(task.ranks, watch)
        )
        yield timed, replace(state, buffers=_timed_buffers(state.buffers, watch))


def _seen(model: Any, watch: Stopwatch, afterwards: ExitStack) -> Any:
    """The model with its forward pass timed: a plain module as itself, anything else (compiled, several ranks) through a stand-in."""
    if not isinstance(model, nn.Module) or is_compiled(model):
        return _StandIn(model, called=_timed(model, watch, splits=False))
    afterwards.enter_context(with_forward(model, _timed(model.forward, watch, splits=True)))
    return model


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has wrapped it."""
    return "_orig_mod" in vars(module).get("_modules", {})


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


def _timed_ranks(ranks: Any, watch: Stopwatch) -> Any:
    """What ranks share (`surefoot.distributed.strategy.Ranks`); the backward pass begins where they have said what from."""

    def started(part: Tensor, scale: Tensor | None) -> Tensor:
        begun: Tensor = ranks.started(part, scale)
        watch.enter("backward")
        return begun

    shared = () if isinstance(ranks, Alone) else ("begin_sum", "summed", "whole_norm")
    timed = {name: _in_phase("communication", getattr(ranks, name), watch) for name in shared}
    return _StandIn(ranks, started=started, **timed)


def _timed_buffers(buffers: Any, watch: Stopwatch) -> Any:
    """Batch statistics (`surefoot.train.batch_norm_buffers`); the backward pass is over where they are told of its end."""

    def end_pass(*, counted: bool = True) -> None:
        watch.leave()
        buffers.end_pass(counted=counted)

    return _StandIn(buffers, end_pass=end_pass)


class _StandIn:
    """What a step calls, with some of its methods timed; with `called` it is called itself."""

    def __init__(self, original: Any, *, called: Callable[..., Any] | None = None, **timed: Callable[..., Any]) -> None:
        self.original, self.called, self.timed = original, called or original, timed

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.called(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        return self.timed.get(name) or getattr(self.original, name)
