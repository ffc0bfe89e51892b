"""docs/explained/anatomy.md: one optimizer step of a real run, each line of loop.py beside what it
computed and how long it took.

    python benchmarks/anatomy.py [--write]

Trains the recipe `images` on scikit-learn's digits and watches the lines of loop.py with a trace
function: the numbers are those of step 20, the microseconds the least of the 15 steps up to it.
Everything but the microseconds is the same each time.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from textwrap import wrap
from time import perf_counter
from types import FrameType
from typing import Any

import torch

import surefoot as sf
from surefoot.config.tree import layered
from surefoot.recipes import images
from surefoot.train import loop

STEP, TIMED = 20, 15
PAGE = Path(__file__).parents[1] / "docs" / "explained" / "anatomy.md"
SETTINGS = {
    "run_dir": None,
    "micro_batch_size": 32,
    "precision": "fp32",
    "length": "100 steps",
    "evaluate_every": "100 steps",
}
Locals = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """A line of loop.py, by how it begins, and what is told of it when it has run; timed where that
    says something.
    """

    code: str
    told: Callable[[Locals], str] = lambda _: ""
    timed: bool = True


@dataclass(frozen=True)
class Part:
    """A paragraph of the page and the lines below it."""

    title: str
    words: str
    lines: tuple[Line, ...]


def short(value: Any) -> str:
    """A number to five digits."""
    return f"{float(value.detach() if isinstance(value, torch.Tensor) else value):.5g}"


def fed(seen: Locals) -> str:
    parts = []
    for one in seen["step"].micro_batches:
        shape = " x ".join(str(size) for size in one.batch[0].shape)
        ids = ", ".join(str(sample) for sample in one.sample_ids[:4].tolist())
        parts.append(f"micro-batch {one.index}: images {shape}, samples {ids} ...")
    return "; ".join(parts)


def added(seen: Locals) -> str:
    count = seen["micro_batch"].count
    sums = seen["sums"]
    return f"{short(seen['part'])} ({count} of {sums.nominal}), in all {short(sums.total)}"


def gradients(seen: Locals) -> str:
    held = seen["gradients"]
    return f"{len(held)} tensor{'' if len(held) == 1 else 's'} with {sum(one.numel() for one in held):,} numbers"


def clipping(seen: Locals) -> str:
    after = torch.cat([one.flatten() for one in seen["gradients"]]).norm()
    return f"limited: {short(seen['clipped'])}; norm afterwards {short(after)}"


def rates(seen: Locals) -> str:
    factor = seen["task"].factors(seen["step"].index) * seen["step"].state.lr_factor
    groups = ", ".join(short(group["lr"]) for group in seen["trained"].optimizer.param_groups)
    return f"factor {short(factor)}; lr of the groups: {groups}"


PARTS = (
    Part(
        "Feed",
        "The samples of a step are computed from its index: positions in the epoch's permutation, augmentation from (seed, epoch,"
        " sample). Nothing is remembered from the previous step.",
        (Line("step = Step(state.step, feed(state.step)", fed),),
    ),
    Part(
        "Seeding",
        "Each pass draws its random numbers (dropout, mixing) from (seed, step, micro-batch), folded into 64 bits. Rank and process are"
        " not part of the seed, so any division of the work draws the same numbers.",
        (
            Line(
                "seed_generators(fold(task.key, step.index, micro_batch.index))",
                lambda _: f"{torch.default_generator.initial_seed() & (2**64 - 1):#018x}",
            ),
        ),
    ),
    Part(
        "Forward",
        "The loop calls the user's loss. Before each pass, it resets the batch statistics to their values at the start of the"
        " step. At the end of the step, they become the mean over the passes.",
        (
            Line("state.buffers.start_pass("),
            Line(
                "result = watched_loss(task.forward, micro_batch.batch)",
                lambda seen: f"mean loss {short(result_of(seen))}",
            ),
        ),
    ),
    Part(
        "Loss sum",
        "A mean of means is wrong if micro-batches differ in size. Each mean is weighted by its target count, and divided by the target"
        " count of the step.",
        (
            Line("sums = LossSum(", lambda seen: f"nominal {seen['sums'].nominal}", timed=False),
            Line(
                "part, share, further = sums.add(result, micro_batch.count)",
                added,
            ),
        ),
    ),
    Part(
        "Backward",
        "This is the only call of `backward`. Gradients accumulate in the parameters. Several ranks sum the gradients once, in"
        " the last pass.",
        (
            Line(
                "task.precision.backward(ranks.started(part, None if scale is None else scale.scale), share)"
            ),
            Line(
                "mean = total if total_count is None",
                lambda seen: f"loss of the step {short(seen['mean'])}",
                timed=False,
            ),
        ),
    ),
    Part(
        "Norm",
        "One norm covers all gradients. The step is not applied if the norm or the loss is not finite. The device decides this,"
        " and the host does not wait. On the CPU the host reads the number, because no wait is needed there.",
        (
            Line("gradients = trained.gradients()", gradients),
            Line("norm = gradient_norm(", lambda seen: f"norm {short(seen['norm'])}"),
            Line("skipped = should_skip(", lambda seen: f"skipped {short(seen['skipped'])}"),
        ),
    ),
    Part(
        "Clip",
        "Unscaling, the division by the target count and clipping are one factor, applied in one pass over the gradients.",
        (Line("clipped = trained.clipping.apply(", clipping),),
    ),
    Part(
        "Learning rate",
        "The schedule is a function of the step's index; each parameter group has its own base rate.",
        (Line("trained.set_rate(factors, lowered=step.state.lr_factor", rates),),
    ),
    Part(
        "Update",
        "AdamW's fused kernel receives `skipped`. If it is 1, the kernel changes no bit of weights and moments.",
        (
            Line("trained.skip.apply(trained.optimizer, skipped"),
            Line("state.buffers.finish(skipped)"),
            Line("clear(state.parameters)"),
        ),
    ),
    Part(
        "Meter row",
        "The row holds index, loss, target count, norm, clip fraction and skipped. These tensors stay on the device until a log"
        " reads them all at once. A checkpoint holds the rows that are not logged yet.",
        (Line("record(step)"),),
    ),
)


def result_of(seen: Locals) -> Any:
    """The loss, a counted mean, beside which the recipe returns its accuracy."""
    mean, _ = seen["result"]
    return mean.value.detach()


@dataclass
class Watch:
    """A trace function for the lines of loop.py: how long each took, and what is told of it."""

    lines: dict[int, Line]
    telling: bool = False
    took_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    told: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    at: dict[FrameType, tuple[int, float]] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        """Called by Python before each line, and at each begin and end of a function."""
        now = perf_counter()
        if frame.f_code.co_filename != loop.__file__ or frame.f_code.co_name.startswith(
            "<"
        ):  # comprehensions
            return None
        number, begun = self.at.pop(frame, (0, 0.0))
        line = self.lines.get(number)
        if line is not None:
            self.took_s[line.code].append(now - begun)
            if self.telling:
                self.told[line.code].append(line.told(frame.f_locals))
        if event == "line":
            self.at[frame] = (frame.f_lineno, perf_counter())
        return self


def placed() -> dict[int, Line]:
    """Each line of the page by its number in loop.py; the last of them where it stands there more
    than once.
    """
    source = Path(loop.__file__).read_text().splitlines()
    found = {}
    for line in (line for part in PARTS for line in part.lines):
        numbers = [
            number
            for number, text in enumerate(source, start=1)
            if text.strip().startswith(line.code)
        ]
        if not numbers:
            raise SystemExit(
                f"loop.py has no line that begins with {line.code!r}: mend benchmarks/anatomy.py"
            )
        found[numbers[-1]] = line
    return found


@dataclass(frozen=True)
class Watched:
    """What was seen of the step."""

    watch: Watch
    source: dict[str, str]
    """The whole line of each, by how it begins."""
    step: sf.Step
    row: tuple[Any, ...]
    parameters: int
    weight_norm: float
    update_norm: float
    step_s: float


def watched() -> Watched:
    """Train until the step is made, and watch it."""
    with redirect_stdout(StringIO()):  # which its console keeps
        run = images.build(layered(images.Config, [("anatomy", SETTINGS)])[0])
    lines = placed()
    watch = Watch(lines)
    before = torch.empty(0)
    parameters = run.state.parameters
    outer = sys.gettrace()
    begun_s = 0.0
    steps_s = []
    try:
        with redirect_stdout(StringIO()), run:
            for step in run:
                steps_s.append(perf_counter() - begun_s)
                if step.index == STEP:
                    sys.settrace(outer)
                    break
                if step.index == STEP - TIMED:
                    sys.settrace(watch)
                watch.telling = step.index == STEP - 1
                before = torch.cat([one.detach().flatten() for one in parameters])
                begun_s = perf_counter()
    finally:
        sys.settrace(outer)
    after = torch.cat([one.detach().flatten() for one in parameters])
    text = Path(loop.__file__).read_text().splitlines()
    return Watched(
        watch,
        {line.code: text[number - 1].strip() for number, line in lines.items()},
        step,
        run.parts.run_state.meter.rows[-1],
        len(after),
        float(after.norm()),
        float((after - before).norm()),
        min(steps_s[-TIMED:]),
    )


def page() -> str:
    """The whole page."""
    seen = watched()
    head = (
        "This page follows one optimizer step line by line through [`loop.py`](../../src/surefoot/train/loop.py), with the numbers of a"
        f" real run. It trains the recipe `images` on scikit-learn's 8 x 8 digits: a network of {seen.parameters:,} parameters,"
        " batches of 64"
        f" in two micro-batches of 32, AdamW, one CPU thread, step {STEP}. [A tour of the loop](loop.md) has the overview."
    )
    made = (
        "`python benchmarks/anatomy.py --write` writes this page, and a test compares it with new output. Times are the minimum"
        f" of {TIMED} steps on one machine, and include a slow trace function. All other numbers are the same each time."
    )
    lines = ["# Anatomy of one step", "", *filled(head), "", *filled(made)]
    for place, part in enumerate(PARTS, start=1):
        lines += ["", f"## {place}. {part.title}", "", *filled(part.words), ""]
        for line in part.lines:
            lines.append(f"    {seen.source[line.code].partition('  #')[0]}")
            told = [one for one in seen.watch.told[line.code] if one]
            took = f"{min(seen.watch.took_s[line.code]) * 1e6:,.0f} µs" if line.timed else ""
            each = " each" if took and len(seen.watch.told[line.code]) > 1 else ""
            lines.append(f"    #   {'; '.join([*told, *([took + each] if took else [])])}")
    index, *measured = seen.row
    shown = ", ".join(short(value) for value in measured)
    end = (
        f"The row of this step: {index}, {shown}. Its update has norm {short(seen.update_norm)}, and the weights have norm"
        f" {short(seen.weight_norm)}: a ratio of {short(seen.update_norm / seen.weight_norm)}."
        " Then the loop evaluates if an evaluation is due, and yields the step to your code. Logging and saving follow."
        f" The whole step took {seen.step_s * 1e6:,.0f} µs."
    )
    lines += ["", *filled(end)]
    return "\n".join(lines) + "\n"


def filled(text: str) -> list[str]:
    return wrap(text, width=100, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    text = page()
    if parser.parse_args().write:
        PAGE.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
