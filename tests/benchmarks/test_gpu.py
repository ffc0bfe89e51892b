"""benchmarks/gpu.sh: its lines, its runner with lines that pass, fail and hang, and a dry run of
all on the CPU. (2 s; slow: minutes)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType

import pytest
import safetensors.torch
import torch
import torch.utils._pytree  # what numpy's first use would import late

from forked_ranks import alive
from run_files import same_tensors
from waiting import wait_until

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
HEAD = {"head": "now, here", "facts": [sys.executable, "-S", "-c", "print('a machine')"]}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("gpu")


# a program and its child, whose process is written to a file
HANGING = """
import os, time
if os.fork() == 0:
    open({file!r}, "w").write(str(os.getpid()))
time.sleep(10_000)
"""


def program(source: str) -> list[str]:
    return [sys.executable, "-S", "-c", source]


def test_every_line_has_a_module_and_a_sentence_in_the_readme(gpu: ModuleType) -> None:
    page = (BENCHMARKS / "README.md").read_text()
    needed = {"tests", "waiting", "fp16", "bf16", "compile", "resume", "ranks", "speed"}

    assert needed <= gpu.LINES.keys()
    for name in gpu.LINES:
        module = (BENCHMARKS / "gpu_lines" / f"{name}.py").read_text()
        assert "def check(device: str) -> str:" in module
        assert f"| `{name}` |" in page


def test_all_lines_together_end_within_ten_minutes(gpu: ModuleType) -> None:
    assert gpu.BUDGET_S < 600
    assert all(0 < line.limit_s <= gpu.BUDGET_S for line in gpu.LINES.values())


def test_a_line_that_passes_fails_skips_or_hangs_is_written_so_and_ends_no_other(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = HANGING.format(file=str(tmp_path / "child"))
    commands = {
        "good": program("print('some words'); print('3 figures')"),
        "bad": program("print('loss 1.0'); raise SystemExit('AssertionError: it rose')"),
        "absent": program("print('no compiler'); raise SystemExit(77)"),
        "hangs": program(hanging),
        "killed": program("import os; os.kill(os.getpid(), 9)"),
        "last": program("print('reached')"),
    }
    lines = {name: gpu.Line(f"{name} holds", 600.0) for name in commands}
    lines["hangs"] = gpu.Line("hangs holds", 2.0)
    monkeypatch.setattr(gpu, "LINES", lines)
    run_dir = tmp_path / "gpu.txt"

    failed = gpu.run_lines(commands, run_dir=run_dir, budget_s=600.0, slack=1.0, **HEAD)

    assert failed == 3
    text = run_dir.read_text()
    rows = [row for row in text.splitlines() if row and not row.startswith("      |")]
    without_seconds = [re.sub(r" +\d+ s  ", " ", row) for row in rows]
    assert without_seconds[:-1] == [
        "now, here",
        "a machine",
        "PASS  good 3 figures",
        "FAIL  bad bad holds",
        "SKIP  absent no compiler",
        "FAIL  hangs hangs holds",
        "FAIL  killed killed holds",
        "PASS  last reached",
    ]
    assert rows[-1].startswith("2 PASS, 1 SKIP, 3 FAIL; ")
    assert "| AssertionError: it rose" in text
    assert "| not over after 2 s" in text
    assert "| ended with -9" in text
    assert wait_until(lambda: not alive(int((tmp_path / "child").read_text()))), (
        "a line that hangs left a process"
    )


def test_a_line_for_which_no_time_is_left_has_failed(gpu: ModuleType, tmp_path: Path) -> None:
    run_dir = tmp_path / "gpu.txt"
    commands = {"fp16": program("print('never')")}

    failed = gpu.run_lines(commands, run_dir=run_dir, budget_s=0.0, slack=1.0, **HEAD)

    assert failed == 1
    assert "no time was left" in run_dir.read_text()


@pytest.mark.slow
def test_the_machine_that_has_no_gpu_is_told_how_to_make_a_dry_run(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    ended = subprocess.run(
        [BENCHMARKS / "gpu.sh", "--only", "memory", "--out", tmp_path / "gpu.txt"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "torch sees no GPU: --device cpu makes a dry run" in (tmp_path / "gpu.txt").read_text()


# modules of gpu_lines/ that lines share
NO_LINES = {
    "__init__",
    "__main__",
    "machine",
    "runs",
    "stand_ins",
    "facts",
    "rank",
    "resumed",
}
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("gpu_lines.stand_ins")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_stand_in_for_safetensors_and_the_package_read_each_other(
    stand_ins: ModuleType, dtype: torch.dtype
) -> None:
    tensors = {
        "a.b": torch.arange(6).reshape(2, 3).to(dtype),
        "none": torch.empty(0, 3, dtype=dtype),
        "scalar": torch.ones((), dtype=dtype),
    }

    read_by_stand_in = stand_ins.load(safetensors.torch.save(tensors))
    read_by_package = safetensors.torch.load(stand_ins.save(tensors))

    for loaded in (read_by_stand_in, read_by_package):
        assert same_tensors(loaded, tensors)
        assert {tensor.dtype for tensor in loaded.values()} == {dtype}


def test_the_stand_in_for_tomlkit_writes_what_is_read_back(stand_ins: ModuleType) -> None:
    document = stand_ins.Document()
    document.add(stand_ins.comment("of a test"))
    table = {
        "text": 'a "quoted" \\ line\n\x7f 😀',
        "float": 1e-30,
        "inf": float("inf"),
        "on": True,
        "number": 3,
        "list": [[1, 2], []],
    }
    document["run"] = table | {"nested": {"a.b": {"c": [{"d": 1}]}, "empty": {}}}
    assert tomllib.loads(stand_ins.dumps(document)) == {"run": document.tables["run"]}


def requirements(name: str) -> set[str]:
    """A package with all that it needs, those of its extras left out."""
    names = set[str]()
    open_names = [name]
    while open_names:
        package = open_names.pop()
        try:
            requires = distribution(package).requires or []
        except PackageNotFoundError:
            continue
        if package not in names:
            names.add(package)
            needed = [text for text in requires if "extra ==" not in text]
            open_names += [re.split(r"[^\w.-]", text)[0] for text in needed]
    return names


def link_packages(names: set[str], folder: Path) -> None:
    """Link the files and directories that installed packages have beside each other."""
    for name in names:
        installed = distribution(name)
        tops = {file.parts[0] for file in installed.files or []}
        for top in tops - {"..", "__pycache__"}:
            if not top.endswith(".pth") and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(installed.locate_file(top))))


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """A Python that finds torch, NumPy and what torch needs, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    link_packages(requirements("torch") | {"numpy"}, packages)
    python = tmp_path / "venv" / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"],
        capture_output=True,
        text=True,
        check=True,
    )
    Path(site.stdout.strip(), "bare.pth").write_text(f"{packages}\n")
    return str(python)


