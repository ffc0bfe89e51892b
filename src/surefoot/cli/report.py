"""`surefoot report RUN...`: a run, or several over each other, as one page of HTML; as a picture; or served while it goes on."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from surefoot.cli.options import WHICH_RUN, find_run, limited, only_options
from surefoot.config.paths import local_path
from surefoot.errors import ConfigError

_DRAWN = 8  # charts of the picture


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a page about a run: its course in one sentence, findings, loss and
    metrics, learning rate, norms, speed, memory and time, layers, and settings. It
    shows examples of the model's work and the commands that repeat the run. It is
    one HTML file of at most 1 MB that needs no network. Every run writes one when
    it ends (--report False leaves it out). The run may be finished, training or
    dead. Several runs: their curves in common charts, and the settings that differ.

    The run's program is not executed. Examples are shown if the run wrote them; for
    a run that was killed: surefoot evaluate RUN --panels.

      surefoot report latest
      surefoot report runs/a runs/b --out compared.html
      surefoot report runs/mine --watch
    """

    runs: Positional[Annotated[tuple[str, ...], arg(metavar="RUN ...")]] = ()
    """Runs' directories, their names under runs/, or latest."""
    out: str | None = None
    """The file. Default: RUN/report.html; report.html for several runs."""
    png: bool = False
    """Draw the main curves too, as .png and .svg beside the page."""
    watch: bool = False
    """Serve the page on this machine and renew it while the run trains."""
    port: int | None = limited(None, least=0)
    """Port of --watch. Default: a free one."""


def report(arguments: list[str]) -> None:
    """Write the page of one run or of several, or serve it while they train."""
    options = only_options(Report, arguments, verb="report", missing=f"report on {WHICH_RUN}; or several")
    runs = [find_run(name) for name in options.runs]
    if options.watch:
        if options.out is not None or options.png:
            raise ConfigError("--watch serves the page and writes none: leave --out and --png out")
        from surefoot.report.live_server import HERE, create_server

        with create_server(runs, port=options.port or 0) as server:
            try:
                print(f"open http://{HERE}:{server.server_address[1]}/ here; Ctrl-C ends it", flush=True)
                server.serve_forever()
            except KeyboardInterrupt:
                print("\nno longer served", file=sys.stderr)
                sys.exit(130)
        return
    if options.port is not None:
        raise ConfigError("--port is for --watch")
    from surefoot.report.write import write_page

    target = write_page(*runs, out=None if options.out is None else local_path(options.out, setting="--out"))
    print(f"written: {target}")
    if len(runs) == 1 and _could_have_panels(runs[0]):
        print(f"note: without panels of what the model does, which surefoot evaluate {runs[0]} --panels makes")
    if options.png:
        from surefoot.report.figures import draw
        from surefoot.report.run_charts import charts
        from surefoot.report.series import read_reported_run
        from surefoot.report.several_runs import page_values

        first, *others = [read_reported_run(run) for run in runs]
        several = page_values([first, *others], stretches=150) if others else None
        figures, title = (several["overlaid"], several["title"]) if several else (charts(first), first.files.name)
        for file in draw(figures[:_DRAWN], target.with_suffix(""), title=title):
            print(f"written: {file}")


def _could_have_panels(run: Path) -> bool:
    """Whether a run has left no panels, is over, and can be built again by a program that may have some."""
    from surefoot.report.series import read_reported_run
    from surefoot.tracking.panels_file import FILE

    reported = read_reported_run(run)
    kind, finished = reported.files.config.program.get("kind"), (reported.recorded.over or "").startswith("finished")
    has_panels = kind == "recipe" or (kind == "file" and not finished)  # a finished one has made them, if it has any
    has_checkpoint = any((run / "checkpoints").glob("step-*"))
    return has_panels and has_checkpoint and not (run / FILE).exists() and not reported.running
