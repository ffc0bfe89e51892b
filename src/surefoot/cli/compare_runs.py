"""Training, reading, comparing and printing the runs of a comparison."""

import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from surefoot.cli.compare_plan import Compare, check_baseline, program_of, trial
from surefoot.cli.compare_worker import build_facts, command, scores_by_batch
from surefoot.cli.options import find_run, needs_option, not_of
from surefoot.config.keywords import parse_score
from surefoot.config.paths import run_path
from surefoot.config.setting_change import SettingChange
from surefoot.config.tree import layered
from surefoot.errors import (
    Command,
    ConfigError,
    SurefootError,
    first_line,
    out_of_range,
    together,
)
from surefoot.program import build_run, in_directory, program_again, program_and_config
from surefoot.run.signals import Signals, to_terminal
from surefoot.tools.compare import plan as planned
from surefoot.tools.compare import runner
from surefoot.tools.compare.plan import Planned, automatic_choices
from surefoot.tools.compare.presentation import as_json, charts, markdown, text, tsv
from surefoot.tools.compare.results import Comparison, compared
from surefoot.tools.compare.search import Search
from surefoot.tools.compare.trained import Compared, Trained, read_run
from surefoot.tools.compare.trials import Trials, outcome_of
from surefoot.tools.compare.variants import Variant, flags, run_labels
from surefoot.tools.report.figures import draw_beside
from surefoot.tracking.console import TextWriter
from surefoot.tracking.format import counted
from surefoot.tracking.run_directory import RunDirectory
from surefoot.train.changed_settings import described

_OUT = "runs/compared"
_NAMED = 4  # runs quoted in a message
_DIFFERENT = 8  # maximum number of differing settings shown


def train_variants(
    new_plan: Planned | None, path: Path, options: Compare, *, typed: set[str]
) -> None:
    """Train the unfinished runs of a comparison in its locked directory, then compare all runs."""
    directory = RunDirectory(path)
    directory.open()
    screen = runner.screen()
    again = f"surefoot compare {shlex.quote(str(path))}"
    signals = Signals(lambda: f"resume with: {again}", say=to_terminal("\n"))
    try:
        plan, chooser = _prepared(new_plan, directory, options, typed=typed)
        screen.say(_introduction(plan, path, chooser, jobs=options.jobs))
        trials = Trials(
            directory,
            lambda name: command("train", path, name),
            threads=plan.threads,
            cwd=plan.started_in,
        )
        session = runner.ComparisonSession(
            chooser,
            trials,
            jobs=options.jobs,
            score=plan.watch,
            screen=screen,
            stopping=lambda: signals.stop is not None,
            labels=run_labels(plan.variants),
        )
        signals.install()
        try:
            session.train()
        finally:
            signals.restore()
        if signals.stop is not None:
            TextWriter(None).put(f"stopped; resume with: {again}\n")
            raise SystemExit(128 + signals.stop)
        plan = planned.read(path) or plan
        comparison = compared(
            _trained(plan, path), target=plan.target, baseline=plan.baseline, settled=plan.settled
        )
        TextWriter(None).put("\n")
        _tell(comparison, directory, more=automatic_choices(plan.found, settings=plan.base))
        if not any(row.status == "finished" for row in comparison.rows):
            raise SystemExit(1)
    finally:
        directory.close()


