"""The core without any extra: what works, and the line to type where an extra is needed. (5 s)"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from forked import Forked
from refused import refused
from stated import numbers_in
from surefoot.config.extras import EXTRAS, is_installed, needed_for, refuse_missing
from surefoot.errors import Command, Setting

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
OWN_NAMES = {
    "sklearn": "scikit-learn",
    "resvg_py": "resvg-py",
    "mlflow": "mlflow-skinny",
}  # modules that are not called like their packages
CUDA = re.compile("nvidia-|cuda-|triton")  # packages that only other builds of torch bring


def closure(texts: Iterable[str]) -> set[str]:
    """All packages that these requirements bring, by the metadata of those that are installed."""
    names = set[str]()
    waiting = [Requirement(text) for text in texts]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in names or CUDA.match(name):
            continue
        names.add(name)
        try:
            needs = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:
            continue
        for need in needs:
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                waiting.append(need)
    return names


CORE = closure(PROJECT["dependencies"])


class OfTheCore(PathFinder):
    """A finder to which every package outside the core is absent."""

    absent: frozenset[str] = frozenset()

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in cls.absent:
            return None
        return PathFinder.find_spec(fullname, path, target)


@cache
def modules_outside_the_core() -> frozenset[str]:
    modules = set[str]()
    for module, packages in packages_distributions().items():
        if CORE.isdisjoint(map(canonicalize_name, packages)):
            modules.add(module)
    return frozenset(modules - {"surefoot", "torch"})


def with_the_core_alone(call: Callable[[], object], directory: Path) -> Any:
    """What `call` returns, as JSON, in a process that finds the core's packages and has imported no
    file of ours.
    """
    outside = modules_outside_the_core()

    def forget_modules() -> None:
        forgotten = outside | {"surefoot", "small_runs"}
        for name in list(sys.modules):
            if name.split(".")[0] in forgotten or name.startswith("torch.utils.tensorboard"):
                del sys.modules[name]

    def call_alone() -> None:
        OfTheCore.absent = outside
        sys.meta_path[:] = [BuiltinImporter, FrozenImporter, OfTheCore]
        forget_modules()
        os.chdir(directory)
        output = sys.stdout
        value = call()
        print(json.dumps(value), file=output)

    with Forked(call_alone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        text = process.stdout.read()
    assert process.returncode == 0, text
    return json.loads(text.splitlines()[-1])


def run_command(*words: str) -> tuple[int, str]:
    """The exit status of a command, and what it prints."""
    from surefoot.cli.main import main

    text = io.StringIO()
    status = 0
    with redirect_stdout(text), redirect_stderr(text):
        try:
            main(list(words))
        except SystemExit as end:
            status = int(end.code or 0)
    return status, text.getvalue()


BYTES = [
    "gpt",
    "--data.path=text.txt",
    "--data.tokenizer=bytes",
    "--model.layers=1",
    "--model.width=16",
    "--model.heads=2",
    "--model.context=16",
    "--cloze-questions=0",
    "--sample-tokens=8",
    "--batch-size=8",
    "--length=6 steps",
]


def what_the_core_does() -> dict[str, Any]:
    """A run of one's own and one of the recipe gpt, both resumed, and the verbs on them."""
    import small_runs
    import surefoot as sf
    from surefoot.data.text import token_cache

    token_cache.MIN_CHARACTERS = 1000  # as if the text were long enough for the cache of tokens
    Path("text.txt").write_text("the cat sat on a mat while birds sang in old trees\n" * 60)
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        for stop in ("9 steps", None):
            small_runs.build("own", stop_after=stop, console=True, report=True).train()
    sf.load("own").diagnose()
    sf.load("own").report()
    commands: list[list[str]] = [
        ["train", *BYTES, "--run-dir=one", "--stop-after=3 steps"],
        ["resume", "one"],
        ["report", "one"],
        ["diagnose", "one"],
        ["verify", "one"],
        ["predict", "one", "the cat", "--max-new-tokens=4"],
    ]
    outputs = [(words[0], *run_command(*words)) for words in commands]
    shutil.copytree("one", "other")
    outputs.append(("compare", *run_command("compare", "one", "other", "--out=both")))
    Path("both", "comparison.png").touch()  # drawn when its rasterizer was there
    outputs.append(("compare", *run_command("compare", "one", "other", "--out=both")))
    return {
        "own": text.getvalue(),
        "outputs": outputs,
        "files": {run: sorted(os.listdir(run)) for run in ("own", "one", "both")},
        "outside": sorted({name.split(".")[0] for name in sys.modules} & OfTheCore.absent),
    }


