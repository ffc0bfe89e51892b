"""Bytes as text, and what is said of those that are none: where, and what they may be."""

from __future__ import annotations

import codecs

from surefoot.errors import DataError

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def is_utf_16(data: bytes) -> bool:
    """Whether bytes begin with the mark of UTF-16, which no UTF-8 does."""
    return data.startswith(_UTF_16)


def decoded(data: bytes, where: str, *, first_line: int = 1) -> str:
    """UTF-8 as text, without the mark that it may begin with; `DataError` naming line and byte, both from 1.

    `where` names the file. Lines are counted from `first_line`: that of the first byte.

    >>> decoded(b"caf" + bytes([0xe9]), "menu.txt")
    Traceback (most recent call last):
    surefoot.errors.DataError: menu.txt, line 1 is not UTF-8 text: byte 4 of the line is 0xe9
      is it a binary or compressed file? Otherwise convert it: iconv -f latin1 -t utf-8
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        # the mark is cut off before bytes are counted: count in what was given
        place = problem.start + len(data) - len(problem.object)
        line = data[:place].count(b"\n") + first_line
        byte = place - (data.rfind(b"\n", 0, place) + 1) + 1
        hint = "is it a binary or compressed file? Otherwise convert it: iconv -f latin1 -t utf-8"
        if is_utf_16(data):
            hint = "it begins with the mark of UTF-16: convert it: iconv -f utf-16 -t utf-8"
        raise DataError(
            f"{where}, line {line} is not UTF-8 text: byte {byte} of the line is 0x{data[place]:02x}\n  {hint}"
        ) from problem
