"""The campaign of ranks: one run on 1, 2, 3, 4 and 8 processes must end with one SHA-256; then
kills and other numbers between.

    python benchmarks/ranks_campaign.py [--short] [--write]

Every cell is an optimizer, a strategy, a precision and a number of micro-batches in a step. The run
of a cell has dropout, data that draw, batch statistics, clipping, an average of weights, a sample
that is not finite, weights of widths 127 and 130, a last step of an epoch with fewer samples, tied
weights, a parameter that no pass uses and one that some passes use. The hash covers the last
checkpoint (weights, buffers, averages, optimizer state) and the loss and norm of every step.
Processes meet over gloo on this machine, with one thread each. A strategy is compared with itself
on one process: FSDP updates shards of other sizes than DDP.

A chain is a run that starts on 1 process and goes on with 4, 2, 3 and 1. In each of these sessions
all processes get SIGKILL at a random moment, and sometimes already while they start. A last session
on 1 process ends the run. The hash must be that of the run that nobody killed. Moments are drawn
from the number of the chain. With --write the result is appended to
benchmarks/results/ranks-campaign.txt. Leaves with 1 if a hash differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import torch
from torch import Tensor, nn

import surefoot as sf
from rank_processes import Ranks
from surefoot.checkpoint import Store
from waiting import wait_until

RESULTS = Path(__file__).parent / "results" / "ranks-campaign.txt"
RANKS: tuple[int, ...] = (1, 2, 3, 4, 8)
STEPS = 7  # the second and the sixth are skipped, and the fourth has fewer samples
SAMPLES, BAD, FEATURES, WIDTH, CLASSES = 80, 30, 20, 127, 130
MICRO_BATCHES = {
    8: (24, 3),
    12: (24, 2),
    11: (22, 2),
}  # of a step: its samples, and those of a micro-batch
OPTIMIZERS = {
    "adamw": lambda: sf.optim.adamw(1e-3, weight_decay=0.1),
    "muon": lambda: sf.optim.muon(1e-2),
    "sgd": lambda: sf.optim.sgd(0.05, momentum=0.9),
    "schedule-free": lambda: sf.optim.schedule_free(1e-3),  # an average of its own
}
STRATEGIES = {
    "ddp": lambda: sf.ddp(find_unused_parameters=True),
    "fsdp": lambda: sf.fsdp(find_unused_parameters=True),
}
PRECISIONS = ("fp32", "bf16")
CHAIN: tuple[int, ...] = (1, 4, 2, 3, 1)
CHAIN_STEPS = 25
SHORT_CHAIN = (1, 3, 2)
Case = dict[str, Any]


class Moved:
    """Samples that are moved by all three generators. One is not finite."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.tokens = torch.randint(CLASSES, (SAMPLES, 3), generator=generator)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        self.inputs[BAD, 0] = torch.nan

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> tuple[Tensor, Tensor, Tensor]:
        noise = random.random() + float(np.random.rand()) + torch.rand(FEATURES)
        return self.inputs[sample] + 0.1 * noise, self.tokens[sample], self.labels[sample]


