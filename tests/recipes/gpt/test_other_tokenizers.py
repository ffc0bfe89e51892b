"""Runs with tokenizers of other projects: their end tokens, the texts that they change, and long
words; 6 seconds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import surefoot as sf
from refused import refused
from stated import numbers_in
from surefoot.config.tree import layered
from surefoot.recipes import gpt
from surefoot.recipes.gpt.predict import Predict, continuations
from surefoot.recipes.readers.text.prepare_shards import prepare_shards
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

TEXTS = {"a.txt": "the cat sat on the mat\n" * 40, "b.txt": "a dog\n" * 99, "c.txt": "no\n" * 50}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


def library_tokenizer(*special: str) -> Tokenizer:
    tokenizer = sf.tokenizers.BPETokenizer.train([*TEXTS.values()], vocab_size=280).tokenizer
    described = json.loads(tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    del vocabulary["<|endoftext|>"]
    described["model"]["vocab"] = {token: place for place, token in enumerate(vocabulary)}
    described["added_tokens"] = []
    without = Tokenizer.from_str(json.dumps(described))
    without.add_special_tokens([AddedToken(token, special=True) for token in special])
    return without


def folder_of(tmp_path: Path, *special: str, end: str | None = None) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    library_tokenizer(*special).save(str(folder / "tokenizer.json"))
    if end is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return folder


def config(path: Path, tokenizer: Path | None, **changes: Any) -> gpt.Config:
    small = {
        "run_dir": None,
        "length": "4 steps",
        "evaluate_every": "4 steps",
        "data.path": str(path),
        "data.tokenizer": None if tokenizer is None else str(tokenizer),
        "data.vocab_size": 300 if tokenizer is None else None,
        "model.layers": 1,
        "model.width": 16,
        "model.heads": 2,
        "model.context": 16,
        "sample_tokens": 0,
        "cloze_questions": 0,
        "report": False,
    }
    return layered(gpt.Config, [("test", small | changes)])[0]


def end_tokens(run: sf.Run) -> int:
    """The end tokens of all training and validation tokens."""
    tokenizer = sf.tokenizers.from_json(run.parts.files["tokenizer.json"])
    data = run.parts.settings
    arrays = [*data.train_data.arrays, *data.splits["val"].data.arrays]
    return int(sum((array == tokenizer.eos_id).sum() for array in arrays))


def said(run: sf.Run) -> str:
    return run.parts.settings.data_summary[0]


def test_the_end_token_that_the_files_name_follows_each_document(
    texts: Path, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, "<pad>", "<x>", "</s>", end="<x>")
    run = gpt.build(config(texts, folder))
    assert end_tokens(run) == len(TEXTS)
    assert said(run).endswith("; end token <x>")
    other = gpt.build(config(texts, folder, **{"data.end_token": "</s>"}))
    assert end_tokens(other) == len(TEXTS)
    assert said(other).endswith("; end token </s>")


def test_a_tokenizer_without_an_end_token_is_said_to_have_none(texts: Path, tmp_path: Path) -> None:
    run = gpt.build(config(texts, folder_of(tmp_path, "<pad>")))
    assert end_tokens(run) == 0
    without = said(run).rpartition("; ")[2]
    assert "--data.end-token" in without
    characters = said(gpt.build(config(texts, Path("characters")))).rpartition("; ")[2]
    assert without.startswith(f"{characters} (")
    assert characters not in said(gpt.build(config(texts, None)))  # which has one of its own


def test_an_end_token_without_a_file_to_find_it_in_is_refused(texts: Path, tmp_path: Path) -> None:
    for tokenizer in (None, Path("bpe"), Path("bytes"), Path("characters")):
        asked = config(texts, tokenizer, **{"data.end_token": "</s>"})
        with refused("end-token-without-file", value="</s>"):
            gpt.build(
                dataclasses.replace(asked, data=dataclasses.replace(asked.data, vocab_size=None))
            )
    with refused("end-token-unknown", sf.DataError, value="<y>"):
        gpt.build(config(texts, folder_of(tmp_path, "</s>"), **{"data.end_token": "<y>"}))


def test_another_end_token_at_resume_is_refused(texts: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "<x>", "</s>", end="<x>")
    asked = config(texts, folder, run_dir=str(tmp_path / "run"), stop_after="2 steps")
    gpt.build(asked).train()
    changed = dataclasses.replace(asked.data, end_token="</s>")
    with refused("settings-changed", sf.CheckpointError):
        gpt.build(dataclasses.replace(asked, data=changed)).train()
    gpt.build(dataclasses.replace(asked, stop_after=None)).train()


def test_a_run_of_0_1_0_goes_on_without_the_end_token(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knew <|endoftext|> only."""
    folder = folder_of(tmp_path, "</s>")
    asked = config(texts, folder, run_dir=str(tmp_path / "run"), stop_after="2 steps")
    with monkeypatch.context() as older:
        older.setattr("surefoot.tracking.run_reader.newest_behavior", lambda: 9)
        older.setattr("surefoot.recipes.gpt.recipe.behavior_in", lambda _: 9)
        older.setattr(
            "surefoot.recipes.gpt.corpus.named_tokenizer",
            lambda name, end_token: sf.tokenizers.BPETokenizer(library_tokenizer("</s>")),
        )
        gpt.build(asked).train()
    run = gpt.build(dataclasses.replace(asked, stop_after=None))
    assert sf.tokenizers.from_json(run.parts.files["tokenizer.json"]).eos_id is None
    run.train()
    assert run.state.step == 4


