from .gpt import GPT
from .gpt_layers import GPTShape
from .resnet import ResNet
from .seq2seq import Decoding, Seq2Seq
from .seq2seq_layers import Seq2SeqShape
from .simple_cnn import SimpleCNN

__all__ = ["GPT", "Decoding", "GPTShape", "ResNet", "Seq2Seq", "Seq2SeqShape", "SimpleCNN"]
