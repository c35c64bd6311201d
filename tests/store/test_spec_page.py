"""The spec page says what the code does, where that can be compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.make_hexdump import SPEC, blocks, split_page

CODE = Path(__file__).parents[2] / "ups_store"


@pytest.mark.parametrize("name", ["hexdump", "sharded document", "sharded hexdump"])
def test_dump_on_spec_page_is_what_the_code_writes(name: str, tmp_path: Path) -> None:
    """Spec 12."""
    assert split_page(SPEC.read_text(), name)[1] == blocks(tmp_path)[name]


def test_clauses_that_the_code_cites_exist() -> None:
    clauses = set(re.findall(r"^(\d+\.\d+)\.", SPEC.read_text(), re.MULTILINE))
    cited = {}
    for path in sorted(CODE.rglob("*.py")):
        text = path.read_text()
        found = re.findall(r'clause="(\d+\.\d+)', text)
        for group in re.findall(r"\(spec ([\d., to]+)", text):
            found += re.findall(r"\d+\.\d+", group)
        cited.update(dict.fromkeys(found, path.name))
    assert len(cited) > 20, "the search found next to nothing"
    assert {clause: name for clause, name in cited.items() if clause not in clauses} == {}
