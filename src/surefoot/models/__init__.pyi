from .gpt import GPT
from .gpt_layers import GPTConfig
from .resnet import ResNet
from .seq2seq import Decoding, Seq2Seq
from .seq2seq_layers import Seq2SeqConfig
from .simple_cnn import SimpleCNN

__all__ = ["GPT", "Decoding", "GPTConfig", "ResNet", "Seq2Seq", "Seq2SeqConfig", "SimpleCNN"]
