"""`surefoot export RUN`: the weights of a run in files that others load."""

from __future__ import annotations

import sys
from typing import Any

from surefoot.cli.options import one_of, option, run_directory
from surefoot.errors import ConfigError

_OPTIONS = {
    "--checkpoint": "newest",
    "--out": None,
    "--weights": "auto",
    "--layout": "own",
    "--max-file": "5 GB",
    "--model": "model",
}


def export(arguments: list[str]) -> None:
    """`surefoot export RUN [--checkpoint newest|best|STEP] [--out DIR] [--weights trained|averaged] [--layout own|gpt2]`."""
    run = run_directory(arguments)
    rest, given = arguments[1:], dict[str, Any]()
    for name, otherwise in _OPTIONS.items():
        rest, value = option(rest, name)
        given[name] = otherwise if value is None else value
    if rest:
        raise ConfigError(f"what is meant by {' '.join(rest)}? surefoot export RUN takes {', '.join(_OPTIONS)}")
    one_of("--weights", given["--weights"], ("auto", "averaged", "trained"))
    one_of("--layout", given["--layout"], ("own", "gpt2"))
    from surefoot import exporting
    from surefoot.memory import in_words

    done = exporting.export(
        run,
        given["--out"],
        checkpoint=given["--checkpoint"],
        weights=given["--weights"],
        layout=given["--layout"],
        max_file=given["--max-file"],
        model=given["--model"],
    )
    for damage in done.damaged:
        print(f"warning: {damage}", file=sys.stderr)
    kind = "averaged" if done.averaged else "trained"
    print(f"written into {done.directory}: the {kind} weights of step {done.step:,}")
    for file in done.files:
        print(f"  {file:<36} {in_words((done.directory / file).stat().st_size):>10}")
