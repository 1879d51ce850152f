"""HTML as a browser would read it: for tests of what notebooks show."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"img", "meta"}


class Seen(HTMLParser):
    """What a piece of HTML holds; fails where an element is not closed, or a style is."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(markup)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data + " "

    def values(self, name: str) -> list[str]:
        """Of all attributes of a name."""
        return [value for attribute, value in self.attributes if attribute == name]


def seen(markup: str) -> Seen:
    """Read HTML; it has to be whole, encodable, without scripts and without anything from elsewhere."""
    found = Seen(markup)
    markup.encode()
    assert not {"script", "link", "iframe", "object", "style"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    for name, value in found.attributes:
        if name in ("src", "href"):
            assert value.startswith("data:image/png;base64,")
        assert not re.search(r"https?://|url\(", value) or name == "title"
    return found
