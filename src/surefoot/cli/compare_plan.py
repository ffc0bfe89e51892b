"""The options of `surefoot compare`, and the plan of a comparison built from them."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from surefoot.cli.options import (
    ChangedProgramOption,
    check_excluded,
    limited,
    needs_option,
    without,
)
from surefoot.cli.processes import refuse_several
from surefoot.cli.settings import (
    arguments_for,
    configured,
    file_values,
    layers_below,
    without_settings,
)
from surefoot.config.tree import MOST_USED, flatten, layered
from surefoot.distributed.process_count import cores_each
from surefoot.errors import ConfigError, Setting, SurefootError, out_of_range, together
from surefoot.program import Program, program_again
from surefoot.tools.compare.plan import Planned
from surefoot.tools.compare.search import Pruner, Sampler, corners, parameter, trial_name
from surefoot.tools.compare.variants import (
    Variant,
    grid,
    group_labels,
    names,
    refuse_baseline,
    refuse_duplicates,
)

_FORM = "SETTING=VALUE, such as optimizer.lr=1e-3"


@dataclass(frozen=True, kw_only=True)
class Compare(ChangedProgramOption):
    """surefoot compare RECIPE|FILE.py:build --vary SETTING=A,B... [settings]
    surefoot compare DIR                 continue a comparison
    surefoot compare RUN RUN...          compare runs, or "runs/a-*" "runs/b-*"

    Train every combination of the varied settings on the same samples in the same
    order, each as a separate run below --out. Write a table and a plot that show
    which differences are within the noise of seeds and data; one seed is not
    tested. The same command continues after a stop or a kill and skips finished
    runs. Test splits are never evaluated.

      surefoot compare gpt --vary optimizer.name=adamw,sgd --vary seed=0,1
      surefoot compare images --trials 20 --vary optimizer.lr=1e-4..1e-2 --jobs 2
      surefoot compare runs/a runs/b --paired
    """

    what: Positional[Annotated[tuple[str, ...], arg(metavar="RECIPE|FILE.py:build|DIR|RUN")]] = ()
    """A recipe or program to train, a comparison to continue, or several runs to compare."""
    config: str | None = None
    """A TOML file of settings."""
    vary: UseAppendAction[tuple[str, ...]] = field(default=(), metadata=MOST_USED)
    """SETTING=A,B: values of a setting; several settings make a grid. A search also takes a range,
    SETTING=1e-4..1e-2.
    """
    variant: UseAppendAction[tuple[str, ...]] = field(default=(), metadata=MOST_USED)
    """An additional combination of settings, "S=A T=B". Repeatable."""
    seeds: int = limited(1, min_value=1, most_used=True)
    """Number of seeds per combination, starting at --seed. A test needs two or more."""
    jobs: int = limited(1, min_value=1, most_used=True)
    """Number of runs that train at once."""
    threads: int | None = limited(None, min_value=1)
    """CPU threads per run, saved in compare.toml. Default: cores / jobs."""
    target: float | None = None
    """Metric value; the result shows how soon each run reaches it."""
    baseline: str = "best"
    """Run that the other runs are compared with: best, first, or the name of a variant."""
    metric: str | None = field(default=None, metadata=MOST_USED)
    """Metric to compare by, as "min SPLIT/METRIC". Default: the metric that the runs monitor."""
    out: str | None = field(default=None, metadata=MOST_USED)
    """Output directory. Default: runs/compare, or runs/compared for existing runs."""
    paired: bool = field(default=False, metadata=MOST_USED)
    """Evaluate existing runs again and compare them batch by batch."""
    trials: int | None = limited(None, min_value=1, most_used=True)
    """Number of trials of a search over the ranges of --vary."""
    sampler: Sampler = "tpe"
    """Method that chooses the settings of each trial."""
    pruner: Pruner = "median"
    """Method that stops poor trials early."""


def planned_of(program: Program, flags: Sequence[str], options: Compare, *, verb: str) -> Planned:
    """Return the plan of a comparison. Raises `ConfigError` with every combination that cannot be
    trained.
    """
    if program.config is None:
        raise without_settings(
            program,
            reason="there is nothing to vary",
            remedy="give it a dataclass argument: def build(config: Config), with a field"
            " `run_dir: str`",
        )
    refuse_several(flags, verb="compare")
    space = None
    if options.trials is None:
        texts = _combinations(options)
    else:
        space = _space(options)
        texts = corners(space)
    texts, configurations = _configurations(program, options, flags, texts, verb=verb)
    if space is None and len(texts) == 1:
        raise _nothing_varies()
    flat = [flatten(config) for config, _ in configurations]
    base = flat[0]
    if "run_dir" not in base:
        raise _without_field("run_dir: str", reason="all variants would share one directory")
    varied = []
    for values, text in zip(flat, texts, strict=True):
        varied.append({setting: values[setting] for setting in text})
    if space is None:
        refuse_duplicates(varied, flat)
    # what differs in some run: the varied settings first, then those that follow from them
    recorded = dict[str, None]()
    for variation in varied:
        recorded |= dict.fromkeys(variation)
    for name in base:
        if name != "run_dir" and any(values[name] != base[name] for values in flat):
            recorded[name] = None
    settings = [{name: values[name] for name in recorded} for values in flat]
    variants = _variants(varied, settings, seeds=options.seeds)
    search = None
    if space is not None:
        variants = []  # the search chooses them
        search = {
            "trials": options.trials,
            "sampler": options.sampler,
            "pruner": options.pruner,
            "seed": base.get("seed", 0),
            "space": space,
        }
    _, origins = configurations[0]
    plan = Planned(
        program=program.described,
        base=base,
        origins={**origins, **dict.fromkeys(recorded, "varied"), "run_dir": "per variant"},
        variants=variants,
        threads=options.threads or max(1, _cores() // options.jobs),
        started_in=os.getcwd(),
        target=options.target,
        metric=options.metric,
        baseline=options.baseline,
        search=search,
    )
    check_baseline(plan)
    return plan


def _cores() -> int:
    """Return the number of cores to train on, at most OMP_NUM_THREADS."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdigit() and int(limit) > 0:
        return min(cores_each(1), int(limit))
    return cores_each(1)


