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
from surefoot.checkpoint import Store
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
            nn.Linear(16, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 40)
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


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this a processor with AMX, and the table these rows; without rows it is silent."""
    monkeypatch.setattr(run_facts, "instruction_set", lambda: "amx_bf16")

    def holding(*rows: Row) -> None:
        monkeypatch.setattr(speed_table, "TABLE", {("amx_bf16", VERSION): ("2026-11-22", rows)})

    holding(row(2.0))
    return holding


Table = Callable[..., None]


@pytest.mark.parametrize(
    ("gain", "chosen"), [(2.0, "bf16"), (1.15, "bf16"), (1.14, "fp32"), (0.5, "fp32")]
)
def test_bf16_is_chosen_where_the_table_has_a_clear_gain(
    gain: float, chosen: str, table: Table
) -> None:
    table(row(gain))
    run = built()
    run.train()
    assert run.parts.run_state.precision.name == run.parts.plan.identity["precision"] == chosen


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
    region: dict[str, Any], inside: bool, table: Table
) -> None:
    table(row(2.0, **region))
    run = built()
    chosen = run.parts.plan.reasons
    assert (run.parts.run_state.precision.name, chosen.unknown) == (
        ("bf16", False) if inside else ("fp32", True)
    )


@pytest.mark.parametrize(
    "other", [{"instructions": "none"}, {"instructions": "avx512_bf16"}, {"torch": "1.0"}]
)
def test_another_processor_and_another_torch_are_fp32(
    other: dict[str, str], table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_facts, "instruction_set", lambda: other.get("instructions", "amx_bf16"))
    monkeypatch.setattr(torch, "__version__", other.get("torch", torch.__version__))
    monkeypatch.setattr(DataPipeline, "first", lambda *_: pytest.fail("data were read for nothing"))
    run = built()
    assert run.parts.plan.reasons.unknown
    assert run.parts.run_state.precision.name == "fp32"


def test_where_regions_overlap_the_least_gain_counts(table: Table) -> None:
    facts = Facts("amx_bf16", VERSION, "linear", 40, 16)
    table(row(2.0), row(1.0))
    assert look_up(facts).precision == "fp32"
    table(row(2.0), row(1.0, width=(50, 60)))
    assert look_up(facts).precision == "bf16"


def test_the_loss_is_called_for_steps_alone(table: Table) -> None:
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
def test_a_run_with_auto_is_bit_equal_to_one_with_what_it_chose(chosen: str, table: Table) -> None:
    table(row(2.0 if chosen == "bf16" else 1.0))
    auto, named = built(), built(precision=chosen)
    auto.train()
    named.train()
    for one, other in zip(auto.state.parameters, named.state.parameters, strict=True):
        assert torch.equal(one, other)


def test_a_resume_on_another_machine_computes_as_the_run_began(
    tmp_path: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = built(precision="bf16")
    whole.train()
    built(tmp_path / "run", stop_after="2 steps").train()
    monkeypatch.setattr(run_facts, "instruction_set", lambda: "none")
    resumed = built(tmp_path / "run")
    resumed.train()
    assert resumed.parts.run_state.precision.name == "bf16"
    for one, other in zip(whole.state.parameters, resumed.state.parameters, strict=True):
        assert torch.equal(one, other)
    newest = Store(tmp_path / "run" / "checkpoints").newest_intact()
    assert newest is not None
    again = built()
    again.load_checkpoint(newest[0])
    assert again.parts.run_state.precision.name == "bf16"  # and is scored as it was
    with refused(
        "settings-changed", sf.CheckpointError, changes=["precision was 'bf16', now 'fp32'"]
    ):
        built(tmp_path / "run", precision="fp32").train()


def test_choosing_leaves_no_trace(table: Table) -> None:
    model = Net()
    before = {name: held.clone() for name, held in model.state_dict().items()}
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index, union-attr]
    run = built(model=model, compile="auto")
    chosen = run.parts.plan.reasons
    assert numbers_in(str(chosen.precision)) == [2]  # times as fast as fp32
    for name, held in run.state.models["model"].state_dict().items():
        assert torch.equal(held, before[name])
    assert all(
        parameter.grad is None or not parameter.grad.any() for parameter in run.state.parameters
    )
    assert random.getstate() == drawn[0]
    assert np.random.get_state()[1].tolist() == drawn[1]  # type: ignore[index, union-attr]
    assert torch.equal(torch.get_rng_state(), drawn[2])


def test_data_that_cannot_be_read_fail_in_the_first_step_where_it_is_explained(
    tmp_path: Path, table: Table
) -> None:
    wrong = (torch.randn(64, 16), torch.full((64,), 500))
    with refused("target-out-of-range", sf.DataError, value=500, where="at step 0"):
        built(tmp_path / "run", train_data=wrong, compile="auto").train()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[str, int] | None]] = {
    "perceptron": (Net, ("linear", 40)),
    "GPT": (lambda: sf.models.GPT(sf.models.GPTConfig(2, 2, 16, 8, 32)), ("attention", 16)),
    "encoder-decoder": (
        lambda: sf.models.Seq2Seq(
            sf.models.Seq2SeqConfig(1, 1, heads=2, width=16, mlp_width=64, vocab_size=40)
        ),
        ("encoder-decoder", 16),
    ),
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


def test_several_models_and_loops_of_ones_own_are_fp32(table: Table) -> None:
    assert run_facts.layer_kind({"first": Net(), "second": Net()}) is None
    own = built(loss=None)
    chosen = own.parts.plan.reasons
    assert chosen.precision
    assert not chosen.unknown  # it cannot be profiled
    assert own.parts.run_state.precision.name == "fp32"


def test_batches_by_tokens_are_told_by_the_plan_whatever_the_seed(table: Table) -> None:
    draw = np.random.default_rng(0)
    rows = [
        [int(token) for token in draw.integers(4, 40, size=size)]
        for size in draw.integers(4, 30, size=200)
    ]
    network = sf.models.Seq2SeqConfig(1, 1, heads=2, width=16, mlp_width=64, vocab_size=40)

    def facts(seed: int) -> Facts | str:
        run = built(
            model=lambda: sf.models.Seq2Seq(network),
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
    by_title = {section.title: section for section in summary.sections(run.parts)}
    return str(by_title["chosen"])


def test_the_header_and_the_plan_say_what_was_chosen_and_why(
    table: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    built(console=True, compile="auto").train()
    said = capsys.readouterr().out
    (precision,) = re.findall(r"precision +bf16 \(auto: (.*)\)\n", said)
    assert numbers_in(precision) == [2]
    assert "adds       to a plain loop: bf16\n" in said
    assert "compile off (auto: " in said
    assert "surefoot profile" not in said
    chosen = choices_in_plan(built())
    assert f"precision bf16 (auto: {precision})" in chosen


def test_where_the_table_is_silent_one_line_names_what_measures(
    table: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    table()
    for said in (built(console=True), built(console=True, compile="auto")):
        said.train()
        assert "note: `surefoot profile` " in " ".join(capsys.readouterr().out.split())
    assert "`surefoot profile` " in choices_in_plan(built())
    built(console=True, precision="fp32").train()
    assert "surefoot profile" not in capsys.readouterr().out


def test_the_configuration_of_a_run_holds_what_was_chosen(
    tmp_path: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import surefoot as sf\nfrom surefoot.config.setting import default\nfrom surefoot.config.train_settings import TrainSettings\n"
        "from dataclasses import dataclass\nfrom typing import Literal\nimport test_auto_precision\n"
        "@dataclass(kw_only=True)\n"
        "class Config(TrainSettings):\n    length: str = default('4 steps')\n    batch_size: int | str = default(16)\n"
        "    precision: Literal['auto', 'fp32', 'tf32', 'bf16', 'fp16', 'fp8'] = default('auto')\n"
        "    channels_last: bool | Literal['auto'] = default('auto')\n"
        "def build(config: Config) -> sf.Run:\n"
        "    return test_auto_precision.built(**(config.train_settings() | {'console': False}))\n"
    )
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
    for _ in range(2):
        text = (run_dir / "config.toml").read_text()
        assert 'precision = "bf16" # auto' in text
        assert "compile = false # auto" in text
        table()  # another machine
        main(typed)
    newest = Store(run_dir / "checkpoints").newest_intact()
    assert newest is not None
    assert newest[0].state["identity"]["precision"] == "bf16"


def test_only_settings_that_say_auto_are_replaced() -> None:
    text = 'precision = "fp32" # flag\ncompile = "auto" # flag\n[model]\nprecision = "auto"\n'
    replaced = 'precision = "fp32" # flag\ncompile = true # auto\n[model]\nprecision = "auto"\n'
    assert (
        with_choices(text, {"precision": "bf16", "channels_last": False, "compile": True})
        == replaced
    )


# --- facts of machines ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has", "limit", "found"),
    [
        ({"architecture": "x86_64", "amx_bf16": True, "avx512_bf16": True}, "", "amx_bf16"),
        (
            {"architecture": "x86_64", "amx_bf16": True, "avx512_bf16": True},
            "avx512_core_amx",
            "amx_bf16",
        ),
        (
            {"architecture": "x86_64", "amx_bf16": True, "avx512_bf16": True},
            "AVX512_CORE_BF16",
            "avx512_bf16",
        ),
        ({"architecture": "x86_64", "amx_bf16": True, "avx512_bf16": True}, "AVX512_CORE", "none"),
        ({"architecture": "x86_64", "amx_bf16": False, "avx512_bf16": True}, "", "avx512_bf16"),
        (
            {"architecture": "x86_64", "avx2": True, "amx_bf16": False, "avx512_bf16": False},
            "",
            "none",
        ),
        ({"architecture": "arm64", "bf16": True}, "", "arm_bf16"),
        ({"architecture": "arm64", "bf16": False}, "", "none"),
        ({"architecture": "riscv64"}, "", "unknown"),
    ],
)
def test_instructions_are_what_torch_sees_and_its_library_may_use(
    has: dict[str, Any], limit: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert instruction_set() == found


@pytest.mark.parametrize(
    ("capability", "name"), [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp32")]
)
def test_on_cuda_the_capability_decides(
    capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    found = precision("auto", torch.device("cuda"))
    assert found.name == name
    assert precision("bf16", torch.device("cuda")).emulated == (name == "fp32")


def test_bf16_on_a_processor_without_it_trains_and_one_line_names_what_is_quicker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("surefoot.train.precision.instruction_set", lambda: "none")
    run = built(console=True, precision="bf16")
    run.train()
    assert run.state.step == 6
    said = " ".join(capsys.readouterr().out.split())
    assert said.count('precision="fp32"') == 1
    assert 'precision="fp32"' in choices_in_plan(built(precision="bf16"))
    built(console=True, precision="fp32").train()
    monkeypatch.setattr("surefoot.train.precision.instruction_set", lambda: "unknown")
    built(console=True, precision="bf16").train()
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
    assert all(5 <= len(rows) <= 20 for _, rows in speed_table.TABLE.values())
    for (instructions, version), (measured, rows) in speed_table.TABLE.items():
        assert date.fromisoformat(measured) <= date.today()
        assert f"# {measured}, benchmarks/precision.py, {instructions}, torch {version} " in printed
        for each in rows:
            gains = ", ".join(f'"{name}": {gain:.2f}' for name, gain in each.gains.items())
            assert (
                f'Row("{each.layers}", {each.width}, {each.rows}, {each.positions}, {{{gains}}}),'
                in printed
            )
            assert all(low <= high for low, high in (each.width, each.rows, each.positions))
            assert (
                each.gains["bf16"] >= BF16_WORTH_IT or max(each.gains.values()) < BF16_WORTH_IT
            )  # clear, either way


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
    monkeypatch.setattr(speed_table, "COMPILE", {"cpu": True})
    monkeypatch.setattr(
        "surefoot.run.build.compiled",
        lambda models: {name: Compiled(held) for name, held in models.items()},
    )
    monkeypatch.setattr("torch.compile", lambda model, **_: Compiled(model))  # what scores


def test_nothing_is_compiled_where_the_table_has_no_gain() -> None:
    run = built(compile="auto")
    run.train()
    assert run.parts.compiled is run.parts.plan.identity["compile"] is False


@pytest.mark.usefixtures("compiling")
def test_steps_of_ones_own_and_batches_by_tokens_are_not_compiled() -> None:
    own = built(loss=None, compile="auto").parts.plan.reasons
    assert own.compile  # why not
    pairs = sf.data.TokenPairs([[4, 5, 6]] * 9, [[4, 5, 6]] * 9)
    run = built(train_data=pairs, batch_size="32 tokens", compile="auto")
    tokens = run.parts.plan.reasons
    assert tokens.compile not in (None, own.compile)


@pytest.mark.usefixtures("compiling")
def test_what_the_table_says_of_compiling_stays_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(
        tmp_path / "run",
        compile="auto",
        stop_after="2 steps",
        save_every="1 steps",
        log_every="1 steps",
    ).train()
    monkeypatch.setattr(speed_table, "COMPILE", {"cpu": False})
    resumed = built(tmp_path / "run", compile="auto", log_every="1 steps")
    with resumed:
        assert resumed.session is not None
        assert resumed.session.watches.layers.modules == {}  # of a compiled model none is watched
        for _ in resumed:
            pass
    assert isinstance(resumed.parts.task.forward, Compiled)
    assert resumed.parts.plan.identity["compile"] is True
    newest = Store(tmp_path / "run" / "checkpoints").newest_intact()
    assert newest is not None
    again = built(compile="auto")
    again.load_checkpoint(newest[0])
    assert again.parts.compiled  # and is scored as it was
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
    named, whole = built(compile=True), built(compile="auto")
    stopped = built(tmp_path / "run", compile="auto", stop_after="3 steps")
    for run in (named, whole, stopped):
        run.train()
        torch.compiler.reset()
    resumed = built(tmp_path / "run", compile="auto")
    resumed.train()
    assert whole.parts.compiled
    assert resumed.parts.compiled
    held = [run.state.models["model"].state_dict() for run in (named, whole, resumed)]
    for name, value in held[0].items():
        assert all(torch.equal(value, other[name]) for other in held[1:]), name


def test_auto_is_typed_like_true_and_nothing_else_is() -> None:
    for typed, meant in (("auto", "auto"), ("true", True), ("False", False)):
        config, _ = configured(images.Config, [], ["--compile", typed], verb="train images")
        assert config.compile == meant
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
    ours, torchs = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    for _ in range(3):
        first, second = (None if share is None else torch.tensor(share) for _ in range(2))
        precision("fp32", torch.device("cpu")).backward(loss_fn(ours), first)
        loss_fn(torchs).backward(second)
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

    precision("fp32", torch.device("cpu")).backward(
        nn.Parameter(torch.ones(())).mul(2).as_subclass(Loss), None
    )
    assert Loss.passes == 1
