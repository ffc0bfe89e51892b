"""What a chat template leaves out of conversations is counted, and so are marks in messages of
users.
"""

from __future__ import annotations

from typing import Any

import pytest

import surefoot as sf
from refused import refused
from stated import numbers_in
from surefoot.recipes.finetune import template_use
from surefoot.recipes.finetune.conversations import render
from surefoot.recipes.finetune.forms import Conversation, RowCounts, conversation_of
from surefoot.recipes.finetune.template_use import lines, unused_by_template, users_with_marks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ m.content or '' }}<|im_end|>\n"
    "{% endfor %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ '### Response:' if m.role == 'assistant' else '### Question:' }}\n"
    "{{ m.content }}\n{% endfor %}"
)
CALL = [{"type": "function", "function": {"name": "w", "arguments": {}}}]
USER = {"role": "user", "content": "a"}


def tokenizer(template: str) -> Any:
    from tokenizers import Tokenizer, models

    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")),
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>", "<|unused|>"],
    )
    fast.chat_template = template
    return fast


def test_fields_that_change_no_text_are_counted() -> None:
    answer = {"role": "assistant", "content": "b", "tool_calls": CALL, "weight": 0, "id": "1"}
    rows = [Conversation([USER, answer], "line 1", tools=CALL)] * 2
    rows.append(Conversation([USER | {"name": "n"}, {"role": "assistant", "content": "b"}], ""))
    expected = {"tools": 2, "tool_calls": 2, "id": 2, "name": 1}
    assert dict(unused_by_template(tokenizer(CHATML), rows)) == expected
    assert dict(unused_by_template(tokenizer(WITH_CALLS), rows)) == {"id": 2, "name": 1}
    (line,) = lines(tokenizer(WITH_CALLS), rows)
    assert line.partition(": ")[2].split(", ") == ["id (2 rows)", "name (1 row)"]


def test_tools_of_a_row_and_of_its_message_are_counted_once() -> None:
    messages = [USER | {"tools": CALL}, {"role": "assistant", "content": "b"}]
    row = Conversation(messages, "line 1", tools=CALL)
    assert dict(unused_by_template(tokenizer(CHATML), [row])) == {"tools": 1}


def test_a_field_that_one_late_row_shows_is_used() -> None:
    """The template names it, so all rows are looked at."""
    template = CHATML + "{% if messages[0].title == 'x' %}x{% endif %}"
    rows = [Conversation([USER | {"title": "y"}, {"role": "assistant", "content": "b"}], "")] * 30
    assert dict(unused_by_template(tokenizer(template), rows)) == {"title": 30}
    rows.append(Conversation([USER | {"title": "x"}, {"role": "assistant", "content": "b"}], ""))
    assert not unused_by_template(tokenizer(template), rows)


def test_an_answer_of_calls_alone_needs_a_template_that_writes_them() -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": CALL}
    answer = {"role": "assistant", "content": "b", "tool_calls": CALL}
    last_only = CHATML + "{{ messages[-1].tool_calls | tojson if messages[-1].tool_calls else '' }}"
    rows = [
        Conversation([USER, answer], "chat.jsonl, line 6"),
        Conversation([USER, calling, USER, {"role": "assistant", "content": "c"}], "line 7"),
    ]
    for template in (CHATML, last_only):
        fields = {"where": "line 7", "key": "tool_calls", "message": 2}
        with refused("template-without-tool-calls", sf.DataError, **fields):
            lines(tokenizer(template), rows)
    assert lines(tokenizer(WITH_CALLS), rows) == []


def test_a_row_of_many_calls_is_written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """With them and without, not for each of its answers."""
    written = list[Any]()
    of_file = template_use.render

    def render(*arguments: Any, **options: Any) -> str:
        written.append(arguments)
        return of_file(*arguments, **options)

    monkeypatch.setattr(template_use, "render", render)
    calling = {"role": "assistant", "content": None, "tool_calls": CALL}
    row = Conversation([USER, calling] * 9, "")
    template_use.refuse_unwritten_calls(tokenizer(WITH_CALLS), [row])
    assert len(written) == 2


def test_a_field_that_the_template_needs_is_used() -> None:
    template = CHATML + "{% if not messages[0].id %}{{ raise_exception('no id') }}{% endif %}"
    rows = [Conversation([USER | {"id": 7}, {"role": "assistant", "content": "b"}], "")]
    assert not unused_by_template(tokenizer(template), rows)


MARKS = {
    "special tokens": (CHATML, ["x <|im_end|>", "<|im_start|>system", "<|unused|> im_start"], 2),
    "marks that are no tokens": (LLAMA_2, ["x [/INST] y", "[INST]", "</s>", "INST user"], 3),
    "lines": (PLAIN, ["Fill in ### Response: here", "Response"], 1),
}


@pytest.mark.parametrize("name", MARKS)
def test_messages_of_users_that_hold_marks_are_counted(name: str) -> None:
    template, texts, expected = MARKS[name]
    rows = [
        Conversation([{"role": role, "content": text}, {"role": "assistant", "content": text}], "")
        for text in texts
        for role in ("user", "system")
    ]
    messages, _ = users_with_marks(tokenizer(template), rows)
    assert messages == expected


def test_the_marks_are_named_with_their_counts() -> None:
    rows = [
        Conversation([{"role": "user", "content": "<|im_end|> <|im_start|>user"}], ""),
        Conversation([{"role": "user", "content": "<|im_end|>"}], ""),
        Conversation([USER], ""),
    ]
    messages, marks = users_with_marks(tokenizer(CHATML), rows)
    assert (messages, dict(marks)) == (2, {"<|im_end|>": 2, "<|im_start|>": 1})
    (line,) = lines(tokenizer(CHATML), rows)
    counted, _, named = line.partition(": ")
    assert numbers_in(counted) == [2]
    assert named.split(", ") == ["<|im_end|>", "<|im_start|>"]


@pytest.mark.parametrize(
    "arguments",
    [
        "m.tool_calls[0].function.arguments | tojson",  # as Qwen 2.5
        "'' + m.tool_calls[0].function.arguments + ''",  # as DeepSeek R1
        "m.tool_calls[0].function.arguments",
    ],
)
def test_arguments_as_texts_of_json_suit_each_template(arguments: str) -> None:
    text = '{"at": "x"}'
    call = {"type": "function", "function": {"name": "w", "arguments": text}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    row = conversation_of({"messages": messages}, "line 1", RowCounts())
    written = "{{ " + arguments + " }}"
    template = (
        f"{{% for m in messages %}}{{% if m.tool_calls %}}{written}{{% endif %}}{{% endfor %}}"
    )
    assert render(tokenizer(template), row.messages, row.where) == text
