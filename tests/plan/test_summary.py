"""`surefoot plan`: its numbers against closed forms, that it trains and writes nothing, and the
loss contract; 3 seconds.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

import small_runs
import surefoot as sf
from ragged import CLASSES, FEATURES, counted_mean, counted_targets, plain_mean, tokens
from rank_processes import Ranks
from refused import refused
from stated import numbers_by_line, numbers_in
from surefoot.cli.main import main
from surefoot.distributed.world import planned_for
from surefoot.memory import in_words
from surefoot.tools.plan import measure, summary
from surefoot.train import scorer
from surefoot.train.state_check import loss_contract


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def run_of(**changes: Any) -> sf.Run:
    generator = torch.Generator().manual_seed(0)
    settings: dict[str, Any] = {
        "model": mlp,
        "loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "train_data": (
            torch.randn(200, 32, generator=generator),
            torch.randint(10, (200,), generator=generator),
        ),
        "batch_size": 40,
        "micro_batch_size": 10,
        "length": "12 epochs",
        "optimizer": sf.optim.adamw(lr=1e-2, weight_decay=0.1),
        "schedule": sf.schedules.cosine("10%", min_lr_ratio=0.1),
        "device": "cpu",
        "console": False,
    }
    return sf.Run(**(settings | changes))


def plan_of(run: sf.Run) -> str:
    """What `surefoot plan` prints of a run."""
    return "\n".join(str(section) for section in summary.sections(run.parts))


def state_of(run: sf.Run) -> dict[str, Tensor]:
    state = run.state.models["model"].state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_equal_bits(some: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert [name for name in some if not torch.equal(some[name], others[name])] == []


def test_parameters_add_up_by_module_and_by_group() -> None:
    text = plan_of(run_of())
    words = [line.split() for line in text.splitlines()]
    assert ["0", "Linear", "2,112"] in words
    assert ["2", "Linear", "650"] in words
    assert ["total", "2,762"] in words
    assert "group 0: 2 tensors, 2,688 elements, lr 0.01, weight decay 0.1" in text
    assert "group 1: 2 tensors, 74 elements, lr 0.01, weight decay 0" in text


def time_passes(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> tuple[str, int]:
    """What a plan says of the time if passes take so long, and how many of them it did not need."""
    left = iter((0.0, *seconds))  # the first counts the memory and warms up
    monkeypatch.setattr(measure, "timed_pass", lambda *_: (next(left), 10))
    run = run_of()
    line = measure.memory_and_time(run.parts, measure.measure(run.parts))[-2]
    return line, len(list(left))


def test_stalled_passes_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    line, _ = time_passes(monkeypatch, 0.05, 30.5, 30.5)
    assert numbers_in(line) == [50, 200]  # ms of a pass, and of a step


def test_slow_passes_are_printed_in_seconds_and_two_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, left = time_passes(monkeypatch, 31.0, 30.5, 32.0, 1.0)
    assert line.startswith("30.5 s ")
    assert left == 2


def test_no_pass_begins_after_30_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    five_ms = [0.005] * 8
    line, left = time_passes(monkeypatch, 0.005, 0.005, 0.005, 0.002, *five_ms)
    assert line.startswith("2 ms ")
    assert left == 5


def time_lines(**changes: Any) -> list[str]:
    """What the plan says of the time of a session whose steps take 1 s."""
    parts = run_of(**changes).parts
    measured = measure.Measurement(
        targets=10, activation_bytes=0, pass_s=1 / parts.pipeline.sizes.pieces
    )
    return [
        line
        for line in measure.memory_and_time(parts, measured)
        if " for " in line or "limit" in line
    ]


def test_the_time_is_that_of_the_steps_until_stop_after() -> None:
    _, whole = time_lines()
    _, stopped = time_lines(stop_after="20 steps")
    assert "1m00s for 60 steps" in whole
    assert "20s for 20 steps until stop_after" in stopped


def test_the_time_limit_is_named_where_it_ends_the_session() -> None:
    *_, limit = time_lines(time_limit="15 s")
    assert limit.startswith("time_limit ")
    assert limit.endswith("after 15s, before step 15")
    assert time_lines(time_limit="90 s") == time_lines()


def test_evaluations_after_stop_after_are_not_counted() -> None:
    every = {
        "evaluate_every": "10 steps",
        "splits": {"val": sf.Split((torch.zeros(8, 32), torch.zeros(8).long()))},
    }
    (whole,) = measure.evaluation_time(run_of(**every).parts)
    (stopped,) = measure.evaluation_time(run_of(stop_after="20 steps", **every).parts)
    assert re.search(r"for all (\d+)", whole)[1] == "6"
    assert re.search(r"for all (\d+)", stopped)[1] == "2"


def test_each_parameter_group_has_its_relative_rate() -> None:
    model = lambda: sf.models.GPT(  # noqa: E731
        sf.models.GPTConfig(layers=3, heads=2, width=8, context=8, vocab_size=16)
    )
    parts = run_of(model=model, optimizer=sf.optim.muon(1e-2, adamw_lr=1e-3), loss=None).parts
    groups = [line for line in summary.parameters_by_group(parts) if line.startswith("  group ")]
    (relative,) = [line for line in summary.learning_rates(parts) if "relative to it" in line]
    assert len(groups) == 3
    assert numbers_in(relative.partition(": ")[2]) == [1, 0.1, 0.1]


def test_the_split_between_muon_and_adamw_is_printed() -> None:
    shape = sf.models.GPTConfig(layers=3, heads=2, width=8, context=8, vocab_size=16)
    muon = sf.optim.muon(1e-2, adamw_lr=1e-3)
    run = run_of(model=lambda: sf.models.GPT(shape), optimizer=muon, loss=None)

    lines = summary.parameters_by_group(run.parts)

    assert lines[1].endswith(
        "lr 0.01, weight decay 0.1, by Muon: blocks.0-2.attention.qkv.weight, blocks.0-2.attention.out.weight, "
        "blocks.0-2.mlp.up.weight, blocks.0-2.mlp.down.weight"
    )
    assert lines[2].endswith("lr 0.001, weight decay 0.1, by AdamW: head.weight")
    assert "by AdamW: embedding.weight, norm.weight" in lines[3]


def test_batches_steps_and_passes_are_those_of_the_run() -> None:
    text = plan_of(run_of())
    stated = numbers_by_line(text)
    assert [40, 1, 4, 10] in stated  # samples of a step: ranks, micro-batches, samples of each
    assert [200, 5, 60, 12] in stated  # samples of an epoch, its steps; steps, their epochs
    assert [40] in stated  # targets of a step
    assert [2, 22.1] in stated  # copies of the gradients, and their kB


def test_the_plan_of_two_ranks_says_what_rank_0_sends_and_where_sums_depend_on_the_ranks() -> None:
    with planned_for(2):
        exact = run_of()
        inexact = run_of(exact_sums=False)
    gradient_bytes = sum(parameter.nbytes for parameter in exact.parts.state.parameters)
    kilobytes, *_ = numbers_in(in_words(gradient_bytes))

    of_exact = numbers_by_line(plan_of(exact))
    of_inexact = numbers_by_line(plan_of(inexact))

    copies = [1, kilobytes, 0, kilobytes]  # and what rank 0 sends
    assert of_exact.count(copies) == 1
    assert len(of_inexact) == len(of_exact) - 1


def test_a_plan_of_several_ranks_has_a_micro_batch_for_each() -> None:
    with planned_for(2):
        parts = small_runs.build(None, micro_batch_size=None).parts
    batch_size = parts.pipeline.sizes.batch_size
    line = summary.batch_arithmetic(parts, None)[0]
    assert numbers_in(line) == [batch_size, 2, 1, batch_size // 2]


def test_targets_are_those_that_the_loss_counts() -> None:
    data = tokens(12, seed=0)
    run = run_of(
        model=lambda: nn.Linear(FEATURES, CLASSES),
        loss=counted_mean,
        train_data=data,
        batch_size=12,
        micro_batch_size=12,
    )
    assert [counted_targets(data)] in numbers_by_line(plan_of(run))


def test_learning_rates_are_those_of_the_schedule() -> None:
    run = run_of()

    schedule, *lines = summary.learning_rates(run.parts)

    assert schedule == "cosine, warmup 6, min_lr_ratio 0.1"
    steps = {}
    for line in lines:
        name, _, step, rate = line.split()[:4]
        steps[name] = int(step)
        assert float(rate) == pytest.approx(1e-2 * run.parts.task.factors(int(step)), rel=1e-3)
    assert steps == {"first": 0, "highest": 6, "middle": 30, "last": 59}


def test_memory_is_that_of_weights_gradients_state_and_what_the_backward_pass_holds() -> None:
    assert "weights 11 kB, gradients 11 kB, optimizer 22.1 kB" in plan_of(run_of())
    assert "averages 11 kB" in plan_of(run_of(ema=0.9))

    def activation_bytes(micro_batch_size: int) -> int:
        run = run_of(micro_batch_size=micro_batch_size, batch_size=40)
        return measure.measure(run.parts).activation_bytes

    # of each sample: 32 inputs, 64 units after ReLU, 10 log-probabilities in float32, a label of 8
    # bytes; and the sums
    assert activation_bytes(10) >= 10 * (32 + 64 + 10) * 4
    assert activation_bytes(40) == pytest.approx(4 * activation_bytes(10), rel=0.05)


def test_planning_changes_nothing_and_writes_nothing(tmp_path: Path) -> None:
    def generators() -> tuple[Any, ...]:
        of_numpy = np.random.get_state()[1].tolist()  # type: ignore[index]
        return random.getstate(), of_numpy, torch.get_rng_state().tolist()

    run = small_runs.build(tmp_path / "run")
    state_before = state_of(run)
    generators_before = generators()

    plan_of(run)
    assert loss_contract(run.parts).holds

    assert_equal_bits(state_before, state_of(run))
    assert generators() == generators_before
    assert all(parameter.grad is None for parameter in run.state.parameters)
    assert run.state.models["model"].training
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_planned_trains_to_the_same_bits() -> None:
    planned = small_runs.build(None)
    plan_of(planned)
    assert loss_contract(planned.parts).holds
    plain = small_runs.build(None)

    planned.train()
    plain.train()

    assert_equal_bits(state_of(plain), state_of(planned))


def test_a_run_that_is_there_already_is_said_to_go_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    small_runs.build(run_dir, stop_after="4 steps").train()

    text = plan_of(small_runs.build(run_dir))

    (line,) = [line for line in text.splitlines() if f"{run_dir} " in line]
    assert numbers_in(line.partition(f"{run_dir} ")[2]) == [4]


def test_a_run_with_other_settings_is_said_not_to_go_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    small_runs.build(run_dir, stop_after="4 steps").train()

    text = plan_of(small_runs.build(run_dir, seed=5))

    assert "[settings-changed]" in text
    of_seed = [numbers_in(line) for line in text.splitlines() if " seed " in line]
    assert [0, 5] in of_seed


def test_given_settings_are_listed_with_their_values_and_objects_are_not() -> None:
    run = run_of(predict_example="", loss_note="a", derived={"twice": lambda values: 2.0})

    line = summary.settings_by_origin(run.parts)[0]

    assert "loss_note a" in line
    words = line.replace(",", "").split()
    assert not {"predict_example", "derived", "model"} & set(words)


def test_tied_parameters_are_counted_once_in_each_of_several_models() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    lines = summary.parameters_by_module({"a": tied(), "b": tied()})
    numbers = [int(line.split()[-1].replace(",", "")) for line in lines]
    *of_modules, total = numbers
    assert sum(of_modules) == total == 30


def test_the_fastest_step_of_a_long_run_is_found() -> None:
    run = run_of(length="1000003 steps", schedule=sf.schedules.one_cycle("30%"))
    (line,) = [line for line in summary.learning_rates(run.parts) if line.startswith("highest")]
    assert line.split() == ["highest", "step", "300,001", "0.01"]


# --- the loss contract ----------------------------------------------------------------------------


def summed(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


@pytest.mark.parametrize(
    ("loss", "count", "holds"),
    [
        (plain_mean, counted_targets, True),
        (counted_mean, None, True),
        (plain_mean, None, False),  # a mean over targets, counted as one over samples
    ],
)
def test_a_loss_that_is_a_mean_over_something_else_than_is_counted_is_found(
    loss: Any, count: Any, holds: bool
) -> None:
    run = run_of(
        model=lambda: nn.Linear(FEATURES, CLASSES),
        loss=loss,
        count_fn=count,
        train_data=tokens(12, seed=0),
        batch_size=12,
        micro_batch_size=12,
    )
    contract = loss_contract(run.parts)
    assert contract.holds == holds
    assert not contract.is_sum


def test_a_sum_is_no_mean() -> None:
    contract = loss_contract(run_of(loss=summed).parts)
    assert not contract.holds
    assert contract.is_sum


def test_a_run_without_a_console_warns_of_a_loss_that_is_no_mean() -> None:
    run = run_of(loss=summed, batch_size=8, micro_batch_size=4, length="1 step", console=False)
    with pytest.warns(UserWarning, match=r"\[loss-not-a-mean\]"):
        run.train()


@pytest.mark.parametrize("micro_batch_size", [1, 10])
def test_what_cannot_be_cut_is_not_checked_and_says_so(micro_batch_size: int) -> None:
    class Texts:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, sample: int) -> Any:
            return {"x": torch.full((32,), float(sample)), "label": sample % 10}

    def squared(model: Any, batch: Any) -> Tensor:
        inputs = torch.stack([row["x"] for row in batch[0]])
        return model(inputs).square().mean()

    run = run_of(
        train_data=Texts(),
        collate_fn=lambda rows: [rows],
        count_fn=lambda batch: len(batch[0]),
        micro_batch_size=micro_batch_size,
        loss=squared,
    )

    contract = loss_contract(run.parts)

    assert contract.holds
    assert not contract.is_checked


class Normalised(nn.Sequential):
    """Batch statistics and dropout, of which a check in evaluation mode knows nothing."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 10))


