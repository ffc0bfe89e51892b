"""Trackers: the real packages in their local modes, read back; and whatever they do, a run goes on.
(5 s; 15 s with the slow ones)

Each lives in a process of its own, which ends with the run: none is left behind, and nothing of
theirs is imported here.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import select
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import small_runs
import surefoot as sf
from refused import refused
from stated import numbers_in
from surefoot.config.extras import TRACKERS
from surefoot.config.toml import to_toml
from surefoot.errors import Command, Setting
from surefoot.tracking.external import client, worker
from surefoot.tracking.external.client import Tracker
from surefoot.tracking.external.run_facts import About, TrackerState
from surefoot.tracking.jsonl import records
from surefoot.tracking.record import Record
from waiting import HANG_S, HangLimit

INSTALLED = tuple(
    name
    for name, packages in TRACKERS.items()
    if all(find_spec(package) is not None for package in packages)
)
CURVES = ("train/loss", "val/accuracy")  # one of each kind


def sample(model: Any) -> str:
    return f"the {type(model).__name__} says <&>"


def build(run_dir: Path, **changes: Any) -> sf.Run:
    data = small_runs.Augmented()
    val_data = (data.inputs, data.labels)
    test_data = (data.inputs[:9], data.labels[:9])
    settings: dict[str, Any] = {
        "splits": {
            "val": sf.Split(val_data, metrics=sf.metrics.accuracy),
            "test": sf.Split(test_data, metrics=sf.metrics.accuracy, at_end=True),
        },
        "sample_fn": sample,
        "length": "18 steps",
        "save_every": "4 steps",
    }
    return small_runs.build(run_dir, **(settings | changes))


def skip_without(name: str) -> None:
    if name not in INSTALLED:
        pytest.skip(f"{name} is not installed: pip install surefoot[{name}]")


class MishapError(Exception):
    pass


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run with a tracker, ended by an error at step 11 without a save since step 8, and
    resumed.
    """

    @cache
    def train_with(name: str) -> Path:
        skip_without(name)
        run_dir = tmp_path_factory.mktemp(name) / "poems" / "runs" / "first"
        with pytest.MonkeyPatch.context() as patch:
            delete_variables(patch, "WANDB_", "MLFLOW_", "TRACKIO_")
            patch.setenv("WANDB_MODE", "offline")
            patch.setenv("WANDB_ERROR_REPORTING", "false")
            patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
            # a busy machine takes long to start each package
            patch.setattr(client, "CLOSING_S", HANG_S)
            modules_before = set(sys.modules)
            with pytest.raises(MishapError):
                fail_after_ten_steps(build(run_dir, trackers=(name,)))
            with redirect_stdout(io.StringIO()) as console:
                build(run_dir, trackers=name, console=True).train()
        log = (run_dir / "trackers" / f"{name}.log").read_text()
        assert "WARNING: records" not in console.getvalue(), console.getvalue() + log
        assert name not in set(sys.modules) - modules_before
        return run_dir

    return train_with


def delete_variables(patch: pytest.MonkeyPatch, *beginnings: str) -> None:
    """Delete the variables of the environment that begin so."""
    for variable in list(os.environ):
        if variable.startswith(beginnings):
            patch.delenv(variable)


def fail_after_ten_steps(run: sf.Run) -> None:
    with run:
        for step in run:
            if step.index == 10:
                raise MishapError


def curve_of_records(run_dir: Path, name: str) -> list[tuple[int, float]]:
    """The points of one of `CURVES`, as the run's own records have them."""
    kind = "eval"
    key = name
    if name.startswith("train/"):
        kind = "train"
        key = name.removeprefix("train/")
    lines = records(run_dir / "metrics.jsonl")
    return [(record["step"], record[key]) for record in lines if record["kind"] == kind]


@pytest.mark.slow
def test_of_wandb_the_file_holds_every_point_once_in_one_run(
    tracked: Callable[[str], Path],
) -> None:
    run_dir = tracked("wandb")
    files = read_wandb(run_dir)
    run_id = TrackerState.read(run_dir / "trackers" / "wandb.json").id
    assert files.runs == {(run_id, "poems", "first")}
    for name in CURVES:
        points = [point for point in files.points if name in point]
        curve = [(int(point["step"]), float(point[name])) for point in points]
        assert curve == curve_of_records(run_dir, name)


