"""Windows over tokens, for language models: shuffled and shifted every epoch to train on, in order and complete to score.

Shape suffixes: B batch, T time (the context).
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.data.leakage_check import IGNORED, Batch, passages
from surefoot.data.order import Ids, permutation
from surefoot.data.text.shards import Tokens, TokenShards
from surefoot.errors import DataError
from surefoot.seeding import fold, stream_key


class TrainWindows:
    """Windows of `context` tokens to train on, that never overlap within an epoch and are cut elsewhere in the next.

    Each epoch starts at an offset from (seed, epoch). A window is (inputs, targets), the targets one token later, and lies
    within one shard. Fewer than two windows' worth of tokens stay out of an epoch at a shard's ends, others in the next.

    >>> windows = TrainWindows(np.arange(10), context=3, seed=0)
    >>> len(windows), [part.shape for part in windows.gather(np.array([0, 1]), np.array([0, 0]))]
    (2, [torch.Size([2, 3]), torch.Size([2, 3])])
    """

    def __init__(self, tokens: Tokens | TokenShards, *, context: int, seed: int) -> None:
        self.arrays = _arrays(tokens, context)
        self.identity = {**_identity(tokens, context), "seed": seed}
        self.context, self.key = context, stream_key(seed, "window offset")
        sizes = np.array([len(array) for array in self.arrays])
        counts = np.maximum(0, sizes - context) // context
        self.offset_counts = np.array(np.maximum(1, sizes - counts * context), dtype=np.uint64)
        self.ends = np.cumsum(counts)
        if self.ends[-1] == 0:
            longest = max(len(array) for array in self.arrays)
            raise DataError(
                f"no window of context {context} fits into {longest} tokens in one piece: at least {2 * context} are needed\n"
                "  give more text, or a smaller context"
            )
        self.starts = self.ends - counts

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def lengths(self) -> int:
        """Tokens of every window, so that a batch may be given in tokens."""
        return self.context

    def gather(self, ids: Ids, epochs: Ids) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these windows, both (B, T) int64."""
        sources = np.searchsorted(self.ends, ids, side="right")
        first = int(epochs[0])
        if (epochs == first).all():
            offsets = self.offsets(first)[sources]
        else:
            offsets = np.array(
                [self.offsets(epoch)[source] for epoch, source in zip(epochs.tolist(), sources, strict=True)]
            )
        window_BT = _windows(self.arrays, sources, (ids - self.starts[sources]) * self.context + offsets, self.context)
        # copies, so that both lie in memory row after row: a loss may `view` its targets
        return torch.from_numpy(window_BT[:, :-1].astype(np.int64)), torch.from_numpy(window_BT[:, 1:].astype(np.int64))

    def passages(self, ids: Ids) -> Batch:
        """A passage out of each window of the first epoch (`leakage_check.passages`), and all targets."""
        return _passages(*self.gather(ids, np.zeros_like(ids)))

    def offsets(self, epoch: int) -> Ids:
        """The token at which an epoch's first window starts, in each shard."""
        # as many places as let the last window end with the shard, so that the tokens at its end have their turn too
        return (np.uint64(fold(self.key, epoch)) % self.offset_counts).astype(np.int64)

    def fingerprint(self) -> dict[str, Any]:
        """Which tokens, how long the windows are, and the seed of their offsets."""
        return self.identity


