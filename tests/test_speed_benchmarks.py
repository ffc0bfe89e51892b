"""The benchmarks of the machine's use run, and count what they say they count. 2 seconds."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a script defines, by its name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return lambda name: runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))


def test_a_tiny_gpt_is_trained_all_ways_and_its_utilisation_follows_from_the_formula(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpt2_mfu.py", "--tiny", "--rounds", "1", "--steps", "1", "--peak", "1e9"])
    benchmark("gpt2_mfu")["main"]()
    lines = capsys.readouterr().out.splitlines()
    operations = 6 * (2 * 12 * 32 * 32 + 128 * 32) + 12 * 2 * 32 * 32  # 6 N + 12 L T D
    assert f"{operations / 1e6:.4g} million operations a token" in lines[1]
    for line in lines[2:]:
        rate, share = (float(line[22:34].replace(",", "")), float(line.split("MFU ")[1].split("%")[0]))
        assert share == pytest.approx(rate * operations / 1e9 * 100, abs=0.06)
    assert [line[:22].strip() for line in lines[2:]] == ["plain", "surefoot", "surefoot, all logits"]


def test_the_plain_gpt_and_surefoots_have_as_many_numbers_that_are_multiplied_with(benchmark: Any) -> None:
    import surefoot as sf

    shape = {"layers": 2, "heads": 2, "width": 16, "context": 8, "vocabulary": 32}
    plain = benchmark("plain_gpt")["PlainGPT"](**shape)
    ours = sf.models.GPT(sf.models.GPTShape(2, 2, 16, 8, 32, family="gpt2", tied=True))
    numbers = [sum(held.numel() for held in model.parameters() if held.ndim == 2) for model in (plain, ours)]
    assert numbers[0] == numbers[1]


def test_each_way_of_a_shape_is_timed_and_what_was_chosen_is_said(benchmark: Any) -> None:
    script = benchmark("machine")
    case = script["classifier"](
        lambda: script["perceptron"](8), lambda: script["perceptron"](8), (32,), batch=4, length=10, steps=1
    )
    chosen, times = script["measured"](case, rounds=1, length=10)
    assert re.fullmatch(r"  auto: fp32 \(auto: .+\), not compiled \(auto: no faster where it was measured\)", chosen)
    plain, fp32, auto, over_plain, over_fp32 = (
        float(number) for number in re.findall(r"\d[\d.e+]*(?= times|,|;)", times.replace("fp32", ""))
    )
    assert over_plain == pytest.approx(plain / auto, rel=0.05)
    assert over_fp32 == pytest.approx(fp32 / auto, rel=0.05)
