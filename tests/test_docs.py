"""Every command in README.md and docs/ works as it stands there, on a text small enough for a test;
30 seconds.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import surefoot as sf
from in_one import in_one
from surefoot.cli.main import main
from surefoot.config.toml import values
from surefoot.tracking.record import KINDS
from tuned_runs import write_chat, write_model

ROOT = Path(__file__).parents[1]
API = sorted(
    (ROOT / "docs" / "reference" / "api").glob("*.md")
)  # of docstrings; their examples are doctests
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {*API, *DECISIONS})]
TOP_PAGES = sorted({*ROOT.glob("*.md")} - {*PAGES})
# by test_readme.py, checkpoint/test_gpt2.py, data/text/test_prepare_shards.py, test_coming_from.py
RUN_ELSEWHERE = {"README.md", "your-own-model.md", "evaluating-gpt.md", "token-shards.md"}
RUN_ELSEWHERE |= {
    f"from-{library}.md" for library in ("plain-loop", "lightning", "hf-trainer", "accelerate")
}
SMALL = [
    "--model.layers=1",
    "--model.width=16",
    "--model.heads=2",
    "--model.context=16",
    "--length=6 steps",
]
SMALL += ["--cloze-questions=8", "--sample-tokens=8", "--batch-size=8", "--micro-batch-size=4"]
OF_TRANSLATION = [
    "--model.encoder-layers=1",
    "--model.decoder-layers=1",
    "--model.width=16",
    "--model.mlp-width=16",
]
OF_TRANSLATION += [
    "--length=6 steps",
    "--data.phrase-count=300",
    "--data.vocab-size=280",
    "--save-every=2 steps",
]
OF_IMAGES = ["--length=2 steps", "--batch-size=8", "--micro-batch-size=4", "--precision=fp32"]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "birds", "sang", "in", "old", "trees"]


def blocks(page: Path) -> list[tuple[str, str]]:
    return re.findall(r"```(\w*)\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    shown = [text for language, text in blocks(page) if language == "console"]
    return [
        shlex.split(line[2:])
        for text in shown
        for line in text.splitlines()
        if line.startswith("$ ")
    ]


def test_every_block_is_of_a_kind_that_some_test_runs() -> None:
    for page in PAGES:
        for language, text in blocks(page):
            assert language in ("console", "toml", "text", "python"), page
            assert language != "console" or all(
                line.startswith("$ ") for line in text.splitlines()
            ), page


LONG = (
    "comparing.md",
    "finding-a-rate.md",
    "images.md",
    "replay.md",
    "schedules.md",
    "translation.md",
)  # many runs; their verbs have tests


@pytest.mark.fast("first-run.md", "verify.md")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.name in LONG else [], id=page.name)
        for page in PAGES
        if commands(page)
    ],
)
def test_every_command_works_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    generator = np.random.default_rng(0)
    Path("text.txt").write_text(
        " ".join(WORDS[place] for place in generator.integers(len(WORDS), size=4000))
    )
    Path("prompts.txt").write_text("the cat\nbirds\n")
    Path("text.jsonl").write_text('{"text": "the cat sat on a mat"}\n' * 99)
    Path("hellaswag_val.jsonl").write_text(
        '{"ctx": "the cat", "endings": ["sat", "sang", "on", "a"], "label": 0}\n'
    )
    Path("english.txt").write_text("the cat\n\nbirds\n")
    Path("pairs.tsv").write_text("".join(f"cat {place}\tKatze {place}\n" for place in range(400)))
    if page.name == "images.md":
        write_images()
    if page.name == "fine-tuning.md":
        pytest.importorskip("transformers", reason="transformers is not installed")
        write_model(Path("models/base"))
        write_chat(Path("chat.jsonl"))
    for language, text in blocks(page):
        if language == "toml":
            Path("mine.toml").write_text(text)
    for command in commands(page):
        assert command[0] == "surefoot", command
        on_paper = "--world-size" in command
        trains = command[1:3] in (["train", "gpt"], ["plan", "gpt"]) and not on_paper
        trained_here = trains and not {"--data.tokenizer", "--init-from", "shards"} & set(command)
        changes = {
            "gpt": SMALL,
            "translation": OF_TRANSLATION,
            "images": OF_IMAGES,
            "finetune": ["--length=2 steps"],
        }
        small = (
            changes.get(command[2], [])
            if command[1] in ("train", "plan", "compare", "find-batch-size")
            else []
        )
        if on_paper:
            small = ["--model.layers=2"]
        if command[1] == "find-lr":  # of so small batches it would suggest nothing, and fail
            small = ["--length=2 steps", "--precision=fp32"]
        main([*command[1:], *small, *(["--data.vocab-size=280"] if trained_here else [])])


def write_images() -> None:
    """Four IDX files in fashion/, folders of two classes in pictures/, and a picture."""
    generator = np.random.default_rng(0)
    Path("fashion").mkdir()
    for part, number in (("train", 200), ("t10k", 40)):
        for kind, shape in (("images-idx3", (number, 28, 28)), ("labels-idx1", (number,))):
            header = bytes([0, 0, 8, len(shape)]) + b"".join(
                size.to_bytes(4, "big") for size in shape
            )
            values = generator.integers(256 if len(shape) == 3 else 10, size=shape, dtype=np.uint8)
            Path("fashion", f"{part}-{kind}-ubyte").write_bytes(header + values.tobytes())
    for place in [
        Path("pictures", part, name) for part in ("train", "test") for name in ("cats", "dogs")
    ]:
        place.mkdir(parents=True)
        for number in range(12):
            Image.fromarray(generator.integers(256, size=(20, 24, 3), dtype=np.uint8)).save(
                place / f"{number}.png"
            )
    Image.fromarray(generator.integers(256, size=(30, 30), dtype=np.uint8)).save("picture.png")


class MyNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


class MyTransformer(nn.Linear):
    """A model as transformers writes them: called with the entries of a batch, it returns a loss
    and logits.
    """

    def __init__(self) -> None:
        super().__init__(16, 4)

    def forward(self, inputs: Tensor, labels: Tensor) -> SimpleNamespace:  # type: ignore[override]
        logits = super().forward(inputs)
        return SimpleNamespace(loss=F.cross_entropy(logits, labels), logits=logits)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def noisy(samples: int, seed: int) -> TensorDataset:
    """Four kinds of noisy images."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (samples,), generator=generator)
    return TensorDataset(
        F.one_hot(labels, 16).float() + torch.randn(samples, 16, generator=generator), labels
    )


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # by torch.compile
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in RUN_ELSEWHERE and "python" in dict(blocks(page))],
    ids=lambda page: str(page.name),
)
def test_the_python_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = {
        f"{name}_set": noisy(160, seed)
        for seed, name in enumerate(("train", "val", "test", "other"))
    }
    rows = [{"inputs": inputs, "labels": label} for inputs, label in sets["train_set"]]
    names: dict[str, Any] = {
        "MyNet": MyNet,
        "MyTransformer": MyTransformer,
        "loss": loss,
        "sf": sf,
        "rows": rows,
        **sets,
    }
    for language, text in blocks(page):
        if language == "python":
            exec(text, names)


