"""How soon tiny-shakespeare is learnt, against nanoGPT on the same machine in the same run; the
last lines are a table.

    python benchmarks/quality.py --data input.txt --nanogpt DIR [--rounds 5] [--first 1] [--baseline-rounds 3] [--only a,b,c,d] [--short]

Characters, the last tenth held out, losses over the *whole* of it; one thread. DIR is a clone of
nanoGPT (https://github.com/karpathy/nanoGPT), whose documented command for a CPU is run unmodified:
4 layers of 128, windows of 64, 2,000 steps. Rounds take turns: nanoGPT, then each of ours with the
round's number as its seed.

 a  4 layers of 128, 0.8 million parameters, windows of 64: a loss of 1.88 in at most 1/12 of nanoGPT's training time
 b  any model up to that size: 1.88 in at most 1/30
 n  as b, with larger tables of n-grams: 4.5 million parameters, most of them seldom seen
 c  the best loss within nanoGPT's time: at most 1.55
 d  nanoGPT's result on a GPU, 1.4697 (10.7 million parameters, documented as 3 minutes on an A100), in at most 300 seconds

Seconds are those of training: of nanoGPT the sum of its steps' times, an evaluating one counted as
the median step; of surefoot what the run records, with waiting for data. `wall` is the process from
start to end: imports, reading, evaluation, checkpoints. Settings were chosen on the last tenth of
the first nine tenths (quality_ablations.sh).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from loops.conditions import reported

from surefoot.memory import instruction_set
from surefoot.tracking.jsonl import records

PRECISION = "fp32" if instruction_set() == "none" else "bf16"
GPU_LOSS = 1.4697
_NANOGPT = shlex.split(  # its README, "I only have a macbook"
    "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
    "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)


@dataclass(frozen=True)
class Setting:
    """What is run, what it must reach, and in which part of nanoGPT's time or in how many
    seconds.
    """

    flags: str  # on top of `--preset shakespeare`
    loss: float
    part: float = 0.0
    seconds: float = 0.0


_SMALL = (
    "--model.context 64 --model.layers 1 --model.heads 1 --model.width 64 --model.activation relu2 --model.ngrams 4 "
    "--batch-size 16 --schedule.warmup '3 steps' --optimizer.ns-steps 5 "
    "--optimizer.lr 0.03 --optimizer.adamw-lr 0.05 --optimizer.momentum 0.85"
)
SETTINGS = {
    "a": Setting(
        "--model.context 64 --model.heads 1 --model.smear 3 --batch-size 28 --length '61 steps' --schedule.warmup '0 steps' "
        "--optimizer.lr 0.05 --optimizer.adamw-lr 0.04 --optimizer.momentum 0.7",
        loss=1.88,
        part=12,
    ),
    "b": Setting(f"{_SMALL} --model.ngram-buckets 3600 --length '150 steps'", loss=1.88, part=30),
    "n": Setting(f"{_SMALL} --length '100 steps'", loss=1.88, part=30),
    "c": Setting("--length '700 steps'", loss=1.55, part=1),
    "d": Setting("", loss=GPU_LOSS, seconds=300),
}


@dataclass(frozen=True)
class Trained:
    """One run: seconds of training and of the whole process, the loss over the held-out part,
    parameters.
    """

    seconds: float
    wall_s: float
    loss: float
    parameters: int

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}  training {self.seconds:6.2f} s  wall {self.wall_s:6.2f} s  {self.parameters:,} parameters"


def surefoot(flags: str, *, text: Path, seed: int, environment: dict[str, str]) -> Trained:
    """One run of `surefoot train gpt --preset shakespeare` with these flags."""
    with tempfile.TemporaryDirectory() as directory:
        command = shlex.split(
            f"-m surefoot train gpt --preset shakespeare --precision {PRECISION} --evaluate-every 100%"
        )
        command += shlex.split(f"--cloze-questions 0 --sample-tokens 0 --seed {seed} {flags}")
        command += ["--data.path", str(text), "--run-dir", f"{directory}/run"]
        wall_s, printed = _ran(command, environment=environment)
        found = records(Path(directory, "run", "metrics.jsonl"))
    phases = ("starting_s", "training_s", "data_wait_s")
    training_s = sum(each[phase] for each in found if each["kind"] == "train" for phase in phases)
    loss = next(each["val/loss"] for each in reversed(found) if each["kind"] == "eval")
    parameters = re.findall(r"([\d,]+) trainable", printed)[0].replace(",", "")
    return Trained(training_s, wall_s, loss, int(parameters))


def nanogpt(clone: Path, *, text: Path, environment: dict[str, str]) -> Trained:
    """One run of nanoGPT's command, and its checkpoint's loss over the whole held-out part in
    windows of 64.
    """
    data = clone / "data" / "shakespeare_char"
    if not (data / "val.bin").exists():
        shutil.copy(text, data / "input.txt")
        with tempfile.TemporaryDirectory() as empty:
            Path(
                empty, "requests.py"
            ).touch()  # which it imports to download the text that is there
            _ran(["prepare.py"], environment=environment | {"PYTHONPATH": empty}, cwd=data)
    with tempfile.TemporaryDirectory() as out:
        wall_s, printed = _ran([*_NANOGPT, f"--out_dir={out}"], environment=environment, cwd=clone)
        saved = torch.load(f"{out}/ckpt.pt", weights_only=False)
    steps_ms = [
        float(each) for each in re.findall(r"iter \d+: loss [\d.]+, time ([\d.]+)ms", printed)
    ]
    evaluations = len(re.findall(r"^step \d+: ", printed, flags=re.MULTILINE))
    kept_ms = sorted(steps_ms)[
        : len(steps_ms) - evaluations
    ]  # an evaluating step takes as long as many
    specification = importlib.util.spec_from_file_location("nanogpt_model", clone / "model.py")
    assert specification is not None
    assert specification.loader is not None
    theirs = importlib.util.module_from_spec(specification)
    sys.modules["nanogpt_model"] = theirs
    specification.loader.exec_module(theirs)
    model = theirs.GPT(theirs.GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    loss = _whole_loss(model.eval(), np.fromfile(data / "val.bin", dtype=np.uint16), context=64)
    seconds = (sum(kept_ms) + evaluations * median(kept_ms)) / 1000
    return Trained(
        seconds, wall_s, loss, sum(parameter.numel() for parameter in model.parameters())
    )


@torch.no_grad()
def _whole_loss(model: Any, tokens: np.ndarray[Any, Any], *, context: int) -> float:
    """Mean loss over every token but the first, in windows that do not overlap."""
    held = torch.from_numpy(tokens.astype(np.int64))
    starts = range(0, len(held) - 1, context)
    windows = [
        (held[start : start + context + 1][:-1], held[start : start + context + 1][1:])
        for start in starts
    ]
    total = sum(
        float(model(inputs[None], targets[None])[1]) * len(targets) for inputs, targets in windows
    )
    return total / (len(held) - 1)


def _ran(
    command: Sequence[str], *, environment: dict[str, str], cwd: Path | None = None
) -> tuple[float, str]:
    """Seconds of a Python process, and what it printed."""
    begun = perf_counter()
    command = [sys.executable, *command]
    done = subprocess.run(
        command, check=False, env=environment, cwd=cwd, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return perf_counter() - begun, done.stdout


def _row(name: str, runs: list[Trained], baseline: list[Trained]) -> str:
    """A line of the table: what was asked, what came, how many runs reached it; of the loss alone
    where nanoGPT's time is not known.
    """
    setting = SETTINGS[name]
    seconds = median(run.seconds for run in runs)
    losses = " ".join(f"{run.loss:.4f}" for run in runs)
    theirs = median(run.seconds for run in baseline) if baseline else None
    limit = setting.seconds or (theirs / setting.part if theirs else None)
    asked = f"{setting.loss} in " + (
        f"{setting.seconds:.0f} s" if setting.seconds else f"1/{setting.part:.0f}"
    )
    met = sum(run.loss <= setting.loss and (limit is None or run.seconds <= limit) for run in runs)
    what = "met" if limit is not None else "the loss (not the time) met"
    times = f"1/{theirs / seconds:.1f} of nanoGPT" if theirs else "nanoGPT not run"
    return f"{name}  asked {asked:16}  {seconds:6.2f} s ({times})  losses {losses}  {what} by {met} of {len(runs)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="tiny-shakespeare's input.txt")
    parser.add_argument(
        "--nanogpt", type=Path, help="a clone of nanoGPT; without it only ours are run"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--first", type=int, default=1, help="the first round's number, which is its seed"
    )
    parser.add_argument(
        "--baseline-rounds", type=int, default=3, help="in how many of the rounds nanoGPT is run"
    )
    parser.add_argument("--only", default=",".join(SETTINGS), help="settings, separated by commas")
    parser.add_argument(
        "--short", action="store_true", help="a and b once, without nanoGPT: half a minute"
    )
    arguments = parser.parse_args()
    names = ["a", "b"] if arguments.short else arguments.only.split(",")
    rounds = 1 if arguments.short else arguments.rounds
    text = arguments.data.resolve()
    clone = None if arguments.short or arguments.nanogpt is None else arguments.nanogpt.resolve()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    baseline: list[Trained] = []
    runs: dict[str, list[Trained]] = {name: [] for name in names}
    for seed in range(arguments.first, arguments.first + rounds):
        if clone is not None and len(baseline) < arguments.baseline_rounds:
            baseline.append(nanogpt(clone, text=text, environment=environment))
            print(f"round {seed}  nanoGPT    {baseline[-1]}", flush=True)
        for name in names:
            runs[name].append(
                surefoot(SETTINGS[name].flags, text=text, seed=seed, environment=environment)
            )
            print(f"round {seed}  {name}, seed {seed}  {runs[name][-1]}", flush=True)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, 1 thread")
    if baseline:
        losses = " ".join(f"{run.loss:.4f}" for run in baseline)
        print(
            f"nanoGPT                     {median(run.seconds for run in baseline):6.2f} s  losses {losses}"
        )
    for name in names:
        print(_row(name, runs[name], baseline))


if __name__ == "__main__":
    with reported():
        main()
