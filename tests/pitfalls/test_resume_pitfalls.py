"""The lines of PITFALLS.md under "Resume" and "Checkpoints" that one process can show; each test
names its line.

Tested elsewhere:
* epoch starts again, order replayed, random state, step saved before it is incremented, a
  checkpoint inside an accumulation window, scaler, average, SIGTERM and Ctrl-C:
  identities/test_law_04_resume.py
* batches read and thrown away: data/test_order.py (step one million costs what step 0 costs)
* kills, disk full, fsync, flipped byte, truncated newest: identities/test_law_09_durability.py,
  checkpoint/test_store.py
* a directory with a number for a name: checkpoint/test_store.py; pickle:
  identities/test_law_10_no_code_in_data.py
* "success" while nothing was written, a checkpoint of another model: test_bad_input.py
* one curve on the command line, extending a run: cli/test_train.py
Not yet: another world size, verify by checksums on request.

3 seconds.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import small_runs
import surefoot as sf
from refused import refused, refused_change
from run_files import (
    files_below,
    newest_checkpoint,
    newest_tensor_hashes,
    newest_tensors,
    records_of,
    same_tensors,
)
from small_runs import CLASSES, FEATURES, SAMPLES, Augmented, Net, train
from stated import lines_naming, numbers_in
from surefoot.checkpoint import Store

STEPS = 16  # in the middle of the third pass


def build(run_dir: str | Path | None, **changes: Any) -> sf.Run:
    return small_runs.build(run_dir, **{"length": f"{STEPS} steps", **changes})


def whole_passes(run_dir: Path, **changes: Any) -> sf.Run:
    """Four steps are one pass exactly."""
    return build(
        run_dir,
        batch_size=13,
        micro_batch_size=13,
        length="3 epochs",
        evaluate_every="4 steps",
        **changes,
    )


def test_resuming_exactly_at_an_epochs_end_trains_what_is_left(tmp_path: Path) -> None:
    whole_passes(tmp_path / "whole").train()
    whole_passes(tmp_path / "cut", stop_after="1 epochs").train()

    with whole_passes(tmp_path / "cut") as run:
        steps = [step.index for step in run]

    assert steps == list(range(4, 12))
    assert same_tensors(newest_tensors(tmp_path / "cut"), newest_tensors(tmp_path / "whole"))


@pytest.mark.parametrize("stop", [3, 7])  # 6.5 steps are one pass
def test_after_a_resume_no_sample_of_the_pass_is_repeated_or_missed(
    stop: int, tmp_path: Path
) -> None:
    samples: list[int] = []
    for last in (f"{stop} steps", None):
        with build(tmp_path / "run", length="2 epochs", stop_after=last) as run:
            for step in run:
                for micro_batch in step.micro_batches:
                    samples += micro_batch.sample_ids.tolist()

    first_pass = samples[:SAMPLES]
    second_pass = samples[SAMPLES:]
    assert sorted(first_pass) == list(range(SAMPLES))
    assert sorted(second_pass) == list(range(SAMPLES))


def test_patience_and_best_score_are_remembered(tmp_path: Path) -> None:
    """The score cannot improve on its first value, so the run ends at the sixth evaluation, however
    often it is cut.
    """

    def worse(outputs: Any, targets: Any) -> sf.Mean:
        return sf.Mean(torch.tensor(1.0), 1)

    data = Augmented()
    settings: dict[str, Any] = {
        "splits": {"val": sf.Split((data.inputs, data.labels), metrics=worse)},
        "evaluate_every": "2 steps",
        "early_stopping": sf.EarlyStopping("min val/worse", patience=5),
    }

    for last in ("5 steps", "9 steps", None):
        run = build(tmp_path / "run", stop_after=last, **settings)
        run.train()

    (rule,) = run.parts.run_state.stopping
    assert run.state.step == 12
    assert rule.step == 2
    assert rule.value == 1.0


def test_the_average_is_remembered(tmp_path: Path) -> None:
    build(tmp_path / "whole", length="9 steps").train()
    build(tmp_path / "cut", length="9 steps", stop_after="5 steps").train()
    build(tmp_path / "cut", length="9 steps").train()

    average = newest_tensors(tmp_path / "whole", "ema")
    assert same_tensors(newest_tensors(tmp_path / "cut", "ema"), average)
    assert not same_tensors(newest_tensors(tmp_path / "whole"), average)


def another_data_set() -> Augmented:
    data = Augmented()
    data.inputs[3, 3] += 1
    return data


def tensors(data: Augmented) -> Any:
    return data.inputs, data.labels


def chosen(indices: range) -> Any:
    return torch.utils.data.Subset(
        torch.utils.data.TensorDataset(*tensors(Augmented())), list(indices)
    )


def with_dropout(p: float) -> Callable[[], torch.nn.Module]:
    def build_net() -> torch.nn.Module:
        net = Net()
        net[3] = torch.nn.Dropout(p)
        return net

    return build_net


def of_groups(lr: float, momentum: float = 0.9) -> Any:
    """An optimizer whose defaults say nothing of its groups' settings."""

    def build_optimizer(groups: Any) -> torch.optim.Optimizer:
        with_settings = [{**group, "lr": lr, "momentum": momentum} for group in groups]
        return torch.optim.SGD(with_settings, lr=0.1)

    return build_optimizer


