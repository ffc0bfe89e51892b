"""trackio: a local database, or the Space or server in TRACKIO_SPACE_ID or TRACKIO_SERVER_URL.

TRACKIO_DIR sets the directory of the database (default: the run's directory). trackio identifies a
run by its unique name.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surefoot.tracking.external.run_facts import About, TrackerState, text_in
from surefoot.tracking.record import Record, numbers_in
from surefoot.tracking.shown import SHOWN_KINDS, image_in, tag_of


class Trackio:
    """A trackio run."""

    def __init__(self, about: About, state: TrackerState, say: Callable[[str], None]) -> None:
        # read by trackio's import
        os.environ.setdefault("TRACKIO_DIR", str(Path(about.directory) / "trackio"))
        import trackio

        warnings.showwarning = _warning_writer(say)  # trackio reports lost data only by warnings
        self.package = trackio
        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", about.project),
            name=f"{about.name}-{state.id[:6]}",
            config=about.settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, record: Record) -> None:
        if record["kind"] in SHOWN_KINDS:
            self.run.log({tag_of(record): self._shown(record)}, step=record["step"])
            return
        values: dict[str, Any] = dict(numbers_in(record))
        text = text_in(record)
        if text is not None:
            values[record["kind"]] = self.package.Markdown(f"```\n{text}\n```")
        if values:
            self.run.log(values, step=record["step"])

    def _shown(self, record: Record) -> Any:
        match record["kind"]:
            case "text":
                return self.package.Markdown(record["text"])
            case "image":
                return self.package.Image(image_in(record))
            case _:
                return self.package.Histogram(np_histogram=(record["counts"], record["edges"]))

    def close(self, ending: str) -> None:
        """Finish the upload; trackio has no status for the end of a run."""
        del ending
        self.run.finish()


def _warning_writer(say: Callable[[str], None]) -> Callable[..., None]:
    def heard(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any
    ) -> None:
        print(warnings.formatwarning(message, category, filename, lineno), flush=True)
        if f"{os.sep}trackio{os.sep}" in filename and issubclass(category, UserWarning):
            say(str(message).strip().splitlines()[0])

    return heard
