"""What a script, a notebook and a hanging worker are told: a sentence with its cure, and no frames. (10 s)"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

import small_runs
import surefoot as sf
from surefoot.data import reading

X, Y = torch.randn(64, 4), torch.randint(3, (64,))


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def build(**changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 3),
        "loss": loss,
        "train": (X, Y),
        "batch_size": 8,
        "length": "2 steps",
        "optimizer": sf.sgd(lr=0.1),
        "console": False,
    }
    return sf.Run(**settings | changes)


def betas(pair: tuple[float, float]) -> Any:
    return lambda groups: torch.optim.AdamW(groups, betas=pair)


BATCHES = [(X[start : start + 8], Y[start : start + 8]) for start in range(0, 64, 8)]
REFUSED: dict[str, tuple[dict[str, Any], type[sf.SurefootError], str, str]] = {
    "(loss, logits)": (
        {"loss": lambda model, batch: (loss(model, batch), model(batch[0]))},
        sf.ConfigError,
        r"the loss returned \(Tensor, Tensor\)",
        "write: return loss",
    ),
    "a mean that is a number": (
        {"loss": lambda model, batch: (loss(model, batch), {"accuracy": 0.5})},
        sf.ConfigError,
        "the loss returned 'accuracy' as float",
        "surefoot.Mean",
    ),
    "a Tensor": ({"train": X}, sf.DataError, "a Tensor", r"\(inputs, targets\)"),
    "a tuple of arrays": ({"train": (X.numpy(), Y.numpy())}, sf.DataError, "NumPy arrays", "torch.from_numpy"),
    "a mixed tuple": ({"train": (X, Y.numpy())}, sf.DataError, "NumPy arrays", "torch.from_numpy"),
    "a path": ({"train": Path("data/train.bin")}, sf.DataError, r"the path 'data/train\.bin'", "load_documents"),
    "a path as text": ({"train": "data/train.bin"}, sf.DataError, "the path", "load_images"),
    "ready batches": ({"train": BATCHES}, sf.DataError, "ready batches of 8", r"torch\.cat"),
    "batches as dictionaries": (
        {"train": [{"x": x, "y": y} for x, y in BATCHES]},
        sf.DataError,
        "ready batches of 8",
        "the samples themselves",
    ),
    "a dictionary of tensors": ({"train": {"x": X, "y": Y}}, sf.DataError, "a dictionary of tensors", "a tuple"),
    "a list of columns": ({"train": [X, Y]}, sf.DataError, "a list of 2 columns", "a tuple of tensors"),
    "a split of arrays": (
        {"evaluate": {"v": sf.Split((X.numpy(), Y.numpy()))}},
        sf.DataError,
        "split 'v': the data are a tuple of NumPy arrays",
        "torch.from_numpy",
    ),
    "betas of torch's": ({"optimizer": betas((0.9, 1.0))}, sf.ConfigError, "Invalid beta parameter", "below 1"),
}


@pytest.mark.parametrize(("changes", "kind", "found", "cure"), REFUSED.values(), ids=REFUSED)
def test_what_users_hand_over_is_refused_with_its_cure(
    changes: dict[str, Any], kind: type[sf.SurefootError], found: str, cure: str
) -> None:
    with pytest.raises(kind, match=found) as refused:
        build(**changes).train()
    assert refused.match(cure)
    assert 2 <= len(str(refused.value).splitlines()) <= 5


def test_betas_outside_of_the_range_of_torch_are_refused_with_a_pair_that_is_inside() -> None:
    with pytest.raises(sf.ConfigError, match=r"optimizer.betas = \(0\.9, 1\.0\): a pair such as \(0\.9, 0\.999\)"):
        build(optimizer=sf.adamw(lr=0.1, betas=(0.9, 1.0)))


@pytest.mark.parametrize(
    "data",
    [
        [(x, y) for x, y in zip(X, Y, strict=True)],
        list(X.unsqueeze(1)),
        [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(9)],  # sequences of one length, and not a step's
        X.numpy(),
        [X[0], X[1]],
    ],
    ids=["samples", "rows", "sequences", "an array", "two samples"],
)
def test_a_list_of_samples_is_taken(data: Any) -> None:
    build(train=data, loss=lambda model, batch: model(batch[0] if isinstance(batch, list) else batch).square().mean())


def test_a_metric_object_is_refused_and_what_the_message_says_works() -> None:
    metric = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
    for scores in (metric, [metric]):
        with pytest.raises(sf.ConfigError, match="MulticlassAccuracy is a metric object") as refused:
            sf.Split((X, Y), scores=scores)
    cure = "".join(str(refused.value).splitlines()[2:])
    split = eval(f"sf.Split((X, Y), {cure})", {"sf": sf, "X": X, "Y": Y, "metric": metric, "torch": torch, "zip": zip})
    run = build(evaluate={"v": split})
    right = (run.state.models["model"](X).argmax(dim=1) == Y).double().mean()
    assert run.scores()["v/score"] == pytest.approx(float(right))


# --- scripts -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch, surefoot as sf
class Data:
    def __len__(self): return 8
    def __getitem__(self, index): {body}
run = sf.Run(
    model=lambda: torch.nn.Linear(1, 1), loss=lambda model, batch: {loss}, train=Data(), batch_size=4, length="4 steps",
    optimizer=sf.sgd(lr=0.1), console=False,
)
run.train()
"""