@pytest.mark.slow
def test_of_wandb_the_file_holds_settings_samples_and_the_scores_of_the_end(
    tracked: Callable[[str], Path],
) -> None:
    run_dir = tracked("wandb")
    files = read_wandb(run_dir)
    assert json.loads(files.config["seed"]) == 0
    assert json.loads(files.config["optimizer"])["lr"] == 1e-2

    (sample_point,) = [point for point in files.points if "sample/path" in point]
    sample_path = json.loads(sample_point["sample/path"])
    (file,) = (run_dir / "trackers" / "wandb").glob(f"offline-run-*/files/{sample_path}")
    assert "the Net says &lt;&amp;&gt;" in file.read_text()

    lines = records(run_dir / "metrics.jsonl")
    (final,) = [record for record in lines if record["kind"] == "final_eval"]
    assert float(files.summary["test/accuracy"]) == final["test/accuracy"]


@pytest.mark.slow
def test_of_mlflow_the_store_holds_every_point_once_in_one_run(
    tracked: Callable[[str], Path],
) -> None:
    run_dir = tracked("mlflow")
    run_id = TrackerState.read(run_dir / "trackers" / "mlflow.json").id
    with closing(sqlite3.connect(run_dir / "trackers" / "mlflow.db")) as store:
        runs = store.execute("select name, status, run_uuid from runs").fetchall()
        assert runs == [("first", "FINISHED", run_id)]
        assert ("poems",) in store.execute("select name from experiments").fetchall()
        query = "select step, value from metrics where key = ? order by step"
        for name in CURVES:
            curve = store.execute(query, (name,)).fetchall()
            assert curve == curve_of_records(run_dir, name)


@pytest.mark.slow
def test_of_mlflow_the_store_holds_settings_and_samples(tracked: Callable[[str], Path]) -> None:
    run_dir = tracked("mlflow")
    with closing(sqlite3.connect(run_dir / "trackers" / "mlflow.db")) as store:
        params = dict(store.execute("select key, value from params").fetchall())
    assert params["seed"] == "0"
    assert params["optimizer.lr"] == "0.01"
    (text,) = (run_dir / "trackers" / "mlflow").glob("*/artifacts/samples/step-00000018.txt")
    assert text.read_text() == "the Net says <&>"


@pytest.mark.slow
def test_mlflow_itself_reads_what_was_written(tracked: Callable[[str], Path]) -> None:
    run_dir = tracked("mlflow")
    curve = json.dumps(curve_of_records(run_dir, "train/loss"))
    command = [sys.executable, "-W", "ignore", "-c", READ_BY_MLFLOW]
    subprocess.run(
        [*command, str(run_dir / "trackers"), curve],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(sys.path), "MLFLOW_DISABLE_TELEMETRY": "true"},
        check=True,
    )


