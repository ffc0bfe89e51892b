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
            brought = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:
            continue
        waiting += [
            each for each in brought if each.marker is None or each.marker.evaluate({"extra": ""})
        ]
    return names


CORE = closure(PROJECT["dependencies"])


class OfTheCore(PathFinder):
    """A finder to which every package outside the core is absent."""

    absent: frozenset[str] = frozenset()

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return (
            None
            if fullname.partition(".")[0] in cls.absent
            else PathFinder.find_spec(fullname, path, target)
        )


@cache
def modules_outside_the_core() -> frozenset[str]:
    return frozenset(
        module
        for module, names in packages_distributions().items()
        if CORE.isdisjoint(map(canonicalize_name, names)) and module not in ("surefoot", "torch")
    )


def with_the_core_alone(call: Callable[[], object], directory: Path) -> Any:
    """What `call` returns, as JSON, in a process that finds the core's packages and has imported no
    file of ours.
    """
    outside = modules_outside_the_core()

    def alone() -> None:
        OfTheCore.absent = outside
        sys.meta_path[:] = [BuiltinImporter, FrozenImporter, OfTheCore]
        for name in list(sys.modules):
            if name.split(".")[0] in outside | {"surefoot", "small_runs"} or name.startswith(
                "torch.utils.tensorboard"
            ):
                del sys.modules[name]
        os.chdir(directory)
        output = sys.stdout
        returned = call()
        print(json.dumps(returned), file=output)

    with Forked(alone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        text = process.stdout.read()
    assert process.returncode == 0, text
    return json.loads(text.splitlines()[-1])


def typed(*words: str) -> tuple[int, str]:
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
]
BYTES += [
    "--model.heads=2",
    "--model.context=16",
    "--cloze-questions=0",
    "--sample-tokens=8",
    "--batch-size=8",
]
BYTES += ["--length=6 steps"]


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
    answers = [(words[0], *typed(*words)) for words in commands]
    shutil.copytree("one", "other")
    answers.append(("compare", *typed("compare", "one", "other", "--out=both")))
    Path("both", "comparison.png").touch()  # drawn when its rasterizer was there
    answers.append(("compare", *typed("compare", "one", "other", "--out=both")))
    return {
        "own": text.getvalue(),
        "answers": answers,
        "files": {run: sorted(os.listdir(run)) for run in ("own", "one", "both")},
        "outside": sorted({name.split(".")[0] for name in sys.modules} & OfTheCore.absent),
    }


def test_runs_and_the_verbs_on_them_need_the_core_alone_and_warn_of_nothing(tmp_path: Path) -> None:
    done = with_the_core_alone(what_the_core_does, tmp_path)
    assert done["outside"] == []
    assert "writes     checkpoints, metrics.jsonl, report.html\n" in done["own"]
    assert "resuming at step 9" in done["own"]
    for verb, status, text in done["answers"]:
        assert status == 0, (verb, text)
    for text in (done["own"], *(text for _, _, text in done["answers"])):
        assert "surefoot[" not in text
        assert "warning" not in text.lower()
    for files in (done["files"]["own"], done["files"]["one"]):
        assert {"metrics.jsonl", "report.html", "checkpoints"} <= {*files}
        assert "tensorboard" not in files
    suffixes = {Path(name).suffix for name in done["files"]["both"] if "comparison." in name}
    assert suffixes == {".svg", ".md", ".tsv", ".json"}
    assert "comparison.svg, .md, .tsv, .json" in done["answers"][-1][2]


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
    answers = []
    for _, words in NEEDS:
        before = {*Path().rglob("*")}
        answers.append((*typed(*words), sorted(map(str, {*Path().rglob("*")} - before))))
    return answers


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
    plans = with_the_core_alone(
        lambda: [
            typed("plan", *words, "--world-size=8", "--parallel=ddp") for words, _ in ON_PAPER
        ],
        tmp_path,
    )
    for (words, tokens), (status, text) in zip(ON_PAPER, plans, strict=True):
        assert status == 0, (words, text)
        (of_data,) = re.findall(r"(?m)^data\n  (.*)", text)
        assert numbers_in(of_data) == [tokens]


