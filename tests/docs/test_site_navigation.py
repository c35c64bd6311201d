"""The site's navigation has every page, those that are made from the code too, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tools.docs_reference import MOVED_PAGES, reference_pages

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"


def entries(nav: Any) -> Iterator[str]:
    """Paths of a navigation, from the outside in."""
    if isinstance(nav, str):
        yield nav
    for item in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from entries(item)


def test_navigation_has_every_page_once() -> None:
    found = sorted(entries(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]))
    commands = {uri for uri in reference_pages() if uri.startswith("reference/commands/")}
    assert commands
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    notebooks = {f"notebooks/{path.stem}.md" for path in (DOCS / "notebooks").glob("*.py")}
    made = {*reference_pages(), *MOVED_PAGES} - commands
    assert found == sorted({*written, *notebooks, *made, "reference/commands/"})


def test_make_docs_hears_warnings() -> None:
    lines = [line for line in (REPOSITORY / "Makefile").read_text().splitlines() if "mkdocs build" in line]
    assert [("--strict" in line, "--quiet" in line) for line in lines] == [(True, False)]
