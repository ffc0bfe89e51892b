"""A task's panels as the page draws them: how strongly a text is tinted, how dark a cell is, curves as a chart."""

from __future__ import annotations

from surefoot.panels import ConfusionMatrix, Curves, TintedText
from surefoot.reporting.charts import Chart, Line
from surefoot.reporting.ticks import written

_FULL_NATS = 6.0  # of loss: as strong as it gets
_DARKEST = 78  # percent, so that letters can be read


def tinted(text: TintedText) -> list[tuple[str, int | None, str]]:
    """Each piece with the strength of its tint in percent, None for none, and its number in words; equal neighbours as one.

    >>> panel = TintedText(title="a", legend="b", unit="fraction", pieces=(("so", None), (" it", 0.5), (" goes", 0.0)))
    >>> tinted(panel)
    [('so', None, ''), (' it', 39, '50 %'), (' goes', 0, '0 %')]
    """
    full = _FULL_NATS if text.unit == "nats" else 1.0
    found: list[tuple[str, int | None, str]] = []
    for piece, value in text.pieces:
        if value is None:
            found.append((piece, None, ""))
            continue
        words = f"{value:.2f} nats" if text.unit == "nats" else written(value, "fraction")
        found.append((piece, round(_DARKEST * min(1.0, value / full)), words))
    return found


def shaded(matrix: ConfusionMatrix) -> list[tuple[str, list[tuple[int, int, bool]]]]:
    """Each row of a confusion matrix: its class, and of each cell the count, how dark it is, and whether it is right.

    How dark is relative to the samples of the row, by the root, so that few that are wrong are seen.

    >>> shaded(ConfusionMatrix(title="a", classes=("cat", "dog"), counts=((4, 0), (1, 3))))[1]
    ('dog', [(1, 39, False), (3, 68, True)])
    """
    rows = []
    for place, (name, counts) in enumerate(zip(matrix.classes, matrix.counts, strict=True)):
        total = sum(counts) or 1
        rows.append(
            (
                name,
                [
                    (count, round(_DARKEST * (count / total) ** 0.5), place == other)
                    for other, count in enumerate(counts)
                ],
            )
        )
    return rows


def chart_of(panel: Curves) -> Chart:
    """A panel of curves as a chart; a point without a value is left out."""
    lines = tuple(
        Line(
            name,
            tuple((float(step), value) for step, value in points if value is not None),
            place,
            place // 7,
            dots=len(points) < 60,
        )
        for place, (name, points) in enumerate(panel.curves.items())
    )
    return Chart("panel", panel.title, lines, note=panel.legend, wide=True)
