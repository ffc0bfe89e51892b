"""Chat templates: which is used, and which parts of a conversation's text are answers. Imports no
torch.
"""

from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.paths import local_path
from surefoot.data.text.files import decode_utf8
from surefoot.recipes.finetune.conversations import render
from surefoot.recipes.finetune.forms import Conversation

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}Assistant: {{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def rendered(
    tokenizer: Any, row: Conversation, *, train_on: str
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation by the tokenizer's chat template, and the start and end of
    each trained answer in it.

    An answer starts after the template's prompt for it, and has the template's end of a message.
    Raises `DataError` if the template fails, or rewrites earlier messages, so that answers have no
    place in the text.
    """
    text = render(tokenizer, row.messages, row.where, tools=row.tools)
    spans = []
    for index in row.trained_answers(train_on):
        earlier = row.messages[:index]
        before = render(tokenizer, earlier, row.where, tools=row.tools, prompts_answer=True)
        until = text
        if index + 1 < len(row.messages):
            until = render(tokenizer, row.messages[: index + 1], row.where, tools=row.tools)
        if not (text.startswith(before) and text.startswith(until) and len(before) < len(until)):
            cure = (
                "--data.train-on last"
                if train_on == "answers" and len(row.answers) > 1
                else "--data.template FILE"
            )
            raise sf.DataError(
                f"{row.where}: the chat template writes message {index + 1} otherwise within the conversation than at its end\n"
                "  so the text has no part that is the answer as the model would write it\n"
                f"  type {cure}"
            )
        spans.append((len(before), len(until)))
    return text, spans


def template_of(tokenizer: Any, file: str | None) -> str:
    """Return the chat template of a file, or else of the tokenizer, or else `DEFAULT_TEMPLATE`."""
    if file is not None:
        path = local_path(file, setting="data.template")
        try:
            return decode_utf8(Path(path).read_bytes(), file)
        except OSError as problem:
            raise sf.ConfigError(
                f"data.template = {file!r} cannot be read: {problem.strerror}\n  it is a file with a chat template in Jinja\n"
                "  leave it out for the tokenizer's own: --data.template None"
            ) from problem
    own = tokenizer.chat_template
    if isinstance(own, dict):  # several by name
        own = own.get("default")
    if own is not None:
        return str(own)
    if tokenizer.eos_token is None:
        raise sf.ConfigError(
            "the tokenizer has neither a chat template nor an end token (eos_token)\n"
            "  so no answer would have an end\n"
            '  add "eos_token" to its tokenizer_config.json, or type --data.template FILE'
        )
    return DEFAULT_TEMPLATE
