"""MLflow: metrics by step, settings as parameters, samples as text artifacts.

The user sets MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME. The default is an SQLite store in the
run's directory.
"""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surefoot.config.tree import flat
from surefoot.tracking.external.run_facts import About, TrackerState, text_in
from surefoot.tracking.record import Record, numbers_in
from surefoot.tracking.shown import SHOWN_KINDS, image_in, tag_of

# MLflow's limits per request
_METRICS = 1000
_PARAMETERS = 100
_LONGEST = 6000  # characters of a parameter; a name has at most 250
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Mlflow:
    """An MLflow run, identified by the server's run id."""

    def __init__(self, about: About, state: TrackerState, say: Callable[[str], None]) -> None:  # noqa: ARG002
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        self.entities = entities
        directory = Path(about.directory)
        tracking_uri = None
        artifacts = None
        if "MLFLOW_TRACKING_URI" not in os.environ:
            tracking_uri = f"sqlite:///{directory / 'mlflow.db'}"
            artifacts = (directory / "mlflow").as_uri()
        self.client = MlflowClient(tracking_uri=tracking_uri)
        if state.started:
            self.client.update_run(state.id, status="RUNNING")
        else:
            project = os.environ.get("MLFLOW_EXPERIMENT_NAME", about.project)
            existing = self.client.get_experiment_by_name(project)
            if existing:
                experiment_id = existing.experiment_id
            else:
                experiment_id = self.client.create_experiment(project, artifacts)
            run = self.client.create_run(str(experiment_id), run_name=about.name)
            state.id = run.info.run_id
        self.id = state.id
        self._tell(about.settings)

    def write(self, record: Record) -> None:
        if record["kind"] in SHOWN_KINDS:
            self._show(record)
            return
        now_ms = int(time.time() * 1000)
        step = record["step"]
        metrics = []
        for name, value in numbers_in(record).items():
            metrics.append(self.entities.Metric(_name(name), float(value), now_ms, step))
        for begin in range(0, len(metrics), _METRICS):
            self.client.log_batch(self.id, metrics=metrics[begin : begin + _METRICS])
        text = text_in(record)
        if text is not None and record["kind"] == "sample":
            self.client.log_text(self.id, text, f"samples/step-{step:08d}.txt")
        elif text is not None:
            self.client.set_tag(self.id, record["kind"], f"step {step}: {text}")

    def _show(self, record: Record) -> None:
        place = f"{_name(tag_of(record))}/step-{record['step']:08d}"
        match record["kind"]:
            case "text":
                self.client.log_text(self.id, record["text"], f"{place}.txt")
            case "image":
                self.client.log_image(self.id, image_in(record), f"{place}.png")
            case _:  # MLflow has no histograms
                self.client.log_dict(self.id, record, f"{place}.json")

    def close(self, ending: str) -> None:
        self.client.set_terminated(self.id, status=_STATUS[ending])

    def _tell(self, settings: dict[str, Any]) -> None:
        # MLflow parameters are immutable, so a setting that a resume changes becomes a tag
        parameters = {_name(name): _text(value) for name, value in flat(settings).items()}
        logged = self.client.get_run(self.id).data.params
        new = []
        changed = []
        for name, value in parameters.items():
            if name not in logged:
                new.append(self.entities.Param(name, value))
            elif logged[name] != value:
                changed.append(self.entities.RunTag(f"now.{name}", value))
        for begin in range(0, len(new), _PARAMETERS):
            self.client.log_batch(self.id, params=new[begin : begin + _PARAMETERS])
        if changed:
            self.client.log_batch(self.id, tags=changed[:_PARAMETERS])


def _name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250]


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text[:_LONGEST]
