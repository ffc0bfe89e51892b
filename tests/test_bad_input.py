"""What users get wrong: each mistake is one clear error of at most five lines, with its exit
status, and nothing is lost.

Library calls go through the command line too (`surefoot train FILE.py:build`), in this process but
for two real commands. Data sets that cannot be trained on are in data/test_dataset_checks.py, texts
in data/text/test_files.py, a damaged or full store in checkpoint/test_store.py and
identities/test_law_09_durability.py, settings in files in test_config.py. 9 seconds.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import surefoot as sf
from run_files import files_below, records_of, same_tensors
from small_runs import Net, build, loss
from stated import numbers_in
from surefoot.checkpoint import Store
from surefoot.checkpoint.filesystem import Disk
from surefoot.cli.main import main
from waiting import HANG_S

Refuse = Callable[..., str]
COMMAND = [sys.executable, "-c", "from surefoot.cli.main import main; main()"]
GPT = [
    "train",
    "gpt",
    "--length=3 steps",
    "--model.width=16",
    "--model.context=8",
    "--model.layers=1",
]


@pytest.fixture
def refuse_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Refuse:
    """What `surefoot ...` says of a mistake: short, without traceback, and with the exit status
    expected.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["surefoot"])

    def run_and_fail(*arguments: str, status: int) -> str:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        error = capsys.readouterr().err
        lines = error.splitlines()
        without_codes = [line for line in lines if not re.fullmatch(r"  \[[a-z-]+\]", line)]
        assert end.value.code == status, error
        assert error.startswith("error: ")
        assert len(without_codes) <= 5, error
        assert "Traceback" not in error
        return error

    return run_and_fail


@pytest.fixture
def refuse_run(refuse_command: Refuse, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """The same for a run that a program of the user's own builds, with some argument of
    `small_runs.build` changed.
    """
    from surefoot.program import Program

    def train_and_fail(
        status: int,
        run_dir: str | None = None,
        *,
        late: Callable[[], dict[str, Any]] = dict,
        **changes: Any,
    ) -> str:
        """`late` makes changes that may be refused where they are made."""

        def build_run() -> sf.Run:
            return build(**{"run_dir": run_dir, **changes, **late()})

        program = Program(build_run, None, {"kind": "file"}, {})
        monkeypatch.setattr("surefoot.cli.processes.find_program", lambda name: program)
        return refuse_command("train", "mine.py", status=status)

    return train_and_fail


# --- typed wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian", "gpt"], "[subcommand-unknown]"),
        (["evalute"], "did you mean evaluate?"),
        (["train"], "[argument-missing]"),
        (["train", "gtp"], "did you mean gpt?"),
        (["train", "missing.py:build"], "[program-missing]"),
        ([*GPT, "--lenght", "3"], "try: --length\n  [setting-unknown]"),
        (
            [*GPT, "--optimizer.learning-rate", "3"],
            "try: --optimizer.lr\n  [setting-unknown]",
        ),
        ([*GPT, "--epochs", "3"], "try: --length '3 epochs'\n  [setting-unknown]"),
        (
            [*GPT, "--max-steps=150"],
            "try: --length '150 steps'\n  [setting-unknown]",
        ),
        ([*GPT, "--epochs", "many"], "try: --length\n  [setting-unknown]"),
        ([*GPT, "--length", "150"], "[duration-without-unit]"),
        (["--lenght"], "[subcommand-unknown]"),
        ([*GPT, "--lr=3"], "try: --optimizer.lr\n  [setting-unknown]"),
        ([*GPT, "--batch-size", "many"], "[setting-out-of-range]"),
        ([*GPT, "--optimizer.lr", "fast"], "[flags-not-understood]"),
        ([*GPT, "--optimizer.lr", "-1"], "[setting-out-of-range]"),
        ([*GPT, "--optimizer.name", "adma"], "not one of adamw, "),
        ([*GPT, "--optimizer.name", "schedulefree"], "Did you mean schedule_free?"),
        ([*GPT, "--optimizer.name", "sgdd"], "Did you mean sgd?"),
        ([*GPT, "--seed"], "[flags-not-understood]"),
        ([*GPT, "again"], "[flags-not-understood]"),
        ([*GPT, "--length", "3"], "[duration-without-unit]"),
        ([*GPT, "--schedule.warmup", "1000 steps"], "does not fit in a run of 3 steps"),
        (
            [*GPT, "--batch-size", "32", "--micro-batch-size", "5"],
            "[micro-batch-size-not-divisor]",
        ),
        ([*GPT, "--batch-size", "0"], "[setting-out-of-range]"),
        ([*GPT, "--batch-size", "-4"], "[setting-out-of-range]"),
        ([*GPT, "--clip", "1.0"], "[clip-not-a-limit]"),
        ([*GPT, "--keep-last", "0"], "[setting-out-of-range]"),
        ([*GPT, "--ema", "2"], "[setting-out-of-range]"),
        ([*GPT, "--device", "cadu"], "cadu"),
        ([*GPT, "--model.heads", "3"], "heads"),
        ([*GPT, "--config", "missing.toml"], "[path-not-usable]"),
        (["resume"], "[argument-missing]"),
        (["resume", "nowhere"], "[run-missing]"),
        (["evaluate", "latest"], "[run-missing]"),
        (["diagnose", "."], "[run-missing]"),
    ],
)
def test_a_mistake_on_the_command_line_is_told_shortly_and_nothing_is_written(
    arguments: list[str], says: str, refuse_command: Refuse, tmp_path: Path
) -> None:
    error = refuse_command(*arguments, status=2)

    assert says in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe\x00"])
