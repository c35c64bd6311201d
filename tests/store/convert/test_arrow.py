"""What an Arrow file has beside the bits: types, names, metadata, constants, ragged arrays; its limits."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from ragged_stores import LENGTHS, TEXTS, build_ragged, ragged_values
from small_stores import MakeStore, build, mixed_values

import ups_store
from ups_store.convert import arrow_file, export_store
from ups_store.errors import DiskFullError, SpecError
from ups_store.system import files

ATTRS = {"channels": ["u", "v", "w", "p"], "note": "Grüße", "none": None}


def exported(path: Path, **options: Any) -> pa.Table:
    with ups_store.open(path) as store:
        target = export_store(store, path.with_suffix(".arrow"), to="arrow", **options)
    return pa.ipc.open_file(str(target)).read_all()


def test_columns_are_tensors_with_the_names_of_their_axes(make_store: MakeStore) -> None:
    schema = exported(make_store()).schema
    fields = schema.field("fields")
    assert fields.type == pa.fixed_shape_tensor(pa.float32(), (5, 64, 4), dim_names=("time", "x", "channel"))
    assert schema.field("nu").type == pa.float64()
    assert schema.field("latent").type.value_type == pa.float32()
    assert schema.field("latent").metadata == {b"ups_store.dtype": b"bfloat16"}
    assert schema.field("mask").type.value_type == pa.uint8()
    assert schema.field("mask").metadata == {b"ups_store.dtype": b"bool"}
    assert not fields.nullable


def test_the_schema_has_identity_attributes_and_constants(make_store: MakeStore) -> None:
    path = make_store(attrs=ATTRS)
    found = {key.decode(): value.decode() for key, value in exported(path).schema.metadata.items()}
    with ups_store.open(path) as store:
        assert found["ups_store.config_hash"] == store.config_hash
        assert json.loads(found["ups_store.identity"]) == store.identity_document
        assert json.loads(found["ups_store.attrs"]) == ATTRS
        assert json.loads(found["ups_store.dims"])["fields"] == list(store.dims["fields"])
        row = pa.ipc.open_stream(base64.b64decode(found["ups_store.constants"])).read_all()
        np.testing.assert_array_equal(row["x"].combine_chunks().to_numpy_ndarray()[0], store["x"])
        assert row.schema.field("t").type.dim_names == ["time"]


def rows_of(table: pa.Table, name: str) -> list[npt.NDArray[Any]]:
    return [np.asarray(row.as_py(), np.float32).reshape(-1, 3) for row in table[name]]


def test_ragged_arrays_are_lists_and_text_is_text(tmp_path: Path) -> None:
    table, values = exported(build_ragged(tmp_path / "a.zarr.zip")), ragged_values()
    assert table.schema.field("points").type == pa.list_(pa.list_(pa.float32(), 3))
    assert table.schema.field("text").type == pa.string()
    assert table["text"].to_pylist() == list(TEXTS)
    for found, expected in zip(rows_of(table, "points"), values["points"], strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(table["label"].to_numpy(), values["label"])


def test_rows_of_numbers_of_matrices_and_bytes_are_lists_too(tmp_path: Path) -> None:
    rows = [np.arange(n * 6, dtype=np.int16).reshape(n, 2, 3) for n in (2, 0, 1)]
    samples = [{"frames": r, "flags": r[:, 0, 0] > 2, "raw": bytes(range(len(r)))} for r in rows]
    path = tmp_path / "a.zarr.zip"
    ups_store.write(path, samples, identity={}, ragged=["frames", "flags"]).close()
    table = exported(path)
    assert table.schema.field("frames").type == pa.list_(pa.list_(pa.list_(pa.int16(), 3), 2))
    assert table["frames"].to_pylist() == [r.tolist() for r in rows]
    assert table["flags"].to_pylist() == [sample["flags"].tolist() for sample in samples]
    assert table["raw"].to_pylist() == [sample["raw"] for sample in samples]


def test_arrays_of_very_many_rows_have_wide_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_file, "MAX_LENGTH", 1200)
    rows = [np.zeros((n, 2), np.float32) for n in (700, 701)]
    samples = [{"points": r, "text": "x" * 700, "raw": b"y" * 701} for r in rows]
    path = tmp_path / "a.zarr.zip"
    ups_store.write(path, samples, identity={}, ragged=["points"]).close()
    table = exported(path)
    kinds = [table.schema.field(name).type for name in ("points", "text", "raw")]
    assert kinds == [pa.large_list(pa.list_(pa.float32(), 2)), pa.large_string(), pa.large_binary()]
    assert list(map(len, table["points"].to_pylist())) == [700, 701]
    assert table["raw"].to_pylist() == [b"y" * 701] * 2


def test_batches_are_bounded_by_bytes_also_of_ragged_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = build_ragged(tmp_path / "a.zarr.zip"), list[int]()
    monkeypatch.setattr(arrow_file, "BLOCK_BYTES", 10_000)
    with ups_store.open(path) as store:
        target = export_store(store, tmp_path / "a.arrow", to="arrow", progress=seen.append)
        total = sum(meta.nbytes for meta in store.metas.values())
    reader = pa.ipc.open_file(str(target))
    batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    assert [batch.num_rows for batch in batches] == [2, 1, 2]  # the third sample has 72,000 bytes
    assert sum(seen) == total
    assert len(seen) == 4
    assert batches[1]["points"].value_lengths().to_pylist() == [LENGTHS[2]]


def test_a_store_of_constants_or_of_no_samples_has_no_batches(tmp_path: Path) -> None:
    for name, values in (("a", {}), ("b", {"u": np.zeros((0, 3), np.float32)})):
        path = build(tmp_path / f"{name}.zarr.zip", values, constants={"x": np.ones(3)}, dims={})
        table = exported(path)
        assert (table.num_rows, table.column_names) == (0, list(values))
        assert b"ups_store.constants" in table.schema.metadata


def test_what_arrow_cannot_hold_is_refused(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ups_store.open(make_store()) as store:
        for limit, array in (("MAX_LENGTH", "fields"), ("MAX_CONSTANTS_BYTES", None)):
            with monkeypatch.context() as patch:
                patch.setattr(arrow_file, limit, 100)
                with pytest.raises(SpecError) as caught:
                    export_store(store, tmp_path / "out", to="arrow")
            assert (caught.value.kind, caught.value.array) == ("limits", array)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_under_the_library_is_a_full_disk(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, data: object) -> None:
        raise OSError(28, "No space left on device")

    with ups_store.open(make_store(mixed_values())) as store, monkeypatch.context() as patch:
        patch.setattr(files, "write_at", full)
        with pytest.raises(DiskFullError):
            export_store(store, tmp_path / "out", to="arrow")
    assert not (tmp_path / "out").exists()
