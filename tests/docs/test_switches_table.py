"""docs/guides/train.md: the table of what combines is what the trainer declares and refuses."""

from __future__ import annotations

from pathlib import Path

from ups.train.switches import SWITCHES, combinations_table

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "train.md").read_text()
BEGIN, END = "<!-- switches: ups.train.switches.combinations_table -->\n", "<!-- end of switches -->"


def test_table_of_switches_is_that_of_the_declaration() -> None:
    """Otherwise put what `combinations_table` gives between the two comments."""
    assert PAGE.partition(BEGIN)[2].partition(END)[0] == combinations_table()


def test_every_switch_has_a_row_with_its_settings() -> None:
    rows = [line for line in combinations_table().splitlines() if line[:3].strip("| ").isdigit()]
    assert len(rows) == len(SWITCHES)
    for row, switch in zip(rows, SWITCHES.values(), strict=True):
        assert all(f"`{setting}`" in row for setting in switch.settings)
