"""Single samples of the recipes in words, for `surefoot replay`: text of tokens, sentences, and a picture in blocks."""

from collections.abc import Callable, Sequence
from typing import Any

_SIDE = 16  # lines of a picture
_SHADES = " ░▒▓█"
_CHARACTERS = 320  # of a text


def text_in_words(tokenizer: Any) -> Callable[[Any], str]:
    """What describes a window of tokens by its text, with the last target; line ends as they are written in Python.

    >>> import torch
    >>> from surefoot.tokenizers.tokenizer import ByteTokenizer
    >>> tokens = torch.tensor([list(b"def f():")])
    >>> text_in_words(ByteTokenizer())((tokens[:, :-1], tokens[:, 1:]))
    "'def f():'"
    """

    def described(batch: Any) -> str:
        inputs_BT, targets_BT = batch
        text = tokenizer.decode([*inputs_BT[0].tolist(), *targets_BT[0, -1:].tolist()])
        return _wrapped(repr(text))

    return described


def pair_in_words(source: Any, target: Any) -> Callable[[Any], str]:
    """What describes a pair by its two sentences, from their tokenizers."""

    def described(batch: Any) -> str:
        source_BS, target_BT = batch
        of_target = _wrapped(target.decode(target_BT[0].tolist()))
        return f"{_wrapped(source.decode(source_BS[0].tolist()))}\n  -> {of_target}"

    return described


def picture_in_words(classes: Sequence[str]) -> Callable[[Any], str]:
    """What describes an image by its shape and class, and draws it in blocks: dark where it is least, white where it is most.

    >>> import torch
    >>> print(picture_in_words(["no", "yes"])((torch.tensor([[[[0.0, 1.0], [0.5, 0.0]]]]), torch.tensor([1]))))
    1 x 2 x 2, yes
      ██
    ▒▒
    """

    def described(batch: Any) -> str:
        images_BCHW, labels_B = batch
        image_HW = images_BCHW[0].float().mean(dim=0)
        height, width = image_HW.shape
        shape = " x ".join(str(size) for size in images_BCHW.shape[1:])
        stride = max(1, -(-max(height, width) // _SIDE))
        small = image_HW[::stride, ::stride]
        finite = small[small.isfinite()]
        low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
        lines = ["".join(_shade(value, low, high) * 2 for value in row).rstrip() for row in small.tolist()]
        return "\n".join([f"{shape}, {classes[int(labels_B[0])]}", *lines])

    return described


def _shade(value: float, low: float, high: float) -> str:
    if not low <= value <= high:  # NaN, or infinity
        return "?"
    place = 0.0 if high == low else (value - low) / (high - low)
    return _SHADES[min(int(place * len(_SHADES)), len(_SHADES) - 1)]


def _wrapped(text: str) -> str:
    shown = text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} ..."
    return "\n".join(shown[place : place + 92] for place in range(0, len(shown), 92))
