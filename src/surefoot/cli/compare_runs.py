"""`surefoot compare RUN RUN...`: runs that are there put next to each other; and how every comparison is told and written."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.cli.compare_options import Compare
from surefoot.cli.options import find_run
from surefoot.compare import plan as planned
from surefoot.compare.batch_scores import scores_by_batch
from surefoot.compare.plot import draw
from surefoot.compare.results import Comparison, compared
from surefoot.compare.tables import as_json, markdown, text, tsv
from surefoot.compare.trained import Compared, Trained, read_run
from surefoot.compare.trials import outcome_of
from surefoot.compare.variants import Variant, flags
from surefoot.config.paths import local_path
from surefoot.errors import ConfigError, SurefootError
from surefoot.recipes.program import build_run, in_directory, program_and_config
from surefoot.tracking.console import Said
from surefoot.tracking.run_directory import RunDirectory

_OUT = "runs/compared"
_NAMED = 4  # runs of a comparison
_DIFFERENT = 8  # settings shown that runs differ in


def compare_runs(asked: Compare) -> None:
    _refuse_comparisons(asked.what)
    paths = [find_run(name) for name in asked.what]
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("one of these runs is named twice")
    runs = [read_run(path, score=asked.score) for path in paths]
    unlike = [
        name
        for name in dict.fromkeys(name for run in runs for name in run.settings)
        if name != "out" and len({repr(run.settings.get(name)) for run in runs}) > 1
    ]
    found = []
    for path, run in zip(paths, runs, strict=True):
        variant = Variant(str(path), str(path), {}, {name: run.settings.get(name) for name in unlike})
        if asked.paired:
            batches: Mapping[str, Any] = _scored_again(path, run, run_changed=asked.run_changed_program)
        else:
            batches = _scored_then(path, run)
        found.append(Compared(variant, run, batches=batches))
    out = RunDirectory(local_path(asked.out or _OUT, setting="--out"))
    out.open()
    overwritten = (out.path / "comparison.json").exists()
    try:
        told = [f"{run.variant.name}: {_typed(run.variant.settings, unlike[:_DIFFERENT])}" for run in found if unlike]
        if len(unlike) > _DIFFERENT:
            told.append(f"and {len(unlike) - _DIFFERENT} more settings that differ: see config.toml of each")
        over = ", over those of an earlier comparison" if overwritten else ""
        tell(compared(found, target=asked.target, reference=asked.reference), out.path, more=told, over=over)
    finally:
        out.close()


def _refuse_comparisons(names: Sequence[str]) -> None:
    """Raise `ConfigError` where what is named is a comparison: its runs are to be named."""
    problems = []
    for name in dict.fromkeys(names):
        path = next((path for path in (Path(name), Path("runs") / name) if (path / planned.FILE).is_file()), None)
        if path is not None and (plan := planned.read(path)) is not None:
            there = [f"{path}/{run}" for run in plan.names[:_NAMED]]
            more = f" and {len(plan.names) - _NAMED} more" if len(plan.names) > _NAMED else ""
            problems.append(f"{name} is a comparison; its runs: {', '.join(there) or 'none yet'}{more}")
    if problems:
        more_of_them = [f"... and {len(problems) - 3} more"] if len(problems) > 3 else []
        raise ConfigError("\n  ".join([*problems[:3], *more_of_them, "compare runs of them: surefoot compare RUN RUN"]))


def _typed(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    """Some settings as they are typed; those that a run does not have only where it has none of them."""
    known = {name: settings[name] for name in names if settings.get(name) is not None}
    return flags(known) if known else f"without {', '.join(names)}"


def _scored_then(path: Path, run: Trained) -> Mapping[str, Any]:
    """The scores batch by batch that a comparison has left beside a run which it trained, if they are of this run and score."""
    held = (outcome_of(path.absolute().parent, path.name) or {}).get("batches")
    missing = {"why": f"{path} was not scored batch by batch: --paired does that"}
    if held is None or run.watch is None or run.best is None:
        return missing
    if "why" in held:
        return dict(held)
    steps = [None if held.get(kind) is None else held[kind]["step"] for kind in ("best", "final")]
    same = held.get("score") == run.watch[1] and steps == [run.best[0], run.scores[-1][0]]
    return dict(held) if same else missing


def _scored_again(path: Path, run: Any, *, run_changed: bool) -> dict[str, Any]:
    """The scores of a run batch by batch, by building it again; why not, where that cannot be."""
    print(f"scoring {path} batch by batch", file=sys.stderr)
    try:
        program, config = program_and_config(path, run_changed=run_changed)
        return scores_by_batch(build_run(program, in_directory(config, path), of=path), run)
    except SurefootError as problem:
        return {"why": f"{path} cannot be built again: {str(problem).splitlines()[0]}"}


def tell(comparison: Comparison, path: Path, *, more: Sequence[str], over: str = "") -> None:
    """Write a comparison as tables and as a picture, with `more` notes, and print it."""
    comparison = dataclasses.replace(comparison, notes=[*comparison.notes, *more])
    directory = RunDirectory(path)
    for name, written in (("json", as_json), ("tsv", tsv), ("md", markdown)):
        directory.write_text(f"comparison.{name}", written(comparison))
    draw(comparison, path / "comparison")
    Said(None).put(f"{text(comparison)}\nwritten: {path}/comparison.png, .svg, .md, .tsv, .json{over}\n")
