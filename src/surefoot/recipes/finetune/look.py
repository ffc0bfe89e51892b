"""What the recipe finetune makes of a path: rows by the chat template, and which of their tokens the
loss counts.
"""

import tempfile
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from surefoot.config.extras import refuse_missing
from surefoot.recipes.data_look import DataPreview, Piece, evenly
from surefoot.recipes.finetune import corpus as texts
from surefoot.recipes.finetune import model_directory, models
from surefoot.recipes.finetune.config import Config
from surefoot.recipes.finetune.template import DEFAULT_TEMPLATE

_END = "<|endoftext|>"
_NO_LIMIT = 1_000_000  # bytes of a row
_LAID_OUT = 500  # rows of training, and of validation


def look(config: Config, *, count: int) -> DataPreview:
    """Read all rows as a new run does, and lay out some hundreds of them. Without a model, its
    tokenizer is one of bytes.
    """
    refuse_missing("the chat template of the recipe finetune", "transformers", "tokenizers")
    facts = []
    config = replace(config, run_dir=None)  # a run that is there already changes nothing
    context = None
    with tempfile.TemporaryDirectory() as scratch:
        if config.model is None:
            facts.append(
                "tokens are bytes, and the template is our own; for those of a model: --model"
            )
            directory = Path(scratch)
            _write_bytes(directory)
            if config.data.max_tokens is None:
                config = replace(config, data=replace(config.data, max_tokens=_NO_LIMIT))
        else:
            directory = model_directory.model_directory(config.model)
            shape = models.model_config(directory / model_directory.CONFIG)
            context = models.context_of(shape)
        tokenizer = texts.load_tokenizer(directory, template=config.data.template)
    corpus = texts.read_corpus(
        config, tokenizer, context=context, default=None, max_rows=max(count, _LAID_OUT)
    )
    rows = evenly(len(corpus.train), count)
    samples = [_pieces(corpus.train, row, tokenizer) for row in rows]
    return DataPreview(corpus.in_words, facts=facts, samples=samples)


def _pieces(dialogues: Any, row: int, tokenizer: Any) -> list[Piece]:
    """Return the text of a row, cut where the loss begins or ends to count."""
    place = slice(int(dialogues.starts[row]), int(dialogues.starts[row + 1]))
    ids = dialogues.tokens[place].tolist()
    is_answer = dialogues.is_answer[place].tolist()
    pieces = []
    for is_target, tokens in groupby(zip(ids, is_answer, strict=True), key=itemgetter(1)):
        text = tokenizer.decode([token for token, _ in tokens])
        pieces.append(Piece(text, is_target=is_target))
    return pieces


def _write_bytes(directory: Path) -> None:
    """Write a tokenizer whose tokens are bytes, so that a mask ends at any character."""
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    from tokenizers import Tokenizer, decoders, pre_tokenizers

    letters = [_END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer_of_transformers = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_END, chat_template=DEFAULT_TEMPLATE
    )
    tokenizer_of_transformers.save_pretrained(directory)
