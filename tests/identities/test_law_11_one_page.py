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


def called(tree: ast.Module) -> list[str]:
    """The name of every method, or function of a module, that is called."""
    return [
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func) != "self.blocks.step"  # the samples of a step, in data/order.py
    ]


@cache
def calls() -> dict[str, list[str]]:
    """What is called, by FILE."""
    files = sorted(SOURCE.rglob("*.py"))
    return {
        path.relative_to(SOURCE).as_posix(): called(ast.parse(path.read_text())) for path in files
    }


def call_sites(*names: str) -> list[str]:
    """FILE of every call of one of these names."""
    return [file for file, there in calls().items() for name in there if name in names]


def outside_of_optimizers_and_precision(files: list[str]) -> list[str]:
    return [
        file for file in files if not file.startswith("optim/") and file != "train/precision.py"
    ]


def lower_layers() -> set[str]:
    """The package of the loop, and those below its layer in the import contract that `make check`
    proves.
    """
    layers = tomllib.loads(CONTRACT.read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    split = [re.findall(r"\w+", layer) for layer in layers]
    own = next(place for place, names in enumerate(split) if "train" in names)
    return {"surefoot.train"} | {f"surefoot.{name}" for names in split[own + 1 :] for name in names}


def test_the_loop_imports_only_torch_the_standard_library_and_lower_layers() -> None:
    imported = set()
    for node in ast.walk(ast.parse(LOOP.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.module is not None
            imported.add(node.module)
    below = lower_layers()
    strange = {
        name
        for name in imported
        if name.split(".")[0] not in sys.stdlib_module_names | {"torch"}
        and not any(name == room or name.startswith(f"{room}.") for room in below)
    }

    assert strange == set()


def test_there_is_one_call_site_of_backward() -> None:
    assert outside_of_optimizers_and_precision(call_sites("backward")) == ["train/loop.py"]
    assert outside_of_optimizers_and_precision(call_sites("run_backward")) == [
        "tools/plan/meta_pass.py"
    ]  # on no numbers
    # of features, in a loss of the whole batch; the loop's backward pass takes it from there to the
    # parameters
    assert outside_of_optimizers_and_precision(call_sites("grad", "vjp", "value_and_grad")) == [
        "train/gradient_cache.py"
    ]


def test_there_is_one_call_site_of_the_optimizers_step() -> None:
    assert outside_of_optimizers_and_precision(call_sites("step")) == []
    steps = [
        node.lineno
        for node in ast.walk(ast.parse(LOOP.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("skip.apply")
    ]
    assert len(steps) == 1  # a way to step or skip is what takes it
    # a composite calls its parts', and one with a closure clips each evaluation
    files = [file for file in call_sites("apply") if file.startswith("optim/")]
    assert files == ["optim/closure_step.py", "optim/skip_step.py"]


def test_the_guard_sees_a_call() -> None:
    tree = ast.parse("(part * scale).backward(); torch.autograd.backward(part); optimizer.step()")
    assert called(tree) == ["backward", "backward", "step"]
