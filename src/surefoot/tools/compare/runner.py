"""The session that trains the variants of a comparison, several at once, and its output on a
terminal.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import TextIO

from surefoot.errors import visible
from surefoot.tools.compare.search import Search
from surefoot.tools.compare.trained import refuse_missing_score, watched
from surefoot.tools.compare.trials import Trial, TrialOutcome, TrialProgress, Trials, is_over
from surefoot.tools.compare.variants import Direction
from surefoot.tracking.console import TextWriter, can_redraw
from surefoot.tracking.format import duration, in_line, number, shortened
from surefoot.tracking.run_reader import read_run

_LOOK_S = 0.2
_BETWEEN_S = 10.0  # minimum interval between plain lines of one variant
_NAME = 20  # minimum characters of a name on a narrow terminal
# of a terminal: to the start of a line above, and clear what is below
_ABOVE = "\x1b[{}A\r"
_ERASE_BELOW = "\x1b[J"


class Lines:
    """Progress output as plain lines: at most one line per variant in 10 s, and only if values
    changed.
    """

    def __init__(
        self, stream: TextIO | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.writer = TextWriter(stream)
        self.now = now
        self.printed: dict[str, tuple[float, list[str]]] = {}

    def say(self, text: str) -> None:
        self.writer.put(f"{visible(text)}\n")

    def show(self, standing: Mapping[str, TrialProgress]) -> None:
        for name, how in standing.items():
            at, before = self.printed.get(name, (-_BETWEEN_S, []))
            values = how.values()
            if how.step > 0 and values != before and self.now() - at >= _BETWEEN_S:
                self.printed[name] = (self.now(), values)
                self.say(" ".join([f"variant={in_line(name)}", *values]))

    def leave(self) -> None: ...
    def close(self) -> None: ...


class Board:
    """Progress output on a terminal: one line per running variant, redrawn in one write if a line
    changed.
    """

    def __init__(self, stream: TextIO | None = None, *, width: int | None = None) -> None:
        self.writer = TextWriter(stream)
        self.width = width
        self.drawn: list[str] = []

    def leave(self) -> None:
        """Keep the drawn lines, because other text was printed below them."""
        self.drawn = []

    def say(self, text: str) -> None:
        self.writer.put(f"{self._start()}{visible(text)}\n")
        self._draw(self.drawn)

    def show(self, standing: Mapping[str, TrialProgress]) -> None:
        columns = {}  # by name: its progress, which begins after the column of names
        for name, how in standing.items():
            values = how.values() if how.step > 0 else ["starting"]
            columns[in_line(name)] = "  ".join(["", *values])
        room = (self.width or get_terminal_size().columns) - 1
        longest = max((len(text) for text in columns.values()), default=0)
        longest_name = max((len(name) for name in columns), default=0)
        width = min(longest_name, max(_NAME, room - longest))
        lines = []
        for name, text in columns.items():
            lines.append(f"{shortened(name, width, keep='both'):<{width}}{text}"[:room])
        if lines != self.drawn:
            self._draw(lines, self._start())

    def close(self) -> None:
        self.writer.put(self._start())
        self.drawn = []

    def _start(self) -> str:
        return _ABOVE.format(len(self.drawn)) + _ERASE_BELOW if self.drawn else ""

    def _draw(self, lines: list[str], start: str = "") -> None:
        self.writer.put(start + "".join(f"{line}\n" for line in lines))
        self.drawn = lines


def screen() -> Lines | Board:
    """Return a live table on a terminal, otherwise lines."""
    return Board() if can_redraw(sys.stdout) else Lines()


class VariantsInOrder:
    """A chooser that selects variants in order. `total` counts all variants, `over` the variants
    that ended in earlier sessions.
    """

    def __init__(self, names: Sequence[str], directory: Path) -> None:
        self.waiting = [name for name in names if not is_over(directory, name)]
        self.total = len(names)
        self.over = len(names) - len(self.waiting)

    def next(self) -> str | None:
        """Return the next variant to train; None if no variant is ready. The session calls again
        after each variant.
        """
        return self.waiting.pop(0) if self.waiting else None

    def saw(self, name: str, step: int, score: float) -> bool:  # noqa: ARG002
        return False  # never pruned

    def ended(self, name: str, outcome: TrialOutcome) -> None:
        """Receive the outcome of a variant."""


Chooser = VariantsInOrder | Search


class ComparisonSession:
    """A session that trains variants until all have ended or `stopping()` returns True."""

    def __init__(
        self,
        chooser: Chooser,
        trials: Trials,
        *,
        jobs: int,
        score: tuple[Direction, str] | None,
        screen: Lines | Board,
        stopping: Callable[[], bool],
        labels: Mapping[str, str],
    ) -> None:
        self.chooser = chooser
        self.trials = trials
        self.jobs = jobs
        self.score = score
        self.screen = screen
        self.stopping = stopping
        self.labels = labels
        self.done = 0
        self.estimated = False
        self.announced_stop = False

    def train(self) -> None:
        """Train all variants; after a stop request, each running variant saves a checkpoint and
        ends.
        """
        try:
            while self._begin() or self.trials.running:
                time.sleep(_LOOK_S)
                if self.stopping() and not self.announced_stop:
                    self.announced_stop = True
                    self.screen.leave()
                for trial in self.trials.running.values():
                    self._look(trial)
                for trial, outcome in self.trials.ended():
                    self._look(trial)
                    self._end(trial, outcome)
                running = self.trials.running.values()
                self.screen.show({self._label(trial): trial.standing for trial in running})
        finally:
            self.trials.close()
            self.screen.close()

    def _label(self, trial: Trial) -> str:
        return self.labels.get(trial.name, trial.name)

    def _begin(self) -> bool:
        """Start variants while there is room for them; return True if any was started."""
        if self.stopping():
            for trial in self.trials.running.values():
                self.trials.stop(trial, "stopped")
            return False
        has_begun = False
        while len(self.trials.running) < self.jobs:
            name = self.chooser.next()
            if name is None:
                break
            self.trials.start(name)
            has_begun = True
        return has_begun

    def _look(self, trial: Trial) -> None:
        """Read the new records of a variant; stop it if its score is not worth going on."""
        how = trial.standing
        for record in trial.new_records():
            if how.steps is None:
                files = read_run(self.trials.directory.path / trial.name)
                how.steps = files.planned_steps
                self.score = self.score or watched(files)
            if self.score is None:
                how.take(record, score=None)
                continue
            _, score = self.score
            how.take(record, score=score)
            if record["kind"] == "eval":
                refuse_missing_score(self.score, record, of=trial.name)
                if self.chooser.saw(trial.name, int(record["step"]), float(record[score])):
                    self.trials.stop(trial, "pruned")
        if not self.estimated and trial.fresh and how.eta_s is not None:
            self._estimate(trial, how.eta_s)

    def _estimate(self, trial: Trial, eta_s: float) -> None:
        self.estimated = True
        left = self.chooser.total - self.chooser.over - self.done
        if left > 1:
            of_one_s = time.monotonic() - trial.started + eta_s
            whole_s = of_one_s * math.ceil(left / self.jobs)
            self.screen.say(
                f"about {duration(whole_s)} for the remaining {left} runs, estimated from the first"
            )

    def _end(self, trial: Trial, outcome: TrialOutcome) -> None:
        how = trial.standing
        if outcome.status != "stopped":
            self.done += 1
        line = f"{self._label(trial)}: {outcome.status} at step {how.step}"
        if how.score is not None and self.score is not None:
            _, name = self.score
            line += f", {name} {number(how.score)}"
        if outcome.said:
            line += f": {outcome.said}"
        self.screen.say(line)
        self.chooser.ended(trial.name, outcome)