def contrastive(model: Any, batch: Any) -> Tensor:
    """Each sample is told from all others of its batch."""
    outputs = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(outputs @ outputs.T / 0.1, torch.arange(len(outputs)))


def noisy(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0] + torch.randn_like(batch[0])), batch[1])


def print_run(capsys: pytest.CaptureFixture[str], **changes: Any) -> list[str]:
    """Train a run. Returns the lines that it prints."""
    settings: dict[str, Any] = {"console": True, "length": "2 steps", "precision": "fp32"}
    run_of(**(settings | changes)).train()
    return capsys.readouterr().out.splitlines()


def warnings_of(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("warning: ")]


def contracts_of(lines: list[str]) -> list[list[float]]:
    """The lines about a contract that holds, or could not be checked: the losses of a batch and of
    its halves.
    """
    return [numbers_in(line) for line in lines if line.split()[:1] == ["loss"]]


def assert_holds(lines: list[str]) -> None:
    """The run says of one contract that the losses of a batch and of its halves are equal."""
    ((whole, halves),) = contracts_of(lines)
    assert whole == pytest.approx(halves, rel=1e-2)
    assert warnings_of(lines) == []


def test_a_contrastive_loss_that_is_cut_is_warned_of_with_its_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = run_of(loss=contrastive)
    model = run.state.models["model"]
    # half of the batch, and its halves: as many samples as it has
    inputs = run.parts.pipeline.again(0)[0].batch[0][:5]
    with torch.no_grad():
        whole = float(contrastive(model, (inputs, None)))
        first = float(contrastive(model, (inputs[:2], None)))
        second = float(contrastive(model, (inputs[2:], None)))
    halves = (2 * first + 3 * second) / 5
    assert whole > 1.5 * halves

    lines = print_run(capsys, loss=contrastive)

    (warning,) = warnings_of(lines)
    assert numbers_in(warning)[:4] == [float(f"{whole:.6g}"), float(f"{halves:.6g}"), 2, 3]
    assert contracts_of(lines) == []
    error = lines[lines.index(warning) : lines.index("  [loss-not-a-mean]")]
    assert any("count_fn=lambda batch" in line for line in error)
    assert any("sf.losses.whole_batch" in line for line in error)


