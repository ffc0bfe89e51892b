"""A program that computes something else than when its run began is refused by name, or goes on
with it where that is accepted. (9 s)

Each run is built by a real file, which is changed between two sessions.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import surefoot as sf
from rank_processes import forks, on_ranks
from refused import refused
from stated import lines_naming, numbers_in
from surefoot.checkpoint import Store
from surefoot.cli.main import main
from surefoot.config.accepted_changes import change_names
from surefoot.config.user_code import names_in

PROGRAM = '''
import torch
from torch import nn
from torch.utils.data import ConcatDataset, TensorDataset, default_collate

import surefoot as sf


def tensors(shift=0.0):
    return torch.arange(24.0).reshape(12, 2) / 24 + shift, torch.arange(12) % 3


LIST = [(inputs, int(label)) for inputs, label in zip(*tensors())]


class Data:
    def __len__(self):
        return 12

    def __getitem__(self, sample):
        inputs, label = LIST[sample]
        return inputs + 0.1 * torch.rand(2), label


class Other(Data):
    def __getitem__(self, sample):
        inputs, label = LIST[sample]
        return inputs - 1.0, label


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.25)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, inputs):
        self.calls += 1
        return self.drop(self.norm(self.linear(inputs)))


def weighted(loss):
    return loss * 1.0


def loss(model, batch):
    """A mean."""
    return weighted(nn.functional.cross_entropy(model(batch[0]), batch[1]))


def collate(samples):
    return default_collate(samples)


def count(batch):
    return len(batch[0])


class Plain(torch.optim.SGD):
    def step(self, closure=None):
        return super().step()


def build(run_dir: str = "runs/changed", **changes):
    settings = dict(
        model=Net, loss=loss, train_data=Data(), batch_size=4, micro_batch_size=2, length="8 steps", collate_fn=collate,
        optimizer=sf.optim.sgd(lr=0.1), save_every="100 steps", report=False, precision="fp32", device="cpu",
        check_state=False,  # the model counts its calls
    )
    return sf.Run(run_dir=run_dir, **{**settings, **changes})


def parts(shift=0.0):
    return ConcatDataset([TensorDataset(*tensors()), Data(), TensorDataset(*tensors(shift))])
'''


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where the program lies; what it leaves in this process is taken away."""
    modules = dict(sys.modules)
    paths = list(sys.path)
    yield tmp_path
    for name in sys.modules.keys() - modules.keys():
        if name.strip("_") == "program":
            del sys.modules[name]
    sys.path[:] = paths


def built(
    place: Path, old: str = "", new: str = "", *, own: str = "{}", folder: str = "", **changes: Any
) -> sf.Run:
    """The run of the program in which one text is another; `own` are settings as the program itself
    writes them.
    """
    assert PROGRAM.count(old) >= 1
    file = place / folder / "program.py"
    file.parent.mkdir(exist_ok=True)
    text = PROGRAM
    if old:
        text = PROGRAM.replace(old, new)
    file.write_text(text)
    names = names_in(file, function="build", form="def build() -> sf.Run")
    run: sf.Run = names["build"](str(place / "run"), **{**eval(own, names), **changes})
    return run


def begin(place: Path, own: str = "{}", **changes: Any) -> None:
    built(place, own=own, stop_after="4 steps", console=False, **changes).train()


def fingerprints(place: Path, step: int) -> dict[str, Any]:
    checkpoint = place / "run" / "checkpoints" / f"step-{step:08d}"
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return dict(state["fingerprints"])


def contents_of_checkpoints(place: Path) -> dict[Path, bytes]:
    files = (place / "run" / "checkpoints").rglob("*.*")
    return {file: file.read_bytes() for file in files}


def test_a_change_that_is_accepted_without_the_first_checkpoint_is_asked_for_once(
    place: Path,
) -> None:
    begin(place)
    shutil.rmtree(place / "run" / "checkpoints" / "step-00000000")
    changed = ("inputs + 0.1", "inputs + 0.2")
    with refused("program-changed", sf.CheckpointError, changed=["data"]):
        built(place, *changed).train()
    built(place, *changed, accept_change="data", stop_after="6 steps").train()
    assert fingerprints(place, 6)["accepted"][0]["changed"] == ["data"]
    built(place, *changed).train()


