"""Models as plain `nn.Module`s: nothing in here knows surefoot."""

from surefoot.models.gpt import GPT, GPTShape
from surefoot.models.resnet import ResNet
from surefoot.models.simple_cnn import SimpleCNN

__all__ = ["GPT", "GPTShape", "ResNet", "SimpleCNN"]