def frozen_statistics(net: Net) -> Net:
    net[1].eval()
    return net


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run as `build` makes it."""
    run_dir = tmp_path_factory.mktemp("four-steps") / "run"
    build(run_dir, length="4 steps").train()
    return run_dir


@pytest.fixture
def run_dir(four_steps: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return shutil.copytree(four_steps, tmp_path / "run")


def refuse_to_resume(run_dir: Path, **changes: Any) -> sf.SurefootError:
    """The short error of a run that goes on with other settings; no checkpoint is touched."""
    files = files_below(run_dir / "checkpoints")
    with pytest.raises(sf.CheckpointError) as caught:
        build(run_dir, length="4 steps", **changes).train()
    assert caught.value.places[0].endswith(" step-00000004")
    assert len(str(caught.value).splitlines()) <= 5
    assert files_below(run_dir / "checkpoints") == files
    return caught.value


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 12}, "batch_size was 8, now 12"),
        ({"micro_batch_size": 2}, "micro_batch_size was 4, now 2"),
        ({"optimizer": sf.optim.sgd(1e-2)}, "optimizer.name was 'adamw', now 'sgd'"),
        (
            {"optimizer": sf.optim.adamw(lr=2e-2, weight_decay=0.05)},
            "optimizer.lr was 0.01, now 0.02",
        ),
        ({"schedule": sf.schedules.constant(3)}, "schedule.shape was 'cosine', now 'constant'"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"ema": None}, "ema was 0.9, now None"),
    ],
)
def test_a_changed_setting_is_refused_naming_both_values(
    changes: dict[str, Any], named: str, run_dir: Path
) -> None:
    """Batch size changed between: silently different data."""
    error = refuse_to_resume(run_dir, **changes)

    assert error.code == "settings-changed"
    assert error.fields["changes"] == [named]


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({"clip": "norm 1.0"}, {"clip": "off"}, "clip was 'norm 1.0', now 'off'"),
        ({"optimizer": of_groups(1e-3)}, {"optimizer": of_groups(1.0)}, "optimizer.groups was"),
        (
            {"optimizer": of_groups(1e-3)},
            {"optimizer": of_groups(1e-3, momentum=0.5)},
            "optimizer.groups was",
        ),
        ({"identity": {"a": {"b": 1}}}, {"identity": {"a": {"b": 2}}}, "identity.a.b was 1, now 2"),
    ],
    ids=["clip", "rate of a group", "momentum of a group", "identity"],
)
def test_a_changed_setting_that_usually_is_absent_is_refused_naming_both_values(
    before: dict[str, Any], after: dict[str, Any], named: str, tmp_path: Path
) -> None:
    build(tmp_path / "run", length="4 steps", **before).train()

    error = refuse_to_resume(tmp_path / "run", **after)

    assert error.code == "settings-changed"
    (change,) = error.fields["changes"]
    assert change.startswith(named)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (tensors(Augmented()), tensors(another_data_set()), "data.sha256 was"),
        (Augmented(), tensors(Augmented()), "data.type was 'Augmented', now 'tuple'"),
        (chosen(range(32)), chosen(range(20, 52)), "data.indices was"),
    ],
    ids=["values", "type", "indices"],
)
def test_other_data_are_refused_naming_what_tells_them_apart(
    before: Any, after: Any, named: str, tmp_path: Path
) -> None:
    build(tmp_path / "run", length="4 steps", train_data=before).train()

    error = refuse_to_resume(tmp_path / "run", train_data=after)

    assert error.code == "data-changed"
    assert error.fields["changes"][0].startswith(named)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            with_dropout(0.5),
            "the model had (3): Dropout(p=0.25, inplace=False) and now has (3): Dropout(p=0.5",
        ),
        (lambda: frozen_statistics(Net()), "now has 1 in evaluation mode"),
    ],
    ids=["dropout", "evaluation mode"],
)
def test_another_model_with_the_same_tensors_is_refused_naming_the_module(
    model: Callable[[], nn.Module], says: str, run_dir: Path
) -> None:
    error = refuse_to_resume(run_dir, model=model)

    assert error.code == "model-changed"
    assert says in str(error)


def test_a_finished_run_started_again_says_so_and_changes_nothing(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resuming trains zero steps with exit 0: only where there is nothing left, and then it is
    said.
    """
    files = files_below(run_dir / "checkpoints")

    build(run_dir, length="4 steps", console=True).train()

    (line,) = lines_naming(capsys.readouterr().out, "finished", " run_dir, ")
    before_the_remedy = line.partition(" run_dir, ")[0]
    assert numbers_in(before_the_remedy) == [4]
    assert files_below(run_dir / "checkpoints") == files


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_prefix_of_ddp_or_compile_is_accepted_and_named(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = nn.Sequential(*Net().children()).state_dict()
    for value in weights.values():
        value.add_(1)
    file = tmp_path / "weights.safetensors"
    save_file({prefix + name: value for name, value in weights.items()}, file)

    with build(None, init_from=file, console=True) as run:
        assert same_tensors(run.state.models["model"].state_dict(), weights)

    output = capsys.readouterr().out
    (renamed,) = lines_naming(output, "renamed ")
    assert numbers_in(renamed)[0] == 9
    assert f"{prefix}0.weight -> 0.weight" in output


def test_a_stale_checkpoint_in_the_working_directory_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "other", length="4 steps").train()
    weights = (newest_checkpoint(tmp_path / "other") / "model.safetensors").read_bytes()
    for name in ("checkpoint.pt", "model.safetensors", "last.ckpt"):
        Path(name).write_bytes(weights)
    Path("checkpoints").mkdir()

    with build(tmp_path / "run", length="4 steps") as run, build(None) as fresh:
        assert run.state.step == 0
        assert same_tensors(
            run.state.models["model"].state_dict(), fresh.state.models["model"].state_dict()
        )


