"""What the recipe gpt makes of a path: its text in tokens, with the end tokens visible."""

from dataclasses import replace
from typing import Any

import numpy as np

import surefoot as sf
from surefoot.config.paths import local_path
from surefoot.recipes.data_look import DataPreview, Piece, evenly
from surefoot.recipes.gpt.config import Config
from surefoot.recipes.gpt.corpus import read_corpus
from surefoot.recipes.readers.text.token_files import find_token_files

_END = "<|endoftext|>"
_ODD = {"\x00": "NUL", "\ufffd": "the replacement character U+FFFD", "\u200b": "U+200B"}
_ENCODED = 1_000_000  # characters of training, and of validation


def look(config: Config, *, count: int) -> DataPreview:
    """Read all text as a run does, and encode its beginning. Without `data.tokenizer`, its bytes are
    the tokens, since nothing is trained here.
    """
    data = replace(config.data, cache=False)
    facts = []
    path = local_path(str(data.path), setting="data.path")
    has_shards = (path / "tokens.json").is_file()
    holds_tokens = has_shards or find_token_files(path, data.tokenizer) is not None
    if data.tokenizer is None and not holds_tokens:
        data = replace(data, tokenizer="bytes", vocab_size=None)
        facts.append("tokens are bytes here; the recipe trains byte pairs, or --data.tokenizer")
    read = read_corpus(data, max_characters=_ENCODED)
    context = config.model.context
    windows = sf.data.TrainWindows(read.train, context=context, seed=config.seed)
    samples = []
    shown = ""
    for index in evenly(len(windows), count):
        ids = np.array([index])
        inputs_BT, targets_BT, *_ = windows.gather(ids, np.zeros_like(ids))
        tokens = [*inputs_BT[0].tolist(), *targets_BT[0, -1:].tolist()]
        text = with_end_tokens(read.tokenizer, tokens)
        samples.append([Piece(text)])
        shown += text.strip("\ufffd")  # a window may cut a character of several tokens at its ends
    odd = [f"samples contain {name}" for letter, name in _ODD.items() if letter in shown]
    if read.tokenizer.eos_id is None:
        odd.append("the tokenizer has no end token: documents follow each other without a border")
    return DataPreview(read.in_words, facts=facts, samples=samples, odd=odd)


def with_end_tokens(tokenizer: Any, tokens: list[int]) -> str:
    """Return the text of tokens, with each end token visible."""
    documents: list[list[int]] = [[]]
    for token in tokens:
        if token == tokenizer.eos_id:
            documents.append([])
        else:
            documents[-1].append(token)
    is_loaded = isinstance(tokenizer, sf.tokenizers.BPETokenizer)
    end = tokenizer.end_token if is_loaded else _END
    return str(end).join(tokenizer.decode(document) for document in documents)
