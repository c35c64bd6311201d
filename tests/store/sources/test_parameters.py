"""Parameters that PDEBench keeps in root attributes, and how they may be spelled."""

from __future__ import annotations

from pathlib import Path

import pytest
from pdebench_files import T, X, values, write

from ups_store.errors import SourceError
from ups_store.sources.hdf5 import nearest
from ups_store.sources.source import open_source


def parameters_of(folder: Path, attrs: dict[str, object]) -> dict[str, float]:
    path = write(folder / "a.h5", {"tensor": values("tensor", (2, T, X))}, attrs)
    with open_source(path) as source:
        return dict(source.info.parameters)


@pytest.mark.parametrize("spelling", ["Nu", "nu", "NU"])
def test_parameter_is_known_in_any_spelling(spelling: str, tmp_path: Path) -> None:
    assert parameters_of(tmp_path, {spelling: 0.01, "config": "x"}) == {"nu": 0.01}


@pytest.mark.parametrize(
    ("attrs", "named"),
    [
        ({"Nu": 0.01, "nu": 0.02}, ("'Nu'", "'nu'", "0.01", "0.02")),
        ({"Nu": 0.01, "nu": 0.01}, ("'Nu'", "'nu'")),
        ({"M": 0.1, "mach": 1.0}, ("'M'", "'mach'", "parameter 'mach'")),
    ],
)
def test_two_spellings_of_one_parameter_are_refused_and_both_named(
    attrs: dict[str, object], named: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(SourceError) as caught:
        parameters_of(tmp_path, attrs)
    assert caught.value.kind == "ambiguous_parameter"
    assert caught.value.path == str(tmp_path / "a.h5")
    assert all(text in str(caught.value) for text in named)


def test_nearest_name_is_that_in_other_capitals(tmp_path: Path) -> None:
    assert nearest("mesh/X", ["mesh/y", "mesh/x"]) == "did you mean 'mesh/x'?"
    assert nearest("velocty", ["pressure", "velocity"]) == "did you mean 'velocity'?"
    assert nearest("qqq", ["pressure"]) is None