def test_each_extra_whose_packages_we_import_has_a_command_that_needs_it() -> None:
    assert {extra for extra, _ in NEEDS} | WITHOUT_CODE | {"notebook"} == {*EXTRAS}
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for module in (module for extra in WITHOUT_CODE for module in EXTRAS[extra]):
        assert re.search(rf"^\s*(import|from) {module}\b", source, re.MULTILINE) is None


def test_no_module_imports_an_optional_package_while_it_is_imported() -> None:
    optional = "|".join(module for modules in EXTRAS.values() for module in modules)
    for path in (ROOT / "src").rglob("*.py"):
        assert (
            re.search(rf"^(import|from) ({optional})\b", path.read_text(), re.MULTILINE) is None
        ), path


def test_pyproject_the_table_of_the_docs_and_the_messages_name_the_same_extras() -> None:
    assert [*OPTIONAL] == [*EXTRAS, "all", "peers", "dev"]
    for extra, modules in EXTRAS.items():
        packages = {canonicalize_name(Requirement(text).name) for text in OPTIONAL[extra]}
        assert packages == {OWN_NAMES.get(module, module) for module in modules}, extra
    assert OPTIONAL["all"] == [f"surefoot[{','.join(EXTRAS)}]"]
    page = (ROOT / "docs" / "start" / "install.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page.partition("## Extras")[2], re.MULTILINE) == [
        *OPTIONAL
    ]
    table = dict(
        re.findall(
            r"^\| `(\w+)` \|.*\| ([\w, -]*) \|$", page.partition("## Extras")[2], re.MULTILINE
        )
    )
    for extra in EXTRAS:
        packages = {canonicalize_name(Requirement(text).name) for text in OPTIONAL[extra]}
        assert {*table[extra].split(", ")} == packages, extra


def test_whatever_says_pip_install_names_an_extra_that_exists() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "Makefile",
        ROOT / "Dockerfile",
        *(ROOT / "docs").rglob("*.md"),
    ]
    for folder in ("src", "examples", "benchmarks"):
        pages += (
            path
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".sh", ".yaml", ".md", ".pyi")
        )
    named = dict[Path, set[str]]()
    for path in (path for path in pages if path.parent.name != "decisions"):
        text = path.read_text()
        named[path] = {*re.findall(r"(?:surefoot|clone|\.|EXTRAS=\"?)\[([a-z,]+)\]", text)}
        for names in named[path]:
            assert {*names.split(",")} <= {*OPTIONAL}, (path, names)
        if path.is_relative_to(ROOT / "src"):
            commands = text.count("pip install")
            assert commands == len(
                re.findall(
                    r'pip install (?:--force-reinstall |"surefoot\[(?:\{extras\}|[a-z,]+)\]")', text
                )
            ), path
    assert named[ROOT / "Dockerfile"] == {"text"}
    assert "slurm" in named[ROOT / "examples" / "launch" / "submitit.sh"]


def test_a_module_that_is_refused_belongs_to_an_extra() -> None:
    """Otherwise the last line of the error would be `pip install "surefoot[]"`."""
    modules = {module for each in EXTRAS.values() for module in each}
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        for node in (
            ast.walk(ast.parse(text)) if "refuse_missing(" in text or "needed_for(" in text else ()
        ):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "refuse_missing",
                "needed_for",
            ):
                literal = {
                    argument.value
                    for argument in node.args[1:]
                    if isinstance(argument, ast.Constant)
                }
                assert literal <= modules, (path, node.lineno)


def test_the_core_and_what_make_train_installs_are_few_packages() -> None:
    """Each beside surefoot itself and pip."""
    assert len(CORE) + 2 <= 26, sorted(CORE)
    recipe = re.search(
        r"^\.venv/train:.*\n\t\$\(call install,([\w,]+)\)",
        (ROOT / "Makefile").read_text(),
        re.MULTILINE,
    )
    assert recipe is not None
    chosen = closure(text for extra in recipe[1].split(",") for text in OPTIONAL[extra])
    assert "tokenizers" in chosen
    assert len(CORE | chosen) + 2 <= 45, sorted(CORE | chosen)


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
