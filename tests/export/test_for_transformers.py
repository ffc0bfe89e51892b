"""`surefoot export --layout transformers` of gpt runs: transformers computes the same logits, writes
the same text and encodes it alike. 15 seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from refused import refused
from surefoot.config.tree import layered
from surefoot.recipes import gpt
from surefoot.recipes.export.tokenizer_files import tokenizer_files
from surefoot.tokenizers.tokenizer import Tokenizer

TEXT = "".join(f"{n} squared is {n * n}; ünd {n} apples\n" for n in range(400))
RUNS: dict[str, dict[str, Any]] = {
    "llama, grouped queries, byte pairs": {
        "model.kv_heads": 2,
        "model.mlp_width": 41,
        "model.rope_theta": 500_000.0,
        "model.norm_eps": 1e-3,
        "data.vocab_size": 300,
    },
    "llama, one head of keys, tied, bytes": {
        "model.kv_heads": 1,
        "model.tie_embeddings": True,
        "data.tokenizer": "bytes",
    },
    "llama, averaged, characters": {"data.tokenizer": "characters", "ema": 0.5},
    "gpt2, bytes": {"model.family": "gpt2", "data.tokenizer": "bytes"},
}


def trained(directory: Path, **changes: Any) -> sf.Run:
    (directory / "text.txt").write_text(TEXT)
    settings = {
        "data.path": str(directory / "text.txt"),
        "data.cache": False,
        "model.family": "llama",
        "model.layers": 2,
        "model.heads": 4,
        "model.width": 32,
        "model.context": 48,
        "run_dir": str(directory / "run"),
        "length": "30 steps",
        "optimizer.lr": 0.02,
        "schedule.warmup": "0 steps",
        "evaluate_every": "100 steps",
        "sample_tokens": 0,
        "cloze_questions": 0,
    }
    config, _ = layered(gpt.Config, [("test", settings | changes)])
    run = gpt.build(config)
    run.train()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS.keys())
def test_transformers_gives_the_logits_the_text_and_the_tokens_of_the_run(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    run = sf.load(trained(tmp_path, **changes))
    ours = run.load_model(device="cpu")

    out = run.export(tmp_path / "out", layout="transformers", max_file="20 KB").directory

    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    family = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}
    assert type(theirs).__name__ == family[changes.get("model.family", "llama")]
    tokenizer = sf.tokenizers.load(tmp_path / "run" / "tokenizer.json")
    with torch.no_grad():
        tokens_BT = torch.tensor(tokenizer.encode(TEXT)[: 3 * 48].reshape(3, 48).astype(int))
        logits_BTV = ours(tokens_BT)
        assert logits_BTV.std() > 0.5  # it has learned something
        torch.testing.assert_close(theirs(tokens_BT).logits, logits_BTV, rtol=1e-5, atol=1e-5)

    prompt = tokenizer.encode("12 squared").tolist()
    settings = {"max_new_tokens": 30, "context": 48, "temperature": 0.0}
    text = sf.generate.sample(ours, prompt, **settings, use_cache=True)
    their_text = theirs.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=30, eos_token_id=None
    )
    assert their_text[0].tolist() == text

    their_tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert their_tokenizer(TEXT)["input_ids"] == tokenizer.encode(TEXT).tolist()
    assert their_tokenizer.decode(their_tokenizer.encode(TEXT)) == TEXT
    assert len(their_tokenizer) == tokenizer.vocab_size == theirs.config.vocab_size
    assert their_tokenizer.eos_token_id == tokenizer.eos_id == theirs.config.eos_token_id
    assert their_tokenizer.model_max_length == 48


CHARACTERS = "\n\r\t abcXYZ.,é日😀\u0301\x00\x85\u2028<|>endoftx"
TOKENIZERS: dict[str, Tokenizer] = {
    "bytes": sf.tokenizers.ByteTokenizer(),
    "characters": sf.tokenizers.CharacterTokenizer("".join(dict.fromkeys(CHARACTERS))),
    "byte pairs": sf.tokenizers.BPETokenizer.train([CHARACTERS, TEXT], vocab_size=320),
}
PIECES = st.one_of(
    st.text(alphabet=CHARACTERS), st.sampled_from(["<|endoftext|>", " abc", "\n\n", "  "])
)


def of_library(files: dict[str, bytes]) -> Any:
    """The tokenizer in the files, as transformers sets it up."""
    from tokenizers import Tokenizer as LibraryTokenizer

    library_tokenizer = LibraryTokenizer.from_str(files["tokenizer.json"].decode())
    settings = json.loads(files["tokenizer_config.json"])
    library_tokenizer.encode_special_tokens = settings["split_special_tokens"]
    return library_tokenizer


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.lists(PIECES).map("".join))
def test_a_tokenizer_for_transformers_encodes_and_decodes_every_text_as_ours(
    kind: str, text: str
) -> None:
    tokenizer = TOKENIZERS[kind]
    theirs = of_library(tokenizer_files(tokenizer, context=8))
    tokens = tokenizer.encode(text).tolist()
    assert theirs.encode(text).ids == tokens
    assert theirs.decode(tokens, skip_special_tokens=False) == text


@given(st.lists(st.integers(0, 256)))
def test_bytes_that_are_no_text_are_decoded_as_ours(tokens: list[int]) -> None:
    tokenizer = TOKENIZERS["bytes"]
    theirs = of_library(tokenizer_files(tokenizer, context=8))
    assert theirs.decode(tokens) == tokenizer.decode(tokens)


def test_a_character_that_no_token_stands_for_is_an_error_there_too() -> None:
    theirs = of_library(tokenizer_files(TOKENIZERS["characters"], context=8))
    with pytest.raises(Exception, match="UNK"):
        theirs.encode("abQ")


def test_half_a_character_cannot_be_in_a_vocabulary_for_transformers() -> None:
    tokenizer = sf.tokenizers.CharacterTokenizer("ab\ud800")
    with refused("text-with-half-character", sf.DataError, position=2):
        tokenizer_files(tokenizer, context=8)


def test_a_token_that_a_loaded_tokenizer_puts_before_a_text_stays_out() -> None:
    """Runs encode without it."""
    from tokenizers.processors import TemplateProcessing

    from tokenizers import Tokenizer as LibraryTokenizer

    trained_tokenizer = TOKENIZERS["byte pairs"]
    assert isinstance(trained_tokenizer, sf.tokenizers.BPETokenizer)
    library_tokenizer = LibraryTokenizer.from_str(trained_tokenizer.tokenizer.to_str())
    library_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer = sf.tokenizers.BPETokenizer(library_tokenizer)
    theirs = of_library(tokenizer_files(tokenizer, context=8))
    assert theirs.encode("abc").ids == tokenizer.encode("abc").tolist()
