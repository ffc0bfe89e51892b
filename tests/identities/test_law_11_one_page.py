"""Law 11: the loop is one page, and nobody else goes backward or takes an optimizer's step.
(1 s)
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import surefoot

SOURCE = Path(surefoot.__file__).parent
LOOP = SOURCE / "train/loop.py"
CONTRACT = Path(__file__).parents[2] / "pyproject.toml"


def called_names(tree: ast.Module) -> list[str]:
    """The name of every method, or function of a module, that is called."""
    names = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if ast.unparse(node.func) == "self.blocks.step":
            continue  # the samples of a step, in data/order.py
        names.append(node.func.attr)
    return names


@cache
def called_names_by_file() -> dict[str, list[str]]:
    names_by_file = {}
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        names_by_file[file] = called_names(ast.parse(path.read_text()))
    return names_by_file


def call_sites(*names: str) -> list[str]:
    """The file of every call of one of these names."""
    files = []
    for file, called in called_names_by_file().items():
        files += [file for name in called if name in names]
    return files


def call_sites_of_steps(*names: str) -> list[str]:
    """Those outside of the classes of optimizers and of precision."""
    return [
        file
        for file in call_sites(*names)
        if not file.startswith("optim/") and file != "train/precision.py"
    ]


def lower_layers() -> set[str]:
    """The package of the loop, and those below its layer in the import contract that `make check`
    proves.
    """
    contracts = tomllib.loads(CONTRACT.read_text())["tool"]["importlinter"]["contracts"]
    packages = {"surefoot.train"}
    is_below = False
    for layer in contracts[0]["layers"]:
        names = re.findall(r"\w+", layer)
        if is_below:
            packages |= {f"surefoot.{name}" for name in names}
        if "train" in names:
            is_below = True
    assert is_below
    return packages


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_the_loop_imports_only_torch_the_standard_library_and_lower_layers() -> None:
    imported = set()
    for node in ast.walk(ast.parse(LOOP.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.module is not None
            imported.add(node.module)
    allowed = {*sys.stdlib_module_names, "torch", *lower_layers()}

    for module in imported:
        assert any(is_within(module, package) for package in allowed), module


def test_there_is_one_call_site_of_backward() -> None:
    assert call_sites_of_steps("backward") == ["train/loop.py"]
    # on no numbers
    assert call_sites_of_steps("run_backward") == ["tools/plan/meta_pass.py"]
    # of features, in a loss of the whole batch; the loop's backward pass takes it from there to the
    # parameters
    assert call_sites_of_steps("grad", "vjp", "value_and_grad") == ["train/gradient_cache.py"]


def test_there_is_one_call_site_of_the_optimizers_step() -> None:
    assert call_sites_of_steps("step") == []
    calls = [node for node in ast.walk(ast.parse(LOOP.read_text())) if isinstance(node, ast.Call)]
    # a way to step or skip is what takes the step
    steps = [call for call in calls if ast.unparse(call.func).endswith("skip.apply")]
    assert len(steps) == 1
    # a composite calls its parts', and one with a closure clips each evaluation
    files = [file for file in call_sites("apply") if file.startswith("optim/")]
    assert files == ["optim/closure_step.py", "optim/skip_step.py"]


def test_the_guard_sees_a_call() -> None:
    tree = ast.parse("(part * scale).backward(); torch.autograd.backward(part); optimizer.step()")
    assert called_names(tree) == ["backward", "backward", "step"]
