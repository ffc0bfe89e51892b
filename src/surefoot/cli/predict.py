"""`surefoot predict RUN INPUT...`: a trained model used on prompts, lines or pictures."""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from surefoot.cli.options import WHICH_RUN, SavedRunOptions, find_run, option_names, verb_options
from surefoot.cli.settings import configured
from surefoot.errors import ConfigError
from surefoot.recipes.program import choose_checkpoint, program_and_config


@dataclass(frozen=True, kw_only=True)
class Predict(SavedRunOptions):
    """Let a trained model go on from a text. One input is continued as you watch;
    several, or the lines of --file FILE, give one JSON object a line; - reads one
    from standard input. How many tokens, temperature, top-k, top-p, seed: surefoot
    predict RUN --help. A translator answers each line of its inputs, of --file, or
    of standard input by one line.

    Of a run of images, inputs are picture files: each is made grey or coloured and
    resized as the training data were, and the likeliest classes are told.

      surefoot predict runs/mine "def " --tokens 100 --temperature 0.7
      surefoot predict runs/mine --file prompts.txt
      surefoot predict runs/translation "July 8, 2055" --beam-size 5
      surefoot predict runs/images picture.png --top 3
    """

    inputs: Positional[Annotated[tuple[str, ...], arg(metavar="[INPUT ...]")]] = ()
    """Prompts, lines to translate, or picture files."""


def predict(arguments: list[str]) -> None:
    """Answer inputs with the model of a run."""
    options, flags = verb_options(Predict, arguments, verb="predict", missing=WHICH_RUN, help_goes_on=True)
    run_path = find_run(options.run)
    program, config = program_and_config(run_path, run_changed=options.run_changed_program)
    if "predict" not in program.names or "Predict" not in program.names:
        raise ConfigError(
            f"what {run_path} was made by does not say how its model is used: it defines no predict()\n"
            "  in Python, give its weights to a model of yours:\n"
            f"  surefoot.load({str(run_path)!r}).load_model(model)"
        )
    asked, _ = configured(
        program.names["Predict"], [], flags, verb=f"predict {options.run} INPUT", own=option_names(Predict)
    )
    checkpoint = choose_checkpoint(run_path, options.checkpoint)
    from surefoot.tracking.console import Said

    console = Said(None)
    for piece in program.names["predict"](config, asked, options.inputs, run=run_path, checkpoint=checkpoint):
        console.put(piece)
        if console.gone:  # nobody reads any more
            break
