"""Checks for gradients that are clipped in most steps, grow, vanish towards the input, or are too
noisy for the batch.
"""

import math

import numpy as np
from numpy.typing import NDArray

from surefoot.tools.diagnose.finding import (
    IGNORED_LABELS,
    Verdict,
    check,
    join_names,
    need,
    well,
    wrong,
)
from surefoot.tools.diagnose.history import History, Series
from surefoot.tools.diagnose.layers import WATCHED, matrices
from surefoot.tools.diagnose.statistics import first_and_last_third, level, trend

FEWEST = 12
"""Minimum number of records: thirds of four, whose medians one record does not change."""
OFTEN = 0.9
"""Fraction of clipped steps above which the limit, not the learning rate, determines the step size.
Clipping is for rare large gradients (Pascanu et al. 2013, section 3.2,
https://arxiv.org/abs/1211.5063)."""
FAR_BELOW = 2.0
"""Minimum ratio of gradient norm to limit. Pascanu et al. set the limit to between half and ten
times the usual norm.
"""
FAR_ABOVE = 10.0
"""Ratio of gradient norm to limit that is a warning. A smaller ratio only lowers SGD's learning
rate, not Adam's.
"""
GREW = 10.0
"""Ratio of the last third to the first third. A healthy gradient norm changes slowly, by a factor
of 2 or 3.
"""
SURE = 3.0
"""Minimum significance of a trend in standard deviations. One run in a thousand exceeds 3 by
chance.
"""
GONE = 1e-4
"""Ratio of a layer's gradient times weight to that of the largest layer. This product is the effect
of a relative weight change on the loss, in any units. Each sigmoid layer of a plain network costs a
factor of 4 or more (Hochreiter 1991; Glorot and Bengio 2010). Layers of networks that train differ
by some hundreds."""
NOISY = 10.0
"""Ratio of noise scale to batch size. A step with batch size B is worth B / (B + noise scale) of a
step with the true gradient (McCandlish et al. 2018, equation 2.7,
https://arxiv.org/abs/1812.06162). Below a tenth, a doubled batch almost doubles the progress."""


