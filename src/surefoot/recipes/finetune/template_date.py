"""The date that a chat template writes: fixed when a run begins, and the same in every rendering of
its conversations. Imports no torch.

The template of Llama 3.2, for one, writes the date of today. Tomorrow it would write other tokens,
so the run could not be resumed or verified. The exported template keeps its clock.
"""

import json
import re
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.paths import read_regular
from surefoot.tracking.run_reader import read_sessions

FILE = "template_date.txt"  # in the run's directory: the moment in ISO 8601
_CLOCK = "strftime_now"  # the function that transformers gives to templates
_QUOTED = re.compile(rf"""{_CLOCK}\(\s*(?:"([^"\\]*)"|'([^'\\]*)')\s*\)""")
_ASKED = re.compile(rf"{_CLOCK} is (?:not )?defined")
_DIRECTIVES = (
    *"aAwdbBmyYHIpMSfjUWcxXGuVDFTRehklnrstCgzZ",
    *(f"-{flag}" for flag in "dmHIMSjyeUWkl"),
)
_PERCENT = "\0"  # stands for %% while directives are replaced


def has_clock(template: str) -> bool:
    """Return True if a chat template can write the date or the time."""
    return _CLOCK in template


def date_of_run(run: Path) -> datetime:
    """Return the moment that the templates of a run write: the recorded one, or that of the first
    session of a run that began before `FIELDS_OF_CHATS`. Raises `CheckpointError` for another text.
    """
    file = run / FILE
    if not file.exists():
        with suppress(OSError, ValueError, LookupError):
            return datetime.fromisoformat(read_sessions(run)[0]["time"]).replace(tzinfo=None)
        return datetime.now()
    try:
        return datetime.fromisoformat(read_regular(file).decode())
    except (OSError, ValueError) as problem:
        raise sf.CheckpointError(
            "template-date-unreadable",
            problem=f"{file} has no date: {problem}",
            reason="the run's conversations were written with this date",
            remedy="restore the file",
            path=file,
        ) from problem


def with_date(template: str, moment: datetime) -> str:
    """Return a chat template in which `strftime_now` is the same moment for ever."""
    quoted = [first or second for first, second in _QUOTED.findall(template)]
    written = {form: moment.strftime(form) for form in quoted}
    expression = f"{_literal(written)}[format]"
    other_uses = len(re.findall(_CLOCK, template)) - len(quoted) - len(_ASKED.findall(template))
    if other_uses:  # a format that is put together: directive by directive, which takes a while
        expression += f" if format in {_literal(written)} else {_by_directives(moment)}"
    # the line's end is no part of the text: environments of chat templates trim it after a block
    return f"{{%- macro {_CLOCK}(format) -%}}{{{{ {expression} }}}}{{%- endmacro %}}\n{template}"


def _by_directives(moment: datetime) -> str:
    expression = f'format.replace("%%", {_literal(_PERCENT)})'
    for directive in _DIRECTIVES:
        with suppress(ValueError):  # a system that lacks this one
            text = moment.strftime(f"%{directive}")
            expression += f'.replace("%{directive}", {_literal(text)})'
    return f'{expression}.replace({_literal(_PERCENT)}, "%")'


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