def _variants(
    varied: Sequence[dict[str, Any]], settings: Sequence[dict[str, Any]], *, seeds: int
) -> list[Variant]:
    """Return the variants of combinations of varied settings. Those that differ only in the seed
    are repeats of one variant, whether --seeds or --vary gave the seeds.
    """
    are_repeated = seeds > 1
    for combination in varied:
        if "seed" in combination and len(combination) > 1:
            are_repeated = True
    run_seeds: list[Any] = [None] * len(varied)
    if are_repeated:
        run_seeds = [combination.pop("seed", None) for combination in varied]
    combinations = {_key_of(combination): combination for combination in varied}
    groups = dict(zip(combinations, names(list(combinations.values())), strict=True))
    variants = []
    for seed, combination, values in zip(run_seeds, varied, settings, strict=True):
        group = groups[_key_of(combination)]
        name = group if seed is None else f"{group},seed={seed}"
        variants.append(Variant(name, group, combination, values))
    return variants


def _key_of(combination: Mapping[str, Any]) -> str:
    return repr(sorted(combination.items()))


def trial(plan: Planned, name: str, chosen: Mapping[str, str]) -> Variant:
    """Return the search variant with the `chosen` values; all other settings are the plan's."""
    _, kind = program_of(plan, run=Path(name))
    flags = _flags_of(kind, chosen)
    config, _ = configured(kind, [("comparison", plan.base)], flags, verb="compare")
    chosen_values = flatten(config)
    varied = {setting: chosen_values[setting] for setting in chosen}
    # settings typed for all trials keep their values if a trial changes the optimizer
    by_hand = {}
    others = {}
    for setting, value in plan.base.items():
        if plan.origins.get(setting) == "flag":
            by_hand[setting] = value
        else:
            others[setting] = value
    config, _ = layered(kind, [("comparison", others), ("flag", by_hand | varied)])
    changed = {}
    for setting, value in flatten(config).items():
        if value != plan.base.get(setting):
            changed[setting] = value
    return Variant(name, name, varied, changed | varied)


def _flags_of(kind: type[Any], texts: Mapping[str, str]) -> list[str]:
    """Return the arguments that set settings to texts."""
    arguments = []
    for setting, text in texts.items():
        arguments += arguments_for(kind, setting, text)
    return arguments


def program_of(plan: Planned, *, run: Path) -> tuple[Program, type[Any]]:
    """Return the program and the settings dataclass of a comparison's runs. The caller has checked
    that the program is unchanged.
    """
    program = program_again(plan.program, run=run, run_changed=True)
    if program.config is None:
        raise without_settings(program, reason="the runs of the comparison have settings")
    return program, program.config


