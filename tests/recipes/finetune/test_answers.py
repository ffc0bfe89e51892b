"""The tokens that a finetune run trains are what the model must write after the prompt that predict
gives it; a template without such a part is refused, and so is one without an end.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import surefoot as sf
from in_one import in_one
from refused import refused
from surefoot.config.behavior import ANSWERS_OF_CHATS
from surefoot.errors import Setting
from surefoot.recipes.finetune import corpus
from surefoot.recipes.finetune import limited as limits
from surefoot.recipes.finetune.config import Data
from surefoot.recipes.finetune.conversations import render, under_limits
from surefoot.recipes.finetune.corpus import _encoded
from surefoot.recipes.finetune.forms import Conversation
from surefoot.recipes.finetune.predict import prompt_tokens, stop_token
from tuned_runs import write_model

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
HEADER = "<|im_start|>assistant\n"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}Assistant:BLANK{{ m.content }}"
    "{{ eos_token }}{% else %}User: {{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:BLANK{% endif %}"
)
QUESTION = {"role": "user", "content": "Is it?"}


def tokenizer_of(kind: str, template: str) -> Any:
    """A tokenizer that counts a blank to the word behind it: GPT-2's, Qwen's, Llama 2's kind."""
    from transformers import PreTrainedTokenizerFast

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    settings: dict[str, Any] = {"vocab_size": 400, "special_tokens": special}
    tokenizer: Any = Tokenizer(models.BPE())
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
        settings["initial_alphabet"] = [*map(chr, range(33, 127)), "\n", "▁"]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, trim_offsets=kind == "trimmed"
        )
        tokenizer.decoder = decoders.ByteLevel()
        settings["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(**settings, show_progress=False)
    texts = ["Is it? Yes No Assistant: Yes User: No", "a Yes No 4 Maybe"]
    tokenizer.train_from_iterator(texts * 9, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = template
    return fast


def conversation(*answers: str, **more: Any) -> Conversation:
    messages: list[dict[str, Any]] = []
    for answer in answers:
        messages += [QUESTION, {"role": "assistant", "content": answer, **more}]
    return Conversation(messages, "line 1")


def encode(tokenizer: Any, *rows: Conversation, **options: Any) -> tuple[Any, list[str]]:
    """Tokens and masks of rows for training, and the notes about them."""
    notes: list[str] = []
    data = Data(path="x", train_on=options.pop("train_on", "answers"))
    encoded, _ = _encoded(rows, tokenizer, data, 256, notes, kind="training", **options)
    return encoded, notes


def trained_texts(tokenizer: Any, *rows: Conversation, **options: Any) -> list[str]:
    """What the loss counts of each row."""
    encoded, _ = encode(tokenizer, *rows, **options)
    texts = []
    for first, last in zip(encoded.starts, encoded.starts[1:], strict=False):
        tokens = encoded.tokens[first:last][encoded.is_answer[first:last]]
        texts.append(tokenizer.decode(tokens))
    return texts


@in_one
@pytest.mark.parametrize("blank", ["", " ", "\n "])
@pytest.mark.parametrize("kind", ["whole", "trimmed", "metaspace"])
def test_the_first_word_of_an_answer_is_trained_behind_the_prompt_of_predict(
    kind: str, blank: str
) -> None:
    """For each kind of tokenizer, whatever the prompt ends with, and whatever an answer begins
    with.
    """
    tokenizer = tokenizer_of(kind, PLAIN.replace("BLANK", blank))
    answers = ["Yes", "No", "4", "\nYes", "a"]
    rows = [conversation(answer) for answer in answers]

    texts = trained_texts(tokenizer, *rows)

    def tokens_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for answer, text, row in zip(answers, texts, rows, strict=True):
        assert text.removesuffix("<|end|>").strip() == answer.strip(), (answer, text)
        assert text.endswith("<|end|>")
        if answer.startswith("\n"):  # joined with the prompt's end, in this row alone
            continue
        # what predict gives the model, followed by what is trained, is the row
        whole = tokens_of(render(tokenizer, row.messages, ""))
        prompt = prompt_tokens(tokenizer, row.messages[:1])
        assert whole[: len(prompt)] == prompt
        if kind != "metaspace":
            assert len(whole) == len(prompt) + len(tokens_of(text))


@pytest.mark.parametrize(("blank", "count"), [(" ", 1), ("", 0)])
def test_a_prompt_that_ends_with_a_blank_is_noted_once(blank: str, count: int) -> None:
    tokenizer = tokenizer_of("whole", PLAIN.replace("BLANK", blank))
    rows = [conversation("Yes"), conversation("No")]
    notes: list[str] = []
    for kind in ("training", "validation"):
        _encoded(rows, tokenizer, Data(path="x"), 64, notes, kind=kind)
    assert len(notes) == count


def test_rows_in_several_blocks_are_trained_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("whole", CHATML)
    rows = [conversation("Yes"), conversation("No", "Maybe"), conversation("4"), conversation("a")]
    in_one_block = trained_texts(tokenizer, *rows)
    monkeypatch.setattr(corpus, "_ROWS_AT_ONCE", 3)
    assert trained_texts(tokenizer, *rows) == in_one_block


def test_an_older_run_trains_the_tokens_that_it_began_with() -> None:
    tokenizer = tokenizer_of("whole", PLAIN.replace("BLANK", " "))
    row = conversation("Yes")

    older, _ = encode(tokenizer, row, behavior=ANSWERS_OF_CHATS - 1)
    newer, _ = encode(tokenizer, row, behavior=ANSWERS_OF_CHATS)

    assert tokenizer.decode(older.tokens[older.is_answer]) == "<|end|>"
    assert tokenizer.decode(newer.tokens[newer.is_answer]) == " Yes<|end|>"
    np.testing.assert_array_equal(older.tokens, newer.tokens)


LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
RIGHT = {
    "Llama 2, which needs no header": LLAMA_2,
    "Mistral, without white space": LLAMA_2.replace(
        " {{ m.content }} {{ eos", "{{ m.content }}{{ eos"
    ),
    "ChatML": CHATML,
    "an empty thought before the last answer": CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
    ),
    "a thought that the prompt opens": CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
    ).replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"),
}


