"""The spec page says what the code does, where that can be compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ups_store
from tests.support.spec_page import run_block
from tools.make_hexdump import PACKED, SPEC, WRITING, blocks, split_page
from ups_store.errors import FormatError
from ups_store.format.root import RootMeta, config_hash, parse_root

CODE = Path(__file__).parents[3] / "ups_store"
GOLDEN = sorted((Path(__file__).parents[1] / "data" / "golden" / "v1.0").glob("*.zarr.zip"))


EXAMPLES = [
    (SPEC, "hexdump"),
    (SPEC, "sharded document"),
    (SPEC, "sharded hexdump"),
    (WRITING, "building hexdump"),
    (PACKED, "packed codecs"),
    (PACKED, "packed hexdump"),
]


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Path, str], str]:
    return blocks(tmp_path_factory.mktemp("examples"))


@pytest.mark.parametrize(("page", "name"), EXAMPLES, ids=[name for _, name in EXAMPLES])
def test_example_on_page_is_what_the_code_writes(
    page: Path, name: str, examples: dict[tuple[Path, str], str]
) -> None:
    """Spec 6, 12, 13."""
    assert split_page(page.read_text(), name)[1] == examples[page, name]


def test_no_example_is_left_out(examples: dict[tuple[Path, str], str]) -> None:
    assert set(examples) == set(EXAMPLES)


def test_recipe_on_page_one_reads_samples_of_golden_files() -> None:
    read_sample = run_block("recipe")["read_sample"]
    for path in GOLDEN:
        with ups_store.open(path) as store, path.open("rb") as file:
            for name, array in store.arrays.items():
                for i in {0, len(store) - 1} if 0 not in array.shape else ():
                    assert read_sample(file, name, i) == store.sample(i)[name].tobytes(), (path, name)


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
    pages = [SPEC.with_name(f"{name}.md") for name in ("spec", "ragged", "writing", "packed")]
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
