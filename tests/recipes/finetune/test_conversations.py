"""Rows of chats: every field is used, or named, or refused, in each form and each kind of file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import surefoot as sf
from refused import refused
from stated import numbers_in
from surefoot.recipes.finetune import conversations
from surefoot.recipes.finetune.conversations import Chats, read_conversations, split_conversations
from surefoot.recipes.finetune.forms import FORMS
from tuned_runs import write_chat

USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
PAIR = [USER, ANSWER]
CALL = [{"type": "function", "function": {"name": "w", "arguments": {"at": "x"}}}]
CALLING = {"role": "assistant", "content": None, "tool_calls": CALL}


def read_path(path: Path, **options: Any) -> Chats:
    return read_conversations(str(path), setting="data.path", **options)


def read(tmp_path: Path, *rows: Any) -> Chats:
    return read_path(write_chat(tmp_path / "chat.jsonl", list(rows)))


def contents(chat: Any) -> list[str]:
    return [message["content"] for message in chat.messages]


def roles(chat: Any) -> list[str]:
    return [message["role"] for message in chat.messages]


# --- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_example_of_each_form_has_this_form(form: Any, tmp_path: Path) -> None:
    chats = read(tmp_path, json.loads(form.example))

    (row,) = chats
    assert roles(row)[-2:] == ["user", "assistant"]
    assert contents(row)[-1] == "4"
    (counts,) = chats.counts.values()
    assert dict(counts.forms) == {form.name: 1}
    assert not counts.unused


SAME_AS_PAIR: dict[str, Any] = {
    "output of Alpaca": {"instruction": "a", "input": "", "output": "b"},
    "ShareGPT": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "ShareGPT with role and content": {"conversations": PAIR},
    "prompt and completion as messages": {"prompt": [USER], "completion": [ANSWER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, ANSWER]},
    "messages as JSON": {"messages": json.dumps(PAIR)},
    "null fields": {"messages": PAIR, "tools": None, "system": None, "instruction": None},
}


@pytest.mark.parametrize("name", SAME_AS_PAIR)
def test_a_usual_form_is_the_conversation_that_it_means(name: str, tmp_path: Path) -> None:
    (row,) = read(tmp_path, SAME_AS_PAIR[name])
    assert row.messages == PAIR
    assert row.tools is None
    assert row.trained_answers("answers") == [1]


@pytest.mark.parametrize("key", ["input", "context"])
def test_a_row_with_an_input_asks_for_both(key: str, tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"instruction": "a", key: "b", "response": "c"})
    assert contents(row) == ["a\n\nb", "c"]


def test_history_and_system_come_before_the_instruction(tmp_path: Path) -> None:
    fields = {"system": "s", "history": [["p", "q"]], "instruction": "a", "output": "b"}
    (row,) = read(tmp_path, fields)
    assert contents(row) == ["s", "p", "q", "a", "b"]
    assert roles(row)[0] == "system"
    assert row.trained_answers("answers") == [2, 4]


def test_system_of_a_row_yields_to_a_system_message(tmp_path: Path) -> None:
    """The key is not used then, and named."""
    message = {"role": "system", "content": "own"}
    with_message = {"messages": [message, *PAIR], "system": "s"}
    without_message = {"messages": PAIR, "system": "s"}

    chats = read(tmp_path, with_message, without_message)

    first, second = chats
    assert first.messages == [message, *PAIR]
    assert second.messages == [{"role": "system", "content": "s"}, *PAIR]
    assert chats.lines()[-1].endswith(": system (1 row)")


TOOLS = [{"type": "function", "function": {"name": "w", "parameters": {}}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["a list", "a text of JSON"])
def test_messages_stay_whole(tools: Any, tmp_path: Path) -> None:
    thinking = ANSWER | {"reasoning_content": "why", "name": "n"}
    result = {"role": "tool", "content": "12", "tool_call_id": "1"}
    messages = [USER, CALLING, result, thinking]

    (row,) = read(tmp_path, {"messages": messages, "tools": tools})

    assert row.messages == messages
    assert row.tools == TOOLS
    assert row.trained_answers("answers") == [1, 3]


CALL_OF_OPENAI = {"name": "w", "arguments": json.dumps({"at": "x"})}
CALLS_OF_OPENAI = [{"type": "function", "function": CALL_OF_OPENAI}]


def says_that_calls_were_texts(chats: Chats) -> bool:
    return any("1 row with calls " in line for line in chats.lines())


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(CALLS_OF_OPENAI, id="arguments"),
        pytest.param(json.dumps(CALLS_OF_OPENAI), id="the list and its arguments"),
        pytest.param(json.dumps(CALL), id="the list"),
    ],
)
def test_calls_as_texts_of_json_are_what_they_say(calls: Any, tmp_path: Path) -> None:
    """As OpenAI writes arguments, and Parquet files whole lists; templates write them as JSON."""
    chats = read(tmp_path, {"messages": [USER, CALLING | {"tool_calls": calls}]})
    assert chats.rows[0].messages == [USER, CALLING]
    assert says_that_calls_were_texts(chats)


def test_arguments_of_an_older_call_are_what_their_text_says(tmp_path: Path) -> None:
    older = {"role": "assistant", "content": None, "function_call": CALL_OF_OPENAI}
    (row,) = read(tmp_path, {"messages": [USER, older]})
    assert row.messages[1]["function_call"] == CALL[0]["function"]


def test_arguments_of_a_call_of_sharegpt_are_what_their_text_says(tmp_path: Path) -> None:
    question = {"from": "human", "value": "a"}
    call = {"from": "function_call", "value": json.dumps(CALL_OF_OPENAI)}
    (row,) = read(tmp_path, {"conversations": [question, call]})
    assert row.messages == [USER, CALLING]


@pytest.mark.parametrize("arguments", ["x", "{x", "21"])
def test_arguments_that_are_no_json_object_stay_as_they_are(arguments: str, tmp_path: Path) -> None:
    message = CALLING | {"function_call": {"name": "w", "arguments": arguments}}
    chats = read(tmp_path, {"messages": [USER, message]})
    assert chats.rows[0].messages[1] == message
    assert not says_that_calls_were_texts(chats)


def test_calls_of_sharegpt_are_calls_of_tools(tmp_path: Path) -> None:
    call = {"from": "function_call", "value": json.dumps(CALL[0]["function"])}
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "a"},
        call,
        {"from": "observation", "value": "12"},
        {"from": "gpt", "value": "b", "weight": 0},
    ]

    (row,) = read(tmp_path, {"conversations": turns})

    assert roles(row) == ["system", "user", "assistant", "tool", "assistant"]
    assert row.messages[2] == CALLING
    assert row.trained_answers("answers") == [2]


def test_the_role_developer_is_system(tmp_path: Path) -> None:
    chats = read(tmp_path, {"messages": [{"role": "developer", "content": "x"}, *PAIR]})
    assert chats.rows[0].messages[0] == {"role": "system", "content": "x"}
    assert any("developer" in line and numbers_in(line) == [1] for line in chats.lines())


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asking", "answering"), [("human", "gpt"), ("user", "model"), ("human", "ai")]
)
@pytest.mark.parametrize("role_key", ["role", "from"])
@pytest.mark.parametrize("text_key", ["content", "value"])
def test_roles_and_keys_of_sharegpt_are_taken_in_any_message(
    asking: str, answering: str, role_key: str, text_key: str, tmp_path: Path
) -> None:
    question = {role_key: asking, text_key: "a"}
    answer = {role_key: answering, text_key: "b"}

    chats = read(tmp_path, {"messages": [question, answer]})

    assert chats.rows[0].messages == PAIR
    is_said = any(f"the role {answering}, written as" in line for line in chats.lines())
    assert is_said is (role_key == "role")


@pytest.mark.parametrize("off", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_an_answer_without_weight_is_not_trained(off: dict[str, Any], tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"messages": [USER, ANSWER | off, USER, ANSWER | {"weight": 1}]})
    assert row.answers == [1, 3]
    assert row.trained_answers("answers") == [3]


@pytest.mark.parametrize("off", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_a_last_answer_without_weight_leaves_none_to_train(
    off: dict[str, Any], tmp_path: Path
) -> None:
    (row,) = read(tmp_path, {"messages": [USER, ANSWER, USER, ANSWER | off]})
    assert row.trained_answers("answers") == [1]
    assert row.trained_answers("last") == []


def test_answers_in_a_prompt_are_not_trained(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"system": "s", "prompt": [*PAIR, USER], "completion": [ANSWER]})
    assert row.answers == [2, 4]
    assert row.trained_answers("answers") == [4]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("weight", "trained_answers"),
    [({"weight": 0}, []), ({"train": False}, []), ({"weight": 1}, [1])],
)
def test_a_weight_of_a_row_is_that_of_its_answers(
    form: Any, weight: dict[str, Any], trained_answers: list[int], tmp_path: Path
) -> None:
    example = json.loads(form.example)
    without_system = {key: value for key, value in example.items() if "system" not in key}

    chats = read(tmp_path, without_system | weight)

    assert chats.rows[0].trained_answers("answers") == trained_answers
    assert not any("nothing uses" in line for line in chats.lines())


def test_a_weight_of_an_answer_comes_before_that_of_its_row(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"messages": [*PAIR, USER, ANSWER | {"weight": 0}], "weight": 1})
    assert row.trained_answers("answers") == [1]


def test_a_weight_that_trains_no_answer_is_named(tmp_path: Path) -> None:
    messages = [USER | {"weight": 1}, ANSWER, USER | {"weight": 0}, ANSWER]
    (counts,) = read(tmp_path, {"messages": messages, "weight": 0.7}).counts.values()
    assert sorted(counts.unused.values()) == [1, 1]
    assert counts.unused["weight"] == 1


# --- what is named --------------------------------------------------------------------------------


def test_keys_that_nothing_uses_are_counted(tmp_path: Path) -> None:
    chats = read(
        tmp_path,
        {"messages": PAIR, "id": 1, "source": "x"},
        {"messages": PAIR, "id": 2, "source": ""},
        {"instruction": "a", "output": "b", "text": "ab"},
    )

    lines = chats.lines()

    assert lines[0] == "2 rows of messages"
    assert numbers_in(lines[1]) == [1]
    assert "(Alpaca)" in lines[1]
    assert lines[2].endswith(": id (2 rows), source (1 row), text (1 row)")


def test_keys_that_an_object_repeats_are_named(tmp_path: Path) -> None:
    question = '{"role": "user", "content": "x", "content": "a"}'
    messages = f"[{question}, {json.dumps(ANSWER)}]"
    lines = [
        f'{{"messages": {messages}}}',
        json.dumps({"messages": messages}),
        f'{{"messages": [], "messages": {messages}}}',
    ]
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join(lines))

    chats = read_path(file)

    assert [row.messages for row in chats] == [PAIR] * 3
    (counts,) = chats.counts.values()
    assert dict(counts.repeated) == {"content": 3, "messages": 1}
    assert any("content (3 times), messages (1 time)" in line for line in chats.lines())


# --- files ----------------------------------------------------------------------------------------


def test_one_json_array_and_a_directory_of_files(tmp_path: Path) -> None:
    place = tmp_path / "chats"
    (place / "deep").mkdir(parents=True)
    (place / "a.json").write_text(json.dumps([{"messages": PAIR}, {"messages": PAIR}], indent=1))
    write_chat(place / "deep" / "B.JSONL", [{"instruction": "a", "output": "b"}])
    (place / "README.md").write_text("about these")
    (place / "dataset_info.json").write_text('{"a": 1}')
    (place / "c.csv").write_text("a,b")

    chats = read_path(place)

    assert [row.messages for row in chats] == [PAIR] * 3
    assert [row.where.rpartition(", ")[2] for row in chats] == ["row 0", "row 1", "line 1"]
    lines = chats.lines()
    assert lines[0] == "2 files"
    assert "a.json: messages" in lines
    assert any(line.startswith("B.JSONL: ") and "(Alpaca)" in line for line in lines)
    assert numbers_in(lines[-1])[:2] == [2, 5]  # files read


def read_files(place: Path, *names: str, reads_val: bool = True, **options: Any) -> Chats:
    """The chats of a directory of files, each of which has one row that asks for its name."""
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        write_chat(place / name, [{"prompt": Path(name).stem, "completion": "b"}])
    return read_path(place, reads_val=reads_val, **options)


def questions(rows: Any) -> set[str]:
    return {contents(row)[0] for row in rows}


@pytest.mark.parametrize(
    ("files", "trained_on"),
    [
        (["data/train-0-of-2.jsonl", "data/test-0-of-1.jsonl"], {"train-0-of-2"}),
        (["chat.jsonl", "more.jsonl", "test.jsonl"], {"chat", "more"}),
        (["train.jsonl", "more.jsonl"], {"train"}),
        (["latest.jsonl", "contest.jsonl"], {"latest", "contest"}),
    ],
)
def test_a_test_part_is_not_trained_on_and_other_files_only_without_a_train_part(
    files: list[str], trained_on: set[str], tmp_path: Path
) -> None:
    """As in `datasets`."""
    chats = read_files(tmp_path, *files)
    assert questions(chats.rows) == trained_on
    assert not chats.held_out


def test_files_of_other_parts_are_counted(tmp_path: Path) -> None:
    chats = read_files(
        tmp_path, "data/train-0-of-2.jsonl", "data/train-1-of-2.jsonl", "data/test-0-of-1.jsonl"
    )
    assert questions(chats.rows) == {"train-0-of-2", "train-1-of-2"}
    assert not chats.held_out
    assert chats.not_read.startswith("read 2 of 3 files; not read: 1 .jsonl")


def test_files_of_a_validation_part_are_held_out(tmp_path: Path) -> None:
    chats = read_files(tmp_path, "Train/a.jsonl", "validation/b.jsonl")
    assert questions(chats.rows) == {"a"}
    assert questions(chats.held_out) == {"b"}
    assert chats.not_read == ""


def test_files_of_a_validation_part_that_is_not_wanted_are_not_read(tmp_path: Path) -> None:
    chats = read_files(tmp_path, "Train/a.jsonl", "dev.jsonl", reads_val=False)
    assert questions(chats.rows) == {"a"}
    assert not chats.held_out
    assert chats.not_read.startswith("read 1 of 2 files")


@pytest.mark.parametrize("files", [["test.jsonl"], ["validation.jsonl", "test/a.jsonl"]])
def test_files_of_other_parts_alone_are_refused(files: list[str], tmp_path: Path) -> None:
    with refused("chats-of-other-parts", sf.DataError):
        read_files(tmp_path, *files)


AS_VAL_PATH: dict[str, Any] = {"part": "val", "reads_val": False}


@pytest.mark.parametrize(
    ("files", "part"),
    [
        (["train.jsonl", "dev.jsonl", "test.jsonl", "more.jsonl"], "dev"),
        (["test.jsonl", "more.jsonl"], "test"),
        (["more.jsonl"], "more"),
        (["train.jsonl", "more.jsonl"], "more"),
    ],
)
def test_val_path_reads_no_files_that_are_named_as_those_for_training(
    files: list[str], part: str, tmp_path: Path
) -> None:
    assert questions(read_files(tmp_path, *files, **AS_VAL_PATH).rows) == {part}


def test_a_val_path_with_files_for_training_alone_is_refused(tmp_path: Path) -> None:
    with refused("chats-of-other-parts", sf.DataError, parts=["training"]):
        read_files(tmp_path, "train.jsonl", **AS_VAL_PATH)


def test_one_value_may_be_a_row_over_several_lines(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": PAIR}, indent=2) + "\n")
    (row,) = read_path(file)
    assert row.messages == PAIR


ONE_LINE = json.dumps({"messages": PAIR})


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        pytest.param(
            '[\n{"messages": []},\n{"messages": [}\n]', "line-not-json", 3, id="in an array"
        ),
        pytest.param(
            f"{ONE_LINE[:-20]}\n{ONE_LINE}\n{ONE_LINE}\n", "line-not-json", 1, id="cut off"
        ),
        pytest.param(
            f"[{ONE_LINE}]\n[{ONE_LINE}]\n", "row-not-an-object", 1, id="an array in each line"
        ),
    ],
)
def test_a_text_that_is_no_row_is_named_by_its_line(
    text: str, code: str, line: int, tmp_path: Path
) -> None:
    file = tmp_path / "chat.json"
    file.write_text(text)
    with refused(code, sf.DataError, where=f"{file}, line {line}"):
        read_path(file)


def test_an_object_that_holds_the_rows_is_no_row(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"data": [{"messages": PAIR}]}, indent=2))
    with refused("row-form-unknown", sf.DataError, keys=["data"]):
        read_path(file)


def test_parquet_has_the_rows_that_json_lines_have(tmp_path: Path) -> None:
    """Arrow writes a null for each field that only other rows have; these are no fields."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    rows = [
        {"messages": [USER, CALLING, {"role": "tool", "content": "1"}, ANSWER], "id": 4},
        {"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER]},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "chat.parquet")

    of_parquet = read_path(tmp_path / "chat.parquet")
    of_lines = read(tmp_path, *rows)

    for row, same_row in zip(of_parquet, of_lines, strict=True):
        assert vars(row) | {"where": ""} == vars(same_row) | {"where": ""}
    assert of_parquet.lines() == of_lines.lines()


def test_the_kind_of_a_file_takes_four_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Parquet file is not read as a text before."""
    file = tmp_path / "chat.parquet"
    file.write_bytes(b"PAR1" + b"x" * 1000)
    left = list[bytes]()

    @contextmanager
    def open_and_note(path: Path) -> Iterator[Any]:
        with path.open("rb") as opened:
            yield opened
            left.append(opened.read())

    monkeypatch.setattr(conversations, "open_unpacked", open_and_note)
    monkeypatch.setattr(
        conversations, "_rows_of_parquet", lambda file: iter([("", {"messages": PAIR})])
    )

    (row,) = read_path(file)

    assert row.messages == PAIR
    assert left == [b"x" * 1000]


@pytest.mark.parametrize("name", ["a.csv", "a.CSV.gz", "a.arrow"])
def test_other_tables_are_refused_by_their_kind(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("prompt,completion\na,b\n")
    with refused("chats-in-another-kind-of-table", sf.DataError, path=tmp_path / name):
        read_path(tmp_path / name)


def test_a_directory_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b")
    with refused("chats-without-rows", sf.DataError, path=tmp_path):
        read_path(tmp_path)


# --- what is refused ------------------------------------------------------------------------------

WRONG_ROWS = {
    '{"messages": [}': ("line-not-json", {}),
    '["a"]': ("row-not-an-object", {}),
    '{"prompt": "a"}': ("row-form-unknown", {"keys": ["prompt"]}),
    '{"messages": []}': ("row-field-of-wrong-type", {"key": "messages"}),
    '{"messages": "hello"}': ("row-field-of-wrong-type", {"key": "messages"}),
    '{"instruction": "a", "response": 3}': ("row-field-of-wrong-type", {"key": "response"}),
    '{"instruction": "a", "input": ["x"], "response": "b"}': (
        "row-field-of-wrong-type",
        {"key": "input"},
    ),
    '{"instruction": "a", "input": 21, "response": "b"}': (
        "row-field-of-wrong-type",
        {"key": "input"},
    ),
    '{"instruction": "a", "history": ["x"], "output": "b"}': (
        "row-field-of-wrong-type",
        {"key": "history"},
    ),
    '{"instruction": "a", "system": {"x": 1}, "output": "b"}': (
        "row-field-of-wrong-type",
        {"key": "system"},
    ),
    '{"prompt": "a", "chosen": "b", "rejected": "c"}': (
        "row-is-a-preference",
        {"keys": ["prompt", "chosen", "rejected"]},
    ),
    '{"chosen": [], "rejected": []}': ("row-is-a-preference", {"keys": ["chosen", "rejected"]}),
    '{"prompt": "a", "completion": "b", "label": false}': ("row-is-a-preference", {}),
    '{"messages": [{"role": "user", "content": "a"}]}': (
        "conversation-without-question-or-answer",
        {},
    ),
    '{"messages": [{"role": "assistant", "content": "a"}]}': (
        "conversation-without-question-or-answer",
        {},
    ),
    '{"messages": [{"role": "bot", "content": "a"}]}': (
        "message-role-unknown",
        {"message": 1, "role": "bot"},
    ),
    '{"messages": [{"role": "user", "content": {"a": 1}}]}': (
        "message-not-understood",
        {"message": 1},
    ),
    '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}': (
        "message-part-not-text",
        {"message": 1},
    ),
    '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}': (
        "message-not-understood",
        {"message": 2},
    ),
    '{"messages": [{"role": "user", "content": "a"}, '
    '{"role": "assistant", "content": "b", "weight": 0.5}]}': (
        "message-weight-not-0-or-1",
        {"message": 2, "key": "weight"},
    ),
    '{"conversations": [{"from": "function_call", "value": "none"}]}': (
        "message-not-understood",
        {"message": 1},
    ),
    '{"instruction": "a", "response": " "}': ("message-empty", {"message": 2}),
    '{"instruction": "a\\ud800", "response": "b"}': (
        "message-with-half-a-character",
        {"message": 1},
    ),
}


@pytest.mark.parametrize("row", WRONG_ROWS)
def test_a_wrong_row_is_named_by_its_line(row: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    good = json.dumps({"instruction": "a", "input": "b", "response": "c"})
    file.write_text(f"{good}\n\n{row}\n")
    code, fields = WRONG_ROWS[row]
    with refused(code, sf.DataError, where=f"{file}, line 3", **fields):
        read_path(file)


# --- runs that began earlier ----------------------------------------------------------------------


def test_a_run_that_began_earlier_reads_the_fields_that_it_read(tmp_path: Path) -> None:
    of_messages = {
        "messages": [USER, ANSWER | {"weight": 0, "tool_calls": CALL}],
        "tools": [],
        "system": "s",
    }
    of_instruction = {
        "instruction": "a",
        "input": ["x"],
        "response": "b",
        "context": "c",
        "history": [["p", "q"]],
    }
    file = write_chat(tmp_path / "chat.jsonl", [of_messages, of_instruction])

    chats = list(read_path(file, uses_all_fields=False))

    assert [row.messages for row in chats] == [PAIR, PAIR]
    assert [row.trained_answers("answers") for row in chats] == [[1], [1]]


def test_a_run_that_began_earlier_takes_the_instruction_where_messages_are_empty(
    tmp_path: Path,
) -> None:
    row = {"messages": [], "instruction": "", "input": "x", "response": "b"}
    file = write_chat(tmp_path / "chat.jsonl", [row])
    (chat,) = read_path(file, uses_all_fields=False)
    assert chat.messages == [{"role": "user", "content": "\n\nx"}, ANSWER]


def test_rows_with_the_same_prompt_are_in_the_same_part(tmp_path: Path) -> None:
    rows = [{"instruction": f"{number // 3}", "response": f"{number}"} for number in range(60)]
    chats = read(tmp_path, *rows)

    training, held_out = split_conversations(chats.rows, val_fraction=0.2)

    assert not questions(training) & questions(held_out)
    assert len(questions(held_out)) == 4
    assert len(training) + len(held_out) == 60


def test_rows_of_a_single_prompt_cannot_be_split(tmp_path: Path) -> None:
    chats = read(tmp_path, *[{"instruction": "0", "response": f"{number}"} for number in range(3)])
    with refused("chats-without-training-rows", sf.DataError, prompts=1):
        split_conversations(chats.rows, val_fraction=0.2)


# --- the law --------------------------------------------------------------------------------------

KEYS = (
    *("system", "system_prompt", "history", "context", "input", "tools", "functions", "weight"),
    *("train", "label", "chosen", "rejected", "reasoning_content", "tool_calls", "name", "id"),
    *("messages", "conversations", "prompt", "completion", "output", "response", "text", "source"),
)
VALUES: tuple[Any, ...] = ("SECRET", ["SECRET"], [["SECRET", "x"]], {"SECRET": 1}, 21, True)


def is_lost(chats: Chats, key: str, value: Any) -> bool:
    """Whether a field of the only row is neither in its conversation nor counted as not used."""
    if key in ("weight", "train") and value is True:  # as without it
        return False
    (chat,) = chats
    (counts,) = chats.counts.values()
    conversation = json.dumps([chat.messages, chat.tools])
    texts_of_field = ("SECRET", json.dumps(value).strip('"'), f'"{key}": ')
    is_kept = any(text in conversation for text in texts_of_field)
    return not is_kept and key not in counts.unused


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_a_row_says_is_kept_or_named_or_refused(form: Any, tmp_path: Path) -> None:
    """For each form, with one more key, at the row and at its answer, of each type."""
    lost = []
    for key, value in product(KEYS, VALUES):
        with_key = [json.loads(form.example)]
        with_key[0][key] = value
        if form.is_list:
            of_answer = json.loads(form.example)
            of_answer[form.keys[0]][-1][key] = value
            with_key.append(of_answer)
        for row in with_key:
            try:
                chats = read(tmp_path, row)
            except sf.DataError:
                continue
            if is_lost(chats, key, value):
                lost.append(row)
    assert lost == []
