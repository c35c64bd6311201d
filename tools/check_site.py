"""Check a built site: every link, anchor and picture is there, and nothing is loaded from the network.

python -m tools.check_site build/site
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADS = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}
_NOT_LOADED = {
    "canonical",
    "alternate",
    "prev",
    "next",
    "edit",
}  # `rel` of links that aren't fetched


class Page(HTMLParser):
    """What a page links to, what it loads, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect from one element."""
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        is_fetched = found.get("rel") not in _NOT_LOADED
        self.loads += [found[key] for name, key in _LOADS if tag == name and key in found and is_fetched]

    def has(self, anchor: str) -> bool:
        """Whether a link to the anchor leads somewhere; no anchor is the top."""
        return not anchor or anchor in self.anchors


def problems_of_site(folder: Path) -> Iterator[str]:
    """Sentences, one for each thing that is wrong."""
    root = folder.resolve()
    paths = sorted(path for path in root.rglob("*.html") if path.name != "404.html")  # its links are absolute
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in paths}
    for path, page in pages.items():
        where = path.relative_to(root)
        yield from (f"{where}: loads {url} from the network" for url in page.loads if _is_remote(url))
        here = [url for url in (*page.links, *page.loads) if not _is_remote(url) and not urlsplit(url).scheme]
        for url in dict.fromkeys(here):
            target = _target(path, url)
            if not target.is_file():
                yield f"{where}: {url} leads nowhere"
            elif target in pages and not pages[target].has(unquote(urlsplit(url).fragment)):
                yield f"{where}: {url}: there is no such place in the page"


def _is_remote(url: str) -> bool:
    return url.startswith(("http:", "https:", "//"))


def _target(page: Path, url: str) -> Path:
    name = unquote(urlsplit(url).path)
    target = (page.parent / name).resolve() if name else page
    return target / "index.html" if target.is_dir() else target


def main(folder: str) -> int:
    """Print what is wrong; 1 if something is."""
    problems = list(problems_of_site(Path(folder)))
    print("\n".join(problems) or f"{folder}: every link leads somewhere")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
