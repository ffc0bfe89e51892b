"""Alerts: to whom, what, how often, and what does not reach the run; 3 seconds."""

from __future__ import annotations

import fcntl
import json
import shlex
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from diagnose.histories import described
from diagnose.histories import train as history
from refused import refused
from small_runs import build
from small_runs import train as trained
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


class Hook(HTTPServer):
    """A local server that answers with `status` and keeps what it gets."""

    def __init__(self) -> None:
        self.status = 200
        self.got = list[tuple[str, str, dict[str, Any]]]()
        self.authorizations = list[str | None]()
        hook = self

        class Keep(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.authorizations.append(self.headers["Authorization"])
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.got.append((self.path, self.headers["Content-Type"], json.loads(body)))
                self.send_response(hook.status)
                if hook.status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def do_GET(self) -> None:
                hook.got.append((self.path, "GET", {}))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Keep)

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


@pytest.fixture
def kept(tmp_path: Path) -> tuple[str, Callable[[], list[list[Any]]]]:
    """A command that appends its arguments and its input to a file, and a function that reads
    them.
    """
    program = tmp_path / "keep.py"
    out = tmp_path / "kept.jsonl"
    program.write_text(
        f"import json, sys\nopen({str(out)!r}, 'a').write(json.dumps([sys.argv[1:], json.load(sys.stdin)]) + chr(10))\n"
    )
    command = shlex.join([sys.executable, str(program)])
    return (
        command,
        lambda: [json.loads(text) for text in out.read_text().splitlines()] if out.exists() else [],
    )


def test_an_address_gets_the_finding_as_json(hook: Hook) -> None:
    alert = Alert(hook.address)
    alert.send(ERROR, run="runs/a", step=1234)
    alert.close()
    ((path, kind, body),) = hook.got
    assert (path, kind) == ("/hook?token=secret", "application/json")
    assert body["finding"] == ERROR.to_dict()
    assert (body["run"], body["step"]) == (str(Path("runs/a").resolve()), 1234)
    where, _, what = body["text"].partition(": ")
    assert where == f"ERROR diverged in {body['run']}, step 1,234"
    assert what == ERROR.message
    assert alert.problems() == []


def test_a_command_gets_it_on_its_input_and_no_shell_reads_its_arguments(
    tmp_path: Path, kept
) -> None:
    command, read = kept
    alert = Alert(f"{command} '; touch {tmp_path / 'ran'}' $HOME")
    alert.send(ERROR, run="runs/a", step=3)
    alert.close()
    (((first, second), body),) = read()
    assert (first, second) == (f"; touch {tmp_path / 'ran'}", "$HOME")
    assert body["finding"]["name"] == "diverged"
    assert not (tmp_path / "ran").exists()
    assert alert.problems() == []


def test_what_is_not_delivered_is_one_line_without_the_secret(hook: Hook) -> None:
    failing = [
        Alert(hook.address),
        Alert(shlex.join([sys.executable, "-c", "raise SystemExit(3)"])),
    ]
    failing.append(Alert("http://127.0.0.1:9/secret"))  # nobody listens
    hook.status = 302
    for alert in failing:
        alert.send(ERROR, run="runs/a", step=3)
        alert.close()
    lines = [alert.problems() for alert in failing]
    assert [len(each) for each in lines] == [1, 1, 1]
    host_and_port = hook.address.partition("/hook")[0]
    for warning, address in ((lines[0][0], host_and_port), (lines[2][0], "http://127.0.0.1:9")):
        assert warning.startswith("WARNING: ")
        assert f" {address}: " in warning
    assert [path for path, *_ in hook.got] == ["/hook?token=secret"]  # a redirect would come as GET
    assert lines[1][0].endswith("exit status 3")
    assert "secret" not in str(lines)


def test_a_target_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "_PATIENCE_S", 0.2)
    alert = Alert(shlex.join([sys.executable, "-c", "import time; time.sleep(600)"]))
    alert.send(ERROR, run="runs/a", step=3)  # returns at once
    alert.close()
    assert numbers_in(alert.problems()[0])[-1] == 0  # seconds, rounded


def kept_alive(tmp_path: Path, *, then: str) -> tuple[str, Path]:
    """A command whose child holds a lock as long as it lives, and the file of the lock."""
    lock = tmp_path / "lock"
    child = f"import fcntl; f = open({str(lock)!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); input()"
    program = tmp_path / "alert.py"
    program.write_text(
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE)\n"
        f"{then}\n"
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


class Began:
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
    command, lock = kept_alive(tmp_path, then="time.sleep(600)")
    monkeypatch.setattr(alerts.subprocess.Popen, "communicate", Began(lock).wait)
    with refused("alert-test-failed", setting="alert"):
        Alert(command).test(run="runs/a")
    assert wait_until(lambda: not is_locked(lock))


