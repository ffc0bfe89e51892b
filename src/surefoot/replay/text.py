"""The tables of a look at one step as text, up to 100 columns wide: micro-batches, samples, modules and parameters."""

import math
from collections.abc import Sequence
from typing import TypeVar

from surefoot.replay.findings import Look, OfModule, OfParameter
from surefoot.tracking.format import in_line, number, shortened, visible
from surefoot.tracking.text_table import text_table

WIDE = 100
_ROWS = 48  # of a table; what is not finite is always among them
_NAME = 30
Row = TypeVar("Row")


def sections(look: Look, *, samples: int) -> list[str]:
    return [*_micro_batches(look), *_samples(look, samples), *_modules(look), *_parameters(look)]


def _micro_batches(look: Look) -> list[str]:
    lines = ["", "micro-batch   loss        counted   samples"]
    for held in look.micro_batches:
        whose = "" if held.rank is None else f" (rank {held.rank})"
        line = f"{f'{held.index}{whose}':<13} {number(held.loss):<11} {number(held.count):<9}"
        lines.append(f"{line} {_ids(held.ids, WIDE - len(line) - 1)}")
    return lines


def _ids(ids: Sequence[int], wide: int) -> str:
    """As many as there is room for, and how many they are."""
    shown = " ".join(map(str, ids))
    if len(shown) <= wide:
        return shown
    end = f" ... ({len(ids)} in all)"
    return shown[: wide - len(end)].rpartition(" ")[0] + end


def _samples(look: Look, most: int) -> list[str]:
    if most == 0 or all(sample.loss is None for sample in look.samples):
        return []
    shown = look.samples[:most]
    norms = any(sample.gradient_norm is not None for sample in shown)
    lines = [
        "",
        f"samples by their loss, each passed alone in evaluation mode; the first {len(shown)} of {len(look.samples)}",
        f"sample        loss        {'its gradient   ' * norms}micro-batch",
    ]
    for sample in shown:
        loss = "-" if sample.loss is None else number(sample.loss)
        own = "-" if sample.gradient_norm is None else number(sample.gradient_norm)
        lines.append(f"{sample.id:<13} {loss:<11} {f'{own:<14} ' * norms}{sample.micro_batch}")
        lines += [f"    {line}"[:WIDE] for line in visible(sample.shown or "").splitlines()]
    steepest = sorted(
        (sample for sample in look.samples if math.isfinite(sample.gradient_norm or math.nan)),
        key=lambda sample: -(sample.gradient_norm or 0.0),
    )
    if steepest:
        named = ", ".join(f"{sample.id} ({number(sample.gradient_norm or 0.0)})" for sample in steepest[:5])
        lines.append(f"largest gradients of single samples: {named}")
    return lines


def _modules(look: Look) -> list[str]:
    if not look.modules:
        return []
    chosen, left_out = _chosen(look.modules, [bool(held.output.nonfinite) for held in look.modules])
    head = ("module, in the order of a pass", "kind", "mean", "rms", "largest", "zeros", "not finite")
    table = text_table([head, *(_module(held) for held in chosen)], left=(0, 1))
    return ["", *table, *_left_out(left_out, "modules")]


def _module(held: OfModule) -> tuple[str, ...]:
    told = held.output
    kind = held.kind if held.calls == 1 else f"{held.kind} x{held.calls}"
    numbers = (f"{value:.3g}" for value in (told.mean, told.rms, told.largest))
    zeros = f"{told.zeros:.0%}" if told.zeros else "-"
    return (_name(held.name or "the model"), shortened(kind, 15), *numbers, zeros, str(told.nonfinite or "-"))


def _parameters(look: Look) -> list[str]:
    if not look.parameters:
        return []
    held = sorted(
        look.parameters, key=lambda each: (not each.nonfinite, -each.norm if math.isfinite(each.norm) else 0.0)
    )
    chosen, left_out = _chosen(held, [bool(each.nonfinite) for each in held])
    head = ("gradient of, largest first", "shape", "norm", "share", "largest", "weights", "not finite")
    table = text_table([head, *(_parameter(each) for each in chosen)], left=(0, 1))
    return ["", *table, *_left_out(left_out, "parameters")]


def _parameter(held: OfParameter) -> tuple[str, ...]:
    norm, largest, weight = (f"{value:.3g}" for value in (held.norm, held.largest, held.weight))
    share = "-" if held.share is None else f"{held.share:.0%}"
    shape = shortened(" x ".join(map(str, held.shape)), 15)
    return (_name(held.name), shape, norm, share, largest, weight, str(held.nonfinite or "-"))


def _name(name: str) -> str:
    return shortened(in_line(name), _NAME, keep="end")


def _chosen(rows: Sequence[Row], marked: Sequence[bool]) -> tuple[list[Row], int]:
    """As many rows as a page has room for, all of those that are marked among the first; how many are left out."""
    if len(rows) <= _ROWS:
        return list(rows), 0
    wanted = [place for place, mark in enumerate(marked) if mark][: _ROWS // 2]
    others = [place for place in range(len(rows)) if place not in wanted][: _ROWS - len(wanted)]
    return [rows[place] for place in sorted([*wanted, *others])], len(rows) - len(wanted) - len(others)


def _left_out(count: int, what: str) -> list[str]:
    return [f"... and {count} more {what}: --json has all"] if count else []
