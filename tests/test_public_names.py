"""Each public name is what its stub says, whatever was imported before: a name is a namespace or an
object, never both. (3 s)

Of law 13: importing every module changes nothing else.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import pydoc
import re
import rlcompleter
import subprocess
import sys
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import surefoot
from fresh_interpreters import EVERYTHING

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS))
from write_api import examples, pages, public_names, shows  # noqa: E402

SOURCE = Path(surefoot.__file__).parent
STUBS = sorted(SOURCE.rglob("__init__.pyi"))

PROBE = f"""
{EVERYTHING}
import importlib
from types import ModuleType
# torch and its company take seconds, once; and what they do is not ours
import torch, numpy, safetensors.torch, torch.utils.data, tyro, tomlkit, PIL.Image
import torch.distributed.fsdp, torch.distributed.elastic.multiprocessing

modules, stubs = json.loads(sys.argv[1])
for turn in (modules, modules[::-1]):
    with warnings.catch_warnings(action="ignore"):
        child = os.fork()
    if child:
        assert os.wait()[1] == 0
        continue
    before = everything()
    for module in turn:
        importlib.import_module(module)
    for changed in changed_since(before).items():
        print("importing changes", *changed)
    for package, module, name in stubs:
        public = getattr(importlib.import_module(package), name)
        if isinstance(public, ModuleType):
            is_named = public is sys.modules.get(module + "." + name)
        else:
            is_named = public is getattr(sys.modules[module], name)
        if not is_named:
            print(package, name, "is", repr(public), "not of", module)
    sys.stdout.flush()
    os._exit(0)
