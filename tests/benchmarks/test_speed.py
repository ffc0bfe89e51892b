"""The benchmarks of the machine's use run, and count what they say they count. 2 seconds."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import small_runs
from surefoot.config import speed_table

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a script defines, by its name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return lambda name: runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))


def test_a_tiny_gpt_is_trained_all_ways_and_its_utilisation_follows_from_the_formula(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peak = 1e9
    arguments = ["--tiny", "--rounds", "1", "--steps", "1", "--peak", str(peak)]
    monkeypatch.setattr(sys, "argv", ["gpt2_mfu.py", *arguments])

    benchmark("gpt2_mfu")["main"]()

    _, sizes, rounds, *rows = capsys.readouterr().out.splitlines()
    operations = 6 * (2 * 12 * 32 * 32 + 128 * 32) + 12 * 2 * 32 * 32  # 6 N + 12 L T D
    assert f"{operations / 1e6:.4g} million operations a token" in sizes
    assert rounds.startswith("1 rounds of 1 steps")
    assert [row[:22].strip() for row in rows] == ["plain", "surefoot", "surefoot, all logits"]
    for row in rows:
        tokens_per_s = float(row[22:34].replace(",", ""))
        percent = float(row.split("MFU ")[1].split("%")[0])
        assert percent == pytest.approx(100 * tokens_per_s * operations / peak, abs=0.06)


def test_the_plain_gpt_and_surefoots_have_as_many_numbers_that_are_multiplied_with(
    benchmark: Any,
) -> None:
    import surefoot as sf

    shape = {"layers": 2, "heads": 2, "width": 16, "context": 8, "vocab_size": 32}
    plain = benchmark("plain_gpt")["PlainGPT"](**shape)
    ours = sf.models.GPT(sf.models.GPTConfig(2, 2, 16, 8, 32, family="gpt2", tie_embeddings=True))
    assert count_in_matrices(plain) == count_in_matrices(ours)


def count_in_matrices(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)


def test_each_way_of_a_shape_is_timed_and_what_was_chosen_is_said(benchmark: Any) -> None:
    script = benchmark("machine")

    def build_perceptron() -> nn.Module:
        model: nn.Module = script["perceptron"](8)
        return model

    case = script["classifier"](
        build_perceptron, build_perceptron, (32,), batch=4, length=10, steps=1
    )

    chosen, times = script["measured"](case, rounds=1, length=10)

    assert re.fullmatch(
        r"  auto: fp32 \(auto: .+\), not compiled \(auto: no faster in measurements\)", chosen
    )
    numbers = re.findall(r"\d[\d.e+]*(?= times|,|;)", times.replace("fp32", ""))
    plain, fp32, auto, over_plain, over_fp32 = map(float, numbers)
    assert over_plain == pytest.approx(plain / auto, rel=0.05)
    assert over_fp32 == pytest.approx(fp32 / auto, rel=0.05)


Shape = tuple[int, int, list[float]]  # width, rows, and what bf16 gained in each measurement
MUCH: Shape = (64, 32, [1.3, 1.2, 1.4])
LITTLE: Shape = (8, 16, [1.1, 0.9, 1.0])


@pytest.mark.parametrize(
    ("shapes", "row"),
    [
        pytest.param(
            [MUCH, (128, 16, [2.0, 2.0, 2.0])],
            'Row("linear", (64, 128), (32, 32), (1, 1), {"bf16": 1.20}),',
            id="all gain",
        ),
        pytest.param(
            [MUCH, (128, 50, [2.0, 2.0]), (128, 99, [2.0, 2.0])],
            'Row("linear", (64, 128), (50, 99), (1, 1), {"bf16": 1.20}),',
            id="all gain, the wider ones with more rows",
        ),
        pytest.param(
            [LITTLE, (8, 64, [1.0, 0.9]), (16, 32, [0.9, 0.8])],
            'Row("linear", (8, 16), (16, 32), (1, 1), {"bf16": 1.10}),',
            id="none gains",
        ),
        pytest.param([LITTLE, MUCH], None, id="one gains"),
        pytest.param([(64, 32, [1.3, 1.1, 1.4])], None, id="not clear"),
    ],
)
def test_a_region_is_in_the_table_if_all_its_shapes_gain_or_none_does(
    shapes: list[Shape], row: str | None, benchmark: Any
) -> None:
    script = benchmark("precision")
    measured = []
    for width, rows, gains in shapes:
        facts = speed_table.Facts("amx_bf16", "2.13", "linear", width, rows)
        measured.append(script["Measured"](facts, 1.0, {"bf16": gains}))

    assert script["row_of"](measured) == row


def test_measuring_again_replaces_the_rows_of_that_processor_alone(
    benchmark: Any, tmp_path: Path
) -> None:
    rewrite = benchmark("precision")["rewrite"]
    table = tmp_path / "speed_table.py"
    results = tmp_path / "precision.txt"
    source = Path(str(speed_table.__file__)).read_text()
    table.write_text(source)
    for instructions, gain in (("slow", 1.0), ("fast", 1.5), ("slow", 1.2)):
        row = f'Row("linear", (1, 9), (1, 9), (1, 1), {{"bf16": {gain:.2f}}}),'
        lines = [
            f"# 2026-11-22, benchmarks/precision.py, {instructions}, torch 0.1 (0.1.2), 1 thread",
            f"region: {row}",
        ]
        rewrite(
            [row], lines, instructions=instructions, version="0.1", table=table, results=results
        )

    rows_of_key = {key: rows for key, (_, rows) in runpy.run_path(str(table))["TABLE"].items()}
    (slow,) = rows_of_key.pop(("slow", "0.1"))
    (fast,) = rows_of_key.pop(("fast", "0.1"))
    assert slow.gains["bf16"] == 1.2
    assert fast.gains["bf16"] == 1.5
    rows_before = {key: rows for key, (_, rows) in speed_table.TABLE.items()}
    assert {key: len(rows) for key, rows in rows_of_key.items()} == {
        key: len(rows) for key, rows in rows_before.items()
    }
    assert results.read_text().count("# 2026-11-22") == 2
    assert '"bf16": 1.00' not in results.read_text()


@pytest.mark.parametrize("name", ["fashion_mnist", "multi30k"])
def test_the_seconds_of_training_are_those_without_opening_evaluating_and_saving(
    benchmark: Any, name: str
) -> None:
    run = small_runs.build(None)
    clock = run.parts.run_state.clock
    clock.total_s |= {
        "opening": 1e3,
        "starting": 1.0,
        "training": 2.0,
        "data_wait": 4.0,
        "evaluating": 1e3,
        "saving": 1e3,
    }
    assert benchmark(name)["seconds_of_training"](run) == 7.0
