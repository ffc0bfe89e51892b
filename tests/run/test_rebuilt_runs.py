"""Runs that are built again where their settings change: what stays theirs, and what is given up."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from refused import refused
from surefoot.tracking.change_journal import CHANGES, append_changes, read_changes
from surefoot.tracking.run_reader import lock_holder

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))


class BuildError(Exception):
    """What a function that builds a model raises."""


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))


def run_in(run_dir: Path, **settings: Any) -> sf.Run:
    chosen: dict[str, Any] = {
        "model": build_model,
        "loss": loss,
        "train_data": (INPUTS, INPUTS.sum(1, keepdim=True)),
        "optimizer": sf.optim.adamw(lr=1e-2),
        "batch_size": 8,
        "length": "12 steps",
        "device": "cpu",
        "console": False,
        "report": False,
        "run_dir": run_dir,
    }
    return sf.Run(**(chosen | settings))


def train(run: sf.Run) -> None:
    """Train a run whose body changes the learning rate in its fifth step."""
    with run:
        for step in run:
            if step.index == 4:
                run.change("optimizer.lr", 1e-3)


def at_second_call(action: Callable[[], None]) -> Callable[[], nn.Module]:
    """Return a function that builds a model, and does something more where it builds it again."""
    models: list[nn.Module] = []

    def build() -> nn.Module:
        models.append(build_model())
        if len(models) == 2:
            action()
        return models[-1]

    return build


# --- the lock of the directory --------------------------------------------------------------------


def can_lock(run_dir: Path) -> bool:
    """Return True if another process can lock the directory of a run."""
    child = (
        "import fcntl, sys\n"
        "with open(sys.argv[1], 'r+b') as lock:\n"
        "    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    )
    command = [sys.executable, "-c", child, str(run_dir / ".lock")]
    done = subprocess.run(command, check=False, capture_output=True)
    return done.returncode == 0


def test_no_other_process_can_take_a_run_that_is_built_again(tmp_path: Path) -> None:
    can_take = []
    model = at_second_call(lambda: can_take.append(can_lock(tmp_path)))
    train(run_in(tmp_path, model=model))
    assert can_take == [False]
    assert can_lock(tmp_path)


def fail() -> None:
    raise BuildError


def test_a_run_that_cannot_be_built_again_leaves_its_directory(tmp_path: Path) -> None:
    with pytest.raises(BuildError):
        train(run_in(tmp_path, model=at_second_call(fail)))
    assert lock_holder(tmp_path) == 0
    assert can_lock(tmp_path)


def test_a_session_that_cannot_be_opened_after_a_change_leaves_its_directory(
    tmp_path: Path,
) -> None:
    def damage_the_journal() -> None:
        (tmp_path / CHANGES).write_text("{}\n")

    with refused("journal-of-changes-damaged", sf.CheckpointError):
        train(run_in(tmp_path, model=at_second_call(damage_the_journal)))
    assert lock_holder(tmp_path) == 0
    assert can_lock(tmp_path)


# --- a change at the step of another one ----------------------------------------------------------


def test_a_change_where_a_value_of_a_ramp_begins_is_refused_with_the_ramp(tmp_path: Path) -> None:
    ramp = "8, 16 from 5 steps"
    run = run_in(tmp_path, batch_size=ramp)
    refusal = refused("changed-otherwise-already", step=5, value=12, because=ramp)
    with refusal as error, run:
        for step in run:
            if step.index == 4:
                run.change("batch_size", 12)
    assert ramp in str(error.value)


# --- what is said ---------------------------------------------------------------------------------


def notes_of(run_dir: Path) -> list[str]:
    lines = (run_dir / "log.txt").read_text().splitlines()
    return [line for line in lines if "note:" in line]


def test_a_change_of_the_first_micro_batch_is_noted_at_a_start_alone(tmp_path: Path) -> None:
    one_process = tmp_path / "one"
    run = run_in(one_process, batch_size="8, 16 from 5 steps", text_log=True)
    run.train()
    two = tmp_path / "two"
    run_in(two, stop_after="5 steps", text_log=True).train()
    sf.load(two).change(batch_size=16)
    before = notes_of(two)
    run_in(two, text_log=True).train()
    assert notes_of(one_process) == before == []
    assert len(notes_of(two)) == 1


# --- what is given up -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda parameter: parameter.detach(),
        lambda parameter: parameter.data.mul_(0.5),
        nn.init.zeros_,
        lambda parameter: parameter.norm(),
    ],
)
def test_a_parameter_of_the_model_before_a_change_refuses_its_use(
    tmp_path: Path, use: Callable[[nn.Parameter], Any]
) -> None:
    run = run_in(tmp_path)
    parameter = run.state.models["model"][0].weight
    train(run)
    with refused("model-of-earlier-settings", model="Parameter"), torch.no_grad():
        use(parameter)
    use(run.state.models["model"][0].weight)


def test_the_weights_of_a_model_before_a_change_are_not_saved(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    network = run.state.models["model"]
    train(run)
    with refused("model-of-earlier-settings"):
        torch.save(network.state_dict(), tmp_path / "weights.pt")


def test_parameters_that_the_next_model_has_too_are_used_on(tmp_path: Path) -> None:
    body = nn.Linear(4, 8)
    tied = nn.Linear(8, 8)

    def around_the_same_layers() -> nn.Module:
        output = nn.Linear(8, 8)
        output.weight = tied.weight
        return nn.Sequential(body, output, nn.Linear(8, 1))

    run = run_in(tmp_path, model=around_the_same_layers)
    first = run.state.models["model"]
    train(run)
    assert run.state.models["model"] is not first
    assert body.weight.norm() > 0
    assert tied.weight.norm() > 0
    with refused("model-of-earlier-settings"):
        first[2].weight.norm()


# --- a journal that was given ---------------------------------------------------------------------


def test_a_ramp_beside_a_journal_without_it_is_refused_with_its_first_value(tmp_path: Path) -> None:
    ramp = "8, 16 from 5 steps"
    begun = tmp_path / "begun"
    run_in(begun, batch_size=ramp, stop_after="1 steps").train()
    sf.load(begun).change(batch_size=12)
    (_, change) = read_changes(begun)
    given = tmp_path / "given"
    given.mkdir()
    append_changes(given, [change])  # the line that holds, without that which it supersedes
    with refused("ramp-of-begun-run", setting="batch_size", step=0) as error:
        run_in(given, batch_size=ramp)
    assert "batch_size=8" in str(error.value).replace(" ", "")
    run_in(given, batch_size=8).train()
    run_in(begun, batch_size=ramp).train()
    one = sf.load(begun).load_model(build_model)
    other = sf.load(given).load_model(build_model)
    assert all(map(torch.equal, one.parameters(), other.parameters()))


# --- the limit of time ----------------------------------------------------------------------------


def test_the_time_limit_is_one_for_all_sessions_of_a_loop(tmp_path: Path) -> None:
    run = run_in(tmp_path, time_limit="60 min")
    deadlines = []
    with run:
        for step in run:
            deadlines.append(run.session.stop_requests.deadline)
            if step.index == 4:
                run.change("optimizer.lr", 1e-3)
    assert all(deadline is deadlines[0] for deadline in deadlines)
    assert deadlines[0] is not None
