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
SOURCE = ROOT / "src" / "surefoot"
API = sorted((ROOT / "docs" / "reference" / "api").glob("*.md"))  # their examples are doctests
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {*API, *DECISIONS})]
TOP_PAGES = sorted({*ROOT.glob("*.md")} - {*PAGES})
# by test_readme.py, checkpoint/test_gpt2.py, data/text/test_prepare_shards.py, test_coming_from.py
RUN_ELSEWHERE = {
    "README.md",
    "your-own-model.md",
    "evaluating-gpt.md",
    "checkpoints.md",
    "token-shards.md",
    "from-plain-loop.md",
    "from-lightning.md",
    "from-hf-trainer.md",
    "from-accelerate.md",
}
SMALL_SETTINGS = {
    "gpt": [
        "--model.layers=1",
        "--model.width=16",
        "--model.heads=2",
        "--model.context=16",
        "--length=6 steps",
        "--cloze-questions=8",
        "--sample-tokens=8",
        "--batch-size=8",
        "--micro-batch-size=4",
    ],
    "translation": [
        "--model.encoder-layers=1",
        "--model.decoder-layers=1",
        "--model.width=16",
        "--model.mlp-width=16",
        "--length=6 steps",
        "--data.phrase-count=300",
        "--data.vocab-size=280",
        "--save-every=2 steps",
    ],
    "images": ["--length=2 steps", "--batch-size=8", "--micro-batch-size=4", "--precision=fp32"],
    "finetune": ["--length=2 steps"],
}
WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "birds", "sang", "in", "old", "trees"]


def blocks(page: Path) -> list[tuple[str, str]]:
    """The language and the text of each block of code on a page."""
    return re.findall(r"```(\w*)\n(.*?)```", page.read_text(), flags=re.DOTALL)


def blocks_of(language: str, page: Path) -> list[str]:
    return [text for block_language, text in blocks(page) if block_language == language]


def without_blocks(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """The words of each command on a page."""
    lines = "\n".join(blocks_of("console", page)).splitlines()
    return [shlex.split(line[2:]) for line in lines if line.startswith("$ ")]


def test_every_block_is_of_a_kind_that_some_test_runs() -> None:
    for page in PAGES:
        languages = {language for language, _ in blocks(page)}
        assert languages <= {"console", "toml", "text", "python"}, page


def test_a_block_of_the_console_has_commands_only() -> None:
    for page in PAGES:
        for text in blocks_of("console", page):
            outputs = [line for line in text.splitlines() if not line.startswith("$ ")]
            assert outputs == [], page


@pytest.mark.fast("first-run.md", "verify.md")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands(page)], ids=lambda page: str(page.name)
)
def test_every_command_works_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    write_texts()
    if page.name == "images.md":
        write_images()
    if page.name == "fine-tuning.md":
        pytest.importorskip("transformers", reason="transformers is not installed")
        write_model(Path("models/base"))
        write_chat(Path("chat.jsonl"))
    for text in blocks_of("toml", page):
        Path("mine.toml").write_text(text)

    for program, *arguments in commands(page):
        assert program == "surefoot"
        main([*arguments, *make_smaller(arguments)])


def make_smaller(arguments: list[str]) -> list[str]:
    """Settings that make what a command trains small enough for a test."""
    verb = arguments[0]
    if "--world-size" in arguments:  # on paper
        return ["--model.layers=2"]
    if verb == "find-lr":  # of so small batches it would suggest nothing, and fail
        return ["--length=2 steps", "--precision=fp32"]
    if verb not in ("train", "plan", "compare", "find-batch-size"):
        return []
    recipe = arguments[1]
    settings = SMALL_SETTINGS.get(recipe, [])
    has_tokenizer = not {"--data.tokenizer", "--init-from", "shards"}.isdisjoint(arguments)
    if verb in ("train", "plan") and recipe == "gpt" and not has_tokenizer:
        settings = [*settings, "--data.vocab-size=280"]
    return settings


def write_texts() -> None:
    """A text, prompts, documents, questions, and sentences with their translations."""
    words = [WORDS[number] for number in np.random.default_rng(0).integers(len(WORDS), size=4000)]
    Path("text.txt").write_text(" ".join(words))
    Path("prompts.txt").write_text("the cat\nbirds\n")
    Path("text.jsonl").write_text('{"text": "the cat sat on a mat"}\n' * 99)
    Path("hellaswag_val.jsonl").write_text(
        '{"ctx": "the cat", "endings": ["sat", "sang", "on", "a"], "label": 0}\n'
    )
    Path("english.txt").write_text("the cat\n\nbirds\n")
    pairs = [f"cat {number}\tKatze {number}\n" for number in range(400)]
    Path("pairs.tsv").write_text("".join(pairs))


def write_images() -> None:
    """Four IDX files in fashion/, folders of two classes in pictures/, and a picture."""
    generator = np.random.default_rng(0)

    def draw_image(*shape: int) -> Image.Image:
        return Image.fromarray(generator.integers(256, size=shape, dtype=np.uint8))

    Path("fashion").mkdir()
    for part, count in (("train", 200), ("t10k", 40)):
        images = generator.integers(256, size=(count, 28, 28), dtype=np.uint8)
        write_idx(Path("fashion", f"{part}-images-idx3-ubyte"), images)
        labels = generator.integers(10, size=count, dtype=np.uint8)
        write_idx(Path("fashion", f"{part}-labels-idx1-ubyte"), labels)
    for part in ("train", "test"):
        for name in ("cats", "dogs"):
            folder = Path("pictures", part, name)
            folder.mkdir(parents=True)
            for number in range(12):
                draw_image(20, 24, 3).save(folder / f"{number}.png")
    draw_image(30, 30).save("picture.png")


