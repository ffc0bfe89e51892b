"""`surefoot plan ... --world N`: a run on many GPUs, computed and not made; its options, and the machine that they assume."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from surefoot.cli import programs
from surefoot.cli.building import from_file, layers_below
from surefoot.cli.flags import configured
from surefoot.cli.options import number, option, whole
from surefoot.config import flatten
from surefoot.errors import ConfigError

if TYPE_CHECKING:
    from surefoot.paper import Assumed

OWN = ("world", "flops", "mfu", "gpu-memory", "bandwidth", "node-bandwidth", "node-size")
_H100 = "H100 SXM's data sheet"
_USUAL = {
    "mfu": (0.4, "as Grattafiori et al. 2024 report, table 4"),
    "gpu_memory": (80e9, _H100),
    "bandwidth": (50e9, "an adapter of 400 Gb/s for each GPU"),
    "node_bandwidth": (450e9, f"{_H100}, NVLink one way"),
    "node_size": (8, "as is usual"),
}
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def asked(arguments: Sequence[str]) -> bool:
    """Whether the arguments of plan are about many GPUs; raises `ConfigError` where they half are."""
    given = [name for name in OWN if option(arguments, f"--{name}")[1] is not None]
    if given and "world" not in given:
        raise ConfigError(f"--{given[0]} is about GPUs on paper\n  say how many there are: --world 8")
    return bool(given)


def plan_on_paper(arguments: list[str]) -> None:
    """Print what a recipe's or file's run would need on `--world` GPUs."""
    rest, given = list(arguments[1:]), dict[str, str]()
    for name in OWN:
        rest, value = option(rest, f"--{name}")
        if value is not None:
            given[name] = value
    world = whole("--world", given["world"])
    numbers = _numbers(given)
    program = programs.found(arguments[0])
    rest, in_file = from_file(program, rest)
    config = None
    if program.config is not None:
        verb = f"surefoot plan {arguments[0]}"
        config, origins = configured(program.config, layers_below(program, in_file, rest), rest, verb=verb, own=OWN)
        lines = [
            f"  {name} = {value!r}  [{origins[name]}]" for name, value in flatten(config).items() if value is not None
        ]
        print("\n".join(["configuration", *lines]))
    from surefoot import paper
    from surefoot.world import on_paper

    with on_paper(world):
        run = program.on_paper(*([] if config is None else [config]))
        for section in paper.sections(run.parts, _assumed(numbers, precision=run.parts.whole.precision.name)):
            print(f"\n{section}")


def _assumed(numbers: dict[str, float], *, precision: str) -> Assumed:
    """The machine that is meant: what was given, else an H100; and for each number where it comes from."""
    from surefoot.paper import Assumed
    from surefoot.precision import FORMATS
    from surefoot.scaling import Machine

    usual = {"flops": (FORMATS[precision].h100_flops, f"{_H100}, dense {precision}"), **_USUAL}
    values = {name: value for name, (value, _) in usual.items()} | numbers
    origins = {
        name: f"--{name.replace('_', '-')}" + ("" if name in numbers else f" absent: {origin}")
        for name, (_, origin) in usual.items()
    }
    machine = Machine(
        flops=values["flops"],
        mfu=values["mfu"],
        memory_bytes=int(values["gpu_memory"]),
        bandwidth=values["bandwidth"],
        node_bandwidth=values["node_bandwidth"],
        node_size=int(values["node_size"]),
    )
    return Assumed(machine, origins)


def _numbers(given: dict[str, str]) -> dict[str, float]:
    """The machine's numbers that were given, by name; raises one `ConfigError` for all that are none."""
    from surefoot.memory import parsed_bytes  # imports torch

    found: dict[str, float] = {}
    problems: list[str] = []
    readers: dict[str, Callable[[str], float]] = {
        "flops": lambda text: number("--flops", text, example="989e12"),
        "mfu": _fraction,
        "gpu-memory": lambda text: parsed_bytes(text, setting="--gpu-memory"),
        "bandwidth": lambda text: bytes_per_s("--bandwidth", text),
        "node-bandwidth": lambda text: bytes_per_s("--node-bandwidth", text),
        "node-size": lambda text: whole("--node-size", text),
    }
    for name, text in given.items():
        if name not in readers:
            continue
        try:
            found[name.replace("-", "_")] = readers[name](text)
        except ConfigError as problem:
            problems.append(str(problem))
    if found.get("flops", 1.0) <= 0:
        problems.append(f"--flops {given['flops']!r}: how many a second, such as 989e12")
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _fraction(text: str) -> float:
    found = number("--mfu", text, example="0.4")
    if not 0 < found <= 1:
        raise ConfigError(f"--mfu {text!r}: which fraction of the FLOP/s is used, above 0 and at most 1")
    return found


def bytes_per_s(option: str, text: str) -> float:
    """Bytes a second from a text with its unit, in which b are bits.

    >>> bytes_per_s("--bandwidth", "50 GB/s"), bytes_per_s("--bandwidth", "400 Gb/s")
    (50000000000.0, 50000000000.0)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]?)(b|B|bit)/s", text.strip(), re.ASCII)
    if found is None or not float(found[1]):
        raise ConfigError(f'{option} {text!r}: write it with a unit, as in "50 GB/s", or "400 Gb/s" in bits')
    return float(found[1]) * _UNITS[found[2].lower()] / (1 if found[3] == "B" else 8)
