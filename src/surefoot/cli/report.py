"""`surefoot report RUN...`: an HTML page or pictures of one or several runs, or a page served
during training.
"""

import secrets
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from tyro.conf import Positional, arg

from surefoot.cli.diagnose import AlertOption, alert_of
from surefoot.cli.options import (
    WHICH_RUN,
    check_excluded,
    find_run,
    limited,
    needs_option,
    only_options,
)
from surefoot.config.extras import refuse_missing
from surefoot.config.paths import run_path

if TYPE_CHECKING:
    from surefoot.tools.diagnose.alert import Alert

_DRAWN = 8  # charts in the picture


@dataclass(frozen=True, kw_only=True)
class Report(AlertOption):
    """Write an HTML page about a run: a one-sentence summary, findings, loss and
    metrics, learning rate, norms, speed, memory and time, layers, settings, example
    outputs, and the commands that repeat the run. The page is one file of at most
    1 MB and needs no network. Every run writes a page when it ends (--report False
    disables this). The run may be finished, training or dead. The page of several
    runs has common charts and the settings that differ.

    The run's program is not executed. Example outputs are shown if the run
    wrote them. surefoot evaluate RUN --panels writes them for a killed run.

      surefoot report latest
      surefoot report runs/a runs/b --out compared.html
      surefoot report runs/mine --watch
      surefoot report --watch runs/
    """

    runs: Positional[Annotated[tuple[str, ...], arg(metavar="RUN ...")]] = ()
    """Runs' directories, their names under runs/, or latest."""
    out: str | None = None
    """Output file. Default: RUN/report.html, or report.html for several runs."""
    png: bool = False
    """Also draw the main curves as .png and .svg beside the page."""
    watch: bool = False
    """Serve the page on this machine and update it while the run trains. The page of a directory of
    runs shows all of them, with buttons that save or stop a run, or halve its rates."""
    port: int | None = limited(None, min_value=0)
    """Port of --watch. Default: a free port."""


def report(arguments: list[str]) -> None:
    """Run `surefoot report`: write one HTML page about runs, or serve it while they train."""
    options = only_options(
        Report, arguments, verb="report", missing=f"{WHICH_RUN}; or several runs"
    )
    if options.watch:
        files = [name for name in ("out", "png") if getattr(options, name)]
        check_excluded("watch", files, reason="it serves the page, and writes no file")
    if options.watch and len(options.runs) == 1:
        directory = run_path(options.runs[0], setting="RUN")
        if _is_directory_of_runs(directory):
            receiver = alert_of(options, run=directory)
            _watch_directory(directory, port=options.port or 0, alert=receiver)
    if options.alert is not None or options.alert_test:
        raise needs_option("alert, for a directory of runs,", "watch", "runs/")
    runs = [find_run(name) for name in options.runs]
    if options.watch:
        from surefoot.tools.report.live_server import create_server

        token = secrets.token_urlsafe(16)
        with create_server(runs, port=options.port or 0, token=token) as server:
            _serve(server, token)
    if options.port is not None:
        raise needs_option("port", "watch", "runs/")
    if options.png:
        refuse_missing("png", "resvg_py", instead="without it, the page has the same charts")
    from surefoot.tools.report.write import write_page

    out = None if options.out is None else run_path(options.out, setting="--out")
    target = write_page(*runs, out=out)
    print(f"written: {target}")
    if len(runs) == 1 and _could_have_panels(runs[0]):
        run = shlex.quote(str(runs[0]))
        print(
            "note: without panels of the model's outputs;"
            f" to add them: surefoot evaluate {run} --panels"
        )
    if options.png:
        from surefoot.tools.report.figures import draw
        from surefoot.tools.report.run_charts import charts
        from surefoot.tools.report.series import read_reported_run
        from surefoot.tools.report.several_runs import page_values

        first, *others = [read_reported_run(run) for run in runs]
        if others:
            several = page_values([first, *others], stretches=150)
            figures = several["overlaid"]
            title = several["title"]
        else:
            figures = charts(first)
            title = first.files.name
        for file in draw(figures[:_DRAWN], target.with_suffix(""), title=title):
            print(f"written: {file}")


def _is_directory_of_runs(path: Path) -> bool:
    return (
        path.is_dir()
        and not (path / "config.toml").exists()
        and not (path / "metrics.jsonl").exists()
    )


def _watch_directory(directory: Path, *, port: int, alert: "Alert | None") -> NoReturn:
    from surefoot.tools.report.directory_watch import DirectoryWatch
    from surefoot.tools.report.live_server import create_directory_server

    token = secrets.token_urlsafe(16)
    watch = DirectoryWatch(directory, alert=alert, say=lambda text: print(text, file=sys.stderr))
    watch.start()
    try:
        with create_directory_server(watch, port=port, token=token) as server:
            _serve(server, token)
    finally:
        watch.close()


def _serve(server: ThreadingTCPServer, token: str) -> NoReturn:
    from surefoot.tools.report.live_server import HERE

    address = f"http://{HERE}:{server.server_address[1]}/{token}/"
    try:
        print(f"open {address} on this machine; Ctrl-C stops the server", flush=True)
        server.serve_forever()
    except KeyboardInterrupt:
        print("\nserver stopped", file=sys.stderr)
    sys.exit(130)


def _could_have_panels(run: Path) -> bool:
    from surefoot.tracking.jsonl import read_records
    from surefoot.tracking.panels_file import FILE
    from surefoot.tracking.run_reader import is_running, read_run

    kind = read_run(run).config.program.get("kind")
    if kind not in ("recipe", "file") or (run / FILE).exists() or is_running(run):
        return False
    if not any((run / "checkpoints").glob("step-*")):
        return False
    if kind == "recipe":
        return True
    last: dict[str, Any] = {}
    for record in read_records(run / "metrics.jsonl"):
        last = record
    # a finished run of a program has written its panels
    return not str(last.get("event", "")).startswith("finished")