def write_idx(file: Path, values: np.ndarray) -> None:
    """Bytes in the format of MNIST's files."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    header = bytes([0, 0, 8, values.ndim]) + sizes
    file.write_bytes(header + values.tobytes())


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
    noise = torch.randn(samples, 16, generator=generator)
    return TensorDataset(F.one_hot(labels, 16).float() + noise, labels)


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
    train_set = noisy(160, seed=0)
    names: dict[str, Any] = {
        "MyNet": MyNet,
        "MyTransformer": MyTransformer,
        "loss": loss,
        "sf": sf,
        "rows": [{"inputs": inputs, "labels": label} for inputs, label in train_set],
        "train_set": train_set,
        "val_set": noisy(160, seed=1),
        "test_set": noisy(160, seed=2),
        "other_set": noisy(160, seed=3),
    }

    for text in blocks_of("python", page):
        exec(text, names)


@in_one
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_settings_files_can_be_read(page: Path) -> None:
    for text in blocks_of("toml", page):
        assert values(text)


def anchors(page: Path) -> set[str]:
    """What the part of a link behind # may be: headings in lower case, without punctuation, with
    hyphens.
    """
    anchors = set()
    for heading in re.findall(r"(?m)^#+ (.*)", without_blocks(page)):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        anchors.add(words.replace(" ", "-"))
    return anchors


@in_one
@pytest.mark.parametrize(
    "page", [*PAGES, *TOP_PAGES, *API], ids=lambda page: f"{page.parent.name}/{page.name}"
)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", page.read_text())
    for path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists()
        if anchor:
            assert anchor in anchors(target), target


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    links = re.findall(r"\]\(([^)#:]+)\)", index.read_text())
    linked = {(index.parent / target).resolve() for target in links}
    assert {*PAGES, *TOP_PAGES} - linked == {index, ROOT / "README.md", ROOT / "CONTRIBUTING.md"}


def test_the_reference_has_every_kind_and_key_of_the_records() -> None:
    page = (ROOT / "docs" / "reference" / "run-directory.md").read_text()
    for kind, keys in KINDS.items():
        absent = [name for name in (kind, *keys) if f"`{name}`" not in page]
        assert absent == [], kind


def test_the_reference_has_every_exit_status() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    for error in sf.SurefootError.__subclasses__():
        if error.exit_status > 1 and hasattr(sf, error.__name__):
            assert f"| {error.exit_status} | `sf.{error.__name__}` |" in page


# what users search for, and the guide that answers it
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


@pytest.mark.parametrize("question", ANSWERS)
def test_a_search_for_a_question_finds_a_heading_of_the_page_that_answers_it(question: str) -> None:
    text = without_blocks(ROOT / "docs" / "guides" / f"{ANSWERS[question]}.md")
    assert re.search(rf"(?mi)^#+ .*{question}", text)


@pytest.fixture(scope="module")
def architecture() -> str:
    return (ROOT / "docs" / "architecture.md").read_text()


def test_the_page_on_the_architecture_names_files_that_are_there(architecture: str) -> None:
    named = re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]*)+(?:\.pyi?)?|[a-z_]+\.py)`", architecture)
    absent = set()
    for name in named:
        if not (SOURCE / name).exists() and not (ROOT / name).exists():
            absent.add(name)

    assert len(named) > 100
    assert absent == {"config.py", "recipe.py", "look.py"}  # of each recipe


def test_the_reading_path_says_how_long_its_files_are(architecture: str) -> None:
    rows = re.findall(r"\| \d+ \| \[`(\S+)`\]\(\.\./src/surefoot/\1\) \| (\d+) \|", architecture)
    total = re.search(r"These (\d+) files, .* about ([\d,]+) lines", architecture)
    assert total is not None
    stated_files = int(total[1])
    stated_lines = int(total[2].replace(",", ""))
    stated = {name: int(lines) for name, lines in rows}
    counted = {name: len((SOURCE / name).read_text().splitlines()) for name in stated}

    assert len(rows) == stated_files
    assert stated == pytest.approx(counted, rel=0.2)
    assert stated_lines == pytest.approx(sum(counted.values()), rel=0.1)


def test_the_page_on_the_architecture_names_the_files_that_define_a_table(
    architecture: str,
) -> None:
    entries = re.findall(r"an entry of `([A-Z_]+)` in `(\S+)`", architecture)
    assert len(entries) >= 4
    for name, file in entries:
        text = (SOURCE / file).read_text()
        assert re.search(rf"(?m)^{name}\b.* = ", text), f"{name} is not defined in {file}"


@pytest.mark.parametrize("question", ANSWERS)
def test_the_index_answers_what_users_search_for(question: str) -> None:
    """One search of the index, a line at a time as grep does it, leads to a page."""
    lines = (ROOT / "docs" / "index.md").read_text().lower().splitlines()
    assert any(question.lower() in line for line in lines)
