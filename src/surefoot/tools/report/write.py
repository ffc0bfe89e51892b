"""The files of reports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from surefoot.config.paths import run_path
from surefoot.errors import ConfigError, DataError, first_line
from surefoot.tools.diagnose.checks import findings
from surefoot.tools.diagnose.finding import Check, Finding
from surefoot.tools.diagnose.reading import history_of
from surefoot.tools.report.figures import write_file
from surefoot.tools.report.followed import FollowedRun
from surefoot.tools.report.page import POLICY, run_page, runs_page
from surefoot.tools.report.series import ReportedRun, read_reported_run
from surefoot.tracking.panels_file import read_panels
from surefoot.tracking.run_reader import REPORT, is_run, missing_run


def write_page(*paths: str | Path, out: str | Path | None = None) -> Path:
    """Write one HTML page for one run, or for several runs with overlaid curves, and return its
    path.

    paths: directories of finished, running or dead runs, which are only read. out: the file to
    write. Default: report.html in the run's directory, or in the current directory for several
    runs. The page needs no network and no other file, and has at most a megabyte. The write is
    atomic. Raises `ConfigError` if a path is not the directory of a run, or the file cannot be
    written.

    >>> import tempfile
    >>> run = Path(tempfile.mkdtemp())
    >>> _ = (run / "metrics.jsonl").write_text(
    ...     '{"kind": "train", "step": 1, "loss": 2.5}' + chr(10)
    ... )
    >>> write_page(run).name, write_page(run).read_text()[:15]
    ('report.html', '<!DOCTYPE html>')
    """
    if not paths:
        raise ConfigError(
            "report-without-runs",
            problem="no run to report",
            remedy="pass the directory of one run or several",
            setting="paths",
        )
    places = [run_path(path, setting="paths") for path in paths]
    if out is not None:
        target = run_path(out, setting="out")
    elif len(places) == 1:
        target = places[0]
    else:
        target = Path()
    if target.is_dir():
        target /= REPORT
    return write_file(target, page_of(places).encode())


def page_of(
    paths: Sequence[Path],
    *,
    script: str = "",
    policy: str = POLICY,
    followed: Mapping[Path, FollowedRun] = MappingProxyType({}),
) -> str:
    """Render the page of runs in their current state; of the runs in `followed`, only what is new
    is read.

    Raises `ConfigError` if a directory does not contain a run.
    """
    for path in paths:
        if path.is_dir() and not is_run(path):
            raise missing_run(path, path.parent)
    if len(paths) > 1:
        runs = [read_reported_run(path, followed=followed.get(path)) for path in paths]
        return runs_page(runs, script=script, policy=policy)
    run, run_findings = _with_findings(paths[0], followed.get(paths[0]))
    panels = None
    try:
        panels = read_panels(run.files.path)
    except DataError as problem:
        run = replace(run, problems=(*run.problems, first_line(problem)))
    return run_page(run, findings=run_findings, panels=panels, script=script, policy=policy)


def report_at_end(path: Path, *, warn: Callable[[str], None]) -> None:
    """Write the page of the run that this process has trained. A failure is passed to `warn`."""
    try:
        write_file(path / REPORT, page_of([path]).encode())
    except Exception as problem:  # a report failure never breaks a run
        kind = "" if isinstance(problem, ConfigError) else f"{type(problem).__name__}: "
        warn(f"warning: no {path / REPORT}: {kind}{first_line(problem)}")


def _with_findings(path: Path, followed: FollowedRun | None) -> tuple[ReportedRun, list[Finding]]:
    run = read_reported_run(path, followed=followed)
    if not run.records.count:
        return run, []
    failures: list[str] = []

    def note(check: Check, problem: Exception) -> None:  # by records that another program wrote
        text = f"The check for {check.name} failed: {type(problem).__name__}: {problem}"
        failures.append(text)

    run_findings = findings(history_of(path, run.records), broken=note)
    return replace(run, problems=(*run.problems, *failures)), run_findings
