"""Fine-tuning on two ranks: the losses of one process, and the same bits after kills; about 30
s.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rank_processes import Ranks
from surefoot.recipes.finetune.template_date import FILE
from tuned_runs import CHAT_TEMPLATE, outcome, session, write_chat, write_model

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finetune-ranks")


@pytest.fixture(scope="module")
def processes(scratch: Path) -> Iterator[Ranks]:
    """They fork from this process, which has imported transformers."""
    import peft
    import transformers

    assert peft.LoraConfig
    assert transformers.AutoModelForCausalLM
    (scratch / "processes").mkdir()
    with Ranks(scratch / "processes") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def spec(scratch: Path) -> dict[str, Any]:
    return {
        "model": str(write_model(scratch / "gpt2")),
        "chat": str(write_chat(scratch / "chat.jsonl")),
    }


def train(
    processes: Ranks, size: int, spec: dict[str, Any], run_dir: Path, *, dies_in: int | None = None
) -> None:
    """Train on ranks; with `dies_in`, each is killed in its forward pass of this number."""
    of_run: dict[str, Any] = {"run_dir": str(run_dir)}
    expected_status = 0
    if dies_in is not None:
        of_run["pass"] = dies_in
        expected_status = -signal.SIGKILL
    outcomes = processes.outcomes(processes.start(size, session, spec=spec | of_run))
    statuses = [outcome.status for outcome in outcomes]
    assert statuses == [expected_status] * size, [outcome.text for outcome in outcomes]


def values_of(name: str, run: dict[str, Any]) -> list[float]:
    return [record[name] for record in run["records"] if name in record]


def assert_same_losses(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("loss", "val/loss"):
        values = values_of(name, one)
        assert len(values) > 1
        np.testing.assert_allclose(values, values_of(name, other), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_as_one_process_and_end_with_the_same_bits_after_kills(
    parallel: str, method: str, processes: Ranks, spec: dict[str, Any], tmp_path: Path
) -> None:
    """The model has tied weights and dropout, and two conversations or more are in each step."""
    changes: dict[str, Any] = {
        "method": method,
        "batch_size": "288 tokens",
        "micro_batch_size": "144 tokens",
    }
    train(processes, 1, spec | {"changes": changes}, tmp_path / "one")
    shared = spec | {"changes": changes | {"parallel": parallel}}
    train(processes, 2, shared, tmp_path / "two")
    two = outcome(tmp_path / "two")
    assert_same_losses(two, outcome(tmp_path / "one"))

    for dies_in in (5, 2):
        train(processes, 2, shared, tmp_path / "killed", dies_in=dies_in)
    train(processes, 2, shared, tmp_path / "killed")
    assert outcome(tmp_path / "killed") == two


@pytest.mark.slow
def test_ranks_write_one_date_in_the_template(
    processes: Ranks, spec: dict[str, Any], scratch: Path, tmp_path: Path
) -> None:
    """That of rank 0, to the microsecond; also after a kill."""
    template = scratch / "dated.jinja"
    template.write_text("{{ strftime_now('%H:%M:%S.%f') }}\n" + CHAT_TEMPLATE)
    sizes = {"batch_size": "288 tokens", "micro_batch_size": "144 tokens"}
    changes = {"data.template": str(template), "length": "4 steps", **sizes}
    dated = spec | {"changes": changes}
    train(processes, 2, dated, tmp_path / "run", dies_in=3)
    moment = (tmp_path / "run" / FILE).read_text()
    train(processes, 2, dated, tmp_path / "run")
    assert (tmp_path / "run" / FILE).read_text() == moment
    assert outcome(tmp_path / "run")["step"] == 4
