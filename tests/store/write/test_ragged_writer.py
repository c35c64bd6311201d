"""Ragged arrays, written: what `create` and `commit` take and refuse, continuing, round trips."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ragged_stores
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_stores import build_ragged, ragged_specs, ragged_values, rows_of
from small_stores import flip

import ups_store
from ups_store import ArraySpec
from ups_store.format.metadata import DTYPE_NAMES, dtype_of

VALUES = ragged_values()


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (ArraySpec((2, None), "int8"), "lengths"),
        (ArraySpec((2, None), "int8", lengths=[1]), "lengths"),
        (ArraySpec((2, None), "int8", lengths=[1, -1]), "lengths"),
        (ArraySpec((2, None), "int8", lengths=[1, 0.5]), "lengths"),
        (ArraySpec((2, None), "int8", lengths=[[1], [1, 2]]), "lengths"),
        (ArraySpec((2, None), "int8", lengths=[2**60, 2**60]), "lengths"),
        (ArraySpec((2, None), "int8", lengths=[2**53 - 2, 0]), "ragged"),
        (ArraySpec((2, None, 0), "int8", lengths=[1, 1]), "ragged"),
        (ArraySpec((2, None), "int8", lengths=[1, 1], encoding="utf-8"), "ragged"),
        (ArraySpec((2, None, 2), "uint8", lengths=[1, 1], encoding="bytes"), "ragged"),
        (ArraySpec((2, None, None), "int8", lengths=[1, 1]), "shape"),
        (ArraySpec((2, None), "int8", lengths=[1, 1], dims=("sample",)), "dims"),
        (ArraySpec((2, None), "int8", lengths=[1, 1], attrs={"ups_store": 1}), "attrs"),
        (ArraySpec((2, 3), "int8", lengths=[1, 1]), "shape"),
        (ArraySpec((2,), "uint8", encoding="bytes"), "shape"),
        (ArraySpec((1, None), "uint8", encoding="latin1", lengths=[1]), "encoding"),  # type: ignore[arg-type]
    ],
)
def test_create_refuses_a_ragged_array_that_the_format_does_not_have(
    tmp_path: Path, spec: ArraySpec, kind: str
) -> None:
    with pytest.raises(ups_store.SpecError) as error:
        ups_store.create(tmp_path / "a.zarr.zip", {"u": spec}, identity={})
    assert error.value.kind == kind


@pytest.mark.parametrize("name", ["u.offsets", "u.lengths"])
def test_create_refuses_the_names_that_belong_to_a_ragged_array(tmp_path: Path, name: str) -> None:
    arrays = {"u": ArraySpec((1, None), "int8", lengths=[1]), name: ArraySpec((1,), "int8")}
    with pytest.raises(ups_store.SpecError) as error:
        ups_store.create(tmp_path / "a.zarr.zip", arrays, identity={})
    assert (error.value.kind, error.value.array) == ("name", name)


def test_create_refuses_long_names_of_ragged_arrays(tmp_path: Path) -> None:
    for length, is_allowed in ((120, True), (121, False)):
        arrays = {"u" * length: ArraySpec((0, None), "int8", lengths=[])}
        if is_allowed:
            ups_store.create(tmp_path / f"{length}.zarr.zip", arrays, identity={}).close()
            continue
        with pytest.raises(ups_store.SpecError) as error:
            ups_store.create(tmp_path / f"{length}.zarr.zip", arrays, identity={})
        assert error.value.kind == "ragged"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"u": [1, 2], "t": "ab", "b": b"c"}, "shape"),
        ({"u": np.zeros(3, np.int16), "t": "ab", "b": b"c"}, "dtype"),
        ({"u": [1, 2, 3], "t": "abc", "b": b"c"}, "shape"),
        ({"u": [1, 2, 3], "t": b"\xff\xff", "b": b"c"}, "text"),
        ({"u": [1, 2, 3], "t": "ab", "b": "c"}, "text"),
        ({"u": [1, 2, 3], "t": "ab"}, "arrays"),
    ],
)
def test_commit_refuses_a_sample_of_other_length_dtype_or_text(
    tmp_path: Path, values: dict[str, Any], kind: str
) -> None:
    arrays = {
        "u": ArraySpec((1, None), "int8", lengths=[3]),
        "t": ArraySpec((1, None), "uint8", lengths=[2], encoding="utf-8"),
        "b": ArraySpec((1, None), "uint8", lengths=[1], encoding="bytes"),
    }
    with ups_store.create(tmp_path / "a.zarr.zip", arrays, identity={}) as writer:
        with pytest.raises(ups_store.SpecError) as error:
            writer.commit(0, values)
        assert error.value.kind == kind
        for text in ("äx"[:1], b"\xc3\xa4", np.frombuffer(b"\xc3\xa4", np.uint8)):
            writer.commit(0, {"u": [1, 2, 3], "t": text, "b": bytearray(b"c")})
        written = writer.finish()
    with ups_store.open(written) as store:
        assert store.sample(0)["b"] == b"c"
        assert store.sample(0)["t"] == "ä"


def test_commit_many_refuses_another_number_of_ragged_samples(tmp_path: Path) -> None:
    with ups_store.create(tmp_path / "a.zarr.zip", ragged_specs(VALUES), identity={}) as writer:
        for points in (VALUES["points"][:1], 3, "ab"):
            with pytest.raises(ups_store.SpecError):
                writer.commit_many([0, 1], {**rows_of(VALUES, [0, 1]), "points": points})


def test_interrupted_ragged_build_continues_and_gives_the_same_bytes(tmp_path: Path) -> None:
    target, specs = tmp_path / "a.zarr.zip", ragged_specs(VALUES)
    whole = build_ragged(tmp_path / "whole.zarr.zip", VALUES)
    with ups_store.create(target, specs, identity=ragged_stores.IDENTITY) as writer:
        writer.commit(2, {name: value[0] for name, value in rows_of(VALUES, [2]).items()})
    with ups_store.create(target, specs, identity=ragged_stores.IDENTITY) as writer:
        assert writer.missing().tolist() == [0, 1, 3, 4]
        with ups_store.join(target, identity=ragged_stores.IDENTITY) as other:
            other.commit_many([4, 0], rows_of(VALUES, [4, 0]))
        writer.commit_many([3, 1, 0], rows_of(VALUES, [3, 1, 0]))
        writer.finish()
    assert target.read_bytes() == whole.read_bytes()


def test_unfinished_file_with_other_lengths_is_another_store(tmp_path: Path) -> None:
    target = tmp_path / "a.zarr.zip"
    ups_store.create(target, ragged_specs(VALUES), identity=ragged_stores.IDENTITY).close()
    others = {**VALUES, "points": [*VALUES["points"][:3], *reversed(VALUES["points"][3:])]}
    with pytest.raises(ups_store.IdentityMismatchError) as error:
        ups_store.create(target, ragged_specs(others), identity=ragged_stores.IDENTITY)
    assert error.value.differences == {"lengths of 'points'[3]": (1, 40)}


def test_join_of_a_file_whose_offsets_are_damaged_leaves_none_open(tmp_path: Path) -> None:
    target = tmp_path / "a.zarr.zip"
    with ups_store.create(target, ragged_specs(VALUES), identity=ragged_stores.IDENTITY) as writer:
        flip(writer.building.building_path, writer.building.layout.ragged["points"].offsets.offset + 8)
        descriptors = os.listdir("/proc/self/fd")
        with pytest.raises(ups_store.CorruptChunkError):
            ups_store.join(target, identity=ragged_stores.IDENTITY)
        assert os.listdir("/proc/self/fd") == descriptors


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_ragged_round_trip_of_any_lengths_dtype_and_order(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 70), max_size=6), label="lengths")
    tail = data.draw(st.sampled_from([(), (1,), (3, 2), (40, 50)]), label="tail")
    dtype = dtype_of(data.draw(st.sampled_from(DTYPE_NAMES), label="dtype"))
    seed = data.draw(st.integers(0, 9))
    rng, num = np.random.default_rng(seed), len(lengths)
    values = [rng.integers(0, 2, (n, *tail)).astype(dtype) for n in lengths]
    target = tmp_path_factory.mktemp("any") / "a.zarr.zip"
    spec = ArraySpec((num, None, *tail), dtype, lengths=lengths)
    order = data.draw(st.permutations(range(num)))
    cut = data.draw(st.integers(0, num))
    with ups_store.create(target, {"u": spec}, identity={}) as writer:
        for batch in (order[:cut], order[cut:]):
            writer.commit_many(batch, {"u": [values[i] for i in batch]})
        writer.finish()
    asked = data.draw(st.lists(st.integers(0, num - 1), max_size=5)) if num else []
    for access in ("map", "pread"):
        with ups_store.open(target, access=access, verify="touch") as store:
            found = store.gather(asked)["u"]
            assert [u.tobytes() for u in found] == [values[i].tobytes() for i in asked]
            assert all(u.dtype == dtype and u.shape[1:] == tail for u in found)
            assert store.verify().ok


@settings(max_examples=8, deadline=None)
@given(texts=st.lists(st.text(max_size=20), max_size=6))
def test_text_round_trip(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    texts = [text for text in texts if text.isascii() or text.encode("utf-8", "ignore").decode() == text]
    target = tmp_path_factory.mktemp("text") / "a.zarr.zip"
    lengths = [len(text.encode()) for text in texts]
    spec = ArraySpec((len(texts), None), "uint8", lengths=lengths, encoding="utf-8")
    with ups_store.create(target, {"t": spec}, identity={}) as writer:
        writer.commit_many(range(len(texts)), {"t": texts})
        writer.finish()
    with ups_store.open(target) as store:
        assert store.gather(slice(None))["t"] == texts
        assert store.verify().ok