def test_a_text_that_is_missing_empty_or_none_is_a_data_error(
    content: bytes | None, refuse_command: Refuse, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)

    error = refuse_command(*GPT, "--data.path", "text.txt", status=3)

    assert "text.txt" in error
    assert not (tmp_path / "runs").exists()


def test_a_text_shorter_than_the_context_is_a_data_error(
    refuse_command: Refuse, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("short")
    refuse_command(*GPT, "--data.path", "text.txt", status=3)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["train", "gpt", "--lenght", "3"], 2), ([*GPT, "--data.path", "nowhere"], 3)],
)
def test_the_installed_command_gives_status_and_message_too(
    arguments: list[str], status: int, tmp_path: Path
) -> None:
    process = subprocess.run(
        [*COMMAND, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert process.returncode == status, process.stderr
    assert len(process.stderr.splitlines()) <= 5
    assert process.stderr.startswith("error: ")


# --- a loss, a model, data that cannot be trained with --------------------------------------------


def loss_of_each_sample(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def detached_loss(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch).detach()


def loss_as_number(model: nn.Module, batch: Any) -> float:
    return loss(model, batch).item()


def loss_in_a_list(model: nn.Module, batch: Any) -> Any:
    return [loss(model, batch)]


def no_loss(model: nn.Module, batch: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("loss", "code"),
    [
        (loss_of_each_sample, "[loss-not-a-scalar]"),
        (detached_loss, "[loss-without-gradient]"),
        (loss_as_number, "[loss-not-a-tensor]"),
        (loss_in_a_list, "[loss-not-a-tensor]"),
    ],
)
def test_a_loss_that_is_no_loss_is_refused_and_step_0_stands(
    loss: Any, code: str, refuse_run: Refuse, tmp_path: Path
) -> None:
    error = refuse_run(2, run_dir="run", loss=loss)

    assert code in error
    assert Store(tmp_path / "run" / "checkpoints").steps() == [0]


def test_a_loss_that_returns_nothing_is_refused(refuse_run: Refuse) -> None:
    assert "[every-sample-left-out]" in refuse_run(2, run_dir="run", loss=no_loss)


def test_a_device_of_no_name_of_torch_says_which_to_write(refuse_run: Refuse) -> None:
    error = refuse_run(2, device="gpu")
    assert "[device-unusable]" in error
    assert 'device="cuda"' in error  # the program takes no setting as a flag
    assert "vulkan" not in error


@pytest.mark.parametrize(
    ("length", "remedy"), [("1 epochs", 'length="15 epochs"'), ("6 steps", 'length="90 steps"')]
)
def test_a_warm_up_that_does_not_fit_suggests_a_length_in_the_users_unit(
    length: str, remedy: str, refuse_run: Refuse
) -> None:
    error = refuse_run(
        2,
        train_data=data(),
        batch_size=4,
        splits=None,
        early_stopping=None,
        length=length,
        schedule=sf.schedules.cosine(warmup="9 steps"),
    )
    assert remedy in error
    assert "9 steps (9 steps)" not in error


def frozen_model() -> nn.Module:
    return Net().requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "says"), [(frozen_model, "no trainable parameter"), (lambda: 3, "is a int")]
)
def test_a_model_that_cannot_be_trained_is_refused(
    model: Any, says: str, refuse_run: Refuse, tmp_path: Path
) -> None:
    error = refuse_run(2, run_dir="run", model=model)

    assert says in error
    assert not (tmp_path / "run").exists()


def data(samples: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 8, generator=generator)
    labels = torch.randint(3, (samples,), generator=generator)
    return inputs, labels


PLAIN: dict[str, Any] = {
    "length": "6 steps",
    "schedule": None,
    "early_stopping": None,
    "splits": None,
}


@pytest.mark.parametrize("wrong", [3, -1])
def test_a_target_out_of_range_names_sample_and_step(
    wrong: int, refuse_run: Refuse, tmp_path: Path
) -> None:
    inputs, labels = data()
    labels[17] = wrong
    step = step_of_sample(17, inputs, labels)

    error = refuse_run(3, run_dir="run", train_data=(inputs, labels), **PLAIN)

    assert "[target-out-of-range]" in error
    assert numbers_in(error)[:3] == [wrong, step, 17]
    assert 0 in Store(tmp_path / "run" / "checkpoints").steps()
    assert list((tmp_path / "run" / "crash").iterdir())


def test_a_target_out_of_range_of_many_classes_is_named_too(refuse_run: Refuse) -> None:
    """Above 16,384 classes the loss takes its logits in pieces, and torch words it otherwise."""
    inputs, labels = data()
    labels[17] = 20_000

    def loss_in_pieces(model: nn.Module, batch: Any) -> sf.Mean:
        return sf.losses.linear_cross_entropy(batch[0], model[0].weight, batch[1])  # type: ignore[index,arg-type]

    error = refuse_run(
        3,
        model=lambda: nn.Sequential(nn.Linear(8, 20_000)),
        loss=loss_in_pieces,
        train_data=(inputs, labels),
        **PLAIN,
    )

    assert "[target-out-of-range]" in error
    target, _step, sample, *_ = numbers_in(error)
    assert target == 20_000
    assert sample == 17


def test_an_index_of_the_users_own_that_is_out_of_range_is_no_label(tmp_path: Path) -> None:
    inputs, labels = data()

    def loss_with_index(model: nn.Module, batch: Any) -> Tensor:
        weights = torch.ones(2)
        return loss(model, batch) * weights[2]

    run = build(tmp_path / "run", loss=loss_with_index, train_data=(inputs, labels), **PLAIN)
    with pytest.raises(IndexError, match="index 2 is out of bounds"):
        run.train()


def step_of_sample(sample: int, inputs: Tensor, labels: Tensor) -> int:
    """The first step that reads a sample, where all labels are in range."""
    with build(None, train_data=(inputs, labels.clamp(0, 2)), **PLAIN) as run:
        for step in run:
            for micro_batch in step.micro_batches:
                if sample in micro_batch.sample_ids.tolist():
                    return step.index
    raise AssertionError(f"no step reads sample {sample}")


def test_nan_in_the_data_names_the_sample_and_keeps_the_weights_of_the_last_good_step(
    refuse_run: Refuse, tmp_path: Path
) -> None:
    inputs, labels = data(8)  # one batch: from some pass on, every step would hold it
    poisoned = inputs.clone()
    poisoned[5, 2] = float("nan")
    changes = PLAIN | {"length": "30 steps", "log_every": "4 steps"}
    untrained = build(None, train_data=(inputs, labels), **changes).state.models["model"]

    error = refuse_run(5, run_dir="run", train_data=(poisoned, labels), **changes)

    assert "sample 5" in error
    assert 0 in numbers_in(error)  # the step whose weights are saved
    store = Store(tmp_path / "run" / "checkpoints")
    assert store.steps()
    for step in store.steps():
        assert same_tensors(store.at(step).tensors("model"), untrained.state_dict()), step


def test_a_single_nan_sample_is_skipped_shown_and_the_run_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    inputs, labels = data()
    inputs[5, 2] = float("nan")

    build(None, train_data=(inputs, labels), console=True, log_every="3 steps", **PLAIN).train()

    assert capsys.readouterr().out.count("skipped=") == 2  # each pass of three steps holds it once


class EmptyStream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("source", "code"),
    [(iter([1]), "[stream-source-read-once]"), (EmptyStream(), "[stream-empty]")],
    ids=["read once", "no rows"],
)
def test_a_source_that_can_be_read_only_once_or_has_no_rows_is_a_data_error(
    source: Any, code: str, refuse_run: Refuse, tmp_path: Path
) -> None:
    error = refuse_run(3, run_dir="run", train_data=source, **PLAIN)

    assert code in error
    assert not (tmp_path / "run").exists()


