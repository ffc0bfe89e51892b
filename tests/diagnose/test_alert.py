"""Alerts: to whom, what, how often, and what does not reach the run; 3 seconds."""

from __future__ import annotations

import fcntl
import json
import math
import shlex
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import small_runs
from diagnose.histories import described
from diagnose.histories import train as train_records
from refused import refused
from stated import numbers_in
from surefoot.cli.diagnose import AlertOption, alert_of
from surefoot.cli.main import main
from surefoot.errors import DivergedError
from surefoot.tools.diagnose import alert as alerts
from surefoot.tools.diagnose.alert import Alert
from surefoot.tools.diagnose.finding import Finding
from surefoot.tools.diagnose.live import LiveFindings
from surefoot.tools.report.directory_watch import DirectoryWatch
from surefoot.tracking.jsonl import line
from surefoot.tracking.run_directory import RunDirectory
from waiting import HANG_S, wait_until
from written_runs import falling, train, written

ERROR = Finding(
    "diverged",
    "error",
    "The run diverged: <all> is lost.",
    evidence=("at step 3",),
    numbers={"steps": 3.0},
)


@dataclass(frozen=True)
class Request:
    path: str
    content_type: str
    body: dict[str, Any]


class Hook(HTTPServer):
    """A local server that answers with `status` and keeps what it gets."""

    def __init__(self) -> None:
        self.status = 200
        self.requests = list[Request]()
        self.authorizations = list[str | None]()
        hook = self

        class Keep(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.authorizations.append(self.headers["Authorization"])
                body = self.rfile.read(int(self.headers["Content-Length"]))
                content_type = str(self.headers["Content-Type"])
                hook.requests.append(Request(self.path, content_type, json.loads(body)))
                self.send_response(hook.status)
                if hook.status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def do_GET(self) -> None:
                hook.requests.append(Request(self.path, "GET", {}))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Keep)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [request.body for request in self.requests]

    @property
    def findings(self) -> list[dict[str, Any]]:
        return [body["finding"] for body in self.bodies]

    @property
    def names(self) -> list[str]:
        return [finding["name"] for finding in self.findings]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook?token=secret"


@pytest.fixture
def hook() -> Iterator[Hook]:
    with Hook() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


KEEPING_PROGRAM = """
import json, sys
with open({out!r}, "a") as file:
    file.write(json.dumps([sys.argv[1:], json.load(sys.stdin)]) + chr(10))
"""


@dataclass(frozen=True)
class KeepingCommand:
    """A command that appends its arguments and its input to a file."""

    command: str
    out: Path

    def calls(self) -> list[Any]:
        """The arguments and the input of each call."""
        return [json.loads(line) for line in self.out.read_text().splitlines()]


@pytest.fixture
def keeping(tmp_path: Path) -> KeepingCommand:
    program = tmp_path / "keep.py"
    out = tmp_path / "kept.jsonl"
    program.write_text(KEEPING_PROGRAM.format(out=str(out)))
    return KeepingCommand(shlex.join([sys.executable, str(program)]), out)


def send_error(target: str) -> Alert:
    """Send an error to a target, and wait until it is delivered or given up."""
    alert = Alert(target)
    alert.send(ERROR, run="runs/a", step=1234)
    alert.close()
    return alert


def test_an_address_gets_the_finding_as_json(hook: Hook) -> None:
    alert = send_error(hook.address)

    (request,) = hook.requests
    run = str(Path("runs/a").resolve())
    assert request.path == "/hook?token=secret"
    assert request.content_type == "application/json"
    assert request.body["finding"] == ERROR.to_dict()
    assert request.body["run"] == run
    assert request.body["step"] == 1234
    assert request.body["text"] == f"ERROR diverged in {run}, step 1,234: {ERROR.message}"
    assert alert.problems() == []


def test_a_command_gets_it_on_its_input_and_no_shell_reads_its_arguments(
    tmp_path: Path, keeping: KeepingCommand
) -> None:
    touched = tmp_path / "touched"

    alert = send_error(f"{keeping.command} '; touch {touched}' $HOME")

    ((arguments, body),) = keeping.calls()
    assert arguments == [f"; touch {touched}", "$HOME"]
    assert body["finding"]["name"] == "diverged"
    assert not touched.exists()
    assert alert.problems() == []