@pytest.fixture(scope="module")
def core_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dict(with_the_core_alone(what_the_core_does, tmp_path_factory.mktemp("core")))


def test_runs_and_the_verbs_on_them_need_the_core_alone(core_alone: dict[str, Any]) -> None:
    assert core_alone["outside"] == []
    for verb, status, text in core_alone["outputs"]:
        assert status == 0, (verb, text)
    assert "resuming at step 9" in core_alone["own"]


def test_the_core_alone_warns_of_nothing(core_alone: dict[str, Any]) -> None:
    texts = [core_alone["own"]]
    texts += [text for _, _, text in core_alone["outputs"]]
    for text in texts:
        assert "surefoot[" not in text
        assert "warning" not in text.lower()


def test_the_core_alone_writes_checkpoints_records_and_a_page(core_alone: dict[str, Any]) -> None:
    assert "writes     checkpoints, metrics.jsonl, report.html\n" in core_alone["own"]
    for run in ("own", "one"):
        files = core_alone["files"][run]
        assert {"metrics.jsonl", "report.html", "checkpoints"} <= {*files}
        assert "tensorboard" not in files


def test_the_core_alone_draws_a_comparison_as_svg_and_keeps_no_older_png(
    core_alone: dict[str, Any],
) -> None:
    files = [name for name in core_alone["files"]["both"] if "comparison." in name]
    assert {Path(name).suffix for name in files} == {".svg", ".md", ".tsv", ".json"}
    *_, (_, _, text) = core_alone["outputs"]
    assert "comparison.svg, .md, .tsv, .json" in text


NEEDS = [
    ("text", ["train", "gpt", "--run-dir=run"]),
    ("text", ["train", "gpt", "--run-dir=run", "--data.tokenizer=gpt2"]),
    ("text", ["compare", "gpt", "--vary", "optimizer.lr=1e-3,3e-3", "--out=run"]),
    ("translation", ["train", "translation", "--run-dir=run"]),
    ("images", ["train", "images", "--run-dir=run"]),
    (
        "vision",
        ["train", "images", "--data.path=synthetic", "--model.name=timm:resnet18", "--run-dir=run"],
    ),
    ("plots", ["plan", "--schedules", "cosine", "--out=a.png"]),
    ("plots", ["report", "log", "--png"]),
    ("tensorboard", ["train", *BYTES, "--run-dir=run", "--tensorboard=True"]),
    ("hub", ["data", "prepare", "shards", "rows.parquet", "--tokenizer=bytes"]),
    ("zstd", ["train", *BYTES, "--data.path=text.txt.zst", "--run-dir=run"]),
    ("trackers", ["train", *BYTES, "--run-dir=run", "--trackers=wandb,mlflow,trackio"]),
    ("search", ["compare", *BYTES, "--vary", "optimizer.lr=1e-4..1e-2", "--trials=2", "--out=run"]),
    ("slurm", ["submit", *BYTES, "--hours=1", "--run-dir=run"]),
    ("hf", ["train", "finetune", "--run-dir=run"]),
    ("quant", ["train", *BYTES, "--run-dir=run", "--optimizer.name=adamw8bit"]),
]
ON_PAPER = [  # commands, and the tokens of their vocabulary
    (["gpt", "--preset=gpt2-124m"], 50_257),
    (["gpt"], 2_048),
    (["translation", "--preset=base"], 37_000),
    (["translation"], 1_024),
]
WITHOUT_CODE = {"remote"}  # extras of which no file of ours imports anything


