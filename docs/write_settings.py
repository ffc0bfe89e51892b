"""Write the table of all settings into docs/reference/settings.md anew, made of the fields: python
docs/write_settings.py.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from pathlib import Path

from surefoot import Run
from surefoot.config.setting import Declared

_HEAD = "| Keyword | Default | Meaning | At a resume |\n|---|---|---|---|\n"
_AT_A_RESUME = {
    "identity": "must be equal",
    "cadence": "may change",
    "observer": "may change",
    "one_session": "one session only",
    "per_rank": "may change, and differ between ranks",
}


def texts_of(kind: type[Declared]) -> dict[str, str]:
    """The string under each field of a class and of those above it."""
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(said))
                ):
                    texts[name] = " ".join(said.split())
    return texts


def settings_table(kind: type[Declared]) -> str:
    """All settings of a class as a table in Markdown, a row each, by group in the order of its
    signature.
    """
    texts, rows, group = texts_of(kind), dict[str, list[str]](), "what is trained"
    for field in dataclasses.fields(kind):
        group = field.metadata["group"] or group
        default = "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        if field.name != "disk":  # of tests
            row = (
                f"`{field.name}`",
                default,
                texts[field.name],
                _AT_A_RESUME[field.metadata["role"]],
            )
            rows.setdefault(group, []).append(
                "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n"
            )
    return _HEAD + "".join(f"| **{name}** | | | |\n{''.join(part)}" for name, part in rows.items())


def with_table(text: str, kind: type[Declared]) -> str:
    """A page with the table of a class in the place of the one that it has."""
    return re.sub(re.escape(_HEAD) + r"(\|.*\n)*", lambda _: settings_table(kind), text)


if __name__ == "__main__":
    page = (
        Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "reference" / "settings.md"
    )
    page.write_text(with_table(page.read_text(), Run))
