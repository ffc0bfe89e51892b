"""The name of a tokenizer's end token: in the files beside the tokenizer, or a usual name."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import DataError, Setting
from surefoot.tokenizers.tokenizer import read_json

if TYPE_CHECKING:
    import tokenizers

USUAL = (
    "<|endoftext|>",  # GPT-2, GPT-NeoX, Qwen, Phi
    "<|end_of_text|>",  # Llama 3, Granite
    "</s>",  # Llama 2, Mistral, RoBERTa, T5
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek, with its own bars and blanks
    "<eos>",  # Gemma
    "<|im_end|>",  # ChatML
    "<|eot_id|>",
    "<|end|>",
    "<|eos|>",
    "<EOS>",
    "[EOS]",
    "<end_of_text>",
)
"""Names of end tokens, in the order in which they are looked for."""

_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def end_token_beside(folder: Path) -> tuple[str, Path] | None:
    """Return the end token that the files of transformers name, and the file; None without one."""
    for name in _FILES:
        file = folder / name
        if not file.is_file():
            continue
        _, fields = read_json(file)
        token = fields.get("eos_token") if isinstance(fields, dict) else None
        if isinstance(token, dict):  # an AddedToken with its options
            token = token.get("content")
        if isinstance(token, str) and token:
            return token, file
    return None


def usual_end_token(tokenizer: "tokenizers.Tokenizer") -> str | None:
    """Return the first usual name in the vocabulary, or None. A name that texts are encoded to, and
    that is not marked as special, is no end token; <|endoftext|> always is one.
    """
    added = tokenizer.get_added_tokens_decoder()
    for name in USUAL:
        token_id = tokenizer.token_to_id(name)
        if token_id is None:
            continue
        is_special = name == USUAL[0] or (token_id in added and added[token_id].special)
        if is_special or token_id not in tokenizer.encode(name, add_special_tokens=False).ids:
            return name
    return None


def unknown_end_token(
    name: str, tokenizer: "tokenizers.Tokenizer", *, source: Any = None
) -> DataError:
    """Return the error for an end token that the vocabulary lacks. `source` is the file that names
    it; None: the user."""
    added_tokens = tokenizer.get_added_tokens_decoder().values()
    special = [token.content for token in added_tokens if token.special]
    known = [
        token
        for token in dict.fromkeys([*special, *USUAL])
        if tokenizer.token_to_id(token) is not None
    ]
    remedies: list[Any] = [Setting("data.end_token", token) for token in known[:4]]
    named_by = f"{source} names the end token {name!r}" if source else f"end_token = {name!r}"
    return DataError(
        "end-token-unknown",
        problem=f"{named_by}, and the vocabulary of the tokenizer has no such token",
        remedy=remedies or "name a token of the vocabulary",
        setting="data.end_token",
        value=name,
        path=source,
    )
