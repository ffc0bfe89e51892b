"""What "auto" comes to: facts looked up in a table, stored with the run, without a call of the loss
or a trace in the run. 8 s.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from in_one import in_one
from refused import refused
from stated import lines_naming, numbers_in
from surefoot.checkpoint import Checkpoint, Store
from surefoot.cli.main import main
from surefoot.cli.settings import configured
from surefoot.config import speed_table
from surefoot.config.speed_table import BF16_WORTH_IT, Facts, Row, look_up
from surefoot.config.toml import with_choices
from surefoot.data.pipeline import DataPipeline
from surefoot.memory import instruction_set
from surefoot.recipes import gpt, images, translation
from surefoot.run import facts as run_facts
from surefoot.tools.plan import summary
from surefoot.train.plan import speed_facts
from surefoot.train.precision import precision

VERSION = ".".join(torch.__version__.split(".")[:2])
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "precision.txt"


class Net(nn.Sequential):
    """With dropout and batch statistics; half of its numbers are in matrices of width 40."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(16, 40),
            nn.BatchNorm1d(40),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(40, 40),
        )


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def built(run_dir: Path | None = None, **changes: Any) -> sf.Run:
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(64, 16, generator=generator), torch.randint(40, (64,), generator=generator))
    arguments: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train_data": data,
        "batch_size": 16,
        "length": "6 steps",
        "optimizer": sf.optim.adamw(lr=1e-3),
        "device": "cpu",
        "precision": "auto",
        "channels_last": "auto",
        "report": False,
        "run_dir": run_dir,
        "console": False,
    }
    return sf.Run(**(arguments | changes))


def row(gain: float, *, width: tuple[int, int] = (1, 999), rows: tuple[int, int] = (1, 999)) -> Row:
    return Row("linear", width, rows, (1, 1), {"bf16": gain})


Table = Callable[..., None]


@pytest.fixture
def set_table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """Makes this a processor with AMX, and the table these rows; without rows it is silent."""
    monkeypatch.setattr(run_facts, "instruction_set", lambda: "amx_bf16")

    def set_rows(*rows: Row) -> None:
        monkeypatch.setattr(speed_table, "TABLE", {("amx_bf16", VERSION): ("2026-11-22", rows)})

    set_rows(row(2.0))
    return set_rows


def assert_same_weights(one: sf.Run, other: sf.Run) -> None:
    for weight, expected in zip(one.state.parameters, other.state.parameters, strict=True):
        assert torch.equal(weight, expected)


@pytest.mark.parametrize(
    ("gain", "chosen"), [(2.0, "bf16"), (1.15, "bf16"), (1.14, "fp32"), (0.5, "fp32")]
)
def test_bf16_is_chosen_where_the_table_has_a_clear_gain(
    gain: float, chosen: str, set_table: Table
) -> None:
    set_table(row(gain))
    run = built()
    run.train()

    assert run.parts.run_state.precision.name == chosen
    assert run.parts.plan.identity["precision"] == chosen


@pytest.mark.parametrize(
    ("region", "inside"),
    [
        ({}, True),
        ({"width": (40, 40), "rows": (16, 16)}, True),
        ({"width": (41, 99)}, False),
        ({"width": (1, 39)}, False),
        ({"rows": (17, 99)}, False),
        ({"rows": (1, 15)}, False),
    ],
)
def test_sizes_outside_of_what_was_measured_are_fp32(
    region: dict[str, Any], inside: bool, set_table: Table
) -> None:
    set_table(row(2.0, **region))
    run = built()

    assert run.parts.run_state.precision.name == ("bf16" if inside else "fp32")
    assert run.parts.plan.reasons.unknown != inside


