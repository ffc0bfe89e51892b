"""The history of a run from its directory: of every kind, whole or damaged; and models as they
print themselves; 1 second.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import small_runs
import surefoot as sf
from diagnose.histories import always, falling, resume, train, wobble
from in_one import in_one
from refused import refused
from surefoot.tools.diagnose.checks import findings
from surefoot.tools.diagnose.finding import Finding
from surefoot.tools.diagnose.reading import description_of, history_in
from surefoot.tools.diagnose.run_settings import kinds_of_models, kinds_of_modules
from surefoot.tracking.run_directory import RunDirectory
from surefoot.tracking.run_reader import standing_of
from written_runs import state_json, written


class Block(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), activation, nn.Dropout(0.1))
        self.norm = nn.LayerNorm(3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList([Block(nn.ReLU()), Block(nn.ReLU()), Block(nn.Tanh())])
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(3, 2)


@pytest.mark.parametrize(
    "model", [Net(), nn.Sequential(nn.Linear(1, 1), nn.ReLU()), nn.Linear(2, 2)]
)
def test_kinds_from_the_print_are_the_classes_of_the_modules(model: nn.Module) -> None:
    assert kinds_of_modules(repr(model)) == {
        name: type(module).__name__ for name, module in model.named_modules()
    }


def test_modules_of_several_models_are_called_by_their_model() -> None:
    generator = nn.Sequential(nn.ReLU())
    critic = nn.Sequential(nn.Tanh())
    kinds = kinds_of_models({"g": repr(generator), "d": repr(critic)})
    assert kinds["g.0"] == "ReLU"
    assert kinds["d.0"] == "Tanh"


def findings_of(run: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings(history_in(run))}


def test_settings_are_those_that_the_newest_readable_checkpoint_notes(tmp_path: Path) -> None:
    config = 'seed = 1\nworkers = 2\n[program]\nkind = "recipe"\nrecipe = "gpt"\n'
    run = written(tmp_path / "run", train(), config=config, processors=3, memory_bytes=10**9)
    states = {
        "step-00000000": json.dumps(state_json(length="7 steps")),
        "step-00000009": json.dumps(state_json(length="600 steps")),
        "step-00000012": '{"desc',
    }
    for checkpoint, text in states.items():
        place = run / "checkpoints" / checkpoint
        place.mkdir(parents=True)
        (place / "state.json").write_text(text)

    description = description_of(run)

    assert description.steps == 600
    assert description.workers == 2
    assert description.program == "recipe"
    assert description.processors == 3
    assert description.memory_bytes == 10**9


CONFIG_OF_SCRIPT = """
[program]
kind = "script"
[run]
length = "600 steps"
[run.schedule]
shape = "constant"
warmup = 0
"""


def test_a_run_that_a_script_made_is_diagnosed_with_its_own_workers_and_what_its_owner_can_type(
    tmp_path: Path,
) -> None:
    records = train(data_wait_s=always(0.4), lr=always(1e-3))
    run = written(tmp_path / "run", records, config=CONFIG_OF_SCRIPT, processors=8, workers=2)

    all_findings = findings_of(run)

    waiting = all_findings["data-bound"]
    assert "with 2 workers" in waiting.evidence[0]
    assert "Run(workers=3) (now 2)" in waiting.try_
    advice = " ".join(" ".join(finding.try_) for finding in all_findings.values())
    assert "Run(length='...')" in advice
    assert "surefoot resume" not in advice


def test_a_run_writes_how_many_workers_read_its_samples(tmp_path: Path) -> None:
    small_runs.build(tmp_path / "run", length="2 steps", workers=1).train()
    assert description_of(tmp_path / "run").workers == 1


@pytest.mark.parametrize(("every", "is_advised"), [(10, True), (50, False)])
def test_longer_records_are_advised_only_where_they_are_short(
    every: int, is_advised: bool, tmp_path: Path
) -> None:
    records = train(targets_per_s=lambda place: 100 + 60 * wobble(place))
    for place, record in enumerate(records):
        record["step"] = every * (place + 1)
    run = written(tmp_path / "run", records)

    jittering = findings_of(run)["jittering-throughput"]

    assert any("log_every" in advice for advice in jittering.try_) is is_advised


@in_one
@pytest.mark.parametrize(
    "name", ["config.toml", "environment.json", "checkpoints/step-00000001/state.json"]
)
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[", b"[1]", b'{"sessions": 3, "identity": 4}', b"a = 1"]
)
def test_no_damaged_file_of_settings_is_an_error(name: str, content: bytes, tmp_path: Path) -> None:
    run = written(tmp_path / "run", train())
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_bytes(content)
    assert "error" not in [finding.severity for finding in findings(history_in(run))]


def test_half_a_line_and_steps_that_a_resume_made_again_are_left_out(tmp_path: Path) -> None:
    first_session = train(count=20)
    second_session = train(lambda place: falling(place) / 2)[10:20]
    run = written(tmp_path / "run", [*first_session, *resume(100), *second_session])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 999, "lo')

    history = history_in(run)

    assert history.resumed == (100,)
    assert list(history.loss.step) == [10 * place for place in range(1, 21)]
    assert history.loss.value[15] == falling(15) / 2


def test_values_that_were_not_finite_come_back_in_layers_too(tmp_path: Path) -> None:
    record = {
        "kind": "layer_stats",
        "step": 1,
        "measured_step": 0,
        "grad_norm": {"a": None, "b": 1.0},
        "nonfinite": {"grad_norm/a": "inf"},
    }
    run = written(tmp_path / "run", [record])

    of_layers = history_in(run).watched("grad_norm")

    assert of_layers["a"].value.tolist() == [math.inf]


def test_what_is_no_run_is_refused_in_one_error(tmp_path: Path) -> None:
    with refused("run-missing"):
        sf.load(tmp_path).diagnose()


ASKING_PROGRAM = """
import sys
from surefoot.tracking.run_reader import Path, standing_of
print(standing_of(Path(sys.argv[1])), 'torch' in sys.modules)
"""


def test_a_run_trains_while_its_lock_is_held_by_this_process_or_another(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def ask_in_process() -> str:
        command = [sys.executable, "-c", ASKING_PROGRAM, str(run)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert standing_of(run) == "unknown"

    directory = RunDirectory(run)
    directory.open()
    assert standing_of(run) == "running"
    assert ask_in_process() == "running False\n"
    assert ask_in_process() == "running False\n"  # to ask lets nobody's lock go

    directory.close()
    assert standing_of(run) == "over"
