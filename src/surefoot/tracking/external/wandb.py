"""Weights & Biases: values over `step`, samples as HTML, and final metrics in the summary.

The user may set WANDB_MODE, WANDB_PROJECT, WANDB_DIR and other variables. Without a login and
WANDB_MODE, the run is offline.
"""

import html
import os
from collections.abc import Callable
from typing import Literal

from surefoot.tracking.external.run_facts import About, TrackerState, text_in
from surefoot.tracking.record import Record, numbers_in, scores_in
from surefoot.tracking.shown import SHOWN_KINDS, image_in, tag_of

_FINISH_S = 25  # seconds, less than `CLOSING_S`


class Wandb:
    """A Weights & Biases run."""

    def __init__(self, about: About, state: TrackerState, say: Callable[[str], None]) -> None:  # noqa: ARG002
        import wandb

        def init(mode: Literal["offline"] | None) -> wandb.Run:
            return wandb.init(
                id=state.id,
                resume="allow",
                project=None if "WANDB_PROJECT" in os.environ else about.project,
                name=None if "WANDB_NAME" in os.environ else about.name,
                dir=None if "WANDB_DIR" in os.environ else about.directory,
                mode=mode,
                settings=wandb.Settings(console="off", finish_timeout=_FINISH_S),
            )

        self.package = wandb
        try:
            self.run = init(None)
        except wandb.errors.UsageError:  # the user is not logged in
            if "WANDB_MODE" in os.environ:
                raise
            self.run = init("offline")
        self.run.define_metric("*", step_metric="step")
        self.run.config.update(about.settings, allow_val_change=True)

    def write(self, record: Record) -> None:
        if record["kind"] in SHOWN_KINDS:
            self.run.log({tag_of(record): self._shown(record), "step": record["step"]})
            return
        values: dict[str, object] = dict(numbers_in(record))
        text = text_in(record)
        if text is not None:
            page = f"<pre>{html.escape(text)}</pre>"
            values[record["kind"]] = self.package.Html(page, inject=False)
        if values:
            self.run.log({**values, "step": record["step"]})
        if record["kind"] == "final_eval":
            self.run.summary.update(scores_in(record))

    def _shown(self, record: Record) -> object:
        match record["kind"]:
            case "text":
                return self.package.Html(f"<pre>{html.escape(record['text'])}</pre>", inject=False)
            case "image":
                return self.package.Image(image_in(record))
            case _:
                return self.package.Histogram(np_histogram=(record["counts"], record["edges"]))

    def close(self, ending: str) -> None:
        self.run.finish(exit_code=1 if ending == "failed" else 0)
