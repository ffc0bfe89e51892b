"""`surefoot profile`: the time of each part of a training step, and measured speedups."""

from dataclasses import dataclass, field

from surefoot.cli.find_lr import TriedRunOptions, tried_options, tried_run
from surefoot.cli.options import limited
from surefoot.cli.processes import Several
from surefoot.config.paths import run_path
from surefoot.config.tree import MOST_USED
from surefoot.program import status_line


@dataclass(frozen=True, kw_only=True)
class Profile(Several, TriedRunOptions):
    """Measure the time of each part of a training step, its operators, memory and
    FLOPs. Measure possible speedups, each in alternation with the unchanged run.
    surefoot train has the same settings. Nothing is trained. The profile takes
    about half a minute.

      surefoot profile gpt
      surefoot profile images --preset cifar10 --data.path DIR --speedups all
      surefoot profile gpt --preset gpt2-124m --data.path DIR --peak-flops 989e12
    """

    speedups: str = field(default="usual", metadata=MOST_USED)
    """Speedups to measure: usual (all but compile, which takes 20 s), none, all, or some of
    workers, precision, fused, checkpointing, channels-last, micro-batch, compile."""
    steps: int = limited(12, min_value=4, most_used=True)
    """Number of timed steps after a warm-up."""
    max_seconds: float = 20.0
    """Approximate duration limit of the profile in seconds."""
    peak_flops: str | None = field(default=None, metadata=MOST_USED)
    """Peak FLOP/s of this device. Default: measured."""
    shapes: bool = False
    """Distinguish operators by the shapes of their inputs."""
    out: str = field(default="runs/profile", metadata=MOST_USED)
    """Directory of profile.json, profile.txt, trace.json.gz (for ui.perfetto.dev), memory.svg, and
    with the extra plots memory.png.
    """


def profile(arguments: list[str]) -> None:
    """Run `surefoot profile`: measure where the time of a step goes."""
    options, flags = tried_options(Profile, arguments, verb="profile")
    from surefoot.tools.profile.flops import parse_peak_flops
    from surefoot.tools.profile.profile import measure
    from surefoot.tools.profile.variants import speedups_of

    speedups = speedups_of(options.speedups)
    peak = None if options.peak_flops is None else parse_peak_flops(options.peak_flops)
    run, _ = tried_run(options, flags, verb="profile", command=arguments)
    with status_line() as show:
        measured = measure(
            run,
            what=options.what,
            out=run_path(options.out, setting="--out"),
            steps=options.steps,
            speedups=speedups,
            peak_flops=peak,
            shapes=options.shapes,
            max_seconds=options.max_seconds,
            progress_fn=show,
        )
    if run.rank == 0:
        print(measured)