def test_an_address_that_refuses_is_one_line_without_the_secret(hook: Hook) -> None:
    hook.status = 302

    (line,) = send_error(hook.address).problems()

    host_and_port = hook.address.partition("/hook")[0]
    assert line.startswith("WARNING: ")
    assert f" {host_and_port}: " in line
    assert "secret" not in line
    # a redirect would come as GET
    assert [request.path for request in hook.requests] == ["/hook?token=secret"]


def test_an_address_at_which_nobody_listens_is_one_line_without_the_secret() -> None:
    (line,) = send_error("http://127.0.0.1:9/secret").problems()
    assert line.startswith("WARNING: ")
    assert " http://127.0.0.1:9: " in line
    assert "secret" not in line


def test_a_command_that_fails_is_one_line_without_its_arguments() -> None:
    failing = [sys.executable, "-c", "raise SystemExit(3)", "secret"]
    (line,) = send_error(shlex.join(failing)).problems()
    assert line.endswith("exit status 3")
    assert "secret" not in line


def test_a_target_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "_PATIENCE_S", 0.2)
    hanging = [sys.executable, "-c", "import time; time.sleep(600)"]
    (line,) = send_error(shlex.join(hanging)).problems()
    assert numbers_in(line)[-1] == 0  # seconds, rounded


def write_hanging_command(tmp_path: Path) -> tuple[str, Path]:
    """A command that hangs, whose child holds a lock as long as it lives; the file of the lock."""
    lock = tmp_path / "lock"
    child = f"import fcntl; f = open({str(lock)!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); input()"
    program = tmp_path / "alert.py"
    program.write_text(
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE)\n"
        "time.sleep(600)\n"
    )
    return shlex.join([sys.executable, str(program)]), lock


def is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


class PatienceUntilLocked:
    """The patience of an alert that ends when a command's child has begun."""

    def __init__(self, lock: Path) -> None:
        self.lock = lock

    def wait(self, process: Any, body: bytes, timeout: float) -> None:
        process.stdin.close()
        wait_until(lambda: is_locked(self.lock))
        raise subprocess.TimeoutExpired(process.args, timeout)


@pytest.mark.skipif(sys.platform == "win32", reason="no process groups")
def test_a_command_that_hangs_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, lock = write_hanging_command(tmp_path)
    monkeypatch.setattr(alerts.subprocess.Popen, "communicate", PatienceUntilLocked(lock).wait)

    with refused("alert-test-failed", setting="alert"):
        Alert(command).test(run="runs/a")
    assert wait_until(lambda: not is_locked(lock))


@pytest.mark.skipif(sys.platform == "win32", reason="no process groups")
def test_the_command_that_is_left_when_a_run_ends_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "_AT_END_S", 0.2)
    command, lock = write_hanging_command(tmp_path)
    alert = Alert(command)
    alert.send(ERROR, run="runs/a", step=3)
    alert.send(ERROR, run="runs/a", step=4)  # must not begin
    assert wait_until(lambda: is_locked(lock))
    thread = alert.thread

    alert.close()

    assert thread is not None
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert wait_until(lambda: not is_locked(lock))
    assert len(alert.problems()) == 2  # the one that was ended, and that not all were sent


@pytest.mark.parametrize(
    ("user", "plain"),
    [
        ("me:pass", "me:pass"),
        ("me%40home:p%3Ass%2F", "me@home:p:ss/"),
        ("token", "token:"),
        (":pass", ":pass"),
    ],
)
def test_a_user_and_password_are_sent_as_a_header_and_named_nowhere(
    user: str, plain: str, hook: Hook
) -> None:
    address = hook.address.replace("http://", f"http://{user}@")

    alert = send_error(address)
    assert alert.problems() == []
    assert hook.authorizations == [f"Basic {b64encode(plain.encode()).decode()}"]

    hook.status = 401
    with refused("alert-test-failed") as error:
        alert.test(run="runs/a")
    assert "pass" not in str(error.value)
    assert "@" not in str(error.value)


