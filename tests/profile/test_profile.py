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


def slept(seconds: float) -> None:
    time.sleep(seconds)


class Slow(nn.Module):
    """A layer that takes its time, forward and back."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(small_runs.FEATURES, 3)
        self.forward_s = forward_s
        self.backward_s = backward_s

    def forward(self, inputs: Tensor) -> Tensor:
        slept(self.forward_s)
        outputs: Tensor = self.layer(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda _: slept(self.backward_s))  # type: ignore[no-untyped-call]
        return outputs


class SlowlyRead(small_runs.Augmented):
    """Samples of which each takes a moment."""

    def __init__(self, each_s: float = 0.004) -> None:
        super().__init__()
        self.each_s = each_s

    def __getitem__(self, sample: int) -> tuple[Tensor, Tensor]:
        slept(self.each_s)
        return super().__getitem__(sample)


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        slept(0.03)
        return super().step(closure)


def loss(model: Any, batch: Any) -> Tensor:
    slept(0.012)
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


def test_what_is_slow_is_seen_where_it_is_and_all_phases_add_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = plain(
        model=lambda: Slow(0.003, 0.006),
        loss=loss,
        train_data=SlowlyRead(),
        micro_batch_size=8,
        optimizer=lambda groups: SlowSGD(groups, lr=0.1),
    )
    with trial_steps(run) as parts:
        steps = stepping(parts)
        clock = LogicalClock()
        steps.watch.now = clock
        monkeypatch.setattr(time, "sleep", clock.advance)
        laps = [steps.make() for _ in range(3)]
    planted = {
        "waiting": 8 * 0.004,
        "forward": 0.003,
        "loss": 0.012,
        "backward": 0.006,
        "optimizer": 0.03,
    }
    for lap in laps[1:]:  # the first reads one batch ahead
        assert {name: seconds for name, seconds in lap.items() if seconds} == pytest.approx(planted)
    assert steps.watch.stack == []  # each phase that was begun was ended
    assert clock() == pytest.approx(sum(sum(lap.values()) for lap in laps))


class SlowTwice(with_closures.Twice):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        slept(0.03)
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "own_s", "evaluations"),
    [
        (lambda groups: SlowTwice(groups, lr=0.1), 0.03, 2),
        # its rate is not 0, at which a line search would divide by 0, and no search would evaluate
        # anything again
        (lambda groups: torch.optim.LBFGS(groups, max_iter=3), 0.0, 3),
        (
            lambda groups: torch.optim.LBFGS(groups, max_iter=3, line_search_fn="strong_wolfe"),
            0.0,
            3,
        ),
    ],
    ids=["twice", "lbfgs", "line search"],
)
def test_the_passes_of_a_closure_are_in_the_phases_of_passes(
    optimizer: Any, own_s: float, evaluations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = plain(
        model=lambda: Slow(0.003, 0.006), loss=loss, micro_batch_size=8, optimizer=optimizer
    )
    before = with_closures.weights(run.state.model)
    with trial_steps(run) as parts:
        assert not [
            each.name for each in variants(parts, ("fused", "compile"))
        ]  # neither takes a closure
        steps = stepping(parts)
        clock = LogicalClock()
        steps.watch.now = clock
        monkeypatch.setattr(time, "sleep", clock.advance)
        lap = steps.make()
    passes = {
        name: evaluations * each_s
        for name, each_s in (("forward", 0.003), ("loss", 0.012), ("backward", 0.006))
    }
    planted = passes | {"optimizer": own_s}
    assert {name: lap.get(name, 0.0) for name in planted} == pytest.approx(planted)
    assert sum(lap.values()) == pytest.approx(sum(planted.values()))
    assert all(map(torch.equal, with_closures.weights(run.state.model), before))


def test_the_state_of_an_inner_optimizer_and_lists_of_tensors_are_optimizer_state() -> None:
    held = {}
    for name in ("sam", "lbfgs"):
        run = with_closures.build(with_closures.source(name))
        with trial_steps(run) as parts:
            steps = stepping(parts)
            for _ in range(6):
                steps.make()
            held[name] = memory_line(steps.make, parts.state, parts.device).peak.optimizer
    copy = 4 * 67  # bytes of the parameters
    assert held["sam"] == 2 * copy  # the weights before a step, and the momentum of SGD
    assert 0 <= held["lbfgs"] - 8 * copy < 64  # 3 pairs, a direction and a gradient; a few numbers


@pytest.fixture(scope="module")
def of_slow_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[sf.profile.Profile, Path]:
    """A profile of a run that waits for its samples, with its files."""
    place = tmp_path_factory.mktemp("profile")
    run = plain(train_data=SlowlyRead(), batch_size=4, micro_batch_size=4)
    return sf.profile.measure(
        run,
        what="slow",
        out=place,
        steps=8,
        speedups=("precision",),
        peak_flops=1e10,
        max_seconds=3.0,
    ), place


def test_a_slow_loader_is_seen_as_waiting(of_slow_data: tuple[sf.profile.Profile, Path]) -> None:
    phases = of_slow_data[0].phases
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
        found = measure_variant(two, base, limit_s=0.0)
    assert found.problem is None
    assert found.flag == "--workers 2"
    assert found.speedup > 1.2  # two sleep at the same time


def test_what_is_written_can_be_read(of_slow_data: tuple[sf.profile.Profile, Path]) -> None:
    found, place = of_slow_data
    with gzip.open(place / "trace.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {
        f"surefoot: {phase}" for phase in ("waiting", "forward", "loss", "backward", "optimizer")
    } <= names
    held = json.loads((place / "profile.json").read_text())
    assert held["phases"]["seconds"] == found.phases.seconds
    assert held["mfu"] == found.flops.model / found.phases.step_s / 1e10
    text = (place / "profile.txt").read_text()
    assert text == f"{found}\n"
    assert max(map(len, text.partition("written")[0].splitlines())) <= 100
    assert "waiting for data" in text
    assert ElementTree.parse(place / "memory.svg").getroot().tag.endswith("svg")
    assert sorted(path.name for path in place.iterdir()) == sorted(
        Path(name).name for name in found.files
    )


def test_the_memory_of_a_step_is_layers_of_which_the_lower_cover_the_higher(
    of_slow_data: tuple[sf.profile.Profile, Path],
) -> None:
    memory = of_slow_data[0].memory
    chart = memory_chart(memory)
    sizes = [dict(line.points) for line in chart.lines]
    assert all(line.area for line in chart.lines)
    assert all(upper[x] >= lower[x] for upper, lower in pairwise(sizes) for x in upper)
    assert chart.lines[-1].name == "parameters"
    assert set(sizes[-1].values()) == {float(memory.peak.parameters)}
    assert max(sizes[0].values()) == memory.peak.total


def test_a_run_that_was_profiled_trains_to_the_same_bits(
    of_slow_data: tuple[sf.profile.Profile, Path],
) -> None:
    def trained(*, profiled: bool) -> sf.Run:
        run = small_runs.build(None, length="4 steps", precision="fp32")
        if profiled:
            sf.profile.measure(
                run,
                steps=4,
                speedups=[name for name in NAMES if name not in ("compile", "workers")],
                peak_flops=1e9,
                max_seconds=0.5,
            )
        run.train()
        return run

    one, other = trained(profiled=True), trained(profiled=False)
    torch.testing.assert_close(
        {**one.state.models["model"].state_dict()},
        {**other.state.models["model"].state_dict()},
        rtol=0,
        atol=0,
    )
    (first,) = one.state.optimizers.values()
    (second,) = other.state.optimizers.values()
    states = [[*held.optimizer.state_dict()["state"].values()] for held in (first, second)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


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
    tokens = torch.randint(
        shape.vocab_size, (40, shape.context + 1), generator=torch.Generator().manual_seed(1)
    )
    settings: dict[str, Any] = {
        "model": lambda: GPT(shape),
        "loss": lambda model, batch: model(
            batch[0],
            loss=lambda hidden, head: sf.losses.linear_cross_entropy(hidden, head, batch[1]),
        ),
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
    found = flops(gpt(replace(SHAPE, context=context), precision=precision))
    assert found.model == found.formula == 8 * context * (6 * weights + 12 * 3 * context * 16)


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
            self.up, self.down = nn.Linear(8, 4096, bias=False), nn.Linear(4096, 3, bias=False)

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
    assert max(held for _, held, _ in line.curve) == line.peak.total


# --- suggestions ----------------------------------------------------------------------------------


class Pictures(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
        )


def test_everything_that_can_be_tried_is_and_leaves_the_run_as_it_was() -> None:
    pictures = torch.randn(24, 3, 8, 8)
    labels = torch.arange(24) % 3
    run = plain(
        model=Pictures,
        loss=small_runs.loss,
        train_data=[(picture, label) for picture, label in zip(pictures, labels, strict=True)],
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=False),
        micro_batch_size=4,
    )
    before = {name: held.clone() for name, held in run.state.models["model"].state_dict().items()}
    strides = [parameter.stride() for parameter in run.state.parameters]
    with trial_steps(run) as parts:
        base = stepping(parts)
        found = [
            measure_variant(variant, base, limit_s=0.0)
            for variant in variants(parts, [*NAMES[:-1]])
            if variant.workers is None
        ]
        offered = [variant.flag for variant in variants(parts, NAMES)]
        trained = {
            name: held.clone() for name, held in run.state.models["model"].named_parameters()
        }
    assert [one.problem for one in found] == [None] * len(found)
    assert all(
        torch.equal(held, before[name]) for name, held in trained.items()
    )  # not even meanwhile
    assert [one.flag for one in found] == [
        "--precision bf16",
        "AdamW(..., fused=True)",
        "--channels-last",
        "--precision bf16 --channels-last",
        "--micro-batch-size 2",
        "--micro-batch-size 8",
    ]
    assert "--compile" in offered
    (changes,) = {one.changes for one in found if "micro" in one.flag}
    assert "batch normalization" in str(changes)
    torch.testing.assert_close({**run.state.models["model"].state_dict()}, before, rtol=0, atol=0)
    assert [parameter.stride() for parameter in run.state.parameters] == strides


def test_a_variant_that_fails_is_told_and_ends_nothing() -> None:
    run = plain(loss=small_runs.loss)
    with trial_steps(run) as parts:
        base = stepping(parts)
        (variant,) = variants(parts, ["precision"])

        def fail() -> Any:
            raise RuntimeError("not on this device")

        assert (
            measure_variant(replace(variant, make=fail), base, limit_s=0.0).problem
            == "not on this device"
        )
        base.make()


def test_gains_are_ranked_before_noise_and_noise_before_losses() -> None:
    def one(
        name: str, speedup: float, low: float, high: float, problem: str | None = None
    ) -> VariantGain:
        return VariantGain(name, f"--{name}", "", speedup, low, high, 9, 0.0, problem)

    given = [
        one("slower", 0.5, 0.4, 0.6),
        one("broken", math.nan, math.nan, math.nan, "cannot"),
        one("noise", 1.3, 0.9, 1.6),
        one("little", 1.01, 1.005, 1.015),
        one("some", 1.2, 1.1, 1.3),
        one("most", 2.0, 1.9, 2.1),
    ]
    assert [held.name for held in rank(given)] == [
        "most",
        "some",
        "noise",
        "little",
        "slower",
        "broken",
    ]


def test_a_suggestion_keeps_to_the_width_of_the_page() -> None:
    flag = "--precision bf16 --channels-last"
    lines = _suggestion(
        VariantGain("both", flag, "every product is rounded", 1.27, 1.2, 1.3, 9, 0.0)
    )
    assert max(map(len, lines)) <= 100
    assert (
        " ".join(" ".join(lines).split()) == f"1.27x (1.20 to 1.30) {flag} every product is rounded"
    )


@in_one
@pytest.mark.parametrize("number", range(6, 26))
def test_the_median_lies_in_the_interval_with_19_chances_in_20_and_in_no_narrower_one(
    number: int,
) -> None:
    low, high = interval(list(range(number)))
    assert low == number - 1 - high
    outside = [
        2 * sum(math.comb(number, k) for k in range(int(spared) + 1)) / 2**number
        for spared in (low, low + 1)
    ]
    assert outside[0] <= 0.05 < outside[1]


def test_fewer_steps_than_a_middle_half_needs_are_refused() -> None:
    with refused("setting-out-of-range", value=3):
        measure(plain(), steps=3)


def test_what_was_not_tried_is_not_said_to_be_no_quicker() -> None:
    found = sf.profile.measure(
        plain(), steps=4, speedups=("precision",), peak_flops=1e10, max_seconds=0.0
    )
    assert (found.tries, found.not_tried) == ([], ["--precision bf16"])
    assert str(found).splitlines()[-1].endswith(": --precision bf16; try --max-seconds 120")


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method:DeprecationWarning"
)  # of torch 2.13 itself
def test_compiling_is_tried_when_asked_for() -> None:
    found = sf.profile.measure(
        gpt(), steps=4, speedups=("compile",), peak_flops=1e10, max_seconds=HANG_S
    )
    assert [one.problem for one in found.tries] == [None]
    assert "first step" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gpt", "translation", "images"])
def test_every_recipe_can_be_profiled(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["profile", recipe, "--out", str(tmp_path), "--steps", "4", "--max-seconds", "30"])
    said = capsys.readouterr().out
    assert "\nsuggestions" in said
    assert max(map(len, said.partition("written")[0].splitlines())) <= 100


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
    ("arguments", "told"),
    [
        ([], "[argument-missing]"),
        (["--speedups", "wrokers"], "did you mean workers?"),
        (["--speedups", "colour"], "[speedup-unknown]"),
        (["--steps", "2"], "[setting-out-of-range]"),
        (["--peak-flops", "much"], "[setting-out-of-range]"),
        (["--max-seconds", "long"], "[flags-not-understood]"),
        (["--out", "there"], "[output-into-run]"),
        (["--stpes", "9"], "[setting-unknown]"),
        (["own_loop"], "[run-without-loss]"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_mistakes_are_answered_in_few_lines(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "there" / "checkpoints").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    function = "own_loop" if arguments == ["own_loop"] else "run"
    given = [argument for argument in arguments if argument != "own_loop"]
    with pytest.raises(SystemExit) as end:
        main(["profile", *([f"program.py:{function}"] if arguments else []), *given])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) <= 5
    assert not (tmp_path / "runs").exists()


def test_the_verb_profiles_a_program_and_writes_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    main(
        [
            "profile",
            "program.py:run",
            "--speedups",
            "none",
            "--peak-flops",
            "1e9",
            "--steps",
            "4",
            "--shapes",
        ]
    )
    said = capfd.readouterr()
    assert "profile of program.py:run: 4 samples per step" in said.out
    assert "\nsuggestions: " in said.out
    assert "    [[" in said.out  # shapes
    # torch's own line, of memory that was allocated earlier in this process
    assert [line for line in said.err.splitlines() if "CPUAllocator" not in line] == []
    assert (tmp_path / "runs" / "profile" / "profile.txt").read_text() == said.out


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


def profiled_on_rank(*, parallel: str, out: str) -> dict[str, Any]:
    run = plain(parallel=parallel, micro_batch_size=2, length="3 steps")
    before = [local_part(parameter)[0].clone() for parameter in run.state.model.parameters()]
    found = measure(run, out=out, steps=4, max_seconds=1e-9, peak_flops=1e9)
    after = [local_part(parameter)[0].clone() for parameter in run.state.model.parameters()]
    run.train()
    return {
        "is_restored": all(map(torch.equal, before, after)),
        "phases": list(found.phases.seconds),
        "flops": sum(found.flops.by_phase.values()),
        "parameters": found.memory.peak.parameters,
        "is_of_ranks": found.ranks == 2 and f"rank {run.rank} of 2 ({parallel})" in found.setting,
        "files": [*found.files],
        "step": run.state.step,
    }


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_each_rank_profiles_its_share_of_a_step_and_rank_0_writes(
    ranks: Ranks, parallel: str, tmp_path: Path
) -> None:
    model = plain().state.model
    whole = sum(parameter.nbytes for parameter in model.parameters())
    by_rank = ranks(2, profiled_on_rank, parallel=parallel, out=str(tmp_path / "profile"))
    for found in by_rank:
        assert found["is_restored"]
        assert found["step"] == 3
        assert "communication" in found["phases"]
        assert found["is_of_ranks"]
    first, second = by_rank
    assert first["flops"] == second["flops"] > 0
    shares = [found["parameters"] for found in by_rank]
    assert shares == [whole, whole] if parallel == "ddp" else sum(shares) == whole
    assert second["files"] == []
    assert json.loads((tmp_path / "profile" / "profile.json").read_text())["ranks"] == 2