@pytest.mark.slow
def test_every_line_passes_on_a_cpu_with_nothing_but_torch_and_numpy(
    bare_python: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "gpu.txt"
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    environment.pop("DEVICE", None)
    environment["PYTHON"] = bare_python
    modules = {path.stem for path in (BENCHMARKS / "gpu_lines").glob("*.py")}

    process = subprocess.run(
        [BENCHMARKS / "gpu.sh", "--device", "cpu", "--out", run_dir],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    text = run_dir.read_text()
    assert process.returncode == 0, text
    assert "safetensors (a stand-in is used), tomlkit (a stand-in is used)" in text
    states = {name: state for state, name in re.findall(r"(?m)^(PASS|SKIP|FAIL) +(\S+)", text)}
    skipped = {name for name, state in states.items() if state == "SKIP"}
    assert states.keys() == modules - NO_LINES
    assert skipped <= {"tests", "compile"}, text
    assert "not installed: pytest, hypothesis" in text


@pytest.mark.slow
def test_the_tests_marked_gpu_are_collected_and_skipped_on_a_cpu(tmp_path: Path) -> None:
    run_dir = tmp_path / "gpu.txt"
    command = [BENCHMARKS / "gpu.sh", "--device", "cpu", "--only", "tests", "--out", run_dir]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, check=False
    )
    assert ended.returncode == 0, run_dir.read_text()
    assert re.search(r"PASS  tests .*(skipped|passed)", run_dir.read_text())
