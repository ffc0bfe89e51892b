"""Law 15: a start makes only what its first step needs. No clock is read: imports, opened files and
calls are counted. (6 s)

In a fresh interpreter, because this one has imported everything already.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from growing import checks

UNUSED_PARTS = (
    "surefoot.recipes.export",
    "surefoot.tools.compare",
    "surefoot.tools.profile",
    "surefoot.tools.replay",
    "surefoot.tools.tune",
    "surefoot.tools.verify",
)
UNUSED = (
    *UNUSED_PARTS,
    "datasets",
    "http.server",
    "mlflow",
    "optuna",
    "pandas",
    "pyarrow",
    "resvg_py",
    "sacrebleu",
    "scipy",
    "sklearn",
    "sympy",
    "timm",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "torchvision",
    "transformers",
    "wandb",
)
STARTS = """
import gc, json, os, sys
from collections import Counter
from pathlib import Path

text = Path("text")
opened, figures = Counter(), {}
passes = os.open("passes", os.O_CREAT | os.O_RDWR | os.O_APPEND)  # a byte for each: a counter would be state of the model

def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, os.PathLike)) and text in Path(arguments[0]).parents:
        opened[Path(arguments[0]).name] += 1

sys.addaudithook(watch)

of_state = Counter()

def count_bytes():
    from surefoot.checkpoint.snapshot import Snapshot

    plain = Snapshot.__init__

    def counting(self, *arguments, **options):
        plain(self, *arguments, **options)
        of_state.update(hashed=self.hashed_bytes, copied=self.copied_bytes)

    Snapshot.__init__ = counting

class FirstStep(BaseException):
    pass

def end(self, done):
    raise FirstStep

def build_and_count(*arguments, **options):
    run = build(*arguments, **options)
    from surefoot.run.periodic import PeriodicWork
    PeriodicWork.evaluate_due = end
    if not of_state:
        count_bytes()
    of_state.clear()
    of_state["weights"] = sum(each.nbytes for each in run.parts.state.model.parameters())
    for model in run.parts.state.models.values():
        model.register_forward_hook(lambda *_: os.write(passes, b".") and None)
    return run

from surefoot.cli import main, plan, train
build = train.build_run
train.build_run = plan.build_run = build_and_count
flags = ["--data.path=text", "--data.vocab-size=300", "--model.layers=1", "--model.width=16", "--model.heads=2", "--model.context=16"]
for name, arguments in {
    "images": ["train", "images", "--run-dir=runs/images"],
    "plan": ["plan", "gpt", "--run-dir=runs/plan", *flags],
    "gpt": ["train", "gpt", "--run-dir=runs/gpt", *flags],
}.items():
    opened.clear(), os.ftruncate(passes, 0)
    try:
        main.main(arguments)
    except FirstStep:
        pass
    if "tokenizers" in sys.modules and name == "plan":
        from surefoot.tokenizers import BPETokenizer
        BPETokenizer.train = None  # the second start with the text needs no training
    figures[name] = {"opened": dict(opened), "passes": os.fstat(passes).st_size, "state": dict(of_state), "modules": sorted(sys.modules)}
figures["frozen"] = gc.get_freeze_count()
figures["spins"] = os.environ.get("GOMP_SPINCOUNT")
print(json.dumps(figures))
"""


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("starts")
    (directory / "text").mkdir()
    for number in range(20):
        words = (f"word{(number * 7919 + index * index) % 1013}" for index in range(10_000))
        (directory / "text" / f"{number}.txt").write_text(" ".join(words))
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("GOMP_", "OMP_WAIT"))
    }
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", STARTS],
        capture_output=True,
        text=True,
        cwd=directory,
        env=environment | {"XDG_CACHE_HOME": str(directory / "cache")},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", UNUSED_PARTS)
def test_a_module_that_no_start_may_import_exists(name: str) -> None:
    assert importlib.util.find_spec(name) is not None


@pytest.mark.slow
@pytest.mark.parametrize("start", ["images", "plan", "gpt"])
def test_no_module_is_imported_that_the_first_step_does_not_use(
    start: str, figures: dict[str, Any]
) -> None:
    for module in figures[start]["modules"]:
        for unused in UNUSED:
            assert module != unused
            assert not module.startswith(f"{unused}.")


@pytest.mark.slow
def test_a_text_is_read_once_and_a_second_start_trains_no_tokenizer(
    figures: dict[str, Any],
) -> None:
    for start in ("plan", "gpt"):
        # opened twice: for the first two bytes, which say whether it is zipped, and for the text
        assert figures[start]["opened"] == {f"{number}.txt": 2 for number in range(20)}


@pytest.mark.slow
def test_few_passes_come_before_the_first_update_or_the_end_of_a_plan(
    figures: dict[str, Any],
) -> None:
    # the state check has 3 (a carried state shows in step 1 only), the loss contract 3 that have
    # the samples of 1, the fingerprint 2, the step 1
    assert figures["images"]["passes"] == 9
    assert figures["gpt"]["passes"] == 9
    # memory 1, time 2 to 10, each of two or three splits 1 to 3, the loss contract 3
    assert 8 <= figures["plan"]["passes"] <= 23


@pytest.mark.slow
def test_a_start_copies_the_weights_three_times_at_most_and_hashes_none_of_them(
    figures: dict[str, Any],
) -> None:
    for start in ("images", "gpt"):
        state = figures[start]["state"]
        # copied by the check of state, the loss contract and the fingerprint of the program
        assert 0 < state["copied"] <= 3.05 * state["weights"]
        assert state["hashed"] <= 0.01 * state["weights"]


@dataclass(frozen=True)
class Budget:
    """The most that the checks before and in the first two steps may take."""

    passes: int
    operators: int
    copied: float  # of the weights' bytes
    hashed: float


BUDGETS = {
    "small": Budget(passes=8, operators=7_600, copied=3.01, hashed=0.01),
    "large": Budget(passes=8, operators=14_000, copied=2.01, hashed=0.01),
}


@pytest.mark.parametrize("size", ["small", pytest.param("large", marks=pytest.mark.slow)])
def test_the_checks_of_a_start_stay_within_their_budget(size: str) -> None:
    """`python benchmarks/costs.py --of checks` prints the figures, and their CPU seconds."""
    costs, weights = checks.small_costs() if size == "small" else checks.large_costs()
    whole = checks.total(costs)
    budget = BUDGETS[size]
    assert 0 < whole.passes <= budget.passes
    assert 0 < whole.operators <= budget.operators
    assert 0 < whole.copied_bytes <= budget.copied * weights
    assert whole.hashed_bytes <= budget.hashed * weights


@pytest.mark.slow
def test_idle_threads_wait_shortly_and_torch_is_no_garbage(figures: dict[str, Any]) -> None:
    assert figures["spins"] == "60000"
    assert figures["frozen"] > 100_000
