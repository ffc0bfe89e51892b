"""An error is data: its code and fields are what a program reads, and one renderer makes the
sentence, in keywords, in flags, or as JSON. (2 s)
"""

from __future__ import annotations

import ast
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot as sf
from refused import refused
from surefoot.checkpoint.format import DamageError, damage_error
from surefoot.cli.main import VERBS, main, run_or_exit
from surefoot.cli.options import option_names
from surefoot.cli.word_order import option_kinds
from surefoot.config.setting import checked
from surefoot.errors import (
    Command,
    ConfigError,
    DataError,
    RankLostError,
    Remedy,
    Setting,
    SurefootError,
    error_of_dict,
    name_rank,
    speaking_in_flags,
    together,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
import write_errors


def an_error(**changes: Any) -> ConfigError:
    parts: dict[str, Any] = {
        "problem": "batch_size = 6 cannot be split evenly over 4 ranks",
        "reason": "each rank takes as many micro-batches as the others",
        "remedy": [Setting("batch_size", 4), Setting("batch_size", 8)],
        "setting": "batch_size",
        "value": 6,
    }
    return ConfigError("batch-size-not-divisible", **(parts | changes))


def last_lines(remedy: Any, *, flags: bool) -> list[str]:
    """The lines of a message between its problem and its code."""
    error = an_error(reason=None, remedy=remedy)
    if not flags:
        return [line.strip() for line in str(error).split("\n")[1:-1]]
    with speaking_in_flags():
        return [line.strip() for line in str(error).split("\n")[1:-1]]


def test_a_message_is_the_problem_its_reason_what_to_type_and_the_code() -> None:
    assert str(an_error()).split("\n") == [
        "batch_size = 6 cannot be split evenly over 4 ranks",
        "  each rank takes as many micro-batches as the others",
        "  try: batch_size=4, or batch_size=8",
        "  [batch-size-not-divisible]",
    ]


@pytest.mark.parametrize(
    ("remedy", "in_python", "on_the_command_line"),
    [
        (Setting("batch_size", 4), "try: batch_size=4", "try: --batch-size 4"),
        (Setting("optimizer.lr", 0.1), "try: lr=0.1", "try: --optimizer.lr 0.1"),
        (Setting("precision", "fp32"), 'try: precision="fp32"', "try: --precision fp32"),
        (Setting("ema", None), "try: ema=None", "try: --ema None"),
        (Setting("compile", False), "try: compile=False", "try: --compile False"),
        (Setting("length", "9 steps"), 'try: length="9 steps"', "try: --length '9 steps'"),
        (Setting("run_dir", 'a"b;c'), r'try: run_dir="a\"b;c"', "try: --run-dir 'a\"b;c'"),
        (Setting("order", ""), 'try: order=""', "try: --order ''"),
        (
            Setting("schedule.milestones", ("50%", "75%")),
            "try: milestones=('50%', '75%')",
            "try: --schedule.milestones 50% 75%",
        ),
        (
            Setting("schedule.name", "cosine"),
            "try: schedule=sf.schedules.cosine(...)",
            "try: --schedule.name cosine",
        ),
        (Setting("nproc", 2), "try: --nproc 2", "try: --nproc 2"),
        (("a longer", Setting("length")), "try: a longer length", "try: a longer --length"),
        (Command("surefoot resume RUN"), "type: surefoot resume RUN", "type: surefoot resume RUN"),
        ("leave it out", "leave it out", "leave it out"),
    ],
)
def test_a_remedy_is_a_keyword_in_python_and_a_flag_on_the_command_line(
    remedy: Remedy, in_python: str, on_the_command_line: str
) -> None:
    assert last_lines(remedy, flags=False) == [in_python]
    assert last_lines(remedy, flags=True) == [on_the_command_line]


def test_alternatives_share_a_line_and_sentences_have_their_own() -> None:
    remedies = ["leave it out", Setting("seed", 1), ("another", Setting("ema")), Command("ls")]
    lines = last_lines(remedies, flags=False)
    assert lines == ["leave it out", "type: ls", "try: seed=1, or another ema"]


def test_an_error_with_a_finished_text_has_no_code() -> None:
    error = ConfigError("the disk is full; type df --human-readable")
    assert error.code is None
    assert str(error) == "the disk is full; type df --human-readable"


def test_an_error_that_went_through_a_pickle_is_the_same_error() -> None:
    error = an_error().inside("in the first part")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ConfigError
    assert vars(again) == vars(error)
    assert str(again) == str(error)


def test_an_error_of_a_class_with_its_own_constructor_is_copied_and_pickled(tmp_path: Path) -> None:
    error = damage_error(tmp_path, "hash differs")
    for again in (error.inside("resume"), pickle.loads(pickle.dumps(error))):
        assert type(again) is DamageError
        assert again.damage == error.damage
    assert str(error.inside("resume")) == f"resume: {error}"


def test_fields_are_plain_values() -> None:
    error = an_error(value=[lambda: 1], path=Path("a"), step=3)
    assert pickle.loads(pickle.dumps(error)).fields == error.fields
    assert error.fields["value"][0].startswith("<function")
    assert (error.fields["path"], error.fields["step"]) == (Path("a"), 3)


def test_an_error_with_a_finished_text_takes_nothing_else() -> None:
    with pytest.raises(TypeError):
        ConfigError("the disk is full", path="/x")


def test_numbers_that_json_lacks_are_text() -> None:
    error = an_error(value=float("nan"), table={(1, 2): float("inf")}, path=Path("a"))
    fields = json.loads(json.dumps(error.to_dict(), allow_nan=False))["fields"]
    assert fields["value"] == "nan"
    assert fields["table"] == {"(1, 2)": "inf"}
    assert fields["path"] == "a"


def test_the_place_of_an_error_is_in_its_json() -> None:
    assert an_error().inside("joined").to_dict()["places"] == ["joined"]


def test_a_run_refuses_a_setting_with_the_code_of_its_check() -> None:
    settings: dict[str, Any] = {
        "model": lambda: torch.nn.Linear(1, 1),
        "loss": lambda model, batch: model(batch[0]).mean(),
        "train_data": (torch.ones(8, 1),),
        "batch_size": 4,
        "length": "4 steps",
        "optimizer": sf.optim.sgd(lr=0.1),
        "device": "cpu",
        "console": False,
    }
    too_long = {"schedule": sf.schedules.cosine(warmup="400 steps")}
    with refused("schedule-warmup-too-long", warmup_steps=400, steps=4):
        sf.Run(**settings, **too_long)
    with pytest.raises(ConfigError) as caught:
        sf.Run(**settings, **too_long, tensorboard=True, seed=-1)
    codes = [problem.code for problem in caught.value.problems]
    assert codes == [
        "setting-out-of-range",
        "schedule-warmup-too-long",
        "tensorboard-without-directory",
    ]


def test_places_stand_before_the_problem_the_outermost_first() -> None:
    error = an_error().inside("joined at step 2").inside("schedule")
    assert error.places == ("schedule", "joined at step 2")
    assert str(error).startswith("schedule: joined at step 2: batch_size = 6")
    assert an_error().places == ()


def test_the_place_of_several_problems_stands_before_them() -> None:
    error = together([an_error(), an_error(value=7)]).inside("schedule").inside("rank 1")
    assert str(error) == f"rank 1: schedule: {an_error()}\n{an_error()}"


@pytest.mark.parametrize(
    "remedy",
    [
        None,
        Setting("length"),
        Setting("ema", None),
        Setting("batch_size", 4),
        Command("ls"),
        "leave it out",
        ("a longer", Setting("length")),
        ("add", Setting("ema", None)),
        ("first", Command("surefoot report runs/a"), "then", Setting("ema", None)),
    ],
)
def test_an_error_of_another_process_says_the_same(remedy: Remedy | None) -> None:
    error = an_error(remedy=remedy, step=3).inside("joined").inside("schedule")
    again = error_of_dict(json.loads(json.dumps(error.to_dict())))
    assert type(again) is ConfigError
    assert again.remedies == error.remedies
    assert again.to_dict() == error.to_dict()


def test_several_problems_of_another_process_stay_several() -> None:
    error = together([an_error(), DataError("row-too-long", problem="row 3 is too long", row=3)])
    again = error_of_dict(json.loads(json.dumps(error.to_dict())))
    assert [type(problem) for problem in again.problems] == [ConfigError, DataError]
    assert again.to_dict() == error.to_dict()


@pytest.mark.parametrize("kind", [DataError, RankLostError])
def test_an_error_names_the_rank_that_raised_it(kind: type[SurefootError]) -> None:
    error = kind("a-code", problem="it is wrong")
    name_rank(error, 3)
    # the loss of a rank names the rank that was lost, not the one that noticed it
    assert error.places == (() if kind is RankLostError else ("rank 3",))


def test_all_problems_of_several_checks_keep_their_codes() -> None:
    def refuse(code: str) -> None:
        raise ConfigError(code, problem=f"{code} is wrong", setting=code)

    with pytest.raises(ConfigError) as caught:
        checked(lambda: refuse("first"), lambda: 3, lambda: refuse("second"))
    assert [problem.code for problem in caught.value.problems] == ["first", "second"]
    assert str(caught.value) == "first is wrong\n  [first]\nsecond is wrong\n  [second]"


def test_a_single_problem_of_several_checks_is_that_error() -> None:
    def refuse() -> None:
        raise an_error()

    with pytest.raises(ConfigError) as caught:
        checked(refuse, lambda: 3)
    assert caught.value.code == "batch-size-not-divisible"


def test_an_error_is_an_object_of_json() -> None:
    described = json.loads(json.dumps(an_error().to_dict()))
    assert described.pop("message") == str(an_error())
    assert described == {
        "error": "ConfigError",
        "exit_status": 2,
        "code": "batch-size-not-divisible",
        "problem": "batch_size = 6 cannot be split evenly over 4 ranks",
        "reason": "each rank takes as many micro-batches as the others",
        "remedies": [
            {"setting": "batch_size", "value": 4},
            {"setting": "batch_size", "value": 8},
        ],
        "fields": {"setting": "batch_size", "value": 6},
    }


@pytest.mark.parametrize(
    ("remedy", "expected"),
    [
        (Setting("length"), {"setting": "length"}),
        (Setting("ema", None), {"setting": "ema", "value": None}),
        (Command("ls"), {"command": "ls"}),
        ("leave it out", {"text": "leave it out"}),
        (
            ("a longer", Setting("length")),
            {"text": "a longer length", "parts": ["a longer", {"setting": "length"}]},
        ),
    ],
)
def test_each_kind_of_remedy_in_json(remedy: Remedy, expected: dict[str, Any]) -> None:
    assert an_error(remedy=remedy).to_dict()["remedies"] == [expected]


def on_the_command_line(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


def test_the_command_line_shows_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("plan", "images", "--length", "10 steps", "--schedule.warmup", "10 steps")
    status, text = on_the_command_line(capsys, *words)
    assert status == 2
    assert "--schedule.warmup 5%" in text
    assert text.splitlines()[-1].strip() == "[schedule-warmup-too-long]"


WITH_JSON = [verb for verb in VERBS if any("json" in option_names(k) for k in option_kinds(verb))]


def test_three_commands_answer_in_json() -> None:
    assert WITH_JSON == ["diagnose", "replay", "verify"]


@pytest.mark.parametrize("verb", WITH_JSON)
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["missing"], "run-missing"),
        ([], "argument-missing"),
        (["s3://missing"], "path-is-url"),
    ],
)
def test_with_json_an_error_is_one_object_on_standard_error(
    verb: str,
    words: list[str],
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    status, text = on_the_command_line(capsys, verb, *words, "--json")
    (line,) = text.splitlines()
    described = json.loads(line)
    assert (described["code"], described["exit_status"], status) == (code, 2, 2)
    assert described.keys() >= an_error().to_dict().keys()


def test_with_json_a_lack_of_memory_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    def allocate() -> None:
        raise torch.OutOfMemoryError("no room for 20 GiB")

    with pytest.raises(SystemExit) as ended:
        run_or_exit(allocate, with_traceback=False, as_json=True)
    assert ended.value.code == 6
    assert json.loads(capsys.readouterr().err) == {
        "error": "OutOfMemoryError",
        "exit_status": 6,
        "code": None,
        "message": "no room for 20 GiB",
    }


def test_with_json_several_problems_are_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _, text = on_the_command_line(capsys, "diagnose", "a", "--jsno", "--al", "--json")
    described = json.loads(text)
    assert [problem["code"] for problem in described["problems"]] == 2 * ["setting-unknown"]
    meant = [problem["remedies"] for problem in described["problems"]]
    assert meant == [[{"setting": "json"}], [{"setting": "all"}]]


def test_a_code_belongs_to_one_class_and_says_one_thing() -> None:
    by_code: dict[str, set[tuple[str, str]]] = {}
    for entry in write_errors.entries():
        assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)+", entry.code)
        by_code.setdefault(entry.code, set()).add((entry.kind, entry.message))
    assert len(by_code) > 20
    statuses = write_errors.exit_statuses()
    assert {entry.kind for entry in write_errors.entries()} <= statuses.keys()
    assert statuses["NotPutBackError"] == ConfigError.exit_status
    assert {code: said for code, said in by_code.items() if len(said) > 1} == {}


