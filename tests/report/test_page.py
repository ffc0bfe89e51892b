"""Pages: what stands on them of whole, broken, running, old and hostile runs, and that they ask for
nothing; 3 seconds.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import surefoot as sf
from pages import Elements, titles
from refused import refused
from stated import numbers_in
from surefoot.tools.diagnose import checks
from surefoot.tools.diagnose.finding import Check, Verdict
from surefoot.tools.diagnose.history import History
from surefoot.tools.report.page import MOST_BYTES
from surefoot.tools.report.write import page_of, write_page
from surefoot.tracking.commands import commands
from surefoot.tracking.run_reader import read_run
from written_runs import CONFIG, HOSTILE, SESSION, falling, layers, rich_run, scores, train, written


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rich_run(tmp_path_factory.mktemp("page") / "my run")


@pytest.fixture(scope="module")
def page(rich: Path) -> str:
    return page_of([rich])


def test_a_page_has_all_its_sections_in_order(page: str) -> None:
    assert titles(page) == [
        "Findings",
        "Loss",
        "Metrics",
        "Learning rate and gradient",
        "Speed, memory and time",
        "Logged by your code",
        "Layers",
        "Model outputs",
        "Samples",
        "Events",
        "Settings",
        "Environment and commands",
    ]


def test_a_page_is_well_formed_and_every_picture_has_words(page: str) -> None:
    elements = Elements(page)
    pictures = elements.with_tag("img")
    assert pictures != []
    assert all(picture["alt"] for picture in pictures)
    plots = [svg for svg in elements.with_tag("svg") if svg.get("class") == "plot"]
    assert len(plots) == 10
    for plot in plots:
        assert plot["role"] == "img"
        assert plot["aria-label"]


def test_a_check_that_fails_is_named_and_the_other_findings_stay(
    rich: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_history: History) -> Verdict:
        raise ZeroDivisionError("in a check")

    found, *_ = sf.load(rich).diagnose()
    failing = Check("failing-check", lambda _history: None, fail)
    monkeypatch.setattr(checks, "CHECKS", (failing, *checks.CHECKS))

    page = page_of([rich])

    assert "The check for failing-check failed: ZeroDivisionError: in a check" in " ".join(
        page.split()
    )
    assert found.message in page


def test_an_id_stands_on_a_page_once(page: str) -> None:
    ids = [attributes["id"] for _, attributes in Elements(page).elements if "id" in attributes]
    assert len(set(ids)) == len(ids) > 0


def test_every_named_line_of_several_can_be_toggled(page: str) -> None:
    for figure in re.findall(r'<figure class="card.*?</figure>', page, flags=re.DOTALL):
        legend, _, frame = figure.partition('<div class="frame">')
        toggles = set(re.findall(r'<input type="checkbox" class="t(\d+)" checked/>', legend))
        assert toggles in (set(), set(re.findall(r'<path class="s(\d+)', frame)))
        for number in toggles:
            assert f"figure:has(.t{number}:not(:checked)) .frame .s{number}" in page
    assert page.count('type="checkbox"') == 4 * 2  # three charts of the loss, and the gradient norm


def test_a_page_asks_for_nothing_and_runs_nothing(page: str) -> None:
    elements = Elements(page)
    tags = {tag for tag, _ in elements.elements}
    assert tags.isdisjoint({"script", "iframe", "object", "form", "base"})
    assert elements.event_handlers() == []
    for tag, attributes in elements.elements:
        for name in ("src", "href"):
            address = attributes.get(name, "data:")
            assert address is not None
            assert address.startswith("data:"), (tag, attributes)
    assert "http" not in page.replace('http-equiv="Content-Security-Policy"', "")
    assert "url(" not in page


def test_a_pages_policy_lets_a_browser_fetch_and_run_nothing(page: str) -> None:
    (policy,) = [meta for meta in Elements(page).with_tag("meta") if "http-equiv" in meta]
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def verdict_of(page: str) -> str:
    verdict = re.search(r'<p class="verdict">(.*?)</p>', page)
    assert verdict is not None
    return verdict[1]


def test_how_the_run_went_is_said_in_a_sentence(page: str) -> None:
    assert "val/loss" in verdict_of(page)
    assert numbers_in(verdict_of(page)) == [600, 2.6576, 1.1996]


def test_chosen_settings_stand_before_those_at_their_default(page: str) -> None:
    chosen, _, defaults = page.partition("at its default")
    assert "<code>optimizer.lr</code></th><td>0.003</td><td" in chosen
    assert "<code>seed</code>" in chosen
    assert "<code>clip</code>" in defaults
    assert "<code>clip</code>" not in chosen


def test_the_commands_are_those_that_made_the_run_and_look_into_it(page: str, rich: Path) -> None:
    text = "".join(Elements(page).text)
    assert re.search(
        r"cd /home/me\ngit checkout 0123456789abcdef  #.*\nsurefoot train gpt --seed 3 --run-dir DIR",
        text,
    )
    assert f"surefoot evaluate '{rich}' --checkpoint best" in text
    assert "surefoot resume" not in text


def test_a_page_of_a_scripts_run_evaluates_in_python(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[program]\nkind = "script"\ncommand = ["mine.py"]\n')
    (tmp_path / "environment.json").write_text(json.dumps({"sessions": [{"command": ["mine.py"]}]}))
    lines = commands(read_run(tmp_path), finished=True)["Evaluate it again"].splitlines()
    assert lines[-1] == 'print(sf.load(run).evaluate(checkpoint="best"))'


def test_targets_are_called_what_the_run_calls_them(page: str) -> None:
    assert "tokens per second" in page
    assert not re.search(r"\btargets\b[^<]*\bsecond\b", page)


def test_a_page_is_the_same_but_for_its_date(rich: Path, page: str) -> None:
    date = r"on \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.sub(date, "", page_of([rich])) == re.sub(date, "", page)


def test_the_file_is_there_whole_beside_the_records(rich: Path, tmp_path: Path) -> None:
    assert write_page(rich) == rich / "report.html"
    assert write_page(rich, out=tmp_path) == tmp_path / "report.html"
    assert write_page(rich, out=tmp_path / "deep" / "a.html").read_text().endswith("</html>")
    assert not list(rich.glob(".*"))


# --- less than a whole run ------------------------------------------------------------------------


def test_three_records_are_a_page_without_empty_sections(tmp_path: Path) -> None:
    records = [train(10, 3.0), train(20, 2.5), scores(20, loss=2.6)]
    page = page_of([written(tmp_path / "run", records)])
    Elements(page)
    assert titles(page) == ["Loss"]
    assert numbers_in(verdict_of(page))[0] == 20


@pytest.mark.parametrize("records", [[], [{"kind": "resume", "step": 0}], [train(1, float("nan"))]])
def test_a_run_without_a_number_has_a_page_too(
    records: list[dict[str, Any]], tmp_path: Path
) -> None:
    page = page_of([written(tmp_path / "run", records)])
    Elements(page)
    assert "Loss" not in titles(page)


def test_nan_in_every_kind_of_record_is_marked_and_harms_nothing(tmp_path: Path) -> None:
    nan = float("nan")
    records = falling(300)
    records[7] = train(
        80,
        nan,
        grad_norm=nan,
        grad_norm_max=float("inf"),
        clip_fraction=nan,
        targets_per_s=nan,
        lr=nan,
    )
    records += [
        scores(310, loss=nan, accuracy=nan),
        layers(320, grad_norm={"up.weight": None}, nonfinite={"grad_norm/up.weight": "nan"}),
        train(320, nan, training_s=nan, targets=nan) | {"skipped": 2, "skipped_steps": [311, 315]},
    ]

    page = page_of([written(tmp_path / "run", records)])

    numbers_of_texts = [numbers_in(text) for text in Elements(page).text]
    assert [80] in numbers_of_texts  # up to this step the training loss is not finite
    assert [2, 311, 315] in numbers_of_texts  # skipped
    assert not re.search(r'(?:points|d|x|y|x1|cx|cy|width|style)="[^"]*\bnan', page)


def test_a_run_of_an_older_version_is_shown_with_what_it_has(tmp_path: Path) -> None:
    records = [{"kind": "train", "step": step, "loss": 1.0 / step} for step in range(1, 30)]
    run = written(tmp_path / "run", records)
    (run / "environment.json").write_text('{"sessions": [{"time": "2025-01-01"}]}')
    assert titles(page_of([run])) == ["Loss", "Environment and commands"]


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = written(tmp_path / "run", falling(100), config="seed = ")
    (run / "environment.json").write_text("{")
    (run / "panels.json").write_text("{}")

    page = page_of([run])

    problems = re.findall(r'<p class="problem">([^<]*)', page)
    files = [Path(problem.split()[0]).name for problem in problems]
    assert files == ["config.toml", "environment.json", "panels.json"]
    assert "Loss" in titles(page)


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    """A run that died at step 100."""
    failure = {"kind": "event", "step": 100, "event": "failed: OSError: disk <gone>"}
    run = written(tmp_path / "run", [*falling(100), failure])
    crash = {"error": "OSError: disk <gone>", "step": 100, "traceback": ["one\n", "two <b>\n"]}
    (run / "crash").mkdir()
    (run / "crash" / "step-00000100.json").write_text(json.dumps(crash))
    return run


def test_a_run_that_died_is_shown_with_its_error(failed: Path) -> None:
    page = page_of([failed])
    assert numbers_in(verdict_of(page))[0] == 100
    assert "OSError: disk &lt;gone&gt;" in verdict_of(page)
    assert "two &lt;b&gt;" in page
    assert 'data-state="failed"' in page


def test_what_was_found_of_a_step_that_failed_is_on_the_page(failed: Path) -> None:
    (failed / "crash" / "step-00000100.txt").write_text("made again: layer <up> overflowed")
    assert "made again: layer &lt;up&gt; overflowed" in page_of([failed])


STOPPED = [*falling(100), {"kind": "event", "step": 100, "event": "stopped by SIGTERM"}]


def test_what_stopped_a_run_is_in_its_verdict(tmp_path: Path) -> None:
    page = page_of([written(tmp_path / "run", STOPPED, config=CONFIG, **SESSION)])
    assert "SIGTERM" in verdict_of(page)
    assert numbers_in(verdict_of(page))[:2] == [100, 600]
    assert "surefoot resume" in page


def test_what_stopped_a_run_is_not_in_its_verdict_when_it_was_resumed(tmp_path: Path) -> None:
    resumed = [*STOPPED, {"kind": "resume", "step": 100}, train(110)]
    page = page_of([written(tmp_path / "run", resumed, config=CONFIG)])
    assert "SIGTERM" not in verdict_of(page)
    assert numbers_in(verdict_of(page))[:2] == [110, 600]


# --- hostile and large ----------------------------------------------------------------------------


def test_hostile_text_is_only_text(tmp_path: Path) -> None:
    records = falling(100, **{HOSTILE: 1.0})
    records += [
        {"kind": "sample", "step": 100, "text": HOSTILE},
        {"kind": "event", "step": 100, "event": f"failed: {HOSTILE}"},
        {"kind": "eval", "step": 100, f"{HOSTILE}/loss": 1.0, f"{HOSTILE}/{HOSTILE}": 2.0},
        layers(100, (HOSTILE, "other"), never_updated=[HOSTILE]),
    ]
    session = {
        "time": HOSTILE,
        "python": HOSTILE,
        "directory": HOSTILE,
        "git_commit": HOSTILE,
        "command": ["surefoot", HOSTILE],
        "machine": {"torch": HOSTILE},
    }
    config = f"name = {json.dumps(HOSTILE[:-1])} # <i>"
    run = written(tmp_path / "a<b>&'\"run", records, config=config, **session)
    crash = {"error": HOSTILE, "step": 100, "traceback": [HOSTILE]}
    (run / "crash").mkdir()
    (run / "crash" / "step-00000100.json").write_text(json.dumps(crash))

    page = page_of([run])

    elements = Elements(page)
    assert {tag for tag, _ in elements.elements}.isdisjoint({"script", "i"})
    assert "x" not in [picture["src"] for picture in elements.with_tag("img")]
    assert elements.event_handlers() == []
    assert 'alert("1")' not in page
    assert not re.search("[\x00-\x08\x0b-\x1f]", page)


def test_no_text_turns_round_the_words_after_it(tmp_path: Path) -> None:
    stop = {"kind": "event", "step": 100, "event": "stopped by \u202e\u2066"}
    page = page_of([written(tmp_path / "run", [*falling(100), stop])])
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", page)


@pytest.mark.slow
def test_a_page_of_everything_at_its_largest_is_below_a_megabyte(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    for step in range(1, 300):
        values = {f"value {number}": float(step % 13) for number in range(200)}
        losses = {f"split {number}/loss": number + step % 5 for number in range(80)}
        records.append(train(step, 1.0 + step % 7, **values))
        records.append({"kind": "eval", "step": step, **losses})
    names = tuple(f"blocks.{number}.{'very' * 20}.weight" for number in range(400))
    records += [layers(step, names) for step in range(1, 20)]
    records += [{"kind": "sample", "step": step, "text": "<" * 100_000} for step in range(20)]
    records += [{"kind": "event", "step": step, "event": "&" * 300} for step in range(1000)]
    text = "&" * 1000
    config = "".join(f'setting_{number} = "{text}" # flag\n' for number in range(1000))

    page = page_of([written(tmp_path / "run", records, config=config)])

    assert len(page.encode()) <= MOST_BYTES


def test_a_page_of_no_run_is_refused(tmp_path: Path) -> None:
    with refused("run-missing", run=str(tmp_path / "nowhere")):
        write_page(tmp_path / "nowhere")
    with refused("run-missing"):
        write_page(tmp_path)
    with refused("report-without-runs", setting="paths"):
        write_page()


def test_a_page_that_cannot_be_written_is_refused_by_its_path(tmp_path: Path, rich: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("file-not-writable", path=tmp_path / "file" / "page.html"):
        write_page(rich, out=tmp_path / "file" / "page.html")


def test_the_verdict_on_a_score_that_became_worse_again_names_its_best(tmp_path: Path) -> None:
    records = [scores(10, loss=2.0), scores(50, loss=1.0), scores(100, loss=2.0)]
    verdict = verdict_of(page_of([written(tmp_path / "run", records)]))
    _, name, of_score = verdict.partition("val/loss")
    assert name == "val/loss"
    assert numbers_in(of_score) == [1, 50, 2, 10]


@pytest.mark.parametrize(
    ("losses", "still_falls"),
    [
        pytest.param(
            [1.6, 0.098, 0.114, 0.019, 0.031, 0.0196, 0.0258, 0.0267, 0.0253, 0.0225, 0.0249],
            False,
            id="wavers at the end",
        ),
        pytest.param([1.6 - 0.1 * place for place in range(11)], True, id="falls evenly"),
        # little of its range, much of its value
        pytest.param([1000 * 0.9**place for place in range(60)], True, id="decays"),
    ],
)
def test_the_verdict_says_whether_a_score_still_falls(
    losses: list[float], still_falls: bool, tmp_path: Path
) -> None:
    records = []
    for place, loss in enumerate(losses):
        step = 20 * place + 20
        records += [train(step), scores(step, loss=loss)]
    verdict = verdict_of(page_of([written(tmp_path / "run", records)]))
    assert ("still falling" in verdict) == still_falls
