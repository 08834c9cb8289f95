"""Check a built site: every internal link leads somewhere, and no page loads anything from another host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING = {
    ("script", "src"),
    ("img", "src"),
    ("link", "href"),
    ("source", "src"),
    ("iframe", "src"),
    ("object", "data"),
}
"""Attributes that make a browser fetch something by itself."""

PASSIVE_LINKS = {"canonical", "next", "prev", "search", "index", "genindex", "author"}
"""Values of a <link>'s rel that a browser does not fetch."""


class Page(HTMLParser):
    """The ids of a page, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.update(values[name] for name in ("id", "name") if name in values)
        for name, value in values.items():
            if (tag, name) in LOADING and not PASSIVE_LINKS & set(values.get("rel", "").split()):
                self.loaded.append(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)


def problems(site: Path) -> Iterator[str]:
    """Each dead link and each load from another host, as PAGE: what."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        for url in page.loaded:
            if urlsplit(url).netloc:
                yield f"{name}: loads {url}"
        for url in (*page.links, *page.loaded):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                yield f"{name}: no page or file for {url}"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                yield f"{name}: no heading for {url}"
    for path in (*sorted(site.rglob("*.css")), *sorted(site.rglob("*.svg"))):
        text = path.read_text(encoding="utf-8", errors="replace")
        for mark in ("url(http", "url('http", 'url("http', "url(//", "@import", '<image href="http'):
            if mark in text:
                yield f"{path.relative_to(site)}: loads from elsewhere: {mark}"


def main(site: Path) -> int:
    """Print the problems of `site`; 1 if there are any."""
    found = list(problems(site.resolve()))
    for line in found:
        print(line)
    print(f"docs: {len(found)} dead links or loads from elsewhere" if found else f"docs: {site}/index.html")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