@in_one
@pytest.mark.parametrize("name", RIGHT)
def test_right_templates(name: str) -> None:
    tokenizer = tokenizer_of("whole", RIGHT[name])
    row = conversation("Yes", "No")

    (of_all,) = trained_texts(tokenizer, row)
    (of_last,) = trained_texts(tokenizer, row, train_on="last")

    first_answer, _, end = of_all.partition("No")
    assert "Yes" in first_answer
    assert end
    assert "Yes" not in of_last


OPENED = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
WRONG = {
    "no header in the prompt": (
        CHATML.replace("<|im_start|>assistant\n{% endif %}", "{% endif %}"),
        "template-header-not-in-prompt",
    ),
    "half a header": (
        CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>{% endif %}"),
        "template-header-not-in-prompt",
    ),
    "another header": (
        CHATML.replace("assistant\n{% endif %}", "model\n{% endif %}"),
        "template-prompt-not-in-text",
    ),
    "a thought is opened": (OPENED, "template-opens-thought"),
    "no end": (CHATML.replace("<|im_end|>", ""), "template-without-end"),
    "no end of the last": (
        CHATML.replace("<|im_end|>", "{% if not loop.last %}<|im_end|>{% endif %}"),
        "template-rewrites-answers",
    ),
}


@in_one
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("answers", [("Yes",), ("Yes", "No")])
def test_templates_without_a_right_answer_are_refused(answers: tuple[str, ...], name: str) -> None:
    template, code = WRONG[name]
    if name == "no end of the last" and len(answers) == 1:
        code = "template-without-end"
    with pytest.raises(sf.DataError) as caught:
        trained_texts(tokenizer_of("whole", template), conversation(*answers))
    assert caught.value.code in (code, "template-prompt-not-in-text"), caught.value
    if "end of the last" not in name:
        assert caught.value.code == code
        assert Setting("data.train_on", "last") not in caught.value.remedies


@pytest.mark.parametrize("answers", [("Yes",), ("Yes", "No", "Maybe")])
def test_a_template_may_end_a_whole_text_once_more(answers: tuple[str, ...]) -> None:
    """As Phi-3's does. Also if the conversation ends with a question."""
    tokenizer = tokenizer_of(
        "whole", CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
    )
    row = conversation(*answers)
    ends_with_a_question = Conversation([*row.messages, QUESTION], "line 1")

    (of_all,) = trained_texts(tokenizer, row)
    (of_last,) = trained_texts(tokenizer, row, train_on="last")
    (before_a_question,) = trained_texts(tokenizer, ends_with_a_question)

    end = f"{answers[-1]}<|im_end|>\n<|end|>"
    assert of_all.endswith(end)
    assert of_last.endswith(end)
    assert before_a_question == "".join(f"{answer}<|im_end|>" for answer in answers)


@in_one
@pytest.mark.parametrize("answers", [("Yes",), ("Yes", "No")])
@pytest.mark.parametrize("train_on", ["answers", "last"])
@pytest.mark.parametrize("cure", [CHATML, RIGHT["a thought that the prompt opens"]])
def test_the_cures_of_an_opened_thought_work(
    cure: str, train_on: str, answers: tuple[str, ...]
) -> None:
    """A copy of the template without it, and a template that writes it before answers too."""
    tokenizer = tokenizer_of("whole", cure)
    assert trained_texts(tokenizer, conversation(*answers), train_on=train_on)


