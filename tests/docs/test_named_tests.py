"""Pages that name tests promise nothing without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
RELIABILITY, ASKED_FOR = (REPOSITORY / "docs/results" / name for name in ("reliability.md", "asked-for.md"))


def names_of_tests() -> set[str]:
    """Names of the tests, and of their files."""
    sources = [*REPOSITORY.glob("tests/**/test_*.py")]
    found = {name for path in sources for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    return found | {path.name for path in sources}


@pytest.mark.parametrize(("page", "least"), [(RELIABILITY, 60), (ASKED_FOR, 20)])
def test_every_test_that_a_page_names_is_there(page: Path, least: int) -> None:
    named = set(re.findall(r"`(?:tests/[a-z/]+/)?(test_\w+(?:\.py)?)`", page.read_text()))
    assert len(named) > least
    assert named - names_of_tests() == set()


@pytest.mark.parametrize(
    ("page", "head", "least"),
    [(RELIABILITY, "| promise | shown by |", 30), (ASKED_FOR, "| asked for | here | shown by |", 7)],
)
def test_every_row_of_a_page_names_a_test(page: Path, head: str, least: int) -> None:
    rows = [line for table in tables(page.read_text(), head) for line in table]
    assert len(rows) > least
    assert [row for row in rows if not re.search(r"`test_\w+(\.py)?`", row.rstrip(" |").split("|")[-1])] == []


def tables(page: str, head: str) -> list[list[str]]:
    """Rows of the tables that begin with this row."""
    found = re.findall(rf"^{re.escape(head)}\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.M)
    return [table.splitlines() for table in found]
