"""`surefoot completion bash|zsh|fish`: a script that completes subcommands, recipes, flags and
choices without running Python.
"""

import importlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from tyro.conf import Positional, arg

from surefoot.cli.help import Flag, flags_of
from surefoot.cli.options import only_options
from surefoot.cli.word_order import option_kinds
from surefoot.recipes import NAMES
from surefoot.recipes.optimizer_settings import RecipeSettings

Shell = Literal["bash", "zsh", "fish"]
# take a recipe's settings
_SETTINGS = ("train", "plan", "find-lr", "find-batch-size", "profile", "submit", "compare")
_HELP_FLAGS = {"help": "Show what is used most", "help-all": "Show everything"}
_OF_A_RUN = ("resume", "evaluate", "verify", "replay")  # the script does not know the run's recipe


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script for TAB completion of subcommands, recipes, flags and
    choices. Print the script again after an update of surefoot.

      surefoot completion bash > ~/.local/share/bash-completion/completions/surefoot
      surefoot completion zsh >> ~/.zshrc
      surefoot completion fish > ~/.config/fish/completions/surefoot.fish
    """

    shell: Positional[Annotated[Shell, arg(metavar="SHELL")]]
    """bash, zsh or fish."""


def completion(arguments: list[str]) -> None:
    """Run `surefoot completion`: print the completion script of a shell."""
    missing = f"completion for which shell? {', '.join(get_args(Shell))}"
    options = only_options(Completion, arguments, verb="completion", missing=missing)
    if options.shell == "fish":
        print(_fish())
    else:
        print(_bash(zsh=options.shell == "zsh"))


def _flags_of_verbs() -> dict[str, list[Flag]]:
    from surefoot.cli.main import VERBS

    flags: dict[str, list[Flag]] = {}
    for verb in VERBS:
        flags[verb] = []
        for kind in option_kinds(verb):
            flags[verb] += [flag for flag in flags_of(kind, switches=True) if not flag.metavar]
        if verb in _OF_A_RUN:
            flags[verb] += flags_of(RecipeSettings)
    for recipe in NAMES:
        predict = importlib.import_module(f"surefoot.recipes.{recipe}.predict").Predict
        known = {flag.name for flag in flags["predict"]}
        flags["predict"] += [flag for flag in flags_of(predict) if flag.name not in known]
    return flags


def _flags_of_recipes() -> dict[str, list[Flag]]:
    flags = {}
    for recipe in NAMES:
        config = importlib.import_module(f"surefoot.recipes.{recipe}.config").Config
        flags[recipe] = list(flags_of(config))
    return flags


def _bash(*, zsh: bool) -> str:
    verbs = _flags_of_verbs()
    recipes = _flags_of_recipes()
    of_zsh = [
        "autoload -U +X compinit && compinit",
        "autoload -U +X bashcompinit && bashcompinit",
    ]
    lines = [
        "# completion of surefoot; print it again after an update",
        *(of_zsh if zsh else []),
        "_surefoot() {",
        '    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" words="" recipe=""',
        '    local verb="${COMP_WORDS[1]}" at=2',
        "    COMPREPLY=()",
        '    if [[ "$cur" == "=" ]]; then cur=""; elif [[ "$prev" == "=" ]]; then prev="${COMP_WORDS[COMP_CWORD-2]}"; fi',
        "    while [[ $at -lt $COMP_CWORD ]]; do",
        f'        case "${{COMP_WORDS[at]}}" in {"|".join(NAMES)}) recipe="${{COMP_WORDS[at]}}" ;; esac',
        "        at=$((at + 1))",
        "    done",
        f'    case "$verb" in {"|".join(_SETTINGS)}) ;; *) recipe="" ;; esac',
        "    if [[ $COMP_CWORD -eq 1 ]]; then",
        f'        words="{" ".join([*verbs, "--help", "--version"])}"',
        "    else",
        '        case "$verb $prev" in',
        *_values(verbs),
        "        esac",
        '        [[ -n "$words" ]] || case "$recipe $prev" in',
        *_values(recipes),
        "        esac",
        '        if [[ -n "$words" ]]; then :',
        '        elif [[ "$cur" == -* ]]; then',
        '            case "$verb" in',
        *(
            f'                {verb}) words="--help --help-all {_typed(flags)}" ;;'
            for verb, flags in verbs.items()
        ),
        "            esac",
        '            case "$recipe" in',
        *(
            f'                {name}) words="$words {_typed(flags)}" ;;'
            for name, flags in recipes.items()
        ),
        "            esac",
        "        elif [[ $COMP_CWORD -eq 2 ]]; then",
        '            case "$verb" in',
        *(f'                {verb}) words="{words}" ;;' for verb, words in _second().items()),
        "            esac",
        "        fi",
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$cur"))',
        "}",
        "complete -o default -F _surefoot surefoot",
    ]
    return "\n".join(lines)


def _second() -> dict[str, str]:
    of_runs = ("resume", "evaluate", "predict", "diagnose", "report", "replay", "verify", "export")
    return {
        **dict.fromkeys(_SETTINGS, " ".join(NAMES)),
        **dict.fromkeys(of_runs, "latest"),
        "data": "look prepare",
        "completion": " ".join(get_args(Shell)),
    }


def _typed(flags: Sequence[Flag]) -> str:
    return " ".join(flag.typed for flag in flags)


def _values(flags: Mapping[str, Sequence[Flag]]) -> Iterator[str]:
    for name, flags_of_name in flags.items():
        for flag in flags_of_name:
            if flag.choices and not flag.is_switch:
                yield f'            "{name} {flag.typed}") words="{" ".join(flag.choices)}" ;;'


def _fish() -> str:
    from surefoot.cli.main import VERBS

    lines = [
        "# completion of surefoot; print it again after an update",
        f"complete -c surefoot -n __fish_use_subcommand -f -a {shlex.quote(' '.join(VERBS))}",
    ]
    for flag, text in _HELP_FLAGS.items():
        lines.append(f"complete -c surefoot -l {flag} -d {shlex.quote(text)}")
    for verb, words in _second().items():
        lines.append(
            f"complete -c surefoot -n '__fish_seen_subcommand_from {verb}' -a {shlex.quote(words)}"
        )
    for verb, flags in _flags_of_verbs().items():
        lines += [_fish_line(flag, f"__fish_seen_subcommand_from {verb}") for flag in flags]
    for name, flags in _flags_of_recipes().items():
        recipe_condition = f"__fish_seen_subcommand_from {name}; and __fish_seen_subcommand_from {' '.join(_SETTINGS)}"
        lines += [_fish_line(flag, recipe_condition) for flag in flags]
    return "\n".join(lines)


def _fish_line(flag: Flag, when: str) -> str:
    value = " -r"
    if flag.is_switch:
        value = ""
    elif flag.choices:
        value = f" -x -a {shlex.quote(' '.join(flag.choices))}"
    first = flag.text.split(". ")[0].split("; ")[0].rstrip(".")
    return f"complete -c surefoot -n {shlex.quote(when)} -l {flag.typed[2:]}{value} -d {shlex.quote(first)}"
