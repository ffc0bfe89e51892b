"""The sentences that users read, a file each: what a run prints, its page, the help of each
subcommand, all options, and for each package what else its source says.

    make sentences

writes them anew, and those of the errors into docs/reference/errors.md. A sentence stands in one
file, which the review reads. On the console, on a page and in the help a number stands as 0 and a
path as PATH, so only words count. In the text of a package an inserted value stands as {name}.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

import surefoot as sf
from pages import Elements
from surefoot.cli.help import Flag, flags_of
from surefoot.cli.main import OVERVIEW, VERBS
from surefoot.cli.main import main as command
from surefoot.cli.word_order import option_kinds
from surefoot.config.paths import write_whole
from surefoot.config.setting import texts_of
from surefoot.recipes import NAMES
from surefoot.tools.report.write import page_of
from written_runs import rich_run

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
import write_errors

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

_WORDS = 3  # of a text of the source that is a sentence
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


def output_of(*arguments: str) -> str:
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
    """What a run prints, and a page with all its sections."""
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
        return {
            "console": words(printed.getvalue(), directory),
            "page": once(words(shown_on(page_of([written])), directory)),
        }


def help_pages() -> dict[str, str]:
    """The overview, what stands above the options of each subcommand, and all options."""
    pages = {"help": words(OVERVIEW, ROOT), "options": texts_of_options()}
    for verb in VERBS:
        above, _, _ = output_of(verb, "--help").partition("\narguments:\n")
        pages[f"help-{verb}"] = words(above, ROOT)
    return pages


def texts_of_options() -> str:
    """The text of each option and setting, where it stands first. docs/reference/settings.md has
    those of `Run`.
    """
    known = set(texts_of(sf.Run).values())
    lines = []
    for title, flags in options_of_commands():
        fresh = {flag.typed: flag.text for flag in flags if flag.text not in known}
        known.update(fresh.values())
        if fresh:
            lines.append(f"{title}:")
            lines += [f"  {name}  {text}" for name, text in fresh.items()]
    return "\n".join(lines) + "\n"


def options_of_commands() -> Iterator[tuple[str, list[Flag]]]:
    """A title and the flags of each subcommand and recipe."""
    for verb in VERBS:
        flags: list[Flag] = []
        for kind in option_kinds(verb):
            flags += flags_of(kind, switches=True)
        yield verb, flags
    for name in NAMES:
        config = importlib.import_module(f"surefoot.recipes.{name}.config").Config
        yield f"train {name}", [*flags_of(config)]
        predict = importlib.import_module(f"surefoot.recipes.{name}.predict").Predict
        yield f"predict, a run of {name}", [*flags_of(predict)]


def texts_of_packages(shown: str) -> dict[str, str]:
    """The sentences of the source that stand in no text of `shown` and not in the page of errors,
    by package and file.
    """
    others = only_words(shown + write_errors.table())
    texts: dict[str, str] = {}
    for path in sorted(write_errors.SOURCE.rglob("*.py")):
        name = path.relative_to(write_errors.SOURCE)
        lines = []
        for sentence in dict.fromkeys(sentences_of(path.read_text())):
            if not all(part in others for part in literal_parts(sentence)):
                lines.append(f"  {sentence}\n")
        if lines:
            package = package_of(name)
            text = f"{name.as_posix()}:\n" + "".join(lines)
            texts[package] = texts.get(package, "") + text
    return texts


def package_of(name: PurePath) -> str:
    """The package of a file; each tool counts as one."""
    parts = name.parts[1:] if name.parts[0] == "tools" else name.parts
    return parts[0] if len(parts) > 1 else "surefoot"


def sentences_of(source: str) -> Iterator[str]:
    """The texts of a file that are sentences, without docstrings and the texts of options."""
    module = ast.parse(source)
    skipped: set[ast.AST] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        if isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
    for node in ast.walk(module):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node not in skipped:
            parts = write_errors.written(node).split()
            with_letters = [part for part in parts if re.search(r"[A-Za-z]{2}", part)]
            if len(with_letters) >= _WORDS:
                yield " ".join(parts)


def literal_parts(sentence: str) -> list[str]:
    """What stands between the inserted values."""
    parts = [only_words(part) for part in re.split(r"\{[^ {}]+\}", sentence)]
    return [part for part in parts if part]


def only_words(text: str) -> str:
    return " ".join(re.findall(r"[A-Za-z]+", text))


def path_of(name: str) -> Path:
    return HERE / f"{name}.txt"


def all_texts() -> dict[str, str]:
    shown = texts_of_runs() | help_pages()
    return shown | texts_of_packages("\n".join(shown.values()))


def write(texts: dict[str, str], folder: Path) -> None:
    """Write a file for each text, atomically, and remove the files of other texts."""
    for name, text in texts.items():
        write_whole(folder / f"{name}.txt", text.encode())
    for path in folder.glob("*.txt"):
        if path.stem not in texts:
            path.unlink()


def main() -> None:
    write(all_texts(), HERE)


if __name__ == "__main__":
    main()