def _prepared(
    new_plan: Planned | None, directory: RunDirectory, options: Compare, *, typed: set[str]
) -> tuple[Planned, runner.Chooser]:
    existing = planned.read(directory.shown)
    if new_plan is None:
        assert existing is not None
        plan = _continued(existing, directory.shown, options, typed=typed)
    elif existing is None:
        plan = new_plan
    else:
        plan = planned.continue_plan(
            existing, new_plan, where=directory.shown, threads_given=options.threads is not None
        )
    previous_metric = None
    if existing is not None and existing.search is not None and existing.found:
        previous_metric = existing.watch
    if previous_metric is not None and plan.watch != previous_metric:
        meaning = f"{' '.join(previous_metric)}, by which this search has ranked its trials"
        raise out_of_range("metric", plan.metric, meaning)
    _check_score(plan, directory.shown)
    check_baseline(plan)
    if plan.found:
        _write(plan, directory)
    else:
        _write(replace(plan, metric=None), directory)  # these runs may not have that metric
        plan = replace(plan, found=build_facts(plan, directory))
        _check_score(plan, directory.shown)
        _write(plan, directory)
    if plan.search is None:
        return plan, runner.VariantsInOrder(plan.names, directory.path)
    return plan, _search(plan, directory)


def _continued(existing: Planned, path: Path, options: Compare, *, typed: set[str]) -> Planned:
    """Return the plan of an existing comparison, changed by the options."""
    program_again(existing.program, run=path, run_changed=options.run_changed_program)
    changes: dict[str, Any] = {}
    if options.target is not None:
        changes["target"] = options.target
    if options.metric is not None:
        changes["metric"] = options.metric
    if "baseline" in typed:
        changes["baseline"] = options.baseline
    if options.trials is not None:
        if existing.search is None:
            raise not_of("trials", "searches", path)
        changes["search"] = {**existing.search, "trials": options.trials}
    if options.threads not in (None, existing.threads):
        meaning = f"{existing.threads}, as before: another number would change the bits"
        raise out_of_range("threads", options.threads, meaning)
    return replace(existing, **changes)


def _search(plan: Planned, directory: RunDirectory) -> Search:
    assert plan.search is not None

    def begin(name: str, chosen: dict[str, str]) -> None:
        current = planned.read(directory.path) or plan
        if name not in current.names:
            variants = [*current.variants, trial(plan, name, chosen)]
            _write(replace(current, variants=variants), directory)

    if plan.watch is None:
        raise needs_option("a search of runs that monitor no score", "metric", "min SPLIT/METRIC")
    return Search(directory.path, **plan.search, direction=plan.watch[0], begin=begin)


def _write(plan: Planned, directory: RunDirectory) -> None:
    _, kind = program_of(plan, run=directory.shown)
    config, _ = layered(kind, [("comparison", plan.base)])
    directory.write_text(planned.FILE, planned.to_text(plan, config))


def _check_score(plan: Planned, path: Path) -> None:
    if plan.metric is None:
        return
    splits = plan.found.get("splits")
    _, score = parse_score(plan.metric)
    split, _, _ = score.partition("/")
    if splits is not None and split not in splits:
        meaning = f"of a split that is evaluated in training: {', '.join(splits) or 'none'}"
        raise out_of_range("metric", plan.metric, meaning)
    for name in plan.names:
        read_run(path / name, metric=plan.metric)


def _introduction(plan: Planned, path: Path, chooser: runner.Chooser, *, jobs: int) -> str:
    """Return what is printed before anything is trained."""
    done = f", {chooser.over} finished" if chooser.over else ""
    runs = counted(chooser.total, "run" if plan.search is None else "trial")
    threads = counted(plan.threads, "thread")
    lines = [f"{runs}{done}; {jobs} at once, each with {threads}; in {path}"]
    lines += automatic_choices(plan.found, settings=plan.base)
    return "\n".join(lines)


def _trained(plan: Planned, path: Path) -> list[Compared]:
    """Return the runs of a comparison with their outcomes."""
    runs = []
    for variant in plan.variants:
        outcome = outcome_of(path, variant.name) or {"status": "stopped"}
        run = read_run(path / variant.name, metric=plan.metric)
        said = outcome.get("said", "")
        runs.append(Compared(variant, run, outcome["status"], said, outcome.get("batches")))
    return runs


