"""`surefoot profile`: where a step's time goes, and what would make it quicker."""

from dataclasses import dataclass

from surefoot.cli.find_lr import TriedRunOptions, tried_options, tried_run
from surefoot.cli.options import limited
from surefoot.config.paths import local_path
from surefoot.recipes.program import status_line


@dataclass(frozen=True, kw_only=True)
class Profile(TriedRunOptions):
    """Measure where the time of a step goes, its operators, memory and arithmetic.
    Try what may make it faster, each in turn with the run as it is. Settings are
    those of surefoot train. Trains nothing and takes about half a minute.

      surefoot profile gpt
      surefoot profile images --preset cifar10 --data.path DIR --speedups all
      surefoot profile gpt --preset gpt2-124m --data.path DIR --peak-flops 989e12
    """

    speedups: str = "usual"
    """usual, none, all, or some of: workers, precision, fused, checkpointing, channels-last, micro-batch, compile. usual
    leaves out compile, which takes 20 seconds or more."""
    steps: int = limited(12, least=4)
    """Number of steps that are timed, after a warm-up."""
    max_seconds: float = 20.0
    """About how many seconds the whole profile may take."""
    peak_flops: str | None = None
    """Peak operations per second of this device. Default: measured."""
    shapes: bool = False
    """Tell operators apart by the shapes of their inputs."""
    out: str = "runs/profile"
    """Directory for profile.json and .txt, trace.json.gz (for ui.perfetto.dev), memory.png and .svg."""


def profile(arguments: list[str]) -> None:
    """Print where the time of a step goes."""
    options, flags = tried_options(Profile, arguments, verb="profile")
    from surefoot.profile.flops import parse_peak_flops
    from surefoot.profile.profile import measure
    from surefoot.profile.variants import speedups_of

    speedups = speedups_of(options.speedups)
    peak = None if options.peak_flops is None else parse_peak_flops(options.peak_flops)
    run, _ = tried_run(options, flags, verb="profile")
    with status_line() as show:
        measured = measure(
            run,
            what=options.what,
            out=local_path(options.out, setting="--out"),
            steps=options.steps,
            speedups=speedups,
            peak_flops=peak,
            shapes=options.shapes,
            max_seconds=options.max_seconds,
            progress_fn=show,
        )
    print(measured)
