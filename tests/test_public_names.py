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
from pathlib import Path

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
    imports = [
        line for line in ast.parse(stub.read_text()).body if isinstance(line, ast.ImportFrom)
    ]
    return [(line.module, alias.asname or alias.name) for line in imports for alias in line.names]


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
    files = [
        path.relative_to(SOURCE.parent).with_suffix("") for path in sorted(SOURCE.rglob("*.py"))
    ]
    modules = [".".join(file.parts).removesuffix(".__init__") for file in files]
    stubs = [
        (package_of(stub), module_in(stub, module), name)
        for stub in STUBS
        for module, name in names_in(stub)
    ]
    assert len(stubs) > 100
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE, json.dumps([modules, stubs])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stub", STUBS, ids=package_of)
def test_no_file_beside_a_stub_is_named_like_a_public_object(stub: Path) -> None:
    beside = {path.stem for path in stub.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {
        name for module, name in names_in(stub) if module is not None and name in beside
    } == set()
    assert {
        name for module, name in names_in(stub) if module is None and name not in beside
    } == set()


@pytest.mark.parametrize("stub", STUBS, ids=package_of)
def test_a_stub_lists_each_name_once_and_dir_shows_them(stub: Path) -> None:
    body = ast.parse(stub.read_text()).body
    handed_on = [
        alias.asname for line in body if isinstance(line, ast.ImportFrom) for alias in line.names
    ]  # X as X
    listed = next(
        (ast.literal_eval(line.value) for line in body if isinstance(line, ast.Assign)), handed_on
    )
    names = [name for _, name in names_in(stub)]
    __import__(package_of(stub))
    package = sys.modules[package_of(stub)]
    assert (
        sorted(names)
        == sorted(listed)
        == sorted({*dir(package)} - {"__version__"})
        == sorted(set(names))
    )


def test_packages_that_hand_names_on_do_it_lazily() -> None:
    eager = {
        init.parent.relative_to(SOURCE).as_posix()
        for init in SOURCE.rglob("__init__.py")
        for line in ast.parse(init.read_text()).body
        if isinstance(line, ast.ImportFrom) and (line.module or "").startswith("surefoot")
    }
    assert eager == set()


def test_the_version_is_that_of_the_package_and_other_names_are_refused() -> None:
    assert surefoot.__version__ == version("surefoot")
    assert "__version__" in dir(surefoot)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = surefoot.no_such_name  # type: ignore[attr-defined]


def test_help_and_completion_show_all_public_names_and_no_module_of_ours() -> None:
    shown = pydoc.plain(pydoc.render_doc(surefoot))
    completer = rlcompleter.Completer({"sf": surefoot})
    completed = set[str]()
    while (text := completer.complete("sf.", len(completed))) is not None:
        completed.add(text.removeprefix("sf.").rstrip("()"))
    public = {name for _, name in names_in(SOURCE / "__init__.pyi")}
    assert completed == public
    assert all(name in shown for name in public)
    assert version("surefoot") in shown


def test_every_public_name_and_method_says_what_it_is() -> None:
    """A method that torch names, such as `step` or `state_dict`, may inherit torch's text;
    `forward` may not: shapes differ.
    """
    silent = []
    for stub in STUBS:
        package = importlib.import_module(package_of(stub))
        for module, name in names_in(stub):
            public = getattr(package, name)
            if module is None or not callable(public):
                continue
            members = (
                [own for own in vars(public) if not own.startswith("_")]
                if inspect.isclass(public)
                else []
            )
            documented = {name: public} | {f"{name}.{own}": getattr(public, own) for own in members}
            silent += [
                f"{package.__name__}.{title}"
                for title, value in documented.items()
                if (callable(value) or isinstance(value, property))
                and not (value.__doc__ if title.endswith(".forward") else inspect.getdoc(value))
            ]
    assert not silent, "\n".join(silent)


def test_each_public_name_has_an_example_that_calls_it_and_shows_a_result() -> None:
    """`make test` runs the examples, which are doctests of the package: none is skipped."""
    assert [name for name, example in examples(public_names()).items() if example is None] == []
    assert [
        path for path in SOURCE.rglob("*.py") if re.search(r"doctest: *\+SKIP", path.read_text())
    ] == []


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
    assert shows(example, "sf.Scale" if "Scale" in example else "sf.scale") == is_enough


def test_the_pages_of_public_names_are_those_of_the_docstrings() -> None:
    """Write them anew: python docs/write_api.py."""
    names = public_names()
    reference = DOCS / "reference"
    stored = [reference / "api.md", *sorted((reference / "api").iterdir())]
    assert {
        str(path.relative_to(reference)): path.read_text(encoding="utf-8") for path in stored
    } == pages(names)


def test_docs_list_each_public_name() -> None:
    names = public_names()
    for stub in STUBS:
        if "recipes" not in stub.parts:
            package = importlib.import_module(package_of(stub))
            objects = {
                name for _, name in names_in(stub) if not inspect.ismodule(getattr(package, name))
            }
            assert objects <= {name.rpartition(".")[2] for name in names}
    with_repr = [
        name
        for name, value in names.items()
        if hasattr(value, "to_dict") and value.__str__ is object.__str__
    ]
    results = (
        "Finding",
        "Verdict",
        "Replay",
        "ExportResult",
        "Profile",
        "LRRangeTest",
        "BatchSizeSearch",
        "Panels",
    )
    assert not [name for name in with_repr if name.endswith(results)], with_repr
    assert all(hasattr(names[name], "to_dict") for name in names if name.endswith(results))


def test_a_dotted_name_in_a_string_of_tests_and_benchmarks_names_something() -> None:
    """What is patched or imported by its name follows a rename too: a benchmark that no test runs
    would break unseen.
    """
    root = DOCS.parent
    wrong = []
    for path in [*(root / "tests").rglob("*.py"), *(root / "benchmarks").rglob("*.py")]:
        for name in sorted(set(re.findall(r"[\"'](surefoot(?:\.\w+){2,})[\"']", path.read_text()))):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                wrong.append(f"{path.relative_to(root)}: {name}")
    assert wrong == []
