from .decoding import Decoding
from .gpt import GPT, GPTShape
from .resnet import ResNet
from .seq2seq import Seq2Seq, Seq2SeqShape
from .simple_cnn import SimpleCNN

__all__ = ["GPT", "Decoding", "GPTShape", "ResNet", "Seq2Seq", "Seq2SeqShape", "SimpleCNN"]
