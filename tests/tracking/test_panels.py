"""Panels as data: what was written is read back, and nothing else is; below a second."""

from __future__ import annotations

import base64
import json
import math
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


REFUSED_TEXTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("panel-value-invalid", {"unit": "bits"}, {"what": "unit", "value": "bits"}),
    ("panel-value-invalid", {"pieces": (("a", -1.0),)}, {"what": "the value of 'a'", "value": -1}),
    ("panel-value-invalid", {"pieces": (("a", math.inf),)}, {"value": math.inf}),
    ("panel-value-invalid", {"pieces": (("a", math.nan),)}, {}),
    ("panel-value-invalid", {"unit": "fraction", "pieces": (("a", 1.5),)}, {"value": 1.5}),
    ("panel-of-wrong-type", {"pieces": (("a", True),)}, {"type": "bool"}),
    ("panel-of-wrong-type", {"pieces": ((3, 1.0),)}, {"what": "a text", "type": "int"}),
    ("panel-too-large", {"title": "x" * 30_000}, {"size": 30_000, "most": 20_000}),
    ("panel-too-large", {"pieces": (("a", 1.0),) * 6000}, {"what": "pieces", "size": 6000}),
    ("panel-text-not-unicode", {"title": "ab\ud800"}, {"index": 2}),
]


@in_one
@pytest.mark.parametrize(("code", "changes", "fields"), REFUSED_TEXTS)
def test_a_text_that_cannot_be_shown_is_refused(
    code: str, changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    with refused(code, **fields):
        text(**changes)


def header(wide: int, high: int) -> str:
    begin = (
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + wide.to_bytes(4, "big") + high.to_bytes(4, "big")
    )
    return base64.b64encode(begin).decode()


@pytest.mark.parametrize(
    ("code", "png"),
    [
        ("panel-image-not-png", "no base64!"),
        ("panel-image-not-png", '"><script>'),
        ("panel-image-not-png", "é"),
        ("panel-image-not-png", b"iVBORw0K"),
        ("panel-image-not-png", base64.b64encode(b"<svg onload=alert(1)>" * 3).decode()),
        ("panel-image-not-png", header(0, 1)),
        ("panel-image-not-png", header(1, 1)[:20]),
        ("panel-too-large", header(100_000, 1)),
        ("panel-too-large", header(1, 100_000)),
    ],
)
def test_a_picture_that_is_no_small_png_is_refused(code: str, png: Any) -> None:
    with refused(code):
        sf.report.ImageGrid(title="wrong", images=(sf.report.Image(png=png),))


def test_a_matrix_that_is_not_square_is_refused() -> None:
    with refused("panel-counts-not-of-classes", classes=2, columns=[2]):
        sf.report.ConfusionMatrix(title="t", classes=("a", "b"), counts=((1, 2),))
    with refused("panel-value-invalid", what="a count", value=-1):
        sf.report.ConfusionMatrix(title="t", classes=("a",), counts=((-1,),))
    with refused("panel-too-large", what="classes", size=200):
        sf.report.ConfusionMatrix(title="t", classes=("a",) * 200, counts=())


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
    with refused("panels-unreadable", sf.DataError, path=tmp_path / "panels.json") as caught:
        sf.load(tmp_path).panels()
    assert caught.value.fields["cause"]["error"] == "ConfigError"
    assert caught.value.fields["cause"]["code"].startswith("panel")


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