def checkpoint_steps(run_dir: Path) -> list[int]:
    return Store(run_dir / "checkpoints").steps()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param(
            {"save_every": "1 steps", "keep_last": 2},
            [0, 11, 12],
            id="recovery points without a score",
        ),
        pytest.param(
            {"save_every": "1 steps", "keep_last": 1, "keep_every": "5 steps"},
            [0, 5, 10, 12],
            id="keep_every stays",
        ),
        pytest.param(
            {"save_every": "1000 steps", "keep_every": "5 steps"},
            [0, 5, 10, 12],
            id="keep_every saves where nothing else does",
        ),
    ],
)
def test_a_run_keeps_the_checkpoints_that_its_settings_ask_for_and_no_others(
    settings: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    """Nothing saved between two improvements; every epoch kept for ever."""
    build(tmp_path / "run", length="12 steps", splits=None, early_stopping=None, **settings).train()

    assert checkpoint_steps(tmp_path / "run") == expected


def test_another_score_to_watch_begins_anew_and_the_old_best_says_nothing_of_it(
    tmp_path: Path,
) -> None:
    changes: dict[str, Any] = {
        "length": "12 steps",
        "evaluate_every": "2 steps",
        "early_stopping": None,
    }
    build(tmp_path / "run", best="min val/loss", stop_after="6 steps", **changes).train()

    run = build(tmp_path / "run", best="max val/accuracy", **changes)
    run.train()

    best = run.parts.run_state.best
    assert best is not None
    assert best.step is not None
    assert best.step > 6
    evaluations = records_of(tmp_path / "run", "eval")
    scores = [record["val/accuracy"] for record in evaluations if record["step"] > 6]
    assert best.value == max(scores)


def test_averages_begin_at_the_weights_a_run_starts_from(tmp_path: Path) -> None:
    build(tmp_path / "first", length="6 steps").train()
    build(tmp_path / "second", init_from=tmp_path / "first", stop_after="1 steps").train()

    start = tmp_path / "second" / "checkpoints" / "step-00000000"
    model = load_file(start / "model.safetensors")
    average = load_file(start / "ema.safetensors")
    # the first run's averaged weights are those that were evaluated
    assert same_tensors(model, newest_tensors(tmp_path / "first", "ema"))
    assert same_tensors(average, model)


def test_averaged_weights_are_saved_with_the_statistics_of_the_live_model(tmp_path: Path) -> None:
    build(tmp_path / "run", length="7 steps", splits=None, early_stopping=None).train()

    model = newest_tensors(tmp_path / "run")
    average = newest_tensors(tmp_path / "run", "ema")
    statistics = [name for name in model if "running" in name or "tracked" in name]
    assert len(statistics) == 3
    for name in statistics:
        assert torch.equal(average[name], model[name])
    assert not torch.equal(average["0.weight"], model["0.weight"])


def test_old_checkpoints_that_resist_removal_are_named_and_the_run_ends_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / ".deleted-step-00000001" / "somebody's directory").mkdir(parents=True)

    build(tmp_path / "run", length="6 steps", save_every="2 steps", console=True).train()

    output = capsys.readouterr().out
    warnings = lines_naming(output, "warning: ")
    assert warnings
    assert lines_naming(output, "warning: ", "step-0000000", " saved, ") == warnings
    assert "NOT SAVED" not in output
    assert checkpoint_steps(tmp_path / "run")[-1] == 6


