"""What the recipe translation makes of a path: pairs, with the special tokens that the model
sees.
"""

from collections.abc import Sequence

from surefoot.recipes.data_look import DataPreview, Piece, evenly
from surefoot.recipes.readers.pairs.files import load_pairs
from surefoot.recipes.translation.config import Config

_LONGER = 3  # times the other side: perhaps no translation
_LONG = 20  # characters; shorter sentences differ by chance


def look(config: Config, *, count: int) -> DataPreview:
    """Read the pairs as a run does. No tokenizer is trained."""
    data = config.data
    pairs = load_pairs(
        str(data.path),
        source=data.source,
        target=data.target,
        val_fraction=data.val_fraction,
        on_empty=data.on_empty,
    )
    test = "no test split" if pairs.test is None else f"{len(pairs.test):,} for the test"
    about = [
        f"pairs of {data.path}, {data.source} to {data.target}",
        f"{len(pairs.train):,} for training, {len(pairs.val):,} for validation, {test}",
        *pairs.notes,
    ]
    samples = []
    for index in evenly(len(pairs.train), count):
        source, target = pairs.train[index]
        prompt = Piece(f"{data.source}: {source}<end>\n{data.target}: <begin>", is_target=False)
        samples.append([prompt, Piece(f"{target}<end>")])
    return DataPreview(about, samples=samples, odd=_odd(pairs.train))


def _odd(pairs: Sequence[tuple[str, str]]) -> list[str]:
    equal = 0
    unlike = 0
    for source, target in pairs:
        shorter, longer = sorted((len(source), len(target)))
        if source == target:
            equal += 1
        if longer > _LONG and longer > _LONGER * shorter:
            unlike += 1
    repeated = len(pairs) - len({*pairs})
    odd = {
        "are equal on both sides": equal,
        f"have one side more than {_LONGER} times as long as the other": unlike,
        "are there twice or more": repeated,
    }
    return [f"{number:,} of {len(pairs):,} pairs {what}" for what, number in odd.items() if number]
