"""docs/images/documents-apart.svg: what each token of a window sees, with documents joined and apart.

    python benchmarks/documents_picture.py [--out docs/images]

The cells are those of the mask that a model uses. `make pictures ONLY=documents` calls it.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from surefoot.models.documents import document_mask

IMAGES = Path(__file__).parents[1] / "docs" / "images"
LENGTHS = [5, 3, 6]  # tokens of each document
CELL = 14  # pixels
MARGIN = 30
STYLE = """
:root{--text:#1d2125;--cell:#2f6fb0;--hidden:#e3e7eb}
@media (prefers-color-scheme:dark){:root{--text:#e3e6e9;--cell:#6fa8e0;--hidden:#2a3036}}
text{font:13px system-ui,sans-serif;fill:var(--text)}
.sees{fill:var(--cell)}.hidden{fill:var(--hidden)}
"""


def matrix(sees_TT: Tensor, *, left: int, title: str) -> list[str]:
    """Return the elements of one matrix: a row is a token, and a column one that it may see."""
    parts = [f'<text x="{left}" y="18">{title}</text>']
    for row, sees_T in enumerate(sees_TT.tolist()):
        for column, sees in enumerate(sees_T):
            x = left + column * CELL
            y = MARGIN + row * CELL
            kind = "sees" if sees else "hidden"
            size = CELL - 1
            parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{size}" height="{size}"/>')
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES)
    out = parser.parse_args().out
    lengths = torch.tensor(LENGTHS)
    documents_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths)
    side = len(documents_T) * CELL
    width = 2 * side + MARGIN
    height = side + MARGIN
    parts = []
    for place, (title, documents_1T) in enumerate(
        [("joined", torch.zeros_like(documents_T)[None]), ("apart", documents_T[None])]
    ):
        mask = document_mask(documents_1T, channels=16, drop_fraction=0.0)
        assert isinstance(mask, Tensor)  # on a CPU
        parts += matrix(mask[0, 0] == 0, left=place * (side + MARGIN), title=title)
    picture = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        *parts,
        "</svg>",
    ]
    (out / "documents-apart.svg").write_text("\n".join(picture) + "\n")


if __name__ == "__main__":
    main()
