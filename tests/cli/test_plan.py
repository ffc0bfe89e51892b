"""`surefoot plan --world-size`: what it prints, from where it has it, and what it refuses; 15
seconds.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from in_one import in_one
from stated import numbers_in
from surefoot.cli.main import main

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


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["plan", *arguments])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["plan", *arguments])
    assert end.value.code == 2
    problem = capsys.readouterr().err
    assert len(problem.splitlines()) <= 8
    return problem


def written(parallel: str = '"auto"', *, batch: int = 64) -> str:
    Path("program.py").write_text(
        PROGRAM.replace("PARALLEL", parallel).replace("BATCH", str(batch))
    )
    return "program.py:build"


def section(text: str, title: str) -> list[str]:
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(title))
    rest = lines[start + 1 :]
    return rest[
        : next((place for place, line in enumerate(rest) if not line.startswith("  ")), len(rest))
    ]


@pytest.mark.slow
def test_the_published_gpt2_of_1558_million_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(
        capsys, "gpt", "--preset", "gpt2-1558m", "--world-size", "512", "--parallel", "fsdp"
    )
    assert section(text, "parameters by module")[-1].split() == ["total", "1,557,611,200"]
    memory = "\n".join(section(text, "memory per GPU, fsdp"))
    # 4 bytes x 1,557,611,200 / 512 are 12.2 MB, and what 1,600 rows in chunks of 4 are more than
    # 512 equal parts
    assert re.search(r"parameters +1[2-4]\.\d MB", memory)
    assert re.search(r"optimizer state +2[4-8]\.\d MB", memory)
    assert section(text, "strategies")[1].split()[0] == "ddp"
    assert not Path("runs").exists()


def test_every_number_of_the_machine_says_where_it_comes_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [
        "--flops",
        "400e12",
        "--bandwidth",
        "25 GB/s",
        "--gpu-memory",
        "40 GB",
        "--mfu",
        "0.5",
        "--node-size",
        "4",
    ]
    assumed = section(said(capsys, written(), "--world-size", "16", *flags), "assumptions")
    origins = [re.findall(r"\[(.*)\]", line)[0] for line in assumed]
    assert origins[:-1] == ["--node-size", "--flops", "--mfu", "--gpu-memory", "--bandwidth"]
    assert origins[-1].startswith("--node-bandwidth default: H100")
    assert "16 GPUs, 4 nodes of 4" in assumed[0]
    assert "400 TFLOP/s" in assumed[1]
    assert "25 GB/s" in assumed[4]


def test_a_strategy_that_is_set_in_a_program_is_the_one_computed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(
        capsys, written("sf.fsdp(replicas=4, reshard_after_forward=False)"), "--world-size", "16"
    )
    assert ", fsdp, 4 replicas, as set" in text
    assert [line.split("  ")[1] for line in section(text, "strategies")[1:]] == [
        "fsdp, 4 replicas, as set",
        "ddp",
        "fsdp",
        "fsdp, reshard off",
        "fsdp, 2 replicas",
    ]


def test_what_fits_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    tight = said(capsys, written(), "--world-size", "8", "--gpu-memory", "1 MB")
    words = {line.split("  ")[1]: line for line in section(tight, "strategies")[1:]}
    assert "too much" in words["ddp"]
    assert "too much" not in words["fsdp"]


@pytest.mark.parametrize(("batch", "fits"), [(64, True), (66, False)])
def test_a_batch_that_ranks_cannot_share_is_computed_with_and_named(
    batch: int, fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = section(said(capsys, written(batch=batch), "--world-size", "8"), "one step")
    assert lines[0].split() == [
        "64",
        "samples",
        "=",
        "8",
        "ranks",
        "x",
        "1",
        "micro-batch",
        "x",
        "8",
    ]
    assert (numbers_in(lines[1])[-2:] == [8, 66]) != fits  # ranks that cannot share the samples


def test_an_optimizer_that_cannot_be_sharded_is_refused_and_has_no_such_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    adafactor = ["gpt", "--world-size", "8", "--optimizer.name", "adafactor"]
    assert "[optimizer-of-whole-parameters]" in refused(capsys, *adafactor, "--parallel", "fsdp")
    rows = section(said(capsys, *adafactor), "strategies")
    assert [line.split()[0] for line in rows[1:-1]] == ["ddp"]
    assert "Adafactor" in rows[-1]


def test_one_gpu_sends_nothing_and_has_no_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, written(), "--world-size", "1")
    assert "sent by" not in text
    assert "strategies" not in text
    assert "memory per GPU, one process" in text


@pytest.mark.parametrize("recipe", ["gpt", "translation"])
def test_recipes_are_computed_without_data(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(
        capsys, recipe, "--world-size", "8", "--fsdp.gather-dtype", "bf16", "--parallel", "fsdp"
    )
    assert "not read: " in text


def test_an_outline_has_the_model_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "--model.layers",
        "1",
        "--model.width",
        "16",
        "--model.heads",
        "2",
        "--data.vocab-size",
        "280",
    ]
    Path("text.txt").write_text("the cat sat on a mat while birds sang in old trees\n" * 200)
    of_run = said(
        capsys,
        "gpt",
        *small,
        "--data.path",
        "text.txt",
        "--sample-tokens",
        "0",
        "--cloze-questions",
        "0",
    )
    on_paper = said(capsys, "gpt", *small, "--data.path", "text.txt", "--world-size", "8")
    title = "parameters by module"
    assert section(of_run, title) == section(on_paper, title)


@in_one
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--flops", "1e12"], "[option-missing]"),
        (["--world-size", "0"], "[setting-out-of-range]"),
        (
            ["--world-size", "8", "--bandwidth", "50"],
            "[setting-out-of-range]",
        ),
        (["--world-size", "8", "--mfu", "40"], "[setting-out-of-range]"),
        (["--world-size", "8", "--flops", "fast"], "[flags-not-understood]"),
        (["--world-size", "8", "--flops", "0"], "[setting-out-of-range]"),
        (["--world-size", "8", "--gpu-memory", "80"], "fits"),
        (["--world-size", "8", "--world-siez", "9"], "[setting-unknown]"),
        (
            ["--world-size", "8", "--parallel", "fsdp", "--fsdp.replicas", "3"],
            "[replicas-not-divisor]",
        ),
    ],
)
def test_what_is_wrong_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if words == "fits":  # bytes without a unit are bytes
        assert "too much" in said(capsys, "gpt", *arguments)
    else:
        assert words in refused(capsys, "gpt", *arguments)


def test_all_wrong_numbers_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    problem = refused(
        capsys, "gpt", "--world-size", "8", "--mfu", "3", "--bandwidth", "5", "--flops", "-1"
    )
    assert problem.count("[setting-out-of-range]") == 3
