"""Specs that are found from the first samples, and errors about samples that don't fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ups_store.errors import SpecError
from ups_store.format.metadata import ArraySpec
from ups_store.write.sample_specs import SampleCheck, counted_specs, shape_of, specs_of

F4 = np.zeros((2, 3), "f4")


def test_specs_are_those_of_the_first_samples() -> None:
    samples: list[dict[str, Any]] = [
        {"u": F4, "p": F4[:1], "y": 1, "text": "a", "raw": b"b"},
        {"u": F4, "p": F4, "y": 0.5, "text": "", "raw": b""},
    ]
    found = specs_of(samples, ragged=["u"])
    assert {name: (spec.shape, spec.dtype, spec.encoding) for name, spec in found.items()} == {
        "u": ((None, None, 3), "float32", None),
        "p": ((None, None, 3), "float32", None),
        "y": ((None,), "float64", None),
        "text": ((None, None), "uint8", "utf-8"),
        "raw": ((None, None), "uint8", "bytes"),
    }
    assert counted_specs({"y": found["y"]}, 7)["y"].shape == (7,)


@pytest.mark.parametrize(
    ("samples", "ragged", "kind", "number", "found"),
    [
        ([{"u": 1}], ["v"], "names", None, "v"),
        ([{"u/v": 1}], [], "names", None, "'u/v'"),
        ([{"u": 1}, {"v": 1}], [], "arrays", 1, "without u; also v"),
        ([{"u": 1, "v": 2}, {"u": 1}], [], "arrays", 1, "without v"),
        ([{"u": "a"}, {"u": b"a"}], [], "mixed", 1, "bytes"),
        ([{"u": "a"}, {"u": 1}], [], "mixed", 1, "int64 of shape ()"),
        ([{"u": 1}, {"u": "a"}], [], "mixed", 1, "str"),
        ([{"u": F4}, {"u": F4.astype("f8")}], [], "mixed", 1, "float64"),
        ([{"u": F4}, {"u": F4[0]}], [], "mixed", 1, "shape (3,)"),
        ([{"u": F4}, {"u": F4[:, :2]}], [], "mixed", 1, "shape (2, 2)"),
        ([{"u": 1}], ["u"], "ragged", None, "None"),
        ([{"u": np.zeros(2, "M8[s]")}], [], "dtype", None, "datetime64[s]"),
    ],
    ids=str,
)
def test_samples_that_do_not_agree_are_an_error(
    samples: list[dict[str, Any]], ragged: list[str], kind: str, number: int | None, found: str
) -> None:
    with pytest.raises(SpecError) as caught:
        specs_of(samples, ragged=ragged)
    assert (caught.value.kind, caught.value.sample, str(caught.value.found)) == (kind, number, found)


SPECS = {
    "u": ArraySpec((None, 2, 3), "float32"),
    "p": ArraySpec((None, None, 3), "float32"),
    "y": ArraySpec((None,), "float64"),
    "n": ArraySpec((None,), "int64"),
    "text": ArraySpec((None, None), "uint8", encoding="utf-8"),
    "raw": ArraySpec((None, None), "uint8", encoding="bytes"),
}
SAMPLE = {"u": F4, "p": F4, "y": 1.0, "n": 1, "text": "a", "raw": b"b"}


def test_sample_that_fits_is_given_in_the_dtypes_that_were_declared() -> None:
    found = SampleCheck(SPECS, num_seen=0)({**SAMPLE, "y": 2, "u": F4.astype(">f4"), "p": F4[:0]}, 5)
    assert (found["y"], found["y"].dtype, found["p"].shape) == (2.0, "float64", (0, 3))
    assert (found["text"], found["raw"], found["u"].tolist()) == ("a", b"b", F4.tolist())


@pytest.mark.parametrize(
    ("value", "expected", "found", "hint"),
    [
        ({"u": "a"}, "float32 of shape (2, 3)", "str", "convert it"),
        ({"text": 1}, "str", "int64 of shape ()", "convert it"),
        ({"raw": F4}, "bytes", "float32 of shape (2, 3)", "convert it"),
        ({"u": F4[:1]}, "shape (2, 3)", "shape (1, 3)", "ragged=['u']"),
        ({"p": F4[0]}, "shape (*, 3)", "shape (3,)", "convert it"),
        ({"p": np.float32(1)}, "shape (*, 3)", "shape ()", "convert it"),
        ({"y": np.zeros(1)}, "shape ()", "shape (1,)", "convert it"),
        ({"u": F4.astype("f8")}, "float32", "float64", "convert it"),
        ({"n": 1.5}, "int64", "float64", "convert it"),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_seen", [0, 1200])
def test_sample_that_contradicts_the_specs_is_an_error(
    value: dict[str, Any], expected: str, found: str, hint: str, num_seen: int
) -> None:
    with pytest.raises(SpecError) as caught:
        SampleCheck(SPECS, num_seen=num_seen)({**SAMPLE, **value}, 5)
    error = caught.value
    assert (error.kind, error.array, error.sample) == ("mixed", *value, 5)
    assert error.expected == expected + (", as in the first 1,200" if num_seen else "")
    assert (error.found, hint in str(error.hint)) == (found, True)


def test_sample_with_other_arrays_is_an_error() -> None:
    with pytest.raises(SpecError) as caught:
        SampleCheck(SPECS, num_seen=0)({"u": F4, "w": 1}, 5)
    assert (caught.value.kind, caught.value.found) == ("arrays", "without n, p, raw, text, y; also w")
    assert shape_of(SPECS["p"]) == "(*, 3)"
