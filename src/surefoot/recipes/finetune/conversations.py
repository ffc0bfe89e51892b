"""Conversations: rows of a file, and their text by a chat template. Imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import surefoot as sf
from surefoot.config.paths import local_path
from surefoot.data.text.files import decode_utf8, open_unpacked
from surefoot.errors import first_line

Message = dict[str, Any]
_ROLES = ("system", "user", "assistant", "tool")
_FORMS = (
    'write {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
    ' or {"instruction": "...", "response": "..."}'
)


@dataclass(frozen=True)
class Conversation:
    """Messages in order, at least one of them an answer, and where they were read.

    `tools` are the definitions that the chat template gets beside the messages. `not_trained` are
    the indices of answers that the loss never counts.
    """

    messages: list[Message]
    where: str
    tools: list[Any] | None = None
    not_trained: frozenset[int] = frozenset()

    @property
    def answers(self) -> list[int]:
        """The indices of the assistant's messages."""
        return [
            index for index, message in enumerate(self.messages) if message["role"] == "assistant"
        ]

    def trained_answers(self, train_on: str) -> list[int]:
        """Return the indices of the messages that the loss counts: "answers", or the "last" one."""
        chosen = self.answers if train_on == "answers" else self.answers[-1:]
        return [index for index in chosen if index not in self.not_trained]


def message_text(message: Message) -> str:
    """Return the text of a message, or its calls of tools as JSON if it has no text."""
    content = message.get("content")
    if content:
        return str(content)
    return json.dumps(message.get("tool_calls"), ensure_ascii=False)


def read_conversations(path: str, *, setting: str) -> list[Conversation]:
    """Read the rows of a .jsonl file, or a gzipped one. Raises `DataError` with the line of a wrong
    row.
    """
    file = local_path(path, setting=setting)
    if not file.is_file():
        raise sf.DataError(
            f"{setting} = {path!r} {'is a directory' if file.is_dir() else 'does not exist'}\n"
            f"  conversations are read from one .jsonl file, with a row per line\n  type --{setting.replace('_', '-')} FILE.jsonl"
        )
    with open_unpacked(file) as opened:
        lines = decode_utf8(opened.read(), str(file)).split("\n")
    rows = [
        Conversation(_messages(line, where := f"{file}, line {number}"), where)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not rows:
        raise sf.DataError(
            f"{file} has no row\n  each line is one conversation, as JSON\n  {_FORMS}"
        )
    return rows


def _messages(line: str, where: str) -> list[Message]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise sf.DataError(
            f"{where}: {line[:60]!r} is not JSON\n  {first_line(problem)}\n  {_FORMS}"
        ) from problem
    match row:
        case {"messages": list(messages)} if messages:
            read = [_message(message, where, nth) for nth, message in enumerate(messages, start=1)]
        case {"instruction": str(instruction), "response": str(response)}:
            more = row.get("input") or ""
            question = (
                f"{instruction}\n\n{more}"
                if isinstance(more, str) and more.strip()
                else instruction
            )
            pair = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": response},
            ]
            read = [_message(message, where, nth) for nth, message in enumerate(pair, start=1)]
        case dict():
            keys = ", ".join(map(repr, row)) or "none"
            why = "needs 'messages' (a list), or 'instruction' and 'response' (texts)"
            raise sf.DataError(f"{where}: a row with the keys {keys}\n  it {why}\n  {_FORMS}")
        case _:
            raise sf.DataError(
                f"{where}: a row that is a {type(row).__name__}: {line[:60]!r}\n  it must be a JSON object\n  {_FORMS}"
            )
    answers = [nth for nth, message in enumerate(read) if message["role"] == "assistant"]
    if not answers or answers[0] == 0:
        which = "begins with an answer" if answers else "has no answer"
        raise sf.DataError(
            f"{where}: the conversation {which}\n  the model learns to answer what comes before\n  {_FORMS}"
        )
    for nth, message in enumerate(read, start=1):
        if message["role"] in ("user", "assistant") and not message["content"].strip():
            raise sf.DataError(
                f"{where}: message {nth}, of the {message['role']}, is empty\n"
                "  the model would learn to answer nothing\n  write its text, or remove the row"
            )
    return read


def _message(message: Any, where: str, nth: int) -> Message:
    match message:
        case {"role": str(role), "content": str(content)} if role in _ROLES:
            try:
                content.encode()
            except UnicodeEncodeError as problem:
                raise sf.DataError(
                    f"{where}: message {nth} has half a surrogate pair: {problem.object[problem.start]!r}\n"
                    "  a tokenizer takes whole characters only\n  remove it"
                ) from problem
            return {"role": role, "content": content}
        case {"role": str(role)} if role not in _ROLES:
            raise sf.DataError(
                f"{where}: message {nth} has the role {role!r}\n  roles are {', '.join(_ROLES)}\n"
                '  write "role": "user" or "assistant"'
            )
    excerpt = json.dumps(message, ensure_ascii=False)[:60]
    raise sf.DataError(
        f"{where}: message {nth} is {excerpt}\n  a message has a 'role' and a 'content', both texts\n  {_FORMS}"
    )


def split_conversations(
    rows: Sequence[Conversation], *, val_fraction: float
) -> tuple[list[Conversation], list[Conversation]]:
    """Return training and validation rows. Rows with the same first user message are in the same
    part, by its hash.

    Raises `DataError` if no row is left for training.
    """
    prompts = sorted(
        {_prompt(row) for row in rows}, key=lambda prompt: sha256(prompt.encode()).digest()
    )
    count = -(-len(prompts) * val_fraction // 1) if val_fraction else 0  # rounded up: at least one
    if count >= len(prompts):
        raise sf.DataError(
            f"{rows[0].where.rpartition(',')[0]} has {len(prompts)} different prompts, and all would be for validation\n"
            f"  data.val_fraction = {val_fraction}, rounded up to whole prompts\n"
            "  add rows, or evaluate nothing: --data.val-fraction 0"
        )
    held_out = set(prompts[: int(count)])
    return [row for row in rows if _prompt(row) not in held_out], [
        row for row in rows if _prompt(row) in held_out
    ]


def _prompt(row: Conversation) -> str:
    return next((message["content"] for message in row.messages if message["role"] == "user"), "")


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    where: str,
    *,
    tools: list[Any] | None = None,
    prompts_answer: bool = False,
) -> str:
    """Return the text of messages by the tokenizer's chat template, with the prompt for an answer
    if `prompts_answer`. The template gets whole messages, and the definitions of `tools`.
    """
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompts_answer
            )
        )
    except Exception as problem:  # templates raise errors of Jinja, and their own
        raise sf.DataError(
            f"{where}: the chat template fails: {first_line(problem) or type(problem).__name__}\n"
            f"  its messages have the roles {', '.join(message['role'] for message in messages)}\n"
            "  change the row, or use another template: --data.template FILE"
        ) from problem