def test_the_best_stays_and_is_no_second_copy(tmp_path: Path) -> None:
    calls = 0

    def best_at_the_second(outputs: Any, targets: Any) -> sf.Mean:
        nonlocal calls
        calls += 1
        score = 0 if calls == 2 else calls
        return sf.Mean(torch.tensor(float(score)), 1)

    data = Augmented()
    split = sf.Split((data.inputs, data.labels), metrics=best_at_the_second, batch_size=SAMPLES)
    build(
        tmp_path / "run",
        length="12 steps",
        keep_last=1,
        save_every="3 steps",
        splits={"val": split},
        evaluate_every="2 steps",
        early_stopping=None,
        best="min val/best_at_the_second",
        check_state=False,  # the metric counts its calls
    ).train()

    assert checkpoint_steps(tmp_path / "run") == [0, 4, 12]
    assert len(list((tmp_path / "run").rglob("model.safetensors"))) == 3


def test_records_after_a_resume_are_one_curve_in_the_file_and_in_tensorboard(
    tmp_path: Path,
) -> None:
    """Steps twice in TensorBoard, counters reset, the old log deleted."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    passes = 0

    def dying_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal passes
        if model.training:
            passes += 1
            if passes == 2 * 7 + 1:  # in step 7, of two micro-batches a step
                raise RuntimeError("died")
        return small_runs.loss(model, batch)

    changes: dict[str, Any] = {
        "length": "10 steps",
        "log_every": "1 steps",
        "save_every": "4 steps",
    }
    with pytest.raises(RuntimeError, match="died"):
        build(tmp_path / "run", loss=dying_loss, **changes).train()

    build(tmp_path / "run", **changes).train()

    curve = records_of(tmp_path / "run", "train")
    assert [record["step"] for record in curve] == list(range(1, 11))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    shown = events.Scalars("train/loss")
    assert [event.step for event in shown] == list(range(1, 11))
    assert [event.value for event in shown] == pytest.approx([record["loss"] for record in curve])


def test_time_spent_is_counted_on_after_a_resume(tmp_path: Path) -> None:
    """Counters reset."""
    checkpoints = Store(tmp_path / "run" / "checkpoints")
    train(build(tmp_path / "run", length="8 steps", stop_after="4 steps"))
    before = checkpoints.at(4).state

    train(build(tmp_path / "run", length="8 steps"))

    after = checkpoints.at(8).state
    before_s = float(before["clock"]["total_s"]["training"])
    after_s = float(after["clock"]["total_s"]["training"])
    assert 0 < before_s < after_s
    assert after["user_state"] != before["user_state"]


def test_other_data_to_score_are_noted_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best score so far was of other data."""
    build(tmp_path / "run", stop_after="6 steps").train()
    split = {"val": sf.Split(tensors(another_data_set()), metrics=sf.metrics.accuracy)}

    run = build(tmp_path / "run", splits=split, console=True)
    run.train()

    assert run.state.step == STEPS
    assert len(lines_naming(capsys.readouterr().out, "note: ", " val ")) == 1