def compare_existing(options: Compare) -> None:
    """Compare finished or running runs, and write the comparison to --out if it is set. A pattern
    such as "runs/a-*" names the seeds of one variant. Raises `ConfigError` for a run named twice.
    """
    _refuse_comparisons(options.what)
    groups = []  # the name or pattern of each path
    paths = []
    for name in options.what:
        matching = _matching_runs(name)
        groups += [name] * len(matching)
        paths += matching
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError(
            "run-named-twice",
            problem="a run is named twice",
            reason="a run is compared with other runs",
            remedy="name each run once",
        )
    runs = [read_run(path, metric=options.metric) for path in paths]
    unlike = _unlike_settings(runs)
    compared_runs: list[Compared] = []
    notes: list[str] = []
    repeats = Counter(groups)
    for group, path, run in zip(groups, paths, runs, strict=True):
        settings = {name: run.settings.get(name) for name in unlike}
        settings["seed"] = _seed_of(run)
        variant = Variant(str(path), group, {}, settings)
        batches: Mapping[str, Any]
        if options.paired:
            draws = repeats[group] > 1
            batches = _evaluate_again(path, run, options.run_changed_program, draws=draws)
        else:
            batches = _read_batches(path, run)
        compared_runs.append(Compared(variant, run, batches=batches))
        if unlike:
            notes.append(f"{path}: {_settings_of(run, unlike[:_DIFFERENT])}")
    for path, run in zip(paths, runs, strict=True):
        notes += [f"{path}: {text}" for text in (*run.problems, *_unlike_changes(run, runs))]
    _refuse_equal_seeds(compared_runs)
    if len(unlike) > _DIFFERENT:
        notes.append(
            f"and {len(unlike) - _DIFFERENT} more settings differ: see config.toml of each run"
        )
    out = RunDirectory(run_path(_OUT if options.out is None else options.out, setting="--out"))
    out.open()
    try:
        comparison = compared(compared_runs, target=options.target, baseline=options.baseline)
        over = ""
        if (out.path / "comparison.json").exists():
            over = ", replacing an earlier comparison"
        _tell(comparison, out, more=notes, over=over)
    finally:
        out.close()


def _unlike_settings(runs: Sequence[Trained]) -> list[str]:
    """Return the names of the settings, except run_dir, that are not the same in all runs."""
    names = dict[str, None]()
    for run in runs:
        names |= dict.fromkeys(run.settings)
    unlike = []
    for name in names:
        values = {repr(run.settings.get(name)) for run in runs}
        if name != "run_dir" and len(values) > 1:
            unlike.append(name)
    return unlike


def _unlike_changes(run: Trained, runs: Sequence[Trained]) -> list[str]:
    """Return the changes of settings that a run had on the way and not all of the others, as text.
    Of a run without any, where another had some, return that.
    """
    if not run.changes and any(other.changes for other in runs):
        return ["no setting was changed on the way"]
    lines = []
    for change in run.changes:
        has_it = [_what_changes(change) in map(_what_changes, other.changes) for other in runs]
        if not all(has_it):
            lines.append(described(change))
    if len(lines) > _DIFFERENT:
        lines[_DIFFERENT:] = [f"and {len(lines) - _DIFFERENT} more changes"]
    return lines


def _what_changes(change: SettingChange) -> tuple[int, str, str]:
    """Return what of a change decides the steps: not who made it when, and why."""
    return change.from_step, change.setting, repr((change.now, change.follows))


def _settings_of(run: Trained, names: Sequence[str]) -> str:
    """Return the settings that a run has, as flags, or as its config.toml has them if a script
    built it. Missing ones are named only if it has none of them.
    """
    known = {name: run.settings[name] for name in names if run.settings.get(name) is not None}
    if not known:
        return f"without {', '.join(names)}"
    if run.of_script:
        return ", ".join(f"{name} = {value}" for name, value in known.items())
    return flags(known)