READ_BY_MLFLOW = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("poems").experiment_id])
history = client.get_metric_history(run.info.run_id, "train/loss")
assert sorted((point.step, point.value) for point in history) == [tuple(pair) for pair in json.loads(sys.argv[2])]
assert run.data.params["seed"] == "0" and run.data.metrics["test/accuracy"] <= 1
"""


@pytest.mark.slow
def test_of_trackio_the_database_holds_every_point_once_in_one_run(
    tracked: Callable[[str], Path],
) -> None:
    run_dir = tracked("trackio")
    run_id = TrackerState.read(run_dir / "trackers" / "trackio.json").id
    with closing(sqlite3.connect(run_dir / "trackers" / "trackio" / "poems.db")) as store:
        runs = store.execute("select distinct run_name from metrics").fetchall()
        rows = store.execute("select step, metrics from metrics").fetchall()
    assert runs == [(f"first-{run_id[:6]}",)]
    points = [(step, json.loads(text)) for step, text in rows]
    for name in CURVES:
        curve = sorted((step, values[name]) for step, values in points if name in values)
        assert curve == curve_of_records(run_dir, name)


@pytest.mark.slow
def test_of_trackio_the_database_holds_settings_and_samples(
    tracked: Callable[[str], Path],
) -> None:
    query_of_config = "select config from configs order by rowid desc limit 1"
    run_dir = tracked("trackio")
    with closing(sqlite3.connect(run_dir / "trackers" / "trackio" / "poems.db")) as store:
        (config,) = store.execute(query_of_config).fetchone()
        rows = store.execute("select metrics from metrics").fetchall()
    assert json.loads(config)["seed"] == 0
    values = [json.loads(text) for (text,) in rows]
    samples = [entry["sample"]["_value"] for entry in values if "sample" in entry]
    assert samples == ["```\nthe Net says <&>\n```"]


def test_trackers_change_no_bit_and_write_in_the_runs_directory_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("trackio")
    delete_variables(monkeypatch, "TRACKIO_")
    place = tmp_path / "place"
    run_dir = place / "poems" / "runs" / "first"

    build(run_dir, length="6 steps", trackers="trackio").train()
    build(tmp_path / "run", length="6 steps").train()

    last = "checkpoints/step-00000006/model.safetensors"
    assert (run_dir / last).read_bytes() == (tmp_path / "run" / last).read_bytes()
    assert TrackerState.read(run_dir / "trackers" / "trackio.json").sent
    paths = set(place.rglob("*"))
    paths_of_run = {run_dir, *run_dir.parents, *run_dir.rglob("*")}
    assert paths - paths_of_run == set()


# --- what a tracker may do wrong, with packages that do it ----------------------------------------

FAILS = {
    "when it is imported": "raise RuntimeError('no room for it')",
    "when the run begins": "Markdown = str\ndef init(**settings): raise RuntimeError('no room for it')",
    "at every record": """
class Run:
    def log(self, values, step): raise RuntimeError('no room for it')
    def finish(self): pass
def init(**settings): return Run()
Markdown = str
""",
    "at the end": """
class Run:
    def log(self, values, step): pass
    def finish(self): raise RuntimeError('no room for it')
def init(**settings): return Run()
Markdown = str
""",
    "by ending its process": "import os; os._exit(7)",
    "by hanging at a record": """
import time
class Run:
    def log(self, values, step): time.sleep(1000)
    def finish(self): pass
def init(**settings): return Run()
Markdown = str
""",
    "by hanging at the end": """
import time
class Run:
    def log(self, values, step): pass
    def finish(self): time.sleep(1000)
