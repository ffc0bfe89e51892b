"""What a chat template uses of the conversations, and which messages of users imitate its marks.
Imports no torch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import surefoot as sf
from surefoot.errors import Setting
from surefoot.recipes.finetune.conversations import render
from surefoot.recipes.finetune.forms import CALLS, READ_KEYS, Conversation, by_rows

_SAMPLE = 20  # rows that are looked at for a key that the template does not name
_SAMPLE_OF_NAMED = 1000  # rows, for one that it names
_SHORTEST_MARK = 3  # characters; shorter ones are in every text


def lines(tokenizer: Any, rows: Sequence[Conversation]) -> list[str]:
    """Return what the header of a run says of the template's use of conversations. Raises
    `DataError` for answers that would be learned without their calls of tools.
    """
    refuse_unwritten_calls(tokenizer, rows)
    facts = []
    unused = unused_by_template(tokenizer, rows)
    if unused:
        facts.append(f"fields that the chat template does not write: {by_rows(unused)}")
    messages, marks = users_with_marks(tokenizer, rows)
    if messages:
        plural = "" if messages == 1 else "s"
        facts.append(
            f"{messages:,} message{plural} of users with marks of the chat template:"
            f" {', '.join(marks)}"
        )
    return facts


def unused_by_template(tokenizer: Any, rows: Sequence[Conversation]) -> Counter[str]:
    """Return the number of rows that have a key which changes no text that the chat template
    writes: keys of messages, and `tools`.

    A key is looked at in 20 rows, or in 1,000 if the template has its name.
    """
    with_key = dict[str, list[Conversation]]()
    for row in rows:
        for key in _keys(row):
            with_key.setdefault(key, []).append(row)
    unused = Counter[str]()
    for key, rows_with_key in with_key.items():
        is_named = key in str(tokenizer.chat_template)
        looked_at = rows_with_key[: _SAMPLE_OF_NAMED if is_named else _SAMPLE]
        if not any(_writes(tokenizer, row, key) for row in looked_at):
            unused[key] = len(rows_with_key)
    return unused


def refuse_unwritten_calls(tokenizer: Any, rows: Sequence[Conversation]) -> None:
    """Raise `DataError` for an answer that has only calls of tools, if the chat template does not
    write them: it would be learned without them.
    """
    for row in rows:
        writes = cache(partial(_writes, tokenizer, row))
        for index in row.answers:
            message = row.messages[index]
            calls = [key for key in CALLS if message.get(key)]
            if message.get("content") or not calls:
                continue
            if not any(map(writes, calls)):
                raise sf.DataError(
                    "template-without-tool-calls",
                    problem=f"{row.where}: message {index + 1} has {calls[0]!r} and no text, and"
                    " the chat template writes no such calls",
                    reason="the model would learn to answer nothing",
                    remedy=[
                        "remove the row",
                        ("a template that writes them:", Setting("data.template", "FILE")),
                    ],
                    where=row.where,
                    key=calls[0],
                    message=index + 1,
                )


def users_with_marks(tokenizer: Any, rows: Sequence[Conversation]) -> tuple[int, Counter[str]]:
    """Return how many messages of users hold marks with which the chat template begins or ends a
    turn, and the number of messages with each mark.

    The marks are read in the text of a conversation: lines and special tokens between messages.
    """
    marks = _marks(tokenizer)
    messages = 0
    counts = Counter[str]()
    for row in rows:
        for message in row.messages:
            if message["role"] != "user":
                continue
            marks_there = [mark for mark in marks if mark in message["content"]]
            counts.update(marks_there)
            if marks_there:
                messages += 1
    return messages, counts


def _keys(row: Conversation) -> list[str]:
    keys = list[str]()
    if row.tools is not None:
        keys.append("tools")
    for message in row.messages:
        for key in message:
            if key not in READ_KEYS and key not in keys:
                keys.append(key)
    return keys


def _without(row: Conversation, key: str) -> Conversation:
    if key == "tools" and row.tools is not None:
        return replace(row, tools=None)
    messages = [dict(message) for message in row.messages]
    for message in messages:
        message.pop(key, None)
    return replace(row, messages=messages)


def _writes(tokenizer: Any, row: Conversation, key: str) -> bool:
    """Return True if a key changes the text of a conversation, or is needed for it."""
    text = _text(tokenizer, row)
    try:
        return text != _text(tokenizer, _without(row, key))
    except sf.DataError:
        return True


def _text(tokenizer: Any, row: Conversation) -> str:
    return render(tokenizer, row.messages, row.where, tools=row.tools)


def _marks(tokenizer: Any) -> list[str]:
    """Return what the template writes between the messages of a conversation, in lines, and the
    special tokens of these lines.
    """
    messages = [
        {"role": "user", "content": "first question"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "second question"},
        {"role": "assistant", "content": "second answer"},
    ]
    try:
        text = render(tokenizer, messages, "a conversation")
    except sf.DataError:  # a template that takes other conversations only
        return []
    special = {token.content for token in tokenizer.added_tokens_decoder.values()}
    special |= {*tokenizer.all_special_tokens}
    marks = dict[str, None]()
    contents = [message["content"] for message in messages]
    for piece in _pieces(text, contents)[1:]:  # a system message may stand before the first
        plain = piece
        for token in sorted(special):
            if token in plain:
                marks[token] = None
                plain = plain.replace(token, "\n")
        for line in plain.splitlines():
            mark = line.strip()
            is_name = mark.replace(" ", "").isalnum()  # of a role
            if len(mark) >= _SHORTEST_MARK and not is_name:
                marks[mark] = None
    return list(marks)


def _pieces(text: str, contents: Sequence[str]) -> list[str]:
    """Return what stands before, between and after contents in a text; nothing if one is missing."""
    pieces = []
    for content in contents:
        before, separator, text = text.partition(content)
        if not separator:
            return []
        pieces.append(before)
    return [*pieces, text]
