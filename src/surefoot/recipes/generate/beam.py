"""Beam search for the likeliest target of a source with an encoder-decoder.

A target does not depend on the other sources of its batch, except for rounding. Shape suffixes: B
sources, S source tokens, K open hypotheses per source, N candidates per hypothesis, C candidates
per source, V vocabulary, T target tokens so far.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surefoot.errors import DataError, out_of_range
from surefoot.models.seq2seq import PADDING, Decoding, Seq2Seq
from surefoot.recipes.generate.sampling import logits_not_finite
from surefoot.seeding import untouched
from surefoot.tokenizers.subwords import BEGIN, END
from surefoot.train.evaluate import evaluation_mode


@dataclass(frozen=True)
class Hypothesis:
    """A target sequence: tokens without begin and end, and the log-probability divided by the
    length penalty.

    >>> max(
    ...     [Hypothesis([5], score=-0.9), Hypothesis([5, 6], score=-0.7)], key=lambda one: one.score
    ... )
    Hypothesis(tokens=[5, 6], score=-0.7)
    """

    tokens: list[int]
    score: float


def twice_and_ten(source_tokens: int) -> int:
    """Return 2 n + 10, the default limit of target tokens for n source tokens; both counts include
    the end token.

    >>> twice_and_ten(12)
    34
    """
    return 2 * source_tokens + 10


def penalty(length: int, alpha: float) -> float:
    """Return the length penalty of a target of `length` tokens (end included), ((5 + length) / 6)
    ** alpha.

    A score is a log-probability divided by this penalty (equation 14 of
    https://arxiv.org/abs/1609.08144). With alpha = 0, scores favor short targets. A larger alpha
    favors longer targets.

    >>> penalty(1, 0.6), round(penalty(7, 1.0), 6)
    (1.0, 2.0)
    """
    return float(((5 + length) / 6) ** alpha)


def beam_search(
    model: Seq2Seq,
    sources: Sequence[Sequence[int]],
    *,
    beam_size: int = 5,
    length_penalty: float = 0.6,
    max_new_tokens_fn: Callable[[int], int] = twice_and_ten,
    batch_size: int = 64,
) -> list[Hypothesis]:
    """Search for the likeliest target of each source; return one hypothesis per source, in order.
    Sources include the end token.

    A beam of 1 is greedy search. Up to `batch_size` sources of similar length are searched
    together. For a source of n tokens, the target has at most `max_new_tokens_fn(n)` tokens, by
    default 2 n + 10. Training modes and global generators are restored. The host waits for the
    device at every token.

    >>> from surefoot.models import Seq2SeqConfig
    >>> model = Seq2Seq(
    ...     Seq2SeqConfig(
    ...         encoder_layers=1, decoder_layers=1, heads=2, width=8, mlp_width=16, vocab_size=10
    ...     )
    ... )
    >>> len(beam_search(model, [[5, 6, 2], [7, 2]], beam_size=2))
    2
    """
    if batch_size < 1:
        raise out_of_range("batch_size", batch_size, "1 or more sources, searched at once")
    for index, source in enumerate(sources):
        if not len(source):
            raise DataError(
                "source-empty",
                problem=f"source {index} is empty",
                reason="it must have at least an end token",
                source=index,
            )
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    hypothesis_of: dict[int, Hypothesis] = {}
    for first in range(0, len(order), batch_size):
        group = order[first : first + batch_size]
        device = model.embedding.weight.device
        rows = [torch.tensor(sources[index], device=device) for index in group]
        source_BS = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
        hypotheses = _search_batch(
            model,
            source_BS,
            beam_size=beam_size,
            length_penalty=length_penalty,
            max_new_tokens_fn=max_new_tokens_fn,
        )
        hypothesis_of |= zip(group, hypotheses, strict=True)
    return [hypothesis_of[index] for index in range(len(sources))]


def _search_batch(
    model: Seq2Seq,
    source_BS: Tensor,
    *,
    beam_size: int = 5,
    length_penalty: float = 0.6,
    max_new_tokens_fn: Callable[[int], int] = twice_and_ten,
) -> list[Hypothesis]:
    # Each step extends the `beam_size` open hypotheses of a source by every token. The best
    # extensions that end in END are finished, and the best other extensions stay open. The search
    # of a source stops after `beam_size` finished hypotheses, at the limit of tokens, or if no open
    # hypothesis can win. Without a finished hypothesis, the best open hypothesis is returned.
    if beam_size < 1:
        raise out_of_range("beam_size", beam_size, "1 (greedy search) or more hypotheses")
    if not 0 <= length_penalty < math.inf:
        raise out_of_range(
            "length_penalty",
            length_penalty,
            "0 (none) or more, such as 0.6; a larger value favors longer outputs",
        )
    limits = []
    for source_tokens in (source_BS != PADDING).sum(dim=1).tolist():
        limit = min(max_new_tokens_fn(source_tokens), model.shape.context)
        limits.append(max(1, limit))
    with torch.no_grad(), untouched(), evaluation_mode([model]):
        search = _Search(model, source_BS, limits, beam_size=beam_size, alpha=length_penalty)
        while search.alive:
            search.lengthen()
    return [best for best in search.best if best is not None]  # `lengthen` has set every entry


class _Search:
    def __init__(
        self, model: Seq2Seq, source_BS: Tensor, limits: list[int], *, beam_size: int, alpha: float
    ) -> None:
        self.beam_size = beam_size
        self.alpha = alpha
        self.limits = limits
        self.decoding = Decoding(model, source_BS, hypotheses=1, max_tokens=max(limits))
        self.alive = list(range(len(limits)))
        self.tokens_BKT = torch.full((len(limits), 1, 1), BEGIN, device=source_BS.device)
        self.scores_BK = torch.zeros((len(limits), 1), device=source_BS.device)  # log-probabilities
        self.ended = [0] * len(limits)
        self.best: list[Hypothesis | None] = [None] * len(limits)

    def lengthen(self) -> None:
        length = self.tokens_BKT.shape[2]  # with the new token, without the begin token
        scores_BC, parents_BC, tokens_BC = self._candidates()
        ends_BC = tokens_BC == END
        candidates = ends_BC.shape[1]
        # of the candidates that end, only those among the best `beam_size` are finished
        is_best_C = torch.arange(candidates, device=ends_BC.device) < self.beam_size
        ended_scores_BC = scores_BC.masked_fill(~(ends_BC & is_best_C), -math.inf)
        self._end(length, ended_scores_BC, parents_BC)
        # the best of the others stay open
        open_scores_BC = scores_BC.masked_fill(ends_BC, -math.inf)
        self.scores_BK, chosen_BK = open_scores_BC.topk(min(self.beam_size, candidates))
        parents_BK = parents_BC.gather(1, chosen_BK)
        tokens_BK = tokens_BC.gather(1, chosen_BK)
        parents_BKT = parents_BK[:, :, None].expand(-1, -1, self.tokens_BKT.shape[2])
        before_BKT = self.tokens_BKT.gather(1, parents_BKT)
        self.tokens_BKT = torch.cat([before_BKT, tokens_BK[:, :, None]], dim=2)

        going_on = []
        best_open_B = self.scores_BK[:, 0].tolist()
        for row, (source, open_score) in enumerate(zip(self.alive, best_open_B, strict=True)):
            best = self.best[source]
            limit = self.limits[source]
            # log-probabilities only fall, and the penalty is largest at the maximal length
            may_win = best is None or open_score / penalty(limit, self.alpha) > best.score
            if length == limit and best is None:
                tokens = self.tokens_BKT[row, 0, 1:].tolist()
                self.best[source] = Hypothesis(tokens, open_score / penalty(length, self.alpha))
            elif length < limit and self.ended[source] < self.beam_size and may_win:
                going_on.append(row)
        self.alive = [self.alive[row] for row in going_on]
        if going_on:
            rows_B = torch.tensor(going_on, device=parents_BK.device)
            self.scores_BK = self.scores_BK[rows_B]
            self.tokens_BKT = self.tokens_BKT[rows_B]
            self.decoding.select(rows_B, parents_BK[rows_B])

    def _candidates(self) -> tuple[Tensor, Tensor, Tensor]:
        # 2 K extensions per source, best first: at most K of them end, so K stay open
        logits_BKV = self.decoding.logits(self.tokens_BKT[:, :, -1])
        logits_BKV = logits_BKV.to(torch.promote_types(logits_BKV.dtype, torch.float32))
        total_BK1 = logits_BKV.logsumexp(dim=2, keepdim=True)
        if not total_BK1.isfinite().all():
            raise logits_not_finite(self.tokens_BKT.shape[2])
        logits_BKV[:, :, [PADDING, BEGIN]] = -math.inf
        following = min(2 * self.beam_size, logits_BKV.shape[2])
        top_BKN, tokens_BKN = logits_BKV.topk(following)
        scores_BKN = top_BKN - total_BK1 + self.scores_BK[:, :, None]
        candidates = min(2 * self.beam_size, scores_BKN[0].numel())
        scores_BC, places_BC = scores_BKN.flatten(1).topk(candidates)
        parents_BC = places_BC // following
        tokens_BC = tokens_BKN.flatten(1).gather(1, places_BC)
        return scores_BC, parents_BC, tokens_BC

    def _end(self, length: int, scores_BC: Tensor, parents_BC: Tensor) -> None:
        ended_B = scores_BC.isfinite().sum(dim=1).tolist()
        best_B, places_B = scores_BC.max(dim=1)
        parents_B = parents_BC.gather(1, places_B[:, None])[:, 0].tolist()
        for row, (source, score) in enumerate(zip(self.alive, best_B.tolist(), strict=True)):
            if not ended_B[row]:
                continue
            self.ended[source] += ended_B[row]
            normed = score / penalty(length, self.alpha)
            best = self.best[source]
            if best is None or normed > best.score:
                tokens = self.tokens_BKT[row, parents_B[row], 1:].tolist()
                self.best[source] = Hypothesis(tokens, normed)
