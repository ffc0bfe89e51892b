"""Which process this is, whoever started it, and where the others are met. (about 2 s)"""

from __future__ import annotations

import pytest
import torch

from fake_slurm import ONE_MACHINE, OUTSIDE_OF_STEPS, THREE_MACHINES
from refused import refused
from surefoot.distributed import world
from surefoot.distributed.environment import Placement, placed
from surefoot.errors import ConfigError

TORCHRUN = {
    "WORLD_SIZE": "22",
    "LOCAL_WORLD_SIZE": "2",
    "RANK": "9",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "gpu001",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MEETING = {"MASTER_ADDR": "gpu9", "MASTER_PORT": "1234"}


def test_slurm_says_where_to_meet() -> None:
    assert placed(THREE_MACHINES) == Placement(9, 11, 1, 3, "tcp://gpu001:61913")


def test_where_to_meet_can_be_said_by_hand() -> None:
    assert placed(THREE_MACHINES | MEETING).meeting == "tcp://gpu9:1234"


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    assert (
        placed(THREE_MACHINES | MEETING | {"MASTER_ADDR": "fd00::1"}).meeting
        == "tcp://[fd00::1]:1234"
    )


@pytest.mark.parametrize("where", OUTSIDE_OF_STEPS)
def test_outside_of_a_step_of_several_tasks_a_process_is_alone(where: str) -> None:
    assert placed(OUTSIDE_OF_STEPS[where]) == Placement()


@pytest.mark.parametrize("where", OUTSIDE_OF_STEPS)
def test_torchrun_is_believed_wherever_it_was_started(where: str) -> None:
    assert placed(OUTSIDE_OF_STEPS[where] | TORCHRUN) == Placement(9, 22, 1, 2, "env://")


def test_torchrun_that_srun_started_on_every_machine_is_believed() -> None:
    assert placed(THREE_MACHINES | TORCHRUN) == Placement(9, 22, 1, 2, "env://")


def test_torchruns_that_do_not_know_of_each_other_are_refused() -> None:
    alone = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3"}
    with refused("launchers-apart", launchers=11, host="gpu001"):
        placed(THREE_MACHINES | alone)


def test_torchs_names_for_what_srun_says_change_nothing() -> None:
    assert placed(THREE_MACHINES | {"WORLD_SIZE": "11"}) == placed(THREE_MACHINES)
    same = {"WORLD_SIZE": "11", "RANK": "9", "LOCAL_RANK": "1"}
    assert placed(THREE_MACHINES | same | MEETING) == Placement(9, 11, 1, 3, "tcp://gpu9:1234")


@pytest.mark.parametrize("said", [{"WORLD_SIZE": "8"}, {"WORLD_SIZE": "11", "RANK": "2"}])
def test_torchs_names_for_another_place_than_sruns_are_refused(said: dict[str, str]) -> None:
    with refused("rank-of-another-task", task=9, tasks=11):
        placed(THREE_MACHINES | said)


def test_mpirun_says_the_place_and_the_user_where_to_meet() -> None:
    assert placed(OPEN_MPI | MEETING) == Placement(5, 8, 1, 4, "env://")


def test_mpirun_without_a_meeting_place_is_refused() -> None:
    with refused("mpirun-without-address", processes=8):
        placed(OPEN_MPI)


def test_mpirun_inside_a_step_is_believed_about_its_own_processes() -> None:
    assert placed(ONE_MACHINE | OPEN_MPI | MEETING) == Placement(5, 8, 1, 4, "env://")


def test_sruns_own_mpi_says_nothing_new() -> None:
    assert placed(ONE_MACHINE | {"PMI_RANK": "1", "PMI_SIZE": "4"}) == placed(ONE_MACHINE)


@pytest.mark.parametrize(
    "changes",
    [
        {"RANK": "22"},
        {"LOCAL_RANK": "2"},
        {"LOCAL_WORLD_SIZE": "23", "WORLD_SIZE": "22"},
        {"RANK": "-1"},
    ],
)
def test_places_that_cannot_be_are_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        placed(TORCHRUN | changes)


@pytest.mark.parametrize(
    "said",
    [{"SLURM_GPUS_PER_TASK": "1"}, {"CUDA_VISIBLE_DEVICES": "1"}, {"ROCR_VISIBLE_DEVICES": "1"}],
)
def test_a_process_that_sees_one_gpu_of_its_own_takes_it(
    said: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "device_called", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert world._own_device("cuda", placed(THREE_MACHINES | said)) == torch.device("cuda", 0)


@pytest.mark.parametrize("said", [{}, {"CUDA_VISIBLE_DEVICES": "0"}])
def test_processes_that_would_share_a_gpu_are_refused(
    said: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "device_called", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with refused("more-processes-than-gpus", processes=3, gpus=1):
        world._own_device("cuda", placed(THREE_MACHINES | said))
