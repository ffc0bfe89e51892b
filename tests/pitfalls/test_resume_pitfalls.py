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
from small_runs import CLASSES, FEATURES, SAMPLES, Augmented, Net, train
from stated import lines_naming, numbers_in
from surefoot.checkpoint import Store
from surefoot.tracking.jsonl import records

STEPS = 16  # in the middle of the third pass


def build(run_dir: str | Path | None, **changes: Any) -> sf.Run:
    return small_runs.build(run_dir, **{"length": f"{STEPS} steps", **changes})


def newest(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(max((run_dir / "checkpoints").glob("step-*")) / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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
    run = whole_passes(tmp_path / "cut")
    with run:
        assert [step.index for step in run] == list(range(4, 12))
    assert equal(newest(tmp_path / "cut"), newest(tmp_path / "whole"))


@pytest.mark.parametrize("stop", [3, 7])  # 6.5 steps are one pass
def test_after_a_resume_no_sample_of_the_pass_is_repeated_or_missed(
    stop: int, tmp_path: Path
) -> None:
    seen: list[int] = []
    for last in (f"{stop} steps", None):
        with build(tmp_path / "run", length="2 epochs", stop_after=last) as run:
            for step in run:
                seen += [int(sample) for part in step.micro_batches for sample in part.sample_ids]
    assert len(seen) == 2 * SAMPLES
    assert sorted(seen[:SAMPLES]) == sorted(seen[SAMPLES:]) == list(range(SAMPLES))


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
    assert (run.state.step, rule.step, rule.value) == (12, 2, 1.0)


def test_the_average_is_remembered(tmp_path: Path) -> None:
    build(tmp_path / "whole", length="9 steps").train()
    build(tmp_path / "cut", length="9 steps", stop_after="5 steps").train()
    build(tmp_path / "cut", length="9 steps").train()
    averages = [
        load_file(tmp_path / name / "checkpoints/step-00000009/ema.safetensors")
        for name in ("whole", "cut")
    ]
    assert equal(*averages)
    assert not equal(averages[0], newest(tmp_path / "whole"))


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
    return lambda groups: torch.optim.SGD(
        [{**group, "lr": lr, "momentum": momentum} for group in groups], lr=0.1
    )


def frozen_statistics(net: Net) -> Net:
    net[1].eval()
    return net


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run as `build` makes it."""
    run_dir = tmp_path_factory.mktemp("four-steps") / "run"
    build(run_dir, length="4 steps").train()
    return run_dir


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({}, {"batch_size": 12}, "batch_size was 8, now 12"),
        ({}, {"micro_batch_size": 2}, "micro_batch_size was 4, now 2"),
        ({}, {"optimizer": sf.optim.sgd(1e-2)}, "optimizer.name was 'adamw', now 'sgd'"),
        (
            {},
            {"optimizer": sf.optim.adamw(lr=2e-2, weight_decay=0.05)},
            "optimizer.lr was 0.01, now 0.02",
        ),
        ({}, {"schedule": sf.schedules.constant(3)}, "schedule.shape was 'cosine', now 'constant'"),
        ({}, {"seed": 1}, "seed was 0, now 1"),
        ({}, {"ema": None}, "ema was 0.9, now None"),
        ({"clip": "norm 1.0"}, {"clip": "off"}, "clip was 'norm 1.0', now 'off'"),
        (
            {"train_data": tensors(Augmented())},
            {"train_data": tensors(another_data_set())},
            "data.sha256 was",
        ),
        ({}, {"train_data": tensors(Augmented())}, "data.type was 'Augmented', now 'tuple'"),
        (
            {"train_data": chosen(range(32))},
            {"train_data": chosen(range(20, 52))},
            "data.indices was",
        ),
        (
            {},
            {"model": with_dropout(0.5)},
            "the model had (3): Dropout(p=0.25, inplace=False) and now has (3): Dropout(p=0.5",
        ),
        ({"optimizer": of_groups(1e-3)}, {"optimizer": of_groups(1.0)}, "optimizer.groups was"),
        ({}, {"model": lambda: frozen_statistics(Net())}, "now has 1 in evaluation mode"),
        (
            {"optimizer": of_groups(1e-3)},
            {"optimizer": of_groups(1e-3, momentum=0.5)},
            "optimizer.groups was",
        ),
        ({"identity": {"a": {"b": 1}}}, {"identity": {"a": {"b": 2}}}, "identity.a.b was 1, now 2"),
    ],
)
def test_a_run_that_became_another_one_is_refused_naming_both_values(
    before: dict[str, Any], after: dict[str, Any], says: str, four_steps: Path, tmp_path: Path
) -> None:
    """Batch size changed between: silently different data."""
    if before:
        build(tmp_path / "run", length="4 steps", **before).train()
    else:
        shutil.copytree(four_steps, tmp_path / "run")
    held = {file: file.read_bytes() for file in (tmp_path / "run" / "checkpoints").rglob("*.*")}
    with pytest.raises(sf.CheckpointError) as caught:
        build(tmp_path / "run", length="4 steps", **(before | after)).train()
    assert caught.value.places[0].endswith(" step-00000004")
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5
    assert {
        file: file.read_bytes() for file in (tmp_path / "run" / "checkpoints").rglob("*.*")
    } == held


def test_a_finished_run_started_again_says_so_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resuming trains zero steps with exit 0: only where there is nothing left, and then it is
    said.
    """
    build(tmp_path / "run", length="4 steps").train()
    held = {file: file.read_bytes() for file in (tmp_path / "run" / "checkpoints").rglob("*.*")}
    build(tmp_path / "run", length="4 steps", console=True).train()
    (line,) = lines_naming(capsys.readouterr().out, "finished", " run_dir, ")
    assert numbers_in(line.partition(" run_dir, ")[0]) == [4]
    assert {
        file: file.read_bytes() for file in (tmp_path / "run" / "checkpoints").rglob("*.*")
    } == held


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_prefix_of_ddp_or_compile_is_accepted_and_named(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = nn.Sequential(*Net().children()).state_dict()
    held = {
        name: value + 1 if value.is_floating_point() else value for name, value in source.items()
    }
    save_file({prefix + name: value for name, value in held.items()}, tmp_path / "held.safetensors")
    with build(None, init_from=tmp_path / "held.safetensors", console=True) as run:
        assert equal(run.state.models["model"].state_dict(), held)
    said = capsys.readouterr().out
    assert "renamed     9 tensors" in said
    assert f"{prefix}0.weight -> 0.weight" in said


def test_a_stale_checkpoint_in_the_working_directory_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "other", length="4 steps").train()
    for name in ("checkpoint.pt", "model.safetensors", "last.ckpt"):
        Path(name).write_bytes(
            (tmp_path / "other/checkpoints/step-00000004/model.safetensors").read_bytes()
        )
    Path("checkpoints").mkdir()
    with build(tmp_path / "run", length="4 steps") as run, build(None) as fresh:
        assert run.state.step == 0
        assert equal(
            run.state.models["model"].state_dict(), fresh.state.models["model"].state_dict()
        )


def kept(run_dir: Path) -> list[int]:
    return Store(run_dir / "checkpoints").steps()


def test_there_are_recovery_points_between_improvements_and_not_every_epoch_is_kept_for_ever(
    tmp_path: Path,
) -> None:
    build(
        tmp_path / "run",
        length="12 steps",
        save_every="1 steps",
        keep_last=2,
        splits=None,
        early_stopping=None,
    ).train()
    assert kept(tmp_path / "run") == [0, 11, 12]


def test_keep_every_stays(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"splits": None, "early_stopping": None}
    build(
        tmp_path / "run",
        length="12 steps",
        save_every="1 steps",
        keep_last=1,
        keep_every="5 steps",
        **changes,
    ).train()
    assert kept(tmp_path / "run") == [0, 5, 10, 12]


def test_keep_every_saves_where_nothing_else_does(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"splits": None, "early_stopping": None}
    build(
        tmp_path / "run",
        length="12 steps",
        save_every="1000 steps",
        keep_every="5 steps",
        **changes,
    ).train()
    assert kept(tmp_path / "run") == [0, 5, 10, 12]


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
    scores = [
        line for line in records(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "eval"
    ]
    assert best.value == max(line["val/accuracy"] for line in scores if line["step"] > 6)


def test_averages_begin_at_the_weights_a_run_starts_from(tmp_path: Path) -> None:
    build(tmp_path / "first", length="6 steps").train()
    build(tmp_path / "second", init_from=tmp_path / "first", stop_after="1 steps").train()
    start = tmp_path / "second" / "checkpoints" / "step-00000000"
    model, average = load_file(start / "model.safetensors"), load_file(start / "ema.safetensors")
    # as they were evaluated
    averaged = max((tmp_path / "first" / "checkpoints").glob("step-*")) / "ema.safetensors"
    assert equal(model, load_file(averaged))
    assert equal(average, model)


def test_averaged_weights_are_saved_with_the_statistics_of_the_live_model(tmp_path: Path) -> None:
    build(tmp_path / "run", length="7 steps", splits=None, early_stopping=None).train()
    end = tmp_path / "run" / "checkpoints" / "step-00000007"
    model, average = load_file(end / "model.safetensors"), load_file(end / "ema.safetensors")
    statistics = [name for name in model if "running" in name or "tracked" in name]
    assert len(statistics) == 3
    assert equal(
        {name: average[name] for name in statistics}, {name: model[name] for name in statistics}
    )
    assert not torch.equal(average["0.weight"], model["0.weight"])


def test_old_checkpoints_that_resist_removal_are_named_and_the_run_ends_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "checkpoints" / ".deleted-step-00000001" / "somebody's directory").mkdir(
        parents=True
    )
    build(tmp_path / "run", length="6 steps", save_every="2 steps", console=True).train()
    said = capsys.readouterr().out
    warnings = lines_naming(said, "warning: ")
    assert warnings
    assert all("step-0000000" in line and " saved, " in line for line in warnings)
    assert "NOT SAVED" not in said
    assert kept(tmp_path / "run")[-1] == 6


def test_the_best_stays_and_is_no_second_copy(tmp_path: Path) -> None:
    calls: list[int] = []

    def best_at_the_second(outputs: Any, targets: Any) -> sf.Mean:
        calls.append(1)
        return sf.Mean(torch.tensor(0.0 if len(calls) == 2 else float(len(calls))), 1)

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
    assert kept(tmp_path / "run") == [0, 4, 12]
    assert len(list((tmp_path / "run").rglob("model.safetensors"))) == 3


def test_records_after_a_resume_are_one_curve_in_the_file_and_in_tensorboard(
    tmp_path: Path,
) -> None:
    """Steps twice in TensorBoard, counters reset, the old log deleted."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def died(model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            calls.append(1)
            if len(calls) == 2 * 7 + 1:
                raise RuntimeError("died")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    calls: list[int] = []
    changes: dict[str, Any] = {
        "length": "10 steps",
        "log_every": "1 steps",
        "save_every": "4 steps",
    }
    with pytest.raises(RuntimeError, match="died"):
        build(tmp_path / "run", loss=died, check_state=False, **changes).train()
    build(tmp_path / "run", **changes).train()
    found = [
        record
        for record in records(tmp_path / "run" / "metrics.jsonl")
        if record["kind"] == "train"
    ]
    assert [record["step"] for record in found] == list(range(1, 11))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    shown = events.Scalars("train/loss")
    assert [event.step for event in shown] == list(range(1, 11))
    assert [event.value for event in shown] == pytest.approx([record["loss"] for record in found])


def test_time_spent_is_counted_on_after_a_resume(tmp_path: Path) -> None:
    """Counters reset."""
    train(build(tmp_path / "run", length="8 steps", stop_after="4 steps"))
    state = Store(tmp_path / "run" / "checkpoints").at(4).state
    train(build(tmp_path / "run", length="8 steps"))
    after = Store(tmp_path / "run" / "checkpoints").at(8).state
    assert (
        float(after["clock"]["total_s"]["training"])
        > float(state["clock"]["total_s"]["training"])
        > 0
    )
    assert after["user_state"] != state["user_state"]


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
            for parameter in group["params"]:
                parameter.data.sub_(
                    parameter.grad, alpha=group["lr"] * group["made"] * float(group["weight"]) / 50
                )


def test_what_an_optimizer_counts_in_its_groups_is_remembered(tmp_path: Path) -> None:
    build(tmp_path / "whole", optimizer=Counting).train()
    build(tmp_path / "run", optimizer=Counting, stop_after="7 steps").train()
    run = build(tmp_path / "run", optimizer=Counting)
    run.train()
    assert run.state.optimizers["model"].optimizer.param_groups[0]["made"] == STEPS
    assert newest_files(tmp_path / "run") == newest_files(tmp_path / "whole")


def test_the_body_s_random_numbers_are_the_step_s_where_nothing_was_counted_too(
    tmp_path: Path,
) -> None:
    """Whatever came before: a process that begins with such a step draws the same."""

    def drawn(out: Path, *, stop: int | None = None) -> dict[int, float]:
        found: dict[int, float] = {}
        with build(out, count_fn=lambda batch: 0, splits=None, early_stopping=None) as run:
            for step in run:
                found[step.index] = float(torch.rand(()))
                if step.index == stop:
                    break
        return found

    whole = drawn(tmp_path / "whole")
    parts = drawn(tmp_path / "run", stop=5) | drawn(tmp_path / "run")
    assert parts == whole
    assert len(set(whole.values())) == STEPS


def newest_files(run_dir: Path) -> dict[str, bytes]:
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return {file.name: file.read_bytes() for file in newest.glob("*.safetensors")}


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
    assert newest_files(tmp_path / "run") == newest_files(tmp_path / "whole")


def test_a_model_handed_over_in_evaluation_mode_is_trained_in_training_mode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As libraries load them: dropout would be off for the whole training."""
    run = build(None, model=lambda: Net().eval(), console=True, length="3 steps")
    run.train()
    assert all(module.training for module in run.state.models["model"].modules())
    assert len(lines_naming(capsys.readouterr().out, "note: ", " evaluation ")) == 1
    part = build(None, model=lambda: frozen_statistics(Net()), length="3 steps")
    part.train()
    assert [module.training for module in part.state.models["model"]] == [
        True,
        False,
        True,
        True,
        True,
    ]  # type: ignore[union-attr]


def test_kept_objects_come_back_as_they_were_whatever_their_names(tmp_path: Path) -> None:
    """A slash in a name, and a name inside an object: two places, not one."""

    def held() -> dict[str, Any]:
        return {"a/b": torch.ones(2), "a": {"b": torch.zeros(2), "b~1": (1, (2.5, torch.ones(1)))}}

    with build(tmp_path / "run", stop_after="3 steps") as run:
        for name, value in held().items():
            run.register_state(name, value)
        for _ in run:
            pass
    again = build(tmp_path / "run")
    with again:
        assert again.register_state("a/b", torch.full((2,), 7.0)).tolist() == [1.0, 1.0]
        found = again.register_state("a", {"b": torch.full((2,), 7.0), "b~1": None})
    assert found["b"].tolist() == [0.0, 0.0]
    assert found["b~1"] == (1, (2.5, torch.ones(1)))


def test_a_longer_run_is_scored_at_the_same_steps(tmp_path: Path) -> None:
    """Patience counts evaluations: with others, early stopping would end another run."""
    settings = {
        "schedule": sf.schedules.constant(2),
        "evaluate_every": "25%",
        "save_every": "100 steps",
    }
    build(tmp_path / "run", length="8 steps", **settings).train()
    build(tmp_path / "run", length="16 steps", **settings).train()
    found = [
        line["step"]
        for line in records(tmp_path / "run" / "metrics.jsonl")
        if line["kind"] == "eval"
    ]
    assert found == [2, 4, 6, 8, 10, 12, 14, 16]


def test_numbers_of_numpy_are_remembered_as_numbers(tmp_path: Path) -> None:
    """They are floats, and write themselves otherwise."""
    settings = {"optimizer": sf.optim.adamw(lr=1e-2, weight_decay=np.float64(0.05))}
    with build(tmp_path / "run", stop_after="7 steps", **settings) as run:
        run.register_state("held", {"number": np.float64(0.1)})
        for _ in run:
            pass
    again = build(tmp_path / "run", **settings)
    with again:
        assert again.register_state("held", {"number": 0.0}) == {"number": 0.1}


def test_parameters_frozen_before_a_resume_are_trained_as_the_checkpoint_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_vectors() -> Net:
        net = Net()
        for parameter in net.parameters():
            parameter.requires_grad_(parameter.ndim > 1)
        return net

    build(tmp_path / "run", length="4 steps", stop_after="2 steps").train()
    resumed = build(tmp_path / "run", length="4 steps", model=without_vectors, console=True)
    resumed.train()
    whole = build(tmp_path / "whole", length="4 steps")
    whole.train()
    assert "unfrozen" in capsys.readouterr().out
    for ours, reference in zip(resumed.state.parameters, whole.state.parameters, strict=True):
        assert torch.equal(ours, reference)


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
    for length in ("4 steps", "8 steps"):
        data = torch.utils.data.Subset(Keyed(), names)  # type: ignore[arg-type]
        build(
            tmp_path / "run",
            train_data=data,
            length=length,
            schedule=None,
            micro_batch_size=None,
            batch_size=4,
        ).train()
