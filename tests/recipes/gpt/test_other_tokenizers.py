"""Runs with tokenizers of other projects: their end tokens, the texts that they change, and long
words; 6 seconds."""

from __future__ import annotations

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
    """A tokenizer without <|endoftext|>, and with these special tokens."""
    trained = sf.tokenizers.BPETokenizer.train([*TEXTS.values()], vocab_size=280).tokenizer
    description = json.loads(trained.to_str())
    tokens = [token for token in description["model"]["vocab"] if token != "<|endoftext|>"]
    description["model"]["vocab"] = {token: place for place, token in enumerate(tokens)}
    description["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def write_folder(tmp_path: Path, *special: str, end: str | None = None) -> Path:
    """The files of a tokenizer, as others write them."""
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


def build(path: Path, tokenizer: Path | None, **changes: Any) -> sf.Run:
    return gpt.build(config(path, tokenizer, **changes))


def count_end_tokens(run: sf.Run) -> int:
    """Among all training and validation tokens."""
    tokenizer = sf.tokenizers.from_json(run.parts.files["tokenizer.json"])
    data = run.parts.settings
    arrays = [*data.train_data.arrays, *data.splits["val"].data.arrays]
    return int(sum((array == tokenizer.eos_id).sum() for array in arrays))


def facts_of(run: sf.Run) -> list[str]:
    """What the header says of the text."""
    return run.parts.settings.data_summary[0].split("; ")


def test_the_end_token_that_the_files_name_follows_each_document(
    texts: Path, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path, "<pad>", "<x>", "</s>", end="<x>")
    run = build(texts, folder)
    assert count_end_tokens(run) == len(TEXTS)
    assert facts_of(run)[-1] == "end token <x>"


def test_another_end_token_follows_each_document_if_it_is_asked_for(
    texts: Path, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path, "<pad>", "<x>", "</s>", end="<x>")
    run = build(texts, folder, **{"data.end_token": "</s>"})
    assert count_end_tokens(run) == len(TEXTS)
    assert facts_of(run)[-1] == "end token </s>"


def test_a_tokenizer_without_an_end_token_is_said_to_have_none(texts: Path, tmp_path: Path) -> None:
    run = build(texts, write_folder(tmp_path, "<pad>"))
    of_characters = facts_of(build(texts, Path("characters")))
    of_bpe = facts_of(build(texts, None))  # which has an end token of its own

    assert count_end_tokens(run) == 0
    no_end_token = of_characters[-1]
    assert facts_of(run)[-1].startswith(f"{no_end_token} (")
    assert "--data.end-token" in facts_of(run)[-1]
    assert no_end_token not in of_bpe


@pytest.mark.parametrize("tokenizer", [None, Path("bpe"), Path("bytes"), Path("characters")])
def test_an_end_token_without_a_file_to_find_it_in_is_refused(
    tokenizer: Path | None, texts: Path
) -> None:
    with refused("end-token-without-file", value="</s>"):
        build(texts, tokenizer, **{"data.end_token": "</s>", "data.vocab_size": None})


def test_an_end_token_that_the_file_does_not_have_is_refused(texts: Path, tmp_path: Path) -> None:
    with refused("end-token-unknown", sf.DataError, value="<y>"):
        build(texts, write_folder(tmp_path, "</s>"), **{"data.end_token": "<y>"})


def test_another_end_token_at_resume_is_refused(texts: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "<x>", "</s>", end="<x>")
    run_dir = str(tmp_path / "run")
    build(texts, folder, run_dir=run_dir, stop_after="2 steps").train()

    with refused("settings-changed", sf.CheckpointError):
        build(texts, folder, run_dir=run_dir, **{"data.end_token": "</s>"}).train()

    build(texts, folder, run_dir=run_dir).train()


def test_a_run_of_0_1_0_goes_on_without_the_end_token(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knew <|endoftext|> only."""
    folder = write_folder(tmp_path, "</s>")
    run_dir = str(tmp_path / "run")

    def named_tokenizer(name: str, end_token: str | None) -> sf.tokenizers.BPETokenizer:
        return sf.tokenizers.BPETokenizer(library_tokenizer("</s>"))

    with monkeypatch.context() as older:
        older.setattr("surefoot.tracking.run_reader.newest_behavior", lambda: 9)
        older.setattr("surefoot.recipes.gpt.recipe.behavior_in", lambda _: 9)
        older.setattr("surefoot.recipes.gpt.corpus.named_tokenizer", named_tokenizer)
        build(texts, folder, run_dir=run_dir, stop_after="2 steps").train()

    run = build(texts, folder, run_dir=run_dir)
    assert sf.tokenizers.from_json(run.parts.files["tokenizer.json"]).eos_id is None
    run.train()
    assert run.state.step == 4


def test_shards_end_their_documents_with_that_token(texts: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "<x>", "</s>", end="<x>")
    shards = tmp_path / "shards"
    tokenizer = sf.tokenizers.load(folder)

    prepared = prepare_shards(shards, [texts], tokenizer=tokenizer, processes=2)

    assert sum((array == tokenizer.eos_id).sum() for array in prepared.arrays) == len(TEXTS)
    for name in (None, folder, shards):
        run = build(shards, name, **{"data.vocab_size": None})
        assert count_end_tokens(run) == len(TEXTS)


def test_shards_that_0_1_0_began_go_on_without_the_end_token(texts: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "</s>")
    shards = tmp_path / "shards"
    of_0_1_0 = sf.tokenizers.BPETokenizer(library_tokenizer("</s>"))
    assert of_0_1_0.eos_id is None
    begun = prepare_shards(shards, [texts], tokenizer=of_0_1_0, processes=1)
    tokenizer = sf.tokenizers.load(folder)
    lines: list[str] = []

    continued = prepare_shards(shards, [texts], tokenizer=tokenizer, processes=1, say=lines.append)

    assert continued.fingerprint() == begun.fingerprint()
    (note,) = [line for line in lines if "</s>" in line]
    assert note.startswith(f"{shards} ")
    assert build(shards, folder).parts.files["tokenizer.json"] == of_0_1_0.to_json()
    with refused("tokenizer-of-other-shards"):
        build(shards, folder, **{"data.end_token": "</s>"})


def test_a_text_that_the_tokenizer_would_change_is_refused_by_name(
    texts: Path, tmp_path: Path
) -> None:
    tokenizer = library_tokenizer("</s>")
    tokenizer.normalizer = normalizers.NFC()
    file = tmp_path / "nfc.json"
    tokenizer.save(str(file))
    nfc = sf.tokenizers.load(file)
    assert count_end_tokens(build(texts, file)) == len(TEXTS)

    (texts / "d.txt").write_text("cafe\u0301\n")

    with refused("tokenizer-changes-text", sf.DataError):
        build(texts, file)
    with refused("tokenizer-changes-text", sf.DataError):
        prepare_shards(tmp_path / "shards", [texts], tokenizer=nfc, processes=1)


def test_words_that_are_cut_for_the_tokenizer_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "dna.txt"
    file.write_text(f"the cat {'ACGT' * 2000} sat {'TTTA' * 3000} " + "on the mat " * 900)
    facts = facts_of(build(file, None, **{"data.val_fraction": 0.1}))
    assert [2, 4096] in [numbers_in(fact) for fact in facts]  # words, bytes


def test_of_a_text_without_long_words_none_are_said_to_be_cut(tmp_path: Path) -> None:
    file = tmp_path / "cat.txt"
    file.write_text("the cat sat on the mat " * 900)
    for fact in facts_of(build(file, None)):
        assert 4096 not in numbers_in(fact)


def sentencepiece() -> sf.tokenizers.BPETokenizer:
    """Blanks are letters at the beginning of words, and the first one of a text is not shown."""
    tokens = ["<unk>", "</s>", "\u2581the", "\u2581cat", "\u2581", "s", "at", "\u2581sat"]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return sf.tokenizers.BPETokenizer(tokenizer, end_token="</s>")


SAT_THE_CAT = (7, 2, 3)  # tokens of `sentencepiece`


@pytest.fixture
def draws_sat_the_cat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every continuation be the same tokens."""

    def stream(_model: Any, tokens: list[int], **_settings: Any) -> Iterator[int]:
        yield from SAT_THE_CAT

    def sample_batch(_model: Any, rows: list[list[int]], **_settings: Any) -> list[list[int]]:
        return [[*row, *SAT_THE_CAT] for row in rows]

    monkeypatch.setattr("surefoot.recipes.generate.stream", stream)
    monkeypatch.setattr("surefoot.recipes.generate.sample_batch", sample_batch)


def continue_prompts(*prompts: str) -> list[str]:
    """What `surefoot predict` prints piece by piece."""
    return list(
        continuations(None, sentencepiece(), list(prompts), Predict(), context=8, otherwise="")
    )


@pytest.mark.usefixtures("draws_sat_the_cat")
def test_a_continuation_keeps_the_blank_at_its_beginning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert continue_prompts("the cat") == ["the cat", " sat", " the", " cat", "\n"]
    assert capsys.readouterr().err == "drawn with --temperature 0.8 --top-p 0.95 --seed 0\n"


@pytest.mark.usefixtures("draws_sat_the_cat")
def test_continuations_of_a_batch_keep_the_blanks_at_their_beginnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = continue_prompts("the cat", "cat the")
    assert json.loads(first)["continuation"] == " sat the cat"
    assert json.loads(second)["continuation"] == " sat the cat"
    assert capsys.readouterr().err == "drawn with --temperature 0.8 --top-p 0.95 --seed 0\n"


def test_a_tokenizer_without_a_line_break_samples_after_a_word(tmp_path: Path) -> None:
    words = tmp_path / "words.json"
    file = tmp_path / "a.txt"
    sentencepiece().tokenizer.save(str(words))
    file.write_text("the cat " * 200 + "the")
    build(file, words, sample_tokens=4).train()

    file.write_text("the cat\n" * 200)
    with refused("tokenizer-changes-text", sf.DataError):
        build(file, words)
