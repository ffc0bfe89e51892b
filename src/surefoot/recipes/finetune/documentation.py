"""The default of the recipe, with no download: questions on Python's standard library, and a small
GPT that is trained first.
"""

import ast
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.paths import write_whole
from surefoot.config.toml import to_toml
from surefoot.recipes import gpt
from surefoot.recipes.finetune.corpus import tokenizer_files
from surefoot.recipes.finetune.forms import Conversation
from surefoot.recipes.finetune.template import DEFAULT_TEMPLATE
from surefoot.recipes.gpt import corpus as gpt_corpus
from surefoot.recipes.optimizer_settings import Optimizer, note

_CONTEXT = 256  # tokens of the small GPT
_LAST = "tokenizer_config.json"  # written when all other files are
_LONGEST = 400  # characters of an answer


def questions() -> list[Conversation]:
    """Return questions on the modules, classes and functions of Python's standard library, answered
    by their docstrings.
    """
    conversations = []
    for file, source in sf.data.stdlib_documents().items():
        for name, question, answer in _questions(file, source):
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            conversations.append(Conversation(messages, f"the documentation of {name}"))
    return conversations


def _questions(file: str, source: str) -> Iterator[tuple[str, str, str]]:
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if any(part.startswith("_") for part in module.split(".")):
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # files that only test the parser
        return
    about = _first_paragraph(tree)
    if about:
        yield module, f"What is the module {module} for?", about
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{module}.{node.name}"
        question = f"What does {name} do?"
        if isinstance(node, ast.ClassDef):
            question = f"What is the class {name}?"
        about = _first_paragraph(node)
        if about:
            yield name, question, about


def _first_paragraph(node: ast.Module | ast.FunctionDef | ast.ClassDef) -> str:
    docstring = ast.get_docstring(node) or ""
    lines = docstring.split("\n\n")[0]
    paragraph = " ".join(lines.split())
    return paragraph if len(paragraph) <= _LONGEST else ""


def small_model(run_dir: str | Path | None, *, seed: int, device: str) -> Path:
    """Train a small GPT by the gpt recipe, in a directory beside `run_dir`, unless it is there.
    Return its files for transformers.
    """
    directory = Path(tempfile.mkdtemp() if run_dir is None else f"{run_dir}-base")
    if not is_trained(run_dir):
        note(
            "note: no model is named (--model DIR), so a small GPT is trained first, in"
            f" {directory}"
        )
        run = _trained(directory, seed=seed, device=device)
        if run.rank == 0:
            sf.load(directory).export(layout="gpt2")
            tokenizer = (directory / gpt_corpus.TOKENIZER).read_text(encoding="utf-8")
            _write_tokenizer(tokenizer, directory / "export")
        run.parts.world.from_main(None)  # the other ranks wait for the files
    return directory / "export"


def is_trained(run_dir: str | Path | None) -> bool:
    """Return True if the small GPT of `run_dir` has been trained and exported."""
    return run_dir is not None and Path(f"{run_dir}-base", "export", _LAST).is_file()


def write_small_tokenizer(directory: Path) -> None:
    """Write the tokenizer of the small GPT into a directory. Nothing is trained but the tokenizer,
    which is cached.
    """
    _write_tokenizer(gpt_corpus.read_corpus(gpt.Data()).tokenizer.to_json(), directory)


def small_config() -> Any:
    """Return the configuration of the small GPT in transformers, with as many tokens as its
    tokenizer may have.
    """
    from transformers import GPT2Config

    shape = gpt.Model(family="gpt2", context=_CONTEXT)
    return GPT2Config(
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.width,
        n_positions=_CONTEXT,
        vocab_size=2048,
        bos_token_id=0,
        eos_token_id=0,
    )


def _trained(directory: Path, *, seed: int, device: str) -> Any:
    config = gpt.Config(
        run_dir=str(directory),
        length="250 steps",
        batch_size=8,
        seed=seed,
        device=device,
        model=gpt.Model(family="gpt2", context=_CONTEXT),
        optimizer=Optimizer(name="muon"),
        cloze_questions=0,
        val_tokens=32_768,
    )
    run = gpt.build(config)
    program = {"kind": "recipe", "recipe": "gpt"}
    run.configuration = to_toml(config, {}, program, preset=gpt.PRESETS["tiny"])
    run.train()
    return run


def _write_tokenizer(text: str, directory: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "tokenizer.json")
        file.write_text(json.dumps(json.loads(text)["tokenizer"]), encoding="utf-8")
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(file), eos_token="<|endoftext|>", chat_template=DEFAULT_TEMPLATE
        )
    files = tokenizer_files(tokenizer)
    last = files.pop(_LAST)
    for name, contents in files.items():
        write_whole(directory / name, contents.encode())
    write_whole(directory / _LAST, last.encode())
