"""Rows of text as a table: columns as wide as their widest cell."""

from collections.abc import Collection, Sequence


def text_table(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,), indent: str = "") -> list[str]:
    """A line for each row; the columns of `left` begin at their left edge, all others (numbers) end at their right one.

    >>> for line in text_table([("phase", "ms", "share"), ("forward", "12.5", "40%")]):
    ...     print(line)
    phase      ms  share
    forward  12.5    40%
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return [
        indent
        + "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