def test_the_page_has_the_codes_of_the_source() -> None:
    """`python docs/write_errors.py` writes them."""
    page = write_errors.PAGE.read_text(encoding="utf-8")
    assert page == write_errors.with_table(page)
    assert "docs/write_errors.py" in "".join(page.splitlines()[:4])


def test_an_entry_of_the_page_is_read_from_the_call() -> None:
    text = (
        "CURE = 'leave it out'\n"
        "raise DataError('row-too-long', problem=f'row {row} of {path.name} is too long',"
        " reason='it does not fit', remedy=[CURE, Setting('length', 5), ('a', Setting('b'))])"
    )
    (entry,) = write_errors.entries_in(ast.parse(text), Path("x.py"))
    assert (entry.code, entry.kind) == ("row-too-long", DataError.__name__)
    assert entry.message == "row {row} of {name} is too long; it does not fit"
    assert entry.remedy == "leave it out, or `length = 5`, or a `b`"


def test_problems_of_problems_are_one_list_each_in_its_place() -> None:
    inner = together([an_error(value=1), an_error(value=2)]).inside("split").inside("rank 1")
    error = together([an_error(value=0), inner, an_error(value=3)])
    assert [problem.fields["value"] for problem in error.problems] == [0, 1, 2, 3]
    places = [problem.places for problem in error.problems]
    assert places == [(), ("rank 1", "split"), ("rank 1", "split"), ()]
    assert not any(problem.problems for problem in error.problems)


def test_errors_of_the_public_interface_are_those_of_the_module() -> None:
    assert sf.ConfigError is ConfigError


def test_of_many_problems_the_first_are_shown_and_the_rest_are_counted() -> None:
    error = together([an_error(value=value) for value in range(30)])
    assert len(error.problems) == 30
    assert str(error).count("[batch-size-not-divisible]") == 16
    assert str(error).splitlines()[-1] == "and 14 more problems"
