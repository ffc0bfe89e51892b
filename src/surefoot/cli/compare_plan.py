"""What `surefoot compare ...` asks for: from a command line to the plan of a comparison, every variant's settings checked."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.cli.compare_options import Compare
from surefoot.cli.options import option_names, without
from surefoot.cli.processes import refuse_several
from surefoot.cli.settings import configured, file_values, layers_below, typed
from surefoot.compare.plan import Planned
from surefoot.compare.search import corners, parameter, trial_name
from surefoot.compare.variants import Variant, grid, group_labels, names, refuse_twins
from surefoot.config.tree import flatten, layered
from surefoot.errors import ConfigError
from surefoot.launch.process_count import cores_each
from surefoot.recipes.program import Program, program_again

_SHOWN = 3  # combinations that cannot be


def planned_of(program: Program, flags: Sequence[str], asked: Compare, *, verb: str) -> Planned:
    """The plan; `ConfigError` with every combination that cannot be trained."""
    if program.config is None:
        raise ConfigError(
            f"{program.described.get('path')}: build() takes no settings, so there is nothing to vary\n"
            "  let it take a dataclass: def build(config: Config), with a field `out: str`"
        )
    refuse_several(flags, verb="compare")
    space = _space(asked) if asked.search is not None else None
    texts = _combinations(asked) if space is None else corners(space)
    configurations = _configurations(program, file_values(asked.config), flags, texts, verb=verb)
    if space is None and len(texts) == 1:
        raise ConfigError(
            "one variant, and nothing to compare it with\n"
            "  add another value (--vary optimizer.lr=1e-3,3e-3), another --variant, or --seeds 3 to see what a seed changes"
        )
    flat = [flatten(config) for config, _ in configurations]
    if "out" not in flat[0]:
        raise ConfigError(
            "these runs have no setting `out`, so all variants would be one directory\n  add out: str to the settings"
        )
    search = {"trials": asked.search, "sampler": asked.sampler, "pruner": asked.pruner}
    varied = [{setting: values[setting] for setting in _plain(text)} for values, text in zip(flat, texts, strict=True)]
    if space is None:
        refuse_twins(varied, flat)
    unlike = [name for name in flat[0] if name != "out" and any(values[name] != flat[0][name] for values in flat)]
    kept = dict.fromkeys([*(name for one in varied for name in one), *unlike])
    repeats = asked.seeds if space is None else 1
    shown = [{key: value for key, value in one.items() if key != "seed" or repeats == 1} for one in varied]
    settings = [{key: values[key] for key in kept} for values in flat]
    named = _named(varied, repeats)
    variants = [Variant(*pair, one, own) for pair, one, own in zip(named, shown, settings, strict=True)]
    return Planned(
        program=program.described,
        base=flat[0],
        origins={**configurations[0][1], **dict.fromkeys(kept, "varied"), "out": "of each its own"},
        variants=variants if space is None else [],
        threads=asked.threads or max(1, _cores() // asked.jobs),
        started_in=os.getcwd(),
        target=asked.target,
        score=asked.score,
        reference=asked.reference,
        search=None if space is None else search | {"seed": flat[0].get("seed", 0), "space": space},
    )


def trial(plan: Planned, name: str, chosen: Mapping[str, str]) -> Variant:
    _, kind = program_of(plan, run=Path(name))
    flags = [part for setting, text in chosen.items() for part in typed(kind, setting, text)]
    meant = flatten(configured(kind, [("comparison", plan.base)], flags, verb="compare")[0])
    varied = {setting: meant[setting] for setting in _plain(chosen)}
    # what was typed for all trials stands beside what varies: no other optimizer makes it fall away
    by_hand = {setting: value for setting, value in plan.base.items() if plan.origins.get(setting) == "flag"}
    below = {setting: value for setting, value in plan.base.items() if setting not in by_hand}
    values = flatten(layered(kind, [("comparison", below), ("flag", by_hand | varied)])[0])
    unlike = {setting: value for setting, value in values.items() if value != plan.base.get(setting)}
    return Variant(name, name, varied, unlike | varied)


def program_of(plan: Planned, *, run: Path) -> tuple[Program, type[Any]]:
    """What builds a comparison's runs, and the dataclass of its settings; that it is unchanged was looked at before."""
    program = program_again(plan.program, run=run, run_changed=True)
    if program.config is None:
        raise ConfigError(f"{plan.program['path']}: build() takes no settings any more")
    return program, program.config


def check_reference(plan: Planned) -> None:
    """Refuse a reference that no variant will be called."""
    from surefoot.compare.results import refuse_reference

    called = group_labels(plan.variants)
    if plan.search is not None:
        called |= {name: name for name in map(trial_name, range(plan.search["trials"]))}
    refuse_reference(plan.reference, called)


