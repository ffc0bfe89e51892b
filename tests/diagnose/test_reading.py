"""The history of a run from its directory: of every kind, whole or damaged; and models as they
print themselves; 1 second.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import small_runs
import surefoot as sf
from diagnose.histories import falling, train, wobble
from in_one import in_one
from refused import refused
from surefoot.tools.diagnose.checks import findings
from surefoot.tools.diagnose.reading import description_of, history_in
from surefoot.tools.diagnose.run_settings import kinds_of_models, kinds_of_modules
from surefoot.tracking.jsonl import line
from surefoot.tracking.run_directory import RunDirectory
from surefoot.tracking.run_reader import standing_of
from written_runs import state_json


class Block(nn.Module):
    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(3, 3), nn.ReLU() if odd else nn.Tanh(), nn.Dropout(0.1)
        )
        self.norm = nn.LayerNorm(3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList([Block(True), Block(True), Block(False)])
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
    kinds = kinds_of_models(
        {"g": repr(nn.Sequential(nn.ReLU())), "d": repr(nn.Sequential(nn.Tanh()))}
    )
    assert (kinds["g.0"], kinds["d.0"]) == ("ReLU", "Tanh")


def run_in(place: Path, records: list[dict[str, Any]], config: str | None = None) -> Path:
    place.mkdir(exist_ok=True)
    (place / "metrics.jsonl").write_text("".join(line(record) + "\n" for record in records))
    if config is not None:
        (place / "config.toml").write_text(config)
    return place


def test_settings_are_those_that_the_newest_readable_checkpoint_notes(tmp_path: Path) -> None:
    run = run_in(
        tmp_path / "run",
        train(),
        'seed = 1\nworkers = 2\n[program]\nkind = "recipe"\nrecipe = "gpt"\n',
    )
    states = {
        "0": json.dumps(state_json(length="7 steps")),
        "9": json.dumps(state_json(length="600 steps")),
        "12": '{"desc',
    }
    for step, text in states.items():
        place = run / "checkpoints" / f"step-{step:>08}"
        place.mkdir(parents=True)
        (place / "state.json").write_text(text)
    (run / "environment.json").write_text(
        json.dumps({"sessions": [{"processors": 3, "memory_bytes": 10**9}]})
    )
    described = description_of(run)
    assert (described.steps, described.workers, described.program) == (600, 2, "recipe")
    assert (described.processors, described.memory_bytes) == (3, 10**9)


def test_a_run_that_a_script_made_is_diagnosed_with_its_own_workers_and_what_its_owner_can_type(
    tmp_path: Path,
) -> None:
    waiting = {"data_wait_s": lambda _: 0.4, "lr": lambda _: 1e-3}
    config = '[program]\nkind = "script"\n[run]\nlength = "600 steps"\n[run.schedule]\nshape = "constant"\nwarmup = 0\n'
    run = run_in(tmp_path / "run", train(**waiting), config)
    (run / "environment.json").write_text(
        json.dumps({"sessions": [{"processors": 8, "workers": 2}]})
    )
    found = {finding.name: finding for finding in findings(history_in(run))}
    assert "with 2 workers" in found["data-bound"].evidence[0]
    assert "Run(workers=3) (now 2)" in found["data-bound"].try_
    said = " ".join(part for finding in found.values() for part in finding.try_)
    assert "Run(length='...')" in said
    assert "surefoot resume" not in said


def test_a_run_writes_how_many_workers_read_its_samples(tmp_path: Path) -> None:
    small_runs.build(tmp_path / "run", length="2 steps", workers=1).train()
    assert description_of(tmp_path / "run").workers == 1


def test_longer_records_are_advised_only_where_they_are_short(tmp_path: Path) -> None:
    for every, advised in ((10, True), (50, False)):
        records = train(targets_per_s=lambda place: 100 + 60 * wobble(place))
        for place, record in enumerate(records):
            record["step"] = every * (place + 1)
        found = {
            finding.name: finding
            for finding in findings(history_in(run_in(tmp_path / str(every), records)))
        }
        assert any("log_every" in part for part in found["jittering-throughput"].try_) is advised


@in_one
@pytest.mark.parametrize(
    "name", ["config.toml", "environment.json", "checkpoints/step-00000001/state.json"]
)
@pytest.mark.parametrize(
    "held", [b"", b"\xff\xfe", b"[", b"[1]", b'{"sessions": 3, "identity": 4}', b"a = 1"]
)
def test_no_damaged_file_of_settings_is_an_error(name: str, held: bytes, tmp_path: Path) -> None:
    run = run_in(tmp_path / "run", train())
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_bytes(held)
    assert [finding for finding in findings(history_in(run)) if finding.severity == "error"] == []


def test_half_a_line_and_steps_that_a_resume_made_again_are_left_out(tmp_path: Path) -> None:
    records = train(count=20)
    run = run_in(
        tmp_path / "run",
        [
            *records,
            {"kind": "resume", "step": 100},
            *train(lambda place: falling(place) / 2)[10:20],
        ],
    )
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
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps(record))
    assert history_in(run).watched("grad_norm")["a"].value.tolist() == [float("inf")]


def test_what_is_no_run_is_refused_in_one_error(tmp_path: Path) -> None:
    with refused("run-missing"):
        sf.load(tmp_path).diagnose()


def test_a_run_trains_while_its_lock_is_held_by_this_process_or_another(tmp_path: Path) -> None:
    held = RunDirectory(tmp_path / "run")
    assert standing_of(tmp_path / "run") == "unknown"
    held.open()
    assert standing_of(tmp_path / "run") == "running"
    other = "import sys; from surefoot.tracking.run_reader import Path, standing_of\n"
    other += "print(standing_of(Path(sys.argv[1])), 'torch' in sys.modules)"
    asked = [sys.executable, "-c", other, str(tmp_path / "run")]
    for _ in range(2):  # to ask lets nobody's lock go
        assert (
            subprocess.run(asked, capture_output=True, text=True, check=True).stdout
            == "running False\n"
        )
    held.close()
    assert standing_of(tmp_path / "run") == "over"
