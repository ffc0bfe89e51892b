"""Panels as data: what was written is read back, and nothing else is; below a second."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import surefoot as sf
from in_one import in_one
from refused import refused
from surefoot.tracking.panels import Panel
from surefoot.tracking.panels_file import MOST_BYTES, fitting, panel_to_dict, panels_from_json

PNG = sf.report.encode_png(torch.full((1, 4, 4), 0.5))
OF_EACH_KIND: tuple[Panel, ...] = (
    sf.report.TextHeatmap(
        title="val", legend="loss", unit="nats", pieces=(("dé", None), (" f</script>", 2.5))
    ),
    sf.report.Examples(
        title="said",
        legend="BLEU",
        examples=(
            sf.report.Example(source="a", reference="b", output="c", score=12.5, group="worst"),
        ),
    ),
    sf.report.Curves(title="ends", legend="nats", curves={"loss": ((0, 2.0), (10, None))}),
    sf.report.ConfusionMatrix(title="taken for", classes=("cat", "dog"), counts=((3, 1), (0, 4))),
    sf.report.ImageGrid(
        title="wrong",
        images=(sf.report.Image(png=PNG, label="cat", guess="dog", probability=0.9, loss=3.0),),
    ),
)


def text(**changes: Any) -> sf.report.TextHeatmap:
    return sf.report.TextHeatmap(
        **({"title": "t", "legend": "l", "unit": "nats", "pieces": (("a", 1.0),)} | changes)
    )


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    shown = sf.report.Panels(step=7, panels=OF_EACH_KIND)
    (tmp_path / "panels.json").write_text(shown.to_json())
    assert sf.load(tmp_path).panels() == shown
    assert len({panel.kind for panel in OF_EACH_KIND}) == 5


def test_a_run_without_panels_has_none(tmp_path: Path) -> None:
    assert sf.load(tmp_path).panels() is None


@in_one
@pytest.mark.parametrize(
    "changes",
    [
        {"unit": "bits"},
        {"pieces": (("a", float("nan")),)},
        {"pieces": (("a", -1.0),)},
        {"unit": "fraction", "pieces": (("a", 1.5),)},
        {"pieces": (("a", True),)},
        {"pieces": ((3, 1.0),)},
        {"title": "x" * 30_000},
        {"title": "\ud800"},
        {"pieces": (("a", 1.0),) * 6000},
    ],
)
def test_a_text_that_cannot_be_shown_is_refused(changes: dict[str, Any]) -> None:
    with refused("panel-invalid"):
        text(**changes)


def header(wide: int, high: int) -> str:
    begin = (
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + wide.to_bytes(4, "big") + high.to_bytes(4, "big")
    )
    return base64.b64encode(begin).decode()


@pytest.mark.parametrize(
    "png",
    [
        "no base64!",
        '"><script>',
        "é",
        b"iVBORw0K",
        base64.b64encode(b"<svg onload=alert(1)>" * 3).decode(),
        header(100_000, 1),
        header(0, 1),
    ],
)
def test_a_picture_that_is_no_small_png_is_refused(png: Any) -> None:
    with refused("panel-invalid"):
        sf.report.ImageGrid(title="wrong", images=(sf.report.Image(png=png),))


def test_a_matrix_that_is_not_square_is_refused() -> None:
    for classes, counts in ((("a", "b"), ((1, 2),)), (("a",), ((-1,),))):
        with refused("panel-invalid"):
            sf.report.ConfusionMatrix(title="t", classes=classes, counts=counts)


HOSTILE = [
    "",
    "[]",
    "nul",
    '{"format_version": 2, "step": 3}',
    '{"format_version": 1, "step": 3, "panels": []}',
    '{"format_version": 2, "step": true, "panels": []}',
    '{"format_version": 2, "step": 3, "panels": [], "code": "import os"}',
    '{"format_version": 2, "step": 3, "panels": 5}',
    '{"format_version": 2, "step": 3, "panels": [{"kind": "html", "text": "<script>"}]}',
    '{"format_version": 2, "step": 3, "panels": [{"kind": ["text-heatmap"]}]}',
    '{"format_version": 2, "step": 3, "panels": [{"kind": "text-heatmap", "title": "t", "__class__": "os.system"}]}',
    '{"format_version": 2, "step": 3, "panels": [{"kind": "text-heatmap", "title": "t", "legend": "", "unit": "nats", "pieces": "ab"}]}',
    '{"format_version": 2, "step": 3, "panels": [{"kind": "text-heatmap", "title": "t", "legend": "", "unit": "nats",'
    ' "pieces": [["a", 1' + "0" * 400 + "]]}]}",
    '{"format_version": 2, "step": 3, "panels": [{"kind": "text-heatmap", "title": "t", "legend": "", "unit": "nats",'
    ' "pieces": [["a", NaN]]}]}',
    '{"format_version": 2, "step": 3, "panels": [{"kind": "curves", "title": "t", "legend": "", "curves": [1]}]}',
    "[" * 100_000,
]


@in_one
@pytest.mark.parametrize("held", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_file_is_refused_by_name(held: str, tmp_path: Path) -> None:
    (tmp_path / "panels.json").write_text(held)
    with refused("panels-unreadable", sf.DataError, path=tmp_path / "panels.json"):
        sf.load(tmp_path).panels()


def test_a_file_that_is_too_large_or_no_text_is_refused(tmp_path: Path) -> None:
    too_large = sf.report.Panels(step=1, panels=()).to_json() + " " * MOST_BYTES
    for content in (too_large.encode(), b"\xff\xfe"):
        (tmp_path / "panels.json").write_bytes(content)
        with refused("panels-unreadable", sf.DataError):
            sf.load(tmp_path).panels()


@given(
    st.integers(min_value=0),
    st.sampled_from(["", "0", "[", '"', "null", "-", "é"]),
    st.integers(0, 3),
)
def test_a_file_with_anything_changed_is_read_or_refused(place: int, put: str, taken: int) -> None:
    held = sf.report.Panels(step=7, panels=OF_EACH_KIND).to_json()
    at = place % len(held)
    with suppress(sf.ConfigError):
        assert isinstance(panels_from_json(held[:at] + put + held[at + taken :]), sf.report.Panels)


def test_panels_beyond_the_room_of_a_page_are_left_out_and_the_next_still_fits() -> None:
    large = text(title="large", pieces=(("x" * 15_000, None),) * 25)
    kept, left_out = fitting([OF_EACH_KIND[0], large, OF_EACH_KIND[3]])
    assert (kept, left_out) == ([OF_EACH_KIND[0], OF_EACH_KIND[3]], [large])
    many = [text(pieces=(("x" * 9_000, None),)) for _ in range(50)]
    shown = sf.report.Panels(step=2**62, panels=tuple(fitting(many)[0]))
    assert MOST_BYTES - 10_000 < len(shown.to_json()) <= MOST_BYTES


def test_a_panel_as_json_names_its_kind_first() -> None:
    for panel in OF_EACH_KIND:
        assert next(iter(json.loads(json.dumps(panel_to_dict(panel))).items())) == (
            "kind",
            panel.kind,
        )
