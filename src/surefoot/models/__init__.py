"""Models as plain `nn.Module`s: nothing in here knows surefoot."""

from surefoot.models.decoding import Decoding
from surefoot.models.gpt import GPT, GPTShape
from surefoot.models.seq2seq import Seq2Seq, Seq2SeqShape

__all__ = ["GPT", "Decoding", "GPTShape", "Seq2Seq", "Seq2SeqShape"]
