"""Build the documentation as a site that is read without a network: python docs/build_site.py
[DIRECTORY].

Sphinx reads a copy of the pages. In the copy, docs/ is the root, and each other file that a page
links to is a page below source/. Links are changed accordingly, so the pages keep the relative
links that work in a browser of the repository. The sidebar is the list of docs/index.md. A warning
of Sphinx, or a link in the built pages that leads nowhere, fails the build.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from urllib.parse import unquote, urldefrag, urljoin, urlparse

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s:]+)(#[^)\s]*)?\)")  # a link to a file of the repository
ITEM = re.compile(
    r"^\* \[[^\]]*\]\(([^)#:]+)\)", flags=re.MULTILINE
)  # the first link of an item of a list
FENCE = re.compile(r"^```.*?^```", flags=re.DOTALL | re.MULTILINE)
LANGUAGES = {
    ".py": "python",
    ".pyi": "python",
    ".sh": "bash",
    ".toml": "toml",
    ".json": "json",
    ".yaml": "yaml",
}
LOADED = {
    "img": "src",
    "script": "src",
    "iframe": "src",
    "link": "href",
    "source": "src",
}  # by the page itself


def build(site: Path) -> list[str]:
    """Build the site into an empty directory. Return the links that lead nowhere."""
    with tempfile.TemporaryDirectory() as copied:
        copy_pages(ROOT, Path(copied))
        strict = [
            "-W",
            "--keep-going",
            "-q",
            "-b",
            "html",
            "-d",
            f"{copied}/.doctrees",
            "-c",
            str(ROOT / "docs" / "site"),
        ]
        subprocess.run([sys.executable, "-m", "sphinx", *strict, copied, str(site)], check=True)
    return broken_links(site)


def copy_pages(root: Path, copied: Path) -> None:
    """Write all pages in the form that Sphinx reads."""
    pending = [
        str(path.relative_to(root)) for path in [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    ]
    done = set[str]()
    while pending:
        path = pending.pop()
        if path in done:
            continue
        done.add(path)
        file, target = root / path, copied / page_of(root, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix in (".png", ".svg"):
            shutil.copyfile(file, target)
        elif file.suffix in (".md", ".ipynb") or file.is_dir():
            text = (
                _listing(file)
                if file.is_dir()
                else _notebook(file)
                if file.suffix == ".ipynb"
                else file.read_text("utf-8")
            )
            pending += [_target(root, path, linked) for linked in _links(text)]
            target.write_text(
                _with_links(_in_sidebar(root, path, text), root, path), encoding="utf-8"
            )
        else:
            target.write_text(
                f"---\norphan: true\nnosearch: true\n---\n\n{_source(file, path)}", encoding="utf-8"
            )


def page_of(root: Path, path: str) -> str:
    """The path in the copy of a file of the repository.

    "docs/guides/data.md" is "guides/data.md", "CHANGELOG.md" is "source/CHANGELOG.md", and
    "examples/gan.py" is "source/examples/gan.py.md". The page of a directory is its README.md, or
    else a list of its files.
    """
    if (root / path).is_dir():
        path = f"{path}/index.md"
    elif Path(path).suffix not in (".md", ".png", ".svg"):
        path += ".md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"


def broken_links(site: Path) -> list[str]:
    """The links of built pages to files or headings that do not exist, and the files that a page
    loads from elsewhere.
    """
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        for tag, address in page.links:
            place = f"{path.relative_to(site)}: {address}"
            if urlparse(address).scheme or address.startswith("//"):
                problems += [f"{place} is loaded from the network"] * (
                    tag in LOADED and not address.startswith("data:")
                )
                continue
            file, anchor = urldefrag(urljoin(str(path), unquote(re.sub(r"\?[^#]*", "", address))))
            if not Path(file).is_file():
                problems.append(f"{place} does not exist")
            elif anchor and Path(file) in pages and anchor not in pages[Path(file)].anchors:
                problems.append(f"{place} has no such heading")
    for path in sorted(site.rglob("*.css")):
        loaded = re.findall(
            r"(?:url\(|@import )\s*[\"']?((?:https?:)?//[^\"')]+)", path.read_text(encoding="utf-8")
        )
        problems += [
            f"{path.relative_to(site)}: {address} is loaded from the network" for address in loaded
        ]
    return problems


class _Page(HTMLParser):
    """The links of a built page with their tags, and the places that a link can lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.anchors: set[str | None] = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {values.get("id"), values.get("name")}
        address = values.get(LOADED.get(tag, "href"))
        if address:
            self.links.append((tag, address))


def _target(root: Path, path: str, link: str) -> str:
    """The file or directory of the repository that a link of a page leads to; README.md for a
    directory that has one.
    """
    target = normpath(join(path if (root / path).is_dir() else dirname(path), link))
    return f"{target}/README.md" if (root / target / "README.md").exists() else target


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """A page's text in parts: True for prose, False for a block of code."""
    start = 0
    for fence in FENCE.finditer(text):
        yield True, text[start : fence.start()]
        yield False, fence.group()
        start = fence.end()
    yield True, text[start:]