def test_shards_end_their_documents_with_that_token(texts: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "<x>", "</s>", end="<x>")
    shards = tmp_path / "shards"
    tokenizer = sf.tokenizers.load(folder)
    prepared = prepare_shards(shards, [texts], tokenizer=tokenizer, processes=2)
    assert sum((array == tokenizer.eos_id).sum() for array in prepared.arrays) == len(TEXTS)
    for name in (None, folder, shards):
        run = gpt.build(config(shards, name, **{"data.vocab_size": None}))
        assert end_tokens(run) == len(TEXTS)


def test_shards_that_0_1_0_began_go_on_without_the_end_token(texts: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "</s>")
    shards = tmp_path / "shards"
    of_0_1_0 = sf.tokenizers.BPETokenizer(library_tokenizer("</s>"))
    assert of_0_1_0.eos_id is None
    begun = prepare_shards(shards, [texts], tokenizer=of_0_1_0, processes=1)
    lines: list[str] = []
    tokenizer = sf.tokenizers.load(folder)
    again = prepare_shards(shards, [texts], tokenizer=tokenizer, processes=1, say=lines.append)
    assert again.fingerprint() == begun.fingerprint()
    (note,) = [line for line in lines if "</s>" in line]
    assert note.startswith(f"{shards} ")
    run = gpt.build(config(shards, folder))
    assert run.parts.files["tokenizer.json"] == of_0_1_0.to_json()
    with refused("tokenizer-of-other-shards"):
        gpt.build(config(shards, folder, **{"data.end_token": "</s>"}))


def test_a_text_that_the_tokenizer_would_change_is_refused_by_name(
    texts: Path, tmp_path: Path
) -> None:
    tokenizer = library_tokenizer("</s>")
    tokenizer.normalizer = normalizers.NFC()
    file = tmp_path / "nfc.json"
    tokenizer.save(str(file))
    assert end_tokens(gpt.build(config(texts, file))) == len(TEXTS)
    (texts / "d.txt").write_text("cafe\u0301\n")
    with refused("tokenizer-changes-text", sf.DataError):
        gpt.build(config(texts, file))
    with refused("tokenizer-changes-text", sf.DataError):
        prepare_shards(
            tmp_path / "shards", [texts], tokenizer=sf.tokenizers.load(file), processes=1
        )


def test_words_that_are_cut_for_the_tokenizer_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "dna.txt"
    file.write_text(f"the cat {'ACGT' * 2000} sat {'TTTA' * 3000} " + "on the mat " * 900)
    run = gpt.build(config(file, None, **{"data.val_fraction": 0.1}))
    assert [2, 4096] in [numbers_in(fact) for fact in said(run).split("; ")]  # words, bytes
    file.write_text("the cat sat on the mat " * 900)
    facts = said(gpt.build(config(file, None))).split("; ")
    assert not any(4096 in numbers_in(fact) for fact in facts)


def sentencepiece() -> sf.tokenizers.BPETokenizer:
    """Blanks are letters at the beginning of words, and the first one of a text is not shown."""
    tokens = ["<unk>", "</s>", "\u2581the", "\u2581cat", "\u2581", "s", "at", "\u2581sat"]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return sf.tokenizers.BPETokenizer(tokenizer, end_token="</s>")


@pytest.mark.parametrize("prompts", [["the cat"], ["the cat", "cat the"]])
def test_a_continuation_keeps_the_blank_at_its_beginning(
    prompts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stream(_model: Any, tokens: list[int], **_settings: Any) -> Iterator[int]:
        yield from (7, 2, 3)

    def sample_batch(_model: Any, rows: list[list[int]], **_settings: Any) -> list[list[int]]:
        return [[*row, 7, 2, 3] for row in rows]

    monkeypatch.setattr("surefoot.recipes.generate.stream", stream)
    monkeypatch.setattr("surefoot.recipes.generate.sample_batch", sample_batch)
    lines = [*continuations(None, sentencepiece(), prompts, Predict(), context=8, otherwise="")]
    if len(prompts) == 1:
        assert lines == ["the cat", " sat", " the", " cat", "\n"]
    else:
        assert [json.loads(line)["continuation"] for line in lines] == [" sat the cat"] * 2
    assert capsys.readouterr().err == "drawn with --temperature 0.8 --top-p 0.95 --seed 0\n"


def test_a_tokenizer_without_a_line_break_samples_after_a_word(tmp_path: Path) -> None:
    sentencepiece().tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("the cat " * 200 + "the")
    run = gpt.build(config(tmp_path / "a.txt", tmp_path / "words.json", sample_tokens=4))
    run.train()
    with refused("tokenizer-changes-text", sf.DataError):
        (tmp_path / "a.txt").write_text("the cat\n" * 200)
        gpt.build(config(tmp_path / "a.txt", tmp_path / "words.json"))