def test_an_empty_data_set_is_a_data_error(refuse_run: Refuse, tmp_path: Path) -> None:
    error = refuse_run(3, run_dir="run", train_data=data(0), **PLAIN)

    assert "empty" in error
    assert not (tmp_path / "run").exists()


# --- somebody else's checkpoint -------------------------------------------------------------------


def wider_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.25), nn.Linear(32, 3)
    )


def test_a_checkpoint_of_another_model_is_refused_naming_a_tensor_and_left_alone(
    refuse_run: Refuse, tmp_path: Path
) -> None:
    build("run", length="4 steps", schedule=None).train()
    before = files_below(tmp_path / "run" / "checkpoints")

    error = refuse_run(4, run_dir="run", length="4 steps", schedule=None, model=wider_model)

    assert "0.weight" in error
    assert "16" in error
    assert "32" in error
    assert files_below(tmp_path / "run" / "checkpoints") == before


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("other.safetensors", "[no-initial-weight-fits]"),
        ("pickle.pt", "[weights-unreadable]"),
        ("nowhere", "[initial-weights-missing]"),
    ],
)
def test_initial_weights_of_nothing_that_fits_are_refused(
    file: str, code: str, refuse_run: Refuse, tmp_path: Path
) -> None:
    save_file({"other": torch.zeros(3)}, tmp_path / "other.safetensors")
    (tmp_path / "pickle.pt").write_bytes(b"\x80\x02.")

    error = refuse_run(4, run_dir="run", init_from=file)

    assert code in error
    assert Store(tmp_path / "run" / "checkpoints").steps() == []


