"""Translations under way: what an encoder-decoder keeps while its target grows token by token.

The source is encoded once, its keys and values are computed once and stand once for all hypotheses about it; of the target
only the new place is computed. Shapes: B sources, K hypotheses for each, S time of the source, H heads, D channels of a head,
V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from surefoot.models.attention import Cache
from surefoot.models.seq2seq import Seq2Seq
from surefoot.models.seq2seq_blocks import DecoderBlock


class Decoding:
    """Hypotheses (B, K) about source tokens (B, S), which grow by one token each at a time, up to `most` of them.

    In the modes in which the model's parts are: set it to evaluation and switch gradients off, or they are kept.

    >>> import torch
    >>> from surefoot.models.seq2seq import Seq2SeqShape
    >>> model = Seq2Seq(Seq2SeqShape(encoder_layers=1, decoder_layers=1, heads=2, width=8, hidden=16, vocabulary=10))
    >>> decoding = Decoding(model, torch.ones(3, 5, dtype=torch.long), hypotheses=2, most=7)
    >>> decoding.logits(torch.ones(3, 2, dtype=torch.long)).shape
    torch.Size([3, 2, 10])
    """

    def __init__(self, model: Seq2Seq, source_BS: Tensor, *, hypotheses: int, most: int) -> None:
        memory_BSC, self.mask_B11S = model.encoded(source_BS)
        self.model = model
        self.blocks = [block for block in model.decoder if isinstance(block, DecoderBlock)]
        self.memories = [block.cross.keys_values(memory_BSC) for block in self.blocks]
        shape = model.shape
        size = (shape.decoder_layers, len(source_BS) * hypotheses, shape.heads, most, shape.width // shape.heads)
        self.cache = Cache(size, device=memory_BSC.device, dtype=self.memories[0][0].dtype)
        self.hypotheses = hypotheses

    def logits(self, tokens_BK: Tensor) -> Tensor:
        """Take one more token of each hypothesis in; give the logits (B, K, V) of the one after it."""
        place = self.cache.length
        x_BKC = self.model.embedded(tokens_BK.reshape(-1, 1), first=place).view(*tokens_BK.shape, -1)
        rotation = self.model.rotation(place, place + 1)
        for block, (k_BHSD, v_BHSD) in zip(self.blocks, self.memories, strict=True):
            x_BKC = block.after(x_BKC, self.cache, k_BHSD, v_BHSD, self.mask_B11S, rotation)
        logits_BKV: Tensor = self.model.head(self.model.decoder_norm(x_BKC))
        return logits_BKV

    def select(self, sources_B: Tensor, parents_BK: Tensor) -> None:
        """Go on with these of the sources only; each hypothesis of one becomes that in the place of its parent (0 to K - 1)."""
        self.cache.select((sources_B[:, None] * self.hypotheses + parents_BK).flatten())
        self.hypotheses = parents_BK.shape[1]
        if len(sources_B) < len(self.mask_B11S):
            self.mask_B11S = self.mask_B11S[sources_B]
            self.memories = [(k_BHSD[sources_B], v_BHSD[sources_B]) for k_BHSD, v_BHSD in self.memories]
