"""The program of a run: a recipe or a function in the user's file, found by its name or from a
run's directory.
"""

import dataclasses
import importlib
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.config import toml, user_code
from surefoot.config.paths import file_text, local_path
from surefoot.config.setting_change import in_effect
from surefoot.config.tree import default_values, did_you_mean, flatten, layered
from surefoot.distributed.environment import import_torch
from surefoot.errors import Command, ConfigError, DataError
from surefoot.recipes import NAMES
from surefoot.recipes.optimizer_settings import RecipeSettings, note
from surefoot.tracking.change_journal import read_changes
from surefoot.tracking.commands import script_command
from surefoot.tracking.numbered import built_again
from surefoot.tracking.run_reader import behavior_in

if TYPE_CHECKING:
    from surefoot.checkpoint import Checkpoint
    from surefoot.checkpoint.format import Damage
    from surefoot.run.run import Run

_SHARED = ("auto", "ddp", "fsdp")  # strategies that share the model's training


@dataclass(frozen=True)
class Program:
    """A function that builds a run, its settings dataclass or None, and its entry in config.toml.
    `names` maps the module's names to values. PRESETS, `check`, `predict`, `Predict`,
    `evaluate_questions`, `outline` (a run without data) and `planned` are optional."""

    build: Callable[..., Any]
    config: type[Any] | None
    described: dict[str, Any]
    names: Mapping[str, Any]

    def preset(self, name: str | None) -> dict[str, Any]:
        """Return the settings of a preset. None is the default of the field `preset`, or `tiny` of
        a recipe, if there is one.
        """
        presets = self.names.get("PRESETS", {})
        if name is None:
            default = None if self.config is None else default_values(self.config).get("preset")
            if default is None and self.described.get("kind") == "recipe":
                default = "tiny"
            return dict(presets.get(default, {}))
        if name not in presets:
            available = f"available: {', '.join(presets) or 'none'}"
            raise ConfigError(
                "preset-unknown",
                problem=f"no preset {name!r}",
                remedy=did_you_mean(name, presets, otherwise=available),
                setting="preset",
                value=name,
            )
        return dict(presets[name])

    def config_text(
        self, config: Any, origins: Mapping[str, str], described: Mapping[str, Any]
    ) -> str:
        """Return the text of config.toml for a configuration, which `--config` reads as the same
        configuration.
        """
        name = getattr(config, "preset", None)
        is_preset = isinstance(name, str) and name in self.names.get("PRESETS", {})
        preset = self.preset(name if is_preset else None)
        return toml.to_toml(config, origins, described, preset=preset)

    def check(self, config: Any) -> None:
        """Call the module's `check(config: Config)`, if any, to refuse invalid settings before data
        are read.
        """
        function = self._of_config("check")
        if function is not None:
            import_torch()
            function(config)

    def refuse_changed_files(self, config: Any, *, run: Path, resuming: bool = False) -> None:
        """Refuse changed files of the user that the recipe's `program_files(config, run=run)`
        lists.
        """
        function = self.names.get("program_files")
        if self.described.get("kind") == "recipe" and inspect.isfunction(function):
            for path, digest in function(config, run=run):
                user_code.refuse_changed(path, was=digest, run=run, resuming=resuming)

    def on_meta(self, *config: Any) -> "Run":
        """Return the run without its data if the module's `outline(config: Config)` can build it,
        else the real run.
        """
        function = self._of_config("outline")
        if function is not None:
            outline: Run | None = function(*config)
            if outline is not None:
                return outline
        return self.run(*config)

    def for_plan(self) -> "Program":
        """Return the program with the module's `planned(config: Config)` for `build`, if any: a
        build that trains nothing.
        """
        return dataclasses.replace(self, build=self._of_config("planned") or self.build)

    def _of_config(self, name: str) -> Callable[..., Any] | None:
        function = self.names.get(name)
        if self.config is None or not inspect.isfunction(function):
            return None
        return function if self.config in typing.get_type_hints(function).values() else None

    def run(self, *config: Any) -> "Run":
        """Build the run. Raises `ConfigError` if the user's function returns something else."""
        from surefoot.run.run import Run

        run = self.build(*config)
        if not isinstance(run, Run):
            function = self.described.get("function", "build")
            raise ConfigError(
                "program-builds-no-run",
                problem=f"{function}() returned {type(run).__name__}, not a sf.Run",
                reason="does it end in `return sf.Run(...)`?",
                function=function,
            )
        return run


