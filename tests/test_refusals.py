"""What a script, a notebook and a hanging worker are told: a sentence with its cure, and no frames.
(10 s)
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import small_runs
import surefoot as sf
from forked_script import run_forked
from in_one import in_one
from rank_processes import Ranks
from refused import refused
from surefoot import errors
from surefoot.cli import main
from surefoot.data import workers as reading
from surefoot.run import run as run_module

X = torch.randn(64, 4)
Y = torch.randint(3, (64,))


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class OwnCrossEntropy(nn.CrossEntropyLoss):
    """A user's name for torch's loss."""


class Claiming:
    __module__ = "torch.nn.functional"

    def __call__(self, model: Any, batch: Any) -> Tensor:
        return loss(model, batch)


def build(**changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 3),
        "loss": loss,
        "train_data": (X, Y),
        "batch_size": 8,
        "length": "2 steps",
        "optimizer": sf.optim.sgd(lr=0.1),
        "console": False,
    }
    return sf.Run(**settings | changes)


def betas(pair: tuple[float, float]) -> Any:
    return lambda groups: torch.optim.AdamW(groups, betas=pair)


BATCHES = [(X[start : start + 8], Y[start : start + 8]) for start in range(0, 64, 8)]
OTHER_KIND = r"\[data-set-of-other-kind\]"
REFUSED: dict[str, tuple[dict[str, Any], type[sf.SurefootError], str, str]] = {
    "a Tensor": ({"train_data": X}, sf.DataError, OTHER_KIND, r"\(inputs, targets\)"),
    "a tuple of arrays": (
        {"train_data": (X.numpy(), Y.numpy())},
        sf.DataError,
        OTHER_KIND,
        "torch.as_tensor",
    ),
    "a mixed tuple": (
        {"train_data": (X, Y.numpy())},
        sf.DataError,
        OTHER_KIND,
        "torch.as_tensor",
    ),
    "a path": (
        {"train_data": Path("data/train.bin")},
        sf.DataError,
        OTHER_KIND,
        "load_documents",
    ),
    "a path as text": ({"train_data": "data/train.bin"}, sf.DataError, OTHER_KIND, "load_images"),
    "ready batches": (
        {"train_data": BATCHES},
        sf.DataError,
        r"\[list-of-batches\]",
        r"torch\.cat",
    ),
    "batches as dictionaries": (
        {"train_data": [{"x": x, "y": y} for x, y in BATCHES]},
        sf.DataError,
        r"\[list-of-batches\]",
        r"\[dict\(zip\(",
    ),
    "a dictionary of tensors": (
        {"train_data": {"x": X, "y": Y}},
        sf.DataError,
        OTHER_KIND,
        "a tuple",
    ),
    "a list of columns": (
        {"train_data": [X, Y]},
        sf.DataError,
        OTHER_KIND,
        "a tuple of tensors",
    ),
    "a split of arrays": (
        {"splits": {"v": sf.Split((X.numpy(), Y.numpy()))}},
        sf.DataError,
        OTHER_KIND,
        "torch.as_tensor",
    ),
    "a class of modules": (
        {"model": nn.Linear},
        sf.ConfigError,
        r"\[model-needs-arguments\]",
        r"lambda: Linear\(",
    ),
    "betas of torch's": (
        {"optimizer": betas((0.9, 1.0))},
        sf.ConfigError,
        r"\[optimizer-rejects-settings\]",
        "below 1",
    ),
    "one beta": (
        {"optimizer": betas((0.9,))},  # type: ignore[arg-type]
        sf.ConfigError,
        r"\[optimizer-rejects-settings\]",
        "below 1",
    ),
}


@in_one
@pytest.mark.parametrize(("changes", "kind", "found", "cure"), REFUSED.values(), ids=REFUSED)
def test_what_users_hand_over_is_refused_with_its_cure(
    changes: dict[str, Any], kind: type[sf.SurefootError], found: str, cure: str
) -> None:
    with pytest.raises(kind, match=found) as refusal:
        build(**changes).train()
    assert refusal.match(cure)
    assert 2 <= len(str(refusal.value).splitlines()) <= 5


@pytest.mark.parametrize(
    ("changes", "code", "fields"),
    [
        (
            {"loss": lambda model, batch: (loss(model, batch), model(batch[0]))},
            "loss-second-value",
            {"returned": "(Tensor, Tensor)"},
        ),
        (
            {"loss": lambda model, batch: (loss(model, batch), {"accuracy": 0.5})},
            "loss-second-value",
            {"returned": "'accuracy' as float"},
        ),
        ({"loss": F.cross_entropy}, "loss-of-torch", {"value": "F.cross_entropy"}),
        (
            {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
            "loss-of-torch",
            {"value": "nn.CrossEntropyLoss"},
        ),
        ({"loss": OwnCrossEntropy()}, "loss-of-torch", {"value": "nn.CrossEntropyLoss"}),
        ({"loss": Claiming()}, "loss-of-torch", {"value": "F.Claiming"}),
        ({"loss": 3}, "loss-arguments", {"value": 3}),
        ({"loss": "mse"}, "loss-arguments", {"value": "mse"}),
        ({"loss": lambda model: 0}, "loss-arguments", {"setting": "loss"}),
        ({"loss": lambda a, b, c: 0}, "loss-arguments", {"setting": "loss"}),
        ({"splits": (X, Y)}, "splits-without-names", {"found": "tuple"}),
        ({"splits": X}, "splits-without-names", {"found": "Tensor"}),
        ({"splits": sf.Split((X, Y))}, "splits-without-names", {"found": "Split"}),
    ],
)
def test_losses_and_splits_of_other_forms_are_refused(
    changes: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    with refused(code, **fields) as refusal:
        build(**changes).train()
    assert refusal.value.remedies
    assert 2 <= len(str(refusal.value).splitlines()) <= 5


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("batches", BATCHES),
        ("batches", [{"x": x, "y": y} for x, y in BATCHES]),
        ("arrays", (X.numpy(), Y.numpy())),
        ("arrays", (X, Y.numpy())),
        ("columns", [X, Y]),
        ("columns", [X.numpy(), Y]),
    ],
)
def test_what_a_refusal_of_data_says_to_type_gives_the_samples(name: str, data: Any) -> None:
    with pytest.raises(sf.DataError) as refusal:
        build(train_data=data)
    cure = re.search(r"(tuple\(|\[dict).*$", str(refusal.value), re.MULTILINE)
    assert cure is not None
    samples = eval(
        cure[0], {name: data, "torch": torch, "tuple": tuple, "map": map, "zip": zip, "dict": dict}
    )
    assert len(samples if isinstance(samples, list) else samples[0]) == 64
    by_name = isinstance(samples, list)
    run = build(
        train_data=samples,
        loss=lambda model, batch: loss(model, (batch["x"], batch["y"]) if by_name else batch),
    )
    run.train()
    reference = build()
    reference.train()
    assert torch.equal(run.state.models["model"].weight, reference.state.models["model"].weight)


def test_what_a_refusal_of_evaluate_and_of_a_class_says_to_type_works() -> None:
    with refused("splits-without-names") as refusal:
        build(splits=(X, Y))
    (written,) = refusal.value.remedies
    changes = eval(
        f"dict({written.partition('write ')[2]})",
        {"sf": sf, "data": (X, Y), "dict": dict},
    )
    assert set(build(**changes).evaluate()) == {"val/loss"}
    with pytest.raises(sf.ConfigError) as refusal:
        build(model=nn.Linear)
    (remedy,) = refusal.value.remedies
    cure = str(remedy).partition(": ")[2].replace("...", "4, 3")
    assert isinstance(
        build(model=eval(cure, {"Linear": nn.Linear})).state.models["model"], nn.Linear
    )


def test_a_model_that_fails_of_itself_raises_what_it_raised() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        build(model=lambda: nn.Linear(4, 3 + "x"))  # type: ignore[operator]
    with pytest.raises(sf.ConfigError) as refused:
        build(model=None)
    assert refused.value.code == "not-a-model"


def test_a_factory_that_fails_of_itself_raises_what_it_raised() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        build(optimizer=lambda groups: torch.optim.AdamW(groups, lr=int("x")))


def test_betas_outside_of_the_range_of_torch_are_refused_with_a_pair_that_is_inside() -> None:
    with refused("setting-out-of-range", setting="optimizer.betas", value=(0.9, 1.0)):
        build(optimizer=sf.optim.adamw(lr=0.1, betas=(0.9, 1.0)))


@pytest.mark.parametrize(
    "data",
    [
        [(x, y) for x, y in zip(X, Y, strict=True)],
        list(X.unsqueeze(1)),
        [
            (torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(9)
        ],  # sequences of one length, and not a step's
        X.numpy(),
        [X[0], X[1]],
    ],
    ids=["samples", "rows", "sequences", "an array", "two samples"],
)
def test_a_list_of_samples_is_taken(data: Any) -> None:
    build(
        train_data=data,
        loss=lambda model, batch: (
            model(batch[0] if isinstance(batch, list) else batch).square().mean()
        ),
    )


class MulticlassAccuracy:
    """A metric object, but not from torchmetrics torchmetrics."""

    def update(self, outputs: Tensor, labels: Tensor) -> None: ...

    def compute(self) -> None: ...


def right_fraction(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(dim=1) == targets).double().mean())


def test_a_metric_object_of_another_library_is_refused_and_what_the_message_says_works() -> None:
    for metrics in ([MulticlassAccuracy()], {"a": MulticlassAccuracy()}, MulticlassAccuracy()):
        with refused("not-a-metric") as refusal:
            sf.Split((X, Y), metrics=metrics)
    (written,) = refusal.value.remedies
    cure = written.partition("write: ")[2]
    split = eval(
        f"sf.Split((X, Y), {cure})",
        {"sf": sf, "surefoot": sf, "X": X, "Y": Y, "function": right_fraction},
    )
    run = build(splits={"v": split})
    assert run.evaluate()["v/right_fraction"] == right_fraction(run.state.models["model"](X), Y)


def test_a_name_for_a_metric_is_refused_and_what_the_message_says_works() -> None:
    with refused("not-a-metric", value="top_k_accuracy") as refusal:
        sf.Split((X, Y), metrics="top_k_accuracy")
    (written,) = refusal.value.remedies
    cure = written.partition("write: ")[2]
    run = build(splits={"v": eval(f"sf.Split((X, Y), {cure})", {"sf": sf, "X": X, "Y": Y})})
    assert set(run.evaluate()) == {"v/loss", "v/top_k_accuracy"}


def test_a_metric_that_returns_a_number_is_refused_and_what_the_message_says_works() -> None:
    with refused("metric-not-a-mean", metric="right_fraction", returned="float") as refusal:
        build(splits={"v": sf.Split((X, Y), metrics=right_fraction)}).evaluate()
    cure = refusal.value.remedies[-1].partition("once: ")[2]
    names = {"sf": sf, "surefoot": sf, "X": X, "Y": Y, "function": right_fraction}
    run = build(splits={"v": eval(f"sf.Split((X, Y), {cure})", names)})
    assert set(run.evaluate()) == {"v/loss", "v/right_fraction"}


# --- scripts --------------------------------------------------------------------------------------

SCRIPT = """
import torch, surefoot as sf
class Data:
    def __len__(self): return 8
    def __getitem__(self, index): {body}
