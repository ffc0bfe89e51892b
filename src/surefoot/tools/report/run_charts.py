"""The charts of a run and their marks."""

from dataclasses import replace

from surefoot.tools.report.charts import Chart, Line, Mark, Points, format_value
from surefoot.tools.report.curves import Curve, smooth
from surefoot.tools.report.headline import headline
from surefoot.tools.report.series import ReportedRun

_SMOOTHED = 40  # points; shorter curves are not smoothed
_DOTS = 60
_MOST_METRICS, _MOST_USERS = 16, 8  # charts of metrics, and of user values
_MOST_LINES = 14  # lines of a chart
_LATE = 8  # points in the second half that justify a separate chart
_LOG_X = 12  # points that justify logarithmic axes


def charts(run: ReportedRun, *, stretches: int | None = None) -> list[Chart]:
    """Return the charts of one run, the loss first. Empty charts are omitted."""
    kinds = (loss_charts, _metric_charts, _train_charts, _users_charts)
    all_charts = (chart for kind in kinds for chart in kind(run, stretches))
    return [chart for chart in all_charts if any(line.points for line in chart.lines)]


def loss_charts(run: ReportedRun, stretches: int | None) -> list[Chart]:
    """Return charts of the training and split losses: linear axes, logarithmic axes, and the second
    half of the run.
    """
    train, scores = run.train, run.scores
    losses = {
        name: scores[name]
        for name in [name for name in scores if name.endswith("/loss")][:_MOST_LINES]
    }
    lines, marks = [], []
    if "loss" in train:
        loss = train["loss"]
        if loss.count > _SMOOTHED:
            lines.append(Line("training", points_of(loss, stretches), faint=True, named=False))
            lines.append(Line("training, smoothed", tuple(smooth(loss))))
        else:
            lines.append(Line("training", points_of(loss, stretches), dots=loss.count < _DOTS))
        marks += _strange(loss, "training loss")
    for index, (name, curve) in enumerate(losses.items(), 1):
        lines.append(
            Line(name, points_of(curve, stretches), series=index, dots=curve.count < _DOTS)
        )
        marks += _strange(curve, name)
    main, best = headline(run), list[Mark]()
    if main is not None and main.name in losses:
        series = 1 + list(losses).index(main.name)
        best.append(
            Mark("best", main.best_step, main.best, f"best {format_value(main.best)}", series)
        )
    charts = [Chart("loss", "Loss", tuple(lines), (*_events(run), *marks, *best), wide=True)]
    if (
        max(
            (line.points[-1][0] / max(1, line.points[0][0]) for line in lines if line.points),
            default=0,
        )
        >= _LOG_X
    ):
        positive = all(value > 0 for line in lines for _, value in line.points)
        log_lines = tuple(line for line in lines if len([1 for x, _ in line.points if x > 0]) > 1)
        if log_lines:
            chart = Chart(
                "loss-log", "Loss, both axes logarithmic", log_lines, tuple(best), x_scale="log"
            )
            charts.append(replace(chart, scale="log" if positive else "linear"))
    middle = max((line.points[-1][0] for line in lines if line.points), default=0.0) / 2
    late = tuple(
        replace(line, points=tuple(point for point in line.points if point[0] >= middle))
        for line in lines
    )
    if any(line.named and len(line.points) >= _LATE for line in late) and middle > 0:
        late_best = tuple(mark for mark in best if mark.x >= middle)
        charts.append(Chart("loss-late", "Loss, second half", late, late_best, x_from=middle))
    return charts


def _metric_charts(run: ReportedRun, stretches: int | None) -> list[Chart]:
    by_score: dict[str, dict[str, Curve]] = {}
    for name, curve in run.scores.items():
        split, _, score = name.rpartition("/")
        if score != "loss":
            by_score.setdefault(score, {})[split] = curve
    charts, main = [], headline(run)
    for score, splits in list(by_score.items())[:_MOST_METRICS]:
        lines = tuple(
            Line(
                split or score, points_of(curve, stretches), series=index, dots=curve.count < _DOTS
            )
            for index, (split, curve) in enumerate(list(splits.items())[:_MOST_LINES], 1)
        )
        marks = [
            mark for split, curve in splits.items() for mark in _strange(curve, f"{split}/{score}")
        ]
        marks += [
            Mark("best", main.best_step, main.best, f"best {format_value(main.best)}", index)
            for index, split in enumerate(splits, 1)
            if main is not None and main.name == f"{split}/{score}"
        ]
        title = f"{next(iter(splits))}/{score}".lstrip("/") if len(splits) == 1 else score
        charts.append(Chart(f"metric-{score}", title, lines, tuple(marks)))
    return charts