def find_program(name: str) -> Program:
    """Return the recipe called `name`, or the function of a name such as FILE.py:build."""
    if name in NAMES:
        config = importlib.import_module(f"surefoot.recipes.{name}.config")
        recipe = importlib.import_module(f"surefoot.recipes.{name}.recipe")
        described = {"kind": "recipe", "recipe": name}
        return Program(recipe.build, config.Config, described, vars(config) | vars(recipe))
    if ":" in name or name.endswith(".py"):
        path, _, function = name.partition(":")
        return _in_file(local_path(path, setting="the program"), function or "build")
    available = f"choose from {', '.join(NAMES)}, or name FILE.py:build"
    raise ConfigError(
        "recipe-or-program-unknown",
        problem=f"no recipe {name!r}",
        remedy=did_you_mean(name, NAMES, otherwise=available),
        value=name,
    )


def program_again(
    described: Mapping[str, Any], *, run: Path, resuming: bool = False, run_changed: bool = False
) -> Program:
    """Return the program that a run's config.toml names. With `resuming`, a changed program runs
    with a note. Otherwise a program that has changed, or that other users could change, is refused
    unless `run_changed`."""
    match described:
        case {"kind": "recipe", "recipe": str(name)}:
            if name not in NAMES:
                raise ConfigError(
                    "recipe-of-other-version",
                    problem=f"{run / 'config.toml'} names the recipe {name!r},"
                    " which this version of surefoot does not have",
                    reason="surefoot writes only the names of its own recipes there, and never"
                    f" runs a file instead; available: {', '.join(NAMES)}",
                    remedy="if a newer version wrote the run, install that version",
                    value=name,
                )
            return find_program(name)
        case {"kind": "file", "path": str(path), "function": str(function), "sha256": str(digest)}:
            user_code.refuse_unresolved(Path(path), file=run / "config.toml")
            if resuming or not run_changed:
                user_code.refuse_changed(Path(path), was=digest, run=run, resuming=resuming)
            if resuming:
                user_code.note_changed(Path(path), was=digest)
            return _in_file(Path(path), function)
        case {"kind": "script", "command": list(command)}:
            raise ConfigError(
                "run-of-script",
                problem=f"{run} was built by a script, and only the script can rebuild it",
                remedy=[
                    Command(script_command(run, command)),
                    "in the script, sf.load(run) has evaluate(), replay(step) and verify();"
                    f" elsewhere, load its weights: sf.load({str(run)!r}).load_model(model)",
                ],
                path=run,
            )
    raise ConfigError(
        "config-without-program",
        problem=f"{run / 'config.toml'} does not name the program of this run",
        reason="its table [program] is missing or damaged",
        path=run / "config.toml",
    )


def read_program(
    run: Path, *, resuming: bool = False, run_changed: bool = False
) -> tuple[Program, dict[str, Any]]:
    """Return the program that a run's config.toml names, by `program_again`, and the file's
    settings by dotted name. Raises `CheckpointError` if this version lacks the run's behavior.
    """
    behavior_in(run)
    text = file_text(run / "config.toml")
    where = str(run / "config.toml")
    described = toml.program(text, where=where)
    program = program_again(described, run=run, resuming=resuming, run_changed=run_changed)
    return program, toml.values(text, where=where)


def program_and_config(run: Path, *, run_changed: bool = False) -> tuple[Program, Any]:
    """Return the program of a run, and its configuration (None if it takes none). A changed program
    is refused unless `run_changed`.
    """
    program, values = read_program(run, run_changed=run_changed)
    config = None
    if program.config is not None:
        config, *_ = layered(program.config, [("file", values)])
    if not run_changed:
        program.refuse_changed_files(config, run=run)
    return program, config