@in_one
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_settings_files_can_be_read(page: Path) -> None:
    for language, text in blocks(page):
        if language == "toml":
            assert values(text)


def anchors(page: Path) -> set[str]:
    """What the part of a link behind # may be: headings in lower case, without punctuation, with
    hyphens.
    """
    headings = re.findall(
        r"^#+ (.*)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@in_one
@pytest.mark.parametrize(
    "page", [*PAGES, *TOP_PAGES, *API], ids=lambda page: f"{page.parent.name}/{page.name}"
)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", page.read_text())
    targets = [(page.parent / path if path else page, anchor) for path, anchor in links]
    assert [path for path, _ in targets if not path.exists()] == []
    assert [
        (path, anchor) for path, anchor in targets if anchor and anchor not in anchors(path)
    ] == []


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / target).resolve()
        for target in re.findall(r"\]\(([^)#:]+)\)", index.read_text())
    }
    assert {*PAGES, *TOP_PAGES} - linked == {index, ROOT / "README.md", ROOT / "CONTRIBUTING.md"}


def test_the_reference_has_every_key_of_the_records_and_every_exit_status() -> None:
    records = (ROOT / "docs" / "reference" / "run-directory.md").read_text()
    keys = {*KINDS, *(key for keys in KINDS.values() for key in keys)}
    assert [key for key in sorted(keys) if f"`{key}`" not in records] == []
    statuses = (ROOT / "docs" / "reference" / "errors.md").read_text()
    for error in sf.SurefootError.__subclasses__():
        if error.exit_status > 1 and hasattr(sf, error.__name__):
            assert f"| {error.exit_status} | `sf.{error.__name__}` |" in statuses