def init(**settings): return Run()
Markdown = str
""",
    "by hanging at the beginning": "import time; time.sleep(1000)",
}


@pytest.mark.fast(
    "when it is imported", "at every record", "by ending its process", "by hanging at the end"
)
@pytest.mark.parametrize("how", FAILS)
def test_a_tracker_that_fails_stops_no_run_and_is_told_of_once(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package(tmp_path, FAILS[how], monkeypatch)
    monkeypatch.setattr(client, "CLOSING_S", 0.7 if "hanging" in how else 30.0)
    limit = HangLimit()  # less than a tracker here hangs
    build(tmp_path / "run", trackers="trackio", console=True).train()
    assert not limit.is_over
    output = capsys.readouterr().out
    assert output.count("WARNING: records ") == 1
    if how == "by ending its process":
        assert "ended with status 7" in output
    elif "hanging" in how:
        assert "did not finish" in output
    else:
        assert "no room for it" in output
    lines = records(tmp_path / "run" / "metrics.jsonl")
    (final,) = [record for record in lines if record["kind"] == "final_eval"]
    assert final["step"] == 18


def test_a_record_is_handed_over_without_waiting_and_the_oldest_are_lost_where_none_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, FAILS["by hanging at the beginning"], monkeypatch)
    monkeypatch.setattr(client, "WAITING", 100)
    monkeypatch.setattr(client, "CLOSING_S", 0.05)
    sink = Tracker("trackio", out=tmp_path / "run", settings={})
    problems = []
    limit = HangLimit()
    for step in range(300):
        try:
            sink.write({"kind": "sample", "step": step, "text": "x" * 2000})
        except OSError as problem:
            problems.append(str(problem))
    (problem,) = problems
    assert numbers_in(problem) == [100]
    assert len(sink.waiting) == 100
    assert not limit.is_over, "a record waited for the tracker"
    sink.close()  # it has said so already, and does not again


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)
def test_a_tracker_that_hangs_ends_by_itself_where_the_training_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "GONE_S", 0.1)
    monkeypatch.setattr(worker, "_LOOKS_S", 0.01)
    # nothing is written to this pipe: its end is that of all processes that have it open
    reading, writing = os.pipe()
    training = os.fork()
    if training == 0:
        itself = os.getpid()
        if os.fork() == 0:
            worker.end_with(itself)
            time.sleep(1000)  # in beginning, writing or closing
        os._exit(0)
    os.close(writing)
    os.waitpid(training, 0)
    ended, _, _ = select.select([reading], [], [], HANG_S)
    os.close(reading)
    assert ended


class ListTracker:
    """A tracker that keeps its records in a list."""

    def __init__(self, fails_at: int = -1) -> None:
        self.records: list[Record] = []
        self.ending = ""
        self.fails_at = fails_at

    def write(self, record: Record) -> None:
        if record["step"] == self.fails_at:
            raise ValueError("not this one")
        self.records.append(record)

    def close(self, ending: str) -> None:
        self.ending = ending


def follow(place: Path, *records: Record, tracker: ListTracker) -> list[str]:
    """Hand records to a tracker as its process does, and return the problems that it names."""
    about = About("trackio", "poems", "first", str(place), {})
    lines = [json.dumps(asdict(about)), *(json.dumps(record) for record in records)]
    problems: list[str] = []
    worker.follow((line.encode() for line in lines), lambda *_: tracker, say=problems.append)
    return problems


CLOSE: Record = {"kind": "close"}


def test_records_that_end_without_a_close_leave_no_thread(tmp_path: Path) -> None:
    threads = threading.enumerate()
    follow(tmp_path, tracker=ListTracker())
    assert threading.enumerate() == threads


def test_after_a_kill_no_point_is_sent_twice_and_each_kind_resumes_where_it_was(
    tmp_path: Path,
) -> None:
    train_3, train_6, train_9, train_12 = [
        {"kind": "train", "step": step} for step in (3, 6, 9, 12)
    ]
    scores_5, scores_10 = [{"kind": "eval", "step": step} for step in (5, 10)]
    killed = ListTracker()
    follow(tmp_path, train_3, train_6, train_9, scores_5, tracker=killed)

    resumed = ListTracker()  # from step 5
    follow(tmp_path, train_6, train_9, scores_10, train_12, CLOSE, tracker=resumed)

    assert killed.records == [train_3, train_6, train_9, scores_5]
    assert killed.ending == "stopped"
    assert resumed.records == [scores_10, train_12]
    assert resumed.ending == "finished"


def test_what_an_earlier_process_still_sends_is_known_before_the_next_one_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def earlier_process_ends(_file: object, _operation: int) -> None:
        state = TrackerState.read(tmp_path / "trackio.json")
        state.sent["train"] = 3
        state.write()

    monkeypatch.setattr(fcntl, "flock", earlier_process_ends)
    second = ListTracker()
    follow(tmp_path, {"kind": "train", "step": 3}, {"kind": "train", "step": 6}, tracker=second)
    assert [record["step"] for record in second.records] == [6]


def test_two_events_of_one_step_are_both_sent(tmp_path: Path) -> None:
    tracker = ListTracker()
    events = [
        {"kind": "event", "step": 4, "event": "stopped by SIGTERM"},
        {"kind": "event", "step": 4, "event": "saved"},
    ]
    follow(tmp_path, *events, CLOSE, tracker=tracker)
    assert tracker.records == events
    assert tracker.ending == "stopped"


def test_after_a_record_that_could_not_be_sent_the_next_one_is(tmp_path: Path) -> None:
    tracker = ListTracker(fails_at=2)
    train = [{"kind": "train", "step": step} for step in (1, 2, 3)]
    problems = follow(tmp_path, *train, CLOSE, tracker=tracker)
    assert [record["step"] for record in tracker.records] == [1, 3]
    assert problems == ["ValueError: not this one"]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"id": 1}', '{"id": "a", "begun": true, "sent": 3}', "\x00"]
)
def test_a_state_that_cannot_be_read_begins_a_new_run_in_the_tracker(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "wandb.json").write_text(text)
    assert not TrackerState.read(tmp_path / "wandb.json").started


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trackers", "code"),
    [
        ("wandbb", "tracker-unknown"),
        ("tensorboard", "tracker-unknown"),
        ("neptune", "tracker-unknown"),
        ("wandb,wandb", "tracker-named-twice"),
    ],
)
def test_a_tracker_that_there_is_not_is_refused(trackers: str, code: str, tmp_path: Path) -> None:
    with refused(code, setting="trackers", value=trackers):
        build(tmp_path / "run", trackers=trackers)


def test_trackers_are_names(tmp_path: Path) -> None:
    with refused("setting-of-wrong-type", setting="trackers"):
        build(tmp_path / "run", trackers=(3,))


def test_tensorboard_is_no_tracker_and_has_a_setting(tmp_path: Path) -> None:
    with refused("tracker-unknown") as error:
        build(tmp_path / "run", trackers="tensorboard")
    assert error.value.remedies == (Setting("tensorboard", True),)


def test_without_a_directory_trackers_are_refused() -> None:
    with refused("trackers-without-directory", value="trackio"):
        small_runs.build(None, trackers="trackio")


def test_packages_that_are_missing_are_named_at_once_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "alembic", None)
    run = build(tmp_path / "run", trackers="wandb,mlflow")
    with refused("package-not-usable", modules=["wandb", "alembic"]) as error:
        run.train()
    assert Command('pip install "surefoot[trackers]"') in error.value.remedies
    assert not (tmp_path / "run").exists()


def test_trackers_are_a_setting_of_every_recipe() -> None:
    from surefoot.cli.settings import configured
    from surefoot.recipes.gpt.config import Config

    config, sources = configured(Config, [], ["--trackers", "wandb,mlflow"], verb="train gpt")
    assert 'trackers = "wandb,mlflow"' in to_toml(config, sources, {})


def package(place: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package called trackio, which does what `text` says."""
    (place / "trackio.py").write_text(text)
    monkeypatch.syspath_prepend(place)


