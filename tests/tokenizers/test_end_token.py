"""The end token of a tokenizer of another project: where its name is read, and that it is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from refused import refused
from surefoot.data.text.document_tokens import encode_documents
from surefoot.errors import DataError
from surefoot.tokenizers import BPETokenizer, ByteTokenizer, from_json, load
from surefoot.tokenizers.end_token import USUAL
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"


def library_tokenizer(*special: str, plain: tuple[str, ...] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["a b"], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens(list(plain))
    return tokenizer


def saved(folder: Path, *special: str, plain: tuple[str, ...] = (), **files: Any) -> Path:
    library_tokenizer(*special, plain=plain).save(str(folder / "tokenizer.json"))
    names = {"config": CONFIG, "map": MAP}
    for kind, fields in files.items():
        (folder / names[kind]).write_text(json.dumps(fields), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", USUAL)
def test_documents_end_with_each_usual_end_token(name: str, tmp_path: Path) -> None:
    tokenizer = load(saved(tmp_path, "<pad>", name, "<unk>"))
    assert tokenizer.eos_id == 257
    ends = encode_documents([f"a{name}", "b"], tokenizer) == 257
    assert ends.sum() == 2  # the name inside a text is text
    again = from_json(tokenizer.to_json())
    assert (again.eos_id, again.to_json()) == (257, tokenizer.to_json())
    assert again.decode([257, *again.encode(name), 257]) == name
    assert again.byte_counts[257] == 0


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"config": {"eos_token": "<|im_end|>"}}, "<|im_end|>"),
        ({"config": {"eos_token": {"content": "<x>", "lstrip": False}}}, "<x>"),
        ({"map": {"eos_token": "<x>"}}, "<x>"),
        ({"map": {"eos_token": {"content": "</s>"}}}, "</s>"),
        ({"config": {"eos_token": "</s>"}, "map": {"eos_token": "<x>"}}, "</s>"),
        ({"config": {"eos_token": None}, "map": {"eos_token": "<x>"}}, "<x>"),
        ({"config": {"bos_token": "<x>"}}, "<|endoftext|>"),
        ({"config": []}, "<|endoftext|>"),
        ({}, "<|endoftext|>"),
    ],
)
def test_the_files_beside_a_tokenizer_name_its_end_token(
    files: dict[str, Any], end: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, "<x>", "</s>", "<|im_end|>", "<|endoftext|>", **files)
    for path in (folder, folder / "tokenizer.json"):
        tokenizer = load(path)
        assert isinstance(tokenizer, BPETokenizer)
        assert tokenizer.end_token == end
        assert tokenizer.eos_id == tokenizer.tokenizer.token_to_id(end)


def test_a_text_may_be_spelled_like_an_end_token(tmp_path: Path) -> None:
    """A usual name that texts are encoded to is no end token."""
    assert load(saved(tmp_path, plain=("</s>",))).eos_id is None


def test_vocabularies_of_gpt2_s_form_have_end_tokens(tmp_path: Path) -> None:
    """As in RoBERTa's vocab.json and merges.txt, where the end token is an ordinary one."""
    vocabulary = library_tokenizer().get_vocab()
    vocabulary["</s>"] = len(vocabulary)
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    assert load(tmp_path).eos_id == 256
    (tmp_path / MAP).write_text('{"eos_token": "a"}')
    assert load(tmp_path).eos_id == vocabulary["a"]


def test_the_user_names_another_end_token(tmp_path: Path) -> None:
    folder = saved(tmp_path, "<x>", "</s>", config={"eos_token": "</s>"})
    assert load(folder, end_token="<x>").eos_id == 256
    description = tmp_path / "ours.json"
    description.write_text(load(folder, end_token="<x>").to_json(), encoding="utf-8")
    assert load(description).eos_id == 256
    assert load(description, end_token="</s>").eos_id == 257
    with refused("end-token-unknown", DataError, value="<y>"):
        load(folder, end_token="<y>")
    with refused("end-token-unknown", DataError, value="<y>"):
        load(description, end_token="<y>")
    (tmp_path / "bytes.json").write_text(ByteTokenizer().to_json())
    with refused("end-token-fixed", DataError, value="<x>"):
        load(tmp_path / "bytes.json", end_token="<x>")


def test_a_named_end_token_that_the_vocabulary_lacks_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "</s>", config={"eos_token": "<gone>"})
    with refused("end-token-unknown", DataError, value="<gone>", path=folder / CONFIG):
        load(folder)
    assert load(folder, end_token="</s>").eos_id == 256


def test_a_stored_tokenizer_keeps_the_end_token_that_it_began_with() -> None:
    """A description without an end token is of 0.1.0: only <|endoftext|> ended a document."""
    tokenizer = library_tokenizer("</s>")
    plain = {"kind": "bpe", "tokenizer": json.loads(tokenizer.to_str())}
    assert from_json(json.dumps(plain)).eos_id is None
    assert "end_token" not in json.loads(from_json(json.dumps(plain)).to_json())
    assert from_json(json.dumps(plain | {"end_token": "</s>"})).eos_id == 256
    with refused("tokenizer-unreadable", DataError):
        from_json(json.dumps(plain | {"end_token": 3}))
    with refused("end-token-unknown", DataError, value="<gone>"):
        from_json(json.dumps(plain | {"end_token": "<gone>"}))
    trained = BPETokenizer.train(["a b"], vocab_size=257)
    assert set(json.loads(trained.to_json())) == {"kind", "tokenizer"}


def test_the_end_token_is_the_one_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    names = ("<x>", "</s>", "<|im_end|>", "<|endoftext|>")
    for place, end in enumerate(names):
        folder = tmp_path / str(place)
        folder.mkdir()
        described = {"eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
        saved(folder, *names, config=described)
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
        tokenizer = load(folder)
        assert tokenizer.eos_id == reference.eos_token_id
        reference.save_pretrained(str(folder / "again"))
        assert load(folder / "again").eos_id == reference.eos_token_id


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json"])
def test_a_tokenizer_of_another_form_is_named(name: str, tmp_path: Path) -> None:
    with refused("tokenizer-missing", DataError, path=tmp_path):
        load(tmp_path)
    (tmp_path / name).write_bytes(b"\n\x0e")
    with refused("tokenizer-of-another-form", DataError, path=tmp_path / name):
        load(tmp_path)