def _combinations(asked: Compare) -> list[dict[str, str]]:
    """Settings as texts: the grid, the single ones, and of each as many as there are seeds."""
    vary: dict[str, list[str]] = {}
    for text in asked.vary:
        setting, value = _setting(text, "--vary")
        if setting in vary:
            raise ConfigError(f"--vary {setting} is given twice: put its values into one, with commas between")
        vary[setting] = [part.strip() for part in value.split(",")]
        if "" in vary[setting]:
            raise ConfigError(f"--vary {text}: a value is missing\n  write it as --vary {setting}=1e-3,3e-3")
        if any(".." in part and not Path(part).exists() for part in vary[setting]):
            raise ConfigError(
                f"--vary {text}: ranges are for a search\n  add --search 20, or give the values one by one"
            )
    single = [dict(_setting(part, "--variant") for part in shlex.split(text)) for text in asked.variant]
    combinations: list[dict[str, str]] = [*grid(vary), *single]
    if not combinations:
        if asked.seeds == 1:
            raise ConfigError(
                "compare what? --vary optimizer.lr=1e-3,3e-3, or --variant 'optimizer.name=sgd optimizer.lr=0.1'"
            )
        combinations = [{}]
    if asked.seeds == 1:
        return combinations
    if any("seed" in one for one in combinations):
        raise ConfigError("--seeds and a varied seed: choose one of them")
    return [{**one, "seed": f"+{repeat}"} for one in combinations for repeat in range(asked.seeds)]


def _configurations(
    program: Program, in_file: dict[str, Any], flags: Sequence[str], texts: Sequence[Mapping[str, str]], *, verb: str
) -> list[tuple[Any, dict[str, str]]]:
    """The configuration of every combination, with origins; one `ConfigError` for all that cannot be."""
    kind = program.config
    assert kind is not None
    configurations, problems, wrong = [], dict[str, str](), list[str]()
    seeds: dict[str, int] = {}  # of each combination, without those of its repeats

    def made(text: Mapping[str, str]) -> tuple[Any, dict[str, str]]:
        own = [part for setting, value in text.items() for part in typed(kind, setting, value)]
        given = [*without(flags, _plain(text)), *own]  # what varies wins
        return configured(kind, layers_below(program, in_file, given), given, verb=verb, own=option_names(Compare))

    for combination in texts:
        text = dict(combination)
        alone = {setting: value for setting, value in text.items() if (setting, value[:1]) != ("seed", "+")}
        try:
            if len(alone) < len(text):
                if repr(alone) not in seeds:
                    seeds[repr(alone)] = _seed(made(alone)[0])
                text = {**alone, "seed": str(seeds[repr(alone)] + int(text["seed"]))}
            configurations.append(made(text))
            program.check(configurations[-1][0])
        except ConfigError as problem:
            if not alone:
                raise
            said = str(problem).splitlines()[0]
            wrong.append(said)
            problems.setdefault(said, " ".join(f"{setting}={value}" for setting, value in alone.items()))
    all_alike = len(problems) == 1 and len(wrong) == len(texts) > 1
    if problems:
        lines = [said if all_alike else f"{combination}: {said}" for said, combination in problems.items()]
        more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise ConfigError("\n  ".join([*lines[:_SHOWN], *more]) + "\n  nothing was trained")
    return configurations


def _seed(config: Any) -> int:
    seed = flatten(config).get("seed")
    if not isinstance(seed, int):
        raise ConfigError("these runs have no whole number `seed` among their settings, so --seeds cannot repeat them")
    return seed


def _named(varied: Sequence[Mapping[str, Any]], seeds: int) -> list[tuple[str, str]]:
    if seeds == 1:
        return [(name, name) for name in names(varied)]
    groups = names([{key: value for key, value in one.items() if key != "seed"} for one in varied[::seeds]])
    return [
        (f"{groups[place // seeds]},seed={one['seed']}", groups[place // seeds]) for place, one in enumerate(varied)
    ]


def _space(asked: Compare) -> dict[str, dict[str, Any]]:
    if asked.variant or asked.seeds > 1:
        raise ConfigError("--search chooses its combinations itself: leave --variant and --seeds out")
    pairs = [_setting(text, "--vary") for text in asked.vary]
    if not pairs:
        raise ConfigError("search for what? --vary optimizer.lr=1e-4..1e-2 --vary optimizer.name=adamw,sgd")
    return {setting.replace("-", "_"): parameter(setting, value) for setting, value in pairs}


def _setting(text: str, option: str) -> tuple[str, str]:
    setting, equals, value = text.partition("=")
    if not equals or not setting or not value:
        raise ConfigError(f"{option} {text}: a setting, =, and what it is to be, as in {option} optimizer.lr=1e-3")
    if setting == "out":
        raise ConfigError(f"{option} {text}: each variant has a directory of its own below --out")
    return setting, value


def _plain(texts: Mapping[str, Any]) -> list[str]:
    return [setting.replace("-", "_") for setting in texts]


def _cores() -> int:
    """The cores that this process may use; as many threads at most as OMP_NUM_THREADS says."""
    cores, told = cores_each(1), os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(told)) if told.isdigit() and int(told) else cores