@pytest.mark.parametrize(
    "other", [{"instructions": "none"}, {"instructions": "avx512_bf16"}, {"torch": "1.0"}]
)
def test_another_processor_and_another_torch_are_fp32(
    other: dict[str, str], set_table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_facts, "instruction_set", lambda: other.get("instructions", "amx_bf16"))
    monkeypatch.setattr(torch, "__version__", other.get("torch", torch.__version__))
    monkeypatch.setattr(DataPipeline, "first", lambda *_: pytest.fail("data were read for nothing"))
    run = built()

    assert run.parts.plan.reasons.unknown
    assert run.parts.run_state.precision.name == "fp32"


def test_where_regions_overlap_the_least_gain_counts(set_table: Table) -> None:
    facts = Facts("amx_bf16", VERSION, "linear", 40, 16)

    set_table(row(2.0), row(1.0))
    assert look_up(facts).precision == "fp32"

    set_table(row(2.0), row(1.0, width=(50, 60)))
    assert look_up(facts).precision == "bf16"


def test_the_loss_is_called_for_steps_alone(set_table: Table) -> None:
    calls: list[int] = []

    def counted(model: nn.Module, batch: Any) -> Tensor:
        calls.append(len(batch[1]))
        return loss(model, batch)

    run = built(
        loss=counted, precision="auto", compile="auto", channels_last="auto", length="3 steps"
    )
    with run:
        assert calls == []
        for _ in run:
            pass
    assert calls == [16, 16, 16]
    assert run.parts.run_state.precision.name == "bf16"


@pytest.mark.parametrize("chosen", ["fp32", "bf16"])
def test_a_run_with_auto_is_bit_equal_to_one_with_what_it_chose(
    chosen: str, set_table: Table
) -> None:
    set_table(row(2.0 if chosen == "bf16" else 1.0))
    auto = built()
    named = built(precision=chosen)
    auto.train()
    named.train()

    assert_same_weights(auto, named)


def test_a_resume_on_another_machine_computes_as_the_run_began(
    tmp_path: Path, set_table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = built(precision="bf16")
    whole.train()
    built(tmp_path / "run", stop_after="2 steps").train()
    monkeypatch.setattr(run_facts, "instruction_set", lambda: "none")
    resumed = built(tmp_path / "run")
    resumed.train()

    assert resumed.parts.run_state.precision.name == "bf16"
    assert_same_weights(resumed, whole)


def test_a_checkpoint_is_scored_with_the_precision_of_its_run(
    tmp_path: Path, set_table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(tmp_path / "run", length="2 steps").train()
    monkeypatch.setattr(run_facts, "instruction_set", lambda: "none")
    scoring = built()

    scoring.load_checkpoint(newest_checkpoint(tmp_path / "run"))

    assert scoring.parts.run_state.precision.name == "bf16"


def test_a_resume_that_names_another_precision_than_was_chosen_is_refused(
    tmp_path: Path, set_table: Table
) -> None:
    built(tmp_path / "run", stop_after="2 steps").train()
    changes = ["precision was 'bf16', now 'fp32'"]
    with refused("settings-changed", sf.CheckpointError, changes=changes):
        built(tmp_path / "run", precision="fp32").train()


def newest_checkpoint(run_dir: Path) -> Checkpoint:
    newest = Store(run_dir / "checkpoints").newest_intact()
    assert newest is not None
    return newest[0]


def test_choosing_leaves_no_trace(set_table: Table) -> None:
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generators = generator_states()

    run = built(model=model, compile="auto")

    assert numbers_in(str(run.parts.plan.reasons.precision)) == [2]  # times as fast as fp32
    for name, tensor in run.state.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    for parameter in run.state.parameters:
        assert parameter.grad is None or not parameter.grad.any()
    assert generator_states() == generators


def generator_states() -> list[Any]:
    numbers_of_numpy = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    return [random.getstate(), numbers_of_numpy, torch.get_rng_state().tolist()]


def test_data_that_cannot_be_read_fail_in_the_first_step_where_it_is_explained(
    tmp_path: Path, set_table: Table
) -> None:
    wrong = (torch.randn(64, 16), torch.full((64,), 500))
    with refused("target-out-of-range", sf.DataError, value=500, where="at step 0"):
        built(tmp_path / "run", train_data=wrong, compile="auto").train()


TRANSLATOR = sf.models.Seq2SeqConfig(1, 1, heads=2, width=16, mlp_width=64, vocab_size=40)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[str, int] | None]] = {
    "perceptron": (Net, ("linear", 40)),
    "GPT": (lambda: sf.models.GPT(sf.models.GPTConfig(2, 2, 16, 8, 32)), ("attention", 16)),
    "encoder-decoder": (lambda: sf.models.Seq2Seq(TRANSLATOR), ("encoder-decoder", 16)),
    "images as they come": (
        lambda: sf.models.SimpleCNN(channels=3, classes=4, width=4),
        ("convolution", 16),
    ),
    "laid out by itself": (
        lambda: sf.models.SimpleCNN(channels=3, classes=4, width=4, channels_last=True),
        ("convolution, channels last", 16),
    ),
    "recurrent": (lambda: nn.LSTM(16, 16), None),
    "torch's attention": (lambda: nn.TransformerEncoderLayer(16, 2), None),
    "words and matrices": (lambda: nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 16)), None),
    "channel by channel": (
        lambda: nn.Sequential(nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 64, 1)),
        None,
    ),
    "hardly a convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(400, 40)),
        None,
    ),
    "no matrix": (lambda: nn.BatchNorm1d(4), None),
}