class EvalWindows:
    """Windows of `context` tokens in order, that hold every target exactly once; the last of a shard is filled up.

    Filling is 0 among inputs and -100 among targets, which cross-entropy leaves out. A shard's first token is never a target. With
    `max_tokens`, at most that number of tokens, or a window more, is evaluated: windows that the seed chooses once, in order.

    >>> EvalWindows(np.arange(6), context=3).gather(np.array([1]), np.array([0]))
    (tensor([[3, 4, 0]]), tensor([[   4,    5, -100]]))
    >>> len(EvalWindows(np.arange(3001), context=3)), len(EvalWindows(np.arange(3001), context=3, max_tokens=300))
    (1000, 100)
    """

    def __init__(
        self, tokens: Tokens | TokenShards, *, context: int, max_tokens: int | None = None, seed: int = 0
    ) -> None:
        self.arrays, self.identity = _arrays(tokens, context), _identity(tokens, context)
        self.context = context
        counts = np.array([-(-(len(array) - 1) // context) for array in self.arrays])
        self.ends = np.cumsum(counts)
        if self.ends[-1] == 0:
            raise DataError(
                "the held-out part has no target: at least 2 tokens are needed\n  give more text, or a larger held-out fraction"
            )
        self.starts = self.ends - counts
        self.lengths = np.array([len(array) for array in self.arrays])
        windows = int(self.ends[-1])
        self.chosen: Ids | None = None  # all of them
        if max_tokens is not None and max_tokens < windows * context:
            self.identity |= {"max_tokens": max_tokens, "seed": seed}
            first = np.arange(max(1, -(-max_tokens // context)), dtype=np.int64)
            self.chosen = np.sort(permutation(stream_key(seed, "evaluated windows"), windows, first))

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.chosen is None else len(self.chosen)

    def gather(self, ids: Ids, _epochs: Ids) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these windows, both (B, T) int64; epochs make no difference."""
        ids = ids if self.chosen is None else self.chosen[ids]
        sources = np.searchsorted(self.ends, ids, side="right")
        firsts = (ids - self.starts[sources]) * self.context
        window_BT = _windows(self.arrays, sources, firsts, self.context).astype(np.int64)
        filled_BT = firsts[:, None] + np.arange(1, self.context + 1) >= self.lengths[sources, None]
        inputs_BT = np.where(filled_BT, 0, window_BT[:, :-1])
        return torch.from_numpy(inputs_BT), torch.from_numpy(np.where(filled_BT, IGNORED, window_BT[:, 1:]))

    def passages(self, ids: Ids) -> Batch:
        """A passage out of each window (`leakage_check.passages`), and all targets."""
        return _passages(*self.gather(ids, np.zeros_like(ids)))

    def fingerprint(self) -> dict[str, Any]:
        """Which tokens, and how long the windows are."""
        return self.identity


def _passages(inputs_BT: Tensor, targets_BT: Tensor) -> Batch:
    return passages(inputs_BT.numpy()), targets_BT.numpy().reshape(-1)


def _windows(arrays: Sequence[Tokens], sources: Ids, firsts: Ids, context: int) -> Tokens:
    """`context` + 1 tokens from each of `firsts` on in the array of its source; past an array's end its last token."""
    if len(arrays) == 1:
        return _cut(arrays[0], firsts, context)
    window_BT = np.empty((len(firsts), context + 1), dtype=arrays[0].dtype)
    for source in np.unique(sources):
        here = sources == source
        window_BT[here] = _cut(arrays[source], firsts[here], context)
    return window_BT


def _cut(array: Tokens, firsts: Ids, context: int) -> Tokens:
    if array.flags.c_contiguous and firsts.size and firsts.max() < len(array) - context:
        # all windows as rows of one view, that begin one token apart: a row is copied at once, not token by token
        rows: Tokens = np.ndarray((len(array) - context, context + 1), array.dtype, array, strides=array.strides * 2)
        return rows[firsts]
    return array.take(firsts[:, None] + np.arange(context + 1), mode="clip")


def _arrays(tokens: Tokens | TokenShards, context: int) -> list[Tokens]:
    if context < 1:
        raise DataError(f"context = {context}: a window has at least 1 token")
    arrays = list(tokens.arrays) if isinstance(tokens, TokenShards) else [np.asarray(tokens)]
    for array in arrays:
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"tokens must be a 1-dimensional array of whole numbers, found {array.dtype} of shape {array.shape}\n"
                "  encode text first: surefoot.tokenizers.ByteTokenizer().encode(text)"
            )
    return [array for array in arrays if len(array)] or [np.empty(0, np.int64)]


def _identity(tokens: Tokens | TokenShards, context: int) -> dict[str, Any]:
    if isinstance(tokens, TokenShards):
        return {**tokens.fingerprint(), "context": context}
    array = np.asarray(tokens)
    # the whole up to 16 Mi tokens, beyond that as many spread over it: naming the data stays a matter of milliseconds
    digest = sha256(array[:: max(1, len(array) // (1 << 24))].astype("<i8").tobytes()).hexdigest()
    return {"tokens": len(array), "sha256": digest, "context": context}
