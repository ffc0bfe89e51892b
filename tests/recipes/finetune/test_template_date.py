"""The date in a chat template is fixed when a run begins, and the same in every later rendering."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import surefoot as sf
from refused import refused
from surefoot.config.paths import write_whole
from surefoot.program import choose_checkpoint, find_program
from surefoot.recipes import finetune
from surefoot.recipes.finetune import recipe, template_date
from surefoot.recipes.finetune.template_date import date_of_run, has_clock, with_date
from tuned_runs import CHAT_TEMPLATE, build_as_command, config, write_chat, write_model

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

THEN = datetime(2026, 2, 3, 4, 5, 6)
DATED = "Time {{ strftime_now('%d %b %Y %H:%M:%S') }}\n" + CHAT_TEMPLATE
FORMATS = [
    "%d %b %Y",
    "%-d/%-m/%y",
    "100%% %A",
    "%H:%M:%S.%f",
    "%Y-%m-%dT%H",
    "no directive",
    "%j%%d",
    "%H:%M %Z%z",
]
USES = {
    "alone": "{{ strftime_now(FORMAT) }}",
    "as Llama 3.2 does": (
        "{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
        "        {%- set date_string = strftime_now(FORMAT) %}\n    {%- else %}\n"
        '        {%- set date_string = "26 Jul 2024" %}\n    {%- endif %}\n{%- endif %}\n'
        '{{- "Today Date: " + date_string + "\\n\\n" }}'
    ),
    "in a macro and a loop": (
        "{% macro now() %}[{{ strftime_now(FORMAT) }}]{% endmacro %}"
        "{% for message in messages %}{{ now() }}{% endfor %}"
    ),
    "after white space": "\n\n  {% if true %}\n  x{{ strftime_now(FORMAT) }}  \n  {% endif %}\n\n",
    "a format that is put together": "{% set form = FORMAT ~ '!' %}{{ strftime_now(form) }}",
}


def rendered(template: str) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [{"role": "user", "content": "a"}]
    texts, _ = render_jinja_template([conversation], chat_template=template)
    return str(texts[0])


@pytest.mark.parametrize("use", USES)
def test_the_fixed_clock_writes_what_strftime_writes(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the clock of transformers itself, set to the same moment."""
    from transformers.utils import chat_template_utils

    class Then(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return THEN

    monkeypatch.setattr(chat_template_utils, "datetime", Then)
    for form in FORMATS:
        template = USES[use].replace("FORMAT", json.dumps(form))
        assert has_clock(template)
        expected = rendered(template)
        assert THEN.strftime(form) in expected
        assert rendered(with_date(template, THEN)) == expected


class Clock(datetime):
    """A clock that is another day each time."""

    days = 0

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        cls.days += 1
        return datetime(2030, 1, cls.days, 12, 0, cls.days)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import chat_template_utils

    Clock.days = 0
    for module in (recipe, template_date, chat_template_utils):
        monkeypatch.setattr(module, "datetime", Clock)


def text_of(run: sf.Run, tokenizer: Any) -> str:
    data = run.parts.pipeline.dataset
    return str(tokenizer.decode(data.tokens[data.starts[0] : data.starts[1]]))


def test_a_run_keeps_the_date_of_its_start(
    clock: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resumed, verified, replayed and evaluated on other days; predict notes the date, and the
    exported template reads the clock.
    """
    from transformers import AutoTokenizer

    model = write_model(tmp_path / "base", chat_template=DATED)
    chat = write_chat(tmp_path / "chat.jsonl", [{"instruction": "a", "output": "b"}] * 4)
    run_dir = tmp_path / "run"
    asked = config(
        run_dir,
        model,
        chat,
        length="2 steps",
        sample_tokens=1,
        **{"data.val_path": str(chat), "data.val_fraction": 0.0},
    )
    tokenizer = AutoTokenizer.from_pretrained(model)

    run = build_as_command(asked)
    text = text_of(run, tokenizer)
    assert text.startswith("Time 01 Jan 2030 12:00:01\n")
    assert "2030-01-01 12:00:01" in run.parts.settings.data_summary[0]

    run.train()
    assert (run_dir / template_date.FILE).read_text() == "2030-01-01T12:00:01"
    assert AutoTokenizer.from_pretrained(run_dir).chat_template == DATED

    assert text_of(finetune.build(asked), tokenizer) == text
    saved = sf.load(run_dir)
    verdict = saved.verify()
    assert verdict.problems == []
    assert verdict.whole
    assert saved.evaluate() is not None

    capsys.readouterr()
    program = find_program("finetune")
    request = program.names["Predict"](temperature=0.0, max_new_tokens=1)
    checkpoint = choose_checkpoint(run_dir, None)
    list(program.names["predict"](asked, request, ["a"], run=run_dir, checkpoint=checkpoint))
    assert "2030-01-01, not" in capsys.readouterr().err

    exported = AutoTokenizer.from_pretrained(saved.export().directory)
    assert exported.chat_template == DATED


def test_a_run_without_a_recorded_date_has_that_of_its_first_session(tmp_path: Path) -> None:
    """As runs that began before the date was recorded."""
    sessions = [{"time": "2026-02-03T04:05:06+0100"}, {"time": "2026-03-01T00:00:00+0100"}]
    write_whole(tmp_path / "environment.json", json.dumps({"sessions": sessions}).encode())
    assert date_of_run(tmp_path) == THEN
    (tmp_path / template_date.FILE).write_text("2027-01-01T00:00:00")
    assert date_of_run(tmp_path) == datetime(2027, 1, 1)
    (tmp_path / template_date.FILE).write_text("yesterday")
    with refused("template-date-unreadable", sf.CheckpointError):
        date_of_run(tmp_path)
