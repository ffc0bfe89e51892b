"""Very long words of a text (DNA, base64, repeated letters), cut before subwords are trained.

The time to train on a word grows with the square of its length. Encoding needs no cut.
"""

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

LONGEST_WORD = 4096  # characters
_BLOCK = LONGEST_WORD // 2
_BLANK = re.compile(r"\s")
_OTHER = re.compile(r"\S")
# a run of white space or of other characters that may hold such a word; a match starts only at the
# beginning of a run
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD + 1},}}|(?<!\s)\s{{{LONGEST_WORD + 1},}}")


def cut_long_words(
    texts: Iterable[str], pre_tokenizer: "tokenizers.pre_tokenizers.PreTokenizer"
) -> Iterator[str]:
    """Yield each text in pieces without words of more than `LONGEST_WORD` characters. Other words
    stay as they are.
    """
    for text in texts:
        begin = 0
        for cut in _cuts(text, pre_tokenizer):
            yield text[begin:cut]
            begin = cut
        yield text[begin:]


def count_long_words(
    texts: Iterable[str], pre_tokenizer: "tokenizers.pre_tokenizers.PreTokenizer"
) -> int:
    """Return the number of words that `cut_long_words` cuts."""
    return sum(1 for text in texts for _ in _long_words(text, pre_tokenizer))


def describe_long_words(
    texts: Iterable[str], pre_tokenizer: "tokenizers.pre_tokenizers.PreTokenizer"
) -> str | None:
    """Return a line about the words that were cut, or None if none was."""
    count = count_long_words(texts, pre_tokenizer)
    if not count:
        return None
    words_were = "word was" if count == 1 else "words were"
    return (
        f"{count:,} {words_were} cut for the training of the tokenizer, longer than"
        f" {LONGEST_WORD:,} characters"
    )


def _cuts(text: str, pre_tokenizer: "tokenizers.pre_tokenizers.PreTokenizer") -> Iterator[int]:
    for first, end in _long_words(text, pre_tokenizer):
        yield from range(first + LONGEST_WORD, end, LONGEST_WORD)


def _long_words(
    text: str, pre_tokenizer: "tokenizers.pre_tokenizers.PreTokenizer"
) -> Iterator[tuple[int, int]]:
    if not _may_hold_long_run(text):
        return
    for run in _LONG_RUN.finditer(text):
        for _, (first, end) in pre_tokenizer.pre_tokenize_str(run[0]):
            if end - first > LONGEST_WORD:
                yield run.start() + first, run.start() + end


def _may_hold_long_run(text: str) -> bool:
    # a long run covers a whole block, and most blocks end the search at their first word
    if len(text) <= LONGEST_WORD:
        return False
    for begin in range(0, len(text) - _BLOCK + 1, _BLOCK):
        end = begin + _BLOCK
        if not (_BLANK.search(text, begin, end) and _OTHER.search(text, begin, end)):
            return True
    return False
