"""The corpus of a finetune run: the tokenizer with its chat template, and conversations as tokens.
Imports no torch.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.behavior import ANSWERS_OF_CHATS, FIELDS_OF_CHATS
from surefoot.errors import Setting
from surefoot.recipes.finetune import template_use
from surefoot.recipes.finetune.config import Config, Data
from surefoot.recipes.finetune.conversations import (
    read_conversations,
    render,
    split_conversations,
    under_limits,
)
from surefoot.recipes.finetune.forms import Conversation, rows_in_words
from surefoot.recipes.finetune.template import (
    PromptEnds,
    end_texts,
    has_marks,
    marked,
    refuse_without_system,
    rendered,
    roles_left_out,
    template_of,
)
from surefoot.recipes.optimizer_settings import note
from surefoot.recipes.shared_errors import refuse_beyond_context
from surefoot.tracking.run_reader import behavior_in

_MAX_TOKENS = 1024  # by default
_TOKENIZER_BYTES = 200_000_000  # of a file
# rows whose prompts are in memory together: they repeat the turns before each answer
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class ConversationCorpus:
    """Training and validation rows as tokens and as conversations, and the tokenizer."""

    train: Any
    val: Any  # None: nothing is evaluated
    rows: list[Conversation]  # for training
    held_out: list[Conversation]
    tokenizer: Any
    max_tokens: int
    about: str
    notes: list[str] = field(default_factory=list)

    @cached_property
    def in_words(self) -> list[str]:
        val = "none" if self.val is None else f"{len(self.val):,}"
        targets = int(self.train.is_answer.sum())
        return [
            self.about,
            f"{len(self.train):,} conversations for training, {val} for validation, at most"
            f" {self.max_tokens:,} tokens each",
            f"{len(self.train.tokens):,} tokens for training, of which {targets:,} are answers;"
            f" {len(self.tokenizer):,} in the vocabulary",
            *self.notes,
        ]


def conversations(
    data: Data, default: list[Conversation] | None, *, behavior: int
) -> tuple[list[Conversation], list[Conversation], list[str]]:
    """Return training and validation rows, and what the header says of them. `default` are the rows
    without a path.
    """
    held_out = list[Conversation]()
    if data.path is None:
        assert default is not None
        rows = default
        about = ["questions on Python's standard library (data.path is not set)"]
    else:
        reads_val = data.val_path is None and data.val_fraction > 0
        rows, held_out, about = _trained_rows(
            data, data.path, "data.path", behavior, reads_val=reads_val
        )
        about[0] = f"conversations of {data.path}: {about[0]}"
        if data.val_path is not None:
            held_out, _, about_val = _trained_rows(
                data, data.val_path, "data.val_path", behavior, part="val"
            )
            about_val[0] = f"validation by {data.val_path}: {about_val[0]}"
            about += about_val
    if not held_out:
        rows, held_out = split_conversations(rows, val_fraction=data.val_fraction)
    return rows, held_out, about


def _trained_rows(
    data: Data,
    path: str,
    setting: str,
    behavior: int,
    *,
    part: str = "training",
    reads_val: bool = False,
) -> tuple[list[Conversation], list[Conversation], list[str]]:
    """Return the rows of a path that have a trained answer, those held out, and what the header
    says of all.
    """
    chats = read_conversations(
        path,
        setting=setting,
        part=part,
        uses_all_fields=behavior >= FIELDS_OF_CHATS,
        reads_val=reads_val,
    )
    rows = [row for row in chats.rows if row.trained_answers(data.train_on)]
    held_out = [row for row in chats.held_out if row.trained_answers(data.train_on)]
    if not rows:
        raise sf.DataError(
            "chats-without-trained-answers",
            problem=f"none of the {len(chats.rows):,} rows of {path} has an answer that is trained",
            reason="all answers have weight 0, or train false",
            remedy="give an answer the weight 1, or remove these keys",
            path=path,
        )
    about = chats.lines()
    left_out = len(chats.rows) + len(chats.held_out) - len(rows) - len(held_out)
    if left_out:
        about.append(
            f"left out: {rows_in_words(left_out)} without an answer that is trained (weight, train)"
        )
    return rows, held_out, about


def read_corpus(
    config: Config,
    tokenizer: Any,
    *,
    context: int | None,
    default: list[Conversation] | None,
    max_rows: int | None = None,
) -> ConversationCorpus:
    """Return the conversations of a configuration in tokens. `context` is the model's limit, None
    if it has none. Of training and of validation, at most `max_rows` evenly spaced rows are taken.
    """
    data = config.data
    max_tokens = limit(data.max_tokens, context)
    behavior = behavior_in(config.run_dir)
    training, held_out, about = conversations(data, default, behavior=behavior)
    all_rows = training + held_out
    if max_rows is not None:
        training = _evenly(training, max_rows)
        held_out = _evenly(held_out, max_rows)
    rows_used = training + held_out
    if len(rows_used) < len(all_rows):
        about.append(f"{len(rows_used):,} of them are laid out here")

    def lines_of(conversations: list[Conversation]) -> list[str]:
        return template_use.lines(tokenizer, conversations)

    about += under_limits(lines_of, [rows_used], [rows_used[0].where])[0]
    notes = list[str]()
    train, rows = _encoded(
        training, tokenizer, data, max_tokens, notes, kind="training", behavior=behavior
    )
    val = None
    scored = list[Conversation]()
    if held_out:
        val, scored = _encoded(
            held_out, tokenizer, data, max_tokens, notes, kind="validation", behavior=behavior
        )
    for line in notes:
        note(f"note: {line}")
    return ConversationCorpus(
        train, val, rows, scored, tokenizer, max_tokens, "; ".join(about), notes
    )


def _evenly(rows: list[Conversation], count: int) -> list[Conversation]:
    return rows[:: max(1, -(-len(rows) // count))]


def limit(max_tokens: int | None, context: int | None) -> int:
    """Return the maximum number of tokens of a row. Raises `ConfigError` if it exceeds the model's
    context.
    """
    if max_tokens is None:
        return min(context or _MAX_TOKENS, _MAX_TOKENS)
    if context is not None:
        refuse_beyond_context("data.max_tokens", max_tokens, context=context)
    return max_tokens


def _encoded(
    rows: Sequence[Conversation],
    tokenizer: Any,
    data: Data,
    max_tokens: int,
    notes: list[str],
    *,
    kind: str,
    behavior: int | None = None,
) -> tuple[Any, list[Conversation]]:
    from surefoot.recipes.readers.text.dialogues import Dialogues  # imports torch

    encoded = []
    used = []
    cut = 0
    left_out = 0
    tokens_of_rows = _tokens(rows, tokenizer, data, notes, behavior)
    for row, (ids, is_answer) in zip(rows, tokens_of_rows, strict=True):
        is_long = len(ids) > max_tokens
        if is_long and data.on_long == "error":
            raise sf.DataError(
                "conversation-too-long",
                problem=f"{row.where}: the conversation has {len(ids):,} tokens, and the limit is"
                f" {max_tokens:,}",
                reason="data.on_long is error",
                remedy=[
                    "shorten it",
                    ("a larger", Setting("data.max_tokens")),
                    Setting("data.on_long", "cut"),
                ],
                tokens=len(ids),
                max_tokens=max_tokens,
            )
        is_skipped = is_long and data.on_long == "skip"
        if is_skipped or not any(is_answer[1:max_tokens]):
            left_out += 1
            continue
        if is_long:
            cut += 1
        encoded.append((ids[:max_tokens], is_answer[:max_tokens]))
        used.append(row)
    if not encoded:
        raise sf.DataError(
            "conversations-without-answer-in-limit",
            problem=f"none of the {len(rows):,} {kind} conversations has an answer within"
            f" {max_tokens:,} tokens",
            reason="longer ones are cut at their end, or skipped (data.on_long)",
            remedy=[("a larger", Setting("data.max_tokens")), "shorten the prompts"],
            split=kind,
            max_tokens=max_tokens,
        )
    if cut or left_out:
        notes.append(
            f"{cut:,} of {len(rows):,} {kind} conversations are cut at their end to"
            f" {max_tokens:,} tokens, and {left_out:,} are left out (data.max_tokens,"
            " data.on_long)"
        )
    return Dialogues(encoded, padding=padding_of(tokenizer)), used


def _tokens(
    rows: Sequence[Conversation],
    tokenizer: Any,
    data: Data,
    notes: list[str],
    behavior: int | None,
) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield the tokens of each row, and whether each is of a trained answer."""
    is_older = behavior is not None and behavior < ANSWERS_OF_CHATS
    if has_marks(tokenizer) and not is_older:
        yield from _marked_tokens(rows, tokenizer, data, notes)
        return
    ends = end_texts(tokenizer)

    def laid_out(row: Conversation) -> Any:
        return rendered(tokenizer, row, train_on=data.train_on, ends=ends, is_checked=not is_older)

    texts = under_limits(laid_out, rows, [row.where for row in rows])
    _note_messages_left_out(rows, [text for text, _ in texts], notes)
    if is_older:
        yield from _tokens_that_begin_in_answers(texts, tokenizer)
        return
    prompt_ends = PromptEnds(tokenizer)
    for first in range(0, len(texts), _ROWS_AT_ONCE):
        block = texts[first : first + _ROWS_AT_ONCE]
        yield from _tokens_after_prompts(block, tokenizer, prompt_ends)
    if any(prompt_ends.joined.values()):
        note_of_blank = (
            "the chat template's prompt ends with a blank, which this tokenizer joins with the next"
            " word: the blank is trained as a part of the answer, and predict leaves it to the model"
        )
        if note_of_blank not in notes:
            notes.append(note_of_blank)


