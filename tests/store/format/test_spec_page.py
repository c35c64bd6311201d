"""The spec page says what the code does, where that can be compared."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import ups_store
from tools.make_hexdump import SPEC, array_document, blocks, split_page
from ups_store.errors import FormatError
from ups_store.format.identity import config_hash
from ups_store.format.root_metadata import RootMeta, parse_root

CODE = Path(__file__).parents[3] / "ups_store"


@pytest.mark.parametrize("name", ["hexdump", "sharded document", "sharded hexdump"])
def test_dump_on_spec_page_is_what_the_code_writes(name: str, tmp_path: Path) -> None:
    """Spec 12."""
    assert split_page(SPEC.read_text(), name)[1] == blocks(tmp_path)[name]


def test_plain_document_on_spec_page_is_what_the_code_writes(tmp_path: Path) -> None:
    """Spec 4.4, 12."""
    arrays = {"nu": ups_store.ArraySpec((5,), "float32")}
    with ups_store.create(tmp_path / "a.zarr.zip", arrays, identity={}) as writer:
        writer.commit_many(range(5), {"nu": np.zeros(5, np.float32)})
        path = writer.finish()
    block = split_page(SPEC.read_text(), "plain document")[1]
    assert block == f"```json\n{array_document(path)}\n```\n"


ROOT = RootMeta((1, 0), config_hash({}), {}, {"a": 1})
ROOT_TEXT = ROOT.to_json().decode()


@pytest.mark.parametrize(
    "version", ["1.0000001", "1.1000000", "1.00", "01.0", "1", "1.0.0", "1.0 ", "1.-1", "\u0661.0"]
)
def test_versions_that_are_not_two_numbers_of_six_digits_are_refused(version: str) -> None:
    """Spec 10.1."""
    with pytest.raises(FormatError):
        parse_root(ROOT_TEXT.replace('"1.0"', f'"{version}"').encode(), path="x")


def test_version_of_six_digits_is_read() -> None:
    """Spec 10.1."""
    assert parse_root(ROOT_TEXT.replace('"1.0"', '"1.999999"').encode(), path="x").version == (1, 999_999)


def test_clauses_that_the_code_cites_exist() -> None:
    pages = [SPEC, SPEC.with_name("writing.md"), SPEC.with_name("packed.md")]
    text = "\n".join(page.read_text() for page in pages)
    clauses = set(re.findall(r"^(\d+\.\d+)\.", text, re.MULTILINE))
    cited = {}
    for path in sorted(CODE.rglob("*.py")):
        text = path.read_text()
        found = re.findall(r'clause="(\d+\.\d+)', text)
        for group in re.findall(r"\(spec ([\d., to]+)", text):
            found += re.findall(r"\d+\.\d+", group)
        cited.update(dict.fromkeys(found, path.name))
    assert len(cited) > 20, "the search found next to nothing"
    assert {clause: name for clause, name in cited.items() if clause not in clauses} == {}
