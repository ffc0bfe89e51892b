"""The campaign of changes: random histories of a run (changes of its settings, steps that it skips,
going back to earlier steps, SIGKILLs between) end with the bits of a run that was given the lines of
the journal in force from the start.

    python benchmarks/changes_campaign.py [--tries 300] [--first 0] [--within-s SECONDS] [--write]

A history has one to three stops, after each of which one or two settings change, or the run goes
back, with and without other settings. The process that takes it back may be killed, and is repeated
or not; a command that has ended is repeated, and must do nothing. A run trains on one, two or three
ranks, under DDP or FSDP, and may have another number of ranks after a stop. In a quarter of all, a
loop of its own calls `run.change` at one of its steps; in a quarter, the batch size has two values
from the start. While a session trains, another process may ask for a change. On the way to each
stop the run is killed up to twice: all its ranks, or one. The run with the lines in force trains on
a number of ranks of its own. Every run of one rank is verified, with all its steps.

A run trains a small network with dropout, averaged weights, AdamW and a rule that lowers its rate.
`--write` appends a dated line to results/changes-campaign.txt. Leaves with 1 where a bit differs.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from torch import Tensor, nn

import surefoot as sf
from journals import in_force
from rank_processes import Ranks
from surefoot.checkpoint import Store
from surefoot.tools.change.while_training import request
from surefoot.tracking.change_journal import append_changes, read_changes
from surefoot.tracking.run_reader import is_running, newest_state
from surefoot.train.changed_settings import Wish
from surefoot.train.recorded_settings import (
    RecordedSettings,
    read_recorded_settings,
    values_of_program,
)
from surefoot.train.skipped_steps import SKIP_STEPS, steps_in

RESULTS = Path(__file__).parent / "results" / "changes-campaign.txt"
SAMPLES = 60
FIRST_STEPS = 24
KILL_WITHIN_S = 1.5
BACK_KILLED_WITHIN_S = 0.1
BODY_STEP_S = 0.02
RAMP = "8, 12 from 50%"
OF_BODY = "optimizer.betas"  # the setting that a loop of its own changes


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    errors: Tensor = model(batch[0]) - batch[1]
    return errors.square().mean()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def run_in(
    run_dir: str,
    *,
    parallel: str = "ddp",
    batch_size: int | str = 8,
    stop_after: int | None = None,
) -> sf.Run:
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    data = (inputs, inputs.sum(1, keepdim=True))
    return sf.Run(
        model=model,
        loss=loss,
        train_data=data,
        splits={"val": sf.Split(data)},
        evaluate_every="3 steps",
        plateau=sf.ReduceLROnPlateau("min val/loss", patience=1, min_delta="5%"),
        optimizer=sf.optim.adamw(lr=1e-2, weight_decay=0.1),
        schedule=sf.schedules.cosine("10%"),
        clip="norm 1.0",
        ema=0.9,
        batch_size=batch_size,
        micro_batch_size=2,
        length=f"{FIRST_STEPS} steps",
        parallel=parallel,  # type: ignore[arg-type]
        stop_after=None if stop_after is None else f"{stop_after} steps",
        save_every="2 steps",
        log_every="1 steps",
        device="cpu",
        console=False,
        report=False,
        tensorboard=False,
        run_dir=run_dir,
    )


def session(
    run_dir: str,
    *,
    parallel: str,
    batch_size: int | str,
    stop_after: int | None,
    body_changes_at: int | None,
) -> None:
    """Train in each of some processes up to a stop, or to the end."""
    torch.set_num_threads(1)
    run = run_in(run_dir, parallel=parallel, batch_size=batch_size, stop_after=stop_after)
    if body_changes_at is None:
        run.train()
        return
    with run:
        for step in run:
            time.sleep(BODY_STEP_S)  # so that another process may ask for a change
            # a change in the last step is refused
            if step.index == body_changes_at and step.index + 1 < run.parts.length.steps:
                run.change(OF_BODY, [0.8, 0.99], because="the body")


def verified(run_dir: str, *, parallel: str, batch_size: int | str) -> list[str]:
    """Repeat all steps of a run; return what is wrong."""
    run = run_in(run_dir, parallel=parallel, batch_size=batch_size)
    verdict = sf.load(run).verify(steps="all")
    return [str(problem) for problem in verdict.problems]


def drawn_change(draw: random.Random, *, step: int) -> tuple[str, Any]:
    """Return a setting and another value of it, for a run that goes on after a step."""
    first = step + draw.randint(1, 6)  # as records number it
    skipped = f"{first}..{first + draw.randrange(5)}"
    choices: dict[str, list[Any]] = {
        "optimizer.lr": [1e-3, 3e-3, 2e-2],
        "optimizer.weight_decay": [0.0, 0.01, 0.5],
        "optimizer.eps": [1e-8, 1e-6],
        "batch_size": [6, 12, 16, 30],  # micro-batches for three ranks
        "micro_batch_size": [1, 2],
        "clip": ["off", "norm 0.1", "value 0.1", "auto 0.9"],
        "ema": [None, 0.5, 0.99],
        "precision": ["bf16", "fp32"],
        "schedule": ["linear", "constant", "cosine", "wsd", "inverse_sqrt", "stretch"],
        "length": [f"{step + more} steps" for more in (8, 15, 31)],
        "skip_steps": [skipped, skipped, None],
    }
    name = draw.choice(list(choices))
    return name, draw.choice(choices[name])


def saved_step(run_dir: Path) -> int:
    """Return the step from which a run goes on. Its records may have later ones, which it left."""
    step, _ = newest_state(run_dir)
    return step


def planned_steps(run_dir: Path) -> int:
    """Return the length of a run by its journal."""
    _, state = newest_state(run_dir)
    if state is None:
        return FIRST_STEPS
    of_program = values_of_program(run_dir, state.identity)
    course = RecordedSettings(of_program, read_changes(run_dir), state.identity).course()
    assert course is not None
    return course.length.steps


@dataclass(frozen=True)
class Back:
    """A command that goes back, and how many lines the journal has behind it."""

    step: int
    because: str
    settings: dict[str, Any]
    lines: int = 0


@dataclass
class History:
    """A run that is changed and killed: its directory, the draws, and counts of what happened."""

    run_dir: Path
    ranks: Ranks
    draw: random.Random
    parallel: str
    batch_size: int | str  # of the program
    size: int  # ranks of the next session
    body_changes_at: int | None
    counts: Counter[str]
    last_back: Back | None = None

    def train(self, run_dir: Path, *, stop_after: int | None, is_disturbed: bool) -> None:
        """Train a session up to a stop; one that is disturbed may die before."""
        place = self.ranks.start(
            self.size,
            session,
            run_dir=str(run_dir),
            parallel=self.parallel,
            batch_size=self.batch_size,
            stop_after=stop_after,
            body_changes_at=self.body_changes_at,
        )
        if is_disturbed:
            self.disturb(place)
        outcomes = self.ranks.outcomes(place)
        was_killed = any(outcome.status == -signal.SIGKILL for outcome in outcomes)
        for rank, outcome in enumerate(outcomes):
            # ranks that have lost another one end with an error
            if outcome.status != 0 and not was_killed:
                text = outcome.text[-800:]
                raise RuntimeError(f"rank {rank} ended with {outcome.status}: {text}")

    def disturb(self, place: Path) -> None:
        """Ask for a change while a session trains, and kill its ranks: all at once, or one first."""
        time.sleep(self.draw.uniform(0.0, KILL_WITHIN_S))
        if self.draw.random() < 0.4:
            self.ask()
            time.sleep(self.draw.uniform(0.0, 0.3))
        order = self.draw.sample(range(self.size), self.size)
        is_one_first = self.draw.random() < 0.5 and self.size > 1
        for rank in order:
            if not (place / f"status-{rank}").exists():
                with suppress(ProcessLookupError):
                    os.kill(int((place / f"pid-{rank}").read_text()), signal.SIGKILL)
                    self.counts["SIGKILLs"] += 1
            if is_one_first and rank == order[0]:  # the others go on until a launcher ends them
                self.counts["kills of one of several ranks"] += 1
                time.sleep(self.draw.uniform(0.0, 1.0))

    def ask(self) -> None:
        """Ask the process that trains for a change, and do not wait."""
        if not is_running(self.run_dir):
            return
        step, _ = newest_state(self.run_dir)
        name, value = drawn_change(self.draw, step=step + 4)
        try:
            asked = request(self.run_dir, [Wish(name, value, "while it trains")])
            self.counts["requests while it trains"] += asked
        except (sf.ConfigError, sf.CheckpointError) as problem:
            self.counts[f"refused: {problem.code}"] += 1

    def change(self) -> None:
        """Change one or two settings of the run that nobody trains."""
        for _ in range(self.draw.randint(1, 2)):
            step = saved_step(self.run_dir)
            name, value = drawn_change(self.draw, step=step)
            try:
                sf.load(self.run_dir).change("a history", **{name: value})
            except sf.ConfigError as problem:
                self.counts[f"refused: {problem.code}"] += 1

    def go_back(self) -> None:
        """Take the run that nobody trains back to an earlier step, or to the present one. The
        process that does so may be killed.
        """
        step = self.draw.randint(0, saved_step(self.run_dir))
        settings = {}
        for _ in range(self.draw.randrange(3)):
            name, value = drawn_change(self.draw, step=step)
            settings[name] = value
        back = Back(step, f"back {len(read_changes(self.run_dir)) + 1}", settings)
        if self.draw.random() < 0.5:
            self.kill_going_back(back)
            if self.draw.random() < 0.3:
                return  # nobody repeats the command
        try:
            sf.load(self.run_dir).go_back(back.step, back.because, **back.settings)
        except sf.ConfigError as problem:
            self.counts[f"refused: {problem.code}"] += 1
            return
        self.counts["goings back"] += 1
        self.last_back = replace(back, lines=len(read_changes(self.run_dir)))
        if self.draw.random() < 0.3:
            self.repeat_going_back()

    def kill_going_back(self, back: Back) -> None:
        """Begin to go back in another process, and kill it."""
        child = os.fork()
        if child == 0:
            with suppress(sf.ConfigError):
                sf.load(self.run_dir).go_back(back.step, back.because, **back.settings)
            os._exit(0)
        time.sleep(self.draw.uniform(0.0, BACK_KILLED_WITHIN_S))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        was_killed = os.WIFSIGNALED(status)
        self.counts["SIGKILLs"] += was_killed
        self.counts["kills on the way back"] += was_killed

    def repeat_going_back(self) -> None:
        """Repeat the last command that went back: it does nothing, unless the run has changed."""
        back = self.last_back
        if back is None or len(read_changes(self.run_dir)) != back.lines:
            return
        sf.load(self.run_dir).go_back(back.step, back.because, **back.settings)
        self.counts["goings back repeated"] += 1
        if len(read_changes(self.run_dir)) != back.lines:
            raise RuntimeError(f"a repeated command has gone back once more: {back}")

    def train_with_deaths(self, *, stop_after: int | None) -> None:
        for _ in range(self.draw.randrange(3)):
            self.train(self.run_dir, stop_after=stop_after, is_disturbed=True)
        self.train(self.run_dir, stop_after=stop_after, is_disturbed=False)


def bits(run_dir: Path) -> dict[str, str]:
    """Return the hash of each tensor of the newest checkpoint, whatever ranks have saved it."""
    (checkpoint, _) = Store(run_dir / "checkpoints").newest_intact() or (None, [])
    assert checkpoint is not None
    hashes = {"step": str(checkpoint.step)}
    for file in checkpoint.files:
        for name, tensor in checkpoint.tensors(file).items():
            values = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            hashes[f"{file}/{name}"] = sha256(values.tobytes()).hexdigest()
    return hashes


def skipped_by_no_range(run_dir: Path) -> list[str]:
    """Return what is wrong with the steps that a run skips: each is in a range that was wished."""
    recorded = read_recorded_settings(run_dir)
    wrong = []
    for step in range(planned_steps(run_dir)):
        text = recorded.at(step).get(SKIP_STEPS)
        if text is not None and step not in steps_in(text):
            wrong.append(f"step {step} is skipped by {text}")
    return wrong


def one_history(number: int, directory: Path, ranks: Ranks) -> tuple[list[str], Counter[str]]:
    """Make a history; return what is wrong with it, and counts of what happened."""
    draw = random.Random(number)
    run_dir = directory / "changed"
    size = draw.choice([1, 1, 2, 2, 3])
    history = History(
        run_dir,
        ranks,
        draw,
        parallel=draw.choice(["ddp", "fsdp"]),
        batch_size=RAMP if draw.random() < 0.25 else 8,
        size=size,
        body_changes_at=draw.randrange(2, 20) if draw.random() < 0.25 else None,
        counts=Counter(),
    )
    counts = history.counts
    counts[f"{size} ranks, {history.parallel}" if size > 1 else "1 rank"] += 1
    counts["with a loop of their own"] += history.body_changes_at is not None
    counts["with a ramp"] += history.batch_size == RAMP
    sizes = {size}
    for _ in range(draw.randint(1, 3)):
        step = saved_step(run_dir) if run_dir.exists() else 0
        last_step = planned_steps(run_dir)
        if step >= last_step:
            break
        history.train_with_deaths(stop_after=draw.randint(step + 1, last_step))
        if draw.random() < 0.3:
            history.repeat_going_back()
        if draw.random() < 0.4:
            history.go_back()
        else:
            history.change()
        if draw.random() < 0.3:
            history.size = draw.choice([1, 2, 3])
            sizes.add(history.size)
    history.train_with_deaths(stop_after=None)
    if draw.random() < 0.2:
        history.go_back()  # from the end
    while saved_step(run_dir) < planned_steps(run_dir):  # a request that came at its end
        history.train(run_dir, stop_after=None, is_disturbed=False)
    counts["with several numbers of ranks"] += len(sizes) > 1

    journal = read_changes(run_dir)
    counts["changes"] += len(journal)
    counts["ranges of skipped steps"] += len(sf.load(run_dir).records("skipped_range"))
    wrong = skipped_by_no_range(run_dir)
    if sizes == {1}:
        (problems,) = ranks(
            1,
            verified,
            run_dir=str(run_dir),
            parallel=history.parallel,
            batch_size=history.batch_size,
        )
        wrong += problems
        counts["verified"] += 1
    of_changed = bits(run_dir)
    given = directory / "given"
    given.mkdir()
    append_changes(given, in_force(journal))
    history.size = draw.choice([1, 2, 3])
    history.body_changes_at = None  # the journal has what it changes
    history.batch_size = 8
    history.train(given, stop_after=None, is_disturbed=False)
    expected = bits(given)
    differ = [name for name in expected | of_changed if expected.get(name) != of_changed.get(name)]
    if differ:
        wrong.append(f"other bits: {', '.join(differ)}")
    return wrong, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tries", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="number of the first history")
    parser.add_argument("--within-s", type=float, help="begin no history after so many seconds")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    total: Counter[str] = Counter()
    bad = []
    tries = 0
    with tempfile.TemporaryDirectory() as scratch, Ranks(Path(scratch)) as ranks:
        for number in range(arguments.first, arguments.first + arguments.tries):
            if arguments.within_s is not None and time.monotonic() - begun > arguments.within_s:
                break
            tries += 1
            directory = Path(scratch) / f"history-{number}"
            directory.mkdir()
            counts: Counter[str] = Counter()
            try:
                wrong, counts = one_history(number, directory, ranks)
            except Exception as problem:
                wrong = [f"{type(problem).__name__}: {problem}"]
            shutil.rmtree(directory)
            total += counts
            if wrong:
                bad.append(number)
                print(f"history {number}: {'; '.join(wrong)}", flush=True)
    line = (
        f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}: {tries} histories from"
        f" {arguments.first} on, {total.pop('changes', 0)} changes, {total.pop('SIGKILLs', 0)} SIGKILLs,"
        f" {len(bad)} with other bits or errors, {time.monotonic() - begun:.0f} s"
    )
    for what, count in sorted(total.items()):
        line += f"; {what}: {count}"
    print(line)
    if arguments.write:
        with RESULTS.open("a") as file:
            file.write(line + "\n")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
