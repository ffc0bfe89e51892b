"""The charts of a run and their marks."""

import math
from collections.abc import Sequence
from dataclasses import replace

from surefoot.config.setting_change import in_effect
from surefoot.tools.report.charts import Chart, Line, Mark, Points, format_value
from surefoot.tools.report.curves import Curve, smooth
from surefoot.tools.report.headline import Headline, headline
from surefoot.tools.report.series import ReportedRun
from surefoot.train.changed_settings import described
from surefoot.train.recorded_settings import recorded_settings

_SMOOTHED = 40  # points; shorter curves are not smoothed
_DOTS = 60
_MOST_METRICS = 16  # charts of metrics
_MOST_USERS = 8  # charts of user values
_MOST_LINES = 14  # lines of a chart
_LATE = 8  # points in the second half that justify a separate chart
_LOG_X = 12  # points that justify logarithmic axes
_MOST_CHANGES = 40  # steps with a mark
_PLANNED = 200  # points of the rates to come
_GREY = 6  # the series whose color has no hue


def charts(run: ReportedRun, *, stretches: int | None = None) -> list[Chart]:
    """Return the charts of one run, the loss first. Empty charts are omitted."""
    all_charts = [
        *loss_charts(run, stretches),
        *_metric_charts(run, stretches),
        *_train_charts(run, stretches),
        *_users_charts(run, stretches),
    ]
    return [chart for chart in all_charts if any(line.points for line in chart.lines)]


def loss_charts(run: ReportedRun, stretches: int | None) -> list[Chart]:
    """Return charts of the training and split losses: linear axes, logarithmic axes, and the second
    half of the run.
    """
    lines = []
    marks = []
    loss = run.train.get("loss")
    if loss is not None:
        if loss.count > _SMOOTHED:
            lines.append(Line("training", points_of(loss, stretches), faint=True, named=False))
            lines.append(Line("training, smoothed", tuple(smooth(loss))))
        else:
            lines.append(_dotted("training", loss, stretches))
        marks += _strange(loss, "training loss")
    main = headline(run)
    best: tuple[Mark, ...] = ()
    names = [name for name in run.scores if name.endswith("/loss")][:_MOST_LINES]
    for index, name in enumerate(names, 1):
        curve = run.scores[name]
        lines.append(_dotted(name, curve, stretches, series=index))
        marks += _strange(curve, name)
        if main is not None and main.name == name:
            best = (_best(main, index),)
    all_marks = (*_events(run), *marks, *best)
    charts = [Chart("loss", "Loss", (*lines, *_left_lines(run, stretches)), all_marks, wide=True)]
    drawn = [line for line in lines if line.points]
    longest = max((line.points[-1][0] / max(1, line.points[0][0]) for line in drawn), default=0)
    if longest >= _LOG_X:
        charts += _logarithmic(lines, best)
    middle = max((line.points[-1][0] for line in drawn), default=0.0) / 2
    if middle > 0:
        charts += _second_half(lines, best, middle)
    return charts


def _left_lines(run: ReportedRun, stretches: int | None) -> list[Line]:
    """Return the losses of the branches that the run has left, in grey."""
    lines = []
    for branch in run.left:
        for name, curve in branch.losses.items():
            title = f"{name}, left by change {branch.number}"
            points = points_of(curve, stretches)
            if curve.count > _SMOOTHED:
                points = tuple(smooth(curve))
            dots = curve.count < _DOTS
            lines.append(Line(title, points, _GREY, faint=True, dots=dots, named=name == "loss"))
    return lines


def _logarithmic(lines: Sequence[Line], best: tuple[Mark, ...]) -> list[Chart]:
    """Return the losses with logarithmic axes, of which the vertical one needs positive values."""
    visible = [line for line in lines if sum(x > 0 for x, _ in line.points) > 1]
    if not visible:
        return []
    is_positive = all(value > 0 for line in lines for _, value in line.points)
    return [
        Chart(
            "loss-log",
            "Loss, both axes logarithmic",
            tuple(visible),
            best,
            x_scale="log",
            scale="log" if is_positive else "linear",
        )
    ]


def _second_half(lines: Sequence[Line], best: tuple[Mark, ...], middle: float) -> list[Chart]:
    late = []
    for line in lines:
        points = tuple(point for point in line.points if point[0] >= middle)
        late.append(replace(line, points=points))
    if not any(line.named and len(line.points) >= _LATE for line in late):
        return []
    marks = tuple(mark for mark in best if mark.x >= middle)
    return [Chart("loss-late", "Loss, second half", tuple(late), marks, x_from=middle)]


def _dotted(name: str, curve: Curve, stretches: int | None, *, series: int = 0) -> Line:
    """Return the line of a curve, with dots if it is short."""
    return Line(name, points_of(curve, stretches), series, dots=curve.count < _DOTS)


def _best(main: Headline, series: int) -> Mark:
    return Mark("best", main.best_step, main.best, f"best {format_value(main.best)}", series)


