"""The benchmarks of the machine's use run, and count what they say they count. 2 seconds."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

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
    monkeypatch.setattr(
        sys, "argv", ["gpt2_mfu.py", "--tiny", "--rounds", "1", "--steps", "1", "--peak", "1e9"]
    )
    benchmark("gpt2_mfu")["main"]()
    lines = capsys.readouterr().out.splitlines()
    operations = 6 * (2 * 12 * 32 * 32 + 128 * 32) + 12 * 2 * 32 * 32  # 6 N + 12 L T D
    assert f"{operations / 1e6:.4g} million operations a token" in lines[1]
    assert lines[2].startswith("1 rounds of 1 steps")
    for line in lines[3:]:
        rate = float(line[22:34].replace(",", ""))
        share = float(line.split("MFU ")[1].split("%")[0])
        assert share == pytest.approx(rate * operations / 1e9 * 100, abs=0.06)
    assert [line[:22].strip() for line in lines[3:]] == [
        "plain",
        "surefoot",
        "surefoot, all logits",
    ]


def test_the_plain_gpt_and_surefoots_have_as_many_numbers_that_are_multiplied_with(
    benchmark: Any,
) -> None:
    import surefoot as sf

    shape = {"layers": 2, "heads": 2, "width": 16, "context": 8, "vocab_size": 32}
    plain = benchmark("plain_gpt")["PlainGPT"](**shape)
    ours = sf.models.GPT(sf.models.GPTConfig(2, 2, 16, 8, 32, family="gpt2", tie_embeddings=True))
    numbers = [
        sum(held.numel() for held in model.parameters() if held.ndim == 2)
        for model in (plain, ours)
    ]
    assert numbers[0] == numbers[1]


def test_each_way_of_a_shape_is_timed_and_what_was_chosen_is_said(benchmark: Any) -> None:
    script = benchmark("machine")
    case = script["classifier"](
        lambda: script["perceptron"](8),
        lambda: script["perceptron"](8),
        (32,),
        batch=4,
        length=10,
        steps=1,
    )
    chosen, times = script["measured"](case, rounds=1, length=10)
    assert re.fullmatch(
        r"  auto: fp32 \(auto: .+\), not compiled \(auto: no faster in measurements\)", chosen
    )
    plain, fp32, auto, over_plain, over_fp32 = (
        float(number)
        for number in re.findall(r"\d[\d.e+]*(?= times|,|;)", times.replace("fp32", ""))
    )
    assert over_plain == pytest.approx(plain / auto, rel=0.05)
    assert over_fp32 == pytest.approx(fp32 / auto, rel=0.05)


def measured_shape(script: Any, width: int, rows: int, *bf16: float) -> Any:
    facts = speed_table.Facts("amx_bf16", "2.13", "linear", width, rows)
    return script["Measured"](facts, 1.0, {"bf16": list(bf16)})


def test_a_region_is_in_the_table_if_all_its_shapes_gain_or_none_does(benchmark: Any) -> None:
    script = benchmark("precision")
    much = measured_shape(script, 64, 32, 1.3, 1.2, 1.4)
    little = measured_shape(script, 8, 16, 1.1, 0.9, 1.0)
    wide = measured_shape(script, 128, 16, 2.0, 2.0, 2.0)
    assert (
        script["row_of"]([much, wide])
        == 'Row("linear", (64, 128), (32, 32), (1, 1), {"bf16": 1.20}),'
    )
    wider = [measured_shape(script, 128, rows, 2.0, 2.0) for rows in (50, 99)]
    assert (
        script["row_of"]([much, *wider])
        == 'Row("linear", (64, 128), (50, 99), (1, 1), {"bf16": 1.20}),'
    )
    none = [
        little,
        measured_shape(script, 8, 64, 1.0, 0.9),
        measured_shape(script, 16, 32, 0.9, 0.8),
    ]
    assert script["row_of"](none) == 'Row("linear", (8, 16), (16, 32), (1, 1), {"bf16": 1.10}),'
    assert script["row_of"]([little, much]) is None
    assert script["row_of"]([measured_shape(script, 64, 32, 1.3, 1.1, 1.4)]) is None  # not clear


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
    found = runpy.run_path(str(table))["TABLE"]
    gains = {
        key: [row.gains["bf16"] for row in rows]
        for key, (_, rows) in found.items()
        if key[1] == "0.1"
    }
    assert gains == {("slow", "0.1"): [1.2], ("fast", "0.1"): [1.5]}
    assert {key: len(rows) for key, (_, rows) in found.items() if key[1] != "0.1"} == {
        key: len(rows) for key, (_, rows) in speed_table.TABLE.items()
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