def _tokens_that_begin_in_answers(
    texts: Sequence[Any], tokenizer: Any
) -> Iterator[tuple[list[int], list[bool]]]:
    for _, spans, ids, offsets in _with_offsets(texts, tokenizer):
        is_answer = []
        for start, _ in offsets:
            is_answer.append(any(first <= start < end for first, end in spans))
        yield ids, is_answer


def _tokens_after_prompts(
    texts: Sequence[Any], tokenizer: Any, prompt_ends: PromptEnds
) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield the tokens of each text. predict gives the tokens of a prompt alone: what follows them
    in the text is the answer.
    """
    prompts = []
    for text, spans in texts:
        for first, _ in spans:
            prompts.append(prompt_ends(text[:first]))
    tokens_of_prompts = iter(tokenizer(prompts, add_special_tokens=False)["input_ids"])
    for _, spans, ids, offsets in _with_offsets(texts, tokenizer):
        is_answer = [False] * len(ids)
        for _, end in spans:
            start = _common(next(tokens_of_prompts), ids)
            for place in range(start, len(ids)):
                if offsets[place][0] >= end:
                    break
                is_answer[place] = True
        yield ids, is_answer


def _with_offsets(texts: Sequence[Any], tokenizer: Any) -> Iterator[Any]:
    """Yield each text with the spans of its answers, its tokens, and their offsets in it."""
    encoded = tokenizer(
        [text for text, _ in texts], add_special_tokens=False, return_offsets_mapping=True
    )
    tokens = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    for (text, spans), (ids, offsets) in zip(texts, tokens, strict=True):
        yield text, spans, ids, offsets


def _marked_tokens(
    rows: Sequence[Conversation], tokenizer: Any, data: Data, notes: list[str]
) -> Iterator[tuple[list[int], list[bool]]]:
    def laid_out(row: Conversation) -> Any:
        text = render(tokenizer, row.messages, row.where, tools=row.tools)
        refuse_without_system(row, text)
        return text, marked(tokenizer, row, train_on=data.train_on)

    texts = under_limits(laid_out, rows, [row.where for row in rows])
    _note_messages_left_out(rows, [text for text, _ in texts], notes)
    encoded = tokenizer([text for text, _ in texts], add_special_tokens=False)["input_ids"]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    trains_end = False
    for ids, (_, is_answer) in zip(encoded, texts, strict=True):
        if not trains_end:
            trained = {token for token, is_one in zip(ids, is_answer, strict=True) if is_one}
            trains_end = not special.isdisjoint(trained)
        yield ids, is_answer
    if not trains_end:
        notes.append(
            "the marks {% generation %} of the chat template leave out the end of an answer, so it"
            " is not trained"
        )


def _note_messages_left_out(
    rows: Sequence[Conversation], texts: Sequence[str], notes: list[str]
) -> None:
    counts = Counter[str]()
    for row, text in zip(rows, texts, strict=True):
        counts.update(roles_left_out(row, text))
    if counts:
        of_roles = ", ".join(f"{count:,} of the {role}" for role, count in counts.most_common())
        notes.append(f"messages that the chat template leaves out: {of_roles}")


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of equal entries at the start of both.

    >>> _common([1, 2, 3], [1, 2, 4, 5]), _common([1, 2], [1, 2, 3]), _common([1, 2, 3], [1, 2])
    (2, 2, 2)
    """
    if list(a) == list(b[: len(a)]):  # almost always, and faster than the loop
        return len(a)
    for place, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return place
    return min(len(a), len(b))