def _metric_charts(run: ReportedRun, stretches: int | None) -> list[Chart]:
    """Return a chart for each score but the loss, with a line for each split."""
    by_score: dict[str, dict[str, Curve]] = {}
    for name, curve in run.scores.items():
        split, _, score = name.rpartition("/")
        if score != "loss":
            by_score.setdefault(score, {})[split] = curve
    main = headline(run)
    charts = []
    for score, splits in list(by_score.items())[:_MOST_METRICS]:
        lines = []
        marks = []
        best = []
        for index, (split, curve) in enumerate(splits.items(), 1):
            if index <= _MOST_LINES:
                lines.append(_dotted(split or score, curve, stretches, series=index))
            marks += _strange(curve, f"{split}/{score}")
            if main is not None and main.name == f"{split}/{score}":
                best.append(_best(main, index))
        title = score
        if len(splits) == 1:
            title = f"{next(iter(splits))}/{score}".lstrip("/")
        all_marks = (*_changes(run), *marks, *best)
        charts.append(Chart(f"metric-{score}", title, tuple(lines), all_marks))
    return charts


def _train_charts(run: ReportedRun, stretches: int | None) -> list[Chart]:
    train = run.train

    def lines(*curves: tuple[str, str, int]) -> tuple[Line, ...]:
        """Return the lines of the curves that have points, each by key, name and series."""
        drawn = []
        for key, name, series in curves:
            points = points_of(train.get(key), stretches)
            if points:
                drawn.append(Line(name, points, series))
        return tuple(drawn)

    def by_optimizer(key: str, title: str) -> tuple[Line, ...]:
        """Return one line for each optimizer or group with a name, or else the only line."""
        names = [name for name in train if name.startswith(f"{key}/")][:_MOST_LINES]
        if not names:
            return lines((key, title, 0))
        named = [(name, name.removeprefix(f"{key}/"), index) for index, name in enumerate(names)]
        return lines(*named)

    rate = by_optimizer("lr", "learning rate")
    clipped = lines(("clip_fraction", "clip fraction", 2))
    momentum = by_optimizer("momentum", "momentum")
    if all(len({value for _, value in line.points}) < 2 for line in momentum):
        momentum = ()  # constant, as most are
    step_times = lines(("ms_per_step", "milliseconds", 0))
    norms = lines(("grad_norm_max", "maximum", 1), ("grad_norm", "mean", 0))
    changes = _changes(run)
    strange = (*_strange(train.get("grad_norm_max", Curve()), "gradient norm"), *changes)
    planned = _planned_rates(run)
    if len(rate) == 1 and planned:
        rate = (*rate, Line("planned", planned, 1, faint=True))
    speed = lines(("targets_per_s", f"{run.count_unit} per second", 0))
    memory = lines(
        ("host_memory_bytes", "host", 0),
        ("host_memory_peak_bytes", "host, peak", 1),
        ("device_memory_peak_bytes", "device, peak", 2),
    )
    rate_note = "mean of each record, over training and waiting for data"
    return [
        Chart("learning-rate", "Learning rate", rate, changes, zero=True, scale="linear"),
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
            changes,
            unit="fraction",
            zero=True,
            scale="linear",
            note="mean of each record",
        ),
        Chart(
            "throughput",
            "Targets per second",
            speed,
            changes,
            zero=True,
            scale="linear",
            note=rate_note,
        ),
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
    charts = []
    for name, curve in list(run.users.items())[:_MOST_USERS]:
        line = _dotted(name, curve, stretches, series=3)
        charts.append(Chart(f"value-{name}", name, (line,), tuple(_strange(curve, name))))
    return charts


def points_of(curve: Curve | None, stretches: int | None) -> Points:
    """Return a curve's points to draw, or () for None."""
    if curve is None:
        return ()
    return tuple((float(step), value) for step, value in curve.points(stretches))


def _strange(curve: Curve, name: str) -> list[Mark]:
    return [
        Mark("strange", step, None, f"{name} is not finite up to step {step:,}")
        for step in curve.strange[:20]
    ]


def _changes(run: ReportedRun) -> tuple[Mark, ...]:
    """Return a mark with its reason for each step at which settings changed."""
    titles: dict[int, list[str]] = {}
    for change in in_effect(run.files.changes):
        titles.setdefault(change.from_step, []).append(described(change))
    marks = []
    for step, texts in list(titles.items())[:_MOST_CHANGES]:
        if step <= run.last_step:
            marks.append(Mark("event", step, None, "; ".join(texts)))
    return tuple(marks)


def _planned_rates(run: ReportedRun) -> Points:
    """Return the learning rates of the steps to come, as settings and journal have them; () if
    something else decides them too, such as a plateau.
    """
    last = run.train.get("lr", Curve()).last
    course = recorded_settings(run.files).known_course()
    if last is None or course is None:
        return ()
    step, recorded = last
    planned = course.rate(step - 1)
    if planned is None or not math.isclose(planned, recorded, rel_tol=1e-6):
        return ()
    end = course.length.steps
    every = max(1, (end - step) // _PLANNED)
    later = range(step + every, end + 1, every)
    rates = course.rates(each - 1 for each in later)
    points = [(float(step), recorded), *zip(map(float, later), rates, strict=True)]
    return tuple(points) if len(points) > 1 else ()


def _events(run: ReportedRun) -> list[Mark]:
    marks: dict[int, list[str]] = {}
    for event in run.events:
        if not event.what.startswith("finished"):
            marks.setdefault(event.step, []).append(event.what)
    return [
        Mark("event", step, None, "; ".join(dict.fromkeys(texts)))
        for step, texts in list(marks.items())[:40]
    ]
