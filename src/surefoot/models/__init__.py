"""Models as plain `nn.Module`s: nothing in here knows surefoot."""

from surefoot.models.gpt import GPT, GPTShape

__all__ = ["GPT", "GPTShape"]