def padding_of(tokenizer: Any) -> int:
    """Return a token for padding, which no other token can see: the tokenizer's own, or else its
    end token, or else 0.
    """
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def load_tokenizer(directory: Path, *, template: str | None) -> Any:
    """Return the tokenizer of a directory with a chat template. Raises `ConfigError` if it cannot
    be read, or has no offsets.
    """
    from transformers import AutoTokenizer

    from surefoot.errors import first_line

    try:
        # without this file, the library builds an empty tokenizer
        if not (directory / "tokenizer_config.json").is_file():
            raise FileNotFoundError("tokenizer_config.json is missing")
        for file in directory.iterdir():
            is_read = file.suffix in (".json", ".model", ".txt", ".jinja") and file.is_file()
            if is_read and file.stat().st_size > _TOKENIZER_BYTES:
                raise OSError(f"{file.name} is larger than 200 MB")
        tokenizer: Any = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as problem:  # the library raises errors of many kinds
        raise sf.ConfigError(
            "model-tokenizer-unreadable",
            problem=f"{directory} has no tokenizer that transformers reads: {first_line(problem)}",
            reason="a model's directory has tokenizer.json and tokenizer_config.json",
            remedy="save them there: tokenizer.save_pretrained(DIR)",
            path=directory,
        ) from problem
    if not tokenizer.is_fast:
        raise sf.ConfigError(
            "tokenizer-without-positions",
            problem=f"the tokenizer of {directory}, {type(tokenizer).__name__}, gives no positions"
            " of its tokens in a text",
            reason="so the loss could not leave out the prompts",
            remedy="convert it to a tokenizer.json, which the library tokenizers reads",
            path=directory,
        )
    tokenizer.chat_template = template_of(tokenizer, template)
    return tokenizer


def tokenizer_files(tokenizer: Any) -> dict[str, str]:
    """Return the files of a tokenizer and its chat template, by name."""
    import tempfile

    files = {}
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        for path in sorted(Path(directory).iterdir()):
            if path.is_file():
                files[path.name] = path.read_text(encoding="utf-8")
    return files
