"""Evaluations, samples and report panels of a session, between steps and at the end of the run."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.reader import interprets
from surefoot.config.keywords import parsed, unmonitored
from surefoot.config.tree import flat
from surefoot.errors import CheckpointError, DivergedError, error_of_dict
from surefoot.run.components import RunComponents
from surefoot.tracking.format import number
from surefoot.tracking.jsonl import read_records
from surefoot.tracking.logger import Journal
from surefoot.train.evaluate import EvaluationStoppedError, numbers
from surefoot.train.model_weights import weights_of

if TYPE_CHECKING:
    from surefoot.tracking.panels_file import Panels


def make_panels(parts: RunComponents, *, stop: Callable[[], bool] = lambda: False) -> "Panels":
    """Return the panels that the run's `panels_fn` builds with the evaluated model. Warns of
    missing panels. Collective.
    """
    from surefoot.tracking.panels_file import Panels, build_panels

    make = parts.settings.panels_fn
    assert make is not None
    panels, notes = parts.evaluator.panels(lambda model: build_panels(make, model, stop=stop))
    for line in notes:
        parts.say(f"warning: {line}")
    return Panels(step=parts.state.step, panels=tuple(panels))


def draw_sample(parts: RunComponents) -> str | Sequence[str]:
    """Return what the run's `sample_fn` returns; with `sample_on_all_ranks`, the texts of all
    ranks, in their order. Collective.
    """
    make = parts.settings.sample_fn
    world = parts.world
    assert make is not None
    if world.size == 1 or not parts.settings.sample_on_all_ranks:
        return parts.evaluator.sample(make)
    texts: list[str] = []
    problem = None
    try:
        sample = parts.evaluator.sample(make, rank=world.rank)
        texts += [sample] if isinstance(sample, str) else sample
    except DivergedError as diverged:  # the other ranks wait for this one
        problem = diverged.to_dict()
    of_ranks = world.gathered([texts, problem])
    for _, problem in of_ranks:
        if problem is not None:
            raise error_of_dict(problem)
    return [text for own, _ in of_ranks for text in own]


class Evaluations:
    """The scores and pending evaluations of one session."""

    def __init__(self, parts: RunComponents, journal: Journal) -> None:
        self.parts = parts
        self.journal = journal
        self.state = parts.state
        self.times = parts.plan.times
        self.evaluator = parts.evaluator
        self.scores: dict[str, float] = {}  # the last scores
        # of the last evaluation, also in an earlier session: the step before it, and its scores
        self.latest: tuple[int, dict[str, float]] = (-1, {})
        self.first: dict[str, float] = {}  # the first scores of the run, with their step
        self.due = False  # a signal interrupted the evaluation of the newest step
        self.ended = False  # the final evaluation is complete
        self.at_end: tuple[int, dict[str, float]] | None = (
            None  # final evaluation: step of the weights, scores
        )
        self.news: list[str] = []  # messages on the newest step, below its row
        self.were_nan: set[str] = set()  # watched scores that were NaN in this session

    @interprets
    def resumed(self, checkpoint: Checkpoint) -> None:
        self.due = checkpoint.saved.evaluation_due
        self.first = {name: float(value) for name, value in checkpoint.saved.first_scores.items()}
        scores = checkpoint.saved.scores or {}
        self.latest = checkpoint.step, {name: float(value) for name, value in scores.items()}
        self.ended = checkpoint.saved.ended and self.parts.finished  # an extended run has a new end

    def scores_due(self, done: int) -> bool:
        is_due = self.due or self.times.evaluate_due(done)
        return is_due and bool(self.evaluator.names(at_end=False))

    def sample_due(self, done: int) -> bool:
        return self.parts.settings.sample_fn is not None and self.times.sample_due(done)

    def end_due(self) -> bool:
        return (
            bool(self.evaluator.names(at_end=True))
            and self.parts.finished
            and not (self.ended or self.due)
        )

    def score(self, *, stop: Callable[[], bool]) -> None:
        """Evaluate and record all splits except `at_end` splits. Updates the best score and the
        learning-rate factor.
        """
        metrics = self._evaluate(stop, at_end=False)
        if metrics is None:
            return
        self.scores = numbers(metrics)
        self.latest = (self.state.step, self.scores)
        self.first = self.first or {"step": self.state.step, **self.scores}
        self.watch(self.scores, of_training=False)  # before `_steer`: may end the run
        lr_factor, message = self._steer()
        self.journal.write({"kind": "eval", "step": self.state.step, **metrics, **lr_factor})
        if message is not None:
            self.news.append(message)

    def check_metrics(self) -> None:
        """Raise before the first step what the first evaluation would raise, from one batch of each
        split. Collective.
        """
        run_state = self.parts.run_state
        monitored = [(each.by, each.text) for each in run_state.watches if not each.of_training]
        if run_state.feedback is not None:
            monitored.append(("plateau", run_state.feedback.plateau.monitor))
        self.evaluator.check_metrics(monitored)

    def watch(self, values: Mapping[str, float], *, of_training: bool) -> None:
        """Update the best checkpoints and the patience of early stopping with the scores of an
        evaluation or of a training record. NaN changes neither, which is said once a session.
        """
        step, saving = self.state.step, self.parts.checkpointing
        for each in self.parts.run_state.watches:
            if each.of_training != of_training:
                continue
            if each.score not in values and each.value is not None:
                continue  # your own loop logs it in some steps only
            value = self._score(each.by, each.text, values)
            if math.isnan(value) and each.score not in self.were_nan:
                self.were_nan.add(each.score)
                self.parts.say(
                    f"warning: {each.score} after step {step:,} is NaN: it is never the best value,"
                    " and uses up no patience"
                )
            before = each.value, each.step
            if not each.improved(step, value) or each.by != "best":
                continue
            if each.step == step:  # else it is kept as a runner-up
                self.news.append(_of_new_best(each.score, step, value, before=before))
            if saving is not None:
                saving.save_requested = True

    def due_at_start(self) -> bool:
        """Return True if `evaluate_at_start` is set and no earlier session recorded this
        evaluation. Collective.
        """
        parts = self.parts
        if self.state.step or not (
            parts.settings.evaluate_at_start and parts.evaluator.names(at_end=False)
        ):
            return False
        before = (
            read_records(parts.directory.metrics)
            if parts.world.is_main and parts.directory is not None
            else ()
        )
        return bool(parts.world.from_main(all(record["kind"] != "eval" for record in before)))

    def score_at_start(self, *, stop: Callable[[], bool]) -> None:
        """Evaluate and record all splits except `at_end` splits before the first step. A resume
        repeats an interrupted evaluation.
        """
        metrics = self._evaluate(stop, at_end=False)
        self.due = False
        if metrics is not None:
            self.first = {"step": 0, **numbers(metrics)}
            self.journal.write({"kind": "eval", "step": 0, **metrics})
            self.journal.step_recorded()

    def score_at_end(self, *, stop: Callable[[], bool]) -> None:
        """Evaluate the `at_end` splits with the weights of the best checkpoint, or without `best`
        with the last weights. A resume does not repeat this evaluation.
        """
        parts, best = self.parts, self._best()
        with nullcontext() if best is None else weights_of(self.state, best):
            metrics = self._evaluate(stop, at_end=True)
        if metrics is None:
            return
        step = self.state.step if best is None else best.step
        kept = parts.run_state.best
        which = "last" if kept is None or step != kept.step else "best"
        self.ended, self.at_end = True, (step, numbers(metrics))
        self.journal.write(
            {
                "kind": "final_eval",
                "step": self.state.step,
                "weights_step": step,
                "weights": which,
                **metrics,
            }
        )
        if parts.checkpointing is not None:
            parts.checkpointing.save_requested = True

    def sample(self) -> None:
        """Write samples of the model to all sinks. A model that overflows is a warning.
        Collective.
        """
        is_main = self.parts.world.is_main
        if not is_main and not self.parts.settings.sample_on_all_ranks:
            self.evaluator.sample(lambda _: "")  # all ranks gather sharded weights
            return
        self.parts.doing("sampling")
        try:
            sample = draw_sample(self.parts)
        except DivergedError as problem:
            self.parts.say(f"warning: no sample: {problem}")
            return
        if not is_main:
            return
        record = {"kind": "sample", "step": self.state.step, **_sample_texts(sample)}
        if self.parts.settings.sample_summary:
            record["drawn"] = self.parts.settings.sample_summary
        self.journal.write(record)

    def show(self, *, stop: Callable[[], bool]) -> None:
        """Write the report's panels, built on rank 0 until `stop` returns True. A failure does not
        end the run. Collective.
        """
        from surefoot.tracking.panels_file import FILE, panel_to_dict

        parts = self.parts
        assert parts.directory is not None
        if not parts.world.is_main:  # all ranks gather sharded weights
            parts.evaluator.panels(lambda _: None)
            return
        rendered = make_panels(parts, stop=self._announce("building the report's panels", stop))
        if stop() or not rendered.panels:
            return
        try:
            parts.directory.write_text(FILE, rendered.to_json())
        except CheckpointError as problem:
            parts.say(f"warning: {problem}")
        self.journal.show(
            {
                "kind": "panels",
                "step": rendered.step,
                "panels": [*map(panel_to_dict, rendered.panels)],
            }
        )

    def conclude(self) -> None:
        """Send the run's settings and final scores to the trackers."""
        self.journal.show(
            {
                "kind": "outcome",
                "step": self.state.step,
                "settings": flat(self.parts.plan.identity),
                "scores": self.scores,
                **({} if self.at_end is None else {"scores_at_end": self.at_end[1]}),
            }
        )

    def _evaluate(self, stop: Callable[[], bool], *, at_end: bool) -> dict[str, Any] | None:
        names = self.evaluator.names(at_end=at_end)
        which = f"of {', '.join(names)}" if at_end else f"after step {self.state.step:,}"
        try:
            return self.evaluator.scores(
                names, stop=self._announce(f"evaluating {', '.join(names)}", stop)
            )
        except EvaluationStoppedError:
            self.due = not at_end
            self.parts.say(f"the evaluation {which} was interrupted; a resume repeats it")
        except DivergedError as problem:  # a failed evaluation does not end a run
            self.parts.say(f"warning: no metrics {which}: {problem}")
        return None

    def _announce(self, what: str, stop: Callable[[], bool]) -> Callable[[], bool]:
        def stopping() -> bool:
            self.parts.doing(what)
            return stop()

        self.parts.doing(what)
        return stopping

    def _steer(self) -> tuple[dict[str, float], str | None]:
        feedback, step, message = self.parts.run_state.feedback, self.state.step, None
        if feedback is None:
            return {}, None
        if self.times.every["evaluate_every"].due(step):  # False at an early end
            before = feedback.standing.factor
            score = self._score("plateau", feedback.plateau.monitor, self.scores)
            message = feedback.update(step, score)
            if not self.parts.finished:
                self.state.lr_factor = feedback.standing.factor
            elif feedback.standing.factor != before:  # stored for an extended run
                message = None
        return {"lr_factor": self.state.lr_factor}, message

    def _score(self, by: str, text: str, values: Mapping[str, float]) -> float:
        score = parsed(text)[1]
        if score not in values:
            raise unmonitored(by, text, f"available metrics: {', '.join(values)}", scores=[*values])
        return values[score]

    def _best(self) -> Checkpoint | None:
        kept, saving = self.parts.run_state.best, self.parts.checkpointing
        if kept is None or kept.step is None or kept.step == self.state.step:
            return None
        try:
            if saving is not None:
                return saving.at(kept.step)
            why = f"nothing is saved, so the weights of step {kept.step}, the best, are lost: the last weights are evaluated instead"
        except CheckpointError as problem:
            why = f"{problem}: the last weights are evaluated instead"
        self.parts.say(f"warning: {why}")
        return None


def _of_new_best(
    score: str, step: int, value: float, *, before: tuple[float | None, int | None]
) -> str:
    """Return the line about a best value. `before` is the best one so far and its step.

    >>> _of_new_best("val/loss", 30, 0.25, before=(0.5, 20))
    'best: val/loss 0.25 at step 30, 0.5 at step 20 before'
    """
    earlier_value, earlier_step = before
    line = f"best: {score} {number(value)} at step {step:,}"
    if earlier_value is None or earlier_step is None:
        return line
    return f"{line}, {number(earlier_value)} at step {earlier_step:,} before"


def _sample_texts(sample: str | Sequence[str]) -> dict[str, Any]:
    """Return the text of a sample. For several samples, also return the list of their texts.

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