class Block(nn.Module):
    """A residual block. FSDP gathers the weights of each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.into, self.out = nn.Linear(WIDTH, CLASSES), nn.Linear(CLASSES, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        changed: Tensor = self.out(torch.relu(self.into(self.norm(hidden))))
        dropped: Tensor = self.drop(changed)
        return hidden + dropped


class Net(nn.Module):
    """The table of tokens is the last layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.into = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.never = nn.Linear(WIDTH, 3)
        self.seldom = nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.table.weight

    def forward(self, inputs: Tensor, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.table(tokens).mean(dim=1) + self.into(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        if bool((tokens[:, 0] < 20).any()):  # in about a third of all micro-batches
            hidden = hidden + self.seldom
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def loss(model: Any, batch: Any) -> Tensor:
    inputs, tokens, labels = batch
    return nn.functional.cross_entropy(model(inputs, tokens), labels)


def trained(
    *,
    optimizer: str,
    strategy: str,
    precision: str,
    micro_batches: int,
    run_dir: str,
    steps: int = STEPS,
    progress: str | None = None,
) -> str:
    """Train a cell's run, or resume it, on each of some ranks; return its hash, or "" on all ranks
    but the first.
    """
    torch.set_num_threads(1)
    batch_size, micro_batch_size = MICRO_BATCHES[micro_batches]
    run = sf.Run(
        model=Net,
        loss=loss,
        train_data=Moved(),
        order="sequential",
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        length=f"{steps} steps",
        optimizer=OPTIMIZERS[optimizer](),
        parallel=STRATEGIES[strategy](),
        precision=precision,  # type: ignore[arg-type]
        clip="norm 0.5",
        ema=None if optimizer == "schedule-free" else 0.9,
        seed=3,
        device="cpu",
        run_dir=run_dir,
        log_every="1 steps",
        save_every="2 steps" if progress else "100 steps",
        console=False,
        report=False,
    )
    is_main = os.environ.get("RANK", "0") == "0"
    with run:
        for step in run:
            if progress is not None and is_main:
                Path(progress).write_text(str(step.index + 1))
    return hash_of(Path(run_dir)) if is_main else ""


def all_trained(runs: list[Case], out: str) -> None:
    """Train the runs of some cells, one after the other, and append the hash of each to a file."""
    for case in runs:
        hashed = trained(**case)
        if hashed:
            with Path(out).open("a") as file:
                file.write(hashed + "\n")


def hash_of(run_dir: Path) -> str:
    """The SHA-256 of all tensors of the last checkpoint, of its groups of parameters, and of every
    step's loss and norm.
    """
    (checkpoint, damage) = Store(run_dir / "checkpoints").newest_intact() or (None, [])
    assert checkpoint is not None
    assert not damage
    digest = sha256()
    for file in sorted(checkpoint.files):
        tensors = checkpoint.tensors(file)
        for name in sorted(tensors):
            if file != "state" or name.startswith(
                ("optimizer/", "groups/", "bad_in_a_row/", "clipping/")
            ):
                tensor = tensors[name].contiguous()
                digest.update(f"{file} {name} {tensor.dtype} {[*tensor.shape]}".encode())
                digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    digest.update(
        json.dumps(
            [checkpoint.saved.optimizer, checkpoint.saved.param_groups], sort_keys=True
        ).encode()
    )
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = {
        row["step"]: [row[name] for name in ("step", "loss", "grad_norm")]
        for row in records
        if row["kind"] == "train"
    }
    assert [*sorted(rows)] == [
        *range(1, checkpoint.step + 1)
    ]  # a step that was made again has the later record
    digest.update(json.dumps(sorted(rows.items())).encode())
    return digest.hexdigest()


def name_of(case: Mapping[str, Any]) -> str:
    return "{optimizer:<13}  {strategy:<4}  {precision}  {micro_batches:>2}".format(**case)


def hashes_of(ranks: Ranks, size: int, cases: Sequence[Case], out: Path) -> list[str]:
    """The hash of each case, or its error. Processes train one case after the other; an error costs
    a start of new ones.
    """
    hashes: list[str] = []
    while len(hashes) < len(cases):
        out.write_text("")
        outcomes = ranks.outcomes(
            ranks.start(size, all_trained, runs=cases[len(hashes) :], out=str(out))
        )
        hashes += out.read_text().splitlines()
        if any(outcome.status for outcome in outcomes):
            texts = [outcome.text for outcome in outcomes if outcome.status]
            errors = [
                line
                for text in texts
                for line in text.splitlines()
                if re.match(r"[\w.]*(Error|error)\b", line)
            ]
            ends = [text.strip().splitlines()[-1] for text in texts if text.strip()]
            hashes.append(
                min(
                    [*errors, *ends],
                    key=lambda line: "RankLost" in line,
                    default="no rank printed an error",
                )
            )
    return hashes


def with_directories(cells: Sequence[Case], directory: Path) -> list[Case]:
    return [cell | {"run_dir": str(directory / str(number))} for number, cell in enumerate(cells)]


def table(cells: Sequence[Case], hashes: Mapping[int, Sequence[str]]) -> tuple[list[str], int]:
    """A line for each cell, and the number of cells in which a hash differs from that of the first
    number of ranks.
    """
    alone, *several = hashes
    lines = [
        "optimizer      strategy, precision, micro-batches  SHA-256 on 1  "
        + "  ".join(f"{f'on {size}':>7}" for size in several)
    ]
    different = 0
    for number, cell in enumerate(cells):
        of_size = {size: hashes[size][number] for size in hashes}
        first = of_size[alone]
        is_good = len(first) == 64 and set(of_size.values()) == {first}
        different += not is_good
        words = ["same" if of_size[size] == first else "DIFFERS" for size in several]
        lines.append(
            f"{name_of(cell):<47}  {first[:12]}  " + "  ".join(f"{word:>7}" for word in words)
        )
        lines += [
            f"    on {size}: {text[:200]}" for size, text in of_size.items() if len(text) != 64
        ]
    return lines, different


def chain(
    ranks: Ranks, number: int, cell: Case, sizes: Sequence[int], steps: int, directory: Path
) -> tuple[str, str]:
    """Train a run whose sessions are killed; its hash, and the moments of the kills."""
    draw = random.Random(number)
    moments = []
    run_dir = directory / f"chain-{number}"
    progress = directory / f"progress-{number}"
    case = cell | {"run_dir": str(run_dir), "steps": steps, "progress": str(progress)}
    for stage, size in enumerate(sizes):
        after_s = round(draw.uniform(0.0, 1.5), 3)
        if draw.random() < 0.25:  # while the processes start
            place = ranks.start(size, trained, **case)
            time.sleep(after_s)
            killed = kill(ranks, place, size)
            moments += [f"{size}: {after_s} s after the start"] * killed
        share = steps // len(sizes)
        after_step = stage * share + draw.randint(1, share - 1)
        after_s = round(draw.uniform(0.0, 0.08), 3)
        progress.unlink(missing_ok=True)
        place = ranks.start(size, trained, **case)
        wait_until(lambda: _number(progress) >= after_step or (place / "status-0").exists())  # noqa: B023
        time.sleep(after_s)
        moments += [f"{size}: {after_s} s after step {after_step}"] * kill(ranks, place, size)
    (ended,) = ranks.outcomes(ranks.start(1, trained, **case))
    return (ended.result if ended.status == 0 else ended.text.strip()[-300:]), "; ".join(moments)


def kill(ranks: Ranks, place: Path, size: int) -> bool:
    """Send SIGKILL to all processes of a group, and wait for them. True if each of them died of
    it.
    """
    for rank in range(size):
        if not (place / f"status-{rank}").exists():
            with suppress(ProcessLookupError):
                os.kill(int((place / f"pid-{rank}").read_text()), signal.SIGKILL)
    return all(outcome.status == -signal.SIGKILL for outcome in ranks.outcomes(place))


def _number(file: Path) -> int:
    return int(file.read_text() or 0) if file.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--short",
        action="store_true",
        help="four cells on 1, 2 and 3 ranks, and a short chain: half a minute",
    )
    parser.add_argument(
        "--write", action="store_true", help="append the result to benchmarks/results"
    )
    arguments = parser.parse_args()
    load = f"load {os.getloadavg()[0]:.1f}"
    begin_s = time.monotonic()
    cells = [
        {
            "optimizer": optimizer,
            "strategy": strategy,
            "precision": precision,
            "micro_batches": number,
        }
        for optimizer in OPTIMIZERS
        for strategy in STRATEGIES
        for precision in PRECISIONS
        for number in MICRO_BATCHES
    ]
    chained = [cell for cell in cells if (cell["precision"], cell["micro_batches"]) == ("fp32", 12)]
    sizes = RANKS
    chain_sizes = CHAIN
    chain_steps = CHAIN_STEPS
    if arguments.short:
        kinds = [("adamw", "fp32"), ("muon", "bf16")]
        cells = [
            cell
            for cell in cells
            if (cell["optimizer"], cell["precision"]) in kinds and cell["micro_batches"] == 11
        ]
        chained = [cell for cell in chained if cell["optimizer"] == "adamw"]
        sizes = (1, 2, 3)
        chain_sizes = SHORT_CHAIN
        chain_steps = 9
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as scratch:
        directory = Path(scratch)
        with Ranks(directory) as ranks:
            hashes = {
                size: hashes_of(
                    ranks,
                    size,
                    with_directories(cells, directory / f"cells-{size}"),
                    directory / "hashes",
                )
                for size in sizes
            }
            lines, different = table(cells, hashes)
            references = [cell | {"steps": chain_steps} for cell in chained]
            expected = hashes_of(
                ranks,
                1,
                with_directories(references, directory / "references"),
                directory / "hashes",
            )
            lines += [
                "",
                f"chains: {' -> '.join(map(str, chain_sizes))} of {chain_steps} steps, each session killed unless it ended before, then 1",
            ]
            broken = 0
            for number, cell in enumerate(chained):
                hashed, moments = chain(ranks, number, cell, chain_sizes, chain_steps, directory)
                is_same = hashed == expected[number]
                broken += not is_same
                lines.append(
                    f"{name_of(cell)}  {expected[number][:12]}  {'same' if is_same else f'DIFFERS: {hashed}'}"
                )
                lines.append(f"    killed {moments}")
    lines += [
        "",
        f"{len(cells) - different} of {len(cells)} cells have one hash on {', '.join(map(str, sizes))} ranks;"
        f" {len(chained) - broken} of {len(chained)} chains end with the hash of the run that nobody killed",
    ]
    head = (
        f"# {time.strftime('%Y-%m-%d')}, python benchmarks/ranks_campaign.py{' --short' * arguments.short}, torch"
        f" {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, 1 thread for each process,"
        f" {os.cpu_count()} cores, {load} at the start; {time.monotonic() - begin_s:.0f} s"
    )
    print("\n".join([head, *lines]))
    if arguments.write:
        with RESULTS.open("a") as file:
            file.write("\n".join([head, *lines]) + "\n\n")
    sys.exit(1 if different or broken else 0)


if __name__ == "__main__":
    main()