def test_answers_that_begin_with_a_thought_need_no_cure() -> None:
    row = conversation("<think>\na</think>\nYes")
    texts = trained_texts(tokenizer_of("whole", OPENED), row)
    assert texts == ["a</think>\nYes<|im_end|>\n"]


def test_the_last_answer_alone_is_the_cure_only_where_it_works() -> None:
    rewrites = CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
    )
    tokenizer = tokenizer_of("whole", rewrites)
    with refused("template-rewrites-answers", sf.DataError, message=2) as caught:
        trained_texts(tokenizer, conversation("Yes", "No"))
    assert caught.value.remedies == (Setting("data.train_on", "last"),)
    text = trained_texts(tokenizer, conversation("Yes", "No"), train_on="last")
    assert text == ["<think>\n\n</think>\n\nNo<|im_end|>\n"]


def test_a_system_message_that_the_template_leaves_out_is_refused() -> None:
    template = CHATML.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"
    )
    tokenizer = tokenizer_of("whole", template)
    assert trained_texts(tokenizer, conversation("Yes"))  # none is there
    row = conversation("Yes")
    with_system = Conversation(
        [{"role": "system", "content": "Be brief."}, *row.messages], "line 2"
    )
    with refused("template-without-system", sf.DataError, where="line 2", message=1):
        trained_texts(tokenizer, row, with_system)


LOOP = "{% for m in messages %}"
LOOP_WITHOUT_TOOLS = "{% for m in messages if m.role != 'tool' %}"
LOOP_OF_LAST_TURN = "{% for m in messages[-2:] %}"
TOOLS_AS_JSON = "{{ m.content | tojson if m.role == 'tool' else m.content }}"
TOOL_RESULT = {"role": "tool", "content": "12 degrees"}
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)


@in_one
@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize(
    ("old", "new", "left_out"),
    [
        ("", "", []),
        ("{{ m.content }}", TOOLS_AS_JSON, []),
        (LOOP, LOOP_WITHOUT_TOOLS, ["1 of the tool"]),
    ],
)
def test_messages_that_the_template_leaves_out_are_noted(
    old: str, new: str, left_out: list[str], template: str
) -> None:
    messages = [*conversation("Yes").messages, TOOL_RESULT, *conversation("No").messages]
    tokenizer = tokenizer_of("whole", template.replace(old, new) if old else template)

    _, notes = encode(tokenizer, Conversation(messages, "line 1"))

    assert [note.rpartition(": ")[2] for note in notes] == left_out


def test_messages_that_a_template_of_the_last_turn_leaves_out_are_noted() -> None:
    tokenizer = tokenizer_of("whole", MARKED.replace(LOOP, LOOP_OF_LAST_TURN))
    messages = [QUESTION, TOOL_RESULT, *conversation("No").messages]

    encoded, notes = encode(tokenizer, Conversation(messages, ""))

    assert "No" in tokenizer.decode(encoded.tokens)
    assert [note.rpartition(": ")[2] for note in notes] == ["1 of the tool"]


# --- marks ----------------------------------------------------------------------------------------


