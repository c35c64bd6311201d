"""The spec page says what the code does, where that can be compared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import ups_store
from tools.make_hexdump import SPEC, array_document, blocks, split_page
from ups_store.errors import FormatError
from ups_store.format.metadata import ArrayMeta, RootMeta, parse_array, parse_root
from ups_store.format.zip_records import Entry, align

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


META = ArrayMeta("nu", (1,), "float32", ("sample",), {"a": 1})
TEXT = META.to_json().decode()


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(json.loads(TEXT), indent=1),
        TEXT.replace('"a":1', '"a":7,"a":1'),
        TEXT.replace('"fill_value":0', '"fill_value":-0'),
        TEXT.replace('"a":1', '"a":1.0'),
        TEXT.replace('"float32"', '"\\u0066loat32"'),
    ],
)
def test_other_texts_of_the_same_values_are_read(text: str) -> None:
    """Spec 4.1."""
    assert parse_array("nu", text.encode(), path="x") == META


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace('"shape":[1]', '"shape":[1.0]'),
        TEXT.replace('"shape":[1]', '"shape":[1e0]'),
        TEXT.replace('"shape":[1]', '"shape":[true]'),
        TEXT.replace('"fill_value":0', '"fill_value":0.0'),
        TEXT.replace('"zarr_format":3', '"zarr_format":3.0'),
        TEXT.replace('"a":1', '"a":NaN'),
        TEXT.replace('"a":1', '"a":Infinity'),
        "\ufeff" + TEXT,
        TEXT.replace('"a":1', '"a":"\xe9"').encode("latin-1"),
    ],
)
def test_texts_of_other_values_are_refused(text: str | bytes) -> None:
    """Spec 4.1."""
    raw = text if isinstance(text, bytes) else text.encode()
    assert raw != TEXT.encode()
    with pytest.raises(FormatError):
        parse_array("nu", raw, path="x")


ROOT = RootMeta((1, 0), "0" * 64, {}, {"a": 1}, None)
ROOT_TEXT = ROOT.to_json().decode()


@pytest.mark.parametrize("end", ["", " ", "\n" * 4096])
def test_white_space_after_the_text_of_the_root_is_read(end: str) -> None:
    """Spec 4.1, 4.3."""
    assert parse_root((ROOT_TEXT.rstrip() + end).encode(), path="x") == ROOT


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400, r'"\ud800"', r'"\udc00\ud800"'])
def test_values_without_a_canonical_text_are_refused(number: str) -> None:
    """Spec 4.1."""
    for text, parse in ((ROOT_TEXT, parse_root), (TEXT, lambda raw, path: parse_array("nu", raw, path=path))):
        changed = text.replace('"a":1', f'"a":{number}')
        assert changed != text
        with pytest.raises(FormatError):
            parse(changed.encode(), path="x")


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


@pytest.mark.parametrize("offset", [0, 1, 4088, 4090, 4096])
@pytest.mark.parametrize("alignment", [64, 4096])
def test_padding_is_that_of_the_formula(offset: int, alignment: int) -> None:
    """Spec 3.4."""
    name = "u/c/0"
    plain = offset + 50 + len(name) + 6
    z = align(plain, alignment) - plain
    entry = Entry(name, offset, 1, alignment)
    assert entry.data_offset == plain + z
    assert len(entry.padding) == 6 + z


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
