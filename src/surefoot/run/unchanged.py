"""Trying things on a run that must not notice: it comes out bit for bit as it went in."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from surefoot.errors import ConfigError
from surefoot.optim.clipping import clear
from surefoot.run.components import RunComponents
from surefoot.run.resume import start_from_init
from surefoot.run.run import Run
from surefoot.train import state_dict
from surefoot.train.auto_precision import settle_choices
from surefoot.train.scratch import preserved
from surefoot.train.state_dict import Kept, Whole


@contextmanager
def unchanged(run: Run) -> Iterator[RunComponents]:
    """A run as it would train now, to make steps with; whatever is done with it, afterwards it is what it was, bit for bit.

    That is done by a checkpoint in memory, on the host: models, optimizers, averages, loss scale, bad steps in a row, modes,
    rates of the groups and kept objects are in it. Besides it come back what no checkpoint holds (`preserved`) and the clock.
    A run that is not open is begun as if it were: with its starting weights, its precision settled. Its meter and its data are
    not to be used inside: read data through a feed of your own.

    Raises `ConfigError` for a run without a loss of its own, and in the middle of a step.
    """
    parts, state, precision = run.parts, run.state, run.parts.whole.precision
    if parts.task.loss is None:
        raise ConfigError(
            "this run has no loss of its own, so its steps cannot be tried: they are made in `for step in run.steps()`\n"
            "  give Run(loss=...), or try them there by hand"
        )
    if any(parameter.grad is not None for parameter in state.parameters):
        raise ConfigError(
            "the run is in the middle of a step: there are gradients that no update has used\n"
            "  try it before the loop, or between two steps of `for step in run`"
        )
    tried = replace(parts, whole=Whole(state, precision, kept=Kept(dict(parts.whole.kept.objects))))
    averages = {f"average of {name}": average.model for name, average in state.averages.items()}
    models = {**state.models, **averages}
    format_before = precision.name, precision.open
    layout_before, described_before = (parts.layout.channels_last, parts.layout.open), dict(parts.described)
    clock = parts.whole.clock
    spent_s = clock.now() - clock.since
    with ExitStack() as stack:
        stack.callback(lambda: setattr(clock, "since", clock.now() - spent_s))  # at last: putting back takes time too
        # what a checkpoint holds is put back from one; this has the rest, and the averages' buffers before they are refreshed
        user_state = tried.whole.kept.objects
        stack.enter_context(preserved(models, parts.task.loss, user_state, state.parameters, with_weights=False))
        stack.enter_context(parts.numerics())
        found = tried.packed()
        try:
            if run.sitting is None:
                settle_choices(parts)
                start_from_init(parts)
            yield parts
        finally:
            clear(state.parameters)
            state.buffers.undo()
            state_dict.restore(tried.whole, found, where="what was before the trial")
            precision.name, precision.open = format_before
            parts.layout.channels_last, parts.layout.open = layout_before
            parts.described.clear()
            parts.described.update(described_before)