class Counting(torch.optim.SGD):
    """An optimizer that counts in its groups, as schedule-free ones do, and steps accordingly."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=1e-2)
        for group in self.param_groups:
            group["made"] = 0
            group["weight"] = torch.zeros(())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["made"] += 1
            group["weight"] += 0.5
            scale = group["made"] * float(group["weight"]) / 50
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"] * scale)


def test_what_an_optimizer_counts_in_its_groups_is_remembered(tmp_path: Path) -> None:
    build(tmp_path / "whole", optimizer=Counting).train()
    build(tmp_path / "run", optimizer=Counting, stop_after="7 steps").train()

    run = build(tmp_path / "run", optimizer=Counting)
    run.train()

    (group, *_) = run.state.optimizers["model"].optimizer.param_groups
    assert group["made"] == STEPS
    assert newest_tensor_hashes(tmp_path / "run") == newest_tensor_hashes(tmp_path / "whole")


def test_the_body_s_random_numbers_are_the_step_s_where_nothing_was_counted_too(
    tmp_path: Path,
) -> None:
    """Whatever came before: a process that begins with such a step draws the same."""

    def draw_in_each_step(run_dir: Path, *, stop: int | None = None) -> dict[int, float]:
        numbers: dict[int, float] = {}
        with build(run_dir, count_fn=lambda batch: 0, splits=None, early_stopping=None) as run:
            for step in run:
                numbers[step.index] = float(torch.rand(()))
                if step.index == stop:
                    break
        return numbers

    whole = draw_in_each_step(tmp_path / "whole")
    before = draw_in_each_step(tmp_path / "run", stop=5)
    after = draw_in_each_step(tmp_path / "run")

    assert before | after == whole
    assert len(set(whole.values())) == STEPS


def test_a_part_that_the_body_puts_into_evaluation_mode_is_in_it_after_a_resume(
    tmp_path: Path,
) -> None:
    """Fine-tuning freezes batch statistics from some step on."""

    def train_some(run_dir: Path, *, stop: int | None = None) -> None:
        with build(run_dir) as run:
            for step in run:
                if step.index == 4:
                    run.state.models["model"][1].eval()  # type: ignore[index,operator]
                if step.index == stop:
                    break

    train_some(tmp_path / "whole")
    train_some(tmp_path / "run", stop=6)
    train_some(tmp_path / "run")

    assert newest_tensor_hashes(tmp_path / "run") == newest_tensor_hashes(tmp_path / "whole")


def test_a_model_handed_over_in_evaluation_mode_is_trained_in_training_mode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As libraries load them: dropout would be off for the whole training."""
    run = build(None, model=lambda: Net().eval(), console=True, length="3 steps")
    run.train()

    assert all(module.training for module in run.state.models["model"].modules())
    assert len(lines_naming(capsys.readouterr().out, "note: ", " evaluation ")) == 1


def test_a_model_with_one_part_in_evaluation_mode_is_trained_so() -> None:
    run = build(None, model=lambda: frozen_statistics(Net()), length="3 steps")
    run.train()

    modes = [module.training for module in run.state.models["model"].children()]
    assert modes == [True, False, True, True, True]


