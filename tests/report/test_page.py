"""Pages: what stands on them of whole, broken, running, old and hostile runs, and that they ask for
nothing; 3 seconds.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pages import Elements, titles
from refused import refused
from stated import numbers_in
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
    elements = Elements(page).found
    pictures = [attributes for tag, attributes in elements if tag == "img"]
    assert pictures
    assert all(attributes["alt"] for attributes in pictures)
    plots = [
        attributes
        for tag, attributes in elements
        if tag == "svg" and attributes.get("class") == "plot"
    ]
    assert len(plots) == 10
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in plots)
    named = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(set(named)) == len(named)


def test_every_named_line_of_several_can_be_toggled(page: str) -> None:
    for figure in re.findall(r'<figure class="card.*?</figure>', page, flags=re.DOTALL):
        legend, _, frame = figure.partition('<div class="frame">')
        toggles = set(re.findall(r'<input type="checkbox" class="t(\d+)" checked/>', legend))
        assert toggles in (set(), set(re.findall(r'<path class="s(\d+)', frame)))
        for number in toggles:
            assert f"figure:has(.t{number}:not(:checked)) .frame .s{number}" in page
    assert page.count('type="checkbox"') == 4 * 2  # three charts of the loss, and the gradient norm


def test_a_page_asks_for_nothing_and_runs_nothing(page: str) -> None:
    elements = Elements(page).found
    assert "http" not in page.replace('http-equiv="Content-Security-Policy"', "")
    assert not [tag for tag, _ in elements if tag in ("script", "iframe", "object", "form", "base")]
    assert not [name for _, attributes in elements for name in attributes if name.startswith("on")]
    for tag, attributes in elements:
        for name in ("src", "href"):
            assert attributes.get(name, "data:").startswith("data:"), (tag, attributes)  # type: ignore[union-attr]
    assert "url(" not in page
    policy = next(attributes["content"] for _, attributes in elements if "http-equiv" in attributes)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def verdict_of(page: str) -> str:
    said = re.search(r'<p class="verdict">(.*?)</p>', page)
    assert said is not None
    return said[1]


def test_how_the_run_went_is_said_in_a_sentence(page: str) -> None:
    assert "val/loss" in verdict_of(page)
    assert numbers_in(verdict_of(page)) == [600, 2.6576, 1.1996]


def test_settings_are_parted_by_who_chose_them(page: str) -> None:
    chosen, _, left = page.partition("at its default")
    assert "<code>optimizer.lr</code></th><td>0.003</td><td" in chosen
    assert "<code>seed</code>" in chosen
    assert "<code>clip</code>" in left
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
    again = commands(read_run(tmp_path), finished=True)["Evaluate it again"]
    assert again.splitlines()[-1] == 'print(sf.load(run).evaluate(checkpoint="best"))'


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
    page = page_of(
        [written(tmp_path / "run", [train(10, 3.0), train(20, 2.5), scores(20, loss=2.6)])]
    )
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
    bad = float("nan")
    told = falling(300)
    told[7] = train(
        80,
        bad,
        grad_norm=bad,
        grad_norm_max=float("inf"),
        clip_fraction=bad,
        targets_per_s=bad,
        lr=bad,
    )
    told += [
        scores(310, loss=bad, accuracy=bad),
        layers(320, grad_norm={"up.weight": None}, nonfinite={"grad_norm/up.weight": "nan"}),
    ]
    told += [
        {**train(320, bad, training_s=bad, targets=bad), "skipped": 2, "skipped_steps": [311, 315]}
    ]
    page = page_of([written(tmp_path / "run", told)])
    Elements(page)
    texts = [numbers_in(text) for text in Elements(page).text]
    assert [80] in texts  # up to this step the training loss is not finite
    assert [2, 311, 315] in texts  # skipped
    assert not re.search(r'(?:points|d|x|y|x1|cx|cy|width|style)="[^"]*\bnan', page)


def test_a_run_of_an_older_version_is_shown_with_what_it_has(tmp_path: Path) -> None:
    old = written(
        tmp_path / "run",
        [{"kind": "train", "step": step, "loss": 1.0 / step} for step in range(1, 30)],
    )
    (old / "environment.json").write_text('{"sessions": [{"time": "2025-01-01"}]}')
    page = page_of([old])
    assert titles(page) == ["Loss", "Environment and commands"]


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = written(tmp_path / "run", falling(100), config="seed = ")
    (run / "environment.json").write_text("{")
    (run / "panels.json").write_text("{}")
    page = page_of([run])
    problems = re.findall(r'<p class="problem">([^<]*)', page)
    assert [text.split()[0].rpartition("/")[2] for text in problems] == [
        "config.toml",
        "environment.json",
        "panels.json",
    ] or problems
    assert len(problems) == 3
    assert "Loss" in titles(page)


def test_a_run_that_died_is_told_with_its_error(tmp_path: Path) -> None:
    run = written(
        tmp_path / "run",
        [*falling(100), {"kind": "event", "step": 100, "event": "failed: OSError: disk <gone>"}],
    )
    (run / "crash").mkdir()
    found = {"error": "OSError: disk <gone>", "step": 100, "traceback": ["one\n", "two <b>\n"]}
    (run / "crash" / "step-00000100.json").write_text(json.dumps(found))
    page = page_of([run])
    assert numbers_in(verdict_of(page))[0] == 100
    assert "OSError: disk &lt;gone&gt;" in verdict_of(page)
    assert "two &lt;b&gt;" in page
    (run / "crash" / "step-00000100.txt").write_text("made again: layer <up> overflowed")
    assert "made again: layer &lt;up&gt; overflowed" in page_of([run])
    assert 'data-state="failed"' in page


def test_what_stopped_a_run_is_told_until_it_goes_on(tmp_path: Path) -> None:
    stopped = [*falling(100), {"kind": "event", "step": 100, "event": "stopped by SIGTERM"}]
    page = page_of([written(tmp_path / "stopped", stopped, config=CONFIG, **SESSION)])
    assert "SIGTERM" in verdict_of(page)
    assert numbers_in(verdict_of(page))[:2] == [100, 600]
    assert "surefoot resume" in page
    went_on = [*stopped, {"kind": "resume", "step": 100}, train(110)]
    page = page_of([written(tmp_path / "gone on", went_on, config=CONFIG)])
    assert "SIGTERM" not in verdict_of(page)
    assert numbers_in(verdict_of(page))[:2] == [110, 600]


# --- hostile and large ----------------------------------------------------------------------------


def test_hostile_text_is_only_text(tmp_path: Path) -> None:
    told = falling(100, **{HOSTILE: 1.0})
    told += [
        {"kind": "sample", "step": 100, "text": HOSTILE},
        {"kind": "event", "step": 100, "event": f"failed: {HOSTILE}"},
    ]
    told += [{"kind": "eval", "step": 100, f"{HOSTILE}/loss": 1.0, f"{HOSTILE}/{HOSTILE}": 2.0}]
    told += [layers(100, (HOSTILE, "other"), never_updated=[HOSTILE])]
    run = written(tmp_path / "a<b>&'\"run", told, config=f"name = {json.dumps(HOSTILE[:-1])} # <i>")
    session = dict.fromkeys(("time", "python", "directory", "git_commit"), HOSTILE)
    hostile = {
        "sessions": [{**session, "command": ["surefoot", HOSTILE], "machine": {"torch": HOSTILE}}]
    }
    (run / "environment.json").write_text(json.dumps(hostile))
    (run / "crash").mkdir()
    (run / "crash" / "step-00000100.json").write_text(
        json.dumps({"error": HOSTILE, "step": 100, "traceback": [HOSTILE]})
    )
    page = page_of([run])
    elements = Elements(page).found
    assert {tag for tag, _ in elements} & {"script", "i"} == set()
    assert not [
        attributes for tag, attributes in elements if tag == "img" and attributes["src"] == "x"
    ]
    assert not [name for _, attributes in elements for name in attributes if name.startswith("on")]
    assert page.count('alert("1")') == 0
    assert not re.search("[\x00-\x08\x0b-\x1f]", page)


def test_no_text_turns_round_the_words_after_it(tmp_path: Path) -> None:
    told = [*falling(100), {"kind": "event", "step": 100, "event": "stopped by \u202e\u2066"}]
    page = page_of([written(tmp_path / "run", told)])
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", page)


@pytest.mark.slow
def test_a_page_of_everything_at_its_largest_is_below_a_megabyte(tmp_path: Path) -> None:
    values = {f"value {n}": 1.0 for n in range(200)}
    told: list[dict[str, Any]] = []
    for step in range(1, 300):
        told.append(
            train(
                step, 1.0 + step % 7, **{name: step % 13 * value for name, value in values.items()}
            )
        )
        told.append(
            {"kind": "eval", "step": step, **{f"split {n}/loss": n + step % 5 for n in range(80)}}
        )
    names = tuple(f"blocks.{n}.{'very' * 20}.weight" for n in range(400))
    told += [layers(step, names) for step in range(1, 20)]
    told += [{"kind": "sample", "step": step, "text": "<" * 100_000} for step in range(20)]
    told += [{"kind": "event", "step": step, "event": "&" * 300} for step in range(1000)]
    config = "".join(f'setting_{n} = "{"&" * 1000}" # flag\n' for n in range(1000))
    page = page_of([written(tmp_path / "run", told, config=config)])
    assert len(page.encode()) <= MOST_BYTES


def test_no_run_is_refused_and_a_place_that_cannot_be_written_too(
    tmp_path: Path, rich: Path
) -> None:
    with refused("run-missing", run=str(tmp_path / "nowhere")):
        write_page(tmp_path / "nowhere")
    with refused("run-missing"):
        write_page(tmp_path)
    with refused("report-without-runs", setting="paths"):
        write_page()
    (tmp_path / "file").write_text("")
    with refused("file-not-writable", path=tmp_path / "file" / "page.html"):
        write_page(rich, out=tmp_path / "file" / "page.html")


def test_a_score_that_went_and_came_back_is_told_by_its_best(tmp_path: Path) -> None:
    losses = ((10, 2.0), (50, 1.0), (100, 2.0))
    told = [{"kind": "eval", "step": step, "val/loss": loss} for step, loss in losses]
    page = page_of([written(tmp_path / "run", told)])
    assert "val/loss" in verdict_of(page)
    assert numbers_in(verdict_of(page).partition("val/loss")[2]) == [1, 50, 2, 10]


def test_a_score_that_wavers_at_the_end_is_level(tmp_path: Path) -> None:
    wavering = [1.6, 0.098, 0.114, 0.019, 0.031, 0.0196, 0.0258, 0.0267, 0.0253, 0.0225, 0.0249]
    falling_to_the_end = [1.6 - 0.1 * place for place in range(11)]
    decaying = [1000 * 0.9**place for place in range(60)]  # little of its range, much of its value
    said = []
    for losses in (wavering, falling_to_the_end, decaying):
        records = [train(20 * place + 20) for place in range(len(losses))]
        evaluated = [scores(20 * place + 20, loss=loss) for place, loss in enumerate(losses)]
        run = written(tmp_path / f"run-{len(said)}", [*records, *evaluated])
        verdict = re.search(r'<p class="verdict">(.*?)</p>', page_of([run]))
        assert verdict is not None
        said.append(verdict[1])
    assert ["still falling" in sentence for sentence in said] == [False, True, True]