@pytest.mark.parametrize(
    "target",
    [
        "ftp://example.org/x",
        "https:///x",
        "https://:8080/x",
        "https://a b",
        "https://example.org/a\tb",
        "https://example.org:https/x",
        "https://example.org:99999/x",
        "https://example.org:0/x",
        "https://me:secret/word@example.org/x",
        "https://me:secret@/x",
        "https://example..org/x",
        f"https://{'a' * 64}.org/x",
        "https://exa<mple>.org/x",
        "https://999.1.1.1/x",
        "https://[::1/x",
        "https://[::g]/x",
        "https://example.org/\u00fc",
    ],
)
def test_an_address_that_is_none_is_refused_without_its_secrets(target: str) -> None:
    with refused("alert-not-an-address", setting="alert") as error:
        Alert(target)
    assert "secret" not in str(error.value)
    assert error.value.__suppress_context__ or error.value.__context__ is None


@pytest.mark.parametrize(
    "target", ["https://example.org", "http://127.0.0.1:8080/x", "https://[::1]:80/x?y=1#z"]
)
def test_an_address_is_taken_as_it_is(target: str) -> None:
    assert Alert(target).target == target


@pytest.mark.parametrize(
    ("code", "target"),
    [
        ("alert-target-unknown", "no-such-command --token secret"),
        ("alert-target-unknown", ""),
        ("alert-target-unknown", "/"),
        ("alert-not-a-command", "python3 'secret"),
        ("alert-target-unknown", "example.org/hook"),
    ],
)
def test_a_command_that_is_none_is_refused_without_its_arguments(code: str, target: str) -> None:
    with refused(code, setting="alert") as error:
        Alert(target)
    assert "secret" not in str(error.value)


