"""Law 13: importing surefoot does nothing, and `surefoot --help` answers without torch. (2 s)

In a fresh interpreter each time: this one has imported everything already. That importing every
room changes nothing is held in `tests/test_public_names.py`, where another interpreter imports them
all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fresh_interpreters import EVERYTHING
from surefoot.cli.main import VERBS

PROBE = f"""
{EVERYTHING}
before = everything()
@CODE@
changed = changed_since(before)
heavy = [name for name in ("torch", "numpy", "safetensors", "tensorboard", "tyro", "tomlkit", "rich", "resvg_py") if name in sys.modules]
print(json.dumps({{"changed": changed, "heavy": heavy}}))
"""


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


ASKED = [
    ["--help"],
    ["-h"],
    ["--version"],
    ["train", "gpt", "--help"],
    *([verb, "--help"] for verb in VERBS),
]


def test_the_command_line_answers_without_torch(tmp_path: Path) -> None:
    """One interpreter answers all: torch is not there after any."""
    code = f"""
import contextlib, io
from surefoot.cli.main import main
for asked in {ASKED}:
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer):
        try:
            main(asked)
        except SystemExit as end:
            assert not end.code, (asked, end.code)
    assert answer.getvalue().strip(), asked
    assert "torch" not in sys.modules, asked
"""
    found = probed(code, tmp_path)
    assert "torch" not in found["heavy"]
    assert "signals" not in found["changed"]
    assert "environment" not in found["changed"]


def test_errors_and_configuration_are_free_of_torch(tmp_path: Path) -> None:
    code = "import surefoot; surefoot.ConfigError, surefoot.DivergedError; surefoot.optim.adamw; import surefoot.config"
    assert "torch" not in probed(code, tmp_path)["heavy"]


def test_a_saved_run_is_read_and_diagnosed_without_torch(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 3, "loss": 2.5}\n')
    reading = "run = surefoot.load('.'); run.step, run.status, run.settings, run.metrics, run.records(), run.panels(), run.diagnose()"
    assert "torch" not in probed(f"import surefoot; {reading}; run.report()", tmp_path)["heavy"]
    assert (tmp_path / "report.html").exists()


def test_the_public_names_are_all_there() -> None:
    import surefoot

    assert [name for name in surefoot.__all__ if getattr(surefoot, name, None) is None] == []