def what_is_refused() -> list[tuple[int, str, list[str]]]:
    Path("text.txt").write_text("the cat sat on a mat while birds sang in old trees\n" * 60)
    Path("rows.parquet").write_bytes(b"PAR1")
    Path("text.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    Path("log").mkdir()
    Path("log/config.toml").write_text('[program]\nkind = "script"\n')
    Path("log/metrics.jsonl").write_text('{"kind": "train", "step": 3, "loss": 2.5}\n')
    outputs = []
    for _, words in NEEDS:
        before = {*Path().rglob("*")}
        status, text = run_command(*words)
        written = {*Path().rglob("*")} - before
        outputs.append((status, text, sorted(map(str, written))))
    return outputs


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is refused without an extra, of commands and of Python, in one process."""
    return with_the_core_alone(
        lambda: {"commands": what_is_refused(), "dataframe": dataframe_without_pandas()},
        tmp_path_factory.mktemp("refusals"),
    )


def test_whatever_needs_an_extra_names_the_line_to_type_and_writes_nothing(
    refusals: dict[str, Any],
) -> None:
    for (extra, words), (status, text, written) in zip(NEEDS, refusals["commands"], strict=True):
        assert status == 2, (words, text)
        assert text.startswith("error: "), text
        assert text.endswith("  [package-not-usable]\n"), text
        line = re.search(r'\n  type: pip install "surefoot\[([\w,]+)\]"\n', text)
        assert line is not None, text
        assert extra in line[1].split(","), text
        assert written == [], words


def dataframe_without_pandas() -> dict[str, Any]:
    import surefoot as sf

    try:
        sf.load("log").dataframe("train")
    except sf.ConfigError as error:
        return error.to_dict()
    return {}


def test_records_as_a_dataframe_need_the_extra_notebook(refusals: dict[str, Any]) -> None:
    error = refusals["dataframe"]
    assert (error["code"], error["fields"]) == ("package-not-usable", {"modules": ["pandas"]})
    assert error["remedies"][1] == {"command": 'pip install "surefoot[notebook]"'}


def test_a_plan_on_paper_of_a_recipe_needs_the_core_alone(tmp_path: Path) -> None:
    def plan_all() -> list[tuple[int, str]]:
        options = ("--world-size=8", "--parallel=ddp")
        return [run_command("plan", *words, *options) for words, _ in ON_PAPER]

    plans = with_the_core_alone(plan_all, tmp_path)

    for (words, tokens), (status, text) in zip(ON_PAPER, plans, strict=True):
        assert status == 0, (words, text)
        (line_of_data,) = re.findall(r"(?m)^data\n  (.*)", text)
        assert numbers_in(line_of_data) == [tokens]


def test_each_extra_whose_packages_we_import_has_a_command_that_needs_it() -> None:
    assert {extra for extra, _ in NEEDS} | WITHOUT_CODE | {"notebook"} == {*EXTRAS}
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for extra in WITHOUT_CODE:
        for module in EXTRAS[extra]:
            assert re.search(rf"(?m)^\s*(import|from) {module}\b", source) is None


def test_no_module_imports_an_optional_package_while_it_is_imported() -> None:
    optional = "|".join(chain.from_iterable(EXTRAS.values()))
    import_line = re.compile(rf"(?m)^(import|from) ({optional})\b")
    for path in (ROOT / "src").rglob("*.py"):
        assert import_line.search(path.read_text()) is None, path


def packages_of(extra: str) -> set[str]:
    """The packages that pyproject.toml gives an extra."""
    return {canonicalize_name(Requirement(text).name) for text in OPTIONAL[extra]}


def test_pyproject_and_the_messages_name_the_same_extras() -> None:
    assert [*OPTIONAL] == [*EXTRAS, "all", "peers", "dev"]
    assert OPTIONAL["all"] == [f"surefoot[{','.join(EXTRAS)}]"]
    for extra, modules in EXTRAS.items():
        assert packages_of(extra) == {OWN_NAMES.get(module, module) for module in modules}, extra


def test_pyproject_and_the_table_of_the_docs_name_the_same_extras() -> None:
    page = (ROOT / "docs" / "start" / "install.md").read_text()
    table = page.partition("## Extras")[2]
    packages = dict(re.findall(r"(?m)^\| `(\w+)` \|.*\| ([\w, -]*) \|$", table))

    assert re.findall(r"(?m)^\| `(\w+)` \|", table) == [*OPTIONAL]
    for extra in EXTRAS:
        assert {*packages[extra].split(", ")} == packages_of(extra), extra


def files_that_name_extras() -> list[Path]:
    """Pages, programs and scripts; decisions tell of names that are gone."""
    files = [ROOT / "README.md", ROOT / "Makefile", ROOT / "Dockerfile"]
    files += (ROOT / "docs").rglob("*.md")
    for folder in ("src", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".sh", ".yaml", ".md", ".pyi"):
                files.append(path)
    return [path for path in files if path.parent.name != "decisions"]


def extras_in(path: Path) -> set[str]:
    """What a file lets somebody install: one extra, or several with commas."""
    return {*re.findall(r"(?:surefoot|clone|\.|EXTRAS=\"?)\[([a-z,]+)\]", path.read_text())}


def test_whatever_says_pip_install_names_an_extra_that_exists() -> None:
    for path in files_that_name_extras():
        for names in extras_in(path):
            assert {*names.split(",")} <= {*OPTIONAL}, (path, names)


def test_the_dockerfile_and_the_script_for_slurm_name_their_extras() -> None:
    assert extras_in(ROOT / "Dockerfile") == {"text"}
    assert "slurm" in extras_in(ROOT / "examples" / "launch" / "submitit.sh")


def test_every_pip_install_of_the_source_names_extras_or_installs_again() -> None:
    command = re.compile(r'pip install (?:--force-reinstall |"surefoot\[(?:\{extras\}|[a-z,]+)\]")')
    for path in (ROOT / "src").rglob("*"):
        if path.suffix in (".py", ".pyi"):
            text = path.read_text()
            assert text.count("pip install") == len(command.findall(text)), path


def test_a_module_that_is_refused_belongs_to_an_extra() -> None:
    """Otherwise the last line of the error would be `pip install "surefoot[]"`."""
    modules = set(chain.from_iterable(EXTRAS.values()))
    functions = ("refuse_missing", "needed_for")
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        if not any(f"{name}(" in text for name in functions):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in functions:
                literals = [part for part in node.args[1:] if isinstance(part, ast.Constant)]
                refused_modules = {literal.value for literal in literals}
                assert refused_modules <= modules, (path, node.lineno)


def test_the_core_is_few_packages() -> None:
    """Each beside surefoot itself and pip."""
    assert len(CORE) + 2 <= 26, sorted(CORE)


def test_what_make_train_installs_is_few_packages() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"(?m)^\.venv/train:.*\n\t\$\(call install,([\w,]+)\)", makefile)
    assert recipe is not None
    requirements = chain.from_iterable(OPTIONAL[extra] for extra in recipe[1].split(","))

    packages = closure(requirements)

    assert "tokenizers" in packages
    assert len(CORE | packages) + 2 <= 45, sorted(CORE | packages)


def test_a_directory_called_like_a_package_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_such_package").mkdir()  # as wandb's own directory of runs looks to an import
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("no_such_package")


def test_several_missing_packages_are_one_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("babel", "tokenizers"):
        monkeypatch.setitem(sys.modules, module, None)
    instead = Setting("precision", "bf16")
    with refused("package-not-usable", modules=["tokenizers", "babel"]) as error:
        refuse_missing("this", "tokenizers", "babel", "torch", instead=instead)
    install = Command('pip install "surefoot[text,translation]"')
    assert error.value.remedies == (instead, install)


def test_a_package_whose_import_fails_is_named_with_its_reason() -> None:
    modules = ["json", "sklearn"]
    with refused("package-not-usable", modules=modules) as error, needed_for("this", *modules):
        raise OSError("no libfoo\nsecond line")
    install = Command("pip install --force-reinstall json scikit-learn")
    assert error.value.remedies == (install,)
