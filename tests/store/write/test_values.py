"""What may be committed as a sample's value, and which bytes become of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_stores import all_arrays, assert_same_bits, begin, build, mixed_values, sample_of

import ups_store
from ups_store import SpecError
from ups_store.format.metadata import dtype_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "burgers1d_train.zarr.zip"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_not_a_number_keeps_its_payload_bits(path: Path, dtype: str) -> None:
    kind = dtype_of(dtype)
    bits = np.random.default_rng(0).integers(0, 256, (3, 5000 * kind.itemsize), np.uint8)
    values = {"large": bits.view(kind), "small": bits[:, : 8 * kind.itemsize].copy().view(kind)}
    with np.errstate(invalid="ignore"):  # ml_dtypes signals on signalling NaNs
        assert np.isnan(values["large"]).any()
    build(path, values)
    assert_same_bits(all_arrays(path), values)


@pytest.mark.parametrize("dtype", [">f4", ">u8"])
def test_big_endian_values_are_stored_little_endian(path: Path, dtype: str) -> None:
    values = {"u": np.arange(6).reshape(2, 3).astype(dtype)}
    build(path, values)
    assert_same_bits(all_arrays(path), {"u": values["u"].astype(values["u"].dtype.newbyteorder("<"))})


def test_booleans_are_normalised_to_zero_and_one(path: Path) -> None:
    bits = np.array([[0, 1, 2, 255]], np.uint8)
    with begin(path, {"mask": bits.view(bool)}, dims={}) as writer:
        writer.commit(0, {"mask": bits.view(bool)[0]})
        writer.finish()
    with ups_store.open(path) as store:
        assert store["mask"].view(np.uint8).tolist() == [[0, 1, 1, 1]]
        assert store.verify().ok


@pytest.mark.parametrize("dtype", ["bool", "int64", "float16", "bfloat16"])
def test_python_numbers_and_lists_take_the_declared_dtype(path: Path, dtype: str) -> None:
    specs = {name: ups_store.ArraySpec(shape, dtype) for name, shape in {"u": (2, 2), "nu": (2,)}.items()}
    with ups_store.create(path, specs, identity={}) as writer:
        writer.commit(0, {"u": [1, 0], "nu": 1})
        writer.commit_many([1], {"u": [[0, 1]], "nu": [True]})
        writer.finish()
    kind = dtype_of(dtype)
    assert_same_bits(all_arrays(path), {"u": np.array([[1, 0], [0, 1]], kind), "nu": np.ones(2, kind)})


def test_python_floats_are_rounded_to_the_declared_dtype(path: Path) -> None:
    with begin(path, {"u": np.zeros((1, 2), np.float32)}) as writer:
        writer.commit(0, {"u": [0.1, 1e30]})
        writer.finish()
    assert_same_bits(all_arrays(path), {"u": np.array([[0.1, 1e30]], np.float32)})


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int8", [300, 0]),
        ("int8", [1.5, 0.0]),
        ("uint8", [-1, 0]),
        ("int16", [np.int64(1 << 20), np.int64(0)]),
        ("int64", [float("nan"), 0.0]),
        ("bool", [2, 0]),
        ("float32", ["1.5", "0"]),
        ("float32", [None, 0]),
        ("float32", [[0.0], [0.0, 1.0]]),
        ("float32", [1j, 0]),
    ],
)
def test_python_values_that_the_dtype_cannot_hold_are_refused(path: Path, dtype: str, value: Any) -> None:
    with begin(path, {"u": np.zeros((1, 2), dtype)}, dims={}) as writer:
        with pytest.raises(SpecError) as caught:
            writer.commit(0, {"u": value})
        assert (caught.value.kind, caught.value.array) == ("dtype", "u")
        assert writer.missing().tolist() == [0]


def test_strided_values_are_stored_in_c_order(path: Path) -> None:
    base = np.arange(2 * 40 * 60, dtype=np.float32).reshape(40, 60, 2)
    values = {"fields": base.T[:, ::2], "nu": np.arange(6.0)[::3]}
    build(path, values, dims={})
    assert_same_bits(all_arrays(path), values)


def test_committed_values_are_copied(path: Path) -> None:
    values = mixed_values(1)
    mine = {name: value.copy() for name, value in values.items()}
    with begin(path, values) as writer:
        writer.commit(0, sample_of(mine, 0))
        for value in mine.values():
            value[...] = 0
        writer.finish()
    assert_same_bits(all_arrays(path), values)


# --- masks --------------------------------------------------------------------------------------------


MASKED = np.ma.array(np.zeros((2, 3)), mask=np.eye(2, 3))
ROWS = ups_store.ArraySpec((2, None, 3), "float64", lengths=[1, 1])


@contextlib.contextmanager
def writing(path: Path, spec: ups_store.ArraySpec) -> Iterator[ups_store.StoreWriter]:
    """A writer whose store is finished in spite of what was refused."""
    with ups_store.create(path, {"u": spec}, identity={}) as writer:
        try:
            yield writer
        finally:
            writer.commit_many([0, 1], {"u": [np.ones((1, 3))] * 2 if spec.is_ragged else np.ones((2, 3))})
            writer.finish()


def create_with_constant(path: Path) -> None:
    ups_store.create(path, {"v": ups_store.ArraySpec((2,), "int8")}, constants={"u": MASKED}, identity={})


def commit(path: Path) -> None:
    with writing(path, ups_store.ArraySpec((2, 3), "float64")) as writer:
        writer.commit(0, {"u": MASKED[0]})


def commit_batched(path: Path) -> None:
    with writing(path, ups_store.ArraySpec((2, 3), "float64")) as writer, writer.batched() as batch:
        batch.commit(0, {"u": MASKED[0]})


def commit_ragged(path: Path) -> None:
    with writing(path, ROWS) as writer:
        writer.commit(0, {"u": MASKED[:1]})


WAYS_IN: list[Callable[[Path], object]] = [
    create_with_constant,
    commit,
    commit_batched,
    commit_ragged,
    lambda path: ups_store.write(path, ({"u": row} for row in MASKED), identity={}),
    lambda path: ups_store.write(path, [{"v": 1}], constants={"u": MASKED}),
    lambda path: ups_store.save(path, constants={"u": MASKED}, v=np.zeros(2)),
]


@pytest.mark.parametrize("way_in", WAYS_IN)
def test_mask_that_would_be_lost_is_refused_by_every_way_in(
    path: Path, way_in: Callable[[Path], object]
) -> None:
    with pytest.raises(SpecError, match="a mask would be lost") as caught:
        way_in(path)
    assert (caught.value.kind, caught.value.array) == ("value", "u")
    assert caught.value.hint == "fill them (`filled`), or store the mask as an array"
    assert {*path.parent.iterdir()} <= {path}


def test_masked_arrays_without_masked_elements_are_arrays(path: Path) -> None:
    whole = np.ma.array(np.arange(6.0).reshape(2, 3), mask=False)
    with begin(path, {"u": whole.data}) as writer:
        writer.commit(0, {"u": whole[0]})
        writer.commit_many([1], {"u": whole[1:]})
        writer.finish()
    assert_same_bits(all_arrays(path), {"u": whole.data})