"""


def package_of(stub: Path) -> str:
    return ".".join(stub.parent.relative_to(SOURCE.parent).parts)


def names_in(stub: Path) -> list[tuple[str | None, str]]:
    """Module and name of each import in a stub; module None for a namespace."""
    names: list[tuple[str | None, str]] = []
    for line in ast.parse(stub.read_text()).body:
        if isinstance(line, ast.ImportFrom):
            names += [(line.module, alias.asname or alias.name) for alias in line.names]
    return names


def names_by_package() -> dict[str, list[tuple[str | None, str]]]:
    """Module and name of each import in the stub of each package."""
    return {package_of(stub): names_in(stub) for stub in STUBS}


def module_in(stub: Path, module: str | None) -> str:
    """The full name of the module in an import of a stub."""
    if module is None:
        return package_of(stub)
    if module.startswith("surefoot."):
        return module
    return f"{package_of(stub)}.{module}"


def test_imported_in_two_orders_public_names_are_the_objects_of_the_stubs_and_nothing_else_changes(
    tmp_path: Path,
) -> None:
    modules = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        modules.append(".".join(parts).removesuffix(".__init__"))
    stubs = []
    for stub in STUBS:
        stubs += [
            (package_of(stub), module_in(stub, module), name) for module, name in names_in(stub)
        ]
    assert len(stubs) > 100

    probe = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE, json.dumps([modules, stubs])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )

    assert (probe.returncode, probe.stdout, probe.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stub", STUBS, ids=package_of)
def test_a_name_of_a_stub_is_a_file_beside_it_if_and_only_if_it_is_a_namespace(stub: Path) -> None:
    beside = {path.stem for path in stub.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
    objects = {name for module, name in names_in(stub) if module is not None}
    namespaces = {name for module, name in names_in(stub) if module is None}

    assert objects & beside == set()
    assert namespaces - beside == set()


def names_handed_on(stub: Path) -> list[str | None]:
    """The names in `__all__` of a stub, or those that it imports as themselves."""
    names: list[str | None] = []
    for line in ast.parse(stub.read_text()).body:
        if isinstance(line, ast.Assign):
            return ast.literal_eval(line.value)
        if isinstance(line, ast.ImportFrom):
            names += [alias.asname for alias in line.names]  # X as X
    return names


@pytest.mark.parametrize("stub", STUBS, ids=package_of)
def test_a_stub_lists_each_name_once_and_dir_shows_them(stub: Path) -> None:
    names = sorted(name for _, name in names_in(stub))
    package = importlib.import_module(package_of(stub))

    assert names == sorted(set(names))
    assert names == sorted(names_handed_on(stub))
    assert names == sorted({*dir(package)} - {"__version__"})


def test_packages_that_hand_names_on_do_it_lazily() -> None:
    eager = set()
    for file in SOURCE.rglob("__init__.py"):
        for line in ast.parse(file.read_text()).body:
            if isinstance(line, ast.ImportFrom) and (line.module or "").startswith("surefoot"):
                eager.add(file.parent.relative_to(SOURCE).as_posix())
    assert eager == set()


def test_the_version_is_that_of_the_package() -> None:
    assert surefoot.__version__ == version("surefoot")
    assert "__version__" in dir(surefoot)


def test_a_name_that_is_not_public_is_refused() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = surefoot.no_such_name  # type: ignore[attr-defined]


def public_names_of_surefoot() -> set[str]:
    return {name for _, name in names_in(SOURCE / "__init__.pyi")}


def test_completion_shows_all_public_names_and_no_module_of_ours() -> None:
    completer = rlcompleter.Completer({"sf": surefoot})
    completed = set()
    for number in count():
        text = completer.complete("sf.", number)
        if text is None:
            break
        completed.add(text.removeprefix("sf.").rstrip("()"))

    assert completed == public_names_of_surefoot()


def test_help_shows_all_public_names_and_the_version() -> None:
    shown = pydoc.plain(pydoc.render_doc(surefoot))

    assert [name for name in public_names_of_surefoot() if name not in shown] == []
    assert version("surefoot") in shown


def with_public_members(name: str, public: Any) -> dict[str, Any]:
    """A public object, and the public members that it defines itself if it is a class."""
    documented = {name: public}
    if inspect.isclass(public):
        for member in vars(public):
            if not member.startswith("_"):
                documented[f"{name}.{member}"] = getattr(public, member)
    return documented


def is_silent(name: str, value: Any) -> bool:
    """Whether something that can be called or read as a property does not say what it is."""
    if not callable(value) and not isinstance(value, property):
        return False
    if name.endswith(".forward"):
        return not value.__doc__
    return not inspect.getdoc(value)


def test_every_public_name_and_method_says_what_it_is() -> None:
    """A method that torch names, such as `step` or `state_dict`, may inherit torch's text;
    `forward` may not: shapes differ.
    """
    silent = []
    for package_name, names in names_by_package().items():
        package = importlib.import_module(package_name)
        for module, name in names:
            public = getattr(package, name)
            if module is not None and callable(public):
                for title, value in with_public_members(name, public).items():
                    if is_silent(title, value):
                        silent.append(f"{package_name}.{title}")
    assert not silent, "\n".join(silent)


def test_each_public_name_has_an_example_that_calls_it_and_shows_a_result() -> None:
    without = [name for name, example in examples(public_names()).items() if example is None]
    assert without == []


def test_no_example_is_skipped() -> None:
    """`make test` runs the examples, which are doctests of the package."""
    skip = re.compile(r"doctest: *\+SKIP")
    assert [path for path in SOURCE.rglob("*.py") if skip.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("example", "is_enough"),
    [
        (">>> scale(2)\n4\n", True),
        (">>> Scale.of(2).factor\n2\n", True),
        (">>> isinstance(load(), Scale)\nTrue\n", True),
        (">>> load()\nTraceback (most recent call last):\na.b.Scale: no file\n", True),
        (
            ">>> try:\n...     load()\n... except Scale as error:\n...     print(error)\nno file\n",
            True,
        ),
        (">>> _ = scale(2)\n", False),  # prints nothing
        (">>> other(scale)\n4\n", False),  # does not call it
        (">>> 'scale(2)'\n'scale(2)'\n", False),
        (">>> rescale(2)\n4\n", False),
    ],
)
def test_an_example_is_enough_if_it_calls_the_name_and_shows_a_result(
    example: str, is_enough: bool
) -> None:
    name = "sf.Scale" if "Scale" in example else "sf.scale"
    assert shows(example, name) == is_enough


def test_the_pages_of_public_names_are_those_of_the_docstrings() -> None:
    """Write them anew: python docs/write_api.py."""
    reference = DOCS / "reference"
    files = [reference / "api.md", *sorted((reference / "api").iterdir())]
    stored = {str(file.relative_to(reference)): file.read_text(encoding="utf-8") for file in files}
    assert stored == pages(public_names())


def test_docs_list_each_public_name() -> None:
    listed = {name.rpartition(".")[2] for name in public_names()}
    for package_name, names in names_by_package().items():
        if "recipes" not in package_name.split("."):
            package = importlib.import_module(package_name)
            objects = {name for _, name in names if not inspect.ismodule(getattr(package, name))}
            assert objects - listed == set(), package_name


RESULTS = (
    "Finding",
    "Verdict",
    "Replay",
    "ExportResult",
    "Profile",
    "LRRangeTest",
    "BatchSizeSearch",
    "Panels",
)


def test_results_have_a_text_of_their_own_and_can_be_made_a_dictionary() -> None:
    results = {name: value for name, value in public_names().items() if name.endswith(RESULTS)}

    assert len(results) >= len(RESULTS)
    assert [name for name, value in results.items() if value.__str__ is object.__str__] == []
    assert [name for name, value in results.items() if not hasattr(value, "to_dict")] == []


def test_a_dotted_name_in_a_string_of_tests_and_benchmarks_names_something() -> None:
    """What is patched or imported by its name follows a rename too: a benchmark that no test runs
    would break unseen.
    """
    root = DOCS.parent
    quoted_name = re.compile(r"[\"'](surefoot(?:\.\w+){2,})[\"']")
    wrong = []
    for path in [*(root / "tests").rglob("*.py"), *(root / "benchmarks").rglob("*.py")]:
        for name in sorted(set(quoted_name.findall(path.read_text()))):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                wrong.append(f"{path.relative_to(root)}: {name}")
    assert wrong == []