def _links(text: str) -> list[str]:
    return [
        link.group(2) for is_prose, part in _parts(text) if is_prose for link in LINK.finditer(part)
    ]


def _with_links(text: str, root: Path, path: str) -> str:
    """The text with the links of the copy."""
    here = dirname(page_of(root, path))

    def changed(link: re.Match[str]) -> str:
        target = page_of(root, _target(root, path, link.group(2)))
        return f"{link.group(1)}{relpath(target, here or '.')}{link.group(3) or ''})"

    return "".join(LINK.sub(changed, part) if is_prose else part for is_prose, part in _parts(text))


def _in_sidebar(root: Path, path: str, text: str) -> str:
    """The text of a page with the trees of contents below it, or with the mark of a page that the
    sidebar omits.
    """
    if path == "docs/index.md":
        return f"---\nhide-toc: true\n---\n\n{''.join(_sidebar(root, text))}{text}"
    if path in ("docs/reference/api.md", "docs/decisions"):
        return f"{text}\n{_toctree(dict.fromkeys(_target(root, path, linked) for linked in _links(text)), root)}"
    is_listed = path.startswith("docs/") or path in _listed(root)
    return text if is_listed else f"---\norphan: true\nnosearch: true\n---\n\n{text}"


def _listed(root: Path) -> set[str]:
    """The files in the sidebar: the first of the links of each item of docs/index.md."""
    items = re.findall(ITEM, (root / "docs" / "index.md").read_text(encoding="utf-8"))
    return {_target(root, "docs/index.md", linked) for linked in items}


def _sidebar(root: Path, index: str) -> Iterator[str]:
    """A tree of contents for each group of docs/index.md: a heading, or a line with a colon between
    lists.
    """
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        for group in re.split(r"^(?=\w[\w ]*:$)", text, flags=re.MULTILINE):
            name = re.match(r"(\w[\w ]*):\n", group)
            if listed := [
                _target(root, "docs/index.md", linked) for linked in re.findall(ITEM, group)
            ]:
                yield _toctree(
                    listed, root, caption=f"{heading}: {name.group(1).lower()}" if name else heading
                )


def _toctree(paths: Iterable[str], root: Path, *, caption: str = "") -> str:
    entries = [f"/{page_of(root, path).removesuffix('.md')}" for path in paths]
    return "\n".join(
        [
            "```{toctree}",
            ":hidden:",
            *[f":caption: {caption}"] * bool(caption),
            "",
            *entries,
            "```\n\n",
        ]
    )


def _listing(directory: Path) -> str:
    """The page of a directory: a link to each of its files, with its title or the first line of its
    docstring.
    """
    rows = []
    for file in sorted(directory.iterdir()):
        if file.suffix in (".md", ".txt", *LANGUAGES) and file.name != "__init__.py":
            first = file.read_text(encoding="utf-8").partition("\n")[0]
            if file.suffix == ".md":
                rows.append(f"* [{first.removeprefix('# ')}]({file.name})")
            else:
                about = f": {first.strip(chr(34))}" if first.startswith('"""') else ""
                rows.append(f"* [`{file.name}`]({file.name}){about}")
    name = (
        directory.name.capitalize()
        if directory.parent.name == "docs"
        else str(directory.relative_to(ROOT))
    )
    return f"# {name}\n\n" + "\n".join(rows) + "\n"


def _notebook(file: Path) -> str:
    """The page of a notebook: its text, its code, and the HTML or else the text of each output."""
    parts = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else _block("python", text))
        for output in cell.get("outputs", ()):
            shown = output.get("data", {"text/plain": output.get("text", "")})
            language, kind = (
                ("{raw} html", "text/html") if "text/html" in shown else ("text", "text/plain")
            )
            parts.append(_block(language, "".join(shown[kind]).rstrip()))
    return "\n\n".join(parts) + "\n"


def _block(language: str, text: str) -> str:
    return f"`````````{language}\n{text}\n`````````"


def _source(file: Path, path: str) -> str:
    """A page with the text of a file."""
    language = LANGUAGES.get(file.suffix, "text")
    return f"# {path}\n\n{_block(language, file.read_text(encoding='utf-8'))}\n"


def main() -> None:
    site = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "site"
    if site.exists() and any(site.iterdir()) and not (site / ".buildinfo").is_file():
        sys.exit(
            f"error: {site} holds files of something else\n  it would be deleted\n  name a new directory"
        )
    shutil.rmtree(site, ignore_errors=True)
    problems = build(site)
    if problems:
        sys.exit("\n".join(problems))
    pages = sum(1 for _ in site.rglob("*.html"))
    print(f"{pages} pages without a broken link; open {site / 'index.html'}")


if __name__ == "__main__":
    main()