@in_one
@pytest.mark.parametrize("name", NETWORKS)
def test_kinds_of_layers_are_told_by_the_modules_and_what_was_not_measured_is_none(
    name: str,
) -> None:
    network, facts = NETWORKS[name]
    assert run_facts.layer_kind({"model": network()}) == facts


def test_several_models_are_of_no_kind() -> None:
    assert run_facts.layer_kind({"first": Net(), "second": Net()}) is None


def test_loops_of_ones_own_are_fp32(set_table: Table) -> None:
    run = built(loss=None)

    assert run.parts.run_state.precision.name == "fp32"
    assert run.parts.plan.reasons.precision
    assert not run.parts.plan.reasons.unknown  # it cannot be profiled


def test_batches_by_tokens_are_told_by_the_plan_whatever_the_seed(set_table: Table) -> None:
    draw = np.random.default_rng(0)
    rows = [draw.integers(4, 40, size=size).tolist() for size in draw.integers(4, 30, size=200)]

    def facts(seed: int) -> Facts | str:
        run = built(
            model=lambda: sf.models.Seq2Seq(TRANSLATOR),
            train_data=sf.data.TokenPairs(rows, rows),
            batch_size="256 tokens",
            seed=seed,
        )
        return speed_facts(
            run.parts.settings,
            run_facts.world_facts(run.parts.world),
            run_facts.data_facts(run.parts.pipeline, {}, reads_shape=True),
            run_facts.model_facts(run.state.models, run.state.optimizers, {}, was_compiled=False),
        )

    longest = max(map(len, rows)) + 1  # and an end
    assert facts(0) == facts(1) == Facts("amx_bf16", VERSION, "encoder-decoder", 16, 256, longest)


def choices_in_plan(run: sf.Run) -> str:
    """The section of a plan on what "auto" came to."""
    (section,) = [section for section in summary.sections(run.parts) if section.title == "chosen"]
    return str(section)


