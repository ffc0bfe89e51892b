"""What is released: versions agree, the files are complete, `make release` refuses, and README's
commands work from the wheel.

`make release` runs this file with SUREFOOT_DIST, the directory of the files that will be published,
and SUREFOOT_RELEASE, which permits no skip.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator
from importlib.metadata import PathDistribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from zipfile import Path as PathInZip
from zipfile import ZipFile

import pytest

import real_slurm
import surefoot as sf

ROOT = Path(__file__).parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
IS_RELEASE = "SUREFOOT_RELEASE" in os.environ
README = (ROOT / "README.md").read_text()

# --- changelog, citation and version --------------------------------------------------------------


def sections() -> dict[str, str]:
    """The text below each heading of the changelog that names a version."""
    parts = re.split(r"^## (.*)\n", CHANGELOG, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    unreleased, *released = sections()
    kinds = re.findall(r"(?m)^### (.*)$", CHANGELOG)

    assert unreleased == "Unreleased"
    for heading in released:
        assert re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", heading)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_a_line_of_the_changelog_has_at_most_100_characters() -> None:
    assert [line for line in CHANGELOG.splitlines() if len(line) > 100] == []


def written_pages() -> set[Path]:
    """All pages but those that are made from docstrings."""
    pages = {*ROOT.glob("*.md")}
    for folder in ("docs", "examples", "benchmarks"):
        pages |= {*(ROOT / folder).rglob("*.md")}
    reference = ROOT / "docs" / "reference"
    return pages - {*reference.glob("api*"), *(reference / "api").iterdir()}


def may_be_longer(line: str) -> bool:
    """Whether a line is code, a row of a table, or a link on its own."""
    is_link = re.fullmatch(r"!?\[.*\]\(\S+\)", line) is not None
    return line.startswith(("    ", "|")) or is_link


def test_a_line_of_prose_in_a_page_has_at_most_100_characters() -> None:
    for page in written_pages():
        prose = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
        long_lines = [line for line in prose.splitlines() if len(line) > 100]
        assert [line for line in long_lines if not may_be_longer(line)] == [], page


def test_changelog_and_citation_have_the_version_of_the_source() -> None:
    _, newest, *_ = sections()
    assert newest.split(" - ")[0] == sf.__version__
    assert f"\nversion: {sf.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_nothing_is_unreleased_in_a_release() -> None:
    assert not IS_RELEASE or not sections()["Unreleased"].strip()


# --- make release ---------------------------------------------------------------------------------

PROGRAM = """#!/bin/sh
echo "$@" >> "$LOG"
[ "$2" != "$FAILS" ]
"""


class Clone(NamedTuple):
    """A repository in which `make release` runs a program that only notes what it should do."""

    path: Path
    log: Path

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.check_output(
            ["git", *identity, *arguments], cwd=self.path, text=True, env=self.environment()
        )

    def environment(self, fails: str = "") -> dict[str, str]:
        person = {
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@b",
            "GIT_CONFIG_GLOBAL": os.devnull,
        }
        return {"PATH": os.environ["PATH"], "LOG": str(self.log), "FAILS": fails} | person

    def release(self, *, fails: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", "release"],
            cwd=self.path,
            env=self.environment(fails),
            text=True,
            capture_output=True,
            check=False,
        )

    def called(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    clone = Clone(tmp_path / "clone", tmp_path / "log")
    (clone.path / "src" / "surefoot").mkdir(parents=True)
    for file in (
        "Makefile",
        ".gitignore",
        "pyproject.toml",
        "constraints.txt",
        "src/surefoot/__init__.py",
    ):
        shutil.copyfile(ROOT / file, clone.path / file)
    clone.git("init", "--quiet")
    clone.git("add", ".")
    clone.git("commit", "--quiet", "--message", "all")
    python = clone.path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PROGRAM)
    python.chmod(0o755)
    (clone.path / ".venv" / "ready").touch()
    return clone


CALLS = ["-m build", "-m pytest --exitfirst tests/test_package.py"]
TAG = f"v{sf.__version__}"


def test_a_release_builds_tests_and_makes_one_annotated_tag(clone: Clone) -> None:
    older = clone.path / "dist" / "surefoot-0.0.1.tar.gz"
    older.parent.mkdir()
    older.touch()

    process = clone.release()

    assert process.returncode == 0
    assert clone.called() == CALLS
    assert not older.exists()
    assert clone.git("cat-file", "-t", TAG) == "tag\n"
    assert clone.git("rev-parse", f"{TAG}^{{commit}}") == clone.git("rev-parse", "HEAD")


def test_a_version_that_has_a_tag_is_not_released_again(clone: Clone) -> None:
    clone.git("tag", TAG)

    process = clone.release()

    assert process.returncode != 0
    assert f"the tag {TAG} exists" in process.stderr
    assert clone.called() == []


@pytest.mark.parametrize("file", ["src/surefoot/__init__.py", "new.py"])
def test_changes_that_are_not_committed_are_not_released(file: str, clone: Clone) -> None:
    (clone.path / file).write_text('__version__ = "0.1.0"\n')

    process = clone.release()

    assert process.returncode != 0
    assert "changes that are not committed" in process.stderr
    assert clone.called() == []
    assert clone.git("tag") == ""


@pytest.mark.parametrize("fails", ["build", "pytest"])
def test_what_fails_leaves_no_tag(fails: str, clone: Clone) -> None:
    assert clone.release(fails=fails).returncode != 0
    assert clone.git("tag") == ""


# --- the files ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the source archive and the wheel that is built from it."""
    if "SUREFOOT_DIST" in os.environ:
        return Path(os.environ["SUREFOOT_DIST"])
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return out


