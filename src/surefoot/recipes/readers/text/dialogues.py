"""Data set of tokenized conversations; rows are padded at their end, and only answers are targets.

Shape suffixes: B batch, T time.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surefoot.data.order import Ids
from surefoot.data.stored_samples import Batch

IGNORED = -100  # target of prompts and of padding, as in torch's cross-entropy


class Dialogues:
    """Data set of (tokens, is_answer) rows for next-token prediction: inputs (B, T), and targets
    (B, T) shifted by one.

    A target is `IGNORED` unless it is a token of an answer. Padding follows the tokens of a row, so
    a causal model needs no mask. `padding` is the input there; it has no effect. `lengths` counts
    the inputs of each row.

    >>> rows = Dialogues([([5, 6, 7], [False, False, True]), ([5, 8], [False, True])], padding=0)
    >>> inputs_BT, targets_BT = rows.gather(np.array([0, 1]), np.array([0, 0]))
    >>> inputs_BT.tolist(), targets_BT.tolist()
    ([[5, 6], [5, 0]], [[-100, 7], [8, -100]])
    """

    pads_to_longest = True  # batches differ in shape

    def __init__(
        self, rows: Sequence[tuple[Sequence[int], Sequence[bool]]], *, padding: int
    ) -> None:
        tokens = [np.asarray(row, dtype=np.int32) for row, _ in rows]
        answers = [np.asarray(answer, dtype=bool) for _, answer in rows]
        self.starts = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
        self.tokens = np.concatenate([np.empty(0, np.int32), *tokens])
        self.is_answer = np.concatenate([np.empty(0, bool), *answers])
        self.lengths: NDArray[np.int64] = np.diff(self.starts) - 1
        self.padding = padding

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(self, ids: Ids, _epochs: Ids) -> tuple[Tensor, Tensor]:
        """Return inputs (B, T) and targets (B, T) of the rows `ids`, int64; epochs are ignored."""
        starts_B1 = self.starts[ids][:, None]
        lengths_B1 = self.lengths[ids][:, None]
        index_1T = np.arange(lengths_B1.max(initial=0))[None]
        is_real_BT = index_1T < lengths_B1
        places_BT = starts_B1 + index_1T
        next_BT = places_BT + 1
        inputs_BT = np.where(is_real_BT, self.tokens.take(places_BT, mode="clip"), self.padding)
        is_target_BT = is_real_BT & self.is_answer.take(next_BT, mode="clip")
        targets_BT = np.where(is_target_BT, self.tokens.take(next_BT, mode="clip"), IGNORED)
        inputs = torch.from_numpy(inputs_BT.astype(np.int64))
        targets = torch.from_numpy(targets_BT.astype(np.int64))
        return inputs, targets

    def stored(self, ids: Ids) -> Batch:
        """Return the bytes of each row's tokens, and no targets."""
        rows = []
        for id in ids.tolist():
            rows.append(self.tokens[self.starts[id] : self.starts[id + 1]].tobytes())
        return rows, None

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of rows, of tokens and of targets, and a hash of all tokens."""
        digest = sha256()
        for array in (self.tokens, self.starts, self.is_answer):
            digest.update(array.astype("<i8").tobytes())
        counts = {
            "samples": len(self),
            "tokens": len(self.tokens),
            "targets": int(self.is_answer.sum()),
        }
        return counts | {"sha256": digest.hexdigest()}
