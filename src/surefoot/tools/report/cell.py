"""The HTML of a run in a notebook's cell: how it went, and the chart of its loss."""

from html import escape

from surefoot.tools.report import tables
from surefoot.tools.report.charts import Chart
from surefoot.tools.report.headline import state_of, verdict
from surefoot.tools.report.page import POLICY, render
from surefoot.tools.report.run_charts import charts
from surefoot.tools.report.series import ReportedRun

_STRETCHES = (150, 40)  # of a curve, so that a notebook with many runs stays small
_HEIGHT = 440  # pixels of the chart, and of each further line of its legend
_LEGEND = 22
_ON_A_LINE = 3  # names in a line of the legend


def run_html(run: ReportedRun) -> str:
    """Return a run as HTML: its state, the course of its main metric in a sentence, figures, and
    the chart of `chart_frame`.
    """
    state = state_of(run)
    figures = {
        "verdict": verdict(run, state),
        "tiles": tables.tiles(run, state),
        "chart": chart_frame(run),
    }
    return render("cell.html", {"run": run, **figures}, [{}])


def chart_frame(run: ReportedRun) -> str:
    """Return the first chart of a run's report, its loss, as HTML; "" if the run has recorded no
    value.

    The chart is a page of its own in a frame: its style does not reach the notebook, and no script
    in it could run.
    """

    def first(stretches: int) -> Chart | None:
        return next(iter(charts(run, stretches=stretches)), None)

    chart = first(_STRETCHES[0])
    if chart is None:
        return ""
    common = {"title": chart.title, "state": "", "script": "", "policy": POLICY, "left_out": ""}
    page = render("chart.html", common, ({"chart": first(stretches)} for stretches in _STRETCHES))
    height = _HEIGHT + _LEGEND * (sum(line.named for line in chart.lines) // _ON_A_LINE)
    frame = f'sandbox width="100%" height="{height}" style="border:0" title="{escape(chart.title)} of the run"'
    return f'<iframe srcdoc="{escape(page)}" {frame}></iframe>'