def wheel_in(dist: Path) -> Path:
    return dist / f"surefoot-{sf.__version__}-py3-none-any.whl"


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_its_license_and_nothing_else(dist: Path) -> None:
    with ZipFile(wheel_in(dist)) as archive:
        files = set(archive.namelist())
    package = set()
    for path in (ROOT / "src" / "surefoot").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            package.add(path.relative_to(ROOT / "src").as_posix())
    about = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    metadata = {f"surefoot-{sf.__version__}.dist-info/{name}" for name in about}

    assert {"surefoot/py.typed", "surefoot/__init__.pyi"} < package
    assert "surefoot/tools/report/page.html" in package
    assert files == package | metadata


@pytest.mark.slow
def test_the_source_archive_holds_the_repository(dist: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone: the files of the repository are not known")
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    known = set(subprocess.check_output(listing, cwd=ROOT, text=True).splitlines())
    with tarfile.open(dist / f"surefoot-{sf.__version__}.tar.gz") as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers()}
    assert files - {"PKG-INFO"} == known


@pytest.mark.slow
def test_the_metadata_say_what_an_index_shows(dist: Path) -> None:
    installed = PathDistribution(PathInZip(wheel_in(dist), f"surefoot-{sf.__version__}.dist-info/"))
    about = installed.metadata
    assert about["Name"] == "surefoot"
    assert about["Version"] == sf.__version__
    assert about["License-Expression"] == "MIT"
    assert about["License-File"] == "LICENSE"
    assert about["Author"] == "the surefoot developers"
    assert "Typing :: Typed" in (about.get_all("Classifier") or [])
    assert {"text", "images", "dev"} <= set(about.get_all("Provides-Extra") or [])
    assert [entry.value for entry in installed.entry_points] == ["surefoot.cli.main:main"]
    assert README.strip() in str(about)


@pytest.mark.slow
def test_tools_that_check_packages_find_nothing(dist: Path) -> None:
    scripts = Path(sys.executable).parent
    files = [str(file) for file in dist.iterdir()]
    assert len(files) == 2

    for command in (
        [scripts / "twine", "check", "--strict", *files],
        [scripts / "check-wheel-contents", str(dist)],
    ):
        process = subprocess.run(command, text=True, capture_output=True, check=False)
        assert process.returncode == 0, process.stdout + process.stderr


# --- the installed wheel --------------------------------------------------------------------------