def test_the_header_and_the_plan_say_what_was_chosen_and_why(
    set_table: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    built(console=True, compile="auto").train()
    printed = capsys.readouterr().out

    (reason,) = re.findall(r"precision +bf16 \(auto: (.*)\)\n", printed)
    assert numbers_in(reason) == [2]
    assert "adds       to a plain loop: bf16\n" in printed
    assert "compile off (auto: " in printed
    assert "surefoot profile" not in printed
    assert f"precision bf16 (auto: {reason})" in choices_in_plan(built())


def test_where_the_table_is_silent_one_line_names_what_measures(
    set_table: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    set_table()
    for changes in ({}, {"compile": "auto"}):
        built(console=True, **changes).train()
        assert "note: `surefoot profile` " in " ".join(capsys.readouterr().out.split())
    assert "`surefoot profile` " in choices_in_plan(built())


def test_where_the_precision_is_named_no_line_names_what_measures(
    set_table: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    set_table()
    built(console=True, precision="fp32").train()

    assert "surefoot profile" not in capsys.readouterr().out


PROGRAM = f"""
import sys
from dataclasses import dataclass
from typing import Literal

import surefoot as sf
from surefoot.config.setting import default
from surefoot.config.train_settings import TrainSettings

sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_auto_precision


@dataclass(kw_only=True)
class Config(TrainSettings):
    length: str = default("4 steps")
    batch_size: int | str = default(16)
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = default("auto")
    channels_last: bool | Literal["auto"] = default("auto")


def build(config: Config) -> sf.Run:
    return test_auto_precision.built(**(config.train_settings() | {{"console": False}}))
"""


def test_the_configuration_of_a_run_holds_what_was_chosen(tmp_path: Path, set_table: Table) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    run_dir = tmp_path / "run"
    typed = [
        "train",
        f"{file}:build",
        "--run-dir",
        str(run_dir),
        "--compile",
        "auto",
        "--report",
        "False",
    ]

    main([*typed, "--stop-after", "2 steps"])
    begun = (run_dir / "config.toml").read_text()
    set_table()  # another machine
    main(typed)

    for text in (begun, (run_dir / "config.toml").read_text()):
        assert 'precision = "bf16" # auto' in text
        assert "compile = false # auto" in text
    assert newest_checkpoint(run_dir).state["identity"]["precision"] == "bf16"


def test_only_settings_that_say_auto_are_replaced() -> None:
    text = 'precision = "fp32" # flag\ncompile = "auto" # flag\n[model]\nprecision = "auto"\n'
    choices = {"precision": "bf16", "channels_last": False, "compile": True}

    replaced = 'precision = "fp32" # flag\ncompile = true # auto\n[model]\nprecision = "auto"\n'
    assert with_choices(text, choices) == replaced


# --- facts of machines ----------------------------------------------------------------------------


WITH_AMX = {"architecture": "x86_64", "amx_bf16": True, "avx512_bf16": True}
WITH_AVX512 = {"architecture": "x86_64", "amx_bf16": False, "avx512_bf16": True}
WITH_AVX2 = {"architecture": "x86_64", "avx2": True, "amx_bf16": False, "avx512_bf16": False}


@pytest.mark.parametrize(
    ("capabilities", "limit", "instructions"),
    [
        (WITH_AMX, "", "amx_bf16"),
        (WITH_AMX, "avx512_core_amx", "amx_bf16"),
        (WITH_AMX, "AVX512_CORE_BF16", "avx512_bf16"),
        (WITH_AMX, "AVX512_CORE", "none"),
        (WITH_AVX512, "", "avx512_bf16"),
        (WITH_AVX2, "", "none"),
        ({"architecture": "arm64", "bf16": True}, "", "arm_bf16"),
        ({"architecture": "arm64", "bf16": False}, "", "none"),
        ({"architecture": "riscv64"}, "", "unknown"),
    ],
)
def test_instructions_are_what_torch_sees_and_its_library_may_use(
    capabilities: dict[str, Any], limit: str, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)

    assert instruction_set() == instructions


@pytest.mark.parametrize(
    ("capability", "name"), [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp32")]
)
def test_on_cuda_the_capability_decides(
    capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    cuda = torch.device("cuda")

    assert precision("auto", cuda).name == name
    assert precision("bf16", cuda).emulated == (name == "fp32")


def test_bf16_on_a_processor_without_it_trains_and_one_line_names_what_is_quicker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("surefoot.train.precision.instruction_set", lambda: "none")
    run = built(console=True, precision="bf16")
    run.train()

    assert run.state.step == 6
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count('precision="fp32"') == 1
    assert 'precision="fp32"' in choices_in_plan(built(precision="bf16"))


@pytest.mark.parametrize(("instructions", "named"), [("none", "fp32"), ("unknown", "bf16")])
def test_no_line_names_what_is_quicker_where_nothing_is_known_to_be(
    instructions: str,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("surefoot.train.precision.instruction_set", lambda: instructions)
    built(console=True, precision=named).train()

    assert 'precision="fp32"' not in capsys.readouterr().out


@pytest.mark.parametrize("recipe", [gpt, images, translation])
def test_no_preset_names_a_precision_that_a_processor_may_lack(recipe: Any) -> None:
    assert [name for name, preset in recipe.PRESETS.items() if "precision" in preset] == []


@pytest.mark.parametrize("instructions", ["amx_bf16", "avx512_bf16"])
@pytest.mark.parametrize(
    ("layers", "width", "rows", "positions"),
    [
        ("attention", 128, 2048, 256),  # gpt --preset shakespeare
        ("convolution, channels last", 192, 200_704, 1),  # images --preset fashion-mnist
        ("convolution, channels last", 128, 200_704, 1),  # images --preset fashion-mnist-fast
    ],
)
def test_presets_with_figures_in_bf16_get_it_where_it_was_measured(
    instructions: str, layers: str, width: int, rows: int, positions: int
) -> None:
    facts = Facts(instructions, "2.13", layers, width, rows, positions)
    assert look_up(facts).precision == "bf16"


# --- the table in the source ----------------------------------------------------------------------


def test_every_row_of_the_table_is_dated_ordered_and_in_the_results_that_were_printed() -> None:
    printed = RESULTS.read_text()
    for (instructions, version), (measured, rows) in speed_table.TABLE.items():
        assert 5 <= len(rows) <= 20
        assert date.fromisoformat(measured) <= date.today()
        assert f"# {measured}, benchmarks/precision.py, {instructions}, torch {version} " in printed
        for row in rows:
            gains = ", ".join(f'"{name}": {gain:.2f}' for name, gain in row.gains.items())
            place = f'"{row.layers}", {row.width}, {row.rows}, {row.positions}'
            assert f"Row({place}, {{{gains}}})," in printed
            for lowest, highest in (row.width, row.rows, row.positions):
                assert lowest <= highest
            is_clear_gain = row.gains["bf16"] >= BF16_WORTH_IT
            assert is_clear_gain or max(row.gains.values()) < BF16_WORTH_IT


# --- compiling ------------------------------------------------------------------------------------


class Compiled(nn.Module):
    """What is called in a model's place as if torch had compiled it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table says that compiling gains; nothing is really compiled."""

    def compiled(models: dict[str, nn.Module]) -> dict[str, nn.Module]:
        return {name: Compiled(model) for name, model in models.items()}

    monkeypatch.setattr(speed_table, "COMPILE", {"cpu": True})
    monkeypatch.setattr("surefoot.run.build.compiled", compiled)
    monkeypatch.setattr("torch.compile", lambda model, **_: Compiled(model))  # what scores


def test_nothing_is_compiled_where_the_table_has_no_gain() -> None:
    run = built(compile="auto")
    run.train()

    assert run.parts.compiled is False
    assert run.parts.plan.identity["compile"] is False


@pytest.mark.usefixtures("compiling")
def test_steps_of_ones_own_and_batches_by_tokens_are_not_compiled() -> None:
    pairs = sf.data.TokenPairs([[4, 5, 6]] * 9, [[4, 5, 6]] * 9)
    of_own_steps = built(loss=None, compile="auto")
    by_tokens = built(train_data=pairs, batch_size="32 tokens", compile="auto")

    why_not = of_own_steps.parts.plan.reasons.compile
    assert why_not
    assert by_tokens.parts.plan.reasons.compile not in (None, why_not)


@pytest.mark.usefixtures("compiling")
def test_what_the_table_says_of_compiling_stays_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"compile": "auto", "save_every": "1 steps", "log_every": "1 steps"}
    built(tmp_path / "run", stop_after="2 steps", **settings).train()
    monkeypatch.setattr(speed_table, "COMPILE", {"cpu": False})
    resumed = built(tmp_path / "run", **settings)
    with resumed:
        assert resumed.session is not None
        assert resumed.session.watches.layers.modules == {}  # of a compiled model none is watched
        for _ in resumed:
            pass

    assert isinstance(resumed.parts.task.forward, Compiled)
    assert resumed.parts.plan.identity["compile"] is True
    scoring = built(compile="auto")
    scoring.load_checkpoint(newest_checkpoint(tmp_path / "run"))
    assert scoring.parts.compiled
    with refused("settings-changed", sf.CheckpointError, changes=["compile was True, now False"]):
        built(tmp_path / "run", compile=False).train()
    assert sf.load(built(tmp_path / "run", compile="auto")).verify(steps="all").exit_status == 0
    replayed = sf.load(built(tmp_path / "run", compile="auto")).replay(step=3)
    assert any("torch.compile" in note for note in replayed.notes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_run_that_chose_to_compile_resumes_to_the_same_bits_and_is_one_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_table, "COMPILE", {"cpu": True})
    named = built(compile=True)
    whole = built(compile="auto")
    stopped = built(tmp_path / "run", compile="auto", stop_after="3 steps")
    for run in (named, whole, stopped):
        run.train()
        torch.compiler.reset()
    resumed = built(tmp_path / "run", compile="auto")
    resumed.train()

    assert whole.parts.compiled
    assert resumed.parts.compiled
    weights = whole.state.model.state_dict()
    for run in (named, resumed):
        for name, tensor in run.state.model.state_dict().items():
            assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize(("typed", "meant"), [("auto", "auto"), ("true", True), ("False", False)])
def test_auto_is_typed_like_true(typed: str, meant: bool | str) -> None:
    config, _ = configured(images.Config, [], ["--compile", typed], verb="train images")

    assert config.compile == meant


def test_another_word_than_auto_is_refused() -> None:
    with refused("flags-not-understood", arguments=["--compile", "often"]) as caught:
        configured(images.Config, [], ["--compile", "often"], verb="train images")
    assert "--compile 'often'" in caught.value.problem
    with refused("setting-of-wrong-type", setting="compile"):
        built(compile="often")


def test_fp16_on_a_cpu_trains_and_one_line_says_that_it_is_for_trying_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = built(console=True, precision="fp16")
    run.train()

    assert run.state.step == 6
    assert len(lines_naming(capsys.readouterr().out, "note: ", "fp16")) == 1
    built(console=True, precision="bf16").train()
    assert lines_naming(capsys.readouterr().out, "note: ", "bf16") == []


@pytest.mark.parametrize("share", [None, 0.25])
@pytest.mark.parametrize(
    "loss_fn", [lambda weight: weight.view(()), lambda weight: (weight * 3).sum()]
)
def test_a_backward_pass_leaves_the_gradients_of_torchs_own(
    loss_fn: Any, share: float | None
) -> None:
    """Also where a gradient is a view of the one that the pass started from, which clipping then
    changes in place.
    """
    ours = nn.Parameter(torch.ones(1))
    torchs = nn.Parameter(torch.ones(1))

    def gradient() -> Tensor | None:
        return None if share is None else torch.tensor(share)

    for _ in range(3):
        precision("fp32", torch.device("cpu")).backward(loss_fn(ours), gradient())
        loss_fn(torchs).backward(gradient())
        for weight in (ours, torchs):
            assert weight.grad is not None
            weight.grad.mul_(0.5)
        assert torch.equal(ours.grad, torchs.grad)


def test_a_loss_of_its_own_tensor_class_keeps_its_own_backward_pass() -> None:
    class Loss(torch.Tensor):
        passes = 0

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            cls.passes += func is torch.Tensor.backward
            return super().__torch_function__(func, types, args, kwargs or {})

    loss = nn.Parameter(torch.ones(())).mul(2).as_subclass(Loss)

    precision("fp32", torch.device("cpu")).backward(loss, None)

    assert Loss.passes == 1