def test_a_command_stays_where_it_is_if_the_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeping: KeepingCommand
) -> None:
    script = tmp_path / "alert.sh"
    script.write_text(f"#!/bin/sh\nexec {keeping.command}\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    alert = Alert("./alert.sh")
    monkeypatch.chdir("/")

    alert.test(run="runs/a")

    ((arguments, body),) = keeping.calls()
    assert arguments == []
    assert body["finding"]["name"] == "alert-test"
    assert body["finding"]["severity"] == "note"


def skipping_records() -> list[dict[str, Any]]:
    """Of a run that skips a step in each record, and later many."""

    def skipped(place: int) -> int:
        if place < 5:
            return 0
        return 1 if place <= 20 else 6

    return train_records(skipped=skipped)


def test_a_finding_is_sent_once_and_only_errors_are(hook: Hook) -> None:
    live = LiveFindings(
        described(standing="running"), say=lambda _: None, command=None, alert=Alert(hook.address)
    )
    for record in skipping_records():
        live.write(record)
    live.write({"kind": "event", "step": 400, "event": "finished"})
    live.at_end()
    live.close()

    assert hook.names.count("non-finite-steps") == 1
    assert len(hook.names) == len(set(hook.names))
    assert {finding["severity"] for finding in hook.findings} == {"error"}


def test_a_resumed_run_does_not_send_its_old_findings(hook: Hook) -> None:
    records = skipping_records()
    live = LiveFindings(
        described(standing="running"),
        say=print,
        command=None,
        alert=Alert(hook.address),
        earlier=records[:-5],
        now=lambda: 0.0,
    )
    for record in records[-5:]:
        live.write(record)
    at_end = live.at_end()
    live.close()

    errors = [finding.name for finding in at_end if finding.severity == "error"]
    assert "non-finite-steps" in errors
    assert "non-finite-steps" not in hook.names


def train_until_it_diverges(run_dir: Path, alert: str | None) -> None:
    """In the 31st pass the loss is not a number."""
    passes = 0

    def loss(model: Any, batch: Any) -> torch.Tensor:
        nonlocal passes
        if model.training and torch.is_grad_enabled():
            passes += 1
        usual = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        return usual * math.nan if passes > 30 else usual

    run = small_runs.build(run_dir, loss=loss, check_state=False, log_every="1 steps")
    run.parts.alert = alert
    with pytest.raises(DivergedError):
        small_runs.train(run)


def newest_tensors(run_dir: Path) -> dict[str, bytes]:
    """The files of tensors of the newest checkpoint."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return {
        f"{newest.name}/{path.name}": path.read_bytes() for path in newest.glob("*.safetensors")
    }


def test_an_alert_changes_no_bit_and_a_run_that_diverges_sends_one(
    tmp_path: Path, hook: Hook
) -> None:
    train_until_it_diverges(tmp_path / "without", None)
    train_until_it_diverges(tmp_path / "with", hook.address)
    train_until_it_diverges(tmp_path / "nowhere", "http://127.0.0.1:9/")

    without_alert = newest_tensors(tmp_path / "without")
    assert len(without_alert) > 1
    assert newest_tensors(tmp_path / "with") == without_alert
    assert newest_tensors(tmp_path / "nowhere") == without_alert
    assert "diverged" in hook.names


PROGRAM = """
from small_runs import build as small
def build():
    return small({run_dir!r}, length="3 steps", splits=None, early_stopping=None)
"""


def test_a_target_stands_nowhere_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    run = tmp_path / "run"
    (tmp_path / "program.py").write_text(PROGRAM.format(run_dir=str(run)))
    for words in (["train", f"{tmp_path}/program.py:build"], ["resume", str(run)]):
        words += ["--alert", hook.address, "--alert-test"]
        monkeypatch.setattr(sys, "argv", ["surefoot", *words])
        main(words)
    files = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    everything = b"".join(files)
    assert b"surefoot" in everything
    assert b"secret" not in everything
    assert b"--alert" not in everything
    assert hook.names == ["alert-test", "alert-test"]


def test_a_test_alert_is_sent_before_anything_begins(tmp_path: Path, hook: Hook) -> None:
    hook.status = 404

    with refused("alert-test-failed", setting="alert"):
        alert_of(AlertOption(alert=hook.address, alert_test=True), run=tmp_path / "run")

    (body,) = hook.bodies
    assert body["run"] == str(tmp_path / "run")
    assert body["finding"]["severity"] == "note"


def test_a_test_alert_is_not_sent_by_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)

    alert_of(AlertOption(alert=hook.address, alert_test=True), run=tmp_path / "run")

    assert hook.requests == []


def test_a_test_without_a_target_is_refused() -> None:
    with refused("option-missing", setting="alert"):
        alert_of(AlertOption(alert_test=True), run="runs/a")


@pytest.mark.parametrize("verb", ["train", "resume"])
def test_a_bad_target_is_refused_before_anything_is_read(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (tmp_path / "program.py").write_text(PROGRAM.format(run_dir=str(run)))
    program = f"{tmp_path}/program.py:build"
    target = program
    if verb == "resume":
        main(["train", program])
        target = str(run)

    with pytest.raises(SystemExit) as end:
        main([verb, target, "--alert", "no-such-command"])

    assert end.value.code == 2
    assert "[alert-target-unknown]" in capsys.readouterr().err
    assert run.exists() == (verb == "resume")


def test_the_page_of_a_directory_sends_the_findings_of_runs_that_it_has_seen_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs = tmp_path / "runs"
    end = [train(60, math.nan, skipped=10), {"kind": "event", "step": 60, "event": "diverged"}]
    written(runs / "over", falling(50) + end)
    written(runs / "running", falling(50))
    directory = RunDirectory(runs / "running")
    directory.open()

    watch = DirectoryWatch(runs, alert=Alert(hook.address))
    look(watch)
    assert hook.requests == []

    with (runs / "running" / "metrics.jsonl").open("a") as file:
        file.write("".join(f"{line(record)}\n" for record in end))
    directory.close()
    look(watch)
    look(watch)
    watch.close()

    directory.open()  # resumed
    watch = DirectoryWatch(runs, alert=Alert(hook.address))
    look(watch)  # it knows from the cache what was sent
    directory.close()
    look(watch)
    watch.close()

    assert "diverged" in hook.names
    assert len(hook.names) == len(set(hook.names))
    assert {Path(body["run"]).name for body in hook.bodies} == {"running"}


def look(watch: DirectoryWatch) -> None:
    """Look at all runs until there is nothing left to do."""
    watch.look()
    while watch.work():
        pass