def _matching_runs(name: str) -> list[Path]:
    """Return the run of a name, or the runs that match a pattern with * in their last part."""
    path = run_path(name, setting="the run")
    if "*" not in path.name or path.exists():
        return [find_run(name)]
    for folder in (path.parent, Path("runs") / path.parent):
        runs = sorted(file.parent for file in folder.glob(f"{path.name}/config.toml"))
        if runs:
            return runs
    return [find_run(name)]  # which says that there is no such run


def _seed_of(run: Trained) -> Any:
    return run.settings.get("seed") if run.order is None else run.order["seed"]


def _refuse_equal_seeds(runs: Sequence[Compared]) -> None:
    paths: dict[tuple[str, Any], str] = {}
    for run in runs:
        group = run.variant.group
        seed = run.variant.settings["seed"]
        other = paths.setdefault((group, seed), run.variant.name)
        if other != run.variant.name:
            raise ConfigError(
                "repeats-of-one-seed",
                problem=f"{other} and {run.variant.name} match {group} and have the seed {seed}",
                reason="the runs of a pattern are one variant, trained with different seeds",
                remedy="name runs of different variants apart",
                pattern=group,
                seed=seed,
            )


def _refuse_comparisons(names: Sequence[str]) -> None:
    problems: list[ConfigError] = []
    for name in dict.fromkeys(names):
        path = _comparison_named(name)
        plan = None if path is None else planned.read(path)
        if plan is None:
            continue
        there = ", ".join(f"{path}/{run}" for run in plan.names[:_NAMED]) or "none yet"
        more = ""
        if len(plan.names) > _NAMED:
            more = f" and {len(plan.names) - _NAMED} more"
        problem = ConfigError(
            "comparison-in-place-of-run",
            problem=f"{name} is a comparison",
            reason=f"its runs: {there}{more}",
            remedy=Command("surefoot compare RUN RUN"),
            path=path,
        )
        problems.append(problem)
    if problems:
        raise together(problems)


def _comparison_named(name: str) -> Path | None:
    for path in (run_path(name, setting="the run"), Path("runs") / name):
        if (path / planned.FILE).is_file():
            return path
    return None


def _read_batches(path: Path, run: Trained) -> Mapping[str, Any]:
    """Return the scores of batches that the run's comparison has computed, or why there are none."""
    outcome = outcome_of(path.absolute().parent, path.name) or {}
    batches: dict[str, Any] = outcome.get("batches") or {}
    if batches and run.watch is not None and run.best is not None:
        if "why" in batches:
            return batches
        steps = [(batches.get(kind) or {}).get("step") for kind in ("best", "final")]
        if batches.get("score") == run.watch[1] and steps == [run.best[0], run.scores[-1][0]]:
            return batches
    cure = "a script built it" if run.of_script else "add --paired"
    return {"why": f"{path} was not evaluated batch by batch: {cure}"}


def _evaluate_again(path: Path, run: Trained, run_changed: bool, *, draws: bool) -> dict[str, Any]:
    """Return the scores of batches, computed now, or why they cannot be."""
    print(f"evaluating {path} batch by batch", file=sys.stderr)
    try:
        program, config = program_and_config(path, run_changed=run_changed)
        rebuilt = build_run(program, in_directory(config, path), of=path)
        return scores_by_batch(rebuilt, run, draws=draws)
    except SurefootError as problem:
        return {"why": f"{path} cannot be rebuilt: {first_line(problem)}"}


def _tell(
    comparison: Comparison, directory: RunDirectory, *, more: Sequence[str], over: str = ""
) -> None:
    comparison = replace(comparison, notes=[*comparison.notes, *more])
    for suffix, write in (("json", as_json), ("tsv", tsv), ("md", markdown)):
        directory.write_text(f"comparison.{suffix}", write(comparison))
    pictures = draw_beside(charts(comparison), directory.path / "comparison", title="")
    suffixes = [*(file.suffix[1:] for file in pictures), "md", "tsv", "json"]
    TextWriter(None).put(
        f"{text(comparison)}\nwritten: {directory.shown}/comparison.{', .'.join(suffixes)}{over}\n"
    )
