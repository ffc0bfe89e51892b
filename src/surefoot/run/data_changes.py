"""What the body of a loop changes in the data set, its collate function or its sampler: the next
step reads it, or the change is refused by name.
"""

from surefoot.data.data_values import ChangedValue
from surefoot.data.loader import Feed
from surefoot.errors import ConfigError, Setting
from surefoot.run import messages
from surefoot.run.components import RunComponents

_SAMPLER = "train_data.batch_sampler"


class DataChanges:
    """The changes of one session. Plain values are saved; others are said once."""

    def __init__(self, parts: RunComponents) -> None:
        self.parts = parts
        self.first_step: int | None = None
        self.named: set[str] = set()

    def begin(self) -> None:
        """Call this before the first step of a loop: workers begin with the values as they are."""
        values = self.parts.run_state.data_values
        if self.first_step is None:
            self.first_step = self.parts.state.step
            values.refresh()
        values.pop_changes()

    def follow(self, feed: Feed, *, step: int) -> None:
        """Compare before a step is read. Raises `ConfigError` if the step would not see a change."""
        parts, values = self.parts, self.parts.run_state.data_values
        values.compare(registered=parts.run_state.user_state.objects)
        changes = values.pop_changes()
        if not changes:
            return
        of_sampler = [change for change in changes if change.name.startswith(_SAMPLER)]
        if of_sampler and not parts.pipeline.data.lists_batches:
            self._refuse_sampler(of_sampler, step=step)
        of_workers = [change for change in changes if change not in of_sampler]
        if of_workers and feed.reads_in_workers:
            self._refuse_with_workers(of_workers, step=step)
        if not feed.reads_in_workers:
            feed.forget_ahead()
        unsaved = [change.name for change in changes if not change.is_saved]
        is_written = parts.directory is not None and parts.world.is_main
        if is_written and not self.named.issuperset(unsaved):
            self.named.update(unsaved)
            text = (
                f"the body of the loop changed {', '.join(unsaved)} before step {step}, and no"
                " checkpoint holds it: use run.register_state, or let __getitem__(self, index, step)"
                " compute it"
            )
            if parts.console is None:
                messages.warn(text)
            else:
                parts.say(f"note: {text}")

    def read(self, step: int) -> None:
        """Call this after a step was read. Collective if the step begins an epoch of a sampler."""
        lists, world = self.parts.pipeline.batch_lists, self.parts.world
        if lists is not None and world.size > 1 and step % lists.steps == 0:
            hashes = world.gathered(lists.hash_at(step))
            differing = [rank for rank, each in enumerate(hashes) if each != hashes[0]]
            if differing:
                raise ConfigError(
                    "sampler-differs-on-ranks",
                    problem=f"{lists.name} on rank {differing[0]} lists other batches than on rank"
                    f" 0 in the epoch that begins with step {step}",
                    reason="each rank reads its part of one list",
                    remedy="let its state change in the same way on every rank: exchange what it"
                    " depends on, as torch.distributed.all_reduce does",
                    step=step,
                    rank=differing[0],
                )
        self.parts.run_state.data_values.note_reading()

    def _refuse_with_workers(self, changes: list[ChangedValue], *, step: int) -> None:
        names = ", ".join(change.name for change in changes)
        raise ConfigError(
            "data-changed-with-workers",
            problem=f"the body of the loop changed {names} before step {step}, and"
            f" {self.parts.pipeline.workers} workers read samples with their own copies of it",
            reason="the workers would never see the change, and a resumed run would",
            remedy=[
                "compute it from the step, which __getitem__(self, index, step) receives",
                Setting("workers", 0),
            ],
            setting=changes[0].name,
            value=self.parts.pipeline.workers,
            step=step,
        )

    def _refuse_sampler(self, changes: list[ChangedValue], *, step: int) -> None:
        kind = type(self.parts.pipeline.data.loader.sampler).__name__
        raise ConfigError(
            "sampler-changed",
            problem=f"the body of the loop changed {changes[0].name} before step {step}",
            reason=f"the run took the weights or indices of the {kind} when it was built, and draws"
            " by itself",
            remedy="give the DataLoader a sampler of your own, whose list is read in each epoch",
            setting=changes[0].name,
            step=step,
        )
