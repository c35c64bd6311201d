"""Issue 32, 56: what the earlier system promised, and the default that differs, stand on their pages."""

from __future__ import annotations

from pathlib import Path

from ups.config import TrainingConfig

DOCS = Path(__file__).parents[3] / "docs"
PROMISED = (
    *("1.36", "1.45", "1.31", "1.07", "1.23", "1.10", "1.18", "1.13", "15, 18, 22 and 26 GB", "98 %"),
    *("$9.45", "within 3 %", "6 to 12 s", "a dry run in 1 to 2 s", "W&B: 1 to 5 s"),
)


def test_page_of_the_earlier_system_has_its_numbers_or_says_which_it_leaves_out() -> None:
    page = (DOCS / "results" / "earlier.md").read_text()
    assert [number for number in PROMISED if number not in page] == []
    assert "main numbers" in page
    assert "checkpoints,\nuploads and evaluations aren't repeated" in page


def test_migrate_page_says_what_amp_without_a_dtype_is() -> None:
    assert TrainingConfig().amp_dtype == "bfloat16"
    page = " ".join((DOCS / "guides" / "migrate.md").read_text().split())
    assert "without `training.amp_dtype` the dtype is bfloat16 here, and was float16 there" in page
