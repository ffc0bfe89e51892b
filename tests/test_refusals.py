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


def adamw_with_betas(pair: tuple[float, float]) -> Any:
    return lambda groups: torch.optim.AdamW(groups, betas=pair)


BATCHES = [(X[start : start + 8], Y[start : start + 8]) for start in range(0, 64, 8)]
NAMED_BATCHES = [{"x": x, "y": y} for x, y in BATCHES]


def build_refused(
    code: str, kind: type[sf.SurefootError], changes: dict[str, Any], **fields: Any
) -> sf.SurefootError:
    """The error of a run with these changes: two to five lines that say what to do."""
    with refused(code, kind, **fields) as refusal:
        build(**changes).train()
    assert refusal.value.remedies
    assert 2 <= len(str(refusal.value).splitlines()) <= 5
    return refusal.value


@in_one
@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        pytest.param({"train_data": X}, "(inputs, targets)", id="a Tensor"),
        pytest.param(
            {"train_data": (X.numpy(), Y.numpy())}, "torch.as_tensor", id="a tuple of arrays"
        ),
        pytest.param({"train_data": (X, Y.numpy())}, "torch.as_tensor", id="a mixed tuple"),
        pytest.param({"train_data": Path("data/train.bin")}, "load_documents", id="a path"),
        pytest.param({"train_data": "data/train.bin"}, "load_images", id="a path as text"),
        pytest.param({"train_data": {"x": X, "y": Y}}, "a tuple", id="a dictionary of tensors"),
        pytest.param({"train_data": [X, Y]}, "a tuple of tensors", id="a list of columns"),
        pytest.param(
            {"splits": {"v": sf.Split((X.numpy(), Y.numpy()))}},
            "torch.as_tensor",
            id="a split of arrays",
        ),
    ],
)
def test_data_of_another_kind_are_refused_with_their_cure(
    changes: dict[str, Any], cure: str
) -> None:
    assert cure in str(build_refused("data-set-of-other-kind", sf.DataError, changes))


@in_one
@pytest.mark.parametrize(
    ("batches", "cure"), [(BATCHES, "torch.cat"), (NAMED_BATCHES, "[dict(zip(")]
)
def test_ready_batches_are_refused_with_the_samples_to_hand_over(batches: Any, cure: str) -> None:
    error = build_refused("list-of-batches", sf.DataError, {"train_data": batches})
    assert cure in str(error)


def test_a_class_that_needs_arguments_is_refused_with_a_factory_to_write() -> None:
    error = build_refused("model-needs-arguments", sf.ConfigError, {"model": nn.Linear})
    assert "lambda: Linear(" in str(error)


@pytest.mark.parametrize("pair", [(0.9, 1.0), (0.9,)])
def test_betas_that_torch_refuses_are_refused_with_their_limit(pair: Any) -> None:
    error = build_refused(
        "optimizer-rejects-settings", sf.ConfigError, {"optimizer": adamw_with_betas(pair)}
    )
    assert "below 1" in str(error)


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
    build_refused(code, sf.ConfigError, changes, **fields)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("batches", BATCHES),
        ("batches", NAMED_BATCHES),
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

    samples = eval(cure[0], {name: data, "torch": torch})

    run = build(train_data=samples, loss=loss_of_pairs_and_named)
    run.train()
    reference = build()
    reference.train()
    assert count_samples(samples) == 64
    assert torch.equal(run.state.models["model"].weight, reference.state.models["model"].weight)


def count_samples(data: Any) -> int:
    """The samples of a list, or of a tuple of tensors."""
    return len(data[0]) if isinstance(data, tuple) else len(data)


