"""`surefoot plan RUN`: what is still to come in an existing run. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.cli.options import RunOption, find_run, only_options
from surefoot.recipes import NAMES


@dataclass(frozen=True, kw_only=True)
class PlanRun(RunOption):
    """Show what is still to come in a run: steps and epochs, the settings of the next
    step with those that were changed, changes to come, and learning rates. The run's
    files are only read, and its program is not executed.

      surefoot plan runs/mine
      surefoot plan runs/mine --schedules --out rates
    """

    schedules: bool = False
    """Draw the learning rates of all steps, through the changes."""
    out: str = "schedules"
    """PATH of the pictures: PATH.svg, and with the extra plots PATH.png."""


def names_a_run(words: Sequence[str]) -> bool:
    """Return True if the words of `surefoot plan` name an existing run, and no program."""
    if len(words) != 1 or words[0] in NAMES or ":" in words[0]:
        return False
    name = words[0]
    places = (Path(name), Path("runs") / name)
    return name == "latest" or any((place / "config.toml").is_file() for place in places)


def plan_run(arguments: Sequence[str]) -> None:
    """Print what is still to come in a run, and draw its learning rates if that is asked for."""
    options = only_options(PlanRun, arguments, verb="plan")
    from surefoot.tools.plan.rest_of_run import read_rest

    rest = read_rest(find_run(options.run))
    print("\n".join(rest.lines()))
    if not options.schedules:
        return
    trace = rest.trace()
    if trace is None:
        print("\nits learning rates are not drawn: only its program knows them")
        return
    from surefoot.tools.plan.schedule_plot import draw_traces
    from surefoot.tools.report.figures import drawn_line

    of_run, base = trace
    print(f"\n{drawn_line(draw_traces([of_run], out=options.out, rate=base))}")
