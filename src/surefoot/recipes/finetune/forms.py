"""Conversations, and the forms of rows that become one: how each form is recognized. Imports no
torch.

What a row holds is trained on, or the row is refused, or `RowCounts` counts what nothing uses.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import surefoot as sf
from surefoot.data.text_files import not_an_object
from surefoot.errors import first_line

Message = dict[str, Any]
_ROLES = ("system", "user", "assistant", "tool")
_ROLES_OF_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "observation": "tool",
    "function_call": "function_call",
}
_WEIGHTS = ("weight", "train")  # of OpenAI; of axolotl
_SYSTEM = ("system", "system_prompt")
CALLS = ("tool_calls", "function_call")
READ_KEYS = ("role", "content", *_WEIGHTS)  # of a message: not only its template reads them


class Arguments(dict[str, Any]):
    """Arguments of a call, which the data have as the text of a JSON object."""

    def __init__(self, value: dict[str, Any], *, text: str) -> None:
        super().__init__(value)
        self.text = text


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


@dataclass(frozen=True)
class Form:
    """A form of rows: its name, the keys by which it is recognized, and an example."""

    name: str
    keys: tuple[str, ...]
    example: str

    @property
    def is_list(self) -> bool:
        """True if one key holds all messages."""
        return len(self.keys) == 1


# A row has the first of these forms whose keys it has.
FORMS = (
    Form(
        "messages",
        ("messages",),
        '{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}',
    ),
    Form(
        "conversations (ShareGPT)",
        ("conversations",),
        '{"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}',
    ),
    Form(
        "conversation",
        ("conversation",),
        '{"conversation": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}',
    ),
    Form(
        "instruction and output (Alpaca)",
        ("instruction", "output"),
        '{"instruction": "Add.", "input": "2 + 2", "output": "4"}',
    ),
    Form(
        "instruction and response",
        ("instruction", "response"),
        '{"instruction": "Add.", "context": "2 + 2", "response": "4"}',
    ),
    Form(
        "prompt and completion",
        ("prompt", "completion"),
        '{"prompt": "2 + 2?", "completion": "4"}',
    ),
    Form("prompt and response", ("prompt", "response"), '{"prompt": "2 + 2?", "response": "4"}'),
    Form("question and answer", ("question", "answer"), '{"question": "2 + 2?", "answer": "4"}'),
    Form(
        "question and response",
        ("question", "response"),
        '{"system_prompt": "Add.", "question": "2 + 2?", "response": "4"}',
    ),
    Form("query and response", ("query", "response"), '{"query": "2 + 2?", "response": "4"}'),
    Form("input and output", ("input", "output"), '{"input": "2 + 2?", "output": "4"}'),
)
WRITE_ROWS = (
    'write {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
    ' or {"instruction": "...", "output": "..."}'
)


@dataclass
class RowCounts:
    """What the rows of a file hold: rows of each form, rows with a key that nothing uses or that is
    repeated in one object, and rows that were changed on the way to the chat template.
    """

    forms: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)

    def add(self, others: "RowCounts") -> None:
        """Add the counts of other rows."""
        self.forms.update(others.forms)
        self.unused.update(others.unused)
        self.repeated.update(others.repeated)
        self.changed.update(others.changed)

    def parsed(self, text: str) -> Any:
        """Return the value of a JSON text, and count the keys that one of its objects repeats.
        Raises `ValueError` if it is not JSON.

        >>> counts = RowCounts()
        >>> counts.parsed('{"a": 1, "a": 2}'), dict(counts.repeated)
        ({'a': 2}, {'a': 1})
        """

        def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            value = dict(pairs)
            if len(value) < len(pairs):
                times = Counter(key for key, _ in pairs)
                self.repeated.update(key for key in times if times[key] > 1)
            return value

        return json.loads(text, object_pairs_hook=as_object)

    def lines(self) -> list[str]:
        """Return what the header of a run says of these rows."""
        lines = []
        for name, count in self.forms.most_common():
            lines.append(f"{rows_in_words(count)} of {name}")
        for change, count in self.changed.most_common():
            lines.append(f"{rows_in_words(count)} with {change}")
        if self.repeated:
            repeated = []
            for key, count in self.repeated.items():
                plural = "" if count == 1 else "s"
                repeated.append(f"{key} ({count:,} time{plural})")
            lines.append(
                f"keys that one object has twice, of which the last counts: {', '.join(repeated)}"
            )
        if self.unused:
            lines.append(f"keys that nothing uses: {by_rows(self.unused)}")
        return lines


def by_rows(counts: Mapping[str, int]) -> str:
    """Return names with the number of rows of each.

    >>> by_rows({"id": 9, "source": 1})
    'id (9 rows), source (1 row)'
    """
    return ", ".join(f"{name} ({rows_in_words(count)})" for name, count in counts.items())


def rows_in_words(count: int) -> str:
    """Return a number of rows in words.

    >>> rows_in_words(1), rows_in_words(2000)
    ('1 row', '2,000 rows')
    """
    return "1 row" if count == 1 else f"{count:,} rows"


def conversation_of(row: Any, where: str, counts: RowCounts) -> Conversation:
    """Return the conversation of a row, and count its form and what nothing uses of it.

    Raises `DataError` for a row of no known form, and for one whose fields have another type.
    """
    if not isinstance(row, dict):
        raise not_an_object(where, row, remedy=WRITE_ROWS)
    fields = {key: value for key, value in row.items() if value is not None}
    form = _form_of(fields, where)
    of_row = RowCounts(forms=Counter({form.name: 1}))
    if form.is_list:
        used = set(form.keys)
        items = _unpacked(fields, form.keys[0], where, of_row)
        messages = _messages(items, where, of_row)
        trained_from = 0
    else:
        messages, trained_from, used = _of_pair(fields, form, where, of_row)
    tools = None
    if fields.get("tools"):
        used.add("tools")
        tools = _unpacked(fields, "tools", where, of_row) or None
    for key in _SYSTEM:
        if key in fields and (not messages or messages[0]["role"] != "system"):
            used.add(key)
            text = _text(fields, key, where)
            if text.strip():
                messages.insert(0, {"role": "system", "content": text})
                trained_from += 1
    used |= _weigh_answers(messages, fields)
    for key, value in fields.items():
        if key not in used and value not in ("", [], {}):
            of_row.unused[key] = 1
    for message in messages:
        for key in _WEIGHTS:
            if message["role"] != "assistant" and message.get(key):
                of_row.unused[f"{key} of messages that are no answers"] = 1
    counts.add(of_row)
    _refuse_unanswered(messages, where)
    not_trained = _answers_not_trained(messages, trained_from)
    return Conversation(messages, where, tools=tools, not_trained=not_trained)


def message_text(message: Message) -> str:
    """Return the text of a message, or its calls of tools as JSON if it has no text."""
    content = message.get("content")
    if content:
        return str(content)
    return json.dumps(message.get("tool_calls"), ensure_ascii=False)


def with_arguments_as_texts(
    messages: Sequence[Message],
) -> tuple[list[Message], list[Arguments]]:
    """Return messages with the texts of their `Arguments`, and these."""
    arguments = list[Arguments]()

    def as_text(value: Any) -> Any:
        if isinstance(value, Arguments):
            arguments.append(value)
            return value.text
        if isinstance(value, list):
            return [as_text(entry) for entry in value]
        if isinstance(value, dict):
            return {key: as_text(entry) for key, entry in value.items()}
        return value

    return [as_text(message) for message in messages], arguments


def with_fields_of_before(row: Any) -> Any:
    """Return what runs used of a row that began before `FIELDS_OF_CHATS`: role and content of
    messages, or instruction, response and a text as input.
    """
    match row:
        case {"messages": list(messages)} if messages:
            return {"messages": [_role_and_content(message) for message in messages]}
        case {"instruction": str(instruction), "response": str(response)}:
            more = row.get("input")
            is_asked = isinstance(more, str) and bool(more.strip())
            question = f"{instruction}\n\n{more}" if is_asked else instruction
            return {"messages": _question_and_answer(question, response)}
    return row


def _role_and_content(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {key: message[key] for key in ("role", "content") if key in message}


def _form_of(fields: Mapping[str, Any], where: str) -> Form:
    is_pair = "messages" not in fields and {"chosen", "rejected"} <= fields.keys()
    has_label = isinstance(fields.get("label"), bool) and {"prompt", "completion"} <= fields.keys()
    if is_pair or has_label or "kto_tag" in fields:
        keys = ("chosen", "rejected") if is_pair else ("label", "kto_tag")
        named = " and ".join(repr(key) for key in keys if key in fields)
        raise sf.DataError(
            "row-is-a-preference",
            problem=f"{where}: a row of preferences, with {named}",
            reason="finetune learns answers; it does not learn which of two answers is better",
            remedy='keep the preferred answers only: {"prompt": "...", "completion": "..."}',
            where=where,
            keys=list(fields),
        )
    for form in FORMS:
        if all(key in fields for key in form.keys):
            return form
    keys_there = ", ".join(map(repr, fields)) or "none"
    known = [" and ".join(form.keys) for form in FORMS]
    raise sf.DataError(
        "row-form-unknown",
        problem=f"{where}: a row with the keys {keys_there}",
        reason=f"a row has {', or '.join(known)}",
        remedy=WRITE_ROWS,
        where=where,
        keys=list(fields),
    )


def _of_pair(
    fields: Mapping[str, Any], form: Form, where: str, of_row: RowCounts
) -> tuple[list[Message], int, set[str]]:
    """Return messages of a question and an answer, the index from which answers are trained, and
    the keys that were used.
    """
    asked, answered = form.keys
    if isinstance(fields[asked], list) and isinstance(fields[answered], list):
        prompt = _messages(fields[asked], where, of_row)
        completion = _messages(fields[answered], where, of_row, before=len(prompt))
        return prompt + completion, len(prompt), {*form.keys}
    items = list[Message]()
    for turn in _as_list(fields.get("history", [])):
        if not _is_turn(turn):
            raise _wrong_type("history", turn, "a list of [question, answer]", where)
        items += _question_and_answer(*turn)
    question_keys = list(dict.fromkeys((asked, "input", "context")))
    texts = [_text(fields, key, where) for key in question_keys if key in fields]
    question = "\n\n".join(text for text in texts if text.strip())
    answer = _text(fields, answered, where)
    items += _question_and_answer(question, answer)
    return _messages(items, where, of_row), 0, {answered, "history", *question_keys}


def _is_turn(value: Any) -> bool:
    """Return True for a list of two texts."""
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and isinstance(value[0], str) and isinstance(value[1], str)


def _question_and_answer(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _unpacked(fields: Mapping[str, Any], key: str, where: str, of_row: RowCounts) -> list[Any]:
    """Return a field that is a list, or the JSON of one."""
    value = _json_read(fields[key], of_row)
    may_be_empty = key == "tools"
    if not isinstance(value, list) or not (value or may_be_empty):
        raise _wrong_type(key, fields[key], "a list with an entry", where)
    return value


def _text(fields: Mapping[str, Any], key: str, where: str) -> str:
    value = fields[key]
    if not isinstance(value, str):
        raise _wrong_type(key, value, "a text", where)
    return value


def _wrong_type(key: str, value: Any, expected: str, where: str) -> sf.DataError:
    return sf.DataError(
        "row-field-of-wrong-type",
        problem=f"{where}: {key!r} is {_excerpt(value)}, not {expected}",
        reason="it would be left out of what is trained on",
        remedy=f"write {expected} there, or remove it",
        where=where,
        key=key,
    )


def _messages(
    items: Iterable[Any], where: str, of_row: RowCounts, *, before: int = 0
) -> list[Message]:
    return [_message(item, where, nth, of_row) for nth, item in enumerate(items, start=before + 1)]


def _message(item: Any, where: str, nth: int, of_row: RowCounts) -> Message:
    if not isinstance(item, dict):
        raise _not_a_message(item, where, nth)
    message = {key: value for key, value in item.items() if value is not None or key == "content"}
    if "role" not in message and "from" in message:
        message = _of_sharegpt(message, where, nth, of_row)
    elif "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    role = message.get("role")
    if isinstance(role, str) and _ROLES_OF_SHAREGPT.get(role) in _ROLES:
        of_row.changed[f"the role {role}, written as {_ROLES_OF_SHAREGPT[role]}"] = 1
        role = _ROLES_OF_SHAREGPT[role]
        message["role"] = role
    if role == "developer":
        of_row.changed["the role developer, written as system"] = 1
        role = "system"
        message["role"] = role
    if isinstance(role, str) and role not in _ROLES:
        raise sf.DataError(
            "message-role-unknown",
            problem=f"{where}: message {nth} has the role {role!r}",
            reason=f"roles are {', '.join(_ROLES)}, developer, and those of ShareGPT",
            remedy='write "role": "user" or "assistant"',
            where=where,
            message=nth,
            role=role,
        )
    for key in CALLS:
        calls = _calls_read(message.get(key), of_row)
        if calls != message.get(key):
            message[key] = calls
            of_row.changed["calls of tools as texts of JSON, read"] = 1
    if isinstance(message.get("content"), list):
        message["content"] = _joined_parts(message["content"], where, nth)
        of_row.changed["content in text parts, joined"] = 1
    content = message.get("content")
    is_call = content is None and role == "assistant" and _has_calls(message)
    if not isinstance(role, str) or not (isinstance(content, str) or is_call):
        raise _not_a_message(item, where, nth)
    _refuse_halves(message, where, nth)
    _refuse_weight(message, where, nth)
    return message


def _not_a_message(item: Any, where: str, nth: int) -> sf.DataError:
    return sf.DataError(
        "message-not-understood",
        problem=f"{where}: message {nth} is {_excerpt(item)}",
        reason="a message has a 'role' and a 'content', both texts",
        remedy=WRITE_ROWS,
        where=where,
        message=nth,
    )


def _of_sharegpt(message: Message, where: str, nth: int, of_row: RowCounts) -> Message:
    """Return a message of ShareGPT with role and content, and all its other fields."""
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    role = message["from"]
    if isinstance(role, str):
        role = _ROLES_OF_SHAREGPT.get(role, role)
    if role != "function_call":
        return {"role": role, "content": message.get("value"), **others}
    try:
        called = of_row.parsed(message["value"])
    except (ValueError, TypeError, KeyError, RecursionError) as problem:
        raise _not_a_message(message, where, nth) from problem
    calls = [{"type": "function", "function": call} for call in _as_list(called)]
    return {"role": "assistant", "content": None, "tool_calls": calls, **others}


def _calls_read(calls: Any, of_row: RowCounts) -> Any:
    """Return calls of tools, and their arguments, without texts of JSON: OpenAI writes such texts,
    and templates of transformers take objects.
    """
    value = _json_read(calls, of_row)
    if isinstance(value, list):
        return [_calls_read(call, of_row) for call in value]
    if not isinstance(value, dict):
        return value
    calls_read = dict(value)
    if "function" in value:
        calls_read["function"] = _calls_read(value["function"], of_row)
    if "arguments" in value:
        calls_read["arguments"] = _arguments_read(value["arguments"], of_row)
    return calls_read


def _arguments_read(arguments: Any, of_row: RowCounts) -> Any:
    value = _json_read(arguments, of_row)
    if isinstance(arguments, str) and isinstance(value, dict):
        return Arguments(value, text=arguments)
    return value


def _json_read(value: Any, of_row: RowCounts) -> Any:
    """Return the list or object that a text is the JSON of, or else the value itself."""
    if not (isinstance(value, str) and value.lstrip().startswith(("[", "{"))):
        return value
    try:
        return of_row.parsed(value)
    except (ValueError, RecursionError):
        return value


def _has_calls(message: Message) -> bool:
    return any(message.get(key) for key in CALLS)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _joined_parts(parts: list[Any], where: str, nth: int) -> str:
    """Return the texts of a content's parts, joined as chat templates of transformers join them."""
    texts = []
    for part in parts:
        text = part if isinstance(part, str) else None
        if isinstance(part, dict) and part.get("type", "text") in ("text", "input_text"):
            text = part.get("text")
        if not isinstance(text, str):
            raise sf.DataError(
                "message-part-not-text",
                problem=f"{where}: message {nth} has the part {_excerpt(part)}",
                reason="finetune trains on text only",
                remedy='write the part as {"type": "text", "text": "..."}, or remove the row',
                where=where,
                message=nth,
            )
        texts.append(text)
    return "".join(texts)


