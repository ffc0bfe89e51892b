"""Where a step goes: phases that add up, arithmetic by closed forms, memory, and gains that are
there; 6 seconds.
"""

from __future__ import annotations

import gzip
import json
import math
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import small_runs
import surefoot as sf
import with_closures
from in_one import in_one
from rank_processes import Ranks
from refused import refused
from surefoot.cli.main import main
from surefoot.distributed.shards import local_part
from surefoot.models.gpt import GPT
from surefoot.models.gpt_layers import GPTConfig
from surefoot.run.run import trial_steps
from surefoot.tools.profile.flops import Flops, count_flops
from surefoot.tools.profile.profile import _write_trace, interval, measure, measure_variant, rank
from surefoot.tools.profile.result import VariantGain, _suggestion
from surefoot.tools.profile.trace import memory_chart, memory_line
from surefoot.tools.profile.variants import NAMES, stepping, variants
from waiting import HANG_S, LogicalClock


class Slow(nn.Module):
    """A layer that takes its time, forward and back."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(small_runs.FEATURES, 3)
        self.forward_s = forward_s
        self.backward_s = backward_s

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.forward_s)
        outputs: Tensor = self.layer(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda _: time.sleep(self.backward_s))  # type: ignore[no-untyped-call]
        return outputs


class SlowlyRead(small_runs.Augmented):
    """Samples of which each takes a moment."""

    def __init__(self, sample_s: float = 0.004) -> None:
        super().__init__()
        self.sample_s = sample_s

    def __getitem__(self, sample: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.sample_s)
        return super().__getitem__(sample)


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(0.03)
        return super().step(closure)


def slow_loss(model: Any, batch: Any) -> Tensor:
    time.sleep(0.012)
    return F.cross_entropy(model(batch[0]), batch[1])


def plain(**changes: Any) -> sf.Run:
    """A run without anything that could be slow."""
    data = small_runs.Augmented()
    settings: dict[str, Any] = {
        "train_data": (data.inputs, data.labels),
        "splits": {},
        "early_stopping": None,
        "ema": None,
        "precision": "fp32",
    }
    return small_runs.build(None, **(settings | changes))


def watch_with(clock: LogicalClock, steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what sleeps move this clock, by which phases are measured."""
    steps.watch.now = clock
    monkeypatch.setattr(time, "sleep", clock.advance)


def test_what_is_slow_is_seen_where_it_is_and_all_phases_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = plain(
        model=lambda: Slow(0.003, 0.006),
        loss=slow_loss,
        train_data=SlowlyRead(),
        micro_batch_size=8,
        optimizer=lambda groups: SlowSGD(groups, lr=0.1),
    )
    with trial_steps(run) as parts:
        steps = stepping(parts)
        clock = LogicalClock()
        watch_with(clock, steps, monkeypatch)
        laps = [steps.make() for _ in range(3)]

    planted = {
        "waiting": 8 * 0.004,
        "forward": 0.003,
        "loss": 0.012,
        "backward": 0.006,
        "optimizer": 0.03,
    }
    for lap in laps[1:]:  # the first reads one batch ahead
        seconds_spent = {name: seconds for name, seconds in lap.items() if seconds}
        assert seconds_spent == pytest.approx(planted)
    assert steps.watch.stack == []  # each phase that was begun was ended
    in_all_phases = [sum(lap.values()) for lap in laps]
    assert clock() == pytest.approx(sum(in_all_phases))


class SlowTwice(with_closures.Twice):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        time.sleep(0.03)
        return super().step(closure)


def slow_twice(groups: Any) -> torch.optim.Optimizer:
    return SlowTwice(groups, lr=0.1)


