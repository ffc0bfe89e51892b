"""What Slurm says of a step, read from environments as it writes them. (about 2 s)"""

from __future__ import annotations

from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given, strategies
from hypothesis.strategies import DrawFn, composite

from fake_slurm import ONE_MACHINE, OUTSIDE_OF_STEPS, THREE_MACHINES
from refused import refused
from surefoot.distributed.slurm import hosts, port, task, tasks_per_node
from surefoot.errors import ConfigError

CONTRADICTIONS = {
    "rank": (
        {"SLURM_PROCID": "11"},
        "SLURM_PROCID = 11",
    ),
    "local rank": ({"SLURM_LOCALID": "3"}, "SLURM_LOCALID = 3"),
    "machine": ({"SLURM_NODEID": "3"}, "SLURM_NODEID = 3"),
    "tasks of machines": (
        {"SLURM_STEP_TASKS_PER_NODE": "4(x3)"},
        "4, 4, 4 on gpu001, gpu002, gpu007",
    ),
    "machines": ({"SLURM_STEP_NODELIST": "gpu001"}, "4, 4, 3 on gpu001"),
    "form of tasks": ({"SLURM_STEP_TASKS_PER_NODE": "4*2"}, "'4*2'"),
    "form of machines": ({"SLURM_STEP_NODELIST": "gpu[1-"}, "'gpu[1-'"),
    "number": ({"SLURM_PROCID": "two"}, "'two'"),
}


def test_the_place_of_a_task_on_one_machine() -> None:
    found = task(ONE_MACHINE)
    assert found is not None
    assert (found.rank, found.tasks, found.local_rank, found.local_tasks, found.host) == (
        1,
        4,
        1,
        4,
        "127.0.0.1",
    )


def test_the_place_of_a_task_on_machines_with_different_numbers_of_tasks() -> None:
    found = task(THREE_MACHINES)
    assert found is not None
    assert (found.rank, found.tasks, found.local_rank, found.local_tasks, found.host) == (
        9,
        11,
        1,
        3,
        "gpu001",
    )


@pytest.mark.parametrize("where", OUTSIDE_OF_STEPS)
def test_outside_of_a_step_of_several_tasks_a_process_is_alone(where: str) -> None:
    assert task(OUTSIDE_OF_STEPS[where]) is None


def test_tasks_a_machine_are_read_from_what_the_user_asked_for_where_srun_does_not_say_them() -> (
    None
):
    kept = {
        key: value for key, value in THREE_MACHINES.items() if not key.endswith("TASKS_PER_NODE")
    }
    even = {"SLURM_STEP_NUM_TASKS": "12", "SLURM_NTASKS_PER_NODE": "4"}
    found = task(kept | even)
    assert found is not None
    assert (found.tasks, found.local_tasks) == (12, 4)


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_contradictions_are_told_in_one_message(what: str) -> None:
    changes, said = CONTRADICTIONS[what]
    with refused("slurm-environment-unusable") as told:
        task(THREE_MACHINES | changes)
    assert said in str(told.value.problem)


@pytest.mark.parametrize("name", ["SLURM_LOCALID", "SLURM_JOB_ID"])
def test_what_is_missing_is_named(name: str) -> None:
    with refused("slurm-environment-unusable") as told:
        task({key: value for key, value in THREE_MACHINES.items() if key != name})
    assert name in str(told.value.problem)


def test_a_step_without_machines_is_told() -> None:
    kept = {key: value for key, value in THREE_MACHINES.items() if not key.endswith("NODELIST")}
    with refused("slurm-environment-unusable") as told:
        task(kept)
    assert "SLURM_STEP_NODELIST" in str(told.value.problem)


def test_jobs_of_a_day_a_second_step_and_a_requeued_job_meet_at_different_ports() -> None:
    of_jobs = {port(job=job, step=0, restarts=0) for job in range(901593, 901593 + 4096)}
    assert of_jobs == set(range(61440, 65536))
    found = {
        port(job=5, step=step, restarts=restarts) for step in range(8) for restarts in range(8)
    }
    assert len(found) == 64


def test_a_requeued_job_meets_at_another_port_than_before() -> None:
    first = task(THREE_MACHINES)
    again = task(THREE_MACHINES | {"SLURM_RESTART_COUNT": "1"})
    assert first is not None
    assert again is not None
    assert first.port != again.port


PLAIN = strategies.text("abcxyz0123456789-._", min_size=1, max_size=4)


@composite
def ranges(draw: DrawFn) -> tuple[str, list[str]]:
    """What stands in brackets, and what it means."""
    shown = []
    meant = []
    for _ in range(draw(strategies.integers(1, 3))):
        width = draw(strategies.integers(1, 4))
        first = draw(strategies.integers(0, 10**width - 1))
        last = first + draw(strategies.integers(0, 3))
        alone = draw(strategies.booleans())
        shown.append(str(first).zfill(width) + ("" if alone else "-" + str(last).zfill(width)))
        meant += [
            str(number).zfill(width) for number in range(first, (first if alone else last) + 1)
        ]
    return f"[{','.join(shown)}]", meant


@composite
def nodelists(draw: DrawFn) -> tuple[str, list[str]]:
    """A list as Slurm's manual describes it, and the machines in it."""
    shown = []
    meant = []
    for _ in range(draw(strategies.integers(1, 3))):
        pieces = draw(
            strategies.lists(
                strategies.one_of(PLAIN.map(lambda text: (text, [text])), ranges()),
                min_size=1,
                max_size=3,
            )
        )
        shown.append("".join(text for text, _ in pieces))
        meant += ["".join(parts) for parts in product(*(names for _, names in pieces))]
    return ",".join(shown), meant


@given(nodelists())
def test_a_node_list_means_every_combination_of_its_ranges_in_order(
    drawn: tuple[str, list[str]],
) -> None:
    text, meant = drawn
    assert hosts(text) == meant


@given(strategies.text("a1[]-,( x)\n", max_size=8))
def test_whatever_else_stands_there_is_refused_or_read_but_nothing_else_happens(text: str) -> None:
    for read in (hosts, tasks_per_node):
        with suppress(ConfigError):
            assert all(read(text))


@given(strategies.lists(strategies.integers(1, 200), min_size=1, max_size=20))
def test_compressed_numbers_of_tasks_mean_what_was_compressed(counts: list[int]) -> None:
    shown: list[list[int]] = []
    for count in counts:
        if shown and shown[-1][0] == count:
            shown[-1][1] += 1
        else:
            shown.append([count, 1])
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in shown)
    assert tasks_per_node(text) == counts
