"""The verbs: train, plan, resume, evaluate, predict."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.cli import programs
from surefoot.cli.flags import configured
from surefoot.cli.programs import Program
from surefoot.config import Settings, flatten, origins, to_toml, values
from surefoot.config import program as program_of
from surefoot.errors import CheckpointError, ConfigError, DataError
from surefoot.recipes.questions import named

if TYPE_CHECKING:
    from surefoot.checkpoint import Contents
    from surefoot.run import Run


def train(arguments: list[str]) -> None:
    """`surefoot train RECIPE|FILE.py:build [--config FILE.toml] [settings]`: a run from its start, or from where it stands."""
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("train what? surefoot train gpt, or surefoot train FILE.py:build")
    program = programs.found(arguments[0])
    rest, in_file = _in_file(program, arguments[1:])
    _start(program, _layers(program, in_file, rest), rest, verb=f"surefoot train {arguments[0]}")


def plan(arguments: list[str]) -> None:
    """`surefoot plan RECIPE|FILE.py:build [--config FILE.toml] [settings]`: what `train` would run; trains and writes nothing."""
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("plan what? surefoot plan gpt, or surefoot plan FILE.py:build")
    program = programs.found(arguments[0])
    rest, in_file = _in_file(program, arguments[1:])
    if program.config is None:
        run = _built(program, None)
    else:
        verb = f"surefoot plan {arguments[0]}"
        config, found = configured(program.config, _layers(program, in_file, rest), rest, verb=verb)
        run = _built(program, config)
        _refuse_fp16_on_a_cpu(run)
        lines = [
            f"  {name} = {value!r}  [{found[name]}]" for name, value in flatten(config).items() if value is not None
        ]
        print("\n".join(["configuration", *lines]))
    from surefoot import plan as planning

    for section in planning.sections(run.parts):
        print(f"\n{section}")
    holds, words = planning.loss_contract(run.parts)
    if not holds:
        raise ConfigError(words)
    print(f"\nloss contract\n  {words}")


def resume(arguments: list[str]) -> None:
    """`surefoot resume RUN [settings]`: go on from the newest intact checkpoint; settings that change no result may change."""
    run = _run_directory(arguments)
    text = _text(run / "config.toml")
    program = programs.again(program_of(text, where=str(run / "config.toml")), run=run)
    if not (run / "checkpoints").is_dir():
        raise CheckpointError(f"{run} holds no checkpoint to go on from: start it with surefoot train")
    of_recipes = ("--preset", "--init") if program.config is not None and issubclass(program.config, Settings) else ()
    for name in of_recipes:
        if _option(arguments[1:], name)[1] is not None:
            raise ConfigError(
                f"{name} is for the start of a run, and {run} has begun\n  another run: surefoot train ... {name} ... --out DIR"
            )
    of_one_sitting = ("stop_after", "time_limit")  # what ended the last one would end this one at once
    before = values(text, where=str(run / "config.toml"))
    held = {name: value for name, value in before.items() if name not in of_one_sitting}
    layers = [("file", held | ({"out": str(run)} if "out" in held else {}))]
    _start(program, layers, arguments[1:], verb="surefoot resume RUN", only=run, held=origins(text))


def evaluate(arguments: list[str]) -> None:
    """`surefoot evaluate RUN [--checkpoint newest|best|STEP|"average N"] [--on SPLIT|[NAME=]FILE]...`: score a checkpoint.

    On all splits that the run has; with `--on` on some of them, or on files that its recipe knows how to score.
    """
    run_path = _run_directory(arguments)
    rest, which = _option(arguments[1:], "--checkpoint")
    rest, on = _options(rest, "--on")
    program, config = _of_run(run_path, rest, verb="surefoot evaluate RUN", own=["checkpoint", "on"])
    of_files = [given for given in on if "=" in given or (Path(given).suffix and Path(given).is_file())]
    files = _files(program, of_files, run_path)
    own = [given for given in on if given not in of_files]
    if config is not None and "out" in flatten(config):
        config = dataclasses.replace(config, out=str(run_path))  # whose tokenizer it is; nothing is opened or written
    chosen = _checkpoint(run_path, which)
    scored = _Scored.of(run_path, which, chosen)
    if own or not on:
        _evaluate_splits(_built(program, config, of=run_path), own, run_path=run_path, chosen=chosen, scored=scored)
    if files:
        print(f"scoring {scored.words} of {run_path} on {', '.join(files)}", file=sys.stderr)
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
    print(f"scoring {scored.words} of {run_path} on {', '.join(names) or 'nothing'}", file=sys.stderr)
    if at_end and not only and names != at_end:
        print(
            f"note: not on {', '.join(at_end)}, for the end of the run; to ask for it: --on {at_end[0]}",
            file=sys.stderr,
        )
    if run.load(chosen):
        print("warning: the data are others than the run was trained on: these scores are of those", file=sys.stderr)
    for name, value in run.scores(*names).items():
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


def predict(arguments: list[str]) -> None:
    """`surefoot predict RUN [INPUT...] [--checkpoint newest|best|STEP|"average N"] [settings]`: use the model that a run has trained.

    One prompt is continued as it is made; several, or those of `--file`, one JSON object a line. A line to translate is
    answered by a line.
    """
    run_path = _run_directory(arguments)
    rest, which = _option(arguments[1:], "--checkpoint")
    place = next((place for place, argument in enumerate(rest) if argument.startswith("--")), len(rest))
    inputs, flags = rest[:place], rest[place:]
    program, config = _of_run(run_path, [], verb="surefoot predict RUN")
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
    for piece in program.names["predict"](config, asked, inputs, run=run_path, checkpoint=_checkpoint(run_path, which)):
        said.put(piece)
        if said.gone:  # nobody reads any more
            break


def _of_run(run: Path, flags: list[str], *, verb: str, own: Sequence[str] = ("checkpoint",)) -> tuple[Program, Any]:
    """What made a run, and its configuration with some flags changed (None where it takes none)."""
    text = _text(run / "config.toml")
    program = programs.again(program_of(text, where=str(run / "config.toml")), run=run)
    if program.config is None:
        _refuse_settings(program, flags)
        return program, None
    return program, configured(program.config, [("file", values(text))], flags, verb=verb, own=own)[0]


def _checkpoint(run: Path, which: str | None) -> Contents:
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
        print(f"warning: {damage}", file=sys.stderr)
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


def _in_file(program: Program, arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The arguments without --config, and the values in the file that it names."""
    rest, file = _option(arguments, "--config")
    if program.config is None:
        _refuse_settings(program, arguments)
    return rest, values(_text(Path(file)), where=file) if file else {}