@dataclass(frozen=True)
class WandbFiles:
    """What the .wandb files of a run hold: its ids, project and names; JSON texts of its points,
    settings and last values.
    """

    runs: set[tuple[str, str, str]] = field(default_factory=set)
    points: list[dict[str, str]] = field(default_factory=list)
    config: dict[str, str] = field(default_factory=dict)
    summary: dict[str, str] = field(default_factory=dict)


def read_wandb(run_dir: Path) -> WandbFiles:
    files = WandbFiles()
    for path in sorted((run_dir / "trackers" / "wandb").glob("offline-run-*/*.wandb")):
        for entry in wandb_entries(path):
            if entry.HasField("run"):
                run = entry.run
                files.runs.add((run.run_id, run.project, run.display_name))
            if entry.HasField("config"):
                files.config.update({item.key: item.value_json for item in entry.config.update})
            if entry.HasField("summary"):
                files.summary.update({item.key: item.value_json for item in entry.summary.update})
            if entry.HasField("history"):
                items = entry.history.item
                files.points.append({"/".join(item.nested_key): item.value_json for item in items})
    return files


def wandb_entries(path: Path) -> Iterator[Any]:
    """The entries of a .wandb file: LevelDB's log format, blocks of 32 KiB, with a header of seven
    bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record as Entry

    data = path.read_bytes()
    position = 7
    parts = b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            entry = Entry()
            entry.ParseFromString(parts)
            parts = b""
            yield entry


@pytest.mark.parametrize("other", [b"ready", b"3", b'{"state": "ready"}', b"[]"])
def test_other_lines_of_a_trackers_process_are_no_problems(
    other: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.write(writing, other + b"\n" + b'{"problem": "no network"}\n')
    os.close(writing)
    with open(reading, "rb", buffering=0) as output:
        process = SimpleNamespace(stdout=output, poll=lambda: None)
        monkeypatch.setattr(Tracker, "_start", lambda _: process)
        tracker = Tracker("wandb", out=tmp_path, settings={})
        tracker._hear()
    assert tracker.problem == "no network"
