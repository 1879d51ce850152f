"""Checks what was built: links lead somewhere, nothing comes from the network, public names have a reference.

A package with `__all__` has a page of reference with these names; the errors have one of their own.
"""

import ast
import logging
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
FOREIGN = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)")


def public_names():
    """The names that each page of reference shows, by the module that the page is of."""
    names = {}
    for path in sorted(ROOT.glob("arrowcache/**/__init__.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names[".".join(path.parent.relative_to(ROOT).parts)] = ast.literal_eval(node.value)
    errors = re.findall(r"^class (\w+)", (ROOT / "arrowcache/errors.py").read_text(), re.MULTILINE)
    names["arrowcache"] = [name for name in names["arrowcache"] if name not in errors]
    return names | {"arrowcache.errors": errors}


class Built(HTMLParser):
    """A page: its anchors, its links, and what a browser loads with it from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.foreign = {"", "__top"}, [], FOREIGN.findall(text)
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.anchors.add(value)
            elif name in ("href", "src"):
                link = urlsplit(value)
                if not link.scheme and not link.netloc:
                    self.links.append(link)
                elif tag != "a" and link.scheme != "data":
                    self.foreign.append(value)


def faults(site, names):
    """What is wrong with the site in a folder: a sentence each."""
    pages = {path: Built(path.read_text()) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        yield from (f"{path} loads {url} from the network" for url in page.foreign)
        for link in page.links:
            start = site if link.path.startswith("/") else path.parent
            target = (start / link.path.lstrip("/")).resolve() if link.path else path
            if not target.exists() or (target in pages and link.fragment not in pages[target].anchors):
                yield f"{path} has a link that leads nowhere: {link.geturl()}"
    for path in site.rglob("*.css"):
        yield from (f"{path} loads {url} from the network" for url in FOREIGN.findall(path.read_text()))
    for module, shown in names.items():
        page = pages.get(site / f"{module}.html")
        missing = {f"{module}.{name}" for name in shown} - (page.anchors if page else set())
        yield from (f"{name} has no reference" for name in sorted(missing))


def on_post_build(config):
    for fault in faults(Path(config.site_dir).resolve(), public_names()):
        logging.getLogger("mkdocs.hooks").warning(fault)  # with --strict it fails the build
