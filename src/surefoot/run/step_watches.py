"""What a session watches inside a step: statistics of layers, and the checks of its first steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefoot.config.behavior import BUFFERS_IN_ORDER
from surefoot.config.durations import Interval
from surefoot.run.components import RunComponents
from surefoot.tracking.logger import Journal
from surefoot.train.loop import Step
from surefoot.train.state_dict import RunState
from surefoot.train.step_watch import UNWATCHED, NamedCalls, Watch
from surefoot.train.weight_check import WeightCheck

if TYPE_CHECKING:
    from surefoot.distributed.world import World
    from surefoot.train.layer_stats import Layers, LayerWatch
    from surefoot.train.state_check import StateCheck


@dataclass(eq=False, repr=False, kw_only=True)
class StepWatches:
    """The watches of the steps of one session, and what follows from them.

    layer_stats_every: the interval of the statistics. make_layers: returns the layers whose
    statistics are taken. checks_weights: step 0 may compare the weights around its passes. announces:
    the ranks of this world tell each other the calls of a step that the user's loop makes.
    """

    run_state: RunState
    journal: Journal
    layer_stats_every: Interval
    make_layers: "Callable[[], Layers]"
    state_check: "StateCheck | None"
    checks_weights: bool
    announces: "World | None"
    user_updates: bool = False  # the user's loop calls `forward_backward` and `update`
    watched: "LayerWatch | None" = None  # of a step whose layers are recorded
    _layers: "Layers | None" = None

    def watch(self, index: int) -> Watch:
        """Return the watch of a step: layer statistics if due, and the checks of weights and state
        in the first steps.
        """
        watch: Watch = UNWATCHED
        self.watched = None
        if self.layer_stats_every.due(index + 1):
            self.watched = self.layers.watch(index)
            watch = self.watched
        if index == 0 and self._compares_weights():
            watch = WeightCheck(self.run_state.state.models, watch)
        if self.state_check is not None and index < self.state_check.steps:
            self.state_check.inner = watch
            watch = self.state_check
        if self.user_updates and self.announces is not None:
            return NamedCalls(watch, self.announces, index)
        return watch

    def record(self, step: Step) -> None:
        """Store the measurements of a step. Layer statistics are read immediately, so that
        checkpoints do not store them.
        """
        if self.state_check is not None and step.index < self.state_check.steps:
            self.state_check.check_step(step)
        self.run_state.meter.add(step)
        if self.watched is not None:
            record = self.layers.read(self.watched, count=step.target_count)
            if record is not None:
                self.journal.write(record)

    def forget_layers(self) -> None:
        """Find the layers again, because other parameters are trained."""
        self._layers = None

    @property
    def layers(self) -> "Layers":
        """The statistics of layers, from the first step whose layers are recorded."""
        if self._layers is None:
            self._layers = self.make_layers()
        return self._layers

    def _compares_weights(self) -> bool:
        """Return True if no check before the first step has compared the weights around a pass."""
        was_checked = self.state_check is not None and self.state_check.has_passed
        return self.checks_weights and not was_checked


def checks_weights(parts: RunComponents) -> bool:
    """Return True if step 0 of a run compares the weights around its passes."""
    return (
        parts.settings.check_state
        and parts.state.buffers.behavior >= BUFFERS_IN_ORDER
        and parts.plan.parallel.kind != "fsdp"  # a pass writes to gathered copies there
    )


def layers_of(parts: RunComponents) -> "Layers":
    """Return the statistics of the layers of a run."""
    from surefoot.train.layer_stats import Layers

    return Layers(
        parts.state.models,
        {name: trained.parameters for name, trained in parts.state.optimizers.items()},
        world=parts.world,
        local_times=parts.task.ranks.local_times,
        compiled=parts.compiled,
        updated=parts.run_state.updated_parameters,
    )
