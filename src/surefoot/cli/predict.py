"""`surefoot predict RUN INPUT...`: predictions of a trained model for prompts, lines or
pictures.
"""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from surefoot.cli.options import WHICH_RUN, SavedRunOptions, find_run, verb_options
from surefoot.cli.settings import configured
from surefoot.errors import ConfigError
from surefoot.program import choose_checkpoint, program_and_config


@dataclass(frozen=True, kw_only=True)
class Predict(SavedRunOptions):
    """Run a trained model on inputs. A gpt run continues prompts: it streams the
    continuation of one prompt, and prints a JSON object for each of several prompts
    or lines of --file. A finetune run answers prompts, and without a prompt holds a
    conversation on a terminal. A translation run prints one line for each line of
    its inputs, --file or standard input. An images run prints the likeliest classes
    of picture files, resized like its training data. The input - reads standard
    input. For the options of one run: surefoot predict RUN --help.

      surefoot predict runs/mine "def " --max-new-tokens 100 --temperature 0.7
      surefoot predict runs/mine --file prompts.txt
      surefoot predict runs/translation "July 8, 2055" --beam-size 5
      surefoot predict runs/images picture.png --top-k 3
    """

    inputs: Positional[Annotated[tuple[str, ...], arg(metavar="[INPUT ...]")]] = ()
    """Prompts, lines to translate, or picture files."""


def predict(arguments: list[str]) -> None:
    """Run `surefoot predict`: use the trained model of a run on inputs."""
    options, flags = verb_options(
        Predict, arguments, verb="predict", missing=WHICH_RUN, help_goes_on=True
    )
    run_path = find_run(options.run, others=options.inputs)
    program, config = program_and_config(run_path, run_changed=options.run_changed_program)
    if "predict" not in program.names or "Predict" not in program.names:
        raise ConfigError(
            "program-without-predict",
            problem=f"the program of {run_path} defines no predict(), which would use its model",
            remedy="in Python, load its weights into your model:"
            f" sf.load({str(run_path)!r}).load_model(model)",
            path=run_path,
        )
    request, _ = configured(
        program.names["Predict"],
        [],
        flags,
        verb=f"predict {options.run} INPUT",
        option_classes=[Predict],
    )
    checkpoint = choose_checkpoint(run_path, options.checkpoint)
    from surefoot.tracking.console import TextWriter

    console = TextWriter(None)
    for piece in program.names["predict"](
        config, request, options.inputs, run=run_path, checkpoint=checkpoint
    ):
        console.put(piece)
        if console.gone:  # the reader has closed the output
            break
