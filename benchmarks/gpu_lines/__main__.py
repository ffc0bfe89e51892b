"""Checks one line: prints its figures, and ends with 0, with 77 if this machine lacks what it
needs, or with a traceback.

python benchmarks/gpu_lines/__main__.py LINE --device cuda
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

SKIPPED = 77


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("line")
    parser.add_argument("--device", default="cuda")
    arguments, _ = parser.parse_known_args()
    root = Path(__file__).parents[2]
    sys.path[:1] = [str(root / "benchmarks"), str(root / "src")]  # in place of this folder
    from gpu_lines.machine import Skip, require
    from gpu_lines.stand_ins import fill_in

    fill_in()
    try:
        if arguments.line != "facts":
            require(arguments.device)
        print(import_module(f"gpu_lines.{arguments.line}").check(arguments.device))
    except Skip as reason:
        print(reason)
        sys.exit(SKIPPED)


if __name__ == "__main__":
    main()
