"""The sentences that users read on the console, on a run's page and in the help, a file each.

    make sentences

writes them anew, and those of the errors into docs/reference/errors.md. A change of a sentence
changes one file, which the review reads. A number stands as 0 and a path as PATH, so only words
count.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import surefoot as sf
from pages import Elements
from surefoot.cli.main import OVERVIEW, VERBS
from surefoot.cli.main import main as command
from surefoot.recipes import NAMES
from surefoot.report.write import page_of
from written_runs import rich_run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_NUMBER = re.compile(r"\d[\d,.:]*(?:e[+-]?\d+)?")


def network() -> nn.Module:
    return nn.Linear(4, 3)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def tiny_run(run_dir: Path) -> sf.Run:
    """A run of a few steps with a split, a schedule, a checkpoint and a page."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(48, 4, generator=generator)
    labels = torch.randint(3, (48,), generator=generator)
    return sf.Run(
        model=network,
        loss=loss,
        train_data=(inputs[:32], labels[:32]),
        splits={"val": sf.Split((inputs[32:], labels[32:]), metrics=sf.metrics.accuracy)},
        batch_size=8,
        length="3 epochs",
        optimizer=sf.optim.adamw(lr=0.01),
        schedule=sf.schedules.cosine(warmup="1 steps"),
        evaluate_every="1 epochs",
        log_every="2 steps",
        run_dir=run_dir,
        device="cpu",
        precision="fp32",
    )


def shown_on(page: str) -> str:
    """The texts of a page, each once, without the numbers of its charts."""
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    texts = [text.strip() for text in Elements(body).text]
    return "\n".join(text for text in texts if re.search(r"[A-Za-z]{3}", text))


def words(text: str, directory: Path) -> str:
    """The text without what differs between machines and runs."""
    text = text.replace(str(directory), "PATH")
    lines = [_NUMBER.sub("0", line).rstrip() for line in text.splitlines()]
    return "\n".join(lines).strip() + "\n"


def once(text: str) -> str:
    """The lines of a text, each where it stands first."""
    return "\n".join(dict.fromkeys(text.splitlines())) + "\n"


def typed(*arguments: str) -> str:
    """What a command prints."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        contextlib.suppress(SystemExit),
    ):
        command(list(arguments))
    return printed.getvalue()


def texts_of_runs() -> dict[str, str]:
    """What a run prints, a page with all its sections, and what `diagnose` says of that run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the header names their number
    try:
        return _texts_of_runs()
    finally:
        torch.set_num_threads(threads)


def _texts_of_runs() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        run_dir = directory / "run"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            tiny_run(run_dir).train()
            tiny_run(run_dir).train()  # is finished
        written = rich_run(directory / "written")
        diagnosed = typed("diagnose", "--all", str(written))
        return {
            "console": words(printed.getvalue(), directory),
            "page": once(words(shown_on(page_of([written])), directory)),
            "diagnose": words(diagnosed, directory),
        }


def help_pages() -> dict[str, str]:
    """The overview, and the help of each subcommand and recipe."""
    pages = {"help": words(OVERVIEW, ROOT)}
    for verb in VERBS:
        pages[f"help-{verb}"] = words(typed(verb, "--help"), ROOT)
    for name in NAMES:
        pages[f"help-train-{name}"] = words(typed("train", name, "--help"), ROOT)
    return pages


def path_of(name: str) -> Path:
    return HERE / f"{name}.txt"


def main() -> None:
    for path in HERE.glob("*.txt"):
        path.unlink()
    for name, text in (texts_of_runs() | help_pages()).items():
        path_of(name).write_text(text)


if __name__ == "__main__":
    main()
