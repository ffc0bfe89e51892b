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
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    parts = [
        part
        for tokens in tokenizer.encode_all(documents)
        for part in (tokens, np.array(end, dtype=tokens.dtype))
    ]
    return np.concatenate(parts)
