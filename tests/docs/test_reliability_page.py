"""`docs/results/reliability.md` promises nothing without a test."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "results" / "reliability.md"


def names_of_tests() -> set[str]:
    """Names of the tests of the store, and of their files."""
    sources = [*REPOSITORY.glob("tests/**/test_*.py")]
    found = {name for path in sources for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    return found | {path.name for path in sources}


def test_every_test_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(?:tests/[a-z/]+/)?(test_\w+(?:\.py)?)`", PAGE.read_text()))
    assert len(named) > 60
    assert named - names_of_tests() == set()


def test_every_promise_of_the_page_names_a_test() -> None:
    rows = [line for table in promises(PAGE.read_text()) for line in table]
    assert len(rows) > 30
    assert [row for row in rows if not re.search(r"`test_\w+(\.py)?`", row.split("|")[2])] == []


def promises(page: str) -> list[list[str]]:
    """Rows of the tables that say what is promised and what shows it."""
    tables = re.findall(r"^\| promise \| shown by \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.M)
    return [table.splitlines() for table in tables]
