"""The spec page says what the code does, where that can be compared."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.make_hexdump import BEGIN, END, SPEC, dump, smallest_store

CODE = Path(__file__).parents[2] / "ups_store"


def test_hex_dump_of_spec_page_is_the_smallest_store(tmp_path: Path) -> None:
    """Spec 12."""
    shown = SPEC.read_text().split(BEGIN)[1].split(END)[0]
    assert shown == f"```\n{dump(smallest_store(tmp_path))}\n```\n"


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
