"""`surefoot report RUN...`: a run, or several over each other, as one page of HTML; as a picture; or served while it goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli.options import option, run_directory, whole
from surefoot.config.paths import local_path, open_regular, read_regular
from surefoot.errors import ConfigError

if TYPE_CHECKING:
    from surefoot.reporting.charts import Chart
    from surefoot.reporting.recorded import ReportedRun

_LAST_BYTES = 4096  # of the records, more than their last lines
_FLAGS = ("--watch", "--png")


def report(arguments: list[str]) -> None:
    """`surefoot report RUN... [--out FILE] [--png] [--watch [--port N]]`. Runs nothing of the run's author."""
    place = next((place for place, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    if not place:
        raise ConfigError("report on which run? give its directory, its name under runs/, or latest; or several")
    runs = [run_directory([given]) for given in arguments[:place]]
    rest, out = option(arguments[place:], "--out")
    rest, port = option(rest, "--port")
    flags = set(rest) & set(_FLAGS)
    if unknown := [argument for argument in rest if argument not in _FLAGS]:
        raise ConfigError(
            f"what is meant by {' '.join(unknown)}? surefoot report takes --out, --port, {', '.join(_FLAGS)}"
        )
    if "--watch" in flags:
        if out is not None or "--png" in flags:
            raise ConfigError("--watch serves the page and writes none: leave --out and --png out")
        _watch(runs, port=0 if port is None else whole("--port", port, least=0))
        return
    if port is not None:
        raise ConfigError("--port is for --watch")
    _write(
        runs,
        None if out is None else local_path(out, setting="--out"),
        png="--png" in flags,
    )


def _write(runs: Sequence[Path], out: Path | None, *, png: bool) -> None:
    from surefoot.report.write import page_of, target_of, write

    target = target_of(runs, out)
    write(page_of(runs), target)
    print(f"written: {target}")
    if len(runs) == 1 and _could_have_panels(runs[0]):
        print(f"note: without panels of what the model does, which surefoot evaluate {runs[0]} --panels makes")
    if png:
        from surefoot.reporting.pictures import draw
        from surefoot.reporting.recorded import read_reported_run

        charts, title = _charts([read_reported_run(run) for run in runs])
        for file in draw(charts, target.with_suffix(""), title=title):
            print(f"written: {file}")


def _charts(runs: Sequence[ReportedRun]) -> tuple[list[Chart], str]:
    """The charts of a picture, and what stands above them."""
    if len(runs) == 1:
        from surefoot.reporting.run_charts import charts

        return charts(runs[0]), runs[0].files.name
    from surefoot.reporting.overlay import overlaid

    held = overlaid(runs, ["silent"] * len(runs), stretches=150)
    return held.overlaid, held.title


def _could_have_panels(run: Path) -> bool:
    """Whether a run has left no panels, is over, and can be built again by a program that may have some."""
    from surefoot.config import program
    from surefoot.panels import FILE
    from surefoot.report.write import is_running

    try:
        made_by = program(read_regular(run / "config.toml").decode())
    except (OSError, UnicodeDecodeError, ConfigError):  # the page names it
        return False
    has_panels = {"recipe": True, "file": not _is_finished(run)}.get(str(made_by.get("kind")), False)
    has_checkpoint = any((run / "checkpoints").glob("step-*"))
    return has_panels and has_checkpoint and not (run / FILE).exists() and not is_running(run)


def _is_finished(run: Path) -> bool:
    """Whether the end of the records says that all steps were made: such a run has made its panels, if it has any."""
    try:
        with open_regular(run / "metrics.jsonl") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            return b'"what": "finished"' in file.read()
    except OSError:
        return False


def _watch(runs: Sequence[Path], *, port: int) -> None:
    """Serve until Ctrl-C, and leave with 130."""
    from surefoot.reporting.watching import HERE, served

    with served(runs, port=port) as server:
        try:
            print(f"open http://{HERE}:{server.server_address[1]}/ here; Ctrl-C ends it", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nno longer served", file=sys.stderr)
            sys.exit(130)