# its rate is not 0, at which a line search would divide by 0, and no search would evaluate anything
# again
def lbfgs(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(groups, max_iter=3)


def lbfgs_with_line_search(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(groups, max_iter=3, line_search_fn="strong_wolfe")


@pytest.mark.parametrize(
    ("optimizer", "update_s", "evaluations"),
    [(slow_twice, 0.03, 2), (lbfgs, 0.0, 3), (lbfgs_with_line_search, 0.0, 3)],
)
def test_the_passes_of_a_closure_are_in_the_phases_of_passes(
    optimizer: Any, update_s: float, evaluations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = plain(
        model=lambda: Slow(0.003, 0.006), loss=slow_loss, micro_batch_size=8, optimizer=optimizer
    )
    before = with_closures.weights(run.state.model)

    with trial_steps(run) as parts:
        steps = stepping(parts)
        watch_with(LogicalClock(), steps, monkeypatch)
        lap = steps.make()

    planted = {
        "forward": evaluations * 0.003,
        "loss": evaluations * 0.012,
        "backward": evaluations * 0.006,
        "optimizer": update_s,
    }
    assert {name: lap.get(name, 0.0) for name in planted} == pytest.approx(planted)
    assert sum(lap.values()) == pytest.approx(sum(planted.values()))
    for weight, weight_before in zip(with_closures.weights(run.state.model), before, strict=True):
        assert torch.equal(weight, weight_before)


@pytest.mark.parametrize("optimizer", [slow_twice, lbfgs, lbfgs_with_line_search])
def test_variants_that_take_no_closure_are_not_offered(optimizer: Any) -> None:
    with trial_steps(plain(loss=small_runs.loss, optimizer=optimizer)) as parts:
        assert list(variants(parts, ("fused", "compile"))) == []


def optimizer_bytes(name: str) -> int:
    """Bytes of the state of an optimizer with closures, after some steps."""
    with trial_steps(with_closures.build(with_closures.source(name))) as parts:
        steps = stepping(parts)
        for _ in range(6):
            steps.make()
        return memory_line(steps.make, parts.state, parts.device).peak.optimizer


PARAMETER_BYTES = 4 * 67  # of the model of with_closures


def test_the_state_of_an_inner_optimizer_is_optimizer_state() -> None:
    # the weights before a step, and the momentum of SGD
    assert optimizer_bytes("sam") == 2 * PARAMETER_BYTES


def test_lists_of_tensors_are_optimizer_state() -> None:
    # 3 pairs, a direction and a gradient; a few numbers
    assert 0 <= optimizer_bytes("lbfgs") - 8 * PARAMETER_BYTES < 64


@pytest.fixture(scope="module")
def of_slow_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[sf.profile.Profile, Path]:
    """A profile of a run that waits for its samples, with its files."""
    place = tmp_path_factory.mktemp("profile")
    run = plain(train_data=SlowlyRead(), batch_size=4, micro_batch_size=4)
    profile = sf.profile.measure(
        run,
        what="slow",
        out=place,
        steps=8,
        speedups=("precision",),
        peak_flops=1e10,
        max_seconds=3.0,
    )
    return profile, place


def test_a_slow_loader_is_seen_as_waiting(of_slow_data: tuple[sf.profile.Profile, Path]) -> None:
    profile, _ = of_slow_data
    phases = profile.phases
    assert phases.seconds["waiting"] > 4 * 0.004
    assert phases.share("waiting") > 0.5
    assert math.isclose(sum(phases.seconds.values()), phases.step_s)
    assert phases.low_s <= phases.step_s <= phases.high_s


@pytest.mark.timing
def test_workers_are_found_to_help_where_samples_are_slow() -> None:
    run = plain(train_data=SlowlyRead(0.015), batch_size=4, micro_batch_size=4)
    with trial_steps(run) as parts:
        base = stepping(parts)
        (two,) = [variant for variant in variants(parts, ["workers"]) if variant.workers == 2]
        gain = measure_variant(two, base, limit_s=0.0)
    assert gain.problem is None
    assert gain.flag == "--workers 2"
    assert gain.speedup > 1.2  # two sleep at the same time


def assert_fits_the_page(text: str) -> None:
    """Before the paths of the files, no line is longer than 100 columns."""
    body, _, _ = text.partition("written")
    assert max(len(line) for line in body.splitlines()) <= 100


def test_the_trace_has_the_phases(of_slow_data: tuple[sf.profile.Profile, Path]) -> None:
    _, place = of_slow_data
    with gzip.open(place / "trace.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    for phase in ("waiting", "forward", "loss", "backward", "optimizer"):
        assert f"surefoot: {phase}" in names


def test_what_is_written_can_be_read(of_slow_data: tuple[sf.profile.Profile, Path]) -> None:
    profile, place = of_slow_data

    as_json = json.loads((place / "profile.json").read_text())
    assert as_json["phases"]["seconds"] == profile.phases.seconds
    assert as_json["mfu"] == profile.flops.model / profile.phases.step_s / 1e10

    text = (place / "profile.txt").read_text()
    assert text == f"{profile}\n"
    assert_fits_the_page(text)
    assert "waiting for data" in text

    assert ElementTree.parse(place / "memory.svg").getroot().tag.endswith("svg")
    named = [Path(name).name for name in profile.files]
    assert sorted(path.name for path in place.iterdir()) == sorted(named)


def test_the_memory_of_a_step_is_layers_of_which_the_lower_cover_the_higher(
    of_slow_data: tuple[sf.profile.Profile, Path],
) -> None:
    profile, _ = of_slow_data
    memory = profile.memory

    chart = memory_chart(memory)

    sizes = [dict(line.points) for line in chart.lines]
    assert all(line.area for line in chart.lines)
    for upper, lower in pairwise(sizes):
        for x, size in upper.items():
            assert size >= lower[x]
    assert chart.lines[-1].name == "parameters"
    assert set(sizes[-1].values()) == {float(memory.peak.parameters)}
    assert max(sizes[0].values()) == memory.peak.total


def test_a_run_that_was_profiled_trains_to_the_same_bits() -> None:
    profiled = small_runs.build(None, length="4 steps", precision="fp32")
    plain_run = small_runs.build(None, length="4 steps", precision="fp32")
    speedups = [name for name in NAMES if name not in ("compile", "workers")]
    sf.profile.measure(profiled, steps=4, speedups=speedups, peak_flops=1e9, max_seconds=0.5)

    profiled.train()
    plain_run.train()

    def state(run: sf.Run) -> tuple[dict[str, Tensor], list[Any]]:
        (of_optimizer,) = run.state.optimizers.values()
        return (
            dict(run.state.models["model"].state_dict()),
            list(of_optimizer.optimizer.state_dict()["state"].values()),
        )

    torch.testing.assert_close(state(profiled), state(plain_run), rtol=0, atol=0)


# --- arithmetic -----------------------------------------------------------------------------------


def flops(run: sf.Run) -> Flops:
    with trial_steps(run) as parts:
        micro_batches = list(parts.pipeline.again(0))
        return count_flops(parts.task, parts.state, micro_batches, parts.pipeline.feed(workers=0))


def test_a_linear_layer_takes_two_operations_for_each_weight_and_row() -> None:
    run = plain(model=lambda: nn.Linear(small_runs.FEATURES, 3), loss=small_runs.loss)
    # backward: the weights' gradient alone, the inputs have none
    once = 2 * 8 * small_runs.FEATURES * 3
    assert flops(run) == Flops({"forward": once, "backward": once}, again=0)


SHAPE = GPTConfig(layers=3, heads=2, width=16, context=32, vocab_size=50)


def gpt(shape: GPTConfig = SHAPE, **changes: Any) -> sf.Run:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocab_size, (40, shape.context + 1), generator=generator)

    def of_next_tokens(model: Any, batch: Any) -> Any:
        def of_hidden(hidden: Tensor, head: Tensor) -> Any:
            return sf.losses.linear_cross_entropy(hidden, head, batch[1])

        return model(batch[0], loss=of_hidden)

    settings: dict[str, Any] = {
        "model": lambda: GPT(shape),
        "loss": of_next_tokens,
        "train_data": (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        "count_fn": lambda batch: batch[1].numel(),
    }
    return plain(**(settings | changes))


@pytest.mark.parametrize("context", [32, 160])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_gpt_takes_six_operations_for_each_weight_and_token_and_attention(
    precision: str, context: int
) -> None:
    """Attention is 4 T D a token and layer forward, and 8 back: of tiles, as in bf16 here, and by
    the kernel of fp32.
    """
    # four matrices for attention and eight for the MLP in each layer; the head
    weights = 3 * 12 * 16**2 + 50 * 16
    attention = 12 * 3 * context * 16

    counted = flops(gpt(replace(SHAPE, context=context), precision=precision))

    assert counted.model == counted.formula == 8 * context * (6 * weights + attention)


def test_what_is_computed_again_is_told_apart() -> None:
    usual = flops(gpt())
    again = flops(gpt(activation_checkpointing="blocks"))
    assert again.by_phase == usual.by_phase
    # the last product of each block: no backward pass needs what it gives
    last = 3 * 2 * 8 * 32 * 4 * 16**2
    assert again.again == usual.by_phase["forward"] - last  # the head is in the loss
    assert again.done == again.model + again.again


# --- memory ---------------------------------------------------------------------------------------


def test_memory_is_told_by_what_holds_it() -> None:
    class Wide(nn.Module):
        """Two small matrices and a large result between them, which the backward pass needs."""

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 4096, bias=False)
            self.down = nn.Linear(4096, 3, bias=False)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.down(self.up(inputs).sin())
            return outputs

    run = plain(model=Wide, loss=small_runs.loss, micro_batch_size=8)
    weights = 4 * (8 + 3) * 4096
    between = 4 * 8 * 4096
    with trial_steps(run) as parts:
        steps = stepping(parts)
        for _ in range(2):
            steps.make()
        line = memory_line(steps.make, parts.state, parts.device)

    assert line.peak.parameters == weights
    assert 2 * weights <= line.peak.optimizer <= 2 * weights + 64  # two averages, and the steps
    assert 2 * between <= line.phases["forward"].activations <= 2.2 * between
    assert line.phases["optimizer"].gradients == weights
    assert line.phases["backward"].gradients <= weights
    assert max(total for _, total, _ in line.curve) == line.peak.total


# --- suggestions ----------------------------------------------------------------------------------


class Pictures(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
        )


def run_of_pictures() -> sf.Run:
    pictures = torch.randn(24, 3, 8, 8)
    labels = torch.arange(24) % 3
    return plain(
        model=Pictures,
        loss=small_runs.loss,
        train_data=list(zip(pictures, labels, strict=True)),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=False),
        micro_batch_size=4,
    )


def copy_state(run: sf.Run) -> dict[str, Tensor]:
    state = run.state.models["model"].state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


def test_everything_that_can_be_tried_is_and_leaves_the_run_as_it_was() -> None:
    run = run_of_pictures()
    before = copy_state(run)
    strides = [parameter.stride() for parameter in run.state.parameters]

    gains = []
    with trial_steps(run) as parts:
        base = stepping(parts)
        for variant in variants(parts, [*NAMES[:-1]]):
            if variant.workers is None:
                gains.append(measure_variant(variant, base, limit_s=0.0))
        meanwhile = dict(run.state.models["model"].named_parameters())
        for name, parameter in meanwhile.items():
            assert torch.equal(parameter, before[name])

    assert [gain.problem for gain in gains] == [None] * len(gains)
    assert [gain.flag for gain in gains] == [
        "--precision bf16",
        "AdamW(..., fused=True)",
        "--channels-last",
        "--precision bf16 --channels-last",
        "--micro-batch-size 2",
        "--micro-batch-size 8",
    ]
    (changes,) = {gain.changes for gain in gains if "micro" in gain.flag}
    assert "batch normalization" in str(changes)
    torch.testing.assert_close(copy_state(run), before, rtol=0, atol=0)
    assert [parameter.stride() for parameter in run.state.parameters] == strides


def test_compiling_is_offered() -> None:
    with trial_steps(run_of_pictures()) as parts:
        assert "--compile" in [variant.flag for variant in variants(parts, NAMES)]


def test_a_variant_that_fails_is_told_and_ends_nothing() -> None:
    def fail() -> Any:
        raise RuntimeError("not on this device")

    with trial_steps(plain(loss=small_runs.loss)) as parts:
        base = stepping(parts)
        (variant,) = variants(parts, ["precision"])

        gain = measure_variant(replace(variant, make=fail), base, limit_s=0.0)

        assert gain.problem == "not on this device"
        base.make()


def gain_of(
    name: str, speedup: float, low: float, high: float, problem: str | None = None
) -> VariantGain:
    return VariantGain(
        name,
        flag=f"--{name}",
        changes="",
        speedup=speedup,
        low=low,
        high=high,
        pairs=9,
        first_s=0.0,
        problem=problem,
    )


def test_gains_are_ranked_before_noise_and_noise_before_losses() -> None:
    gains = [
        gain_of("slower", 0.5, 0.4, 0.6),
        gain_of("broken", math.nan, math.nan, math.nan, "cannot"),
        gain_of("noise", 1.3, 0.9, 1.6),
        gain_of("little", 1.01, 1.005, 1.015),
        gain_of("some", 1.2, 1.1, 1.3),
        gain_of("most", 2.0, 1.9, 2.1),
    ]

    names = [gain.name for gain in rank(gains)]

    assert names == ["most", "some", "noise", "little", "slower", "broken"]


def test_a_suggestion_keeps_to_the_width_of_the_page() -> None:
    flag = "--precision bf16 --channels-last"
    changes = "every product is rounded"
    gain = replace(gain_of("both", 1.27, 1.2, 1.3), flag=flag, changes=changes)

    lines = _suggestion(gain)

    assert max(len(line) for line in lines) <= 100
    words = " ".join(lines).split()
    assert " ".join(words) == f"1.27x (1.20 to 1.30) {flag} {changes}"


@in_one
@pytest.mark.parametrize("number", range(6, 26))
def test_the_median_lies_in_the_interval_with_19_chances_in_20_and_in_no_narrower_one(
    number: int,
) -> None:

    def chance_to_be_outside(spared: int) -> float:
        """Of an interval without so many values at each end."""
        at_one_end = sum(math.comb(number, count) for count in range(spared + 1))
        return 2 * at_one_end / 2**number

    low, high = interval(list(range(number)))

    assert low == number - 1 - high
    assert chance_to_be_outside(int(low)) <= 0.05
    assert chance_to_be_outside(int(low) + 1) > 0.05


def test_fewer_steps_than_a_middle_half_needs_are_refused() -> None:
    with refused("setting-out-of-range", value=3):
        measure(plain(), steps=3)


def test_what_was_not_tried_is_not_said_to_be_no_quicker() -> None:
    profile = sf.profile.measure(
        plain(), steps=4, speedups=("precision",), peak_flops=1e10, max_seconds=0.0
    )
    assert profile.tries == []
    assert profile.not_tried == ["--precision bf16"]
    last_line = str(profile).splitlines()[-1]
    assert last_line.endswith(": --precision bf16; try --max-seconds 120")


@pytest.mark.slow
# of torch 2.13 itself
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiling_is_tried_when_asked_for() -> None:
    profile = sf.profile.measure(
        gpt(), steps=4, speedups=("compile",), peak_flops=1e10, max_seconds=HANG_S
    )
    assert [gain.problem for gain in profile.tries] == [None]
    assert "first step" in str(profile)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gpt", "translation", "images"])
def test_every_recipe_can_be_profiled(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["profile", recipe, "--out", str(tmp_path), "--steps", "4", "--max-seconds", "30"])
    text = capsys.readouterr().out
    assert "\nsuggestions" in text
    assert_fits_the_page(text)


# --- what is refused ------------------------------------------------------------------------------

PROGRAM = """
import torch, surefoot as sf

def build(loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean()):
    data = torch.zeros(8, 4), torch.zeros(8, 1)
    sgd = lambda groups: torch.optim.SGD(groups, lr=0.1)
    return sf.Run(model=lambda: torch.nn.Linear(4, 1), loss=loss, train_data=data, batch_size=4,
        optimizer=sgd, length="9 steps", console=False)

def run() -> sf.Run:
    return build()

def own_loop() -> sf.Run:
    return build(None)
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "[argument-missing]"),
        (["program.py:run", "--speedups", "wrokers"], "did you mean workers?"),
        (["program.py:run", "--speedups", "colour"], "[speedup-unknown]"),
        (["program.py:run", "--steps", "2"], "[setting-out-of-range]"),
        (["program.py:run", "--peak-flops", "much"], "[setting-out-of-range]"),
        (["program.py:run", "--max-seconds", "long"], "[flags-not-understood]"),
        (["program.py:run", "--out", "there"], "[output-into-run]"),
        (["program.py:run", "--stpes", "9"], "[setting-unknown]"),
        (["program.py:own_loop"], "[run-without-loss]"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_mistakes_are_answered_in_few_lines(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "there" / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SystemExit) as end:
        main(["profile", *arguments])

    assert end.value.code == 2
    message = capsys.readouterr().err
    assert words in message
    assert len(message.splitlines()) <= 5
    assert not (tmp_path / "runs").exists()


def test_the_verb_profiles_a_program_and_writes_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    flags = ["--speedups=none", "--peak-flops=1e9", "--steps=4", "--shapes"]

    main(["profile", "program.py:run", *flags])

    printed = capfd.readouterr()
    assert "profile of program.py:run: 4 samples per step" in printed.out
    assert "\nsuggestions: " in printed.out
    assert "    [[" in printed.out  # shapes
    # torch's own line, of memory that was allocated earlier in this process
    assert [line for line in printed.err.splitlines() if "CPUAllocator" not in line] == []
    assert (tmp_path / "runs" / "profile" / "profile.txt").read_text() == printed.out


def test_a_profile_does_not_go_into_a_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with refused("output-into-run", setting="out", value=str(tmp_path)):
        measure(plain(), out=tmp_path)


def test_a_trace_that_cannot_be_written_is_an_error_of_its_path(tmp_path: Path) -> None:
    class Trace:
        def export_chrome_trace(self, path: str) -> None:
            raise RuntimeError("no space left")

    with refused("file-not-writable", path=tmp_path / "trace.json.gz"):
        _write_trace(Trace(), tmp_path / "trace.json.gz")


def profile_on_rank(*, parallel: str, out: str) -> dict[str, Any]:
    run = plain(parallel=parallel, micro_batch_size=2, length="3 steps")

    def copy_weights() -> list[Tensor]:
        return [local_part(parameter)[0].clone() for parameter in run.state.model.parameters()]

    before = copy_weights()
    profile = measure(run, out=out, steps=4, max_seconds=1e-9, peak_flops=1e9)
    after = copy_weights()
    run.train()
    return {
        "is_restored": all(map(torch.equal, before, after)),
        "phases": list(profile.phases.seconds),
        "flops": sum(profile.flops.by_phase.values()),
        "parameter_bytes": profile.memory.peak.parameters,
        "ranks": profile.ranks,
        "names_its_rank": f"rank {run.rank} of 2 ({parallel})" in profile.setting,
        "files": [*profile.files],
        "step": run.state.step,
    }


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_each_rank_profiles_its_share_of_a_step_and_rank_0_writes(
    ranks: Ranks, parallel: str, tmp_path: Path
) -> None:
    whole_bytes = sum(parameter.nbytes for parameter in plain().state.model.parameters())

    by_rank = ranks(2, profile_on_rank, parallel=parallel, out=str(tmp_path / "profile"))

    for of_rank in by_rank:
        assert of_rank["is_restored"]
        assert of_rank["step"] == 3
        assert "communication" in of_rank["phases"]
        assert of_rank["ranks"] == 2
        assert of_rank["names_its_rank"]
    first, second = by_rank
    assert first["flops"] == second["flops"] > 0
    if parallel == "ddp":
        assert first["parameter_bytes"] == second["parameter_bytes"] == whole_bytes
    else:
        assert first["parameter_bytes"] + second["parameter_bytes"] == whole_bytes
    assert second["files"] == []
    assert json.loads((tmp_path / "profile" / "profile.json").read_text())["ranks"] == 2