def test_kept_objects_come_back_as_they_were_whatever_their_names(tmp_path: Path) -> None:
    """A slash in a name, and a name inside an object: two places, not one."""

    with build(tmp_path / "run", stop_after="3 steps") as run:
        run.register_state("a/b", torch.ones(2))
        run.register_state("a", {"b": torch.zeros(2), "b~1": (1, (2.5, torch.ones(1)))})
        for _ in run:
            pass

    with build(tmp_path / "run") as resumed:
        with_slash = resumed.register_state("a/b", torch.full((2,), 7.0))
        nested = resumed.register_state("a", {"b": torch.full((2,), 7.0), "b~1": None})

    assert with_slash.tolist() == [1.0, 1.0]
    assert nested["b"].tolist() == [0.0, 0.0]
    assert nested["b~1"] == (1, (2.5, torch.ones(1)))


def test_a_longer_run_is_scored_at_the_same_steps(tmp_path: Path) -> None:
    """Patience counts evaluations: with others, early stopping would end another run."""
    settings = {
        "schedule": sf.schedules.constant(2),
        "evaluate_every": "25%",
        "save_every": "100 steps",
    }
    build(tmp_path / "run", length="8 steps", **settings).train()

    build(tmp_path / "run", length="16 steps", **settings).train()

    evaluated_steps = [record["step"] for record in records_of(tmp_path / "run", "eval")]
    assert evaluated_steps == [2, 4, 6, 8, 10, 12, 14, 16]


def test_numbers_of_numpy_are_remembered_as_numbers(tmp_path: Path) -> None:
    """They are floats, and write themselves otherwise."""
    settings = {"optimizer": sf.optim.adamw(lr=1e-2, weight_decay=np.float64(0.05))}
    with build(tmp_path / "run", stop_after="7 steps", **settings) as run:
        run.register_state("threshold", {"value": np.float64(0.1)})
        for _ in run:
            pass

    with build(tmp_path / "run", **settings) as resumed:
        assert resumed.register_state("threshold", {"value": 0.0}) == {"value": 0.1}


def test_parameters_frozen_before_a_resume_are_trained_as_the_checkpoint_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_vectors() -> Net:
        net = Net()
        for parameter in net.parameters():
            parameter.requires_grad_(parameter.ndim > 1)
        return net

    build(tmp_path / "whole", length="4 steps").train()
    build(tmp_path / "run", length="4 steps", stop_after="2 steps").train()

    build(tmp_path / "run", length="4 steps", model=without_vectors, console=True).train()

    assert "unfrozen" in capsys.readouterr().out
    assert same_tensors(newest_tensors(tmp_path / "run"), newest_tensors(tmp_path / "whole"))


@pytest.mark.slow
def test_where_a_run_began_from_may_be_left_out_or_named_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build("first", length="4 steps").train()
    for name, again in (("a", "first"), ("b", str(tmp_path / "first")), ("c", None)):
        build(name, init_from="first", stop_after="3 steps").train()
        build(name, init_from=again).train()
    with refused_change("init_from"):
        build("a", init_from="b").train()


@pytest.mark.parametrize("settings", [{"a": Path("x")}, {"a": float("nan")}, {1: {2}}])
def test_settings_that_are_no_json_are_refused_before_anything_is_written(
    settings: Any, tmp_path: Path
) -> None:
    with refused("settings-not-json", setting="settings"):
        build(tmp_path / "run", identity=settings)
    assert list(tmp_path.iterdir()) == []


class Keyed:
    """A data set without a length, whose samples have names."""

    def __getitem__(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((FEATURES,), float(len(name))), torch.tensor(len(name) % CLASSES)


def test_a_subset_of_what_has_no_length_and_names_instead_of_numbers_is_trained_on(
    tmp_path: Path,
) -> None:
    names = ["a", "bb", "ccc", "dddd"] * 3
    settings: dict[str, Any] = {"schedule": None, "micro_batch_size": None, "batch_size": 4}

    for length in ("4 steps", "8 steps"):
        data = torch.utils.data.Subset(Keyed(), names)  # type: ignore[arg-type]
        build(tmp_path / "run", train_data=data, length=length, **settings).train()

    assert checkpoint_steps(tmp_path / "run")[-1] == 8
