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
        match self.what:
            case "weight" | "buffer":
                return f"the {self.what} {self.name}, before the step"
            case "inputs":
                phrase = f"{self.name} in the data"
            case "loss":
                phrase = "the loss, although the outputs are finite"
            case "gradient":
                phrase = f"{self.name}.grad"
            case "norm":
                phrase = f"the gradient norm: {self.name}.grad is too large to square"
            case _:
                phrase = f"{self.what} of {self.name or 'the model'}"
                if self.kind:
                    phrase += f" ({self.kind})"
        where = self._where()
        if where and self.rank is not None:
            where += f" (rank {self.rank})"
        return f"{phrase}{where}"

    def _where(self) -> str:
        count = len(self.samples)
        if self.every_sample:
            return f", from each of the {count} samples of micro-batch {self.micro_batch}"
        if self.samples:
            samples = "sample" if count == 1 else "samples"
            listed = ", ".join(str(sample) for sample in self.samples[:5])
            more = " ..." if count > 5 else ""
            return f", from {samples} {listed}{more}"
        return "" if self.micro_batch is None else f", in micro-batch {self.micro_batch}"


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
        verdict = f"first non-finite: {self.first}"
        if self.first.reaches:
            verdict += f"; first affected module: {self.first.reaches}"
        return verdict

    def to_dict(self) -> dict[str, Any]:
        return dict(json_values({"verdict": self.verdict, "finite": self.finite} | asdict(self)))


def json_values(value: Any) -> Any:
    """Convert to JSON values. A nonfinite value becomes null, and its text is added in an entry
    `nonfinite`.

    >>> json_values({"loss": math.nan, "shape": (2, 3)})
    {'loss': None, 'shape': [2, 3], 'nonfinite': {'loss': 'nan'}}
    """
    if isinstance(value, Mapping):
        plain: dict[str, Any] = {}
        nonfinite = {}
        for name, entry in value.items():
            if isinstance(entry, float) and not math.isfinite(entry):
                plain[name] = None
                nonfinite[name] = repr(entry)
            else:
                plain[name] = json_values(entry)
        if nonfinite:
            plain["nonfinite"] = nonfinite
        return plain
    if isinstance(value, list | tuple):
        return [json_values(entry) for entry in value]
    return value


WIDE = 100
_ROWS = 48  # rows per table; nonfinite rows are always included
_NAME = 30


def sections(look: Look, *, samples: int) -> list[str]:
    """Return the lines on micro-batches, samples, modules and parameters of a repeated step."""
    return [*_micro_batches(look), *_samples(look, samples), *_modules(look), *_parameters(look)]


def _micro_batches(look: Look) -> list[str]:
    lines = ["", "micro-batch   loss        targets   samples"]
    for micro_batch in look.micro_batches:
        name = str(micro_batch.index)
        if micro_batch.rank is not None:
            name += f" (rank {micro_batch.rank})"
        line = f"{name:<13} {number(micro_batch.loss):<11} {number(micro_batch.count):<9}"
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
    has_norms = any(sample.gradient_norm is not None for sample in samples)
    title = f"{'sample':<13} {'loss':<11} "
    if has_norms:
        title += f"{'gradient norm':<14} "
    lines = [
        "",
        f"samples by loss, each run alone in evaluation mode; the first {len(samples)} of {len(look.samples)}",
        f"{title}micro-batch",
    ]
    for sample in samples:
        line = f"{sample.id:<13} {_number_or_dash(sample.loss):<11} "
        if has_norms:
            line += f"{_number_or_dash(sample.gradient_norm):<14} "
        lines.append(f"{line}{sample.micro_batch}")
        lines += [f"    {line}"[:WIDE] for line in visible(sample.shown or "").splitlines()]
    norms = []
    for sample in look.samples:
        norm = sample.gradient_norm
        if norm and math.isfinite(norm):
            norms.append((norm, sample.id))
    if norms:
        norms.sort(key=lambda pair: -pair[0])
        largest = ", ".join(f"{sample_id} ({number(norm)})" for norm, sample_id in norms[:5])
        lines.append(f"largest gradient norms by sample: {largest}")
    return lines


def _number_or_dash(value: float | None) -> str:
    return "-" if value is None else number(value)


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
        output = module.output
        kind = module.kind if module.calls == 1 else f"{module.kind} x{module.calls}"
        rows.append(
            (
                module.name or "the model",
                kind,
                f"{output.mean:.3g}",
                f"{output.rms:.3g}",
                f"{output.largest:.3g}",
                f"{output.zeros:.0%}" if output.zeros else "-",
                str(output.nonfinite or "-"),
            )
        )
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

    def order(parameter: OfParameter) -> tuple[bool, float]:
        size = parameter.norm if math.isfinite(parameter.norm) else 0.0
        return not parameter.nonfinite, -size

    for parameter in sorted(look.parameters, key=order):
        rows.append(
            (
                parameter.name,
                " x ".join(str(size) for size in parameter.shape),
                f"{parameter.norm:.3g}",
                "-" if parameter.share is None else f"{parameter.share:.0%}",
                f"{parameter.largest:.3g}",
                f"{parameter.weight:.3g}",
                str(parameter.nonfinite or "-"),
            )
        )
    return _table(head, rows, "parameters")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], what: str) -> list[str]:
    if not rows:
        return []
    nonfinite = [index for index, row in enumerate(rows) if row[-1] != "-"][: _ROWS // 2]
    others = [index for index in range(len(rows)) if index not in nonfinite]
    listed = sorted([*nonfinite, *others[: _ROWS - len(nonfinite)]])
    cells = [head]
    for name, kind, *values in (rows[index] for index in listed):
        cells.append((shortened(in_line(name), _NAME, keep="end"), shortened(kind, 15), *values))
    lines = ["", *text_table(cells, left=(0, 1))]
    if len(listed) < len(rows):
        lines.append(f"... and {len(rows) - len(listed)} more {what}: --json lists all")
    return lines
