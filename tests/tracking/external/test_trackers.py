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
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
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

THERE = tuple(
    name
    for name, packages in TRACKERS.items()
    if all(find_spec(package) is not None for package in packages)
)
TOLD = ("train/loss", "val/accuracy")  # one curve of each kind


def sample(model: Any) -> str:
    return f"the {type(model).__name__} says <&>"


def built(run_dir: Path, **changes: Any) -> sf.Run:
    held_out = small_runs.Augmented()
    ends = {
        "val": sf.Split((held_out.inputs, held_out.labels), metrics=sf.metrics.accuracy),
        "test": sf.Split(
            (held_out.inputs[:9], held_out.labels[:9]), metrics=sf.metrics.accuracy, at_end=True
        ),
    }
    settings: dict[str, Any] = {
        "splits": ends,
        "sample_fn": sample,
        "length": "18 steps",
        "save_every": "4 steps",
    }
    return small_runs.build(run_dir, **(settings | changes))


def needs(name: str) -> None:
    if name not in THERE:
        pytest.skip(f"{name} is not installed: pip install surefoot[{name}]")


class MishapError(Exception):
    pass


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run told to a tracker, ended by an error at step 11 without a save since step 8, and gone
    on with.
    """

    @cache
    def trained(name: str) -> Path:
        needs(name)
        run_dir = tmp_path_factory.mktemp(name) / "poems" / "runs" / "first"
        with pytest.MonkeyPatch.context() as patch:
            for variable in [
                held for held in os.environ if held.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))
            ]:
                patch.delenv(variable)
            patch.setenv("WANDB_MODE", "offline")
            patch.setenv("WANDB_ERROR_REPORTING", "false")
            patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
            patch.setattr(
                client, "CLOSING_S", HANG_S
            )  # a busy machine takes long to start each package
            before = set(sys.modules)
            with pytest.raises(MishapError):
                fail_after_ten_steps(built(run_dir, trackers=(name,)))
            with redirect_stdout(io.StringIO()) as console:
                built(run_dir, trackers=name, console=True).train()
            log = (run_dir / "trackers" / f"{name}.log").read_text()
            assert "WARNING: records" not in console.getvalue(), console.getvalue() + log
            assert name not in set(sys.modules) - before
        return run_dir

    return trained


def fail_after_ten_steps(run: sf.Run) -> None:
    with run:
        for step in run:
            if step.index == 10:
                raise MishapError


def expected(run_dir: Path, name: str) -> list[tuple[int, float]]:
    kind, _, own = name.partition("/")
    return [
        (record["step"], record[own if kind == "train" else name])
        for record in records(run_dir / "metrics.jsonl")
        if record["kind"] == ("train" if kind == "train" else "eval")
    ]


@pytest.mark.slow
def test_of_wandb_the_file_holds_every_point_once_in_one_run(
    tracked: Callable[[str], Path],
) -> None:
    out = tracked("wandb")
    found = [
        entry
        for path in sorted((out / "trackers" / "wandb").glob("offline-run-*/*.wandb"))
        for entry in wandb_file(path)
    ]
    runs = [entry.run for entry in found if entry.HasField("run")]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {
        (TrackerState.read(out / "trackers" / "wandb.json").id, "poems", "first")
    }
    config = {u.key: u.value_json for e in found if e.HasField("config") for u in e.config.update}
    assert json.loads(config["seed"]) == 0
    assert json.loads(config["optimizer"])["lr"] == 1e-2
    points = [
        {"/".join(item.nested_key): item.value_json for item in e.history.item}
        for e in found
        if e.HasField("history")
    ]
    for name in TOLD:
        assert [(int(p["step"]), float(p[name])) for p in points if name in p] == expected(
            out, name
        )
    (text,) = [json.loads(point["sample/path"]) for point in points if "sample/path" in point]
    (file,) = (out / "trackers" / "wandb").glob(f"offline-run-*/files/{text}")
    assert "the Net says &lt;&amp;&gt;" in file.read_text()
    summary = {
        u.key: u.value_json for e in found if e.HasField("summary") for u in e.summary.update
    }
    (end,) = (record for record in records(out / "metrics.jsonl") if record["kind"] == "final_eval")
    assert float(summary["test/accuracy"]) == end["test/accuracy"]


@pytest.mark.slow
def test_of_mlflow_the_store_holds_every_point_once_in_one_run(
    tracked: Callable[[str], Path],
) -> None:
    out = tracked("mlflow")
    store = sqlite3.connect(out / "trackers" / "mlflow.db")
    rows = store.execute("select name, status, run_uuid from runs").fetchall()
    assert rows == [("first", "FINISHED", TrackerState.read(out / "trackers" / "mlflow.json").id)]
    assert ("poems",) in store.execute("select name from experiments").fetchall()
    for name in TOLD:
        points = store.execute(
            "select step, value from metrics where key = ? order by step", (name,)
        ).fetchall()
        assert points == expected(out, name)
    params = dict(store.execute("select key, value from params").fetchall())
    assert (params["seed"], params["optimizer.lr"]) == ("0", "0.01")
    (text,) = (out / "trackers" / "mlflow").glob("*/artifacts/samples/step-00000018.txt")
    assert text.read_text() == "the Net says <&>"
    store.close()


@pytest.mark.slow
def test_mlflow_itself_reads_what_was_written(tracked: Callable[[str], Path]) -> None:
    out = tracked("mlflow")
    status = os.spawnve(
        os.P_WAIT,
        sys.executable,
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            READ_BY_MLFLOW,
            str(out / "trackers"),
            json.dumps(expected(out, TOLD[0])),
        ],
        os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MLFLOW_DISABLE_TELEMETRY": "true"},
    )
    assert status == 0


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
    out = tracked("trackio")
    store = sqlite3.connect(out / "trackers" / "trackio" / "poems.db")
    rows = [
        (run, step, json.loads(held))
        for run, step, held in store.execute("select run_name, step, metrics from metrics")
    ]
    kept = TrackerState.read(out / "trackers" / "trackio.json")
    assert {run for run, _, _ in rows} == {f"first-{kept.id[:6]}"}
    for name in TOLD:
        assert sorted((step, held[name]) for _, step, held in rows if name in held) == expected(
            out, name
        )
    (text,) = [held["sample"]["_value"] for _, _, held in rows if "sample" in held]
    assert text == "```\nthe Net says <&>\n```"
    (config,) = store.execute("select config from configs order by rowid desc limit 1").fetchone()
    assert json.loads(config)["seed"] == 0
    store.close()


def test_trackers_change_no_bit_and_write_in_the_runs_directory_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("trackio")
    for variable in [held for held in os.environ if held.startswith("TRACKIO_")]:
        monkeypatch.delenv(variable)
    place = tmp_path / "place"
    out = place / "poems" / "runs" / "first"
    for each, trackers in ((out, "trackio"), (tmp_path / "run", None)):
        built(each, length="6 steps", **({"trackers": trackers} if trackers else {})).train()
    last = "checkpoints/step-00000006/model.safetensors"
    assert (out / last).read_bytes() == (tmp_path / "run" / last).read_bytes()
    assert TrackerState.read(out / "trackers" / "trackio.json").sent
    assert [
        path
        for path in place.rglob("*")
        if not path.is_relative_to(out) and path not in out.parents
    ] == []


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
    built(tmp_path / "run", trackers="trackio", console=True).train()
    assert not limit.is_over
    said = capsys.readouterr().out
    assert said.count("WARNING: records ") == 1
    why = {"by ending its process": "ended with status 7"}.get(
        how, "did not finish" if "hanging" in how else "no room for it"
    )
    assert why in said
    assert [
        line["step"]
        for line in records(tmp_path / "run" / "metrics.jsonl")
        if line["kind"] == "final_eval"
    ] == [18]


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
    assert ([numbers_in(problem) for problem in problems], len(sink.waiting)) == ([[100]], 100)
    assert not limit.is_over, "a record waited for the tracker"
    sink.close()  # told already


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)
def test_a_tracker_that_hangs_ends_by_itself_where_the_training_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "GONE_S", 0.1)
    monkeypatch.setattr(worker, "_LOOKS_S", 0.01)
    there, held = os.pipe()  # which nothing is written to: its end is that of all who hold it
    training = os.fork()
    if training == 0:
        itself = os.getpid()
        if os.fork() == 0:
            worker.end_with(itself)
            time.sleep(1000)  # in beginning, writing or closing
        os._exit(0)
    os.close(held)
    os.waitpid(training, 0)
    ended, _, _ = select.select([there], [], [], HANG_S)
    os.close(there)
    assert ended


def test_to_follow_records_that_end_without_a_word_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.enumerate()
    followed(tmp_path, told=Noted())
    assert threading.enumerate() == before


class Noted:
    """A tracker that keeps what it is told."""

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


def followed(place: Path, *records: Record, told: Noted) -> list[str]:
    about = About("trackio", "poems", "first", str(place), {})
    lines = [json.dumps(asdict(about)), *(json.dumps(record) for record in records)]
    said: list[str] = []
    worker.follow((line.encode() for line in lines), lambda *_: told, say=said.append)
    return said


CLOSE: Record = {"kind": "close"}


def test_after_a_kill_no_point_is_told_twice_and_each_kind_goes_on_where_it_stood(
    tmp_path: Path,
) -> None:
    first, second = Noted(), Noted()
    train = [{"kind": "train", "step": step} for step in (3, 6, 9, 12)]
    scores = [{"kind": "eval", "step": step} for step in (5, 10)]
    followed(tmp_path, *train[:3], scores[0], told=first)
    followed(
        tmp_path, train[1], train[2], scores[1], train[3], CLOSE, told=second
    )  # gone on with from step 5
    assert first.records + second.records == [*train[:3], scores[0], scores[1], train[3]]
    assert (first.ending, second.ending) == ("stopped", "finished")


def test_what_an_earlier_process_still_sends_is_known_before_the_next_one_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def earlier_process_ends(_file: object, _operation: int) -> None:
        state = TrackerState.read(tmp_path / "trackio.json")
        state.sent["train"] = 3
        state.write()

    monkeypatch.setattr(fcntl, "flock", earlier_process_ends)
    second = Noted()
    followed(tmp_path, {"kind": "train", "step": 3}, {"kind": "train", "step": 6}, told=second)
    assert [record["step"] for record in second.records] == [6]


def test_two_events_of_one_step_are_both_told(tmp_path: Path) -> None:
    told = Noted()
    events = [
        {"kind": "event", "step": 4, "event": what} for what in ("stopped by SIGTERM", "saved")
    ]
    followed(tmp_path, *events, CLOSE, told=told)
    assert told.records == events
    assert told.ending == "stopped"


def test_after_a_record_that_could_not_be_told_the_next_one_is(tmp_path: Path) -> None:
    told = Noted(fails_at=2)
    said = followed(
        tmp_path, *({"kind": "train", "step": step} for step in (1, 2, 3)), CLOSE, told=told
    )
    assert [record["step"] for record in told.records] == [1, 3]
    assert said == ["ValueError: not this one"]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"id": 1}', '{"id": "a", "begun": true, "sent": 3}', "\x00"]
)
def test_what_was_kept_and_cannot_be_read_begins_a_new_run_in_the_tracker(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "wandb.json").write_text(text)
    assert not TrackerState.read(tmp_path / "wandb.json").started


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "code", "value"),
    [
        ("wandbb", "tracker-unknown", "wandbb"),
        ("tensorboard", "tracker-unknown", "tensorboard"),
        ("neptune", "tracker-unknown", "neptune"),
        ("wandb,wandb", "tracker-named-twice", "wandb,wandb"),
    ],
)
def test_a_tracker_that_there_is_not_is_refused(
    given: str, code: str, value: str, tmp_path: Path
) -> None:
    with refused(code, setting="trackers", value=value):
        built(tmp_path / "run", trackers=given)


def test_trackers_are_names(tmp_path: Path) -> None:
    with refused("setting-of-wrong-type", setting="trackers"):
        built(tmp_path / "run", trackers=(3,))


def test_tensorboard_is_no_tracker_and_has_a_setting(tmp_path: Path) -> None:
    with refused("tracker-unknown") as error:
        built(tmp_path / "run", trackers="tensorboard")
    assert error.value.remedies == (Setting("tensorboard", True),)


def test_without_a_directory_trackers_are_refused() -> None:
    with refused("trackers-without-directory", value="trackio"):
        small_runs.build(None, trackers="trackio")


def test_packages_that_are_missing_are_named_at_once_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "alembic", None)
    run = built(tmp_path / "run", trackers="wandb,mlflow")
    with refused("package-not-usable", modules=["wandb", "alembic"]) as error:
        run.train()
    assert Command('pip install "surefoot[trackers]"') in error.value.remedies
    assert not (tmp_path / "run").exists()


def test_trackers_are_a_setting_of_every_recipe() -> None:
    from surefoot.cli.settings import configured
    from surefoot.recipes.gpt.config import Config

    config, found = configured(Config, [], ["--trackers", "wandb,mlflow"], verb="train gpt")
    assert 'trackers = "wandb,mlflow"' in to_toml(config, found, {})


def package(place: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package called trackio, which does what `text` says."""
    (place / "trackio.py").write_text(text)
    monkeypatch.syspath_prepend(place)


def wandb_file(path: Path) -> Iterator[Any]:
    """The entries of a .wandb file: LevelDB's log format, blocks of 32 KiB, with a header of seven
    bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record as Entry

    data = path.read_bytes()
    at = 7
    held = b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        held += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found = Entry()
            found.ParseFromString(held)
            held = b""
            yield found


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