@pytest.mark.skipif(sys.platform == "win32", reason="no process groups")
def test_the_command_that_is_left_when_a_run_ends_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "_AT_END_S", 0.2)
    command, lock = kept_alive(tmp_path, then="time.sleep(600)")
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
    alert = Alert(hook.address.replace("http://", f"http://{user}@"))
    alert.send(ERROR, run="runs/a", step=3)
    alert.close()
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept
) -> None:
    command, read = kept
    script = tmp_path / "alert.sh"
    script.write_text(f"#!/bin/sh\nexec {command}\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    alert = Alert("./alert.sh")
    monkeypatch.chdir("/")
    alert.test(run="runs/a")
    (((), body),) = read()
    assert (body["finding"]["name"], body["finding"]["severity"]) == ("alert-test", "note")


def skipping(kept: int = 20) -> list[dict[str, Any]]:
    return list(history(skipped=lambda place: int(place >= 5) + 5 * (place > kept)))


def test_a_finding_is_sent_once_and_only_errors_are(hook: Hook) -> None:
    said: list[str] = []
    alert = Alert(hook.address)
    live = LiveFindings(described(standing="running"), say=said.append, command=None, alert=alert)
    for record in skipping():
        live.write(record)
    live.write({"kind": "event", "step": 400, "event": "finished"})
    live.at_end()
    live.close()
    names = [body["finding"]["name"] for *_, body in hook.got]
    assert names.count("non-finite-steps") == 1
    assert len(names) == len(set(names))
    assert {body["finding"]["severity"] for *_, body in hook.got} == {"error"}


def test_a_resumed_run_does_not_send_its_old_findings(hook: Hook) -> None:
    records = skipping()
    alert = Alert(hook.address)
    old = records[:-5]
    new = records[-5:]
    live = LiveFindings(
        described(standing="running"),
        say=print,
        command=None,
        alert=alert,
        earlier=old,
        now=lambda: 0.0,
    )
    for record in new:
        live.write(record)
    assert "non-finite-steps" in {
        finding.name for finding in live.at_end() if finding.severity == "error"
    }
    live.close()
    assert "non-finite-steps" not in [body["finding"]["name"] for *_, body in hook.got]


def test_an_alert_changes_no_bit_and_a_run_that_diverges_sends_one(
    tmp_path: Path, hook: Hook
) -> None:
    def loss(model, batch):
        if model.training and torch.is_grad_enabled():
            passes.append(0)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1]) * (
            float("nan") if len(passes) > 30 else 1
        )

    weights = []
    for name, target in (
        ("without", None),
        ("with", hook.address),
        ("nowhere", "http://127.0.0.1:9/"),
    ):
        passes: list[int] = []
        run = build(tmp_path / name, loss=loss, check_state=False, log_every="1 steps")
        run.parts.alert = target
        with pytest.raises(DivergedError):
            trained(run)
        newest = max((tmp_path / name / "checkpoints").glob("step-*"))
        weights.append(
            [newest.name, *(path.read_bytes() for path in sorted(newest.glob("*.safetensors")))]
        )
    assert len(weights[0]) > 2
    assert weights[0] == weights[1] == weights[2]
    assert "diverged" in [body["finding"]["name"] for *_, body in hook.got]


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
    texts = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert b"surefoot" in b"".join(texts)
    assert not any(b"secret" in text or b"--alert" in text for text in texts)
    assert [body["finding"]["name"] for *_, body in hook.got] == ["alert-test", "alert-test"]


@pytest.mark.parametrize("environment", [{}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}])
def test_a_test_alert_is_sent_by_one_process_before_anything_begins(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    hook.status = 404
    options = AlertOption(alert=hook.address, alert_test=True)
    if environment:
        alert_of(options, run=tmp_path / "run")
        assert hook.got == []
    else:
        with refused("alert-test-failed", setting="alert"):
            alert_of(options, run=tmp_path / "run")
        ((_, _, body),) = hook.got
        assert (body["run"], body["finding"]["severity"]) == (str(tmp_path / "run"), "note")


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
    if verb == "resume":
        main(["train", program])
    with pytest.raises(SystemExit) as end:
        main([verb, program if verb == "train" else str(run), "--alert", "no-such-command"])
    assert end.value.code == 2
    assert "[alert-target-unknown]" in capsys.readouterr().err
    assert run.exists() == (verb == "resume")


def test_the_page_of_a_directory_sends_the_findings_of_runs_that_it_has_seen_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ends = [train(60, float("nan"), skipped=10), {"kind": "event", "step": 60, "event": "diverged"}]
    for name in ("old", "new"):
        written(tmp_path / "runs" / name, falling(50) + (ends if name == "old" else []))

    def looked() -> None:
        watch.look()
        while watch.work():
            pass

    directory = RunDirectory(tmp_path / "runs" / "new")
    directory.open()
    watch = DirectoryWatch(tmp_path / "runs", alert=Alert(hook.address))
    looked()
    assert hook.got == []
    with (tmp_path / "runs" / "new" / "metrics.jsonl").open("a") as file:
        file.write("".join(f"{line(record)}\n" for record in ends))
    directory.close()
    looked()
    looked()
    watch.close()
    directory.open()  # resumed
    watch = DirectoryWatch(
        tmp_path / "runs", alert=Alert(hook.address)
    )  # it knows from the cache what was sent
    looked()
    directory.close()
    looked()
    watch.close()
    sent = [(Path(body["run"]).name, body["finding"]["name"]) for *_, body in hook.got]
    assert ("new", "diverged") in sent
    assert len(sent) == len(set(sent))
    assert {name for name, _ in sent} == {"new"}