def _layers(program: Program, in_file: dict[str, Any], flags: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """What stands below the flags: the preset that the flags or the file name, and the file."""
    _, flagged = _option(flags, "--preset")
    name = in_file.get("preset") if flagged is None else flagged
    preset = program.preset(name if isinstance(name, str) else None)
    return [("preset", preset)] * bool(preset) + [("file", in_file)] * bool(in_file)


def _start(
    program: Program,
    layers: list[tuple[str, dict[str, Any]]],
    arguments: list[str],
    *,
    verb: str,
    only: Path | None = None,
    held: Mapping[str, str] | None = None,
) -> None:
    """Build and train; `only` is the directory that a resumed run must have, `held` the origins its values had before."""
    if program.config is None:
        _refuse_settings(program, arguments)
        run = _built(program, None, of=only)
        run.configuration = to_toml(Nothing(), {}, program.described)
    else:
        config, found = configured(program.config, layers, arguments, verb=verb)
        kept = {name: (held or {}).get(name, origin) if origin == "file" else origin for name, origin in found.items()}
        run = _built(program, config, of=only)
        run.configuration = to_toml(config, kept, program.described)
    if only is not None and (run.parts.directory is None or run.parts.directory.path.resolve() != only.resolve()):
        raise ConfigError(
            f"resuming {only}, but what made it now builds a run in {run.parts.directory.path if run.parts.directory else 'no directory'}\n"
            "  was `out` changed, or is it relative to another directory than this one?"
        )
    _refuse_fp16_on_a_cpu(run)
    if run.parts.example is None and {"predict", "Predict"} <= program.names.keys():
        run.parts = dataclasses.replace(run.parts, example="INPUT")
    run.train()


def _built(program: Program, config: Any, *, of: Path | None = None) -> Run:
    """What a program builds; a terminal is told that this may take seconds. `of` is the run that it is built for again."""
    shown = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if shown:
        print("reading the data and building the model ...", end="", file=sys.stderr, flush=True)
    try:
        return program.run() if config is None else program.run(config)
    except DataError as problem:
        from surefoot.directory import directory_of_start

        begun_in = None if of is None else directory_of_start(of)
        if begun_in in (None, os.getcwd()):
            raise
        raise DataError(f"{problem}\n  this run was started in {begun_in}: a relative path is from there") from problem
    finally:
        if shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def _refuse_settings(program: Program, arguments: Sequence[str]) -> None:
    """Raise where there are settings for a program that takes none."""
    if arguments:
        raise ConfigError(
            f"{program.described.get('path')}: build() takes no settings, but there are: {' '.join(arguments)}"
        )


def _refuse_fp16_on_a_cpu(run: Run) -> None:
    """Raise where the library lets pass, for tests, what nobody who trains can want."""
    if run.parts.whole.precision.name == "fp16" and run.parts.device.type == "cpu":
        raise ConfigError("precision = fp16 is slow and overflows on a CPU\n  try: --precision bf16, or fp32")


@dataclasses.dataclass(frozen=True)
class Nothing:
    """The configuration of a program that takes none."""


def _option(arguments: Sequence[str], name: str) -> tuple[list[str], str | None]:
    """The arguments without one option of the verb's own, and its value."""
    rest = list(arguments)
    for place, argument in enumerate(rest):
        if argument == name:
            if place + 1 == len(rest):
                raise ConfigError(f"{name} needs a value")
            return rest[:place] + rest[place + 2 :], rest[place + 1]
        if argument.startswith(f"{name}="):
            return rest[:place] + rest[place + 1 :], argument.partition("=")[2]
    return rest, None


def _options(arguments: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """The arguments without an option that may be given several times, and its values."""
    rest, found = list(arguments), list[str]()
    while (taken := _option(rest, name))[1] is not None:
        rest, value = taken
        found.append(str(value))
    return rest, found


def _run_directory(arguments: list[str]) -> Path:
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("which run? give its directory, its name under runs/, or latest")
    given = arguments[0]
    if given == "latest":
        found = sorted(Path("runs").glob("*/config.toml"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise ConfigError(f"no run below {Path('runs').resolve()}")
        return found[-1].parent
    for path in (Path(given), Path("runs") / given):
        if (path / "config.toml").is_file():
            return path
    place = Path(given)
    if place.parent.name == "checkpoints" and place.is_dir():
        step = int("".join(filter(str.isdigit, place.name)) or 0)
        raise ConfigError(f"{given} is a checkpoint: give its run, {place.parent.parent}, and --checkpoint {step}")
    there = ", ".join(sorted(file.parent.name for file in Path("runs").glob("*/config.toml"))) or "none"
    raise ConfigError(f"no run {given!r} here, nor below runs/ (there: {there})")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise ConfigError(f"cannot read {path}: {why}") from problem
