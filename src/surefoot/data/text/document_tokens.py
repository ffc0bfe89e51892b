"""Documents as one array of tokens, with an end token after each document."""

from collections.abc import Sequence

import numpy as np

from surefoot.tokenizers.tokenizer import Tokenizer


def encode_documents(documents: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of all documents in one array, with `eos_id` (if the tokenizer has one)
    after each document.

    >>> from surefoot.tokenizers import ByteTokenizer
    >>> encode_documents(["ab", "c"], ByteTokenizer()).tolist()
    [97, 98, 256, 99, 256]
    """
    pieces = list[np.ndarray]()
    for tokens in tokenizer.encode_all(documents):
        pieces.append(tokens)
        if tokenizer.eos_id is not None:
            pieces.append(np.array([tokenizer.eos_id], dtype=tokens.dtype))
    return np.concatenate(pieces)
