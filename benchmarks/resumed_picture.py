"""docs/images/resumed.png: the run of `make train`, killed with kill -9 and gone on with, as a
terminal shows its end.

    python benchmarks/resumed_picture.py [--length "550 steps"]

A few minutes on two cores. The terminal is a pseudo-terminal of 80 columns; what it shows at the
end is drawn, in its colors, with the font DejaVu Sans Mono of the system. `make pictures ONLY=resumed`
calls it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pyte
from PIL import Image, ImageDraw, ImageFont

COLUMNS, LINES = 80, 400
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "resumed.png"
SUREFOOT = Path(sys.executable).with_name("surefoot")
BACKGROUND, INK, FAINT = "#1e1e1e", "#e4e4e4", "#8a8a8a"
COLORS = {
    "red": "#f07178",
    "green": "#8fd07e",
    "brown": "#e6c07b",
    "cyan": "#6cc7d6",
}  # pyte's names; brown is yellow
Letters = list[tuple[str, str]]  # of a line, each with its color


def shown(arguments: list[str], *, place: Path, kill_when: str | None = None) -> list[Letters]:
    """The lines that a terminal shows of the command, which is killed as soon as a line of its
    output begins so.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "PATH": f"{SUREFOOT.parent}:{os.environ['PATH']}",
    }
    process = subprocess.Popen(
        [SUREFOOT.name, *arguments],
        cwd=place,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        stream.feed(data)
        if kill_when is not None and any(
            line.lstrip().startswith(kill_when) for line in screen.display
        ):
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    os.close(ours)
    rows = [[screen.buffer[row][column] for column in range(COLUMNS)] for row in range(LINES)]
    lines = [[(letter.data, COLORS.get(letter.fg, INK)) for letter in row] for row in rows]
    while lines and not text_of(lines[-1]):
        lines.pop()
    return lines


def text_of(letters: Letters) -> str:
    return "".join(letter for letter, _ in letters).rstrip()


def typed(line: str) -> Letters:
    """A line that a person typed."""
    return [(letter, FAINT) for letter in line]


def draw(lines: list[Letters], path: Path) -> None:
    """Write lines as a picture."""
    font = ImageFont.truetype("DejaVuSansMono.ttf", 14)
    letter_wide = font.getlength("M")
    wide = letter_wide * max(len(text_of(line)) for line in lines)
    high, border = 19, 14
    picture = Image.new("RGB", (int(wide) + 2 * border, high * len(lines) + 2 * border), BACKGROUND)
    pen = ImageDraw.Draw(picture)
    for place, line in enumerate(lines):
        for column, (letter, color) in enumerate(line):
            pen.text(
                (border + letter_wide * column, border + high * place),
                letter,
                font=font,
                fill=color,
            )
    picture.quantize(32).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--length", default="550 steps")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        train = ["train", "gpt", "--run-dir", "runs/first", "--length", arguments.length]
        half = str(int(arguments.length.split()[0]) // 2)
        first = shown(train, place=place, kill_when=f"{half} ")
        steps = (
            step[1] for line in reversed(first) if (step := re.search(r"(\d+)/\d+", text_of(line)))
        )
        killed = next(steps, half)  # the live line may not be drawn again yet
        second = shown(["resume", "runs/first"], place=place)
    head = [
        f"$ make train      # killed with kill -9 after step {killed}",
        "$ surefoot resume runs/first",
    ]
    draw([*map(typed, head), *second], PICTURE)


if __name__ == "__main__":
    main()
