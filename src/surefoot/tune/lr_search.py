"""A range test of the learning rate: on the data that the run would see next, with everything of its own step."""

import math
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from surefoot.errors import ConfigError
from surefoot.report import figures
from surefoot.report.charts import Chart, Line, Mark
from surefoot.run.components import RunComponents
from surefoot.run.run import Run, unchanged
from surefoot.train.error_causes import explaining
from surefoot.train.loop import State, Step, forward_backward, update
from surefoot.tune.lr_range_test import Curve, LRRangeTest, as_text, averaged, check_range, diverged, far, suggest

_BLOCK = 10  # losses are read so many at a time: reading waits for the device


def find_lr(
    run: Run,
    *,
    min_lr: float = 1e-6,
    max_lr: float = 10.0,
    steps: int = 100,
    progress_fn: Callable[[float, float], None] | None = None,
) -> LRRangeTest:
    """Try learning rates from `min_lr` to `max_lr`, each the same factor above the one before, and suggest one.

    The run makes its own next steps, one for each rate: same samples, accumulation, precision, clipping and optimizer. The
    rate takes the place of base rate and schedule; all groups keep the ratios of their base rates. The test is
    undone: training goes on bit for bit as if there had been none. It ends early where the running average of the losses is
    past four times its best, or a loss or gradient is not finite. A loss is that after the update with its rate.
    `progress_fn(rate, loss)` receives each of them when it is read. `print` the result for a short table with the suggestion.

    Smith 2017, section 3.3 (https://arxiv.org/abs/1506.01186), where the rate grows linearly; exponentially as fastai has it.

    >>> inputs = torch.linspace(-1, 1, 64)[:, None]
    >>> run = Run(
    ...     model=lambda: torch.nn.Linear(1, 1),
    ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     train_data=(inputs, 3 * inputs),
    ...     optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0),
    ...     batch_size=16,
    ...     length="9 epochs",
    ...     device="cpu",
    ...     console=False,
    ... )
    >>> test = find_lr(run)
    >>> test.end, 0.01 < test.suggested < 2
    ('diverged', True)

    Raises `ConfigError` for a run that is finished, has no loss of its own, or is in the middle of a step.
    """
    check_range(min_lr, max_lr, steps)
    if run.parts.finished:
        raise ConfigError(
            f"this run is finished, at step {run.state.step:,}: there are no next steps to try rates in\n"
            "  test what it was made by, from the start: surefoot find-lr RECIPE, or an earlier checkpoint of it"
        )
    rates = np.geomspace(min_lr, max_lr, steps)
    losses: list[float] = []
    bad: int | None = None  # the place of the first loss that is none, or has gone wild
    with unchanged(run) as parts, closing(_steps(parts, rates.tolist())) as blocks:
        for block in blocks:
            first = len(losses)
            losses += [loss for loss, _ in block]
            bad = next((first + index for index, (_, fine) in enumerate(block) if not fine), None)
            wild = diverged(np.array(losses[:bad]))
            bad = bad if wild is None else wild
            if progress_fn is not None:
                for index in range(max(first, 1), len(losses) if bad is None else bad):
                    progress_fn(float(rates[index - 1]), losses[index])
            if bad is not None:
                break
    if bad is None:
        return suggest(rates, np.array(losses[1:]), end="highest")
    return suggest(
        rates[: max(bad - 1, 0)],
        np.array(losses[1:bad]),
        end="diverged" if math.isfinite(losses[bad]) and diverged(np.array(losses[: bad + 1])) == bad else "not finite",
        diverged_at=float(rates[bad - 1]) if bad else None,
    )


def _steps(parts: RunComponents, rates: list[float]) -> Generator[list[tuple[float, bool]]]:
    """The steps of the test in blocks: each step's loss before its update, and whether loss and gradient were finite."""
    first, last = parts.state.step, len(rates)
    # a state of its own over the same parts: nothing that the run may have set beside them has a say in the rate
    state = State(parts.state.models, parts.state.optimizers, parts.state.ema_models, first, parts.state.buffers)
    base = _base_rate(parts)
    task = replace(parts.task, factors=lambda step: rates[min(step - first, last - 1)] / base)
    rows: list[Tensor] = []
    with closing(parts.pipeline.feed(workers=parts.pipeline.workers)) as feed:
        feed.start(first, stop=first + last + 1)
        for index in range(first, first + last + 1):  # one more: the loss after the last rate
            step = Step(index, feed.micro_batches(index), task, state)
            with explaining(step):
                loss = forward_backward(step)
                update(step)
            bad = torch.stack([trained.bad_in_a_row for trained in state.optimizers.values()]).max()
            rows.append(torch.stack([loss.float(), bad]))
            if len(rows) == _BLOCK or index == first + last:
                read, rows = torch.stack(rows).tolist(), []
                yield [(loss, math.isfinite(loss) and bad == 0) for loss, bad in read]


def _base_rate(parts: RunComponents) -> float:
    """The learning rate in the settings of the first optimizer; of one that is built by a function, its first group's."""
    name, trained = next(iter(parts.state.optimizers.items()))
    described = parts.identity["optimizer"]
    rate = (described if len(parts.state.optimizers) == 1 and name == "model" else described[name]).get("lr")
    return float(rate if isinstance(rate, int | float) else trained.optimizer.param_groups[0]["initial_lr"])


def draw(test: LRRangeTest, directory: Path, *, title: str) -> list[Path]:
    """Write find-lr.png and find-lr.svg into a directory; `ConfigError` if they cannot be written."""
    return figures.draw([chart_of(test)], directory / "find-lr", title=title)


def chart_of(test: LRRangeTest) -> Chart:
    """Losses, on a logarithmic axis where all are above 0; crosses at its top for those that would hide the fall."""
    if not len(test.losses):
        return Chart("find-lr", "Loss", (), wide=True)
    low, high = float(min(test.losses.min(), test.smoothed.min())), float(test.smoothed.max())
    top = 10 * high if low > 0 else high + 0.25 * (high - low) + 1e-9
    above = np.flatnonzero(test.losses > far(test.rates, test.losses))
    end = next(iter(above[above > test.smoothed.argmin()]), len(test.losses))

    def line(name: str, values: Curve, series: int = 0, *, measured: bool = False) -> Line:
        points = zip(test.rates.tolist(), values.tolist(), strict=False)
        inside = tuple((rate, value) for rate, value in points if value <= top)
        return Line(name, inside, series, faint=measured, dots=measured)

    lines = [
        line("loss after a step at this rate", test.losses, measured=True),
        line("smoothed", test.smoothed[:end]),
    ]
    if test.end == "diverged":
        lines.append(line("running average: ends the test at 4 times its best", averaged(test.losses), 1))
    marks = [Mark("strange", float(rate), None, "far above") for rate in test.rates[test.losses > top]]
    for what, rate, series in (("least", test.minimum, 0), ("suggested", test.suggested, 2)):
        if rate is not None:
            value = float(np.interp(rate, test.rates, test.smoothed))
            marks.append(Mark("best", rate, value, f"{what}: {as_text(rate)}", series))
    if test.diverged_at is not None:
        marks.append(Mark("event", test.diverged_at, None, f"{test.end}: {as_text(test.diverged_at)}"))
    return Chart(
        "find-lr",
        "Loss",
        tuple(lines),
        tuple(marks),
        scale="log" if low > 0 else "linear",
        x_scale="log",
        x_name="learning rate",
        wide=True,
    )
