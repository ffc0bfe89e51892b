"""The verb `profile`: where a step's time goes, and what would make it quicker."""

from __future__ import annotations

import sys

from surefoot.cli.finders import meant
from surefoot.cli.options import number, option, whole
from surefoot.config.paths import local_path

_OWN = ["out", "steps", "tries", "peak", "shapes", "limit"]


def profile(arguments: list[str]) -> None:
    """`surefoot profile RECIPE|FILE.py:build|RUN [settings] [--tries] [--steps] [--peak] [--shapes] [--limit] [--out DIR]`."""
    rest, out = option(arguments, "--out")
    rest, tries = option(rest, "--tries")
    rest, steps = option(rest, "--steps")
    rest, peak = option(rest, "--peak")
    rest, limit = option(rest, "--limit")
    shapes = "--shapes" in rest
    rest = [argument for argument in rest if argument != "--shapes"]
    count = whole("--steps", steps or "12", least=4)
    limit_s = number("--limit", limit or "20", example="60")
    from surefoot.profiling.peak import given_peak
    from surefoot.profiling.tries import tries_of

    names = tries_of(tries or "usual")
    top = None if peak is None else given_peak(peak)
    run, _ = meant(rest, "profile", own=_OWN)
    from surefoot.profiling.profile import profile as profiled

    shown = sys.stderr is not None and sys.stderr.isatty()

    def watch(text: str) -> None:
        if shown:
            print(f"\r\x1b[2K{text} ...", end="", file=sys.stderr, flush=True)

    try:
        found = profiled(
            run,
            what=rest[0],
            out=local_path(out or "runs/profile", setting="--out"),
            steps=count,
            tries=names,
            peak=top,
            shapes=shapes,
            limit_s=limit_s,
            watch=watch,
        )
    finally:
        if shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    print(found)