@pytest.mark.parametrize(
    "changed",
    [
        ("batch[1])", "2 - batch[1])"),
        ("batch[1])", "batch[1], label_smoothing=0.1)"),
        ("batch[1])", "batch[1]) * 0 + 1.0986122886681098"),
    ],
)
def test_another_loss_is_refused_where_the_weights_of_step_0_are_zero(
    changed: tuple[str, str], place: Path
) -> None:
    with_zeros: Any = {"model": zeros}
    begin(place, **with_zeros)
    with refused("program-changed", sf.CheckpointError, changed=["loss"]):
        built(place, *changed, **with_zeros).train()
    built(place, **with_zeros).train()


def test_a_forgotten_return_may_be_added_in_the_same_directory(place: Path) -> None:
    with refused("every-sample-left-out"):
        built(place, "return weighted(", "weighted(").train()
    run = built(place)
    run.train()
    assert run.state.step == 8


def zeros() -> torch.nn.Module:
    model = torch.nn.Linear(2, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@dataclass(frozen=True)
class Change:
    """One text of the program in the place of another; `own` are settings as it writes them."""

    old: str
    new: str
    named: str  # in the error
    own: str = "{}"
    code: str = "program-changed"


CHANGES = {
    "loss": Change(
        "cross_entropy(model(batch[0]), batch[1])",
        "cross_entropy(model(batch[0]), batch[1]) + 1",
        named="loss() in",
    ),
    "loss's helper": Change("loss * 1.0", "loss * 1.5", named="weighted() in program.py"),
    "forward": Change(
        "self.norm(self.linear(inputs))",
        "self.linear(inputs)",
        named="Net.forward() in program.py",
    ),
    "collate_fn": Change(
        "return default_collate(samples)",
        "return default_collate(samples[::-1])",
        named="collate() in program.py",
    ),
    "__getitem__": Change("inputs + 0.1", "inputs + 0.2", named="Data.__getitem__() in program.py"),
    "sample of a list": Change(
        "LIST = [",
        "LIST = [(torch.ones(2), 2)] * 1 + [",
        named="data.sha256 was",
        own="{'train_data': LIST[:12]}",
        code="data-changed",
    ),
    "length of a list": Change(
        "in zip(*tensors())]",
        "in zip(*tensors())][:11]",
        named="data.samples was 12, now 11",
        own="{'train_data': LIST}",
        code="data-changed",
    ),
    "tensors of a part": Change(
        "parts(shift=0.0)",
        "parts(shift=0.5)",
        named="data.parts.2.sha256 was",
        own="{'train_data': parts()}",
        code="data-changed",
    ),
    "a part": Change(
        "Data(), TensorDataset",
        "Other(), TensorDataset",
        named="data.parts.1.type was",
        own="{'train_data': parts()}",
        code="data-changed",
    ),
    "code of a part": Change(
        "inputs + 0.1", "inputs + 0.2", named="(part 1)", own="{'train_data': parts()}"
    ),
    "count_fn": Change(
        "return len(batch[0])",
        "return 2 * len(batch[0])",
        named="2 targets",
        own="{'count_fn': count}",
    ),
    "an optimizer of one's own": Change(
        "return super().step()",
        "return super().step(closure)",
        named="Plain.step() in program.py",
        own="{'optimizer': lambda groups: Plain(groups, lr=0.1)}",
    ),
}


def built_with(change: str, place: Path, **changes: Any) -> sf.Run:
    case = CHANGES[change]
    return built(place, case.old, case.new, **{"own": case.own, **changes})


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_computed_otherwise_at_a_resume_is_refused_by_name(
    change: str, place: Path
) -> None:
    case = CHANGES[change]
    begin(place, case.own)
    before = contents_of_checkpoints(place)

    with refused(case.code, sf.CheckpointError) as caught:
        built_with(change, place, console=False).train()

    message = str(caught.value)
    assert "step-00000004" in message
    assert case.named in message
    assert len(message.splitlines()) <= 5
    assert contents_of_checkpoints(place) == before


@pytest.mark.fast("loss-loss", "forward-model", "sample of a list-data")
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("loss", "loss"),
        ("forward", "model"),
        ("collate_fn", "collate"),
        ("__getitem__", "data"),
        ("sample of a list", "data"),
    ],
)
def test_an_accepted_change_goes_on_is_recorded_and_is_what_is_compared_from_then_on(
    change: str, name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CHANGES[change]
    begin(place, case.own)

    built_with(change, place, stop_after="6 steps", accept_change=name).train()
    assert "note: accepted: " in capsys.readouterr().out
    first, second = json.loads((place / "run" / "environment.json").read_text())["sessions"]
    assert not first.get("accepted_changes")
    (accepted,) = second["accepted_changes"]
    assert accepted["changed"] == [name]
    (accepted,) = fingerprints(place, 6)["accepted"]
    assert (accepted["step"], accepted["changed"]) == (4, [name])

    built_with(change, place).train()
    assert "accepted: " not in capsys.readouterr().out
    verdict = sf.load(built_with(change, place)).verify()
    assert not verdict.problems
    assert [0, 4, 4] in [numbers_in(line) for line in verdict.not_proved]
    with refused(case.code, sf.CheckpointError):
        built(place, own=case.own, console=False).train()


def test_a_mistake_that_is_mended_before_a_step_was_trained_needs_no_accepted_change(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with refused("loss-not-a-scalar"):
        built(place, "loss * 1.0", "loss.expand(2)").train()
    built(place, stop_after="1 steps").train()
    assert "note: accepted: " in capsys.readouterr().out
    with refused("program-changed", sf.CheckpointError, changed=["loss"]):
        built(place, "loss * 1.0", "loss * 2.0", console=False).train()


@pytest.mark.parametrize("name", ["clip", "optimizer.lr", "schedule.name", "ema"])
def test_a_setting_is_not_accepted_and_names_the_line_to_type(name: str) -> None:
    with pytest.raises(sf.ConfigError) as refusal:
        change_names(f"loss,{name}")
    assert refusal.value.code == "change-of-a-setting"
    assert refusal.value.fields["value"] == name
    assert f"surefoot change RUN {name}=VALUE" in str(refusal.value)


def test_a_change_is_accepted_by_its_own_name_alone(place: Path) -> None:
    begin(place)
    with refused("program-changed", sf.CheckpointError, changed=["model"]):
        built_with("forward", place, accept_change=["loss", "data"], console=False).train()
    with refused("change-unknown", value="forward"):
        built(place, accept_change="forward")


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        (
            "loss * 1.0",
            "1.0 * loss",
            "note: weighted() in program.py changed, but the results on the first samples did not",
        ),
        ("len(batch[0])", "1 * len(batch[0])", "note: count() in program.py changed"),
        ('    """A mean."""', '    """The mean."""  # of all', None),
        ("0.1 * torch.rand(2), label", "(0.1\n            * torch.rand(2)), label", None),
    ],
)
def test_equal_values_of_another_text_are_a_note_and_another_layout_is_nothing(
    old: str, new: str, note: str | None, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data draw random numbers, the model has dropout and statistics: none of that is a false
    alarm.
    """
    begin(place, own="{'count_fn': count}")
    built(place, old, new, own="{'count_fn': count}").train()

    notes = lines_naming(capsys.readouterr().out, "note: ")
    if note is None:
        assert notes == []
    else:
        (line,) = notes
        assert note in line


def test_the_pass_leaves_nothing_behind(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def state(run: sf.Run) -> dict[str, Any]:
        model = run.state.model
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state()[1].tolist(),
            "torch": torch.get_rng_state().tolist(),
            "tensors": [tensor.tolist() for tensor in (*model.parameters(), *model.buffers())],
            "modes": [part.training for part in model.modules()],
            "gradients": [parameter.grad for parameter in model.parameters()],
        }

    run = built(place, console=False)
    before = state(run)
    with run:
        assert state(run) == before

    assert fingerprints(place, 0)["loss"] is not None
    assert fingerprints(place, 0)["draws"]


def test_a_loss_that_takes_gradients_itself_is_passed_with_them(place: Path) -> None:
    gradient = (
        "torch.autograd.grad(model(batch[0]).sum(), model.linear.weight, create_graph=True)[0]"
    )
    begin(place, f"{{'loss': lambda model, batch: {gradient}.sum()}}")

    assert fingerprints(place, 4)["loss"] is not None


def test_a_run_whose_steps_its_program_makes_is_compared_by_data_and_by_the_text_of_its_model(
    place: Path,
) -> None:
    def train(run: sf.Run) -> None:
        with run:
            for step in run.steps():
                sf.forward_backward(step, lambda model, batch: model(batch[0]).square().mean())
                sf.update(step)

    train(built(place, loss=None, stop_after="4 steps", console=False))
    for change, name in (("forward", "model"), ("__getitem__", "data")):
        with refused("program-changed", sf.CheckpointError, changed=[name]):
            train(built_with(change, place, loss=None, console=False))
    train(built_with("forward", place, loss=None, accept_change="model", console=False))
    assert fingerprints(place, 8)["loss"] is None


def test_of_many_weights_texts_alone_are_compared(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.train.state_check._MAX_WEIGHT_BYTES", 0)
    begin(place)
    assert fingerprints(place, 0)["loss"] is None
    with refused("program-changed", sf.CheckpointError, changed=["loss"]):
        built(place, "loss * 1.0", "1.0 * loss", console=False).train()
    built(place, console=False).train()


def test_where_step_0_is_damaged_texts_alone_are_compared_and_the_loss_is_remembered(
    place: Path,
) -> None:
    begin(place)
    before = fingerprints(place, 0)["loss"]
    (place / "run" / "checkpoints" / "step-00000000" / "model.safetensors").write_bytes(b"")
    with refused("program-changed", sf.CheckpointError, changed=["loss"]):
        built_with("loss", place, console=False).train()
    built(place, console=False).train()
    assert fingerprints(place, 8)["loss"] == before


def test_a_checkpoint_without_fingerprints_is_refused_in_one_sentence(place: Path) -> None:
    begin(place)
    store = Store(place / "run" / "checkpoints")
    checkpoint = store.at(4)
    del checkpoint.state["fingerprints"]
    store.save(checkpoint)

    with refused("state-of-another-version", sf.CheckpointError):
        built(place, console=False).train()


def test_a_split_of_other_samples_is_noted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = "{'splits': {'val': sf.Split(Other())}, 'evaluate_every': '2 steps'}"
    begin(place, own)
    built(place, "inputs - 1.0", "inputs - 2.0", own=own).train()

    assert len(lines_naming(capsys.readouterr().out, "note: ", " val ")) == 1


def test_a_split_of_other_samples_that_steers_is_refused(place: Path) -> None:
    plateau = "sf.ReduceLROnPlateau('min val/loss', patience=5)"
    own = f"""{{
        'splits': {{'val': sf.Split(Other())}}, 'evaluate_every': '2 steps', 'plateau': {plateau}
    }}"""
    begin(place, own)
    with refused("program-changed", sf.CheckpointError, changed=["data"]):
        built(place, "inputs - 1.0", "inputs - 2.0", own=own, console=False).train()


class Graph:
    """Nothing that is known."""


def test_objects_that_are_not_looked_into_are_named_when_the_run_begins(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    def samples() -> list[Any]:
        return [(torch.ones(2), 1, Graph()) for _ in range(12)]

    def collate(samples: list[Any]) -> Any:
        inputs = [inputs for inputs, *_ in samples]
        return torch.stack(inputs), torch.ones(len(samples)).long()

    built(place, stop_after="4 steps", train_data=samples(), collate_fn=collate).train()
    assert "note: Graph in samples " in capsys.readouterr().out

    built(place, train_data=samples(), collate_fn=collate).train()


def test_the_command_line_accepts_a_change(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    text = PROGRAM.replace('(run_dir: str = "runs/changed", **changes)', "()")
    text = text.replace("run_dir=run_dir, **{**settings, **changes}", "**settings")

    def write_program(stop_after: str | None, factor: str) -> None:
        settings = f'run_dir="run", length="8 steps", stop_after={stop_after!r}'
        program = text.replace('length="8 steps"', settings)
        (place / "program.py").write_text(program.replace("loss * 1.0", f"loss * {factor}"))

    write_program("4 steps", "1.0")
    main(["train", "program.py:build"])
    write_program(None, "1.5")
    with pytest.raises(SystemExit, match="4"):
        main(["resume", "run"])
    assert "--accept-change loss" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["resume", "run", "--accept-change", "everything"])

    main(["resume", "run", "--accept-change", "loss"])

    (accepted,) = fingerprints(place, 8)["accepted"]
    assert accepted["changed"] == ["loss"]


# --- several ranks --------------------------------------------------------------------------------


@pytest.mark.fast("fsdp")
@forks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_refuse_the_same_change_and_go_on_with_the_same_program(
    strategy: str, place: Path
) -> None:
    settings: dict[str, Any] = {"parallel": strategy, "micro_batch_size": 2, "console": False}
    if strategy == "fsdp":
        settings["model"] = lambda: torch.nn.Linear(2, 3)

    def work(rank: int) -> None:
        own = {**settings, "folder": f"rank-{rank}"}
        built(place, stop_after="4 steps", **own).train()
        with pytest.raises(sf.CheckpointError) as caught:
            built_with("loss", place, **own).train()
        (place / f"refused-{rank}").write_text(str(caught.value))
        built(place, **own).train()

    assert on_ranks(2, work) == [0, 0]
    first, second = [(place / f"refused-{rank}").read_text() for rank in range(2)]
    assert first == second
    assert "step-00000004" in first
    assert "[program-changed]" in first
    assert fingerprints(place, 8)["loss"] == fingerprints(place, 0)["loss"]
