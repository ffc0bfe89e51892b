"""Rows of chats: every field is used, or named, or refused, in each form and each kind of file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
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


def read(tmp_path: Path, *rows: Any, name: str = "chat.jsonl") -> Chats:
    return read_conversations(str(write_chat(tmp_path / name, list(rows))), setting="data.path")


# --- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_example_of_each_form_has_this_form(form: Any, tmp_path: Path) -> None:
    chats = read(tmp_path, json.loads(form.example))
    (row,) = chats
    assert [message["role"] for message in row.messages][-2:] == ["user", "assistant"]
    assert row.messages[-1]["content"] == "4"
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
    assert (row.messages, row.tools, row.trained_answers("answers")) == (PAIR, None, [1])


def test_a_row_with_an_input_asks_for_both(tmp_path: Path) -> None:
    for key in ("input", "context"):
        (row,) = read(tmp_path, {"instruction": "a", key: "b", "response": "c"})
        assert [message["content"] for message in row.messages] == ["a\n\nb", "c"]


def test_history_and_system_come_before_the_instruction(tmp_path: Path) -> None:
    row = {"system": "s", "history": [["p", "q"]], "instruction": "a", "output": "b"}
    (read_row,) = read(tmp_path, row)
    assert [message["content"] for message in read_row.messages] == ["s", "p", "q", "a", "b"]
    assert read_row.messages[0]["role"] == "system"
    assert read_row.trained_answers("answers") == [2, 4]


def test_system_of_a_row_yields_to_a_system_message(tmp_path: Path) -> None:
    """The key is not used then, and named."""
    own = {"role": "system", "content": "own"}
    chats = read(
        tmp_path, {"messages": [own, *PAIR], "system": "s"}, {"messages": PAIR, "system": "s"}
    )
    first, second = chats
    assert first.messages == [own, *PAIR]
    assert second.messages == [{"role": "system", "content": "s"}, *PAIR]
    assert chats.lines()[-1].endswith(": system (1 row)")


def test_messages_stay_whole(tmp_path: Path) -> None:
    thinking = ANSWER | {"reasoning_content": "why", "name": "n"}
    tools = [{"type": "function", "function": {"name": "w", "parameters": {}}}]
    result = {"role": "tool", "content": "12", "tool_call_id": "1"}
    for written in (tools, json.dumps(tools)):
        messages = [USER, CALLING, result, thinking]
        (row,) = read(tmp_path, {"messages": messages, "tools": written})
        assert row.messages == messages
        assert row.tools == tools
        assert row.trained_answers("answers") == [1, 3]


def test_calls_as_texts_of_json_are_what_they_say(tmp_path: Path) -> None:
    """As OpenAI writes arguments, and Parquet files whole lists; templates write them as JSON."""
    text = json.dumps({"at": "x"})
    called = {"name": "w", "arguments": text}
    of_openai = [{"type": "function", "function": called}]
    for written in of_openai, json.dumps(of_openai), json.dumps(CALL):
        chats = read(tmp_path, {"messages": [USER, CALLING | {"tool_calls": written}]})
        assert chats.rows[0].messages == [USER, CALLING]
        assert any("1 row with calls " in line for line in chats.lines())
    older = {"role": "assistant", "content": None, "function_call": called}
    turns = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": json.dumps(called)},
    ]
    (row,) = read(tmp_path, {"messages": [USER, older]})
    assert row.messages[1]["function_call"] == CALL[0]["function"]
    (row,) = read(tmp_path, {"conversations": turns})
    assert row.messages == [USER, CALLING]
    for other in "x", "{x", "21":
        kept = CALLING | {"function_call": {"name": "w", "arguments": other}}
        chats = read(tmp_path, {"messages": [USER, kept]})
        assert chats.rows[0].messages[1] == kept
        assert not any("1 row with calls " in line for line in chats.lines())


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
    assert [message["role"] for message in row.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert row.messages[2] == CALLING
    assert row.trained_answers("answers") == [2]


def test_the_role_developer_is_system(tmp_path: Path) -> None:
    chats = read(tmp_path, {"messages": [{"role": "developer", "content": "x"}, *PAIR]})
    assert chats.rows[0].messages[0] == {"role": "system", "content": "x"}
    assert any("developer" in line and numbers_in(line) == [1] for line in chats.lines())


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("human", "gpt"), ("user", "model"), ("human", "ai")])
@pytest.mark.parametrize("of_role", ["role", "from"])
@pytest.mark.parametrize("of_text", ["content", "value"])
def test_roles_and_keys_of_sharegpt_are_taken_in_any_message(
    names: tuple[str, str], of_role: str, of_text: str, tmp_path: Path
) -> None:
    messages = [
        {of_role: name, of_text: text} for name, text in zip(names, ("a", "b"), strict=True)
    ]
    chats = read(tmp_path, {"messages": messages})
    assert chats.rows[0].messages == PAIR
    is_said = any(f"the role {names[1]}, written as" in line for line in chats.lines())
    assert is_said is (of_role == "role")


@pytest.mark.parametrize("off", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_an_answer_without_weight_is_not_trained(off: dict[str, Any], tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"messages": [USER, ANSWER | off, USER, ANSWER | {"weight": 1}]})
    assert (row.answers, row.trained_answers("answers")) == ([1, 3], [3])
    (row,) = read(tmp_path, {"messages": [USER, ANSWER, USER, ANSWER | off]})
    assert (row.trained_answers("answers"), row.trained_answers("last")) == ([1], [])


def test_answers_in_a_prompt_are_not_trained(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"system": "s", "prompt": [*PAIR, USER], "completion": [ANSWER]})
    assert (row.answers, row.trained_answers("answers")) == ([2, 4], [4])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_weight_of_a_row_is_that_of_its_answers(form: Any, tmp_path: Path) -> None:
    for weight, trained in ({"weight": 0}, []), ({"train": False}, []), ({"weight": 1}, [1]):
        example = {key: val for key, val in json.loads(form.example).items() if "system" not in key}
        chats = read(tmp_path, example | weight)
        assert chats.rows[0].trained_answers("answers") == trained
        assert not any("nothing uses" in line for line in chats.lines())
    (row,) = read(tmp_path, {"messages": [*PAIR, USER, ANSWER | {"weight": 0}], "weight": 1})
    assert row.trained_answers("answers") == [1]


def test_a_weight_that_trains_no_answer_is_named(tmp_path: Path) -> None:
    users = [USER | {"weight": 1}, ANSWER, USER | {"weight": 0}, ANSWER]
    (counts,) = read(tmp_path, {"messages": users, "weight": 0.7}).counts.values()
    assert sorted(counts.unused.values()) == [1, 1]
    assert counts.unused["weight"] == 1


# --- what is named --------------------------------------------------------------------------------


def test_keys_that_nothing_uses_are_counted(tmp_path: Path) -> None:
    rows = [{"messages": PAIR, "id": 1, "source": "x"}, {"messages": PAIR, "id": 2, "source": ""}]
    lines = read(tmp_path, *rows, {"instruction": "a", "output": "b", "text": "ab"}).lines()
    assert lines[0] == "2 rows of messages"
    assert numbers_in(lines[1]) == [1]
    assert "(Alpaca)" in lines[1]
    assert lines[2].endswith(": id (2 rows), source (1 row), text (1 row)")


def test_keys_that_an_object_repeats_are_named(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    inner = (
        '[{"role": "user", "content": "x", "content": "a"}, {"role": "assistant", "content": "b"}]'
    )
    texts = [
        f'{{"messages": {inner}}}',
        json.dumps({"messages": inner}),
        '{"messages": [], ' + f'"messages": {inner}}}',
    ]
    file.write_text("\n".join(texts))
    chats = read_conversations(str(file), setting="data.path")
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
    chats = read_conversations(str(place), setting="data.path")
    assert [row.messages for row in chats] == [PAIR] * 3
    assert [row.where.rpartition(", ")[2] for row in chats] == ["row 0", "row 1", "line 1"]
    lines = chats.lines()
    assert lines[0] == "2 files"
    assert "a.json: messages" in lines
    assert any(line.startswith("B.JSONL: ") and "(Alpaca)" in line for line in lines)
    assert numbers_in(lines[-1])[:2] == [2, 5]  # files read


def test_files_named_as_parts_are_these_parts(tmp_path: Path) -> None:
    """As in `datasets`: a test part is not trained on, and other files only without a train part."""

    def prompts(*names: str, reads_val: bool = True, **part: str) -> tuple[set[Any], set[Any], str]:
        place = tmp_path / str(len([*tmp_path.iterdir()]))
        for name in names:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            write_chat(place / name, [{"prompt": Path(name).stem, "completion": "b"}])
        chats = read_conversations(str(place), setting="data.path", reads_val=reads_val, **part)
        parts = [
            {row.messages[0]["content"] for row in rows} for rows in (chats.rows, chats.held_out)
        ]
        return parts[0], parts[1], chats.not_read

    snapshot = ("data/train-0-of-2.jsonl", "data/train-1-of-2.jsonl", "data/test-0-of-1.jsonl")
    trained, held_out, not_read = prompts(*snapshot)
    assert (trained, held_out) == ({"train-0-of-2", "train-1-of-2"}, set())
    assert not_read.startswith("read 2 of 3 files; not read: 1 .jsonl")
    trained, held_out, not_read = prompts("Train/a.jsonl", "validation/b.jsonl")
    assert (trained, held_out, not_read) == ({"a"}, {"b"}, "")
    trained, held_out, not_read = prompts("Train/a.jsonl", "dev.jsonl", reads_val=False)
    assert (trained, held_out) == ({"a"}, set())
    assert not_read.startswith("read 1 of 2 files")
    assert prompts("chat.jsonl", "more.jsonl", "test.jsonl")[0] == {"chat", "more"}
    assert prompts("train.jsonl", "more.jsonl")[0] == {"train"}
    assert prompts("latest.jsonl", "contest.jsonl")[0] == {"latest", "contest"}
    for names in (["test.jsonl"], ["validation.jsonl", "test/a.jsonl"]):
        with refused("chats-of-other-parts", sf.DataError):
            prompts(*names)
    # data.val_path never reads rows that are named as those for training
    options: Any = {"part": "val", "reads_val": False}
    every = ("train.jsonl", "dev.jsonl", "test.jsonl", "more.jsonl")
    for chosen, expected in (
        (every, "dev"),
        (every[2:], "test"),
        (every[3:], "more"),
        (("train.jsonl", "more.jsonl"), "more"),
    ):
        assert prompts(*chosen, **options)[0] == {expected}
    with refused("chats-of-other-parts", sf.DataError, parts=["training"]):
        prompts("train.jsonl", **options)


def test_one_value_may_be_a_row_over_several_lines(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": PAIR}, indent=2) + "\n")
    (row,) = read_conversations(str(file), setting="data.path")
    assert row.messages == PAIR
    file.write_text(json.dumps({"data": [{"messages": PAIR}]}, indent=2))
    with refused("row-form-unknown", sf.DataError, keys=["data"]):
        read_conversations(str(file), setting="data.path")
    file.write_text('[\n{"messages": []},\n{"messages": [}\n]')
    with refused("line-not-json", sf.DataError, where=f"{file}, line 3"):
        read_conversations(str(file), setting="data.path")
    good = json.dumps({"messages": PAIR})
    file.write_text(f"{good[:-20]}\n{good}\n{good}\n")  # the first line is cut off
    with refused("line-not-json", sf.DataError, where=f"{file}, line 1"):
        read_conversations(str(file), setting="data.path")
    file.write_text(f"[{good}]\n[{good}]\n")
    with refused("row-not-an-object", sf.DataError, where=f"{file}, line 1"):
        read_conversations(str(file), setting="data.path")


def test_parquet_has_the_rows_that_json_lines_have(tmp_path: Path) -> None:
    """Arrow writes a null for each field that only other rows have; these are no fields."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    rows = [
        {"messages": [USER, CALLING, {"role": "tool", "content": "1"}, ANSWER], "id": 4},
        {"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER]},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "chat.parquet")
    chats = read_conversations(str(tmp_path / "chat.parquet"), setting="data.path")
    expected = read(tmp_path, *rows)
    assert [vars(row) | {"where": ""} for row in chats] == [
        vars(row) | {"where": ""} for row in expected
    ]
    assert chats.lines() == expected.lines()


def test_the_kind_of_a_file_takes_four_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Parquet file is not read as a text before."""
    file = tmp_path / "chat.parquet"
    file.write_bytes(b"PAR1" + b"x" * 1000)
    rest = list[bytes]()

    @contextmanager
    def opened(path: Path) -> Iterator[Any]:
        with path.open("rb") as of_file:
            yield of_file
            rest.append(of_file.read())

    monkeypatch.setattr(conversations, "open_unpacked", opened)
    monkeypatch.setattr(
        conversations, "_rows_of_parquet", lambda file: iter([("", {"messages": PAIR})])
    )
    (row,) = read_conversations(str(file), setting="data.path")
    assert (row.messages, rest) == (PAIR, [b"x" * 1000])


@pytest.mark.parametrize("name", ["a.csv", "a.CSV.gz", "a.arrow"])
def test_other_tables_are_refused_by_their_kind(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("prompt,completion\na,b\n")
    with refused("chats-in-another-kind-of-table", sf.DataError, path=tmp_path / name):
        read_conversations(str(tmp_path / name), setting="data.path")


def test_a_directory_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b")
    with refused("chats-without-rows", sf.DataError, path=tmp_path):
        read_conversations(str(tmp_path), setting="data.path")


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
        read_conversations(str(file), setting="data.path")


# --- runs that began earlier ----------------------------------------------------------------------


def test_a_run_that_began_earlier_reads_the_fields_that_it_read(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [USER, ANSWER | {"weight": 0, "tool_calls": CALL}],
            "tools": [],
            "system": "s",
        },
        {
            "instruction": "a",
            "input": ["x"],
            "response": "b",
            "context": "c",
            "history": [["p", "q"]],
        },
    ]
    file = write_chat(tmp_path / "chat.jsonl", rows)
    chats = read_conversations(str(file), setting="data.path", uses_all_fields=False)
    assert [row.messages for row in chats] == [PAIR, PAIR]
    assert [row.trained_answers("answers") for row in chats] == [[1], [1]]
    empty = {"messages": [], "instruction": "", "input": "x", "response": "b"}
    chats = read_conversations(
        str(write_chat(file, [empty])), setting="data.path", uses_all_fields=False
    )
    assert chats.rows[0].messages == [{"role": "user", "content": "\n\nx"}, ANSWER]


def test_rows_with_the_same_prompt_are_in_the_same_part(tmp_path: Path) -> None:
    rows = [{"instruction": f"{number // 3}", "response": f"{number}"} for number in range(60)]
    chats = read(tmp_path, *rows)
    training, held_out = split_conversations(chats.rows, val_fraction=0.2)
    parts = [{row.messages[0]["content"] for row in part} for part in (training, held_out)]
    assert not parts[0] & parts[1]
    assert (len(parts[1]), len(training) + len(held_out)) == (4, 60)
    with refused("chats-without-training-rows", sf.DataError, prompts=1):
        split_conversations(chats.rows[:3], val_fraction=0.2)


# --- the law --------------------------------------------------------------------------------------

KEYS = (
    *("system", "system_prompt", "history", "context", "input", "tools", "functions", "weight"),
    *("train", "label", "chosen", "rejected", "reasoning_content", "tool_calls", "name", "id"),
    *("messages", "conversations", "prompt", "completion", "output", "response", "text", "source"),
)
VALUES: tuple[Any, ...] = ("SECRET", ["SECRET"], [["SECRET", "x"]], {"SECRET": 1}, 21, True)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_a_row_says_is_kept_or_named_or_refused(form: Any, tmp_path: Path) -> None:
    """For each form, with one more key, at the row and at its answer, of each type."""
    lost = []
    for key in KEYS:
        for value in VALUES:
            for is_in_answer in (False, True):
                row = json.loads(form.example)
                if is_in_answer and not form.is_list:
                    continue
                (row[form.keys[0]][-1] if is_in_answer else row)[key] = value
                try:
                    chats = read(tmp_path, row)
                except sf.DataError:
                    continue
                (conversation,) = chats
                kept = json.dumps([conversation.messages, conversation.tools])
                (counts,) = chats.counts.values()
                if key in ("weight", "train") and value is True:  # as without it
                    continue
                is_kept = json.dumps(value).strip('"') in kept or f'"{key}": ' in kept
                if not is_kept and key not in counts.unused and "SECRET" not in kept:
                    lost.append((key, value, is_in_answer))
    assert lost == []
