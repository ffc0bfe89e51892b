"""Data set of tokenized sentence pairs; the rows of a batch are padded to the longest row of each
side.

Shape suffixes: B batch, S source tokens, T target tokens.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surefoot.data.order import Ids
from surefoot.data.stored_samples import Batch
from surefoot.errors import DataError, out_of_range
from surefoot.tokenizers.subwords import BEGIN, END, PADDING, SubwordTokenizer

Tokens = NDArray[np.int32]


class TokenPairs:
    """Data set of token pairs: sources end in `END`, targets have `BEGIN` and `END`, and both are
    padded with `PADDING`.

    Pairs with more than `max_source_tokens` or `max_target_tokens` tokens (`END` included) are
    skipped; `left_out` is their number. `lengths` (pairs, 2) counts the tokens that the model sees:
    source with `END`, and target with either `BEGIN` or `END`.

    >>> pairs = TokenPairs([[7, 8], [9]], [[5], [6, 6]])
    >>> source_BS, target_BT = pairs.gather(np.array([1, 0]), np.array([0, 0]))
    >>> source_BS.tolist(), target_BT.tolist(), pairs.lengths.tolist()
    ([[9, 2, 0], [7, 8, 2]], [[1, 6, 6, 2], [1, 5, 2, 0]], [[3, 2], [2, 3]])
    """

    pads_to_longest = True  # batches differ in shape

    def __init__(
        self,
        sources: Sequence[Sequence[int] | Tokens],
        targets: Sequence[Sequence[int] | Tokens],
        *,
        max_source_tokens: int | None = None,
        max_target_tokens: int | None = None,
    ) -> None:
        if len(sources) != len(targets):
            raise DataError(
                "pairs-incomplete",
                problem=f"{len(sources)} sources and {len(targets)} targets: each pair needs one of"
                " each",
                sources=len(sources),
                targets=len(targets),
            )
        counts = np.empty((len(sources), 2), dtype=np.int64)
        counts[:, 0] = [len(row) + 1 for row in sources]
        counts[:, 1] = [len(row) + 1 for row in targets]
        limits = {"max_source_tokens": max_source_tokens, "max_target_tokens": max_target_tokens}
        fits = np.ones(len(counts), dtype=bool)
        for side, (name, limit) in enumerate(limits.items()):
            if limit is not None:
                if limit < 2:
                    raise out_of_range(name, limit, "2 tokens or more, with the end token")
                fits &= counts[:, side] <= limit
        self.lengths: NDArray[np.int64] = counts[fits]
        self.left_out = int(len(fits) - fits.sum())
        if self.left_out and not fits.any():
            shortest = [int(length) for length in counts.min(axis=0)]
            raise DataError(
                "pairs-all-too-long",
                problem=f"all {self.left_out} pairs are longer than max_source_tokens ="
                f" {max_source_tokens} and max_target_tokens = {max_target_tokens}",
                reason=f"the shortest sentences have {shortest[0]} and {shortest[1]} tokens",
                remedy="raise the limits",
                pairs=self.left_out,
                shortest=shortest,
            )
        indices = np.flatnonzero(fits).tolist()
        self.source, self.source_starts = _flat([sources[index] for index in indices], before=[])
        self.target, self.target_starts = _flat(
            [targets[index] for index in indices], before=[BEGIN]
        )

    @classmethod
    def from_text(
        cls,
        pairs: Sequence[tuple[str, str]],
        *,
        source: SubwordTokenizer,
        target: SubwordTokenizer,
        max_source_tokens: int | None = None,
        max_target_tokens: int | None = None,
    ) -> Self:
        """Encode sentence pairs with one tokenizer per side."""
        return cls(
            source.encode_all([one for one, _ in pairs]),
            target.encode_all([other for _, other in pairs]),
            max_source_tokens=max_source_tokens,
            max_target_tokens=max_target_tokens,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(self, ids: Ids, _epochs: Ids) -> tuple[Tensor, Tensor]:
        """Return source tokens (B, S) and target tokens (B, T) of the pairs `ids`, int64; epochs
        are ignored.
        """
        source_BS = _rows(self.source, self.source_starts, ids)
        target_BT = _rows(self.target, self.target_starts, ids)
        return source_BS, target_BT

    def stored(self, ids: Ids) -> Batch:
        """Return the bytes of each pair's unpadded tokens, and all target tokens."""
        rows = []
        targets = []
        for id in ids.tolist():
            source = self.source[self.source_starts[id] : self.source_starts[id + 1]]
            target = self.target[self.target_starts[id] : self.target_starts[id + 1]]
            rows.append(source.tobytes() + target.tobytes())
            targets.append(target)
        if not targets:
            return rows, None
        return rows, np.concatenate(targets).astype(np.int64)

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of pairs and tokens, and a hash of all tokens."""
        digest = sha256()
        for array in (self.source, self.source_starts, self.target, self.target_starts):
            digest.update(array.astype("<i8").tobytes())
        return {
            "samples": len(self),
            "tokens": int(self.lengths.sum()),
            "sha256": digest.hexdigest(),
        }


def _flat(
    rows: Sequence[Sequence[int] | Tokens], *, before: list[int]
) -> tuple[Tokens, NDArray[np.int64]]:
    sequences = [np.array([*before, *row, END], dtype=np.int32) for row in rows]
    tokens = np.concatenate([np.empty(0, np.int32), *sequences])
    starts = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    return tokens, starts


def _rows(flat: Tokens, starts: NDArray[np.int64], ids: Ids) -> Tensor:
    firsts = starts[ids]
    ends = starts[ids + 1]
    places_BT = firsts[:, None] + np.arange((ends - firsts).max(initial=0))
    rows_BT = flat.take(places_BT, mode="clip").astype(np.int64)
    rows_BT[places_BT >= ends[:, None]] = PADDING
    return torch.from_numpy(rows_BT)