run = sf.Run(
    model=lambda: torch.nn.Linear(1, 1), loss=lambda model, batch: {loss}, train_data=Data(), batch_size=4, length="4 steps",
    optimizer={optimizer}, console=False, workers={workers},
)
run.train()
"""


def script_of(
    body: str,
    *,
    loss: str = "model(batch).mean()",
    optimizer: str = "sf.optim.sgd(lr=0.1)",
    workers: int = 0,
) -> str:
    return SCRIPT.format(body=body, loss=loss, optimizer=optimizer, workers=workers)


def printed_by(code: str, tmp_path: Path, *, option: str = "", status: int = 1) -> list[str]:
    """What an interpreter that has imported nothing prints of a script."""
    script = tmp_path / "train.py"
    script.write_text(code)
    command = [sys.executable, option, code] if option else [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status
    return done.stderr.splitlines()


def printed_by_fork(code: str, tmp_path: Path, ranks: Ranks, *, status: int = 1) -> list[str]:
    """What a process prints of a script that is forked from one that has imported torch."""
    script = tmp_path / "train.py"
    script.write_text(code)
    outcome = run_forked(script, ranks)
    assert outcome.status == status
    return outcome.text.splitlines()


def test_a_refusal_in_a_script_is_its_sentence_and_the_scripts_own_line(tmp_path: Path) -> None:
    code = script_of("return torch.zeros(1)", loss="(model(batch).mean(), 3)")
    lines = printed_by(code, tmp_path, status=2)
    assert lines[-2].strip() == "[loss-second-value]"
    assert lines[-1] == f"  {tmp_path / 'train.py'}, line {len(SCRIPT.splitlines())}"
    assert not any("Traceback" in line or line.startswith("  File") for line in lines)


@pytest.mark.slow
def test_settings_that_torch_refuses_are_a_sentence_and_two_lines_of_the_script(
    tmp_path: Path,
) -> None:
    body = "return torch.zeros(1)"
    code = script_of(body, optimizer="lambda groups: torch.optim.AdamW(groups, betas=(0.9, 1.0))")
    lines = printed_by(code, tmp_path, status=2)
    places = [line for line in lines if "train.py, line" in line]
    assert places == [f"  {tmp_path / 'train.py'}, line {number}" for number in (8, 6)]
    assert "[optimizer-rejects-settings]" in [line.strip() for line in lines]


@pytest.mark.fast("fork-0")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("option", ["", "-c", "fork"])
def test_an_error_in_the_users_own_code_keeps_its_frames(
    tmp_path: Path, option: str, workers: int, ranks: Ranks
) -> None:
    """In a loader's process it is taken only for sample 5: sample 0, 4 and 7 are looked at
    before.
    """
    code = script_of("return torch.zeros(1) if index in (0, 4, 7) else index / 0", workers=workers)
    if option == "fork":
        lines = printed_by_fork(code, tmp_path, ranks)
    else:
        lines = printed_by(code, tmp_path, option=option)
    assert "ZeroDivisionError: division by zero" in lines
    assert any("in __getitem__" in line for line in lines)


@pytest.mark.parametrize(
    "code",
    [
        "try: {}['my own bug']\nfinally: sf.ConfigError; sf.optim.sgd(lr=-1)",
        "try: {}['my own bug']\nexcept KeyError: raise sf.DataError('sample 3 is broken')",
        "try: {}['my own bug']\nexcept KeyError:\n    try: sf.optim.sgd(lr=-1)\n    finally: sf.optim.adam(lr=-1)",
    ],
    ids=["finally", "except", "two of ours"],
)
def test_an_error_of_ours_hides_none_of_the_users(code: str, tmp_path: Path, ranks: Ranks) -> None:
    lines = printed_by_fork(f"import surefoot as sf\n{code}", tmp_path, ranks)
    assert "KeyError: 'my own bug'" in lines
    assert any(line.startswith("surefoot.errors.") for line in lines)


REFUSED_RUN = """
import surefoot as sf
try: sf.Run(epochs=3)
except sf.ConfigError: pass
"""


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sf.Run(epochs=3)", 2),
        ("sf.optim.sgd(lr=-1)", 2),
        ("sf.data.load_documents('/no/such/file')", 3),
        ("try: {}['x']\nexcept KeyError: raise sf.CheckpointError('no') from None", 4),
        ("raise sf.DivergedError('no', step=3)", 5),
        ("raise sf.RankLostError('rank 1 was killed')", 7),
    ],
)
def test_a_refusal_that_comes_of_nothing_of_the_users_has_no_frames_and_its_exit_status(
    code: str, status: int, tmp_path: Path, ranks: Ranks
) -> None:
    lines = printed_by_fork(f"{REFUSED_RUN}{code}", tmp_path, ranks, status=status)
    assert lines[0].startswith("error: ")
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize(
    "code",
    [
        "sf.ConfigError('no')",
        "sf.DataError('a-code', problem='no')",
        "pickle.loads(pickle.dumps(sf.CheckpointError('no')))",
        "sf.ddp(sync='never')",
        "sf.optim.adamw(learning_rate=3)",
        "sf.schedules.wsd(cooldown_shape='cosine')",
        "sf.data.load_images('missing')",
        "sf.load('missing').diagnose()",
    ],
)
def test_making_an_error_changes_no_hook(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with suppress(sf.SurefootError):
        exec(code, {"sf": sf, "pickle": pickle})
    assert sys.excepthook is sys.__excepthook__


def test_a_run_and_a_command_install_the_hook_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(sf.ConfigError):
        sf.Run(epochs=3)
    hook = sys.excepthook
    assert hook is not sys.__excepthook__
    build()
    with pytest.raises(SystemExit):
        main.main(["diagnose", "no-such-run"])
    assert sys.excepthook is hook
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(SystemExit):
        main.main(["diagnose", "no-such-run"])
    assert sys.excepthook is not sys.__excepthook__


def files_in(problem: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(problem.__traceback__)]


def raise_own(model: Any, batch: Any) -> Any:
    return {}["my own bug"]


def left_by_a_loop() -> None:
    with build(loss=raise_own) as run:
        for _ in run:
            pass


@pytest.mark.parametrize(
    ("call", "ends_in"),
    [
        (lambda: build(batch_size=0), "build"),
        (lambda: sf.optim.adamw(learning_rate=3), "<lambda>"),
        (lambda: sf.data.load_images("missing"), "<lambda>"),
        (lambda: sf.load("missing").diagnose(), "<lambda>"),
        (lambda: build().evaluate("missing"), "<lambda>"),
        (lambda: build(loss=raise_own).train(), "raise_own"),
        (left_by_a_loop, "raise_own"),
        (lambda: build(train_data=Broken()), "build"),
    ],
    ids=["settings", "optimizer", "loader", "saved", "evaluate", "train", "loop", "data"],
)
def test_errors_leave_a_public_function_without_our_frames(
    call: Callable[[], Any], ends_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(errors._frames, "all", False)
    with pytest.raises(Exception) as raised:  # noqa: PT011
        call()
    problem: BaseException | None = raised.value
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == ends_in
    package = str(Path(sf.__file__).parent)
    while problem is not None:
        assert not any(file.startswith(package) or file == "<string>" for file in files_in(problem))
        problem = errors.behind(problem)


def test_a_bug_of_ours_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(errors._frames, "all", False)
    names: dict[str, Any] = {}
    exec(compile("def build(settings): return settings.missing", errors.__file__, "exec"), names)
    monkeypatch.setattr(run_module, "build", names["build"])
    with pytest.raises(AttributeError) as raised:
        build()
    assert errors.__file__ in files_in(raised.value)


def test_traceback_keeps_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(errors._frames, "all", True)
    with pytest.raises(sf.ConfigError) as raised:
        build(batch_size=0)
    assert run_module.__file__ in files_in(raised.value)


def test_a_refused_resume_in_a_script_names_the_directory_and_keywords(tmp_path: Path) -> None:
    build(run_dir=tmp_path / "run").train()
    with pytest.raises(sf.CheckpointError) as refused:
        build(run_dir=tmp_path / "run", seed=1).train()
    lines = str(refused.value).splitlines()
    free = tmp_path / "run-2"
    there = tmp_path / "run"
    assert f" {there} at step-00000002: seed was 0, now 1" in lines[0]
    assert lines[-1] == "  [settings-changed]"
    assert f' run_dir="{free}", ' in lines[-2]
    assert lines[-2].endswith(f' init_from="{there}"')


@pytest.mark.parametrize(
    ("file", "of_user"),
    [(errors.__file__, False), (torch.__file__, False), (os.__file__, False), (__file__, True)],
    ids=["surefoot", "torch", "the standard library", "the user's"],
)
def test_whose_code_raised_what_a_refusal_hides_decides_on_frames(file: str, of_user: bool) -> None:
    code = compile("try: open('/no/such/file')\nexcept OSError: raise error", file, "exec")
    with pytest.raises(sf.ConfigError) as raised:
        exec(
            code,
            {
                "open": open,
                "OSError": OSError,
                "error": sf.ConfigError("no"),
                "__name__": "a_module",
            },
        )
    assert errors.comes_of_user(raised.value) is of_user


def test_a_rank_that_was_lost_has_no_frames_of_where_this_one_waited() -> None:
    lost = sf.RankLostError("rank 1 was killed")
    try:
        raise RuntimeError("connection closed")
    except RuntimeError as problem:
        lost.__cause__ = problem
    assert not errors.comes_of_user(lost)


def test_an_uncaught_refusal_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    errors.end_scripts_without_traceback()
    refusal = sf.ConfigError("a text: \x1b[2J")
    with pytest.raises(SystemExit):
        sys.excepthook(sf.ConfigError, refusal, None)
    assert capsys.readouterr().err == "error: a text: \ufffd[2J\n"


@pytest.mark.parametrize(("local_rank", "waited_s"), [("0", []), ("1", [10.0])])
def test_a_refusal_before_ranks_meet_waits_for_local_rank_0(
    local_rank: str,
    waited_s: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(errors.threading, "Event", lambda: types.SimpleNamespace(wait=slept.append))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("RANK", f"1{local_rank}")
    errors.end_scripts_without_traceback()
    refusal = sf.ConfigError("no")
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(sf.ConfigError, refusal, None)
    assert (slept, ended.value.code) == (waited_s, 2)
    assert main._speaks_of(refusal, None)
    assert slept == 2 * waited_s
    is_first = local_rank == "0"
    assert capsys.readouterr().err == (
        "error: no\n" if is_first else f"error: rank 1{local_rank}: no\n"
    )


class Broken:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, sample: int) -> Any:
        return {}["my own bug"]


def broken_on_ranks(**changes: Any) -> None:
    build(train_data=Broken() if not changes else (X, Y), **changes)


def test_an_error_in_the_users_own_code_keeps_its_frames_on_several_ranks(ranks: Ranks) -> None:
    first, second = ranks.outcomes(ranks.start(2, broken_on_ranks))
    assert first.status == second.status == 1
    assert "KeyError: 'my own bug'" in first.text
    assert "in __getitem__" in first.text
    assert second.text == ""


def test_a_refusal_on_several_ranks_is_its_sentence_and_the_scripts_own_line(ranks: Ranks) -> None:
    first, second = ranks.outcomes(ranks.start(2, broken_on_ranks, batch_size=7))
    assert first.status == second.status == 2
    lines = first.text.splitlines()
    assert "  [batch-size-not-divisible]" in lines
    assert re.fullmatch(rf"  {re.escape(__file__)}, line \d+", lines[-1])
    assert "Traceback" not in first.text
    assert second.text == ""


def test_a_hook_that_was_there_is_left_in_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have one, by which one of them speaks for all; a user may have one too."""
    others: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, problem, trace: others.append(problem))
    errors.end_scripts_without_traceback()
    raised = [sf.ConfigError("no"), ValueError("x")]
    for problem in raised:
        sys.excepthook(type(problem), problem, None)
    assert others == raised


