"""The learning rate range test: runs the next steps of a run with increasing learning rates, then
undoes them.
"""

import math
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from surefoot.errors import Command, ConfigError
from surefoot.run.components import RunComponents
from surefoot.run.run import Run, check_run, trial_steps
from surefoot.tools.report.charts import Chart, Line, Mark
from surefoot.tools.tune.lr_range_test import (
    Curve,
    End,
    LRRangeTest,
    as_text,
    averaged,
    check_range,
    diverged,
    far,
    suggest,
)
from surefoot.tracking.run_reader import newest_state
from surefoot.train.error_causes import explaining
from surefoot.train.loop import State, Step, forward_backward, update

_BLOCK = 10  # losses per read from the device, because each read waits for the device


def find_lr(
    run: Run,
    *,
    min_lr: float = 1e-6,
    max_lr: float = 10.0,
    steps: int = 100,
    progress_fn: Callable[[float, float], None] | None = None,
) -> LRRangeTest:
    """Try `steps` learning rates, geometrically spaced from `min_lr` to `max_lr`, and suggest one.

    The run takes its next steps, one per learning rate, with its own samples, accumulation,
    precision, clipping and optimizer. The tried learning rate replaces base learning rate and
    schedule; parameter groups keep the ratios of their base learning rates. Each loss follows the
    update with its learning rate. The test ends early if the running average of the losses exceeds
    4 times its best, or if a loss or gradient is not finite. All changes are undone: training
    continues bit for bit as without the test. `progress_fn(rate, loss)` receives each loss when it
    is read, on rank 0. On several ranks every rank makes this call; the result is the same on all. `print` the result for a short table with the suggestion. Smith 2017, section 3.3
    (https://arxiv.org/abs/1506.01186), with fastai's exponential instead of linear growth.

    >>> inputs = torch.linspace(-1, 1, 64)[:, None]
    >>> run = Run(
    ...     model=lambda: torch.nn.Linear(1, 1),
    ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0),
    ...     train_data=(inputs, 3 * inputs),
    ...     batch_size=16,
    ...     length="9 epochs",
    ...     device="cpu",
    ...     console=False,
    ... )
    >>> test = find_lr(run)
    >>> test.end, 0.01 < test.suggested < 2
    ('diverged', True)

    A run that is not open starts with its initial weights, also if its directory has later ones;
    inside `with run:` it starts from its newest checkpoint. Raises `ConfigError` if the run is
    finished, has no `loss`, or is in the middle of a step.
    """
    check_run(run, call="sf.tune.find_lr()", verb="find-lr")
    check_range(min_lr, max_lr, steps)
    if run.parts.finished:
        raise ConfigError(
            "find-lr-of-finished-run",
            problem=f"this run is finished, at step {run.state.step:,}:"
            " no steps are left to test learning rates",
            remedy=["test an earlier checkpoint of the run", Command("surefoot find-lr RECIPE")],
            step=run.state.step,
        )
    if run.session is None:
        _note_initial_weights(run.parts)
    rates = np.geomspace(min_lr, max_lr, steps)
    losses: list[float] = []
    bad: int | None = None  # index of the first loss that is not finite or has diverged
    with (
        trial_steps(run, call="sf.tune.find_lr()") as parts,
        closing(_steps(parts, rates.tolist())) as blocks,
    ):
        for block in blocks:
            first = len(losses)
            losses += [loss for loss, _ in block]
            bad = next((first + index for index, (_, fine) in enumerate(block) if not fine), None)
            wild = diverged(np.array(losses[:bad]))
            bad = bad if wild is None else wild
            if progress_fn is not None and parts.world.is_main:
                for index in range(max(first, 1), len(losses) if bad is None else bad):
                    progress_fn(float(rates[index - 1]), losses[index])
            if bad is not None:
                break
    if bad is None:
        return suggest(rates, np.array(losses[1:]), end="highest")
    end: End = "not finite"
    if math.isfinite(losses[bad]) and diverged(np.array(losses[: bad + 1])) == bad:
        end = "diverged"
    diverged_at = float(rates[bad - 1]) if bad else None
    tried_rates = rates[: max(bad - 1, 0)]
    return suggest(tried_rates, np.array(losses[1:bad]), end=end, diverged_at=diverged_at)