def _refuse_halves(message: Message, where: str, nth: int) -> None:
    try:
        for value in message.values():
            text = value
            if not isinstance(value, str):
                text = json.dumps(value, ensure_ascii=False, default=str)
            text.encode()
    except UnicodeEncodeError as problem:
        raise sf.DataError(
            "message-with-half-a-character",
            problem=f"{where}: message {nth} has half a surrogate pair:"
            f" {problem.object[problem.start]!r}",
            reason="a tokenizer takes whole characters only",
            remedy="remove it",
            where=where,
            message=nth,
        ) from problem


def _refuse_weight(message: Message, where: str, nth: int) -> None:
    for key in _WEIGHTS:
        if key in message and message[key] not in (0, 1):
            raise sf.DataError(
                "message-weight-not-0-or-1",
                problem=f"{where}: message {nth} has {key!r} = {_excerpt(message[key])}",
                reason="an answer is trained on (1) or not (0)",
                remedy=f'write "{key}": 0 or 1',
                where=where,
                message=nth,
                key=key,
            )


def _answers_not_trained(messages: Sequence[Message], trained_from: int) -> frozenset[int]:
    """Return the indices of answers before `trained_from`, and of those with the weight 0."""
    indices = set[int]()
    for index, message in enumerate(messages):
        has_weight = all(message.get(key, 1) for key in _WEIGHTS)
        is_trained = index >= trained_from and has_weight
        if message["role"] == "assistant" and not is_trained:
            indices.add(index)
    return frozenset(indices)


