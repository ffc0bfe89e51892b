"""Models as plain `nn.Module`s: nothing in here knows surefoot."""

from surefoot.models.decoding import Decoding
from surefoot.models.gpt import GPT, GPTShape
from surefoot.models.resnet import ResNet
from surefoot.models.seq2seq import Seq2Seq, Seq2SeqShape
from surefoot.models.simple_cnn import SimpleCNN

__all__ = ["GPT", "Decoding", "GPTShape", "ResNet", "Seq2Seq", "Seq2SeqShape", "SimpleCNN"]