def check_baseline(plan: Planned) -> None:
    """Raise `ConfigError` if the baseline is neither a variant nor a trial of the search."""
    labels = group_labels(plan.variants)
    if plan.search is not None:
        trials = [trial_name(index) for index in range(plan.search["trials"])]
        labels |= dict(zip(trials, trials, strict=True))
    refuse_baseline(plan.baseline, labels)


def _combinations(options: Compare) -> list[dict[str, str]]:
    vary: dict[str, list[str]] = {}
    for text in options.vary:
        setting, value = _setting(text, "vary")
        values = [part.strip() for part in value.split(",")]
        vary.setdefault(setting, []).extend(values)
        if "" in values:
            raise out_of_range("vary", text, _FORM)
        if any(".." in part and not Path(part).exists() for part in values):
            raise needs_option(f"the range of {setting}", "trials", 20)
    combinations = list(grid(vary))
    for text in options.variant:
        combinations.append(dict(_setting(part, "variant") for part in shlex.split(text)))
    if not combinations and options.seeds > 1:
        combinations = [{}]  # only the seed varies
    if not combinations:
        raise _nothing_varies()
    if options.seeds > 1 and any("seed" in combination for combination in combinations):
        check_excluded("vary", ["seeds"], reason="it varies the seed already")
    return combinations


def _nothing_varies() -> ConfigError:
    return ConfigError(
        "nothing-varies",
        problem="nothing varies: a comparison needs two variants",
        remedy=[
            Setting("vary", "optimizer.lr=1e-3,3e-3"),
            Setting("variant", "optimizer.name=sgd optimizer.lr=0.1"),
            Setting("seeds", 3),
            ("in a search", Setting("vary", "optimizer.lr=1e-4..1e-2")),
        ],
        setting="vary",
    )


def _without_field(field: str, *, reason: str) -> ConfigError:
    return ConfigError(
        "program-without-setting",
        problem=f"these runs have no setting `{field}`",
        reason=reason,
        remedy="add it to the settings of the program",
        setting=field.partition(":")[0],
    )


def _configurations(
    program: Program,
    options: Compare,
    flags: Sequence[str],
    texts: Sequence[dict[str, str]],
    *,
    verb: str,
) -> tuple[list[dict[str, str]], list[tuple[Any, dict[str, str]]]]:
    kind = program.config
    assert kind is not None
    in_file = file_values(options.config)
    known: list[dict[str, str]] = []
    configurations: list[tuple[Any, dict[str, str]]] = []
    problems: dict[str, SurefootError] = {}  # by message, with the first combination that has it
    wrong: list[SurefootError] = []

    def add(text: dict[str, str]) -> Any:
        # varied values override flags
        arguments = [*without(flags, text), *_flags_of(kind, text)]
        layers = layers_below(program, in_file, arguments)
        config, origins = configured(kind, layers, arguments, verb=verb, option_classes=[Compare])
        configurations.append((config, origins))
        known.append(text)
        program.check(config)
        return config

    for text in texts:
        try:
            config = add(text)
            if options.seeds > 1:
                seed = flatten(config).get("seed")
                if not isinstance(seed, int):
                    raise _without_field("seed: int", reason="seeds cannot vary it")
                known[-1] = {**text, "seed": str(seed)}
                for repeat in range(1, options.seeds):
                    add({**text, "seed": str(seed + repeat)})
        except ConfigError as problem:
            if not text:
                raise
            wrong.append(problem)
            combination = " ".join(f"{name}={value}" for name, value in text.items())
            problems.setdefault(str(problem), problem.inside(combination))
    if len(problems) == 1 and len(wrong) == len(texts) > 1:
        raise wrong[0]
    if problems:
        raise together([*problems.values()])
    return known, configurations


def _space(options: Compare) -> dict[str, dict[str, Any]]:
    others = ["variant"] if options.variant else []
    if options.seeds > 1:
        others.append("seeds")
    check_excluded("trials", others, reason="a search chooses the combinations")
    if not options.vary:
        raise _nothing_varies()
    space = {}
    for text in options.vary:
        name, value = _setting(text, "vary")
        space[name] = parameter(name, value)
    return space


def _setting(text: str, option: str) -> tuple[str, str]:
    setting, equals, value = text.partition("=")
    if not equals or not setting or not value:
        raise out_of_range(option, text, _FORM)
    if setting == "run_dir":
        meaning = "another setting than run_dir: each variant has its own directory below out"
        raise out_of_range(option, text, meaning)
    return setting.replace("-", "_"), value
