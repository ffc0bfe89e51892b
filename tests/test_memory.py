"""Memory as it is measured, against sums of bytes; and what is free, against made-up files of the
system. (1 s)
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import nn

from refused import refused
from surefoot import memory
from surefoot.errors import Setting
from surefoot.memory import free_bytes, parsed_bytes, peak, tensor_bytes

CPU = torch.device("cpu")


def test_the_peak_is_the_most_that_lives_at_one_time() -> None:
    with peak(CPU) as measured:
        first = torch.zeros(1000)  # 4,000
        second = first + 1  # 8,000
        del first
        third = torch.zeros(500)  # 6,000
        del second, third
        torch.zeros(100)
    assert measured.memory_bytes == 8000


def test_what_was_there_before_and_views_of_it_are_not_counted() -> None:
    weight = torch.zeros(100, 100)
    inputs = torch.zeros(10, 100)
    with peak(CPU) as measured:
        result = inputs @ weight.t()
        view = result.view(100, 10)[2:].t()
    assert view.shape == (10, 98)
    assert measured.memory_bytes == 10 * 100 * 4


@pytest.mark.parametrize("rows", [10, 40])
def test_a_backward_pass_holds_activations_and_gradients(rows: int) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    inputs = torch.randn(rows, 32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with peak(CPU) as measured:
        model(inputs).square().sum().backward()
    activations = rows * (64 + 64 + 10 + 10)  # of both layers, of the ReLU, of the square
    least = 4 * activations
    most = 4 * (activations + parameters + 2 * rows * 64)
    assert least <= measured.memory_bytes <= most


def test_it_agrees_with_the_allocator_as_torch_profiles_it() -> None:
    # no convolution: some processors need scratch memory for it, which is no output of an operator
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(192, 512), nn.ReLU(), nn.LayerNorm(512), nn.Linear(512, 10)
    )
    images = torch.randn(20, 3, 8, 8)
    labels = torch.zeros(20, dtype=torch.long)

    def pass_once() -> None:
        nn.functional.cross_entropy(model(images), labels).backward()
        model.zero_grad()

    pass_once()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        pass_once()
    with peak(CPU) as measured:
        pass_once()

    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    allocated_bytes = [*accumulate(event.nbytes() for event in events)]
    assert measured.memory_bytes == pytest.approx(max(allocated_bytes), rel=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_allocator_is_asked() -> None:
    device = torch.device("cuda")
    with peak(device) as measured:
        tensor = torch.zeros(1 << 20, device=device)
        del tensor
    assert measured.memory_bytes == 4 << 20
    assert 0 < free_bytes(device) <= torch.cuda.get_device_properties(device).total_memory


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GB", 8_000_000_000),
        ("8 gb", 8_000_000_000),
        ("512MiB", 512 * 2**20),
        ("1.5 kB", 1500),
        ("100", 100),
    ],
)
def test_bytes_have_units(text: str, size_bytes: int) -> None:
    assert parsed_bytes(text, setting="memory") == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "8 Gb/s", "-1GB", "0GB", "8 apples", "1e3"])
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with refused("not-a-size-in-bytes", setting="memory", value=text):
        parsed_bytes(text, setting="memory")


# --- what is free ---------------------------------------------------------------------------------


def test_what_the_system_says_is_available(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    5000 kB\n")
    assert memory._available_bytes(file) == 5000 * 1024


def test_a_system_that_says_nothing_of_its_memory(tmp_path: Path) -> None:
    assert memory._available_bytes(tmp_path / "none") is None


def test_control_groups_limit_it_and_file_cache_is_free(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/outer/inner\n")
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("400\n")
    (inner.parent / "memory.max").write_text("1000\n")
    (inner.parent / "memory.current").write_text("700\n")
    (inner.parent / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert memory._left_in_groups(tmp_path, tmp_path / "own") == [450]


def test_the_older_kind_of_control_groups_too(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("4:memory:/mine\n1:cpu:/\n0::/\n")
    mine = tmp_path / "memory" / "mine"
    mine.mkdir(parents=True)
    (mine / "memory.limit_in_bytes").write_text("1000\n")
    (mine / "memory.usage_in_bytes").write_text("100\n")
    assert memory._left_in_groups(tmp_path, tmp_path / "own") == [900]


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no Linux")
def test_some_memory_is_free_here() -> None:
    assert 1e6 < free_bytes(CPU) < 1e14


def test_a_device_that_does_not_tell_needs_to_be_told() -> None:
    with refused("free-memory-unknown") as caught:
        free_bytes(torch.device("meta"))
    assert caught.value.remedies == (Setting("memory", "8GB"),)


def test_tensors_that_are_made_one_after_another_are_each_counted() -> None:
    assert tensor_bytes(torch.zeros(length) for length in (1, 2, 3)) == 24