@check("often-clipped")
def often_clipped(history: History) -> Verdict:
    """Measure the fraction of clipped steps in the second half of the run, and the ratio of
    gradient norm to limit.
    """
    described = history.described
    kind, limit = described.clip or ("", math.nan)
    well(kind == "off", "the gradient is not clipped")
    well(kind == "auto", "the limit follows the gradient norm automatically")
    second_half = max(history.step // 2, described.warmup, described.steps_changed_at)
    late = history.column("clip_fraction").finite.since(second_half)
    need(
        len(late) >= FEWEST // 2,
        f"{len(late)} records in the second half are too few (at least {FEWEST // 2})",
    )
    share = float(late.value.mean())
    norm = level(history.column("grad_norm").since(int(late.step[0]) - 1).value)
    need(math.isfinite(norm), "the later gradient norms are not finite")
    healthy = f"{share:.0%} of the later steps are clipped"
    if norm:
        healthy += f", with gradient norms of about {norm:.3g}"
    well(share < OFTEN or (kind == "norm" and norm < FAR_BELOW * limit), healthy)
    evidence = f"median gradient norm {norm:.3g}"
    if not math.isnan(limit):
        evidence += f", limit {limit:g}"
    setting = described.present("clip") or "not known"
    remedies = []
    if kind == "norm":
        twice_the_norm = float(f"{2 * norm:.1g}")
        remedies.append(described.typed("clip", f"norm {twice_the_norm:g}"))
    remedies.append(described.typed("clip", "auto 0.9"))
    return wrong(
        "warning" if norm >= FAR_ABOVE * limit or math.isnan(limit) else "note",
        f"The gradient was clipped in {share:.0%} of the later steps: the limit ({setting}) determines their size.",
        (evidence,),
        causes=(
            "a limit that is too small for this model: the gradient norm grows with the number of parameters",
            "a gradient norm that has grown",
        ),
        try_=remedies,
        step=int(late.step[0]),
        numbers={"share": share, "norm": norm},
    )


@check("growing-gradient")
def growing_gradient(history: History) -> Verdict:
    """Compare the gradient norms in the first and last third of the run, and name the layers that
    grew most.
    """
    described = history.described
    since = max(described.warmup, described.steps_changed_at)
    norms = history.column("grad_norm").finite.since(since)
    need(
        len(norms) >= FEWEST,
        f"{len(norms)} gradient norm records after the warm-up are too few (at least {FEWEST})",
    )
    before, now = first_and_last_third(norms.value)
    well(
        not (before > 0 and now > GREW * before and trend(norms.value) > SURE),
        f"the gradient norm went from {before:.3g} to {now:.3g}",
    )
    return wrong(
        "warning",
        f"The gradient norm grows: from {before:.3g} to {now:.3g}.",
        (
            f"medians of the first and last third of {len(norms)} records; the trend is {trend(norms.value):.1f} standard deviations",
            _layers_that_grew(history),
        ),
        causes=(
            "the beginning of a divergence: weights, logits or attention that grow without bound",
            "targets or loss weights that grow with the steps",
        ),
        try_=(
            history.described.lr_divided(3, digits=2, otherwise="a lower learning rate"),
            "more weight decay; normalization of queries and keys, or of the output",
        ),
        step=int(norms.step[0]),
        numbers={"before": before, "now": now},
    )


@check("vanishing-gradient")
def vanishing_gradient(history: History) -> Verdict:
    """Compare each layer's gradient times weight with that of the largest layer, and find gradients
    of 0.
    """
    norms = history.column("grad_norm").finite
    quarter = len(norms) // 4
    if len(norms) >= FEWEST and not norms.value[-quarter:].any():
        evidence = [f"the norm is 0 in the last {quarter} records"]
        counted = history.column("targets").value[-quarter:]
        if counted.size > 0 and not counted.any():
            evidence.append("no target was counted in them")
        return wrong(
            "error",
            "The gradient is exactly 0.",
            evidence,
            causes=(
                IGNORED_LABELS,
                "all units of a layer are dead, or an output is saturated",
                "a loss that is constant, or is computed from detached tensors",
            ),
            try_=(
                f"{history.described.replay(history.step - 1)}  # shows at which layer the gradient ends",
            ),
            step=int(norms.step[-quarter]),
            numbers={"smallest": 0.0},
        )
    gradients = _settled(history, "grad_norm")
    weights = _settled(history, "weight_norm")
    names = [parameter for parameter in matrices(history, gradients) if parameter in weights]
    watched = max(map(len, gradients.values()), default=0)
    need(
        watched >= WATCHED and len(names) >= 2,
        f"{watched} measured steps of {len(names)} matrices after the warm-up are too few (at least {WATCHED} steps and 2 matrices)",
    )
    effects = {}  # of a relative change of a matrix on the loss
    for name in names:
        effect = level(gradients[name].value) * level(weights[name].value)
        if effect > 0:
            effects[name] = effect
    need(len(effects) >= 2, "fewer than two matrices have gradients")
    smallest, *_, largest = sorted(effects, key=lambda parameter: effects[parameter])
    gone = [parameter for parameter in effects if effects[parameter] < GONE * effects[largest]]
    of_largest = effects[smallest] / effects[largest]
    within = effects[largest] / effects[smallest]
    well(
        not gone,
        f"gradient times weight differs by at most {within:.2g}x between all {len(effects)} matrices",
    )
    return wrong(
        "warning",
        f"The gradient vanishes on its way to {join_names(gone)}.",
        (
            f"gradient times weight of {smallest} is {of_largest:.1g} of the value of {largest}",
            f"{len(gone)} of {len(effects)} matrices are below {GONE:g} of the largest",
        ),
        causes=(
            "many layers that each make the gradient smaller: sigmoid or tanh without residual connections or norms",
            "initial weights that are too small",
        ),
        try_=(
            "residual connections, a norm in each layer, ReLU or GELU",
            "Glorot or He initialization",
        ),
        numbers={"smallest": of_largest, "layers": len(gone)},
    )


@check("batch-too-small")
def noisy_batch(history: History) -> Verdict:
    """Compare the gradient noise scale with the batch size (McCandlish et al. 2018, appendix
    A.1).
    """
    rows = _noise_rows(history)
    need(
        len(rows) >= 2 * WATCHED,
        f"{len(rows)} measured steps with several micro-batches are too few (at least"
        f" {2 * WATCHED}): set micro_batch_size to get them",
    )
    batch = float(np.median(rows[:, 2]))
    gradients, noises = gradient_and_noise(rows)
    gradient = float(gradients.mean())
    error = float(gradients.std(ddof=1)) / math.sqrt(len(rows))
    largest_plausible = max(gradient + 2 * error, 1e-300)
    at_least = float(noises.mean()) / largest_plausible
    is_known = gradient > 2 * error
    if is_known:
        scale = noise_scale(rows)
        noise_text = f"noise scale {scale:.3g}"
    else:
        scale = at_least
        noise_text = f"noise scale at least {scale:.3g}"
    is_small = at_least > NOISY * batch
    need(is_small or is_known, "the gradient noise is not known accurately enough yet")
    well(not is_small, f"noise scale {scale:.3g} targets, batch {batch:.3g} targets")
    times = 2 ** max(1, math.floor(math.log2(min(scale / batch, 16))))
    number, _, unit = str(history.described.present("batch_size")).partition(" ")
    larger: int | str = int(number) * times if number.isdigit() else f"{times} times as many"
    if unit:
        larger = f"{larger} {unit}"
    return wrong(
        "warning" if at_least > NOISY**2 * batch else "note",
        f"The batch is small for the gradient noise: {batch:.3g} targets, {noise_text}.",
        (
            f"from {len(rows)} measured steps; at least {at_least:.3g}, even if the gradient is two standard errors larger than measured",
            f"a step is worth {batch / (batch + scale):.2g} of a step with the true gradient",
        ),
        causes=("a batch smaller than the task needs; gradients are noisier late in training",),
        try_=(
            history.described.typed("batch_size", larger),
            "with it, a higher learning rate: by the square root of the batch's factor for Adam, by the factor for SGD",
            "or a lower learning rate at the end, which averages as a larger batch does",
        ),
        numbers={"noise_scale": scale, "at_least": at_least, "batch": batch},
    )


def _noise_rows(history: History) -> NDArray[np.float64]:
    """Return a row for each measured step with several micro-batches, as `noise_scale` takes
    it.
    """
    noise = history.watched("grad_noise")
    keys = ("small_count", "small_squared", "big_count", "big_squared")
    if any(key not in noise for key in keys):
        return np.zeros((0, 4))
    since = history.described.steps_changed_at
    columns = [noise[key].where(noise[key].step >= since).value for key in keys]
    rows: NDArray[np.float64] = np.array(columns).T
    is_complete = (rows != 0).all(axis=1) & np.isfinite(rows).all(axis=1)
    has_several = rows[:, 2] > rows[:, 0]
    complete: NDArray[np.float64] = rows[is_complete & has_several]
    return complete


def noise_scale(rows: NDArray[np.float64]) -> float:
    """Return the batch size in targets at which the noise equals the gradient, or infinity if noise
    hides the gradient.

    The rows are (small count, squared norm, big count, squared norm). McCandlish et al. 2018,
    equations A.2 and A.3.

    >>> noise_scale(np.array([[1.0, 1.0 + 8.0, 4.0, 1.0 + 2.0]]))  # gradient 1, noise 8 / count
    8.0
    """
    gradient, noise = gradient_and_noise(rows)
    return float(noise.mean() / gradient.mean()) if gradient.mean() > 0 else math.inf


def gradient_and_noise(
    rows: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return unbiased estimates per row: the squared norm of the true gradient, and the variance of
    one target's gradient.
    """
    small, small_squared, big, big_squared = rows.T
    noise = (small_squared - big_squared) / (1 / small - 1 / big)
    return (big * big_squared - small * small_squared) / (big - small), noise


def _settled(history: History, kind: str) -> dict[str, Series]:
    """Return the measured steps after warm-up, except the first: weights initialized to 0 have
    hardly moved by then.
    """
    settled = {}
    for name, series in history.watched(kind).items():
        is_later = series.step > series.step[0]
        settled[name] = series.where(is_later & (series.step >= history.described.warmup))
    return settled


def _layers_that_grew(history: History) -> str:
    growths = {}
    for name, series in history.watched("grad_norm").items():
        if len(series) < 2 * WATCHED:
            continue
        before, now = first_and_last_third(series.value)
        if before > 0 and now > GREW * before:
            growths[name] = now / before
    if not growths:
        return ""
    most_first = sorted(growths, key=lambda name: -growths[name])
    return (
        f"it grew most in {join_names([f'{name} ({growths[name]:.3g}x)' for name in most_first])}"
    )


@check("loss-contract")
def loss_contract(history: History) -> Verdict:
    """Check that the loss of a batch was the count-weighted mean over its halves when the run
    began.
    """
    contract = history.data.get("loss_contract")
    if not isinstance(contract, dict):
        contract = {}
    summary = str(contract.get("description", "")).partition("\n")[0]
    need(
        summary,
        "steps had one micro-batch, so the loss of a batch was not compared with that of its halves",
    )
    need("not checked" not in summary, f"the loss contract was {summary}")
    well("holds" not in contract or bool(contract["holds"]), f"the loss contract {summary}")
    return wrong(
        "warning",
        "The loss of a batch is not the mean over its samples, so gradients depend on the size of micro-batches.",
        (summary,),
        causes=(
            "a sum, or a mean over something other than the counted targets",
            "a loss that couples the samples of a batch",
        ),
        try_=(
            "pass Run(count_fn=lambda batch: ...), or return sf.Mean(total, count)",
            "for a contrastive loss: Run(loss=sf.losses.whole_batch(encode_fn, loss_fn))",
        ),
        numbers={},
    )
