"""The options of `surefoot compare`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from surefoot.cli.options import ChangedProgramOption, by_flag, limited, option_names
from surefoot.compare.search import Pruner, Sampler
from surefoot.errors import ConfigError
from surefoot.train.patience import parsed


@dataclass(frozen=True, kw_only=True)
class Compare(ChangedProgramOption):
    """surefoot compare RECIPE|FILE.py:build --vary SETTING=A,B... [settings]
    surefoot compare DIR                 go on with a comparison
    surefoot compare RUN RUN...          compare runs that are there
    surefoot compare --schedules LIST    draw schedules side by side; trains nothing

    Train every combination of the varied settings on the same samples in the same
    order, each as a run of its own below --out; then one table and one plot, with
    what is inside the noise said. Stopped or killed, the same command goes on:
    what is finished is not trained again. A test split is never scored by it.

      surefoot compare gpt --vary optimizer.name=adamw,sgd --vary optimizer.lr=1e-3,3e-3
      surefoot compare images --search 20 --vary optimizer.lr=1e-4..1e-2 --jobs 2
      surefoot compare runs/a runs/b --paired

    With --schedules each is drawn with its peak, its lowest rate, the end of its
    warm-up and the mean of its factors, which are printed too. Of a run of 1,000
    steps, or of one of --length; of a recipe with that recipe's length, base rate
    and the settings of its schedule. LIST has commas between schedules, a colon
    before each setting, a slash between drops, and + and @ where one follows on
    another; all is every shape.

      surefoot compare --schedules cosine,linear,wsd,inverse-sqrt
      surefoot compare --schedules linear:floor=0.1,wsd:cooldown=30% gpt
      surefoot compare --schedules step:drops=30%/60%,constant+linear@50%
      surefoot compare --schedules all gpt --preset shakespeare --out rates
    """

    what: Positional[Annotated[tuple[str, ...], arg(metavar="RECIPE|FILE.py:build|DIR|RUN")]] = ()
    """What to train, a comparison to go on with, or several runs."""
    config: str | None = None
    """A TOML file of settings."""
    vary: UseAppendAction[tuple[str, ...]] = ()
    """SETTING=A,B: values of a setting; several make a grid. Of a search also a range, SETTING=1e-4..1e-2."""
    variant: UseAppendAction[tuple[str, ...]] = ()
    """"S=A T=B": one combination more."""
    seeds: int = limited(1, least=1)
    """Train each combination this many times, with as many seeds from --seed on."""
    jobs: int = limited(1, least=1)
    """Runs that train at once."""
    threads: int | None = limited(None, least=1)
    """Threads of each run; kept in compare.toml. Absent: cores / jobs."""
    target: float | None = None
    """Tell how soon each reaches this score."""
    reference: str = "best"
    """What differences are taken to: best, first or a variant."""
    score: str | None = None
    """"min SPLIT/LOSS": judge by this instead of the score the runs watch."""
    out: str | None = None
    """Directory. Absent: runs/compare; of runs that are there runs/compared, written anew each time. Of schedules PATH.png and
    PATH.svg. Absent: schedules."""
    paired: bool = False
    """Of runs that are there: score them again, batch by batch."""
    search: int | None = limited(None, least=1)
    """Search with this many trials in ranges."""
    sampler: Sampler = "tpe"
    """Of a search: how settings are chosen."""
    pruner: Pruner = "median"
    """Of a search: which trials are ended early."""
    schedules: str | None = None
    """Draw these schedules."""


def given_options(arguments: Sequence[str]) -> set[str]:
    return {name for name, _ in by_flag(arguments)} & set(option_names(Compare))


def check_score(text: str | None) -> None:
    try:
        direction, score = (None, None) if text is None else parsed(text)
    except ConfigError as problem:
        raise ConfigError(f"--score {text!r}: {problem}") from problem
    if score is not None and not all(score.partition("/")):
        raise ConfigError(f"--score {text!r}: a split and a score of it, as in '{direction} held-out/loss'")