@in_one
@pytest.mark.parametrize("kind", ["whole", "trimmed"])
@pytest.mark.parametrize(
    "template",
    [
        MARKED,
        MARKED.replace("{% generation %}", "{%- generation -%}"),
        MARKED.replace("<|im_start|>assistant\n{% gen", "Assistant: {% gen"),
        MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
    ],
)
def test_marks_of_the_template_are_those_of_transformers(template: str, kind: str) -> None:
    """Also where its prompt is none: it ignores add_generation_prompt."""
    tokenizer = tokenizer_of(kind, template)
    row = conversation("Yes", "No")

    encoded, _ = encode(tokenizer, row)

    expected = tokenizer.apply_chat_template(
        row.messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoded.tokens.tolist() == expected["input_ids"]
    assert encoded.is_answer.astype(int).tolist() == expected["assistant_masks"]


def test_a_comment_on_marks_is_no_mark() -> None:
    tokenizer = tokenizer_of("whole", CHATML + "{# no {% generation %}\nhere #}")
    assert trained_texts(tokenizer, conversation("Yes")) == ["Yes<|im_end|>\n"]


def test_a_row_in_which_nothing_is_marked_is_refused() -> None:
    rarely = MARKED.replace("m.role == 'assistant'", "m.content == 'Yes'")
    with refused("template-marks-nothing", sf.DataError, where="line 1"):
        trained_texts(tokenizer_of("whole", rarely), conversation("Yes"), conversation("No"))


def test_marks_of_some_answers() -> None:
    tokenizer = tokenizer_of("whole", MARKED)
    row = conversation("Yes", "No")
    without_last = Conversation(row.messages, "line 1", not_trained=frozenset({3}))

    assert trained_texts(tokenizer, row) == ["Yes<|im_end|>No<|im_end|>"]
    assert trained_texts(tokenizer, row, train_on="last") == ["No<|im_end|>"]
    assert trained_texts(tokenizer, without_last) == ["Yes<|im_end|>"]


def test_an_answer_with_two_marks_is_refused_where_the_last_answer_is_asked_for() -> None:
    twice = MARKED.replace(
        "{{ m.content }}<|im_end|>{% end",
        "a{% endgeneration %}b{% generation %}{{ m.content }}<|im_end|>{% end",
    )
    with refused("template-marks-unclear", sf.DataError):
        trained_texts(tokenizer_of("whole", twice), conversation("Yes", "No"), train_on="last")


MARKED_WITHOUT_END = MARKED.replace(
    "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
)


@pytest.mark.parametrize(("template", "count"), [(MARKED, 0), (MARKED_WITHOUT_END, 1)])
def test_marks_without_the_end_are_noted(template: str, count: int) -> None:
    _, notes = encode(tokenizer_of("whole", template), conversation("Yes"))
    assert len(notes) == count


# --- a template is a program ----------------------------------------------------------------------

DOUBLED = "{% set ns = namespace(x='a') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
ENDLESS = (
    "{% for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


@in_one
@pytest.mark.parametrize(
    ("template", "limit"),
    [
        (ENDLESS, "time"),
        (DOUBLED, "memory"),
        ("{{ 'a' | center(10 ** 11) }}", "memory"),
        ("{{ 'a' * 10 ** 11 }}", "memory"),
        ("{{ 'a' * 30000000 }}", "memory"),
        ("{{ '%99999999999d' % 1 }}", "memory"),
    ],
)
def test_a_template_has_a_limit_of_time_and_memory(
    template: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.2 if limit == "time" else 60.0)
    tokenizer = tokenizer_of("whole", template)
    with refused("template-over-limit", sf.DataError, where="line 1", limit=limit):
        trained_texts(tokenizer, conversation("Yes"))
    with refused("template-over-limit", sf.DataError, limit=limit):
        stop_token(tokenizer)


def test_the_limit_of_time_is_that_of_each_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows may take longer than one text may."""
    monkeypatch.setattr(limits, "SECONDS", 1.0)
    slow = "{% for a in range(99000) %}{% endfor %}" * 20
    tokenizer = tokenizer_of("whole", slow + CHATML)
    assert len(trained_texts(tokenizer, *[conversation("Yes")] * 12)) == 12


def child_processes() -> str:
    """The numbers of the processes that this one has started."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_results_and_errors_of_the_limited_process() -> None:
    def double(item: int) -> int:
        if item == 3:
            raise error
        return 2 * item

    error = sf.DataError(
        "of-the-row", problem="the third", reason="a", remedy=[Setting("lr", 1), "b"], item=3
    )
    before = child_processes()

    assert limits.limited(double, [1, 2]) == [2, 4]
    with refused("of-the-row", sf.DataError, item=3) as caught:
        limits.limited(double, [1, 2, 3, 4])
    assert caught.value.to_dict() == error.to_dict()
    assert child_processes() == before
    assert not limits.is_inside()


def test_nothing_is_computed_outside_of_the_limits() -> None:
    """A function that fails there and would not end here."""
    this_process = os.getpid()

    def fail_elsewhere(item: int) -> int:
        if os.getpid() != this_process:
            raise LookupError(f"item {item}")
        return item

    with pytest.raises(RuntimeError, match="LookupError: item 1"):
        limits.limited(fail_elsewhere, [1])


def test_a_crash_is_named_by_its_signal() -> None:
    def crash_at_2(item: int) -> int:
        if item == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    with refused("template-process-ended", sf.DataError, where="second", cause="SIGKILL"):
        under_limits(crash_at_2, [1, 2], ["first", "second"])


def test_a_daemonic_process_renders_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker of a pool."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert limits.limited(str, [1, 2]) == ["1", "2"]


def test_the_limited_process_ends_with_its_parent() -> None:
    reader, writer = os.pipe()

    def wait(_: int) -> None:
        os.write(writer, b"x")
        threading.Event().wait()

    parent = os.fork()
    if parent == 0:
        try:
            limits.limited(wait, [1])
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    has_ended, _, _ = select.select([reader], [], [], 10)
    assert has_ended
    assert os.read(reader, 1) == b""  # nobody holds the other end
    os.close(reader)


def test_a_healthy_model_is_trained_as_before(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_model(tmp_path / "base"))
    assert trained_texts(tokenizer, conversation("b", "c"))[0] == "b<|endoftext|>\nc<|endoftext|>\n"
