"""`surefoot plan --world-size`: what it prints, from where it has it, and what it refuses; 15
seconds.
"""

from __future__ import annotations

import re
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from command_line import error_of, output_of
from in_one import in_one
from stated import numbers_in

PROGRAM = """
import torch
import torch.nn.functional as F
import surefoot as sf

def build():
    data = torch.arange(400.0).view(200, 2), torch.arange(200.0)[:, None]
    def loss(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])
    def model():
        blocks = [torch.nn.Sequential(torch.nn.Linear(2, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 2)) for _ in range(12)]
        return torch.nn.Sequential(*blocks, torch.nn.Linear(2, 1))
    return sf.Run(model=model, loss=loss, train_data=data, batch_size=BATCH, length="3 steps",
                  optimizer=sf.optim.adamw(lr=0.1), run_dir="runs/a", precision="fp32", parallel=PARALLEL)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    return output_of(capsys, "plan", *arguments)


def error_of_plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    message = error_of(capsys, "plan", *arguments)
    assert len(message.splitlines()) <= 8
    return message


def write_program(parallel: str = '"auto"', *, batch: int = 64) -> str:
    program = PROGRAM.replace("PARALLEL", parallel).replace("BATCH", str(batch))
    Path("program.py").write_text(program)
    return "program.py:build"


def section(text: str, title: str) -> list[str]:
    """The indented lines below the one that begins with the title."""
    _, _, below = f"\n{text}".partition(f"\n{title}")
    _, *lines = below.splitlines()
    return list(takewhile(lambda line: line.startswith("  "), lines))


def strategies(text: str) -> dict[str, str]:
    """The lines of the table of strategies by their name."""
    _, *rows = section(text, "strategies")
    return {row.split("  ")[1]: row for row in rows}


@pytest.mark.slow
def test_the_published_gpt2_of_1558_million_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(
        capsys, "gpt", "--preset", "gpt2-1558m", "--world-size", "512", "--parallel", "fsdp"
    )
    assert section(text, "parameters by module")[-1].split() == ["total", "1,557,611,200"]
    memory = "\n".join(section(text, "memory per GPU, fsdp"))
    # 4 bytes x 1,557,611,200 / 512 are 12.2 MB, and what 1,600 rows in chunks of 4 are more than
    # 512 equal parts
    assert re.search(r"parameters +1[2-4]\.\d MB", memory)
    assert re.search(r"optimizer state +2[4-8]\.\d MB", memory)
    assert next(iter(strategies(text))) == "ddp"
    assert not Path("runs").exists()


def test_every_number_of_the_machine_says_where_it_comes_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [
        "--world-size=16",
        "--flops=400e12",
        "--bandwidth=25 GB/s",
        "--gpu-memory=40 GB",
        "--mfu=0.5",
        "--node-size=4",
    ]
    lines = {}
    for line in section(plan(capsys, write_program(), *flags), "assumptions"):
        (origin,) = re.findall(r"\[(.*)\]", line)
        lines[origin] = line
    *of_flags, of_default = lines
    assert of_flags == ["--node-size", "--flops", "--mfu", "--gpu-memory", "--bandwidth"]
    assert of_default.startswith("--node-bandwidth default: H100")
    assert "16 GPUs, 4 nodes of 4" in lines["--node-size"]
    assert "400 TFLOP/s" in lines["--flops"]
    assert "25 GB/s" in lines["--bandwidth"]


def test_a_strategy_that_is_set_in_a_program_is_the_one_computed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = write_program("sf.fsdp(replicas=4, reshard_after_forward=False)")
    text = plan(capsys, program, "--world-size=16")
    assert ", fsdp, 4 replicas, as set" in text
    assert list(strategies(text)) == [
        "fsdp, 4 replicas, as set",
        "ddp",
        "fsdp",
        "fsdp, reshard off",
        "fsdp, 2 replicas",
    ]


def test_a_strategy_that_does_not_fit_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    rows = strategies(plan(capsys, write_program(), "--world-size=8", "--gpu-memory=1 MB"))
    assert "too much" in rows["ddp"]
    assert "too much" not in rows["fsdp"]


@pytest.mark.parametrize(("batch", "fits"), [(64, True), (66, False)])
def test_a_batch_that_ranks_cannot_share_is_computed_with_and_named(
    batch: int, fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    text = plan(capsys, write_program(batch=batch), "--world-size=8")
    samples, note, *_ = section(text, "one step")
    assert " ".join(samples.split()) == "64 samples = 8 ranks x 1 micro-batch x 8"
    says_that_ranks_cannot_share = numbers_in(note)[-2:] == [8, 66]
    assert says_that_ranks_cannot_share != fits


def test_an_optimizer_that_cannot_be_sharded_is_refused_and_has_no_such_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    adafactor = ["gpt", "--world-size", "8", "--optimizer.name", "adafactor"]
    assert "[optimizer-of-whole-parameters]" in error_of_plan(
        capsys, *adafactor, "--parallel", "fsdp"
    )
    _, ddp, note = section(plan(capsys, *adafactor), "strategies")
    assert ddp.split()[0] == "ddp"
    assert "Adafactor" in note


def test_one_gpu_sends_nothing_and_has_no_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, write_program(), "--world-size", "1")
    assert "sent by" not in text
    assert "strategies" not in text
    assert "memory per GPU, one process" in text


@pytest.mark.parametrize("recipe", ["gpt", "translation"])
def test_recipes_are_computed_without_data(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(
        capsys, recipe, "--world-size", "8", "--fsdp.gather-dtype", "bf16", "--parallel", "fsdp"
    )
    assert "not read: " in text


def test_an_outline_has_the_model_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model.layers=1", "--model.width=16", "--model.heads=2", "--data.vocab-size=280"]
    Path("text.txt").write_text("the cat sat on a mat while birds sang in old trees\n" * 200)
    data = ["--data.path=text.txt", "--sample-tokens=0", "--cloze-questions=0"]

    of_run = plan(capsys, "gpt", *model, *data)
    of_outline = plan(capsys, "gpt", *model, "--data.path=text.txt", "--world-size=8")

    title = "parameters by module"
    assert section(of_run, title) == section(of_outline, title) != []


def test_a_memory_without_a_unit_is_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "too much" in plan(capsys, "gpt", "--world-size=8", "--gpu-memory=80")


@in_one
@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--flops 1e12", "option-missing"),
        ("--world-size 0", "setting-out-of-range"),
        ("--world-size 8 --bandwidth 50", "setting-out-of-range"),
        ("--world-size 8 --mfu 40", "setting-out-of-range"),
        ("--world-size 8 --flops fast", "flags-not-understood"),
        ("--world-size 8 --flops 0", "setting-out-of-range"),
        ("--world-size 8 --world-siez 9", "setting-unknown"),
        ("--world-size 8 --parallel fsdp --fsdp.replicas 3", "replicas-not-divisor"),
    ],
)
def test_what_is_wrong_is_refused(
    flags: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"[{code}]" in error_of_plan(capsys, "gpt", *flags.split())


def test_all_wrong_numbers_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--world-size=8", "--mfu=3", "--bandwidth=5", "--flops=-1"]
    message = error_of_plan(capsys, "gpt", *flags)
    assert message.count("[setting-out-of-range]") == 3
