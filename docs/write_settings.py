"""Write the table of all settings into docs/reference/settings.md anew, made of the fields: python
docs/write_settings.py.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

from surefoot import Run
from surefoot.config.setting import Declared, by_group, names_that_change, texts_of
from surefoot.config.train_settings import TrainSettings

_HEAD = "| Keyword | Default | Meaning | At a resume |\n|---|---|---|---|\n"
_AT_A_RESUME = {
    "identity": "must be equal",
    "cadence": "may change",
    "observer": "may change",
    "one_session": "one session only",
    "per_rank": "may change, and differ between ranks",
}


# of these, `surefoot change` takes the numbers or the name
_IN_PARTS = ("optimizer", "schedule", "early_stopping")
_ON_RECORD = {*names_that_change(TrainSettings), *_IN_PARTS}


def settings_table(kind: type[Declared]) -> str:
    """All settings of a class as a table in Markdown, a row each, by group in the order of its
    signature.
    """
    texts = texts_of(kind)
    table = _HEAD
    for group, fields in by_group(kind).items():
        table += f"| **{group}** | | | |\n"
        for field in fields:
            default = "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
            role = _AT_A_RESUME[field.metadata["role"]]
            if field.name in _ON_RECORD:
                role = "changes on record"
            cells = [f"`{field.name}`", default, texts[field.name], role]
            table += "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    return table


def with_table(text: str, kind: type[Declared]) -> str:
    """A page with the table of a class in the place of the one that it has."""
    return re.sub(re.escape(_HEAD) + r"(\|.*\n)*", lambda _: settings_table(kind), text)


if __name__ == "__main__":
    page = (
        Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "reference" / "settings.md"
    )
    page.write_text(with_table(page.read_text(), Run))
