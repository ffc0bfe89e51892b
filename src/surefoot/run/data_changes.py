"""What the body of a loop changes in the data set, its collate function or its sampler: the next
step reads it, or the change is refused by name.
"""

from collections.abc import Callable, Mapping
from typing import Any

from surefoot.data.data_values import DataChange, DataValues
from surefoot.data.loader import Feed
from surefoot.data.pipeline import DataPipeline
from surefoot.errors import ConfigError, Setting

_SAMPLER = "train_data.batch_sampler"
_OF_LOADER = ("train_data.collate_fn", "train_data.dataset")
_DECODE = "train_data.decode_fn"


class DataChanges:
    """The changes of one session. Plain values are saved; of others, `say_unsaved` is told once.

    `registered` has the objects of `run.register_state`.
    """

    def __init__(
        self,
        values: DataValues,
        pipeline: DataPipeline,
        *,
        registered: Mapping[str, Any],
        say_unsaved: Callable[[str], None],
    ) -> None:
        self.values = values
        self.pipeline = pipeline
        self.registered = registered
        self.say_unsaved = say_unsaved
        self.first_step: int | None = None
        self.named: set[str] = set()

    def begin(self, *, step: int) -> None:
        """Call this before the first step of a loop: workers begin with the values as they are."""
        if self.first_step is None:
            self.first_step = step
            self.values.refresh()
        self.values.pop_changes()

    def follow(self, feed: Feed, *, step: int) -> None:
        """Compare before a step is read. Raises `ConfigError` if the step would not see a change."""
        self.values.compare(registered=self.registered)
        changes = self.values.pop_changes()
        if not changes:
            return
        self._refuse_unseen(changes, step=step, in_workers=feed.reads_in_workers)
        if not feed.reads_in_workers:
            feed.follow_changes()
        unsaved = [change.name for change in changes if not change.is_saved]
        if not self.named.issuperset(unsaved):
            self.named.update(unsaved)
            self.say_unsaved(
                f"the body of the loop changed {_first_names(unsaved)} before step {step}, and no"
                " checkpoint holds it: use run.register_state, or let __getitem__(self, index,"
                " step) compute it"
            )

    def _refuse_unseen(self, changes: list[DataChange], *, step: int, in_workers: bool) -> None:
        pipeline = self.pipeline
        of_workers, of_stream, shared = [], [], []
        for change in changes:
            name = change.name
            if name.startswith("splits["):
                continue  # each evaluation reads anew
            if name.startswith(_SAMPLER):
                if not pipeline.data.lists_batches:
                    self._refuse_sampler(name, step=step)
            elif pipeline.data.loader is not None and name in _OF_LOADER:
                self._refuse_loader(name, step=step)
            elif pipeline.tape is not None and name.startswith("train_data"):
                is_source = not name.startswith(_DECODE)
                if in_workers or (is_source and not change.is_shared):
                    of_stream.append(name)
            elif in_workers and change.is_shared:
                shared.append(name)
            elif in_workers:
                of_workers.append(name)
        if of_stream:
            self._refuse_stream(of_stream, step=step)
        if shared:
            self._refuse_shared(shared, step=step)
        if of_workers:
            self._refuse_with_workers(of_workers, step=step)

    def note_reading(self) -> None:
        """Call this after a step was read: reading may change the data set too."""
        self.values.note_reading()

    def refuse_other_lists(self, step: int) -> None:
        """Raise `ConfigError` if a sampler lists other batches on another rank. Collective if the
        step begins an epoch of a sampler.
        """
        lists, world = self.pipeline.batch_lists, self.pipeline.world
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

    def _refuse_with_workers(self, names: list[str], *, step: int) -> None:
        workers = self.pipeline.workers
        raise ConfigError(
            "data-changed-with-workers",
            problem=f"the body of the loop changed {_first_names(names)} before step {step}, and"
            f" {workers} workers read samples with their own copies of it",
            reason="the workers would never see the change, and a resumed run would",
            remedy=[
                "compute it from the step, which __getitem__(self, index, step) receives",
                Setting("workers", 0),
            ],
            setting=names[0],
            value=workers,
            step=step,
            names=names,
        )

    def _refuse_shared(self, names: list[str], *, step: int) -> None:
        workers = self.pipeline.workers
        raise ConfigError(
            "shared-data-changed-with-workers",
            problem=f"the body of the loop changed {_first_names(names)} before step {step}, in"
            f" memory that it shares with {workers} workers",
            reason="the workers read steps ahead, so the step that sees the change would depend on"
            " their speed",
            remedy=[
                "compute it from the step, which __getitem__(self, index, step) receives",
                Setting("workers", 0),
            ],
            setting=names[0],
            value=workers,
            step=step,
            names=names,
        )

    def _refuse_stream(self, names: list[str], *, step: int) -> None:
        raise ConfigError(
            "stream-changed",
            problem=f"the body of the loop changed {_first_names(names)} before step {step}, and"
            " the process that reads the stream has its own copy of it",
            reason="its rows are read ahead, so that no step would see the change",
            remedy=[
                "change the batch in the loss or in collate_fn, with workers = 0",
                "let the source change by the number of its rows",
            ],
            setting=names[0],
            step=step,
            names=names,
        )

    def _refuse_loader(self, name: str, *, step: int) -> None:
        raise ConfigError(
            "loader-changed",
            problem=f"the body of the loop set {name} before step {step}",
            reason="the run took the parts of the DataLoader when it was built",
            remedy="set an attribute of the data set or of the collate function, which is read in"
            " each step",
            setting=name,
            step=step,
        )

    def _refuse_sampler(self, name: str, *, step: int) -> None:
        kind = type(self.pipeline.data.loader.sampler).__name__
        raise ConfigError(
            "sampler-changed",
            problem=f"the body of the loop changed {name} before step {step}",
            reason=f"the run took the weights or indices of the {kind} when it was built, and draws"
            " by itself",
            remedy="give the DataLoader a sampler of your own, whose list is read in each epoch",
            setting=name,
            step=step,
        )


def _first_names(names: list[str]) -> str:
    """Return the first three names, and the number of the others."""
    first = ", ".join(names[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