def loss_of_pairs_and_named(model: Any, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        return loss(model, (batch["x"], batch["y"]))
    return loss(model, batch)


def test_what_a_refusal_of_splits_says_to_type_works() -> None:
    with refused("splits-without-names") as refusal:
        build(splits=(X, Y))
    (remedy,) = refusal.value.remedies
    keywords = remedy.partition("write ")[2]

    changes = eval(f"dict({keywords})", {"sf": sf, "data": (X, Y)})

    assert set(build(**changes).evaluate()) == {"val/loss"}


def test_what_a_refusal_of_a_class_says_to_type_works() -> None:
    with refused("model-needs-arguments") as refusal:
        build(model=nn.Linear)
    (remedy,) = refusal.value.remedies
    cure = str(remedy).partition(": ")[2].replace("...", "4, 3")

    factory = eval(cure, {"Linear": nn.Linear})

    assert isinstance(build(model=factory).state.models["model"], nn.Linear)


def test_a_model_that_fails_of_itself_raises_what_it_raised() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        build(model=lambda: nn.Linear(4, 3 + "x"))  # type: ignore[operator]


def test_none_is_no_model() -> None:
    with refused("not-a-model"):
        build(model=None)


def test_a_factory_that_fails_of_itself_raises_what_it_raised() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        build(optimizer=lambda groups: torch.optim.AdamW(groups, lr=int("x")))


def test_betas_outside_of_the_range_of_torch_are_refused_with_a_pair_that_is_inside() -> None:
    with refused("setting-out-of-range", setting="optimizer.betas", value=(0.9, 1.0)):
        build(optimizer=sf.optim.adamw(lr=0.1, betas=(0.9, 1.0)))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(list(zip(X, Y, strict=True)), id="samples"),
        pytest.param(list(X.unsqueeze(1)), id="rows"),
        # of one length, and not as long as a step's
        pytest.param([(torch.randn(5, 4), torch.randint(3, (5,)))] * 9, id="sequences"),
        pytest.param(X.numpy(), id="an array"),
        pytest.param([X[0], X[1]], id="two samples"),
    ],
)
def test_a_list_of_samples_is_taken(data: Any) -> None:
    def mean_square(model: Any, batch: Any) -> Tensor:
        inputs = batch[0] if isinstance(batch, list) else batch
        return model(inputs).square().mean()

    run = build(train_data=data, loss=mean_square)

    assert len(run.parts.pipeline.dataset) == len(data)


class MulticlassAccuracy:
    """A metric object, but not from torchmetrics torchmetrics."""

    def update(self, outputs: Tensor, labels: Tensor) -> None: ...

    def compute(self) -> None: ...


def right_fraction(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs.argmax(dim=1) == targets).double().mean())


def split_with(keywords: str) -> sf.Split:
    """The split that a user writes with the keywords of a message."""
    names = {"sf": sf, "surefoot": sf, "X": X, "Y": Y, "function": right_fraction}
    split: sf.Split = eval(f"sf.Split((X, Y), {keywords})", names)
    return split


@pytest.mark.parametrize(
    "metrics", [[MulticlassAccuracy()], {"a": MulticlassAccuracy()}, MulticlassAccuracy()]
)
def test_a_metric_object_of_another_library_is_refused_and_what_the_message_says_works(
    metrics: Any,
) -> None:
    with refused("not-a-metric") as refusal:
        sf.Split((X, Y), metrics=metrics)
    (remedy,) = refusal.value.remedies

    run = build(splits={"v": split_with(remedy.partition("write: ")[2])})

    assert run.evaluate()["v/right_fraction"] == right_fraction(run.state.models["model"](X), Y)


def test_a_name_for_a_metric_is_refused_and_what_the_message_says_works() -> None:
    with refused("not-a-metric", value="top_k_accuracy") as refusal:
        sf.Split((X, Y), metrics="top_k_accuracy")
    (remedy,) = refusal.value.remedies

    run = build(splits={"v": split_with(remedy.partition("write: ")[2])})

    assert set(run.evaluate()) == {"v/loss", "v/top_k_accuracy"}


def test_a_metric_that_returns_a_number_is_refused_and_what_the_message_says_works() -> None:
    with refused("metric-not-a-mean", metric="right_fraction", returned="float") as refusal:
        build(splits={"v": sf.Split((X, Y), metrics=right_fraction)}).evaluate()
    remedy = refusal.value.remedies[-1]

    run = build(splits={"v": split_with(remedy.partition("once: ")[2])})

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
    arguments = [option, code] if option else [str(script)]
    process = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False
    )
    assert process.returncode == status
    return process.stderr.splitlines()


def printed_by_fork(code: str, tmp_path: Path, ranks: Ranks, *, status: int = 1) -> list[str]:
    """What a process prints of a script that is forked from one that has imported torch."""
    script = tmp_path / "train.py"
    script.write_text(code)
    outcome = run_forked(script, ranks)
    assert outcome.status == status
    return outcome.text.splitlines()


