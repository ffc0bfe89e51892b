"""Windows over tokens for language models: training windows shift every epoch, evaluation windows
cover all targets.

Shape suffixes: B batch, T time (the context).
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.data.order import Ids, permutation
from surefoot.data.stored_samples import IGNORED, Batch, passages
from surefoot.data.text.shards import Tokens, TokenShards, not_tokens
from surefoot.errors import DataError, out_of_range
from surefoot.seeding import fold, stream_key


class TrainWindows:
    """Data set of training windows of `context` tokens; windows of an epoch do not overlap.

    A window gives (inputs, targets) from one shard; targets are the inputs shifted by one token.
    The first window starts at an offset drawn from (seed, epoch). Each epoch omits fewer than two
    windows of tokens at the ends of each shard. With `end_token`, the token that ends each
    document, a window gives (inputs, targets, documents): see `apart`.

    >>> windows = TrainWindows(np.arange(10), context=3, seed=0)
    >>> len(windows), [part.shape for part in windows.gather(np.array([0, 1]), np.array([0, 0]))]
    (2, [torch.Size([2, 3]), torch.Size([2, 3])])
    """

    def __init__(
        self,
        tokens: Tokens | TokenShards,
        *,
        context: int,
        seed: int,
        end_token: int | None = None,
    ) -> None:
        self.arrays = _arrays(tokens, context)
        self.identity = {**_identity(tokens, context, end_token), "seed": seed}
        self.context = context
        self.end_token = end_token
        self.key = stream_key(seed, "window offset")
        sizes = np.array([len(array) for array in self.arrays])
        counts = np.maximum(0, sizes - context) // context
        self.offset_counts = np.array(np.maximum(1, sizes - counts * context), dtype=np.uint64)
        self.ends = np.cumsum(counts)
        if self.ends[-1] == 0:
            longest = max(len(array) for array in self.arrays)
            raise DataError(
                "text-shorter-than-context",
                problem=f"no window of context {context} fits into {longest} contiguous tokens: at"
                f" least {2 * context} are needed",
                remedy="give more text, or a smaller context",
                context=context,
                longest=longest,
            )
        self.starts = self.ends - counts

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def lengths(self) -> int:
        """The number of tokens per window, for batch sizes in tokens."""
        return self.context

    def gather(self, ids: Ids, epochs: Ids) -> tuple[Tensor, ...]:
        """Return inputs and targets of the windows `ids`, and documents if they are kept apart; all
        are (B, T) int64.
        """
        sources = np.searchsorted(self.ends, ids, side="right")
        first = int(epochs[0])
        if (epochs == first).all():
            offsets = self.offsets(first)[sources]
        else:
            windows = zip(epochs.tolist(), sources, strict=True)
            offsets = np.array([self.offsets(epoch)[source] for epoch, source in windows])
        firsts = (ids - self.starts[sources]) * self.context + offsets
        window_BT = _windows(self.arrays, sources, firsts, self.context)
        # contiguous copies, because a loss may `view` its targets
        inputs_BT = window_BT[:, :-1].astype(np.int64)
        targets_BT = window_BT[:, 1:].astype(np.int64)
        return _tensors(inputs_BT, targets_BT, self.end_token)

    def passages(self, ids: Ids) -> Batch:
        """Return a passage of each window in the first epoch (see `stored_samples.passages`), and
        all targets.
        """
        inputs_BT, targets_BT, *_ = self.gather(ids, np.zeros_like(ids))
        return _passages(inputs_BT, targets_BT)

    def offsets(self, epoch: int) -> Ids:
        """Return the start of the first window of an epoch in each shard."""
        # at the largest offset, the last window ends with the shard, so that the last tokens are
        # used too
        return (np.uint64(fold(self.key, epoch)) % self.offset_counts).astype(np.int64)

    def fingerprint(self) -> dict[str, Any]:
        """Return the number and hash of the tokens, the context length, the seed of the offsets,
        and the end token if documents are kept apart.
        """
        return self.identity


class EvalWindows:
    """Data set of evaluation windows of `context` tokens, in order, with every target exactly once.

    The last window of a shard is padded, with 0 in inputs and -100 (ignored by cross-entropy) in
    targets. The first token of a shard is never a target. If `max_tokens` is given, the seed
    chooses windows of about `max_tokens` in total (rounded up to a window). With `end_token`, the
    token that ends each document, a window gives (inputs, targets, documents): see `apart`.

    >>> EvalWindows(np.arange(6), context=3).gather(np.array([1]), np.array([0]))
    (tensor([[3, 4, 0]]), tensor([[   4,    5, -100]]))
    >>> (
    ...     len(EvalWindows(np.arange(3001), context=3)),
    ...     len(EvalWindows(np.arange(3001), context=3, max_tokens=300)),
    ... )
    (1000, 100)
    """

    def __init__(
        self,
        tokens: Tokens | TokenShards,
        *,
        context: int,
        max_tokens: int | None = None,
        seed: int = 0,
        end_token: int | None = None,
    ) -> None:
        self.arrays = _arrays(tokens, context)
        self.identity = _identity(tokens, context, end_token)
        self.context = context
        self.end_token = end_token
        counts = np.array([-(-(len(array) - 1) // context) for array in self.arrays])
        self.ends = np.cumsum(counts)
        if self.ends[-1] == 0:
            raise DataError(
                "held-out-text-too-short",
                problem="the held-out part has no target: at least 2 tokens are needed",
                remedy="give more text, or a larger held-out fraction",
            )
        self.starts = self.ends - counts
        self.lengths = np.array([len(array) for array in self.arrays])
        windows = int(self.ends[-1])
        self.chosen: Ids | None = None  # None: all windows
        if max_tokens is not None and max_tokens < windows * context:
            self.identity |= {"max_tokens": max_tokens, "seed": seed}
            first = np.arange(max(1, -(-max_tokens // context)), dtype=np.int64)
            key = stream_key(seed, "evaluated windows")
            self.chosen = np.sort(permutation(key, windows, first))

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.chosen is None else len(self.chosen)

    def gather(self, ids: Ids, _epochs: Ids) -> tuple[Tensor, ...]:
        """Return inputs and targets of the windows `ids`, and documents if they are kept apart; all
        are (B, T) int64. Epochs are ignored.
        """
        ids = ids if self.chosen is None else self.chosen[ids]
        sources = np.searchsorted(self.ends, ids, side="right")
        firsts = (ids - self.starts[sources]) * self.context
        window_BT = _windows(self.arrays, sources, firsts, self.context).astype(np.int64)
        filled_BT = firsts[:, None] + np.arange(1, self.context + 1) >= self.lengths[sources, None]
        inputs_BT = np.where(filled_BT, 0, window_BT[:, :-1])
        targets_BT = np.where(filled_BT, IGNORED, window_BT[:, 1:])
        return _tensors(inputs_BT, targets_BT, self.end_token)

    def passages(self, ids: Ids) -> Batch:
        """Return a passage of each window (see `stored_samples.passages`), and all targets."""
        inputs_BT, targets_BT, *_ = self.gather(ids, np.zeros_like(ids))
        return _passages(inputs_BT, targets_BT)

    def fingerprint(self) -> dict[str, Any]:
        """Return the number and hash of the tokens, the context length, `max_tokens` and seed if
        `max_tokens` is used, and the end token if documents are kept apart.
        """
        return self.identity


def apart(inputs_BT: Tokens, targets_BT: Tokens, *, end_token: int) -> tuple[Tokens, Tokens]:
    """Return targets and documents of windows whose documents are kept apart.

    The documents are numbered within each window, and an end token belongs to the document that it
    ends. The target of an end token is the next document's first token, which no text predicts: it
    is -100.

    >>> targets_BT, documents_BT = apart(
    ...     np.array([[4, 9, 5, 6]]), np.array([[9, 5, 6, 9]]), end_token=9
    ... )
    >>> targets_BT.tolist(), documents_BT.tolist()
    ([[9, -100, 6, 9]], [[0, 0, 1, 1]])
    """
    is_end_BT = inputs_BT == end_token
    documents_BT = is_end_BT.cumsum(axis=1) - is_end_BT
    return np.where(is_end_BT, IGNORED, targets_BT), documents_BT


def _tensors(inputs_BT: Tokens, targets_BT: Tokens, end_token: int | None) -> tuple[Tensor, ...]:
    if end_token is None:
        return torch.from_numpy(inputs_BT), torch.from_numpy(targets_BT)
    targets_BT, documents_BT = apart(inputs_BT, targets_BT, end_token=end_token)
    return tuple(map(torch.from_numpy, (inputs_BT, targets_BT, documents_BT)))


def _passages(inputs_BT: Tensor, targets_BT: Tensor) -> Batch:
    return passages(inputs_BT.numpy()), targets_BT.numpy().reshape(-1)


def _windows(arrays: Sequence[Tokens], sources: Ids, firsts: Ids, context: int) -> Tokens:
    if len(arrays) == 1:
        return _cut(arrays[0], firsts, context)
    window_BT = np.empty((len(firsts), context + 1), dtype=arrays[0].dtype)
    for source in np.unique(sources):
        here = sources == source
        window_BT[here] = _cut(arrays[source], firsts[here], context)
    return window_BT


def _cut(array: Tokens, firsts: Ids, context: int) -> Tokens:
    if array.flags.c_contiguous and firsts.size and firsts.max() < len(array) - context:
        # overlapping view, so that NumPy copies rows instead of single tokens
        shape = (len(array) - context, context + 1)
        rows: Tokens = np.ndarray(shape, array.dtype, array, strides=array.strides * 2)
        return rows[firsts]
    return array.take(firsts[:, None] + np.arange(context + 1), mode="clip")


def _arrays(tokens: Tokens | TokenShards, context: int) -> list[Tokens]:
    if context < 1:
        raise out_of_range("context", context, "1 token or more")
    arrays = list(tokens.arrays) if isinstance(tokens, TokenShards) else [np.asarray(tokens)]
    for array in arrays:
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise not_tokens(array)
    return [array for array in arrays if len(array)] or [np.empty(0, np.int64)]


def _identity(tokens: Tokens | TokenShards, context: int, end_token: int | None) -> dict[str, Any]:
    windows = {"context": context}
    if end_token is not None:
        windows["end_token"] = end_token
    if isinstance(tokens, TokenShards):
        return {**tokens.fingerprint(), **windows}
    array = np.asarray(tokens)
    # all tokens up to 16 Mi, or 16 to 32 Mi evenly spaced tokens: the hash takes milliseconds
    distance = max(1, len(array) // (1 << 24))
    digest = sha256(array[::distance].astype("<i8").tobytes()).hexdigest()
    return {"tokens": len(array), "sha256": digest, **windows}
