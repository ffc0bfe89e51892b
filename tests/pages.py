"""A page of HTML as its elements."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "line", "rect", "circle", "path", "input"}


class Elements(HTMLParser):
    """All elements of a page with their attributes and text; fails where they are not closed in
    order.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def with_tag(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all elements with this tag."""
        return [attributes for name, attributes in self.elements if name == tag]

    def event_handlers(self) -> list[str]:
        """The attributes that would run a program, such as onclick."""
        names: list[str] = []
        for _, attributes in self.elements:
            names += [name for name in attributes if name.startswith("on")]
        return names

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def titles(page: str) -> list[str]:
    """The headings of its sections."""
    return re.findall(r"<h2[^>]*>([^<]*)", page)
