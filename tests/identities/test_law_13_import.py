"""Law 13: importing surefoot does nothing, and `surefoot --help` answers without torch. (2 s)

In a fresh interpreter each time: this one has imported everything already.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from in_one import in_one

PROBE = """
import json, logging, os, random, signal, sys, threading, warnings

def everything():
    handlers = {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()}
    return {
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "signals": handlers,
        "logging": [repr(logging.root.handlers), logging.root.level, sorted(logging.root.manager.loggerDict)],
        "threads": len(threading.enumerate()),
        "warnings": repr(warnings.filters),
        "hooks": [repr(sys.excepthook), repr(sys.stdout), repr(sys.stderr)],
        "random": repr(random.getstate()),
    }

before = everything()
@CODE@
after = everything()
changed = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
heavy = [name for name in ("torch", "numpy", "safetensors", "tensorboard", "tyro", "tomlkit", "rich", "matplotlib") if name in sys.modules]
print(json.dumps({"changed": changed, "heavy": heavy}))
"""
ROOMS = sorted(
    path.relative_to(Path(__file__).parents[2] / "src")
    .with_suffix("")
    .as_posix()
    .replace("/", ".")
    .removesuffix(".__init__")
    for path in (Path(__file__).parents[2] / "src" / "surefoot").rglob("*.py")
)


def probed(code: str, tmp_path: Path) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE.replace("@CODE@", code)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return dict(json.loads(ended.stdout))


def test_importing_surefoot_imports_nothing_heavy_and_changes_nothing(tmp_path: Path) -> None:
    assert probed("import surefoot", tmp_path) == {"changed": {}, "heavy": []}
    assert list(tmp_path.iterdir()) == []


def test_importing_every_room_changes_nothing(tmp_path: Path) -> None:
    # torch and its company are imported first: what they do is not ours
    company = "import torch, numpy, safetensors.torch, torch.utils.data, tyro, tomlkit, PIL.Image\n"
    company += "import torch.distributed.fsdp, torch.distributed.elastic.multiprocessing\nbefore = everything()\n"
    code = company + "\n".join(f"import {room}" for room in ROOMS)
    assert probed(code, tmp_path)["changed"] == {}
    assert list(tmp_path.iterdir()) == []


@in_one
@pytest.mark.parametrize(
    "asked",
    [
        "['--help']",
        "['-h']",
        "['--version']",
        "['train', 'gpt', '--help']",
        *(f"['{verb}', '--help']" for verb in ("train", "plan", "resume", "evaluate", "predict", "compare")),
    ],
)
def test_the_command_line_answers_without_torch(asked: str, tmp_path: Path) -> None:
    code = f"""
import contextlib, io
from surefoot.cli.main import main
answer = io.StringIO()
with contextlib.redirect_stdout(answer):
    try:
        main({asked})
    except SystemExit as end:
        assert not end.code, end.code
assert answer.getvalue().strip()
"""
    found = probed(code, tmp_path)
    assert "torch" not in found["heavy"]
    assert "signals" not in found["changed"]
    assert "environment" not in found["changed"]


def test_errors_and_configuration_are_free_of_torch(tmp_path: Path) -> None:
    code = "import surefoot; surefoot.ConfigError, surefoot.DivergedError; surefoot.adamw; import surefoot.config"
    assert "torch" not in probed(code, tmp_path)["heavy"]


def test_a_saved_run_is_read_and_diagnosed_without_torch(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 3, "loss": 2.5}\n')
    reading = "run = surefoot.load('.'); run.step, run.status, run.settings, run.metrics, run.records(), run.panels(), run.diagnose()"
    assert "torch" not in probed(f"import surefoot; {reading}; run.report()", tmp_path)["heavy"]
    assert (tmp_path / "report.html").exists()


def test_the_public_names_are_all_there() -> None:
    import surefoot

    assert [name for name in surefoot.__all__ if getattr(surefoot, name, None) is None] == []