class Installed(NamedTuple):
    """The scripts of an environment that holds the wheel and no other code of ours, and an empty
    folder.
    """

    scripts: Path
    folder: Path

    def run(self, *command: str) -> str:
        """Run a script of the environment in the folder; return all that it prints."""
        ours = (
            "PYTHONPATH",
            "PYTHONDONTWRITEBYTECODE",  # with bytecode, only the first start compiles torch
            "VIRTUAL_ENV",
        )
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        process = subprocess.run(
            [self.scripts / command[0], *command[1:]],
            cwd=self.folder,
            env=environment | {"XDG_CACHE_HOME": str(self.scripts.parent / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert process.returncode == 0, f"{shlex.join(command)}\n{process.stdout}"
        return process.stdout


@pytest.fixture(scope="module")
def installed(dist: Path) -> Iterator[Installed]:
    """The wheel with the extras that README's commands need, in an environment that was empty;
    skips without an index.
    """
    with TemporaryDirectory(prefix="surefoot-") as path:  # on the disk: it takes a gigabyte
        venv.create(Path(path, "environment"), with_pip=True, symlinks=True)
        scripts = Path(path, "environment", "bin")
        pip = [
            scripts / "python",
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            "--no-compile",
        ]
        for what in ("torch", f"{wheel_in(dist)}[text,images]"):
            command = [*pip, "--constraint", str(ROOT / "constraints.txt"), what]
            process = subprocess.run(
                command, text=True, capture_output=True, check=False, env=without_paths()
            )
            reason = line_of_network_error(process.stderr)
            if process.returncode and reason is not None and not IS_RELEASE:
                pytest.skip(f"no package index is reachable: {reason}")
            assert process.returncode == 0, process.stderr
        Path(path, "folder").mkdir()
        yield Installed(scripts, Path(path, "folder"))


# pip retries, and then says that it finds no version: only the warnings of its attempts tell an
# index that is not reachable
NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|Connection(?:Error|Reset|Refused)"
    r"|Max retries exceeded|Network is unreachable|Temporary failure in name resolution|Remote end closed connection"
)


def line_of_network_error(output: str) -> str | None:
    """The line by which pip says that it did not reach an index, or None if it failed for another
    reason.
    """
    for line in output.splitlines():
        if NETWORK.search(line):
            return line.strip()
    return None


def without_paths() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def error_of_pip(folder: Path, *arguments: str) -> str:
    """What pip says when it cannot download a package."""
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check"]
    process = subprocess.run(
        [*pip, "download", "--retries=1", "--no-deps", *arguments],
        cwd=folder,
        text=True,
        capture_output=True,
        check=False,
    )
    assert process.returncode != 0
    return process.stderr


def test_an_index_that_is_not_reached_is_a_reason_to_skip(tmp_path: Path) -> None:
    (closed,) = real_slurm.free_ports(1)
    index = f"--index-url=http://127.0.0.1:{closed}/simple"
    assert line_of_network_error(error_of_pip(tmp_path, index, "no-such-package")) is not None


@pytest.mark.parametrize(
    "arguments",
    [("--no-index", "--find-links=.", "no-such-package"), ("--no-index", "surefoot[")],
    ids=["absent from the index", "no name of a package"],
)
def test_another_error_of_pip_is_no_reason_to_skip(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    assert line_of_network_error(error_of_pip(tmp_path, *arguments)) is None


@pytest.mark.slow
def test_the_installed_package_says_its_version_in_three_ways(installed: Installed) -> None:
    of_script = installed.run("surefoot", "--version")
    of_module = installed.run("python", "-m", "surefoot", "--version")
    of_pip = installed.run("pip", "show", "surefoot").splitlines()

    assert f"surefoot {sf.__version__}" in of_script
    assert of_module == of_script
    assert f"Version: {sf.__version__}" in of_pip
    assert "Author: the surefoot developers" in of_pip


SMALL = [
    "--length=6 steps",
    "--stop-after=4 steps",
    "--batch-size=8",
    "--micro-batch-size=4",
    "--sample-tokens=8",
    "--cloze-questions=8",
    "--model.layers=1",
    "--model.width=16",
    "--model.heads=2",
    "--model.context=16",
]
VERBS = ("train", "resume", "predict", "diagnose", "replay", "verify", "report")
PLACEHOLDERS = {"RUN": "runs/first", "RUN...": "runs/first", "N": "2"}


def commands_of_readme() -> dict[str, list[str]]:
    """The first command of README with each of the verbs, on one small run."""
    commands = dict[str, list[str]]()
    for text in re.findall(r"`(?:\.venv/bin/)?surefoot\s([^`]*)`", README):
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(text)]
        commands.setdefault(words[0], words)
    lines = (ROOT / "Makefile").read_text().splitlines()
    train = next(line for line in lines if "surefoot train" in line)
    _, *words = shlex.split(train)
    commands["train"] = [*words, *SMALL]  # README names it as `make train`
    return commands


@pytest.mark.slow
def test_the_commands_of_readme_work_from_an_empty_folder(installed: Installed) -> None:
    commands = commands_of_readme()

    output = {verb: installed.run("surefoot", *commands[verb]) for verb in VERBS}

    run = installed.folder / "runs" / "first"
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert (run / "checkpoints" / "step-00000006").is_dir()
    how_drawn, code = output["predict"].split("\n", 1)  # of standard error and output
    assert how_drawn.startswith("drawn with ")
    assert code.startswith("def ")
    assert sorted(path.name for path in installed.folder.iterdir()) == ["runs"]


@pytest.mark.slow
def test_the_script_of_readme_trains_from_an_empty_folder(installed: Installed) -> None:
    script = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[0]
    installed.run("python", "-c", script.replace('"30 epochs"', '"1 epochs"'))
    assert (installed.folder / "runs" / "digits" / "checkpoints" / "step-00000021").is_dir()
