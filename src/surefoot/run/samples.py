"""Samples and report panels of a session, drawn with the evaluated model."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from surefoot.distributed.world import World
from surefoot.errors import CheckpointError, DivergedError, error_of_dict
from surefoot.tracking.logger import Journal
from surefoot.tracking.record import Record
from surefoot.tracking.run_directory import RunDirectory
from surefoot.train.run_settings import RunSettings
from surefoot.train.scorer import Evaluator

if TYPE_CHECKING:
    from surefoot.tracking.panels_file import Panels


def draw_sample(evaluator: Evaluator, settings: RunSettings, world: World) -> str | Sequence[str]:
    """Return what the run's `sample_fn` returns; with `sample_on_all_ranks`, the texts of all
    ranks, in their order. Collective.
    """
    make = settings.sample_fn
    assert make is not None
    if world.size == 1 or not settings.sample_on_all_ranks:
        return evaluator.sample(make)
    own_texts: list[str] = []
    problem = None
    try:
        sample = evaluator.sample(make, rank=world.rank)
        own_texts += [sample] if isinstance(sample, str) else sample
    except DivergedError as diverged:  # the other ranks wait for this one
        problem = diverged.to_dict()
    texts: list[str] = []
    for texts_of_rank, problem_of_rank in world.gathered([own_texts, problem]):
        if problem_of_rank is not None:
            raise error_of_dict(problem_of_rank)
        texts += texts_of_rank
    return texts


def make_panels(
    evaluator: Evaluator,
    settings: RunSettings,
    *,
    step: int,
    say: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
) -> "Panels":
    """Return the panels that the run's `panels_fn` builds with the evaluated model, until `stop`
    returns True. Warns of missing panels. Collective.
    """
    from surefoot.tracking.panels_file import Panels, build_panels

    make = settings.panels_fn
    assert make is not None
    panels, notes = evaluator.panels(lambda model: build_panels(make, model, stop=stop))
    for line in notes:
        say(f"warning: {line}")
    return Panels(step=step, panels=tuple(panels))


def announced(
    what: str, doing: Callable[[str], None], stop: Callable[[], bool]
) -> Callable[[], bool]:
    """Say through `doing` what a session does, now and whenever the returned `stop` is asked."""

    def stopping() -> bool:
        doing(what)
        return stop()

    doing(what)
    return stopping


@dataclass(frozen=True)
class Samples:
    """The samples and panels of one session. All methods are collective.

    doing: shows what a session does.
    """

    evaluator: Evaluator
    settings: RunSettings
    journal: Journal
    world: World
    _: KW_ONLY
    directory: RunDirectory | None
    say: Callable[[str], None]
    doing: Callable[[str], None]

    def draw(self, step: int) -> Record | None:
        """Return the record of samples of the model, or None on ranks above 0. A model that
        overflows is a warning.
        """
        is_main = self.world.is_main
        if not is_main and not self.settings.sample_on_all_ranks:
            self.evaluator.sample(lambda _: "")  # all ranks gather sharded weights
            return None
        self.doing("sampling")
        try:
            sample = draw_sample(self.evaluator, self.settings, self.world)
        except DivergedError as problem:
            self.say(f"warning: no sample: {problem}")
            return None
        if not is_main:
            return None
        record: Record = {"kind": "sample", "step": step, **sample_texts(sample)}
        if self.settings.sample_summary:
            record["drawn"] = self.settings.sample_summary
        return record

    def show(self, sample: Record | None) -> None:
        """Write a sample to all sinks."""
        if sample is not None:
            self.journal.write(sample)

    def show_panels(self, step: int, *, stop: Callable[[], bool]) -> None:
        """Write the report's panels, built on rank 0 until `stop` returns True. A failure does not
        end the run.
        """
        from surefoot.tracking.panels_file import FILE, panel_to_dict

        assert self.directory is not None
        if not self.world.is_main:  # all ranks gather sharded weights
            self.evaluator.panels(lambda _: None)
            return
        panels = make_panels(
            self.evaluator,
            self.settings,
            step=step,
            say=self.say,
            stop=announced("building the report's panels", self.doing, stop),
        )
        if stop() or not panels.panels:
            return
        try:
            self.directory.write_text(FILE, panels.to_json())
        except CheckpointError as problem:
            self.say(f"warning: {problem}")
        shown = [panel_to_dict(panel) for panel in panels.panels]
        self.journal.show({"kind": "panels", "step": step, "panels": shown})


def sample_texts(sample: str | Sequence[str]) -> dict[str, Any]:
    """Return the text of a sample. For several samples, also return the list of their texts.

    >>> sample_texts("once"), sample_texts(["once", "twice"])["texts"]
    ({'text': 'once'}, ['once', 'twice'])
    >>> print(sample_texts(["once", "twice"])["text"])
    --- 1 of 2 ---
    once
    --- 2 of 2 ---
    twice
    """
    texts = [sample] if isinstance(sample, str) else list(sample)
    if len(texts) < 2:
        return {"text": "".join(texts)}
    numbered = [f"--- {number} of {len(texts)} ---\n{text}" for number, text in enumerate(texts, 1)]
    return {"text": "\n".join(numbered), "texts": texts}
