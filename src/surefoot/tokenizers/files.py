"""Tokenizers from files: what some `to_json` or the library `tokenizers` wrote."""

from pathlib import Path

from surefoot.config.paths import local_path
from surefoot.tokenizers.bpe import BpeTokenizer
from surefoot.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer, Tokenizer, described, parsed


def tokenizer_from_json(text: str) -> Tokenizer:
    """The tokenizer that some tokenizer's `to_json` described.

    >>> tokenizer_from_json(CharacterTokenizer("xy").to_json()).encode("yx").tolist()
    [1, 0]
    """
    match described(text, None)["kind"]:
        case "characters":
            return CharacterTokenizer.from_json(text)
        case "bpe":
            return BpeTokenizer.from_json(text)
    return ByteTokenizer.from_json(text)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer in a file that some `to_json` or the library `tokenizers` wrote, or in a directory that holds one.

    Such a directory has a tokenizer.json (as every run's has), or GPT-2's encoder.json and vocab.bpe. Raises `DataError`.
    """
    path = local_path(path, setting="path")
    inside = path / "tokenizer.json"
    file = inside if inside.is_file() else path
    text, found = parsed(file, problem=f"{file} is no tokenizer") if file.is_file() else ("", None)
    return tokenizer_from_json(text) if isinstance(found, dict) and "kind" in found else BpeTokenizer.load(file)
