"""The commands of docs/guides/many-processes.md: torchrun, Slurm and surefoot would take them as
they stand there. (about 3 s)
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from in_one import in_one
from surefoot.cli.options import option_names, without
from surefoot.cli.submit import Submit, check_training
from surefoot.errors import ConfigError

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "guides" / "many-processes.md").read_text()
IN_BLOCKS = re.findall(r"(?m)^    (\S.*)$", TEXT)
IN_SENTENCES = re.findall(r"`((?:torchrun|srun) [^`]*train[^`]*)`", TEXT)
COMMANDS = [shlex.split(text) for text in (*IN_BLOCKS, *IN_SENTENCES)]
EXAMPLES = {
    "--parallel": "fsdp",
    "--batch-size": "64",
    "--micro-batch-size": "8",
    "--save-every": "10 min",
    "--fsdp.blocks": "Block",
}
NOT_SETTINGS = ("nproc", "max_restarts", *option_names(Submit))


def settings(command: list[str]) -> list[str]:
    """What surefoot would train, and with which settings: what follows its verb, without the
    options of verbs.
    """
    verbs = ("train", "submit", "examples/launch/slurm.sh")
    verb = next(verb for verb in verbs if verb in command)
    start = command.index(verb) + 1
    return without(command[start:], NOT_SETTINGS)


@in_one
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_can_be_typed(command: list[str]) -> None:
    assert command[0] in ("surefoot", "torchrun", "srun", "sbatch")
    if command[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(command[1:])
        assert options.training_script in ("surefoot", "my_script.py")
        assert options.module == (options.training_script == "surefoot")
    if command[0] == "sbatch":
        assert (ROOT / command[1]).is_file()
    if "my_script.py" not in command:
        check_training(settings(command))


def test_a_command_with_a_mistake_would_be_found() -> None:
    with pytest.raises(ConfigError):
        check_training(["gpt", "--fsdp.replica", "2"])


def test_every_setting_that_is_named_exists() -> None:
    named = re.findall(r"`(--(?:fsdp|ddp|parallel|batch|micro|save|stop)[\w.-]*)(?: (\w+))?`", TEXT)
    assert len(named) > 6
    for flag, value in named:
        check_training(["gpt", "--parallel", "fsdp", flag, value or EXAMPLES[flag]])