ANSWERS = {
    "wandb": "trackers",
    "gradient accumulation": "data",
    "freezing": "fine-tuning",
    "two data sets": "data",
    "custom metric": "validation",
    "weights for inference": "fine-tuning",
    "more epochs": "fine-tuning",
    "own scheduler": "schedules",
    "multi-GPU": "many-processes",
    "mixed precision": "precision",
    "early stopping": "validation",
    "reproducibility": "reproducibility",
}


def test_a_search_for_a_question_finds_a_heading_of_the_page_that_answers_it() -> None:
    for question, page in ANSWERS.items():
        text = re.sub(
            r"```.*?```", "", (ROOT / "docs" / "guides" / f"{page}.md").read_text(), flags=re.DOTALL
        )
        assert re.search(rf"^#+ .*{question}", text, flags=re.MULTILINE | re.IGNORECASE), question


def test_the_page_on_the_architecture_names_files_that_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]*)+(?:\.pyi?)?|[a-z_]+\.py)`", page)
    of_each_recipe = {"config.py", "recipe.py", "look.py"}
    places = [ROOT / "src" / "surefoot", ROOT]
    assert len(named) > 100
    assert {name for name in named if not any((place / name).exists() for place in places)} == (
        of_each_recipe
    )


def test_the_reading_path_says_how_long_its_files_are() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"\| \d+ \| \[`(\S+)`\]\(\.\./src/surefoot/\1\) \| (\d+) \|", page)
    total = re.search(r"These (\d+) files, .* about ([\d,]+) lines", page)
    assert total is not None
    assert len(rows) == int(total[1])
    counts = {
        name: len((ROOT / "src" / "surefoot" / name).read_text().splitlines()) for name, _ in rows
    }
    stated = {name: int(lines) for name, lines in rows}
    assert stated == pytest.approx(counts, rel=0.2)
    assert int(total[2].replace(",", "")) == pytest.approx(sum(counts.values()), rel=0.1)


def test_the_page_on_the_architecture_names_the_files_that_define_a_table() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    entries = re.findall(r"an entry of `([A-Z_]+)` in `(\S+)`", page)
    assert len(entries) >= 4
    for name, file in entries:
        text = (ROOT / "src" / "surefoot" / file).read_text()
        assert re.search(rf"(?m)^{name}\b.* = ", text), f"{name} is not defined in {file}"


QUESTIONS = """wandb, gradient accumulation, freezing, two data sets, custom metric, weights for inference, more epochs,
own scheduler, multi-GPU, mixed precision, early stopping, reproducibility"""


@pytest.mark.parametrize("question", re.split(r",\s", QUESTIONS))
def test_the_index_answers_what_users_search_for(question: str) -> None:
    """One search of the index, a line at a time as grep does it, leads to a page."""
    lines = (ROOT / "docs" / "index.md").read_text().lower().splitlines()
    assert any(question.lower() in line for line in lines)