def printed_by(code: str, tmp_path: Path) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr.splitlines()


def test_a_refusal_in_a_script_is_its_sentence_and_the_scripts_own_line(tmp_path: Path) -> None:
    code = SCRIPT.format(body="return torch.zeros(1)", loss="(model(batch).mean(), 3)")
    lines = printed_by(code, tmp_path)
    assert lines[0].startswith("error: the loss returned (Tensor, int)")
    assert lines[-1] == f"  {tmp_path / 'train.py'}, line {len(SCRIPT.splitlines())}"
    assert not any("Traceback" in line or line.startswith("  File") for line in lines)


def test_an_error_in_the_users_own_code_keeps_its_frames(tmp_path: Path) -> None:
    lines = printed_by(SCRIPT.format(body="return index / 0", loss="model(batch).mean()"), tmp_path)
    assert "ZeroDivisionError: division by zero" in lines
    assert any("in __getitem__" in line for line in lines)


def test_a_hook_that_was_there_is_left_in_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have one, by which one of them speaks for all; a user may have one too."""
    others: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, problem, trace: others.append(problem))
    raised = [sf.ConfigError("no"), ValueError("x")]
    for problem in raised:
        sys.excepthook(type(problem), problem, None)
    assert others == raised


# --- notebooks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["notebook", "prompt"])
def test_an_interrupt_where_a_person_types_is_a_keyboard_interrupt(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "notebook":
        monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=object))
    else:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt), small_runs.build(tmp_path / "run") as run:  # noqa: PT012
        for step in run:
            if step.index == 4:
                os.kill(os.getpid(), signal.SIGINT)
    assert sf.checkpoint.Store(tmp_path / "run" / "checkpoints").newest_step() == 5
    run = small_runs.build(tmp_path / "run")
    run.train()  # the same process goes on
    assert run.state.step == 26


def test_an_interrupt_of_a_script_still_leaves_with_130(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end, small_runs.build(tmp_path / "run") as run:  # noqa: PT012
        for step in run:
            if step.index == 4:
                os.kill(os.getpid(), signal.SIGINT)
    assert end.value.code == 130


# --- a loader worker that hangs ---------------------------------------------------------------------------------------


class Hanging:
    """A data set whose sample 9 waits until a file is there."""

    def __init__(self, go_on: Path) -> None:
        self.go_on = go_on

    def __len__(self) -> int:
        return 16

    def __getitem__(self, sample: int) -> Tensor:
        if sample == 9:
            while not self.go_on.exists():
                os.sched_yield()
        return torch.zeros(4)


def test_a_worker_that_hangs_is_named_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_WAIT_S", 0.2)
    warnings: list[str] = []

    def say(text: str) -> None:
        if "loader worker" in text:
            warnings.append(text)
            (tmp_path / "go on").touch()

    run = build(
        train=Hanging(tmp_path / "go on"), loss=lambda model, batch: model(batch).mean(), workers=2, length="4 steps"
    )
    feed = run.parts.supply.feed(workers=2, say=say)
    feed.start(0, stop=4)
    steps = [feed.micro_batches(step) for step in range(4)]
    feed.close()
    (warning,) = warnings
    hung = next(step for step, (micro_batch,) in enumerate(steps) if 9 in micro_batch.ids.tolist())
    assert f"loader worker {hung % 2} (process " in warning
    assert f"of step {hung}" in warning
    assert len(warning.splitlines()) == 3


def test_a_worker_is_named_after_twenty_seconds() -> None:
    assert reading._WAIT_S * reading._HANGS_AFTER == 20
    assert np.isclose(reading._WAIT_S, 5.0)  # as often as torch itself looks whether a worker has died
