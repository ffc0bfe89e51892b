"""The runs of a directory for a page that is updated: rows from the cache at once, new records from
a thread.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigError, SurefootError, first_line
from surefoot.tools.change.while_training import request_half_rates
from surefoot.tools.diagnose.alert import Alert
from surefoot.tools.diagnose.checks import findings
from surefoot.tools.diagnose.finding import Finding
from surefoot.tools.diagnose.reading import history_of
from surefoot.tools.report.charts import Chart
from surefoot.tools.report.followed import (
    FollowedRun,
    prune_cache,
    read_followed,
    read_head,
)
from surefoot.tools.report.page import render
from surefoot.tools.report.run_signals import Request, run_not_training, signal_run
from surefoot.tools.report.series import ReportedRun
from surefoot.tools.report.several_runs import overlaid_charts
from surefoot.tools.report.watched_run import (
    WatchedRun,
    began_at,
    no_files,
    row_of,
    runs_in,
    stamp_of,
)
from surefoot.tracking.run_reader import lock_holder, read_run

EVERY_S = 2.0
_MOST_RUNS = 500  # the newest
_MOST_OPEN = 16  # runs whose curves stay in memory
_MOST_DRAWN = 12  # runs whose curves are overlaid
_DEPTH = 2  # `compare` writes its runs into a directory of its own
_FINDINGS_S = 10.0  # between two checks of a run
_TIMES_AS_LONG = 100  # between two checks of a run, in durations of a check
_SAVED_S = 30.0  # between two writes of the cache


class DirectoryWatch:
    """The page of a directory of runs. `look` lists the runs, `work` reads some of the new records;
    `start` does both in a thread.
    """

    def __init__(
        self, directory: Path, *, alert: Alert | None = None, say: Callable[[str], None] = print
    ) -> None:
        self.directory = directory
        self.alert = alert
        self.say = say
        self.runs: dict[str, WatchedRun] = {}
        self.open: dict[str, FollowedRun] = {}  # the last used is last
        self.lock = threading.Lock()
        self.asking = threading.Lock()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._follow, name="surefoot reads runs", daemon=True)

    def look(self) -> None:
        """List the runs and the sizes of their records. A new run gets its row from the cache."""
        newest: list[tuple[float, Path]] = []
        for path in runs_in(self.directory, _DEPTH):
            with suppress(OSError):
                newest.append((began_at(path), path))
        runs = {}
        for began, path in sorted(newest, reverse=True)[:_MOST_RUNS]:
            name = str(path.relative_to(self.directory))
            key = sha256(os.fsencode(name)).hexdigest()[:16]
            run = self.runs.get(key)
            if run is None:
                run = WatchedRun(path, name, key)
                _fill_from_cache(run)
            run.began = began
            run.stamp = stamp_of(path)
            run.watched |= run.running
            runs[key] = run
        with self.lock:
            self.runs = runs
            for key in self.open.keys() - runs.keys():
                del self.open[key]

    def work(self) -> bool:
        """Read a part of the new records of each running run, and of one other run; return True if
        there are more.
        """
        waiting = [run for run in list(self.runs.values()) if run.read != run.stamp]
        running = [run for run in waiting if run.running]
        others = [run for run in waiting if not run.running]
        more = len(others) > 1
        for run in [*running, *others[:1]]:
            if self.over.is_set():
                break
            with self.lock:
                more |= self._advance(run)
        return more

    def start(self) -> None:
        self.look()
        prune_cache()
        self.thread.start()

    def close(self) -> None:
        """End the thread and write the cache of the runs that were read since."""
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()
        with self.lock:
            for key in list(self.open):
                self._put_away(key)
        if self.alert is not None:
            self.alert.close()
            self._say_problems()

    def page(
        self, chosen: Sequence[str], *, script: str, policy: str
    ) -> tuple[str, tuple[Any, ...]]:
        """Return the page with the curves of the chosen runs overlaid, and a value that differs if
        the page does.
        """
        runs = self.runs  # replaced as a whole: a page without curves waits for no reading
        drawn = [runs[key] for key in chosen if key in runs][:_MOST_DRAWN]
        signatures = [
            (run.key, run.stamp, run.state, run.fraction, run.note, run.row)
            for run in runs.values()
        ]
        charts: list[Chart] = []
        if drawn:
            with self.lock:
                charts = self._charts(drawn)
        values = {
            "title": self.directory.resolve().name,
            "runs": list(runs.values()),
            "series": {run.key: index for index, run in enumerate(drawn)},
            "running": sum(run.running for run in runs.values()),
            "charts": charts,
            "most": _MOST_DRAWN,
        }
        common = {"script": script, "policy": policy, "state": "", "left_out": ""}
        return render("directory.html", common, [values]), (signatures, [run.key for run in drawn])

    def _charts(self, drawn: Sequence[WatchedRun]) -> list[Chart]:
        reported = []
        for run in drawn:
            records = self._opened(run).records
            reported.append(ReportedRun(no_files(run.path), records, running=run.running))
        labels = [run.name for run in drawn]
        return overlaid_charts(labels, reported, max(20, 300 // len(drawn)))

    def request(self, key: str, request: Request) -> str:
        """Signal the process of a run, and return the answer. Raises `ConfigError` as `signal_run`
        does.
        """
        with self.asking:
            run = self.runs[key]
            try:
                if request == "stop" and run.stopped and run.stopped == lock_holder(run.path):
                    raise ConfigError(
                        "stop-already-requested",
                        problem=f"process {run.stopped} was asked before",
                        reason="a second signal would not let it save",
                        path=run.path,
                        pid=run.stopped,
                    )
                number = signal_run(run.path, request)
            except SurefootError as problem:
                run.note = first_line(problem)
                raise
            what = "save"
            if request == "stop":
                run.stopped = number
                what = "save and stop"
            run.note = f"process {number} was asked to {what} at {time.strftime('%H:%M:%S')}"
            return run.note

    def request_half_rates(self, key: str) -> str:
        """Ask the process of a run for half of its learning rates, and return the answer."""
        with self.asking:
            run = self.runs[key]
            try:
                if not run.running:
                    raise run_not_training(run.path)
                run.note = request_half_rates(run.path)
            except SurefootError as problem:
                run.note = first_line(problem)
                raise
            return run.note

    def _follow(self) -> None:
        reported = ""
        while not self.over.is_set():
            more = False
            try:
                self.look()
                more = self.work()
            except Exception as problem:  # the page goes on with what it has
                text = f"{type(problem).__name__}: {first_line(problem)}"
                if text != reported:
                    self.say(f"note: {self.directory} could not be read: {text}")
                    reported = text
            self._say_problems()
            self.over.wait(0.0 if more else EVERY_S)

    def _say_problems(self) -> None:
        if self.alert is not None:
            for line in self.alert.problems():
                self.say(line)

    def _opened(self, run: WatchedRun) -> FollowedRun:
        followed = self.open.pop(run.key, None) or read_followed(run.path)
        while len(self.open) >= _MOST_OPEN:
            self._put_away(next(iter(self.open)))
        self.open[run.key] = followed
        return followed

    def _put_away(self, key: str) -> None:
        followed = self.open.pop(key)
        run = self.runs.get(key)
        if run is not None and run.row is not None and run.dirty:
            self._save(run, followed)

    def _save(self, run: WatchedRun, followed: FollowedRun) -> None:
        assert run.row is not None
        followed.save(run.row)
        run.saved_at = time.monotonic()
        run.dirty = False

    def _advance(self, run: WatchedRun) -> bool:
        stamp = run.stamp  # `look` may replace it meanwhile
        followed = self._opened(run)
        try:
            more = followed.advance()
        except OSError as problem:
            run.read = stamp
            run.note = f"metrics.jsonl cannot be read: {problem.strerror or problem}"
            return False
        run.dirty = True
        now = time.monotonic()
        is_due = not more and (now >= run.checked_at or not run.running)
        if run.files is None or is_due:
            run.files = read_run(run.path)
        of_run = self._findings(run, followed) if is_due else None
        size, _ = followed.reader.size_and_time
        run.fraction = min(1.0, followed.reader.offset / max(1, size))
        run.row = row_of(run, followed, of_run)
        if not more:
            run.read = stamp
            if not run.running or now - run.saved_at >= _SAVED_S:
                self._save(run, followed)
        return more

    def _findings(self, run: WatchedRun, followed: FollowedRun) -> list[Finding]:
        started = time.monotonic()
        history = history_of(run.path, followed.records)
        # the page of the run names the checks that fail on records of another program
        of_run = findings(history, broken=lambda _check, _problem: None)
        ended = time.monotonic()
        run.checked_at = ended + max(_FINDINGS_S, _TIMES_AS_LONG * (ended - started))
        for finding in of_run:
            is_new = finding.severity == "error" and finding.name not in run.alerted
            if self.alert is not None and run.watched and is_new:
                self.alert.send(finding, run=run.path, step=followed.records.last_step)
                run.alerted.append(finding.name)
        return of_run


def _fill_from_cache(run: WatchedRun) -> None:
    head = read_head(run.path)
    if head is None:
        return
    run.row = head["row"]
    run.alerted = head["row"]["alerted"]
    run.fraction = 1.0
    if head["row"]["state"] != "running":  # the findings of a run that was killed differ
        run.read = (*head["size_and_time"], False)