def build_run(
    program: Program, config: Any, *, of: Path | None = None, step: int | None = None
) -> "Run":
    """Build the run of a program, with a status line in a terminal. `of` is the existing run that
    is rebuilt, with the settings that it had after `step` steps; None: after its newest checkpoint.
    """
    with status_line() as show, built_again(of, step=step):
        show("reading the data and building the model")
        try:
            return program.run() if config is None else program.run(config)
        except DataError as problem:
            from surefoot.tracking.run_directory import directory_of_start

            started_in = None if of is None else directory_of_start(of)
            if started_in in (None, os.getcwd()):
                raise
            place = f"relative paths start in {started_in}, where this run was started"
            raise problem.inside(place) from problem


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that replaces the text on one line of a terminal. The line is erased at the
    end; without a terminal nothing is shown."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    if not is_terminal or os.environ.get("TERM") == "dumb":
        yield lambda _: None
        return

    def show(text: str) -> None:
        print(f"\r\x1b[2K{text} ...", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def in_directory(config: Any, run: Path) -> Any:
    """Return the configuration with `run_dir` set to `run`, if it has `run_dir`, because
    config.toml may name another directory.
    """
    if config is None or "run_dir" not in flatten(config):
        return config
    return dataclasses.replace(config, run_dir=str(run))


def for_one_process(config: Any, run: Path, *, sharded: bool = False) -> Any:
    """Return the configuration with `run_dir` set to `run`, for one process. If `sharded`, FSDP
    stays.
    """
    config = in_directory(config, run)
    parallel = getattr(config, "parallel", None)
    stays_sharded = sharded and parallel == "fsdp"
    # a user's setting of that name may mean something else
    if parallel in _SHARED and not stays_sharded:
        config = dataclasses.replace(config, parallel="none")
    if isinstance(config, RecipeSettings):
        if stays_sharded:
            fsdp = dataclasses.replace(config.fsdp, replicas=1)
        else:
            fsdp = type(config.fsdp)()
        config = dataclasses.replace(config, ddp=type(config.ddp)(), fsdp=fsdp)
    return config


def choose_checkpoint(run: Path, which: str | None) -> "Checkpoint":
    """Return a checkpoint of a run: the newest intact, the best, a step's, or an average of the
    last. Damaged checkpoints are reported.
    """
    from surefoot.checkpoint import Store, average_weights
    from surefoot.checkpoint.average import last_steps
    from surefoot.checkpoint.store import without_checkpoint

    store = Store(run / "checkpoints")
    average = re.fullmatch(r"\s*average\s+([0-9]+)\s*", which or "")
    if average:
        last_count = int(average[1])
        mean = store.choose(lambda: average_weights(store, last_count))
        _note_other_settings(run, last_steps(store, last_count))
        return mean

    def read() -> "tuple[Checkpoint, list[Damage]]":
        newest = store.newest_intact()
        if newest is None:
            raise without_checkpoint(run)
        if which in (None, "newest"):
            return newest
        chosen, damaged = newest
        if which == "best":
            return store.at(store.best_step(chosen)), damaged
        if not (which.isascii() and which.isdigit()):
            steps = ", ".join(str(step) for step in store.steps())
            raise ConfigError(
                "checkpoint-unknown",
                problem=f"checkpoint = {which!r} is no checkpoint",
                remedy=f'choose newest, best, a step ({steps}), or "average 5" for the last five',
                setting="checkpoint",
                value=which,
            )
        return store.at(int(which)), damaged

    checkpoint, damaged = store.choose(read)
    for damage in damaged:
        note(f"warning: {damage}")
    return checkpoint


def _note_other_settings(run: Path, steps: Sequence[int]) -> None:
    """Say which settings changed between the checkpoints of a mean: it has those of the newest."""
    names: set[str] = set()
    for change in in_effect(read_changes(run)):
        if steps[0] <= change.from_step < steps[-1]:
            names |= change.names
    if names:
        note(
            f"note: {', '.join(sorted(names))} changed between the averaged checkpoints; the average"
            f" has the settings of step {steps[-1]}"
        )


def step_of_settings(checkpoint: "Checkpoint") -> int:
    """Return the step before a checkpoint, whose settings made its weights: others may hold from
    the step of the checkpoint on.
    """
    return max(0, checkpoint.step - 1)


def _in_file(path: Path, function: str) -> Program:
    import_torch()  # not while the user's file runs, which may switch the collection of garbage off
    names = user_code.names_in(path, function=function, form=f"def {function}(...) -> sf.Run")
    build = names[function]
    path = path.resolve()
    described = {
        "kind": "file",
        "path": str(path),
        "function": function,
        "sha256": user_code.digest(path),
    }
    return Program(build, _config_of(build, path), described, names)


def _config_of(build: Callable[..., Any], path: Path) -> type[Any] | None:
    """Return the dataclass that the first argument is annotated with, or None if the function can
    be called without arguments. Raises `ConfigError` if it needs other ones.
    """
    parameters = list(inspect.signature(build).parameters.values())
    required = [parameter.name for parameter in parameters if _is_required(parameter)]
    if parameters:
        first = parameters[0].name
        kind = typing.get_type_hints(build).get(first)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and required in ([], [first]):
            return kind
    if required:
        raise ConfigError(
            "program-arguments",
            problem=f"{path}: {build.__name__} must take no argument without a default,"
            " or one argument annotated with a dataclass of its settings",
            path=path,
            function=build.__name__,
            required=required,
        )
    return None


def _is_required(parameter: inspect.Parameter) -> bool:
    is_of_several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not is_of_several