def test_a_refusal_in_a_script_is_its_sentence_and_the_scripts_own_line(
    tmp_path: Path, ranks: Ranks
) -> None:
    code = script_of("return torch.zeros(1)", loss="(model(batch).mean(), 3)")

    lines = printed_by_fork(code, tmp_path, ranks, status=2)

    assert lines[-2].strip() == "[loss-second-value]"
    assert lines[-1] == f"  {tmp_path / 'train.py'}, line {len(SCRIPT.splitlines())}"
    assert not any("Traceback" in line or line.startswith("  File") for line in lines)


@pytest.mark.slow
def test_settings_that_torch_refuses_are_a_sentence_and_two_lines_of_the_script(
    tmp_path: Path,
) -> None:
    optimizer = "lambda groups: torch.optim.AdamW(groups, betas=(0.9, 1.0))"
    code = script_of("return torch.zeros(1)", optimizer=optimizer)

    lines = printed_by(code, tmp_path, status=2)

    script = tmp_path / "train.py"
    places = [line for line in lines if "train.py, line" in line]
    assert places == [f"  {script}, line 8", f"  {script}, line 6"]
    assert "  [optimizer-rejects-settings]" in lines


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


@pytest.fixture
def pythons_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook that Python has for exceptions that nobody catches."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


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

    errors_shown = [line for line in lines if line.startswith("error: ")]
    assert errors_shown == lines[:1]
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
@pytest.mark.usefixtures("pythons_hook")
def test_making_an_error_changes_no_hook(code: str) -> None:
    with suppress(sf.SurefootError):
        exec(code, {"sf": sf, "pickle": pickle})
    assert sys.excepthook is sys.__excepthook__


@pytest.mark.usefixtures("pythons_hook")
def test_a_run_installs_the_hook_once() -> None:
    with pytest.raises(sf.ConfigError):
        sf.Run(epochs=3)
    hook = sys.excepthook
    build()
    with pytest.raises(SystemExit):
        main.main(["diagnose", "no-such-run"])

    assert hook is not sys.__excepthook__
    assert sys.excepthook is hook


@pytest.mark.usefixtures("pythons_hook")
def test_a_command_installs_the_hook() -> None:
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

    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == ends_in
    ours = (str(Path(sf.__file__).parent), "<string>")
    problem: BaseException | None = raised.value
    while problem is not None:
        assert [file for file in files_in(problem) if file.startswith(ours)] == []
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
    run_dir = tmp_path / "run"
    free_dir = tmp_path / "run-2"
    build(run_dir=run_dir).train()

    with refused("settings-changed", sf.CheckpointError) as refusal:
        build(run_dir=run_dir, seed=1).train()

    lines = str(refusal.value).splitlines()
    assert f" {run_dir} at step-00000002: seed was 0, now 1" in lines[0]
    remedy = lines[-2]  # before the code
    assert f' run_dir="{free_dir}", ' in remedy
    assert remedy.endswith(f' init_from="{run_dir}"')


@pytest.mark.parametrize(
    ("file", "of_user"),
    [(errors.__file__, False), (torch.__file__, False), (os.__file__, False), (__file__, True)],
    ids=["surefoot", "torch", "the standard library", "the user's"],
)
def test_whose_code_raised_what_a_refusal_hides_decides_on_frames(file: str, of_user: bool) -> None:
    code = compile("try: open('/no/such/file')\nexcept OSError: raise error", file, "exec")
    with pytest.raises(sf.ConfigError) as raised:
        exec(code, {"error": sf.ConfigError("no"), "__name__": "a_module"})
    assert errors.comes_of_user(raised.value) is of_user


def test_a_rank_that_was_lost_has_no_frames_of_where_this_one_waited() -> None:
    lost = sf.RankLostError("rank 1 was killed")
    try:
        raise RuntimeError("connection closed")
    except RuntimeError as problem:
        lost.__cause__ = problem
    assert not errors.comes_of_user(lost)


@pytest.mark.usefixtures("pythons_hook")
def test_an_uncaught_refusal_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    errors.end_scripts_without_traceback()
    refusal = sf.ConfigError("a text: \x1b[2J")
    with pytest.raises(SystemExit):
        sys.excepthook(sf.ConfigError, refusal, None)
    assert capsys.readouterr().err == "error: a text: \ufffd[2J\n"


