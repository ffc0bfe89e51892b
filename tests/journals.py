"""Journals of changes, as tests and the campaign of changes give them to another run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot.config.setting_change import SettingChange, at_beginning, in_effect


def in_force(journal: Sequence[SettingChange]) -> list[SettingChange]:
    """Return the lines of a journal that hold at some step, as that of another run begins."""
    present = at_beginning(journal)
    lines = []
    for line in in_effect(journal):
        if line.goes_back:
            continue
        follows = {name: [present[name], now] for name, (_, now) in line.follows.items()}
        was = present.get(line.setting, line.was)  # other data are no value
        lines.append(replace(line, number=0, sha256="", was=was, follows=follows))
        present |= {name: now for name, (_, now) in line.values.items()}
    return lines
