"""`surefoot compare ...`: variants trained side by side, settings searched for, or runs that are there put next to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.cli.compare_options import Compare, check_score, given_options
from surefoot.cli.compare_plan import check_reference, planned_of, program_of, trial
from surefoot.cli.options import verb_options
from surefoot.compare import plan as planned
from surefoot.compare import progress
from surefoot.compare.notes import of_what_was_open
from surefoot.compare.plan import Planned
from surefoot.compare.search import Search
from surefoot.compare.trials import Trials, outcome_of
from surefoot.compare.variants import run_labels
from surefoot.config.paths import local_path
from surefoot.config.tree import layered
from surefoot.errors import ConfigError
from surefoot.recipes.program import find_program, program_again
from surefoot.run.signals import Signals, to_terminal
from surefoot.tracking.console import Said
from surefoot.train.patience import parsed

if TYPE_CHECKING:
    from surefoot.compare.runner import Chooser
    from surefoot.compare.trained import Compared
    from surefoot.tracking.run_directory import RunDirectory

_OUT = "runs/compare"


def compare(arguments: list[str]) -> None:
    options, flags = verb_options(Compare, arguments, verb="compare")
    named, given = options.what, given_options(arguments)
    if options.schedules is not None:
        from surefoot.cli.plan_schedules import compare_schedules

        compare_schedules(options, flags, given=given)
        return
    check_score(options.score)
    if not named:
        raise ConfigError(
            "compare what? surefoot compare gpt --vary optimizer.lr=1e-3,3e-3, or surefoot compare RUN RUN"
        )
    if len(named) == 1 and (Path(named[0]) / planned.FILE).is_file():
        _refuse(flags, given - {"jobs", "threads", "target", "reference", "score", "search", "run_changed_program"})
        _train(None, Path(named[0]), options, given=given)
    elif len(named) > 1:
        _refuse(flags, given - {"target", "reference", "score", "out", "paired", "run_changed_program"})
        from surefoot.cli.compare_runs import compare_runs

        compare_runs(options)
    else:
        if (Path(named[0]) / "config.toml").is_file():
            raise ConfigError(f"{named[0]} is one run: name another to compare it with, or what to train")
        if options.paired:
            raise ConfigError(
                "--paired is for runs that are there: those trained here are always scored batch by batch"
            )
        if options.search is None and given & {"sampler", "pruner"}:
            raise ConfigError("--sampler and --pruner are of a search\n  say how many trials: --search 20")
        program = find_program(named[0])
        plan = planned_of(program, flags, options, verb=f"compare {named[0]}")
        _train(plan, local_path(options.out or _OUT, setting="--out"), options, given=given)


def _refuse(flags: Sequence[str], options: set[str]) -> None:
    first = next(iter([*flags, *(f"--{name.replace('_', '-')}" for name in sorted(options))]), None)
    if first is not None:
        raise ConfigError(
            f"{first} is for the start of a comparison\n  another one: surefoot compare RECIPE ... --out DIR"
        )


# --- trained here ----------------------------------------------------------------------------------------------------


def _train(asked_plan: Planned | None, path: Path, asked: Compare, *, given: set[str]) -> None:
    """Train what is not yet trained of a comparison, in the directory that it holds meanwhile, and tell how they compare."""
    from surefoot.cli.compare_runs import tell
    from surefoot.cli.compare_worker import command
    from surefoot.compare.results import compared
    from surefoot.compare.runner import Sitting
    from surefoot.tracking.run_directory import RunDirectory

    if asked_plan is not None:
        check_reference(asked_plan)
    directory = RunDirectory(path)
    directory.open()
    screen = progress.screen()
    signals = Signals(lambda: f"go on with: surefoot compare {path}", say=to_terminal("\n"))
    try:
        plan, chooser = _prepared(asked_plan, directory, asked, given=given)
        screen.say(_said_first(plan, path, chooser, jobs=asked.jobs))
        trials = Trials(directory, lambda name: command("train", path, name), threads=plan.threads, cwd=plan.started_in)
        sitting = Sitting(
            chooser,
            trials,
            jobs=asked.jobs,
            score=plan.watch,
            screen=screen,
            stopping=lambda: signals.stop is not None,
            shown=run_labels(plan.variants),
        )
        signals.install()
        try:
            sitting.train()
        finally:
            signals.restore()
        if signals.stop is not None:
            Said(None).put(f"stopped; go on with: surefoot compare {path}\n")
            raise SystemExit(128 + signals.stop)
        plan = planned.read(path) or plan
        found = compared(_trained(plan, path), target=plan.target, reference=plan.reference, settled=plan.settled)
        Said(None).put("\n")
        tell(found, path, more=of_what_was_open(plan.found, settings=plan.base))
        if not any(row.status == "finished" for row in found.rows):
            raise SystemExit(1)
    finally:
        directory.close()


def _prepared(
    asked_plan: Planned | None, directory: RunDirectory, asked: Compare, *, given: set[str]
) -> tuple[Planned, Chooser]:
    from surefoot.cli.compare_worker import what_building_tells
    from surefoot.compare.runner import InOrder

    held = planned.read(directory.path)
    if asked_plan is None:
        assert held is not None
        program_again(held.program, run=directory.path, run_changed=asked.run_changed_program)
        changes = {name: getattr(asked, name) for name in ("target", "score") if getattr(asked, name) is not None}
        changes |= {"reference": asked.reference} if "reference" in given else {}
        if asked.search is not None:
            if held.search is None:
                raise ConfigError(f"--search {asked.search}: {directory.path} is no search, its variants are given")
            changes["search"] = {**held.search, "trials": asked.search}
        if asked.threads not in (None, held.threads):
            raise ConfigError(
                f"--threads {asked.threads}: this comparison has {held.threads}, and another number gives other bits"
            )
        plan = dataclasses.replace(held, **changes)
    else:
        plan = asked_plan
        if held is not None:
            plan = planned.going_on(held, plan, where=directory.path, threads_given=asked.threads is not None)
    judged = None if held is None or held.search is None or not held.found else held.watch
    if judged is not None and plan.watch != judged:
        raise ConfigError(
            f"--score {plan.score!r}: what this search has tried was judged by {' '.join(judged)}\n"
            "  another search: --out DIR"
        )
    _check_score(plan, directory.path)
    check_reference(plan)
    _write(plan if plan.found else dataclasses.replace(plan, score=None), directory)  # which may not be one of theirs
    if not plan.found:
        plan = dataclasses.replace(plan, found=what_building_tells(plan, directory))
        _check_score(plan, directory.path)
        _write(plan, directory)
    if plan.search is None:
        return plan, InOrder(plan.names, directory.path)
    return plan, _search(plan, directory)


def _search(plan: Planned, directory: RunDirectory) -> Chooser:
    """The search of a plan; the settings of each trial are in the plan before it begins."""
    assert plan.search is not None

    def begin(name: str, chosen: dict[str, str]) -> None:
        held = planned.read(directory.path) or plan
        if name not in held.names:
            _write(dataclasses.replace(held, variants=[*held.variants, trial(plan, name, chosen)]), directory)

    if plan.watch is None:
        raise ConfigError(
            "these runs watch no score, so a search would not know what is better\n  say it: --score 'min SPLIT/SCORE'"
        )
    return Search(
        directory.path,
        plan.search["space"],
        **{name: plan.search[name] for name in ("trials", "seed", "sampler", "pruner")},
        direction=plan.watch[0],
        begin=begin,
    )


def _write(plan: Planned, directory: RunDirectory) -> None:
    config = layered(program_of(plan, run=directory.path)[1], [("comparison", plan.base)])[0]
    directory.write_text(planned.FILE, planned.to_text(plan, config))


def _check_score(plan: Planned, path: Path) -> None:
    """Refuse a score that these runs do not have, as far as building one has told, and what is recorded of those begun."""
    from surefoot.compare.trained import read_run

    splits = plan.found.get("splits")
    if plan.score is not None and splits is not None and parsed(plan.score)[1].partition("/")[0] not in splits:
        raise ConfigError(
            f"--score {plan.score!r}: these runs score no such split on the way; there are: {', '.join(splits) or 'none'}"
        )
    for name in plan.names if plan.score is not None else []:
        read_run(path / name, score=plan.score)


def _said_first(plan: Planned, path: Path, chooser: Chooser, *, jobs: int) -> str:
    done = f", {chooser.over} of them {'is' if chooser.over == 1 else 'are'} done" if chooser.over else ""
    kind = ("run" if plan.search is None else "trial") + "s" * (chooser.total != 1)
    threads = f"{plan.threads} thread{'s' if plan.threads > 1 else ''}"
    first = f"{chooser.total} {kind}{done}; {jobs} at once, each with {threads}; in {path}"
    return "\n".join([first, *of_what_was_open(plan.found, settings=plan.base)])


def _trained(plan: Planned, path: Path) -> list[Compared]:
    from surefoot.compare.trained import Compared, read_run

    found = []
    for variant in plan.variants:
        outcome = outcome_of(path, variant.name) or {"status": "stopped", "said": ""}
        run = read_run(path / variant.name, score=plan.score)
        found.append(Compared(variant, run, outcome["status"], outcome.get("said", ""), outcome.get("batches")))
    return found
