"""The verbs for a run that is there: evaluate and predict, and which of its checkpoints."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli import processes
from surefoot.cli.building import built, of_run
from surefoot.cli.flags import configured
from surefoot.cli.options import RUN_CHANGED, option, options, run_directory, switch
from surefoot.cli.programs import Program
from surefoot.config import flatten
from surefoot.config.paths import write_whole
from surefoot.errors import CheckpointError, ConfigError
from surefoot.placement import placed
from surefoot.recipes.questions import named

if TYPE_CHECKING:
    from surefoot.checkpoint import Contents
    from surefoot.run import Run


def evaluate(arguments: list[str]) -> None:
    """`surefoot evaluate RUN [--checkpoint newest|best|STEP|"average N"] [--on SPLIT|[NAME=]FILE]...`: score a checkpoint.

    `surefoot evaluate RUN --panels` makes what the report shows of the task instead, for a run that could not do so itself.
    On all splits that the run has; with `--on` on some of them, or on files that its recipe knows how to score.
    """
    run_path = run_directory(arguments)
    rest, run_changed = switch(arguments[1:], RUN_CHANGED)
    rest, panels = switch(rest, "--panels")
    rest, which = option(rest, "--checkpoint")
    rest, on = options(rest, "--on")
    rest, several = processes.options(rest)
    own = ["checkpoint", "on"]
    program, config = of_run(run_path, rest, verb="surefoot evaluate RUN", own=own, run_changed=run_changed)
    if panels:
        if on or which is not None:
            raise ConfigError("--panels shows the best checkpoint, or the newest: leave --on and --checkpoint out")
        processes.refuse_several(arguments, verb="evaluate --panels")
        _write_panels(program, config, run_path)
        return
    of_files = [given for given in on if "=" in given or (Path(given).suffix and Path(given).is_file())]
    files = _files(program, of_files, run_path)
    own = [given for given in on if given not in of_files]
    if files:
        processes.refuse_several(arguments, verb="evaluate --on FILE")
        if placed(os.environ).world_size > 1:
            raise ConfigError("evaluate --on FILE works in one process: start it without torchrun or srun")
    alone = processes.options(arguments)[0]
    processes.start_several(["evaluate", *alone], several, config=config, flags=arguments, out=run_path)
    if config is not None and "out" in flatten(config):
        config = dataclasses.replace(config, out=str(run_path))  # whose tokenizer it is; nothing is opened or written
    chosen = checkpoint_of(run_path, which)
    scored = _Scored.of(run_path, which, chosen)
    if own or not on:
        _evaluate_splits(built(program, config, of=run_path), own, run_path=run_path, chosen=chosen, scored=scored)
    if files:
        _note(f"scoring {scored.words} of {run_path} on {', '.join(files)}")
        for name, value in program.names["judged"](config, files, run=run_path, checkpoint=chosen):
            print(f"{scored.key} {name}={value!r}", flush=True)


@dataclasses.dataclass(frozen=True)
class _Scored:
    """Whose scores they are: in words, and as a line of scores begins."""

    words: str
    key: str

    @classmethod
    def of(cls, run: Path, which: str | None, chosen: Contents) -> _Scored:
        """Of what `--checkpoint` asked for, and what that came to."""
        from surefoot.checkpoint import Store, last_steps

        match (which or "").split():
            case ["average", count]:
                steps = [str(step) for step in last_steps(Store(run / "checkpoints"), int(count))]
                return cls(f"the mean of steps {', '.join(steps)}", f"mean_of_steps={','.join(steps)}")
        words = f"step {chosen.step}" + (", the best," if which == "best" else "")
        return cls(words, f"step={chosen.step}")


def _evaluate_splits(run: Run, only: Sequence[str], *, run_path: Path, chosen: Contents, scored: _Scored) -> None:
    """Print the scores of a run's own splits, or of some of them."""
    scoring = run.parts.scoring
    unknown = [name for name in only if name not in scoring.splits]
    if unknown:
        there = ", ".join(scoring.splits) or "none"
        raise ConfigError(
            f"--on {unknown[0]}: no split of this run, which has: {there}, nor a file here\n  a file: --on NAME=FILE"
        )
    at_end = scoring.names(at_end=True)
    names = only or scoring.names(at_end=False) or at_end
    _note(f"scoring {scored.words} of {run_path} on {', '.join(names) or 'nothing'}")
    if at_end and not only and names != at_end:
        _note(f"note: not on {', '.join(at_end)}, for the end of the run; to ask for it: --on {at_end[0]}")
    if run.load(chosen):
        _note("warning: the data are others than the run was trained on: these scores are of those")
    found = run.scores(*names)
    if run.parts.world.is_main:
        for name, value in found.items():
            print(f"{scored.key} {name}={value!r}")


