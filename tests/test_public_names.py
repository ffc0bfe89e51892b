"""Each public name is what its stub says, whatever was imported before: a name is a namespace or an object, never both. (6 s)"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import surefoot

SOURCE = Path(surefoot.__file__).parent
STUBS = sorted(SOURCE.rglob("__init__.pyi"))

PROBE = """
import importlib, json, os, sys
from types import ModuleType
import torch, torch.distributed.fsdp, torch.utils.data, numpy, tyro  # which takes seconds, once

modules, stubs = json.loads(sys.argv[1])
for turn in (modules, modules[::-1]):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    for module in turn:
        importlib.import_module(module)
    for package, module, name in stubs:
        public = getattr(importlib.import_module(package), name)
        if module is None:
            is_named = public is sys.modules[f"{package}.{name}"]
        else:
            is_named = public is getattr(sys.modules[f"{package}.{module}"], name) and not isinstance(public, ModuleType)
        if not is_named:
            print(f"{package}.{name} is {public!r}, not of {module}")
    sys.stdout.flush()
    os._exit(0)
"""


def package_of(stub: Path) -> str:
    return ".".join(stub.parent.relative_to(SOURCE.parent).parts)


def names_in(stub: Path) -> list[tuple[str | None, str]]:
    """Module and name of each import in a stub; module None for a namespace."""
    imports = [line for line in ast.parse(stub.read_text()).body if isinstance(line, ast.ImportFrom)]
    return [(line.module, alias.asname or alias.name) for line in imports for alias in line.names]


def test_public_names_are_the_objects_of_the_stubs_in_two_orders_of_import(tmp_path: Path) -> None:
    files = [path.relative_to(SOURCE.parent).with_suffix("") for path in sorted(SOURCE.rglob("*.py"))]
    modules = [".".join(file.parts).removesuffix(".__init__") for file in files]
    stubs = [(package_of(stub), *each) for stub in STUBS for each in names_in(stub)]
    assert len(stubs) > 100
    ended = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([modules, stubs])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


@pytest.mark.parametrize("stub", STUBS, ids=package_of)
def test_no_file_beside_a_stub_is_named_like_a_public_object(stub: Path) -> None:
    beside = {path.stem for path in stub.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {name for module, name in names_in(stub) if module is not None and name in beside} == set()
    assert {name for module, name in names_in(stub) if module is None and name not in beside} == set()


@pytest.mark.parametrize("stub", STUBS, ids=package_of)
def test_a_stub_lists_each_name_once_and_dir_shows_them(stub: Path) -> None:
    body = ast.parse(stub.read_text()).body
    handed_on = [alias.asname for line in body if isinstance(line, ast.ImportFrom) for alias in line.names]  # X as X
    listed = next((ast.literal_eval(line.value) for line in body if isinstance(line, ast.Assign)), handed_on)
    names = [name for _, name in names_in(stub)]
    __import__(package_of(stub))
    package = sys.modules[package_of(stub)]
    assert sorted(names) == sorted(listed) == sorted(dir(package)) == sorted(set(names))


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
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = surefoot.no_such_name  # type: ignore[attr-defined]


def test_every_public_name_and_method_says_what_it_is() -> None:
    silent = []
    for stub in STUBS:
        package = importlib.import_module(package_of(stub))
        for module, name in names_in(stub):
            public = getattr(package, name)
            if module is None or not callable(public):
                continue
            members = (
                vars(public).items() if inspect.isclass(public) and not issubclass(public, torch.nn.Module) else ()
            )
            spoken = {name: public} | {f"{name}.{own}": value for own, value in members if not own.startswith("_")}
            silent += [
                f"{package.__name__}.{title}"
                for title, value in spoken.items()
                if (callable(value) or isinstance(value, property)) and not inspect.getdoc(value)
            ]
    assert not silent, "\n".join(silent)