def _weigh_answers(messages: Sequence[Message], fields: Mapping[str, Any]) -> set[str]:
    """Give the weight of a row to its answers, but for those that are not trained anyway, and
    return the keys that were used.
    """
    used = {key for key in _WEIGHTS if fields.get(key) in (0, 1)}
    for message in messages:
        for key in used:
            if message["role"] == "assistant" and message.get(key, 1):
                message[key] = fields[key]
    return used


def _refuse_unanswered(messages: list[Message], where: str) -> None:
    answers = [nth for nth, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or answers[0] == 0:
        which = "begins with an answer" if answers else "has no answer"
        raise sf.DataError(
            "conversation-without-question-or-answer",
            problem=f"{where}: the conversation {which}",
            reason="the model learns to answer what comes before",
            remedy=WRITE_ROWS,
            where=where,
        )
    for nth, message in enumerate(messages, start=1):
        role = message["role"]
        is_empty = not (message.get("content") or "").strip()
        is_call = role == "assistant" and _has_calls(message)
        if role in ("user", "assistant") and is_empty and not is_call:
            raise sf.DataError(
                "message-empty",
                problem=f"{where}: message {nth}, of the {role}, is empty",
                reason="the model would learn to answer nothing",
                remedy="write its text, or remove the row",
                where=where,
                message=nth,
            )


def _excerpt(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as problem:
        text = f"{type(value).__name__} ({first_line(problem)})"
    return text[:60]