@pytest.mark.parametrize(
    ("local_rank", "rank", "wait_s", "message"),
    [
        pytest.param("0", "10", [], "error: no\n", id="local rank 0"),
        pytest.param("1", "11", [10.0], "error: rank 11: no\n", id="local rank 1"),
    ],
)
@pytest.mark.usefixtures("pythons_hook")
def test_a_refusal_before_ranks_meet_waits_for_local_rank_0(
    local_rank: str,
    rank: str,
    wait_s: list[float],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waits_s: list[float] = []
    event = types.SimpleNamespace(wait=waits_s.append)
    monkeypatch.setattr(errors.threading, "Event", lambda: event)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("RANK", rank)
    errors.end_scripts_without_traceback()
    refusal = sf.ConfigError("no")

    with pytest.raises(SystemExit) as ended:
        sys.excepthook(sf.ConfigError, refusal, None)
    assert ended.value.code == 2
    assert waits_s == wait_s
    assert capsys.readouterr().err == message

    assert main._speaks_of(refusal, None)  # so does the command line
    assert waits_s == [*wait_s, *wait_s]


class Broken:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, sample: int) -> Any:
        return {}["my own bug"]


def build_with_broken_data() -> None:
    build(train_data=Broken())


def build_with_odd_batches() -> None:
    build(batch_size=7)


def test_an_error_in_the_users_own_code_keeps_its_frames_on_several_ranks(ranks: Ranks) -> None:
    first, second = ranks.outcomes(ranks.start(2, build_with_broken_data))

    assert first.status == second.status == 1
    assert "KeyError: 'my own bug'" in first.text
    assert "in __getitem__" in first.text
    assert second.text == ""


def test_a_refusal_on_several_ranks_is_its_sentence_and_the_scripts_own_line(ranks: Ranks) -> None:
    first, second = ranks.outcomes(ranks.start(2, build_with_odd_batches))

    assert first.status == second.status == 2
    lines = first.text.splitlines()
    assert "  [batch-size-not-divisible]" in lines
    assert re.fullmatch(rf"  {re.escape(__file__)}, line \d+", lines[-1])
    assert "Traceback" not in first.text
    assert second.text == ""


def test_a_hook_that_was_there_is_left_in_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have one, by which one of them speaks for all; a user may have one too."""
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, problem, trace: seen.append(problem))
    errors.end_scripts_without_traceback()
    problems = [sf.ConfigError("no"), ValueError("x")]

    for problem in problems:
        sys.excepthook(type(problem), problem, None)

    assert seen == problems


# --- notebooks ------------------------------------------------------------------------------------


def train_and_interrupt(run_dir: Path) -> None:
    """Train, and press Ctrl-C in step 4."""
    with small_runs.build(run_dir, length="7 steps") as run:
        for step in run:
            if step.index == 4:
                os.kill(os.getpid(), signal.SIGINT)


def be_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = types.SimpleNamespace(
        custom_exceptions=(), CustomTB=None, set_custom_exc=lambda *_: None
    )
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)


def be_at_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)


@pytest.mark.parametrize("be_where_a_person_types", [be_in_a_notebook, be_at_a_prompt])
def test_an_interrupt_where_a_person_types_is_a_keyboard_interrupt(
    be_where_a_person_types: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be_where_a_person_types(monkeypatch)

    with pytest.raises(KeyboardInterrupt):
        train_and_interrupt(tmp_path / "run")

    assert sf.checkpoint.Store(tmp_path / "run" / "checkpoints").newest_step() == 5
    run = small_runs.build(tmp_path / "run", length="7 steps")
    run.train()  # the same process goes on
    assert run.state.step == 7


def test_an_interrupt_of_a_script_still_leaves_with_130(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        train_and_interrupt(tmp_path / "run")
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
    hanging_steps = []
    for step in range(4):
        (micro_batch,) = feed.micro_batches(step)
        if 9 in micro_batch.sample_ids.tolist():
            hanging_steps.append(step)
    feed.close()

    (warning,) = warnings
    first = hanging_steps[0]
    assert f"loader worker {first % 2} (process " in warning
    assert f"of step {first}" in warning
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

    workers_and_seconds = []
    for text in warnings:
        match = re.search(r"worker (\d) .* for (\d+) s$", text.splitlines()[0])
        if match:
            workers_and_seconds.append((int(match[1]), int(match[2])))
    assert workers_and_seconds == named


def test_a_worker_is_named_after_twenty_seconds() -> None:
    assert reading._WAIT_S * reading._HANGS_AFTER == 20
    # as often as torch itself looks whether a worker has died
    assert np.isclose(reading._WAIT_S, 5.0)