def _files(program: Program, given: Sequence[str], run: Path) -> dict[str, Path]:
    """The files of `--on NAME=FILE` and `--on FILE` by name."""
    files = named(given, setting="--on")
    if files and "judged" not in program.names:
        raise ConfigError(
            f"--on {given[0]}: files of questions are scored by runs of gpt, and {run} is none\n"
            "  --on SPLIT names one of the run's own splits"
        )
    return files


def _write_panels(program: Program, config: Any, run_path: Path) -> None:
    """Make what the report shows of the task, with the best checkpoint, or the newest if none is best; write it into the run."""
    from surefoot.panels import FILE
    from surefoot.reporting.writing import is_running

    if is_running(run_path):
        raise ConfigError(f"{run_path} is being trained: it makes its panels when it is over")
    if config is not None and "out" in flatten(config):
        config = dataclasses.replace(config, out=str(run_path))  # whose tokenizer it is
    run = built(program, config, of=run_path)
    if run.parts.panels is None:
        raise ConfigError(f"what made {run_path} has no panels: give Run(panels=...)")
    try:
        chosen = checkpoint_of(run_path, "best")
    except CheckpointError:  # no score was watched, or that checkpoint is damaged
        chosen = checkpoint_of(run_path, "newest")
    run.load(chosen)
    try:
        write_whole(run_path / FILE, run.panels().to_json().encode())
    except OSError as problem:
        raise CheckpointError(f"cannot write {run_path / FILE}: {problem.strerror or problem}") from problem
    print(
        f"written: {run_path / FILE}, with the weights of step {chosen.step:,}; to see them: surefoot report {run_path}"
    )


def predict(arguments: list[str]) -> None:
    """`surefoot predict RUN [INPUT...] [--checkpoint newest|best|STEP|"average N"] [settings]`: use the model that a run has trained.

    One prompt is continued as it is made; several, or those of `--file`, one JSON object a line. A line to translate is
    answered by a line.
    """
    run_path = run_directory(arguments)
    rest, run_changed = switch(arguments[1:], RUN_CHANGED)
    rest, which = option(rest, "--checkpoint")
    place = next((place for place, argument in enumerate(rest) if argument.startswith("--")), len(rest))
    inputs, flags = rest[:place], rest[place:]
    program, config = of_run(run_path, [], verb="surefoot predict RUN", run_changed=run_changed)
    if "predict" not in program.names or "Predict" not in program.names:
        raise ConfigError(
            f"what {run_path} was made by does not say how its model is used: it defines no predict()\n"
            "  in Python, give its weights to a model of yours:\n"
            f"  surefoot.load_weights(model, surefoot.checkpoint.Store({str(run_path / 'checkpoints')!r}).newest_intact()[0])"
        )
    asked = configured(
        program.names["Predict"], [], flags, verb=f"surefoot predict {arguments[0]} INPUT", own=["checkpoint"]
    )[0]
    from surefoot.sinks.console import Said

    said = Said(None)
    for piece in program.names["predict"](
        config, asked, inputs, run=run_path, checkpoint=checkpoint_of(run_path, which)
    ):
        said.put(piece)
        if said.gone:  # nobody reads any more
            break


def checkpoint_of(run: Path, which: str | None) -> Contents:
    """The newest intact checkpoint of a run, the best, that of a step, or the mean of the last ones; damaged ones are named."""
    from surefoot.checkpoint import Store, averaged

    store = Store(run / "checkpoints")
    match (which or "").split():
        case ["average", count] if count.isascii() and count.isdigit():
            return averaged(store, int(count))
    contents = store.newest_intact()
    if contents is None:
        raise CheckpointError(f"{run} holds no checkpoint")
    chosen, damaged = contents
    for damage in damaged:
        _note(f"warning: {damage}")
    if which in (None, "newest"):
        return chosen
    if which == "best":
        best = (chosen.state.get("watch") or {}).get("step")
        if best is None:
            raise CheckpointError(f"{run} has no best checkpoint: no score was watched, or none seen yet")
        return store.at(best)
    if not (which.isascii() and which.isdigit()):
        raise ConfigError(
            f"--checkpoint {which!r}: newest, best, or a step: {', '.join(str(step) for step in store.steps())};"
            ' or "average 5", of the last five'
        )
    return store.at(int(which))


def _note(text: str) -> None:
    """What is no result, by rank 0 alone; the others may not have met yet."""
    if placed(os.environ).rank == 0:
        print(text, file=sys.stderr)