def _note_initial_weights(parts: RunComponents) -> None:
    """Say that the test does not start from the newest checkpoint of the run's directory."""
    if parts.directory is None or parts.state.step > 0:
        return
    newest_step, _ = newest_state(parts.directory.path)
    if newest_step > 0:
        parts.say(
            f"note: the test starts from the initial weights; to start from step {newest_step:,},"
            " call it inside `with run:`"
        )


def _steps(parts: RunComponents, rates: list[float]) -> Generator[list[tuple[float, bool]]]:
    first = parts.state.step
    last = len(rates)
    # a new state over the same components, so that no other setting of the run changes the learning
    # rate
    state = State(
        parts.state.models,
        parts.state.optimizers,
        parts.state.ema_models,
        first,
        parts.state.buffers,
    )
    base = _base_rate(parts)
    task = replace(
        parts.task,
        factors=lambda step: rates[min(step - first, last - 1)] / base,
        group_factors=None,
    )
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
                block = torch.stack(rows).tolist()
                rows = []
                yield [(loss, math.isfinite(loss) and bad == 0) for loss, bad in block]


def _base_rate(parts: RunComponents) -> float:
    name, trained = next(iter(parts.state.optimizers.items()))
    described = parts.plan.identity["optimizer"]
    if len(parts.state.optimizers) > 1 or name != "model":
        described = described[name]
    rate = described.get("lr")
    rates = trained.rates
    if not isinstance(rate, int | float):
        return float(rates.bases[0])
    if rates.bases[0] is rates.initial[0] or not rates.initial[0]:
        return float(rate)
    return float(rate) * float(rates.bases[0]) / rates.initial[0]  # the loop's body wrote a rate


def chart_of(test: LRRangeTest) -> Chart:
    """Chart the losses, on a logarithmic axis if all are positive. Losses that would hide the fall
    are drawn as crosses at the top.
    """
    if not len(test.losses):
        return Chart("find-lr", "Loss", (), wide=True)
    low = float(min(test.losses.min(), test.smoothed.min()))
    high = float(test.smoothed.max())
    if low > 0:
        scale: Literal["linear", "log"] = "log"
        top = 10 * high
    else:
        scale = "linear"
        top = high + 0.25 * (high - low) + 1e-9
    # the smoothed line ends where losses after its minimum are capped
    is_far = np.flatnonzero(test.losses > far(test.rates, test.losses))
    after_minimum = is_far[is_far > test.smoothed.argmin()]
    end = after_minimum[0] if len(after_minimum) else len(test.losses)

    def line(name: str, values: Curve, series: int = 0, *, measured: bool = False) -> Line:
        points = zip(test.rates.tolist(), values.tolist(), strict=False)
        inside = tuple((rate, value) for rate, value in points if value <= top)
        return Line(name, inside, series, faint=measured, dots=measured)

    lines = [
        line("loss after a step with this learning rate", test.losses, measured=True),
        line("smoothed", test.smoothed[:end]),
    ]
    if test.end == "diverged":
        lines.append(
            line("running average: the test ends at 4 times its minimum", averaged(test.losses), 1)
        )
    rates_above = test.rates[test.losses > top]
    marks = [Mark("strange", float(rate), None, "far above") for rate in rates_above]
    for what, rate, series in (("minimum", test.minimum, 0), ("suggested", test.suggested, 2)):
        if rate is not None:
            value = float(np.interp(rate, test.rates, test.smoothed))
            marks.append(Mark("best", rate, value, f"{what}: {as_text(rate)}", series))
    if test.diverged_at is not None:
        marks.append(
            Mark("event", test.diverged_at, None, f"{test.end}: {as_text(test.diverged_at)}")
        )
    return Chart(
        "find-lr",
        "Loss",
        tuple(lines),
        tuple(marks),
        scale=scale,
        x_scale="log",
        x_name="learning rate",
        wide=True,
    )
