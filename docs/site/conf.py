"""Settings of Sphinx for `make site`."""

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

_PACKAGE = Path(__file__).parents[2] / "src" / "surefoot" / "__init__.py"

project = "surefoot"
release = re.findall(r'__version__ = "(.*?)"', _PACKAGE.read_text(encoding="utf-8"))[0]
extensions = ["myst_parser"]
myst_heading_anchors = (
    4  # links lead to headings by the names that browsers of repositories give them
)
smartquotes = False  # quotes in the text are those that a reader types
html_theme = "furo"
html_title = f"surefoot {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}


def note_public_names(app: Sphinx, page: nodes.document) -> None:
    """Enter each public name as an object of Python, so that a search for a name leads to its
    entry.
    """
    if not app.env.docname.startswith("reference/api/"):
        return
    for section in page.findall(nodes.section):
        title = section.next_node(nodes.title)
        if title is not None and isinstance(title.children[0], nodes.literal):
            name = title.astext()
            kind = "class" if name.rpartition(".")[2][0].isupper() else "function"
            app.env.domains.python_domain.note_object(name, kind, section["ids"][0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("doctree-read", note_public_names)
