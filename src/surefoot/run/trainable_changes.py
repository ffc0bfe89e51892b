"""Parameters that the body of a loop freezes or unfreezes between two steps."""

from collections.abc import Callable

from surefoot.errors import ConfigError
from surefoot.run.components import RunComponents
from surefoot.run.training_check import SessionNotes
from surefoot.train.loop import State


class TrainableChanges:
    """The changes of one session. `meet` prepares several ranks for other parameters; it is None in
    a single process.
    """

    def __init__(
        self, state: State, notes: SessionNotes, *, rank: int, meet: Callable[[], None] | None
    ) -> None:
        self.state = state
        self.notes = notes
        self.rank = rank
        self.meet = meet
        self.flags = state.trainable.flags  # of the newest step

    def any(self) -> bool:
        """Return True if other parameters are trained than in the newest step."""
        flags = self.state.trainable.flags
        return flags is not self.flags and flags != self.flags

    def follow(self, *, same_on_all_ranks: bool) -> None:
        """Train the other parameters. Raises `ConfigError` if they differ between ranks.
        Collective.
        """
        step = self.state.step
        trainable = self.state.trainable
        changes = trainable.changes(self.flags)
        self.flags = trainable.flags
        if not same_on_all_ranks:
            raise ConfigError(
                "ranks-train-other-parameters",
                problem=f"after step {step} rank {self.rank} trains other parameters than other"
                f" ranks: {changes[0]}",
                reason="gradients are summed over all ranks, which would wait for each other forever",
                remedy="freeze and unfreeze by step.index, in the same way on every rank",
                step=step,
                rank=self.rank,
            )
        if self.meet is not None:
            self.meet()
        for change in changes:  # alternating changes are printed once
            self.notes.say_once(change, f"after step {step:,}: {change}")


def meet_with_other_parameters(parts: RunComponents) -> None:
    """Check the first pass of several ranks with other trained parameters, and prepare the sums of
    their gradients. Collective.
    """
    task = parts.task
    if task.loss is not None:
        from surefoot.train.parallel_check import check_first_pass

        check_first_pass(
            parts.state.models,
            task.loss,
            parts.pipeline.first(parts.state.step),
            precision=parts.run_state.precision,
            world=parts.world,
            allow_unused=parts.plan.parallel.find_unused_parameters,
        )
    task.ranks.follow_trainable()
    parts.make_ready()
