"""What one session makes of the model between steps and at the end: scores on the record, what is best, and samples."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.reader import interprets
from surefoot.config.tree import flat
from surefoot.errors import CheckpointError, ConfigError, DivergedError
from surefoot.run.components import RunComponents
from surefoot.tracking.logger import Journal
from surefoot.tracking.run_reader import read_records
from surefoot.train.evaluate import EvaluationStoppedError, numbers
from surefoot.train.model_weights import weights_of

if TYPE_CHECKING:
    from surefoot.tracking.panels_file import Panels


def make_panels(parts: RunComponents, *, stop: Callable[[], bool] = lambda: False) -> "Panels":
    """What the run's `panels_fn` makes of the model as it is evaluated; each reason why there are not more is said. Collective."""
    from surefoot.tracking.panels_file import Panels, build_panels

    make = parts.settings.panels_fn
    assert make is not None
    panels, notes = parts.evaluator.panels(lambda model: build_panels(make, model, stop=stop))
    for line in notes:
        parts.say(f"warning: {line}")
    return Panels(step=parts.state.step, panels=tuple(panels))


class Evaluations:
    """The scores of one session, and which are still owed."""

    def __init__(self, parts: RunComponents, journal: Journal) -> None:
        self.parts, self.journal, self.state = parts, journal, parts.state
        self.scores: dict[str, float] = {}  # the last ones
        self.first: dict[str, float] = {}  # of the run, with their step
        self.due = False  # those of the newest step, given up for a signal
        self.ended = False  # what is scored when the run is over has been scored
        self.at_end: tuple[int, dict[str, float]] | None = None  # in this session: whose weights, and the scores

    @interprets
    def resumed(self, checkpoint: Checkpoint) -> None:
        self.due = checkpoint.saved.evaluation_due
        self.first = {name: float(value) for name, value in checkpoint.saved.first_scores.items()}
        self.ended = checkpoint.saved.ended and self.parts.finished  # a run that was made longer has another end

    def scores_due(self, done: int) -> bool:
        return bool(self.parts.evaluator.names(at_end=False)) and self.parts.timetable.evaluate_due(done)

    def sample_due(self, done: int) -> bool:
        return self.parts.settings.sample_fn is not None and self.parts.timetable.sample_due(done)

    def end_due(self) -> bool:
        return bool(self.parts.evaluator.names(at_end=True)) and self.parts.finished and not (self.ended or self.due)

    def score(self, *, stop: Callable[[], bool]) -> None:
        """Score every split but those for the end, record it, and watch the score that decides what is best."""
        metrics = self._evaluate(stop, at_end=False)
        if metrics is None:
            return
        self.scores = numbers(metrics)
        self.first = self.first or {"step": self.state.step, **self.scores}
        watch = self.parts.run_state.watch
        # first: it may end the run, and then there are no rates to steer
        improved = watch is not None and watch.improved(self.state.step, self._watched(watch.score))
        if improved and self.parts.checkpointing is not None:
            self.parts.checkpointing.save_requested = True
        lr_factor, message = self._steer()
        self.journal.write({"kind": "eval", "step": self.state.step, **metrics, **lr_factor})
        if message is not None:
            self.parts.say(message)

    def due_at_start(self) -> bool:
        """Whether to evaluate before the first step: asked for, and not in the records of a session that ended then. Collective."""
        parts = self.parts
        if self.state.step or not (parts.settings.evaluate_at_start and parts.evaluator.names(at_end=False)):
            return False
        before = read_records(parts.directory.path) if parts.world.is_main and parts.directory is not None else ()
        return bool(parts.world.from_main(all(record["kind"] != "eval" for record in before)))

    def score_at_start(self, *, stop: Callable[[], bool]) -> None:
        """Score every split but those for the end before the first step, and record it; it steers nothing. Given up: made by the resume."""
        metrics = self._evaluate(stop, at_end=False)
        self.due = False
        if metrics is not None:
            self.first = {"step": 0, **numbers(metrics)}
            self.journal.write({"kind": "eval", "step": 0, **metrics})

    def score_at_end(self, *, stop: Callable[[], bool]) -> None:
        """Score what is for the end alone, with the best checkpoint's weights; the next save holds that it was done."""
        parts, best = self.parts, self._best()
        with nullcontext() if best is None else weights_of(self.state, best):
            metrics = self._evaluate(stop, at_end=True)
        if metrics is None:
            return
        step = self.state.step if best is None else best.step
        self.ended, self.at_end = True, (step, numbers(metrics))
        self.journal.write({"kind": "final_eval", "step": self.state.step, "weights_step": step, **metrics})
        if parts.checkpointing is not None:
            parts.checkpointing.save_requested = True

    def sample(self) -> None:
        assert self.parts.settings.sample_fn is not None
        if not self.parts.world.is_main:  # sharded weights are gathered by all
            self.parts.evaluator.sample(lambda _: "")
            return
        self.parts.doing("sampling")
        try:
            sample = self.parts.evaluator.sample(self.parts.settings.sample_fn)
        except DivergedError as problem:
            self.parts.say(f"warning: no sample: {problem}")
            return
        self.journal.write({"kind": "sample", "step": self.state.step, **_sample_texts(sample)})

    def show(self, *, stop: Callable[[], bool]) -> None:
        """Write what a report shows of the task, made by rank 0 until `stop` says so; what cannot be made ends no run. Collective."""
        from surefoot.tracking.panels_file import FILE, panel_to_dict

        parts = self.parts
        assert parts.directory is not None
        if not parts.world.is_main:  # as for a sample
            parts.evaluator.panels(lambda _: None)
            return
        rendered = make_panels(parts, stop=self._announce("making the report's panels", stop))
        if stop() or not rendered.panels:
            return
        try:
            parts.directory.write_text(FILE, rendered.to_json())
        except CheckpointError as problem:
            parts.say(f"warning: {problem}")
        self.journal.show({"kind": "panels", "step": rendered.step, "panels": [*map(panel_to_dict, rendered.panels)]})

    def conclude(self) -> None:
        """Show what the run was and what came of it to those who compare runs."""
        self.journal.show(
            {
                "kind": "outcome",
                "step": self.state.step,
                "settings": flat(self.parts.identity),
                "scores": self.scores,
                **({} if self.at_end is None else {"scores_at_end": self.at_end[1]}),
            }
        )

    def _evaluate(self, stop: Callable[[], bool], *, at_end: bool) -> dict[str, Any] | None:
        """Scores of the splits that are for the end, or of all others; None where there are none, which is said."""
        names = self.parts.evaluator.names(at_end=at_end)
        which = f"of {', '.join(names)}" if at_end else f"after step {self.state.step:,}"
        try:
            return self.parts.evaluator.scores(names, stop=self._announce(f"evaluating {', '.join(names)}", stop))
        except EvaluationStoppedError:
            self.due = not at_end
            self.parts.say(f"the evaluation {which} is left to the resume")
        except DivergedError as problem:  # whoever looks at a run does not end it
            self.parts.say(f"warning: no scores {which}: {problem}")
        return None

    def _announce(self, what: str, stop: Callable[[], bool]) -> Callable[[], bool]:
        """Say what is being done, now and whenever it is asked whether to `stop`."""

        def stopping() -> bool:
            self.parts.doing(what)
            return stop()

        self.parts.doing(what)
        return stopping

    def _steer(self) -> tuple[dict[str, float], str | None]:
        """Let the scores steer the learning rates of the steps to come; what is recorded of that, and what is said.

        Scores taken only because the run ends here do not count, so that a run made longer goes on as one of that length.
        After the last step there is nothing to lower: a reduction is kept for a run made longer, and is not told.
        """
        feedback, step, message = self.parts.run_state.feedback, self.state.step, None
        if feedback is None:
            return {}, None
        if self.parts.timetable.every["evaluate_every"].due(step):
            before = feedback.standing.factor
            message = feedback.update(step, self._watched(feedback.plateau.score))
            if not self.parts.finished:
                self.state.lr_factor = feedback.standing.factor
            elif feedback.standing.factor != before:
                message = None
        return {"lr_factor": self.state.lr_factor}, message

    def _watched(self, score: str) -> float:
        if score not in self.scores:
            raise ConfigError(f"cannot watch {score!r}: scored are {', '.join(self.scores)}")
        return self.scores[score]

    def _best(self) -> Checkpoint | None:
        """The best checkpoint where it is an earlier one; none where it cannot be had, which is said."""
        watch, saving = self.parts.run_state.watch, self.parts.checkpointing
        if watch is None or watch.step in (None, self.state.step):
            return None
        try:
            if saving is not None:
                return saving.at(watch.step)
            why = f"nothing is saved, so the weights of step {watch.step}, the best, are gone: the last are scored"
        except CheckpointError as problem:
            why = f"{problem}: the last weights are scored instead"
        self.parts.say(f"warning: {why}")
        return None


def _sample_texts(sample: str | Sequence[str]) -> dict[str, Any]:
    """One text for people, and if there are several, all of them by themselves.

    >>> _sample_texts("once"), _sample_texts(["once", "twice"])["texts"]
    ({'text': 'once'}, ['once', 'twice'])
    >>> print(_sample_texts(["once", "twice"])["text"])
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