def _train_charts(run: ReportedRun, stretches: int | None) -> list[Chart]:
    def lines(*curves: tuple[str, str, int]) -> tuple[Line, ...]:
        drawn = [
            (name, points_of(train.get(key), stretches), series) for key, name, series in curves
        ]
        return tuple(Line(name, points, series) for name, points, series in drawn if points)

    def by_optimizer(key: str, title: str) -> tuple[Line, ...]:
        """Return one line for each optimizer or group with a name, or else the only line."""
        names = [name for name in train if name.startswith(f"{key}/")][:_MOST_LINES]
        if not names:
            return lines((key, title, 0))
        named = [(name, name.removeprefix(f"{key}/"), nth) for nth, name in enumerate(names)]
        return lines(*named)

    train = run.train
    rate = by_optimizer("lr", "learning rate")
    clipped = lines(("clip_fraction", "clip fraction", 2))
    momentum = by_optimizer("momentum", "momentum")
    if all(len({value for _, value in line.points}) < 2 for line in momentum):
        momentum = ()  # constant, as most are
    step_times = lines(("ms_per_step", "milliseconds", 0))
    norms = lines(("grad_norm_max", "maximum", 1), ("grad_norm", "mean", 0))
    strange = tuple(
        _strange(train["grad_norm_max"], "gradient norm") if "grad_norm_max" in train else ()
    )
    speed = lines(("targets_per_s", f"{run.count_unit} per second", 0))
    memory = lines(
        ("host_memory_bytes", "host", 0),
        ("host_memory_peak_bytes", "host, peak", 1),
        ("device_memory_peak_bytes", "device, peak", 2),
    )
    rate_note = "mean of each record, over training and waiting for data"
    return [
        Chart("learning-rate", "Learning rate", rate, zero=True, scale="linear"),
        Chart("momentum", "Momentum", momentum, scale="linear", note="Adam's beta1, or momentum"),
        Chart(
            "grad_norm",
            "Gradient norm",
            norms,
            strange,
            note="before clipping, of the steps of each record",
        ),
        Chart(
            "clip_fraction",
            "Clip fraction",
            clipped,
            unit="fraction",
            zero=True,
            scale="linear",
            note="mean of each record",
        ),
        Chart("throughput", "Targets per second", speed, zero=True, scale="linear", note=rate_note),
        Chart(
            "step-time",
            "Milliseconds per step",
            step_times,
            zero=True,
            scale="linear",
            note=rate_note,
        ),
        Chart("memory", "Memory", memory, unit="bytes", zero=True, scale="linear"),
    ]


def _users_charts(run: ReportedRun, stretches: int | None) -> list[Chart]:
    return [
        Chart(
            f"value-{name}",
            name,
            (Line(name, points_of(curve, stretches), series=3, dots=curve.count < _DOTS),),
            tuple(_strange(curve, name)),
        )
        for name, curve in list(run.users.items())[:_MOST_USERS]
    ]


def points_of(curve: Curve | None, stretches: int | None) -> Points:
    """Return a curve's points to draw, or () for None."""
    return (
        ()
        if curve is None
        else tuple((float(step), value) for step, value in curve.points(stretches))
    )


def _strange(curve: Curve, name: str) -> list[Mark]:
    return [
        Mark("strange", step, None, f"{name} is not finite up to step {step:,}")
        for step in curve.strange[:20]
    ]


def _events(run: ReportedRun) -> list[Mark]:
    marks: dict[int, list[str]] = {}
    for event in run.records.events:
        if not event.what.startswith("finished"):
            marks.setdefault(event.step, []).append(event.what)
    return [
        Mark("event", step, None, "; ".join(dict.fromkeys(texts)))
        for step, texts in list(marks.items())[:40]
    ]