@pytest.mark.parametrize("changes", [{"loss": contrastive}, {}], ids=["contrastive", "a mean"])
def test_a_batch_that_is_not_cut_has_no_contract(
    changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = print_run(capsys, micro_batch_size=None, **changes)
    assert contracts_of(lines) == []
    assert warnings_of(lines) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_batch_statistics_and_dropout_break_no_contract(
    precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_holds(print_run(capsys, model=Normalised, precision=precision))


def test_a_loss_that_draws_in_evaluation_mode_too_is_not_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = print_run(capsys, loss=noisy)
    assert contracts_of(lines) == [[]]  # a line without figures
    assert warnings_of(lines) == []

    contract = loss_contract(run_of(loss=noisy).parts)
    assert contract.holds
    assert not contract.is_checked


def test_the_contract_is_looked_at_once_in_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "length": "3 steps"}
    first_session = print_run(capsys, **settings, stop_after="2 steps")
    second_session = print_run(capsys, **settings)
    assert_holds(first_session)
    assert contracts_of(second_session) == []


def test_looking_at_the_contract_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    calls = 0

    def counted(model: Any, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        batch[0].mul_(2)
        return F.cross_entropy(model(batch[0]), batch[1])

    assert_holds(print_run(capsys, loss=counted))
    assert calls == 2 * 4


class Remembers(nn.Linear):
    """A pass moves a parameter, a persistent buffer and another, in evaluation mode too; the loss
    depends on them.
    """

    def __init__(self) -> None:
        super().__init__(32, 10)
        self.teacher = nn.Parameter(torch.zeros(10), requires_grad=False)
        self.register_buffer("calls", torch.ones(()))
        self.register_buffer("last", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher += self.calls
            self.calls += 1
            self.last += 1
        return super().forward(x) / self.last + self.teacher / self.calls


def test_looking_at_the_contract_changes_neither_weights_nor_buffers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before_passes: list[list[float]] = []

    def noting(model: Any, batch: Any) -> Tensor:
        before_passes.append([float(model.teacher[0]), float(model.calls), float(model.last)])
        return F.cross_entropy(model(batch[0]), batch[1])

    # without the check of the state, which refuses a pass that writes the teacher
    lines = print_run(capsys, model=Remembers, loss=noting, check_state=False)

    assert_holds(lines)
    assert len(before_passes) == 2 * 4  # what was noted before the first step was put back too
    assert before_passes[0] == [0.0, 1.0, 1.0]


def print_run_on_rank(run_dir: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        run_of(
            loss=contrastive,
            micro_batch_size=20,
            batch_size=40,
            length="2 steps",
            console=True,
            run_dir=run_dir,
        ).train()
    return text.getvalue()


def test_the_contract_is_looked_at_where_ranks_cut_the_batch(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, print_run_on_rank, run_dir=str(tmp_path / "run"))
    (warning,) = [line for line in first.splitlines() if line.startswith("warning: ")]
    assert numbers_in(warning)[2:4] == [5, 5]  # the counts of the halves
    assert second == ""


# --- on the command line --------------------------------------------------------------------------

PROGRAM = """
import torch
import torch.nn.functional as F
import surefoot as sf

def build():
    data = torch.arange(40.0)[:, None], torch.arange(40.0)[:, None]
    def loss(model, batch):
        return F.mse_loss(model(batch[0]), batch[1], reduction="REDUCTION")
    return sf.Run(model=lambda: torch.nn.Linear(1, 1), loss=loss, train_data=data, batch_size=8, length="3 steps",
                  optimizer=sf.optim.adamw(lr=0.1), run_dir="runs/a")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_a_program_without_settings_is_planned(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("program.py").write_text(PROGRAM.replace("REDUCTION", "mean"))
    main(["plan", "program.py:build"])
    text = capsys.readouterr().out
    assert "\nloss contract\n" in text
    assert not Path("runs").exists()


def test_a_broken_contract_ends_with_2_and_says_what_to_write(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("program.py").write_text(PROGRAM.replace("REDUCTION", "sum"))
    with pytest.raises(SystemExit) as end:
        main(["plan", "program.py:build"])
    assert end.value.code == 2
    assert "[loss-not-a-mean]" in capsys.readouterr().err


def test_a_recipe_is_planned_with_the_origin_of_every_setting(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("to be or not to be, that is the question\n" * 400)
    Path("mine.toml").write_text('length = "7 steps"\n')
    flags = [
        "--data.path=text.txt",
        "--data.val-fraction=0.2",
        "--model.context=32",
        "--preset=shakespeare",
    ]
    main(["plan", "gpt", "--config", "mine.toml", *flags])
    lines = capsys.readouterr().out.splitlines()
    assert "  length = '7 steps'  [file]" in lines
    assert "  data.tokenizer = 'characters'  [preset]" in lines
    assert "  model.context = 32  [flag]" in lines
    assert "  seed = 0  [default]" in lines
    assert sorted(path.name for path in here.iterdir()) == ["mine.toml", "text.txt"]


def test_the_time_of_evaluations_is_estimated_from_a_few_batches_spread_over_each_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = (torch.arange(200.0)[:, None].expand(200, 32), torch.zeros(200, dtype=torch.int64))
    scored_batches = list[list[int]]()

    def slow(outputs: Any, targets: Any) -> sf.Mean:
        scored_batches.append(outputs[:, 0].int().tolist())
        return sf.Mean(torch.zeros(()), len(outputs))

    def now_s() -> float:
        return 0.005 * sum(len(batch) for batch in scored_batches)  # 5 ms a sample

    monkeypatch.setattr(scorer, "perf_counter", now_s)
    settings: dict[str, Any] = {"metrics": slow, "predict": lambda model, batch: tuple(batch)}
    splits = {
        "often": sf.Split(data, batch_size=10, **settings),
        "once": sf.Split(data, at_end=True, **settings),
    }
    run = run_of(splits=splits, evaluate_every="3 epochs")
    # a CPU needs no full batch of 10
    first, second, third = [33, 34, 35], [99, 100, 101], [165, 166, 167]

    assert run.parts.evaluator.seconds("often", limit_s=1.0) == pytest.approx(1.0)  # 200 samples
    assert scored_batches == [first, second, third]

    scored_batches.clear()  # a batch takes 15 ms
    assert run.parts.evaluator.seconds("often", limit_s=0.02) == pytest.approx(1.0)
    assert scored_batches == [first, second]

    text = plan_of(run)
    (often,) = [line for line in text.splitlines() if " often," in line]
    assert numbers_in(often) == [1, 4, 4]  # s of an evaluation, of all, their number
    assert " once," in text


def test_a_metric_that_is_not_a_counted_mean_is_found_by_a_plan() -> None:
    def right(outputs: Any, targets: Any) -> float:
        return 0.5

    split = sf.Split((torch.zeros(9, 32), torch.zeros(9, dtype=torch.int64)), metrics=right)
    with refused("metric-not-a-mean"):
        plan_of(run_of(splits={"val": split}))


def test_a_plan_says_which_data_these_are() -> None:
    run = run_of(data_summary=["text of somebody", "a tenth of it is held out"])
    assert "data\n  text of somebody\n  a tenth of it is held out\n" in plan_of(run)


class OwnNotes(Dataset):  # type: ignore[type-arg]
    """A data set of a user with a `reading_notes` of another meaning."""

    reading_notes = None

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def notes_of_csv(text: str) -> list[list[float]]:
    """The files that were read, all files, and those that end with .csv; the header wraps lines."""
    clauses = re.findall(r"\d+ \w+ \d+ \w+;[^;\d]*\d+ \.csv", " ".join(text.split()))
    return [numbers_in(clause) for clause in clauses]


def write_table(file: Path, *, rows: int) -> None:
    """Rows of 32 inputs `x` and a label `y`."""
    parquet = pytest.importorskip("pyarrow.parquet")
    labels = [row % 10 for row in range(rows)]
    table = pytest.importorskip("pyarrow").table({"x": [[0.5] * 32] * rows, "y": labels})
    parquet.write_table(table, file)


def of_rows(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"].float()), batch["y"])


def subset_of(rows: Any) -> Any:
    return Subset(rows, range(40))


def parts_of(rows: Any) -> Any:
    return ConcatDataset([Subset(rows, range(40)), rows])


@pytest.mark.parametrize("data_of", [subset_of, parts_of])
def test_plan_and_header_say_which_files_were_not_read_below_subsets_and_parts(
    data_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(tmp_path / "a.parquet", rows=80)
    (tmp_path / "b.csv").write_text("x,y")
    rows = sf.data.Table(tmp_path)
    run = run_of(
        train_data=data_of(rows),
        loss=of_rows,
        splits={"val": sf.Split(OwnNotes(rows))},
        length="1 step",
        console=True,
    )

    assert notes_of_csv(plan_of(run)) == [[1, 2, 1]]
    run.train()
    assert notes_of_csv(capsys.readouterr().out) == [[1, 2, 1]]


def test_plan_and_header_say_a_note_of_two_directories_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for directory in (tmp_path / "a", tmp_path / "b"):
        directory.mkdir()
        write_table(directory / "test.parquet", rows=20)
        write_table(directory / "train.parquet", rows=20)
    rows = sf.data.Table([tmp_path / "a", tmp_path / "b"])
    note, again = rows.reading_notes
    assert note == again
    run = run_of(train_data=rows, loss=of_rows, length="1 step", console=True)

    assert plan_of(run).count(note) == 1
    run.train()
    header = " ".join(capsys.readouterr().out.split())
    assert header.count(note) == 1


def test_a_recipe_says_where_its_text_is_from_and_what_of_it_is_held_out(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("the cat sat on the mat; " * 500)
    flags = [
        "--data.path=text.txt",
        "--data.tokenizer=bytes",
        "--model.layers=1",
        "--cloze-questions=0",
    ]

    main(["plan", "gpt", *flags])

    lines = capsys.readouterr().out.splitlines()
    first = lines.index("data") + 1
    assert "text.txt" in lines[first]
    assert numbers_in(lines[first + 1].replace("%", "")) == [1, 12_000, 5]
    assert numbers_in(lines[first + 2])[-2:] == [601, 257]
