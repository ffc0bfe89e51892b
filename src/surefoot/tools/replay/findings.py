"""The result of inspecting a step: JSON for `crash/` and for other ranks, and tables for the
terminal.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from surefoot.errors import visible
from surefoot.tools.replay.tensor_stats import Tally
from surefoot.tracking.format import in_line, number, shortened, text_table


@dataclass(frozen=True)
class First:
    """The first nonfinite value of a step, in order of computation.

    `what` is one of: "inputs" (the data; `name` is the tensor of the batch), "weight" or "buffer"
    (before the step), "input", "output" or "gradient of output" (of module `name`), "loss",
    "gradient" (of parameter `name`). "norm" means that all gradients are finite, but the sum of
    their squares is not.
    """

    what: str
    name: str
    kind: str = ""  # the module's class
    micro_batch: int | None = None
    rank: int | None = None
    samples: tuple[int, ...] = ()
    every_sample: bool = False  # each sample of the micro-batch fails alone
    reaches: str = ""  # the first module with a nonfinite output for this input

    def __str__(self) -> str:
        """Return the finding as part of a sentence.

        >>> print(First("output", "blocks.3.mlp.up", kind="Linear", micro_batch=0, samples=(8127,)))
        output of blocks.3.mlp.up (Linear), from sample 8127
        """
        if self.what in ("weight", "buffer"):
            return f"the {self.what} {self.name}, before the step"
        kind = f" ({self.kind})" if self.kind else ""
        phrases = {
            "inputs": f"{self.name} in the data",
            "loss": "the loss, although the outputs are finite",
            "gradient": f"{self.name}.grad",
            "norm": f"the gradient norm: {self.name}.grad is too large to square",
        }
        return (
            phrases.get(self.what, f"{self.what} of {self.name or 'the model'}{kind}")
            + self._whose()
        )

    def _whose(self) -> str:
        rank, count = "" if self.rank is None else f" (rank {self.rank})", len(self.samples)
        if self.every_sample:
            return f", from each of the {count} samples of micro-batch {self.micro_batch}{rank}"
        if self.samples:
            return f", from sample{'s' * (count > 1)} {', '.join(map(str, self.samples[:5]))}{' ...' * (count > 5)}{rank}"
        return "" if self.micro_batch is None else f", in micro-batch {self.micro_batch}{rank}"


@dataclass(frozen=True)
class OfModule:
    """The outputs of a module over all its calls in a step."""

    name: str
    kind: str
    calls: int
    output: Tally


@dataclass(frozen=True)
class OfParameter:
    """The gradient of a parameter before clipping. `share` is this gradient's fraction of the
    squared norm of all gradients.
    """

    name: str
    shape: tuple[int, ...]
    weight: float  # norm of the weight
    norm: float
    largest: float
    nonfinite: int
    share: float | None


@dataclass(frozen=True)
class OfMicroBatch:
    """One forward and backward pass of a step."""

    index: int
    rank: int | None
    ids: tuple[int, ...]
    count: float
    loss: float


@dataclass(frozen=True)
class OfSample:
    """One sample of a step: its loss, its gradient norm if computed, and its description."""

    id: int
    epoch: int
    micro_batch: int
    loss: float | None
    gradient_norm: float | None = None
    shown: str | None = None


@dataclass(frozen=True)
class Look:
    """The inspection of one step. `notes` has remarks for the reader."""

    step: int
    loss: float
    norm: float
    first: First | None
    modules: list[OfModule] = field(default_factory=list)
    parameters: list[OfParameter] = field(default_factory=list)
    micro_batches: list[OfMicroBatch] = field(default_factory=list)
    samples: list[OfSample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    @property
    def verdict(self) -> str:
        """The result in one sentence.

        >>> Look(3, 2.0, 1.0, None).verdict
        'everything in this step is finite'
        """
        if self.finite:
            return "everything in this step is finite"
        if self.first is None:
            return "loss or gradient is not finite, but all inspected values are finite: look for the cause in the loss, outside the models"
        reaches = f"; first affected module: {self.first.reaches}" if self.first.reaches else ""
        return f"first non-finite: {self.first}{reaches}"

    def to_dict(self) -> dict[str, Any]:
        return dict(json_values({"verdict": self.verdict, "finite": self.finite} | asdict(self)))


def json_values(value: Any) -> Any:
    """Convert to JSON values. A nonfinite value becomes null, and its text is added in an entry
    `nonfinite`.

    >>> json_values({"loss": math.nan, "shape": (2, 3)})
    {'loss': None, 'shape': [2, 3], 'nonfinite': {'loss': 'nan'}}
    """
    if isinstance(value, Mapping):
        nonfinite = {
            name: repr(entry)
            for name, entry in value.items()
            if isinstance(entry, float) and not math.isfinite(entry)
        }
        plain = {
            name: None if name in nonfinite else json_values(entry) for name, entry in value.items()
        }
        return plain | ({"nonfinite": nonfinite} if nonfinite else {})
    return [json_values(entry) for entry in value] if isinstance(value, list | tuple) else value


WIDE = 100
_ROWS = 48  # rows per table; nonfinite rows are always included
_NAME = 30


def sections(look: Look, *, samples: int) -> list[str]:
    """Return the lines on micro-batches, samples, modules and parameters of a repeated step."""
    return [*_micro_batches(look), *_samples(look, samples), *_modules(look), *_parameters(look)]


def _micro_batches(look: Look) -> list[str]:
    lines = ["", "micro-batch   loss        targets   samples"]
    for micro_batch in look.micro_batches:
        whose = "" if micro_batch.rank is None else f" (rank {micro_batch.rank})"
        line = f"{f'{micro_batch.index}{whose}':<13} {number(micro_batch.loss):<11} {number(micro_batch.count):<9}"
        lines.append(f"{line} {_ids(micro_batch.ids, WIDE - len(line) - 1)}")
    return lines


def _ids(ids: Sequence[int], width: int) -> str:
    text = " ".join(map(str, ids))
    if len(text) <= width:
        return text
    end = f" ... ({len(ids)} in total)"
    return text[: width - len(end)].rpartition(" ")[0] + end


def _samples(look: Look, limit: int) -> list[str]:
    if limit == 0 or all(sample.loss is None for sample in look.samples):
        return []
    samples = look.samples[:limit]
    norms = any(sample.gradient_norm is not None for sample in samples)
    lines = [
        "",
        f"samples by loss, each run alone in evaluation mode; the first {len(samples)} of {len(look.samples)}",
        f"sample        loss        {'gradient norm  ' * norms}micro-batch",
    ]
    for sample in samples:
        loss, own = (
            "-" if value is None else number(value) for value in (sample.loss, sample.gradient_norm)
        )
        lines.append(f"{sample.id:<13} {loss:<11} {f'{own:<14} ' * norms}{sample.micro_batch}")
        lines += [f"    {line}"[:WIDE] for line in visible(sample.shown or "").splitlines()]
    finite = [
        (sample.gradient_norm or 0.0, sample.id)
        for sample in look.samples
        if math.isfinite(sample.gradient_norm or math.nan)
    ]
    named = ", ".join(
        f"{name} ({number(norm)})" for norm, name in sorted(finite, key=lambda each: -each[0])[:5]
    )
    return [*lines, f"largest gradient norms by sample: {named}"] if named else lines


def _modules(look: Look) -> list[str]:
    head = (
        "module, in order of execution",
        "kind",
        "mean",
        "rms",
        "largest",
        "zeros",
        "not finite",
    )
    rows = list[tuple[str, ...]]()
    for module in look.modules:
        output, kind = (
            module.output,
            module.kind if module.calls == 1 else f"{module.kind} x{module.calls}",
        )
        sizes = [f"{value:.3g}" for value in (output.mean, output.rms, output.largest)]
        zeros = f"{output.zeros:.0%}" if output.zeros else "-"
        rows.append((module.name or "the model", kind, *sizes, zeros, str(output.nonfinite or "-")))
    return _table(head, rows, "modules")


def _parameters(look: Look) -> list[str]:
    head = (
        "parameter by gradient norm",
        "shape",
        "norm",
        "share",
        "largest",
        "weights",
        "not finite",
    )
    rows = list[tuple[str, ...]]()
    by_size = sorted(
        look.parameters, key=lambda each: -each.norm if math.isfinite(each.norm) else 0.0
    )
    for each in sorted(by_size, key=lambda each: not each.nonfinite):
        norm, largest, weight = (f"{value:.3g}" for value in (each.norm, each.largest, each.weight))
        shape, bad = " x ".join(map(str, each.shape)), str(each.nonfinite or "-")
        rows.append(
            (
                each.name,
                shape,
                norm,
                "-" if each.share is None else f"{each.share:.0%}",
                largest,
                weight,
                bad,
            )
        )
    return _table(head, rows, "parameters")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], what: str) -> list[str]:
    if not rows:
        return []
    wanted = [index for index, row in enumerate(rows) if row[-1] != "-"][: _ROWS // 2]
    others = [index for index in range(len(rows)) if index not in wanted][: _ROWS - len(wanted)]
    visible = [rows[index] for index in sorted(wanted + others)]
    cells = [
        (shortened(in_line(row[0]), _NAME, keep="end"), shortened(row[1], 15), *row[2:])
        for row in visible
    ]
    left_out = len(rows) - len(visible)
    more = [f"... and {left_out} more {what}: --json lists all"] if left_out else []
    return ["", *text_table([head, *cells], left=(0, 1)), *more]
