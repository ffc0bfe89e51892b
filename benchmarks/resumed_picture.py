"""docs/images/resumed.png: the run of `make train`, killed with kill -9 and gone on with, as a terminal shows its end.

    python benchmarks/resumed_picture.py [--length "2500 steps"]

A few minutes on two cores. The terminal is a pseudo-terminal of 112 columns; what it shows at the end is drawn with matplotlib's
monospaced font.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pyte
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont

COLUMNS, LINES = 112, 400
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "resumed.png"
SUREFOOT = Path(sys.executable).with_name("surefoot")
BACKGROUND, INK, FAINT = "#1e1e1e", "#e4e4e4", "#8a8a8a"


def shown(arguments: list[str], *, place: Path, kill_when: str | None = None) -> list[str]:
    """The lines that a terminal shows of the command, which is killed once some line of its output begins so."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    environment = {**os.environ, "TERM": "xterm-256color", "PATH": f"{SUREFOOT.parent}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        [SUREFOOT.name, *arguments], cwd=place, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
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
        if kill_when is not None and any(line.lstrip().startswith(kill_when) for line in screen.display):
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    os.close(ours)
    return [line.rstrip() for line in screen.display]


def draw(lines: list[str], path: Path) -> None:
    """Write lines as a picture; those that were typed are faint."""
    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSansMono.ttf", 14)
    wide = font.getlength("M" * max(map(len, lines)))
    high, border = 19, 14
    picture = Image.new("RGB", (int(wide) + 2 * border, high * len(lines) + 2 * border), BACKGROUND)
    pen = ImageDraw.Draw(picture)
    for place, line in enumerate(lines):
        pen.text((border, border + high * place), line, font=font, fill=FAINT if line.startswith("$ ") else INK)
    picture.quantize(32).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--length", default="2500 steps")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        train = ["train", "gpt", "--run-dir", "runs/first", "--length", arguments.length]
        first = shown(train, place=place, kill_when=str(int(arguments.length.split()[0]) // 2) + " ")
        killed = next(line.split()[0] for line in reversed(first) if line)
        second = shown(["resume", "runs/first"], place=place)
    while second and not second[-1]:
        second.pop()
    draw(
        [
            f"$ make train      # killed with kill -9, behind step {killed.split('/')[0]}",
            "$ surefoot resume runs/first",
            *second,
        ],
        PICTURE,
    )


if __name__ == "__main__":
    main()
