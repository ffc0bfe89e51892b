"""The site of the documentation: its pages are those of the repository, and each link leads
somewhere. (0.3 s; a build 20 s)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from build_site import LINK, broken_links, build, copy_pages, page_of  # noqa: E402

OUTSIDE = (
    "README.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "src/surefoot/train/loop.py",
    "examples/gan.py",
    "examples/notebook.ipynb",
    "tests/identities",
)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("copied")
    copy_pages(ROOT, directory)
    return directory


def test_each_page_and_each_linked_file_of_the_repository_is_a_page_of_the_site(
    copied: Path,
) -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    paths = [*OUTSIDE, *(str(page.relative_to(ROOT)) for page in pages)]

    assert len(pages) > 100
    assert [path for path in paths if not (copied / page_of(ROOT, path)).is_file()] == []


def test_a_notebook_is_a_page_with_its_text_its_code_and_its_outputs(copied: Path) -> None:
    page = (copied / page_of(ROOT, "examples/notebook.ipynb")).read_text()
    assert "\n# Training in a notebook\n" in page
    assert "[guide](../../guides/notebooks.md)" in page
    assert "python\nrun.train()\n" in page
    assert page.count("{raw} html\n<table>") == 2  # the table of each session, with its chart
    assert page.count("<iframe srcdoc=") == 3
    assert "text\nmodel      SimpleCNN" in page


def test_links_of_the_site_lead_to_its_pages(copied: Path) -> None:
    links = []
    for page in copied.rglob("*.md"):
        if not page.name.endswith(".py.md"):
            prose = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
            links += [page.parent / link for _, link, _ in LINK.findall(prose)]

    assert len(links) > 400
    assert [link for link in links if not link.is_file()] == []


def test_the_sidebar_has_each_page_of_docs_once(copied: Path) -> None:
    entries = []
    for page in copied.rglob("*.md"):
        for tree in re.findall(r"(?s)```\{toctree\}.*?```", page.read_text()):
            entries += re.findall(r"(?m)^/(.+)$", tree)
    of_docs = [entry for entry in entries if not entry.startswith(("source/", "decisions/index"))]
    paths = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
    pages = {page_of(ROOT, path).removesuffix(".md") for path in paths}

    assert sorted(of_docs) == sorted(pages - {"index"})
    assert len(entries) == len(set(entries))


PAGE = '<html><body><h1 id="top-of-it">A</h1>{}</body></html>'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder, and a page beside the one with the link of a test."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.html").write_text('<p id="part">')
    return tmp_path


@pytest.mark.parametrize(
    "element",
    [
        '<a href="other.html#part">',
        '<a href="other.html?q=1">',
        '<a href="#top-of-it">',
        '<a href="https://example.org/x">',  # a reader may follow it
        '<img src="data:image/png;base64,AA">',
    ],
)
def test_a_link_that_leads_somewhere_is_no_problem(element: str, site: Path) -> None:
    (site / "index.html").write_text(PAGE.format(element))
    assert broken_links(site) == []


@pytest.mark.parametrize(
    ("element", "problem"),
    [
        ('<a href="missing.html">', "does not exist"),
        ('<a href="folder">', "does not exist"),  # a browser of files shows no page there
        ('<img src="missing.png">', "does not exist"),
        ('<a href="other.html#missing">', "has no such heading"),
        ('<a href="#missing">', "has no such heading"),
        ('<script src="https://example.org/x.js"></script>', "is loaded from the network"),
        ('<link href="//example.org/x.css">', "is loaded from the network"),
    ],
)
def test_a_link_that_leads_nowhere_is_named(element: str, problem: str, site: Path) -> None:
    (site / "index.html").write_text(PAGE.format(element))

    (line,) = broken_links(site)

    page, _link, text = line.split(maxsplit=2)
    assert page == "index.html:"
    assert text == problem


def test_a_style_sheet_loads_nothing_from_the_network(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text(
        'p { background: url("a.png") } @font-face { src: url(https://example.org/f.woff2) }'
    )
    assert broken_links(tmp_path) == [
        "a.css: https://example.org/f.woff2 is loaded from the network"
    ]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_or_a_broken_link(tmp_path: Path) -> None:
    assert build(tmp_path) == []
    assert "killed with kill -9" in (tmp_path / "index.html").read_text()
    # a script, so that a search works without a server
    index = (tmp_path / "searchindex.js").read_text()
    assert index.startswith("Search.setIndex(")
    assert '"sf.tune"' in index