# --- notebooks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["notebook", "prompt"])
def test_an_interrupt_where_a_person_types_is_a_keyboard_interrupt(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "notebook":
        shell = types.SimpleNamespace(
            custom_exceptions=(), CustomTB=None, set_custom_exc=lambda *_: None
        )
        monkeypatch.setitem(
            sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell)
        )
    else:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with (  # noqa: PT012
        pytest.raises(KeyboardInterrupt),
        small_runs.build(tmp_path / "run", length="7 steps") as run,
    ):
        for step in run:
            if step.index == 4:
                os.kill(os.getpid(), signal.SIGINT)
    assert sf.checkpoint.Store(tmp_path / "run" / "checkpoints").newest_step() == 5
    run = small_runs.build(tmp_path / "run", length="7 steps")
    run.train()  # the same process goes on
    assert run.state.step == 7


def test_an_interrupt_of_a_script_still_leaves_with_130(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end, small_runs.build(tmp_path / "run") as run:  # noqa: PT012
        for step in run:
            if step.index == 4:
                os.kill(os.getpid(), signal.SIGINT)
    assert end.value.code == 130


# --- a loader worker that hangs -------------------------------------------------------------------


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


def test_a_worker_that_hangs_is_named_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_WAIT_S", 0.2)
    warnings: list[str] = []

    def say(text: str) -> None:
        if "loader worker" in text:
            warnings.append(text)
            (tmp_path / "go on").touch()

    run = build(
        train_data=Hanging(tmp_path / "go on"),
        loss=lambda model, batch: model(batch).mean(),
        workers=2,
        length="4 steps",
    )
    feed = run.parts.pipeline.feed(workers=2, say=say)
    feed.start(0, stop=4)
    steps = [feed.micro_batches(step) for step in range(4)]
    feed.close()
    (warning,) = warnings
    hung = next(
        step for step, (micro_batch,) in enumerate(steps) if 9 in micro_batch.sample_ids.tolist()
    )
    assert f"loader worker {hung % 2} (process " in warning
    assert f"of step {hung}" in warning
    assert len(warning.splitlines()) == 3


class TimedOut:
    """A loader's batches, before each of which a wait is over so many times."""

    def __init__(self, batches: Any, *, times: int) -> None:
        self.batches = batches
        self.times = times
        self.left = times
        self._workers = batches._workers

    def __next__(self) -> Any:
        if self.left:
            self.left -= 1
            raise RuntimeError("DataLoader timed out after 5 seconds")
        self.left = self.times
        return next(self.batches)

    def _shutdown_workers(self) -> None:
        self.batches._shutdown_workers()


@pytest.mark.parametrize(
    ("times", "named"),
    [
        (3, []),
        (5, [(0, 20), (1, 20)]),
        (17, [(0, 20), (0, 40), (0, 80), (1, 20), (1, 40), (1, 80)]),
    ],
)
def test_a_slow_worker_is_named_once_and_then_each_time_that_it_takes_twice_as_long(
    times: int, named: list[tuple[int, int]]
) -> None:
    warnings: list[str] = []
    run = build(
        train_data=[torch.ones(4)] * 16,
        loss=lambda model, batch: model(batch).mean(),
        length="6 steps",
    )
    feed = run.parts.pipeline.feed(workers=2, say=warnings.append)
    feed.start(0, stop=6)
    assert feed.loader_workers is not None
    feed.loader_workers.batches = TimedOut(feed.loader_workers.batches, times=times)
    for step in range(6):
        feed.micro_batches(step)
    feed.close()
    found = [re.search(r"worker (\d) .* for (\d+) s$", text.splitlines()[0]) for text in warnings]
    assert [(int(one[1]), int(one[2])) for one in found if one] == named


def test_a_worker_is_named_after_twenty_seconds() -> None:
    assert reading._WAIT_S * reading._HANGS_AFTER == 20
    assert np.isclose(
        reading._WAIT_S, 5.0
    )  # as often as torch itself looks whether a worker has died
