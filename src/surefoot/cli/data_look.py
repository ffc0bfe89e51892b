"""`surefoot data look`: what a path holds, and what each recipe would train on."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from surefoot.cli.options import by_flag, limited, option_names, refuse_unknown, verb_options
from surefoot.cli.settings import layers_below, read_settings
from surefoot.config.paths import local_path, write_whole
from surefoot.errors import ConfigError, SurefootError, visible
from surefoot.program import find_program
from surefoot.recipes import NAMES

if TYPE_CHECKING:
    from surefoot.recipes.data_look import Piece

_FORM = "surefoot data look PATH"
_LABEL = 10  # columns, at the start of a line
_COLOR = "\x1b[32m"
_PLAIN = "\x1b[0m"
_LONGEST = 2_000  # characters of a sample
_KINDS_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class DataLook:
    """Show, before any training, what each recipe would make of a path: files by kind,
    fields of rows, classes and sizes, samples as the model will see them with special
    tokens, and what is odd or left out. What the loss counts is green, or between >>>
    and <<<. Pictures are written as a sheet. With --recipe, settings of that recipe
    may follow, as for train.

      surefoot data look corpus/
      surefoot data look chats.jsonl --recipe finetune --model DIR
    """

    path: Positional[Annotated[str, arg(metavar="PATH")]]
    """A file or a directory."""
    recipe: str | None = None
    """gpt, translation, images or finetune. Default: all."""
    samples: int = limited(3, min_value=1)
    """Number of samples, or of pictures of each class."""
    png: str | None = None
    """PNG file for the sheet of pictures. Default: a new file in the temporary directory."""


def look(arguments: list[str]) -> None:
    """Run `surefoot data look`: print what a path holds and what recipes make of it."""
    options, flags = verb_options(
        DataLook, arguments, verb="data look", missing=f"data look needs a path: {_FORM}"
    )
    if options.recipe is None:
        settings = [group for group in by_flag(flags) if group[0]]
        refuse_unknown(settings, option_names(DataLook), verb="data look", flags="options")
    elif options.recipe not in NAMES:
        raise ConfigError(
            "recipe-unknown",
            problem=f"recipe = {options.recipe!r} is not one of {', '.join(NAMES)}",
            setting="recipe",
            value=options.recipe,
        )
    path = local_path(options.path, setting="PATH")
    from surefoot.data.scan import reported_scans
    from surefoot.recipes.data_look import contents

    at_path = contents(path)
    print(visible(str(path)))
    by_number = sorted(at_path.kinds.items(), key=lambda entry: entry[1], reverse=True)
    kinds = [
        f"{number:,} {kind}, {size:,} bytes" for kind, (number, size) in by_number[:_KINDS_SHOWN]
    ]
    if len(by_number) > _KINDS_SHOWN:
        kinds.append(f"... and {len(by_number) - _KINDS_SHOWN:,} more kinds")
    _print("files", kinds or ["none"])
    _print("fields", at_path.fields)
    _print("odd", at_path.odd)
    refusals = list[SurefootError]()
    recipes = NAMES if options.recipe is None else [options.recipe]
    for recipe in recipes:
        print(f"\n{recipe}")
        with reported_scans() as scans:
            try:
                _show(recipe, options, flags)
            except SurefootError as problem:
                if options.recipe is not None:
                    raise
                _print("refused", str(problem).split("\n"))
                refusals.append(problem)
        reasons = dict[str, None]()  # in order, each once
        for scan in scans:
            reasons |= dict.fromkeys(scan.reasons())
        _print("left out", list(reasons))
    if len(refusals) == len(NAMES):
        sys.exit(refusals[-1].exit_status)


def _show(name: str, options: DataLook, flags: Sequence[str]) -> None:
    from surefoot.recipes.data_look import look as look_at

    program = find_program(name)
    words = [*flags, f"--data.path={options.path}"]
    config, _ = read_settings(
        program,
        layers_below(program, {}, words),
        words,
        verb="data look",
        option_classes=[DataLook],
    )
    result = look_at(name, config, count=options.samples)
    _print("data", result.about)
    _print("facts", result.facts)
    for number, sample in enumerate(result.samples, start=1):
        _print(f"sample {number}", "".join(_marked(sample)).split("\n"))
    if result.sheet is not None:
        _print("pictures", [_write_sheet(result.sheet, options.png)])
    _print("odd", result.odd)


def _marked(sample: "Sequence[Piece]") -> Iterator[str]:
    before, after = ">>>", "<<<"
    if sys.stdout.isatty():
        before, after = _COLOR, _PLAIN
    is_masked = any(not piece.is_target for piece in sample)
    for piece in sample:
        text = visible(piece.text)
        if len(text) > _LONGEST:
            text = f"{text[:_LONGEST]} ... ({len(text):,} characters)"
        if is_masked and piece.is_target:
            text = f"{before}{text}{after}"
        yield text


def _write_sheet(sheet: bytes, file: str | None) -> str:
    if file is None:
        path = Path(tempfile.mkdtemp(prefix="surefoot-look-"), "pictures.png")
    else:
        path = local_path(file, setting="--png")
    write_whole(path, sheet)
    return f"{path}: a row of pictures for each class, in order, augmented as in the first epoch"


def _print(label: str, lines: Sequence[str]) -> None:
    for line in lines:
        print(f"  {label:<{_LABEL}}{line}".rstrip())
        label = ""  # only before the first line