# --- no place to write ----------------------------------------------------------------------------


class Failing:
    """A disk on which everything that changes it fails from the n-th such operation on, `times`
    times.
    """

    def __init__(self, error: int, *, after: int = 0, times: int = 1 << 30) -> None:
        self.error = error
        self.left = after
        self.times = times
        self.disk = Disk()

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.disk, name)
        if name not in ("create", "append", "flush", "make_directory"):
            return operation

        def fail_when_due(*arguments: Any) -> Any:
            self.left -= 1
            if self.left < 0 and self.times > 0:
                self.times -= 1
                raise OSError(self.error, os.strerror(self.error))
            return operation(*arguments)

        return fail_when_due


def test_an_output_directory_below_a_file_is_refused(refuse_run: Refuse, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    assert "[run-directory-not-writable]" in refuse_run(2, run_dir="file/run")
    assert (tmp_path / "file").read_text() == "kept"


def test_an_output_that_is_a_file_is_refused(refuse_run: Refuse, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    assert "[run-directory-not-writable]" in refuse_run(2, run_dir="file")
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_nothing_ends_the_run_before_its_first_step(
    error: int, refuse_run: Refuse
) -> None:
    passes = 0

    def counted_loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal passes
        if torch.is_grad_enabled():  # which they are not in the pass of the start
            passes += 1
        return loss(model, batch)

    text = refuse_run(4, run_dir="run", disk=Failing(error), loss=counted_loss)

    assert os.strerror(error) in text
    assert passes == 0


def operations_of_the_first_save(tmp_path: Path) -> int:
    counting = Failing(errno.ENOSPC, after=1 << 30)
    with build(str(tmp_path / "counted"), disk=counting) as run:
        done = (1 << 30) - counting.left
        run.stop()
    return done


def test_a_disk_that_is_full_for_a_while_is_told_loudly_and_the_run_ends_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = Failing(errno.ENOSPC, after=operations_of_the_first_save(tmp_path), times=2)

    build(str(tmp_path / "run"), disk=disk, console=True, length="12 steps").train()

    assert capsys.readouterr().out.count("NOT SAVED") == 2
    store = Store(tmp_path / "run" / "checkpoints")
    assert store.newest_intact() is not None
    assert store.steps()[0] == 0
    assert store.steps()[-1] == 12


def test_a_disk_that_stays_full_never_ends_with_success_and_the_good_checkpoint_stands(
    refuse_run: Refuse, tmp_path: Path
) -> None:
    disk = Failing(errno.ENOSPC, after=operations_of_the_first_save(tmp_path))

    error = refuse_run(4, run_dir="run", disk=disk, length="12 steps")

    assert "step 12" in error
    assert "step-00000000" in error
    newest = Store(tmp_path / "run" / "checkpoints").newest_intact()
    assert newest is not None
    checkpoint, damaged = newest
    assert checkpoint.step == 0
    assert damaged == []


@pytest.mark.parametrize(
    "name",
    [
        "config.toml",
        "../x",
        "checkpoints",
        "a/b",
        ".hidden",
        "",
        "Config.toml",
        "a\\b",
        "a\0b",
        "a\nb",
    ],
)
def test_a_file_of_a_recipe_cannot_take_the_place_of_ours(name: str, refuse_run: Refuse) -> None:
    assert "[extra-file-name]" in refuse_run(2, extra_files={name: "text"})


class Unsized(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter([1])


def named_loss(outputs: Any, targets: Any) -> sf.Mean:
    return sf.Mean(0.0, 1)


named_loss.__name__ = "loss"


def with_split(name: str = "val", **settings: Any) -> dict[str, Any]:
    return {"splits": {name: sf.Split(**{"data": data(), **settings})}}


def with_stopping(**settings: Any) -> dict[str, Any]:
    return {"early_stopping": sf.EarlyStopping("min val/loss", **{"patience": 1, **settings})}


@pytest.mark.parametrize(
    ("says", "changes"),
    [
        ("[split-not-wrapped]", lambda: {"splits": {"val": data()}}),
        ("[split-name-invalid]", lambda: with_split("a/b")),
        ("[setting-out-of-range]", lambda: with_split(batch_size=0)),
        ("[setting-out-of-range]", lambda: with_split(batch_size="8")),
        (
            "[metric-name-twice]",
            lambda: with_split(metrics=[sf.metrics.accuracy, sf.metrics.accuracy]),
        ),
        ("[metric-name-twice]", lambda: with_split(metrics=named_loss)),
        ("[not-a-metric]", lambda: with_split(metrics="accuracy")),
        ("[not-a-metric]", lambda: with_split(metrics=sf.metrics.ClassificationReport)),
        ("[not-a-metric]", lambda: with_split(metrics=0.5)),
        ("[setting-out-of-range]", lambda: with_stopping(patience=0)),
        ("[setting-out-of-range]", lambda: with_stopping(min_delta=float("nan"))),
        ("[schedule-of-another-form]", lambda: {"schedule": "cosine"}),
        ("batch_size = 64.0", lambda: {"batch_size": 64.0}),
        (
            "[optimizer-instance-misfit]",
            lambda: {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])},
        ),
        ("seed = -1", lambda: {"seed": -1}),
        ("seed = 18446744073709551616", lambda: {"seed": 1 << 64}),
        ("a lazy module", lambda: {"model": lambda: nn.LazyLinear(3)}),
        ("[path-empty]", lambda: {"run_dir": ""}),
    ],
)
def test_what_a_caller_mistakes_is_refused_before_anything_is_written(
    says: str, changes: Callable[[], dict[str, Any]], refuse_run: Refuse, tmp_path: Path
) -> None:
    error = refuse_run(2, "run", late=lambda: {**PLAIN, "train_data": data(), **changes()})

    assert says in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "split_data"),
    [("[data-set-empty]", data(0)), ("[split-stream-without-end]", Unsized())],
    ids=["empty", "without an end"],
)
def test_a_split_that_cannot_be_scored_is_refused_before_anything_is_written(
    code: str, split_data: Any, refuse_run: Refuse, tmp_path: Path
) -> None:
    error = refuse_run(3, "run", late=lambda: {**PLAIN, **with_split(data=split_data)})

    assert code in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags",
    [["--sample-tokens", "-5"], ["--cloze-questions", "-1"], ["--early-stopping.patience", "0"]],
)
def test_numbers_below_nothing_are_refused_before_the_training(
    flags: list[str], refuse_command: Refuse, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    refuse_command(*GPT, "--data.path", "text.txt", "--run-dir", "run", *flags, status=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--optimizer.lr", "abc"], "'abc' is not a number"),
        (["--keep-last", "x"], "'x' is not a whole number"),
        (["--run-dir"], "needs a value"),
        (["--checkpont", "best"], "[setting-unknown]"),
        (["--config", "nope.toml"], "[path-not-usable]"),
    ],
)
def test_a_mistyped_flag_is_told_in_words(
    flags: list[str], says: str, refuse_command: Refuse
) -> None:
    error = refuse_command(*GPT, *flags, status=2)
    assert says in error
    assert "int()" not in error


def test_each_of_several_problems_is_marked_as_one(refuse_command: Refuse) -> None:
    error = refuse_command(*GPT, "--seed", "-1", "--workers", "-1", status=2)
    problems = [line for line in error.splitlines() if not line.startswith(" ")]
    assert [line[:6] for line in problems] == ["error:", "error:"]


def test_a_small_text_is_trained_on_without_questions(tmp_path: Path) -> None:
    """There is too little of it to hold out for them, and nobody asked for any."""
    text = tmp_path / "text.txt"
    run_dir = tmp_path / "run"
    text.write_text("to be or not to be, that is the question\n" * 20)

    main([*GPT, "--model.context=16", f"--data.path={text}", f"--run-dir={run_dir}"])

    *_, scores = records_of(run_dir, "eval")
    assert "val/loss" in scores
    assert "cloze/accuracy" not in scores
