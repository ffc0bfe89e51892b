"""The evaluations of a session, between steps and at the end of the run, and what their scores
decide.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.reader import interprets
from surefoot.config.keywords import parse_score, unmonitored
from surefoot.config.train_settings import Timetable
from surefoot.errors import CheckpointError, DivergedError
from surefoot.run.checkpointing import Checkpointing
from surefoot.run.samples import announced
from surefoot.tracking.format import number
from surefoot.tracking.logger import Journal
from surefoot.train.evaluate import EvaluationStoppedError, numbers
from surefoot.train.model_weights import weights_of
from surefoot.train.scorer import Evaluator
from surefoot.train.state_dict import RunState


@dataclass(frozen=True)
class BegunEnd:
    """What the records of a complete run have of its end, which this session writes."""

    has_sample: bool
    weights_step: int | None  # of the final evaluation
    scores_at_end: dict[str, float]


class Evaluations:
    """The scores and pending evaluations of one session.

    checkpointing: None if nothing is saved. doing: shows what a session does.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        run_state: RunState,
        times: Timetable,
        journal: Journal,
        *,
        checkpointing: Checkpointing | None,
        say: Callable[[str], None],
        doing: Callable[[str], None],
    ) -> None:
        self.evaluator = evaluator
        self.run_state = run_state
        self.state = run_state.state
        self.times = times
        self.journal = journal
        self.checkpointing = checkpointing
        self.say = say
        self.doing = doing
        self.scores: dict[str, float] = {}  # the last scores
        # of the last evaluation, also in an earlier session: the step before it, and its scores
        self.latest: tuple[int, dict[str, float]] = (-1, {})
        self.first: dict[str, float] = {}  # the first scores of the run, with their step
        self.due = False  # a signal interrupted the evaluation of the newest step
        self.ended = False  # the final evaluation is complete
        # of the final evaluation: the step of the weights, and their scores
        self.at_end: tuple[int, dict[str, float]] | None = None
        self.news: list[str] = []  # messages on the newest step, below its row
        self.were_nan: set[str] = set()  # watched scores that were NaN in this session

    @interprets
    def resumed(self, checkpoint: Checkpoint) -> None:
        """Continue after a checkpoint that was restored."""
        saved = checkpoint.saved
        self.due = saved.evaluation_due
        self.first = {name: float(value) for name, value in saved.first_scores.items()}
        scores = {name: float(value) for name, value in (saved.scores or {}).items()}
        self.latest = checkpoint.step, scores
        self.ended = saved.ended and self._is_finished  # an extended run has a new end

    def completed(self, begun_end: BegunEnd) -> None:
        """Take up the scores of a run that was complete when it was restored."""
        _, self.scores = self.latest
        if begun_end.weights_step is not None:
            self.at_end = (begun_end.weights_step, begun_end.scores_at_end)

    @property
    def has_end_splits(self) -> bool:
        """True if some splits are evaluated at the end of the run."""
        return bool(self.evaluator.names(at_end=True))

    @property
    def has_splits(self) -> bool:
        """True if some splits are evaluated while the run trains."""
        return bool(self.evaluator.names(at_end=False))

    def scores_due(self, done: int) -> bool:
        """Return True if splits are evaluated after `done` steps."""
        is_due = self.due or self.times.evaluate_due(done)
        return is_due and self.has_splits

    def end_due(self) -> bool:
        """Return True if the final evaluation follows."""
        return self.has_end_splits and self._is_finished and not (self.ended or self.due)

    def metrics_after(self, done: int) -> dict[str, float]:
        """Return the metrics of the evaluation after `done` steps, or nothing without one."""
        scored_step, metrics = self.latest
        return metrics if scored_step == done else {}

    def score(self, *, stop: Callable[[], bool]) -> None:
        """Evaluate and record all splits except `at_end` splits. Updates the best score and the
        learning-rate factor.
        """
        metrics = self._evaluate(stop, at_end=False)
        if metrics is None:
            return
        step = self.state.step
        self.scores = numbers(metrics)
        self.latest = (step, self.scores)
        if not self.first:
            self.first = {"step": step, **self.scores}
        self.watch(self.scores, of_training=False)  # before `_steer`: may end the run
        lr_factor, message = self._steer()
        self.journal.write({"kind": "eval", "step": step, **metrics, **lr_factor})
        if message is not None:
            self.news.append(message)

    def check_metrics(self) -> None:
        """Raise before the first step what the first evaluation would raise, from one batch of each
        split. Collective.
        """
        monitored = [
            (watch.by, watch.text) for watch in self.run_state.watches if not watch.of_training
        ]
        feedback = self.run_state.feedback
        if feedback is not None:
            monitored.append(("plateau", feedback.plateau.monitor))
        self.evaluator.check_metrics(monitored)

    def watch(self, values: Mapping[str, float], *, of_training: bool) -> None:
        """Update the best checkpoints and the patience of early stopping with the scores of an
        evaluation or of a training record. NaN changes neither, which is said once a session.
        """
        step = self.state.step
        for watch in self.run_state.watches:
            if watch.of_training != of_training:
                continue
            if watch.score not in values and watch.value is not None:
                continue  # the user's code logs it in some steps only
            value = self._score(watch.by, watch.text, values)
            if math.isnan(value) and watch.score not in self.were_nan:
                self.were_nan.add(watch.score)
                self.say(
                    f"warning: {watch.score} after step {step:,} is NaN: it is never the best value,"
                    " and uses up no patience"
                )
            before = watch.value, watch.step
            if not watch.improved(step, value) or watch.by != "best":
                continue
            if watch.step == step:  # else it is kept as a runner-up
                self.news.append(_of_new_best(watch.score, step, value, before=before))
            if self.checkpointing is not None:
                self.checkpointing.save_requested = True

    def score_at_start(self, *, stop: Callable[[], bool]) -> None:
        """Evaluate and record all splits except `at_end` splits before the first step. A resume
        repeats an interrupted evaluation.
        """
        metrics = self._evaluate(stop, at_end=False)
        self.due = False
        if metrics is not None:
            self.scored_at_start(numbers(metrics))
            self.journal.write({"kind": "eval", "step": 0, **metrics})
            self.journal.step_recorded()

    def scored_at_start(self, scores: dict[str, float]) -> None:
        """Take the scores of the evaluation before the first step."""
        self.first = {"step": 0, **scores}
        self.latest = (0, scores)

    def score_at_end(self, *, stop: Callable[[], bool]) -> None:
        """Evaluate the `at_end` splits with the weights of the best checkpoint, or without `best`
        with the last weights. A resume does not repeat this evaluation.
        """
        best = self._best()
        with nullcontext() if best is None else weights_of(self.state, best):
            metrics = self._evaluate(stop, at_end=True)
        if metrics is None:
            return
        step = self.state.step
        weights_step = step if best is None else best.step
        kept = self.run_state.best
        is_best = kept is not None and kept.step == weights_step
        self.ended = True
        self.at_end = (weights_step, numbers(metrics))
        self.journal.write(
            {
                "kind": "final_eval",
                "step": step,
                "weights_step": weights_step,
                "weights": "best" if is_best else "last",
                **metrics,
            }
        )
        if self.checkpointing is not None:
            self.checkpointing.save_requested = True

    @property
    def _is_finished(self) -> bool:
        return self.run_state.is_finished(self.times.length.steps)

    def _evaluate(self, stop: Callable[[], bool], *, at_end: bool) -> dict[str, Any] | None:
        names = self.evaluator.names(at_end=at_end)
        which = f"of {', '.join(names)}" if at_end else f"after step {self.state.step:,}"
        stop = announced(f"evaluating {', '.join(names)}", self.doing, stop)
        try:
            return self.evaluator.scores(names, stop=stop)
        except EvaluationStoppedError:
            self.due = not at_end
            self.say(f"the evaluation {which} was interrupted; a resume repeats it")
        except DivergedError as problem:  # a failed evaluation does not end a run
            self.say(f"warning: no metrics {which}: {problem}")
        return None

    def _steer(self) -> tuple[dict[str, float], str | None]:
        """Lower the learning rate if the scores ask for it. Returns what the record of the
        evaluation has of it, and a message.
        """
        feedback = self.run_state.feedback
        if feedback is None:
            return {}, None
        message = None
        step = self.state.step
        is_new = feedback.standing.step < step  # False where the rule begins
        if is_new and self.times.every["evaluate_every"].due(step):  # not due at an early end
            before = feedback.standing.factor
            score = self._score("plateau", feedback.plateau.monitor, self.scores)
            message = feedback.update(step, score)
            if not self._is_finished:
                self.state.lr_factor = feedback.standing.factor
            elif feedback.standing.factor != before:  # stored for an extended run
                message = None
        return {"lr_factor": feedback.standing.factor}, message

    def _score(self, by: str, text: str, values: Mapping[str, float]) -> float:
        score = parse_score(text)[1]
        if score not in values:
            raise unmonitored(by, text, f"available metrics: {', '.join(values)}", scores=[*values])
        return values[score]

    def _best(self) -> Checkpoint | None:
        """Return the checkpoint of the best weights, or None if the last ones are evaluated."""
        best = self.run_state.best
        if best is None or best.step is None or best.step == self.state.step:
            return None
        if self.checkpointing is None:
            self.say(
                f"warning: nothing is saved, so the weights of step {best.step}, the best, are lost:"
                " the last weights are evaluated instead"
            )
            return None
        try:
            return self.checkpointing.at(best.step)
        except CheckpointError as problem:
            self.say(f"warning: {problem}: the last weights are evaluated instead")
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
