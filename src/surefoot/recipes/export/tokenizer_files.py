"""The tokenizer of a run in the files that transformers loads: tokenizer.json, in the format of the
library `tokenizers`, and tokenizer_config.json.
"""

import json
from typing import TYPE_CHECKING, Any

from surefoot.config.extras import needed_for
from surefoot.tokenizers.bpe import END, BPETokenizer
from surefoot.tokenizers.tokenizer import (
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
    encodable,
)

if TYPE_CHECKING:
    import tokenizers


def tokenizer_files(tokenizer: Tokenizer, *, context: int) -> dict[str, bytes]:
    """Return the contents of the files by name. transformers encodes a text with them exactly as
    `tokenizer` does, also a text with the name of the end token. `context` is the model's.

    Raises `DataError` for a vocabulary with half of a surrogate pair.
    """
    match tokenizer:
        case ByteTokenizer():
            library_tokenizer = _of_bytes(tokenizer)
            end_token: str | None = END
        case CharacterTokenizer():
            library_tokenizer = _of_characters(tokenizer)
            end_token = None
        case BPETokenizer():
            library_tokenizer = tokenizer.tokenizer
            end_token = tokenizer.end_token
        case _:
            raise TypeError(f"a {type(tokenizer).__name__} is no tokenizer of a GPT")
    described = json.loads(library_tokenizer.to_str())
    described["post_processor"] = None  # some add a token before a text, which no run has seen
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # the characters of the end token are text
    }
    if end_token is not None:
        settings["bos_token"] = end_token
        settings["eos_token"] = end_token
    return {
        "tokenizer.json": (json.dumps(described, ensure_ascii=False) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }


def _of_bytes(tokenizer: ByteTokenizer) -> "tokenizers.Tokenizer":
    with needed_for("the layout transformers", "tokenizers"):
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = _letters_of_bytes()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    vocabulary[END] = tokenizer.eos_id
    built = Tokenizer(models.BPE(vocabulary, []))  # no merges: a token is a byte
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(END, special=True)])
    return built


def _letters_of_bytes() -> list[str]:
    """Return the letter by which a byte-level tokenizer writes each byte: printable characters
    stand for themselves, others for one above 255 (GPT-2's encoder.py).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = []
    substitute = 0x100
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(substitute))
            substitute += 1
    return letters


def _of_characters(tokenizer: CharacterTokenizer) -> "tokenizers.Tokenizer":
    with needed_for("the layout transformers", "tokenizers"):
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = encodable(tokenizer.characters)
    vocabulary = {character: token for token, character in enumerate(characters)}
    # a character outside the vocabulary is an error, as this token for it is not there
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    built.decoder = decoders.Fuse()
    return built
