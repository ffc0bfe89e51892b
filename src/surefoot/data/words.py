"""Texts into byte pairs by their words, each different one of which is encoded once: the same tokens in a quarter of the time.

Byte pairs are joined within words only, so the tokens of a text are those of its words, one after the other. What a word is
says GPT-2's pattern (Radford et al. 2019, `encoder.py`): with letters and digits of any script, which Python's `re` has no
classes for. So only texts of ASCII are taken apart here, where the classes are plain.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import tokenizers

_WORD = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)
_PLAIN = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


def tokens_by_word(
    texts: Sequence[str], encode: Callable[[list[str]], list[NDArray[Any]]], dtype: Any
) -> list[NDArray[Any]]:
    """The tokens of texts of ASCII; `encode` gives those of words, and is called once.

    >>> tokens_by_word(["a bb a a"], lambda words: [np.array([len(word)] * len(word)) for word in words], np.uint16)[0].tolist()
    [1, 3, 3, 3, 2, 2, 2, 2]
    """
    number: dict[str, int] = defaultdict(count().__next__)  # of each word, in the order in which they are met
    numbers = []
    for text in texts:
        words = _WORD.findall(text)
        numbers.append(np.fromiter(map(number.__getitem__, words), np.int32, len(words)))
    tokens = encode(list(number))
    lengths = np.array([len(each) for each in tokens], dtype=np.int64)
    first = np.cumsum(lengths) - lengths
    row = np.concatenate([np.empty(0, dtype), *tokens]).astype(dtype, copy=False)
    found = []
    for chosen in numbers:
        counts = lengths[chosen]
        before = np.cumsum(counts) - counts  # where a word's tokens begin in the text
        places = np.arange(counts.sum()) + np.repeat(first[chosen] - before, counts)
        found.append(row[places])
    return found


def splits_into_words(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether a byte-level tokenizer takes texts apart as GPT-2's does, and by nothing else."""
    if tokenizer.pre_tokenizer is None or tokenizer.normalizer is not None:
        return False
    pieces = json.loads(tokenizer.pre_tokenizer.__getstate__())
    plain = {key: value for key, value in pieces.items() if key != "trim_offsets"} == _PLAIN
    return plain and all(token.special for token in tokenizer.get_added_tokens_decoder().values())
